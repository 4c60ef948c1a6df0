"""Toys, small runs and fixtures that several tests share."""

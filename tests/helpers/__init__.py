"""Toy tasks, small runs and other helpers shared by several tests."""

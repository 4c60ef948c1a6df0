"""Turns run folders into tables and reports; does not import torch."""

"""Figures of trained models and tables, in a common style (style.py)."""

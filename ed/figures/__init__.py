"""Figures of trained models and of tables, in one visual language (style.py)."""

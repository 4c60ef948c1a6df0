"""Training methods. Each regularizer is a class that overrides one of two hooks."""

"""Ways to train: each regularizer is one class that overrides one of two hooks."""

"""Training methods: each regularizer is one class that overrides one of two hooks."""

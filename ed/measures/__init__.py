"""Measures of a trained model: effective degree, sharpness, generalization gap, and more."""

"""What is read off a trained model: effective degree, sharpness, gap, and more."""

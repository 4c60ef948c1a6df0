"""Data sets: loading, crops, corruptions, splits and ImageNet."""

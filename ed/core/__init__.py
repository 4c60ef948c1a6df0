"""The numerics of effective degree. Depends only on torch."""

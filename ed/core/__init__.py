"""The numerics of effective degree. Imports torch alone, nothing else of ours."""

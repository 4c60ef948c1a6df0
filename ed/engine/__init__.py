"""The training loop and what it stands on. Knows no concrete task or regularizer."""

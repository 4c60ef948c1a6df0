"""The training loop. It knows no concrete task or regularizer."""

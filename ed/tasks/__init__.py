"""Tasks, each with data, field, loss and evaluation. No task imports another."""

"""The training engine, independent of concrete tasks and regularizers."""

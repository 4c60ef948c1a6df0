"""Processes, random streams, files and hub access."""

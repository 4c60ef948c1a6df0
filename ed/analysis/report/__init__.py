"""Builds the report: one HTML file with every table, figure and run of the committed results."""

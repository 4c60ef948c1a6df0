"""The report page: every table, figure and run of the committed results in one HTML file."""

"""Measures the cost of a governed call beside ungoverned calls of peers: `python -m bench --help`."""

"""What a governed call costs, beside the peers' ungoverned ones: `python -m bench --help`."""

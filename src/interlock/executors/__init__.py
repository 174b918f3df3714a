"""Executors, which run tools. An executor takes a grant and nothing else."""

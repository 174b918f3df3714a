"""What runs tools. An executor takes a grant and nothing else."""

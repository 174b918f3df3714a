"""Runs untrusted code: isolated, bounded, and fast enough to be the default. See `supervisor` for how."""

"""Observability: traces, metrics, logs and alerts."""

"""What operators see of calls: traces, metrics, logs and alerts."""

"""What can be seen of Interlock from outside: traces, metrics, logs and alerts."""

"""What tools change: side-effect manifests, prediction, session state."""

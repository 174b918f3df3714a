"""What helps a call that met a passing failure: retries that never repeat what must not be repeated."""

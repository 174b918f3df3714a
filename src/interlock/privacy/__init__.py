"""Removes what must not be seen: redaction by schema and name, secret scrubbing, patterns of private text."""

"""Names of the environment variables that state settings."""

from __future__ import annotations

PREFIX = "INTERLOCK_"


def variable(name: str) -> str:
    """The environment variable that states a setting."""
    return PREFIX + name.upper()

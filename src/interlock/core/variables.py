"""Names of settings and of the environment variables that state them."""

from __future__ import annotations

from collections.abc import Iterable

PREFIX = "INTERLOCK_"


def variable(name: str) -> str:
    """The environment variable that states a setting."""
    return PREFIX + name.upper()


def nearest(name: str, names: Iterable[str], alike: float = 0.6) -> str | None:
    """The most similar of some names, if one is similar enough."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, names, 1, alike)), None)

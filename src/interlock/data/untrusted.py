"""Parts of JSON that somebody else sent: of the type that is wanted, or empty."""

from __future__ import annotations

from typing import Any, cast

from interlock.data.schema import Json

LONGEST_TEXT = 16_384


def strings(value: Any) -> list[str]:
    """Return the texts of a list; empty for anything else."""
    return [one for one in cast("list[Any]", value) if isinstance(one, str)] if isinstance(value, list) else []


def members(value: Any) -> Json:
    """Return the members of an object; empty for anything else."""
    return cast("Json", value) if isinstance(value, dict) else {}


def text_in(value: Any) -> str:
    """Return a text, cut first; empty for anything that is not a text."""
    return value[:LONGEST_TEXT] if isinstance(value, str) else ""

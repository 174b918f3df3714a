"""The depth of nested values: a validator needs stack for each level of a schema that leads back to itself."""

from __future__ import annotations

from typing import Any, cast

Json = dict[str, Any]
DEEPEST = 200


def too_deep(value: Any) -> bool:
    """Whether a value is nested deeper than allowed."""
    return levels(value, DEEPEST) > DEEPEST


def levels(value: Any, most: int) -> int:
    """Return the number of levels of a value, up to one more than `most`. Level by level, so that it needs no stack."""
    level: list[Any] = [value]
    for number in range(most):
        level = [
            item
            for one in level
            if isinstance(one, dict | list | tuple)
            for item in (cast("Json", one).values() if isinstance(one, dict) else cast("list[Any]", one))
        ]
        if not level:
            return number + 1
    return most + 1

"""Finds operations in the parameters of a call that destroy much at once, such as DROP TABLE.

It reads texts, so it finds what is written plainly and nothing that is hidden. It adds to the policy and replaces
nothing of it: where a tool can destroy, forbid or restrict the tool.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

MOST_TEXT: Final = 200_000
_COMMENT: Final = re.compile(r"/\*.*?\*/|--[^\n]*", re.DOTALL)
_SPACE: Final = re.compile(r"\s+")
_OPERATIONS: Final = tuple(
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        ("DROP", r"\bdrop (?:table|database|schema|view|index|user|role|column|keyspace|collection)\b"),
        ("TRUNCATE", r"\btruncate (?:table )?[\w\"`\[]"),
        ("DELETE without WHERE", r"\bdelete from [\w.\"`\[\]]+ ?(?:;|$)"),
        ("UPDATE without WHERE", r"\bupdate [\w.\"`\[\]]+ set (?:(?!\bwhere\b)[^;])*(?:;|$)"),
        ("GRANT ALL", r"\bgrant all\b"),
        ("rm -r", r"\brm (?:-\S+ )*-\w*[rR]\w*\b|\brm (?:-\S+ )*--recursive\b"),
        ("mkfs", r"\bmkfs(?:\.\w+)?\b"),
        ("dd to a device", r"\bdd .*\bof=/dev/"),
        ("git push --force", r"\bgit push\b.*(?: --force\b| -f\b)"),
    )
)


def dangers(parameters: Mapping[str, Any]) -> list[str]:
    """The names of dangerous operations in the texts of parameters, at any depth; each once."""
    found: dict[str, None] = {}
    left = MOST_TEXT
    for text in _texts(parameters):
        if left <= 0:
            break
        plain = _SPACE.sub(" ", _COMMENT.sub(" ", text[:left])).strip()
        left -= len(text)
        found |= dict.fromkeys(name for name, pattern in _OPERATIONS if pattern.search(plain))
    return list(found)


def _texts(value: Any) -> list[str]:
    texts: list[str] = []
    waiting: list[Any] = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            texts.append(one)
        elif isinstance(one, Mapping):
            waiting += cast("Mapping[str, Any]", one).values()
        elif isinstance(one, Sequence) and not isinstance(one, bytes | bytearray):
            parts = cast("Sequence[Any]", one)
            if parts and all(isinstance(part, str) for part in parts):
                texts.append(" ".join(cast("Sequence[str]", parts)))  # a command and its arguments
            waiting += parts
    return texts

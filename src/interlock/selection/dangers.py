"""Finds operations in the parameters of a call that destroy much at once, such as DROP TABLE.

It reads texts, so it finds what is written plainly and nothing that is hidden. It adds to the policy and replaces
nothing of it: where a tool can destroy, forbid or restrict the tool.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

from interlock.core.expressions import expression

MOST_TEXT: Final = 200_000
UNREAD: Final = "text that is too long to be read"
_LINE_COMMENT: Final = expression(r"--[^\n]*")
_SPACE: Final = expression(r"\s+")
_OPERATIONS: Final = tuple(
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        ("DROP", r"\bdrop (?:table|database|schema|view|index|user|role|column|keyspace|collection)\b"),
        ("TRUNCATE", r"\btruncate (?:table )?[\w\"`\[]"),
        ("DELETE without WHERE", r"\bdelete from [\w.\"`\[\]]+ ?(?:;|$)"),
        ("GRANT ALL", r"\bgrant all\b"),
        ("rm -r", r"\brm (?:-\S+ )*-\w*[rR]\w*\b|\brm (?:-\S+ )*--recursive\b"),
        ("mkfs", r"\bmkfs(?:\.\w+)?\b"),
    )
)
# An operation, and what must follow it somewhere. One pass over the text finds both.
_FOLLOWED: Final = tuple(
    (name, re.compile(first, re.IGNORECASE), re.compile(then, re.IGNORECASE))
    for name, first, then in (
        ("dd to a device", r"\bdd ", r"\bof=/dev/"),
        ("git push --force", r"\bgit push\b", r" --force\b| -f\b"),
    )
)
_UPDATE: Final = expression(r"\bupdate [\w.\"`\[\]]+ set ", re.IGNORECASE)
_WHERE: Final = expression(r"\bwhere\b", re.IGNORECASE)


def dangers(parameters: Mapping[str, Any]) -> list[str]:
    """The names of dangerous operations in the texts of parameters, at any depth; each once.

    Takes time in proportion to the text. Text beyond `MOST_TEXT` is not read, and counts as dangerous.
    """
    found: dict[str, None] = {}
    left = MOST_TEXT
    for text in _texts(parameters):
        if len(text) > left:
            found[UNREAD] = None
        found |= dict.fromkeys(_operations(_SPACE.sub(" ", _without_comments(text[:left])).strip()))
        left = max(0, left - len(text))
    return list(found)


def _operations(plain: str) -> Iterator[str]:
    yield from (name for name, pattern in _OPERATIONS if pattern.search(plain))
    for name, first, then in _FOLLOWED:
        if (begun := first.search(plain)) and then.search(plain, begun.end()):
            yield name
    # Of several in one statement the last decides: a condition behind it is behind the others too.
    for statement in plain.split(";"):
        ends = [update.end() for update in _UPDATE.finditer(statement)]
        if ends and not _WHERE.search(statement, ends[-1]):
            yield "UPDATE without WHERE"
            return


def _without_comments(text: str) -> str:
    parts: list[str] = []
    at = 0
    while (start := text.find("/*", at)) >= 0 and (end := text.find("*/", start + 2)) >= 0:
        parts.append(text[at:start])
        at = end + 2
    return _LINE_COMMENT.sub(" ", " ".join((*parts, text[at:])))


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

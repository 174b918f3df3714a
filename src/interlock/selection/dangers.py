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
# What begins a quoted text or a comment, and what ends it. What looks like a comment inside of quotes is none.
_ENDS: Final = {"'": "'", '"': '"', "`": "`", "--": "\n", "/*": "*/"}
_BEGIN: Final = expression(r"['\"`]|--|/\*")
_SPACE: Final = expression(r"\s+")
# The name of a table in SQL, with those of its schema and database, and the name that a statement gives it.
_NAME: Final = r"(?:[\w$]+|\"[^\"]{1,200}\"|`[^`]{1,200}`|\[[^\]]{1,200}\])"
_TABLE: Final = rf"(?:only )?{_NAME}(?:\.{_NAME})*(?: (?:as )?(?!set\b|where\b|using\b)\w+)?"
_KINDS: Final = r"(?:temporary |temp |materialized |external |foreign |virtual )?"
_OPERATIONS: Final = tuple(
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        ("DROP", rf"\bdrop {_KINDS}(?:table|database|schema|view|index|user|role|column|keyspace|collection)\b"),
        ("TRUNCATE", r"\btruncate (?:table )?[\w\"`\[]"),
        ("DELETE without WHERE", rf"\bdelete from {_TABLE} ?(?:;|$|returning\b|limit\b|order by\b)"),
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
_UPDATE: Final = expression(rf"\bupdate {_TABLE} set ", re.IGNORECASE)
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
        # Comments may stand inside of an operation, and an operation in what only looks like a comment.
        for form in (text[:left], _without_comments(text[:left])):
            found |= dict.fromkeys(_operations(_SPACE.sub(" ", form).strip()))
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
    endless: set[str] = set()  # of these none ends any more, so none is looked for again
    copied = at = 0
    while begin := _BEGIN.search(text, at):
        kind, at = begin[0], begin.end()
        end = -1 if kind in endless else text.find(_ENDS[kind], at)
        if end < 0:
            endless.add(kind)
            end = len(text) if kind == "--" else -1
        if end < 0:
            continue
        at = min(end + len(_ENDS[kind]), len(text))
        if kind in ("--", "/*"):
            parts.append(text[copied : begin.start()])
            copied = at
    return " ".join((*parts, text[copied:]))


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

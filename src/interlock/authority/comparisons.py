"""The texts that rules and standing approvals compare arguments with, and the kind of argument that follows.

`context.arguments.file like "/srv/*"` implies that `file` is a path. The text that a caller sent may be another
spelling of a path that is not in /srv, so the argument is compared in its normal form, and a call whose argument has
none is denied. The same applies to URLs and hosts. The kind follows from the text of the rule alone:

    begins with `/`, `~` or `file:`              a path
    has `://`                                    a URL
    `example.org`, `*.example.org`, `10.0.0.1`   a host; only `like` refuses what is none, since `==` may mean a file
    has `/` elsewhere                            pieces: `.` and `..` between the slashes are refused

Everything else is text, and is compared as it was sent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from interlock.core.expressions import expression
from interlock.core.record import NamedTuple
from interlock.data.subschemas import HOST, PATH, URL

Json = dict[str, Any]

# Readings of an argument, besides the kinds that a schema can mark.
PIECES, MAYBE_HOST, LIKE = "pieces", "maybe-host", "like"

_URL = expression(r"[a-z*?][a-z0-9+.*?-]*://", re.IGNORECASE)
_HOST = expression(r"(?:\*?\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*\.[a-z][a-z0-9-]+\Z", re.IGNORECASE)
_ADDRESS = expression(r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}\Z|[0-9a-f]*:[0-9a-f:.]*:[0-9a-f:.]*\Z", re.IGNORECASE)
_COMPARING = ("like", "==", "!=", "contains", "containsAll", "containsAny")
_WILD = expression(r"[*?]")


class Compared(NamedTuple):
    """The readings of an argument, and of its members by name."""

    readings: frozenset[str]
    members: Mapping[str, Compared]

    def below(self, name: str) -> Compared:
        """Return the readings of a member: all of the enclosing value, and its own."""
        if self is NOTHING_COMPARED:
            return self
        member = self.members.get(name)
        if member is None:
            return Compared(self.readings, {}) if self.readings else NOTHING_COMPARED
        return member if not self.readings else Compared(member.readings | self.readings, member.members)


NOTHING_COMPARED = Compared(frozenset(), {})


class Comparison(NamedTuple):
    """An argument by the names that lead to it, its reading, and the texts it is compared with."""

    names: tuple[str, ...]
    readings: frozenset[str]
    texts: tuple[str, ...] = ()


def together(comparisons_: Iterable[Comparison]) -> Compared:
    """Combine the readings of many comparisons."""
    here: set[str] = set()
    inside: dict[str, list[Comparison]] = {}
    for one in comparisons_:
        if one.names:
            inside.setdefault(one.names[0], []).append(one._replace(names=one.names[1:]))
        else:
            here |= one.readings
    if not here and not inside:
        return NOTHING_COMPARED
    return Compared(frozenset(here), {name: together(more) for name, more in inside.items()})


def reading_of(text: str, *, pattern: bool) -> frozenset[str]:
    """Return the reading that follows from comparing an argument with a text, or with a pattern in which `*` matches
    anything.
    """
    readings = LIKE_ALONE if pattern else frozenset[str]()
    if text.startswith(("/", "~")) or text[:5].lower() == "file:":
        return readings | {PATH}
    if _URL.match(text):
        return readings | {URL}
    if "/" in text:
        return readings | {PIECES}
    if _HOST.match(text) or _ADDRESS.match(text):
        return readings | {HOST if pattern else MAYBE_HOST}
    return readings


LIKE_ALONE = frozenset({LIKE})


# Rules


def comparisons(conditions: Any) -> Iterator[Comparison]:
    """Yield every argument that the conditions of a rule compare with a text."""
    if isinstance(conditions, list):
        for one in cast("list[Any]", conditions):
            yield from comparisons(one)
    if not isinstance(conditions, dict):
        return
    node = cast("Json", conditions)
    for word, inner in node.items():
        if word in _COMPARING and isinstance(inner, dict):
            held = cast("Json", inner)
            texts = list(_texts(held))
            readings = frozenset(reading for text, like in texts for reading in reading_of(text, pattern=like))
            if readings:
                written = tuple(text for text, _ in texts)
                yield from (Comparison(names, readings, written) for names in _arguments(held))
        yield from comparisons(inner)


def _texts(node: Any) -> Iterator[tuple[str, bool]]:
    """Every text in an expression, and whether it is a pattern."""
    if isinstance(node, list):
        for one in cast("list[Any]", node):
            yield from _texts(one)
    elif isinstance(node, dict):
        for word, inner in cast("Json", node).items():
            if word == "Value" and isinstance(inner, str):
                yield inner, False
            elif word == "pattern" and isinstance(inner, list):
                yield _written(cast("list[Any]", inner)), True
            else:
                yield from _texts(inner)


def _written(pattern: list[Any]) -> str:
    return "".join("*" if one == "Wildcard" else str(cast("Json", one).get("Literal", "")) for one in pattern)


def _arguments(node: Any) -> Iterator[tuple[str, ...]]:
    """Yield the names behind every `context.arguments` in an expression; nothing if the whole context is meant."""
    if isinstance(node, list):
        for one in cast("list[Any]", node):
            yield from _arguments(one)
    elif isinstance(node, dict):
        names = _names(cast("Json", node))
        if names is None:
            for inner in cast("Json", node).values():
                yield from _arguments(inner)
        elif names[:1] in ((), ("arguments",)):
            yield names[1:]


def _names(node: Json) -> tuple[str, ...] | None:
    """Return the names in `context.a.b`; None for any other expression."""
    if node.get("Var") == "context":
        return ()
    step: Any = node.get(".")
    if len(node) != 1 or not isinstance(step, dict):
        return None
    inner: Any = cast("Json", step).get("left")
    above = _names(cast("Json", inner)) if isinstance(inner, dict) else None
    return None if above is None else (*above, str(cast("Json", step).get("attr")))


# Standing approvals


def of_patterns(patterns: Mapping[str, Any]) -> Compared:
    """Return the readings that follow from the patterns of a standing approval; a text without `*` and `?` is compared
    as is.
    """
    from interlock.contract.argument_bounds import innermost  # where there are standing approvals only

    return together(
        Comparison((name,), reading_of(one, pattern=True))
        for name, one in ((name, innermost(pattern)) for name, pattern in patterns.items())
        if isinstance(one, str) and wild(one)
    )


def wild(pattern: str) -> bool:
    """Whether a pattern matches more than one text."""
    return _WILD.search(pattern) is not None


def normal_pattern(pattern: str) -> str:
    """Resolve the fixed directories of a path pattern, like the paths that it is compared with."""
    first = _WILD.search(pattern)
    if first is None or not pattern.startswith("/"):
        return pattern
    slash = pattern.rindex("/", 0, first.start()) + 1
    directory = os.path.realpath(pattern[:slash])
    return f"{directory.rstrip('/')}/{pattern[slash:]}"

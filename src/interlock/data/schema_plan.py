"""Schemas that say no more than what data looks like, for the compiled walk to hold it against.

Most tools take texts, numbers, and rows and lists of them, and their schemas say no more than that. Such a schema is a
shape, and data that has it can be checked, copied and written in canonical form in one go, or only checked, as results
are. A schema that says anything else (a pattern, a bound, alternatives) is no shape, and is the validator's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol, cast

from interlock.data.canonical import canonical, compiled
from interlock.data.schema import Json


class Take(Protocol):
    """Takes a value of which no more than `most` may be looked at: one for each value, and the bytes of texts."""

    def __call__(self, value: Any, most: int = ..., /) -> tuple[bytes, Json] | None: ...


class Fits(Protocol):
    """Checks a value of which no more than `most` may be looked at, counted in the same way."""

    def __call__(self, value: Any, most: int = ..., /) -> bool: ...


# As the compiled walk reads it: its kind, whether null will do as well, and what is in it.
Plan = tuple[str, bool, Any]

# Words that hold nothing against data, where they stand.
_NOTES = frozenset(
    {
        "title", "description", "examples", "default", "deprecated", "readOnly", "writeOnly",
        "$comment", "$schema", "$defs", "definitions",
    }
)  # fmt: skip
_PLAIN = {"string": "text", "integer": "whole", "number": "real", "boolean": "truth", "null": "nothing"}
_ANY: Plan = ("any", False, None)
# Rows of more members are not the walk's; and types that share their parts are written out for each use of them.
_MEMBERS, _DEEPEST, _LONGEST = 64, 15, 300


class _Other(Exception):  # noqa: N818 - an answer, not an error
    """A schema that says more than what data looks like."""


def taker(document: Json, kept: Collection[str] | None) -> Take | None:
    """What takes the arguments of a tool: gives them in canonical form and as a copy if they fit, else None.

    They do not fit either if they are too large.

    In the copy, 3 becomes 3.0 where the schema says `number`, as hints want it; but not in the members that are `kept`
    as they are, nor anywhere if that is None. There is no such thing where a schema is no shape, and where nothing was
    compiled.
    """
    if compiled is None:
        return None
    try:
        plan = _Reader(document).row(document, 0, lambda name: kept is not None and name not in kept)
    except _Other:
        return None
    return compiled.Shape(plan).take


def fitter(document: Json) -> Fits | None:
    """The function that holds a result against its schema, where the schema is a shape.

    Its yes is certain. Its no may also mean that the result is too large or not plain: the validator decides then.
    """
    if compiled is None:
        return None
    try:
        plan = _Reader(document, open_rows=True).part(document, 0, real=False)
    except _Other:
        return None
    return compiled.Shape(plan).fits


class _Reader:
    """Reads the shapes out of one schema. Rows that may have more members than they name can only be checked."""

    def __init__(self, root: Json, *, open_rows: bool = False) -> None:
        self._root = root
        self._open_rows = open_rows
        self._left = _LONGEST

    def row(self, node: Json, depth: int, real: Callable[[str], bool]) -> Plan:
        """An object of named members; `real` says in which of them a whole number becomes a float."""
        said = self._said(node, depth)
        members, required = said.pop("properties", None), said.pop("required", [])
        more = said.pop("additionalProperties", True)
        if said != {"type": "object"} or not isinstance(members, dict):
            raise _Other
        if more is not False and not (more is True and self._open_rows):
            raise _Other
        parts = cast("Json", members)
        if not isinstance(required, list) or not parts.keys() >= set(cast("list[str]", required)):
            raise _Other
        if len(parts) > _MEMBERS or not all(map(str.isascii, parts)):
            raise _Other
        plans = (
            (name, b",%s:" % canonical(name), name in required, self.part(parts[name], depth + 1, real=real(name)))
            for name in sorted(parts)
        )
        return "open" if more else "row", False, tuple(plans)

    def part(self, node: Any, depth: int, *, real: bool) -> Plan:
        """Whatever else a schema describes."""
        said = {} if node is True else self._said(node, depth)
        if not said:
            return _ANY
        match said:
            case {"type": "object", "properties": _}:
                return self.row(said, depth, lambda _: real)
            case {"type": "object", **more}:
                return "map", False, self.part(_alone(more, "additionalProperties"), depth + 1, real=real)
            case {"type": "array", **more}:
                return "list", False, self.part(_alone(more, "items"), depth + 1, real=real)
            case {"enum": values, **more} if more in ({}, {"type": "string"}):
                return _choice(values)
            case {"const": value, **more} if more in ({}, {"type": "string"}):
                return _choice([value])
            case {"anyOf": [one, other], **more} if not more:
                return self._nullable(one, other, depth + 1, real=real)
            case {"type": str(kind), **more} if kind in _PLAIN and not more:
                return ("number" if kind == "number" and not real else _PLAIN[kind]), False, None
            case _:
                raise _Other

    def _nullable(self, one: Any, other: Any, depth: int, *, real: bool) -> Plan:
        first, second = self.part(one, depth, real=real), self.part(other, depth, real=real)
        kind, _, inner = second if first[0] == "nothing" else first
        if "nothing" not in (first[0], second[0]):
            raise _Other
        return kind, True, inner

    def _said(self, node: Any, depth: int) -> Json:
        """What a schema says about data, itself or where it refers to."""
        while True:
            self._left -= 1
            if not isinstance(node, dict) or depth > _DEEPEST or self._left < 0:
                raise _Other
            said = _without_notes(cast("Json", node))
            if "$ref" not in said:
                return said
            node = self._referred(said)

    def _referred(self, said: Json) -> Any:
        """What nothing but a reference refers to: a definition of the schema's own, by its plain name."""
        where, _, name = str(said["$ref"]).rpartition("/")
        if len(said) > 1 or where not in ("#/$defs", "#/definitions") or "%" in name or "~" in name:
            raise _Other
        held = self._root.get(where[2:])
        return cast("Json", held).get(name) if isinstance(held, dict) else None


def _without_notes(node: Json) -> Json:
    return {word: value for word, value in node.items() if word not in _NOTES and not word.startswith("x-")}


def _alone(said: Json, word: str) -> Any:
    if said.keys() - {word}:
        raise _Other
    return said.get(word, True)


def _choice(values: Any) -> Plan:
    if not isinstance(values, list) or not all(type(value) is str for value in cast("list[Any]", values)):
        raise _Other
    return "choice", False, frozenset(cast("list[str]", values))

"""Plans for the compiled walk: schemas that only describe the shape of data.

Most tools take texts, numbers, and rows and lists of them, and their schemas state nothing else. Such a schema is a
shape: data can be checked against it, copied and written in canonical form in one pass, or only checked, as results
are. A schema that states anything else (a pattern, a bound, alternatives) is not a shape and is left to the validator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol, cast

from interlock.data.canonical import canonical, compiled
from interlock.data.schema import Json


class Take(Protocol):
    """Checks and copies a value of which at most `most` is visited: one for each value, plus the bytes of texts."""

    def __call__(self, value: Any, most: int = ..., /) -> tuple[bytes, Json] | None: ...


class Fits(Protocol):
    """Checks a value of which at most `most` is visited, counted in the same way."""

    def __call__(self, value: Any, most: int = ..., /) -> bool: ...


# The form that the compiled walk reads: the kind, whether null is allowed, and the content.
Plan = tuple[str, bool, Any]

# Keywords that do not constrain data.
_NOTES = frozenset(
    {
        "title", "description", "examples", "default", "deprecated", "readOnly", "writeOnly",
        "$comment", "$schema", "$defs", "definitions",
    }
)  # fmt: skip
_PLAIN = {"string": "text", "integer": "whole", "number": "real", "boolean": "truth", "null": "nothing"}
_ANY: Plan = ("any", False, None)
# Rows with more members are left to the validator; types that share parts are written out for each use.
_MEMBERS, _DEEPEST, _LONGEST = 64, 15, 300


class _Other(Exception):  # noqa: N818 - an answer, not an error
    """A schema that states more than a shape."""


def taker(document: Json, exact: Collection[str] | None) -> Take | None:
    """Make the function that takes the arguments of a tool: returns their canonical form and a copy if they fit, else
    None.

    Arguments that are too large do not fit either.

    In the copy, 3 becomes 3.0 where the schema says `number`, as type hints require; but not in the members listed in
    `exact`, nor anywhere if `exact` is None. Returns None if the schema is not a shape, or if nothing was compiled.
    """
    if compiled is None:
        return None
    try:
        plan = _Reader(document).row(document, 0, lambda name: exact is not None and name not in exact)
    except _Other:
        return None
    return compiled.Shape(plan).take


def fitter(document: Json) -> Fits | None:
    """Make the function that checks a result against its schema, if the schema is a shape.

    Its True is final. False may also mean that the result is too large or not plain: then the validator decides.
    """
    if compiled is None:
        return None
    try:
        plan = _Reader(document, open_rows=True).part(document, 0, real=False)
    except _Other:
        return None
    return compiled.Shape(plan).fits


class _Reader:
    """Reads shapes from one schema. Rows that may have undeclared members can only be checked."""

    def __init__(self, root: Json, *, open_rows: bool = False) -> None:
        self._root = root
        self._open_rows = open_rows
        self._left = _LONGEST

    def row(self, node: Json, depth: int, real: Callable[[str], bool]) -> Plan:
        """Read an object of named members; `real` tells in which of them a whole number becomes a float."""
        constraints = self._constraints(node, depth)
        members, required = constraints.pop("properties", None), constraints.pop("required", [])
        more = constraints.pop("additionalProperties", True)
        if constraints != {"type": "object"} or not isinstance(members, dict):
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
        """Read any other schema."""
        constraints = {} if node is True else self._constraints(node, depth)
        if not constraints:
            return _ANY
        match constraints:
            case {"type": "object", "properties": _}:
                return self.row(constraints, depth, lambda _: real)
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

    def _constraints(self, node: Any, depth: int) -> Json:
        """Return the constraints of a schema, its own or those of its reference."""
        while True:
            self._left -= 1
            if not isinstance(node, dict) or depth > _DEEPEST or self._left < 0:
                raise _Other
            constraints = _without_notes(cast("Json", node))
            if "$ref" not in constraints:
                return constraints
            node = self._referred(constraints)

    def _referred(self, constraints: Json) -> Any:
        """Resolve a schema that is only a reference to one of its own definitions, by plain name."""
        where, _, name = str(constraints["$ref"]).rpartition("/")
        if len(constraints) > 1 or where not in ("#/$defs", "#/definitions") or "%" in name or "~" in name:
            raise _Other
        held = self._root.get(where[2:])
        return cast("Json", held).get(name) if isinstance(held, dict) else None


def _without_notes(node: Json) -> Json:
    return {word: value for word, value in node.items() if word not in _NOTES and not word.startswith("x-")}


def _alone(constraints: Json, word: str) -> Any:
    if constraints.keys() - {word}:
        raise _Other
    return constraints.get(word, True)


def _choice(values: Any) -> Plan:
    if not isinstance(values, list) or not all(type(value) is str for value in cast("list[Any]", values)):
        raise _Other
    return "choice", False, frozenset(cast("list[str]", values))

"""Bounds of arguments: the patterns by which an approval in advance says what each argument may be.

    "cash"                     this text; `*` and `?` match in texts
    {"minimum": 1}             a number within bounds, in the words of JSON Schema
    {"enum": ["cash", "giro"]} one of these values
    {"type": "string"}         any text
    {"items": PATTERN}         a list, each item of which is within this bound
    {"x-any": true}            any value
    anything else              this value

An empty list has no item that is within a bound, and means everything to some tools: a bound for each item covers it
only if it lets the items be anything. A bound for each item of a list of lists is a bound in a bound.

The module also reads and writes patterns as words of a command line.
"""

from __future__ import annotations

import fnmatch
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import orjson

from interlock.data.canonical import canonical, decode

if TYPE_CHECKING:
    from interlock.data.schema import Json


def matches(pattern: Any, value: Any) -> bool:
    """Whether a value is within a bound."""
    if isinstance(pattern, str) and isinstance(value, str):
        # A bracket is literal; fnmatch would treat it as a set of letters, and one title would match many.
        return fnmatch.fnmatchcase(value, pattern.replace("[", "[[]"))
    if is_text(pattern):
        return isinstance(value, str)
    if is_any(pattern):
        return True
    if is_each(pattern):
        # INVARIANT: no item is covered that is not within the bound, and no list of none.
        items: Any = cast("list[Any]", value) if isinstance(value, list) else None
        return (
            items is not None
            and (len(items) > 0 or is_open(pattern["items"]))
            and all(matches(pattern["items"], item) for item in items)
        )
    if is_range(pattern):
        # INVARIANT: a value or bound that is not a number never matches.
        return _is_number(value) and all(
            _is_number(bound) and _WITHIN[word](value, bound) for word, bound in pattern.items()
        )
    if is_set(pattern):
        return any(_is_same(one, value) for one in pattern["enum"])
    return _is_same(pattern, value)


def _is_same(pattern: Any, value: Any) -> bool:
    # In Python, a boolean within a list or an object equals a number. In the canonical form, a text in another Unicode
    # form is the same: but it names another file.
    return type(pattern) is type(value) and pattern == value and canonical(pattern) == canonical(value)


def is_range(pattern: Any) -> TypeGuard[Json]:
    """Whether a pattern is the bounds of a number."""
    return isinstance(pattern, dict) and cast("Json", pattern) != {} and cast("Json", pattern).keys() <= _WITHIN.keys()


def is_set(pattern: Any) -> TypeGuard[Json]:
    """Whether a pattern is a set of values."""
    if not isinstance(pattern, dict) or cast("Json", pattern).keys() != {"enum"}:
        return False
    values: Any = cast("Json", pattern)["enum"]
    return isinstance(values, list) and len(cast("list[Any]", values)) > 0


def is_text(pattern: Any) -> TypeGuard[Json]:
    """Whether a pattern says that any text is allowed."""
    return isinstance(pattern, dict) and cast("Json", pattern) == {"type": "string"}


def is_each(pattern: Any) -> TypeGuard[Json]:
    """Whether a pattern is the bound of each item of a list."""
    return isinstance(pattern, dict) and cast("Json", pattern).keys() == {"items"}


def is_any(pattern: Any) -> TypeGuard[Json]:
    """Whether a pattern says that any value is allowed."""
    return isinstance(pattern, dict) and cast("Json", pattern).keys() == ANY.keys() and pattern["x-any"] is True


ANY: Mapping[str, Any] = {"x-any": True}


def innermost(pattern: Any) -> Any:
    """The bound of a value, or of the items in a list, or of those in a list of lists."""
    while is_each(pattern):
        pattern = pattern["items"]
    return pattern


def with_innermost(pattern: Any, bound: Any) -> Any:
    """A pattern with another innermost bound."""
    return {"items": with_innermost(pattern["items"], bound)} if is_each(pattern) else bound


def values_in(pattern: Any) -> list[Any]:
    """Values as a pattern quotes them, in the place that they have in an argument."""
    if is_each(pattern):
        return [[one] for one in values_in(pattern["items"])]
    return list(pattern["enum"]) if is_set(pattern) else [pattern]


def bound_faults(arguments: Mapping[str, Any], document: Json) -> Iterator[str]:
    """List the faults of bounds of arguments that a schema describes."""
    from interlock.data.schema import property_of, resolve_ref

    takes = resolve_ref(document, document)
    for name, pattern in arguments.items():
        yield from _faults(f"`{name}`", pattern, document, property_of(takes, name))


def _faults(what: str, pattern: Any, document: Json, schema: Any) -> Iterator[str]:
    from interlock.data.kinds import items_of, kinds

    admitted = kinds(document, schema)
    if is_each(pattern):
        if "array" in admitted:
            yield from _faults(f"an item of {what}", pattern["items"], document, items_of(document, schema))
        else:
            yield f"{what} is not a list, so it has no bound for each item"
    if is_text(pattern) and "string" not in admitted:
        yield f"{what} is not a text, so it cannot be any text"
    if not is_range(pattern):
        return
    # Another value than a number is never within the bounds, so a union with other kinds has bounds too.
    if admitted.isdisjoint(("number", "integer")):
        yield f"{what} is not a number, so it has no least and no most"
    elif not all(map(_is_number, pattern.values())):
        yield f"{what} is bounded by something else than numbers"
    elif max((pattern[word] for word in _LEAST if word in pattern), default=-math.inf) > min(
        (pattern[word] for word in _MOST if word in pattern), default=math.inf
    ):
        yield f"no number is within the bounds of {what}"


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


_LEAST, _MOST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_WITHIN: Mapping[str, Callable[[Any, Any], bool]] = {
    "minimum": operator.ge, "exclusiveMinimum": operator.gt, "maximum": operator.le, "exclusiveMaximum": operator.lt,
}  # fmt: skip


def is_value(pattern: Any) -> bool:
    """Whether a pattern is one value, as it must be."""
    if isinstance(pattern, str):
        return not _WILD.intersection(pattern)
    return not _is_bound(pattern)


def _is_bound(pattern: Any) -> bool:
    return any(form(pattern) for form in (is_range, is_set, is_text, is_each, is_any))


_WILD = frozenset("*?[")


def is_open(pattern: Any) -> bool:
    """Whether a pattern matches any text or any value, however it is written; or any list of them."""
    inner = innermost(pattern)
    return is_text(inner) or is_any(inner) or (isinstance(inner, str) and inner != "" and not inner.strip("*?"))


# Words of a command line


def read_word(word: str, document: Json, schema: Any) -> Any:
    """Read a pattern for an argument with this schema: JSON, or a text as it is where the schema admits texts.

    A text that would be read as another value is written in quotes, as JSON: `"5"`, or `5` if it can only be a text.
    Raises ValueError for a word that is neither.
    """
    from interlock.data.documents import read_json
    from interlock.data.kinds import kinds, kinds_of_value

    admitted = kinds(document, schema)
    try:
        read_json(word)
        value = decode(word.encode())  # whole numbers as they are, however long
    except ValueError:
        if "string" in admitted:
            return word
        raise
    return value if "string" not in admitted or admitted & kinds_of_value(value) else word


def as_value(pattern: Any) -> Any:
    """The bound by which an argument is this text or value: a set of one, if the value looks like another bound."""
    return {"enum": [pattern]} if _is_bound(pattern) else pattern


def for_each(document: Json, schema: Any, bound: Callable[[Any], Any], depth: int = 1) -> Json:
    """The bound of each item of a list, made by `bound` from the schema of the items; of a list of lists, of theirs."""
    from interlock.data.kinds import items_of, kinds

    items = items_of(document, schema)
    deeper = depth < _DEEPEST_LIST and kinds(document, items) - {"null"} == frozenset({"array"})
    return {"items": for_each(document, items, bound, depth + 1) if deeper else bound(items)}


# A schema may say that a list has lists only, without an end.
_DEEPEST_LIST = 8


def written(text: str) -> str:
    """Write a text as a pattern that `read_word` reads as this text, whatever else the schema admits."""
    from interlock.data.documents import read_json

    try:
        read_json(text)
    except ValueError:
        return text
    return orjson.dumps(text).decode()

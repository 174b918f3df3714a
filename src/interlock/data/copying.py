"""Generates functions that copy JSON data, one function per type.

Data that fits the schema of a plain type has a known shape: where its containers are, and where a number may be of
another kind than the hint. The copy can therefore be written as a function of a few lines that touches only the parts
of the data that need it. For a list of rows with an `id: int`, a `name: str` and, in some of them, `tags: list[str]`,
it is

    def copy(it):
        made_1 = []
        for it_1 in it:
            it_1 = {**it_1}
            it_2 = it_1['id']
            if it_2.__class__ is float:
                it_1['id'] = whole(it_2)
            if 'tags' in it_1:
                it_3 = it_1['tags']
                it_3 = [*it_3]
                it_1['tags'] = it_3
            made_1.append(it_1)
        it = made_1
        return it
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Literal

import typing_extensions

_IMMUTABLE = (str, bool, type(None))
# Python limits the nesting of blocks, and types that share parts would be written out for each use.
_DEEPEST, _LONGEST = 15, 300


class _Open(Exception):  # noqa: N818 - an answer, not an error
    """A type that does not determine the parts of its values."""


def copier(hint: Any) -> Callable[[Any], Any] | None:
    """Make a copy function for a plain type; None if the type leaves open what its values hold, or is a union."""
    try:
        body = list(_copied(hint, "it", count(1), 0))
    except _Open:
        return None
    names: dict[str, Any] = {"whole": int, "real": real}
    # The source is generated below and nowhere else; all it contains of a type are the names of members, as literals.
    exec("\n    ".join(("def copy(it):", *body, "return it")), names)  # noqa: S102
    return names["copy"]


def _copied(hint: Any, it: str, names: Iterator[int], depth: int) -> Iterator[str]:
    """Generate lines that replace the value of a name by a copy; none if the value is immutable."""
    hint = bare(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if depth > _DEEPEST:
        raise _Open
    if hint in _IMMUTABLE or (origin is Literal and all(type(arg) in _IMMUTABLE for arg in args)):
        return
    if hint is int or hint is float:
        yield f"{it} = {_number(hint, it)} else {it}"
    elif origin is list and args:
        yield from _each(args[0], it, names, depth, of_list=True)
    elif origin is dict and len(args) > 1:
        yield from _each(args[1], it, names, depth, of_list=False)
    elif origin in (typing.Union, types.UnionType):
        yield from _perhaps([arg for arg in args if arg is not type(None)], it, names, depth)
    elif typing_extensions.is_typeddict(hint):
        yield f"{it} = {{**{it}}}"
        for member, item in typing.get_type_hints(hint, include_extras=True).items():
            yield from _member(hint, member, item, it, names, depth)
    else:
        raise _Open


def _each(hint: Any, it: str, names: Iterator[int], depth: int, *, of_list: bool) -> Iterator[str]:
    number = _next(names)
    one, made = f"it_{number}", f"made_{number}"
    lines = list(_copied(hint, one, names, depth + 1))
    if bare(hint) in (int, float):
        copy = f"{_number(bare(hint), one)} else {one}"
        yield f"{it} = [{copy} for {one} in {it}]" if of_list else f"{it} = {{k: {copy} for k, {one} in {it}.items()}}"
    elif not lines:
        yield f"{it} = [*{it}]" if of_list else f"{it} = {{**{it}}}"
    else:
        yield f"{made} = []" if of_list else f"{made} = {{}}"
        yield f"for {one} in {it}:" if of_list else f"for key_{number}, {one} in {it}.items():"
        yield from _inside(lines)
        yield f"    {made}.append({one})" if of_list else f"    {made}[key_{number}] = {one}"
        yield f"{it} = {made}"


def _perhaps(there: list[Any], it: str, names: Iterator[int], depth: int) -> Iterator[str]:
    lines = [list(_copied(hint, it, names, depth + 1)) for hint in there]
    if len(there) > 1 and any(lines):
        raise _Open  # pydantic finds out which of them a value belongs to
    if any(lines):
        yield f"if {it} is not None:"
        yield from _inside(lines[0])


def _member(row: Any, member: str, item: Any, it: str, names: Iterator[int], depth: int) -> Iterator[str]:
    hint, origin = item_hint(item), typing.get_origin(item)
    always = origin is typing.Required or (origin is not typing.NotRequired and member in row.__required_keys__)
    one = f"it_{_next(names)}"
    lines = list(_copied(hint, one, names, depth + 1))
    if not lines:
        return
    place = f"{it}[{member!r}]"
    if bare(hint) in (int, float):
        value, _, condition = _number(bare(hint), one).partition(" if ")
        lines = [f"{one} = {place}", f"if {condition}:", f"    {place} = {value}"]
    else:
        lines = [f"{one} = {place}", *lines, f"{place} = {one}"]
    if always:
        yield from lines
    else:
        yield f"if {member!r} in {it}:"
        yield from _inside(lines)


def _number(kind: type, it: str) -> str:
    """Generate the conversion of a number to the right kind, if it is of the other."""
    return f"whole({it}) if {it}.__class__ is float" if kind is int else f"real({it}) if {it}.__class__ is int"


def _next(names: Iterator[int]) -> int:
    number = next(names)
    if number > _LONGEST:
        raise _Open
    return number


def _inside(lines: list[str]) -> Iterator[str]:
    return (f"    {line}" for line in lines)


def real(number: int) -> int | float:
    """Convert a whole number to a float; unchanged if it is too large for one."""
    try:
        return float(number)
    except OverflowError:
        return number


def bare(hint: Any) -> Any:
    """Strip annotations from a type."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def item_hint(hint: Any) -> Any:
    """Return the type of a typed dict's member, required or not."""
    wrapped = typing.get_origin(hint) in (typing.Required, typing.NotRequired)
    return typing.get_args(hint)[0] if wrapped else hint

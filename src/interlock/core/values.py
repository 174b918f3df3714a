"""From JSON to the values that a function's hints ask for.

A function gets values of its own: whatever it does to them changes neither what its caller holds nor what is checked,
kept or recorded of the call afterwards. JSON has one kind of number, so 5.0 becomes 5 where a hint says `int`, and 3
becomes 3.0 where it says `float`.

A type is *plain* if JSON's values are its values but for these two things. Values of plain types are made here, place
by place, in a fraction of the time pydantic takes; all others are pydantic's, with whatever their authors said of them.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal

import annotated_types
import pydantic
import typing_extensions
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from interlock.core.canonical import private_copy

Converter = Callable[[Any], Any]

_IMMUTABLE = (str, bool, type(None))
_ANYTHING = (Any, object, dict, list)
_BOUNDS = (
    annotated_types.Gt, annotated_types.Ge, annotated_types.Lt, annotated_types.Le, annotated_types.Interval,
    annotated_types.MultipleOf, annotated_types.MinLen, annotated_types.MaxLen, annotated_types.Len, str,
)  # fmt: skip


def converter(hint: Any) -> Converter | None:
    """How JSON becomes a value of a type; None where it is one already, and one that nobody can change."""
    return _own(hint) if is_plain(hint) else pydantic.TypeAdapter[Any](hint).validate_python


# Plain types


def is_plain(hint: Any, inside: tuple[Any, ...] = ()) -> bool:
    """Whether JSON's values are this type's values, but for the kind of a number."""
    if typing.get_origin(hint) is typing.Annotated and not all(map(_only_bounds, hint.__metadata__)):
        return False
    hint = bare(hint)
    if hint in (*_IMMUTABLE, *_ANYTHING, int, float):
        return True
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (list, typing.Union, types.UnionType) or (origin is dict and args[:1] in ((), (str,))):
        return all(is_plain(arg, inside) for arg in args)
    if origin is Literal:
        return all(type(arg) in (*_IMMUTABLE, int) for arg in args)
    if typing_extensions.is_typeddict(hint) and hint not in inside and not hasattr(hint, "__pydantic_config__"):
        return all(is_plain(item, (*inside, hint)) for _, item in _items(hint))
    return False


def _only_bounds(said: Any) -> bool:
    """Whether what is said beside a type only bounds it, which the schema does too, or describes it."""
    if isinstance(said, FieldInfo):
        renamed = said.alias is not None or said.validation_alias is not None
        filled = said.default is not PydanticUndefined or said.default_factory is not None
        return not renamed and not filled and all(map(_only_bounds, said.metadata))
    if isinstance(said, pydantic.StringConstraints):
        return not (said.strip_whitespace or said.to_lower or said.to_upper)
    # Patterns and the like are of a class that pydantic keeps to itself.
    return isinstance(said, _BOUNDS) or type(said).__module__.startswith("pydantic._internal.")


def bare(hint: Any) -> Any:
    """A type without what is said beside it."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def item_hint(hint: Any) -> Any:
    """The type of a typed dict's member, whether or not it must be there."""
    wrapped = typing.get_origin(hint) in (typing.Required, typing.NotRequired)
    return typing.get_args(hint)[0] if wrapped else hint


def _items(typed_dict: Any) -> Iterator[tuple[str, Any]]:
    for name, hint in typing.get_type_hints(typed_dict, include_extras=True).items():
        yield name, item_hint(hint)


# Their values. What has another shape than its hint says is left as it is: handlers' arguments have no schema.


def _own(hint: Any) -> Converter | None:
    hint = bare(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is int or (origin is Literal and int in map(type, args)):
        return _whole
    if hint is float:
        return _real
    if hint in _IMMUTABLE or origin is Literal:
        return None
    if typing_extensions.is_typeddict(hint):
        return _record({name: own for name, item in _items(hint) if (own := _own(item)) is not None})
    if origin in (typing.Union, types.UnionType):
        return _one_of(hint, [arg for arg in args if arg is not type(None)])
    if origin is list and args:
        return _list(_own(args[0]))
    if origin is dict and args:
        return _dict(_own(args[1]))
    return _anything


def _whole(value: Any) -> Any:
    return int(value) if value.__class__ is float and value.is_integer() else value


def _real(value: Any) -> Any:
    try:
        return float(value) if value.__class__ is int else value
    except OverflowError:
        return value


def _record(members: dict[str, Converter]) -> Converter:
    # Numbers are most of what there is, and mostly of the kind they should be: they are looked at in place.
    wholes = [name for name, own in members.items() if own is _whole]
    reals = [name for name, own in members.items() if own is _real]
    others = [(name, own) for name, own in members.items() if own is not _whole and own is not _real]

    def make(value: Any) -> Any:
        if value.__class__ is not dict:
            return value
        made = value.copy()
        for name in wholes:
            if made.get(name).__class__ is float:
                made[name] = _whole(made[name])
        for name in reals:
            if made.get(name).__class__ is int:
                made[name] = _real(made[name])
        for name, own in others:
            if name in made:
                made[name] = own(made[name])
        return made

    return make


def _list(own: Converter | None) -> Converter:
    if own is None:
        return lambda value: value.copy() if value.__class__ is list else value
    return lambda value: [own(item) for item in value] if value.__class__ is list else value


def _dict(own: Converter | None) -> Converter:
    if own is None:
        return lambda value: value.copy() if value.__class__ is dict else value
    return lambda value: {name: own(item) for name, item in value.items()} if value.__class__ is dict else value


def _one_of(hint: Any, some: list[Any]) -> Converter | None:
    if len(some) == 1:
        one = _own(some[0])
        return None if one is None else lambda value: None if value is None else one(value)
    if all(_own(arg) is None for arg in some):
        return None
    # Which of several it is, is pydantic's to tell.
    choose = pydantic.TypeAdapter[Any](hint).validate_python
    return lambda value: choose(_anything(value))


def _anything(value: Any) -> Any:
    try:
        return _copied(value)
    except RecursionError:
        return private_copy(value)


def _copied(value: Any) -> Any:
    if value.__class__ is dict:
        return {name: _copied(item) if item.__class__ in (dict, list) else item for name, item in value.items()}
    if value.__class__ is list:
        return [_copied(item) if item.__class__ in (dict, list) else item for item in value]
    return value

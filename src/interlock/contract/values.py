"""Converts JSON to the values that a function's hints require.

A function gets values of its own: changing them affects neither the caller's data nor what is checked, stored or
recorded of the call afterwards. JSON has one kind of number, so 5.0 becomes 5 where a hint says `int`, and 3 becomes
3.0 where it says `float`. Single numbers, which most arguments are, are converted here, and lists and rows of plain
values by a function generated for their type; pydantic does the rest, with the authors' own validators.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal, cast

import annotated_types
import pydantic
import typing_extensions
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from interlock.data.canonical import private_copy
from interlock.data.copying import bare, copier, item_hint, real

Converter = Callable[[Any], Any]

_IMMUTABLE = (str, bool, type(None))
_ANYTHING = (Any, object, dict, list)
_BOUNDS = (
    annotated_types.Gt, annotated_types.Ge, annotated_types.Lt, annotated_types.Le, annotated_types.Interval,
    annotated_types.MultipleOf, annotated_types.MinLen, annotated_types.MaxLen, annotated_types.Len, str,
)  # fmt: skip


def converter(hint: Any) -> Converter | None:
    """Make the converter from JSON to a type; None if JSON values of it are already right and immutable."""
    if is_plain(hint):
        plain = bare(hint)
        if plain is int:
            return _whole
        if plain is float:
            return _real
        if plain in _ANYTHING:
            return _copied
        if _is_immutable(plain):
            return None
        copy = copier(plain)
        if copy is not None:
            return copy
    make = pydantic.TypeAdapter[Any](hint).validate_python
    return make if _is_made_anew(hint) else lambda value: make(_copied(value))


def _whole(value: Any) -> Any:
    return int(value) if value.__class__ is float else value


def _real(value: Any) -> Any:
    return real(value) if value.__class__ is int else value


def _copied(value: Any) -> Any:
    return private_copy(value) if value.__class__ in (dict, list) else value


# Types


def is_plain(hint: Any, inside: tuple[Any, ...] = ()) -> bool:
    """Whether JSON's values are this type's values, except for the kind of a number."""
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
    if _is_row(hint) and hint not in inside and not hasattr(hint, "__pydantic_config__"):
        return all(is_plain(item, (*inside, hint)) for item in _items(hint))
    return False


def _only_bounds(annotation: Any) -> bool:
    """Whether the annotations of a type only bound it, which the schema does too, or describe it."""
    if isinstance(annotation, FieldInfo):
        renamed = annotation.alias is not None or annotation.validation_alias is not None
        filled = annotation.default is not PydanticUndefined or annotation.default_factory is not None
        extra: Any = annotation.json_schema_extra or {}
        # Our own marks change no type; other additions of an author to the schema might.
        marked = isinstance(extra, dict) and all(name.startswith("x-") for name in cast("dict[str, Any]", extra))
        return not renamed and not filled and marked and all(map(_only_bounds, annotation.metadata))
    if isinstance(annotation, pydantic.StringConstraints):
        return not (annotation.strip_whitespace or annotation.to_lower or annotation.to_upper)
    # Patterns and the like are of a private class of pydantic.
    return isinstance(annotation, _BOUNDS) or type(annotation).__module__.startswith("pydantic._internal.")


def _is_immutable(hint: Any) -> bool:
    """Whether a plain type contains neither numbers nor anything mutable."""
    hint = bare(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return all(map(_is_immutable, typing.get_args(hint)))
    if typing.get_origin(hint) is Literal:
        return all(type(arg) in _IMMUTABLE for arg in typing.get_args(hint))
    return hint in _IMMUTABLE


def _is_made_anew(hint: Any, inside: tuple[Any, ...] = ()) -> bool:
    """Whether pydantic copies every container in such a value: it passes on values whose type is open."""
    hint = bare(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in (*_IMMUTABLE, int, float) or origin is Literal:
        return True
    if origin in (list, dict, typing.Union, types.UnionType):
        return bool(args) and all(_is_made_anew(arg, inside) for arg in args)
    if _is_row(hint) and hint not in inside:
        return all(_is_made_anew(item, (*inside, hint)) for item in _items(hint))
    return False


def _is_row(hint: Any) -> bool:
    """Whether a type is a dict with only named members: one that takes others does not determine their types."""
    more = getattr(hint, "__extra_items__", typing_extensions.NoExtraItems)
    named = more in (typing_extensions.NoExtraItems, typing_extensions.Never)
    bases = filter(typing_extensions.is_typeddict, getattr(hint, "__orig_bases__", ()))
    return typing_extensions.is_typeddict(hint) and named and all(map(_is_row, bases))


def _items(typed_dict: Any) -> Iterator[Any]:
    return map(item_hint, typing.get_type_hints(typed_dict, include_extras=True).values())

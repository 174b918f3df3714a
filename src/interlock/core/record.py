"""Dataclasses and named tuples that are cheap to define, and immutable records that cost no more than mutable ones.

The `dataclass` of the standard library compiles six methods for every class, about 0.8 ms each time, and a command
defines 150 classes of which it uses a third. `dataclass` here has the same meaning for the options that it takes, but
compiles `__init__` when the first object of a class is made, and needs no compiler for the other methods. `fields`,
`replace`, `asdict`, `copy` and `pickle` work as usual.

`NamedTuple` is that of `typing`, for the same reason with a `__new__` that is compiled when the first tuple is made. A
class with other bases beside it is for the standard library.

`@record` makes such a class with slots and keyword-only fields. The type checker treats it as frozen, and strict
checking is part of every build. At run time it is not frozen, because a frozen dataclass takes three times as long to
create and a call creates ten of them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import MISSING, FrozenInstanceError, field, fields
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, Self, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(field_specifiers=(field,))
def dataclass(
    *, frozen: bool = False, slots: bool = False, kw_only: bool = False, eq: bool = True
) -> Callable[[type[T]], type[T]]:
    """Make a class a dataclass, as `dataclasses.dataclass` does, without compiling its methods now."""

    def make(cls: type[T]) -> type[T]:
        # Without methods the standard library compiles nothing: it collects the fields and makes the slots.
        if cls.__doc__ is None:
            cls.__doc__ = cls.__name__  # otherwise the standard library inspects and writes a signature
        plain = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)
        return _with_methods(plain(cls), frozen=frozen, slots=slots, eq=eq)

    return make


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Make a class a record."""
    return dataclass(slots=True, kw_only=True, eq=False)(cls)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def step(cls: type[T]) -> type[T]:
    """Make a class a record with positional fields. The steps of a call use it, because that is faster."""
    return dataclass(slots=True, eq=False)(cls)


def _with_methods(cls: type[T], *, frozen: bool, slots: bool, eq: bool) -> type[T]:
    methods: dict[str, Any] = {"__init__": _first_init(cls, frozen), "__repr__": _repr}
    if eq:
        values = _values_of(tuple(one.name for one in fields(cls) if one.compare))  # pyright: ignore[reportArgumentType] - a dataclass
        methods["__eq__"] = _eq(values)
        methods["__hash__"] = _hash(values) if frozen else None
    if frozen:
        methods |= _frozen(cls)
        if slots:
            methods |= {"__getstate__": _getstate, "__setstate__": _setstate}
    for name, method in methods.items():
        # A method that the class defines itself stays. Python sets __hash__ to None in a class that defines __eq__.
        if cls.__dict__.get(name) is None:
            setattr(cls, name, method)
    return cls


def _first_init(cls: type, frozen: bool) -> Callable[..., None]:
    def __init__(self: object, *args: object, **named: object) -> None:  # noqa: N807 - the method of a class
        if cls.__dict__["__init__"] is __init__:
            type.__setattr__(cls, "__init__", _compiled_init(cls, frozen))
        cls.__init__(self, *args, **named)

    return __init__


def _compiled_init(cls: type, frozen: bool) -> Callable[..., None]:
    """The `__init__` of a class, with a parameter and an assignment for each field."""
    scope: dict[str, Any] = {"_set": object.__setattr__, "_unset": MISSING}
    positional: list[str] = []
    by_name: list[str] = []
    body: list[str] = []
    for one in fields(cls):
        parameter = value = one.name
        if one.default_factory is not MISSING:
            scope[f"_new_{one.name}"] = one.default_factory
            parameter = f"{one.name}=_unset"
            value = f"_new_{one.name}() if {one.name} is _unset else {one.name}" if one.init else f"_new_{one.name}()"
        elif one.default is not MISSING:
            scope[f"_default_{one.name}"] = one.default
            parameter = f"{one.name}=_default_{one.name}"
            value = one.name if one.init else f"_default_{one.name}"
        elif not one.init:
            continue
        if one.init:
            (by_name if one.kw_only else positional).append(parameter)
        body.append(f"_set(self, {one.name!r}, {value})" if frozen else f"self.{one.name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    parameters = ", ".join(["self", *positional, *(["*", *by_name] if by_name else [])])
    source = f"def __init__({parameters}):\n " + "\n ".join(body or ["pass"])
    exec(source, scope)  # noqa: S102 - names of fields, which are identifiers of our own source
    made: Callable[..., None] = scope["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    return made


def _values_of(names: tuple[str, ...]) -> Callable[[Any], Any]:
    if len(names) == 1:
        (name,) = names
        return lambda one: (getattr(one, name),)
    return attrgetter(*names) if names else lambda one: ()


def _eq(values: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def __eq__(self: object, other: object) -> Any:  # noqa: N807 - the method of a class
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    return __eq__


def _hash(values: Callable[[Any], Any]) -> Callable[[Any], int]:
    def __hash__(self: object) -> int:  # noqa: N807 - the method of a class
        return hash(values(self))

    return __hash__


def _frozen(cls: type) -> dict[str, Any]:
    names = frozenset(one.name for one in fields(cls))

    def __setattr__(self: object, name: str, value: object) -> None:  # noqa: N807 - the method of a class
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: object, name: str) -> None:  # noqa: N807 - the method of a class
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}


@recursive_repr()
def _repr(self: Any) -> str:
    shown = ", ".join(f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr)
    return f"{self.__class__.__qualname__}({shown})"


def _getstate(self: Any) -> list[Any]:
    return [getattr(self, one.name) for one in fields(self)]


def _setstate(self: Any, state: list[Any]) -> None:
    for one, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, one.name, value)


# The attributes of named tuples, as the standard library makes them.
_getter: Callable[[int, str], Any] = collections._tuplegetter  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
_new: Callable[..., Any] = tuple.__new__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


class _Row(tuple[Any, ...]):
    """The base of all named tuples."""

    __slots__ = ()
    _fields: tuple[str, ...]

    @classmethod
    def _make(cls, values: Iterable[Any]) -> Self:
        made: Self = _new(cls, values)
        if len(made) != len(cls._fields):
            raise TypeError(f"Expected {len(cls._fields)} arguments, got {len(made)}")
        return made

    def _replace(self, **changes: Any) -> Self:
        made = self._make(map(changes.pop, self._fields, self))
        if changes:
            raise ValueError(f"Got unexpected field names: {list(changes)!r}")
        return made

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in zip(self._fields, self, strict=True))
        return f"{self.__class__.__name__}({shown})"


class _RowType(type):
    """Makes a class of the fields in the body of another, as `typing.NamedTuple` does."""

    def __new__(cls, name: str, _: tuple[type, ...], body: dict[str, Any]) -> Any:
        names = tuple(body.get("__annotations__", ()))
        defaults = {one: body.pop(one) for one in names if one in body}
        if tuple(defaults) != names[len(names) - len(defaults) :]:
            raise TypeError(f"{name}: fields without a default come first")
        getters = {one: _getter(at, one) for at, one in enumerate(names)}
        facts = {"__slots__": (), "__match_args__": names, "_fields": names, "_field_defaults": defaults}
        made = type(name, (_Row,), {**body, **getters, **facts})
        made.__new__ = _first_new(made, defaults)
        return made


def _first_new(made: Any, defaults: dict[str, Any]) -> Any:
    def __new__(cls: Any, *args: Any, **named: Any) -> Any:  # noqa: N807 - the method of a class
        parameters = "".join(f", {name}" for name in made._fields)
        # As the standard library makes it.
        new = eval(f"lambda _cls{parameters}: _new(_cls, ({parameters[2:]},))", {"_new": _new})  # noqa: S307 - names of fields, which are identifiers of our own source
        new.__name__ = "__new__"
        new.__defaults__ = tuple(defaults.values())
        made.__new__ = staticmethod(new)
        return new(cls, *args, **named)

    return staticmethod(__new__)


# To the type checker the named tuple of the standard library. A class with this base has `_Row` for its base.
if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:
    NamedTuple = type.__new__(_RowType, "NamedTuple", (), {})

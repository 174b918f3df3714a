"""Immutable records that cost no more than mutable ones.

`@record` makes a dataclass with slots and keyword-only fields. The type checker treats it as frozen, and strict
checking is part of every build. At run time it is not frozen, because a frozen dataclass takes three times as long to
create and a call creates ten of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Make a class a record."""
    return dataclass(slots=True, kw_only=True, eq=False)(cls)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def step(cls: type[T]) -> type[T]:
    """Make a class a record with positional fields. The steps of a call use it, because that is faster."""
    return dataclass(slots=True, eq=False)(cls)

"""Immutable values at the price of plain ones.

`@record` is a dataclass with slots and keyword-only fields. The type checker sees it as frozen, and strict checking is
part of every build; at run time it is not, because a frozen dataclass takes three times as long to make and a call
makes ten of them.
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
    """Make a class a record whose fields are given in order; the steps of a call are made this way."""
    return dataclass(slots=True, eq=False)(cls)

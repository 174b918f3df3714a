"""Holds every unit of the journal to its contract: it runs twice, and both runs must be the same.

The first run lies in a savepoint that is rolled back. Then the unit runs again, for good. Both must return the same
value or raise the same error, append the same records, and leave what is around the unit as it was. What differs is
raised where the unit was handed over, and noted for the fixture that fails the test: a background task might keep the
error to itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from types import FunctionType
from typing import Any, cast

from interlock.core.errors import Failure
from interlock.store.port import Unit
from interlock.store.transaction import Transaction

broken: list[str] = []


def rehearse(unit: Unit[Any], transaction: Transaction) -> Any:
    """Run a unit twice and return what it returned, or raise what it raised."""
    mark, around = transaction.mark(), _around(unit)
    transaction.execute("SAVEPOINT rehearsal")
    first = _run(unit, transaction)
    _raise_if_over(first, transaction)
    appended = [row[:4] for row in transaction.rows[mark[0] :]]
    transaction.execute("ROLLBACK TO rehearsal")
    transaction.execute("RELEASE rehearsal")
    transaction.rewind(mark)
    if _around(unit) != around:
        _break(unit, f"it changes what is around it: {around} became {_around(unit)}")
    second = _run(unit, transaction)
    _raise_if_over(second, transaction)
    if [row[:4] for row in transaction.rows[mark[0] :]] != appended:
        _break(unit, f"its second run appends other records: {appended} and {transaction.rows[mark[0] :]}")
    if not _same(first, second):
        _break(unit, f"its second run ends otherwise: {first!r} and {second!r}")
    if isinstance(second, _Raised):
        raise second.error
    return second


@dataclasses.dataclass(slots=True)
class _Raised:
    error: Exception


def _raise_if_over(run: object, transaction: Transaction) -> None:
    """Raise what ended the transaction: the disk is full, or the connection is lost. There is nothing to compare."""
    if not transaction._connection.in_transaction:  # pyright: ignore[reportPrivateUsage]
        assert isinstance(run, _Raised)
        raise run.error


def _run(unit: Unit[Any], transaction: Transaction) -> Any:
    try:
        return unit(transaction)
    except Exception as error:  # noqa: BLE001 - compared, then raised
        return _Raised(error)


def _break(unit: Unit[Any], what: str) -> None:
    words = f"the unit {getattr(unit, '__qualname__', unit)} breaks its contract: {what}"
    broken.append(words)
    raise AssertionError(words)


_PLAIN = (bool, int, float, str, bytes, list, dict, set, type(None))


def _around(unit: Any, depth: int = 2) -> list[tuple[str, str]]:
    """The plain values and collections that a unit closes over, as text."""
    found: list[tuple[str, str]] = []
    if not isinstance(unit, FunctionType):
        return found
    for name, cell in zip(unit.__code__.co_freevars, unit.__closure__ or (), strict=True):
        try:
            value: object = cell.cell_contents
        except ValueError:
            found.append((name, "not bound yet"))
            continue
        if isinstance(value, _PLAIN):
            found.append((name, _text(cast("Any", value))))
        elif depth and callable(value):
            found.extend(_around(value, depth - 1))
    return found


def _text(value: object) -> str:
    try:
        return repr(value)
    except RecursionError:
        return "nested too deeply to be compared"


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, _Raised):
        return _same(one.error, other.error)
    if isinstance(one, Failure):
        return (one.code, one.message) == (other.code, other.message)
    if isinstance(one, BaseException):
        return str(one) == str(other)
    if one == other:
        return True
    if dataclasses.is_dataclass(one):
        names = (field.name for field in dataclasses.fields(one))
        return all(_same(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, Mapping):
        first, second = cast("Mapping[Any, Any]", one), cast("Mapping[Any, Any]", other)
        return first.keys() == second.keys() and all(_same(first[name], second[name]) for name in first)
    if isinstance(one, str | bytes | int | float | Set):
        return False
    if isinstance(one, Sequence):
        pair = cast("Sequence[Any]", one), cast("Sequence[Any]", other)
        return len(pair[0]) == len(pair[1]) and all(map(_same, *pair))
    return True  # an object of its own, such as a cursor: nothing to compare

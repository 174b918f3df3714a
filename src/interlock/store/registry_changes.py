"""The tools that each change of the registry was about, so that other processes read those again and no others.

Each change has a fact of the epoch that it raised (`store.epochs`): the epoch, and the addresses of the tools whose
versions or code it changed. There are `MOST_CHANGES` such facts, which are overwritten in turn. A reader that is
further behind reads the whole registry, and so does one that finds another epoch in a fact: an older release raises the
epoch and writes no fact.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from interlock.core.record import NamedTuple
from interlock.store import epochs, facts
from interlock.store.port import Reader, Transaction

MOST_CHANGES: Final = 256
# A change of more tools is noted as one of any: reading the whole registry costs less then.
MOST: Final = 100
_ANY: Final = "*"
_NAME: Final = "registry_change:"
_EPOCH: Final = "CAST(value AS INTEGER)"
_NOTE: Final = (
    f"INSERT INTO fact (name, value) SELECT '{_NAME}' || CAST({_EPOCH} - {_EPOCH} / {MOST_CHANGES} * {MOST_CHANGES}"  # noqa: S608 - constants
    f" AS TEXT), value || ' ' || ? FROM fact WHERE name = '{epochs.REGISTRY}'"
    " ON CONFLICT (name) DO UPDATE SET value = excluded.value"
)


class Changed(NamedTuple):
    """The epoch of the registry, and the tools that changed since an earlier one; None if that is not known."""

    epoch: int
    addresses: frozenset[str] | None


def note(transaction: Transaction, addresses: Collection[str] | None) -> None:
    """Note what the change was about that has just raised the epoch; None: any tool."""
    known = None if addresses is None else sorted(set(addresses))
    transaction.execute(_NOTE, (_ANY if known is None or len(known) > MOST else " ".join(known),))


def epoch(reader: Reader) -> int:
    return int(facts.get(reader, epochs.REGISTRY) or 0)


def since(reader: Reader, known: int) -> Changed:
    """The epoch, and what changed since an earlier one."""
    now = epoch(reader)
    if now == known:
        return Changed(now, frozenset())
    if not 0 <= known < now or now - known > MOST_CHANGES:
        return Changed(now, None)
    notes = facts.some(reader, [f"{_NAME}{number % MOST_CHANGES}" for number in range(known + 1, now + 1)])
    found: set[str] = set()
    for number in range(known + 1, now + 1):
        of, _, addresses = notes.get(f"{_NAME}{number % MOST_CHANGES}", "").partition(" ")
        if of != str(number) or addresses == _ANY:
            return Changed(now, None)
        found.update(addresses.split())
    return Changed(now, frozenset(found) if len(found) <= MOST else None)

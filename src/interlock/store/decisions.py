"""The order to drop cached decisions of the policy, which every process on the store follows.

It is one fact: the number of the last order and the subjects that it names. A process that has missed the one before
cannot know its subjects and drops everything.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from interlock.core.record import NamedTuple
from interlock.store import epochs, facts
from interlock.store.port import Reader, Transaction

# How many subjects one order may name.
MOST_SUBJECTS = 1000
_SUBJECTS = "decision_subjects"


class Order(NamedTuple):
    """The last order: how many there were, and the subjects that it names; None for everybody."""

    number: int
    subjects: tuple[str, ...] | None


def drop(transaction: Transaction, subjects: Sequence[str] | None) -> None:
    """Let every process drop what it has cached about some subjects; None for everybody."""
    epochs.advance(transaction, epochs.DECISIONS)
    facts.put(transaction, _SUBJECTS, orjson.dumps(subjects).decode())


def last(reader: Reader) -> Order:
    """The last order; its number is 0 where there was none."""
    number, subjects = facts.get(reader, epochs.DECISIONS), facts.get(reader, _SUBJECTS)
    named = None if subjects is None else orjson.loads(subjects)
    return Order(int(number or 0), None if named is None else tuple(named))

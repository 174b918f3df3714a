"""Surfaces: the tables `surface` and `surface_tool`.

A row of `surface` is what the holder of a token, or a local caller, is offered: which tools, why each, since when, and
for whom. A row of `surface_tool` is a tool that such a holder has loaded, and when it was last used. Every process on
the store knows both. The journal has a record of kind `surface` for each change of what is offered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from interlock.core.record import NamedTuple
from interlock.store import epochs, records
from interlock.store.port import Reader, Transaction

_COLUMNS = "holder, id, caller, agent, facts, offered, revision, created_ms, changed_ms"
_SELECT = f"SELECT {_COLUMNS} FROM surface"  # noqa: S608 - constants
_FORGOTTEN_AFTER_MS = 30 * 86_400_000
_AT_ONCE = 500
_LAST = "CASE WHEN used_ms > loaded_ms THEN used_ms ELSE loaded_ms END"


class Loaded(NamedTuple):
    """A tool that a holder has loaded; `used_ms` is None until it is called."""

    address: str
    loaded_ms: int
    used_ms: int | None


class SurfaceRow(NamedTuple):
    """A surface. `facts` and `offered` are JSON objects."""

    holder: str
    id: str
    caller: str
    agent: str | None
    facts: str
    offered: str
    revision: int
    created_ms: int
    changed_ms: int

    @property
    def names(self) -> set[str]:
        """The tools that it offers."""
        return set(orjson.loads(self.offered))


def loaded(reader: Reader, holder: str) -> list[Loaded]:
    """The tools that a holder has loaded; those that were used or loaded last come first."""
    statement = f"SELECT address, loaded_ms, used_ms FROM surface_tool WHERE holder = ? ORDER BY {_LAST} DESC, address"  # noqa: S608 - constant
    return [Loaded._make(row) for row in reader.all(statement, (holder,))]


def names(reader: Reader, holders: Sequence[str]) -> dict[str, frozenset[str]]:
    """The names of the tools that each of some holders has loaded."""
    found: dict[str, set[str]] = {holder: set() for holder in holders}
    for start in range(0, len(holders), _AT_ONCE):
        some = tuple(holders[start : start + _AT_ONCE])
        marks = ", ".join("?" * len(some))
        statement = f"SELECT holder, address FROM surface_tool WHERE holder IN ({marks})"  # noqa: S608 - marks
        for holder, address in reader.all(statement, some):
            found[holder].add(address)
    return {holder: frozenset(names) for holder, names in found.items()}


def load(transaction: Transaction, holder: str, addresses: Iterable[str], most: int) -> None:
    """Add tools to those of a holder. Of more than `most`, those that were used longest ago are forgotten."""
    now_ms = transaction.now_ms
    for address in addresses:
        transaction.execute(
            "INSERT INTO surface_tool (holder, address, loaded_ms) VALUES (?, ?, ?)"
            " ON CONFLICT (holder, address) DO UPDATE SET loaded_ms = excluded.loaded_ms",
            (holder, address, now_ms),
        )
    transaction.execute(
        "DELETE FROM surface_tool WHERE holder = ? AND address NOT IN (SELECT address FROM surface_tool"  # noqa: S608 - constant
        f" WHERE holder = ? ORDER BY {_LAST} DESC, address LIMIT ?)",
        (holder, holder, most),
    )
    epochs.advance(transaction, epochs.SURFACES)


def use(transaction: Transaction, holder: str, addresses: Iterable[str]) -> None:
    """Note that loaded tools were called."""
    for address in addresses:
        transaction.execute(
            "UPDATE surface_tool SET used_ms = ? WHERE holder = ? AND address = ?",
            (transaction.now_ms, holder, address),
        )


def find(reader: Reader, holder: str) -> SurfaceRow | None:
    """The surface of a holder."""
    row = reader.one(f"{_SELECT} WHERE holder = ?", (holder,))
    return None if row is None else SurfaceRow._make(row)


def of_caller(reader: Reader, who: str) -> SurfaceRow | None:
    """The surface of a caller or an agent that changed last: each of their tokens has its own."""
    row = reader.one(f"{_SELECT} WHERE caller = ? OR agent = ? ORDER BY changed_ms DESC, holder LIMIT 1", (who, who))
    return None if row is None else SurfaceRow._make(row)


def offer(
    transaction: Transaction, holder: str, surface_id: str, facts: Mapping[str, Any], offered: Mapping[str, str]
) -> SurfaceRow | None:
    """Store what a holder is offered, with a record in the journal. None if it is offered that already."""
    before = find(transaction, holder)
    known: dict[str, str] = {} if before is None else orjson.loads(before.offered)
    if before is not None and known.keys() == offered.keys():
        return None
    now_ms = transaction.now_ms
    caller, agent = str(facts["id"]), facts.get("agent")
    row = SurfaceRow(
        holder, surface_id, caller, agent, orjson.dumps(facts).decode(), orjson.dumps(offered).decode(),
        1 if before is None else before.revision + 1, now_ms if before is None else before.created_ms, now_ms,
    )  # fmt: skip
    transaction.execute(
        f"INSERT INTO surface ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (holder) DO UPDATE SET"  # noqa: S608 - constant
        " facts = excluded.facts, offered = excluded.offered, revision = excluded.revision,"
        " changed_ms = excluded.changed_ms",
        row,
    )
    event = "tool.surface.created" if before is None else "tool.surface.updated"
    body = records.plain(
        "surface", surface_id, now_ms, event=event, revision=row.revision, callerId=caller, agentId=agent,
        tenant=facts.get("tenant"), offered={name: why for name, why in offered.items() if name not in known},
        withdrawn=sorted(known.keys() - offered.keys()),
    )  # fmt: skip
    transaction.append("surface", surface_id, body)
    return row


def sweep(transaction: Transaction) -> None:
    """Forget tools that were last loaded or used a month ago, and surfaces that have none and did not change since.

    A surface of pinned tools alone is made again when its holder comes back.
    """
    at_ms = transaction.now_ms - _FORGOTTEN_AFTER_MS
    transaction.execute(f"DELETE FROM surface_tool WHERE {_LAST} < ?", (at_ms,))  # noqa: S608 - constant
    transaction.execute(
        "DELETE FROM surface WHERE changed_ms < ? AND holder NOT IN (SELECT holder FROM surface_tool)", (at_ms,)
    )
    epochs.advance(transaction, epochs.SURFACES)

"""Table `quarantine`: content that is refused until a person has looked at it.

A row is one content, by its digest. It stays when the quarantine is lifted and has `lifted_ms` then. Each change gives
its row an epoch that is higher than all before, so that every process on the home notices.
"""

from __future__ import annotations

from interlock.core.record import NamedTuple
from interlock.store.port import Reader, Transaction

_COLUMNS = "digest, tool, call, reason, at_ms, lifted_ms"


class QuarantineRow(NamedTuple):
    """One content that is or was in quarantine. `call` is the call, or the upstream, on whose account it is."""

    digest: str
    tool: str
    call: str
    reason: str
    at_ms: int
    lifted_ms: int | None


class HeldContent(NamedTuple):
    """A content that is in quarantine, and why."""

    digest: str
    reason: str


def entries(reader: Reader) -> list[QuarantineRow]:
    """Everything that is or was in quarantine, by time."""
    return [QuarantineRow._make(row) for row in reader.all(f"SELECT {_COLUMNS} FROM quarantine ORDER BY at_ms")]  # noqa: S608 - constant


def find_held(reader: Reader, tool_or_digest: str) -> QuarantineRow | None:
    """The entry of a tool's version or of a digest that is in quarantine now."""
    row = reader.one(
        f"SELECT {_COLUMNS} FROM quarantine WHERE (tool = ? OR digest = ?) AND lifted_ms IS NULL",  # noqa: S608 - constant
        (tool_or_digest, tool_or_digest),
    )
    return None if row is None else QuarantineRow._make(row)


def held(reader: Reader, tool: str) -> HeldContent | None:
    """The content of a tool's version that is in quarantine now."""
    row = reader.one("SELECT digest, reason FROM quarantine WHERE tool = ? AND lifted_ms IS NULL", (tool,))
    return None if row is None else HeldContent._make(row)


def impose(transaction: Transaction, digest: str, tool: str, call: str, reason: str, at_ms: int) -> None:
    """Put a content into quarantine, also one that was there before."""
    transaction.execute(
        "INSERT INTO quarantine (digest, tool, call, reason, at_ms, lifted_ms, epoch)"
        " VALUES (?, ?, ?, ?, ?, NULL, (SELECT COALESCE(MAX(epoch), 0) + 1 FROM quarantine))"
        " ON CONFLICT (digest) DO UPDATE SET call = excluded.call, reason = excluded.reason,"
        " at_ms = excluded.at_ms, lifted_ms = NULL, epoch = excluded.epoch",
        (digest, tool, call, reason, at_ms),
    )
    transaction.notifies = True


def lift(transaction: Transaction, digest: str, lifted_ms: int) -> None:
    transaction.execute(
        "UPDATE quarantine SET lifted_ms = ?, epoch = (SELECT MAX(epoch) + 1 FROM quarantine) WHERE digest = ?",
        (lifted_ms, digest),
    )
    transaction.notifies = True

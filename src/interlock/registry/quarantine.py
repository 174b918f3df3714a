"""Quarantine: content whose behaviour differed from its contract is refused until a person has reviewed it.

The content is quarantined, by its digest: registering it again under another version, a restart or the passing of time
do not release it. Every process on a home notices it within moments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from interlock.core.clock import iso
from interlock.core.errors import Failure
from interlock.core.record import NamedTuple
from interlock.store import quarantine as table
from interlock.store import records
from interlock.store.tools import bump_epoch

if TYPE_CHECKING:
    from interlock.call.context import Caller
    from interlock.store.port import Reader, Store, Transaction, Unit

DEFINITION_CHANGED = "TOOL_DEFINITION_CHANGED"  # the beginning of such a reason


class Quarantined(NamedTuple):
    """One entry."""

    digest: str
    tool: str
    call: str
    reason: str
    at_ms: int
    lifted_ms: int | None

    @property
    def advice(self) -> str:
        """The command that releases it.

        If its definition changed, it is held on its upstream's account, not a call's.
        """
        if self.reason.startswith(DEFINITION_CHANGED):
            return (
                f"look: interlock upstream show {self.call}, then: interlock upstream accept {self.call} --reason WHY"
            )
        return f"an operator who has looked at it: interlock tools release {self.tool} --reason WHY"

    def document(self) -> dict[str, Any]:
        return {
            "tool": self.tool,
            "digest": self.digest,
            "invocation_id": self.call,
            "reason": self.reason,
            "since": iso(self.at_ms),
            "lifted": self.lifted_ms is not None,
        }


def impose(digest: str, tool: str, call: str, reason: str) -> Unit[None]:
    """Unit that puts content into quarantine."""

    def unit(transaction: Transaction) -> None:
        table.impose(transaction, digest, tool, call, reason, transaction.now_ms)
        bump_epoch(transaction, ())  # what is in quarantine is no part of the versions
        body = records.plain(
            "registry", call, transaction.now_ms, event="tool.quarantined", toolId=tool, digest=digest, reason=reason
        )  # fmt: skip
        transaction.append("registry", call, body)

    return unit


def lift(tool: str, *, by: Caller, reason: str) -> Unit[Quarantined]:
    """Unit in which an authorized person releases content. `tool` is the reference or the digest."""
    if by.kind != "human" or by.agent not in (None, by.id):
        raise Failure("E3206", "only a person can lift a quarantine; an agent never can")
    if not by.governs("tools:admin"):
        raise Failure("E3206", "lifting a quarantine needs the scope tools:admin, in the tenant `local`")
    if not reason.strip():
        raise Failure("E3004", "say why the quarantine is lifted")

    def unit(transaction: Transaction) -> Quarantined:
        row = table.find_held(transaction, tool)
        if row is None:
            raise Failure("E3101", f"`{tool}` is not in quarantine")
        entry = Quarantined._make(row)
        table.lift(transaction, entry.digest, transaction.now_ms)
        bump_epoch(transaction, ())  # what is in quarantine is no part of the versions
        body = records.plain(
            "registry", entry.call, transaction.now_ms, event="tool.quarantine_lifted", toolId=entry.tool,
            digest=entry.digest, by=by.acting, reason=reason,
        )  # fmt: skip
        transaction.append("registry", entry.call, body)
        return entry._replace(lifted_ms=transaction.now_ms)

    return unit


def lift_changed(transaction: Transaction, ref: str) -> str | None:
    """Release a definition that had changed; returns its digest, or None if it was not held for that."""
    held = table.held(transaction, ref)
    if held is None or not held.reason.startswith(DEFINITION_CHANGED):
        return None
    table.lift(transaction, held.digest, transaction.now_ms)
    return held.digest


def every_entry(reader: Reader) -> list[Quarantined]:
    """Everything that is or was in quarantine, by time."""
    return [Quarantined._make(row) for row in table.entries(reader)]


class Quarantine:
    """The current quarantine, as every process on the home sees it."""

    def __init__(self, journal: Store, monotonic: Callable[[], float]) -> None:
        self._journal = journal
        self._monotonic = monotonic
        # The content in quarantine, as of the last look; see `check`.
        self.held: Mapping[str, Quarantined] = {}
        self._changes = journal.changes
        self._changes.watch(("quarantine",), table.entries, self._changed)

    def check(self, digest: str, ref: str, now: float) -> None:
        """Refuse (E3210) content that is in quarantine."""
        if now >= self._changes.fresh_until:
            self._changes.catch_up()
        held = self.held.get(digest)
        if held is not None:
            words = f"{ref} is in quarantine until a person has looked at it: {held.reason}"
            raise Failure("E3210", words, details={"quarantined": True}, resolution=held.advice)

    def holds(self, digest: str) -> bool:
        """Whether content is in quarantine."""
        if self._monotonic() >= self._changes.fresh_until:
            self._changes.catch_up()
        return digest in self.held

    async def look(self) -> None:
        """Check whether anything was quarantined or released."""
        await self._changes.look()

    def _changed(self, rows: list[table.QuarantineRow]) -> None:
        self.held = {row.digest: Quarantined._make(row) for row in rows if row.lifted_ms is None}

    async def all(self) -> list[Quarantined]:
        """Return everything that ever was in quarantine."""
        return await self._journal.read(every_entry)

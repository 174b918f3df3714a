"""Effect audit: compare what a call changed with what its tool declares.

The reports of the tool, its session and the places that an operator has put under watch are compared. A read-only tool
that changed something, and a write that changed what its manifest does not cover, have broken their contract: changes
that can be reverted are reverted, the call fails, and the version is quarantined until a person has looked at it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from interlock.contract.effects import Change
from interlock.contract.permissions import Permissions, is_below
from interlock.core.errors import Failure
from interlock.effects import watch
from interlock.effects.locks import LockRequest, covers
from interlock.effects.session import SessionState
from interlock.registry import quarantine

if TYPE_CHECKING:
    from interlock.call.context import Context
    from interlock.call.phases import Call
    from interlock.call.prepared import Prepared
    from interlock.contract.manifest import Operation
    from interlock.effects.watch import Watcher, WatchVerdict
    from interlock.effects.watched import DatabaseWatcher
    from interlock.gateway.observe import Observer
    from interlock.gateway.redaction import CallRedaction
    from interlock.registry.quarantine import Quarantine
    from interlock.store.port import Store


class EffectAudit:
    """The watchers of one gateway, and the consequences of what they detect."""

    def __init__(
        self,
        journal: Store,
        observer: Observer,
        redaction: CallRedaction,
        quarantine: Quarantine,
        files: Sequence[Watcher],
        databases: Sequence[DatabaseWatcher],
    ) -> None:
        self._journal = journal
        self._observer = observer
        self._redaction = redaction
        self._quarantine = quarantine
        self._databases = databases
        self._watchers: list[Watcher] = [*files, *databases]
        self._engines = [(place, one.ENGINE) for one in self._databases for place in one.resources]
        self.active = bool(self._watchers)
        # A call holds every watched resource exclusively, so that no other call's changes are attributed to it.
        self.lock_requests = tuple(
            LockRequest(resource) for watcher in self._watchers for resource in watcher.resources
        )

    async def before(self) -> list[Any]:
        return await watch.look(self._watchers)

    async def judge(self, call: Call, tool: Prepared, context: Context | None, before: Sequence[Any] | None) -> None:
        """Check the changes of a call; raises E3417 if its tool did what it declares not to do.

        Changes that were detected and not reported are left in `call.more.detected`, to be recorded with the others.
        """
        watched = [] if before is None else await watch.changes(self._watchers, before)
        detected = [*call.more.detected, *watched]
        reported: list[Change] = [] if context is None else context.changes
        if detected:
            call.extend().detected = tuple(_missing(detected, reported))
        if call.request.operation == "compensate":
            return  # an undo is not compared with what the undone call declares
        session = None if context is None else context.session
        # A write may keep state in its own session; a read-only tool may not.
        own = session.changes() if not tool.writes and isinstance(session, SessionState) else ()
        if not detected and not reported and not own:
            return
        verdict = watch.judge(
            tool.contract.mutation.mutation_class,
            call.more.predicted,
            [*detected, *_missing(reported, detected)] if detected else reported,
            own,
            [one for one in watched if not self._is_listed(tool.permissions, one)],
        )
        if verdict.finding != "ok":
            left = await self._put_back(call, watched, before)
            await self._convict(call, tool, verdict, rolled_back=before is not None and not left)

    def _is_listed(self, permissions: Permissions, change: Change) -> bool:
        """Whether the tool's permissions allow the change: of a file, or of something in a database."""
        for place, engine in self._engines:
            if covers(place, change.resource):
                return permissions.databases.get(engine) == "write"
        path = change.resource.removeprefix("file:")
        resolved = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        roots = {one for root in permissions.writable for one in (root, os.path.realpath(root))}
        return any(is_below(one, root) for one in (path, resolved) for root in roots)

    async def _put_back(self, call: Call, watched: Sequence[Change], before: Sequence[Any] | None) -> list[Change]:
        """Revert detected changes. Returns those that could not be reverted; the others are recorded."""
        left: list[Change] = []
        for watcher, seen in zip(self._watchers, before or (), strict=False):
            left.extend(await watcher.restore(seen))
        call.extend().detected = (*call.more.detected, *map(_reverse, _missing(watched, left)))
        return left

    async def _convict(self, call: Call, tool: Prepared, verdict: WatchVerdict, *, rolled_back: bool) -> None:
        changes = [self._redaction.redact_text(call, f"{one.operation} {one.resource}") for one in verdict.outside[:20]]
        words = f"{tool.ref} changed what it did not declare: {', '.join(changes[:3])}"
        await self._journal.commit(
            quarantine.impose(tool.digest, tool.ref, call.id, f"{verdict.finding}: {changes[0]}")
        )
        await self._quarantine.look()
        self._observer.alert(verdict.finding, call, changes=changes)
        raise Failure(
            "E3417",
            words,
            details={
                "violation": verdict.finding,
                "changes": changes,
                "rolled_back": rolled_back,
                "quarantined": True,
            },
        )

    def close(self) -> None:
        for watcher in self._databases:
            watcher.close()


def _missing(changes: Sequence[Change], others: Sequence[Change]) -> list[Change]:
    """Return the changes that are not among the others, by resource and operation."""
    known = {(one.resource, one.operation) for one in others}
    return [one for one in changes if (one.resource, one.operation) not in known]


_BACK: dict[Operation, Operation] = {"CREATE": "DELETE", "DELETE": "CREATE"}


def _reverse(change: Change) -> Change:
    operation = _BACK.get(change.operation, change.operation)
    return Change(resource=change.resource, operation=operation, before=change.after, after=change.before)

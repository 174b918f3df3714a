"""Writes that do not succeed after their effect: they are undone, or the means to undo them are stored."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from interlock.call.phases import Ran, Request, Verified
from interlock.call.results import Result
from interlock.core.errors import Failure
from interlock.gateway.hooks import Hooks
from interlock.gateway.observe import Observer
from interlock.gateway.persistence.undo import UndoStore

# Failures that prove that the effect is not what its contract states. A refusal by a hook, or a check that could not
# be made, does not.
_DISPROVED = frozenset(("E3303", "E3417"))


class Rollback:
    """Undoes writes that do not verify, each by a call of its own through the gateway."""

    def __init__(
        self, observer: Observer, undo: UndoStore, hooks: Hooks, invoke: Callable[[Request], Awaitable[Result]]
    ) -> None:
        self._observer = observer
        self._undo = undo
        self._hooks = hooks
        self._invoke = invoke

    async def roll_back(self, ran: Ran, failure: Failure) -> Failure:
        """Undo a write that did not verify, if its tool stated how.

        Returns the failure to report: the one that was found, with whether the effect was undone.
        """
        call, tool = ran, ran.tool
        undoable = call.more.compensation is not None and tool.contract.manifest.compensable
        if failure.code == "E3416" and undoable:
            # The effect stands, and only the result is withheld: the caller decides whether to undo it.
            await self._undo.store_now(ran)
        if failure.code not in _DISPROVED or not tool.writes or call.more.source != "compute":
            return failure
        if call.request.operation != "invoke":
            return failure
        undone = False
        if undoable:
            await self._undo.store_now(ran)
            if call.more.held is not None:
                call.more.held.release()  # the undo needs the locks of the call
            undo = Request(
                tool=tool.contract.address, arguments={}, caller=call.request.caller, key=f"rollback-{call.id}",
                trace_id=call.trace_id, operation="compensate", parent=call.id, door="gateway",
            )  # fmt: skip
            undone = (await self._invoke(undo)).ok
        name = "OUTPUT_SCHEMA_VIOLATION" if failure.code == "E3303" else "SIDE_EFFECT_INCONSISTENCY"
        self._observer.alert(name, call, rolled_back=undone)
        if not undone:
            self._observer.alert("ROLLBACK_FAILED", call)
        details = {**(failure.details or {}), "rolled_back": undone}
        return Failure(failure.code, failure.message, details=details, retryable=failure.retryable and undone)

    async def run_post_hooks(self, verified: Verified) -> None:
        """Run the post-hooks. If one of them stops a write, the effect stands, so the means to undo it are stored."""
        if verified.more.source in ("replay", "preview") or verified.request.operation == "compensate":
            return
        try:
            await self._hooks.after(verified, verified.value)
        except (Failure, asyncio.CancelledError):
            await asyncio.shield(self._undo.store_now(verified))
            raise

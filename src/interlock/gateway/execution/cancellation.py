"""Stop calls by their id: while they run, while they wait, or before they start."""

from __future__ import annotations

import asyncio
from typing import Any

from interlock.call.phases import REASONS, Call, Reason, Why
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.gateway import reconcile
from interlock.gateway.execution import active_calls
from interlock.gateway.execution.active_calls import ActiveCalls
from interlock.gateway.observe import Observer
from interlock.store.port import Store


class Cancellation:
    """Cancels calls, and remembers which calls were stopped before they ran."""

    def __init__(self, active: ActiveCalls, journal: Store, clock: Clock, observer: Observer) -> None:
        self._active = active
        self._journal = journal
        self._clock = clock
        self._observer = observer
        # Calls that can be stopped by their id before they run, with the tasks that make them.
        self._entered: dict[str, tuple[Call, asyncio.Task[Any]]] = {}
        # Calls to be cut off when they are about to run, and calls whose tasks `cancel` interrupted.
        self.doomed: dict[str, Why] = {}
        self._called_off: dict[str, Why] = {}

    def cancel(self, call_id: str, reason: Reason = "interruption") -> str:
        """Ask for a call to end: `canceled`, `unsupported` by its profile, or `finished` already. Always on record."""
        call, task = self._active.get(call_id), None
        if call is None:
            call, task = self._entered.get(call_id, (None, None))
        if call is None or (task is not None and (call.launched or call.recorded)):
            answer = "finished"
        elif call.tool is None or call.tool.contract.manifest.cancellable:
            answer = "canceled"
        else:
            answer = "unsupported"
        self._journal.post(reconcile.note_cancel(call_id, call, self._clock.now_ms(), answer, reason))
        ref = "" if call is None else call.ref
        self._observer.mention("tool.invocation.cancel_requested", call_id, ref, answer=answer)
        if call is not None and answer == "canceled":
            if task is None:
                active_calls.stop(call, REASONS[reason])
            else:
                self._called_off[call_id] = REASONS[reason]
                task.cancel()
        return answer

    def stop(self, call_id: str, why: Why) -> None:
        """Cut a call off: now if it runs, otherwise when it is about to run."""
        call = self._active.get(call_id)
        if call is None:
            self.doomed[call_id] = why
        else:
            active_calls.stop(call, why)

    def enter(self, call: Call) -> None:
        """Make a call that may wait, or whose id is known to others, stoppable before it runs."""
        task = asyncio.current_task()
        assert task is not None
        self._entered[call.own_id] = call, task

    def leave(self, call: Call) -> None:
        """Forget a call that is closed."""
        self.doomed.pop(call.id, None)
        self._entered.pop(call.own_id, None)

    def stopped(self, call: Call) -> Failure:
        """Return the failure of a call that was stopped before it ran."""
        call.more.why = self.doomed.pop(call.id)
        return active_calls.cut_off(call)

    def was_called_off(self, call: Call) -> bool:
        """Whether it was `cancel` that interrupted the call. If so, its task is no longer being cancelled."""
        entered = self._entered.get(call.own_id)
        if entered is None or call.own_id not in self._called_off:
            return False
        call.extend().why = self._called_off.pop(call.own_id)
        entered[1].uncancel()
        return True

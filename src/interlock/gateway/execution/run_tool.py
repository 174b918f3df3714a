"""Run the tool of a granted call in its executor, within its deadline.

A tool that is cut off is stopped. If it is a write that continues nevertheless, its outcome is recorded when it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from interlock.core.errors import Failure
from interlock.executors.function import MOST_HUNG, FunctionExecutor
from interlock.executors.isolated import IsolatedExecutor, State
from interlock.executors.remote import Connect, RemoteExecutor
from interlock.gateway.checkpoints import Checkpoints
from interlock.gateway.execution.active_calls import GRACE_S, ActiveCalls
from interlock.gateway.execution.cancellation import Cancellation
from interlock.gateway.execution.clean_failure import clean_failure, tool_failure
from interlock.gateway.execution.credentials import Credentials
from interlock.gateway.execution.late import LateOutcomes
from interlock.gateway.execution.tool_context import narrowed
from interlock.gateway.observe import Observer
from interlock.store import records

if TYPE_CHECKING:
    from interlock.call.context import Context
    from interlock.call.phases import Call, Granted, Read
    from interlock.core.clock import Clock
    from interlock.executors.function import Begun
    from interlock.executors.sandbox.job import Outcome
    from interlock.settings import Settings
    from interlock.store.home import Instance
    from interlock.store.port import Store


class ToolRunner:
    """Runs tools: functions of this process, programs in a sandbox, and tools of upstreams."""

    def __init__(
        self,
        *,
        grant: object,
        journal: Store,
        clock: Clock,
        settings: Settings,
        instance: Instance,
        observer: Observer,
        active: ActiveCalls,
        cancellation: Cancellation,
        credentials: Credentials,
        late: LateOutcomes,
        checkpoints: Checkpoints,
        connect: Connect,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._observer = observer
        self.active = active
        self._cancellation = cancellation
        self._credentials = credentials
        self._late = late
        self._function_executor = FunctionExecutor(grant, self._note_hung)
        self.start: Callable[[Read], Begun] = self._function_executor.start
        self._isolated_executor = IsolatedExecutor(
            grant, clock=clock, network=settings.egress, network_of=settings.egress_of, note=self._note_outcome,
            hide=observer.hide, checkpoints=checkpoints.bounds, shared=instance.home.sandbox,
        )  # fmt: skip
        self._remote_executor = RemoteExecutor(
            grant, clock=clock, connect=connect, network=settings.egress, network_of=settings.egress_of
        )
        self.warm_up = self._isolated_executor.warm_up

    async def run(self, granted: Granted, context: Context | None, begun: Begun | None = None) -> Any:
        """Run the tool of a call and return its output. `begun` is a function that was started on the fast path."""
        call, tool = granted, granted.tool
        call.extend().context = context
        if begun is None and call.deadline <= self._clock.monotonic():
            raise Failure("E3402", f"{tool.ref} had no time left to start")
        self._cancellation.check(call)
        active = self.active
        run = active.run_here if tool.computes else active.run_apart
        call.launched = True
        try:
            if tool.isolated:
                output = await run(call, self._isolated_executor.run(granted, context))
            elif tool.remote:
                output = await run(call, self._remote_executor.run(granted, context, narrowed(granted)))
            else:
                output = await run(call, self._function_executor.run(granted, context, begun))
            call.returned = True
            return output
        except Failure as failure:
            if call.more.why is not None and call.more.scope is not None:
                await self._await_late(granted)
            call.extend().borrowed = context is not None and failure is context.failed_below
            await self._credentials.note_limit(call, failure)
            raise await clean_failure(self._observer, call, failure) from failure
        except asyncio.CancelledError:
            if call.more.scope is not None:
                await self._await_late(granted)
            raise
        except Exception as error:  # an executor's edge: whatever the tool raised becomes a failure
            self._observer.log_failure(call, f"{tool.ref} failed", error)
            # The name of the exception's class comes from the tool, and may contain private values as well.
            raise await clean_failure(self._observer, call, tool_failure(tool.writes, tool.ref, error)) from error

    async def _await_late(self, granted: Granted) -> None:
        """A write was cut off while it ran: if it continues, have its outcome recorded when it ends."""
        call = granted
        job = self._function_executor.unfinished(call.id)
        call.extend().runs_on = job is not None
        if job is not None:
            self._late.watch(granted, job)
        elif call.more.task is not None and not call.more.task.done():
            await asyncio.wait({call.more.task}, timeout=GRACE_S)

    @property
    def sandbox(self) -> State:
        """Whether the sandbox is open."""
        return self._isolated_executor.state

    def hung_share(self) -> float:
        """Return how many threads hang, as a share of those that may."""
        return self._function_executor.hung / MOST_HUNG

    async def stop(self) -> None:
        """Cut off the calls that run, and wait for late outcomes to be recorded."""
        await self.active.close()
        await self._late.close()

    async def close(self) -> None:
        """Close the executors."""
        self._function_executor.close()
        await self._isolated_executor.close()

    def _note_hung(self, call: Call, hung: int) -> None:
        """Alert that a sync function continues in its thread although its call was cut off."""
        reason = f"it goes on in a thread after its call was cut off; {hung} such threads, at most {MOST_HUNG}"
        self._observer.alert("TOOL_THREAD_HUNG", call, reason=reason, hung=hung)

    def _note_outcome(self, call: Call, outcome: Outcome) -> None:
        """Meter a sandboxed call. Attempts at what the sandbox forbids are alerted and recorded."""
        if call.more.meter is not None and outcome.cpu_ns is not None:
            call.more.meter.told(outcome.cpu_ns, outcome.wall_ns, outcome.max_rss or 0)
        if not outcome.violations:
            return
        self._observer.alert("SANDBOX_VIOLATION", call, what=list(outcome.violations)[:20])
        violations = [self._observer.hide(call, what) for what in outcome.violations[:100]]
        body = records.about("violation", call, self._clock.now_ms(), toolId=call.ref, violations=violations)
        self._journal.post(lambda transaction: transaction.append("violation", call.id, body))

"""Run the tool of a granted call in its executor, within its deadline.

A tool that is cut off is stopped. If it is a write that continues nevertheless, its outcome is recorded when it ends.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from interlock.contract.executors import kind_of
from interlock.core.errors import Failure
from interlock.executors.function import StartedThread, awaited
from interlock.executors.site import Site, make_executors
from interlock.gateway.checkpoints import CheckpointWriter
from interlock.gateway.execution.active_calls import GRACE_S, ActiveCalls
from interlock.gateway.execution.cancellation import Cancellation
from interlock.gateway.execution.clean_failure import at_deadline, clean_failure, tool_failure
from interlock.gateway.execution.credentials import Credentials
from interlock.gateway.execution.late import LateOutcomes
from interlock.gateway.execution.tool_context import narrowed
from interlock.gateway.failure_log import FailureLog
from interlock.gateway.observe import Observer
from interlock.gateway.redaction import CallRedaction
from interlock.store import records

if TYPE_CHECKING:
    from interlock.call.connector import Connector, ReadFile
    from interlock.call.context import Context
    from interlock.call.phases import Call, FastRead, Granted
    from interlock.call.prepared import Prepared
    from interlock.core.clock import Clock
    from interlock.executors.function import FunctionExecutor, Started
    from interlock.settings import Settings
    from interlock.store.instance import Instance
    from interlock.store.port import Store


class ToolRunner:
    """Runs tools, each in the executor that its contract names (contract/executors.py)."""

    def __init__(
        self,
        *,
        grant: object,
        journal: Store,
        clock: Clock,
        settings: Settings,
        instance: Instance,
        observer: Observer,
        redaction: CallRedaction,
        failure_log: FailureLog,
        active: ActiveCalls,
        cancellation: Cancellation,
        credentials: Credentials,
        late: LateOutcomes,
        checkpoints: CheckpointWriter,
        connect: Callable[[str], Connector],
        read_file: ReadFile,
        make_context: Callable[[Granted], Context],
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._observer = observer
        self._redaction = redaction
        self._failure_log = failure_log
        self.active = active
        self._cancellation = cancellation
        self._credentials = credentials
        self._late = late
        site = Site(
            grant=grant,
            clock=clock,
            network=settings.egress,
            network_of=settings.egress_of,
            connect=connect,
            read_file=read_file,
            narrowed=narrowed,
            make_context=make_context,
            alert=observer.alert,
            hide=redaction.redact_text,
            violated=self._record_violations,
            checkpoints=checkpoints.bounds,
            sandbox=instance.home.sandbox,
            grace_s=settings.sandbox_grace_s,
        )
        self._executors = make_executors(site)
        # The fast path starts functions by itself, and hands them over if they have to wait.
        functions = cast("FunctionExecutor", self._executors[kind_of("function").module])
        self.start: Callable[[FastRead, Context | None], Started] = functions.start
        self._resume = functions.resume

    def uses_context(self, tool: Prepared) -> bool:
        """Whether the executor of a tool uses a context from the start, and does not make one when it is needed."""
        return not self._executors[tool.executor].makes_context

    async def run(self, granted: Granted, context: Context | None, started: Started | None = None) -> Any:
        """Run the tool of a call and return its output. `started` is a function that was started on the fast path."""
        call, tool = granted, granted.tool
        call.more.context = context
        if started is None and call.deadline <= self._clock.monotonic():
            raise Failure("E3402", f"{tool.ref} had no time left to start")
        if call.id in self._cancellation.doomed:
            raise self._cancellation.stopped(call)
        active = self.active
        run = active.run_here if tool.computes else active.run_apart
        call.launched = True
        try:
            if started is None:
                output = await run(call, self._executors[tool.executor].run(granted, context))
            elif isinstance(started, StartedThread):
                # Waiting for a thread needs no task of its own, because nothing can keep it from being cut off.
                output = await active.run_here(call, self._resume(granted, started))
                if inspect.isawaitable(output):
                    output = await active.run_apart(call, awaited(output))
            else:
                output = await run(call, self._resume(granted, started))
            call.returned = True
            return output
        except Failure as failure:
            if call.more.why is not None and call.more.scope is not None:
                await self._await_late(granted)
            call.extend().borrowed = context is not None and failure is context.failed_below
            failure = at_deadline(call, failure, self._clock.monotonic())
            await self._credentials.note_limit(call, failure)
            raise await clean_failure(self._failure_log, call, failure) from failure
        except asyncio.CancelledError:
            if call.more.scope is not None:
                await self._await_late(granted)
            raise
        except Exception as error:  # an executor's edge: whatever the tool raised becomes a failure
            self._failure_log.log(call, f"{tool.ref} failed", error)
            # The name of the exception's class comes from the tool, and may contain private values as well.
            raise await clean_failure(self._failure_log, call, tool_failure(tool.writes, tool.ref, error)) from error

    async def _await_late(self, granted: Granted) -> None:
        """A write was cut off while it ran: if it continues, have its outcome recorded when it ends."""
        call = granted
        executor = self._executors[call.tool.executor]
        unfinished = executor.unfinished(call.id)
        call.extend().runs_on = unfinished is not None
        if unfinished is not None:
            self._late.watch(granted, unfinished)
        elif call.more.task is not None and not call.more.task.done():
            await asyncio.wait({call.more.task}, timeout=GRACE_S + executor.grace_s)

    async def warm_up(self) -> None:
        """Prepare what the first call of a sandboxed tool would otherwise wait for."""
        for executor in self._executors.values():
            await executor.warm_up()

    def health(self) -> dict[str, Literal["healthy", "degraded"]]:
        """The parts of executors that `/ready` lists."""
        return {part: state for executor in self._executors.values() for part, state in executor.health().items()}

    def loads(self) -> dict[str, Callable[[], float]]:
        """The limits that raise an alert when nearly reached, by name: functions that return the share in use."""
        return {name: share for executor in self._executors.values() for name, share in executor.loads().items()}

    async def stop(self) -> None:
        """Cut off the calls that run, and wait for late outcomes to be recorded."""
        await self.active.close()
        await self._late.close()

    async def close(self) -> None:
        """Close the executors."""
        for executor in self._executors.values():
            await executor.close()

    def _record_violations(self, call: Call, attempts: Sequence[str]) -> None:
        """Alert and record attempts at what the sandbox forbids."""
        self._observer.alert("SANDBOX_VIOLATION", call, what=list(attempts)[:20])
        violations = [self._redaction.redact_text(call, what) for what in attempts[:100]]
        body = records.about("violation", call, self._clock.now_ms(), toolId=call.ref, violations=violations)
        self._journal.post(lambda transaction: transaction.append("violation", call.id, body))

"""Phase 4. Make the intent durable, reserve the idempotency key, lock the resources, and run the tool.

Everything here needs a grant. A call that ran before under its key is not run again. A call is checked against the
effects that its tool declares however it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from interlock.call.connector import Aged
from interlock.call.phases import Call, Granted, Ran
from interlock.core.errors import Failure
from interlock.gateway.execution.cancellation import Cancellation
from interlock.gateway.execution.credentials import Credentials
from interlock.gateway.execution.effect_audit import EffectAudit
from interlock.gateway.execution.preview import Previews
from interlock.gateway.execution.reserve import Reservations
from interlock.gateway.execution.resource_locks import ResourceLocks
from interlock.gateway.execution.run_tool import ToolRunner
from interlock.gateway.execution.tool_context import Contexts
from interlock.gateway.observe import Observer
from interlock.gateway.progress import ProgressReporter
from interlock.resilience.services import Services

if TYPE_CHECKING:
    from interlock.call.context import Context
    from interlock.executors.function import Started


class Execution:
    """Runs granted calls, once."""

    def __init__(
        self,
        *,
        services: Services,
        credentials: Credentials,
        reservations: Reservations,
        locks: ResourceLocks,
        contexts: Contexts,
        runner: ToolRunner,
        previews: Previews,
        audit: EffectAudit,
        cancellation: Cancellation,
        observer: Observer,
        progress: ProgressReporter,
    ) -> None:
        self._services = services
        self._credentials = credentials
        self._reservations = reservations
        self._locks = locks
        self._contexts = contexts
        self._runner = runner
        self._previews = previews
        self._audit = audit
        self._cancellation = cancellation
        self._observer = observer
        self._progress = progress

    async def run(self, granted: Granted, *, entered: bool = False) -> Ran:
        """Run a granted call, or find that it has been run. `entered`: its external service lets it through."""
        call, tool = granted, granted.tool
        looking = call.more.looking
        if not entered:
            call.phases.append("execute")
            if tool.service is not None and not looking:
                return await self._run_at(tool.service, granted)
        if looking or not tool.writes:
            self._runner.active.begin(call)
        if tool.credentials and call.more.uses is not None and not looking:
            # A call whose credentials are not available must not use up anything.
            await self._credentials.lend_to(granted)
        if call.more.uses is not None and (looking or not tool.writes):
            await self._reservations.use_up(call)
        if looking:
            return await self._previews.run(granted)
        if tool.writes:
            replay = await self._reservations.reserve(granted)
            if replay is not None:
                return replay
        if tool.credentials and call.more.lease is None:
            await self._credentials.lend_to(granted)
        if tool.writes or self._locks.needed(granted):
            await self._locks.hold(granted)
        undo = call.request.operation == "compensate"
        wanted = tool.bound.undo_takes_context if undo else tool.bound.takes_context
        wanted = wanted and (tool.writes or self._runner.uses_context(tool))
        context = None
        if wanted:
            contexts = self._contexts
            context = contexts.make(granted) if contexts.near else await contexts.prepare(granted)
        call.move("running")
        if self._observer.audience:
            self._observer.emit("tool.invocation.started", call)
        if call.request.on_progress is not None and not tool.contract.manifest.reports_progress:
            call.extend().warnings.append("PROGRESS_UNSUPPORTED")
        if tool.slow:
            self._progress.report(call, {"message": "started", "percent": 0})
        return await self.carry_out(granted, context)

    async def _run_at(self, service: str, granted: Granted) -> Ran:
        """Run a call of an external service. A service that keeps failing is not called (E3501)."""
        call, tool = granted, granted.tool
        entry = self._services.enter(service, tool.contract.manifest.circuit_breaker_config, tool.contract.address)
        try:
            ran = await self.run(granted, entered=True)
            if ran.more.source == "compute":
                entry.done()
            return ran
        except Failure as failure:
            if call.launched and not call.more.borrowed:
                entry.done(failure, own_deadline=call.own_deadline)
            raise
        finally:
            entry.abandoned()  # unless it said something about the service

    async def carry_out(self, granted: Granted, context: Context | None, started: Started | None = None) -> Ran:
        """Run the tool and check its effects. `started` is a function that was started on the fast path."""
        call = granted
        try:
            before = await self._audit.before() if self._audit.active else None
            # INVARIANT: the effects of a tool that fails, or is cut off, are checked like those of one that succeeds.
            try:
                output = await self._runner.run(granted, context, started)
            except Failure:
                await self._check_effects(call, context, before)
                raise
            except asyncio.CancelledError:
                with suppress(Failure):  # the violation is recorded all the same; the caller has gone
                    await asyncio.shield(self._check_effects(call, context, before))
                raise
            if before is not None or context is not None or call.more.detected:
                await self._audit.judge(call, granted.tool, context, before)
            if isinstance(output, Aged):
                # INVARIANT: a cached answer is never presented as a new one.
                call.extend().warnings.append(f"CACHED_RESULT age_s={output.age_s:.3f}")
                output, call.extend().source = output.value, "cache"
        finally:
            if self._locks.leased:
                self._locks.rest(call)
        granted.output = output
        if context is not None:
            # INVARIANT: what a tool reports after it has returned changes nothing.
            more = call.more
            more.changes, more.attestations = tuple(context.changes), tuple(context.attestations)
            more.compensation = context.compensation
        return cast("Ran", granted)

    async def _check_effects(self, call: Call, context: Context | None, before: Sequence[Any] | None) -> None:
        """Compare what a call did with what its tool declares. A tool that still runs is not done yet."""
        assert call.tool is not None
        if call.more.runs_on:
            return
        if before is not None or context is not None or call.more.detected:
            await self._audit.judge(call, call.tool, context, before)

    def release(self, call: Call) -> None:
        """Release the locks and the key of a call that is closed, so that waiting calls continue."""
        if call.more.held is not None and not call.more.runs_on:
            call.more.held.release()
        self._cancellation.leave(call)
        self._reservations.release(call)

    async def close(self) -> None:
        """Cut off what runs, and release what execution holds."""
        await self._runner.stop()
        await self._services.settle()
        await self._runner.close()
        self._audit.close()
        self._locks.close()

"""The governed call: six phases, in this order, for every call there is.

    Request ─► Validate ─► Authorize ─► Execute ─► Verify ─► Return

`invoke` is the only way to a tool, whatever endpoint, retry, saga step or compensation it comes from. It always answers
with one terminal result and never raises for what a tool, a caller or a policy did; every answer is in the journal
before it is given. Each phase is a module: request, validate, authorize, execute, verify, finish. Each takes the type
that the phase before it returns. `api/wiring` builds the phases and connects them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from interlock.approvals.ticket import Ticket
from interlock.call.phases import Call, Checked, FastRead, Granted, Lease, Ran, Request
from interlock.call.results import Result
from interlock.core.errors import Failure
from interlock.gateway import open_call
from interlock.gateway.execution.active_calls import cut_off
from interlock.gateway.handlers import agrees
from interlock.gateway.masking import masked

if TYPE_CHECKING:
    from interlock.call.prepared import Prepared
    from interlock.core.clock import Clock
    from interlock.core.turns import Turn
    from interlock.data.schema import Json
    from interlock.gateway.approval.waiting_call import WaitingCalls
    from interlock.gateway.authorize import Authorizer
    from interlock.gateway.execute import Execution
    from interlock.gateway.execution.cancellation import Cancellation
    from interlock.gateway.execution.preview import Previews
    from interlock.gateway.execution.run_tool import ToolRunner
    from interlock.gateway.failure import FailedCalls
    from interlock.gateway.failure_log import FailureLog
    from interlock.gateway.fast_path import FastPath, RunningRead
    from interlock.gateway.finish import Finisher
    from interlock.gateway.hooks import Hooks
    from interlock.gateway.observe import Observer
    from interlock.gateway.persistence.storage import CallStorage
    from interlock.gateway.request import Requests
    from interlock.gateway.results.roll_back import Rollback
    from interlock.gateway.results.unrecorded import UnrecordedOutcomes
    from interlock.gateway.results.waiting import PendingResults
    from interlock.gateway.reviewer_view import ReviewerView
    from interlock.gateway.stored_checkpoints import StoredCheckpoints
    from interlock.gateway.validate import Validator
    from interlock.gateway.verify import ResultVerifier
    from interlock.registry.catalog import Catalog
    from interlock.registry.quarantine import Quarantine
    from interlock.resilience.services import Services
    from interlock.telemetry.setup import Telemetry


# many methods: the ways into the six phases, and the phases in their order
class Gateway:
    """The six phases over one data directory."""

    def __init__(
        self,
        *,
        clock: Clock,
        catalog: Catalog,
        fast_path: FastPath,
        requests: Requests,
        validator: Validator,
        authorizer: Authorizer,
        pending: PendingResults,
        execution: Execution,
        runner: ToolRunner,
        services: Services,
        cancellation: Cancellation,
        previews: Previews,
        verifier: ResultVerifier,
        rollback: Rollback,
        finisher: Finisher,
        failed: FailedCalls,
        unrecorded: UnrecordedOutcomes,
        hooks: Hooks,
        observer: Observer,
        failure_log: FailureLog,
        reviewer_view: ReviewerView,
        telemetry: Telemetry,
        quarantine: Quarantine,
        storage: CallStorage,
        checkpoints: StoredCheckpoints,
        waiting_calls: WaitingCalls,
    ) -> None:
        self._clock = clock
        self._catalog = catalog
        self.fast_path = fast_path
        self._requests = requests
        self._validator = validator
        self._authorizer = authorizer
        self._pending = pending
        self._execution = execution
        self.runner = runner
        self._started = runner.active.started
        self.services = services
        self.cancellation = cancellation
        self._previews = previews
        self._verifier = verifier
        self._rollback = rollback
        self._finisher = finisher
        self._failed = failed
        self._unrecorded = unrecorded
        self.hooks = hooks
        self.observer = observer
        self.failure_log = failure_log
        self.reviewer_view = reviewer_view
        self.telemetry = telemetry
        self._tracer = telemetry.tracer
        self.quarantine = quarantine
        self.storage = storage
        self.checkpoints = checkpoints
        self.waiting_calls = waiting_calls

    async def invoke(self, request: Request, turn: Turn | None = None, tool: Prepared | None = None) -> Result:
        """Make one call, from request to result. One with a turn waits for it before its tool runs.

        `tool` is the tool of the call, if its caller has just looked it up.
        """
        made = self.make(request, turn, tool)
        return await made if isinstance(made, CoroutineType) else made

    def make(
        self, request: Request, turn: Turn | None = None, tool: Prepared | None = None
    ) -> Result | CoroutineType[Any, Any, Result]:
        """Make one call, as `invoke` does. Returns its result if it has one at once, otherwise what makes the call."""
        read = self.fast_path.take(request, tool) if turn is None else None
        if isinstance(read, Result):
            return read
        if read is not None:
            return self.finish(read)
        return self._answered(open_call.open_call(request, self._clock), self._run, turn, tool)

    def open(self, request: Request, tool: Prepared | None = None) -> tuple[str, Coroutine[Any, Any, Result]]:
        """Return the id of a call, by which others can stop it, and what makes the call, as `invoke` does."""
        call = open_call.open_call(request, self._clock)
        call.known = True
        return call.id, self._answered(call, self._run, None, tool)

    async def finish(self, read: RunningRead) -> Result:
        """Return the result of a read that the fast path has begun. One that fails or takes long goes on in phases."""
        if read.written is None and read.function.waiter is not None:
            try:
                await read.function.waiter
            except asyncio.CancelledError:
                _cancel_again()
            else:
                closed = self.fast_path.close(read) if read.function.ended else read
                if isinstance(closed, Result):
                    return closed
        if read.written is None:
            granted = read.call or self._authorizer.as_granted(read)
            return await self._answered(granted, self._continue, read)
        try:
            await read.written
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - reported like that of any other call
            return await self._answered(_recorded(read), _raise, error)
        return self.fast_path.finish(read)

    async def _run(self, call: Call, turn: Turn | None, tool: Prepared | None = None) -> Result:
        """Run the six phases, one after the other."""
        requested = await self._requests.read(call, tool)
        checked = await self._validator.validate(requested)
        granted = await self._authorizer.authorize(checked)
        if isinstance(granted, Ticket):
            return self._pending.of(call, granted)
        if turn is not None:
            await self._take_turn(granted, turn)
        ran = await self._execution.run(granted)
        return await self._verify_and_finish(ran)

    async def _take_turn(self, granted: Granted, turn: Turn) -> None:
        """Wait for the turn of a call whose tool decides by its input whether it may overlap others.

        The input is the one that the tool will receive, so nothing that could change it comes after this. Time that the
        call waits for others is no part of its own, except that the caller's deadline stays.
        """
        decide, asked = granted.tool.handler("concurrent"), self._clock.monotonic()
        overlaps = decide is not None and await agrees(decide, granted.deadline - asked, **granted.input)
        asked = self._clock.monotonic()
        await turn.take(overlaps=overlaps)
        waited, limit = self._clock.monotonic() - asked, granted.request.deadline
        granted.started += waited
        granted.deadline = granted.deadline + waited if limit is None else min(granted.deadline + waited, limit.at)
        self._authorizer.check_again(granted)

    async def _continue(self, granted: Granted, read: RunningRead) -> Result:
        """Continue a fast-path read in the regular phases, from Execute on."""
        granted.extend()
        return await self._verify_and_finish(await self._execution.carry_out(granted, read.context, read.function))

    async def _verify_and_finish(self, ran: Ran) -> Result:
        try:
            verified = await self._verifier.verify(ran)
            if self.hooks.registered:
                await self._rollback.run_post_hooks(verified)
                self.hooks.redact_outputs(verified)
        except Failure as failure:
            raise await self._rollback.roll_back(ran, failure) from failure
        return await self._finisher.succeed(verified)

    async def _answered(self, call: Call, phases: Callable[..., Awaitable[Result]], *rest: object) -> Result:
        """Return the result of a call, whatever its phases raise, and release what the call held."""
        if self._tracer is not None:
            self._tracer.begin(call)
        entered = call.known or call.request.key is not None
        if entered:
            self.cancellation.enter(call)
        try:
            return await phases(call, *rest)
        except Failure as failure:
            return await self._failed.close(call, await masked(call, failure, self._catalog))
        except asyncio.CancelledError:
            called_off = self.cancellation.was_called_off(call)
            failure = cut_off(call) if called_off else Failure("E3703", f"{call.ref} was cancelled by its caller")
            result = await self._failed.close(call, failure)
            if called_off:
                return result
            raise
        except Exception as error:  # noqa: BLE001 - a broken gateway still answers, and still records
            self.failure_log.log(call, "the gateway failed", error)
            return await self._failed.close(call, Failure("E3000", "something went wrong inside Interlock"))
        finally:
            if self._tracer is not None:
                self._tracer.end(call)
            more = call.more
            if call.id in self._started.used:
                self._started.end(call.id)
            if entered or more.held is not None or more.scope is not None:
                self._execution.release(call)
            if call.more.lease is not None:
                await _close_lease(call, call.more.lease, self.failure_log)
            if call.more.context is not None and not call.more.runs_on:
                # The functions of a context refer to their call, so the two would wait for the garbage collector.
                call.more.context = None

    async def checked(self, request: Request) -> Checked:
        """Return a call as policies and tokens would see it. Raises what is wrong with its input.

        Only phases 1 and 2 run; nothing is recorded.
        """
        call = open_call.open_call(request, self._clock)
        return await self._validator.validate(await self._requests.read(call, to_run=False))

    async def foresee(self, checked: Checked) -> tuple[Json, Json]:
        """Return the preview of a call: as it is, and as its reviewer may see it. Nothing is run or recorded."""
        preview = await self._previews.look(self._authorizer.to_look(checked))
        return preview, self.reviewer_view.preview(checked, preview)

    def with_id(self, request: Request) -> Request:
        """Return the request with the id that its call will have, so that the call can be stopped by it."""
        return open_call.with_id(request, self._clock)

    async def decline(self, request: Request, failure: Failure) -> Result:
        """Return the result of a call that was never started: labelled synthetic, on record like any other."""
        call = open_call.open_call(request, self._clock)
        if self._tracer is not None:
            self._tracer.begin(call)
        try:
            return await self._failed.close(call, failure)
        finally:
            if self._tracer is not None:
                self._tracer.end(call)

    async def write_unrecorded(self) -> None:
        """Write the outcomes that could not be recorded before, as far as the journal takes them now."""
        # Cancelled between the commit and the removal from the list, an outcome would be written twice.
        await asyncio.shield(self._unrecorded.write_all())

    async def close(self) -> None:
        """End the calls that run, and write the outcomes that are not recorded yet."""
        await self._execution.close()
        await self.hooks.close()
        await self.write_unrecorded()
        await self._started.settle()
        self._started.close()
        await self.telemetry.close()


async def _close_lease(call: Call, lease: Lease, failure_log: FailureLog) -> None:
    try:
        await lease.close()
    except Exception as error:  # noqa: BLE001 - the call has ended, and its result stands
        failure_log.log(call, "credentials could not be given back", error)


def _recorded(read: FastRead) -> Call:
    """Return the call of a fast-path read whose success is being written."""
    call = read.requested()
    call.phases += ("verify", "return")
    call.returned = call.recorded = True
    return call


def _cancel_again() -> None:
    """Have the cancellation of the current task delivered again, at its next wait: in the phase that handles it."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
    task.cancel()


async def _raise(_: Call, error: BaseException) -> Result:
    raise error

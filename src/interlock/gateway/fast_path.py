"""The fast path: a simple read, from its request to its result, in one step (ADR 24).

Nearly all calls of agents are reads that need no lookup, no approval and no wait. They pass the same checks as every
call, made by the same components: the contract fits their input and output, the token and the policy allow them,
quarantine, loop detection and redaction apply, and the same record is written. Only the steps in between are skipped,
which exist for calls that can stop at any of them.

Functions that are attributes of objects get a local name before they are called here. Otherwise Python first looks for
a method of that name, which takes longer than the call.

INVARIANT: the fast path only handles success. Every other call goes to the regular phases: before the tool has started,
by starting over, because nothing has happened; afterwards, by continuing from that point with the running tool. A read
that takes long does so too: the phases enforce its deadline, note that it has begun, and cancel it by its id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import field
from typing import TYPE_CHECKING

import orjson

from interlock.call.phases import FastRead, Granted, Request
from interlock.call.results import Result
from interlock.core.clock import Clock, new_ids
from interlock.core.record import dataclass
from interlock.data.bounds import LONGEST_NUMBER, SMALL_INPUT, long_number, size_of
from interlock.data.canonical import NO_HASH, canonical
from interlock.gateway.execution.tool_context import Contexts, left_nothing
from interlock.gateway.open_call import trace_of
from interlock.store import records

if TYPE_CHECKING:
    from interlock.call.context import Context
    from interlock.call.prepared import Prepared
    from interlock.executors.function import Started
    from interlock.gateway.authorize import Authorizer
    from interlock.gateway.execution.active_calls import ActiveCalls
    from interlock.gateway.hooks import Hooks
    from interlock.gateway.observe import Observer
    from interlock.registry.catalog import Catalog
    from interlock.registry.quarantine import Quarantine
    from interlock.resilience.limits import LoopWatch
    from interlock.store.port import Store
    from interlock.telemetry.setup import Telemetry

_log = logging.getLogger("interlock.gateway")


@dataclass(slots=True, eq=False)
class RunningRead(FastRead):
    """A read on the fast path: with its started function, then with its result, while that is being written."""

    # The call and its context, if the function takes one.
    call: Granted | None = None
    context: Context | None = None
    function: Started = field(init=False)
    rest: str = field(init=False)
    result: Result = field(init=False)
    written: asyncio.Future[None] | None = None


class FastPath:
    """Makes simple reads."""

    def __init__(
        self,
        *,
        barred: bool,
        small: int,
        large: int,
        catalog: Catalog,
        quarantine: Quarantine,
        authorizer: Authorizer,
        start: Callable[[FastRead, Context | None], Started],
        active: ActiveCalls,
        contexts: Contexts,
        hooks: Hooks,
        observer: Observer,
        telemetry: Telemetry,
        journal: Store,
        clock: Clock,
        loops: LoopWatch,
        batched: bool,
    ) -> None:
        self._barred = barred
        self._small = small
        self._large = large
        self._catalog = catalog
        self._quarantine = quarantine
        self._authorizer = authorizer
        self._start = start
        self._active = active
        self._started = active.started
        self._contexts = contexts
        self._hooks = hooks
        self._observer = observer
        self._metrics = telemetry.metrics
        self._alerts = telemetry.alerts
        self._journal = journal
        self._changes = journal.changes
        self._clock = clock
        self._loops = loops
        self._batched = batched

    def take(self, request: Request, tool: Prepared | None = None) -> Result | RunningRead | None:
        """Return the result of a simple read, or a read that is not done yet. None: nothing has happened.

        A function that only computes has ended or waits. Any other runs apart, in a task or a thread.

        `tool` is what the catalog has for the request at this moment, if its caller has looked already.
        """
        caller, given = request.caller, request.arguments
        if (
            request.key is not None or request.dry_run or request.id is not None or request.deadline is not None
            or request.timeout_s is not None or request.session or request.on_progress is not None
            or request.task is not None or request.parent is not None or request.hidden
            or request.operation != "invoke" or caller is None or not isinstance(given, dict)
            or self._barred or self._hooks.registered or self._observer.listeners
        ):  # fmt: skip
            return None
        clock, noted = self._clock, ""
        try:
            tool = tool or self._catalog.at_hand(request.tool, request.version, caller.capability)
            if tool is None or not tool.fast_path or tool.input_redactor is None or tool.input_redactor.guarded:
                return None
            if caller.surface is not None and not caller.surface.offers(tool.contract.address):
                return None
            takes_context = tool.bound.takes_context
            if takes_context and not self._contexts.near and not tool.bound.is_async:
                return None  # its session is read first, from a server
            take = tool.take
            taken = None if take is None else take(given, self._small)
            if taken is None:
                if size_of(given, SMALL_INPUT) > SMALL_INPUT or not tool.fits_input(given):
                    return None
                taken = canonical(given), None
            if len(taken[0]) > LONGEST_NUMBER and (len(taken[0]) > self._small or long_number(taken[0])):
                return None
            for name, _ in tool.defaults:
                if name not in given:
                    return None
            if tool.inner_defaults is not None and tool.inner_defaults.lacks(given):
                return None
            wall_ms, monotonic, random_bytes = clock.now_ms, clock.monotonic, clock.random_bytes
            now_ms, now = wall_ms(), monotonic()
            if now >= self._changes.fresh_until or tool.digest in self._quarantine.held:
                return None
            read = RunningRead(request, caller, tool, given, now_ms, now, *taken)
            decision = self._authorizer.grant_read(read)
            if decision is None:
                return None
            rest = records.rest_of_read(decision, tool, caller, request.door, request.native)
            if rest is None:
                return None
            made = NO_HASH.copy()
            made.update(taken[0])
            read.input_hash = input_hash = made.hexdigest()
            read.id, read.trace_id = new_ids(now_ms, random_bytes(24))
            if request.trace_id is not None:
                read.trace_id, read.span = trace_of(request.trace_id, read.trace_id)
            noted = read.id
            if not self._started.begin(noted, read.trace_id, input_hash, rest):
                return None
            loop = self._loops.seen(caller, tool.ref, input_hash, now)
            if loop is not None:
                self._observer.alert("RUNAWAY_LOOP", read.requested(), what=loop)
            if takes_context:
                read.call = self._authorizer.as_granted(read)
                read.context = self._contexts.make(read.call)
            start = self._start
            read.rest, read.function = rest, start(read, read.context)
        except Exception:  # noqa: BLE001 - nothing has begun: the phases find the same, and say what is wrong
            self._started.end(noted)
            return None
        if read.function.waiter is not None:
            self._active.watch(read.function.waiter, now, tool.contract.timeout.default_s)
            return read
        return self.close(read) if read.function.ended else read

    def close(self, read: RunningRead) -> Result | RunningRead:
        """Verify the output of a function that has ended, and write the record of its call.

        Return the result, or the read: while its record is being written, or unchanged if the regular phases must do
        all that.
        """
        tool, value, written = read.tool, read.function.output, None
        redactor = tool.redactor
        try:
            if redactor is None or self._hooks.registered:
                return read
            if read.call is not None and read.context is not None and not left_nothing(read.call, read.context):
                return read
            fits = tool.fits_fast
            if (fits is None or not fits(value, self._large)) and (
                size_of(value, self._large) > self._large or not tool.contract.output.fits(value)
            ):
                return read
            if not redactor.trivial:
                shown = redactor.apply(value, disclose=read.caller.scopes)
                if shown.paths:
                    return read
                value = shown.value
            size = len(orjson.dumps(value))
            if size > self._large or (tool.max_result is not None and size > tool.max_result):
                return read
            if tool.max_inline is not None and size > tool.max_inline:
                return read
            wall_ms, monotonic = self._clock.now_ms, self._clock.monotonic
            latency_ms = int((monotonic() - read.started) * 1_000_000) / 1000
            now_ms = wall_ms()
            body = records.read(read.id, now_ms, read.trace_id, read.input_hash, latency_ms, value, size, read.rest)
            batched = self._batched and not self._journal.crowded
            if not batched or not self._started.answer(read.id, body, self._journal.record):
                written = self._journal.append("closed", read.id, body, awaited=not batched)
        except Exception:  # noqa: BLE001 - the phases find the same, and do what has to be done about it
            return read
        metadata = {"latency_ms": latency_ms, "policy_refs": read.decision.rules}
        result = Result(read.id, tool.ref, "succeeded", now_ms, read.trace_id, metadata, value)
        read.written, read.result = written, result
        if read.call is not None:
            read.call.move("succeeded")  # what the tool reports from here on changes nothing
        return self.finish(read) if written is None else read

    def finish(self, read: RunningRead) -> Result:
        """Return the result of a read that is on record, count it, and notify those who listen by now."""
        result = read.result
        if read.written is not None:  # otherwise its closing record has taken the place of the note
            self._started.end(read.id)
        try:
            self._metrics.read(read.tool, result.metadata["latency_ms"])
            if read.started >= self._alerts.due:
                self._alerts.look()
        except Exception:  # noqa: BLE001 - as `Observer.closed` does
            _log.exception("call %s could not be counted", read.id)
        if self._observer.listeners:
            call = read.requested()
            self._observer.emit("tool.invocation.succeeded", call)
            self._observer.emit("tool.result.created", call)
        return result

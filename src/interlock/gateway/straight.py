"""The straight line: a plain read, from its request to its result, in one go.

Nearly all calls of agents are reads that nothing has to be looked up, asked or waited for. They go through the same
checks as every call, made by the same parts: the contract holds their input and output, the token and the policy allow
them, quarantine, loops and redaction are heeded, the same record is written. What they are spared is the steps in
between, which are there for calls that can stop at any of them.

INVARIANT: the line only ever says yes. Whatever is not plain about a call is left to the phases: before the tool has
begun by starting over, as nothing has happened; afterwards by going on from there, with the tool as far as it came.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import orjson

from interlock.call.phases import Read, Request
from interlock.call.results import Result
from interlock.core.clock import Clock, new_ids
from interlock.data.bounds import LONGEST_NUMBER, SMALL_INPUT, long_number, size_of
from interlock.data.canonical import canonical
from interlock.executors.function import Begun
from interlock.gateway.authorize import Authorizer
from interlock.gateway.execute import Execution
from interlock.gateway.hooks import Hooks
from interlock.gateway.observe import Observer
from interlock.registry.catalog import Catalog
from interlock.registry.quarantine import Quarantine
from interlock.resilience.limits import LoopWatch
from interlock.store import records
from interlock.store.port import Store
from interlock.telemetry.setup import Telemetry


class Line(Read):
    """A plain read on the line: with its result, to be told once that is written, or as far as its function came."""

    __slots__ = ("begun", "result", "written")

    begun: Begun
    result: Result
    written: asyncio.Future[None] | None


class Straight:
    """Takes the reads that are plain."""

    def __init__(
        self,
        *,
        barred: bool,
        small: int,
        large: int,
        catalog: Catalog,
        quarantine: Quarantine,
        authorizer: Authorizer,
        execution: Execution,
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
        self._execution = execution
        self._hooks = hooks
        self._observer = observer
        self._metrics = telemetry.metrics
        self._alerts = telemetry.alerts
        self._journal = journal
        self._clock = clock
        self._loops = loops
        self._batched = batched

    def take(self, request: Request) -> Result | Line | None:
        """The result of a plain read, or the read where something is left to do. None: nothing has happened."""
        caller, given = request.caller, request.arguments
        if (
            request.key is not None or request.trace_id is not None or request.dry_run or request.id is not None
            or request.deadline is not None or request.timeout_s is not None or request.session
            or request.on_progress is not None or request.task is not None or request.parent is not None
            or request.hidden or request.operation != "invoke" or caller is None or not isinstance(given, dict)
            or self._barred or self._hooks.registered or self._observer.listeners
        ):  # fmt: skip
            return None
        clock = self._clock
        try:
            tool = self._catalog.at_hand(request.tool, request.version, caller.capability)
            if tool is None or not tool.straight or tool.sink is None or tool.sink.guarded:
                return None
            taken = None if tool.take is None else tool.take(given, self._small)
            if taken is None:
                if size_of(given, SMALL_INPUT) > SMALL_INPUT or not tool.fits_input(given):
                    return None
                taken = canonical(given), None
            if len(taken[0]) > LONGEST_NUMBER and (len(taken[0]) > self._small or long_number(taken[0])):
                return None
            for name, _ in tool.defaults:
                if name not in given:
                    return None
            now_ms, now = clock.now_ms(), clock.monotonic()
            self._quarantine.check(tool.digest, tool.ref, now)
            read = Line(request, caller, tool, given, now_ms, now)
            decision = self._authorizer.clear(read)
            if decision is None:
                return None
            rest = records.rest_of_read(decision, tool, caller, request.door, request.native)
            if rest is None:
                return None
            read.model_input, read.own = taken
            read.input_hash = input_hash = hashlib.sha256(taken[0]).hexdigest()
            read.id, read.trace_id = new_ids(now_ms, clock.random_bytes(24))
            odd = self._loops.seen(caller, tool.ref, input_hash, now)
            if odd is not None:
                self._observer.alert("RUNAWAY_LOOP", read.requested(), what=odd)
            begun = self._execution.start(read)
        except Exception:  # noqa: BLE001 - nothing has begun: the phases find the same, and say what is wrong
            return None
        if begun.ended:
            told = self._close(read, begun.output, rest)
            if told is not None:
                return told
        read.written, read.begun = None, begun
        return read

    def _close(self, read: Line, value: Any, rest: str) -> Result | Line | None:
        """Verify what came out and write its record. None where that is not as plain as it was to call it."""
        tool, written = read.tool, None
        redactor = tool.redactor
        try:
            if redactor is None or self._hooks.registered:
                return None
            plainly = tool.plainly_fits
            if (plainly is None or not plainly(value, self._large)) and (
                size_of(value, self._large) > self._large or not tool.contract.output.fits(value)
            ):
                return None
            if not redactor.trivial:
                shown = redactor.apply(value, disclose=read.caller.scopes)
                if shown.paths:
                    return None
                value = shown.value
            size = len(orjson.dumps(value))
            if size > self._large or (tool.max_result is not None and size > tool.max_result):
                return None
            if tool.max_inline is not None and size > tool.max_inline:
                return None
            latency_ms = int((self._clock.monotonic() - read.started) * 1_000_000) / 1000
            now_ms = self._clock.now_ms()
            body = records.read(read.id, now_ms, read.trace_id, read.input_hash, latency_ms, value, size, rest)
            if self._batched and not self._journal.crowded:
                self._journal.record("closed", read.id, body)
            else:
                written = self._journal.append("closed", read.id, body)
        except Exception:  # noqa: BLE001 - the phases find the same, and do what has to be done about it
            return None
        assert read.decision is not None
        metadata = {"latency_ms": latency_ms, "policy_refs": read.decision.rules}
        result = Result(read.id, tool.ref, "succeeded", now_ms, read.trace_id, metadata, value)
        read.written, read.result = written, result
        return self.tell(read) if written is None else read

    def tell(self, read: Line) -> Result:
        """The result of a read that is on record: count it, and tell whoever has come to listen meanwhile."""
        result = read.result
        self._metrics.read(read.tool, result.metadata["latency_ms"])
        if read.started >= self._alerts.due:
            self._alerts.look()
        if self._observer.listeners:
            call = read.requested()
            self._observer.emit("tool.invocation.succeeded", call)
            self._observer.emit("tool.result.created", call)
        return result

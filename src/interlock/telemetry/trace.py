"""Spans of calls, created when a call has ended.

    tool.invoke ─┬─ Validate
                 ├─ Authorize
                 ├─ Execute ─┬─ External ─── Attempt …   for a tool of an upstream: one for each attempt to send
                 │           ├─ External …               requests of a sandboxed tool, through the egress proxy
                 │           └─ tool.invoke …            calls that the tool makes
                 ├─ Verify
                 └─ Return

A traced call notes when it entered each phase and each state; nothing else happens until it ends. Then its spans are
created in one go and handed to the sinks, so no span can be left open. Only the id of the parent span of a nested or
upstream call must be known earlier: the span ids of a call are consecutive, so it is computed by addition.

Requests that leave the process are noted when they begin and when they end (`Outbound`). A call notes up to 128 of
them; further ones are only counted. One that has not ended when the call does ends with the call.

Whether a call is traced is decided once, when it begins: by its caller's traceparent, by the parent call or else by the
trace id, so that every process decides alike.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from interlock.contract.standard.states import State
from interlock.core.clock import Clock, iso
from interlock.core.errors import Failure
from interlock.core.record import NamedTuple
from interlock.telemetry.w3c import Position, trace_hex

if TYPE_CHECKING:
    from interlock.call.context import Caller
    from interlock.call.phases import Call
    from interlock.data.schema import Json

_log = logging.getLogger("interlock.telemetry")

Attributes = Mapping[str, str | int | float | bool]
_Owner = tuple[str, str]  # tenant and caller

_PHASES = {
    "validate": "Validate",
    "authorize": "Authorize",
    "execute": "Execute",
    "verify": "Verify",
    "return": "Return",
}
# Codes for which a more specific status than the errorCode exists.
_STATUS = {"E3303": "OUTPUT_SCHEMA_VIOLATION", "E3417": "SIDE_EFFECT_INCONSISTENCY"}
_MOST_EVENTS = 128
_NOTHING: Attributes = {}
# A call has up to six spans of its own and this many outbound ones; their ids differ in the last byte.
_FIRST_OUTBOUND = 8
MOST_OUTBOUND = 128
_IDS = 0xFF


class Happened(NamedTuple):
    """An event within a span."""

    name: str
    at_ns: int
    attributes: Attributes


class Span(NamedTuple):
    """A span that has ended. `status` names the error; None if there was none."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start_ns: int
    end_ns: int
    status: str | None
    attributes: Attributes
    events: Sequence[Happened]
    state: str = ""
    kind: Literal["internal", "server", "client"] = "internal"

    def document(self) -> Json:
        return {
            "name": self.name,
            "trace_id": self.trace_id,
            "span_id": self.span_id,
            "parent_span_id": self.parent_id,
            "start": iso(self.start_ns // 1_000_000),
            "duration_ms": (self.end_ns - self.start_ns) / 1e6,
            "status": self.status or "OK",
            "attributes": dict(self.attributes),
            "events": [
                {"name": event.name, "at": iso(event.at_ns // 1_000_000), **event.attributes} for event in self.events
            ],
        }


Sink = Callable[[Sequence[Span]], None]


class _Failed(NamedTuple):
    """The stored part of a failure: only texts of the error table, nothing specific to the call."""

    status: str
    kind: str
    code: str


_CANCELED = _Failed("CANCELED", "CANCELED", "")


class Outbound:
    """Something that leaves the process for a call: an external call, an attempt at one, a request through the proxy.

    As a context manager it ends with its body. It ends once; later calls of `end` are ignored.
    """

    __slots__ = ("_attributes", "_deadline", "_ended", "_failed", "_name", "_parent", "_recording", "_span", "_started")

    def __init__(
        self, recording: Recording, name: str, span: str, parent: str, deadline: float, attributes: Attributes
    ) -> None:
        self._recording = recording
        self._name = name
        self._span = span
        self._parent = parent
        self._deadline = deadline
        self._attributes = dict(attributes)
        self._started = recording.now()
        self._ended: float | None = None
        self._failed: _Failed | None = None

    @property
    def traceparent(self) -> str:
        """The traceparent for the receiver of the request."""
        return Position(self._recording.trace_id, self._span, True).traceparent

    def below(self, name: str, deadline: float, attributes: Attributes, /) -> Outbound | None:
        """Begin a part that has a span of its own; None if the call has reached its limit of spans."""
        return self._recording.outbound(name, deadline, attributes, parent=self._span)

    def note(self, attributes: Attributes, /) -> None:
        """Add attributes that were not known when it began."""
        if self._ended is None:
            self._attributes.update(attributes)

    def end(self, error: BaseException | str | None = None) -> None:
        """End it: successfully, with an exception, or with a status."""
        if self._ended is not None:
            return
        self._ended = self._recording.now()
        if error is not None:
            self._failed = _Failed(error, error, "") if isinstance(error, str) else self._judged(error)

    def _judged(self, error: BaseException) -> _Failed:
        if isinstance(error, Failure):
            return _failed(error)
        if isinstance(error, asyncio.CancelledError | TimeoutError):
            # A task that is cut off sees a cancellation, whatever the reason was.
            late = isinstance(error, TimeoutError) or self._recording.now() >= self._deadline
            return _Failed("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", "") if late else _CANCELED
        return _Failed("EXECUTION_FAILED", "EXECUTION_FAILED", "")

    def __enter__(self) -> Outbound:
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        self.end(error)

    def close(self, failed: _Failed | None) -> None:
        """End it because its call has ended."""
        if self._ended is None:
            self.end()
            self._failed = failed or _CANCELED

    def span(self, facts: Attributes, state: str) -> Span:
        """Make its span."""
        assert self._ended is not None
        failed, ns = self._failed, self._recording.ns
        attributes = {**facts, **self._attributes, "external.latency_ms": (self._ended - self._started) * 1000}
        if failed is not None:
            attributes["error.type"] = failed.kind
            if failed.code:
                attributes["error.code"] = failed.code
        return Span(
            self._name, self._recording.trace_id, self._span, self._parent, ns(self._started), ns(self._ended),
            None if failed is None else failed.status, attributes, (), state, "client",
        )  # fmt: skip


def _failed(failure: Failure) -> _Failed:
    row = failure.row
    return _Failed(_STATUS.get(row.code) or row.error_code.value, row.error_code.value, row.code)


class _Phases(list[str]):
    """The phases of a call, and when each was entered."""

    __slots__ = ("now", "times")

    def __init__(self, call: Call, now: Callable[[], float]) -> None:
        super().__init__(call.phases)
        self.now = now
        self.times = [call.started]

    def append(self, item: str, /) -> None:
        super().append(item)
        self.times.append(self.now())


class _States(list[State]):
    """The states of a call, with the phase and the time at which each was reached."""

    __slots__ = ("phases", "running", "times")

    def __init__(self, call: Call, phases: _Phases, running: Callable[[], None]) -> None:
        super().__init__(call.states)
        self.phases = phases
        self.running = running
        self.times: list[tuple[int, float]] = []

    def append(self, item: State, /) -> None:
        super().append(item)
        self.times.append((len(self.phases) - 1, self.phases.now()))
        if item == "running":
            self.running()


# many methods: one span tree per call; its accessors are called on every call and stay direct
class Recording:
    """A traced call: while it runs, in `Call.span`; afterwards, the times from which its spans are made."""

    __slots__ = (
        "_above", "_call", "_calls", "_dropped", "_ended", "_facts", "_failed", "_failed_in", "_first", "_noted",
        "_outbound", "_phases", "_started_ms", "_states", "cost", "known_as", "source", "trace_id",
    )  # fmt: skip

    def __init__(
        self,
        call: Call,
        trace_id: str,
        above: Position | None,
        first: int,
        clock: Clock,
        calls: dict[str, Recording | None],
    ) -> None:
        self.trace_id = trace_id
        self.cost = 0.0
        self.source = "compute"
        self.known_as = call.own_id
        self._call = call
        self._calls = calls
        self._above = above
        self._first = first & 0x7FFF_FFFF_FFFF_FFFF & ~_IDS | _IDS + 1
        self._started_ms = call.started_ms
        self._ended = call.started
        self._facts: Attributes = {}
        self._failed: _Failed | None = None
        self._failed_in = -1
        self._noted: list[tuple[int, str, float, Attributes]] = []
        self._outbound: list[Outbound] = []
        self._dropped = 0
        call.phases = self._phases = _Phases(call, clock.monotonic)
        call.states = self._states = _States(call, self._phases, self._running)

    @property
    def position(self) -> Position:
        """The position in the trace of whatever the call does now."""
        return Position(self.trace_id, self._id(len(self._phases) - 1), True, self.state)

    @property
    def traceparent(self) -> str:
        return self.position.traceparent

    @property
    def invocation_id(self) -> str:
        """The id of the call, which has ended."""
        return str(self._facts["tool.invocation_id"])

    @property
    def state(self) -> str:
        """The tracestate that the caller sent, to be passed on."""
        return "" if self._above is None else self._above.state

    def event(self, name: str, **attributes: str | float) -> None:
        """Record an event in the current phase."""
        if len(self._noted) < _MOST_EVENTS:
            self._noted.append((len(self._phases) - 1, name, self._phases.now(), attributes))

    def outbound(
        self, name: str, deadline: float, attributes: Attributes, *, parent: str | None = None
    ) -> Outbound | None:
        """Record a request that leaves the process now, in the current phase; None if the call has reached its limit.

        `deadline`, on the clock of the call, distinguishes a timeout from a cancellation.
        """
        if len(self._outbound) >= MOST_OUTBOUND:
            self._dropped += 1
            return None
        own = self._id(_FIRST_OUTBOUND + len(self._outbound))
        begun = Outbound(self, name, own, parent or self.position.span_id, deadline, attributes)
        self._outbound.append(begun)
        return begun

    def fail(self, failure: Failure) -> None:
        """Mark the current phase as failed."""
        self._failed = _failed(failure)
        self._failed_in = len(self._phases) - 1

    def end(self) -> None:
        """Record the end of the call and release the call, so that its input is not held in memory."""
        self._ended = self._phases.now()
        for one in self._outbound:
            one.close(self._failed)
        self._facts = self._attributes(self._call)
        self._states.running = _nobody
        del self._call

    def _running(self) -> None:
        # An approved call keeps the id it had when it was requested, and its nested calls refer to it by that id.
        self.known_as = self._call.id
        self._calls[self.known_as] = self

    def _id(self, place: int) -> str:
        return f"{self._first + place:016x}"

    def spans(self) -> list[Span]:
        """Make the spans of the call, which has ended."""
        phases, entered, above = self._phases, self._phases.times, self._above
        ends = [*entered[1:], self._ended]
        state = self.state
        status = None if self._failed is None else self._failed.status
        events = self._events()
        root, ns = self._id(0), self.ns
        facts = {"tool.id": self._facts["tool.id"]}
        made = [
            Span(
                "tool.invoke", self.trace_id, root, None if above is None else above.span_id, ns(entered[0]),
                ns(self._ended), status, self._facts, events[0], state,
                "internal" if "tool.parent_invocation_id" in self._facts else "server",
            )
        ]  # fmt: skip
        for place in range(1, len(entered)):
            name = _PHASES[phases[place]]
            wrong = status if place == self._failed_in else None
            own, start_ns, end_ns = self._id(place), ns(entered[place]), ns(ends[place])
            if name == "Execute":
                how = "completed" if wrong is None else "failed"
                events[place].append(Happened(f"tool.execution.{how}", end_ns, {"source": self.source}))
            made.append(Span(name, self.trace_id, own, root, start_ns, end_ns, wrong, facts, events[place], state))
        return [*made, *(one.span(facts, state) for one in self._outbound)]

    def _events(self) -> list[list[Happened]]:
        """The events by phase, in order."""
        happened = [
            (place, f"tool.invocation.{'started' if state == 'running' else state}", at, _NOTHING)
            for state, (place, at) in zip(self._states[1:], self._states.times, strict=True)
        ]
        if self._noted:
            happened = sorted([*happened, *self._noted], key=lambda event: event[2])
        events: list[list[Happened]] = [[] for _ in self._phases]
        for place, name, at, attributes in happened:
            events[place].append(Happened(name, self.ns(at), attributes))
        return events

    def now(self) -> float:
        """The time, on the clock of the call."""
        return self._phases.now()

    def ns(self, at: float) -> int:
        """Convert a time on the clock of the call to nanoseconds since 1970."""
        return self._started_ms * 1_000_000 + int((at - self._phases.times[0]) * 1e9)

    def _attributes(self, call: Call) -> Attributes:
        contract = None if call.tool is None else call.tool.contract
        facts: dict[str, str | int | float | bool] = {
            # The requested name is text from the caller; only an existing tool has a name that may be shown.
            "tool.id": "unknown" if contract is None else contract.address,
            "tool.version": "" if contract is None else contract.version,
            "tool.invocation_id": call.id,
            "tool.status": call.state,
            "tool.latency_ms": (self._ended - call.started) * 1000,
            "tool.cost": self.cost,
            "tool.source": self.source,
            "tool.door": call.request.door,
        }
        if contract is not None:
            facts["tool.mutation_class"] = contract.mutation.mutation_class
        if call.request.parent is not None:
            facts["tool.parent_invocation_id"] = call.request.parent
        if self._dropped:
            facts["external.dropped"] = self._dropped
        if self._failed is not None:
            facts["error.type"], facts["error.code"] = self._failed.kind, self._failed.code
        return facts


def _nobody() -> None:
    """Default listener for calls that have ended: does nothing."""


class Tracer:
    """Decides which calls are traced and passes on their spans. Keeps the latest ones for the callers who made them."""

    def __init__(self, clock: Clock, *, ratio: float, retained: int) -> None:
        self._clock = clock
        self._below = int(ratio * 2**64)
        # Calls that have begun and not ended, with their recording, or None if they are not traced.
        self._open: dict[str, Recording | None] = {}
        self._recordings: deque[tuple[_Owner, str, Recording]] = deque(maxlen=retained)
        self.sinks: list[Sink] = []

    @property
    def open(self) -> int:
        """The number of calls that have begun and not ended."""
        return len(self._open)

    def begin(self, call: Call) -> None:
        """Decide whether a call is traced, and begin its recording."""
        parent = call.request.parent
        given = call.more.span
        above = given if isinstance(given, Position) else None
        trace_id = trace_hex(call.trace_id)
        if parent is not None and parent in self._open:
            outer = self._open[parent]
            above, traced = (None, False) if outer is None else (outer.position, True)
        elif above is not None:
            traced = above.sampled
        else:
            traced = int(trace_id[16:], 16) < self._below
        recording = None
        if traced:
            first = int.from_bytes(self._clock.random_bytes(8), "big")
            recording = call.extend().span = Recording(call, trace_id, above, first, self._clock, self._open)
        self._open[call.own_id] = recording

    def end(self, call: Call) -> None:
        """End the recording of a call, whatever its outcome."""
        self._open.pop(call.own_id, None)
        recording = call.more.span
        if not isinstance(recording, Recording):
            return
        self._open.pop(recording.known_as, None)
        try:
            recording.end()
            caller = call.request.caller
            self._recordings.append((("", "") if caller is None else _owner(caller), call.trace_id, recording))
            for sink in self.sinks:
                sink(recording.spans())
        except Exception:  # noqa: BLE001 - telemetry is never the reason why a call fails
            _log.exception("a trace was lost", extra={"trace_id": call.trace_id, "invocation_id": call.id})

    def of(self, trace_id: str, caller: Caller, reaches: Callable[[str], bool] | None = None) -> list[Json]:
        """Return the latest spans of a trace that the caller may see, in the order they began.

        Auditors see those of their tenant, and local auditors see all. `reaches` filters calls by their id.
        """
        spans = [
            span
            for recording in self._seen_by(caller, trace_id)
            if reaches is None or reaches(recording.invocation_id)
            for span in recording.spans()
        ]
        return [span.document() for span in sorted(spans, key=lambda span: span.start_ns)]

    def calls_of(self, trace_id: str, caller: Caller) -> set[str]:
        """Return the ids of the calls of a trace that `of` shows without a filter."""
        return {recording.invocation_id for recording in self._seen_by(caller, trace_id)}

    def _seen_by(self, caller: Caller, trace_id: str) -> list[Recording]:
        everything, audits, own = caller.governs("audit:read"), "audit:read" in caller.scopes, _owner(caller)
        return [
            recording
            for owner, trace, recording in self._recordings
            if trace == trace_id and (everything or owner == own or (audits and owner[0] == own[0]))
        ]


def _owner(caller: Caller) -> _Owner:
    return caller.tenant, caller.id


def progress_facts(record: Mapping[str, Any]) -> dict[str, str | float]:
    """The facts of a progress record that go into a span; the record is already redacted."""
    facts: dict[str, str | float] = {"sequence": record["sequence"], "message": record["message"]}
    if record["percent"] is not None:
        facts["percent"] = record["percent"]
    return facts

"""Events, alerts and metrics of calls.

What is passed to this module is redacted already: it contains no private value of a call.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from interlock.call.events import Event, Listener
from interlock.call.phases import Call, Source
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.seldom import Seldom
from interlock.store.port import EndedCall
from interlock.telemetry.setup import Telemetry

if TYPE_CHECKING:
    from interlock.telemetry.trace import Recording

_log = logging.getLogger("interlock.gateway")
# After so many failures in a row, an alert says that a tool fails.
FAILING_AFTER = 30
# The same trouble of the store is alerted once in this time.
ALERT_EVERY_S = 60.0
# The most calls whose last events are stored until somebody listens, and whose ends are remembered.
MOST_UNHEARD = 1000
_STORE = frozenset(("E3801", "E3803"))


# many methods: one for each kind of event
class Observer:
    """Notifies listeners and raises alerts. Costs nothing while nobody listens."""

    def __init__(self, clock: Clock, telemetry: Telemetry) -> None:
        self._clock = clock
        self._alerts = telemetry.alerts
        self._count = telemetry.metrics.closed
        self._failures_in_a_row = telemetry.metrics.failures_in_a_row
        self._seldom = Seldom(ALERT_EVERY_S, clock.monotonic)
        self.listeners: list[Listener] = []
        # Listeners of one call each.
        self.followers: dict[str, list[Listener]] = {}
        # All of them. While there are none, a call need not ask for its own.
        self.audience: list[Listener] = []
        # Calls that ended before anybody listened: those whose process had died, found when the store was opened.
        self._unheard: deque[EndedCall] | None = deque(maxlen=MOST_UNHEARD)
        self._ends: dict[str, None] = {}
        self._numbers = itertools.count(1)
        self.metrics: Counter[str] = telemetry.metrics.signals

    def emit(self, kind: str, call: Call, **data: Any) -> None:
        """Emit one event of a call."""
        if not self.listeners and call.id not in self.followers:
            return
        try:
            event_id = f"{call.id}:{next(self._numbers)}"
            now_ms = self._clock.now_ms()
            self._send(Event(id=event_id, type=kind, invocation_id=call.id, tool=call.ref, at_ms=now_ms, data=data))
        except Exception:  # noqa: BLE001 - INVARIANT: what is told about a call never decides how it ends.
            _log.exception("the event %s of call %s could not be sent", kind, call.id)

    def mention(self, kind: str, invocation_id: str, tool: str, **data: Any) -> None:
        """Emit an event of a call that no task of this process runs."""
        event_id = f"{invocation_id or kind}:{next(self._numbers)}"
        now_ms = self._clock.now_ms()
        self._send(Event(id=event_id, type=kind, invocation_id=invocation_id, tool=tool, at_ms=now_ms, data=data))

    def has_listeners(self, call: Call) -> bool:
        """Whether anybody listens to the events of a call."""
        return bool(self.listeners) or call.id in self.followers

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Add a listener for all calls. Returns a function that removes it."""
        self.listeners.append(listener)
        self.audience.append(listener)
        unheard, self._unheard = self._unheard, None
        if unheard:
            self.ended(unheard)

        def stop() -> None:
            self.listeners.remove(listener)
            self.audience.remove(listener)

        return stop

    def follow(self, call_id: str, listener: Listener) -> Callable[[], None]:
        """Add a listener for one call. Returns a function that removes it."""
        theirs = self.followers.setdefault(call_id, [])
        theirs.append(listener)
        self.audience.append(listener)

        def stop() -> None:
            theirs.remove(listener)
            self.audience.remove(listener)
            if not theirs:
                self.followers.pop(call_id, None)

        return stop

    def _send(self, event: Event) -> None:
        for listener in (*self.listeners, *self.followers.get(event.invocation_id, ())):
            notify(listener, event)

    def alert(self, name: str, call: Call, **facts: Any) -> None:
        """Emit an alert for operators."""
        self.metrics[name] += 1
        severity = self._alerts.fire(name, tool=call.ref, invocation_id=call.id, trace_id=call.trace_id, facts=facts)
        if (recording := _recording(call)) is not None:
            recording.event("tool.alert", alert=name, severity=severity)
        self.emit("tool.alert", call, alert=name, **facts)

    def ended(self, calls: Iterable[EndedCall]) -> None:
        """Emit the last events of calls that no task of this process runs: their failure, and that there is a result.

        Until somebody listens to all calls, they are stored for the first who does.
        """
        for one in calls:
            if self._unheard is not None and one.call not in self.followers:
                self._unheard.append(one)
                continue
            if not self.is_first_end(one.call):
                continue
            event = "canceled" if one.state == "canceled" else "failed"
            self.mention(f"tool.invocation.{event}", one.call, one.tool, error_code=one.code)
            self.mention("tool.result.created", one.call, one.tool)

    def is_first_end(self, call_id: str) -> bool:
        """Whether the end of a call was not announced yet. The last ends are remembered.

        A ticket may end a call that its own task is about to end: both announce it, and one of them does.
        """
        if call_id in self._ends:
            return False
        self._ends[call_id] = None
        if len(self._ends) > MOST_UNHEARD:
            del self._ends[next(iter(self._ends))]
        return True

    def announce(self, kind: str, invocation_id: str, tool: str, **data: Any) -> None:
        """Emit an alert that concerns no call that this process runs."""
        name = str(data.get("alert", kind))
        self.metrics[name] += 1
        self._alerts.fire(name, tool=tool, invocation_id=invocation_id, facts=data)
        self.mention(kind, invocation_id, tool, **data)

    def breaker_changed(self, service: str, before: str, after: str) -> None:
        """Alert that the circuit breaker of a service opened or closed."""
        if after != "half_open":
            facts = {"alert": "SERVICE_BREAKER", "service": service, "from": before, "to": after}
            self.announce("tool.alert", "", "", **facts)

    def surface_changed(self, revision: int) -> None:
        """Announce that the set of tools that can be listed and called has changed."""
        self.surface_event("tool.surface.updated", "tools", revision=revision)

    def surface_event(self, kind: str, surface: str, tool: str = "", **data: Any) -> None:
        """Announce what has happened to a surface, or to a tool on it."""
        if self.listeners:
            now_ms, number = self._clock.now_ms(), next(self._numbers)
            event = Event(id=f"{kind}:{number}", type=kind, invocation_id="", tool=tool, at_ms=now_ms, data=data,
                          surface=surface)  # fmt: skip
            self._send(event)

    def closed(
        self, call: Call, metadata: Mapping[str, Any], source: Source = "compute", failure: Failure | None = None
    ) -> None:
        """Count a call that has ended and is on record. A fault here leaves its end as it is on record."""
        try:
            self._count(call, metadata, source, failure)
            if failure is not None:
                self._note_failure(call, failure)
            if call.started >= self._alerts.due:
                self._alerts.look()
            if call.more.span is not None and (recording := _recording(call)) is not None:
                recording.cost, recording.source = metadata.get("cost", 0.0), source
        except Exception:  # noqa: BLE001 - its end is on record already
            _log.exception("call %s could not be counted", call.id)

    def _note_failure(self, call: Call, failure: Failure) -> None:
        """Alert if a failure concerns more than one call: the store cannot be written, or a tool only fails."""
        if failure.code in _STORE:
            if self._seldom.due((failure.code, failure.message)) is not None:
                self.alert("STORE_UNWRITABLE", call, reason=f"{failure.message}; {failure.resolution}")
        elif call.tool is not None and call.launched and call.state != "canceled":
            failures = self._failures_in_a_row(call.tool)
            if failures == FAILING_AFTER:
                reason = f"it failed {failures} times in a row, the last time with {failure.code}"
                self.alert("TOOL_FAILING", call, reason=reason, failures=failures)


def _recording(call: Call) -> Recording | None:
    """The recording of a call that is traced. Without one, what traces calls is not loaded."""
    if call.more.span is None:
        return None
    from interlock.telemetry.trace import Recording

    return call.more.span if isinstance(call.more.span, Recording) else None


def notify(listener: Callable[[Any], None], what: Any) -> None:
    """Call one listener. An exception of the listener does not affect the call."""
    try:
        listener(what)
    except BaseException:  # noqa: BLE001 - a listener is other people's code; even its SystemExit is its own
        _log.exception("a listener failed")

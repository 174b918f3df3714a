"""What others can see of calls while they happen: events, progress, partial results, alerts and counts."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from typing import Any

from interlock.core.clock import Clock, iso
from interlock.core.events import Event, Listener
from interlock.core.phases import Call
from interlock.core.redact import Redactor
from interlock.core.schema import Json

_log = logging.getLogger("interlock.gateway")


class Observer:
    """Tells listeners what happens. Costs nothing while nobody listens."""

    def __init__(self, clock: Clock, redactor: Redactor) -> None:
        self._clock = clock
        self._redactor = redactor
        self.listeners: list[Listener] = []
        self._numbers = itertools.count(1)
        self.metrics: Counter[str] = Counter()

    def emit(self, kind: str, call: Call, **data: Any) -> None:
        """Tell of one event."""
        if not self.listeners:
            return
        event_id = f"{call.id}:{next(self._numbers)}"
        now_ms = self._clock.now_ms()
        event = Event(id=event_id, type=kind, invocation_id=call.id, tool=call.ref, at_ms=now_ms, data=data)
        for listener in self.listeners:
            listener(event)

    def alert(self, name: str, call: Call, **facts: Any) -> None:
        """Tell of something an operator should see."""
        self.metrics[name] += 1
        _log.warning("%s: %s in call %s", name, call.ref, call.id, extra={"trace_id": call.trace_id})
        self.emit("tool.alert", call, alert=name, **facts)

    def progress(self, call: Call, facts: Json) -> None:
        """Pass on a progress record: numbered without gaps, never above 100 percent, never after the end."""
        if call.ended or call.why is not None:
            return
        call.progress += 1
        percent = facts.get("percent")
        record: Json = {
            **facts,
            "schema_version": "0.2.0",
            "progress_id": f"{call.id}:{call.progress}",
            "invocation_id": call.id,
            "sequence": call.progress,
            "status": call.state,
            "message": self._redactor.text(str(facts.get("message", ""))),
            "percent": None if percent is None else max(0.0, min(100.0, float(percent))),
            "elapsed_ms": round((self._clock.monotonic() - call.started) * 1000, 3),
            "timestamp": iso(self._clock.now_ms()),
        }
        if call.request.on_progress is not None:
            call.request.on_progress(record)
        self.emit("tool.invocation.progress", call, **record)

    def partial(self, call: Call, value: Any) -> None:
        """Pass on a part of the result. Parts are ordered and never replace the final result."""
        if call.ended or call.why is not None:
            return
        call.move("partial_result")
        shown = self._redactor.value(value).value
        call.parts.append(shown)
        self.emit("tool.invocation.partial_result", call, index=len(call.parts), value=shown)

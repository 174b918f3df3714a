"""What others can see of calls while they happen: events, progress, partial results, alerts and counts."""

from __future__ import annotations

import itertools
import logging
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from interlock.core.clock import Clock, iso
from interlock.core.errors import Failure
from interlock.core.events import Event, Listener
from interlock.core.phases import Call
from interlock.core.redact import REDACTED, Redactor, SchemaRedactor, private_values, safe_log, safe_message
from interlock.core.schema import Json

_log = logging.getLogger("interlock.gateway")


class Observer:
    """Tells listeners what happens. Costs nothing while nobody listens."""

    def __init__(self, clock: Clock, redactor: Redactor) -> None:
        self._clock = clock
        self._redactor = redactor
        self.listeners: list[Listener] = []
        self._numbers = itertools.count(1)
        self._sinks: dict[str, SchemaRedactor] = {}
        self.metrics: Counter[str] = Counter()

    def emit(self, kind: str, call: Call, **data: Any) -> None:
        """Tell of one event."""
        if not self.listeners:
            return
        event_id = f"{call.id}:{next(self._numbers)}"
        now_ms = self._clock.now_ms()
        event = Event(id=event_id, type=kind, invocation_id=call.id, tool=call.ref, at_ms=now_ms, data=data)
        for listener in self.listeners:
            self._tell(listener, event)

    def _tell(self, listener: Callable[[Any], None], what: Any) -> None:
        """Tell one listener. What it does with it is its own affair and never the call's."""
        try:
            listener(what)
        except BaseException:  # noqa: BLE001 - a listener is other people's code; even its SystemExit is its own
            _log.exception("a listener failed")

    def alert(self, name: str, call: Call, **facts: Any) -> None:
        """Tell of something an operator should see."""
        self.metrics[name] += 1
        _log.warning("%s: %s in call %s", name, call.ref, call.id, extra={"trace_id": call.trace_id})
        self.emit("tool.alert", call, alert=name, **facts)

    def hide(self, call: Call, text: str) -> str:
        """A text of a call's making without credentials and personal data, above all those it was called with."""
        for value in self._private(call):
            text = text.replace(value, REDACTED)
        return safe_log(self._redactor, text)

    def _private(self, call: Call) -> list[str]:
        if call.tool is None:
            return []
        digest = call.tool.digest
        if digest not in self._sinks:
            self._sinks[digest] = self._redactor.for_schema(call.tool.contract.input.document)
        try:
            return private_values(self._sinks[digest], call.request.arguments)
        except (KeyError, IndexError, TypeError, ValueError):
            return []  # a key that was itself redacted cannot be followed; the patterns still hold

    def clean(self, call: Call, failure: Failure) -> Failure:
        """A failure of other people's making, fit to be shown: no path, no secret, no stack."""
        details = None if failure.details is None else self.shown(call, dict(failure.details))
        return Failure(
            failure.code,
            safe_message(self._redactor, self.hide(call, failure.message)),
            details=details,
            retryable=failure.retryable,
            retry_after_ms=failure.retry_after_ms,
            native_error_ref=failure.native_error_ref,
            policy_refs=failure.policy_refs,
            evidence_refs=failure.evidence_refs,
        )

    def shown(self, call: Call, value: Any) -> Any:
        """Data that no output schema describes, without anything private in it."""
        return self._hide_all(call, self._redactor.value(value).value)

    def _hide_all(self, call: Call, value: Any) -> Any:
        if isinstance(value, str):
            return safe_message(self._redactor, self.hide(call, value))
        if isinstance(value, dict):
            return {name: self._hide_all(call, item) for name, item in cast("Json", value).items()}
        if isinstance(value, list | tuple):
            return [self._hide_all(call, item) for item in cast("list[Any]", value)]
        return value

    def log_failure(self, call: Call, what: str, error: BaseException) -> None:
        """Put an unforeseen failure into the log, in full but for what is private."""
        trace = "".join(traceback.format_exception(error))
        _log.error("%s in call %s\n%s", what, call.id, self.hide(call, trace), extra={"trace_id": call.trace_id})

    def progress(self, call: Call, facts: Json) -> None:
        """Pass on a progress record: numbered without gaps, never above 100 percent, never after the end."""
        if call.ended or call.why is not None:
            return
        call.progress += 1
        percent = facts.get("percent")
        shown = cast("Json", self.shown(call, facts))
        record: Json = {
            **shown,
            "schema_version": "0.2.0",
            "progress_id": f"{call.id}:{call.progress}",
            "invocation_id": call.id,
            "sequence": call.progress,
            "status": call.state,
            "message": str(shown.get("message", "")),
            "percent": None if percent is None else max(0.0, min(100.0, float(percent))),
            "elapsed_ms": round((self._clock.monotonic() - call.started) * 1000, 3),
            "timestamp": iso(self._clock.now_ms()),
        }
        if call.request.on_progress is not None:
            self._tell(call.request.on_progress, record)
        self.emit("tool.invocation.progress", call, **record)

    def partial(self, call: Call, value: Any) -> None:
        """Pass on a part of the result. Parts are ordered and never replace the final result."""
        if call.ended or call.why is not None:
            return
        call.move("partial_result")
        call.parts.append(value)
        self.emit("tool.invocation.partial_result", call, index=len(call.parts), value=value)

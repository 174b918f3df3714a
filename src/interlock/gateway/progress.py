"""Progress records and partial results of running calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from interlock.call.phases import Call, ResultPart
from interlock.core.clock import Clock, iso
from interlock.gateway.observe import Observer, notify
from interlock.telemetry.trace import Recording, progress_facts

if TYPE_CHECKING:
    from interlock.contract.standard.states import State
    from interlock.data.schema import Json
    from interlock.gateway.redaction import CallRedaction

_COUNTS = ("total_steps", "bytes_read", "bytes_written", "line_count")


class ProgressReporter:
    """Passes on what tools report while they run. Costs nothing while nobody listens."""

    def __init__(self, clock: Clock, observer: Observer, redaction: CallRedaction) -> None:
        self._clock = clock
        self._observer = observer
        self._redaction = redaction

    def report(self, call: Call, facts: Json) -> None:
        """Pass on a progress record: numbered without gaps, never above 100 percent, never after the end."""
        if call.ended or call.more.why is not None:
            return
        call.extend().progress += 1
        if (
            call.request.on_progress is None
            and not self._observer.has_listeners(call)
            and not isinstance(call.more.span, Recording)
        ):
            return  # nobody listens
        shown = self._redaction.redact_data(call, facts)
        record = _progress_record(call, cast("Json", shown) if isinstance(shown, dict) else {}, facts.get("percent"))
        record["elapsed_ms"] = round((self._clock.monotonic() - call.started) * 1000, 3)
        record["timestamp"] = iso(self._clock.now_ms())
        if isinstance(call.more.span, Recording):
            call.more.span.event("tool.invocation.progress", **progress_facts(record))
        if call.request.on_progress is not None:
            notify(call.request.on_progress, record)
        self._observer.emit("tool.invocation.progress", call, **record)

    def partial(self, call: Call, value: Any, *, yielded: bool = False) -> None:
        """Pass on a part of the result. Parts are ordered and never replace the final result."""
        if call.ended or call.more.why is not None:
            return
        if call.state == "yielded":
            call.move("running")
        state: State = "yielded" if yielded else "partial_result"
        call.move(state)
        call.extend().parts.append(ResultPart(value, yielded))
        index = len(call.more.parts)
        self._observer.emit(f"tool.invocation.{state}", call, index=index, ref=_part_ref(call, index), value=value)


def _progress_record(call: Call, facts: Json, percent: Any) -> Json:
    """Return a progress record with every field of `tool_progress`. Values of the wrong type become null or empty.

    `partial_result_refs` names the latest part; parts are numbered from 1, so it also tells how many there are.
    """
    parts = len(call.more.parts)
    step = facts.get("current_step")
    return {
        **facts,
        "schema_version": "0.2.0",
        "progress_id": f"{call.id}:{call.more.progress}",
        "invocation_id": call.id,
        "sequence": call.more.progress,
        "status": call.state,
        "message": str(facts.get("message", "")),
        "percent": None if percent is None else max(0.0, min(100.0, float(percent))),
        "current_step": step if isinstance(step, str) else _count(step),
        **{name: _count(facts.get(name)) for name in _COUNTS},
        "partial_result_refs": [_part_ref(call, parts)] if parts else [],
        "artifact_refs": _texts(facts.get("artifact_refs")),
    }


def _part_ref(call: Call, index: int) -> str:
    """Return the name of a part of a result, in its event and in progress records."""
    return f"{call.id}:part:{index}"


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _texts(value: Any) -> list[str]:
    found = cast("list[Any]", value) if isinstance(value, list | tuple) else []
    return [one for one in found if isinstance(one, str)]

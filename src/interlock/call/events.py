"""Events about tools and calls, sent to listeners while they happen.

`CLASSES` lists every class of events, `KINDS` every type of event with its class and the schema of its data. `SCHEMA`
is the schema of any event's document.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, get_args

from interlock.core.clock import iso
from interlock.core.record import NamedTuple, dataclass

if TYPE_CHECKING:
    from interlock.data.schema import Json

EventGroup = Literal[
    "declaration", "surface", "invocation", "hook", "permission", "scheduling", "progress", "result", "persistence",
    "error", "telemetry",
]  # fmt: skip
CLASSES: Final[tuple[EventGroup, ...]] = get_args(EventGroup)


class Kind(NamedTuple):
    """A type of event: the class it belongs to, what it links to, and the members that its data always has."""

    group: EventGroup
    of: Literal["call", "tool", "surface", "any"]
    data: tuple[str, ...] = ()


KINDS: Final[dict[str, Kind]] = {
    "tool.declared": Kind("declaration", "tool", ("digest", "by")),
    "tool.surface.created": Kind("surface", "surface", ("revision",)),
    "tool.surface.updated": Kind("surface", "surface", ("revision",)),
    "tool.deferred.discovered": Kind("surface", "tool"),
    "tool.deferred.loaded": Kind("surface", "tool"),
    "DEPRECATION_MIGRATION_PROGRESS": Kind("declaration", "tool"),
    "DEPRECATION_MIGRATION_COMPLETE": Kind("declaration", "tool"),
    "DEPRECATION_REMOVAL_BLOCKED": Kind("declaration", "tool"),
    "TOOL_VERSION_REMOVED": Kind("declaration", "tool"),
    "tool.invocation.planned": Kind("invocation", "call"),
    "tool.invocation.selected": Kind("invocation", "call"),
    "tool.invocation.arguments_ready": Kind("invocation", "call"),
    "tool.invocation.started": Kind("invocation", "call"),
    "tool.invocation.partial_result": Kind("invocation", "call", ("index", "ref")),
    "tool.invocation.yielded": Kind("invocation", "call", ("index", "ref")),
    "tool.invocation.succeeded": Kind("invocation", "call"),
    "tool.invocation.cancel_requested": Kind("invocation", "call", ("answer",)),
    "tool.hook.pre.started": Kind("hook", "call", ("hook",)),
    "tool.hook.pre.completed": Kind("hook", "call", ("hook", "outputs")),
    "tool.hook.post.started": Kind("hook", "call", ("hook",)),
    "tool.hook.post.completed": Kind("hook", "call", ("hook", "outputs")),
    "tool.permission.requested": Kind("permission", "call", ("ticketId",)),
    "tool.permission.decided": Kind("permission", "call", ("behavior", "reason")),
    "approval.approved": Kind("permission", "call", ("ticketId", "status")),
    "approval.denied": Kind("permission", "call", ("ticketId", "status")),
    "APPROVAL_ESCALATED": Kind("permission", "call", ("ticketId", "status")),
    "APPROVAL_AUTO_DENIED": Kind("permission", "call", ("ticketId", "status")),
    "APPROVAL_LAPSED": Kind("permission", "call", ("ticketId", "status")),
    "tool.invocation.queued": Kind("scheduling", "call"),
    "tool.invocation.progress": Kind("progress", "call", ("progress_id", "timestamp")),
    "tool.result.created": Kind("result", "call"),
    "tool.result.redacted": Kind("result", "call", ("paths",)),
    "tool.result.persisted": Kind("persistence", "call", ("decision",)),
    "tool.invocation.validation_failed": Kind("error", "call", ("error_code",)),
    "tool.invocation.failed": Kind("error", "call", ("error_code",)),
    "tool.invocation.canceled": Kind("error", "call", ("error_code",)),
    "tool.invocation.timed_out": Kind("error", "call", ("error_code",)),
    "tool.alert": Kind("telemetry", "any", ("alert",)),
    "INVALID_TOOL_SCHEMA": Kind("telemetry", "any"),
    "RETRY_BUDGET_EXHAUSTED": Kind("telemetry", "call", ("attempts",)),
}


def data_schema(kind: str) -> Json:
    """The JSON Schema of an event's document, by its type. For an unlisted type it is the general form."""
    known = KINDS.get(kind)
    links = {"call": ["invocation_id"], "tool": ["tool_id"], "surface": ["surface_id"]}
    text = {"type": "string", "minLength": 1}
    required = [] if known is None else links.get(known.of, [])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "schema_version": {"const": "0.2.0"},
            "event_id": text,
            "event_class": text if known is None else {"const": kind},
            "group": {"enum": list(CLASSES)} if known is None else {"const": known.group},
            "occurred_at": {"type": "string", "format": "date-time"},
            **dict.fromkeys(required, text),
            "data": {"type": "object", "required": [] if known is None else list(known.data)},
        },
        "required": ["schema_version", "event_id", "event_class", "occurred_at", "data", *required],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event: its type (`tool.invocation.started`), the call, tool or surface it is about, and the facts."""

    id: str
    type: str
    invocation_id: str
    tool: str
    at_ms: int
    data: Json
    surface: str = ""

    def document(self) -> Json:
        document: Json = {
            "schema_version": "0.2.0",
            "event_id": self.id,
            "event_class": self.type,
            "occurred_at": iso(self.at_ms),
            "invocation_id": self.invocation_id,
            "tool_id": self.tool,
            "data": self.data,
        }
        return {**document, "surface_id": self.surface} if self.surface else document


Listener = Callable[[Event], None]

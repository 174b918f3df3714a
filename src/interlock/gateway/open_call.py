"""Start a call: its id, its trace and its start time."""

from __future__ import annotations

from dataclasses import replace

from interlock.call.phases import Call, Request
from interlock.core.clock import Clock, new_id, new_ids
from interlock.core.expressions import expression
from interlock.telemetry import w3c

_TRACE = expression(r"[0-9A-Za-z_.:-]{1,128}\Z")


def open_call(request: Request, clock: Clock) -> Call:
    """Make the call of a request. Its trace is the one that the request names, or a new one."""
    now_ms = clock.now_ms()
    call_id, new_trace = new_ids(now_ms, clock.random_bytes(24))
    trace_id, above = (new_trace, None) if request.trace_id is None else trace_of(request.trace_id, new_trace)
    call = Call(request.id or call_id, trace_id, now_ms, clock.monotonic(), request)
    if above is not None:
        call.extend().span = above
    if request.hidden:
        call.extend().hidden = request.hidden
    return call


def trace_of(stated: str, otherwise: str) -> tuple[str, w3c.Position | None]:
    """Return the trace that a request names, and the caller's position in it. `otherwise` if it cannot be used."""
    if w3c.claims(stated):
        above = w3c.read(stated)
        return (otherwise, None) if above is None else (above.trace_id, above)
    return (stated if _TRACE.match(stated) else otherwise), None


def with_id(request: Request, clock: Clock) -> Request:
    """Return the request with the id that its call will have, so that the call can be stopped by it."""
    return replace(request, id=new_id(clock.now_ms(), clock.random_bytes(8)))

"""Spans of the requests that a sandboxed tool makes through the egress proxy.

A span contains the host and port, the method, the status, the bytes in both directions and the time, but neither path
nor query nor headers. Host and method come from the tool, so a host is included only if it was readable and after
redaction, and a method only if it is registered.
"""

from __future__ import annotations

from collections.abc import Callable

from interlock.executors.egress.policy import EgressRefusal, Seen
from interlock.telemetry.trace import Outbound, Recording

_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})
_OTHER = "_OTHER"


class RequestSpans:
    """The spans of one call's requests. `hide` removes the call's private values from a text."""

    def __init__(self, recording: Recording, deadline: float, hide: Callable[[str], str]) -> None:
        self._recording = recording
        self._deadline = deadline
        self._hide = hide
        # By the identity of the request, which the proxy keeps for as long as this object lives.
        self._open: dict[int, Outbound] = {}

    def begin(self, seen: Seen) -> None:
        """Begin the span of a request that is about to leave."""
        span = self._started(seen.method, seen.host, seen.port)
        if span is not None:
            self._open[id(seen)] = span

    def end(self, seen: Seen) -> None:
        """End the span of a request."""
        span = self._open.pop(id(seen), None)
        if span is None:
            return
        span.note({"http.request.size": seen.bytes_out, "http.response.size": seen.bytes_in})
        if seen.status is not None:
            span.note({"http.response.status_code": seen.status})
        span.end(seen.error)

    def refuse(self, refusal: EgressRefusal) -> None:
        """Record a refused request. One that had left before has a span already."""
        if refusal.begun:
            return
        span = self._started(refusal.method, refusal.host, refusal.port)
        if span is not None:
            span.note({"error.code": refusal.code})
            span.end("RESOURCE_EXHAUSTED" if refusal.code == "E3407" else "AUTHORIZATION_DENIED")

    def _started(self, method: str, host: str, port: int | None) -> Outbound | None:
        attributes: dict[str, str | int] = {"http.request.method": method if method in _METHODS else _OTHER}
        if port is not None:
            attributes |= {"server.address": self._hide(host), "server.port": port}
        return self._recording.outbound("External", self._deadline, attributes)

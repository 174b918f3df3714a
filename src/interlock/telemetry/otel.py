"""Converts spans to OpenTelemetry and sends them to a collector.

The SDK's own tracer is not used: it would open six context managers in every call, at some 40 µs each. Its data types,
its batching and its exporters are. The SDK is slow to import, so it is imported only here, inside functions.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from interlock._version import __version__
from interlock.core.record import NamedTuple
from interlock.telemetry.trace import Sink, Span

if TYPE_CHECKING:
    import requests
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

# How long a collector that does not answer may delay the end of the process.
_PATIENCE_S = 3.0
# The number of bytes of a collector's answer that are read.
_ANSWER = 65_536


def sink(processor: SpanProcessor, *, service: str = "interlock") -> Sink:
    """Make a sink that hands every span to a processor of the SDK."""
    convert = _converter(service)

    def take(spans: Sequence[Span]) -> None:
        for span in spans:
            processor.on_end(convert(span))

    return take


class Sending(NamedTuple):
    """A sink that sends in the background, its fill level (at one it begins to lose spans), and how to stop it.

    `fails`: whether the last spans could not be sent.
    """

    sink: Sink
    lag: Callable[[], float]
    fails: Callable[[], bool]
    stop: Callable[[], None]


def to_collector(endpoint: str) -> Sending:
    """Send spans to an OTLP/HTTP collector. Stopping sends the last ones."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

    address = endpoint if "/v1/" in endpoint else f"{endpoint.rstrip('/')}/v1/traces"
    exporter = OTLPSpanExporter(endpoint=address, timeout=_PATIENCE_S, session=_session())
    exporting, failed = exporter.export, False

    def export(spans: Sequence[ReadableSpan]) -> SpanExportResult:
        nonlocal failed
        result = exporting(spans)
        failed = result is not SpanExportResult.SUCCESS
        return result

    exporter.export = export
    processor = BatchSpanProcessor(exporter)
    # The SDK reveals the length of its queue only to its own meters.
    queue: deque[Any] = cast("Any", processor)._batch_processor._queue

    def lag() -> float:
        return len(queue) / (queue.maxlen or 1)

    def stop() -> None:
        # The processor would otherwise try every batch for as long as a request may take.
        enough = threading.Timer(_PATIENCE_S, exporter.shutdown)
        enough.start()
        try:
            processor.shutdown()
        finally:
            enough.cancel()

    return Sending(sink(processor), lag, lambda: failed, stop)


def _session() -> requests.Session:
    """Make a session that follows no redirect, uses no proxy of the environment and reads only the start of an answer.

    The SDK sends in a thread of its own. An endless answer would otherwise occupy that thread and fill memory.
    """
    import requests

    class Bounded(requests.Session):
        def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
            response = super().send(request, **{**kwargs, "stream": True, "allow_redirects": False})
            until, body = time.monotonic() + _PATIENCE_S, b""
            try:
                for piece in response.iter_content(_ANSWER):
                    body += piece
                    if len(body) > _ANSWER or time.monotonic() > until:
                        break
            finally:
                response.close()
            response._content = body[:_ANSWER]  # pyright: ignore[reportPrivateUsage] - there is no public way
            return response

    session = Bounded()
    session.trust_env = False
    return session


def _converter(service: str) -> Callable[[Span], ReadableSpan]:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

    resource = Resource.create({"service.name": service, "service.version": __version__})
    scope = InstrumentationScope("interlock", __version__)
    sampled = TraceFlags(TraceFlags.SAMPLED)
    fine = Status(StatusCode.UNSET)
    kinds = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}

    def context(span: Span, span_id: str, *, remote: bool) -> Any:
        state = TraceState.from_header([span.state]) if span.state else None
        return SpanContext(int(span.trace_id, 16), int(span_id, 16), remote, sampled, state)

    def convert(span: Span) -> ReadableSpan:
        parent = span.parent_id
        return ReadableSpan(
            span.name,
            context=context(span, span.span_id, remote=False),
            parent=None if parent is None else context(span, parent, remote=span.kind == "server"),
            resource=resource,
            attributes=span.attributes,
            events=[Event(event.name, event.attributes, event.at_ns) for event in span.events],
            kind=kinds[span.kind],
            status=fine if span.status is None else Status(StatusCode.ERROR, span.status),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=scope,
        )

    return convert

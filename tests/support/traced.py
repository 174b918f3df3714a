"""An Interlock whose calls are traced into memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from interlock import Interlock
from interlock.telemetry import otel
from interlock.telemetry.trace import Tracer
from tests.sample import TOOLS
from tests.support import traced_tools as tools


@dataclass
class Tree:
    """A span and what hangs under it, in the order they began."""

    span: ReadableSpan
    children: list[Tree] = field(default_factory=list["Tree"])

    @property
    def shape(self) -> Any:
        """Names and statuses: `Validate`, `Validate!INVALID_INPUT`, or a pair with the children."""
        wrong = self.span.status.description
        name = f"{self.span.name}!{wrong}" if wrong else self.span.name
        return (name, [child.shape for child in self.children]) if self.children else name

    def __getitem__(self, name: str) -> Tree:
        return next(child for child in self.children if child.span.name == name)

    @property
    def events(self) -> list[str]:
        return [event.name for event in self.span.events]

    @property
    def attributes(self) -> dict[str, Any]:
        return dict(self.span.attributes or {})


@dataclass
class Traced:
    """An Interlock and the spans that came out of it."""

    app: Interlock
    exporter: InMemorySpanExporter

    @property
    def tracer(self) -> Tracer:
        tracer = self.app.gateway.telemetry.tracer
        assert tracer is not None
        return tracer

    def take(self) -> list[ReadableSpan]:
        """The spans so far, which are then forgotten."""
        spans = list(self.exporter.get_finished_spans())
        self.exporter.clear()
        return spans

    def trees(self) -> list[Tree]:
        return grown(self.take())


def grown(spans: list[ReadableSpan]) -> list[Tree]:
    """Spans as trees. Those whose parent is not among them are roots."""
    found = {span.context.span_id: Tree(span) for span in spans if span.context is not None}
    assert len(found) == len(spans), "two spans with one id"
    roots: list[Tree] = []
    for tree in sorted(found.values(), key=lambda tree: tree.span.start_time or 0):
        parent = None if tree.span.parent is None else found.get(tree.span.parent.span_id)
        (roots if parent is None else parent.children).append(tree)
    return roots


@asynccontextmanager
async def traced(home: Path, **settings: Any) -> AsyncGenerator[Traced]:
    exporter = InMemorySpanExporter()
    async with Interlock.open(home, **cast("dict[str, Any]", {"trace_ratio": 1.0, **settings})) as app:
        attach(app)
        opened = Traced(app, exporter)
        opened.tracer.sinks.append(otel.sink(SimpleSpanProcessor(exporter)))
        yield opened


def attach(app: Interlock) -> None:
    for one in (*TOOLS, *tools.TOOLS):
        app.catalog.attach(one)

"""Telemetry as one object that a gateway is given and that is closed with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from interlock.telemetry.alerts import Alerts, Memory
from interlock.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from interlock.call.context import Caller
    from interlock.core.clock import Clock
    from interlock.data.schema import Json
    from interlock.telemetry.trace import Tracer


class Telemetry:
    """Metrics and alerts, which are always on, and a tracer if calls are traced.

    `ratio` is the share of traces that are recorded; None means all if there is a collector to send them to, otherwise
    none. `retained` is the number of calls whose spans stay readable here.
    """

    def __init__(self, clock: Clock, *, ratio: float | None = None, collector: str = "", retained: int = 1000) -> None:
        self.metrics = Metrics(clock.monotonic)
        self.alerts = Alerts(clock.monotonic)
        self.alerts.watch("memory", Memory())
        self.metrics.limits = self.alerts.levels
        self.tracer: Tracer | None = None
        self._stop: Callable[[], None] | None = None
        # Whether the last spans could not be sent to the collector; None where none are sent.
        self.export_fails: Callable[[], bool] | None = None
        share = (1.0 if collector else 0.0) if ratio is None else ratio
        if share > 0:
            from interlock.telemetry.trace import Tracer

            self.tracer = Tracer(clock, ratio=share, retained=retained)
            if collector:
                from interlock.telemetry import otel

                sending = otel.to_collector(collector)
                self._stop, self.export_fails = sending.stop, sending.fails
                self.tracer.sinks.append(sending.sink)
                self.alerts.watch("trace export", sending.lag)

    def trace(self, trace_id: str, caller: Caller, reaches: Callable[[str], bool] | None = None) -> list[Json]:
        """Return the latest spans of a trace that the caller may see; none if nothing is traced.

        `reaches` filters calls by their id.
        """
        return [] if self.tracer is None else self.tracer.of(trace_id, caller, reaches)

    def traced_calls(self, trace_id: str, caller: Caller) -> set[str]:
        """Return the ids of the calls of a trace that the caller may see."""
        return set() if self.tracer is None else self.tracer.calls_of(trace_id, caller)

    async def close(self) -> None:
        """Send the spans that are still waiting."""
        if self._stop is not None:
            stop, self._stop = self._stop, None
            await asyncio.to_thread(stop)

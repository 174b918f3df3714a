"""Metrics of calls in the Prometheus text format.

The table `METRICS` lists them. Each call that ends is counted in plain integers, one set per tool version, which costs
less than a microsecond; everything else is computed when the metrics are read. Shares (of timeouts, of replays, of
inputs and outputs that do not fit) cover about the last quarter of an hour: at each reading the numbers are saved and
compared with those of a quarter of an hour before.

INVARIANT: no label contains data that a caller sent. Labels are names of admitted tools, of groups that an operator
defined, and words from tables of this program.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from interlock.core.record import NamedTuple

if TYPE_CHECKING:
    from interlock.call.phases import Call
    from interlock.call.prepared import Prepared
    from interlock.core.errors import Failure

WINDOW_S = 900.0
# Readings at shorter intervals than this save no further numbers.
_KEEP_EVERY_S = 15.0

LATENCY_MS = (
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10_000.0, 30_000.0,
    60_000.0, 300_000.0,
)  # fmt: skip
RESOLUTION_MS = (
    1000.0, 5000.0, 15_000.0, 60_000.0, 300_000.0, 900_000.0, 3_600_000.0, 14_400_000.0, 86_400_000.0, 604_800_000.0,
)  # fmt: skip

MetricType = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """One row of the table."""

    name: str
    type: MetricType
    labels: tuple[str, ...]
    help: str


METRICS = (
    Metric(
        "tool.invocation.count", "counter", ("toolId", "version", "status", "mutationClass"), "calls that have ended"
    ),
    Metric(
        "tool.invocation.latency_ms", "histogram", ("toolId", "version", "timeoutClass"), "how long calls took, in ms"
    ),
    Metric("tool.invocation.cost", "counter", ("toolId", "version", "costCategory"), "what calls have cost, by part"),
    Metric("tool.invocation.retries", "counter", ("toolId", "version"), "calls that were sent again"),
    Metric(
        "tool.invocation.timeout_rate", "gauge", ("toolId", "version", "timeoutClass"), "share that ran out of time"
    ),
    Metric("tool.idempotency.replay_rate", "gauge", ("toolId",), "share of calls with a key that had been made before"),
    Metric("tool.approval.pending_count", "gauge", ("toolId", "approverGroup"), "calls that wait for a person"),
    Metric(
        "tool.approval.resolution_time_ms", "histogram", ("toolId", "resolution"), "how long people took to decide"
    ),
    Metric("tool.schema.validation_failure_rate", "gauge", ("toolId", "phase"), "share of data that did not fit"),
    Metric("interlock.signal.count", "counter", ("signal",), "alerts and announcements"),
    Metric("interlock.limit.used", "gauge", ("limit",), "share of a limit that is used"),
)  # fmt: skip


class Approvals(NamedTuple):
    """Figures of the store on tickets: how many wait for each group, and how long each decision took."""

    pending: Mapping[tuple[str, str], int]
    resolved: Sequence[tuple[str, str, float]]


async def _no_approvals() -> Approvals:
    return Approvals({}, ())


class _Histogram:
    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class _Sums(NamedTuple):
    """The numbers from which shares are computed."""

    calls: int = 0
    timeouts: int = 0
    keyed: int = 0
    replays: int = 0
    bad_inputs: int = 0
    outputs: int = 0
    bad_outputs: int = 0

    def plus(self, other: _Sums) -> _Sums:
        return _Sums(*map(sum, zip(self, other, strict=True)))

    def minus(self, other: _Sums) -> _Sums:
        return _Sums(*(mine - its for mine, its in zip(self, other, strict=True)))


class _Series:
    """The numbers of one tool version."""

    __slots__ = (
        "bad_outputs", "cost", "failures", "keyed", "latency", "mutation_class", "outputs", "replays", "retries",
        "states", "succeeded", "timeout_class", "tool", "version",
    )  # fmt: skip

    def __init__(self, tool: Prepared | None) -> None:
        contract = None if tool is None else tool.contract
        self.tool = "unknown" if contract is None else contract.address
        self.version = "" if contract is None else contract.version
        self.mutation_class = "" if contract is None else contract.mutation.mutation_class
        self.timeout_class = "" if contract is None else contract.timeout.timeout_class
        self.states: defaultdict[str, int] = defaultdict(int)
        self.latency = _Histogram(LATENCY_MS)
        self.cost: dict[str, float] = {}
        self.retries = self.keyed = self.replays = self.outputs = self.bad_outputs = 0
        # Failures in a row, and the number of successes before them.
        self.failures = self.succeeded = 0

    def sums(self) -> _Sums:
        states = self.states
        bad = states.get("validation_failed", 0) + states.get("schema_parse_failed", 0)
        return _Sums(
            sum(states.values()), states.get("timed_out", 0), self.keyed, self.replays, bad, self.outputs,
            self.bad_outputs,
        )  # fmt: skip


class Metrics:
    """The metrics of one gateway."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._series: dict[str, _Series] = {}
        self._readings: deque[tuple[float, dict[str, _Sums]]] = deque([(monotonic(), {})])
        # Sources of the numbers that this module does not count: tickets, signals, limits.
        self.approvals: Callable[[], Awaitable[Approvals]] = _no_approvals
        self.signals: Counter[str] = Counter()
        self.limits: Callable[[], Mapping[str, float]] = dict

    # Counting

    def closed(self, call: Call, metadata: Mapping[str, Any], source: str, failure: Failure | None) -> None:
        """Count a call that has ended. Not split into functions, because every call passes here."""
        tool = call.tool
        series = self._series.get("" if tool is None else tool.ref) or self._of(tool)
        series.states[call.state] += 1
        latency_ms = metadata["latency_ms"]
        latency = series.latency
        latency.counts[bisect_left(LATENCY_MS, latency_ms)] += 1
        latency.sum += latency_ms
        if call.request.key is not None:
            series.keyed += 1
            series.replays += source == "replay"
        if source == "compute" and (failure is None or "verify" in call.phases):
            series.outputs += 1
            series.bad_outputs += failure is not None and failure.code == "E3303"
        if "cost_parts" in metadata:
            self._charge(series, metadata["cost_parts"])

    def failures_in_a_row(self, tool: Prepared) -> int:
        """Count a call whose tool ran and failed, and return the number of failures since the last success.

        A success costs nothing here: it shows in the number of successes.
        """
        series = self._of(tool)
        succeeded = series.states["succeeded"]
        series.failures = series.failures + 1 if succeeded == series.succeeded else 1
        series.succeeded = succeeded
        return series.failures

    def read(self, tool: Prepared, latency_ms: float) -> None:
        """Count a successful read."""
        series = self._series.get(tool.ref) or self._of(tool)
        series.states["succeeded"] += 1
        series.outputs += 1
        latency = series.latency
        latency.counts[bisect_left(LATENCY_MS, latency_ms)] += 1
        latency.sum += latency_ms

    def _charge(self, series: _Series, parts: Mapping[str, float]) -> None:
        for part, amount in parts.items():
            if part != "total":
                series.cost[part] = series.cost.get(part, 0.0) + amount

    def retried(self, tool: Prepared) -> None:
        """Count a call that is sent again."""
        self._of(tool).retries += 1

    def _of(self, tool: Prepared | None) -> _Series:
        name = "" if tool is None else tool.ref
        series = self._series.get(name)
        if series is None:
            series = self._series[name] = _Series(tool)
        return series

    # Output

    async def render(self) -> bytes:
        """Render all metrics in the text format of Prometheus."""
        samples = self._samples(await self.approvals())
        lines: list[str] = []
        for metric in METRICS:
            name = metric.name.replace(".", "_")
            lines += (f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.type}")
            for values, value in samples[metric.name]:
                labels = ",".join(
                    f'{label}="{_escaped(one)}"' for label, one in zip(metric.labels, values, strict=True)
                )
                if isinstance(value, _Histogram):
                    lines += _buckets(name, labels, value)
                else:
                    lines.append(f"{name}{{{labels}}} {value}")
        lines.append("")
        return "\n".join(lines).encode()

    def _samples(self, approvals: Approvals) -> Mapping[str, list[tuple[tuple[str, ...], float | _Histogram]]]:
        made: dict[str, list[tuple[tuple[str, ...], float | _Histogram]]] = {metric.name: [] for metric in METRICS}
        shares = self._shares()
        by_tool: dict[str, _Sums] = {}
        for name, series in self._series.items():
            tool, version, recent = series.tool, series.version, shares[name]
            by_tool[tool] = by_tool.get(tool, _Sums()).plus(recent)
            made["tool.invocation.count"] += [
                ((tool, version, state, series.mutation_class), count) for state, count in series.states.items()
            ]
            made["tool.invocation.latency_ms"].append(((tool, version, series.timeout_class), series.latency))
            made["tool.invocation.cost"] += [((tool, version, part), amount) for part, amount in series.cost.items()]
            made["tool.invocation.retries"].append(((tool, version), series.retries))
            rate = _share(recent.timeouts, recent.calls)
            made["tool.invocation.timeout_rate"].append(((tool, version, series.timeout_class), rate))
        for tool, recent in by_tool.items():
            made["tool.idempotency.replay_rate"].append(((tool,), _share(recent.replays, recent.keyed)))
            made["tool.schema.validation_failure_rate"] += [
                ((tool, "input"), _share(recent.bad_inputs, recent.calls)),
                ((tool, "output"), _share(recent.bad_outputs, recent.outputs)),
            ]
        made["tool.approval.pending_count"] += list(approvals.pending.items())
        made["tool.approval.resolution_time_ms"] += _resolutions(approvals.resolved)
        made["interlock.signal.count"] += [((name,), count) for name, count in self.signals.items()]
        made["interlock.limit.used"] += [((name,), used) for name, used in self.limits().items()]
        return made

    def _shares(self) -> dict[str, _Sums]:
        """The numbers added in the last quarter of an hour, or since the start."""
        now, samples = self._monotonic(), self._readings
        while len(samples) > 1 and samples[1][0] <= now - WINDOW_S:
            samples.popleft()
        before = samples[0][1]
        sums = {name: series.sums() for name, series in self._series.items()}
        if now - samples[-1][0] >= _KEEP_EVERY_S:
            samples.append((now, sums))
        return {name: one.minus(before.get(name, _Sums())) for name, one in sums.items()}


def _resolutions(resolved: Iterable[tuple[str, str, float]]) -> list[tuple[tuple[str, ...], float | _Histogram]]:
    merged: dict[tuple[str, ...], _Histogram] = {}
    for tool, resolution, took_ms in resolved:
        merged.setdefault((tool, resolution), _Histogram(RESOLUTION_MS)).observe(took_ms)
    return list(merged.items())


def _share(some: int, every: int) -> float:
    return some / every if every else 0.0


def _buckets(name: str, labels: str, histogram: _Histogram) -> list[str]:
    lines: list[str] = []
    total = 0
    for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
        total += count
        lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {total}')
    return [*lines, f"{name}_sum{{{labels}}} {histogram.sum}", f"{name}_count{{{labels}}} {total}"]


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

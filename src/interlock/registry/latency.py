"""The timeout class that follows from measured latency.

The journal has the latency of every call. For a version that was called often enough lately, the 99th percentile gives
its class by the table of `class_for_latency`. If a manifest states no class, the measured one is the version's class. A
stated class stays, and `interlock doctor` reports where it is too short for what was measured. Deadlines are always
those of the contract: a promise to callers does not change by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from interlock.contract.timeouts import TimeoutClass, class_for_latency, stated_policy
from interlock.core.record import record
from interlock.store import ledger
from interlock.store.port import Reader

Json = dict[str, Any]

# The number of latest closing records that are read, and the number of calls of a version that make a measurement.
MOST_RECORDS = 20_000
ENOUGH = 100
_ORDER: tuple[TimeoutClass, ...] = ("interactive", "standard", "long_running", "async")


@record
class Measured:
    """The latency of the calls of one version that ran."""

    calls: int
    p99_s: float


def measure(reader: Reader) -> dict[str, Measured]:
    """Measure the latency of every version that was called often enough lately, by its ref."""
    return measured(ledger.newest_closed(reader, MOST_RECORDS))


def measured(bodies: Iterable[bytes]) -> dict[str, Measured]:
    """The same from closing records. Calls that did not run, and replayed answers, are not counted."""
    took: dict[str, list[float]] = {}
    for body in bodies:
        known: Json = orjson.loads(body)
        ran = "running" in known.get("states", ()) and known.get("source") in ("compute", "synthetic")
        if ran and isinstance(latency := known.get("latencyMs"), int | float):
            took.setdefault(f"{known['toolId']}@{known['version']}", []).append(latency / 1000)
    return {
        ref: Measured(calls=len(each), p99_s=sorted(each)[math.ceil(0.99 * len(each)) - 1])
        for ref, each in took.items()
        if len(each) >= ENOUGH
    }


def fitting(manifest: Json, measured_: Measured) -> TimeoutClass:
    """Return the class that a measurement requires of the tool of a manifest."""
    restartable = manifest.get("restart_safe", False) or manifest.get("mutation_class") == "read_only"
    checkpoints: Json = manifest.get("checkpoint_config", {})
    return class_for_latency(
        measured_.p99_s,
        external_io=manifest.get("external_io", True),
        checkpointable=restartable or checkpoints.get("enabled", False),
    )


def differs(manifest: Json, measured_: Measured) -> TimeoutClass | None:
    """Return the class that a measurement requires if a manifest states one that is too short."""
    stated, wanted = manifest.get("timeout_class"), fitting(manifest, measured_)
    return None if stated is None or _ORDER.index(wanted) <= _ORDER.index(stated) else wanted


class Latencies:
    """The latest measurements, as one process knows them."""

    def __init__(self) -> None:
        self.measured: Mapping[str, Measured] = {}

    def describe(self, ref: str, manifest: Json) -> Json:
        """Return the class of a version, whether it was stated, measured or inferred from its timeout, and the
        measurement. `manifest` is the document that the version was admitted with.
        """
        policy, measured = stated_policy(manifest), self.measured.get(ref)
        document: Json = {"default_s": policy.default_s, "max_s": policy.max_s}
        if measured is not None:
            document |= {"measured_calls": measured.calls, "measured_p99_ms": round(measured.p99_s * 1000, 3)}
            document["measured_class"] = fitting(manifest, measured)
        if manifest.get("timeout_class") is not None:
            return {**document, "class": policy.timeout_class, "class_source": "stated"}
        if measured is not None:
            return {**document, "class": document["measured_class"], "class_source": "measured"}
        return {**document, "class": policy.timeout_class, "class_source": "inferred"}

"""The timeout class that measured latency calls for.

The journal has the latency of every call. Of a version that was called often enough lately, the 99th percentile gives
its class by the table of `class_for_latency`. Where a manifest states no class, the measured one is the version's
class. A stated class stays, and `interlock doctor` tells where it is too short for what was measured. Deadlines are
those of the contract in any case: a promise to callers does not change by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import orjson

from interlock.contract.contract import Contract, class_for_latency, infer_class
from interlock.contract.manifest import Manifest, TimeoutClass
from interlock.core.record import record
from interlock.data.schema import Json
from interlock.store import ledger
from interlock.store.port import Reader

# How many of the latest closing records are looked at, and how many calls of a version make a measurement.
MOST_RECORDS = 20_000
ENOUGH = 100
_ORDER: tuple[TimeoutClass, ...] = ("interactive", "standard", "long_running", "async")


@record
class Measured:
    """How long the calls of one version took that ran."""

    calls: int
    p99_s: float


def measure(reader: Reader) -> dict[str, Measured]:
    """The latency of every version that was called often enough lately, by its ref."""
    return measured(ledger.newest_closed(reader, MOST_RECORDS))


def measured(bodies: Iterable[bytes]) -> dict[str, Measured]:
    """The same from closing records. Calls that did not run, and answers that were kept, say nothing of a tool."""
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


def fitting(manifest: Manifest, found: Measured) -> TimeoutClass:
    """The class that a measurement calls for."""
    restartable = manifest.restart_safe or manifest.mutation_class == "read_only"
    return class_for_latency(
        found.p99_s,
        external_io=manifest.external_io,
        checkpointable=restartable or manifest.checkpoint_config.enabled,
    )


def differs(manifest: Manifest, found: Measured) -> TimeoutClass | None:
    """The class that a measurement calls for where a manifest states one that is too short for it."""
    stated, wanted = manifest.timeout_class, fitting(manifest, found)
    return None if stated is None or _ORDER.index(wanted) <= _ORDER.index(stated) else wanted


class Latencies:
    """What was measured last, as one process knows it."""

    def __init__(self) -> None:
        self.found: Mapping[str, Measured] = {}

    def told(self, contract: Contract) -> Json:
        """The class of a version, whether it was stated, measured or inferred from its timeout, and the measurement."""
        manifest, found = contract.manifest, self.found.get(contract.ref)
        told: Json = {"default_s": contract.timeout.default_s, "max_s": contract.timeout.max_s}
        if found is not None:
            told |= {"measured_calls": found.calls, "measured_p99_ms": round(found.p99_s * 1000, 3)}
            told["measured_class"] = fitting(manifest, found)
        if manifest.timeout_class is not None:
            return {**told, "class": manifest.timeout_class, "class_source": "stated"}
        if found is not None:
            return {**told, "class": told["measured_class"], "class_source": "measured"}
        return {**told, "class": infer_class(contract.timeout.default_s), "class_source": "inferred"}

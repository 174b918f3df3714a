"""The timeout class that follows from measured latency.

The journal has the latency of every call. For a version that was called often enough lately, the 99th percentile gives
its class by the table of `class_for_latency`. If a manifest states no class, the measured one is the version's class. A
stated class stays, and `interlock doctor` reports where it is too short for what was measured. Deadlines are always
those of the contract: a promise to callers does not change by itself.
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


def fitting(manifest: Manifest, measured_: Measured) -> TimeoutClass:
    """Return the class that a measurement requires."""
    restartable = manifest.restart_safe or manifest.mutation_class == "read_only"
    return class_for_latency(
        measured_.p99_s,
        external_io=manifest.external_io,
        checkpointable=restartable or manifest.checkpoint_config.enabled,
    )


def differs(manifest: Manifest, measured_: Measured) -> TimeoutClass | None:
    """Return the class that a measurement requires if a manifest states one that is too short."""
    stated, wanted = manifest.timeout_class, fitting(manifest, measured_)
    return None if stated is None or _ORDER.index(wanted) <= _ORDER.index(stated) else wanted


class Latencies:
    """The latest measurements, as one process knows them."""

    def __init__(self) -> None:
        self.measured: Mapping[str, Measured] = {}

    def describe(self, contract: Contract) -> Json:
        """Return the class of a version, whether it was stated, measured or inferred from its timeout, and the
        measurement.
        """
        manifest, measured = contract.manifest, self.measured.get(contract.ref)
        document: Json = {"default_s": contract.timeout.default_s, "max_s": contract.timeout.max_s}
        if measured is not None:
            document |= {"measured_calls": measured.calls, "measured_p99_ms": round(measured.p99_s * 1000, 3)}
            document["measured_class"] = fitting(manifest, measured)
        if manifest.timeout_class is not None:
            return {**document, "class": manifest.timeout_class, "class_source": "stated"}
        if measured is not None:
            return {**document, "class": document["measured_class"], "class_source": "measured"}
        return {**document, "class": infer_class(contract.timeout.default_s), "class_source": "inferred"}

"""The timeout class that measured latency calls for: what is measured, where it counts, and where it is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from interlock import Effect, Interlock, Preview, tool
from interlock.api import parts
from interlock.api.doctor import examine
from interlock.contract.contract import Contract
from interlock.contract.declare import Tool
from interlock.contract.manifest import parse_manifest
from interlock.contract.manifest_tools import from_manifest
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from interlock.registry.latency import ENOUGH
from interlock.store.homes import home_at
from interlock.testing import FakeClock
from tests.support.calls import admit
from tests.support.wires import wired

Json = dict[str, Any]
clock = FakeClock()
took_s = 0.0


def _pass() -> str:
    clock.advance(took_s)
    return "done"


@tool(version="1.0.0", mutation_class="read_only", namespace="pace", timeout_class="standard")
async def states() -> str:
    """State a class."""
    return _pass()


async def passes() -> str:
    """Let time pass."""
    return _pass()


def _unstated(name: str, *, external_io: bool) -> Tool[..., Any]:
    """A tool of a manifest that states neither a class nor a timeout."""
    document = states.manifest.document()
    for name_of in ("timeout_class", "timeout_default", "timeout_max"):
        document.pop(name_of, None)
    document |= {"tool_id": name, "name": name, "external_io": external_io}
    return from_manifest(parse_manifest(document), passes, {})


def timeout_of(app: Interlock, contract: Contract) -> Json:
    return app.latencies.describe(contract.ref, contract.document())


computes = _unstated("computes", external_io=False)
fetches = _unstated("fetches", external_io=True)


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="pace", effects=[Effect("x:y", "UPDATE")],
    timeout_class="async",
)  # fmt: skip
async def writes() -> str:
    """Change something that cannot be begun anew."""
    return _pass()


@writes.preview
def _() -> Preview:
    return Preview(impact="x")


@writes.compensate
async def _(result: str) -> None:
    return None


async def call(app: Interlock, one: Tool[..., Any], seconds: float, times: int = ENOUGH) -> None:
    """Call a tool so often that each call takes so long."""
    global took_s
    took_s = seconds
    name = f"{one.manifest.address}"
    for number in range(times):
        key = f"{seconds}-{number}" if one.manifest.mutation_class != "read_only" else None
        assert (await app.call(name, key=key)).ok


@pytest.mark.proves("LIFE-11")
@pytest.mark.parametrize(
    ("which", "seconds", "expected"),
    [
        (computes, 0.1, "interactive"), (computes, 0.499, "interactive"), (computes, 0.501, "standard"),
        (fetches, 0.1, "standard"), (fetches, 4.9, "standard"), (fetches, 5.1, "long_running"),
    ],
)  # fmt: skip
async def test_a_tool_that_states_no_class_has_the_one_its_latency_calls_for(
    home: Path, which: Tool[..., Any], seconds: float, expected: str
) -> None:
    async with Interlock.open(home, clock=clock.clock, housekeeping=False) as app:
        await admit(app, which)
        contract = (await app.catalog.resolve(which.manifest.address)).contract
        assert timeout_of(app, contract)["class_source"] == "inferred"
        await call(app, which, seconds, ENOUGH - 1)
        await app.measure()
        assert timeout_of(app, contract)["class_source"] == "inferred", "that is not enough to go by"
        await call(app, which, seconds, 1)
        await app.measure()
        told = timeout_of(app, contract)
        assert (told["class"], told["class_source"], told["measured_calls"]) == (expected, "measured", ENOUGH)
        assert told["measured_p99_ms"] == pytest.approx(seconds * 1000, abs=0.01)
        # The deadline is a promise of the contract, and stays.
        assert told["default_s"] == contract.timeout.default_s == 30
        async with wired(app) as wires:
            assert (await wires.http.get(f"/v1/tools/{which.manifest.address}")).json()["timeout"] == told
            described = await wires.rpc("tools.describe", {"tool_id": which.manifest.address})
            assert described["result"]["timeout"] == told
            asked = wire.DescribeRequest(tool_id=which.manifest.address)
            found = await wires.stub.Describe(asked, metadata=wires.metadata())
            assert wire.TimeoutClass.Name(found.timeout_class) == f"TIMEOUT_CLASS_{expected.upper()}"


@pytest.mark.proves("LIFE-11")
async def test_one_slow_call_in_a_hundred_does_not_make_a_class_and_two_do(home: Path) -> None:
    async with Interlock.open(home, clock=clock.clock, housekeeping=False) as app:
        await admit(app, fetches)
        contract = (await app.catalog.resolve("pace.fetches")).contract
        for slow, expected in ((1, "standard"), (1, "long_running")):
            await call(app, fetches, 0.1, 98 if expected == "standard" else 0)
            await call(app, fetches, 20.0, slow)
            await call(app, fetches, 0.1, 1 if expected == "standard" else 0)
            await app.measure()
            assert timeout_of(app, contract)["class"] == expected


@pytest.mark.proves("LIFE-11")
async def test_a_stated_class_that_is_too_short_for_what_was_measured_is_told_by_doctor(home: Path) -> None:
    async with Interlock.open(home, clock=clock.clock, housekeeping=False) as app:
        await admit(app, states, writes, fetches)
        await call(app, states, 4.9)
        await call(app, writes, 6.0)
        await call(app, fetches, 0.2)
        assert _findings(home) == []
        await app.measure()
        contract = (await app.catalog.resolve("pace.writes")).contract
        told = timeout_of(app, contract)
        assert (told["class"], told["class_source"], told["measured_class"]) == ("async", "stated", "async")
        await call(app, states, 5.1, 2)
    (found,) = _findings(home)
    assert found == "pace.states@1.0.0 states standard; of 102 calls 99 % took at most 5,100 ms"


def _findings(home: Path) -> list[str]:
    found = examine(home_at(home), machine=False)
    return [finding.what for finding in found if finding.name == "latency"]


@pytest.mark.proves("LIFE-11")
async def test_a_running_process_measures_by_itself(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MEASURE_EVERY_S", 0.01)
    async with Interlock.open(home, clock=clock.clock, housekeeping=True) as app:
        await admit(app, fetches)
        contract = (await app.catalog.resolve("pace.fetches")).contract
        await call(app, fetches, 5.1)
        async with asyncio.timeout(60):
            while timeout_of(app, contract)["class_source"] != "measured":  # noqa: ASYNC110 - no event to wait for
                await asyncio.sleep(0.01)
        assert timeout_of(app, contract)["class"] == "long_running"

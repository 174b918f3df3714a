"""Trace context crosses in both directions; what cannot be read starts a new trace and is never a failure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock import Interlock
from interlock.call.connector import Discovered, RemoteCall
from interlock.contract.manifest import parse_manifest
from interlock.contract.manifest_tools import without_function
from interlock.data.schema import Json
from interlock.telemetry import w3c
from interlock.telemetry.w3c import Position
from tests import sample
from tests.support.traced import attach, traced

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"

hexes = st.text("0123456789abcdef", min_size=32, max_size=32).filter(lambda text: text.strip("0"))


@given(hexes, hexes.map(lambda text: text[:16]).filter(lambda text: text.strip("0")), st.booleans())
def test_what_is_written_is_read(trace: str, span: str, sampled: bool) -> None:
    position = Position(trace, span, sampled)
    assert w3c.read(position.traceparent) == position


@pytest.mark.parametrize(
    "text",
    [
        "", "-", "00", "00-", GOOD[:-1], GOOD + "0", GOOD + "-", GOOD + "-more", GOOD.upper(), "ff" + GOOD[2:],
        f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE[1:]}-{SPAN}-01", f"00-{TRACE}g-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0g", " " + GOOD, GOOD + "\n", "00-\ud800", "0" * 100_000,
        f"01-{TRACE}-{SPAN}-01-" + "x" * 300,
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_nothing(text: str) -> None:
    assert w3c.read(text) is None
    assert w3c.joined(text, "a=b") is None


def test_later_versions_are_read_as_far_as_we_know_them() -> None:
    assert w3c.read(f"cc-{TRACE}-{SPAN}-03-what-comes-later") == Position(TRACE, SPAN, True)


@given(st.text(max_size=200))
def test_no_text_is_too_strange(text: str) -> None:
    w3c.read(text)
    w3c.joined(text, text)
    joined = w3c.joined(GOOD, text)
    assert joined is not None
    position = w3c.read(joined)
    assert position is not None
    assert position.traceparent == GOOD


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("rojo=00f067aa0ba902b7,congo=t61rcWkgMzE", "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"),
        (" a=1 ,\tb=2,, ", "a=1,b=2"),
        ("tenant@system=a b", "tenant@system=a b"),
        ("a=1,a=2", ""),
        ("no-value", ""),
        ("UPPER=1", ""),
        ("a=\x00", ""),
        ("a=" + "x" * 600, ""),
        (",".join(f"k{n}=v" for n in range(33)), ""),
    ],
)
def test_state_is_passed_on_as_it_is_or_not_at_all(given: str, kept: str) -> None:
    joined = w3c.joined(GOOD, given)
    assert joined is not None
    position = w3c.read(joined)
    assert position is not None
    assert position.state == kept


def test_an_id_of_another_form_becomes_one_of_this_form_and_always_the_same() -> None:
    assert w3c.trace_hex(TRACE) == TRACE
    assert w3c.trace_hex("order-17") == w3c.trace_hex("order-17") != w3c.trace_hex("order-18")
    assert w3c.read(f"00-{w3c.trace_hex('order-17')}-{SPAN}-00") is not None
    assert w3c.trace_hex("0" * 32) != "0" * 32


@pytest.mark.proves("OBS-02")
@pytest.mark.parametrize("settings", [{}, {"trace_ratio": 1.0}])
async def test_a_traceparent_gives_the_call_its_trace_and_a_bad_one_a_new_trace(
    home: Path, settings: dict[str, Any]
) -> None:
    async with Interlock.open(home, **settings) as app:
        attach(app)
        sent = await app.call("demo.add", a=1, trace_id=f"{GOOD} vendor=value")
        assert sent.trace_id == TRACE
        assert app.journal.reader.all("SELECT body FROM journal WHERE call = ?", (sent.invocation_id,))[0][0].count(
            TRACE.encode()
        )
        refused = await app.call("demo.add", a="x", trace_id=GOOD)
        assert refused.error is not None
        assert refused.error.envelope(refused.trace_id)["traceId"] == TRACE
        for bad in (GOOD.upper(), f"00-{TRACE}-{'0' * 16}-01", GOOD + "-x", f"zz {GOOD}", "x" * 100_000, GOOD + "é"):
            result = await app.call("demo.add", a=1, trace_id=bad)
            assert result.ok
            assert w3c.trace_hex(result.trace_id) == result.trace_id != TRACE
        own = await app.call("demo.add", a=1, trace_id="order-17")
        assert own.trace_id == "order-17"


class Echo:
    """An upstream that keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[RemoteCall] = []

    async def call(self, call: RemoteCall) -> Any:
        self.asked.append(call)
        return call.arguments["text"]

    def mapping(self, native: Json, reported: Json) -> Json | None:
        return None

    async def discover(self, credentials: Mapping[str, str] | None = None) -> Discovered:
        return Discovered(())

    async def probe(self, credentials: Mapping[str, str] | None = None) -> None: ...

    def forget(self) -> None: ...

    async def close(self) -> None: ...


MANIFEST = parse_manifest(
    {
        **sample.shout.manifest.document(),
        "namespace": "far",
        "external_service": "faraway",
        "execution": {"kind": "upstream", "target": "faraway", "native": {"name": "shout"}},
    }
)


@pytest.mark.proves("OBS-01", "OBS-02")
async def test_an_upstream_hears_of_the_trace_and_hangs_under_the_external_call(home: Path) -> None:
    echo = Echo()
    async with traced(home) as one:
        one.app.connect_through(lambda name: echo)
        await one.app.add(without_function(MANIFEST))
        one.take()
        assert (await one.app.call("far.shout", text="a", trace_id=f"{GOOD} vendor=value")).unwrap() == "a"
        (tree,) = one.trees()
    (external,) = tree["Execute"].children
    assert external.span.name == "External"
    assert external.attributes["upstream"] == "faraway"
    assert external.span.context is not None
    assert external.span.context.trace_state.to_header() == "vendor=value"
    told = w3c.read(echo.asked[-1].traceparent)
    assert told is not None
    assert told.trace_id == TRACE
    assert int(told.span_id, 16) == external.span.context.span_id

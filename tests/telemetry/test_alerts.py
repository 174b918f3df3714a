"""Signals are named, have a severity, and all go one way; what is nearly used up is told before it is."""

from __future__ import annotations

import ast
import asyncio
import itertools
import os
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock import Caller, Interlock, tool
from interlock.api.service import Service
from interlock.core.errors import Failure
from interlock.doors.server import Listening, serving
from interlock.http import connection
from interlock.registry.retirement import deprecate
from interlock.telemetry import alerts as alerts_module
from interlock.telemetry.alerts import FULL, SIGNALS, Alert, Alerts, Memory
from interlock.testing import FakeClock
from tests import sample
from tests.support import source
from tests.support.traced import traced
from tests.support.upstream_servers import HttpServer

# The clause, as it is written.
NAMED = (
    "TOOL_OUTPUT_SCHEMA_VIOLATION", "TOOL_OUTPUT_CORRUPTION", "MUTATION_CLASS_VIOLATION", "WRITE_TOOL_NO_MUTATION",
    "RETRY_BUDGET_EXHAUSTED", "INVALID_TOOL_SCHEMA", "saga_compensation_failure",
)  # fmt: skip
REST = "saga_compensation_failure, which nothing fires yet"


def fired() -> set[str]:
    """The names that modules fire: the first argument of `alert`, and `alert=` of `announce` and `emit`."""
    found: set[str] = set()
    for _, node in source.nodes_with("alert"):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        said = [word.value for word in node.keywords if word.arg == "alert"]
        if node.func.attr == "alert":
            said += node.args[:1]
        found |= {one.value for one in said if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return found


def test_every_name_that_is_fired_is_in_the_table() -> None:
    names = fired()
    assert "ROLLBACK_FAILED" in names
    assert names <= SIGNALS.keys()


@pytest.mark.part_of("OBS-09", rest=REST)
@pytest.mark.parametrize("name", sorted({*NAMED, *SIGNALS}))
def test_every_signal_goes_to_the_log_and_to_whoever_listens_with_its_severity(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    alerts = Alerts(lambda: 0.0)
    heard: list[Alert] = []
    alerts.listeners.append(heard.append)
    caplog.set_level("INFO")
    severity = alerts.fire(name, tool="demo.add@1.0.0", invocation_id="I1", trace_id="T1", facts={"a": 1})
    (alert,) = heard
    assert severity == alert.severity == SIGNALS[name]
    assert (alert.name, alert.tool, alert.invocation_id, alert.trace_id) == (name, "demo.add@1.0.0", "I1", "T1")
    (line,) = caplog.records
    assert line.getMessage() == f"{name}: demo.add@1.0.0 in call I1"
    assert line.levelname == {"info": "INFO", "warning": "WARNING", "critical": "ERROR"}[severity]
    assert (vars(line)["trace_id"], vars(line)["invocation_id"]) == ("T1", "I1")


def test_a_listener_that_fails_keeps_nobody_from_hearing(caplog: pytest.LogCaptureFixture) -> None:
    def broken(alert: Alert) -> None:
        raise SystemExit(alert.name)

    alerts = Alerts(lambda: 0.0)
    heard: list[Alert] = []
    alerts.listeners += [broken, heard.append]
    alerts.fire("POLICY_ALERT", facts={})
    assert len(heard) == 1
    assert "a listener failed" in caplog.text


async def test_what_calls_and_people_do_reaches_the_sink(app: Interlock) -> None:
    heard: list[Alert] = []
    app.gateway.telemetry.alerts.listeners.append(heard.append)
    wrong = await app.call("seen.liar", text="b")
    quiet = await app.call("demo.echo", value=1)
    assert quiet.ok
    assert [(one.name, one.invocation_id, one.trace_id) for one in heard] == [
        ("TOOL_OUTPUT_SCHEMA_VIOLATION", wrong.invocation_id, wrong.trace_id)
    ]
    heard.clear()
    pending = await app.call("demo.send", to="a", key="k")
    await app.approvals.deny(
        pending.metadata["pending"]["ticketId"], by=Caller(id="boss", groups=frozenset({"approvers"}))
    )
    assert [(one.name, one.severity) for one in heard] == [("approval.denied", "info")]
    assert app.gateway.observer.metrics["approval.denied"] == 1


class Maps:
    """A service that is there, or is not."""

    there = True


@tool(version="1.0.0", mutation_class="read_only", namespace="far", external_service="maps")
def route(text: sample.Text) -> str:
    """Ask a service that others run for the way."""
    if not Maps.there:
        raise Failure("E3502", "nobody answers")
    return text


async def test_a_breaker_that_opens_reads_otherwise_than_one_that_closes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    time = FakeClock()
    caplog.set_level("INFO", "interlock.alerts")
    async with Interlock.open(tmp_path, clock=time.clock, housekeeping=False) as app:
        await app.add(route)
        for there, calls in ((False, 5), (True, 3)):
            Maps.there = there
            for _ in range(calls):
                assert (await app.call("far.route", text="b")).ok is there
            time.advance(61)
    assert [line.getMessage() for line in caplog.records if line.name == "interlock.alerts"] == [
        "SERVICE_BREAKER: service maps: was closed, is open",
        "SERVICE_BREAKER: service maps: was half_open, is closed",
    ]


# Limits


@pytest.mark.part_of("OBS-09", rest=REST)
def test_a_pool_that_is_four_fifths_used_is_told_of_once() -> None:
    now = [0.0]
    alerts = Alerts(lambda: now[0])
    heard: list[Alert] = []
    alerts.listeners.append(heard.append)
    pool: deque[int] = deque()
    alerts.watch("connection pool", lambda: len(pool) / 10)

    def look(used: int) -> int:
        pool.clear()
        pool.extend(range(used))
        now[0] = alerts.due
        alerts.look()
        return len(heard)

    assert [look(used) for used in (0, 7, 8, 9, 10, 7, 8, 6, 8)] == [0, 0, 1, 1, 1, 1, 1, 1, 2]
    assert {alert.name for alert in heard} == {"LIMIT_NEAR"}
    assert heard[0].facts == {"limit": "connection pool", "used": 0.8}
    assert heard[0].severity == "critical"
    assert alerts.levels() == {"connection pool": 0.8}


@given(st.lists(st.floats(0, 1), max_size=50))
def test_between_two_alerts_of_a_limit_it_had_eased(levels: list[float]) -> None:
    alerts = Alerts(lambda: 0.0)
    level = [0.0]
    alerts.watch("queue", lambda: level[0])
    told: list[int] = []
    heard: list[Alert] = []
    alerts.listeners.append(heard.append)
    for place, used in enumerate(levels):
        level[0] = used
        alerts.look()
        told += [place] * (len(heard) - len(told))
    assert all(levels[place] >= FULL for place in told)
    assert all(min(levels[one:other]) < 0.7 for one, other in itertools.pairwise(told))
    if any(used >= FULL for used in levels):
        assert told[0] == next(place for place, used in enumerate(levels) if used >= FULL)


def test_a_limit_that_cannot_be_read_is_left_out() -> None:
    alerts = Alerts(lambda: 0.0)
    alerts.watch("memory", lambda: None)
    alerts.watch("pool", lambda: 1 / 0)
    alerts.watch("queue", lambda: 0.5)
    alerts.look()
    assert alerts.levels() == {"queue": 0.5}


def test_memory_is_a_share_of_what_this_process_may_have() -> None:
    used = Memory()()
    assert used is None or 0 < used < 1


@pytest.mark.supports("IDEM-10")
@pytest.mark.part_of("OBS-09", rest=REST)
async def test_whatever_goes_wrong_in_a_place_is_told_by_its_name_with_its_severity(app: Interlock, home: Path) -> None:
    heard: list[Alert] = []
    app.gateway.telemetry.alerts.listeners.append(heard.append)

    def told() -> list[tuple[str, str]]:
        found = [(alert.name, alert.severity) for alert in heard]
        heard.clear()
        return found

    for call, expected in (
        (("seen.liar", {"text": "b"}), ("TOOL_OUTPUT_SCHEMA_VIOLATION", "warning")),
        (("seen.garble", {"text": "b"}), ("TOOL_OUTPUT_CORRUPTION", "critical")),
        (("seen.sneak", {"text": "b"}), ("MUTATION_CLASS_VIOLATION", "critical")),
        (("seen.idle", {"name": "b"}), ("WRITE_TOOL_NO_MUTATION", "info")),
    ):
        result = await app.call(*call, key="k")
        assert {(one.invocation_id, one.trace_id) for one in heard} == {(result.invocation_id, result.trace_id)}
        assert expected in told()

    sample.flaky.failures = [Failure("E3502", retry_after_ms=1)] * 9
    assert not (await app.call_with_retries("demo.unsteady", {"name": "b"}, key="r")).ok
    assert told() == [("RETRY_BUDGET_EXHAUSTED", "warning")]

    spoilt = {"name": "spoilt", "path": "/", "description": "Cannot be read.", "input_schema": {"type": "nonsense"}}
    config: dict[str, object] = {"urls": ["http://127.0.0.1:9"], "tools": [spoilt], "allow_private": True}
    await app.upstreams.add("far", "http", config, by=app.caller)
    assert told() == [("INVALID_TOOL_SCHEMA", "warning")]

    boss = Caller(id="boss", groups=frozenset({"approvers"}))
    for number, decide in enumerate((app.approvals.approve, app.approvals.deny)):
        pending = await app.call("demo.send", to="a", key=f"p{number}")
        await decide(pending.metadata["pending"]["ticketId"], by=boss)
    assert told() == [("approval.approved", "info"), ("approval.denied", "info")]


@pytest.mark.supports("REG-09")
@pytest.mark.part_of("OBS-09", rest=REST)
async def test_a_version_that_comes_to_its_end_is_told_of(home: Path) -> None:
    time = FakeClock()
    heard: list[Alert] = []
    async with Interlock.open(home, clock=time.clock, housekeeping=False) as app:
        app.gateway.telemetry.alerts.listeners.append(heard.append)
        await app.journal.commit(deprecate("seen.slow", "1.0.0", by="ann", migration_guide="https://a.example/b"))
        time.advance(8 * 86_400)
        await app.maintain()
        time.advance(90 * 86_400)
        await app.maintain()
    names = [alert.name for alert in heard if alert.name.startswith(("DEPRECATION", "TOOL_VERSION"))]
    assert names[0] == "DEPRECATION_MIGRATION_COMPLETE"
    assert names[-1] == "TOOL_VERSION_REMOVED"


@pytest.mark.part_of("OBS-09", rest=REST)
async def test_what_this_place_itself_can_run_out_of_is_told_before_it_does(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts_module, "_memory_limit", lambda: int(_resident() / 0.85))
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 5)
    for name, size in (("MAX_QUEUE_SIZE", 40), ("MAX_EXPORT_BATCH_SIZE", 40), ("SCHEDULE_DELAY", 600_000)):
        monkeypatch.setenv(f"OTEL_BSP_{name}", str(size))
    async with HttpServer.open() as collector, traced(home, otlp_endpoint=collector.url) as seen:
        app, heard = seen.app, list[Alert]()
        app.gateway.telemetry.alerts.listeners.append(heard.append)
        async with serving(Service(app), Listening(port=0)) as server:
            streams = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(4)]
            for reader, writer in streams:
                writer.write(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
                assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            while app.gateway.telemetry.alerts.levels()["trace export"] < FULL:
                assert (await app.call("demo.add", a=1)).ok
            app.gateway.telemetry.alerts.look()
            for _, writer in streams:
                writer.close()
    near = {alert.facts["limit"]: alert.facts["used"] for alert in heard if alert.name == "LIMIT_NEAR"}
    assert near.keys() == {"memory", "connections", "trace export"}
    assert min(near.values()) >= FULL


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_limits_are_looked_at_as_calls_go_by(app: Interlock) -> None:
    alerts = app.gateway.telemetry.alerts
    heard: list[Alert] = []
    alerts.listeners.append(heard.append)
    alerts.watch("pool", lambda: 0.9)
    alerts.due = 0.0
    assert (await app.call("demo.add", a=1)).ok
    assert [one.facts["limit"] for one in heard] == ["pool"]

"""Signals are named, have a severity, and all go one way; what is nearly used up is told before it is."""

from __future__ import annotations

import ast
import itertools
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock import Caller, Interlock
from interlock.telemetry.alerts import FULL, SIGNALS, Alert, Alerts, Memory

SOURCE = Path(__file__).parents[2] / "src" / "interlock"
# The clause, as it is written.
NAMED = (
    "TOOL_OUTPUT_SCHEMA_VIOLATION", "TOOL_OUTPUT_CORRUPTION", "MUTATION_CLASS_VIOLATION", "WRITE_TOOL_NO_MUTATION",
    "RETRY_BUDGET_EXHAUSTED", "INVALID_TOOL_SCHEMA", "saga_compensation_failure",
)  # fmt: skip
REST = "a saga, output corruption and the journal's queue, which are told of where they are built"


def fired(path: Path) -> set[str]:
    """The names that a module fires: the first argument of `alert`, and `alert=` of `announce` and `emit`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        said = [word.value for word in node.keywords if word.arg == "alert"]
        if node.func.attr == "alert":
            said += node.args[:1]
        found |= {one.value for one in said if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return found


def test_every_name_that_is_fired_is_in_the_table() -> None:
    names = {name for path in SOURCE.rglob("*.py") for name in fired(path)}
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


async def test_what_calls_and_people_do_reaches_the_sink(lock: Interlock) -> None:
    heard: list[Alert] = []
    lock.gateway.telemetry.alerts.listeners.append(heard.append)
    wrong = await lock.call("seen.liar", text="b")
    quiet = await lock.call("demo.echo", value=1)
    assert quiet.ok
    assert [(one.name, one.invocation_id, one.trace_id) for one in heard] == [
        ("TOOL_OUTPUT_SCHEMA_VIOLATION", wrong.invocation_id, wrong.trace_id)
    ]
    heard.clear()
    pending = await lock.call("demo.send", to="a", key="k")
    await lock.approvals.deny(
        pending.metadata["pending"]["ticketId"], by=Caller(id="boss", groups=frozenset({"approvers"}))
    )
    assert [(one.name, one.severity) for one in heard] == [("approval.denied", "info")]
    assert lock.gateway.observer.metrics["approval.denied"] == 1


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


async def test_limits_are_looked_at_as_calls_go_by(lock: Interlock) -> None:
    alerts = lock.gateway.telemetry.alerts
    heard: list[Alert] = []
    alerts.listeners.append(heard.append)
    alerts.watch("pool", lambda: 0.9)
    alerts.due = 0.0
    assert (await lock.call("demo.add", a=1)).ok
    assert [one.facts["limit"] for one in heard] == ["pool"]

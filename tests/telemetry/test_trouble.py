"""Trouble that concerns more than one call is alerted: a full disk, an exposed key, a tool that only fails."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from interlock import Failure, Interlock, tool
from interlock.api import background
from interlock.api.home_health import COUNTED_BYTES, Condition
from interlock.store.homes import home_at
from interlock.telemetry.alerts import Alert, Alerts
from interlock.testing import FakeClock
from tests import sample

GIB = 2**30


def _disk(monkeypatch: pytest.MonkeyPatch, *, total: int, free: int) -> None:
    block = 4096
    held = SimpleNamespace(f_frsize=block, f_blocks=total // block, f_bfree=free // block, f_bavail=free // block)
    monkeypatch.setattr(os, "statvfs", lambda _: held)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]


async def test_a_disk_that_is_nearly_full_is_alerted_and_a_large_one_with_room_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alerts, heard = Alerts(lambda: 0.0), list[Alert]()
    alerts.listeners.append(heard.append)
    condition = Condition(home_at(tmp_path), alerts, lambda *_, **__: None)
    for total, free in ((1000 * GIB, 50 * GIB), (10 * GIB, 5 * GIB)):
        _disk(monkeypatch, total=total, free=free)
        await condition.look()
        assert not heard
    for total, free in ((1000 * GIB, COUNTED_BYTES // 10), (10 * GIB, GIB)):
        _disk(monkeypatch, total=total, free=free)
        await condition.look()
        await condition.look()
        assert [(one.name, one.facts["limit"]) for one in heard] == [("LIMIT_NEAR", "disk")], "once"
        heard.clear()
        _disk(monkeypatch, total=total, free=total)
        await condition.look()


async def test_a_disk_that_nobody_can_look_at_is_no_alert(tmp_path: Path) -> None:
    alerts = Alerts(lambda: 0.0)
    await Condition(home_at(tmp_path / "gone"), alerts, lambda *_, **__: None).look()
    assert "disk" not in alerts.levels()


async def test_a_key_that_others_can_read_is_alerted_while_the_process_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "CONDITION_EVERY_S", 0.01)
    heard: asyncio.Queue[Alert] = asyncio.Queue()

    def note(alert: Alert) -> None:
        if alert.name == "KEY_EXPOSED":
            heard.put_nowait(alert)

    async with Interlock.open(tmp_path) as app, asyncio.timeout(60):
        app.gateway.telemetry.alerts.listeners.append(note)
        key = tmp_path / "keys" / "journal.ed25519"
        for _ in range(2):
            key.chmod(0o644)
            alert = await heard.get()
            assert (alert.severity, alert.facts["key"]) == ("critical", "journal.ed25519")
            assert "chmod 600" in alert.facts["reason"]
            key.chmod(0o600)
            (tmp_path / "keys" / "other.pem").touch(mode=0o600)
            (tmp_path / "keys" / "other.pem").chmod(0o640)
            assert (await heard.get()).facts["key"] == "other.pem", "a look has seen that the first one was put right"
            (tmp_path / "keys" / "other.pem").unlink()
            (tmp_path / "keys" / "marker.pem").touch()
            (tmp_path / "keys" / "marker.pem").chmod(0o644)
            assert (await heard.get()).facts["key"] == "marker.pem"
            (tmp_path / "keys" / "marker.pem").unlink()
        assert heard.empty()
        assert app.gateway.observer.metrics["KEY_EXPOSED"] == 6


async def test_keys_in_order_raise_no_alert(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        app.issuer_keys.init("EdDSA")
        heard: list[object] = []
        await Condition(app.home, Alerts(lambda: 0.0), lambda *said, **_: heard.append(said)).look()
    assert heard == []


@tool(version="1.0.0", mutation_class="read_only", namespace="moody")
async def fortune(text: sample.Text) -> str:
    """Tell what comes, to whoever is polite."""
    if not text.startswith("hello"):
        raise RuntimeError(text)
    return text


@tool(version="1.0.0", mutation_class="read_only", namespace="moody")
async def lookup(text: sample.Text) -> str:
    """Look something up in a place that is nearly empty."""
    return {"hello": "there"}[text]


@tool(version="1.0.0", mutation_class="read_only", namespace="moody")
async def complaint(text: sample.Text) -> str:
    """Fail with a long text."""
    if len(text) > 100:
        raise Failure("E3401", text)
    return text


@pytest.mark.sqlite_only("the file of the store may not grow")
async def test_a_full_disk_is_alerted_when_a_call_meets_it_and_not_for_every_call(tmp_path: Path) -> None:
    time, heard = FakeClock(), list[Alert]()
    async with Interlock.open(tmp_path, clock=time.clock, housekeeping=False) as app:
        await app.add(fortune)
        app.gateway.telemetry.alerts.listeners.append(heard.append)
        journal = app.journal.writer._connection  # pyright: ignore[reportPrivateUsage] - the disk is made small
        journal.execute(f"PRAGMA max_page_count={journal.execute('PRAGMA page_count').fetchone()[0]}")
        codes: list[str] = []
        while len(codes) < 3:
            result = await app.call("moody.fortune", text="hello" * 1000)
            codes += [] if result.error is None else [result.error.code]
        journal.execute("PRAGMA max_page_count=1000000")
        told = [one for one in heard if one.name == "STORE_UNWRITABLE"]
        assert [(one.severity, "disk" in one.facts["reason"]) for one in told] == [("critical", True)]


async def test_thirty_failures_of_a_tool_in_a_row_are_alerted_once(tmp_path: Path) -> None:
    heard: list[Alert] = []
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        await app.add(fortune, lookup)
        app.gateway.telemetry.alerts.listeners.append(heard.append)

        async def fail(times: int) -> list[Alert]:
            for _ in range(times):
                assert not (await app.call("moody.fortune", text="a")).ok
                assert not (await app.call("moody.fortune", text=7)).ok, "refused, so the tool did not fail"
            found = [one for one in heard if one.name == "TOOL_FAILING"]
            heard.clear()
            return found

        assert await fail(29) == []
        assert (await app.call("moody.fortune", text="hello")).ok
        assert await fail(29) == []
        (alert,) = await fail(1)
        assert (alert.tool, alert.facts["failures"]) == ("moody.fortune@1.0.0", 30)
        assert "30 times in a row, the last time with E3401" in alert.facts["reason"]
        assert await fail(40) == [], "once, until it has succeeded"


async def test_a_failing_tool_has_one_traceback_a_minute_for_each_kind_of_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    time = FakeClock()
    async with Interlock.open(tmp_path, clock=time.clock, housekeeping=False) as app:
        await app.add(fortune, lookup)
        for _ in range(5):
            await app.call("moody.fortune", text="a")
            await app.call("moody.lookup", text="a")
        lines = [line.getMessage() for line in caplog.records if line.name == "interlock.gateway"]
        assert len(lines) == 10, "each call leaves a line"
        full = [line for line in lines if "Traceback" in line]
        assert sorted(line.split()[0] for line in full) == ["moody.fortune@1.0.0", "moody.lookup@1.0.0"]
        assert sum(line.endswith("RuntimeError, as before") for line in lines) == 4
        caplog.clear()
        time.advance(61)
        await app.call("moody.fortune", text="a")
        (line,) = [line.getMessage() for line in caplog.records if line.name == "interlock.gateway"]
        assert "4 more since" in line
        assert "Traceback" in line


async def test_a_long_failure_is_logged_in_full_once_a_minute_and_in_a_short_line_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    time = FakeClock()
    async with Interlock.open(tmp_path, clock=time.clock, housekeeping=False) as app:
        await app.add(complaint)
        for _ in range(5):
            assert not (await app.call("moody.complaint", text="a b " * 5000)).ok
        lines = [line.getMessage() for line in caplog.records if line.name == "interlock.gateway"]
        assert [len(line) > 1000 for line in lines] == [True, *[False] * 4]
        assert max(map(len, lines[1:])) < 300
        caplog.clear()
        time.advance(61)
        await app.call("moody.complaint", text="a b " * 5000)
        (line,) = [line.getMessage() for line in caplog.records if line.name == "interlock.gateway"]
        assert line.startswith("moody.complaint@1.0.0 failed (4 more since it was last told in full) in call ")

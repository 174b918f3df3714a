"""kill -9 at every labelled point of a write, and at any moment: nothing acknowledged is lost, nothing done twice."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from interlock import Interlock
from interlock.api import background
from interlock.api.service import Service
from interlock.audit.chain import verify
from interlock.contract.standard import ToolResult
from interlock.data.canonical import digest
from interlock.gateway.reconcile import reconcile
from interlock.store.homes import home_at
from interlock.telemetry.alerts import Alert
from tests.crash.driver import POINTS
from tests.support import forked
from tests.support.calls import FIELDS, prepare, records, until
from tests.support.counter import effects, mark, wait
from tests.support.postgres import Server
from tests.support.source import ROOT
from tests.thorough import THOROUGH

pytestmark = pytest.mark.timeout(600)  # many processes start and die, one after the other


def drive(mode: str, home: Path, lines: Path, count: int, calls: int = 1) -> list[dict[str, Any]]:
    done = subprocess.run(
        [*forked.python(), "-m", "tests.crash.driver", mode, str(home), str(count), str(calls)],
        cwd=ROOT,
        env={**os.environ, "EFFECTS": str(lines)},
        capture_output=True,
        text=True,
        check=False,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


async def judge(home: Path, lines: Path, turns: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every promise about a crash, checked on what the dead processes left behind; then every call is retried."""
    monkeypatch.setenv("EFFECTS", str(lines))
    made = effects(str(lines))
    assert len(made) == len(set(made)), "an effect was made twice"
    acknowledged = {name for turn in turns for name, answer in turn["acknowledged"].items() if answer == "ok"}
    assert acknowledged <= set(made), "an acknowledged effect was lost"
    assert {answer for turn in turns for answer in turn["acknowledged"].values()} <= {"ok"}
    async with Interlock.open(home) as app:
        app.catalog.attach(mark)
        rows = app.journal.reader.all("SELECT key, state FROM reservation")
        state = {key.removeprefix("key-"): status for key, status in rows}
        assert "executing" not in state.values(), "an intent of a dead process was not reported"
        assert set(made) <= state.keys(), "an effect has no record"
        closed = {row[0] for row in app.journal.reader.all("SELECT DISTINCT call FROM journal WHERE kind = 'closed'")}
        intents = {row[0] for row in app.journal.reader.all("SELECT DISTINCT call FROM journal WHERE kind = 'intent'")}
        assert intents <= closed, "a call was never closed"
        names = [name for turn in turns for name in turn["names"]]
        rows = app.journal.reader.all("SELECT body FROM journal WHERE kind = 'mutation'")
        entries = [(entry["affectedResource"], entry["newValue"]) for entry in (json.loads(body) for (body,) in rows)]
        assert len(entries) == len(set(entries)), "a change has two entries"
        kept = {name for name in names if json.loads(app.gateway.storage.sessions.read(app.caller, name)[1])}
        told = {value for resource, value in entries if resource == "session:marked"}
        assert kept == told, "a change of a session without an entry, or an entry without a change"
        lined = {value for resource, value in entries if resource != "session:marked"}
        assert lined <= set(made)
        # The change, its entries and its key are there together, or none of them is.
        settled = {name for name in names if state.get(name) == "done"}
        assert settled == kept == lined, "a change, its entry and its key were not written together"
        assert {state[name] for name in names if name in state and name not in settled} <= {"unknown"}
        for name in names:
            result = await app.call("demo.mark", {"name": name}, key=f"key-{name}", session=name)
            if state.get(name) == "unknown":
                assert result.error is not None
                assert result.error.code == "E3409"
            else:
                assert result.unwrap() == name
                assert result.replayed == (name in made)
    final = effects(str(lines))
    assert len(final) == len(set(final)), "a retry repeated an effect"
    verdict = verify(home_at(home))
    assert verdict.intact, verdict.faults


@pytest.mark.proves("IDEM-08")
@pytest.mark.proves("EFFECT-07")
@pytest.mark.proves("AUDIT-04")
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
async def test_a_kill_at_every_labelled_point_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, database: str
) -> None:
    home, lines = tmp_path / "home", tmp_path / "effects"
    if database == "postgres":
        server: Server = request.getfixturevalue("postgres_server")
        monkeypatch.setenv("INTERLOCK_STORE", server.new_schema())
    await prepare(home, mark)
    assert home_at(home).near == (database == "sqlite")
    times = 6 if THOROUGH or database == "sqlite" else 1
    turns = drive("points", home, lines, times)
    assert len(POINTS) == 18
    assert Counter(turn["point"] for turn in turns if turn["killed"]) == dict.fromkeys(POINTS, times)
    await judge(home, lines, turns, monkeypatch)


@pytest.mark.proves("IDEM-08")
@pytest.mark.proves("EFFECT-07")
@pytest.mark.proves("AUDIT-04")
async def test_a_kill_at_any_moment_loses_and_doubles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, lines = tmp_path / "home", tmp_path / "effects"
    await prepare(home, mark)
    turns = drive("random", home, lines, 110, calls=40 if THOROUGH else 8)
    assert [turn["point"] for turn in turns].count("random") == 110  # with the labelled points, more than 200
    await judge(home, lines, turns, monkeypatch)
    answered = sum(len(turn["acknowledged"]) for turn in turns)
    asked = sum(len(turn["names"]) for turn in turns)
    assert 0 < answered < asked, "the kills came too early or too late to prove anything"


@pytest.mark.proves("IDEM-08")
async def test_a_commit_is_on_disk_before_it_counts(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path / "home", housekeeping=False) as app:
        found = await app.journal.commit(
            lambda transaction: [transaction.one(f"PRAGMA {name}") for name in ("synchronous", "journal_mode")]
        )
    assert found == [(2,), ("wal",)], "the connection that writes waits for the disk (synchronous=FULL)"


# What an operator hears of it

DYING = """
import asyncio, sys
from tests.crash.driver import run_calls

asyncio.run(run_calls(sys.argv[1], [sys.argv[2]], lambda line: None, False))
"""


async def die_in_a_write(home: Path, lines: Path, name: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *forked.python(), "-c", DYING, str(home), name, cwd=ROOT,
        env={**os.environ, "EFFECTS": str(lines), "CRASH_AT": "after the effect"},
    )  # fmt: skip
    assert await process.wait() == -9


@pytest.mark.proves("AUDIT-04")
async def test_a_kill_in_the_middle_of_a_write_is_told_of_once_by_a_process_that_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "TICKETS_EVERY_S", 0.01)
    home = tmp_path / "home"
    await prepare(home, mark)
    heard = asyncio.Queue[Alert]()
    async with Interlock.open(home) as app:
        app.gateway.telemetry.alerts.listeners.append(heard.put_nowait)
        await die_in_a_write(home, tmp_path / "effects", "a")
        async with asyncio.timeout(60):
            alert = await heard.get()
        ((call, state),) = app.journal.reader.all("SELECT call, state FROM reservation")
        assert state == "unknown"
        assert (alert.name, alert.severity, alert.tool, alert.invocation_id) == (
            "OUTCOME_UNKNOWN", "critical", "demo.mark@1.0.0", call,
        )  # fmt: skip
        assert f"interlock calls reconcile {call}" in caplog.text
        assert b'interlock_signal_count{signal="OUTCOME_UNKNOWN"} 1' in await app.gateway.telemetry.metrics.render()
    async with Interlock.open(home) as later:
        assert "OUTCOME_UNKNOWN" not in later.gateway.observer.metrics
    assert heard.empty()


@pytest.mark.proves("AUDIT-04", "LIFE-08")
async def test_a_kill_in_the_middle_of_a_write_is_told_of_once_by_whoever_opens_the_home_next(tmp_path: Path) -> None:
    home = tmp_path / "home"
    await prepare(home, mark)
    await die_in_a_write(home, tmp_path / "effects", "a")
    heard: list[str] = []
    for told in (1, 0):
        async with Interlock.open(home) as app:
            app.listen(lambda event: heard.append(event.type))
            await app.journal.commit(lambda _: None)
            assert app.gateway.observer.metrics["OUTCOME_UNKNOWN"] == told
            # The call that was cut off has one end, which says that nobody knows.
            ((intent,),) = app.journal.reader.all("SELECT call FROM journal WHERE kind = 'intent'")
            (closed,) = records(app, intent)
            assert (closed["states"][-1], closed["status"], closed["error_code"]) == ("failed", "ERROR", "E3409")
            assert (closed["outcome"], closed["source"]) == ("unknown", "synthetic")
            # So does the result that is read back.
            result = (await Service(app).calls.status(intent, app.caller))["result"]
            ToolResult.parse(result)
            about: dict[str, Any] = result["error"]
            assert (result["invocation_id"], result["status"], about["error_code"]) == (intent, "failed", "E3409")
            assert (about["retryable"], about["details"]["outcome"]) == (False, "unknown")
            await until(lambda: heard)
    assert [one for one in heard if one.startswith("tool.result")] == ["tool.result.created"]


@pytest.mark.proves("AUDIT-01")
async def test_a_call_that_is_tried_again_after_a_kill_leaves_a_closing_record_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, lines = tmp_path / "home", tmp_path / "effects"
    await prepare(home, mark)
    await die_in_a_write(home, lines, "a")
    async with Interlock.open(home, housekeeping=False) as app:
        app.catalog.attach(mark)
        ((intent,),) = app.journal.reader.all("SELECT call FROM journal WHERE kind = 'intent'")
        again = [await app.call("demo.mark", {"name": "a"}, key="key-a", session="a") for _ in range(2)]
        assert [one.error and one.error.code for one in again] == ["E3409", "E3409"], "its key is blocked"
        await app.journal.commit(lambda _: None)
        closed = records(app)
        assert [one["call"] for one in closed] == [intent, *(one.invocation_id for one in again)]
        assert all(one.keys() >= FIELDS and one["idempotencyKey"] == "key-a" for one in closed)
        # A person says that it did not happen. Then it runs, and that is one record more.
        await reconcile(app.journal, app.caller, intent, seal=app.gateway.storage.outcomes.seal, happened=False)
        monkeypatch.setenv("EFFECTS", str(lines))
        result = await app.call("demo.mark", {"name": "a"}, key="key-a", session="a")
        assert (result.ok, [one["call"] for one in records(app)][3:]) == (True, [result.invocation_id])
    assert effects(str(lines)) == ["a", "a"]


# What is on record of it

HANGING = """
import asyncio, os, sys
from interlock import Caller, Hook, HookResult, Interlock
from tests.support.counter import wait

async def main():
    async with Interlock.open(sys.argv[1], housekeeping=False) as app:
        app.catalog.attach(wait)
        app.hook(Hook(id="doubt", when="pre", run=lambda _: HookResult(permission="ask")))
        pending = await app.call("demo.wait", {"name": "a"})
        ticket = pending.metadata["pending"]["ticketId"]
        await app.approvals.approve(ticket, by=Caller(id="local:ben", groups=frozenset({"approvers"})))
        running = asyncio.create_task(app.approved_calls.resume(ticket))
        while not app.journal.reader.all("SELECT 1 FROM journal WHERE kind = 'started'"):
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), 9)

asyncio.run(main())
"""


@pytest.mark.proves("AUDIT-01")
async def test_the_record_of_a_call_whose_process_was_killed_has_every_field(tmp_path: Path) -> None:
    home, lines = tmp_path / "home", tmp_path / "effects"
    await prepare(home, mark, wait)
    await die_in_a_write(home, lines, "a")
    reading = await asyncio.create_subprocess_exec(*forked.python(), "-c", HANGING, str(home), cwd=ROOT)
    assert await reading.wait() == -9
    async with Interlock.open(home, housekeeping=False) as app:
        rows = app.journal.reader.all("SELECT kind, body FROM journal WHERE kind IN ('intent', 'started', 'closed')")
        found: dict[str, list[dict[str, Any]]] = {}
        for kind, body in rows:
            found.setdefault(kind, []).append(json.loads(body))
        write, read = sorted(found["closed"], key=lambda record: record["toolId"])
        (intent,), (started,) = found["intent"], found["started"]
        for record, begun in ((write, intent), (read, started)):
            assert record.keys() >= FIELDS
            same = ("call", "traceId", "callerId", "agentId", "toolId", "version", "operation", "inputHash",
                    "mutationClass", "authDecision")  # fmt: skip
            assert {name: record[name] for name in same} == {name: begun[name] for name in same}
            assert record["timestamp"] >= begun["timestamp"]
            assert (record["status"], record["outputSummary"], record["sideEffects"]) == ("ERROR", None, [])
            assert (record["latencyMs"], record["inputHash"]) == (None, digest({"name": "a"}))
            assert record["callerId"] == app.caller.id
        assert (write["authDecision"], write["errorCode"], write["error_code"]) == (
            "ALLOW",
            "PRECONDITION_FAILED",
            "E3409",
        )
        assert (write["mutationClass"], write["approvalTicketId"]) == ("write_reversible", None)
        ticket = app.journal.reader.all("SELECT id FROM ticket")[0][0]
        assert (read["mutationClass"], read["approvalTicketId"]) == ("read_only", ticket)
        assert read["authDecision"] == "REQUIRES_APPROVAL"
        assert read["errorCode"] is not None
    assert verify(home_at(home)).intact

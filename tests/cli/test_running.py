"""`interlock calls list` while calls run: those that have run for a moment are there, and one is told of the others."""

from __future__ import annotations

import asyncio

from interlock import Interlock, tool
from tests.support.calls import admit
from tests.support.cli import Cli


class Gate:
    """Opened by a test; each test has an event of its own loop."""

    event: asyncio.Event


gate = Gate()


@tool(version="1.0.0", mutation_class="read_only", namespace="own", timeout_class="long_running")
async def brood() -> str:
    """Take until the test lets go."""
    await gate.event.wait()
    return "done"


async def test_a_read_that_runs_is_listed_until_it_has_ended(fresh: Cli) -> None:
    async with Interlock.open(fresh.home, housekeeping=False) as app:
        await admit(app, brood)
        gate.event = asyncio.Event()
        running = asyncio.create_task(app.call("own.brood"))
        async with asyncio.timeout(60):
            while not app.journal.reader.all("SELECT 1 FROM journal WHERE kind = 'started'"):  # noqa: ASYNC110 - of the store
                await asyncio.sleep(0.01)
        (listed,) = (await asyncio.to_thread(fresh.ask, "calls", "list"))["calls"]
        gate.event.set()
        ended = await running
        (after,) = fresh.ask("calls", "list")["calls"]
    assert (listed["invocation_id"], listed["tool"], listed["state"]) == (
        ended.invocation_id, "own.brood@1.0.0", "running",
    )  # fmt: skip
    assert (listed["caller"], listed["error_code"]) == (after["caller"], None)
    assert (after["invocation_id"], after["state"]) == (ended.invocation_id, "succeeded")
    assert "a quarter of a second" in " ".join(fresh("calls", "list", "--help").out.split())


async def test_running_calls_beyond_the_first_page_are_reached(fresh: Cli) -> None:
    async with Interlock.open(fresh.home, housekeeping=False) as app:
        await admit(app, brood)
        gate.event = asyncio.Event()
        calls = [asyncio.create_task(app.call("own.brood")) for _ in range(3)]
        async with asyncio.timeout(60):
            while app.journal.reader.all("SELECT count(*) FROM journal WHERE kind = 'started'") != [(3,)]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        first = await asyncio.to_thread(fresh.ask, "calls", "running", "--limit", "2")
        shown = (await asyncio.to_thread(fresh, "calls", "list", "--limit", "2")).out
        rest = await asyncio.to_thread(fresh.ask, "calls", "running", "--limit", "2", "--before", str(first["before"]))
        gate.event.set()
        made = {(await call).invocation_id for call in calls}
    assert {one["invocation_id"] for one in (*first["calls"], *rest["calls"])} == made
    assert (len(first["calls"]), len(rest["calls"]), rest["before"]) == (2, 1, None)
    assert f"--before {first['before']}" in shown


def test_calls_are_found_by_state_error_tool_and_time_and_the_leaders_are_told(fresh: Cli) -> None:
    from interlock.cli.calls import calls

    assert {"list", "running", "top"} <= set(calls.commands)
    assert fresh.ask("calls", "running") == {"calls": [], "before": None}
    assert fresh.ask("calls", "top", "--by", "cost")["top"] == []
    refused = fresh("calls", "list", "--since", "yesterday")
    assert refused.code == 2
    assert "2026-07-01T12:00:00Z" in refused.err
    assert fresh.ask("calls", "list", "--since", "2h", "--state", "failed", "--tool", "demo.post")["calls"] == []


def test_calls_on_record_are_found_by_state_error_tool_caller_and_time(cli: Cli) -> None:
    issued = cli("token", "issue", "--agent", "research-7")
    agent = Cli(cli.path, {"INTERLOCK_TOKEN": issued.out.strip()})
    balance = ("call", "demo.balance", '{"account": "cash"}', "--json")
    own, theirs = cli(*balance).json["invocation_id"], agent(*balance).json["invocation_id"]
    refused = cli("call", "demo.post", '{"account": "cash", "cents": "two"}', "--key", "k", "--json").json
    first, last = cli.ask("calls", "list")["calls"][-1]["at"], refused["created_at"]

    def found(*options: str) -> list[str]:
        return [one["invocation_id"] for one in cli.ask("calls", "list", *options)["calls"]]

    everything = [refused["invocation_id"], theirs, own]
    assert found() == everything
    assert found("--caller", "research-7") == [theirs]
    (did,) = {one["caller"] for one in cli.ask("calls", "list")["calls"] if one["invocation_id"] == theirs}
    assert found("--caller", did) == [theirs]
    assert found("--caller", "nobody-of-this-name") == []
    assert found("--tool", "demo.balance") == found("--tool", "demo.balance@1.0.0") == [theirs, own]
    assert found("--tool", "demo.balance@9.9.9") == []
    assert found("--state", "succeeded") == found("--status", "succeeded") == [theirs, own]
    assert found("--state", "validation_failed") == found("--error", "E3301") == found("--error", "INVALID_INPUT")
    assert found("--error", "E3301") == [refused["invocation_id"]]
    assert found("--since", first) == found("--since", "1h") == everything
    assert found("--until", first) == []
    assert found("--since", first, "--tool", "demo.post", "--state", "succeeded") == []
    assert found("--limit", "1") == [refused["invocation_id"]]
    assert found("--until", last, "--tool", "demo.balance", "--caller", "research-7") == [theirs]
    shown = cli("calls", "list", "--caller", "research-7").out.splitlines()
    assert len(shown) == 2
    assert shown[1].split()[-1] == "research-7"

"""kill -9 of a process with calls in the background: each has one end, which is told the same for good."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from interlock import Event, Hook, Interlock
from interlock.api import background
from interlock.api.calls import Ask
from interlock.api.service import Service
from interlock.audit.chain import verify
from interlock.contract.standard import ToolResult
from interlock.data.canonical import digest
from interlock.store.homes import home_at
from tests.support import forked
from tests.support.bounds import until
from tests.support.calls import FIELDS, prepare, records
from tests.support.calls import until as wait_until
from tests.support.counter import entered, stay, wait
from tests.support.source import ROOT

# One call for each point at which a process may die: before the tool starts, or while it runs; of a read and a write.
ENDS = {
    "read before": ("demo.wait", "E3404", "the process that ran it died before it was on record that it started"),
    "write before": ("demo.stay", "E3404", "the process that ran it died before its tool started: it did not run"),
    "read": ("demo.wait", "E3404", "the process that ran it died"),
    "write": ("demo.stay", "E3409", None),
}


async def hang(home: str) -> None:
    """Start a call of each kind in the background, and wait for the end of this process. Prints their ids."""
    async with Interlock.open(home, housekeeping=False) as app:
        app.catalog.attach(wait)
        app.catalog.attach(stay)

        async def hold(moment: Any) -> None:
            if moment.input["name"].endswith("before"):
                entered.add(moment.input["name"])
                await asyncio.Event().wait()

        app.hook(Hook(id="hold", when="pre", run=hold, timeout_s=60))
        calls = Service(app).calls
        keys = {"write before": "before", "write": "during"}
        ids = {
            name: await calls.start(Ask(tool, {"name": name}, key=keys.get(name)), app.caller, door="rest")
            for name, (tool, *_) in ENDS.items()
        }
        while entered != ids.keys():  # noqa: ASYNC110 - hooks and tools add to it
            await asyncio.sleep(0.01)
        print(json.dumps(ids), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        os.kill(os.getpid(), signal.SIGKILL)


HANGING = "import asyncio, sys; from tests.crash.test_background import hang; asyncio.run(hang(sys.argv[1]))"


@asynccontextmanager
async def hanging(home: Path) -> AsyncGenerator[dict[str, str]]:
    """A process with the calls, which is killed in the end. Their ids by their names."""
    process = await asyncio.create_subprocess_exec(
        *forked.python(), "-c", HANGING, str(home), cwd=ROOT, stdin=PIPE, stdout=PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    yield json.loads(await process.stdout.readline())
    process.stdin.close()
    assert await process.wait() == -signal.SIGKILL


class Follower:
    """A process that stays open on the data directory, with the events that it hears."""

    def __init__(self, app: Interlock) -> None:
        self.app = app
        self.calls = Service(app).calls
        self.events: list[Event] = []
        app.listen(self.events.append)

    async def statuses(self, ids: dict[str, str]) -> dict[str, Any]:
        return {name: await self.calls.status(call, self.app.caller) for name, call in ids.items()}

    async def has_ended(self, ids: dict[str, str]) -> bool:
        return all(one["status"] != "running" for one in (await self.statuses(ids)).values())


def check(app: Interlock, ids: dict[str, str], statuses: dict[str, Any]) -> None:
    """Each call has one closing record with every field, and a result that says the same."""
    assert ids.keys() == statuses.keys() == ENDS.keys()
    for name, (tool, code, reason) in ENDS.items():
        (closed,) = records(app, ids[name])
        assert closed.keys() >= FIELDS
        assert (closed["toolId"], closed["version"], closed["operation"]) == (tool, "1.0.0", "invoke")
        assert (closed["callerId"], closed["tenant"], closed["door"]) == (app.caller.id, "local", "rest")
        assert closed["inputHash"] == digest({"name": name})
        assert closed["mutationClass"] == ("read_only" if name.startswith("read") else "write_reversible")
        assert closed["authDecision"] == (None if name.endswith("before") else "ALLOW")
        assert closed["traceId"]
        assert (closed["status"], closed["error_code"], closed.get("reason")) == ("ERROR", code, reason)
        status = statuses[name]
        assert (status["status"], status["error_code"], status["trace_id"]) == ("failed", code, closed["traceId"])
        assert status["outcome"] == ("unknown" if name == "write" else None)
        result = status["result"]
        ToolResult.parse(result)
        assert (result["invocation_id"], result["status"]) == (ids[name], "failed")
        assert result["error"]["error_code"] == code


def ends_heard(*followers: Follower) -> list[str]:
    heard = [one for follower in followers for one in follower.events]
    ends = [one.invocation_id for one in heard if one.type == "tool.invocation.failed"]
    created = [one.invocation_id for one in heard if one.type == "tool.result.created"]
    assert sorted(ends) == sorted(created)
    return sorted(created)


@pytest.mark.proves("LIFE-08", "AUDIT-01")
async def test_calls_in_the_background_of_a_killed_process_have_one_end_after_a_restart(tmp_path: Path) -> None:
    home = tmp_path / "home"
    await prepare(home, wait, stay)
    async with hanging(home) as ids:
        pass
    heard: list[str] = []
    seen: list[dict[str, Any]] = []
    for _ in range(2):
        async with Interlock.open(home, housekeeping=False) as app:
            follower = Follower(app)
            await until(partial(follower.has_ended, ids))
            seen.append(await follower.statuses(ids))
            check(app, ids, seen[-1])
            await app.journal.commit(lambda _: None)
            await until_heard(follower, heard, ids)
            heard += ends_heard(follower)
            for call in ids.values():
                result = await follower.calls.outcome(call, app.caller)
                assert result is not None
                assert not result.ok
    assert seen[0] == seen[1]
    assert sorted(heard) == sorted(ids.values())
    assert verify(home_at(home)).intact


async def until_heard(follower: Follower, before: list[str], ids: dict[str, str]) -> None:
    """Wait for the events of calls whose end was not heard of before."""
    await wait_until(lambda: len(before) + len(ends_heard(follower)) >= len(ids))


@pytest.mark.proves("LIFE-08")
@pytest.mark.parametrize("housekeeping", [True, False], ids=["by itself", "when asked"])
async def test_processes_that_live_on_close_them_once_and_tell_one_end(
    tmp_path: Path, housekeeping: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "TICKETS_EVERY_S", 0.01)
    home = tmp_path / "home"
    await prepare(home, wait, stay)
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(Interlock.open(home, housekeeping=housekeeping)) for _ in range(2)]
        first, second = followers = [Follower(app) for app in opened]
        async with hanging(home) as ids:
            assert {one["status"] for one in (await first.statuses(ids)).values()} == {"running"}
        if housekeeping:
            await wait_until(lambda: len(ends_heard(*followers)) >= len(ids))
        told: list[dict[str, set[Any]]] = []
        while len(told) < 2:  # what is told from the first end on
            for statuses in await asyncio.gather(*(one.statuses(ids) for one in followers)):
                ended = {name: one for name, one in statuses.items() if one["status"] != "running"}
                for name, one in ended.items():
                    assert (one["status"], one["error_code"]) == ("failed", ENDS[name][1])
                if ended.keys() == ids.keys():
                    check(first.app, ids, statuses)
                    told.append(statuses)
        await wait_until(lambda: len(ends_heard(*followers)) >= len(ids))
        await asyncio.gather(*(one.app.background.close_dead_calls() for one in followers))
        assert ends_heard(*followers) == sorted(ids.values())
        assert told[0] == told[1]
        check(second.app, ids, await second.statuses(ids))

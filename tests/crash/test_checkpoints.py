"""kill -9 while calls save checkpoints: what a tool was told is saved is there afterwards, and the call is closed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from interlock import Interlock
from interlock.audit.chain import verify
from interlock.store.homes import home_at
from tests import warm
from tests.support import checkpoint_tools as tools
from tests.support.calls import admit, records

ROOT = Path(__file__).parents[2]
STEPS = 1000


@pytest.mark.part_of("STATE-06", rest="deleting named checkpoints, which does not exist yet")
@pytest.mark.parametrize("way", ["check.awaits", "check.caged_for_long"])
async def test_a_killed_process_leaves_every_checkpoint_that_its_tool_was_told_of(tmp_path: Path, way: str) -> None:
    home = tmp_path / "home"
    async with Interlock.open(home, caller="local:ann") as app:
        await admit(app, *tools.TOOLS)
    told = await asyncio.to_thread(_killed, home, way)
    async with Interlock.open(home, caller="local:ann") as app:
        ((call,),) = app.journal.reader.all("SELECT DISTINCT call FROM checkpoint")
        saved = await app.checkpoints(call)
        assert len(saved) >= told >= 5
        assert [one.state for one in saved] == [{"at": step} for step in range(len(saved))]
        assert len(records(app, call, "checkpoint")) == len(saved)
        (closed,) = records(app, call)
        assert closed["error_code"] == "E3404"
    assert verify(home_at(home)).intact


def _killed(home: Path, way: str) -> int:
    """Run a call that saves one checkpoint after another, and kill its process; how many it had heard of."""
    words = ["-m", "tests.crash.test_checkpoints", str(home), way]
    with warm.start(words, os.environ, ROOT, python=True) as child:
        told: list[bytes] = []
        while _saved(told) < 5 and (line := child.stdout.readline()):
            told.append(line)
        child.send_signal(signal.SIGKILL)
        told += child.stdout.read().splitlines()
    assert child.returncode == -signal.SIGKILL, told
    return _saved(told)


def _saved(told: list[bytes]) -> int:
    return sum(line.startswith(b"saved") for line in told)


async def _save_on_and_on(home: str, way: str) -> None:
    async with Interlock.open(home, caller="local:ann", checkpoints_per_call=STEPS) as app:
        for one in tools.TOOLS:
            app.catalog.attach(one)
        script = [["insist", "phase_complete", {"at": step}] for step in range(STEPS)]
        print(await app.call(way, {"script": script}, on_progress=lambda facts: print(facts["message"])))


if __name__ == "__main__":
    asyncio.run(_save_on_and_on(sys.argv[1], sys.argv[2]))

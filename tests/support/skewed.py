"""A node whose wall clock is wrong: a process with a data directory of its own that does what a test asks for.

    with skewed.started(home, address, hours=6) as node:
        node.ask("call", name="a", key="k")

The clock is that of the process, as on a machine whose clock was set; durations are right.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = "tests.support.skewed"


class Node:
    """A process that answers one question at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.answer()

    def ask(self, act: str, **given: Any) -> Any:
        """Let the process do something, and return what it tells about it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"act": act, **given}) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)


@contextmanager
def started(home: Path, address: str, *, hours: float) -> Generator[Node]:
    """A process whose clock is so many hours ahead, on a data directory with its store at an address."""
    from tests.support import forked

    words = [*forked.python(), "-m", PROGRAM, str(home), address, str(hours)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")}
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=root
    ) as process:
        yield Node(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def set_clock(hours: float) -> None:
    """Set the wall clock of this process wrong."""
    right = time.time_ns

    def wrong() -> int:
        return right() + round(hours * 3600 * 1e9)

    time.time_ns = wrong
    time.time = lambda: wrong() / 1e9


async def main(home: str, address: str, hours: str) -> None:
    set_clock(float(hours))
    from interlock import Caller, Interlock
    from interlock.api.approvals import Approvals
    from interlock.contract.manifest import CircuitBreakerConfig
    from interlock.core.errors import Failure
    from tests import sample

    years: dict[str, Any] = {"retention_years": 1, "retention_years_writes": 1}
    async with Interlock.open(home, store=address, housekeeping=False, purge_records=True, **years) as app:
        for one in (sample.increment, sample.send):
            app.catalog.attach(one)
        services = app.gateway.services
        ben = Caller(id="local:ben", groups=frozenset({"approvers"}))

        async def call(tool: str, key: str, **given: Any) -> Any:
            result = await app.call(tool, key=key, **given)
            code = None if result.error is None else result.error.code
            return {"state": result.state, "replayed": result.replayed, "code": code}

        async def grant(lifetime_s: int) -> Any:
            return await Approvals(app).agree_in_advance(
                "demo.send", by=ben, caller=app.caller.id, arguments={"to": "team-*"}, uses=9, lifetime_s=lifetime_s
            )

        async def fail(service: str, timeout_s: int) -> None:
            config = CircuitBreakerConfig.model_validate({"timeout_seconds": timeout_s})
            for entry in [services.enter(service, config) for _ in range(config.failure_threshold)]:
                entry.done(Failure("E3502"))
            await services.settle()

        async def suspend(service: str, for_s: int) -> None:
            services.suspend(service, for_s * 1000)
            await app.journal.drain()

        async def enter(service: str) -> Any:
            await app.journal.changes.look()
            try:
                services.enter(service, CircuitBreakerConfig.model_validate({})).abandoned()
            except Failure as failure:
                return {"code": failure.code, "wait_s": (failure.retry_after_ms or 0) / 1000}
            return {"code": None, "wait_s": 0}

        async def maintain() -> int:
            await app.background.maintain()
            return app.journal.reader.one("SELECT count(*) FROM journal WHERE call = 'old'")[0]

        acts = {"call": call, "grant": grant, "fail": fail, "suspend": suspend, "enter": enter, "maintain": maintain}
        print(json.dumps("ready"), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            print(json.dumps(await acts[asked.pop("act")](**asked)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

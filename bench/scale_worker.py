"""One process of `bench scale`: `python -m bench.scale_worker KIND ADDRESS [HOME]` does as much as it can when asked.

It prints a line when it is ready. Then each line on stdin, `WORK CALLERS SECONDS`, has an answer: how many calls or
jobs were finished, in what time, with how much CPU time of this process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from bench.scale_tools import look, post
from interlock import Interlock

Work = Callable[[], Awaitable[Any]]


@asynccontextmanager
async def interlock(address: str, home: str) -> AsyncGenerator[dict[str, Work]]:
    """Governed calls: a read is answered when its record is durable, a write has a key of its own."""
    # A release that is compared with this one may have no other store than SQLite.
    async with Interlock.open(home, store=address) if address else Interlock.open(home) as app:
        await app.add(look, post)
        numbers = itertools.count()

        async def read() -> None:
            (await app.call("scale.look", {"name": "a"})).unwrap()

        async def write() -> None:
            name = f"{os.getpid()}-{next(numbers)}"
            (await app.call("scale.post", {"name": name}, key=name)).unwrap()

        yield {"read": read, "write": write, "settle": app.journal.drain}


@asynccontextmanager
async def procrastinate(address: str, _: str) -> AsyncGenerator[dict[str, Work]]:
    """Jobs that are inserted and finished by a worker in the same process."""
    from procrastinate import App, PsycopgConnector

    app = App(connector=PsycopgConnector(conninfo=address, min_size=4, max_size=20))
    done: dict[str, asyncio.Future[None]] = {}
    numbers = itertools.count()

    @app.task(name="post")
    async def job(name: str) -> None:
        done[name].set_result(None)

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        worker = asyncio.create_task(
            app.run_worker_async(concurrency=16, install_signal_handlers=False, fetch_job_polling_interval=0.1)
        )

        async def write() -> None:
            name = str(next(numbers))
            done[name] = asyncio.get_running_loop().create_future()
            await job.defer_async(name=name)
            await done[name]
            del done[name]

        try:
            yield {"write": write}
        finally:
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)


@asynccontextmanager
async def dbos(address: str, _: str) -> AsyncGenerator[dict[str, Work]]:
    """Workflows of one step, awaited."""
    from dbos import DBOS

    DBOS(config={"name": "bench", "system_database_url": address, "run_admin_server": False, "log_level": "ERROR"})

    @DBOS.step()
    async def make(name: str) -> str:
        return name

    @DBOS.workflow()
    async def job(name: str) -> str:
        return await make(name)

    DBOS.launch()
    numbers = itertools.count()

    async def write() -> None:
        await job(str(next(numbers)))

    try:
        yield {"write": write}
    finally:
        DBOS.destroy()


KINDS = {"interlock": interlock, "procrastinate": procrastinate, "dbos": dbos}


async def serve(kind: str, address: str, home: str) -> None:
    loop = asyncio.get_running_loop()
    async with KINDS[kind](address, home) as works:
        print(json.dumps({"pid": os.getpid()}), flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            name, callers, seconds = line.split()
            found = await _run(works[name], works.get("settle"), int(callers), float(seconds))
            print(json.dumps(found), flush=True)


async def _run(work: Work, settle: Work | None, callers: int, seconds: float) -> dict[str, float]:
    wall, cpu, count = time.perf_counter(), time.process_time(), 0

    async def caller() -> None:
        nonlocal count
        while time.perf_counter() < wall + seconds:
            await work()
            count += 1

    await asyncio.gather(*(caller() for _ in range(callers)))
    if settle is not None:
        await settle()
    return {"calls": count, "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    asyncio.run(serve(*sys.argv[1:4]))

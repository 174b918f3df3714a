"""A store on PostgreSQL whose connections are cut at any moment, and whose server is restarted, while calls write.

Nothing is lost that was acknowledged, nothing runs twice, every call whose outcome is not known says so, and the chain
is whole. Callers repeat a call that was refused, with the same key, as the error tells them to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from interlock import Interlock, Result
from interlock.audit.chain import verify
from interlock.store.homes import home_at
from tests import sample
from tests.support.postgres import Server
from tests.support.proxy import Proxy
from tests.thorough import THOROUGH

CUTS = 400 if THOROUGH else 25
RESTARTS = 20 if THOROUGH else 1
CALLERS = 6
# Answers after which a caller tries again: the store cannot be used, or could not take down how the call ended.
PASSING = {"E3801", "E3803", "E3409"}


@pytest.fixture
def proxy(postgres_server: Server) -> Iterator[Proxy]:
    made = Proxy(postgres_server.place / ".s.PGSQL.5432", seed=7)
    yield made
    made.close()


def through(proxy: Proxy, address: str) -> str:
    """The address of a schema by way of a proxy."""
    schema = address.rpartition("&options=")[2]
    return f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres?sslmode=disable&gssencmode=disable&options={schema}"


@asynccontextmanager
async def opened(path: Path, address: str) -> AsyncGenerator[Interlock]:
    sample.reset()
    async with Interlock.open(path, store=address, housekeeping=False) as app:
        await app.add(sample.increment)
        yield app


async def write(app: Interlock, key: str) -> Result:
    """Call until the answer is about the call and not about the store."""
    while True:
        result = await app.call("demo.increment", name=key, key=key)
        if result.error is None or result.error.code not in PASSING:
            return result
        await asyncio.sleep(0.01)


async def write_until(app: Interlock, ended: asyncio.Event) -> dict[str, Result]:
    """Let several callers write one thing after the other, each under a key of its own, until told to end."""
    found: dict[str, Result] = {}

    async def caller(number: int) -> None:
        count = 0
        while not ended.is_set():
            key = f"{number}-{count}"
            found[key] = await write(app, key)
            count += 1

    await asyncio.gather(*(caller(number) for number in range(CALLERS)))
    return found


async def check(app: Interlock, found: dict[str, Result]) -> None:
    """Each key ran once at most; what succeeded ran, is replayed, and what is not known is reported."""
    assert found
    assert set(sample.world.counters.values()) <= {1}
    for key, result in found.items():
        again = await write(app, key)
        if result.ok:
            assert (sample.world.counters[key], again.ok, again.replayed) == (1, True, True), (key, again)
        else:
            assert result.state == "unknown", (key, result.error)
            assert not again.ok, (key, again)
    assert sample.world.runs == len(sample.world.counters) <= len(found)
    assert any(result.ok for result in found.values())


@pytest.mark.proves("OPS-07")
async def test_connections_that_are_cut_at_any_byte_lose_nothing_and_double_nothing(
    tmp_path: Path, postgres_server: Server, proxy: Proxy
) -> None:
    address = postgres_server.new_schema()
    async with opened(tmp_path / "home", through(proxy, address)) as app:
        ended = asyncio.Event()
        writing = asyncio.create_task(write_until(app, ended))
        proxy.cutting = 20_000
        proxy.cut_all()
        while proxy.cuts < CUTS:  # noqa: ASYNC110 - the proxy has threads of its own
            await asyncio.sleep(0.01)
        proxy.cutting = 0
        ended.set()
        await check(app, await writing)
    verdict = verify(home_at(tmp_path / "home", address))
    assert verdict.intact, verdict.faults


async def test_backends_that_are_ended_while_they_work_lose_nothing_and_double_nothing(
    tmp_path: Path, postgres_server: Server
) -> None:
    address = postgres_server.new_schema()
    schema = address.rpartition("%3D")[2]
    async with opened(tmp_path / "home", f"{address}&application_name={schema}") as app:
        ended = asyncio.Event()
        writing = asyncio.create_task(write_until(app, ended))
        with postgres_server.connect() as administrator:
            cuts = 0
            while cuts < CUTS:
                rows = await asyncio.to_thread(administrator.execute, _END_ONE)
                cuts += len(rows.fetchall())
        ended.set()
        await check(app, await writing)
    verdict = verify(home_at(tmp_path / "home", address))
    assert verdict.intact, verdict.faults


# One of those that are in the middle of something, or any.
_END_ONE = (
    b"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'interlock'"
    b" ORDER BY state = 'idle', random() LIMIT 1"
)


async def test_a_server_that_is_restarted_under_load_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    server = Server()
    try:
        address = server.new_schema()
        async with opened(tmp_path / "home", address) as app:
            ended = asyncio.Event()
            writing = asyncio.create_task(write_until(app, ended))
            for number in range(RESTARTS):
                done = sample.world.runs
                while sample.world.runs < done + 10:  # noqa: ASYNC110 - calls run in the background
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(server.stop, "immediate" if number % 2 == 0 else "fast")
                await asyncio.to_thread(server.start)
            done = sample.world.runs
            while sample.world.runs < done + 10:  # noqa: ASYNC110 - calls run in the background
                await asyncio.sleep(0.01)
            ended.set()
            await check(app, await writing)
        verdict = verify(home_at(tmp_path / "home", address))
        assert verdict.intact, verdict.faults
    finally:
        server.remove()

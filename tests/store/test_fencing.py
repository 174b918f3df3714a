"""A tool that works under resource locks ends with its server's right to them, before another server has them.

A server loses that right when its lease runs out: because it was stopped, or cut off from the database. The leases of
this test are real, so it takes as long as one of them.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import httpx
import psycopg
import pytest

from interlock import Effect, Field, Interlock, Preview, tool
from interlock.store.postgres import fence
from tests.support.bounds import PATIENCE_S, until
from tests.support.cli import Cli
from tests.support.cluster import Node, prepare
from tests.support.postgres import Server
from tests.support.proxy import Proxy

pytestmark = pytest.mark.skipif(not fence.possible(), reason="needs a timer that only Linux has")

TOOLS = '''
import asyncio
import os
import time
from functools import partial
from typing import Annotated

from interlock import Effect, Field, Preview, tool

PLACE = {place!r}
Name = Annotated[str, Field(description="a name", examples=["a"])]
write = partial(
    tool, version="1.0.0", mutation_class="write_reversible", namespace="fenced", timeout_s=600,
    effects=[Effect("account:{{name}}", "UPDATE")],
)


def note(file: str) -> None:
    """Write down that somebody is at work now, by a clock that all processes of this machine share."""
    descriptor = os.open(os.path.join(PLACE, file), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{{time.monotonic_ns()}}\\n".encode())
    os.close(descriptor)


def finished(name: str) -> bool:
    return name == "a" or os.path.exists(os.path.join(PLACE, "may-end"))  # the example ends at once


@write()
async def work(name: Name) -> str:
    """Work on an account until it may end."""
    note(f"work-{{name}}")
    while not finished(name):
        await asyncio.sleep(0.01)
        note(f"work-{{name}}")
    return name


@write()
def toil(name: Name) -> str:
    """Work on an account in a thread, which nobody can stop."""
    note(f"work-{{name}}")
    while not finished(name):
        time.sleep(0.01)
        note(f"work-{{name}}")
    return name


@write()
async def take(name: Name) -> str:
    """Work on an account for a moment."""
    note(f"take-{{name}}")
    return name


for one in (work, toil, take):
    one.preview(lambda name: Preview(impact="an account"))
    one.compensate(lambda name: None)
'''


class Fenced:
    """A server that has a tool at work, and another one that wants its lock."""

    def __init__(self, place: Path, node: Node, other: Node, proxy: Proxy, name: str) -> None:
        self.node = node
        self.proxy = proxy
        self.name = name
        self._place = place
        self._other = other

    def times(self, what: str) -> list[int]:
        path = self._place / f"{what}-{self.name}"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    async def works(self) -> bool:
        return bool(self.times("work"))

    async def ask(self, web: httpx.AsyncClient, tool: str, key: str, *, here: bool = False) -> Any:
        sent = {"tool_id": f"fenced.{tool}", "parameters": {"name": self.name}, "idempotency_key": key}
        return await web.post(f"{(self.node if here else self._other).rest}/tools/invoke", json=sent)


@pytest.fixture
def fleet(tmp_path: Path, postgres_server: Server) -> Generator[tuple[list[Fenced], str]]:
    """Three servers, each behind a proxy of its own, and a fourth one."""
    store = postgres_server.new_schema()
    schema = store.rpartition("search_path%3D")[2]
    (tmp_path / "fenced_tools.py").write_text(TOOLS.format(place=str(tmp_path)))
    with ExitStack() as stack:
        proxies = [Proxy(postgres_server.place / ".s.PGSQL.5432", number) for number in range(3)]
        for proxy in proxies:
            stack.callback(proxy.close)
        far = [
            f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres?sslmode=disable&gssencmode=disable&options=-csearch_path%3D{schema}"
            for proxy in proxies
        ]
        clis = [
            Cli(tmp_path / str(number), {"INTERLOCK_STORE": address}) for number, address in enumerate((store, *far))
        ]
        token = prepare(clis, tmp_path / "fenced_tools.py", "fenced.*")
        nodes = [Node(cli) for cli in clis]
        for node in nodes:
            stack.callback(node.end)
            assert node.start(), node.log.read_text()
        yield (
            [
                Fenced(tmp_path, node, nodes[0], proxy, name)
                for node, proxy, name in zip(nodes[1:], proxies, ("stopped", "thread", "task"), strict=True)
            ],
            token,
        )


@pytest.mark.proves("EFFECT-06")
async def test_no_tool_works_on_under_locks_that_another_server_has_by_now(
    fleet: tuple[list[Fenced], str], tmp_path: Path
) -> None:
    """One server is stopped. Two are cut off from the database: one with a tool that can be stopped, one without."""
    (stopped, thread, task), token = fleet
    limits = httpx.Limits(max_connections=60)
    async with (
        httpx.AsyncClient(headers={"authorization": f"Bearer {token}"}, timeout=PATIENCE_S, limits=limits) as web,
        asyncio.TaskGroup() as group,
    ):

        async def held(one: Fenced, tool: str) -> httpx.Response | None:
            try:
                return await one.ask(web, tool, f"first-{one.name}", here=True)
            except httpx.HTTPError:
                return None  # its server was killed

        first = ((stopped, "work"), (thread, "toil"), (task, "work"))
        for one, tool in first:
            group.create_task(held(one, tool))
        for one, _ in first:
            await until(one.works)

        stopped.node.signal(signal.SIGSTOP)
        for one in (thread, task):
            one.proxy.silence()
        taken = await asyncio.gather(*(one.ask(web, "take", f"second-{one.name}") for one in (stopped, thread, task)))
        assert [answer.status_code for answer in taken] == [200] * 3, [answer.text for answer in taken]

        (tmp_path / "may-end").touch()
        stopped.node.signal(signal.SIGCONT)
        for one in (thread, task):
            one.proxy.resume()
        codes = await asyncio.gather(*(asyncio.to_thread(one.node.wait) for one in (stopped, thread, task)))
        # The last one is still there when it hears that it was taken for dead, and ends by itself.
        assert codes == [-signal.SIGKILL, -signal.SIGKILL, 1], task.node.log.read_text()
        for one in (stopped, thread, task):
            assert max(one.times("work")) < min(one.times("take"))

        # None of them has written an outcome: a person is asked.
        again = await asyncio.gather(*(one.ask(web, "take", f"third-{one.name}") for one in (stopped, thread, task)))
        assert [answer.status_code for answer in again] == [200] * 3
        for one, tool in first:
            answer = await one.ask(web, tool, f"first-{one.name}")
            assert answer.json()["error"]["error_code"] == "E3409", answer.text


go_on = asyncio.Event()


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="fenced", effects=[Effect("account:{name}", "UPDATE")]
)
async def pause(name: Annotated[str, Field(description="a name", examples=["a"])]) -> str:
    """Work on an account until a test lets it end."""
    if name != "a":
        await go_on.wait()
    return name


@pause.preview
def _(name: str) -> Preview:
    return Preview(impact=name)


@pause.compensate
async def _(result: str) -> None:
    return None


@pytest.mark.proves("EFFECT-06")
async def test_a_process_that_was_taken_for_dead_writes_no_outcome_over_unknown(
    tmp_path: Path, postgres_server: Server
) -> None:
    """A program of somebody's own, which is not ended: its tool is at work when its lease is gone."""
    go_on.clear()
    store = postgres_server.new_schema()
    async with Interlock.open(tmp_path, store=store) as late, Interlock.open(tmp_path, store=store) as other:
        await late.add(pause)
        other.catalog.attach(pause)
        running = asyncio.create_task(late.call("fenced.pause", name="b", key="first"))

        async def is_at_work() -> bool:
            return len(late.gateway.runner.active) > 0

        async def is_unknown() -> bool:
            ended = await other.call("fenced.pause", name="b", key="first")
            return ended.error is not None and ended.error.code == "E3409"

        await until(is_at_work)
        with psycopg.connect(store, autocommit=True) as connection:
            connection.execute("DELETE FROM instance WHERE id = %s", (late.instance.id,))
        await until(is_unknown)
        go_on.set()
        ended = await running
        assert ended.error is not None
        assert ended.error.code in ("E3409", "E3801")
        assert await is_unknown()
        assert (await other.call("fenced.pause", name="b", key="second")).ok

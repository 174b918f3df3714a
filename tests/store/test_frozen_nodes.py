"""A node that stops, or whose network does, while it holds the lock of all writers keeps the others up for seconds.

The server ends its session (`store.postgres.session`). What the node had begun is undone, and it finds that out when it
goes on: nothing is settled twice, and nothing that was acknowledged is lost.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.bounds import PATIENCE_S, until
from tests.support.cli import Cli
from tests.support.cluster import Node, prepare
from tests.support.postgres import Server
from tests.support.proxy import Proxy

# A tool whose effect is a line of a file. In a server with `HOLDS`, the next unit after the effect named so stands
# still when it has done its work and holds the lock of all writers: the server is stopped, or waits for a file.
TOOLS = '''
import os
import signal
import threading
import time
from typing import Annotated

from interlock import Effect, Field, Preview, tool
from interlock.store.writer import Writer

PLACE = {place!r}
HOLDS = os.environ.get("HOLDS", "")
perform = Writer.perform


def path(name):
    return os.path.join(PLACE, name)


def hold(unit, transaction):
    done = perform(unit, transaction)
    if os.path.exists(path("hold-" + HOLDS)):
        os.rename(path("hold-" + HOLDS), path("held-" + HOLDS))
        if HOLDS.startswith("stopped"):
            # To this thread: a signal to the process lets it go on until some thread has taken it.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        while HOLDS.startswith("cut") and not os.path.exists(path("go-on")):
            time.sleep(0.01)
    return done


if HOLDS:
    Writer.perform = staticmethod(hold)


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="frozen", timeout_s=600,
    effects=[Effect("entry:{{name}}", "CREATE")],
)
async def post(name: Annotated[str, Field(description="a name", examples=["a"])]) -> str:
    """Make an entry, in a file that all servers share."""
    descriptor = os.open(path("entries"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, (name + "\\n").encode())
    os.close(descriptor)
    if HOLDS and name == HOLDS:
        open(path("hold-" + HOLDS), "w").close()
    return name


post.preview(lambda name: Preview(impact="an entry"))
post.compensate(lambda name: None)
'''


class Fleet:
    """Three servers on one store: two as usual, and one that will stand still."""

    def __init__(self, place: Path, server: Server, nodes: list[Node], token: str) -> None:
        self.place = place
        self.frozen, *self.others = nodes
        self.web = httpx.AsyncClient(headers={"authorization": f"Bearer {token}"}, timeout=PATIENCE_S)
        self._server = server

    async def post(self, node: Node, name: str) -> Any:
        """Make an entry under a key of its own. Returns the answer."""
        sent = {"tool_id": "frozen.post", "parameters": {"name": name}, "idempotency_key": name}
        return await self.web.post(f"{node.rest}/tools/invoke", json=sent)

    async def hold(self, name: str) -> asyncio.Task[Any]:
        """Make an entry on the server that stands still then, with the lock, before it has written the outcome."""
        # Each is on the board of resource locks from now on. One that was alone there hands it over itself.
        for place, node in enumerate((self.frozen, *self.others)):
            assert (await self.post(node, f"first-{place}")).status_code == 200
        call = asyncio.create_task(self.post(self.frozen, name))

        async def held() -> bool:
            return (self.place / f"held-{name}").exists()

        await until(held)
        assert (self.entries()[name], call.done()) == (1, False)
        await until(self._is_held)
        return call

    async def _is_held(self) -> bool:
        """Whether a session holds the lock of all writers and says nothing."""
        with self._server.connect() as connection:
            return len(connection.execute(_HOLDING).fetchall()) == 1

    def entries(self) -> Counter[str]:
        return Counter((self.place / "entries").read_text().splitlines())

    async def others_write(self, name: str) -> None:
        """Those who wait have more patience than the server has with the session, so no call is refused."""
        answers = await asyncio.gather(*(self.post(node, f"{name}-{place}") for place, node in enumerate(self.others)))
        assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]

    async def settled(self, name: str, answer: Any) -> None:
        """Every server gives the same answer for the key of the call, and its effect is there once.

        Without an answer, the kernel has ended the server with its lease, as on a machine that is too busy.
        """
        for node in self.others:
            if answer is not None and answer.status_code == 200:
                again = await self.post(node, name)
                assert (again.status_code, again.json()["replayed"]) == (200, True), again.text
                continue
            if answer is not None:  # it was stopped for so long that it was taken for dead
                assert answer.json()["error"]["error_code"] in ("E3801", "E3409"), answer.text
            await until(lambda node=node: self.unknown(node, name))
        assert set(self.entries().values()) == {1}
        verified = await asyncio.to_thread(self.others[0].cli, "audit", "verify")
        assert verified.code == 0, verified.out

    async def unknown(self, node: Node, name: str) -> bool:
        """Whether a server answers that the outcome of a call is unknown."""
        return (await self.post(node, name)).json().get("error", {}).get("error_code") == "E3409"


_HOLDING = b"""
SELECT 1 FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND granted AND classid = 18764 AND state = 'idle in transaction'
"""


@pytest.fixture
def make_fleet(tmp_path: Path) -> Generator[Callable[..., Fleet]]:
    with ExitStack() as stack:

        def make(server: Server, holds: str, proxy: Proxy | None = None) -> Fleet:
            store = server.new_schema()
            schema = store.rpartition("search_path%3D")[2]
            (tmp_path / "frozen_tools.py").write_text(TOOLS.format(place=str(tmp_path)))
            first = store if proxy is None else (
                f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres?sslmode=disable&gssencmode=disable"
                f"&options=-csearch_path%3D{schema}"
            )  # fmt: skip
            clis = [
                Cli(tmp_path / str(place), {"INTERLOCK_STORE": one}) for place, one in enumerate((first, store, store))
            ]
            token = prepare(clis, tmp_path / "frozen_tools.py", "frozen.*")
            nodes = [Node(cli) for cli in clis]
            for node, more in zip(nodes, ({"HOLDS": holds}, {}, {}), strict=True):
                stack.callback(node.end)
                assert node.start(**more), node.log.read_text()
            return Fleet(tmp_path, server, nodes, token)

        yield make


@pytest.fixture
def server() -> Generator[Server]:
    """A server of its own: what its other stores hold is not looked at."""
    made = Server()
    yield made
    made.remove()


async def test_a_server_that_is_stopped_in_a_unit_keeps_others_up_for_seconds_and_settles_its_call_when_it_goes_on(
    server: Server, make_fleet: Callable[..., Fleet]
) -> None:
    fleet = await asyncio.to_thread(make_fleet, server, "stopped")
    async with fleet.web:
        call = await fleet.hold("stopped")
        await fleet.others_write("meanwhile")
        fleet.frozen.signal(signal.SIGCONT)
        try:
            answer = await call
        except httpx.HTTPError:
            answer = None
        await fleet.settled("stopped", answer)


async def test_a_server_that_is_stopped_in_a_unit_for_longer_than_its_lease_writes_nothing_over_unknown(
    server: Server, make_fleet: Callable[..., Fleet]
) -> None:
    fleet = await asyncio.to_thread(make_fleet, server, "stopped-long")
    async with fleet.web:
        call = await fleet.hold("stopped-long")
        await fleet.others_write("meanwhile")

        async def unknown() -> bool:
            answer = await fleet.post(fleet.others[0], "stopped-long")
            return answer.json()["error"]["error_code"] == "E3409"

        await until(unknown)
        fleet.frozen.signal(signal.SIGCONT)
        try:
            answer = await call
        except httpx.HTTPError:
            pass  # the kernel has ended it with its lease
        else:
            await fleet.settled("stopped-long", answer)
        assert await asyncio.to_thread(fleet.frozen.wait) in (1, -signal.SIGKILL)
        assert await unknown()
        assert set(fleet.entries().values()) == {1}


async def test_a_server_whose_network_drops_everything_in_a_unit_keeps_others_up_for_seconds(
    server: Server, make_fleet: Callable[..., Fleet]
) -> None:
    proxy = Proxy(server.place / ".s.PGSQL.5432", seed=3)
    try:
        fleet = await asyncio.to_thread(make_fleet, server, "cut", proxy)
        async with fleet.web:
            call = await fleet.hold("cut")
            proxy.silence()
            await fleet.others_write("meanwhile")
            # Its commit reaches nobody: the session that it belongs to has ended.
            (fleet.place / "go-on").touch()
            proxy.resume()
            await fleet.settled("cut", await call)
    finally:
        proxy.close()

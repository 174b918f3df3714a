"""A server that takes the place of another one and lacks what that one had committed: nodes notice, and refuse."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from interlock import Interlock
from interlock.api import health
from interlock.api.doctor import examine
from interlock.api.health import Health
from interlock.api.service import Service
from interlock.audit.chain import verify
from interlock.core.errors import Failure
from interlock.doors.server import serving
from interlock.store.homes import home_at
from tests import sample
from tests.support.calls import code, until
from tests.support.postgres import Server
from tests.support.proxy import Proxy
from tests.support.servers import LOOPBACK

SOCKET = ".s.PGSQL.5432"
PRIMARY = ("listen_addresses=", "fsync=off", "autovacuum=off", "jit=off", "max_connections=100")
NOT_COPIED = shutil.ignore_patterns("anchors.jsonl", "instances", "*.lock")


class Pair:
    """A server, a way to it that lasts, and later another one that lagged behind."""

    def __init__(self) -> None:
        self.first = Server(PRIMARY)
        self.second: Server | None = None
        self.way = Proxy(self.first.place / SOCKET, seed=5)
        self._base = self.first.place / "base"

    @property
    def address(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.way.port}/postgres?sslmode=disable&gssencmode=disable"

    def copy(self) -> None:
        """Give the other server what the first one has. It gets nothing more."""
        self.first.stop("fast")
        subprocess.run(["cp", "-a", self.first.place / "data", self._base], check=True)
        self.first.start()

    def fail_over(self) -> None:
        self.second = Server((*PRIMARY, "restore_command=false"), base=self._base)
        self.way.lead_to(self.second.place / SOCKET)

    def fail_back(self) -> None:
        self.way.lead_to(self.first.place / SOCKET)

    def remove(self) -> None:
        self.way.close()
        for one in (self.first, self.second):
            if one is not None:
                one.remove()


@pytest.fixture
def pair() -> Generator[Pair]:
    made = Pair()
    yield made
    made.remove()


@asynccontextmanager
async def opened(path: Path, address: str) -> AsyncGenerator[Interlock]:
    async with Interlock.open(path, store=address, housekeeping=False) as app:
        if not path.with_suffix(".admitted").exists():
            await app.add(sample.increment)
            path.with_suffix(".admitted").touch()
        else:
            app.catalog.attach(sample.increment)
        yield app


async def call(app: Interlock, key: str) -> str | None:
    """Call until the answer is not about a connection that was lost, or a lock of a process that is gone: its error."""
    while True:
        ended = code(await app.call("demo.increment", name=key, key=key))
        if ended not in ("E3801", "E3803", "E3410"):
            return ended
        await asyncio.sleep(0.01)


async def test_a_store_that_went_back_is_refused_until_the_right_server_is_there_again(
    tmp_path: Path, pair: Pair
) -> None:
    sample.reset()
    async with opened(tmp_path / "home", pair.address) as app:
        assert await call(app, "before") is None
        await asyncio.to_thread(pair.copy)
        assert await call(app, "lost") is None
        await asyncio.to_thread(pair.fail_over)

        async def refused() -> bool:
            return await call(app, "after") == "E3804"

        await until(refused)
        error = (await app.call("demo.increment", name="after", key="after")).error
        assert error is not None
        assert error.message.startswith("the database has gone back: it does not have record ")
        assert "Failover" in error.resolution
        assert (await Health(app).ready())[1]["store"] == "down"
        # Nothing has run there, neither anew nor again.
        assert sample.world.counters == {"before": 1, "lost": 1}

        await asyncio.to_thread(pair.fail_back)
        assert await call(app, "after") is None
        assert (await app.call("demo.increment", name="lost", key="lost")).replayed
        assert sample.world.counters == {"before": 1, "lost": 1, "after": 1}
    assert verify(home_at(tmp_path / "home", pair.address)).faults == ()


async def test_a_store_that_went_back_and_was_written_on_by_others_is_refused_as_well(
    tmp_path: Path, pair: Pair
) -> None:
    sample.reset()
    async with opened(tmp_path / "home", pair.address) as app:
        assert await call(app, "before") is None
        await asyncio.to_thread(pair.copy)
        shutil.copytree(tmp_path / "home", tmp_path / "other", ignore=NOT_COPIED)
        (tmp_path / "other.admitted").touch()
        assert await call(app, "lost") is None
        await asyncio.to_thread(app.journal.anchor)  # the signature tells the next process
        await asyncio.to_thread(pair.fail_over)
        assert pair.second is not None
        async with opened(tmp_path / "other", pair.second.address) as other:
            for number in range(5):
                assert await call(other, f"elsewhere-{number}") is None
        assert await call(app, "after") == "E3804"
        error = (await app.call("demo.increment", name="after", key="after")).error
        assert error is not None
        assert error.message.startswith("the database has gone back: it has another one in the place of record ")
        assert "after" not in sample.world.counters

    # The next process is refused as well: what was signed is gone.
    with pytest.raises(Failure) as refused:
        async with opened(tmp_path / "home", pair.address):
            pass
    assert refused.value.code == "E3804"


@pytest.mark.proves("OPS-10")
async def test_readiness_follows_a_server_that_is_stopped_and_started(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "READY_WITHIN_S", 2.0)
    sample.reset()
    async with (
        opened(tmp_path / "home", pair.first.address) as app,
        serving(Service(app), LOOPBACK) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as web,
    ):

        async def ready() -> tuple[int, str, set[str]]:
            """The status, twice, and the parts that are not healthy."""
            answer = await web.get("/ready")
            told = answer.json()
            return (
                answer.status_code,
                told["status"],
                {one for one, is_ in told["dependencies"].items() if is_ != "healthy"},
            )

        async def down() -> bool:
            # The keys of the signer are checked against what the store says of them.
            return await ready() == (503, "down", {"store", "signer"})

        async def healthy() -> bool:
            return await ready() == (200, "healthy", set())

        assert await healthy()
        await asyncio.to_thread(pair.first.stop, "fast")
        await until(down)
        assert (await web.get("/health")).json()["status"] == "healthy"
        refused = await app.call("demo.increment", name="a", key="meanwhile")
        assert code(refused) in ("E3801", "E3803")

        await asyncio.to_thread(pair.first.start)
        await until(healthy)
        assert (await app.call("demo.increment", name="a", key="afterwards")).ok
    assert sample.world.counters == {"a": 1}


async def test_doctor_warns_about_a_server_that_may_lose_or_damage_what_was_committed(
    tmp_path: Path, pair: Pair, postgres_server: Server
) -> None:
    async def warned(name: str, address: str) -> list[str]:
        async with opened(tmp_path / name, address):
            found = examine(home_at(tmp_path / name, address), machine=False)
        return [one.what for one in found if "a crash of the server" in one.what]

    assert await warned("one", pair.address) == [
        "fsync is off: a crash of the server may lose or damage what was acknowledged"
    ]
    assert await warned("both", postgres_server.new_schema()) == [
        "fsync and full_page_writes are off: a crash of the server may lose or damage what was acknowledged"
    ]
    safe = Server(("listen_addresses=",))
    try:
        assert await warned("none", safe.address) == []
    finally:
        safe.remove()

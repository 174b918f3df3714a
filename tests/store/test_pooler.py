"""A store on PostgreSQL behind PgBouncer: in session mode everything works, in transaction mode nothing is opened."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest

from interlock import Effect, Field, Interlock, Preview, tool
from interlock.audit.chain import verify
from interlock.core.errors import Failure
from interlock.store import changes, epochs
from interlock.store.homes import home_at
from interlock.store.postgres.connection import PostgresConnection, connected
from interlock.store.postgres.pooler import pooler_mode
from tests.support.calls import until
from tests.support.cli import Cli
from tests.support.cluster import Cluster, Node
from tests.support.pooler import Pooler
from tests.support.postgres import Server

PATIENCE_S = 120.0


@pytest.fixture
def make_pooler(postgres_server: Server) -> Iterator[Callable[..., Pooler]]:
    made: list[Pooler] = []

    def make(mode: str, **options: Any) -> Pooler:
        made.append(Pooler(postgres_server, mode, **options))
        return made[-1]

    yield make
    for pooler in made:
        pooler.remove()


def name() -> str:
    return f"pooled_{secrets.token_hex(4)}"


async def post(cluster: Cluster, node: Node, entry: str) -> bool:
    """Make an entry, again and again with its key until the call is answered. Returns whether it was replayed."""
    sent = {"tool_id": "cluster.post", "parameters": {"name": entry}, "idempotency_key": entry}
    async with httpx.AsyncClient(headers=cluster.bearer, timeout=PATIENCE_S) as client, asyncio.timeout(PATIENCE_S):
        while True:
            answer = await client.post(f"http://127.0.0.1:{node.port}/v1/tools/invoke", json=sent)
            if answer.status_code == 200:
                return answer.json()["replayed"]
            assert answer.json()["error"]["error_code"] in ("E3801", "E3803", "E3409"), answer.json()
            await asyncio.sleep(0.05)


async def test_servers_behind_a_pooler_in_session_mode_serve_and_go_on_when_it_was_killed(
    tmp_path: Path, make_pooler: Callable[..., Pooler]
) -> None:
    pooler = make_pooler("session")
    cluster = Cluster(tmp_path, pooler.new_database(name()), 2)
    try:
        nodes = [await asyncio.to_thread(cluster.start, number) for number in range(2)]
        replayed = [await post(cluster, node, "first") for node in nodes]
        assert replayed == [False, True]
        for round_ in range(3):
            pooler.kill()
            during = [asyncio.create_task(post(cluster, node, f"{round_}-{node.port}")) for node in nodes]
            await asyncio.to_thread(pooler.start)
            assert await asyncio.gather(*during)
        assert set(cluster.entries().values()) == {1}
        assert len(cluster.entries()) == 7
        doctor = nodes[0].cli("doctor")
        assert "reached through a connection pooler in session mode" in doctor.out
        verified = nodes[1].cli("audit", "verify")
        assert verified.code == 0, verified.out
    finally:
        cluster.close()


NOT_COPIED = shutil.ignore_patterns("anchors.jsonl", "instances", "*.lock")
NAMES = Annotated[str, Field(description="a name", examples=["a"])]
inside: list[str] = []
met: list[str] = []


@tool(version="1.0.0", mutation_class="write_reversible", namespace="room", effects=[Effect("room:only", "UPDATE")])
async def enter(name: NAMES) -> str:
    """Be alone in the room for a moment."""
    met.extend(inside)
    inside.append(name)
    await asyncio.sleep(0.005)
    inside.remove(name)
    return name


@enter.preview
def preview(name: str) -> Preview:
    return Preview(impact=f"{name} in the room")


@enter.compensate
def leave(name: str) -> None:
    """Nobody is left in it."""


async def test_locks_and_notices_work_between_nodes_behind_a_pooler_in_session_mode(
    tmp_path: Path, make_pooler: Callable[..., Pooler], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = make_pooler("session").new_database(name())
    async with Interlock.open(tmp_path / "a", store=address, housekeeping=False) as one:
        await one.add(enter)
        shutil.copytree(tmp_path / "a", tmp_path / "b", ignore=NOT_COPIED)
        async with Interlock.open(tmp_path / "b", store=address, housekeeping=False) as other:
            other.catalog.attach(enter)
            met.clear()
            calls = [app.call("room.enter", name=f"{at}", key=f"{at}") for at in range(12) for app in (one, other)]
            results = await asyncio.gather(*calls)
            assert met == []
            # Of two calls with one key one ran, and the other waited for its outcome.
            assert [result.value for result in results] == [f"{at // 2}" for at in range(24)]
            assert sum(result.replayed for result in results) == 12

            # From here on only a notice can let a node find a change.
            seen: list[object] = []
            other.journal.changes.watch(("decisions",), lambda reader: None, seen.append)
            other.journal.changes.start()
            monkeypatch.setattr(changes, "READ_EVERY_S", 3600.0)
            monkeypatch.setattr(changes, "READ_IDLE_EVERY_S", 3600.0)
            other.journal.changes.note_news()  # the read before may have begun before the watch was there
            listener = other.journal.changes._listener  # pyright: ignore[reportPrivateUsage]
            assert listener is not None
            await until(lambda: listener.listening and seen)
            for expected in range(len(seen) + 1, len(seen) + 4):
                await one.journal.commit(lambda transaction: epochs.advance(transaction, epochs.DECISIONS))
                await until(lambda expected=expected: len(seen) == expected)
    verdict = verify(home_at(tmp_path / "b", address))
    assert verdict.intact, verdict.faults


@pytest.mark.parametrize(
    ("mode", "in_turns", "free"),
    [
        ("transaction", False, 0),
        ("transaction", False, 3),
        ("transaction", True, 1),
        ("transaction", True, 2),
        ("transaction", True, 3),
        ("statement", False, 0),
    ],
)
async def test_a_pooler_that_shares_out_sessions_is_refused_before_anything_is_made(
    tmp_path: Path, make_pooler: Callable[..., Pooler], postgres_server: Server, mode: str, in_turns: bool, free: int
) -> None:
    database = name()
    address = make_pooler(mode, in_turns=in_turns).new_database(database)
    with ExitStack() as stack:  # after which the pooler has so many sessions that nobody uses
        clients = [stack.enter_context(closing(PostgresConnection(address))) for _ in range(free)]
        for statement in ("BEGIN", "ROLLBACK"):
            for client in clients:
                client.execute(statement)
    with pytest.raises(Failure) as refused:
        async with Interlock.open(tmp_path / "home", store=address):
            pass
    assert refused.value.code == "E3108"
    assert "not in session mode" in refused.value.message
    assert "pool_mode = session" in refused.value.resolution
    direct = postgres_server.address.replace("/postgres?", f"/{database}?")
    with closing(PostgresConnection(direct)) as connection:
        assert connection.all("SELECT tablename FROM pg_tables WHERE schemaname = 'public'") == []


def test_a_pooler_that_shares_out_sessions_is_known_while_other_clients_are_busy(
    make_pooler: Callable[..., Pooler],
) -> None:
    """Others take and leave sessions meanwhile, so that four statements alone may look as in session mode."""
    address = make_pooler("transaction", in_turns=True).new_database(name())
    over = threading.Event()

    def work() -> None:
        with connected(address) as client:
            while not over.is_set():
                client.execute(b"SELECT pg_sleep(0.0005)", prepare=False)

    others = [threading.Thread(target=work) for _ in range(4)]
    for one in others:
        one.start()
    try:
        for _ in range(40):
            with closing(PostgresConnection(address)) as connection:
                assert pooler_mode(connection, address) == "transaction"
    finally:
        over.set()
        for one in others:
            one.join()


async def test_doctor_names_a_pooler_that_was_set_to_another_mode(
    tmp_path: Path, make_pooler: Callable[..., Pooler], postgres_server: Server
) -> None:
    database = name()
    pooled = make_pooler("transaction").new_database(database)
    direct = postgres_server.address.replace("/postgres?", f"/{database}?")
    async with Interlock.open(tmp_path / "home", store=direct, housekeeping=False):
        pass
    found = Cli(tmp_path, {"INTERLOCK_STORE": pooled})("doctor")
    assert "the connection pooler of the store is not in session mode" in found.out
    assert "pool_mode = session" in found.out
    assert found.code == 1
    found = Cli(tmp_path, {"INTERLOCK_STORE": direct})("doctor")
    assert "connection pooler" not in found.out

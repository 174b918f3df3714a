"""Our sessions on the server have settings of their own, whatever the server, the database or the role set."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from interlock.core.clock import Clock
from interlock.store import facts
from interlock.store.homes import home_at
from interlock.store.journal import Journal
from interlock.store.port import Transaction, Unit
from interlock.store.signing import Signer
from interlock.store.writer import Writer
from tests.support.pooler import Pooler
from tests.support.ports import unused_port
from tests.support.postgres import OPTIONS, Server

BODY = b'{"kind":"test","call":"x"}'
NAMES = (
    "idle_in_transaction_session_timeout", "lock_timeout", "synchronous_commit", "transaction_isolation",
    "client_connection_check_interval", "tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count",
    "tcp_user_timeout",
)  # fmt: skip
ON_TCP = ("8s", "10s", "on", "read committed", "2s", "5", "2", "3", "10000")


def count(transaction: Transaction) -> None:
    facts.increase(transaction, "counted")
    transaction.append("test", "x", BODY)


@asynccontextmanager
async def opened(path: Path, address: str) -> AsyncGenerator[Journal]:
    home = home_at(path, address)
    home.prepare()
    made = Journal(home, clock=Clock(), signer=Signer(home.keys))
    try:
        yield made
    finally:
        await made.close()


async def in_a_unit(journal: Journal) -> tuple[str, ...]:
    """The settings of the session in which units are run."""

    def look(transaction: Transaction) -> tuple[str, ...]:
        return tuple(transaction.one("SELECT current_setting(?)", (name,))[0] for name in NAMES)

    return await journal.commit(look)


def with_defaults(server: Server, **defaults: str) -> str:
    """The address of a schema for a role that has other defaults than the server."""
    role = f"r{secrets.token_hex(4)}"
    address = server.new_schema()
    with server.connect() as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN SUPERUSER".encode())
        for name, value in defaults.items():
            connection.execute(f"ALTER ROLE {role} SET {name} = '{value}'".encode())
    return address.replace("postgres@", f"{role}@")


@pytest.fixture
def on_tcp(monkeypatch: pytest.MonkeyPatch) -> Generator[Server]:
    monkeypatch.setenv("PGPORT", str(unused_port()))  # for the server and for its clients
    made = Server(f"{OPTIONS} listen_addresses=127.0.0.1")
    yield made
    made.remove()


async def test_a_session_over_the_network_notices_that_the_other_end_is_gone(tmp_path: Path, on_tcp: Server) -> None:
    schema = on_tcp.new_schema().partition("&")[2]
    async with opened(tmp_path / "home", f"postgresql://postgres@127.0.0.1/postgres?{schema}") as journal:
        assert await in_a_unit(journal) == ON_TCP
        ours: Any = journal.writer._connection  # pyright: ignore[reportPrivateUsage]
        with socket.socket(fileno=ours._driver.pgconn.socket) as way:
            try:
                tcp = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
                assert [way.getsockopt(socket.IPPROTO_TCP, one) for one in tcp] == [5, 2, 3, 10_000]
            finally:
                way.detach()


@pytest.mark.parametrize("stronger", [False, True])
async def test_a_commit_is_never_weaker_than_on_whatever_the_role_has(
    tmp_path: Path, postgres_server: Server, stronger: bool
) -> None:
    for given in ("remote_apply",) if stronger else ("off", "local", "remote_write", "on"):
        address = with_defaults(postgres_server, synchronous_commit=given)
        async with opened(tmp_path / given, address) as journal:
            assert (await in_a_unit(journal))[2] == ("remote_apply" if stronger else "on")


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
async def test_units_of_several_nodes_see_each_other_whatever_isolation_the_role_has(
    tmp_path: Path, postgres_server: Server, level: str
) -> None:
    address = with_defaults(postgres_server, default_transaction_isolation=level)
    async with opened(tmp_path / "home", address) as one, opened(tmp_path / "home", address) as other:
        assert (await in_a_unit(one))[3] == "read committed"
        for _ in range(20):
            await asyncio.gather(*(journal.commit(count) for journal in (one, other) for _ in range(3)))
        assert facts.get(one.reader, "counted") == "120"


async def test_the_settings_of_a_session_reach_the_server_through_a_pooler(
    tmp_path: Path, postgres_server: Server
) -> None:
    pooler = Pooler(postgres_server, "session")
    try:
        async with opened(tmp_path / "home", pooler.new_database(f"p{secrets.token_hex(4)}")) as journal:
            # The server is on a socket here, which has no packets.
            assert await in_a_unit(journal) == (*ON_TCP[:5], "0", "0", "0", "0")
    finally:
        pooler.remove()


async def test_a_transaction_that_stands_still_is_undone_and_written_again_once(
    tmp_path: Path, postgres_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends the session in the middle of a unit. Its caller hears nothing of it."""
    standing: list[int] = []
    perform = Writer.perform

    def stand_still(unit: Unit[Any], transaction: Any) -> Any:
        done = perform(unit, transaction)
        if unit is count and not standing:
            standing.append(pid)
            transaction.execute("SET LOCAL idle_in_transaction_session_timeout = 1")
            with postgres_server.connect() as connection:
                while connection.execute(SESSION, (pid,)).fetchone() is not None:
                    pass
        return done

    async with opened(tmp_path / "home", postgres_server.new_schema()) as journal:
        pid = await journal.commit(lambda transaction: transaction.one("SELECT pg_backend_pid()")[0])
        monkeypatch.setattr(Writer, "perform", staticmethod(stand_still))
        await journal.commit(count)
        assert standing == [pid]
        assert facts.get(journal.reader, "counted") == "1"
        assert journal.reader.one("SELECT count(*) FROM journal WHERE kind = 'test'") == (1,)


SESSION = b"SELECT 1 FROM pg_stat_activity WHERE pid = %s"

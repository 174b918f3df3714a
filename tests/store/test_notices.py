"""On PostgreSQL, a process that commits a change wakes the readers of changes of the others."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from interlock import Caller, Interlock
from interlock.registry.quarantine import impose
from interlock.store import changes, epochs, shared_config, tokens
from interlock.store.port import Transaction
from interlock.store.postgres import notices
from interlock.store.postgres.connection import PostgresConnection
from interlock.store.postgres.notices import SEND, Listener
from tests import sample
from tests.support.calls import until
from tests.support.postgres import Server

NOT_COPIED = shutil.ignore_patterns("anchors.jsonl", "instances", "*.lock")
BY = Caller(id="operator", scopes=frozenset({"policy:admin"}))
# Sessions that wait for notices.
_LISTENING = b"SELECT pid FROM pg_stat_activity WHERE query = 'LISTEN interlock' AND state = 'idle'"


@asynccontextmanager
async def two_nodes(tmp_path: Path, address: str) -> AsyncGenerator[tuple[Interlock, Interlock]]:
    """Two data directories on one store, as two machines have them."""
    sample.reset()
    async with Interlock.open(tmp_path / "a", store=address, housekeeping=False) as one:
        await one.add(*sample.TOOLS)
        shutil.copytree(tmp_path / "a", tmp_path / "b", ignore=NOT_COPIED)
        async with Interlock.open(tmp_path / "b", store=address, housekeeping=False) as other:
            yield one, other


def follow(node: Interlock, *families: str) -> Callable[[], int]:
    """Follow epochs at a node. Returns a function that counts how often it has seen another one."""
    seen: list[Any] = []
    node.journal.changes.watch(families, lambda reader: node.home.epochs(reader), seen.append)
    node.journal.changes.start()
    return lambda: len(seen)


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes look for changes so seldom that only a notice can let them find one."""
    monkeypatch.setattr(changes, "READ_EVERY_S", 3600.0)
    monkeypatch.setattr(changes, "READ_IDLE_EVERY_S", 3600.0)


def revoke(transaction: Transaction) -> None:
    tokens.revoke(transaction, "jti", "a", at_ms=transaction.now_ms, by="operator", reason="lost")


def push(transaction: Transaction) -> None:
    shared_config.add(transaction, dict.fromkeys(shared_config.FILES, ""), "config", "operator", None)


CHANGES: dict[str, Callable[[Transaction], Any]] = {
    "revocations": revoke,
    "quarantine": impose("a" * 64, "demo.increment@1.0.0", "call", "seen to lie"),
    "config": push,
    **{
        family: lambda transaction, name=name: epochs.advance(transaction, name)
        for family, name in (
            ("registry", epochs.REGISTRY),
            ("identities", epochs.IDENTITIES),
            ("services", epochs.SERVICES),
            ("upstreams", epochs.UPSTREAMS),
            ("surfaces", epochs.SURFACES),
            ("decisions", epochs.DECISIONS),
            ("secrets", epochs.SECRETS),
        )
    },
}


@pytest.mark.usefixtures("seldom")
async def test_every_kind_of_change_is_found_by_its_notice_alone(tmp_path: Path, postgres_server: Server) -> None:
    assert set(CHANGES) == set(epochs.Epochs._fields)
    async with two_nodes(tmp_path, postgres_server.new_schema()) as (one, other):
        counts = {family: follow(other, family) for family in CHANGES}
        listener = other.journal.changes._listener  # pyright: ignore[reportPrivateUsage]
        assert listener is not None
        await until(lambda: listener.listening and all(count() == 1 for count in counts.values()))
        for family, change in CHANGES.items():
            before = counts[family]()
            await one.journal.commit(change)
            await until(lambda family=family, before=before: counts[family]() > before)


@pytest.mark.usefixtures("seldom")
async def test_a_change_is_found_that_was_made_while_nobody_listened(
    tmp_path: Path, postgres_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    connected = notices.connected

    def held(address: str) -> Any:
        may_go_on.wait()
        return connected(address)

    async with two_nodes(tmp_path, postgres_server.new_schema()) as (one, other):
        count = follow(other, "decisions")
        listener = other.journal.changes._listener  # pyright: ignore[reportPrivateUsage]
        assert listener is not None
        await until(lambda: listener.listening and count() == 1)
        monkeypatch.setattr(notices, "connected", held)
        try:
            with postgres_server.connect() as administrator:
                listening = administrator.execute(_LISTENING).fetchall()
                assert listening
                for (pid,) in listening:
                    administrator.execute(b"SELECT pg_terminate_backend(%s)", (pid,))
            await until(lambda: not listener.listening)
            await one.journal.commit(CHANGES["decisions"])
            assert count() == 1
        finally:
            may_go_on.set()
        await until(lambda: count() == 2)
        await until(lambda: listener.listening)
        await one.journal.commit(CHANGES["decisions"])
        await until(lambda: count() == 3)


async def test_without_notices_changes_are_found_by_reading(
    tmp_path: Path, postgres_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_LISTEN", b"SELECT 1")  # as a pooler in transaction mode would have it
    async with two_nodes(tmp_path, postgres_server.new_schema()) as (one, other):
        count = follow(other, "decisions")
        await until(lambda: count() == 1)
        await one.journal.commit(CHANGES["decisions"])
        await until(lambda: count() == 2)


async def test_notices_of_other_stores_and_of_what_was_rolled_back_are_not_heard(postgres_server: Server) -> None:
    here, elsewhere = postgres_server.new_schema(), postgres_server.new_schema()
    heard = 0

    def news() -> None:
        nonlocal heard
        heard += 1

    listener = Listener(here, news)
    ours, theirs = PostgresConnection(here), PostgresConnection(elsewhere)
    try:
        await until(lambda: heard == 1)  # it began to listen
        theirs.execute(SEND)
        ours.execute("BEGIN")
        ours.execute(SEND)
        ours.execute("ROLLBACK")
        ours.execute(SEND)
        await until(lambda: heard > 1)
        # Notices come in the order in which they were committed, so the others would have come before.
        assert heard == 2
        ours.execute("BEGIN")
        ours.execute(SEND)
        await asyncio.sleep(0)
        assert heard == 2
        ours.execute("COMMIT")
        await until(lambda: heard == 3)
    finally:
        listener.close()
        ours.close()
        theirs.close()

"""One reader tells every cache what other processes changed. When it cannot read for too long, calls are refused."""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from interlock import Interlock
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.contract.manifest import CircuitBreakerConfig
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.demo_tools import balance
from interlock.store import epochs, facts
from interlock.store.changes import FRESH_S, READ_EVERY_S, ChangeReader
from interlock.store.home import Home
from interlock.store.journal import Journal
from interlock.store.port import Reader, Transaction
from interlock.store.signing import Signer
from tests.support import forked

PATIENCE_S = 60.0
AGENT = "did:web:agents.example:one"


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not (await held if inspect.isawaitable(held := holds()) else held):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)


# Changes of a second process

OTHER = """
import asyncio, sys
from interlock import Interlock
from interlock.demo_tools import post
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.contract.manifest import CircuitBreakerConfig
from interlock.registry.quarantine import impose
from interlock.store import upstreams

def upstream(transaction):
    upstreams.insert(transaction, "far", kind="mcp", config="{}", overlay="{}", added_by="test", at_ms=1)

async def main(home, token, digest):
    async with Interlock.open(home, housekeeping=False) as app:
        await app.tokens.revoke(token, reason="lost", by=Caller(id="operator", scopes=frozenset({"tokens:issue"})))
        await app.journal.commit(impose(digest, "demo.balance@1.0.0", "call", "seen to lie"))
        await app.add(post)
        services = app.gateway.services
        config = CircuitBreakerConfig.model_validate({"failure_threshold": 1})
        services.enter("bank", config).done(Failure("E3502", "does not answer"))
        await services.settle()
        await app.journal.commit(upstream)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_every_cache_sees_what_another_process_changed(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path / "home", housekeeping=False) as app:
        await app.add(balance)
        by = app.caller
        await app.identities.register(Identity(did=AGENT, name="agent"), by=by.id)
        await app.tokens.rotate_key(by=by, first=True)
        token = await app.tokens.issue(subject=AGENT, by=by)
        caller = await app.tokens.verifier.verify(token)
        version = await app.catalog.resolve("demo.balance")
        services, config = (
            app.gateway.services,
            CircuitBreakerConfig.model_validate({"failure_threshold": 1}),
        )
        services.enter("bank", config).done()
        assert app.tokens.verifier.known(token) == caller
        assert not app.gateway.quarantine.holds(version.row.digest)
        assert app.upstream_states.unanswered() == frozenset()
        assert [one.row.address for one in await app.catalog.newest()] == ["demo.balance"]
        arguments = [str(app.home.path), token, version.row.digest]
        done = await asyncio.create_subprocess_exec(*forked.python(), "-c", OTHER, *arguments)
        assert await done.wait() == 0

        def refused() -> bool:
            try:
                services.enter("bank", config).abandoned()
            except Failure as failure:
                return failure.code == "E3501"
            return False

        await until(lambda: app.tokens.verifier.known(token) is None)
        assert caller.capability is not None
        with pytest.raises(Failure) as void:
            app.tokens.verifier.check(caller.capability)
        assert void.value.code == "E3201"
        await until(lambda: app.gateway.quarantine.holds(version.row.digest))

        async def both() -> bool:
            return [one.row.address for one in await app.catalog.newest()] == ["demo.balance", "demo.post"]

        await until(both)
        await until(refused)
        await until(lambda: app.upstream_states.answers("far"))


# One reader


async def test_calls_read_no_epoch_on_the_event_loop_and_one_thread_reads_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Interlock.open(tmp_path / "home", housekeeping=False) as app:
        await app.add(balance)
        changes = app.journal.changes
        asked: list[str] = []
        where: list[str] = []
        changes.watch(("registry",), _revision, lambda _: None, also=lambda: where.append(_thread()))
        for name in ("one", "all", "each"):
            read = getattr(type(app.journal.reader), name)

            def counted(self: Any, statement: str, *given: Any, read: Any = read) -> Any:
                asked.append(statement)
                return read(self, statement, *given)

            monkeypatch.setattr(type(app.journal.reader), name, counted)
        await app.call("demo.balance", account="cash")
        await asyncio.sleep(2 * FRESH_S)
        await app.call("demo.balance", account="cash")
        async with asyncio.timeout(PATIENCE_S):
            while where.count("interlock-changes") < 10:
                result = await app.call("demo.balance", account="cash")
                assert result.error is None
        families = ("epoch", "revocation", "quarantine", "breaker", "suspension", "FROM upstream")
        assert [one for one in asked if any(word in one for word in families)] == []
        assert [one.name for one in threading.enumerate()].count("interlock-changes") == 1
    assert [one.name for one in threading.enumerate()].count("interlock-changes") == 0


async def test_a_process_that_only_looks_once_starts_no_thread(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path / "home", housekeeping=False) as app:
        await app.catalog.rows()
        assert "interlock-changes" not in {one.name for one in threading.enumerate()}


# A store that cannot be read


def _thread() -> str:
    return threading.current_thread().name


async def _answer(app: Interlock) -> str | None:
    result = await app.call("demo.balance", account="cash")
    return None if result.error is None else result.error.code


@pytest.mark.sqlite_only("the file of a store is removed or replaced")
@pytest.mark.parametrize("how", ["removed", "replaced"])
async def test_calls_are_refused_when_the_database_is_gone_for_longer_than_the_bound_and_recover(
    tmp_path: Path, how: str
) -> None:
    async with Interlock.open(tmp_path / "home", housekeeping=False, max_stale_s=0.2) as app:
        await app.add(balance)
        assert await _answer(app) is None
        database, away = app.home.database, tmp_path / "away"
        database.rename(away)
        if how == "replaced":
            shutil.copy(away, database)
        async with asyncio.timeout(PATIENCE_S):
            while (code := await _answer(app)) is None:  # noqa: ASYNC110 - only time brings it about
                await asyncio.sleep(0.01)
        assert code == "E3801"
        assert (await Service(app).health.readiness())[0] == 503
        with pytest.raises(Failure) as refused:
            await app.catalog.resolve("demo.balance")
        assert "removed or replaced" in refused.value.message
        os.replace(away, database)
        assert await _answer(app) is None


@pytest_asyncio.fixture
async def journal(tmp_path: Path) -> AsyncGenerator[Journal]:
    home = Home(tmp_path)
    home.prepare()
    made = Journal(home, clock=Clock(), signer=Signer(home.keys), max_stale_s=0.5)
    yield made
    await made.close()


def _revision(reader: Reader) -> str | None:
    return epochs.read(reader).registry


def _change(transaction: Transaction) -> None:
    epochs.advance(transaction, epochs.REGISTRY)


def _stale(changes: ChangeReader) -> bool:
    try:
        changes.catch_up()
    except Failure as failure:
        return failure.code == "E3801"
    return False


async def test_what_is_known_is_used_up_to_the_bound_and_no_longer(tmp_path: Path) -> None:
    home, now = Home(tmp_path), [100.0]
    home.prepare()
    journal = Journal(home, clock=Clock(), signer=Signer(home.keys), monotonic=lambda: now[0], max_stale_s=3.0)
    try:
        changes, seen = journal.changes, list[str | None]()
        changes.watch(("registry",), _revision, seen.append)
        changes.catch_up()
        assert (seen, changes.age_s, changes.fresh_until) == ([None], 0.0, 100.0 + FRESH_S)
        home.database.rename(tmp_path / "away")
        now[0] += 2.9
        changes.catch_up()
        assert changes.fresh_until <= 103.0
        now[0] = 103.0
        for _ in range(2):
            with pytest.raises(Failure) as refused:
                changes.catch_up()
            assert refused.value.code == "E3801"
        (tmp_path / "away").rename(home.database)
        changes.catch_up()
        assert changes.age_s == 0.0
    finally:
        await journal.close()


async def test_a_read_that_hangs_refuses_calls_after_the_bound_and_none_after_it_ends(journal: Journal) -> None:
    changes, loop_thread = journal.changes, threading.current_thread()
    hangs, go_on = threading.Event(), threading.Event()

    def hanging() -> None:
        if hangs.is_set() and threading.current_thread() is not loop_thread:
            go_on.wait(PATIENCE_S)

    changes.watch(("registry",), _revision, lambda _: None, also=hanging)
    changes.catch_up()
    changes.catch_up()
    hangs.set()
    await until(lambda: _stale(changes))
    hangs.clear()
    go_on.set()
    await until(lambda: not _stale(changes))


@pytest.mark.parametrize("ask", [ChangeReader.caught_up, ChangeReader.look])
async def test_a_slow_read_is_waited_for_while_the_loop_goes_on_however_far_the_clock_was_moved(
    tmp_path: Path, ask: Callable[[ChangeReader], Coroutine[Any, Any, None]]
) -> None:
    home, now = Home(tmp_path), [100.0]
    home.prepare()
    journal = Journal(home, clock=Clock(), signer=Signer(home.keys), monotonic=lambda: now[0])
    changes, loop_thread = journal.changes, threading.current_thread()
    slow, reading, go_on = threading.Event(), threading.Event(), threading.Event()

    def slowly() -> None:
        if slow.is_set() and threading.current_thread() is not loop_thread:
            reading.set()
            go_on.wait(PATIENCE_S)

    try:
        changes.watch(("registry",), _revision, lambda _: None, also=slowly)
        changes.catch_up()
        changes.start()
        slow.set()
        assert reading.wait(PATIENCE_S)
        now[0] += FRESH_S
        changes.catch_up()
        assert changes.fresh_until == now[0] + FRESH_S, "calls need not ask again one by one"
        now[0] += 3600.0
        with pytest.raises(Failure, match="does not answer"):
            changes.catch_up()  # it cannot wait, and what is known is too old
        waiting = asyncio.create_task(ask(changes))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        slow.clear()
        go_on.set()  # by the loop: if it were held, the read would not end
        await waiting
        changes.catch_up()
    finally:
        go_on.set()
        await journal.close()


async def test_a_cache_that_is_added_while_the_thread_reads_waits_for_the_end_of_that_read(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.prepare()
    journal = Journal(home, clock=Clock(), signer=Signer(home.keys))
    changes, loop_thread = journal.changes, threading.current_thread()
    slow, reading, go_on = threading.Event(), threading.Event(), threading.Event()

    def slowly() -> None:
        if slow.is_set() and threading.current_thread() is not loop_thread:
            reading.set()
            go_on.wait(PATIENCE_S)

    end = threading.Timer(0.05, go_on.set)
    try:
        changes.watch(("registry",), _revision, lambda _: None, also=slowly)
        changes.catch_up()
        changes.start()
        known: list[str | None] = []
        changes.watch(("registry",), _revision, known.append)
        slow.set()
        changes.hurry()
        assert reading.wait(PATIENCE_S)
        end.start()
        changes.catch_up()
        assert known
    finally:
        go_on.set()
        end.cancel()
        await journal.close()


async def test_how_old_what_is_known_is_can_be_told_as_a_share_of_the_bound(tmp_path: Path) -> None:
    home, now = Home(tmp_path), [100.0]
    home.prepare()
    journal = Journal(home, clock=Clock(), signer=Signer(home.keys), monotonic=lambda: now[0], max_stale_s=4.0)
    changes = journal.changes
    try:
        changes.catch_up()
        assert changes.stale_share() is None, "nobody reads for this process yet"
        home.database.rename(tmp_path / "away")
        changes.start()
        now[0] += 3.0
        assert changes.stale_share() == 0.75
        (tmp_path / "away").rename(home.database)
        await until(lambda: changes.stale_share() == 0.0)
    finally:
        await journal.close()


async def test_a_change_that_cannot_be_loaded_refuses_calls_at_once(journal: Journal) -> None:
    changes, broken = journal.changes, [False]

    def load(reader: Reader) -> str | None:
        if broken[0]:
            raise Failure("E3801", "the registry cannot be read")
        return _revision(reader)

    seen: list[str | None] = []
    changes.watch(("registry",), load, seen.append)
    changes.catch_up()
    broken[0] = True
    await journal.commit(_change)
    with pytest.raises(Failure):
        await changes.look()
    assert _stale(changes)
    broken[0] = False
    changes.catch_up()
    assert seen == [None, "1"]


async def test_a_change_of_this_process_counts_at_once_and_an_older_read_of_the_thread_does_not_undo_it(
    journal: Journal,
) -> None:
    changes, loop_thread, seen = journal.changes, threading.current_thread(), list[str | None]()
    loaded = threading.Event()

    def load(reader: Reader) -> str | None:
        found = _revision(reader)
        if found is not None and threading.current_thread() is not loop_thread:
            loaded.set()
        return found

    changes.watch(("registry",), load, seen.append)
    changes.catch_up()
    changes.catch_up()  # starts the thread
    await journal.commit(_change)
    assert loaded.wait(PATIENCE_S)  # the thread has read it; the loop stands still, so nothing is taken over yet
    await journal.commit(_change)
    await changes.look()
    assert seen[-1] == "2"
    await asyncio.sleep(2 * READ_EVERY_S)
    assert seen[-1] == "2"
    assert seen == sorted(seen, key=lambda one: one or "")


async def test_another_thread_may_ask_and_caches_change_on_the_loop(journal: Journal) -> None:
    changes, where = journal.changes, list[int]()
    changes.watch(("registry",), _revision, lambda _: where.append(threading.get_ident()))
    changes.catch_up()
    await journal.commit(_change)
    await asyncio.to_thread(changes.catch_up)
    await until(lambda: len(where) == 2)
    assert set(where) == {threading.get_ident()}


async def test_a_watch_that_was_ended_hears_no_more(journal: Journal) -> None:
    seen: list[str | None] = []
    end = journal.changes.watch(("registry",), _revision, seen.append)
    await journal.changes.look()
    end()
    await journal.commit(_change)
    await journal.changes.look()
    assert seen == [None]


@pytest.mark.parametrize("name", [epochs.REGISTRY, epochs.IDENTITIES, epochs.SERVICES, epochs.UPSTREAMS])
async def test_each_epoch_rises_by_one_and_is_read_with_all_others(journal: Journal, name: str) -> None:
    before = epochs.read(journal.reader)
    await journal.commit(lambda transaction: epochs.advance(transaction, name))
    after = epochs.read(journal.reader)
    assert facts.get(journal.reader, name) == "1"
    assert sum(one != other for one, other in zip(before, after, strict=True)) == 1


async def test_a_read_that_begins_while_the_store_is_closed_is_no_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = Home(tmp_path / "home")
    home.open_database().close()
    begun, ends = threading.Event(), threading.Event()

    def monotonic() -> float:
        if threading.current_thread() is not threading.main_thread() and not begun.is_set():
            begun.set()  # the thread is about to read
            assert ends.wait(PATIENCE_S)
        return 0.0

    reader = ChangeReader(home, monotonic=monotonic)
    reader.start()
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    stopping = asyncio.create_task(asyncio.to_thread(reader.stop))
    await until(lambda: reader._stopped)  # pyright: ignore[reportPrivateUsage]
    ends.set()
    await stopping
    assert not caplog.records

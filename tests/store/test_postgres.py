"""The store on PostgreSQL: several processes on one chain, a server that goes away, leases, and what is verified."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import psycopg
import pytest
import pytest_asyncio

from interlock import Context, Effect, Field, Interlock, tool
from interlock.api.doctor import examine
from interlock.api.health import Health
from interlock.api.listing import Wanted
from interlock.api.service import Service
from interlock.audit.chain import verify
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.store import facts, last_head, verify_reads
from interlock.store.homes import home_at
from interlock.store.journal import Journal
from interlock.store.node_files import compare, differences, nodes
from interlock.store.port import Reader, StoreError, Transaction
from interlock.store.postgres import leases
from interlock.store.postgres.connection import PostgresConnection
from interlock.store.postgres.home import PostgresHome
from interlock.store.postgres.layout import CONNECTIONS, departures
from interlock.store.readers import THREADS, Readers
from interlock.store.signing import Signer
from tests import sample, warm
from tests.support.calls import admit, code, until
from tests.support.cli import Cli
from tests.support.postgres import Server
from tests.support.stores import busy, impatient

TOOL = '''
from typing import Annotated
from interlock import Field, tool

Number = Annotated[int, Field(description="a whole number", examples=[1])]


@tool(version="1.0.0", mutation_class="read_only", namespace="demo", external_io=False)
async def add(a: Number, b: Number = 5) -> int:
    """Add two whole numbers."""
    return a + b
'''
Whole = Annotated[int, Field(description="a whole number", examples=[1])]
BODY = b'{"kind":"test","call":"x"}'
SETTINGS_LEFT = "numbers of parts that are not built"


@pytest.fixture
def address(postgres_server: Server) -> str:
    return postgres_server.new_schema()


@pytest.fixture
def home(address: str, tmp_path: Path) -> PostgresHome:
    made = home_at(tmp_path / "home", address)
    assert isinstance(made, PostgresHome)
    return made


@pytest_asyncio.fixture
async def journal(home: PostgresHome) -> AsyncGenerator[Journal]:
    home.prepare()
    made = Journal(home, clock=Clock(), signer=Signer(home.keys))
    yield made
    await made.close()


def copied(home: Path, other: Path) -> None:
    """Copy what another machine needs of a data directory."""
    for name in ("keys", "manifests"):
        if (home / name).exists():
            shutil.copytree(home / name, other / name)
    for name in ("policy.cedar", "principals.toml"):
        shutil.copy(home / name, other)


def count(transaction: Transaction) -> int:
    """A unit that shows when it counts twice."""
    facts.increase(transaction, "counted")
    transaction.append("test", "x", BODY)
    return transaction.now_ms


def counted(journal: Journal) -> tuple[str | None, int]:
    (records,) = journal.reader.one("SELECT count(*) FROM journal")
    return facts.get(journal.reader, "counted"), records


def driver(journal: Journal) -> Any:
    return journal.writer._connection._driver  # pyright: ignore


def run(address: str, *statements: str) -> None:
    """Run statements as somebody who may do anything."""
    with closing(psycopg.connect(address, autocommit=True)) as connection:
        for statement in statements:
            connection.execute(statement.encode())


async def test_units_of_one_turn_are_committed_together_and_one_that_refuses_leaves_nothing(journal: Journal) -> None:
    def refuses(transaction: Transaction) -> None:
        count(transaction)
        raise Failure("E3004", "no")

    def breaks(transaction: Transaction) -> None:
        transaction.execute("INSERT INTO fact (name, value) VALUES ('twice', '1'), ('twice', '2')")

    futures = [journal.submit(unit) for unit in (count, refuses, count, breaks, count)]
    ended = await asyncio.gather(*futures, return_exceptions=True)
    assert [isinstance(one, int) for one in ended] == [True, False, True, False, True]
    assert counted(journal) == ("3", 3)


def test_threads_that_find_their_connection_lost_open_one(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    open_one = PostgresConnection._open  # pyright: ignore[reportPrivateUsage]

    def noted(self: PostgresConnection) -> Any:
        opened.append(open_one(self))
        return opened[-1]

    monkeypatch.setattr(PostgresConnection, "_open", noted)
    with closing(PostgresConnection(address, reading=True)) as connection:
        connection.hang_up()
        together = threading.Barrier(8)

        def read(_: int) -> Any:
            together.wait()
            return connection.one("SELECT 7")

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(read, range(8))) == [(7,)] * 8
        assert [one.closed for one in opened] == [True, False]
    assert opened[-1].closed


async def test_two_writers_of_one_home_begin_their_own_transactions(home: PostgresHome, journal: Journal) -> None:
    other = Journal(home, clock=Clock(), signer=Signer(home.keys))
    try:
        for one in (journal, other, journal):
            await one.commit(count)
    finally:
        await other.close()
    assert counted(journal) == ("3", 3)


async def test_a_connection_that_was_cut_is_opened_again_and_the_unit_runs_once(journal: Journal, address: str) -> None:
    await journal.commit(count)
    run(address, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        " AND application_name = 'interlock'")  # fmt: skip
    await journal.commit(count)
    assert counted(journal) == ("2", 2)


class Cut:
    """Cuts the connection of a journal while it commits, once, before or after the server has done so."""

    def __init__(self, journal: Journal, monkeypatch: pytest.MonkeyPatch, *, arrives: bool, error: Exception) -> None:
        self._broken, self._arrives, self._error = driver(journal), arrives, error
        self._execute = self._broken.execute
        monkeypatch.setattr(self._broken, "execute", self._cut)

    def _cut(self, statement: bytes, *given: Any) -> Any:
        if statement == b"COMMIT":
            if self._arrives:
                self._execute(statement)
            if isinstance(self._error, psycopg.Error):
                self._broken.close()
            raise self._error
        return self._execute(statement, *given)


def failing_once(error: Exception, real: Callable[..., Any]) -> Callable[..., Any]:
    """A function that raises an error when it is called for the first time."""
    left = [error]

    def once(*given: Any, **named: Any) -> Any:
        if left:
            raise left.pop()
        return real(*given, **named)

    return once


CUT = psycopg.OperationalError("the connection was cut")
NO_FILE = OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize("error", [CUT, NO_FILE, MemoryError()], ids=repr)
@pytest.mark.parametrize("units", [1, 3])
@pytest.mark.parametrize("arrives", [True, False])
async def test_a_commit_whose_answer_is_lost_counts_once(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, arrives: bool, units: int, error: Exception
) -> None:
    await journal.commit(count)
    broken = driver(journal)
    Cut(journal, monkeypatch, arrives=arrives, error=error)
    await asyncio.gather(*(journal.submit(count) for _ in range(units)))
    assert driver(journal) is not broken
    assert counted(journal) == (str(units + 1), units + 1)


@pytest.mark.parametrize("error", [NO_FILE, MemoryError(), RuntimeError("can't start new thread")], ids=repr)
@pytest.mark.parametrize("units", [1, 3])
@pytest.mark.parametrize("arrives", [True, False])
async def test_a_lost_commit_counts_once_where_the_process_cannot_connect_at_once(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, arrives: bool, units: int, error: Exception
) -> None:
    """The process has no free file descriptor, or no memory, at the moment in which it connects again."""
    await journal.commit(count)
    Cut(journal, monkeypatch, arrives=arrives, error=CUT)
    monkeypatch.setattr(psycopg, "connect", failing_once(error, psycopg.connect))
    await asyncio.gather(*(journal.submit(count) for _ in range(units)))
    assert counted(journal) == (str(units + 1), units + 1)


@pytest.mark.parametrize("units", [1, 3])
async def test_a_lost_commit_counts_once_where_the_next_connection_is_cut_as_well(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, units: int
) -> None:
    """The outcome is known, and the connection is lost again while the end of the chain is compared."""
    await journal.commit(count)
    Cut(journal, monkeypatch, arrives=True, error=CUT)
    compare = failing_once(StoreError("cut again"), last_head.refuse_lost)

    def cut(reader: PostgresConnection, *known: Any) -> None:
        try:
            compare(reader, *known)
        except StoreError:
            reader.hang_up()
            raise

    monkeypatch.setattr(last_head, "refuse_lost", cut)
    await asyncio.gather(*(journal.submit(count) for _ in range(units)))
    assert counted(journal) == (str(units + 1), units + 1)


@pytest.mark.parametrize("units", [1, 3])
async def test_what_is_committed_counts_once_whatever_fails_after_it(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, units: int
) -> None:
    await journal.commit(count)
    monkeypatch.setattr("interlock.store.anchors.ANCHOR_AFTER_S", 0.0)
    monkeypatch.setattr("interlock.store.anchors.note_anchor", failing_once(MemoryError(), lambda *_: None))
    await asyncio.gather(*(journal.submit(count) for _ in range(units)))
    assert counted(journal) == (str(units + 1), units + 1)


def test_a_process_without_a_free_file_descriptor_is_told_that_the_store_cannot_be_reached(address: str) -> None:
    script = """
import os, resource, sys
from interlock.store.port import StoreError
from interlock.store.postgres.connection import connected
connected(sys.argv[1]).close()  # everything is loaded
highest = max(map(int, os.listdir("/proc/self/fd")))
resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, highest + 8))
held = []
while True:
    try:
        held.append(os.dup(0))
    except OSError:
        break
for _ in range(6):
    try:
        connected(sys.argv[1]).close()
    except StoreError:
        os.close(held.pop())
    else:
        break
else:
    sys.exit("never connected")
"""
    subprocess.run([sys.executable, "-c", script, address], check=True, timeout=60)


async def test_a_process_that_ends_does_not_wait_for_ever_for_the_outcome_of_a_commit(
    home: PostgresHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interlock.store.postgres.home.GIVE_UP_S", 0.0)
    home.prepare()
    journal = Journal(home, clock=Clock(), signer=Signer(home.keys))
    await journal.commit(count)
    broken = driver(journal)
    execute, tried = broken.execute, threading.Event()

    def cut(statement: bytes, *given: Any) -> Any:
        if statement == b"COMMIT":
            broken.close()
            raise psycopg.OperationalError("the connection was cut")
        return execute(statement, *given)

    def unreachable(_: PostgresConnection) -> None:
        tried.set()
        raise StoreError("nobody is there")

    monkeypatch.setattr(broken, "execute", cut)
    monkeypatch.setattr(PostgresConnection, "reopen", unreachable)
    future = journal.submit(count)
    await asyncio.to_thread(tried.wait)
    await journal.close()
    with pytest.raises(Failure, match="not known") as unknown:
        await future
    assert unknown.value.code == "E3801"


async def test_a_server_that_is_restarted_costs_no_unit(tmp_path: Path) -> None:
    server = Server()
    try:
        home = home_at(tmp_path / "home", server.new_schema())
        home.prepare()
        journal = Journal(home, clock=Clock(), signer=Signer(home.keys))
        await journal.commit(count)
        server.stop("fast")
        with pytest.raises(Failure) as refused:
            await journal.commit(count)
        assert refused.value.code == "E3801"
        assert "/" not in refused.value.message
        server.start()
        await journal.commit(count)
        assert counted(journal) == ("2", 2)
        await journal.close()
    finally:
        server.remove()


@pytest.mark.proves("AUDIT-04")
async def test_while_another_transaction_holds_the_store_a_write_is_refused_before_it_runs(
    home: PostgresHome, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample.reset()
    async with Interlock.open(home.path, store=address, housekeeping=False) as app:
        await app.add(sample.increment)
        impatient(home, app.journal, monkeypatch)
        with busy(home):
            refused = await app.call("demo.increment", name="a", key="k")
        assert refused.error is not None
        assert (refused.error.code, refused.error.retryable) == ("E3803", True)
        assert sample.world.runs == 0
        assert (await app.call("demo.increment", name="a", key="k")).unwrap() == 1
    assert verify(home).faults == ()


@pytest.mark.parametrize("ahead", [
    "SELECT setval('store_time', {0})",
    "UPDATE store_clock SET ms = {0}",  # as a program of the version before does, which is upgraded later
])  # fmt: skip
async def test_time_never_goes_back_whatever_the_clock_of_the_server_does(
    journal: Journal, home: PostgresHome, address: str, ahead: str
) -> None:
    later_ms = await journal.commit(count) + 20_000
    run(address, ahead.format(later_ms))
    assert home.now_ms(journal.reader) >= later_ms
    for _ in range(2):
        assert await journal.commit(count) >= later_ms


async def test_time_does_not_go_back_when_the_server_crashes(tmp_path: Path) -> None:
    server = Server()
    try:
        address = server.new_schema()
        home = home_at(tmp_path, address)
        home.prepare()
        journal = Journal(home, clock=Clock(), signer=Signer(home.keys))
        later_ms = await journal.commit(count) + 20_000
        run(address, f"SELECT setval('store_time', {later_ms})")
        assert await journal.commit(count) >= later_ms
        await asyncio.to_thread(server.stop, "immediate")
        await asyncio.to_thread(server.start)
        assert await journal.commit(count) >= later_ms
        await journal.close()
    finally:
        server.remove()


async def test_writes_leave_no_dead_row_for_the_time_of_the_store(journal: Journal) -> None:
    """They would be read at each write for as long as somebody has an old snapshot."""
    before = journal.reader.one("SELECT xmin::text, ctid::text FROM store_clock")
    times = [await journal.commit(count) for _ in range(3)]
    assert times == sorted(times)
    assert journal.reader.one("SELECT xmin::text, ctid::text FROM store_clock") == before


async def test_a_process_that_lost_its_lease_may_not_write_any_more(home: PostgresHome, address: str) -> None:
    async with Interlock.open(home.path, store=address) as late, Interlock.open(home.path, store=address) as other:
        assert other.instance.alive(late.instance.id)
        assert home.alive() == 2
        run(address, f"DELETE FROM instance WHERE id = '{late.instance.id}'")  # as another process does it
        while other.instance.alive(late.instance.id):  # noqa: ASYNC110 - it is believed to live for a moment
            await asyncio.sleep(0.05)
        with pytest.raises(Failure, match="taken for dead") as fenced:
            await late.journal.commit(count)
        assert fenced.value.code == "E3801"
        await other.journal.commit(count)


def nobody_else(home: PostgresHome) -> bool:
    return home.others() == 0


def may_be_migrated(home: PostgresHome) -> bool:
    try:
        home.refuse_in_use("0001", "0003", "0002")
    except Failure as failure:
        return failure.code != "E3804"
    return True


def may_be_copied(home: PostgresHome) -> bool:
    return home.in_use() == 0


async def until_leases_end(address: str) -> None:
    """Wait until the server runs for long enough that a lease can have run out."""
    with closing(psycopg.connect(address, autocommit=True)) as connection:

        async def reached() -> bool:
            return connection.execute(
                "SELECT pg_postmaster_start_time() < clock_timestamp() - interval '15 s'"
            ).fetchone() == (True,)

        await until(reached)


@pytest.mark.parametrize("decide", [nobody_else, may_be_migrated, may_be_copied])
async def test_a_process_whose_lease_ran_out_may_not_write_after_a_decision_without_it(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch, decide: Callable[[PostgresHome], bool]
) -> None:
    monkeypatch.setattr(leases, "RENEW_EVERY_S", 3600.0)
    await until_leases_end(address)
    async with Interlock.open(tmp_path / "other", store=address, housekeeping=False) as late:
        copied(tmp_path / "other", tmp_path / "home")
        home = home_at(tmp_path / "home", address)
        assert isinstance(home, PostgresHome)
        assert not decide(home)
        run(address, f"UPDATE instance SET until_ms = 1 WHERE id = '{late.instance.id}'")
        assert decide(home)
        with pytest.raises(Failure, match="taken for dead"):
            await late.journal.commit(count)
        assert late.instance.lost


@pytest.mark.parametrize("decide", [nobody_else, may_be_migrated, may_be_copied])
async def test_no_lease_runs_out_until_everybody_had_time_to_renew_it_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decide: Callable[[PostgresHome], bool]
) -> None:
    monkeypatch.setattr(leases, "RENEW_EVERY_S", 3600.0)
    server = Server()
    try:
        async with Interlock.open(tmp_path / "other", store=server.address, housekeeping=False) as late:
            copied(tmp_path / "other", tmp_path / "home")
            home = home_at(tmp_path / "home", server.address)
            assert isinstance(home, PostgresHome)
            run(server.address, "UPDATE instance SET until_ms = 1")
            assert not decide(home)
            await late.journal.commit(count)
    finally:
        server.remove()


async def test_the_sealing_key_is_not_changed_under_a_process_that_may_still_seal(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_EVERY_S", 3600.0)
    await until_leases_end(address)
    async with Interlock.open(tmp_path / "one", store=address, housekeeping=False) as one:
        copied(tmp_path / "one", tmp_path / "two")
        async with Interlock.open(tmp_path / "two", store=address, housekeeping=False) as two:
            with pytest.raises(Failure) as refused:
                await one.secrets.rotate_key(by="local:ann", others=one.home.others)
            assert refused.value.code == "E3109"
            run(address, f"UPDATE instance SET until_ms = 1 WHERE id = '{two.instance.id}'")
            await one.secrets.rotate_key(by="local:ann", others=one.home.others)
            with pytest.raises(Failure, match="taken for dead"):
                await two.secrets.set("mail", "hunter2", by="local:ben")
            await one.secrets.set("mail", "hunter3", by="local:ann")
            assert await one.secrets.reseal_all(by="local:ann") == []


def test_a_server_that_others_have_taken_for_dead_ends(tmp_path: Path, address: str) -> None:
    """Each of its calls would fail; whoever supervises it starts it again."""
    cli = Cli(tmp_path, {"INTERLOCK_STORE": address})
    with warm.start(("serve", "--port", "0", "--no-grpc", "--no-token"), cli.environment, cli.path) as process:
        assert b"serves" in process.stdout.readline()
        run(address, "DELETE FROM instance")
        _, said = process.communicate()
    assert process.returncode == 1
    assert b"E3801" in said
    assert b"it ends, to be started again" in b" ".join(said.split())


async def test_two_processes_on_one_store_run_a_key_once_and_see_each_others_tools(
    tmp_path: Path, address: str
) -> None:
    sample.reset()
    async with Interlock.open(tmp_path / "one", store=address) as one:
        await one.add(sample.increment)
        async with Interlock.open(tmp_path / "one", store=address) as two:
            two.catalog.attach(sample.increment)
            calls = [app.call("demo.increment", name="a", key="k") for app in (one, two) for _ in range(10)]
            results = await asyncio.gather(*calls)
            assert {result.unwrap() for result in results} == {1}
            assert sample.world.runs == 1
    verdict = verify(home_at(tmp_path / "one", address))
    assert verdict.intact, verdict.faults


@tool(version="1.0.0", mutation_class="read_only", namespace="loop")
def look(ctx: Context, number: Whole) -> int:
    """Look at what the session keeps."""
    return ctx.session.get("number", number)


@tool(
    version="1.0.0",
    mutation_class="write_reversible",
    namespace="loop",
    effects=[Effect("number:{number}", "UPDATE")],
)
async def keep(ctx: Context, number: Whole) -> int:
    """Keep a number in the session."""
    ctx.session["number"] = number
    ctx.effect(f"number:{number}", "UPDATE", before=0, after=number)
    ctx.compensate_with(number=number)
    return number


@keep.compensate
async def _(number: Whole) -> None:
    """Change nothing."""


async def test_calls_wait_for_the_server_on_threads_and_never_on_the_loop(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, on_loop, execute = threading.get_ident(), list[str](), PostgresConnection.execute

    def executed(self: PostgresConnection, statement: str, *parameters: Any) -> Any:
        if threading.get_ident() == loop:
            on_loop.append(statement)
        return execute(self, statement, *parameters)

    async with Interlock.open(tmp_path / "home", store=address) as app:
        await admit(app, look, keep)
        await app.journal.changes.caught_up()
        monkeypatch.setattr(PostgresConnection, "execute", executed)
        for number in (1, 2):
            assert (await app.call("loop.keep", number=number, key=f"k{number}")).unwrap() == number
            assert (await app.call("loop.look", number=0)).unwrap() == number
            assert await app.replay_session() == {"number": number}
            await app.journal.changes.look()
        monkeypatch.undo()
    assert on_loop == []


def backends(address: str) -> list[int]:
    """The connections that Interlock has to a schema."""
    shown = "SELECT pid FROM pg_stat_activity WHERE application_name = 'interlock' AND usename = current_user"
    with closing(psycopg.connect(address, autocommit=True)) as connection:
        return [pid for (pid,) in connection.execute(f"{shown} AND datname = current_database()").fetchall()]


def gone(address: str, pids: set[int]) -> bool:
    """Wait until the server has ended these connections, which it does some time after they are closed."""
    while pids & {*backends(address)}:
        pass
    return True


async def test_long_reads_share_a_few_connections_that_the_server_may_end(home: PostgresHome, address: str) -> None:
    home.prepare()
    readers = Readers(home)

    def pid(reader: Reader) -> int:
        return reader.one("SELECT pg_backend_pid()")[0]

    def pieces(reader: Reader) -> Generator[int]:
        for _ in range(3):
            yield pid(reader)

    used = set(await asyncio.gather(*(readers.read(pid) for _ in range(40))))
    assert len(used) <= THREADS
    assert {one async for one in readers.slices(pieces)} <= used
    with pytest.raises(Failure):
        await readers.read(lambda reader: reader.one("SELECT 1 FROM nowhere"))
    assert await readers.read(pid) in used, "a read that failed leaves its connection usable"
    run(address, *(f"SELECT pg_terminate_backend({one}, 10000)" for one in used))
    again = set(await asyncio.gather(*(readers.read(pid) for _ in range(20))))
    assert len(again) <= THREADS
    assert not again & used
    readers.close()
    assert await asyncio.to_thread(gone, address, again)


@pytest.mark.proves("OPS-07")
async def test_callers_who_find_no_connection_free_are_served_or_told_to_wait(
    postgres_server: Server, tmp_path: Path
) -> None:
    """A server lends a role so many connections. A process that has those it needs runs calls; it may lack others."""
    sample.reset()
    own, role = postgres_server.new_schema(), f"r{secrets.token_hex(6)}"
    run(own, f"CREATE ROLE {role} LOGIN", f"GRANT ALL ON SCHEMA {own.rpartition('%3D')[2]} TO {role}")
    address = own.replace("postgres@", f"{role}@")

    async def read(app: Interlock) -> str:
        try:
            await Service(app).listing.page(Wanted(), by=app.caller)
        except Failure as failure:
            return f"{failure.code} {failure.retryable}"
        return "read"

    async with Interlock.open(tmp_path / "home", store=address) as app:
        await app.add(sample.increment)
        assert (await app.call("demo.increment", name="a", key="first")).ok
        await until(lambda: len(backends(address)) >= CONNECTIONS - THREADS)  # threads make some of those it needs
        run(own, f"ALTER ROLE {role} CONNECTION LIMIT {len(backends(address))}")
        calls = [app.call("demo.increment", name="a", key=f"k{number % 50}") for number in range(100)]
        reads = asyncio.gather(*(read(app) for _ in range(20)))
        results = await asyncio.gather(*calls)
        assert {*await reads} <= {"E3001 True", "read"}
        with pytest.raises(Failure) as refused:
            async with Interlock.open(tmp_path / "home", store=address):
                pass
        assert (refused.value.code, refused.value.retryable, refused.value.retry_after_ms) == ("E3001", True, 1000)
        assert {code(result) for result in results} == {None}
        assert sample.world.runs == 51
        run(own, f"ALTER ROLE {role} CONNECTION LIMIT -1")
        assert await read(app) == "read"
    run(own, f"DROP OWNED BY {role}", f"DROP ROLE {role}")


async def test_two_data_directories_use_one_store_at_the_same_time(tmp_path: Path, address: str) -> None:
    sample.reset()
    other = tmp_path / "other"
    async with Interlock.open(tmp_path / "one", store=address) as one:
        await one.add(sample.increment)
        copied(tmp_path / "one", other)
        async with Interlock.open(other, store=address) as two:
            two.catalog.attach(sample.increment)
            calls = [app.call("demo.increment", name="b", key="first") for app in (one, two) for _ in range(5)]
            assert {result.unwrap() for result in await asyncio.gather(*calls)} == {1}
            assert sample.world.runs == 1
            with pytest.raises(Failure) as refused:
                await one.secrets.rotate_key(by="x", others=one.home.others)
            assert refused.value.code == "E3109"
        assert (await one.call("demo.increment", name="b", key="second")).ok
    for home in (tmp_path / "one", other):
        verdict = verify(home_at(home, address))
        assert verdict.intact, verdict.faults


async def test_a_data_directory_with_another_sealing_key_is_refused(tmp_path: Path, address: str) -> None:
    async with Interlock.open(tmp_path / "one", store=address):
        pass
    copied(tmp_path / "one", tmp_path / "other")
    (tmp_path / "other" / "keys" / "secrets.key").unlink()
    with pytest.raises(Failure, match="sealing key") as refused:
        async with Interlock.open(tmp_path / "other", store=address):
            pass
    assert refused.value.code == "E3804"
    assert "copy the directory `keys`" in refused.value.resolution
    assert not (tmp_path / "other" / "keys" / "secrets.key").exists()
    async with Interlock.open(tmp_path / "one", store=address) as one:
        await one.secrets.rotate_key(by="x", others=one.home.others)
    shutil.copy(tmp_path / "one" / "keys" / "secrets.key", tmp_path / "other" / "keys")
    async with Interlock.open(tmp_path / "other", store=address):
        pass


async def test_a_file_that_differs_between_machines_is_told(tmp_path: Path, address: str) -> None:
    other = tmp_path / "other"
    async with Interlock.open(tmp_path / "one", store=address) as one:
        copied(tmp_path / "one", other)
        (other / "settings.toml").write_text('log_level = "warning"\n')  # which concerns that machine alone
        async with Interlock.open(other, store=address):
            assert differences(one.home) == []
        (other / "policy.cedar").write_text((other / "policy.cedar").read_text() + "\n// here only\n")
        (other / "settings.toml").write_text("token_max_s = 600\n")
        async with Interlock.open(other, store=address):
            told = differences(one.home)
            assert [(found.file, found.directory) for found in told] == [
                ("policy.cedar", str(other)),
                ("settings.toml", str(other)),
            ]
            findings = [found for found in examine(one.home, machine=False) if found.name == "nodes"]
            assert ["policy.cedar" in found.what for found in findings] == [True, False]
            assert (await Health(one).ready())[1]["nodes"] == "degraded"


@pytest.mark.part_of("OPS-06", rest=SETTINGS_LEFT)
async def test_a_process_that_was_started_with_other_settings_is_named(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_EVERY_S", 0.01)
    other = tmp_path / "other"
    async with Interlock.open(tmp_path / "one", store=address) as one:

        async def restart(expected: list[bool]) -> dict[str, Any]:
            async with asyncio.timeout(120):
                while [node.restart for node in nodes(one.home)] != expected:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.01)
            return compare(nodes(one.home))

        copied(tmp_path / "one", other)
        async with Interlock.open(other, store=address):
            (other / "settings.toml").write_text("token_max_s = 600\n")
            assert await restart([False, True]) == {}, "it runs with the settings of the others still"
        async with Interlock.open(other, store=address):
            assert (await restart([False, False])).keys() == {"settings.toml"}
            (tmp_path / "one" / "settings.toml").write_text("token_max_s = 600\n")
            assert await restart([True, False]) == {}


async def test_what_was_changed_in_the_database_shows_when_it_is_verified(home: PostgresHome, address: str) -> None:
    sample.reset()
    async with Interlock.open(home.path, store=address) as app:
        await app.add(sample.increment)
        await app.call("demo.increment", name="a", key="k")
    assert verify(home).intact
    run(
        address,
        "ALTER TABLE journal DISABLE TRIGGER journal_never_changes",
        "UPDATE journal SET body = convert_to(replace(convert_from(body, 'UTF8'), 'increment', 'decrement'), 'UTF8')"
        " WHERE seq = 2",
    )
    faults = {fault.what for fault in verify(home).faults}
    assert "the trigger `journal_never_changes` on `journal` is not as it was made" in faults
    assert any("does not fit its hash" in what for what in faults)
    role = f"r{secrets.token_hex(6)}"
    run(address, f"CREATE ROLE {role}", f"GRANT DELETE ON journal TO {role}")
    assert any(role in fault.what for fault in verify(home).faults)
    run(address, f"DROP OWNED BY {role}", f"DROP ROLE {role}")


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("DROP TRIGGER anchor_stays ON anchor", "anchor_stays"),
        (("CREATE OR REPLACE TRIGGER journal_never_changes BEFORE INSERT ON journal FOR EACH ROW"
         " EXECUTE FUNCTION interlock_never()"), "journal_never_changes"),
        (("CREATE OR REPLACE TRIGGER journal_never_changes BEFORE UPDATE ON journal FOR EACH ROW WHEN (false)"
         " EXECUTE FUNCTION interlock_never()"), "journal_never_changes"),
        (("CREATE OR REPLACE TRIGGER journal_never_changes BEFORE UPDATE ON journal FOR EACH ROW"
         " EXECUTE FUNCTION interlock_payload_use()"), "journal_never_changes"),
        (("CREATE OR REPLACE TRIGGER journal_never_changes BEFORE UPDATE OF kind ON journal FOR EACH ROW"
         " EXECUTE FUNCTION interlock_never()"), "journal_never_changes"),
        ("ALTER FUNCTION interlock_enter(text) SECURITY DEFINER", "interlock_enter"),
        ("ALTER FUNCTION interlock_never() SET search_path = elsewhere", "interlock_never"),
        ("CREATE OR REPLACE FUNCTION interlock_never() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
         "interlock_never"),
        ("CREATE FUNCTION interlock_outcome(integer) RETURNS text LANGUAGE sql AS $$SELECT 'committed'$$",
         "interlock_outcome"),
        ("CREATE TABLE more () INHERITS (revocation)", "revocation"),
        ("CREATE RULE kept AS ON DELETE TO reservation DO INSTEAD NOTHING", "reservation"),
        ("ALTER TABLE ticket ENABLE ROW LEVEL SECURITY", "ticket"),
        ("CREATE TRIGGER more BEFORE INSERT ON ticket FOR EACH ROW EXECUTE FUNCTION interlock_never()", "more"),
    ],
)  # fmt: skip
async def test_a_trigger_or_function_that_was_changed_under_its_name_shows(
    home: PostgresHome, address: str, statement: str, named: str
) -> None:
    home.prepare()
    home.open_database().close()
    with closing(home.reading()) as reader:
        assert list(departures(reader)) == []
    run(address, statement)
    with closing(home.reading()) as reader:
        (fault,) = departures(reader)
    assert f"`{named}`" in fault


async def test_a_store_that_is_gone_though_the_data_directory_had_one_is_refused(
    home: PostgresHome, postgres_server: Server
) -> None:
    async with Interlock.open(home.path, store=home.address) as app:
        await app.journal.commit(count)
    with pytest.raises(Failure) as refused:
        async with Interlock.open(home.path, store=postgres_server.new_schema()):
            pass
    assert refused.value.code == "E3804"


async def test_an_older_schema_takes_the_migrations_that_it_lacks(home: PostgresHome, address: str) -> None:
    async with Interlock.open(home.path, store=address):
        pass
    back = ("DROP TABLE surface", "DROP TABLE surface_tool", "DROP TABLE lock_board", "DROP TABLE shared_config",
            "DROP TABLE tool_source", "DROP FUNCTION interlock_enter", "DROP SEQUENCE store_time",
            "DROP FUNCTION interlock_board", "CREATE FUNCTION interlock_alone(text) RETURNS void LANGUAGE sql AS ''",
            "UPDATE alembic_version SET version_num = '0010'")  # fmt: skip
    run(address, *back)
    async with Interlock.open(home.path, store=address) as app:
        assert app.journal.reader.all("SELECT * FROM surface_tool") == []
    verdict = verify(home)  # the functions are those that a new schema has
    assert verdict.intact, verdict.faults
    run(
        address,
        "UPDATE alembic_version SET version_num = '9999'",
        "UPDATE fact SET value = '9999' WHERE name = 'schema_compatible_since'",
    )
    with pytest.raises(Failure) as newer:
        async with Interlock.open(home.path, store=address):
            pass
    assert newer.value.code == "E3805"


@pytest.mark.parametrize("said_in", ["settings", "environment"])
def test_the_command_line_works_on_it(tmp_path: Path, address: str, said_in: str) -> None:
    (tmp_path / "home").mkdir()
    environment = dict(os.environ)
    if said_in == "settings":
        (tmp_path / "home" / "settings.toml").write_text(f'store = "{address}"\n')
    else:
        environment["INTERLOCK_STORE"] = address

    def interlock(*words: str, status: int = 0) -> str:
        code, out, _ = warm.run(["--home", str(tmp_path / "home"), *words], environment, tmp_path, merged=True)
        assert code == status, out.decode()
        return out.decode()

    (tmp_path / "numbers_to_add.py").write_text(TOOL)
    assert "demo.add" in interlock("tools", "add", str(tmp_path / "numbers_to_add.py"))
    assert "12" in interlock("call", "demo.add", '{"a": 7}')
    assert "demo.add" in interlock("calls", "list")
    assert "intact" in interlock("audit", "verify")
    assert "PostgreSQL" in interlock("doctor")
    assert "intact" in interlock("backup", str(tmp_path / "copy"))
    assert not (tmp_path / "home" / "interlock.db").exists()


async def test_a_lease_that_has_run_out_is_taken_once_the_server_has_been_up_for_as_long(
    home: PostgresHome, address: str
) -> None:
    async with Interlock.open(home.path, store=address) as app:
        run(address, "INSERT INTO instance (id, until_ms, place) VALUES ('dead', 1, 'x'), ('well', 9000000000000, 'x')")
        while app.instance.alive("dead"):  # noqa: ASYNC110 - only the server tells
            await asyncio.sleep(0.1)
        assert app.instance.alive("well")
        assert not app.instance.alive("nobody")


@pytest.mark.usefixtures("journal")
async def test_the_records_of_a_call_are_found_without_reading_the_journal(address: str) -> None:
    """The verifier asks for those of each key. PostgreSQL has no statistics here, as after a fast start."""
    with closing(PostgresConnection(address)) as connection:
        connection.execute(
            "INSERT INTO journal (seq, kind, call, body, hash) SELECT number, 'closed', 'call-' || number,"
            " convert_to(repeat('x', 700), 'UTF8'), ''::bytea FROM generate_series(1000, 9000) AS number"
        )
    with closing(PostgresConnection(address, reading=True)) as reader:
        reader.execute("BEGIN")
        assert [seq for seq, _, _ in verify_reads.records_of_call(reader, "call-7000")] == [7000]
        (read,) = reader.one(
            "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables"
            " WHERE relname = 'journal' AND schemaname = current_schema()"
        )
    assert read < 100

"""Keys, results, costs, budgets and sessions: after any honest history they agree with the journal.

An edit of a row is found. Nothing is found in a backup, in an older home, or in one in which calls run.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock import Effect, Interlock, Preview, tool
from interlock.audit import outcomes
from interlock.audit.chain import verify
from interlock.audit.chain_verdict import ChainVerdict
from interlock.audit.retention import purge
from interlock.settings import Settings
from interlock.store.backup import copied
from interlock.store.connection import SqliteConnection
from interlock.store.homes import home_at
from interlock.testing import FakeClock
from tests.support.histories import BUDGETS, DAY_S, VERSIONS, Text, live, work
from tests.support.stores import opened, unguarded

ACTS = ("fine", "refused", "again", "unclear", "undone", "happened", "never", "large", "charged")


def edited(home: Path, *statements: str) -> ChainVerdict:
    """What the verification says of a copy after an edit."""
    with tempfile.TemporaryDirectory() as directory:
        copy = home_at(shutil.copytree(home, Path(directory) / "home"))
        with unguarded(copy) as db:
            for statement in statements:
                assert db.execute(statement).rowcount > 0
        return verify(copy)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=st.lists(st.sampled_from([*ACTS, "passing"]), min_size=1, max_size=6))
def test_after_any_honest_history_the_tables_agree_with_the_journal(acts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory) / "home"
        asyncio.run(live(home, acts, FakeClock()))
        assert verify(home_at(home)).faults == ()
        whole = verify(home_at(home)).head[0]
        later = FakeClock().now_ms + 9 * 366 * DAY_S * 1000
        for through in (whole // 2, whole):
            purge(home_at(home), Settings.model_validate({}), now_ms=later, by="local:auditor", through=max(through, 1))
            assert verify(home_at(home)).faults == ()


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("lived") / "home"
    asyncio.run(live(home, list(ACTS), FakeClock()))
    return home


FINE, UNCLEAR = "key = 'fine-0'", "key = 'unclear-3'"
CALL = f"(SELECT call FROM reservation WHERE {FINE})"
ZEROS = f"CAST('{'0' * 32}' AS BLOB)"
# As an older version would have kept it, in clear text.
FORGED = """CAST('{"value":"forged","persistence":["inline",null,8,""],"redacted":[]}' AS BLOB)"""


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        (f"DELETE FROM reservation WHERE {FINE}", "is missing in the tables, on record it is 'done'"),
        (f"DELETE FROM reservation WHERE {UNCLEAR}", "is missing in the tables, on record it is 'unknown'"),
        ("DELETE FROM reservation WHERE key = 'happened-5'", "is missing in the tables, on record it is 'done'"),
        ("DELETE FROM reservation WHERE key = 'undo-undone-4'", "is missing in the tables, on record it is 'done'"),
        (f"UPDATE reservation SET state = 'executing' WHERE {FINE}", "'executing' in the tables, on record 'done'"),
        (f"UPDATE reservation SET state = 'done' WHERE {UNCLEAR}", "is 'done' in the tables, on record 'unknown'"),
        (f"UPDATE reservation SET call = 'another' WHERE {FINE}", "call another is in the tables and on no record"),
        (f"UPDATE reservation SET call = CAST(call AS BLOB) WHERE {FINE}", "is in the tables and on no record"),
        (f"UPDATE reservation SET input_hash = 'x' WHERE {FINE}", "input_hash is 'x', on record"),
        (f"UPDATE reservation SET version = '9.9.9' WHERE {FINE}", "version is '9.9.9', on record '1.0.0'"),
        (f"UPDATE reservation SET caller = 'local:eve' WHERE {FINE}", "caller is 'local:eve'"),
        (f"UPDATE reservation SET scope = {ZEROS} WHERE {FINE}", "is filed under another name"),
        (f"UPDATE reservation SET expires_ms = reserved_ms WHERE {FINE}", "before its window does"),
        pytest.param(
            f"UPDATE reservation SET expires_ms = 'never' WHERE {FINE}",
            "before its window does",
            marks=pytest.mark.sqlite_only("columns hold values of any type"),
        ),
        ("UPDATE session SET version = version - 1", "the state of a session has version"),
        ("DELETE FROM session", "the state of a session is missing in the tables"),
        ("UPDATE spend SET held = held - 1", "millionths aside, and calls hold 0"),
        ("UPDATE spend SET spent = -5", "which cannot be"),
        ("UPDATE spend SET spent = spent - 250000", "millionths are spent in the tables, on record"),
        ("UPDATE spend SET spent = 0", "millionths are spent in the tables, on record"),
        ("DELETE FROM spend", "is missing in the tables, on record"),
        (f"DELETE FROM cost WHERE call = {CALL}", "is missing in the tables, on record it is 250000 mill"),
        (f"UPDATE cost SET total = 1 WHERE call = {CALL}", "is 1 millionths in the tables"),
        (f"UPDATE cost SET parts = '{{}}' WHERE call = {CALL}", "on record {'external_api': 250000}"),
        ("UPDATE cost SET total = 1 WHERE call LIKE 'charge:%'", "on record {'retrieval': 500000}"),
        ("INSERT INTO cost VALUES ('a', 't', '', 'local', 5, '{}')", "the cost of call a is in the tables and on no"),
        pytest.param(
            'UPDATE session SET state = \'{"last": "forged"}\'',
            "holds other values than it had on record",
            marks=pytest.mark.sqlite_only("columns hold values of any type"),
        ),
        (f"UPDATE session SET state = {ZEROS}", "cannot be opened"),
        (f"UPDATE reservation SET result = {FORGED} WHERE {FINE}", "has another result than"),
        (f"UPDATE reservation SET result = {FORGED} WHERE key = 'refused-1'", "has another result than"),
        (f"UPDATE reservation SET result = {FORGED} WHERE key = 'happened-5'", "has another result than"),
        (f"UPDATE reservation SET result = substr(result, 1, 40) WHERE {FINE}", "it was changed after it was sealed"),
        (f"UPDATE reservation SET result = NULL WHERE {FINE}", "it is not what was stored"),
        ("UPDATE payload SET body = CAST('1' AS BLOB), size = 1", "has another result than is on record"),
        ("INSERT INTO hold VALUES ('a', 'b', 5, 'c')", "a call holds room in the budget b"),
    ],
)
def test_a_row_that_says_something_else_than_the_record_is_found(lived: Path, statement: str, found: str) -> None:
    verdict = edited(lived, statement)
    assert not verdict.intact
    assert any(found in fault.what for fault in verdict.faults), verdict.faults


def test_a_key_that_was_given_back_and_is_in_the_tables_again_is_found(lived: Path) -> None:
    with opened(home_at(lived)) as db:
        query = "SELECT call FROM journal WHERE kind = 'closed' AND instr(body, CAST('\"again-2\"' AS BLOB)) > 0"
        (call,) = db.execute(query).fetchone()
    verdict = edited(lived, f"UPDATE reservation SET call = '{call}' WHERE {FINE}")
    assert any(
        f"the idempotency key of call {call} is 'done' in the tables, on record it was" in f.what
        for f in verdict.faults
    )


async def test_a_home_in_which_calls_run_agrees(tmp_path: Path) -> None:
    began, go = asyncio.Event(), asyncio.Event()

    @tool(
        version="1.0.0", mutation_class="write_reversible", namespace="out", effects=[Effect("thing:x", "UPDATE")],
        estimated_cost=1.0,
    )  # fmt: skip
    async def waits(name: Text) -> str:
        """Wait until it may go on."""
        began.set()
        await go.wait()
        return name

    @waits.preview
    def _(name: str) -> Preview:
        return Preview(impact=name)

    @waits.compensate
    async def _(name: str) -> None:
        return None

    home = tmp_path / "home"
    async with Interlock.open(home, budgets=BUDGETS, housekeeping=False) as app:
        app.catalog.attach(waits)
        await app.add(waits)
        running = asyncio.create_task(app.call("out.waits", name="a", key="a"))
        await began.wait()
        assert (await asyncio.to_thread(verify, home_at(home))).faults == ()
        if app.home.near:  # a server copies no database that is in use
            forged = await asyncio.to_thread(edited, home, "UPDATE hold SET amount = 1")
            assert any("millionths aside" in fault.what for fault in forged.faults)
            ended = await asyncio.to_thread(edited, home, "UPDATE reservation SET state = 'done'")
            assert any("on record 'executing'" in fault.what for fault in ended.faults)
            gone = await asyncio.to_thread(edited, home, "DELETE FROM reservation")
            assert any("is missing in the tables, on record it is 'executing'" in fault.what for fault in gone.faults)
        go.set()
        assert (await running).ok
    assert verify(home_at(home)).faults == ()


async def test_no_fault_is_found_while_calls_begin_and_end(tmp_path: Path) -> None:
    home, over = tmp_path / "home", False

    async def calling(app: Interlock, who: int) -> None:
        number = 0
        while not over:
            number += 1
            key = f"{who}-{number}"
            call = app.call("out.work", name=key, how=ACTS[number % 4], key=key, session=f"s{who}")
            if number % 5:
                await call
                continue
            leaving = asyncio.ensure_future(call)
            for _ in range(number % 7):
                await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.wait({leaving})

    async with Interlock.open(home, budgets=BUDGETS, housekeeping=False) as app:
        await app.add(work)
        callers = [asyncio.ensure_future(calling(app, who)) for who in range(4)]
        try:
            found = [(await asyncio.to_thread(verify, home_at(home))).faults for _ in range(15)]
        finally:
            over = True
            await asyncio.gather(*callers)
    assert found == [()] * 15
    assert verify(home_at(home)).faults == ()


async def test_a_caller_who_leaves_at_any_moment_leaves_a_record_of_how_the_call_ended(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with Interlock.open(home, budgets=BUDGETS, housekeeping=False) as app:
        await app.add(work)
        for turns in range(30):
            leaving = asyncio.ensure_future(app.call("out.work", name="a", how="fine", key=f"k{turns}"))
            for _ in range(turns):
                await asyncio.sleep(0 if app.home.near else 0.001)
            leaving.cancel()
            await asyncio.wait({leaving})
            await app.maintain()
            assert verify(home_at(home)).faults == ()
        kinds = [
            {kind for (kind,) in app.journal.reader.all("SELECT kind FROM journal WHERE call = ?", (call,))}
            for (call,) in app.journal.reader.all("SELECT call FROM journal WHERE kind = 'intent'")
        ]
    assert all(found & {"closed", "settled"} for found in kinds)
    if app.home.near:  # on a server, how far a call comes in a turn of the loop depends on the machine
        assert any("mutation" not in found for found in kinds), "some callers left before their call changed anything"


def test_a_restored_backup_agrees(lived: Path, tmp_path: Path) -> None:
    with copied(home_at(lived), tmp_path / "backup"):
        pass
    with copied(home_at(tmp_path / "backup"), tmp_path / "restored"):
        pass
    assert verify(home_at(tmp_path / "restored")).faults == ()
    keys = home_at(tmp_path / "restored").keys
    (keys / "secrets.key").unlink()
    # What is sealed cannot be compared without the keys, and that is no fault of the tables.
    assert verify(home_at(tmp_path / "restored")).faults == ()
    assert not (keys / "secrets.key").exists()


def test_a_home_whose_sealing_keys_have_changed_agrees(tmp_path: Path) -> None:
    home = tmp_path / "home"
    asyncio.run(live(home, list(ACTS), FakeClock()))

    async def rotate() -> None:
        async with Interlock.open(home, clock=FakeClock().clock, housekeeping=False) as app:
            await app.secrets.rotate_key(by="local:ben")

    asyncio.run(rotate())
    assert verify(home_at(home)).faults == ()


@pytest.mark.parametrize("revision", sorted(path.name[:4] for path in VERSIONS.glob("0*.py")))
def test_an_empty_home_of_any_earlier_schema_agrees(tmp_path: Path, revision: str) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'old.db'}", poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    config = Config()
    config.set_main_option("script_location", str(VERSIONS.parent))
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
    engine.dispose()
    with closing(sqlite3.connect(tmp_path / "old.db", factory=SqliteConnection)) as db:
        db.text_factory = bytearray
        assert list(outcomes.disagreements(db, 0, 0)) == []


async def test_what_an_older_version_did_not_record_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_before(body: bytes, *_: object) -> bytes:
        return body

    with monkeypatch.context() as patch:
        patch.setattr("interlock.store.records.with_budgets", as_before)
        await live(tmp_path / "home", list(ACTS), FakeClock())
    assert verify(home_at(tmp_path / "home")).faults == ()

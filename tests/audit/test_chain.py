"""The chain: whatever is done to the ledger behind the program's back, the verification says so, and where."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import sqlite3
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock import Context, Effect, Failure, Field, Interlock, Preview, tool
from interlock.audit.chain import verify
from interlock.audit.chain_verdict import MAX_FAULTS, ChainVerdict
from interlock.audit.retention import purge
from interlock.core.clock import Clock
from interlock.data.canonical import digest
from interlock.settings import Settings
from interlock.store import layout
from interlock.store.home import Home
from interlock.store.homes import home_at
from interlock.store.port import StoreError
from interlock.store.signing import Signer
from tests.support import forked
from tests.support.chains import EARLIER, Account, Copy, count, echo, make_home, post
from tests.support.stores import address_of, opened, unguarded

CANARY = "canary-7f3a"
EXAMPLES = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@tool(version="1.0.0", mutation_class="read_only", namespace="demo")
async def fail(account: Account) -> dict[str, str]:
    """Fail, and say with what."""
    if account.startswith(CANARY):
        raise Failure("UPSTREAM_FAILURE", f"no luck with {account}")
    return {"account": account}


# Homes


@pytest.fixture(scope="module")
def original() -> Iterator[Home]:
    with tempfile.TemporaryDirectory() as directory:
        yield asyncio.run(make_home(Path(directory)))


def tampered(original: Home, act: Callable[[Copy], Any], *, guards: bool = True, **options: Any) -> ChainVerdict:
    """What the verification says after something was done to a copy, whose guards were put back if they are to be."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "home"
        shutil.copytree(original.path, path)
        home = home_at(path)
        with unguarded(home, put_back=guards) as db:
            copy = Copy(home, db)
            act(copy)
        verdict = copy.verdict(**options)
    assert verdict.intact == (not verdict.faults)
    return verdict


def last_of_writes(home: Home) -> int:
    """The place of the last record of a call whose key is in the tables."""
    with opened(home) as db:
        query = "SELECT max(seq) FROM journal WHERE call IN (SELECT call FROM reservation)"
        return db.execute(query).fetchone()[0]


def seqs(home: Home) -> st.SearchStrategy[int]:
    return st.integers(1, count(home))


AUDIT_03 = pytest.mark.proves("AUDIT-03")


AUDIT_02 = pytest.mark.proves("AUDIT-02")


# What is whole


def test_an_untouched_home_verifies_and_the_verdict_says_how_far(original: Home) -> None:
    heard: list[int] = []
    verdict = verify(original, progress=heard.append)
    assert verdict.intact
    assert verdict.faults == ()
    assert verdict.records == verdict.head[0] == verdict.anchored_through == heard[-1] == count(original)
    assert verdict.purged_through == 0
    assert verdict.anchors >= 5
    assert verdict.last_anchor_ms is not None
    with opened(original) as db:
        last = db.execute("SELECT hash FROM journal WHERE seq = ?", verdict.head[:1]).fetchone()[0]
    assert verdict.head[1] == last.hex()


@pytest.mark.sqlite_only("the file of the store is copied or damaged")
def test_verification_needs_only_a_copy_of_the_database_and_leaves_nothing_beside_it(
    original: Home, tmp_path: Path
) -> None:
    shutil.copy(original.database, tmp_path)
    before = (tmp_path / "interlock.db").read_bytes()
    verdict = verify(home_at(tmp_path), public_key=Signer(original.keys).public, database_only=True)
    assert verdict.intact
    assert not verdict.anchors_file
    assert verdict.anchors >= 5
    assert os.listdir(tmp_path) == ["interlock.db"]
    assert (tmp_path / "interlock.db").read_bytes() == before


async def test_a_live_home_verifies_between_and_during_its_calls(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path) as app:
        await app.add(echo)
        seen = 0
        for _ in range(5):
            calls = asyncio.gather(*(app.call("demo.echo", account="x") for _ in range(20)))
            verdict = await asyncio.to_thread(verify, app.home)
            await calls
            assert verdict.intact, verdict.faults
            assert verdict.records >= seen
            seen = verdict.records
        assert verify(app.home).records == 101
    assert verify(home_at(tmp_path)).anchored_through == 101


async def test_an_empty_home_is_a_whole_chain(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path):
        pass
    verdict = verify(home_at(tmp_path))
    assert verdict.intact
    assert verdict.head == (0, bytes(32).hex())
    assert verdict.last_anchor_ms is None


# What is not


@AUDIT_03
@EXAMPLES
@given(data=st.data())
def test_a_change_of_any_column_of_any_record_is_found_where_it_was_made(original: Home, data: st.DataObject) -> None:
    seq = data.draw(seqs(original))
    column = data.draw(st.sampled_from(["kind", "call", "body", "hash"]))

    def act(copy: Copy) -> None:
        old = copy.db.execute(f"SELECT CAST({column} AS BLOB) FROM journal WHERE seq = ?", (seq,)).fetchone()[0]
        new = data.draw(
            st.one_of(
                st.binary(max_size=40),
                st.text(max_size=40),
                st.integers(0, len(old) - 1).map(lambda at: old[:at] + bytes([old[at] ^ 1]) + old[at + 1 :]),
                st.just(old + b" "),
                st.just(old[:-1]),
            ).filter(lambda new: (new.encode() if isinstance(new, str) else new) != old)
        )
        as_stored = "CAST(? AS TEXT)" if column in ("kind", "call") else "?"
        if not original.near:  # a server takes nothing that is of another type
            raw = new.encode() if isinstance(new, str) else new
            new = raw.decode("latin-1").replace("\0", "0") if column in ("kind", "call") else raw
        copy.db.execute(f"UPDATE journal SET {column} = {as_stored} WHERE seq = ?", (new, seq))

    assert tampered(original, act).faults[0].seq == seq


@pytest.mark.sqlite_only("columns hold values of any type")
@AUDIT_03
@pytest.mark.parametrize(("column", "kind"), [("kind", "BLOB"), ("call", "BLOB"), ("body", "TEXT"), ("hash", "TEXT")])
def test_a_value_stored_as_another_type_is_found_because_lookups_would_miss_it(
    original: Home, column: str, kind: str
) -> None:
    act = f"UPDATE journal SET {column} = CAST({column} AS {kind}) WHERE seq = 3"
    assert tampered(original, lambda copy: copy.db.execute(act)).faults[0].seq == 3


@AUDIT_03
def test_a_column_that_quotes_its_way_through_the_record_is_found(original: Home) -> None:
    """`call` up to a later quote of the same record is a prefix of it, and still not its call."""

    def act(copy: Copy) -> None:
        seq, _, call, body, _ = copy.rows()[2]
        rest = body.decode().split(f'"call":"{call}', 1)[1].split('"kind"')[0]
        copy.db.execute("UPDATE journal SET call = ? WHERE seq = ?", (call + rest.removesuffix('",'), seq))

    assert tampered(original, act).faults[0].seq == 3


@AUDIT_03
@EXAMPLES
@given(data=st.data())
def test_a_removed_record_is_found_where_it_was(original: Home, data: st.DataObject) -> None:
    seq = data.draw(seqs(original))
    renumber = data.draw(st.booleans())

    def act(copy: Copy) -> None:
        copy.db.execute("DELETE FROM journal WHERE seq = ?", (seq,))
        if renumber:
            copy.db.execute("UPDATE journal SET seq = seq - 1 WHERE seq > ?", (seq,))

    assert tampered(original, act).faults[0].seq == seq


@AUDIT_03
@EXAMPLES
@given(data=st.data())
def test_an_inserted_record_is_found_where_it_was_put(original: Home, data: st.DataObject) -> None:
    last = count(original)
    seq = data.draw(st.integers(-1, last + 1))
    model = data.draw(seqs(original))

    def act(copy: Copy) -> None:
        _, kind, call, body, hash_ = copy.rows()[model - 1]
        copy.db.execute("UPDATE journal SET seq = -seq - 10 WHERE seq >= ?", (max(seq, 1),))
        copy.db.execute("UPDATE journal SET seq = -seq - 9 WHERE seq <= -10")
        copy.db.execute("INSERT INTO journal VALUES (?, ?, ?, ?, ?)", (seq, kind, call, body, hash_))

    # A copy of a record in that record's own place is that record; what follows is then the stranger.
    assert tampered(original, act).faults[0].seq == (seq if seq != model else seq + 1)


@AUDIT_03
@EXAMPLES
@given(data=st.data())
def test_two_records_that_changed_places_are_found_at_the_first_of_them(original: Home, data: st.DataObject) -> None:
    first, second = sorted(data.draw(st.lists(seqs(original), min_size=2, max_size=2, unique=True)))
    columns = data.draw(st.sampled_from([("body",), ("hash",), ("kind", "call", "body", "hash"), ("call",)]))

    def act(copy: Copy) -> bool:
        rows, names = copy.rows(), ", ".join(f"{name} = ?" for name in columns)
        places = [("seq", "kind", "call", "body", "hash").index(name) for name in columns]
        values = [[rows[seq - 1][place] for place in places] for seq in (second, first)]
        for seq, others in zip((first, second), values, strict=True):
            copy.db.execute(f"UPDATE journal SET {names} WHERE seq = ?", (*others, seq))
        return values[0] != values[1]

    differ: list[bool] = []
    verdict = tampered(original, lambda copy: differ.append(act(copy)))
    assert verdict.intact != differ[0]
    if differ[0]:
        assert verdict.faults[0].seq == first


@AUDIT_03
@EXAMPLES
@given(data=st.data())
def test_a_cut_tail_is_found_by_the_anchors_in_the_database_the_file_or_the_auditors_hand(
    original: Home, data: st.DataObject
) -> None:
    whole = verify(original)
    keep = data.draw(st.integers(0, whole.records - 1))
    anchors = data.draw(st.sampled_from(["kept", "in the file only", "gone"]))

    def act(copy: Copy) -> None:
        copy.db.execute("DELETE FROM journal WHERE seq > ?", (keep,))
        if anchors != "kept":
            copy.db.execute("DELETE FROM anchor WHERE seq > ?", (keep,))
        if anchors == "gone":
            copy.home.anchors.unlink()

    verdict = tampered(original, act)
    assert verdict.faults[0].seq == keep + 1
    assert "missing" in verdict.faults[0].what
    if anchors == "gone":
        assert "keys/journal.head names the last" in verdict.faults[0].what
        assert any("the anchors file is missing" in fault.what for fault in verdict.faults)
        known = whole.head[0], bytes.fromhex(whole.head[1])
        assert "the known head" in tampered(original, act, known_head=known, database_only=True).faults[0].what
        # Of the database alone, without any head, a cut journal is just a shorter one: it shows exactly where the cut
        # took a record of a write, whose key is still in the tables. The verdict says what it is of.
        alone = tampered(original, act, database_only=True)
        assert not alone.anchors_file
        assert alone.intact == (keep >= last_of_writes(original))
        assert all("the idempotency key of call" in fault.what for fault in alone.faults)


@AUDIT_03
@EXAMPLES
@given(data=st.data())
def test_a_chain_written_anew_contradicts_the_next_anchor_and_any_known_head(
    original: Home, data: st.DataObject
) -> None:
    seq = data.draw(seqs(original))
    whole = verify(original)

    def act(copy: Copy) -> None:
        body = orjson.loads(copy.rows()[seq - 1][3])
        forged = orjson.dumps({**body, "timestamp": "2001-01-01T00:00:00.000Z"}, option=orjson.OPT_SORT_KEYS)
        copy.db.execute("UPDATE journal SET body = ? WHERE seq = ?", (forged, seq))
        copy.relink(seq)

    with opened(original) as db:
        anchored = db.execute("SELECT MIN(seq) FROM anchor WHERE seq >= ?", (seq,)).fetchone()[0]
    assert tampered(original, act).faults[0].seq == anchored

    def act_without_anchors(copy: Copy) -> None:
        act(copy)
        copy.db.execute("DELETE FROM anchor")
        copy.home.anchors.unlink()

    head = (whole.head[0], bytes.fromhex(whole.head[1]))
    assert tampered(original, act_without_anchors, known_head=head).faults[0].seq == head[0]


@AUDIT_03
@EXAMPLES
@given(data=st.data())
def test_a_changed_or_removed_anchor_is_found(original: Home, data: st.DataObject) -> None:
    with opened(original) as db:
        seq = data.draw(st.sampled_from([row[0] for row in db.execute("SELECT seq FROM anchor")]))
    changes = [
        f"UPDATE anchor SET hash = x'{'00' * 32}' WHERE seq = ?",
        "UPDATE anchor SET at_ms = at_ms + 1 WHERE seq = ?",
        "UPDATE anchor SET key_id = 'another' WHERE seq = ?",
        f"UPDATE anchor SET signature = x'{'00' * 64}' WHERE seq = ?",
        "UPDATE anchor SET signature = x'00' WHERE seq = ?",
        "UPDATE anchor SET signature = 'text' WHERE seq = ?",
        "DELETE FROM anchor WHERE seq = ?",
    ]
    if address_of(original) is None:  # where a column takes a value of any type
        changes.append("UPDATE anchor SET at_ms = 'soon' WHERE seq = ?")
    change = data.draw(st.sampled_from(changes))
    assert tampered(original, lambda copy: copy.db.execute(change, (seq,))).faults[0].seq == seq


@AUDIT_03
def test_an_anchor_moved_to_another_record_is_found(original: Home) -> None:
    with opened(original) as db:
        query = "SELECT MIN(seq) FROM journal WHERE seq NOT IN (SELECT seq FROM anchor)"
        free = db.execute(query).fetchone()[0]
    move = f"UPDATE anchor SET seq = {free} WHERE seq = (SELECT MAX(seq) FROM anchor)"
    assert tampered(original, lambda copy: copy.db.execute(move)).faults[0].seq == free


@AUDIT_03
@EXAMPLES
@given(data=st.data())
def test_a_changed_line_of_the_anchors_file_is_found(original: Home, data: st.DataObject) -> None:
    content = original.anchors.read_bytes()
    at = data.draw(st.integers(0, len(content) - 2).filter(lambda at: content[at : at + 1] != b"\n"))
    flipped = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    verdict = tampered(original, lambda copy: copy.home.anchors.write_bytes(flipped))
    # Hex digits may be spelt in either case; nothing else may differ.
    assert verdict.intact == (flipped.lower() == content.lower())


def test_a_damaged_line_names_its_number(original: Home) -> None:
    verdict = tampered(original, lambda copy: copy.home.anchors.write_bytes(b'[]\n\n{"seq": 1}\n\xff\n'))
    assert [fault.what for fault in verdict.faults] == [f"line {n} of the anchors file is damaged" for n in (1, 3, 4)]


def test_without_a_public_key_anchors_prove_nothing_and_the_verdict_says_so(original: Home) -> None:
    verdict = tampered(original, lambda copy: (copy.home.keys / "journal.pub").unlink())
    assert [fault.what for fault in verdict.faults] == [
        "the public key journal.pub is missing; signatures cannot be checked"
    ]
    damaged = tampered(original, lambda copy: (copy.home.keys / "journal.pub").write_text("zz"))
    assert "damaged" in damaged.faults[0].what
    trusted = Signer(original.keys).public
    assert tampered(original, lambda copy: (copy.home.keys / "journal.pub").unlink(), public_key=trusted).intact


@pytest.mark.parametrize("at_ms", [2**53, -(2**53), 2**63 - 1])
def test_a_time_that_no_calendar_has_is_found_and_breaks_nothing(original: Home, at_ms: int) -> None:
    def act(copy: Copy) -> None:
        copy.db.execute("UPDATE anchor SET at_ms = ?", (at_ms,))
        (copy.home.keys / "journal.pub").unlink()

    verdict = tampered(original, act, database_only=True)
    assert verdict.document()["intact"] is False
    assert verdict.faults[0].what == "the anchor is damaged"


def test_a_home_signed_anew_with_another_key_does_not_pass_the_auditors_key(original: Home, tmp_path: Path) -> None:
    trusted = Signer(original.keys).public
    (tmp_path / "other").mkdir()
    other = Signer(tmp_path / "other")

    def act(copy: Copy) -> None:
        for seq, hash_, at_ms in copy.db.execute("SELECT seq, hash, at_ms FROM anchor").fetchall():
            signature = other.sign("head", seq, hash_, at_ms)
            copy.db.execute("UPDATE anchor SET key_id = ?, signature = ? WHERE seq = ?", (other.key_id, signature, seq))
        copy.home.anchors.unlink()
        (copy.home.keys / "journal.pub").write_text(other.public.hex())

    assert tampered(original, act, database_only=True).intact
    assert not tampered(original, act, public_key=trusted).intact


def test_no_more_faults_are_listed_than_a_person_reads(original: Home) -> None:
    verdict = tampered(original, lambda copy: copy.db.execute("UPDATE journal SET hash = x'00'"))
    assert len(verdict.faults) == MAX_FAULTS
    assert verdict.faults[0].seq == 1
    assert verdict.records == count(original)


def read_by_all(database: Path) -> list[list[Any]]:
    """The journal as its readers look at it: in order, by call, by number, the newest of a kind first."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro&immutable=1", uri=True)) as db:
        found = [db.execute("SELECT seq, kind, call, body, hash FROM journal ORDER BY seq").fetchall()]
        for seq, _, call, *_ in found[0]:
            found.append(db.execute("SELECT seq, body FROM journal WHERE call = ? ORDER BY seq", (call,)).fetchall())
            found.append(db.execute("SELECT body FROM journal WHERE seq = ?", (seq,)).fetchall())
        found.append(db.execute("SELECT body FROM journal WHERE kind = 'closed' ORDER BY seq DESC").fetchall())
        found.append(db.execute("SELECT DISTINCT call FROM journal WHERE call >= '0' AND call < 'a'").fetchall())
    return found


@pytest.mark.sqlite_only("the file of the store is copied or damaged")
@AUDIT_03
@EXAMPLES
@given(data=st.data())
def test_flipped_bytes_never_break_the_verification_nor_have_others_read_what_it_did_not(
    original: Home, data: st.DataObject
) -> None:
    content = bytearray(original.database.read_bytes())
    # The schema and the roots of the ledger are in the first pages.
    places = st.one_of(st.integers(0, 7 * 4096 - 1), st.integers(0, len(content) - 1))
    for at in data.draw(st.lists(places, min_size=1, max_size=8)):
        content[at] ^= data.draw(st.integers(1, 255))
    with tempfile.TemporaryDirectory() as directory:
        database = Path(directory) / "interlock.db"
        database.write_bytes(content)
        intact, code = False, "E3804"
        try:
            intact = verify(home_at(directory), public_key=Signer(original.keys).public, database_only=True).intact
        except Failure as failure:
            code = failure.code
        assert code == "E3804"
        assert not intact or read_by_all(database) == read_by_all(original.database)


@pytest.mark.sqlite_only("the file of the store is copied or damaged")
@pytest.mark.parametrize("content", [None, b"", b"not a database at all" * 100])
def test_what_is_no_database_of_ours_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "interlock.db").write_bytes(content)
    with pytest.raises(Failure) as caught:
        verify(home_at(tmp_path))
    assert caught.value.code == "E3804"


@pytest.mark.sqlite_only("the file of the store is copied or damaged")
def test_a_foreign_or_hollow_database_is_refused(tmp_path: Path, original: Home) -> None:
    with closing(sqlite3.connect(tmp_path / "interlock.db")) as db:
        db.execute("CREATE TABLE journal (seq)")
    with pytest.raises(Failure, match="not made by Interlock"):
        verify(home_at(tmp_path))

    def act(copy: Copy) -> None:
        copy.db.execute("ALTER TABLE journal RENAME TO j")
        copy.db.execute("CREATE VIEW journal AS SELECT * FROM j")

    with pytest.raises(Failure, match="no ledger"):
        tampered(original, act, guards=False)


def test_a_malformed_public_key_is_refused(original: Home) -> None:
    with pytest.raises(Failure) as caught:
        verify(original, public_key=b"short")
    assert caught.value.code == "E3004"


# Read by everybody as it was verified

COLUMNS = "seq INTEGER NOT NULL, kind TEXT NOT NULL, call TEXT NOT NULL, body BLOB NOT NULL, hash BLOB NOT NULL"
BY_CALL = "CREATE INDEX journal_call ON journal (call)"


def rebuild(db: sqlite3.Connection, definition: str) -> None:
    """Make the journal anew by another definition, with the same rows."""
    db.execute("ALTER TABLE journal RENAME TO former")
    db.execute("DROP INDEX journal_call")
    db.execute(f"CREATE TABLE journal {definition}")
    db.execute("INSERT INTO journal (seq, kind, call, body, hash) SELECT seq, kind, call, body, hash FROM former")
    db.execute("DROP TABLE former")
    db.execute(BY_CALL)


def index_as(db: sqlite3.Connection, what: str) -> None:
    """Have another index under the definition of the one by call."""
    db.execute("DROP INDEX journal_call")
    db.execute(f"CREATE INDEX journal_call ON journal {what}")
    db.execute("PRAGMA writable_schema=ON")
    db.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'journal_call'", (BY_CALL,))


@pytest.mark.sqlite_only("the schema is changed in ways that only SQLite has")
def test_the_ledger_is_known_to_the_letter_and_nothing_else_acts_by_itself(original: Home) -> None:
    with opened(original) as db:
        assert list(layout.departures(db)) == []
        acting = db.execute("SELECT name FROM sqlite_master WHERE type NOT IN ('table', 'index')").fetchall()
    assert len(acting) == 11  # eight guard the ledger, three keep the sums of payload bytes


PAYLOAD_SUMS = ("payload_stored", "payload_expired", "payload_deleted")


@pytest.mark.sqlite_only("the schema is changed in ways that only SQLite has")
@AUDIT_03
def test_a_home_without_the_sums_of_payload_bytes_is_intact_and_nothing_hides_behind_their_triggers(
    original: Home, tmp_path: Path
) -> None:
    home = home_at(shutil.copytree(original.path, tmp_path / "home"))
    with opened(home) as db:
        for name in PAYLOAD_SUMS:
            db.execute(f"DROP TRIGGER {name}")
    assert verify(home).intact
    with opened(home) as db:
        db.execute("CREATE TRIGGER payload_deleted AFTER DELETE ON payload BEGIN DELETE FROM ticket; END")
    [fault] = verify(home).faults
    assert fault.what == "the trigger `payload_deleted` on `payload` was not made by Interlock"


@pytest.mark.sqlite_only("the schema is changed in ways that only SQLite has")
@AUDIT_03
def test_a_ledger_of_an_earlier_version_is_intact_and_nothing_hides_behind_its_name(original: Home) -> None:
    assert tampered(original, lambda copy: copy.db.execute(EARLIER)).intact
    other = EARLIER.replace("ABORT, 'the journal is append-only'", "IGNORE")
    [fault] = tampered(original, lambda copy: copy.db.execute(other)).faults
    assert fault.what == "the trigger `journal_only_grows` on `journal` was not made by Interlock"


@pytest.mark.sqlite_only("the schema is changed in ways that only SQLite has")
@AUDIT_03
@pytest.mark.parametrize(
    "definition",
    [
        f"({COLUMNS})",
        f"({COLUMNS}, PRIMARY KEY (seq)) WITHOUT ROWID",
        f"({COLUMNS}, PRIMARY KEY (seq), UNIQUE (seq, call))",
        f"({COLUMNS}, PRIMARY KEY (seq), CHECK (kind != 'intent' OR 1))",
        f"({COLUMNS}, shown TEXT AS (call), PRIMARY KEY (seq))",
        f"({COLUMNS.replace('call TEXT', 'call TEXT COLLATE NOCASE')}, PRIMARY KEY (seq))",
        f"({COLUMNS.replace('seq INTEGER', 'seq INT')}, PRIMARY KEY (seq))",
        f"({COLUMNS.replace(' NOT NULL', '')}, PRIMARY KEY (seq))",
    ],
)
def test_a_ledger_made_anew_by_another_definition_is_found(original: Home, definition: str) -> None:
    fault = tampered(original, lambda copy: rebuild(copy.db, definition)).faults[0]
    assert fault.what == "the table `journal` is not as it was made"


@pytest.mark.sqlite_only("the schema is changed in ways that only SQLite has")
@AUDIT_03
@pytest.mark.parametrize("seq", ["NULL", "'7'", "7.5", "x'07'", "-1", "3"])
def test_a_record_that_no_order_reaches_is_found(original: Home, seq: str) -> None:
    def act(copy: Copy) -> None:
        rebuild(copy.db, "(seq, kind TEXT, call TEXT, body BLOB, hash BLOB)")
        copy.db.execute(f"INSERT INTO journal SELECT {seq}, kind, 'forged', body, hash FROM journal WHERE seq = 2")

    found = [fault.what for fault in tampered(original, act).faults]
    assert "the table `journal` is not as it was made" in found
    assert any("no place of its own" in what or "before the start" in what for what in found)


@pytest.mark.sqlite_only("the schema is changed in ways that only SQLite has")
@AUDIT_03
@pytest.mark.parametrize(
    "what",
    [
        "(call) WHERE seq != 3",
        "(call) WHERE kind != 'intent'",
        "(call COLLATE NOCASE DESC)",
        "(kind)",
        "(CASE seq WHEN 3 THEN 'nobody' ELSE call END)",
    ],
)
def test_a_record_that_an_index_hides_is_found_though_the_definition_was_put_back(original: Home, what: str) -> None:
    verdict = tampered(original, lambda copy: index_as(copy.db, what))
    assert verdict.records == count(original)
    assert "the table `journal` contradicts itself" in verdict.faults[0].what
    shown = tampered(original, lambda copy: copy.db.execute(f"CREATE INDEX another ON journal {what}"))
    assert "the index `another` on `journal` was not made by Interlock" in shown.faults[0].what


@pytest.mark.sqlite_only("the schema is changed in ways that only SQLite has")
@AUDIT_03
def test_an_index_that_is_kept_elsewhere_is_found(original: Home) -> None:
    def act(copy: Copy) -> None:
        copy.db.execute("PRAGMA writable_schema=ON")
        other = "(SELECT rootpage FROM sqlite_master WHERE name = 'reservation_call')"
        copy.db.execute(f"UPDATE sqlite_master SET rootpage = {other} WHERE name = 'journal_call'")

    assert "contradicts itself" in tampered(original, act).faults[0].what


@pytest.mark.sqlite_only("the schema is changed in ways that only SQLite has")
@AUDIT_03
@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("CREATE VIEW calls AS SELECT * FROM journal WHERE seq != 3", "the view `calls` on `calls`"),
        ("CREATE TRIGGER later AFTER INSERT ON reservation BEGIN DELETE FROM anchor; END", "the trigger `later`"),
        ("CREATE TRIGGER later AFTER INSERT ON journal BEGIN DELETE FROM journal WHERE seq = NEW.seq; END", "`later`"),
        ("CREATE UNIQUE INDEX one ON anchor (hash)", "the index `one` on `anchor`"),
        ("ALTER TABLE segment ADD COLUMN note TEXT", "the table `segment` is not as it was made"),
        ("DROP INDEX journal_call", "the index `journal_call` on `journal` is missing"),
    ],
)
def test_whatever_answers_or_acts_beside_the_ledger_is_found(original: Home, statement: str, found: str) -> None:
    assert found in tampered(original, lambda copy: copy.db.execute(statement)).faults[0].what


@AUDIT_03
def test_missing_guards_are_found(original: Home) -> None:
    verdict = tampered(original, lambda _: None, guards=False)
    assert len([fault for fault in verdict.faults if "the trigger" in fault.what and "is missing" in fault.what]) == (
        8 if address_of(original) is None else 7
    )


@pytest.mark.sqlite_only("the file of the store is copied or damaged")
@AUDIT_03
def test_what_others_would_roll_back_before_they_read_is_not_passed_over(original: Home, tmp_path: Path) -> None:
    """A hot rollback journal that would put a former page back."""
    path = tmp_path / "home"
    shutil.copytree(original.path, path)
    page = original.database.read_bytes()[:4096]
    header = bytes.fromhex("d9d505f920a163d7") + struct.pack(">IIIII", 1, 0, 1, 512, 4096)
    checksum = sum(page[at] for at in range(4096 - 200, 0, -200)) & 0xFFFFFFFF
    content = header.ljust(512, b"\0") + struct.pack(">I", 1) + page + struct.pack(">I", checksum)
    (path / "interlock.db-journal").write_bytes(content)
    with pytest.raises(Failure) as caught:
        verify(home_at(path))
    assert caught.value.code == "E3804"


# The anchors file


@AUDIT_03
@pytest.mark.parametrize("how", ["gone", "empty", "begun anew"])
def test_a_tail_cut_in_the_database_shows_by_the_anchors_file_that_went_with_it(original: Home, how: str) -> None:
    def act(copy: Copy) -> None:
        cut = copy.db.execute("SELECT seq FROM anchor ORDER BY seq DESC LIMIT 1 OFFSET 1").fetchone()[0]
        copy.db.execute("DELETE FROM journal WHERE seq > ?", (cut,))
        copy.db.execute("DELETE FROM anchor WHERE seq > ?", (cut,))
        last = copy.home.anchors.read_bytes().split()[-2]
        copy.home.anchors.unlink()
        if how != "gone":
            copy.home.anchors.write_bytes(b"" if how == "empty" else last + b"\n")

    beside_the_keys, *faults = tampered(original, act).faults
    assert "keys/journal.head names the last" in beside_the_keys.what
    if not original.near and how != "gone":
        assert faults == [], "the other machines of a store have the other anchors"
        return
    (fault,) = faults
    assert "the anchors file lacks the first" in fault.what or "the anchors file is missing or empty" in fault.what


@AUDIT_03
def test_without_keys_and_anchors_a_database_passes_only_as_what_it_is(original: Home) -> None:
    def act(copy: Copy) -> None:
        copy.db.execute("DELETE FROM anchor")
        copy.home.anchors.unlink()
        shutil.rmtree(copy.home.keys)

    trusted = Signer(original.keys).public
    (fault,) = tampered(original, act, public_key=trusted, database_only=True).faults
    assert fault.what == "there is no signed head, so the public key given proves nothing"


def test_an_anchors_file_that_ended_long_ago_is_found_and_one_that_a_crash_cut_short_is_not(tmp_path: Path) -> None:
    now_ms = 1_800_000_000_000

    async def live() -> None:
        nonlocal now_ms
        async with Interlock.open(tmp_path / "home", clock=Clock(now_ms=lambda: now_ms)) as app:
            await app.add(echo)
            for _ in range(3):
                now_ms += 400_000
                await app.call("demo.echo", account="a")
                app.journal.anchor()

    asyncio.run(live())
    home = home_at(tmp_path / "home")
    lines = home.anchors.read_bytes().split()
    for kept in range(1, len(lines)):
        home.anchors.write_bytes(b"\n".join(lines[:kept]) + b"\n")
        # The last one and the one before are less than ten minutes apart.
        assert verify(home).intact == (kept >= len(lines) - 2)


def _hold(home: Home, lines: list[bytes], cut: bytes) -> None:
    """Write the anchors file as it is after a line that was cut off: each goes on a line of its own."""
    home.anchors.write_bytes(b"".join(b"\n" + line + b"\n" for line in lines) + cut)


@pytest.mark.parametrize("kept", [1, 9, 40, -120, -1])
@pytest.mark.parametrize("by", ["call", "purge"])
async def test_a_line_that_a_power_cut_left_half_written_is_no_tampering(tmp_path: Path, by: str, kept: int) -> None:
    home = await make_home(tmp_path)
    *lines, last = home.anchors.read_bytes().split()
    _hold(home, lines, b"\n" + last[:kept])
    assert verify(home).intact
    if by == "purge":
        assert purge(home, Settings.model_validate({}), now_ms=4_000_000_000_000, by="op")
    else:
        async with Interlock.open(tmp_path) as app:
            await app.add(echo)
            await app.call("demo.echo", account="a")
    assert verify(home).faults == ()


async def test_a_head_that_another_process_has_signed_is_not_noted_again(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path) as one:
        await one.add(echo)
        await one.call("demo.echo", account="a")
        async with Interlock.open(tmp_path):
            pass
    noted = [orjson.loads(line)["seq"] for line in home_at(tmp_path).anchors.read_bytes().split()]
    assert sorted(set(noted)) == noted


@AUDIT_03
@pytest.mark.parametrize("kept", [8, 40, -1])
def test_a_torn_line_whose_anchor_the_database_does_not_hold_is_damage(original: Home, kept: int) -> None:
    def act(copy: Copy) -> None:
        seq = copy.db.execute("SELECT seq FROM anchor ORDER BY seq DESC LIMIT 1 OFFSET 1").fetchone()[0]
        copy.db.execute("DELETE FROM anchor WHERE seq = ?", (seq,))
        *lines, torn, last = copy.home.anchors.read_bytes().split()
        _hold(copy.home, lines, b"\n" + torn[:kept] + b"\n" + last + b"\n")

    (fault,) = tampered(original, act).faults
    assert fault.what.endswith("of the anchors file is damaged")


@AUDIT_03
@pytest.mark.parametrize("rest", [b"another digit", b" ", b"\n\n", b"}"])
def test_a_torn_line_that_does_not_end_as_a_crash_ends_it_is_damage(original: Home, rest: bytes) -> None:
    def act(copy: Copy) -> None:
        *lines, torn, last = copy.home.anchors.read_bytes().split()
        digit = b"1" if torn[-20:].startswith(b"0") else b"0"
        _hold(
            copy.home, lines, b"\n" + torn[:-20] + (digit if rest == b"another digit" else rest) + b"\n" + last + b"\n"
        )

    (fault,) = tampered(original, act).faults
    assert fault.what.endswith("of the anchors file is damaged")


# Who may write

REWRITES = (
    "UPDATE journal SET kind = 'x'",
    "UPDATE journal SET body = x'00' WHERE seq = 1",
    "DELETE FROM journal",
    "DELETE FROM journal WHERE seq = 1",
    "UPDATE anchor SET at_ms = 0",
    "DELETE FROM anchor",
    "DELETE FROM segment",
)


@pytest.mark.sqlite_only("the schema is changed in ways that only SQLite has")
@AUDIT_03
@pytest.mark.parametrize("statement", [*REWRITES, "DROP TABLE journal", "DROP TRIGGER journal_never_changes"])
async def test_the_running_program_has_no_right_to_change_or_remove_a_record(tmp_path: Path, statement: str) -> None:
    async with Interlock.open(tmp_path) as app:
        await app.add(echo)
        with pytest.raises(StoreError, match="not authorized"):
            app.journal.writer._connection.execute(statement)  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(Failure, match="not authorized"):
            await app.journal.commit(lambda transaction: transaction.execute(statement))
    assert verify(home_at(tmp_path)).intact


@pytest.mark.sqlite_only("the schema is changed in ways that only SQLite has")
@AUDIT_03
@pytest.mark.parametrize(
    "statement",
    [
        "REPLACE INTO journal SELECT seq, 'x', call, body, hash FROM journal",
        "REPLACE INTO anchor SELECT seq, hash, 0, key_id, signature FROM anchor",
        "ALTER TABLE journal RENAME TO somewhere_without_a_guard",
        "PRAGMA writable_schema=ON",
        "PRAGMA Writable_Schema(ON)",
        "PRAGMA recursive_triggers=OFF",
        "PRAGMA main.RECURSIVE_TRIGGERS(0)",
    ],
)
async def test_the_running_program_cannot_go_round_its_guards(tmp_path: Path, statement: str) -> None:
    async with Interlock.open(tmp_path) as app:
        await app.add(echo)
        app.journal.anchor()
        connection = app.journal.writer._connection  # pyright: ignore[reportPrivateUsage]
        connection.execute("BEGIN")
        before = connection.total_changes
        try:
            connection.execute(statement)
        except StoreError:
            pass
        else:
            assert connection.total_changes == before
            assert connection.execute("PRAGMA writable_schema").fetchone()[0] == 0
            assert connection.execute("PRAGMA recursive_triggers").fetchone()[0] == 1
            assert connection.execute("SELECT COUNT(*) FROM journal").fetchone()[0] == 1
        finally:
            connection.execute("ROLLBACK")


@AUDIT_03
@pytest.mark.supports("AUDIT-01")
@pytest.mark.parametrize("statement", REWRITES[:-1])
def test_a_plain_connection_meets_the_triggers(original: Home, statement: str) -> None:
    with (
        opened(original) as db,
        pytest.raises(StoreError, match="append-only"),
    ):
        db.execute(statement)
    assert verify(original).intact


@pytest.mark.sqlite_only("the schema is changed in ways that only SQLite has")
@AUDIT_03
@given(data=st.data())
def test_a_record_that_another_program_replaces_is_found(original: Home, data: st.DataObject) -> None:
    seq = data.draw(seqs(original))
    change = data.draw(st.sampled_from(["'x', call, body, hash", "kind, 'x', body, hash", "kind, call, X'7B7D', hash"]))
    replaced = f"REPLACE INTO journal SELECT seq, {change} FROM journal WHERE seq = {seq}"
    verdict = tampered(original, lambda copy: copy.db.execute(replaced))
    assert [fault.seq for fault in verdict.faults][:1] == [seq]


# What a record holds

VECTORS: list[tuple[dict[str, Any], str]] = [
    ({}, "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"),
    ({"account": "cash"}, hashlib.sha256(b'{"account":"cash"}').hexdigest()),
    ({"b": 1.0, "a": [True, None]}, hashlib.sha256(b'{"a":[true,null],"b":1}').hexdigest()),
    ({"name": "u\u0308"}, hashlib.sha256('{"name":"ü"}'.encode()).hexdigest()),
]


@AUDIT_02
@pytest.mark.parametrize(("value", "expected"), VECTORS)
def test_an_input_hash_is_the_sha256_of_the_canonical_input(value: dict[str, Any], expected: str) -> None:
    assert digest(value) == expected


@AUDIT_02
async def test_records_hold_the_hash_of_the_input_and_the_shape_of_the_output_and_neither_itself(
    tmp_path: Path,
) -> None:
    async with Interlock.open(tmp_path / "one") as app, Interlock.open(tmp_path / "two") as node:
        await app.add(echo, post, fail)
        await node.add(echo)
        calls = [
            await app.call("demo.echo", account=f"{CANARY}-read"),
            await app.call("demo.post", account=f"{CANARY}-write", cents=7, key="k1"),
            await app.call("demo.post", account=f"{CANARY}-write", cents=7, key="k1"),
            await app.call("demo.post", account=f"{CANARY}-other", cents=7, key="k1"),
            await app.call("demo.post", account=f"{CANARY}-dry", cents=7, dry_run=True),
            await app.call("demo.post", account=f"{CANARY}-keyless", cents=7),
            await app.call("demo.post", account=f"{CANARY}-unfit", cents=f"{CANARY}-word", key="k2"),
            await app.call("demo.echo", {"account": "x", f"{CANARY}-field": f"{CANARY}-value"}),
            await app.call("demo.fail", account=f"{CANARY}-fail"),
            await app.call("demo.nobody", account=f"{CANARY}-unknown"),
        ]
        assert CANARY in str(calls[0].value)
        twin = await node.call("demo.echo", account=f"{CANARY}-read")
        await app.journal.drain()
        await node.journal.drain()
        here = {call: orjson.loads(body) for call, body in _closed(app)}
        there = {call: orjson.loads(body) for call, body in _closed(node)}
        ledger = app.journal.reader.all("SELECT * FROM journal")
    assert all(result.invocation_id in here for result in calls)
    read = here[calls[0].invocation_id]
    assert read["inputHash"] == hashlib.sha256(f'{{"account":"{CANARY}-read"}}'.encode()).hexdigest()
    assert read["inputHash"] == there[twin.invocation_id]["inputHash"]
    assert read["outputSummary"] == {"type": "object", "keys": 1, "bytes": len(orjson.dumps(calls[0].value))}
    assert not [row for row in ledger if CANARY in repr(row)]
    assert CANARY.encode() not in (tmp_path / "one" / "anchors.jsonl").read_bytes()
    # A home that only read holds nothing of it anywhere: no table, no log, no left-over page.
    for file in (tmp_path / "two").rglob("*"):
        assert not file.is_file() or CANARY.encode() not in file.read_bytes()


Memo = Annotated[str, Field(description="a memo", examples=["m"])]
Hidden = Annotated[str, Field(description="a memo", examples=["m"], json_schema_extra={"x-sensitivity": "pii"})]


@tool(
    version="1.0.0",
    mutation_class="write_reversible",
    namespace="demo",
    effects=[Effect("account:{account}", "UPDATE")],
)
async def book(ctx: Context, account: Account, memo: Memo, hidden: Hidden = "") -> dict[str, str]:
    """Change an account, and report the change with what was sent."""
    ctx.effect(f"account:{account}", "UPDATE", before={"memo": ""}, after={"memo": memo, "hidden": hidden})
    return {"memo": memo, "hidden": hidden}


@book.compensate
async def _(result: dict[str, str]) -> None:
    return None


@book.preview
def _(account: str, memo: str, hidden: str) -> Preview:
    return Preview(impact="a memo would be changed")


@AUDIT_02
async def test_a_closing_record_names_the_resource_and_only_the_mutation_record_has_the_value_of_a_change(
    tmp_path: Path,
) -> None:
    async with Interlock.open(tmp_path / "home") as app:
        await app.add(book)
        sent = {"account": "ann", "memo": f"{CANARY}-memo", "hidden": f"{CANARY}-hidden"}
        result = await app.call("demo.book", sent, key="k")
        assert result.ok, result.error
        # An argument that is private names no resource in the ledger either.
        private = await app.call("demo.book", {**sent, "account": f"{CANARY}-hidden"}, key="p")
        assert private.ok, private.error
        await app.journal.drain()
        rows = app.journal.reader.all("SELECT kind, call, body FROM journal WHERE call = ?", (result.invocation_id,))
        records = {kind: orjson.loads(body) for kind, _, body in rows}
        ledger = app.journal.reader.all("SELECT * FROM journal")
    closed, mutation = records["closed"], records["mutation"]
    assert closed["sideEffects"] == [{"resource": "account:ann", "operation": "UPDATE"}]
    assert CANARY not in str(closed)
    assert CANARY not in str(records["intent"])
    assert mutation["affectedResource"] == "account:ann"
    assert mutation["newValue"]["memo"] == f"{CANARY}-memo", "EFFECT-05 asks for the value"
    assert not [row for row in ledger if f"{CANARY}-hidden" in repr(row)]


def _closed(app: Interlock) -> list[tuple[str, bytes]]:
    return app.journal.reader.all("SELECT call, body FROM journal WHERE kind = 'closed'")


# Many writers

WRITER = """
import asyncio, sys
from interlock import Interlock
from tests.support.chains import echo, post

async def main(home, name):
    async with Interlock.open(home) as app:
        await app.add(echo, post)
        for number in range(0, 200, 10):
            results = await asyncio.gather(*(
                app.call("demo.post", account=name, cents=n, key=f"{name}-{n}") if n % 5 == 0
                else app.call("demo.echo", account=name)
                for n in range(number, number + 10)
            ))
            assert all(result.state == "succeeded" for result in results), results

asyncio.run(main(*sys.argv[1:]))
"""


@AUDIT_03
def test_four_processes_on_one_home_leave_one_whole_chain(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    writers = [
        subprocess.Popen([*forked.python(), "-c", WRITER, str(tmp_path), name], cwd=root, stderr=subprocess.PIPE)
        for name in ("north", "east", "south", "west")
    ]
    for writer in writers:
        _, errors = writer.communicate(timeout=90)
        assert writer.returncode == 0, errors.decode()
    verdict = verify(home_at(tmp_path))
    assert verdict.intact, verdict.faults
    assert verdict.anchored_through == verdict.records
    with opened(home_at(tmp_path)) as db:
        assert db.execute("SELECT COUNT(DISTINCT call) FROM journal WHERE kind = 'closed'").fetchone()[0] == 4 * 200
        assert db.execute("SELECT COUNT(*) FROM journal WHERE kind = 'registry'").fetchone()[0] == 2

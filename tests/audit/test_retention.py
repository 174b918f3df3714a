"""Retention: nothing goes before its term, and what goes leaves the chain provable."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import orjson
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from interlock import Failure, Field, Interlock, tool
from interlock.audit import retention
from interlock.audit.chain import verify
from interlock.audit.chain_verdict import ChainVerdict
from interlock.audit.retention import Segment, Terms, expire_payloads, purge
from interlock.settings import Settings
from interlock.store import administration
from interlock.store.administration import administered
from interlock.store.connection import SqliteConnection
from interlock.store.home import Home
from interlock.store.homes import home_at
from interlock.store.journal_connection import LOG_BYTES
from interlock.store.port import StoreError, Transaction
from interlock.store.signing import Signer
from tests.support.chains import echo
from tests.support.retention import DAY_MS, Time, make_home, ms, stored
from tests.support.stores import opened, unguarded

AUDIT_11 = pytest.mark.proves("AUDIT-11")
SETTINGS = Settings.model_validate({})
TWO_AND_FIVE = Settings.model_validate({"retention_years": 2, "retention_years_writes": 5})
EXAMPLES = examples(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
BY = "local:auditor"


async def call_again(home: Home, now_ms: int) -> None:
    async with Interlock.open(home.path, clock=Time(now_ms).clock) as app:
        await app.add(echo)
        assert (await app.call("demo.echo", account="later")).state == "succeeded"


# Terms


@AUDIT_11
@pytest.mark.parametrize("years", [0, -1, 8, 100])
def test_a_term_outside_one_to_seven_years_is_refused_however_it_was_set(years: int) -> None:
    with pytest.raises(ValueError):
        Settings.model_validate({"retention_years": years})
    with pytest.raises(Failure) as caught:
        Terms.of(SETTINGS.model_copy(update={"retention_years_writes": years}))
    assert caught.value.code == "E3004"


@AUDIT_11
def test_by_default_reads_are_kept_one_year_and_everything_else_seven() -> None:
    assert Terms.of(SETTINGS) == Terms(reads_years=1, others_years=7)


@AUDIT_11
async def test_nothing_is_purged_before_its_term_and_asking_for_it_is_refused(tmp_path: Path) -> None:
    home = await make_home(tmp_path)
    before, kept = verify(home), stored(home)
    just_before = ms(2027) - 1
    assert purge(home, SETTINGS, now_ms=just_before, by=BY) == ()
    for through in (1, 2, len(kept), len(kept) + 1):
        with pytest.raises(Failure, match="nothing was purged: record 1 ") as caught:
            purge(home, SETTINGS, now_ms=just_before, by=BY, through=through)
        assert caught.value.code == "E3411"
    assert stored(home) == kept
    assert verify(home).head == before.head


@AUDIT_11
async def test_what_is_past_its_term_goes_and_the_rest_still_verifies_and_continues(tmp_path: Path) -> None:
    home = await make_home(tmp_path)
    whole = verify(home)
    now_ms = ms(2027)
    # Both registrations were made at the first moment of 2020; the reads behind them go with them.
    (segment,) = purge(home, SETTINGS, now_ms=now_ms, by=BY)
    assert (segment.first_seq, segment.last_seq, segment.records) == (1, 5, 5)
    assert [kind for _, kind in stored(home)] == ["intent", "mutation", "closed", "closed", "purge"]

    verdict = verify(home, known_head=(whole.head[0], bytes.fromhex(whole.head[1])))
    assert verdict.intact, verdict.faults
    assert verdict.purged_through == 5
    assert verdict.records == 5
    assert verdict.anchored_through == verdict.head[0] == whole.head[0] + 1
    assert verdict.last_anchor_ms == now_ms

    await call_again(home, now_ms)
    again = verify(home)
    assert again.intact, again.faults
    assert again.records == 6


@AUDIT_11
async def test_the_record_of_a_purge_says_who_removed_what(tmp_path: Path) -> None:
    home = await make_home(tmp_path)
    (segment,) = purge(home, SETTINGS, now_ms=ms(2027), by=BY)
    with opened(home) as db:
        body = orjson.loads(db.execute("SELECT body FROM journal WHERE kind = 'purge'").fetchone()[0])
    assert body == {
        "kind": "purge", "call": "purge:5", "timestamp": "2027-01-01T00:00:00.000Z", "by": BY,
        "firstSeq": 1, "lastSeq": 5, "hash": segment.hash.hex(),
    }  # fmt: skip


@AUDIT_11
async def test_each_class_of_record_has_its_own_term_and_the_first_in_term_stops_the_purge(tmp_path: Path) -> None:
    home = await make_home(tmp_path)
    # Five years and a day after the start the registrations are due and so are all the reads, but not the write.
    (segment,) = purge(home, TWO_AND_FIVE, now_ms=ms(2025) + DAY_MS, by=BY)
    assert segment.last_seq == 5
    # The read behind the write is long past its two years, and stays for the write's sake.
    assert purge(home, TWO_AND_FIVE, now_ms=ms(2025) + 3 * DAY_MS, by=BY) == ()
    (segment,) = purge(home, TWO_AND_FIVE, now_ms=ms(2025) + 5 * DAY_MS, by=BY)
    assert (segment.first_seq, segment.last_seq) == (6, 9)
    assert verify(home).intact


@AUDIT_11
async def test_a_purge_up_to_a_record_takes_no_more_than_was_asked(tmp_path: Path) -> None:
    home = await make_home(tmp_path)
    (segment,) = purge(home, SETTINGS, now_ms=ms(2040), by=BY, through=3)
    assert segment.last_seq == 3
    with pytest.raises(Failure, match="does not exist"):
        purge(home, SETTINGS, now_ms=ms(2040), by=BY, through=100)
    assert verify(home).purged_through == 3


@AUDIT_11
@pytest.mark.parametrize(
    ("made", "too_early", "due"),
    [
        (ms(2023, 6, 15, 12), ms(2024, 6, 15, 12) - 1, ms(2024, 6, 15, 12)),
        (ms(2024, 2, 29, 12), ms(2025, 2, 28, 23), ms(2025, 3, 1, 12)),
        (ms(2023, 2, 28, 12), ms(2024, 2, 28, 12) - 1, ms(2024, 2, 29, 12)),
    ],
)
async def test_a_year_is_a_year_of_the_calendar(tmp_path: Path, made: int, too_early: int, due: int) -> None:
    time = Time(made)
    async with Interlock.open(tmp_path, clock=time.clock) as app:
        await app.add(echo)
    one_year = SETTINGS.model_copy(update={"retention_years_writes": 1})
    assert purge(home_at(tmp_path), one_year, now_ms=too_early, by=BY) == ()
    assert len(purge(home_at(tmp_path), one_year, now_ms=due, by=BY)) == 1


@AUDIT_11
@EXAMPLES
@given(data=st.data())
def test_however_often_and_whenever_it_is_purged_only_what_is_past_its_term_goes(
    original: Home, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        home = home_at(shutil.copytree(original.path, Path(directory) / "home"))
        now_ms = ms(2020)
        for days in data.draw(st.lists(st.integers(0, 4 * 365), min_size=1, max_size=5)):
            now_ms += days * DAY_MS
            years = {name: data.draw(st.integers(1, 7)) for name in ("retention_years", "retention_years_writes")}
            with opened(home) as db:
                bodies = dict(db.execute("SELECT seq, body FROM journal").fetchall())
            for segment in purge(home, SETTINGS.model_copy(update=years), now_ms=now_ms, by=BY):
                for seq in range(segment.first_seq, segment.last_seq + 1):
                    record = orjson.loads(bodies[seq])
                    read = record.get("mutationClass") == "read_only"
                    term = years["retention_years" if read else "retention_years_writes"]
                    made = datetime.fromisoformat(record["timestamp"])
                    assert made.replace(year=made.year + term).timestamp() * 1000 <= now_ms
            verdict = verify(home)
            assert verdict.intact, verdict.faults


# The boundary


@AUDIT_11
async def test_a_wholly_purged_journal_goes_on_from_the_head_it_ended_with(tmp_path: Path) -> None:
    home = await make_home(tmp_path)
    last = len(stored(home))
    purge(home, SETTINGS, now_ms=ms(2040), by=BY)
    assert stored(home) == [(last + 1, "purge")]
    await call_again(home, ms(2040))
    assert [seq for seq, _ in stored(home)] == [last + 1, last + 2]
    assert verify(home).intact
    # Seven years on, the record of that purge and all after it are due as well.
    (segment,) = purge(home, SETTINGS, now_ms=ms(2048), by=BY)
    assert (segment.first_seq, segment.last_seq) == (last + 1, last + 2)
    await call_again(home, ms(2048))
    verdict = verify(home)
    assert verdict.intact, verdict.faults
    assert verdict.purged_through == last + 2
    assert verdict.records == 2


@AUDIT_11
async def test_a_journal_without_a_single_record_goes_on_from_its_newest_segment(tmp_path: Path) -> None:
    home = await make_home(tmp_path)
    verdict = verify(home)
    seq, head = verdict.head[0], bytes.fromhex(verdict.head[1])
    signer = Signer(home.keys)
    with opened(home) as db:
        signature = signer.sign("segment", seq, head, 1)
        db.execute("INSERT INTO segment VALUES (?, 1, ?, 1, ?, ?)", (seq, head, signer.key_id, signature))
        db.execute("DELETE FROM journal")
    assert verify(home).head == verdict.head
    await call_again(home, ms(2028))
    after = verify(home, known_head=(seq, head))
    assert after.intact, after.faults
    assert (after.purged_through, after.records) == (seq, 1)


@AUDIT_11
async def test_a_large_purge_goes_in_segments_that_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = await make_home(tmp_path, reads=8)
    monkeypatch.setattr(retention, "SEGMENT_RECORDS", 4)
    segments = purge(home, SETTINGS, now_ms=ms(2040), by=BY)
    assert [(segment.first_seq, segment.last_seq) for segment in segments] == [(1, 4), (5, 8), (9, 12), (13, 14)]
    assert [kind for _, kind in stored(home)] == ["purge"] * 4
    assert verify(home).intact


@AUDIT_11
async def test_a_purge_beside_a_running_program_leaves_one_chain(tmp_path: Path) -> None:
    await make_home(tmp_path)
    async with Interlock.open(tmp_path, clock=Time(ms(2030)).clock) as app:
        await app.add(echo)
        segments, *results = await asyncio.gather(
            asyncio.to_thread(purge, app.home, SETTINGS, now_ms=ms(2030), by=BY),
            *(app.call("demo.echo", account="x") for _ in range(50)),
        )
        assert isinstance(segments, tuple)
        assert all(result.state == "succeeded" for result in results if not isinstance(result, tuple))
        assert verify(app.home).intact
    verdict = verify(home_at(tmp_path))
    assert verdict.intact, verdict.faults
    assert verdict.purged_through == 9
    assert verdict.records == 51


@AUDIT_11
async def test_two_purges_at_once_remove_everything_once(tmp_path: Path) -> None:
    home = await make_home(tmp_path)

    def attempt() -> tuple[Segment, ...] | Failure:
        try:
            return purge(home, SETTINGS, now_ms=ms(2027), by=BY)
        except Failure as failure:
            return failure

    outcomes = await asyncio.gather(*(asyncio.to_thread(attempt) for _ in range(4)))
    removed = [outcome for outcome in outcomes if isinstance(outcome, tuple) and outcome]
    assert len(removed) == 1
    assert all(outcome.code == "E3410" for outcome in outcomes if isinstance(outcome, Failure))
    assert verify(home).intact


@AUDIT_11
async def test_a_broken_chain_is_not_purged_because_that_would_remove_the_evidence(tmp_path: Path) -> None:
    home = await make_home(tmp_path)
    with unguarded(home) as db:
        db.execute("UPDATE journal SET kind = 'late' WHERE seq = 7")
    kept = stored(home)
    with pytest.raises(Failure, match="the chain is broken at record 7") as caught:
        purge(home, SETTINGS, now_ms=ms(2040), by=BY)
    assert caught.value.code == "E3804"
    assert stored(home) == kept


@AUDIT_11
async def test_a_purge_that_fails_half_way_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = await make_home(tmp_path)
    before = verify(home)

    def full(*_: Any) -> bytes:
        raise StoreError("database or disk is full")

    monkeypatch.setattr(retention, "anchor_head", full)
    with pytest.raises(Failure) as caught:
        purge(home, SETTINGS, now_ms=ms(2040), by=BY)
    assert caught.value.code in ("E3801", "E3803")
    after = verify(home)
    assert after.intact
    assert (after.head, after.purged_through) == (before.head, 0)


# Tampering with segments


@pytest.fixture(scope="module")
def original() -> Iterator[Home]:
    with tempfile.TemporaryDirectory() as directory:
        yield asyncio.run(make_home(Path(directory)))


@pytest.fixture(scope="module")
def purged() -> Iterator[Home]:
    """A home with two purged segments, 1 to 2 and 3 to 5, and records from 6 on."""
    with tempfile.TemporaryDirectory() as directory:
        home = asyncio.run(make_home(Path(directory)))
        purge(home, SETTINGS, now_ms=ms(2027), by=BY, through=2)
        purge(home, SETTINGS, now_ms=ms(2027), by=BY)
        yield home


def tampered(home: Home, act: Callable[[SqliteConnection], Any]) -> ChainVerdict:
    with tempfile.TemporaryDirectory() as directory:
        copy = home_at(shutil.copytree(home.path, Path(directory) / "home"))
        with unguarded(copy) as db:
            act(db)
        return verify(copy)


SEGMENT_EDITS = [
    ("UPDATE segment SET hash = CAST('00000000000000000000000000000000' AS BLOB) WHERE last_seq = 5", 5),
    ("UPDATE segment SET at_ms = at_ms + 1 WHERE last_seq = 5", 5),
    ("UPDATE segment SET first_seq = 2 WHERE last_seq = 5", 5),
    ("UPDATE segment SET key_id = 'another' WHERE last_seq = 2", 2),
    ("UPDATE segment SET signature = CAST(hash || hash AS BLOB) WHERE last_seq = 2", 2),
    pytest.param(
        "UPDATE segment SET signature = 'text' WHERE last_seq = 2",
        1,
        marks=pytest.mark.sqlite_only("columns hold values of any type"),
    ),
    ("UPDATE segment SET last_seq = 4 WHERE last_seq = 5", 4),
    ("UPDATE segment SET last_seq = 7 WHERE last_seq = 5", 6),
    ("UPDATE segment SET last_seq = -3 WHERE last_seq = 2", 1),
    ("DELETE FROM segment WHERE last_seq = 2", 5),
    ("DELETE FROM segment WHERE last_seq = 5", 3),
    ("DELETE FROM segment", 1),
    ("DELETE FROM journal WHERE seq = 6", 6),
    ("UPDATE journal SET kind = 'late' WHERE seq = 6", 6),
    ("INSERT INTO journal SELECT 5, kind, call, body, hash FROM journal WHERE seq = 6", 5),
]


@AUDIT_11
@pytest.mark.proves("AUDIT-03")
@pytest.mark.parametrize(("edit", "position"), SEGMENT_EDITS)
def test_an_edit_of_a_segment_or_at_its_boundary_is_found(purged: Home, edit: str, position: int) -> None:
    assert verify(purged).intact
    assert tampered(purged, lambda db: db.execute(edit)).faults[0].seq == position


@AUDIT_11
def test_two_segments_made_one_are_found_by_the_record_of_the_purge(purged: Home) -> None:
    def act(db: SqliteConnection) -> None:
        db.execute("DELETE FROM segment WHERE last_seq = 2")
        db.execute("UPDATE segment SET first_seq = 1 WHERE last_seq = 5")

    found = [fault.what for fault in tampered(purged, act).faults]
    assert found == [
        f"the segment that stands for records {stretch} is missing or another" for stretch in ("1 to 2", "3 to 5")
    ]


@AUDIT_11
def test_an_anchor_in_a_purged_segment_is_still_checked_by_its_signature(purged: Home) -> None:
    with opened(purged) as db:
        seq = db.execute("SELECT MIN(seq) FROM anchor").fetchone()[0]
    change = "UPDATE anchor SET at_ms = 1 WHERE seq = (SELECT MIN(seq) FROM anchor)"
    assert tampered(purged, lambda db: db.execute(change)).faults[0].seq == seq


@AUDIT_11
def test_no_head_can_be_claimed_that_a_segment_contradicts(purged: Home) -> None:
    assert verify(purged, known_head=(5, bytes(32))).faults[0].seq == 5
    assert verify(purged, known_head=(4, bytes(32))).intact  # gone; the signed segment vouches for it
    assert verify(purged, known_head=(0, bytes(32))).intact


@AUDIT_11
def test_even_a_plain_connection_cannot_delete_beyond_the_newest_segment(purged: Home) -> None:
    with (
        opened(purged) as db,
        pytest.raises(StoreError, match="append-only"),
    ):
        db.execute("DELETE FROM journal WHERE seq = 6")
    for statement in ("UPDATE segment SET last_seq = 100 WHERE last_seq = 5", "DELETE FROM segment"):
        with (
            opened(purged) as db,
            pytest.raises(StoreError, match="append-only"),
        ):
            db.execute(statement)
    assert verify(purged).intact


# Payloads


@tool(version="1.0.0", mutation_class="read_only", namespace="demo", max_inline_chars=100)
async def report(account: Annotated[str, Field(description="ledger account", examples=["cash"])]) -> dict[str, str]:
    """A long report."""
    return {"text": account * 200}


async def test_a_large_result_expires_and_its_envelope_stays_readable(tmp_path: Path) -> None:
    time = Time(ms(2026))
    async with Interlock.open(tmp_path, clock=time.clock, payload_days=2) as app:
        await app.add(report)
        result = await app.call("demo.report", account="cash")
        ref = result.persistence.ref
        assert ref is not None
        size = len(await app.read_payload(ref))
        time.now_ms += 2 * DAY_MS - 1
        assert await expire_payloads(app.journal) == 0
        assert len(await app.read_payload(ref)) == size
        time.now_ms += 1
        assert await expire_payloads(app.journal) == 1
        assert await expire_payloads(app.journal) == 0
        with pytest.raises(Failure, match="is gone: expired"):
            await app.read_payload(ref)
        rows = app.journal.reader.all("SELECT call, size, body FROM payload WHERE ref = ?", (ref,))
        assert rows == [(result.invocation_id, size, None)]
    assert verify(home_at(tmp_path)).intact


async def _with_payloads(home: Path, time: Time, sizes: list[int]) -> None:
    """A home that keeps large results which expire with the clock."""

    def unit(transaction: Transaction) -> None:
        row = "INSERT INTO payload (ref, call, owner, body, size, created_ms, expires_ms, reason) VALUES"
        for at, size in enumerate(sizes):
            expires_ms = time.now_ms + at // 3
            values = (f"payload:{at}", "c", "local/x", bytes(size), size, time.now_ms, expires_ms, "large")
            transaction.execute(f"{row} (?, ?, ?, ?, ?, ?, ?, ?)", values)

    async with Interlock.open(home, clock=time.clock, housekeeping=False) as app:
        await app.journal.commit(unit)


@examples(max_examples=15)
@given(sizes=st.lists(st.sampled_from([0, 100, 900_000, retention.PAYLOAD_BYTES_AT_ONCE + 1]), max_size=12))
async def test_payloads_expire_in_slices_that_are_bounded_and_none_is_left(sizes: list[int]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        time = Time(ms(2026))
        await _with_payloads(Path(directory), time, sizes)
        time.now_ms += DAY_MS
        async with Interlock.open(directory, clock=time.clock, housekeeping=False) as app:
            place, seen = (-1, ""), 0
            while (found := await app.journal.commit(retention.expire_slice(place))) is not None:
                assert found.place > place
                held = app.journal.reader.all("SELECT COUNT(*) FROM payload WHERE body IS NOT NULL")[0][0]
                assert held == len(sizes) - seen - found.payloads
                gone = app.journal.reader.all(
                    "SELECT size FROM payload WHERE (expires_ms, ref) > (?, ?) AND (expires_ms, ref) <= (?, ?)",
                    (*place, *found.place),
                )
                assert found.payloads == 1 or sum(size for (size,) in gone) <= retention.PAYLOAD_BYTES_AT_ONCE
                place, seen = found.place, seen + found.payloads
            assert seen == len(sizes)


async def test_others_write_between_the_slices_and_the_space_is_given_back(tmp_path: Path) -> None:
    time = Time(ms(2026))
    count = 30
    await _with_payloads(tmp_path, time, [2**20] * count)
    near = home_at(tmp_path).near  # in a file
    large = (tmp_path / "interlock.db").stat().st_size if near else 0
    time.now_ms += DAY_MS
    async with Interlock.open(tmp_path, clock=time.clock, housekeeping=False) as app:
        between: list[int] = []

        async def write(_: float) -> None:
            held = app.journal.reader.all("SELECT COUNT(*) FROM payload WHERE body IS NOT NULL")[0][0]
            await app.journal.append("authority", "x", b'{"call":"x","kind":"authority"}')
            between.append(held)

        assert await expire_payloads(app.journal, write) == count
        assert sorted(set(between), reverse=True) == [26, 22, 18, 14, 10, 6, 2, 0]
    if not near:
        return
    assert (tmp_path / "interlock.db").stat().st_size < large / 4
    assert not (tmp_path / "interlock.db-wal").exists() or (tmp_path / "interlock.db-wal").stat().st_size <= LOG_BYTES


async def test_a_purge_gives_the_space_back_and_says_before_what_it_would_remove(tmp_path: Path) -> None:
    home = await make_home(tmp_path, reads=40)
    wanted = retention.due(home, SETTINGS, now_ms=ms(2040))
    kept = stored(home)
    assert sum(segment.records for segment in wanted) == len(kept)
    assert retention.due(home, SETTINGS, now_ms=ms(2040), before_ms=ms(2020)) == ()
    early = retention.due(home, SETTINGS, now_ms=ms(2040), before_ms=ms(2020, 1, 10))
    assert 0 < sum(segment.records for segment in early) < len(kept)
    assert stored(home) == kept, "nothing went"
    assert purge(home, SETTINGS, now_ms=ms(2040), by=BY, before_ms=ms(2020, 1, 10)) == early
    assert verify(home).intact
    assert stored(home)[0][0] == early[-1].last_seq + 1


@pytest.mark.sqlite_only("the file of a store gives empty pages back")
@pytest.mark.parametrize("earlier_version", [False, True])
def test_a_file_that_was_emptied_shrinks(tmp_path: Path, earlier_version: bool) -> None:
    home = asyncio.run(make_home(tmp_path))
    with opened(home) as db:
        if earlier_version:
            db.execute("PRAGMA journal_mode=DELETE")
            db.execute("PRAGMA auto_vacuum=0")
            db.execute("VACUUM")
        names = "ref, call, owner, body, size, created_ms, expires_ms, reason"
        row = f"INSERT INTO payload ({names}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        db.executemany(row, ((f"payload:{at}", "c", "o", bytes(2**20), 2**20, 0, 0, "large") for at in range(20)))
        db.execute("UPDATE payload SET body = NULL")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with administered(home) as connection:
        (empty,) = connection.one("PRAGMA freelist_count")
        assert administration.give_back(connection) is not earlier_version
        given_back = empty - connection.one("PRAGMA freelist_count")[0]
    assert given_back == (0 if earlier_version else administration.PAGES_AT_ONCE)
    if earlier_version:
        assert retention.shrink(home) == 0
    assert retention.shrink(home, rewrite=True) > 15 * 2**20
    assert verify(home).intact


async def test_housekeeping_removes_records_past_their_term_only_where_it_is_set(tmp_path: Path) -> None:
    home = await make_home(tmp_path)
    for purges in (False, True):
        async with Interlock.open(
            tmp_path, clock=Time(ms(2040)).clock, housekeeping=False, purge_records=purges
        ) as app:
            await app.maintain()
        assert (stored(home)[0][0] > 1) == purges
    assert verify(home).intact

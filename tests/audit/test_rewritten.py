"""History that is rewritten without the signing key is found: by `audit verify`, and by the next start."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock import Interlock
from interlock.audit.chain import verify
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.store import last_head
from interlock.store.home import Home
from interlock.store.homes import home_at
from interlock.store.journal import Journal
from interlock.store.records import plain
from interlock.store.signing import Signer
from interlock.testing import FakeClock
from tests.support.chains import Copy, count, make_home
from tests.support.stores import opened, unguarded

EXAMPLES = hypothesis.settings(max_examples=25)


@pytest.fixture(scope="module")
def original() -> Iterator[Home]:
    with tempfile.TemporaryDirectory() as directory:
        yield asyncio.run(make_home(Path(directory)))


@contextmanager
def edited(original: Home, act: Callable[[Copy], object]) -> Generator[Home]:
    """A copy of a home to which something was done by somebody who knows the format; the triggers are back."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "home"
        shutil.copytree(original.path, path)
        home = home_at(path)
        with unguarded(home) as db:
            act(Copy(home, db))
        yield home


async def opens(home: Home) -> Failure | None:
    """Open a home as a process does; the failure when it is refused."""
    try:
        async with Interlock.open(home.path, housekeeping=False):
            return None
    except Failure as failure:
        return failure


def forge(copy: Copy, seq: int) -> None:
    body = orjson.loads(copy.rows()[seq - 1][3])
    copy.db.execute("UPDATE journal SET body = ? WHERE seq = ?", (orjson.dumps({**body, "by": "somebody else"}), seq))
    copy.relink(seq)


def unsign(copy: Copy, after: int = 0) -> None:
    """Remove the anchors behind a record, in the database and in the file."""
    copy.db.execute("DELETE FROM anchor WHERE seq > ?", (after,))
    lines = [line for line in copy.home.anchors.read_bytes().split() if orjson.loads(line)["seq"] <= after]
    copy.home.anchors.write_bytes(b"".join(line + b"\n" for line in lines))


@EXAMPLES
@given(data=st.data())
def test_records_rewritten_and_unsigned_in_every_place_but_the_keys_are_found(
    original: Home, data: st.DataObject
) -> None:
    seq = data.draw(st.integers(1, count(original)), "rewritten from")
    anchors_kept = data.draw(st.sampled_from([0, seq - 1]), "anchors kept up to")
    cut = data.draw(st.booleans(), "cut after it")

    def act(copy: Copy) -> None:
        forge(copy, seq)
        unsign(copy, anchors_kept)
        if cut:
            copy.db.execute("DELETE FROM journal WHERE seq > ?", (seq,))

    with edited(original, act) as home:
        assert not verify(home).intact
        failure = asyncio.run(opens(home))
        assert failure is not None
        assert failure.code == "E3804"
        words = ("interlock audit verify", "restore the whole data directory")
        assert any(one in failure.resolution for one in words)
        assert not verify(home).intact, "nobody has signed it"


def test_removed_signatures_are_found_though_no_record_was_changed(original: Home) -> None:
    with edited(original, unsign) as home:
        assert any("keys/journal.head names it" in fault.what for fault in verify(home).faults)
        failure = asyncio.run(opens(home))
    assert failure is not None
    assert (failure.code, "signed heads were removed" in failure.message) == ("E3804", True)


def test_a_last_head_that_is_gone_damaged_or_forged_is_refused(original: Home) -> None:
    def gone(copy: Copy) -> None:
        last_head.path_of(copy.home).unlink()

    def damaged(copy: Copy) -> None:
        last_head.path_of(copy.home).write_bytes(b"{}")

    def forged(copy: Copy) -> None:
        head = last_head.read(copy.home)
        assert head is not None
        line = last_head.anchor_line(head.seq, head.hash, head.at_ms + 1, head.key_id, head.signature)
        last_head.path_of(copy.home).write_bytes(line)

    for act, word in ((gone, "missing"), (damaged, "damaged"), (forged, "does not verify")):
        with edited(original, act) as home:
            assert any("keys/journal.head" in fault.what and word in fault.what for fault in verify(home).faults)
            failure = asyncio.run(opens(home))
        assert failure is not None
        assert (failure.code, word in failure.message) == ("E3804", True)


def test_an_anchor_that_was_made_up_signs_nothing(original: Home) -> None:
    def act(copy: Copy) -> None:
        forge(copy, count(original))
        copy.db.execute("UPDATE anchor SET hash = (SELECT hash FROM journal WHERE journal.seq = anchor.seq)")

    with edited(original, act) as home:
        assert not verify(home).intact
        failure = asyncio.run(opens(home))
    assert failure is not None
    assert failure.code == "E3804"


def earlier(copy: Copy) -> None:
    """Make a home as an earlier version left it."""
    last_head.path_of(copy.home).unlink()
    copy.db.execute("DELETE FROM fact WHERE name = ?", (last_head.FACT,))


async def test_a_home_of_an_earlier_version_is_taken_over_once_and_on_record(original: Home) -> None:
    with edited(original, earlier) as home:
        assert verify(home).intact
        before = count(home)
        for _ in range(2):
            assert await opens(home) is None
        with opened(home) as db:
            found = db.execute("SELECT seq, body FROM journal WHERE kind = 'signing'").fetchall()
        ((seq, body),) = found
        assert (seq, orjson.loads(body)["act"]) == (before + 1, "last_head.begun")
        verdict = verify(home)
        assert (verdict.intact, verdict.anchored_through) == (True, verdict.head[0])


def test_a_home_of_an_earlier_version_without_signatures_is_refused_where_its_records_span_time(
    original: Home,
) -> None:
    def act(copy: Copy) -> None:
        earlier(copy)
        unsign(copy)
        body = orjson.loads(copy.rows()[0][3])
        old = orjson.dumps({**body, "timestamp": "2001-01-01T00:00:00.000Z"})
        copy.db.execute("UPDATE journal SET body = ? WHERE seq = 1", (old,))
        copy.relink(1)

    with edited(original, act) as home:
        assert any("is not signed, though" in fault.what for fault in verify(home).faults)
        failure = asyncio.run(opens(home))
    assert failure is not None
    assert (failure.code, "is not signed, though" in failure.message) == ("E3804", True)


async def test_more_unsigned_records_than_a_killed_process_leaves_are_a_fault(tmp_path: Path) -> None:
    home = await make_home(tmp_path / "home")
    first = count(home) + 1
    with unguarded(home) as db:
        rows = [(first + at, "authority", "x", plain("authority", "x", 0, act="forged"), b"") for at in range(1001)]
        for row in rows:
            db.execute("INSERT INTO journal (seq, kind, call, body, hash) VALUES (?, ?, ?, ?, ?)", row)
        Copy(home, db).relink(first)
    (fault,) = verify(home).faults
    assert "1,001 records" in fault.what
    failure = await opens(home)
    assert failure is not None
    assert (failure.code, "1,001 records" in failure.message) == ("E3804", True)


@pytest.mark.sqlite_only("the files of a store that is in use are copied")
@EXAMPLES
@given(
    steps=st.lists(st.tuples(st.sampled_from([0.0, 0.4, 3600.0, -5.0]), st.integers(1, 400)), min_size=1, max_size=6),
    processes=st.integers(1, 3),
)
async def test_a_process_that_ends_at_any_moment_leaves_a_home_that_opens(
    steps: list[tuple[float, int]], processes: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        home = home_at(Path(directory) / "home")
        time = FakeClock(1_800_000_000_000)
        now_ms = lambda: time.clock.now_ms()  # noqa: E731
        journals = [Journal(home, clock=Clock(now_ms=now_ms), signer=Signer(home.keys)) for _ in range(processes)]
        try:
            for at, (pause_s, records) in enumerate(steps):
                time.advance(pause_s)
                body = plain("authority", "x", now_ms(), act="test")
                writer = journals[at % processes]
                await asyncio.gather(*(writer.append("authority", "x", body) for _ in range(records)))
                # As if everybody were killed now: the files, as they are at this moment.
                shutil.copytree(home.path, Path(directory) / f"copy{at}")
                left = home_at(Path(directory) / f"copy{at}")
                assert verify(left).intact
                later = Journal(left, clock=Clock(), signer=Signer(left.keys))
                await later.close()
                verdict = verify(left)
                assert (verdict.intact, verdict.anchored_through) == (True, verdict.head[0])
        finally:
            for journal in journals:
                await journal.close()


async def test_a_process_that_found_a_head_signed_by_another_signs_its_next_record_however_long_ago_that_was(
    tmp_path: Path,
) -> None:
    clock, home = FakeClock(), home_at(tmp_path / "home")

    def started() -> Journal:
        return Journal(home, clock=clock.clock, signer=Signer(home.keys))

    async def write(journal: Journal) -> None:
        await journal.append("authority", "x", plain("authority", "x", clock.now_ms, act="said"))

    first, second = started(), started()
    try:
        await write(first)
        clock.advance(2)
        await write(first)  # with a signature, of which the second process knows nothing
        clock.advance(3600)
        await second.commit(lambda _: None)  # it would sign the head, and finds that it is signed
        await write(second)
        third = started()  # as any process does while these two run, or after both were killed
        await third.close()
        assert verify(home).intact
    finally:
        await first.close()
        await second.close()

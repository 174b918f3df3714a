"""Large payloads are written in pieces: they read as they were, go with their row, and leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from interlock import Caller, Failure, Interlock
from interlock.api.doctor import examine
from interlock.audit.chain import verify
from interlock.audit.retention import expire_payloads
from interlock.call.phases import Request
from interlock.gateway.persistence.pieces import Sealed
from interlock.store import payloads
from interlock.store.backup import copied
from interlock.store.homes import home_at
from interlock.store.journal import Journal
from interlock.store.payloads import PIECE_BYTES
from interlock.store.sealing import keys_in_use
from tests.support import stores
from tests.support.calls import admit, until
from tests.support.pieces import ANN, CHANGE, LARGE, changing, produce, text


@asynccontextmanager
async def opened(home: Path, **settings: Any) -> AsyncGenerator[Interlock]:
    async with Interlock.open(home, housekeeping=False, **settings) as app:
        await admit(app, produce, changing)
        yield app


def pieces(app: Interlock) -> int:
    return app.journal.reader.all("SELECT count(*) FROM payload_piece")[0][0]


def notes(app: Interlock) -> list[tuple[str, str]]:
    """The notes about pieces that no row names: the payload and the process that writes them."""
    rows = app.journal.reader.all("SELECT name, value FROM fact WHERE name LIKE 'pieces%'")
    return [(name.partition(":")[2], writer) for name, writer in rows]


async def make(app: Interlock, name: str, size: int) -> str:
    key = None if name == "piece.produce" else f"k{size}"
    result = await app.call(name, {"size": size}, caller=ANN, key=key)
    assert result.ok, result.error
    assert result.persistence.ref is not None
    return result.persistence.ref


@pytest.mark.parametrize("name", ["piece.produce", CHANGE])
@pytest.mark.parametrize("size", [PIECE_BYTES - 39, PIECE_BYTES - 38, LARGE + 27])
async def test_a_payload_of_any_size_reads_as_it_was_and_only_large_ones_are_in_pieces(
    tmp_path: Path, name: str, size: int
) -> None:
    async with opened(tmp_path) as app:
        ref = await make(app, name, size)
        assert await app.read_payload(ref, caller=ANN) == f'"{text(size)}"'.encode()
        ((told, length, count),) = app.journal.reader.all(
            "SELECT size, length(body), pieces FROM payload WHERE ref = ?", (ref,)
        )
        lengths = [one for (one,) in app.journal.reader.all("SELECT length(body) FROM payload_piece ORDER BY number")]
        assert told == size + 2
        assert length + sum(lengths) == size + 2 + 37
        assert (count, count > 0) == (len(lengths), size > PIECE_BYTES - 39)
        assert all(one <= PIECE_BYTES for one in (length, *lengths))
        assert notes(app) == []
        kept_bytes = app.journal.reader.all("SELECT sum(size) FROM payload")[0][0]
        used = dict(app.journal.reader.all("SELECT scope, bytes FROM payload_use"))
        assert used == dict.fromkeys(("home", "tenant:north", "caller:north/user:ann"), kept_bytes)
        if name == CHANGE:
            again = await app.call(name, {"size": size}, caller=ANN, key=f"k{size}")
            assert (again.replayed, again.value) == (True, text(size))
    assert verify(home_at(tmp_path)).faults == ()


async def test_a_large_payload_of_an_earlier_version_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as app:
        with monkeypatch.context() as patch:
            patch.setattr(payloads, "PIECE_BYTES", 1 << 30)
            ref = await make(app, "piece.produce", LARGE)
        assert pieces(app) == 0
        assert await app.read_payload(ref, caller=ANN) == f'"{text(LARGE)}"'.encode()


@pytest.mark.sqlite_only("a copy of the data directory is not offered on PostgreSQL yet")
async def test_a_backup_holds_the_pieces_and_the_key_that_they_are_sealed_with(tmp_path: Path) -> None:
    async with opened(tmp_path / "home") as app:
        ref = await make(app, "piece.produce", LARGE)
        assert keys_in_use(app.journal.reader) == {app.gateway.storage.payloads._box.current}  # pyright: ignore[reportPrivateUsage]
        with copied(home_at(tmp_path / "home"), tmp_path / "copy"):
            pass
    async with opened(tmp_path / "copy") as app:
        assert await app.read_payload(ref, caller=ANN) == f'"{text(LARGE)}"'.encode()


# They go


@pytest.mark.parametrize("way", ["expired", "discarded by its caller"])
async def test_pieces_go_with_their_payload_and_its_row_says_why(tmp_path: Path, way: str) -> None:
    async with opened(tmp_path) as app:
        ref, other = await make(app, CHANGE, LARGE), await make(app, CHANGE, LARGE + 1)
        if way == "expired":
            statement = "UPDATE payload SET expires_ms = 0 WHERE ref = ?"
            await app.journal.commit(lambda transaction: transaction.execute(statement, (ref,)) and None)
            assert await expire_payloads(app.journal) == 1
        else:
            assert await app.call_off(ref.removeprefix("payload:"), "discard") == "finished"
            await app.maintain()
        with pytest.raises(Failure, match=f"is gone: {way}"):
            await app.read_payload(ref, caller=ANN)
        assert app.journal.reader.all("SELECT DISTINCT ref FROM payload_piece") == [(other,)]
        assert notes(app) == []
        kept_bytes = app.journal.reader.all("SELECT sum(size) FROM payload WHERE body IS NOT NULL")
        assert app.journal.reader.all("SELECT bytes FROM payload_use WHERE scope = 'home'") == kept_bytes
        assert await app.read_payload(other, caller=ANN)
    assert verify(home_at(tmp_path)).faults == ()


async def test_a_payload_that_expires_while_it_is_read_is_whole_or_gone(tmp_path: Path) -> None:
    async with opened(tmp_path) as app:
        ref = await make(app, "piece.produce", 20 * PIECE_BYTES)
        await app.journal.commit(lambda transaction: transaction.execute("UPDATE payload SET expires_ms = 0") and None)
        reading = asyncio.create_task(app.read_payload(ref, caller=ANN))
        await expire_payloads(app.journal)
        (read,) = await asyncio.gather(reading, return_exceptions=True)
        if isinstance(read, Failure):
            assert "is gone: expired" in read.message
        else:
            assert read == f'"{text(20 * PIECE_BYTES)}"'.encode()


async def test_a_call_that_is_cancelled_between_two_pieces_leaves_none(tmp_path: Path) -> None:
    async with opened(tmp_path) as app:
        calling = asyncio.create_task(app.call("piece.produce", {"size": 40 * PIECE_BYTES}, caller=ANN))
        await until(lambda: pieces(app))
        assert not calling.done()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await app.journal.drain()
        assert 0 < pieces(app) < 40
        ((_, writer),) = notes(app)
        assert writer == app.instance.id
        await app.maintain()
        assert (pieces(app), notes(app)) == (0, [])
        assert app.journal.reader.all("SELECT count(*) FROM payload") == [(0,)]
    assert verify(home_at(tmp_path)).faults == ()


async def test_a_write_that_is_cancelled_between_two_pieces_is_recorded_all_the_same(tmp_path: Path) -> None:
    async with opened(tmp_path) as app:
        calling = asyncio.create_task(app.call(CHANGE, {"size": LARGE}, caller=ANN, key="k"))
        await until(lambda: pieces(app))
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert app.journal.reader.all("SELECT state FROM reservation") == [("done",)]
        again = await app.call(CHANGE, {"size": LARGE}, caller=ANN, key="k")
        assert (again.replayed, again.value) == (True, text(LARGE))
    assert verify(home_at(tmp_path)).faults == ()


async def test_pieces_of_a_process_that_lives_stay_and_those_of_a_dead_one_go(tmp_path: Path) -> None:
    async with opened(tmp_path) as app:
        async with Interlock.open(tmp_path, housekeeping=False) as other:
            for number in (1, 2):
                await app.journal.commit(
                    lambda transaction, number=number: payloads.add_piece(
                        transaction, "payload:x", number, memoryview(b"x"), other.instance.id
                    )
                )
            await app.maintain()
            assert (pieces(app), notes(app)) == (2, [("payload:x", other.instance.id)])
        await app.maintain()
        assert (pieces(app), notes(app)) == (0, [])


# The closing unit does not depend on them


@pytest.mark.parametrize("way", ["removed", "key retired", "no room"])
@pytest.mark.parametrize("name", ["piece.produce", CHANGE])
async def test_a_closing_that_cannot_use_the_pieces_keeps_the_payload_whole_or_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, way: str
) -> None:
    async with opened(tmp_path, payload_bytes_per_caller=10 * LARGE) as app:
        stored, box = app.gateway.storage.payloads, app.gateway.storage.payloads._box  # pyright: ignore[reportPrivateUsage]
        write_ahead = stored.write_ahead

        async def then(caller: Caller, bodies: Mapping[str, bytes], *, strict: bool) -> Mapping[str, Sealed]:
            ahead = await write_ahead(caller, bodies, strict=strict)
            assert pieces(app) > 0
            if way == "removed":
                for ref, _ in notes(app):
                    await app.journal.commit(lambda transaction, ref=ref: payloads.release_pieces(transaction, ref))
                await app.maintain()
                assert pieces(app) == 0
            elif way == "key retired":
                box.rotate()
                box.retire(())
            else:
                row = "INSERT INTO payload_use (scope, bytes) VALUES ('caller:north/user:ann', ?)"
                await app.journal.commit(lambda transaction: transaction.execute(row, (10 * LARGE,)) and None)
            return ahead

        monkeypatch.setattr(stored, "write_ahead", then)
        result = await app.call(name, {"size": LARGE}, caller=ANN, key=None if name == "piece.produce" else "k")
        if way == "no room" and name == "piece.produce":
            assert result.error is not None
            assert result.error.code == "E3407"
        else:
            assert result.ok, result.error
            ref = result.persistence.ref
            assert ref is not None
            if way == "no room":
                with pytest.raises(Failure, match="withheld"):
                    await app.read_payload(ref, caller=ANN)
            else:
                assert await app.read_payload(ref, caller=ANN) == f'"{text(LARGE)}"'.encode()
        await app.maintain()
        assert (pieces(app), notes(app)) == (0, [])


async def test_pieces_that_the_store_refuses_do_not_stop_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as app:

        async def refuse(*_: Any) -> None:
            raise Failure("E3803", "too many records wait for the journal")

        monkeypatch.setattr(Journal, "commit_large", refuse)
        ref = await make(app, CHANGE, LARGE)
        assert pieces(app) == 0
        assert await app.read_payload(ref, caller=ANN) == f'"{text(LARGE)}"'.encode()


async def test_nothing_is_written_ahead_for_a_caller_who_is_at_the_quota(tmp_path: Path) -> None:
    async with opened(tmp_path, payload_bytes_per_caller=LARGE + 2) as app:
        await make(app, "piece.produce", LARGE)
        before = pieces(app)
        refused = await app.call("piece.produce", {"size": LARGE}, caller=ANN)
        assert refused.error is not None
        assert refused.error.code == "E3407"
        assert (pieces(app), notes(app)) == (before, [])


# Inputs


async def test_large_inputs_are_kept_in_pieces_too(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path, housekeeping=False, keep_inputs="always") as app:
        await admit(app, changing)
        for arguments in ({"size": 1}, {"size": text(LARGE)}):
            result = await app.gateway.invoke(Request(tool=CHANGE, arguments=arguments, caller=ANN, key="k"))
            assert (await app.inputs(result.invocation_id)).model_input == arguments
        kept_pieces = pieces(app)
        assert kept_pieces > 1
        assert notes(app) == []
        await app.maintain()
        assert pieces(app) == kept_pieces


# Damage


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM payload_piece WHERE number = 2",
        "DELETE FROM payload_piece",
        "UPDATE payload_piece SET body = x'00' WHERE number = 2",
        "UPDATE payload_piece SET number = -number; UPDATE payload_piece SET number = number + 4",
    ],
    ids=["one removed", "all removed", "changed", "in another order"],
)
async def test_a_piece_that_was_removed_or_changed_is_found(tmp_path: Path, statement: str) -> None:
    async with opened(tmp_path) as app:
        ref = await make(app, CHANGE, LARGE)
        with stores.opened(app.home) as database:
            for one in statement.split(";"):
                database.execute(one)
        with pytest.raises(Failure) as caught:
            await app.read_payload(ref, caller=ANN)
        assert caught.value.code == "E3604"
    verdict = verify(home_at(tmp_path))
    assert any("cannot be opened: it was changed" in fault.what for fault in verdict.faults), verdict.faults
    broken = [one for one in examine(home_at(tmp_path), machine=False) if one.status == "broken"]
    assert any(one.what == f"a part of {ref} is missing, so it cannot be read" for one in broken) == (
        "DELETE" in statement
    )

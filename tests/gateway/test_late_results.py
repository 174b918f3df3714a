"""Large results of writes: of those that end after they were cut off, and of those that are told as they are."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Annotated, Any

import pytest

from interlock import Caller, Field, Interlock
from interlock.audit.chain import verify
from interlock.audit.retention import expire_payloads
from interlock.data.bounds import LARGE
from interlock.gateway.execution import late as late_outcomes
from interlock.gateway.results import outputs, placement
from interlock.privacy.redact import SchemaRedactor
from interlock.store.homes import home_at
from interlock.store.payloads import PIECE_BYTES
from interlock.testing import FakeClock
from tests.support.calls import admit, code, records, until, write

ANN = Caller(id="user:ann", tenant="north")
MUCH = 3 * PIECE_BYTES
DAY_S = 86_400
Size = Annotated[int, Field(description="how many characters", examples=[1])]


def text(size: int) -> str:
    return ("0123456789" * (size // 10 + 1))[:size]


class Late:
    """A write in a thread that nothing can stop, until it is released."""

    def __init__(self, **options: Any) -> None:
        self.entered, self.release, self.runs = threading.Event(), threading.Event(), 0

        def pay(size: Size) -> str:
            """Pay slowly, and heed nobody."""
            self.entered.set()
            self.release.wait(60)
            self.runs += 1
            return text(size)

        self.tool = write(pay, **options)

    async def cut_off(self, app: Interlock, clock: FakeClock, size: int) -> None:
        call = asyncio.create_task(app.call("demo.pay", {"size": size}, key="k", timeout_s=5, caller=ANN))
        await until(self.entered.is_set)
        clock.advance(6)
        assert code(await call) == "E3402"

    async def end(self, app: Interlock) -> None:
        self.release.set()
        await until(lambda: records(app, kind="late"))


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[bool]]:
    """Which walks over a result ran on the thread of the event loop."""
    seen: dict[str, set[bool]] = {}
    main = threading.get_ident()

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def noted(*given: Any, **named: Any) -> Any:
            seen.setdefault(name, set()).add(threading.get_ident() == main)
            return real(*given, **named)

        monkeypatch.setattr(owner, name, noted)

    watch(late_outcomes, "map_output")
    watch(placement, "digest")
    watch(outputs, "encode")
    watch(SchemaRedactor, "apply")
    return seen


def pieces(app: Interlock) -> list[int]:
    return [count for (count,) in app.journal.reader.all("SELECT pieces FROM payload WHERE ref LIKE 'payload:%'")]


def largest_row(app: Interlock) -> int:
    """The size of the largest outcome that stands in the row of a key."""
    return app.journal.reader.all("SELECT max(length(result)) FROM reservation")[0][0]


@pytest.mark.parametrize("told", ["by reference", "inline"])
@pytest.mark.parametrize("size", [10, MUCH])
async def test_a_late_result_is_walked_over_beside_the_loop_and_written_in_pieces_where_it_is_large(
    tmp_path: Path, walked: dict[str, set[bool]], told: str, size: int
) -> None:
    clock, late = FakeClock(), Late(persist_output=told == "by reference")
    async with Interlock.open(tmp_path, clock=clock.clock, housekeeping=False) as app:
        await admit(app, late.tool)
        await late.cut_off(app, clock, size)
        walked.clear()
        await late.end(app)
        large = size > LARGE
        assert set(walked) == {"map_output", "digest", "encode", "apply"}
        assert set().union(*walked.values()) == {not large}
        assert [count > 1 for count in pieces(app)] == ([True] if large else [])
        assert largest_row(app) < 1000
        assert app.journal.reader.all("SELECT name FROM fact WHERE name LIKE 'pieces%'") == []
        again = await app.call("demo.pay", {"size": size}, key="k", caller=ANN)
        assert (again.value, again.replayed, late.runs) == (text(size), True, 1)
        by_reference = large and told == "by reference"
        assert (again.persistence.decision, again.persistence.ref is None) == (
            ("preview", False) if by_reference else ("inline", True)
        )
    assert verify(home_at(tmp_path)).faults == ()


async def test_a_late_result_for_which_a_quota_has_no_room_is_on_record_and_withheld(tmp_path: Path) -> None:
    clock, late = FakeClock(), Late()
    async with Interlock.open(tmp_path, clock=clock.clock, housekeeping=False, payload_bytes=1000) as app:
        await admit(app, late.tool)
        await late.cut_off(app, clock, MUCH)
        await late.end(app)
        again = await app.call("demo.pay", {"size": MUCH}, key="k", caller=ANN)
        assert (again.value, again.replayed, late.runs) == (None, True, 1)
        assert again.persistence.decision == "link"
        assert "payload_bytes" in again.persistence.reason
    assert verify(home_at(tmp_path)).faults == ()


async def test_a_home_that_is_closed_waits_until_a_late_outcome_is_on_record(tmp_path: Path) -> None:
    clock, late = FakeClock(), Late()
    async with Interlock.open(tmp_path, clock=clock.clock, housekeeping=False) as app:
        await admit(app, late.tool)
        await late.cut_off(app, clock, MUCH)
        late.release.set()
        settling = app.gateway.runner._late._settling  # pyright: ignore[reportPrivateUsage]
        await until(lambda: settling)
    async with Interlock.open(tmp_path, clock=clock.clock, housekeeping=False) as app:
        await admit(app, late.tool)
        again = await app.call("demo.pay", {"size": MUCH}, key="k", caller=ANN)
        assert (again.value, again.replayed, late.runs) == (text(MUCH), True, 1)


async def change(size: Size) -> str:
    """Change something and tell much about it."""
    return text(size)


changing = write(change, persist_output=False)


async def test_a_large_result_that_is_told_as_it_is_stands_in_no_row_and_goes_with_its_key(tmp_path: Path) -> None:
    clock = FakeClock()
    async with Interlock.open(tmp_path, clock=clock.clock, store_clock=clock.clock, housekeeping=False) as app:
        await admit(app, changing)
        first = await app.call("demo.change", {"size": MUCH}, key="k", caller=ANN)
        assert (first.value, first.persistence.decision, first.persistence.ref) == (text(MUCH), "inline", None)
        assert "persistence" not in records(app, kind="closed")[-1]
        assert largest_row(app) < 1000
        assert [count > 1 for count in pieces(app)] == [True]
        again = await app.call("demo.change", {"size": MUCH}, key="k", caller=ANN)
        assert (again.value, again.replayed) == (text(MUCH), True)
        assert (again.persistence.decision, again.persistence.ref) == ("inline", None)
        ((until_ms,),) = app.journal.reader.all("SELECT expires_ms FROM payload WHERE ref LIKE 'payload:%'")
        assert app.journal.reader.all("SELECT expires_ms FROM reservation") == [(until_ms,)]
        assert verify(home_at(tmp_path)).faults == ()
        clock.advance((until_ms - clock.clock.now_ms()) / 1000 + 1)
        assert await expire_payloads(app.journal) == 1
        assert app.journal.reader.all("SELECT count(*) FROM payload_piece") == [(0,)]
        anew = await app.call("demo.change", {"size": MUCH}, key="k", caller=ANN)
        assert (anew.value, anew.replayed) == (text(MUCH), False)


async def test_a_replay_of_a_large_result_that_found_no_room_says_so(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path, housekeeping=False, payload_bytes=1000) as app:
        await admit(app, changing)
        first = await app.call("demo.change", {"size": MUCH}, key="k", caller=ANN)
        assert (first.value, first.persistence.decision) == (text(MUCH), "inline")
        assert "payload_bytes" in records(app, kind="closed")[-1]["withheld"]
        again = await app.call("demo.change", {"size": MUCH}, key="k", caller=ANN)
        assert (again.value, again.replayed, again.persistence.decision) == (None, True, "link")
        assert "payload_bytes" in again.persistence.reason
    assert verify(home_at(tmp_path)).faults == ()

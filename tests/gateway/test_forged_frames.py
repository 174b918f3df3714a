"""Whatever bytes come out of a sandbox: the call ends, its key is settled, and no budget gains or loses by it.

Real sandboxed processes write the bytes, through the gateway and onto the journal.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from interlock import Interlock
from interlock.audit.chain import verify
from interlock.call.results import Result
from interlock.store.homes import home_at
from tests.support import isolated_tools as cell
from tests.support.calls import admit
from tests.support.forged_frames import CUT, DONE, ROWS, spoilt
from tests.thorough import THOROUGH, no_collection

CALLS = 1_000 if THOROUGH else 12
HELD_S = 0.05
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
LIMIT = 10**6
LONGEST = 200_000


class Turns:
    """The processor time of the loop's thread between two turns of the loop, at most."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.of = b""

    @asynccontextmanager
    async def counted(self, stream: bytes) -> AsyncGenerator[None]:
        before = self.longest_s
        task = asyncio.ensure_future(self._count())
        try:
            yield
        finally:
            task.cancel()
            if self.longest_s > before:
                self.of = stream[:60] + b"..." + stream[-200:]

    async def _count(self) -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            self.longest_s, last = max(self.longest_s, now - last), now


@pytest.mark.supports("EXEC-03")
@pytest.mark.timeout(7200)
def test_whatever_a_sandbox_says_keys_and_budgets_stay_sane(tmp_path: Path) -> None:
    turns, calls = Turns(), 0
    budget = {"per": "caller", "limit": LIMIT}

    @given(ROWS, CUT)
    @settings(max_examples=CALLS, deadline=None, suppress_health_check=SLOW)
    def one(rows: tuple[list[bytes], list[bytes], bool], cut: tuple[int, int | None] | None) -> None:
        nonlocal calls
        before, odd, done = rows
        stream = spoilt(b"".join((*before, *odd, DONE if done else b"")), cut)[:LONGEST]
        calls += 1
        runner.run(_heard(app, turns, stream, f"key-{calls}"))

    with asyncio.Runner() as runner:
        opened = Interlock.open(tmp_path / "home", budgets=[budget], housekeeping=False)
        app = runner.run(opened.__aenter__())
        try:
            runner.run(admit(app, cell.utter, cell.double))
            assert runner.run(app.call("cell.double", n=1)).ok  # which opens the sandbox
            one()
            assert runner.run(app.call("cell.double", n=21)).unwrap() == 42
        finally:
            runner.run(opened.__aexit__(None, None, None))
    assert verify(home_at(tmp_path / "home")).faults == ()
    print(f"{calls:,} calls; the loop was held for {turns.longest_s * 1e3:.1f} ms at most: {turns.of!r}")
    assert turns.longest_s < HELD_S or not THOROUGH


async def _heard(app: Interlock, turns: Turns, stream: bytes, key: str) -> None:
    said = base64.b64encode(stream).decode()
    earlier = _spent(app)
    async with asyncio.timeout(120), turns.counted(stream):
        with no_collection():
            result = await app.call("cell.utter", stream=said, key=key)
    again = await app.call("cell.utter", stream=said, key=key)
    _check_key(app, result, again)
    assert not {"\x1b", "\u202e", "\0"} & set(str(result.error)), stream
    assert app.journal.reader.all("SELECT count(*) FROM hold", ())[0][0] == 0
    ((spent, held),) = app.journal.reader.all("SELECT spent, held FROM spend", ())
    assert held == 0
    assert earlier <= spent <= LIMIT * 10**6 + 10**15, stream


def _spent(app: Interlock) -> int:
    return sum(spent for (spent,) in app.journal.reader.all("SELECT spent FROM spend", ()))


def _check_key(app: Interlock, result: Result, again: Result) -> None:
    """The call has one intent and one end, its key is not held, and the key gives the same answer or blocks."""
    records = app.journal.reader.all("SELECT kind FROM journal WHERE call = ?", (result.invocation_id,))
    kinds = [kind for (kind,) in records]
    assert kinds.count("intent") == kinds.count("closed") == 1
    states = app.journal.reader.all("SELECT state FROM reservation WHERE call = ?", (result.invocation_id,))
    if result.ok:
        assert states == [("done",)]
        assert again.replayed
        assert again.value == result.value
    else:
        assert states in ([], [("done",)], [("unknown",)])
        assert not again.ok or not states

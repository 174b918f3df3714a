"""kill -9 between two pieces of a large result: the key is blocked, records are whole, and the pieces go."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from interlock import Interlock
from interlock.audit.chain import verify
from interlock.store.homes import home_at
from tests.support import forked
from tests.support.calls import admit
from tests.support.pieces import ANN, CHANGE, LARGE, changing, produce

ROOT = Path(__file__).parents[2]
# Killed in the writer's thread: two pieces are on disk, and the third is written and not committed.
DYING = """
import asyncio, os, sys
from interlock import Interlock
from interlock.store import payloads
from tests.support.pieces import ANN, LARGE, changing, produce

add_piece = payloads.add_piece

def killed(transaction, ref, number, piece, writer):
    add_piece(transaction, ref, number, piece, writer)
    if number == 3:
        os.kill(os.getpid(), 9)

async def main():
    payloads.add_piece = killed
    async with Interlock.open(sys.argv[1], housekeeping=False) as app:
        app.catalog.attach(changing)
        app.catalog.attach(produce)
        key = "k" if sys.argv[2] == "demo.change_much" else None
        await app.call(sys.argv[2], {"size": LARGE}, caller=ANN, key=key)

asyncio.run(main())
"""


@pytest.mark.parametrize("name", [CHANGE, "piece.produce"])
async def test_a_kill_between_two_pieces_leaves_a_home_in_order_and_the_pieces_go(tmp_path: Path, name: str) -> None:
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        await admit(app, changing, produce)
    process = await asyncio.create_subprocess_exec(*forked.python(), "-c", DYING, str(tmp_path), name, cwd=ROOT)
    assert await process.wait() == -9
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        await admit(app, changing, produce)
        assert app.journal.reader.all("SELECT number FROM payload_piece ORDER BY 1") == [(1,), (2,)]
        assert app.journal.reader.all("SELECT count(*) FROM payload") == [(0,)]
        await app.maintain()
        assert app.journal.reader.all("SELECT count(*) FROM payload_piece") == [(0,)]
        assert app.journal.reader.all("SELECT count(*) FROM fact WHERE name LIKE 'pieces%'") == [(0,)]
        again = await app.call(name, {"size": LARGE}, caller=ANN, key="k" if name == CHANGE else None)
        if name == CHANGE:
            assert app.journal.reader.all("SELECT key, state FROM reservation") == [("k", "unknown")]
            assert again.error is not None
            assert again.error.code == "E3409"
        else:
            assert again.persistence.ref is not None
            assert len(await app.read_payload(again.persistence.ref, caller=ANN)) == LARGE + 2
    assert verify(home_at(tmp_path)).faults == ()

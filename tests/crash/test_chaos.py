"""Callers write to three nodes on one store while everything fails: the short form of `./dev chaos`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.crash import chaos
from tests.crash.fleet import FAULTS
from tests.thorough import THOROUGH

CALLS, KILLS = (2000, 40) if THOROUGH else (200, 6)
pytestmark = pytest.mark.timeout(1800 if THOROUGH else 600)


@pytest.mark.proves("OPS-07")
async def test_faults_of_every_kind_lose_nothing_double_nothing_and_leave_nothing_unreported(tmp_path: Path) -> None:
    found = await chaos.run(tmp_path, calls=CALLS, kills=KILLS, seed=17, short=not THOROUGH)
    print(found.table())
    assert found.faults.keys() == FAULTS.keys()
    assert found.told["acknowledged"]
    assert found.kept, found.table()


def test_a_saved_table_takes_the_place_of_the_one_that_the_page_has(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = chaos.PAGE.read_text()
    page.write_text(text)
    found = chaos.Found(7, 2, told=Counter(acknowledged=2), violations={"lost": [], "unreported": []}, verified=True)
    for commit in ("1a2b3c", "4d5e6f"):
        chaos.save(found.section(commit), page)
    before, _, rest = text.partition(chaos.BEGIN)
    after = rest.partition(chaos.END)[2]
    saved = page.read_text()
    assert saved.startswith(before)
    assert saved.endswith(chaos.END + after)
    assert after.strip()
    assert "1a2b3c" not in saved
    for row in ("| calls | 2 |", "| acknowledged | 2 |", "| lost | 0 |", "| audit verify | passes |", "commit 4d5e6f:"):
        assert saved.count(row) == 1, row

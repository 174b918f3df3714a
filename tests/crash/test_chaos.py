"""Callers write to three nodes on one store while everything fails: the short form of `./dev chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash import chaos
from tests.crash.fleet import FAULTS
from tests.thorough import THOROUGH

CALLS, KILLS = (2000, 40) if THOROUGH else (200, 6)
pytestmark = pytest.mark.timeout(1800 if THOROUGH else 600)


@pytest.mark.part_of(
    "OPS-07",
    rest="tests outside `BEHAVIOUR` of tests/tiers.py, such as those of the command line, on PostgreSQL; version 16"
    " with pgvector, as tests run on the version that is installed",
)
async def test_faults_of_every_kind_lose_nothing_double_nothing_and_leave_nothing_unreported(tmp_path: Path) -> None:
    found = await chaos.run(tmp_path, calls=CALLS, kills=KILLS, seed=17, short=not THOROUGH)
    print(found.table())
    assert found.faults.keys() == FAULTS.keys()
    assert found.told["acknowledged"]
    assert found.kept, found.table()

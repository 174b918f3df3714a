"""Answers, records, events and metrics of the corpus are what the golden files say, over every wire."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import pytest

from interlock.core.errors import CODES
from tests.golden.corpus import CASES, RAW
from tests.golden.record import FILES, WIRES, played
from tests.support import postgres

MOST_LINES = 60
# On a shared store, readiness tells of the nodes and of Redis as well: what is recorded, and what is expected there.
READINESS = (
    ('content-length: 176","x-trace-id: <trace 1>"],"body":{"status":"healthy"', '"background":"healthy","sandbox"'),
    (
        'content-length: 212","x-trace-id: <trace 1>"],"body":{"status":"healthy"',
        '"background":"healthy","nodes":"healthy","redis":"healthy","sandbox"',
    ),
)


@pytest.mark.timeout(600)  # every case over every wire
async def test_every_call_of_the_corpus_goes_as_recorded(tmp_path: Path) -> None:
    made = await played(tmp_path)
    known = {path.stem: path.read_text() for path in FILES.glob("*.json")}
    if postgres.given():
        for recorded, expected in zip(*READINESS, strict=True):
            assert known["raw"].count(recorded) == 1
            known["raw"] = known["raw"].replace(recorded, expected)
    assert made.keys() == known.keys(), "python -m tests.golden writes the files anew"
    changed = [name for name in made if made[name] != known[name]]
    lines = [
        line[:400]
        for name in changed
        for line in difflib.unified_diff(
            known[name].splitlines(), made[name].splitlines(), f"{name}: recorded", f"{name}: now", n=0, lineterm=""
        )
    ]
    assert not changed, "\n".join([f"{len(changed)} cases changed", *lines[:MOST_LINES]])


def test_the_golden_files_hold_every_wire_and_every_error_code() -> None:
    found = {path.stem: json.loads(path.read_text()) for path in FILES.glob("*.json")}
    assert found["codes"].keys() == CODES.keys()
    assert found["raw"]["http"].keys() == RAW.keys()
    assert found.keys() == {*CASES, "codes", "raw"}
    for case in (*(found[name] for name in CASES), *found["codes"].values()):
        assert tuple(case) == WIRES

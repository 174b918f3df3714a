"""`./dev bench search DIR`: the quality of the search on sets of a user's own, in the format of bench/sets."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from bench import search, sets
from interlock.data.schema import Json

TOOLS: list[Json] = [
    {
        "id": "mail.send",
        "name": "send_email",
        "description": "Send an email message to a recipient.",
        "input_schema": {"type": "object", "properties": {"to": {"type": "string", "description": "the address"}}},
        "server": "mail",
        "server_description": "Letters of the office.",
    },
    {"id": "bank.invoice", "name": "create_invoice", "description": "Write an invoice for goods.", "category": "money"},
    {"id": "sky.forecast", "name": "forecast", "description": "Weather of the next seven days in a city."},
    {"id": "words.translate", "name": "translate", "description": "Translate a text into another language."},
]
QUERIES: list[Json] = [
    {"query": "send somebody an email message", "relevant": ["mail.send"]},
    {
        "query": "the weather of a city in another language",
        "groups": [["sky.forecast", "bank.invoice"], ["words.translate"]],
        "steps": "1. weather of the next days in a city\n2) translate a text",
    },
]


def _written(folder: Path, *, packed: bool) -> None:
    folder.mkdir()
    for name, lines in (("tools", TOOLS), ("queries", QUERIES)):
        text = "".join(f"{json.dumps(one)}\n" for one in lines).encode()
        path = folder / f"{name}.jsonl{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(text) if packed else text)


@pytest.mark.parametrize("packed", [False, True])
def test_the_bench_measures_a_set_of_the_users_own(tmp_path: Path, packed: bool) -> None:
    _written(tmp_path / "office", packed=packed)
    quality, selection = search.set_tables(tmp_path / "office", quick=True)
    assert quality.title == "Search: office, 4 tools, 2 requests"
    words_alone = next(row for row in quality.rows if row[0] == "ours, words only")
    assert words_alone[1:] == ("100.0", "100.0", "100.0")
    assert selection.title == "Selection: office, 4 tools, 2 requests"
    assert [row[0] for row in selection.rows] == ["search alone", "with intent", "with categories", "with both"]


def test_the_bench_measures_every_set_in_a_folder(tmp_path: Path) -> None:
    for name in ("first", "second"):
        _written(tmp_path / name, packed=False)
    (tmp_path / "empty").mkdir()
    shutil.copy(tmp_path / "first" / "tools.jsonl", tmp_path / "empty")
    assert [one.name for one in sets.found(tmp_path)] == ["first", "second"]
    titles = [one.title.partition(",")[0] for one in search.set_tables(tmp_path, quick=True)]
    assert titles == ["Search: first", "Search: second", "Selection: first", "Selection: second"]

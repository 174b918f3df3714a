"""The guided tour runs to its end, and the journal it leaves proves that it was no theatre."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from interlock import Caller, Interlock, demo_tools
from interlock.api import demonstration
from interlock.store.homes import home_at
from tests.support import forked, stores
from tests.support.cli import Cli

Json = dict[str, Any]
PATIENCE_S = 540.0


def records(home: Path) -> list[Json]:
    return stores.bodies(home_at(home))


def ledger_in(directory: Path) -> bool:
    return any(directory.rglob("demo-ledger*"))


async def test_what_the_demonstration_did_in_one_home_does_not_show_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("INTERLOCK_DEMO_LEDGER", raising=False)
    # Of several homes the one opened first counts, and another test of this process may still have one open.
    monkeypatch.setattr(demonstration, "_open", list[str]())
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user"))
    asked: Json = {"account": "cash", "cents": 250, "key": "order-17"}
    for name in ("first", "second"):
        async with Interlock.open(tmp_path / name, housekeeping=False) as app:
            await app.add(demo_tools.post)
            async with Interlock.open(tmp_path / "meanwhile", housekeeping=False):
                pass
            result = await app.call("demo.post", **asked, caller=Caller(id="local:ann", kind="human", trust=90))
            assert (result.value or {})["entry"] == 1, result.error
    written = [name for name in ("first", "second", "meanwhile", "user") if ledger_in(tmp_path / name)]
    assert written == ["first", "second"]
    assert "INTERLOCK_DEMO_LEDGER" not in os.environ
    monkeypatch.setenv("INTERLOCK_DEMO_LEDGER", "elsewhere")
    async with Interlock.open(tmp_path / "third", housekeeping=False):
        assert os.environ["INTERLOCK_DEMO_LEDGER"] == "elsewhere"


def tour(cli: Cli, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program that takes the tour."""
    python = forked.python()
    return subprocess.run(
        [*python, *words], env={**cli.environment, "TOUR_PYTHON": "\n".join(python)}, cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


@pytest.mark.sqlite_only("the tour changes the store's file, and a killed process leaves no lease")
@pytest.mark.timeout(600)
def test_the_tour_runs_to_its_end_and_its_journal_proves_that_it_happened(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    ended = tour(cli, "-m", "tests.cli.warm_tour", "demo", "--keep")
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    place = re.search(r"its data directory is (\S+?)\. ", ended.stdout)
    assert place is not None
    directory = Path(place.group(1))
    try:
        everything_was_shown(ended.stdout)
        nothing_was_staged(records(directory / "home"), directory / "ledger.jsonl")
    finally:
        shutil.rmtree(directory)
    assert not cli.home.exists()


def everything_was_shown(out: str) -> None:
    for words in (
        "def post(ctx: Context, account: Account, cents: Cents) -> Entry:",
        "$ interlock tools add interlock.demo_tools",
        "did you mean `account`?",
        "replayed: it ran once, at ",
        "E3204",
        "press@example.org would get the statement of cash",
        "$ interlock approvals approve ",
        "E3209",
        "E3406",
        "E3417",
        "E3210",
        "$ kill -9 ",
        "E3409",
        "$ interlock calls reconcile",
        " · intact",
        " · broken",
    ):
        assert words in out


def nothing_was_staged(journal: list[Json], ledger: Path) -> None:
    # Every effect is in the ledger once, also that of the killed process.
    assert [json.loads(line)["cents"] for line in ledger.read_text().splitlines()] == [250, 500]
    closed = [record for record in journal if record["kind"] == "closed"]
    # The duplicate was replayed, and the made-up argument never ran.
    assert [record["source"] for record in closed if record.get("idempotencyKey") == "order-17"].count("replay") == 1
    refused = next(record for record in closed if record.get("error_code") == "E3301")
    assert "execute" not in refused["phases"]
    # The agent was held to its token; what was approved ran once, cites its ticket and its agent; silence was a no.
    assert any(record.get("error_code") == "E3204" and record["agentId"].startswith("did:key:") for record in closed)
    mailed = [record for record in closed if record.get("idempotencyKey") == "mail-1"]
    assert [record["source"] for record in mailed] == ["compute", "replay"]
    assert mailed[0]["approvalTicketId"].startswith("apr_")
    assert ledger.with_suffix(".outbox").read_text().splitlines() == ["press@example.org: statement of cash"]
    acts = [record["act"] for record in journal if record["kind"] == "approval"]
    assert acts == ["approved", "used", "auto_denied", "approved", "used"]
    # The killed call left an intent, an end that nobody could know, and a person's word.
    settled = next(record for record in journal if record["kind"] == "settled")
    story = [record for record in journal if record["call"] == settled["call"]]
    assert [record["kind"] for record in story] == ["intent", "closed", "settled"]
    assert story[1]["outcome"] == "unknown"
    assert settled["happened"] is True
    # The edit is really there.
    assert [record["newValue"] for record in journal if record["kind"] == "mutation"] == [9250, "cash"]


def test_a_tour_in_which_something_goes_wrong_says_so_and_exits_1(tmp_path: Path) -> None:
    # Without its first steps nothing is registered, so calls that should succeed do not.
    program = (
        "from interlock.cli import demo; from tests.cli import warm_tour;"
        " demo.STEPS = demo.STEPS[1:3]; warm_tour.tour()"
    )
    ended = tour(Cli(tmp_path), "-c", program, "demo", "--json")
    assert ended.returncode == 1
    document: Json = json.loads(ended.stdout)
    assert document["finished"] is False
    assert [command["exit"] for command in document["steps"][1]["commands"]] == [1, 1, 1]

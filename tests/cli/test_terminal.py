"""Commands at a terminal: progress while they work, and lines that fit."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.support.cli import Cli
from tests.support.postgres import Server
from tests.support.retention import make_home, ms

NOTES = (sys.executable, "-m", "interlock.demo_server")


def at_terminal(cli: Cli, *words: str, columns: int = 100) -> str:
    return warm.at_terminal(words, cli.environment, cli.path, columns)[1]


# Progress


def test_long_commands_show_what_they_are_at_on_a_terminal(fresh: Cli) -> None:
    shown = at_terminal(fresh, "tools", "add", "interlock.demo_tools")
    assert "looking for tools …" in shown
    assert "] " in shown.partition("trying out demo.post@")[0], "a bar before the second tool"
    assert "trying out demo.balance@" in at_terminal(fresh, "tools", "test", "demo.balance")
    added = at_terminal(fresh, "upstream", "add", "mcp", "notes", "--accept-hints", "--", *NOTES)
    assert "connecting to notes and trying out its tools …" in added
    tried = [step.partition("\r")[0] for step in added.split("trying out notes.")[1:]]
    assert len(set(tried)) == len(tried) > 1, "each tool is named"
    assert "] " in added.split("trying out notes.")[-2][-30:], "a bar before the last one"
    assert "asking notes for its tools" in at_terminal(fresh, "upstream", "refresh", "notes")
    assert "asking notes whether it answers …" in at_terminal(fresh, "upstream", "probe", "notes")
    assert "trying out the tools of notes …" in at_terminal(fresh, "upstream", "accept", "notes", "--reason", "seen")
    assert "writing: 0 of" in at_terminal(fresh, "audit", "export", "--out", "journal.jsonl")
    assert "100 %  copying" in at_terminal(fresh, "backup", "copy")
    assert "100 %  copying" in at_terminal(fresh, "--home", str(fresh.path / "again"), "restore", "copy")
    assert "looking at: sandbox" in at_terminal(fresh, "doctor")


# A write that reports progress, and waits for a person first.
PUBLISH = '''
from typing import Annotated

from interlock import Context, Effect, Field, Preview, tool


@tool(namespace="demo", version="1.0.0", mutation_class="write_irreversible", effects=[Effect("page:{name}", "CREATE")])
async def publish(ctx: Context, name: Annotated[str, Field(description="a page", examples=["a"])]) -> str:
    """Publish a page."""
    ctx.progress("printing it", percent=50)
    ctx.effect(f"page:{name}", "CREATE")
    return name


@publish.preview
async def _(name: str) -> Preview:
    return Preview(impact="it would be published")
'''
# What commands that may take long show while they work. CALL is a call that can be undone, TICKET an approved one.
LONG = {
    "calls resume of one": (
        ("calls", "resume", "TICKET"),
        ("going on with what was approved …", "50 %", "printing it"),
    ),
    "calls resume": (("calls", "resume"), ("going on with what was approved …", "50 %", "printing it")),
    "calls undo": (("calls", "undo", "CALL", "--key", "u-1"), ("undoing 01",)),
    "tools evaluate": (("tools", "evaluate", "--recorded"), ("measuring selections …",)),
    "tools train-router": (("tools", "train-router"), ("training on your calls …",)),
    "secrets rotate-key": (("secrets", "rotate-key"), ("sealing every credential under a new key …",)),
}


@pytest.mark.parametrize("name", LONG)
def test_every_long_command_says_what_it_is_at_on_a_terminal(cli: Cli, name: str) -> None:
    words, told = LONG[name]
    if name.startswith("calls resume"):
        (cli.path / "publishing.py").write_text(PUBLISH)
        assert cli("tools", "add", "publishing.py").code == 0
        token = cli("token", "issue", "--agent", "bot", "--scope", "tools:invoke").out.strip()
        agent = Cli(cli.path, {"INTERLOCK_TOKEN": token})
        ticket = agent.call("demo.publish", {"name": "a"}, "--key", "k-1")["pending"]["ticketId"]
        assert cli("approvals", "approve", ticket).code == 0
        words = tuple(ticket if word == "TICKET" else word for word in words)
    elif name == "calls undo":
        call = cli.call("demo.post", {"account": "cash", "cents": 250}, "--key", "k-1")["invocation_id"]
        words = tuple(call if word == "CALL" else word for word in words)
    shown = at_terminal(cli, *words)
    assert [one for one in told if one not in shown] == [], shown


@pytest.mark.sqlite_only("a file is copied before it is migrated; a server has backups of its own")
def test_a_migration_shows_how_far_its_backup_is_on_a_terminal(fresh: Cli) -> None:
    assert fresh("tools", "list").code == 0
    for way in ("down", "up"):
        moved = at_terminal(fresh, "migrate", way)
        assert "100 %  copying" in moved, moved
        assert ("undoing 0" if way == "down" else "migrating …") in moved


def reaches_the_end(shown: str, words: str) -> bool:
    """Whether a bar counts records up to the last one, such as `100 %  removed 9 of 9 records`."""
    return re.search(rf"100 %  {words} ([1-9][\d,]*) of \1 records", shown) is not None


async def test_export_and_removal_of_records_show_how_many_are_done_on_a_terminal(tmp_path: Path) -> None:
    await make_home(tmp_path / "home", start_ms=ms(2015))
    exported = at_terminal(Cli(tmp_path), "audit", "export", "--out", "journal.jsonl")
    assert reaches_the_end(exported, "writing:"), exported
    removed = at_terminal(Cli(tmp_path), "audit", "purge", "--yes")
    assert reaches_the_end(removed, "removed"), removed


async def test_copying_a_store_shows_how_far_it_is_on_a_terminal(tmp_path: Path, postgres_server: Server) -> None:
    await make_home(tmp_path / "home", start_ms=ms(2015))
    copied = at_terminal(Cli(tmp_path), "store", "copy", "--to", postgres_server.new_schema())
    assert "100 %  copying" in copied, copied
    assert "verifying: " in copied


def test_progress_is_shown_neither_beside_json_nor_without_a_terminal(fresh: Cli) -> None:
    for words in (("tools", "add", "interlock.demo_tools"), ("audit", "export", "--out", "a.jsonl", "--replace")):
        assert fresh(*words).err == ""
        shown = at_terminal(fresh, *words, "--json")
        assert "\r" not in shown
        assert "\x1b[K" not in shown


def test_json_on_a_terminal_means_what_it_means_elsewhere_and_draws_nothing(cli: Cli) -> None:
    words = ("call", "demo.\u202e\x9b31m", "{}", "--json")
    shown = at_terminal(cli, *words)
    assert not set(shown) & set("\u202e\x9b\x1b")
    assert "\\u202e\\u009b31m" in shown
    assert json.loads(shown)["error"]["message"] == cli(*words).json["error"]["message"]


# Width


def unfitting(shown: str, columns: int) -> list[str]:
    """The lines that are longer than the terminal, though they could be folded between words."""
    lines = (_ESCAPES.sub("", line.rpartition("\r")[2]) for line in shown.split("\n"))
    return [line for line in lines if len(line) > columns and " " in line.strip()]


_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
MAIL = '{"account": "cash", "to": "somebody@example.org"}'


def test_lines_fit_a_terminal_of_forty_columns(cli: Cli) -> None:
    cli("call", "demo.mail_statement", MAIL, "--key", "before")
    shown = {
        words: at_terminal(cli, *words, columns=40)
        for words in (
            ("call", "demo.balance", '{"account": "cash"}'),
            ("call", "demo.post", '{"account": "cash", "cents": "2,50"}', "--key", "k"),
            ("call", "demo.mail_statement", MAIL, "--key", "m"),
            ("call", "demo.nothing", "{}"),
            ("calls", "show", "nothing-of-the-kind"),
            ("tools", "list"),
            ("tools", "show", "demo.post"),
            ("tools", "test", "demo.balance"),
            ("calls", "list"),
            ("approvals", "list"),
            ("approvals", "show", cli.ask("approvals", "list", "--all")["tickets"][0]["id"]),
            ("policy", "explain", "me", "demo.mail_statement", MAIL),
            ("audit", "verify"),
            ("upstream", "probe", "nothing"),
            ("health",),
        )
    }
    assert {words: lines for words, text in shown.items() if (lines := unfitting(text, 40))} == {}
    # Each text of a progress line replaces the one before, so it must not be folded.
    steps = [step for text in shown.values() for step in text.split("\r\x1b[K")[1:-1]]
    assert any("trying out demo.bal" in step for step in steps)
    assert max(map(len, steps)) < 40

"""Commands at a terminal: progress while they work, and lines that fit."""

from __future__ import annotations

import sys

from tests import warm
from tests.cli.conftest import Cli

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
    assert "asking notes for its tools" in at_terminal(fresh, "upstream", "refresh", "notes")
    assert "asking notes whether it answers …" in at_terminal(fresh, "upstream", "probe", "notes")
    assert "trying out the tools of notes …" in at_terminal(fresh, "upstream", "accept", "notes", "--reason", "seen")
    assert "writing: 0 of" in at_terminal(fresh, "audit", "export", "--out", "journal.jsonl")
    assert "copying: 100 %" in at_terminal(fresh, "backup", "copy")
    assert "copying: 100 %" in at_terminal(fresh, "--home", str(fresh.path / "again"), "restore", "copy")
    assert "looking at: sandbox" in at_terminal(fresh, "doctor")


def test_progress_is_shown_neither_beside_json_nor_without_a_terminal(fresh: Cli) -> None:
    for words in (("tools", "add", "interlock.demo_tools"), ("audit", "export", "--out", "a.jsonl", "--replace")):
        assert fresh(*words).err == ""
        shown = at_terminal(fresh, *words, "--json")
        assert "\r" not in shown
        assert "\x1b[K" not in shown

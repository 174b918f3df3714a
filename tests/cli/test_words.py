"""What a command says when something is not as it was meant: who has to act, and what to write instead."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import click
import pytest

from interlock.cli import root
from interlock.cli.command import runs_at_server
from tests.support.cli import Cli

FAILING = '''
from typing import Annotated

from interlock import Context, Effect, Failure, Field, Preview, tool

Text = Annotated[str, Field(description="any text", examples=["hello"])]


@tool(version="1.0.0", mutation_class="write_reversible", namespace="own", effects=[Effect("log", "UPDATE")])
def note(text: Text) -> str:
    """Note something down, and fail."""
    if text == "later":
        raise Failure("RATE_LIMITED", "the log is busy", retry_after_ms=55_324)
    raise ValueError("the cause")


@note.preview
def _(text: str) -> Preview:
    return Preview(impact="notes it")


@note.compensate
def _(text: str) -> None:
    pass
'''


def write(cli: Cli, name: str, text: str) -> str:
    path = cli.path / name
    path.write_text(text)
    return str(path)


def test_ids_that_say_nothing_are_refused_with_what_is_needed(cli: Cli) -> None:
    for words in (("calls", "show", "01"), ("calls", "reconcile", "01", "--happened")):
        ended = cli(*words)
        assert ended.code == 1
        assert "`01` is too short to tell which call is meant; give at least 6 characters" in ended.err
    ended = cli("approvals", "show", "nope")
    assert ended.code == 1
    assert "no ticket has the id `nope`" in ended.err
    assert "invocation" not in ended.err
    assert "call not found" not in ended.err


def test_credentials_are_listed_as_everything_else_is(fresh: Cli) -> None:
    stored = fresh("secrets", "set", "github/token", "-", "--expires", "30d", "--json", stdin="s3cret").json
    assert datetime.fromisoformat(stored["expires_at"]).tzinfo is not None
    [one] = fresh.ask("secrets", "list")["secrets"]
    assert (one["name"], one["slot"], one["resting_until"]) == ("github/token", "main", None)
    assert one["expires_at"] == stored["expires_at"]
    assert datetime.fromisoformat(one["created_at"]) < datetime.fromisoformat(one["expires_at"])
    gone = fresh("secrets", "remove", "nope")
    assert gone.code == 1
    assert "there is no credential `nope` to forget" in gone.err
    assert "store" not in gone.err
    assert "interlock secrets list" in gone.err


def test_a_registered_tool_is_tested_by_its_name(cli: Cli) -> None:
    [tested] = cli.ask("tools", "test", "demo.balance")["tools"]
    assert (tested["tool"], tested["passed"]) == ("demo.balance@1.0.0", True)


def test_what_cannot_be_a_tool_is_told_all_that_is_wrong_line_by_line(fresh: Cli) -> None:
    manifest = json.dumps({"tool_id": "echo", "version": "1.0.0", "name": "Echo", "description": "Give it all back.",
                           "provider": "local", "protocol": "native", "parameters": {"type": "object"},
                           "execution": {"target": "../../etc/passwd:x"}})  # fmt: skip
    bare = "from interlock import tool\n\n@tool\ndef go(x):\n    pass\n"
    ended = fresh("tools", "add", "../odd", write(fresh, "odd.json", manifest), write(fresh, "bare.py", bare))
    assert ended.code == 1
    assert "`../odd` is not the name of a module; give a .py file, a module or a manifest" in ended.out
    assert "`../../etc/passwd:x` must be written module:function or file.py:function" in ended.out
    assert "relative import" not in ended.out
    lines = [line for line in ended.out.splitlines() if line.startswith("    ")]
    for words in ('write @tool(version="1.0.0")', "a docstring", "a type for `x`", "a return type", 'name="bare_go"'):
        assert any(words in line for line in lines), words


def test_a_token_that_was_not_given_is_asked_for(fresh: Cli) -> None:
    ended = fresh("token", "delegate", "--to", "sub")
    assert ended.code == 2
    assert "there is no token: give --token, set INTERLOCK_TOKEN, or send one on stdin" in ended.err


def test_a_range_that_says_nothing_is_a_usage_error(cli: Cli) -> None:
    ended = cli("call", "demo.post@", "{}")
    assert ended.code == 2
    assert "say which versions after the @, or write demo.post alone" in ended.err


def test_a_tool_that_failed_tells_where_its_cause_is_found(fresh: Cli) -> None:
    fresh("tools", "add", write(fresh, "mine.py", FAILING))
    note = ("call", "own.note", '{"text": "no"}', "--key", "n-1")
    first, again = fresh(*note), fresh(*note)
    assert first.code == again.code == 1
    assert "E3401" in first.out
    assert "not retryable" in first.out
    assert "sees the cause with: interlock --verbose call own.note …" in first.out
    assert "the cause" not in first.out.replace("sees the cause", "")
    assert "replayed: it failed once, at " in again.out
    assert "interlock --verbose call own.note … under a new key" in again.out
    later = fresh("call", "own.note", '{"text": "later"}', "--key", "n-2")
    assert "retryable after 56 s" in later.out


def test_no_line_of_an_upstreams_error_can_be_taken_for_one_of_ours() -> None:
    import io

    from interlock.cli.render import Page
    from interlock.core.errors import Failure

    stream = io.StringIO()
    Page(stream).failure(Failure("E3401", "no\n✓ demo.pay  paid\r\x1b[2Jnext  done"))
    _, *message = stream.getvalue().split("\n")[:3]
    assert message == ["  no", "  ✓ demo.pay  paid\\x0d\\x1b[2Jnext  done"]


def test_a_mistyped_command_is_answered_with_the_nearest_one(fresh: Cli) -> None:
    for words, meant in ((("tols", "list"), "tools"), (("tools", "lst"), "list")):
        ended = fresh(*words)
        assert (ended.code, f"Did you mean '{meant}'?" in ended.err) == (2, True)
    assert "Did you mean" not in fresh("zzzzzz").err
    shell = Cli(fresh.path, {"_INTERLOCK_COMPLETE": "bash_complete", "COMP_WORDS": "interlock up", "COMP_CWORD": "1"})
    assert shell().out == "plain,upstream\n"


def test_the_shell_completes_the_names_of_tools_and_upstreams(cli: Cli) -> None:
    def completed(words: str, *, more: str = "") -> list[str]:
        number = len(words.split()) - 1 + words.endswith(" ")
        said = {"_INTERLOCK_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(number)}
        return Cli(cli.path, {**said, "INTERLOCK_SERVER": more} if more else said)().out.split()

    assert completed("interlock call demo.b") == ["plain,demo.balance"]
    assert "plain,demo.post" in completed("interlock tools show ")
    for words in ("approvals grant", "tools test", "tools recommend", "tools export"):
        assert completed(f"interlock {words} demo.b") == ["plain,demo.balance"], words
    assert cli("upstream", "add", "mcp", "notes", "--", sys.executable, "-m", "interlock.demo_server").code == 0
    for words in ("show", "probe", "refresh", "accept", "remove"):
        assert completed(f"interlock upstream {words} n") == ["plain,notes"], words
    assert completed("interlock call demo.b", more="http://127.0.0.1:9") == []
    assert completed(f"interlock --home {cli.path / 'other'} call demo.b") == []
    assert not (cli.path / "other").exists()
    assert "_INTERLOCK_COMPLETE=bash_source" in cli("--help").out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"TERM": "xterm", "NO_COLOR": "1"}, False)],
)
def test_a_page_aligns_columns_of_any_script_and_has_colours_on_a_terminal_that_shows_them(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], coloured: bool
) -> None:
    from interlock.cli.render import GOOD, Page

    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    rows = [("ab", GOOD), ("日本", "wide"), ("e\u0301e\u0301", "two accents"), ("a\tb", "a tab")]
    expected = ["ab     ✓", "日本   wide", "e\u0301e\u0301     two accents", "a b    a tab"]
    piped, terminal = io.StringIO(), Terminal()
    for stream in (piped, terminal):
        Page(stream).table(rows)
    assert piped.getvalue().splitlines() == expected
    shown = terminal.getvalue().splitlines()
    assert shown == [expected[0].replace("✓", "\x1b[32m✓\x1b[0m") if coloured else expected[0], *expected[1:]]


HOSTILE = "\x1b[2J\x9b31m\rwiped\u202e"


def test_nothing_that_a_page_is_made_of_draws_on_the_terminal_of_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a style is given: names of identities and lines of configurations are shown so."""
    from interlock.cli.render import Page, Text

    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    for stream in (io.StringIO(), Terminal()):
        page = Page(stream)
        page.line(Text(HOSTILE), HOSTILE, right=Text("").append(HOSTILE))
        page.table([(Text(HOSTILE), Text(f"two\n  {HOSTILE}"))])
        page.console.print(HOSTILE)
        assert not set(stream.getvalue()) & set("\x1b\x9b\r\u202e")
        assert stream.getvalue().count("\\x1b[2J") == 6
        # What is in a cell cannot be taken for a line of ours.
        assert len(stream.getvalue().splitlines()) == 3


@pytest.mark.parametrize("columns", [40, 100])
def test_cells_of_wide_characters_and_of_spaces_are_folded_by_their_columns(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    from interlock.cli.render import Page, Text
    from interlock.cli.terminal import cell_len

    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    Page(stream).table([("name", "日本語 " * 60), ("empty", " " * 200), ("more", Text("wide 宽 " * 40, "bold"))])
    lines = stream.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= columns
    assert max(map(cell_len, lines)) > columns - len("日本語 ") * 2
    assert stream.getvalue().count("日本語") == 60
    assert "empty" in [line.strip() for line in lines]


def test_a_table_that_does_not_fit_a_narrow_terminal_has_a_line_for_each_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    from interlock.cli.render import Page

    rows = [("10:14:03", "01JCXK2M4Q8Z01JCXK2M4Q8Z01", "demo.statements@1.0.0", "succeeded", "", "ann")]
    head = ("when", "call", "tool", "state", "source", "caller")
    shown = dict[int, list[str]]()
    for columns in (60, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("TERM", "dumb")
        stream = Terminal()
        Page(stream).table(rows, head)
        shown[columns] = stream.getvalue().splitlines()
    assert max(map(len, shown[60])) <= 60
    assert [line.split() for line in shown[60]] == [
        ["when", "10:14:03"], ["call", rows[0][1]], ["tool", rows[0][2]], ["state", "succeeded"], ["caller", "ann"], [],
    ]  # fmt: skip
    assert len(shown[100]) == 2


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command and group, with its words."""

    def below(group: click.Group, words: str) -> Iterator[tuple[str, click.Command]]:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield f"{words} {name}", command
            if isinstance(command, click.Group):
                yield from below(command, f"{words} {name}")

    context = click.Context(root)
    return below(root, "interlock")


def test_no_list_of_commands_is_cut_off_at_80_columns(fresh: Cli) -> None:
    listed = [(words, command.get_short_help_str(60)) for words, command in commands()]
    assert len(listed) > 100
    assert [words for words, short in listed if not short or short.endswith("...")] == []
    for words in ((), ("tools",), ("calls",)):
        assert "..." not in fresh(*words, "--help").out.partition("Commands:")[2]


def test_the_examples_of_the_first_help_fit_60_columns(fresh: Cli) -> None:
    examples = fresh("--help").out.partition("New here?")[2].partition("\n\n")[0]
    assert max(map(len, examples.splitlines()[1:])) <= 60


def test_a_list_without_tools_names_the_data_directory_that_was_read(fresh: Cli) -> None:
    listed = fresh("tools", "list").out
    assert "no tools yet" in listed
    assert str(fresh.home) in listed.replace("\n", "")


def test_every_column_of_the_migrations_has_a_heading(fresh: Cli) -> None:
    fresh("tools", "list")
    head = fresh("migrate", "status").out.splitlines()[0]
    assert [one.strip() for one in head.split("   ") if one.strip()] == ["migration", "state", "undo", "what it does"]


def test_a_server_that_does_not_answer_is_to_be_started(fresh: Cli) -> None:
    ended = Cli(fresh.path, {"INTERLOCK_TOKEN": "any"})("--server", "http://127.0.0.1:9", "tools", "list")
    assert (ended.code, "http://127.0.0.1:9 does not answer" in ended.err) == (1, True)
    assert "next   start `interlock serve` there, or check the address" in ended.err
    assert "send the call again" not in ended.err


def test_an_option_that_stands_before_the_command_is_not_taken_for_another_one(fresh: Cli) -> None:
    ended = fresh("calls", "list", "--server", "http://127.0.0.1:9")
    assert (ended.code, "interlock --server … calls list" in ended.err) == (2, True)
    assert "--before" not in ended.err
    told = fresh("calls", "list", "--home", "x", "--json").json["error"]
    assert told["message"].endswith("--home stands before the command: interlock --home … calls list")
    assert "'--befor'" in fresh("calls", "list", "--befor", "x").err


def test_every_command_runs_at_a_server_or_is_listed_with_the_reason_why_not() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/command-line.md").read_text()
    there, here = ({*named(page, head)} for head in ("| Command | With a server |", "| Command | Why it is local |"))
    leaves = {words.removeprefix("interlock "): one for words, one in commands() if not isinstance(one, click.Group)}
    remote = {words for words, one in leaves.items() if runs_at_server(one)}
    assert here == leaves.keys() - remote
    assert {words for words in leaves for one in there if words == one or words.startswith(f"{one} ")} == remote


def named(page: str, head: str) -> Iterator[str]:
    """The commands in the first column of a table. In a row, the name of a group stands for those that follow."""
    for row in page.partition(head)[2].partition("\n\n")[0].splitlines()[2:]:
        group = ""
        for one in re.findall(r"`([a-z][^`]*)`", row.split("|")[1]):
            group = one.rpartition(" ")[0] or group
            yield one if " " in one or not group else f"{group} {one}"

"""`interlock dev`: drafts after every save, calls by form and by JSON, and everything that is wrong at once."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest

from tests import warm
from tests.support.cli import INTERLOCK, Cli

TOOLS = '''
from pathlib import Path
from typing import Annotated
from interlock import Context, Effect, Field, tool

Number = Annotated[int, Field(description="a number", examples=[2])]


@tool(version="1.0.0", mutation_class="read_only")
def double(number: Number, plus: Annotated[int, Field(description="more", examples=[1])] = 0) -> int:
    """Give twice the number."""
    return number * 2 + plus


@tool(version="1.0.0", mutation_class="write_reversible", effects=[Effect("note:{number}", "CREATE")])
def note(ctx: Context, number: Number) -> int:
    """Note a number down."""
    Path(f"{number}.note").write_text("")
    ctx.effect(f"note:{number}", "CREATE")
    return number


@note.preview
def _(number: int):
    from interlock import Preview

    return Preview(impact=f"{number} would be noted")


@note.compensate
def _(number: int) -> None:
    Path(f"{number}.note").unlink()
'''


@pytest.fixture
def desk(fresh: Cli) -> Cli:
    """A developer's folder with a file of tools."""
    (fresh.path / "mine.py").write_text(TOOLS)
    return fresh


def test_a_script_loads_calls_and_reads_the_timeline(desk: Cli):
    given = ("--call", "mine.double", '{"number": 2}', "--call", "note", '{"number": 5}', "--key", "k")
    told = desk.ask("dev", "mine.py", "--once", *given)
    assert [(one["tool"], one["callable"], one["faults"]) for one in told["drafts"]] == [
        ("mine.double@1.0.0-dev.1", True, []),
        ("mine.note@1.0.0-dev.1", True, []),
    ]
    assert [one["structured_content"] for one in told["calls"]] == [4, 5]
    story = told["calls"][1]["timeline"]
    assert story[0] == "Its phases: request → validate → authorize → execute → verify → return."
    assert any("through a session of interlock dev" in sentence for sentence in story)
    assert (desk.path / "5.note").exists()
    # Outside of the session there is no such tool, and its calls are on record.
    assert desk.call("mine.double", {"number": 2})["error"]["error_code"] == "E3101"
    assert desk.ask("tools", "list")["tools"] == []
    shown = desk("audit", "explain", told["calls"][1]["invocation_id"])
    assert "It can be undone in the session that made it" in shown.out


def test_a_script_previews_a_call(desk: Cli):
    previewed = desk("dev", "mine.py", "--once", "--preview", "--call", "note", '{"number": 6}')
    assert (previewed.code, "6 would be noted" in previewed.out) == (0, True)
    assert not (desk.path / "6.note").exists()


def test_a_script_is_told_of_everything_that_is_wrong(desk: Cli):
    wrong = TOOLS.replace('version="1.0.0"', 'version="one"', 1).replace("@note.compensate\n", "")
    (desk.path / "mine.py").write_text(wrong)
    done = desk("dev", "mine.py", "--once", "--call", "double", '{"number": 2}')
    assert done.code == 1
    lines = [number for number, line in enumerate(wrong.splitlines(), 1) if line.startswith("@tool")]
    assert f"✗ double   mine.py, line {lines[0]}\n" in done.out
    assert f"✗ mine.note@1.0.0   mine.py, line {lines[1]}\n" in done.out
    assert "add a @tool.compensate handler" in done.out
    assert "`double` is no draft that can be called; there are: none" in done.out


def test_the_author_is_told_what_a_tool_raised_and_where(desk: Cli):
    # Callers are told no more than the type of it.
    (desk.path / "mine.py").write_text(TOOLS.replace("number * 2 + plus", "number * Nothing"))
    broken = desk("dev", "mine.py", "--once", "--call", "note", '{"number": 2}', "--key", "k")
    assert broken.code == 1
    line = TOOLS.splitlines().index("    return number * 2 + plus") + 1
    assert f"raised mine.py, line {line}, in double: NameError: name 'Nothing' is not defined" in broken.out
    assert "✓ mine.note@1.0.0-dev.1   2" in broken.out, "the other tool can be called"


def test_a_session_is_for_oneself_and_json_for_scripts(desk: Cli):
    for words, part in (
        (["dev", "mine.py", "--json"], "--json needs --once"),
        (["dev", "mine.py", "--call", "double", "{"], "--call: the text given is unusable"),
        (["dev", "nowhere.py"], "does not exist"),
    ):
        refused = desk(*words)
        assert (refused.code, part in refused.err) == (2, True), refused.err
    held = Cli(desk.path, {"INTERLOCK_TOKEN": "some.token"})("dev", "mine.py", "--once")
    assert (held.code, "E32" in held.err) == (1, True)


def test_a_save_makes_new_drafts_while_the_session_goes_on(desk: Cli):
    words = ["dev", "mine.py", "--call", "note", '{"number": 1}', "--key", "seen"]
    with warm.start(words, desk.environment, desk.path) as child:

        def until(text: str) -> str:
            seen = ""
            while text not in seen:
                line = child.stdout.readline().decode()
                assert line, f"{text} did not come:\n{seen}\n{child.stderr.read().decode()}"
                seen += line
            return seen

        def type_in(line: str) -> None:
            child.stdin.write(f"{line}\n".encode())
            child.stdin.flush()

        assert "mine.note@1.0.0-dev.1" in until("The caller's key was seen-1.0.0-dev.1.")
        # At once: a save is noticed also where it comes while the session is busy with the one before.
        (desk.path / "mine.py").write_text(TOOLS.replace("number * 2 + plus", "number * 200 + plus"))
        assert "mine.double@1.0.0-dev.2" in until("The caller's key was seen-1.0.0-dev.2.")
        until("It can be undone")
        type_in('mine.double {"number": 2}')
        assert "✓ mine.double@1.0.0-dev.2   400" in until("It succeeded after")
        # A form: one line for each parameter; an empty one takes the example, or leaves out what has a default.
        type_in("double\n3\n")
        assert "✓ mine.double@1.0.0-dev.2   600" in until("It succeeded after")
        type_in('note {"number": 9} k-9')
        call = until("It can be undone in the session that made it").split("undo ")[-1].split()[0]
        assert (desk.path / "9.note").exists()
        type_in(f"undo {call} k-10")
        until("It succeeded after")
        assert not (desk.path / "9.note").exists()
        # A file that cannot be loaded leaves the drafts as they are.
        (desk.path / "mine.py").write_text(TOOLS + "\n)\n")
        until("SyntaxError: unmatched ')'")
        type_in("list")
        assert "mine.double@1.0.0-dev.2" in until("mine.note@1.0.0-dev.2")
        type_in("quit")
        assert child.wait() == 0


WORDS = '''
from typing import Annotated, Literal
from interlock import Field, tool


@tool(version="1.0.0", mutation_class="read_only")
def look(
    tag: Annotated[str | None, Field(description="a tag", examples=["t"])] = None,
    size: Annotated[int | str, Field(description="a size", examples=["large"])] = 0,
    flag: Annotated[bool | None, Field(description="a flag", examples=[True])] = None,
    mode: Annotated[Literal["1", "2"] | None, Field(description="a mode", examples=["1"])] = None,
) -> str:
    """Look for a tag."""
    return repr((tag, size, flag, mode))
'''


@pytest.mark.parametrize(
    ("typed", "received"),
    [
        (("12", "12", "true", "1"), "('12', 12, True, '1')"),
        (("true", "true", "null", "null"), "('true', 'true', None, None)"),
        (("null", "1.5", "", ""), "(None, '1.5', None, None)"),
        (('"null"', "large", "false", '"2"'), "('null', 'large', False, '2')"),
        (("[1]", '{"a": 1}', "", "2"), "('[1]', '{\"a\": 1}', None, '2')"),
    ],
)
def test_a_form_takes_text_that_looks_like_something_else_where_text_is_wanted(
    fresh: Cli, typed: tuple[str, ...], received: str
):
    (fresh.path / "words.py").write_text(WORDS)
    ended = fresh("dev", "words.py", stdin="\n".join(("look", *typed, "quit", "")))
    assert received in ended.out, ended.out + ended.err


def test_at_a_terminal_a_form_asks_for_each_parameter(desk: Cli):
    ours, theirs = os.openpty()
    environment = {**desk.environment, "TERM": "dumb", "COLUMNS": "200", "NO_COLOR": "1"}
    with subprocess.Popen(
        [*INTERLOCK, "dev", "mine.py"], env=environment, cwd=desk.path, stdin=theirs, stdout=theirs, stderr=theirs
    ) as child:
        os.close(theirs)
        try:
            terminal(ours)(
                ("interlock dev> ", "note"),
                ("number, a whole number: a number [2]: ", ""),
                ("key, your own name for this action [dev-", "mine-1"),
                ("mine.note@1.0.0-dev.1   2", None),
                ("The caller's key was mine-1.", None),
                ("interlock dev> ", "double"),
                ("number, a whole number: a number [2]: ", "many"),
                ("plus, a whole number: more [left out]: ", ""),
                ("`many` is not a whole number", None),
                ("interlock dev> ", "help"),
                ("interlock dev> ", "quit"),
            )
            assert child.wait(120) == 0
        finally:
            child.kill()
            os.close(ours)
    assert (desk.path / "2.note").exists()


def terminal(descriptor: int) -> Callable[..., None]:
    """Plays a conversation: waits for each text to appear, in order, and types the line that belongs to it."""
    seen = b""

    def play(*steps: tuple[str, str | None]) -> None:
        nonlocal seen
        for text, answer in steps:
            while text.encode() not in seen:
                try:
                    more = os.read(descriptor, 65_536)
                except OSError:
                    more = b""
                assert more, f"{text} did not come:\n{seen.decode()}"
                seen += more
            seen = seen.partition(text.encode())[2]
            if answer is not None:
                os.write(descriptor, f"{answer}\n".encode())

    return play

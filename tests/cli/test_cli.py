"""Every command, every exit code, every form that others script against."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, cast

import click
import pytest

from interlock import Clock, Failure, Interlock
from interlock.cli import root
from interlock.gateway import reconcile
from tests import warm
from tests.support import stores
from tests.support.cli import INTERLOCK, Cli

Json = dict[str, Any]

TOOLS = '''
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from interlock import Context, Effect, Field, tool

Text = Annotated[str, Field(description="any text", examples=["hello"])]


@tool(version="1.0.0", mutation_class="read_only", namespace="own")
def shout(text: Text) -> str:
    """Say it louder than it was said."""
    print("a tool may print what it likes")
    os.system("echo and so may its children")
    return text.upper()


@tool(version="1.0.0", mutation_class="read_only", namespace="own")
def paint(text: Text) -> str:
    """Answer with what would draw on a terminal."""
    return "\\x1b[31mred\\x1b[0m " + text


@tool(version="1.0.0", mutation_class="read_only", namespace="own")
def lost(text: Text) -> str:
    """Say where something is, unless greeted."""
    from interlock import Failure
    if text != "hello":
        raise Failure("E3502", "cannot read /srv/private/key", details={"at": "/srv/private/key"})
    return text


@tool(version="1.0.0", mutation_class="read_only", namespace="own")
def crash(text: Text) -> str:
    """Fail in a way nobody foresaw, unless greeted."""
    if text != "hello":
        raise ValueError("secret detail")
    return text


@tool(version="1.0.0", mutation_class="read_only", namespace="own")
def stall(ctx: Context, text: Text) -> str:
    """Hold its thread for much longer than anybody waits."""
    import threading

    if text != "hello":
        threading.Event().wait(50)
    return text


@tool(version="1.0.0", mutation_class="read_only", namespace="own")
def table(text: Text) -> list[dict[str, str]]:
    """A list too long for one line."""
    return [{"text": text, "number": str(number)} for number in range(9)]


@tool(version="1.0.0", mutation_class="read_only", namespace="own")
def remember(ctx: Context, text: Text) -> str:
    """What the session held before, and hold this."""
    return str(ctx.session.get("text", "nothing"))
'''

UNTRIED = '''
from pathlib import Path
from typing import Annotated

from interlock import Context, Effect, Field, tool


@tool(version="1.0.0", mutation_class="write_reversible", namespace="own", effects=[Effect("file:{name}", "CREATE")])
def touch(ctx: Context, name: Annotated[str, Field(description="a file", examples=["touched"])]) -> str:
    """Make a file in the working directory."""
    Path(name).write_text("touched")
    with open("told", "a") as told:
        told.write("made ")
    ctx.effect(f"file:{name}", "CREATE", after=name)
    return name


@touch.compensate
def _(name: str) -> None:
    Path(name).unlink()
    with open("told", "a") as told:
        told.write("unmade ")
'''

REFUSED = '''
from typing import Annotated

from interlock import Effect, Field, tool


@tool(version="1.0.0", mutation_class="write_irreversible", namespace="own", timeout_class="long_running")
def launch(where: Annotated[str, Field(description="where to", examples=["moon"])]) -> str:
    """Launch something that never comes back."""
    return where
'''

MANIFEST: Json = {
    "tool_id": "echo",
    "namespace": "own",
    "version": "1.0.0",
    "name": "Echo",
    "description": "Give back what was said.",
    "provider": "local",
    "protocol": "native",
    "parameters": {
        "type": "object",
        "properties": {"text": {"type": "string", "description": "what to say", "examples": ["hello"]}},
        "required": ["text"],
    },
    "result_schema": {"type": "string"},
    "required_permissions": [],
    "mutation_class": "read_only",
    "timeout_class": "standard",
    "idempotency": {},
    "observability": {},
    "execution": {"target": "echo.py:echo"},
}


def diffable(version: str, extra: str = "") -> str:
    return f'''
from typing import Annotated

from interlock import Field, tool


@tool(version="{version}", mutation_class="read_only", namespace="own", breaking_changes={bool(extra)})
def measure(text: Annotated[str, Field(description="any text", examples=["hello"])]{extra}) -> int:
    """How long a text is."""
    return len(text)
'''


def write(cli: Cli, name: str, text: str) -> str:
    path = cli.path / name
    path.write_text(text)
    return str(path)


def journal(cli: Cli) -> list[Json]:
    """The records of a home, read from its store."""
    return stores.bodies(cli.store)


# Help and start-up


def paths(command: click.Command, trail: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield trail
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from paths(child, (*trail, name))


@pytest.mark.parametrize("trail", list(paths(root)), ids=" ".join)
def test_every_command_explains_itself_with_an_example(fresh: Cli, trail: tuple[str, ...]) -> None:
    ended = fresh(*trail, "--help")
    assert ended.code == 0
    assert ended.err == ""
    assert f"interlock {' '.join(trail)}".strip() in ended.out.partition("Options:")[0]
    assert "Options:" in ended.out
    assert not fresh.home.exists()


def test_every_command_that_is_no_group_can_answer_in_json() -> None:
    for trail in paths(root):
        command: click.Command = root
        for name in trail:
            assert isinstance(command, click.Group)
            found = command.get_command(click.Context(command), name)
            assert found is not None
            command = found
        if not isinstance(command, click.Group):
            assert any("--json" in parameter.opts for parameter in command.params), trail


def test_help_imports_only_click() -> None:
    program = (
        "import sys, interlock.cli, click\n"
        "try: interlock.cli.root(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'sqlalchemy', 'pydantic', 'rich', 'alembic', 'asyncio', 'orjson'} & set(sys.modules)),"
        " file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr.strip() == "[]"


def test_help_costs_far_less_than_a_third_of_a_second_of_processor_time(fresh: Cli) -> None:
    def cost() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*INTERLOCK, "--help"], env=fresh.environment, capture_output=True, timeout=60, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(cost() for _ in range(3)) < 0.3


def test_the_version_is_told(fresh: Cli) -> None:
    from interlock import __version__

    assert fresh("--version").out == f"interlock {__version__}\n"


def test_a_home_can_be_given_as_an_option_before_the_command(fresh: Cli) -> None:
    other = fresh.path / "other"
    assert fresh("--home", str(other), "tools", "list").code == 0
    assert (other / "policy.cedar").exists()
    assert not fresh.home.exists()


@pytest.mark.parametrize(
    "words",
    [
        ("nonsense",),
        ("tools", "nonsense"),
        ("tools", "add"),
        ("tools", "show"),
        ("tools", "test"),
        ("tools", "diff", "demo.post"),
        ("tools", "deprecate", "demo.post"),
        ("tools", "deprecate", "demo.post@1.2.0", "--days", "soon"),
        ("call",),
        ("call", ""),
        ("call", "@1"),
        ("call", "demo.balance", "{}", "extra"),
        ("call", "demo.balance", "{}", "--timeout", "never"),
        ("call", "demo.balance", "{}", "--timeout", "nan"),
        ("call", "demo.balance", "{}", "--timeout", "-1"),
        ("call", "demo.balance", "{}", "--wait", "0"),
        ("call", "demo.balance", "{}", "--wait", "nan"),
        ("calls", "show"),
        ("calls", "list", "--limit", "0"),
        ("calls", "undo", "01JC"),
        ("calls", "reconcile", "--happened"),
        ("calls", "reconcile", "01JC", "--result", "1"),
        ("calls", "reconcile", "01JC", "--happened", "--did-not-happen"),
        ("calls", "reconcile", "01JC", "--did-not-happen", "--result", "1"),
        ("approvals", "show"),
        ("approvals", "approve"),
        ("approvals", "approve", "apr_01JC", "--edit", "nonsense"),
        ("approvals", "approve", "apr_01JC", "--edit", "[]"),
        ("approvals", "deny"),
        ("approvals", "grant", "demo.post", "--caller", "local:bob", "--uses", "1"),
        ("approvals", "grant", "demo.post", "--caller", "local:bob", "--expires", "1d"),
        ("approvals", "grant", "demo.post", "--uses", "1", "--expires", "1d"),
        ("approvals", "grant", "demo.post", "--caller", "local:bob", "--uses", "1", "--expires", "soon"),
        ("approvals", "grant", "demo.post", "--caller", "local:bob", "--uses", "1", "--expires", "1d", "--arg", "x"),
        ("approvals", "watch", "--for", "0"),
        ("audit", "explain"),
        ("audit", "verify", "--public-key", "xyz"),
        ("audit", "verify", "--known-head", "xyz"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_understood_is_a_usage_error(cli: Cli, words: tuple[str, ...]) -> None:
    ended = cli(*words)
    assert ended.code == 2
    assert ended.out == ""
    assert "Error: " in ended.err


# tools


def test_tools_of_a_file_are_admitted(fresh: Cli) -> None:
    ended = fresh("tools", "add", write(fresh, "mine.py", TOOLS))
    assert ended.code == 0, ended.out
    assert "✓ own.shout@1.0.0   admitted" in ended.out
    again = fresh.ask("tools", "add", "mine.py")
    assert [offer["new"] for offer in again["admitted"]] == [False] * 7


def test_tools_of_a_module_in_the_working_directory_are_admitted_and_can_be_called(fresh: Cli) -> None:
    write(fresh, "my_own_tools.py", TOOLS)
    assert fresh("tools", "add", "my_own_tools").code == 0
    assert fresh.call("own.shout", {"text": "hey"})["structured_content"] == "HEY"


def test_tools_of_a_manifest_are_admitted(fresh: Cli) -> None:
    write(fresh, "echo.py", "def echo(text):\n    return text\n")
    assert fresh("tools", "add", write(fresh, "echo.json", json.dumps(MANIFEST))).code == 0
    assert fresh.call("own.echo", {"text": "hey"})["structured_content"] == "hey"


def test_a_refused_tool_gets_every_failed_condition_on_a_line_of_its_own(fresh: Cli) -> None:
    ended = fresh("tools", "add", write(fresh, "refused.py", REFUSED))
    assert ended.code == 1
    lines = ended.out.splitlines()
    assert lines[0] == "✗ own.launch@1.0.0   refused"
    conditions = [line.split()[0] for line in lines[1:]]
    assert {"timeout_class_assigned", "mutation_class_labeled", "contract_tests_passing"} <= set(conditions)
    assert any("@tool.preview" in line for line in lines)
    document = fresh.ask("tools", "add", "refused.py")
    assert document["admitted"] == []
    assert "mutation_class_labeled" in document["refused"][0]["refused"]


NO_TOOLS: dict[str, str | None] = {
    "missing.py": None,
    "empty.py": "",
    "syntax.py": "def broken(:\n",
    "raises.py": "raise RuntimeError('at import')\n",
    "no_such_module_anywhere": None,
    "missing.yaml": None,
    "bad.yaml": "{unclosed: [",
    "list.json": "[1, 2]",
    "deep.json": "[" * 5000,
    "binary.json": "\x00\x01",
    "unknown.json": '{"tool_idd": "x"}',
    "untyped.py": "from interlock import tool\n@tool(version='1', mutation_class='read_only')\ndef f(x): ...\n",
}


# A file is named, and a tool where it is known which one is meant.
NAMED = ["f" if name == "untyped.py" else name for name in NO_TOOLS]
UNDECLARED = '''
from interlock import tool


@tool(mutation_class="read_only")
def first() -> int:
    """Declared without a version."""
    return 1


@tool(version="1.0.0", mutation_class="read_only", timeot_s=3)
def second(x) -> int:
    """Declared with a misspelt option and an argument without a type."""
    return 2


@tool(version="1.0.0", mutation_class="read_only")
def third() -> int:
    """Declared as it should be."""
    return 3
'''


def test_all_refused_declarations_of_a_file_are_told_at_once_each_with_its_place(fresh: Cli) -> None:
    ended = fresh("tools", "add", write(fresh, "many.py", UNDECLARED))
    assert ended.code == 1
    heads = [line.split() for line in ended.out.splitlines() if line.startswith("✗")]
    assert heads == [
        ["✗", "first", "refused", "many.py,", "line", "5"],
        ["✗", "second", "refused", "many.py,", "line", "11"],
    ]
    assert "`version` is missing" in ended.out
    assert "did you mean `timeout_s`?" in ended.out
    document = fresh.ask("tools", "add", "many.py")
    assert document["admitted"] == [], "what was refused keeps the file from being loaded for a call"
    assert [(one["tool"], one["line"]) for one in document["refused"]] == [("first", 5), ("second", 11)]
    assert [Path(one["file"]).name for one in document["refused"]] == ["many.py", "many.py"]


def test_what_is_no_tool_is_refused_in_words(fresh: Cli) -> None:
    for name, text in NO_TOOLS.items():
        if text is not None:
            write(fresh, name, text)
    ended = fresh("tools", "add", *NO_TOOLS)
    assert ended.code == 1
    assert [line.split()[1] for line in ended.out.splitlines() if line.startswith("✗")] == NAMED
    refused = fresh.ask("tools", "add", *NO_TOOLS)["refused"]
    assert [offer["tool"] for offer in refused] == NAMED
    assert {offer["error"]["errorCode"] for offer in refused} == {"INVALID_INPUT"}


def test_one_bad_target_does_not_keep_the_good_ones_out(fresh: Cli) -> None:
    document = fresh.ask("tools", "add", "missing.py", write(fresh, "mine.py", TOOLS))
    assert len(document["admitted"]) == 7
    assert [offer["tool"] for offer in document["refused"]] == ["missing.py"]


def test_registered_tools_are_listed(cli: Cli) -> None:
    ended = cli("tools", "list")
    assert ended.code == 0
    assert "demo.mail_statement" in ended.out
    listed = {tool["tool"]: tool for tool in cli.ask("tools", "list")["tools"]}
    assert listed["demo.post"]["mutation_class"] == "write_reversible"
    assert listed["demo.post"]["state"] == "active"


def test_an_empty_home_says_how_to_begin(fresh: Cli) -> None:
    assert "interlock tools add" in fresh("tools", "list").out
    assert "interlock call" in fresh("calls", "list").out
    assert fresh.ask("tools", "list") == {"tools": []}
    assert fresh.ask("calls", "list") == {"calls": [], "before": None}


def test_a_tool_is_shown_with_its_contract(cli: Cli) -> None:
    ended = cli("tools", "show", "demo.post@^1")
    assert ended.code == 0
    for words in ("demo.post@1.2.0", "a whole number", "UPDATE account:{account}", "active", "undone"):
        assert words in ended.out
    document = cli.ask("tools", "show", "post")
    assert document["tool"] == "demo.post"
    assert document["input_schema"]["required"] == ["account", "cents"]
    assert json.dumps(document).count("ledger account") == 1  # every fact once
    assert not document["manifest"].keys() & {*document, "tool_id", "namespace", "timeout_class", "parameters"}
    assert (document["timeout"]["class"], json.dumps(document).count("standard")) == ("standard", 1)
    assert document["digest"] in ended.out
    assert cli("tools", "show", "demo.pots").code == 1
    assert "did you mean" in cli("tools", "show", "demo.pots").err
    assert cli("tools", "show", "demo.post@^9").code == 1


def test_testing_a_tool_says_how_each_case_went_and_writes_nothing(cli: Cli) -> None:
    ended = cli("tools", "test", "interlock.demo_tools")
    assert ended.code == 0
    assert "✓   missing account" in ended.out
    document = cli.ask("tools", "test", "interlock.demo_tools")
    assert document["passed"] is True
    assert {tool["mode"] for tool in document["tools"]} == {"examples", "preview"}
    assert not cli.ledger.exists() or cli.ledger.read_text() == ""


def test_a_tool_with_nothing_to_try_it_with_is_tested_live_once_and_then_admitted(fresh: Cli) -> None:
    target = write(fresh, "untried.py", UNTRIED)
    touched, told = fresh.path / "touched", fresh.path / "told"
    refused = fresh("tools", "test", target)
    assert refused.code == 1
    assert "--live" in refused.out
    assert fresh("tools", "add", target).code == 1
    assert not told.exists()
    live = fresh.ask("tools", "test", target, "--live")
    assert live["passed"] is True
    assert live["tools"][0]["mode"] == "live"
    assert (told.read_text(), touched.exists()) == ("made unmade ", False), "it ran once, and was undone"
    assert fresh("tools", "add", target).code == 0


def test_a_deprecated_version_still_runs_and_every_result_says_until_when(cli: Cli) -> None:
    ended = cli("tools", "deprecate", "demo.balance@1.0.0", "--successor", "demo.post", "--days", "3")
    assert ended.code == 0
    assert "deprecated" in ended.out
    result = cli.call("demo.balance", {"account": "cash"})
    assert result["is_error"] is False
    assert result["metadata"]["deprecation"]["successor"] == "demo.post"
    assert "deprecated: it runs until" in cli("call", "demo.balance", '{"account": "cash"}').out
    assert cli.ask("tools", "show", "demo.balance")["state"] == "deprecated"
    again = cli("tools", "deprecate", "demo.balance@1.0.0", "--json")
    assert again.code == 1
    assert again.json["error"]["error_code"] == "E3103"
    assert cli("tools", "deprecate", "demo.balance@7.0.0").code == 1
    unknown = cli("tools", "deprecate", "demo.balance@1.0.0", "--amend", "--successor", "demo.nope")
    assert unknown.code == 1
    assert "the successor `demo.nope` is not registered" in unknown.err
    corrected = cli("tools", "deprecate", "demo.balance@1.0.0", "--amend", "--successor", "demo.post@^1")
    assert corrected.code == 0
    assert "demo.post@^1" in corrected.out
    told = cli.call("demo.balance", {"account": "cash"})["metadata"]["deprecation"]
    assert told["successor"] == "demo.post@^1"
    assert told["removalDate"] == result["metadata"]["deprecation"]["removalDate"]


def test_retiring_a_version_needs_the_scope_for_it(cli: Cli) -> None:
    revoke(cli)
    ended = cli("tools", "deprecate", "demo.balance@1.0.0")
    assert ended.code == 1
    assert "E3206" in ended.err


def test_the_difference_between_two_versions_is_shown(fresh: Cli) -> None:
    extra = ', unit: Annotated[str, Field(description="which unit", examples=["cm"])]'
    assert fresh("tools", "add", write(fresh, "measure.py", diffable("1.0.0"))).code == 0
    assert fresh("tools", "add", write(fresh, "measure.py", diffable("2.0.0", extra))).code == 0
    ended = fresh("tools", "diff", "own.measure", "1.0.0", "2.0.0")
    assert ended.code == 0
    assert "a major change" in ended.out
    document = fresh.ask("tools", "diff", "own.measure", "1.0.0", "2.0.0")
    assert document["level"] == document["bump"] == "major"
    assert any("unit" in change["pointer"] for change in document["changes"])
    same = fresh("tools", "diff", "own.measure", "1.0.0", "1.0.0")
    assert "the same for callers" in same.out
    assert fresh("tools", "diff", "own.measure", "1.0.0", "3.0.0").code == 1


# call


def test_a_call_answers_with_the_tool_result(cli: Cli) -> None:
    result = cli.call("demo.balance", {"account": "cash"})
    assert result["status"] == "succeeded"
    assert result["is_error"] is False
    assert result["structured_content"] == 1000
    assert len(result["invocation_id"]) == 26
    assert result["error"] is None
    assert result["metadata"]["replayed"] is False
    assert result["metadata"]["source"] == "compute"


WORDY = '''
from typing import Annotated

from interlock import Context, Field, tool

Text = Annotated[str, Field(description="any text", examples=["hello"])]


@tool(version="1.0.0", mutation_class="read_only", namespace="own", max_inline_chars=100)
def shout(context: Context, text: Text) -> str:
    """Say it loudly."""
    context.show(model="it shouted", search="noise")
    return text.upper()
'''


def _texts(value: Any) -> list[str]:
    """Every text in a document, once for each place where it stands."""
    if isinstance(value, dict):
        return [text for one in cast("dict[str, Any]", value).values() for text in _texts(one)]
    if isinstance(value, list):
        return [text for one in cast("list[Any]", value) for text in _texts(one)]
    return [value] if isinstance(value, str) else []


def test_json_of_a_result_says_everything_once(fresh: Cli) -> None:
    fresh("tools", "add", write(fresh, "mine.py", WORDY))
    said = fresh.call("own.shout", {"text": "hey you"})
    assert said["structured_content"] == "HEY YOU"
    assert said["content"] == []
    assert said["views"] == {"model": "it shouted", "search": "noise"}
    for once in ("HEY YOU", "it shouted", said["invocation_id"], "compute"):
        assert sum(once in text for text in _texts(said)) == 1, once
    stored = fresh.call("own.shout", {"text": "hey you " * 50})
    assert stored["structured_content"] is None
    (kept,) = stored["content"]
    assert (kept["type"], sum(text == kept["ref"] for text in _texts(stored))) == ("persisted_ref", 1)
    assert stored["metadata"]["persistence"]["size_chars"] > 400


FACTORIAL = '''
import math
from typing import Annotated

from interlock import Field, tool

Whole = Annotated[int, Field(description="a whole number", examples=[3])]


@tool(version="1.0.0", mutation_class="read_only", namespace="own", external_io=False)
async def factorial(n: Whole, times: Whole) -> list[int]:
    """The product of all whole numbers up to one, so many times."""
    return [math.factorial(n)] * times
'''


def test_whole_numbers_of_any_size_are_shown_as_they_are(fresh: Cli) -> None:
    assert fresh("tools", "add", write(fresh, "mine.py", FACTORIAL)).code == 0
    number = 15511210043330985984000000
    short, long = '{"n": 25, "times": 1}', '{"n": 25, "times": 20}'
    assert fresh("call", "own.factorial", short, "--json").json["structured_content"] == [number]
    assert f"[{number}]" in fresh("call", "own.factorial", short).out
    assert fresh("call", "own.factorial", long).out.count(str(number)) == 20


def test_a_refused_call_answers_with_the_error_envelope(cli: Cli) -> None:
    ended = cli("call", "demo.post", '{"account": "cash", "cents": "2,50"}', "--key", "k", "--json")
    assert ended.code == 1
    assert ended.err == ""
    result = ended.json
    assert result["is_error"] is True
    assert result["structured_content"] is None
    error = result["error"]
    assert error["errorCode"] == "INVALID_INPUT"
    assert error["error_code"] == "E3301"
    assert error["error_class"] == "schema_validation_failed"
    assert error["retryable"] is False
    assert "cents" in error["humanMessage"]
    # Once for people, once more under the standard's second name for it, and once with its place.
    assert ended.out.count("is not a whole number") == 3


def test_a_refused_call_tells_a_person_what_to_send_instead(cli: Cli) -> None:
    ended = cli("call", "demo.post", '{"acount": "cash", "cents": "2,50"}', "--key", "k")
    assert ended.code == 1
    first, *faults = ended.out.splitlines()
    assert first.split() == ["✗", "INVALID_INPUT", "E3301", "demo.post@1.2.0", "not", "retryable"]
    assert "  acount    `acount` is not a parameter; did you mean `account`?" in faults
    assert any(line.startswith("  cents     `2,50` is not a whole number") for line in faults)


def test_the_same_key_twice_runs_once_and_says_so(cli: Cli) -> None:
    words = ("call", "demo.post", '{"account": "cash", "cents": 250}', "--key", "order-17")
    first, again = cli(*words), cli(*words)
    assert first.code == again.code == 0
    assert first.out.startswith("✓ demo.post@1.2.0   entry 1, balance 1250   ")
    assert re.search(r"  [\d.]+ m?s$", first.out.rstrip())
    assert "replayed: it ran once, at " in again.out
    third = cli.ask(*words)
    assert third["metadata"]["replayed"] is True
    assert third["metadata"]["source"] == "replay"
    assert third["structured_content"] == {"entry": 1, "balance": 1250}
    other = cli("call", "demo.post", '{"account": "cash", "cents": 999}', "--key", "order-17")
    assert (other.code, "E3306" in other.out, "not retryable" in other.out) == (1, True, True)
    assert len(cli.ledger.read_text().splitlines()) == 1


def test_arguments_can_come_from_stdin(cli: Cli) -> None:
    ended = cli("call", "demo.balance", "-", "--json", stdin='{"account": "savings"}')
    assert ended.code == 0
    assert ended.json["structured_content"] == 0
    assert cli("call", "demo.balance", "-", stdin="").code == 2


def test_a_dry_run_says_what_would_happen_and_does_nothing(cli: Cli) -> None:
    ended = cli("call", "demo.post", '{"account": "cash", "cents": 250}', "--dry-run")
    assert ended.code == 0
    assert "nothing was changed" in ended.out
    assert "UPDATE account:cash" in ended.out
    assert cli.call("demo.post", {"account": "cash", "cents": 1}, "--dry-run")["metadata"]["source"] == "preview"
    assert cli.call("demo.balance", {"account": "cash"})["structured_content"] == 1000


def test_what_cannot_be_undone_waits_for_a_person(cli: Cli) -> None:
    arguments = '{"account": "cash", "to": "press@example.org"}'
    ended = cli("call", "demo.mail_statement", arguments, "--key", "m", "--json")
    assert ended.code == 1
    result = ended.json
    assert result["status"] == "awaiting_approval"
    assert result["is_error"] is False
    assert result["error"]["errorCode"] == "APPROVAL_REQUIRED"
    assert result["pending"]["status"] == "PENDING"
    ticket = result["pending"]["ticketId"]
    assert ended.out.count('"ticketId"') == 1
    shown = cli("call", "demo.mail_statement", arguments, "--key", "m")
    assert shown.code == 1
    assert f"somebody in approvers other than you: interlock approvals approve {ticket}" in shown.out
    assert f"interlock calls resume {ticket}" in shown.out
    (listed,) = cli.ask("calls", "list")["calls"]
    assert (listed["invocation_id"], listed["state"]) == (result["invocation_id"], "awaiting_approval")
    assert "awaiting_approval" in cli("calls", "show", result["invocation_id"]).out
    assert not cli.ledger.with_suffix(".outbox").exists()


@pytest.mark.parametrize("text", ["", "{", "nonsense", "{'a': 1}", '{"a": NaN}', '{"a": 1}}', "[" * 3000])
def test_text_that_is_no_json_is_a_usage_error_that_says_where(fresh: Cli, text: str) -> None:
    ended = fresh("call", "demo.balance", text)
    assert ended.code == 2
    assert ended.out == ""
    assert "not valid JSON" in ended.err
    assert "column" in ended.err
    assert not fresh.home.exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"account": Infinity}', "not valid JSON"),
        ('{"account": "a", "account": "b"}', "account"),
        ('{"account": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"account": "\\ud800"}', "unusable"),
        ("\ufeff{}", "not valid JSON"),
        ('{"account": ' + "[" * 50_000 + "]" * 50_000 + "}", "unusable"),
    ],
    ids=["infinity", "a name twice", "five thousand digits", "half a character", "a byte order mark", "a deep nest"],
)
def test_json_that_readers_understand_differently_is_a_usage_error(fresh: Cli, text: str, words: str) -> None:
    for given, stdin in ((text, ""), ("-", text)):
        ended = fresh("call", "demo.balance", given, stdin=stdin)
        assert (ended.code, ended.out) == (2, "")
        assert words in ended.err
        assert len(ended.err) < 2000
    assert not fresh.home.exists()


@pytest.mark.parametrize(
    ("stdin", "words"),
    [
        ("<&-", "stdin is unusable: not valid JSON"),
        ("0> written", "stdin cannot be read"),
        ("< /dev/zero", "stdin holds more than 64 MiB"),
    ],
)
def test_a_stdin_that_is_closed_unreadable_or_endless_is_a_usage_error(fresh: Cli, stdin: str, words: str) -> None:
    command = ["sh", "-c", f'exec "$0" "$@" {stdin}', *INTERLOCK, "call", "demo.balance", "-"]
    ended = subprocess.run(
        command, env=fresh.environment, cwd=fresh.path, capture_output=True, check=False, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (2, b""), ended.stderr
    assert words.encode() in ended.stderr
    assert b"Traceback" not in ended.stderr
    assert not fresh.home.exists()


GARBAGE = [
    "null",
    "[]",
    "[1]",
    "3",
    '"text"',
    '{"account": null}',
    '{"account": {"a": [1]}}',
    '{"": ""}',
    '{"a\\u0000": 1}',
]


@pytest.mark.parametrize("text", GARBAGE)
def test_json_that_is_no_input_is_refused_and_on_record(cli: Cli, text: str) -> None:
    ended = cli("call", "demo.balance", text, "--json")
    assert ended.code == 1
    assert ended.json["error"]["errorCode"] == "INVALID_INPUT"
    assert ended.json["invocation_id"] in (record["call"] for record in journal(cli))


@pytest.mark.parametrize(
    "tool",
    [
        "nope",
        "demo.",
        ".",
        "demo.balance@nonsense",
        "demo.balance@^9",
        "x" * 5000,
        "%",
        "démo.\u202e",
        "a b",
    ],
)
def test_a_name_that_is_no_tool_is_an_answer_and_not_an_accident(cli: Cli, tool: str) -> None:
    ended = cli("call", tool, '{"account": "cash"}', "--json")
    assert ended.code == 1
    assert len(ended.out.splitlines()) == 1
    assert ended.json["error"] is None or ended.json["error"]["error_code"] != "E3000"


def test_an_argument_that_is_no_text_is_a_usage_error(cli: Cli) -> None:
    words = [os.fsencode(word) for word in (*INTERLOCK, "call")]
    ended = subprocess.run([*words, b"\xff\xfe"], env=cli.environment, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert b"UTF-8" in ended.stderr
    assert b"Traceback" not in ended.stderr


def test_what_a_tool_prints_does_not_get_into_the_json(fresh: Cli) -> None:
    added = fresh("tools", "add", write(fresh, "mine.py", TOOLS), "--json")
    assert added.code == 0
    assert len(added.out.splitlines()) == 1
    ended = fresh("call", "own.shout", '{"text": "hey"}', "--json")
    assert ended.json["structured_content"] == "HEY"
    assert len(ended.out.splitlines()) == 1
    assert "a tool may print what it likes" in ended.err
    assert "and so may its children" in ended.err


def test_a_tool_cannot_draw_on_the_terminal_of_its_reader(fresh: Cli) -> None:
    fresh("tools", "add", write(fresh, "mine.py", TOOLS))
    ended = fresh("call", "own.paint", '{"text": "hey"}')
    assert "\x1b" not in ended.out
    assert "\\x1b[31mred" in ended.out


SOURCED = """
from typing import Annotated
from interlock import Context, Field, tool

Note = Annotated[str, Field(description="private", examples=["n"], json_schema_extra={"x-sensitivity": "pii"})]

@tool(version="1.0.0", mutation_class="read_only", namespace="own")
async def note(ctx: Context, note: Note) -> dict[str, Note]:
    \"\"\"Give a private note back, and say how good it is.\"\"\"
    ctx.provenance(data_version="v7", confidence=0.5)
    ctx.log.warning("a note: %s", note)
    return {"note": note}
"""


@pytest.mark.proves("AUDIT-06")
@pytest.mark.proves("CONTRACT-07")
def test_a_result_on_the_command_line_says_what_was_removed_and_what_its_data_is(fresh: Cli) -> None:
    fresh("tools", "add", write(fresh, "mine.py", SOURCED))
    ended = fresh("call", "own.note", '{"note": "Quux7731"}', "--json")
    assert ended.json["structured_content"] == {"note": "[REDACTED]"}
    assert ended.json["redaction_state"] == {"redacted": True, "paths": ["/note"]}
    source = ended.json["metadata"]["provenance"]
    assert (source["dataVersion"], source["confidence"]) == ("v7", 0.5)
    shown = fresh("call", "own.note", '{"note": "Quux7731"}')
    assert "Quux7731" not in ended.out + ended.err + shown.out + shown.err


STATED = """
from typing import Annotated
from interlock import Field, Sandboxing, tool

Text = Annotated[str, Field(description="text", examples=["a"])]
Hint = Annotated[str, Field(description="set by the runtime", examples=["t"], json_schema_extra={"x-internal": True})]
Mail = Annotated[str, Field(description="whose", examples=["m"], json_schema_extra={"x-sensitivity": "pii"})]

@tool(
    version="1.0.0", mutation_class="read_only", namespace="own", examples=[{"text": "a"}],
    sandbox=Sandboxing(artifacts=2), content_types=["image"], expected_artifacts=["*.csv"], timeout_s=120,
    expected_resources=["https://wiki.example/*"],
)
async def stated(text: Text, mail: Mail = "nobody", tenant_hint: Hint = "none") -> str:
    \"\"\"State everything that a contract can state.\"\"\"
    return text
"""


@pytest.mark.supports("TEST-09")
@pytest.mark.proves("CONTRACT-12")
def test_a_contract_on_the_command_line_states_its_facts_and_hides_internal_fields_from_models(fresh: Cli) -> None:
    added = fresh("tools", "add", write(fresh, "mine.py", STATED))
    assert added.code == 0, added.out + added.err
    shown = fresh.ask("tools", "show", "own.stated")
    standard = fresh.ask("tools", "show", "own.stated", "--standard")
    declared = standard["declaration"]
    takes, gives = declared["input_contract"], declared["output_contract"]
    assert (takes["strict"], takes["argument_mode"], takes["media_mode"]) == (True, "object", "none")
    assert (takes["defaults"], takes["examples"]) == ({"mail": "nobody"}, [{"text": "a"}])
    assert (takes["sensitive_fields"], takes["mutation_policy"]) == (["mail"], "recorded")
    assert (gives["expected_artifacts"], gives["expected_resources"]) == (["*.csv"], ["https://wiki.example/*"])
    assert gives["content_types"] == ["text", "image", "persisted_ref", "artifact_ref"]
    assert (gives["media_modes"], gives["result_size_policy"]) == (["text", "image"], "persist")
    assert gives["rendering_boundary"] == "model_facing_content"
    assert "tenant_hint" not in str(declared)
    assert "tenant_hint" not in str(shown["input_schema"])
    assert "tenant_hint" in standard["interface"]["schemas"]["runtime_input_schema"]["properties"]
    for words in (("list",), ("search", "contract"), ("export", "--format", "anthropic")):
        for form in ((), ("--json",)):
            ended = fresh("tools", *words, *form)
            assert ended.code == 0, ended.err
            assert "stated" in ended.out
            assert "hint" not in ended.out + ended.err
    assert [one["known_pairs"] for one in fresh.ask("tools", "list")["tools"]] == [0], "it has none, and says so"
    refused = fresh("call", "own.stated", '{"text": "a", "tenant_hint": "mine"}', "--json")
    assert refused.json["error"]["errorCode"] == "INVALID_INPUT"
    assert "tenant_hint" not in refused.out + refused.err


@pytest.mark.proves("CONTRACT-13")
def test_an_envelope_on_the_command_line_names_no_place_of_the_machine(fresh: Cli) -> None:
    fresh("tools", "add", write(fresh, "mine.py", TOOLS))
    ended = fresh("call", "own.lost", '{"text": "hey"}', "--json")
    assert ended.json["error"]["error_code"] == "E3502"
    assert "/srv/private" not in ended.out
    missing = fresh("call", "own.nothing", "{}", "--json")
    assert str(fresh.home) not in missing.out


@contextmanager
def _broken_policy(cli: Cli) -> Generator[None]:
    (cli.home / "policy.cedar").write_text('permit (principal, action, "sk-live-0123456789abcdef");')
    yield


@contextmanager
def _broken_principals(cli: Cli) -> Generator[None]:
    (cli.home / "principals.toml").write_text('sk-live-0123456789abcdef = "/srv/private"')
    yield


@contextmanager
def _broken_store(cli: Cli) -> Generator[None]:
    for name in ("interlock.db", "interlock.db-wal", "interlock.db-shm"):
        (cli.home / name).unlink(missing_ok=True)
    (cli.home / "interlock.db").write_bytes(b"sk-live-0123456789abcdef" * 400)
    yield


def _refusing_store(cli: Cli) -> AbstractContextManager[None]:
    return stores.refusing(cli.store, "journal", "TRUE", "/srv/private/disk sk-live-0123456789abcdef")


@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize(
    "broken",
    [
        _broken_policy,
        _broken_principals,
        pytest.param(_broken_store, marks=pytest.mark.sqlite_only("the store's file is damaged")),
        _refusing_store,
    ],
)
def test_a_broken_layer_is_told_on_the_command_line_without_a_path_a_secret_or_a_stack_trace(
    cli: Cli, broken: Callable[[Cli], AbstractContextManager[None]]
) -> None:
    with broken(cli):
        ended = cli("call", "demo.balance", '{"account": "cash"}', "--json")
        shown = cli("call", "demo.balance", '{"account": "cash"}')
    envelope = ended.json["error"]
    assert re.fullmatch(r"E\d{4}", envelope["error_code"])
    assert envelope["humanMessage"]
    assert envelope["resolution"]
    for printed in (ended, shown):
        assert printed.code == 1
        told = printed.out + printed.err
        if printed is not ended:  # a person is shown, on a line of its own, which home they chose
            told = "\n".join(line for line in told.splitlines() if line.split() != ["data", str(cli.home)])
        for given_away in ("sk-live", "/srv/", str(cli.home), "Traceback", 'File "', ".py"):
            assert given_away not in told


@pytest.mark.supports("CONTRACT-13")
def test_a_tool_that_crashes_is_told_without_its_stack_trace(fresh: Cli) -> None:
    fresh("tools", "add", write(fresh, "mine.py", TOOLS))
    ended = fresh("call", "own.crash", '{"text": "hey"}')
    assert ended.code == 1
    assert "EXECUTION_FAILED" in ended.out
    assert "secret detail" not in ended.out + ended.err


def test_a_tool_that_stalls_is_cut_off_and_nobody_waits_for_its_thread(fresh: Cli) -> None:
    fresh("tools", "add", write(fresh, "mine.py", TOOLS))
    ended = fresh("call", "own.stall", '{"text": "hey"}', "--timeout", "0.2", "--json")
    assert ended.code == 1
    assert ended.json["error"]["errorCode"] == "DEADLINE_EXCEEDED"


def test_a_value_too_long_for_a_line_is_shown_below(fresh: Cli) -> None:
    fresh("tools", "add", write(fresh, "mine.py", TOOLS))
    ended = fresh("call", "own.table", '{"text": "hey"}')
    assert json.loads(ended.out.partition("\n")[2]) == [{"text": "hey", "number": str(n)} for n in range(9)]


def test_a_session_can_be_named(fresh: Cli) -> None:
    fresh("tools", "add", write(fresh, "mine.py", TOOLS))
    result = fresh.call("own.remember", {"text": "hey"}, "--session", "s1")
    assert result["structured_content"] == "nothing"
    shown = fresh.ask("calls", "show", result["invocation_id"])
    assert shown["records"][0]["record"]["session"] == "s1"


# calls


def test_calls_are_listed_newest_first(cli: Cli) -> None:
    first = cli.call("demo.balance", {"account": "cash"})["invocation_id"]
    second = cli.call("nope")["invocation_id"]
    listed = cli.ask("calls", "list")["calls"]
    assert [call["invocation_id"] for call in listed] == [second, first]
    assert listed[0]["error_code"] == "E3101"
    assert [call["invocation_id"] for call in cli.ask("calls", "list", "--limit", "1")["calls"]] == [second]
    shown = cli("calls", "list").out
    assert first in shown
    assert "failed E3101" in shown


def test_a_call_is_shown_with_every_record_it_left(cli: Cli) -> None:
    call = cli.call("demo.post", {"account": "cash", "cents": 250}, "--key", "order-17")["invocation_id"]
    document = cli.ask("calls", "show", call)
    assert [entry["record"]["kind"] for entry in document["records"]] == ["intent", "mutation", "closed"]
    shown = cli("calls", "show", call[:20].lower())
    assert shown.code == 0
    for words in ("order-17", "ALLOW reads-and-undoable-writes", "UPDATE account:cash   1000 → 1250", "validate"):
        assert words in shown.out
    missing = cli("calls", "show", "01JCNOSUCHCALL")
    assert missing.code == 1
    assert "E3702" in missing.err


def test_a_call_can_be_undone_once(cli: Cli) -> None:
    call = cli.call("demo.post", {"account": "cash", "cents": 250}, "--key", "order-17")["invocation_id"]
    assert cli("calls", "undo", call, "--key", "undo-17").code == 0
    assert cli("calls", "undo", call, "--key", "undo-17").code == 0
    assert cli.call("demo.balance", {"account": "cash"})["structured_content"] == 1000
    read = cli.call("demo.balance", {"account": "cash"})["invocation_id"]
    assert cli("calls", "undo", read, "--key", "u").code == 1


POST = ("call", "demo.post", '{"account": "cash", "cents": 500}', "--key", "order-18")


def unknown_call(cli: Cli) -> str:
    """Kill a write in its middle and return the call nobody can know the outcome of."""
    cli.kill(*POST)
    stores.bury(cli.store)
    waiting = cli.ask("calls", "reconcile")["unknown"]
    assert [(one["tool"], one["version"], one["key"]) for one in waiting] == [("demo.post", "1.2.0", "order-18")]
    return waiting[0]["invocation_id"]


def test_a_killed_call_is_listed_blocks_its_key_and_is_settled_with_its_result(cli: Cli) -> None:
    assert "nothing to settle" in cli("calls", "reconcile").out
    call = unknown_call(cli)
    assert call in cli("calls", "reconcile").out
    blocked = cli.ask(*POST)
    assert blocked["error"]["error_code"] == "E3409"
    misfit = cli("calls", "reconcile", call, "--happened", "--result", '{"entry": "one"}')
    assert misfit.code == 1
    assert "could not have returned that" in misfit.err
    assert "balance: missing; send a whole number" in misfit.err
    assert "entry: `one` is not a whole number" in misfit.err
    assert "interlock tools show demo.post" in misfit.err
    unsaid = cli("calls", "reconcile", call, "--happened")
    assert unsaid.code == 1
    assert "returns something; say what it was, as its idempotency key will answer with it" in unsaid.err
    assert "add the result: --result JSON" in unsaid.err
    settled = cli.ask("calls", "reconcile", call, "--happened", "--result", '{"entry": 1, "balance": 1500}')
    assert settled["settled"]["happened"] is True
    replayed = cli.ask(*POST)
    assert replayed["structured_content"] == {"entry": 1, "balance": 1500}
    assert replayed["metadata"]["replayed"] is True
    assert len(cli.ledger.read_text().splitlines()) == 1
    again = cli("calls", "reconcile", call, "--happened")
    assert again.code == 1
    assert "E3702" in again.err
    records = cli.ask("calls", "show", call)["records"]
    assert [entry["record"]["kind"] for entry in records] == ["intent", "closed", "settled"]
    assert records[-1]["record"]["by"].startswith("local:")
    assert cli("audit", "verify").code == 0


def test_a_killed_call_that_did_not_happen_frees_its_key(cli: Cli) -> None:
    call = unknown_call(cli)
    cli.ledger.unlink()  # as if the power had failed before the entry reached the disk
    ended = cli("calls", "reconcile", call[:18], "--did-not-happen")
    assert ended.code == 0
    assert "its key is free" in ended.out
    result = cli.ask(*POST)
    assert result["metadata"]["replayed"] is False
    assert result["structured_content"] == {"entry": 1, "balance": 1500}
    assert cli.ask("calls", "list")["calls"][-1]["state"] == "settled"


def test_settling_needs_the_scope_for_it(cli: Cli) -> None:
    call = unknown_call(cli)
    revoke(cli)
    ended = cli("calls", "reconcile", call, "--did-not-happen", "--json")
    assert ended.code == 1
    assert ended.json["error"]["error_code"] == "E3206"
    assert len(cli.ask("calls", "reconcile")["unknown"]) == 1


async def test_a_call_settled_after_its_window_is_still_replayed_for_a_whole_window(tmp_path: Path) -> None:
    now = 1_000_000_000_000
    async with Interlock.open(tmp_path, store_clock=Clock(now_ms=lambda: now)) as app:
        await app.journal.commit(
            lambda transaction: transaction.execute(
                "INSERT INTO reservation (scope, tool, version, key, caller, input_hash, state, call, owner,"
                " reserved_ms, expires_ms)"
                " VALUES (x'00', 't.x', '1.0.0', 'k', 'c', 'h', 'unknown', 'call-1', 'o', ?, ?)",
                (now - 90_000, now - 30_000),
            )
        )
        assert [one.call for one in await reconcile.unknown_calls(app.journal)] == ["call-1"]
        seal = app.gateway.storage.outcomes.seal
        await reconcile.reconcile(app.journal, app.caller, "call-1", seal=seal, happened=True, value=7)
        assert app.journal.reader.all("SELECT state, expires_ms FROM reservation") == [("done", now + 60_000)]
        assert await reconcile.unknown_calls(app.journal) == []
        with pytest.raises(Failure) as caught:
            await reconcile.reconcile(app.journal, app.caller, "call-1", seal=seal, happened=False)
        assert caught.value.code == "E3702"


# audit


def revoke(cli: Cli) -> None:
    """Leave the local user nothing but the right to call tools."""
    cli.home.joinpath("principals.toml").write_text('[[principal]]\nid = "local:*"\nkind = "human"\ntrust = 100\n')


@pytest.mark.sqlite_only("the full disk is that of the store's file")
@pytest.mark.parametrize("words", [("call", "demo.balance", '{"account": "cash"}'), ("audit", "verify")])
def test_a_full_disk_is_not_told_as_a_broken_home(cli: Cli, words: tuple[str, ...]) -> None:
    (cli.home / "interlock.db-wal").touch()
    # The index of the database's log finds no room, as on a full disk; nor would bytecode.
    limited = ["/bin/sh", "-c", 'ulimit -f 16; exec "$@"', "sh", *INTERLOCK, *words]
    environment = {**cli.environment, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(limited, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "E3803" in done.stdout + done.stderr
    assert "make room" in done.stdout + done.stderr


def test_an_untouched_journal_is_intact(cli: Cli) -> None:
    cli.call("demo.post", {"account": "cash", "cents": 250}, "--key", "order-17")
    ended = cli("audit", "verify")
    assert ended.code == 0
    assert " · 1 chain · head " in ended.out
    assert "intact" in ended.out
    document = cli.ask("audit", "verify")
    assert document["intact"] is True
    assert document["records"] == 6
    head = f"{document['head']['seq']}:{document['head']['hash']}"
    assert cli("audit", "verify", "--known-head", head).code == 0
    assert cli("audit", "verify", "--known-head", f"2:{'00' * 32}").code == 1
    key = (cli.home / "keys" / "journal.pub").read_text().strip()
    assert cli("audit", "verify", "--public-key", key).code == 0
    assert cli("audit", "verify", "--public-key", "00" * 32).code == 1
    (cli.home / "anchors.jsonl").rename(cli.path / "anchors.jsonl")
    cut = cli("audit", "verify")
    assert cut.code == 1
    assert "the anchors file is missing" in cut.out
    alone = cli("audit", "verify", "--database-only", "--public-key", key)
    assert alone.code == 0
    assert "of the database alone" in alone.out


def test_a_changed_record_is_found_and_named(cli: Cli) -> None:
    cli.call("demo.post", {"account": "cash", "cents": 250}, "--key", "order-17")
    stores.forge(cli.store, b"1250", b"9250", "seq = 5")
    ended = cli("audit", "verify", "--json")
    assert ended.code == 1
    assert ended.json["intact"] is False
    assert ended.json["faults"][0]["seq"] == 5
    assert "at record 5" in cli("audit", "verify").out


REBUILT = """
    ALTER TABLE journal RENAME TO former; DROP INDEX journal_call;
    CREATE TABLE journal (seq INTEGER, kind TEXT, call TEXT, body BLOB, hash BLOB);
    INSERT INTO journal SELECT * FROM former; DROP TABLE former;
    CREATE INDEX journal_call ON journal (call);
    INSERT INTO journal SELECT NULL, kind, 'FORGED', body, zeroblob(32) FROM journal WHERE kind = 'closed';
"""
HIDDEN = """
    DROP INDEX journal_call; CREATE INDEX journal_call ON journal (call) WHERE kind = 'registry';
    PRAGMA writable_schema=ON;
    UPDATE sqlite_master SET sql = 'CREATE INDEX journal_call ON journal (call)' WHERE name = 'journal_call';
"""


@pytest.mark.sqlite_only("the tables that SQLite keeps about a file are changed")
@pytest.mark.parametrize(
    ("script", "found", "told"),
    [(REBUILT, "the table `journal` is not as it was made", "`journal`"), (HIDDEN, "missing from index", "index")],
)
def test_records_put_in_or_hidden_by_another_layout_are_found(cli: Cli, script: str, found: str, told: str) -> None:
    cli.call("demo.post", {"account": "cash", "cents": 250}, "--key", "order-17")
    connection = sqlite3.connect(cli.home / "interlock.db")
    guards = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    drop, make = (";".join(texts) for texts in ([f"DROP TRIGGER {name}" for name, _ in guards], [g for _, g in guards]))
    connection.executescript(f"{drop};{script}")
    connection.close()
    with closing(sqlite3.connect(cli.home / "interlock.db")) as again:
        again.executescript(make)
    ended = cli("audit", "verify", "--json")
    assert ended.code == 1
    assert any(found in fault["what"] for fault in ended.json["faults"])
    doctor = cli("doctor", "--json")
    assert doctor.code == 1
    assert any(one["name"] == "journal" and told in one["what"] for one in doctor.json["findings"])


def test_a_journal_that_is_not_there_is_an_error_and_is_not_made(fresh: Cli) -> None:
    ended = fresh("audit", "verify")
    assert ended.code == 1
    assert "E3804" in ended.err
    assert not fresh.home.exists()


def test_the_journal_can_be_exported_and_checked_elsewhere(cli: Cli) -> None:
    cli.call("demo.post", {"account": "cash", "cents": 250}, "--key", "order-17")
    lines = cli("audit", "export").out.splitlines()
    head = bytes(32)
    for line in lines:
        row = json.loads(line)
        body = line[line.index('"record":') + len('"record":') : -1].encode()
        head = hashlib.sha256(head + row["seq"].to_bytes(8, "big") + body).digest()
        assert head.hex() == row["hash"]
    assert json.loads(lines[-1])["record"]["kind"] == "audit.read"
    written = cli.ask("audit", "export", "--out", "journal.jsonl")
    exported = cli.path / "journal.jsonl"
    assert written["records"] == len(exported.read_text().splitlines()) == len(lines) + 1
    assert exported.stat().st_mode & 0o777 == 0o600
    assert cli("audit", "export", "--out", "no/such/place").code == 1


def test_reading_the_journal_needs_the_scope_for_it(cli: Cli) -> None:
    call = cli.call("demo.balance", {"account": "cash"})["invocation_id"]
    revoke(cli)
    for words in (("export",), ("explain", call)):
        ended = cli("audit", *words)
        assert ended.code == 1
        assert ended.out == ""
        assert "E3206" in ended.err


def test_a_call_is_explained_in_sentences(cli: Cli) -> None:
    call = cli.call("demo.post", {"account": "cash", "cents": 250}, "--key", "order-17")["invocation_id"]
    told = cli("audit", "explain", call).out
    for words in (
        "asked for demo.post@1.2.0",
        "on their own behalf",
        "by rule reads-and-undoable-writes",
        "It changed account:cash (UPDATE) from 1000 to 1250.",
        "It succeeded",
        "It can be undone",
    ):
        assert words in told
    refused = cli.call("demo.balance", {"account": 1})["invocation_id"]
    story = " ".join(cli.ask("audit", "explain", refused)["story"])
    assert "never put to the policy" in story
    assert "in the validate phase, before anything ran" in story
    replay = cli.call("demo.post", {"account": "cash", "cents": 250}, "--key", "order-17")["invocation_id"]
    assert f"it had run before as call {call}" in cli("audit", "explain", replay).out
    assert cli("audit", "explain", "01JCNOSUCHCALL").code == 1


# doctor


def findings(cli: Cli) -> dict[str, Json]:
    return {one["name"]: one for one in cli.ask("doctor")["findings"]}


def test_a_healthy_home_is_found_healthy(cli: Cli) -> None:
    ended = cli("doctor")
    assert ended.code == 0, ended.out
    for words in (
        "python", "sqlite", "GiB free", "0020", "3 records, 3 tools", "0 wait for a person",
        "permit: reads-and-undoable-writes", "a person decides: a-person-decides-what-cannot-be-undone",
        "local:* is in approvers, managers, admins", "signing key", "issuer keys", "secrets key",
    ):  # fmt: skip
        assert words in ended.out
    assert "✗" not in ended.out


def test_looking_at_a_home_that_is_not_there_does_not_make_it(fresh: Cli) -> None:
    assert fresh("doctor").code == 0
    assert not fresh.home.exists()


def test_what_waits_for_a_person_is_pointed_out(cli: Cli) -> None:
    unknown_call(cli)
    cli.call("demo.mail_statement", {"account": "cash", "to": "press@example.org"}, "--key", "m")
    found = findings(cli)
    assert found["calls"]["status"] == found["approvals"]["status"] == "attention"
    assert "calls reconcile" in found["calls"]["advice"]
    assert "approvals list" in found["approvals"]["advice"]


@pytest.mark.parametrize(
    ("file", "text", "name"),
    [
        pytest.param(
            *("interlock.db", "this is not a database at all, far from it", "journal"),
            marks=pytest.mark.sqlite_only("the store's file is damaged"),
        ),
        ("policy.cedar", "permit (principal, action", "policy"),
        (
            "policy.cedar",
            '@id("x") permit (principal, action == Action::"demo.post", resource) when { context.arguments.cent > 1 };',
            "policy",
        ),
        ("policy.toml", '[[rule]]\nid = "all"\neffect = "allow"\n', "policy"),
        ("principals.toml", "[[principal]", "policy"),
        ("settings.toml", "surprise = 1", "settings"),
    ],
)
def test_what_is_broken_is_found_with_advice(cli: Cli, file: str, text: str, name: str) -> None:
    for stale in cli.home.glob(f"{file}-*"):
        stale.unlink()
    (cli.home / file).write_text(text)
    ended = cli("doctor", "--json")
    assert ended.code == 1
    (found,) = [one for one in ended.json["findings"] if one["name"] == name and one["status"] == "broken"]
    assert found["advice"]


def test_a_key_that_others_can_read_is_found(cli: Cli) -> None:
    issuer = cli.home / "keys" / "issuer"
    issuer.mkdir()
    keys = {
        "signing key": cli.home / "keys" / "journal.ed25519",
        "issuer keys": issuer / "001794719968000.key.pem",
        "secrets key": cli.home / "keys" / "secrets.key",
    }
    for path in keys.values():
        path.touch()
        path.chmod(0o644)
    assert cli("doctor").code == 1
    found = findings(cli)
    for name, path in keys.items():
        assert found[name]["status"] == "broken"
        assert found[name]["advice"] == f"chmod 600 {path}"


# Errors of the program itself


def foreign(cli: Cli) -> None:
    cli.home.mkdir()
    connection = sqlite3.connect(cli.home / "interlock.db")
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()


def damaged(cli: Cli) -> None:
    cli.home.mkdir()
    (cli.home / "interlock.db").write_bytes(b"SQLite format 3\0" + b"nonsense" * 500)


def newer(cli: Cli) -> None:
    assert cli("tools", "list").code == 0
    stores.make_newer(cli.store)


def blocked(cli: Cli) -> None:
    cli.home.mkdir()
    (cli.home / "keys").write_text("a file where a directory must be")


def bad_settings(cli: Cli) -> None:
    cli.home.mkdir()
    (cli.home / "settings.toml").write_text("audit = 'never'")


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        pytest.param(foreign, "E3804", marks=pytest.mark.sqlite_only("the file is another program's")),
        pytest.param(damaged, "E3804", marks=pytest.mark.sqlite_only("the store's file is damaged")),
        (newer, "E3805"),
        (blocked, "E3801"),
        (bad_settings, "E3108"),
    ],
)
def test_a_home_that_cannot_be_used_is_one_readable_block(fresh: Cli, spoil: Any, code: str) -> None:
    spoil(fresh)
    ended = fresh("call", "demo.balance", "{}")
    assert ended.code == 1
    assert ended.out == ""
    first, *rest = ended.err.splitlines()
    assert first.startswith(f"✗ {code}  ")
    assert rest[-1].startswith("  next   ")
    spoken = fresh("call", "demo.balance", "{}", "--json")
    assert spoken.code == 1
    assert spoken.err == ""
    document = spoken.json
    assert document["is_error"] is True
    assert document["error"]["error_code"] == code
    assert document["structured_content"] is None
    assert document["metadata"]["replayed"] is False


def test_a_terminal_that_knows_no_unicode_gets_its_answer_all_the_same(cli: Cli) -> None:
    ended = subprocess.run(
        [*INTERLOCK, "call", "demo.balance", '{"account": "cash"}'],
        env={**cli.environment, "PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert b"demo.balance@1.0.0   1000" in ended.stdout


def test_a_closed_stdout_is_no_reason_to_fall_over(cli: Cli) -> None:
    ended = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *INTERLOCK, "call", "demo.balance", '{"account": "cash"}'],
        env=cli.environment, stderr=subprocess.PIPE, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 0
    assert ended.stderr == b""


SLOW = '''
import asyncio, sys
from interlock import Effect, Preview, tool

@tool(version="1.0.0", mutation_class="write_reversible", namespace="slow", effects=[Effect("x", "UPDATE")])
async def strand() -> str:
    """Change something, or not, and never come back."""
    print("begun", file=sys.stderr, flush=True)
    await asyncio.Event().wait()
    return "never"

@strand.preview
def _() -> Preview:
    return Preview(impact="x")

@strand.compensate
async def _() -> None:
    return None
'''


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_in_the_middle_of_a_write_says_that_its_outcome_is_unknown(fresh: Cli, as_json: bool) -> None:
    (fresh.path / "slow.py").write_text(SLOW)
    assert fresh("tools", "add", "slow.py").code == 0
    words = ("call", "slow.strand", "{}", "--key", "k", *(["--json"] if as_json else []))
    with warm.start(words, fresh.environment, fresh.path) as child:
        assert child.stderr.readline() == b"begun\n"
        child.send_signal(signal.SIGINT)
        out, err = (text.decode() for text in child.communicate())
    (stranded,) = fresh.ask("calls", "reconcile")["unknown"]
    assert child.returncode == 1
    message = json.loads(out)["error"]["message"] if as_json else " ".join(err.split())
    assert "whether slow.strand@1.0.0 took effect is unknown" in message
    assert f"interlock calls reconcile {stranded['invocation_id']}" in message
    assert "Aborted" not in err


@pytest.mark.parametrize("text", ['{"account": "cash", "cents": 1, "cents": 999}', '{"a": {"b": 1,\n"b": 2}}'])
def test_arguments_that_say_one_thing_twice_are_refused_with_their_line(cli: Cli, text: str) -> None:
    ended = cli("call", "demo.post", text, "--key", "k")
    assert (ended.code, "appears twice" in ended.err, "line" in ended.err) == (2, True, True)
    assert not cli.ledger.exists()


def test_a_manifest_that_says_one_thing_twice_is_refused_with_its_line(cli: Cli) -> None:
    def refused(*words: str) -> str:
        ended = cli(*words)
        assert ended.code == 1
        return " ".join((ended.out + ended.err).split())

    (cli.path / "m.yaml").write_text("tool_id: demo.x\nmutation_class: write_irreversible\nmutation_class: read_only\n")
    assert "line 3: `mutation_class` appears twice" in refused("tools", "add", "m.yaml")
    (cli.path / "m.json").write_text('{"tool_id": "demo.x",\n "tool_id": "demo.y"}')
    assert "line 2: `tool_id` appears twice" in refused("tools", "add", "m.json")
    (cli.path / "o.yaml").write_text("defaults:\n  mutation_class: write_irreversible\n  mutation_class: read_only\n")
    overlay = refused("upstream", "add", "mcp", "up", "http://127.0.0.1:9/mcp", "--overlay", "o.yaml")
    assert "line 3: `mutation_class` appears twice" in overlay


@pytest.mark.parametrize("head", ["3", "3:", "0:" + "a" * 64, "-1:" + "a" * 64, "3:abcd", "x:" + "a" * 64])
def test_a_mistyped_head_is_a_usage_error_and_no_broken_chain(cli: Cli, head: str) -> None:
    ended = cli("audit", "verify", "--known-head", head)
    assert (ended.code, "SEQ:HASH" in ended.err) == (2, True)


VERSIONED = '''
from interlock import Effect, Preview, tool
from typing import Annotated
from pydantic import Field

Name = Annotated[str, Field(description="what", examples=["a"])]


@tool(version="{version}", mutation_class="write_reversible", namespace="ver", effects=[Effect("x:{{name}}", "UPDATE")])
def touch(name: Name) -> str:
    """Touch something."""
    return "{version}"


@touch.preview
def _(name: str) -> Preview:
    return Preview()


@touch.compensate
def _(name: str) -> None:
    return None
'''


@pytest.mark.proves("IDEM-06")
def test_a_known_key_at_another_version_is_a_conflict(fresh: Cli) -> None:
    for version in ("1.0.0", "1.1.0"):
        added = fresh("tools", "add", write(fresh, f"ver_{version[2]}.py", VERSIONED.format(version=version)))
        assert added.code == 0, added.out
    assert fresh.ask("call", "ver.touch@1.0.0", '{"name": "a"}', "--key", "k")["status"] == "succeeded"
    refused = fresh("call", "ver.touch@1.1.0", '{"name": "a"}', "--key", "k", "--json")
    assert refused.code == 1
    assert (refused.json["error"]["error_code"], refused.json["error"]["errorCode"]) == ("E3306", "CONFLICT")
    assert refused.json["structured_content"] is None
    other = fresh("call", "ver.touch@1.0.0", '{"name": "b"}', "--key", "k", "--json")
    assert (other.code, other.json["error"]["errorCode"], other.json["structured_content"]) == (1, "CONFLICT", None)

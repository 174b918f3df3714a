"""The command that a call which waits offers: typed as it is printed, it agrees to that call."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.cli import Cli
from tests.support.mcp_servers import listed

Json = dict[str, Any]
TEXT: Json = {"type": "string"}
OPTIONAL: Json = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
MODE: Json = {"enum": ["fast", "slow"]}
# An enum of gRPC: by name or by number.
NAMED: Json = {"anyOf": [{"type": "string", "enum": ["LOW", "HIGH"]}, {"type": "integer"}]}
# A float of gRPC.
FLOAT: Json = {"anyOf": [{"type": "number"}, {"type": "string", "enum": ["NaN", "Infinity", "-Infinity"]}]}
DEFINITIONS: Json = {"Mode": MODE, "Title": {"type": "string"}}


class Row(NamedTuple):
    """A tool that takes `x`, a value of it, the bound that is offered, and a value that is not covered."""

    schema: Json
    value: Any
    bound: Any
    beyond: Any


ROWS: dict[str, Row] = {
    "a text": Row(TEXT, "hello", "hello", "other"),
    "a text or null": Row(OPTIONAL, "hello", "hello", None),
    "null": Row(OPTIONAL, None, None, "null"),
    "a text that says null": Row(OPTIONAL, "null", "null", None),
    "a text in quotes": Row(OPTIONAL, '"hello"', '"hello"', "hello"),
    "a plain text in quotes": Row(TEXT, '"hello"', '"hello"', "hello"),
    "a text of digits": Row(TEXT, "5", "5", "6"),
    "a path or null": Row(OPTIONAL, "/srv/x/a.txt", "/srv/x/*", "/srv/y/a.txt"),
    "a value of an enum": Row(MODE, "fast", "fast", "slow"),
    "a constant or null": Row({"anyOf": [{"const": "fast"}, {"type": "null"}]}, "fast", "fast", None),
    "a name of an enum of gRPC": Row(NAMED, "HIGH", "HIGH", "LOW"),
    "text or number, a text": Row({"type": ["integer", "string"]}, "hello", "hello", "other"),
    "text or number, digits": Row({"type": ["integer", "string"]}, "5", "5", 5),
    "text or number, a number": Row({"type": ["integer", "string"]}, 5, {"maximum": 5}, "5"),
    "a float of gRPC": Row(FLOAT, 2.5, {"maximum": 2.5}, 2.6),
    "a float of gRPC that is a text": Row(FLOAT, "NaN", "NaN", 0.5),
    "a number or null": Row({"anyOf": [{"type": "number"}, {"type": "null"}]}, 3, {"maximum": 3}, None),
    "a number of an enum": Row({"enum": [1, 2]}, 1, {"maximum": 1}, 2),
    "anything, a number": Row({"description": "anything"}, 5, {"maximum": 5}, "5"),
    "a list of texts": Row({"type": "array", "items": TEXT}, ["a", "b"], ["a", "b"], ["a"]),
    "a list of paths": Row({"type": "array", "items": TEXT}, ["/srv/a", "/srv/b"], {"items": "/srv/*"}, ["/srv/../a"]),
    "paths or null": Row(
        {"anyOf": [{"type": "array", "items": TEXT}, {"type": "null"}]}, ["/srv/a"], {"items": "/srv/*"}, []
    ),
    "paths in two directories": Row({"type": "array"}, ["/srv/a", "/opt/b"], ["/srv/a", "/opt/b"], ["/srv/a"]),
    "lists of texts": Row({"type": "array", "items": {"type": "array", "items": TEXT}}, [["a"]], [["a"]], [["b"]]),
    "an object": Row({"type": "object"}, {"depth": 1}, {"depth": 1}, {"depth": 2}),
    "an object like a bound": Row({"type": "object"}, {"minimum": 1}, {"enum": [{"minimum": 1}]}, {"minimum": 2}),
    "an object of items": Row({}, {"items": "a*"}, {"enum": [{"items": "a*"}]}, ["ab"]),
    "a reference": Row({"$ref": "#/$defs/Mode"}, "fast", "fast", "slow"),
    "a reference or null": Row({"anyOf": [{"$ref": "#/$defs/Title"}, {"type": "null"}]}, "a b", "a b", None),
    "anything, a text": Row({"description": "anything"}, "hello", "hello", "other"),
    "anything, digits": Row({"description": "anything"}, "5", "5", 5),
}


# Values that are content, and no bounds.
LONG: dict[str, Any] = {
    "rows": [{"old": "x" * 20_000, "new": "y"}],
    "an object": {name: [1, 2, 3] for name in "abcdefghij"},
    "texts": ["a text of some length"] * 5,
}


GRANT = ("--caller", "local:bob", "--uses", "1", "--expires", "1d")


def named(row: str) -> str:
    return f"take_{list(ROWS).index(row)}"


def tool(name: str, properties: Json) -> Json:
    schema = {"type": "object", "properties": properties, "required": [*properties], "$defs": DEFINITIONS}
    return {"name": name, "description": "Does what it is told.", "inputSchema": schema}


@pytest.fixture(scope="module")
def governed(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """A home whose one person is alone on the machine, with a tool for each row."""
    cli = Cli(tmp_path_factory.mktemp("governed"))
    tools = [tool(named(row), {"x": ROWS[row].schema}) for row in ROWS]
    tools += [tool("edit", {"path": TEXT, "x": {"description": "anything"}})]
    (cli.path / "tools.json").write_text(json.dumps(tools))
    program = (sys.executable, str(Path(listed.__file__)), str(cli.path / "tools.json"))
    report = cli("upstream", "add", "mcp", "s", "--json", "--", *program).json
    assert [one["state"] for one in report["tools"]] == ["admitted"] * len(tools), report
    assert cli("approvals", "alone").code == 0
    return cli


@pytest.fixture
def home(governed: Cli, tmp_path: Path) -> Cli:
    shutil.copytree(governed.home, tmp_path / "home")
    return Cli(tmp_path)


def asks(cli: Cli, name: str, arguments: Json, key: str) -> str | None:
    """Make a call that waits for a person; the command that it offers, as it is printed."""
    waits = cli.call(f"s.{name}", arguments, "--key", key)
    assert waits["status"] == "awaiting_approval", waits
    return waits["pending"].get("agreeInAdvance")


def agree(cli: Cli, command: str | None) -> Json:
    """Type a command as a shell reads it; what was agreed to."""
    assert command is not None
    program, *words = shlex.split(command)
    assert program == "interlock"
    granted = cli(*words, "--json")
    assert granted.code == 0, (command, granted)
    return granted.json["arguments"]


@pytest.mark.parametrize("row", ROWS)
def test_the_command_that_is_offered_covers_the_call_and_not_another(home: Cli, row: str) -> None:
    schema, value, bound, beyond = ROWS[row]
    del schema
    assert agree(home, asks(home, named(row), {"x": value}, "one")) == {"x": bound}
    assert home.call(f"s.{named(row)}", {"x": value}, "--key", "two")["status"] == "succeeded"
    asks(home, named(row), {"x": beyond}, "three")


@pytest.mark.parametrize(
    ("row", "word", "bound"),
    [
        ("a text or null", "/srv/*", "/srv/*"),
        ("a text or null", "5", "5"),
        ("a text or null", "null", None),
        ("a value of an enum", "f*", "f*"),
        ("a name of an enum of gRPC", "2", 2),
        ("text or number, a text", "5", 5),
        ("text or number, a text", '"5"', "5"),
        ("a reference", "f*", "f*"),
    ],
)
def test_a_pattern_is_a_text_where_the_schema_admits_texts(home: Cli, row: str, word: str, bound: Any) -> None:
    assert home.ask("approvals", "grant", f"s.{named(row)}", "--arg", f"x={word}", *GRANT)["arguments"] == {"x": bound}


@pytest.mark.parametrize("value", LONG)
def test_a_value_that_is_too_long_for_a_bound_is_left_open_beside_one_that_is_not(home: Cli, value: str) -> None:
    command = asks(home, "edit", {"path": "/srv/a", "x": LONG[value]}, "one")
    assert command is not None
    assert len(command) < 200
    assert agree(home, command) == {"path": "/srv/*", "x": {"x-any": True}}
    assert "path=/srv/*, x any value" in home("approvals", "standing").out
    explained = home("policy", "explain", "me", "s.edit", json.dumps({"path": "/srv/b", "x": None})).out
    assert "covers this call" in explained
    assert "with path=/srv/*, x any value" in explained
    assert home.call("s.edit", {"path": "/srv/b", "x": None}, "--key", "two")["status"] == "succeeded"
    asks(home, "edit", {"path": "/opt/b", "x": LONG[value]}, "three")


@pytest.mark.parametrize(
    "value", [{"password": "hunter2-hunter2"}, [{"deep": [{"api_key": "hunter2-hunter2"}]}]], ids=["inside", "deeper"]
)
def test_a_value_that_holds_something_private_is_left_open_and_the_call_is_covered(home: Cli, value: Any) -> None:
    command = asks(home, "edit", {"path": "/srv/a", "x": value}, "one")
    assert "REDACTED" not in str(command)
    assert agree(home, command) == {"path": "/srv/*", "x": {"x-any": True}}
    assert home.call("s.edit", {"path": "/srv/a", "x": value}, "--key", "two")["status"] == "succeeded"


def test_nothing_is_offered_for_a_call_that_has_no_bound(home: Cli) -> None:
    assert asks(home, named("anything, a text"), {"x": LONG["rows"]}, "one") is None


@pytest.mark.parametrize(
    ("row", "words", "bound", "said"),
    [
        ("a list of texts", ("--each", "x=/srv/*"), {"items": "/srv/*"}, "each of x=/srv/*"),
        ("a list of texts", ("--each", "x=a", "--each", "x=b"), {"items": {"enum": ["a", "b"]}}, "each of x one of a"),
        ("paths or null", ("--each", "x=/srv/*"), {"items": "/srv/*"}, "each of x=/srv/*"),
        ("paths in two directories", ("--each", "x<=5"), {"items": {"maximum": 5}}, "each of x<=5"),
        (
            "paths in two directories", ("--each", "x<=5", "--each", "x>=1"), {"items": {"maximum": 5, "minimum": 1}},
            "each of x>=1, each of x<=5",
        ),
        ("lists of texts", ("--each", "x=/srv/*"), {"items": {"items": "/srv/*"}}, "each of each of x=/srv/*"),
    ],
)  # fmt: skip
def test_each_item_of_a_list_has_a_bound(home: Cli, row: str, words: tuple[str, ...], bound: Json, said: str) -> None:
    granted = home("approvals", "grant", f"s.{named(row)}", *words, *GRANT)
    assert (granted.code, said in granted.out) == (0, True), granted
    (standing,) = home.ask("approvals", "standing")["standing"]
    assert standing["arguments"] == {"x": bound}


@pytest.mark.parametrize(
    ("row", "words", "code", "said"),
    [
        ("a list of texts", ("--each", "x=*"), 1, "a pattern that says more than anything goes"),
        ("a list of texts", ("--any-value", "x"), 1, "a pattern that says more than anything goes"),
        ("a list of texts", ("--each", "x<=5"), 1, "an item of `x` is not a number"),
        ("a text", ("--each", "x=a"), 1, "`x` is not a list, so it has no bound for each item"),
        ("a list of texts", ("--each", "y=a"), 1, "takes no `y`; it takes x"),
        ("a list of texts", ("--any-value", "y"), 1, "takes no `y`; it takes x"),
        ("a list of texts", ("--each", "x=a", "--any-value", "x"), 2, "`x` is bounded twice"),
        ("a list of texts", ("--each", "x=a", "--arg", "x=[]"), 2, "`x` is bounded twice"),
        ("a list of texts", ("--each", "x<=5", "--each", "x=a"), 2, "`x` is bounded twice"),
        ("a list of texts", ("--each", "x=a*", "--each", "x=b"), 2, "values have no * and ?"),
        ("a list of texts", ("--each", "x"), 2, "write NAME=PATTERN"),
    ],
)
def test_bounds_of_items_that_make_no_sense_are_refused(
    home: Cli, row: str, words: tuple[str, ...], code: int, said: str
) -> None:
    refused = home("approvals", "grant", f"s.{named(row)}", *words, *GRANT)
    assert (refused.code, said in " ".join((refused.out + refused.err).split())) == (code, True), refused
    assert home.ask("approvals", "standing")["standing"] == []

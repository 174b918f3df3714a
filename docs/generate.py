"""Writes the pages and schemas that follow from the code's own tables: `python -m docs.generate [--check]`.

Errors, states, settings, commands and requirements are each said in one place. These pages are drawn from there, so
they cannot disagree with it; with `--check` nothing is written, and the exit code is 1 if anything on disk differs.
"""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import click
import orjson
import pydantic
import pydantic_core
from pydantic.fields import FieldInfo

from docs import marks, overlay_reference, python_reference, upstream_features
from interlock.call.events import KINDS, data_schema
from interlock.cli import root as command_line
from interlock.contract.manifest import Manifest
from interlock.contract.standard import VERSION, published_schemas
from interlock.contract.standard.states import HISTORY, MOVES, TERMINAL
from interlock.core.errors import CODES
from interlock.settings import Settings
from tests import house

ROOT = Path(__file__).parents[1]
REFERENCE = Path("docs/reference")
SCHEMAS = Path("schemas")
DEFAULTS = Path("src/interlock/default_settings.json")

_MADE_BY = "<!-- Written by `./dev docs` from {source}. Change that, not this page. -->\n"


def pages(root: Path = ROOT) -> dict[Path, bytes]:
    """Every generated file: its path in the repository, and what it holds."""
    texts = {
        REFERENCE / "errors.md": errors_page(),
        REFERENCE / "states.md": states_page(),
        REFERENCE / "settings.md": settings_page(),
        REFERENCE / "cli.md": cli_page(),
        REFERENCE / "python.md": python_page(),
        REFERENCE / "overlay.md": overlay_page(),
        REFERENCE / "requirements.md": requirements_page(root / "tests"),
        REFERENCE / "upstream-features.md": _MADE_BY.format(source="the marks of the tests")
        + upstream_features.page(root / "tests"),
        REFERENCE / "sizes.md": sizes_page(),
        REFERENCE / "conformance.md": conformance_page(root / "tests"),
    }
    found = {path: text.encode() for path, text in texts.items()}
    for name, schema in published_schemas().items():
        found[SCHEMAS / f"agent-tool-{VERSION}" / f"{name}.json"] = _json(schema)
    found[DEFAULTS] = _json(default_settings(Settings.model_construct()))
    found[SCHEMAS / "manifest.json"] = _json(
        {"$schema": "https://json-schema.org/draft/2020-12/schema", **Manifest.model_json_schema()}
    )
    found[SCHEMAS / "events.json"] = _json({kind: data_schema(kind) for kind in KINDS})
    return found


def default_settings(model: pydantic.BaseModel) -> dict[str, Any]:
    """The defaults of settings as `interlock.default_settings` reads them."""
    found: dict[str, Any] = {}
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, pydantic.BaseModel):
            found[name] = {"part": default_settings(value)}
        elif isinstance(value, tuple) and any(isinstance(one, pydantic.BaseModel) for one in cast("Any", value)):
            found[name] = {"parts": [default_settings(one) for one in cast("tuple[pydantic.BaseModel, ...]", value)]}
        else:
            found[name] = value
    properties = [name for name, one in vars(type(model)).items() if isinstance(one, property)]
    return found | {name: {"property": getattr(model, name)} for name in properties}


def _json(document: Any) -> bytes:
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(_cell(text) for text in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# Sizes


def sizes_page() -> str:
    """The measures of the source, beside those of other codebases."""
    head = _MADE_BY.format(source="tests/house.py") + _SIZES
    growth = "\n## Growth by package\n\nLines of source, without generated modules.\n\n"
    return head + _table(house.HEAD, house.table()) + _COUNTED + growth + _table(house.GROWTH_HEAD, house.growth())


_SIZES = """# Sizes of the source

Measured by `python -m tests.house`; [test_house.py](../../tests/test_house.py) holds the limits. Numbers of lines and
files are rounded. *Before* is the source before it was put in order. The other columns are codebases of the same trade,
measured once.

"""
_COUNTED = """
Classes over 12 methods and module-level mutable state count everything, except constants; what is above the limits has
its reason beside it in the source. Words to decode are those of `RIDDLES` in `tests/house.py`, counted in the pages
that are not generated, without code blocks. An earlier reading of the docs found 19.9 unusual phrasings per 1,000 words
by eye, and 0 to 1.3 in the other codebases, which is another measure.
"""


# Errors


def errors_page() -> str:
    """The table of errors, one row per code."""
    said = {True: "yes", False: "no", None: "the failure says"}
    rows = [
        (
            f'<a id="{row.code.lower()}"></a>`{row.code}`', row.title, f"`{row.error_code}`", f"`{row.error_class}`",
            said[row.retryable], str(row.http), str(row.jsonrpc), f"`{row.grpc}`", row.resolution,
        )
        for row in CODES.values()
    ]  # fmt: skip
    header = ("code", "what", "errorCode", "error_class", "retryable", "HTTP", "JSON-RPC", "gRPC", "what to do")
    return f"""{_MADE_BY.format(source="`core/errors.py`")}
# Errors

Every failure that leaves Interlock carries one of these {len(CODES)} codes, in one envelope, at every endpoint,
with the status that belongs to it there: HTTP, JSON-RPC or gRPC.

`retryable` says whether sending the same call again can help. Where it reads "the failure says", a tool marks its own
failure with `Failure(…, retryable=True)`; the default is no.

{_table(header, rows)}"""


# States


def states_page() -> str:
    """The life of a call: a diagram and a table, drawn from the moves there are."""
    arrows = "\n".join(f"    {state} --> {after}" for state, moves in MOVES.items() for after in moves)
    ends = "\n".join(f"    {state} --> [*]" for state in MOVES if state in TERMINAL)
    rows = [
        (f"`{state}`", ", ".join(f"`{after}`" for after in moves) or "none: it is an end", HISTORY.get(state, ""))
        for state, moves in MOVES.items()
    ]
    return f"""{_MADE_BY.format(source="`contract/standard/states.py`")}
# States of a call

A call is always in one of {len(MOVES)} states. There are no other moves than these; states that do not apply are
skipped, and {len(TERMINAL)} of them are ends that never change. `interlock calls show ID` prints the states a call has
been through. `needs_input` is in the table for a part that is still to come.

```mermaid
stateDiagram-v2
    direction LR
    [*] --> planned
{arrows}
{ends}
```

{_table(("state", "may become", "history reads"), rows)}"""


# Settings


def settings_page() -> str:
    """Every setting with its type, default and bounds."""
    rows: list[tuple[str, ...]] = []
    for name, info in Settings.model_fields.items():
        kind = _type(info)
        default = orjson.dumps(pydantic_core.to_jsonable_python(info.default)).decode()
        rows.append((f"`{name}`", kind, f"`{default}`", info.description or ""))
    return f"""{_MADE_BY.format(source="`settings.py`")}
# Settings

Settings live in `settings.toml` of the data directory. A variable `INTERLOCK_<NAME>` (in capitals:
`INTERLOCK_PAYLOAD_DAYS`) overrides the file, and an argument of `Interlock.open(path, name=value)` overrides both. In a
variable, a list of texts is written with commas (`iban,passport_no`), a list of objects and an object as JSON. A
variable replaces the whole value of the file.

A name that is not listed here is refused with its line, as is a value of another type: a misspelt safety setting must
not be ignored. A variable with another name may be another program's, so it stops nothing: a server logs a warning if
the name is nearly that of a setting. A value that holds a credential itself, such as an address with a password, is
refused too: name a file or a stored credential instead. A process reads its settings when it starts. `interlock config
show` prints those in effect and where each comes from, with credentials masked; `interlock config check` finds faults
before a start.

{_table(("setting", "type", "default", "what it does"), rows)}
```toml
audit = "batched"
payload_days = 30
redact_names = ["iban", "passport_no"]
```
"""


_KINDS: dict[Any, str] = {
    int: "whole number", float: "number", bool: "true or false", str: "text", Path: "path", Any: "value",
}  # fmt: skip


def _type(info: FieldInfo) -> str:
    """The type of a field in words, with its bounds."""
    return " ".join([_kind(info.annotation), *filter(None, map(_bound, info.metadata))])


def _kind(annotation: Any, *, many: bool = False) -> str:
    """A type in words; of several, if it is what a list holds."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        stated = next((one.json_schema for one in arguments[1:] if isinstance(one, pydantic.WithJsonSchema)), None)
        if choices := (stated or {}).get("enum"):
            return " or ".join(f"`{choice}`" for choice in choices)
        return _kind(arguments[0], many=many)
    if origin is tuple:
        return f"list of {_kind(arguments[0], many=True)}"
    if origin is dict:
        return "objects" if many else "object"
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_kind(one, many=many) for one in arguments if one is not NoneType)
    word = _KINDS.get(annotation, "object")
    assert word != "object" or issubclass(annotation, pydantic.BaseModel) or is_dataclass(annotation)
    return f"{word}s" if many else word


def _bound(rule: Any) -> str:
    names = (("ge", "at least"), ("le", "at most"), ("gt", "above"), ("lt", "below"))
    return ", ".join(f"{words} {getattr(rule, name)}" for name, words in names if hasattr(rule, name))


# Commands


def cli_page() -> str:
    """The command line, from click's own tree."""
    sections = "\n".join(_section(command, path) for path, command in _commands(command_line, ("interlock",)))
    return f"""{_MADE_BY.format(source="`interlock.cli`")}
# Command line

{sections}"""


def _commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path[-1])
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None and not found.hidden:
                yield from _commands(found, (*path, name))


def _section(command: click.Command, path: tuple[str, ...]) -> str:
    context = click.Context(command, info_name=" ".join(path))
    usage = " ".join([*path, *command.collect_usage_pieces(context)])
    options = [
        (" ".join(f"`{part}`" for part in declared[0].split("  ")), declared[1])
        for parameter in command.get_params(context)
        if isinstance(parameter, click.Option) and "--help" not in parameter.opts
        if (declared := parameter.get_help_record(context)) is not None
    ]
    parts = [f"{'#' * min(len(path) + 1, 4)} {' '.join(path)}\n", f"```text\n{usage}\n```\n", *_prose(command.help)]
    if options:
        parts.append(_table(("option", "what it does"), options))
    parts += _prose(command.epilog)
    return "\n".join(parts)


def _prose(text: str | None) -> Iterator[str]:
    """Paragraphs of a help text; those that click was told to leave alone are examples."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text or "")):
        if paragraph.startswith("\b"):
            yield f"```text\n{paragraph.removeprefix(chr(8)).strip(chr(10))}\n```\n"
        elif paragraph:
            yield " ".join(line.strip() for line in paragraph.splitlines()) + "\n"


# Conformance


def conformance_page(tests: Path) -> str:
    """The results of the public MCP conformance suites, as the tests compare them with each run."""
    source = "doors/conformance/expected.toml"
    expected: dict[str, Any] = tomllib.loads((tests / source).read_text())
    runs = [
        (suite, protocol, *counts) for protocol, all_ in expected["checks"].items() for suite, counts in all_.items()
    ]
    rows = [
        (suite, expected["suites"][suite]["clients"], f"`--protocol {protocol}`", f"{passed} of {of}")
        for suite, protocol, passed, of in runs
    ]
    failures = "\n".join(
        f"- {', '.join(f'`{scenario}`' for scenario in one['scenarios'])} ({' and '.join(one['clients'])} clients, "
        f"{', '.join(f'`--protocol {protocol}`' for protocol in one['protocols'])}): {' '.join(one['reason'].split())}"
        for one in expected["failures"]
    )
    return f"""{_MADE_BY.format(source=f"`tests/{source}`")}
# MCP conformance

The public conformance suites (npm `@modelcontextprotocol/conformance`) run against `interlock serve`, with the
everything-server of the official Python SDK as an upstream. It speaks both eras of the protocol and is added like this:

```
interlock upstream add mcp everything http://127.0.0.1:3001/mcp --no-prefix --allow-private --idempotency each
```

The tools that the scenarios of the tasks extension name are served by
[jobs.py](../../tests/support/mcp_servers/jobs.py), a second upstream, which is always spoken to in 2026-07-28: the
everything-server has no tasks. It is added with `--tasks relay`, because one scenario wants a client without tasks to
be refused; by default Interlock follows the task for such a client and answers with the result. The suites send no
token, so a proxy in front of the server adds one. A person agreed to the calls in advance (`interlock approvals
grant`), since nothing is known about most of the tools. `--protocol auto` is the default; the other two values force
one era on a server that speaks both, so that clients and server may be of different eras.
[test_conformance.py](../../tests/doors/conformance/test_conformance.py) compares every run with this page: in normal
tests with `auto`, in `./dev test --thorough` with all three.

{_table(("suite", "clients", "upstream", "checks passed"), rows)}
## Expected failures

{failures}

`server-sse-polling` makes no scored check, and warns: Interlock does not interrupt a stream for the client to resume.
"""


# Python


def python_page() -> str:
    """Every public name of the package, with an example that the tests run."""
    return f"""{_MADE_BY.format(source="the source and `docs/python_examples.txt`")}
# Python

Every public name of the package `interlock`, with its signature and an example. The examples are one program, from top
to bottom, and the tests run it. The [tutorial](../tutorial.md) explains the ideas; [test your own
tools](../how-to/testing.md) has the fixtures for pytest.

{python_reference.page()}"""


# Overlays


def overlay_page() -> str:
    """Every field of an overlay."""
    return f"""{_MADE_BY.format(source="the models of overlays and `docs/overlay_reference.py`")}
# Overlay

Every field of an overlay, with its type, its default and an example. [State facts about an upstream's
tools](../how-to/overlays.md) explains what overlays are for. A name that is not listed here is refused, and the message
has the closest one that is.

{overlay_reference.page(_type, _table)}"""


# Requirements


@dataclass(slots=True)
class Proof:
    """The tests that name one clause, and the rests that some of them leave open."""

    proven_in: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    supported_in: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    partly_in: dict[str, set[tuple[str, str]]] = field(default_factory=dict[str, set[tuple[str, str]]])

    @property
    def status(self) -> Literal["proven", "partly", "open"]:
        """Proven means that no test leaves a rest. One test that says `proves` does not outvote another's rest."""
        if self.partly_in:
            return "partly"
        if self.proven_in:
            return "proven"
        return "partly" if self.supported_in else "open"


def ledger(tests: Path) -> dict[str, list[tuple[str, str]]]:
    """Every clause by area: its id and what it demands."""
    areas: dict[str, list[tuple[str, str]]] = {}
    for path in sorted((tests.parent / "ledger").glob("*.toml")):
        clauses = tomllib.loads(path.read_text())["requirement"]
        areas[path.stem] = [(clause["id"], clause["must"]) for clause in clauses]
    return areas


def named_in_tests(tests: Path) -> dict[str, Proof]:
    """Every clause that a test names, with the tests."""
    found: dict[str, Proof] = {}
    for file, mark in marks.marks_of(tests, *marks.OF_CLAUSES):
        for clause in mark.names:
            proof = found.setdefault(clause, Proof())
            named = (file, mark.test)
            if mark.kind == "proves":
                proof.proven_in.add(named)
            elif mark.kind == "supports":
                proof.supported_in.add(named)
            else:
                proof.partly_in.setdefault(mark.rest or "not said", set()).add(named)
    return found


def requirements_page(tests: Path) -> str:
    """Which clauses are proven, which in part and what is left, and which are open."""
    named, areas = named_in_tests(tests), ledger(tests)
    unproven = Proof()
    counts = {area: Counter(named.get(id_, unproven).status for id_, _ in clauses) for area, clauses in areas.items()}
    total = sum(counts.values(), Counter[str]())
    summary = [
        (f"[{area.upper()}](#{area})", *(str(count[status]) for status in ("proven", "partly", "open")))
        for area, count in counts.items()
    ]
    summary.append(("all", *(f"**{total[status]}**" for status in ("proven", "partly", "open"))))
    sections = "\n".join(_area(area, clauses, named) for area, clauses in areas.items())
    return f"""{_MADE_BY.format(source="`ledger` and the marks of the tests")}
# Requirements

The ledger in [ledger](../../ledger) has {total.total()} clauses.

- **Proven**: every sentence of the clause is asserted by the tests listed, and no test leaves a rest.
- **Partly**: some of it is built and asserted. What is left is listed after "left".
- **Open**: no test names the clause, and nothing is claimed about it.

Tests name clauses with `pytest.mark.proves`, `pytest.mark.supports` (a part, which tests marked `proves` complete) and
`pytest.mark.part_of(..., rest=...)` (a part, and what no test asserts). One rest is enough to make a clause "partly".

{_table(("area", "proven", "partly", "open"), summary)}
{sections}"""


def _area(area: str, clauses: list[tuple[str, str]], named: dict[str, Proof]) -> str:
    rows = [(f"`{clause}`", *_judged(named.get(clause, Proof()))) for clause, _ in clauses]
    clauses_in = f"[The clauses](../../ledger/{area}.toml)."
    table = _table(("clause", "status", "tests, and what is left"), rows)
    return f'<a id="{area}"></a>\n\n## {area.upper()}\n\n{clauses_in}\n\n{table}'


def _judged(proof: Proof) -> tuple[str, str]:
    named = proof.proven_in.union(proof.supported_in, *proof.partly_in.values())
    files: dict[str, list[str]] = {}
    for file, test in sorted(named):
        files.setdefault(file, []).append(test)
    tests = "; ".join(f"[{file.removeprefix('tests/')}](../../{file}){_tests(names)}" for file, names in files.items())
    left = "; ".join(sorted(proof.partly_in))
    return proof.status, f"{tests}. **Left**: {left}" if left else tests


def _tests(names: list[str]) -> str:
    return "" if marks.WHOLE_MODULE in names else ": " + ", ".join(f"`{name}`" for name in names)


# Writing


def differences(root: Path = ROOT) -> list[str]:
    """The files on disk that differ from what would be written."""
    wanted = pages(root)
    there = {
        path.relative_to(root)
        for directory in (REFERENCE, SCHEMAS)
        for path in (root / directory).rglob("*")
        if path.is_file()
    }
    found = [f"{path} is not generated" for path in sorted(there - wanted.keys())]
    for path, content in wanted.items():
        if not (root / path).is_file():
            found.append(f"{path} is missing")
        elif (root / path).read_bytes() != content:
            found.append(f"{path} is out of date")
    return found


def main() -> int:
    if sys.argv[1:] not in ([], ["--check"]):
        print("usage: python -m docs.generate [--check]", file=sys.stderr)
        return 2
    if sys.argv[1:]:
        found = differences()
        for line in found:
            print(f"{line}; run ./dev docs", file=sys.stderr)
        return 1 if found else 0
    for path, content in pages().items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_bytes(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())

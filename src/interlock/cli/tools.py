"""`interlock tools`: the registered tools. Lists, searches, shows, exports and compares them.

Admission is in `admission`, deprecation and quarantine in `retirement`, exports in `tool_export`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import (
    LazyGroup,
    at_rest,
    at_server,
    looking,
    reading,
)
from interlock.cli.completion import tool_names
from interlock.cli.output import Output, Session

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.api.types import Reader
    from interlock.cli.remote import Server
    from interlock.cli.render import Cell, Page

Json = dict[str, Any]


@click.group(
    cls=LazyGroup,
    lazy={
        "add": "admission:add",
        "affordances": "window:affordances",
        "cost": "window:cost",
        "deprecate": "retirement:deprecate",
        "evaluate": "selection:evaluate",
        "export": "tool_export:export",
        "quarantine": "retirement:quarantine",
        "recommend": "selection:recommend",
        "release": "retirement:release",
        "schema": "window:schema",
        "search": "selection:search",
        "select": "selection:select",
        "test": "admission:test",
        "train-router": "selection:train_router",
    },
    short_help="The tools that agents may call: add, show, test, retire.",
)
def tools() -> None:
    """The tools that agents may call: add, show, test and retire them.

    \b
    interlock tools add my_tools.py
    interlock tools list
    """


# list and show


async def _list_at_server(server: Server, out: Output, /) -> int:
    from interlock.cli.tool_export import pages

    found = await pages(server, "/v1/tools", limit=500)
    documents = [
        {
            "tool": one["tool_id"],
            **{name: one[name] for name in ("version", "mutation_class", "state", "availability")},
            "description": str(one["description"]).splitlines()[0],
            **{name: one[name] for name in ("published_at", "known_pairs", "deprecation")},
        }
        for one in found
    ]
    return _answer_list(out, documents)


@tools.command("list", short_help="Every registered version, with its class and state.")
@at_server(_list_at_server)
@reading
def list_tools(reader: Reader, out: Output, /) -> int:
    """Every registered version, with its mutation class and its state.

    With --server: the newest version of every tool that your token lets you call.

    \b
    interlock tools list
    interlock tools list --json
    """
    from interlock.api.tool_listing import every_version

    return _answer_list(out, every_version(reader))


def _answer_list(out: Output, documents: list[Json]) -> int:
    def show(page: Page) -> None:
        if not documents:
            _show_none(page, out.session)
            return
        columns = ("tool", "version", "mutation_class", "state", "description")
        shown = [{**one, "state": _state(one["state"], one["availability"])} for one in documents]
        rows = [[str(document[column]) for column in columns] for document in shown]
        page.table(rows, ("tool", "version", "changes", "state", "what it does"))

    out.answer({"tools": documents}, show)
    return 0


def _show_none(page: Page, session: Session) -> None:
    """Tell where no tools were found: the reader may have meant another place."""
    if session.server is not None:
        page.line(f"no tools at {session.server} that your token lets you call")
        return
    page.line("no tools yet; add some: interlock tools add FILE.py")
    page.facts([("data directory", str(session.path.absolute()))])


async def _show_at_server(server: Server, out: Output, /, tool: str, standard: bool) -> int:
    from interlock.api.tool_listing import BESIDE_MANIFEST
    from interlock.cli.remote import part

    name, at, spec = tool.partition("@")
    answer = await server.get(f"/v1/tools/{part(name)}", version=spec if at else None)
    profiles = {name: answer.pop(name) for name in ("execution_profile", "permission_profile", "interface")}
    if standard:
        return out.answer_indented(profiles)
    document: Json = {
        "tool": answer.pop("tool_id"),
        **{name: answer.pop(name) for name in ("state", "availability", "deprecation", "timeout", "version")},
        "warnings": answer.pop("warnings", []),
        "input_schema": answer["parameters"],
        "output_schema": answer["result_schema"],
        "manifest": {name: value for name, value in answer.items() if name not in BESIDE_MANIFEST},
        "known_pairs": answer["known_pairs"],
    }
    return _answer_version(out, document)


def _show_at_rest(reader: Reader, out: Output, /, tool: str, standard: bool) -> int | None:
    if standard:
        return None
    from interlock.api.tool_listing import contract_at_rest, version_at_rest

    name, at, spec = tool.partition("@")
    version = version_at_rest(reader, out.session.path, name, spec if at else None)
    return _answer_version(out, contract_at_rest(reader, version))


@tools.command(short_help="The contract of a version, and its state.")
@at_server(_show_at_server)
@at_rest(_show_at_rest)
@click.argument("tool", metavar="TOOL[@RANGE]", shell_complete=tool_names)
@click.option("--standard", is_flag=True, help="The objects of the Agent Tool standard instead, as JSON.")
@looking
async def show(app: Interlock, out: Output, /, tool: str, standard: bool) -> int:
    """The contract of a version: its input and output, its effects, its time limits and its state.

    \b
    interlock tools show demo.post
    interlock tools show demo.post@^1
    interlock tools show demo.post --standard
    """
    from interlock.api.tool_listing import any_version, contract_document

    name, at, spec = tool.partition("@")
    version = await any_version(app, name, spec if at else None)
    if standard:
        from interlock.contract.standard.export import declaration, execution_profile, interface, permission_profile

        contract = version.contract
        objects: Json = {
            "declaration": declaration(contract, version.row.state).document(),
            "execution_profile": execution_profile(contract).document(),
            "permission_profile": permission_profile(contract).document(),
            "interface": interface(contract, enabled=app.enabled(version)).document(),
        }
        return out.answer_indented(objects)
    await app.measure()
    return _answer_version(out, contract_document(version, app.availability(version.row), app.latencies))


def _answer_version(out: Output, document: Json) -> int:
    out.answer(document, lambda page: _show_version(page, document))
    return 0


def _state(state: str, availability: str) -> str:
    """The state of a version for people: `unavailable` where it could be called if its upstream answered."""
    return "unavailable" if state in ("active", "deprecated") and availability != "AVAILABLE" else state


def _time(timeout: Json) -> str:
    """The time limits of a call, the timeout class of its tool, and the measured latency."""
    kind = f"{timeout['class']}, {timeout['class_source']}"
    words = f"{timeout['default_s']:g} s, at most {timeout['max_s']:g} s ({kind})"
    if "measured_calls" not in timeout:
        return words
    return f"{words}; of {timeout['measured_calls']:,} calls 99 % took at most {timeout['measured_p99_ms']:,.0f} ms"


def _key(manifest: Json) -> str:
    """Return the origin of the idempotency key of a call."""
    if manifest["mutation_class"] == "read_only":
        return "not needed"
    stated: Json = manifest.get("idempotency") or {}
    match stated.get("key"):
        case "request":
            return "the client's own identity of the request"
        case "each":
            return "not needed; every request is a new action, and nothing protects it from being sent again"
        case _:
            return "the caller's own, needed"


def _show_version(page: Page, document: Json) -> None:
    from interlock.cli.render import Text

    manifest: Json = document["manifest"]
    state = _state(document["state"], document["availability"])
    page.line(
        Text(f"{document['tool']}@{document['version']}", "bold"), f"   {state}", right=manifest["mutation_class"]
    )
    page.line(manifest["description"])
    page.line("")
    page.line(Text("takes", "bold"))
    page.table(_fields(document["input_schema"]), indent="  ")
    page.line(Text("gives", "bold"))
    page.table(_fields(document["output_schema"]), indent="  ")
    words = {"previews": "previewed", "compensable": "undone", "cancellable": "cancelled"}
    effects: list[Json] = manifest.get("effects") or []
    needs: list[str] = [*(manifest.get("required_permissions") or ()), *(manifest.get("required_scopes") or ())]
    facts: list[tuple[str, Cell]] = [
        *(("may change", f"{effect['operation']} {effect['resource']}") for effect in effects),
        ("can be", ", ".join(word for name, word in words.items() if manifest.get(name)) or "called"),
        ("time", _time(document["timeout"])),
        ("idempotency key", _key(manifest)),
        ("needs", ", ".join(needs) or "nothing"),
        ("known pairs", str(document["known_pairs"] or "none: nothing says what it must answer")),
    ]
    # A server tells callers neither where a tool comes from nor the digest of what runs it.
    facts += [(name, document[key]) for name, key in (("digest", "digest"), ("from", "origin")) if key in document]
    notice: Json = document["deprecation"] or {}
    facts.extend((name, str(value)) for name, value in notice.items() if value is not None)
    facts.extend(("warning", warning) for warning in document["warnings"])
    page.line(Text("contract", "bold"))
    page.facts(facts)


def _fields(schema: Json) -> list[list[str]]:
    from interlock.data.explain import type_words
    from interlock.data.schema import resolve_ref

    parts: Json = schema.get("properties") or {}
    if not parts:
        return [["nothing" if schema.get("type") == "object" and "properties" in schema else type_words(schema)]]
    required: list[str] = schema.get("required") or []
    rows: list[list[str]] = []
    for name, raw in parts.items():
        part = {**resolve_ref(schema, raw), **raw}
        default = f", {part['default']!r} unless given" if "default" in part else ", may be left out"
        examples: list[Any] = part.get("examples") or []
        example = f" (for example {examples[0]!r})" if examples else ""
        rows.append([name, type_words(part) + ("" if name in required else default), f"{_description(part)}{example}"])
    return rows


def _description(part: Json) -> str:
    return str(part.get("description", ""))


# diff


async def _diff_at_server(server: Server, out: Output, /, tool: str, old: str, new: str) -> int:
    from interlock.cli.remote import part

    return _answer_diff(out, await server.get(f"/v1/tools/{part(tool)}/diff", old=old, new=new))


def _diff_at_rest(reader: Reader, out: Output, /, tool: str, old: str, new: str) -> int:
    from interlock.api.comparisons import compare_versions
    from interlock.api.tool_listing import version_at_rest

    before, after = [version_at_rest(reader, out.session.path, tool, f"={version}") for version in (old, new)]
    return _answer_diff(out, compare_versions(before, after))


@tools.command(short_help="The changes for callers between two versions of a tool.")
@at_server(_diff_at_server)
@at_rest(_diff_at_rest)
@click.argument("tool", shell_complete=tool_names)
@click.argument("old")
@click.argument("new")
@looking
async def diff(app: Interlock, out: Output, /, tool: str, old: str, new: str) -> int:
    """The changes for callers between two versions of a tool, and the step up in version that they need.

    \b
    interlock tools diff demo.post 1.2.0 2.0.0
    """
    from interlock.api.comparisons import compare_versions
    from interlock.api.tool_listing import any_version

    before, after = [await any_version(app, tool, f"={version}") for version in (old, new)]
    return _answer_diff(out, compare_versions(before, after))


def _answer_diff(out: Output, document: Json) -> int:
    def show(page: Page) -> None:
        page.line(
            f"{document['tool']} {document['old']} → {document['new']}   a {document['level']} change",
            right=f"version steps up: {document['bump']}",
        )
        rows = [(one["level"], one["side"], one["pointer"] or "/", one["what"]) for one in document["changes"]]
        if rows:
            page.table(rows, ("breaks", "side", "where", "what"), indent="  ")
        else:
            page.line("  the schemas are the same for callers")

    out.answer(document, show)
    return 0

"""`interlock upstream` as operators type it, over real servers, files and modules."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest

from interlock import Caller, Failure, Field, Interlock, tool
from interlock.api.service import Service
from tests.support import postgres
from tests.support.cli import INTERLOCK, Cli
from tests.support.http_tools import RATE, READS, SHOP
from tests.support.upstream_servers import Answer, HttpServer, json_answer

Json = dict[str, Any]
SCRIPTED = (sys.executable, str(Path(__file__).parents[1] / "support" / "mcp_servers" / "scripted.py"))
NOTES = (sys.executable, "-m", "interlock.demo_server")
CHAIN = '''
from langchain_core.tools import tool


@tool
def shout(text: str) -> str:
    """Say a text in capitals, so that nobody misses it."""
    return text.upper()
'''


def add(cli: Cli, *options: str, server: tuple[str, ...] = NOTES) -> Json:
    return cli("upstream", "add", "mcp", "notes", *options, "--json", "--", *server).json


def states(report: Json) -> dict[str, str]:
    return {one["name"]: one["state"] for one in report["tools"]}


def classes(report: Json) -> dict[str, str]:
    return {one["name"]: one["mutation_class"] for one in report["tools"]}


async def test_era_questions_and_logs_of_a_server_are_options(fresh: Cli) -> None:
    refused = await asyncio.to_thread(fresh, "upstream", "add", "mcp", "notes", "--protocol", "modern", "--", *SCRIPTED)
    assert (refused.code, "no protocol version in common" in refused.err) == (1, True)
    await asyncio.to_thread(add, fresh, "--protocol", "handshake", "--no-questions", "--logs", server=SCRIPTED)
    async with Interlock.open(fresh.home, housekeeping=False) as app:
        config = (await app.upstreams.get("notes")).config
    assert (config["protocol"], config["questions"], config["logs"]) == ("handshake", False, True)


@pytest.mark.proves("REG-10")
def test_a_server_is_looked_at_added_called_probed_and_let_go(fresh: Cli) -> None:
    looked = add(fresh, "--dry-run")
    assert states(looked) == {"search": "offered", "note": "offered"}
    assert fresh.ask("upstream", "list") == {"upstreams": [], "services": []}
    # Its hint that a tool only reads is believed by nobody until somebody says so.
    assert set(classes(looked).values()) == {"write_irreversible"}
    hinted = add(fresh, "--accept-hints")
    assert classes(hinted) == {"search": "read_only", "note": "write_irreversible"}
    assert fresh.call("notes.search", {"word": "milk"})["structured_content"]["content"] == [
        {"type": "text", "text": ""}
    ]
    waits = fresh.call("notes.note", {"text": "milk"}, "--key", "note-1")
    assert waits["error"]["errorCode"] == "APPROVAL_REQUIRED"
    assert not (fresh.path / "notes.txt").exists()
    assert fresh.ask("upstream", "probe", "notes") == {"name": "notes", "state": "available", "reason": ""}
    shown = fresh.ask("upstream", "show", "notes")
    assert (shown["kind"], states(shown)) == ("mcp", {"search": "admitted", "note": "admitted"})
    assert "2 admitted" in fresh("upstream", "list").out
    refused = add(fresh)["error"]
    assert (refused["error_code"], refused["retryable"]) == ("E3411", False)
    assert "interlock upstream refresh notes" in refused["resolution"]
    taken = fresh("upstream", "add", "mcp", "notes", "--", *NOTES).err
    assert "another version" not in taken
    assert "interlock upstream refresh notes" in taken
    assert fresh.ask("upstream", "remove", "notes")["state"] == "removed"
    gone = fresh("upstream", "show", "notes")
    assert (gone.code, "there is no upstream `notes`" in gone.err) == (1, True)
    assert fresh.call("notes.search", {"word": "milk"})["status"] == "failed"


def test_one_bad_tool_does_not_spoil_the_rest(fresh: Cli) -> None:
    ended = fresh("upstream", "add", "mcp", "odd", "--", *SCRIPTED)
    assert ended.code == 0
    assert "6 admitted, 1 refused" in ended.out
    assert "INVALID_TOOL_SCHEMA" in ended.out
    (name,) = [name for name, state in states(fresh.ask("upstream", "show", "odd")).items() if state == "refused"]
    for typed in (name, f"odd.{name}"):
        error = fresh.call(typed)["error"]
        assert error["error_code"] == "E3101"
        assert f"the upstream odd offers {name}, which is refused: INVALID_TOOL_SCHEMA" in error["message"]
        assert error["resolution"] == "see interlock upstream show odd"
    assert "upstream" not in fresh.call("odd.neverthere")["error"]["message"]
    assert "A person is asked for every call of 6 of them" in ended.out


def test_a_changed_definition_is_kept_out_until_a_person_takes_it(fresh: Cli) -> None:
    server = fresh.path / "server.py"
    source = (Path(__file__).parents[2] / "src" / "interlock" / "demo_server.py").read_text()
    server.write_text(source)
    overlay = fresh.path / "overlay.yaml"
    overlay.write_text("tools: {search: {mutation_class: read_only}}")
    added = add(fresh, "--overlay", str(overlay), server=(sys.executable, str(server)))
    assert classes(added)["search"] == "read_only"
    server.write_text(source.replace("that contain a word", "that contain a word, and mail them"))
    looked = fresh("upstream", "refresh", "notes")
    assert "interlock upstream accept notes --reason" in looked.out
    shown = fresh("upstream", "show", "notes").out
    assert "Find the notes that contain a word.   →   Find the notes that contain a word, and mail them." in shown
    refused = fresh.call("notes.search", {"word": "milk"})
    assert refused["error"]["error_code"] == "E3210"
    unchanged = fresh.ask("upstream", "accept", "notes", "note", "--reason", "looked")
    assert "has not changed" in unchanged["error"]["message"]
    assert "--reason" in fresh("upstream", "accept", "notes").err
    (seen,) = [one["seen"] for one in fresh.ask("upstream", "show", "notes")["tools"] if one["state"] == "changed"]
    stale = fresh.ask("upstream", "accept", "notes", "--reason", "looked", "--shown", f"search={'0' * len(seen)}")
    assert stale["error"]["error_code"] == "E3103", "what was looked at is not what is there"
    accepted = fresh.ask("upstream", "accept", "notes", "--reason", "the mails are wanted", "--shown", f"search={seen}")
    assert states(accepted) == {"search": "admitted", "note": "admitted"}
    called = fresh.call("notes.search", {"word": "milk"})
    assert called["status"] != "failed"
    assert {one["name"]: one["version"] for one in fresh.ask("upstream", "show", "notes")["tools"]} == {
        "search": "1.1.0",
        "note": "1.0.0",
    }


def test_openapi_documents_and_langchain_modules(fresh: Cli) -> None:
    document = fresh.path / "shop.json"
    document.write_text(json.dumps(SHOP))
    looked = fresh.ask("upstream", "add", "openapi", "shop", "shop.json", "--dry-run", "--accept-hints")
    assert classes(looked) == {"listOrders": "read_only", "placeOrder": "write_irreversible"}
    document.write_text(json.dumps({**SHOP, "servers": []}))
    nowhere = fresh("upstream", "add", "openapi", "shop", "shop.json")
    assert (nowhere.code, "give --url" in nowhere.err) == (2, True)
    (fresh.path / "chain_tools.py").write_text(CHAIN)
    overlay = fresh.path / "chain.yaml"
    overlay.write_text("tools: {shout: {mutation_class: read_only}}")
    added = fresh.ask("upstream", "add", "langchain", "chain", "chain_tools", "--overlay", "chain.yaml")
    assert states(added) == {"shout": "admitted"}
    assert "HELLO" in json.dumps(fresh.call("chain.shout", {"text": "hello"}))


def test_what_goes_wrong_is_said_in_words_and_changes_nothing(fresh: Cli) -> None:
    (fresh.path / "broken.yaml").write_text("tools: {serch: {mutation_class: read_only}}")
    (fresh.path / "list.json").write_text("[]")
    rate: Json = {"name": "rate", "description": "The rate of a currency.", "path": "/", "input_schema": {}}
    (fresh.path / "rates.yaml").write_text(json.dumps({"tools": [{**rate, "methd": "GET"}]}))
    notes = ("upstream", "add", "mcp", "notes")
    for words, code, message in (
        ((*notes, "--", "no-such-program"), 1, "`no-such-program` cannot be found"),
        ((*notes, "--", "no-such-program"), 1, "install it, or give its whole path"),
        ((*notes, "--", sys.executable, "no_file.py"), 1, "No such file or directory"),
        ((*notes, "http://127.0.0.1:9/mcp"), 1, "--allow-private"),
        (("upstream", "add", "openapi", "shop", "no_file.json"), 2, "no such file: no_file.json"),
        (("upstream", "add", "http", "rates", "rates.yaml"), 1, "`urls` is missing"),
        (
            ("upstream", "add", "http", "rates", "rates.yaml"),
            1,
            "`tools.0.methd` is not a field there; did you mean `method`?",
        ),
        (("upstream", "show", "nobody"), 1, "interlock upstream list"),
        ((*notes, "--overlay", "broken.yaml", "--", *NOTES), 1, "serch"),
        ((*notes, "http://127.0.0.1:9/mcp"), 1, "private network"),
        (("upstream", "add", "openapi", "shop", "list.json"), 1, "an OpenAPI document is an object"),
        (("upstream", "add", "langchain", "chain", "no_such_module"), 1, "no_such_module"),
        (("upstream", "refresh", "nobody"), 1, "there is no upstream `nobody`"),
        ((*notes, "--env", "WRONG", "--", *NOTES), 2, "--env is written NAME=VALUE"),
        ((*notes, "--secret", "WRONG", "--", *NOTES), 2, "--secret is written WHERE=NAME"),
    ):
        ended = fresh(*words)
        assert (ended.code, message in ended.err) == (code, True), (words, ended.err)
    assert fresh("upstream", "list").out == "no upstreams yet; interlock upstream add --help\n"


def test_a_server_that_changed_unannounced_is_never_asked_and_the_first_refusal_says_what_to_do(fresh: Cli) -> None:
    server = fresh.path / "server.py"
    source = (Path(__file__).parents[2] / "src" / "interlock" / "demo_server.py").read_text()
    server.write_text(source)
    add(fresh, "--accept-hints", server=(sys.executable, str(server)))
    ran = fresh.path / "ran"
    changed = source.replace("that contain a word", "that contain a word, and mail them")
    changed = changed.replace('if name == "search"', f'open({str(ran)!r}, "a").close()\n    if name == "search"')
    server.write_text(changed)
    assert "ran" in changed
    # Nobody has refreshed it, and every command is a process of its own.
    refused = fresh.call("notes.search", {"word": "milk"})["error"]
    assert (refused["error_code"], ran.exists()) == ("E3210", False)
    assert "interlock upstream show notes" in refused["resolution"]
    assert states(fresh.ask("upstream", "show", "notes"))["search"] == "changed", "and it is there to be looked at"
    assert {one["tool"]: one["state"] for one in fresh.ask("tools", "list")["tools"]} == {
        "notes.search": "quarantined",
        "notes.note": "active",
    }
    again = fresh.call("notes.search", {"word": "milk"})["error"]
    assert (again["error_code"], ran.exists()) == ("E3210", False)
    assert "quarantine" in again["message"]
    assert "interlock upstream accept notes" in again["resolution"]
    fresh.ask("upstream", "accept", "notes", "--reason", "wanted")
    assert fresh.call("notes.search", {"word": "milk"})["status"] != "failed"
    assert ran.exists()


def test_interlock_behind_interlock_loses_no_tool(
    fresh: Cli, copied: Callable[[Path], Cli], tmp_path_factory: pytest.TempPathFactory
) -> None:
    behind = copied(tmp_path_factory.mktemp("behind"))
    offered = behind.ask("tools", "list")["tools"]
    serving = (*INTERLOCK, "serve", "--stdio")
    stores = postgres.given() and {**postgres.given(), "PYTHONPATH": os.environ["PYTHONPATH"]}
    environment = {"INTERLOCK_HOME": str(behind.home), **stores}
    given = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
    inner = fresh("upstream", "add", "mcp", "inner", *given, "--json", "--", *serving)
    tools = inner.json["tools"]
    served = {one["name"]: (one["state"], one["reason"]) for one in tools if one["name"].startswith("demo")}
    assert len(served) == len(offered)
    assert set(served.values()) == {("admitted", "")}


@pytest.mark.proves("REG-11")
async def test_tools_of_an_upstream_that_does_not_answer_are_listed_and_shown_as_unavailable(fresh: Cli) -> None:
    async def stands() -> tuple[set[str], str]:
        """The availability as documents tell it, and the line that a person sees."""
        (listed,) = (await asyncio.to_thread(fresh.ask, "tools", "list"))["tools"]
        shown = await asyncio.to_thread(fresh.ask, "tools", "show", "bank.rate")
        assert "unavailable" not in listed["description"]
        return {listed["availability"], shown["availability"]}, (await asyncio.to_thread(fresh, "tools", "list")).out

    async with HttpServer.open() as server:
        async with Interlock.open(fresh.home, housekeeping=False) as app:
            config: Json = {"urls": [server.url], "tools": [RATE], "allow_private": True}
            await app.upstreams.add("bank", "http", config, by=app.caller, overlay=READS)
        availability, line = await stands()
        assert (availability, "unavailable" in line) == ({"AVAILABLE"}, False)
        server.otherwise = lambda _: Answer(status=0)  # connections are closed without an answer
        assert (await asyncio.to_thread(fresh.ask, "upstream", "probe", "bank"))["state"] == "unavailable"
        availability, line = await stands()
        assert (availability, "unavailable" in line) == ({"UNAVAILABLE"}, True)
        asked = len(server.got)
        failed = await asyncio.to_thread(fresh.call, "bank.rate", {"of": "CHF"})
        assert failed["error"]["error_class"] == "dependency_unavailable"
        assert len(server.got) == asked, "the call fails at once; nobody was asked"
        server.otherwise = lambda _: json_answer({"rate": 1})
        assert (await asyncio.to_thread(fresh.ask, "upstream", "probe", "bank"))["state"] == "available"
        availability, line = await stands()
        assert (availability, "unavailable" in line) == ({"AVAILABLE"}, False)
        again = await asyncio.to_thread(fresh.call, "bank.rate", {"of": "CHF"})
        assert again["structured_content"] == {"rate": 1}


async def test_the_breaker_of_a_service_that_is_no_upstream_is_shown_where_operators_look(fresh: Cli) -> None:
    @tool(version="1.0.0", mutation_class="read_only", namespace="bank", external_service="ledger")
    async def fails(of: Annotated[str, Field(description="any text", examples=["a"])]) -> str:
        """Ask a service that is away."""
        if of == "a":
            return of
        raise Failure("E3502", "the ledger is away")

    async with Interlock.open(fresh.home, housekeeping=False) as app:
        await app.add(fails)
        for number in range(6):
            assert not (await app.call("bank.fails", {"of": f"C{number}"})).ok
        await app.gateway.services.settle()
        (service,) = (await asyncio.to_thread(fresh.ask, "upstream", "list"))["services"]
        assert (service["service"], service["state"]) == ("ledger", "open")
        assert service["retryAfterMs"] > 0
        assert "breaker of ledger: open; no call for " in (await asyncio.to_thread(fresh, "upstream", "list")).out
        shown = await asyncio.to_thread(fresh.ask, "upstream", "show", "ledger")
        assert (shown["kind"], shown["services"][0]["state"]) == ("external_service", "open")
        words = (await asyncio.to_thread(fresh, "upstream", "show", "ledger")).out
        assert "ledger is no upstream, but a service that tools name" in words
        assert "breaker of ledger: open; no call for " in words
        over_rest = await Service(app).upstreams.all(by=Caller(id="local:root", scopes=frozenset({"tools:admin"})))
        assert [(one["service"], one["state"]) for one in over_rest["services"]] == [("ledger", "open")]
        findings = (await asyncio.to_thread(fresh.ask, "doctor"))["findings"]
        (found,) = [one for one in findings if one["name"] == "services"]
        assert found["status"] == "attention"
        assert "ledger is open: E3502" in found["what"]


async def test_the_breakers_of_an_upstream_are_shown(fresh: Cli) -> None:
    async with HttpServer.open() as server, Interlock.open(fresh.home, housekeeping=False) as app:
        config: Json = {"urls": [server.url], "tools": [RATE], "allow_private": True}
        for name in ("bank", "bank2"):
            await app.upstreams.add(name, "http", config, by=app.caller, overlay=READS)
        assert (await asyncio.to_thread(fresh.ask, "upstream", "show", "bank"))["services"] == []
        server.otherwise = lambda _: Answer(status=503)
        for number in range(6):
            assert not (await app.call("bank.rate", {"of": f"C{number}"})).ok
        await app.gateway.services.settle()
        services = (await asyncio.to_thread(fresh.ask, "upstream", "show", "bank"))["services"]
        assert [(one["service"].partition(" ")[0], one["state"]) for one in services] == [("bank", "open")] * len(
            services
        )
        assert services
        assert services[0]["retryAfterMs"] > 0
        shown = (await asyncio.to_thread(fresh, "upstream", "show", "bank")).out
        assert f"breaker of {services[0]['service']}: open; no call for " in shown
        assert (await asyncio.to_thread(fresh.ask, "upstream", "show", "bank2"))["services"] == []

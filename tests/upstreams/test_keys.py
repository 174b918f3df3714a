"""Where the idempotency key of an upstream's tool comes from: the caller, the client's request, or nowhere."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import httpx2
import mcp_types as types
import orjson
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from interlock import Caller, Interlock
from interlock.audit.chain import verify
from interlock.data.schema import Json
from tests.support import forked
from tests.support.calls import code, records
from tests.support.identities import did_of
from tests.support.wires import Wires, wired

REVIEWER = Caller(id="local:reviewer", groups=frozenset({"approvers"}))
MODERN = "2026-07-28"
ERAS = pytest.mark.parametrize("mode", ["legacy", MODERN])
ROOT = Path(__file__).parents[2]


class Notes:
    """The notes server behind Interlock, and the file it writes to."""

    def __init__(self, app: Interlock, wires: Wires, file: Path) -> None:
        self.app = app
        self.wires = wires
        self.file = file

    @property
    def lines(self) -> list[str]:
        return self.file.read_text().splitlines() if self.file.exists() else []

    @asynccontextmanager
    async def client(self, mode: str, **headers: str) -> AsyncGenerator[Client]:
        sent = {**self.wires.http.headers, **headers}
        url = f"{self.wires.http.base_url}/mcp".replace("//mcp", "/mcp")
        bearer = {name: sent[name] for name in ("authorization", *headers)}
        async with httpx2.AsyncClient(headers=bearer, timeout=60) as http:
            transport = streamable_http_client(url, http_client=http)
            async with Client(transport, mode=mode, read_timeout_seconds=20) as client:
                yield client

    async def rest(self, text: str, **headers: str) -> Json:
        return await self.rest_of("add", {"text": text}, **headers)

    async def rest_of(self, tool: str, arguments: Json, **headers: str) -> Json:
        body = {"tool_id": f"notes.{tool}", "parameters": arguments}
        return (await self.wires.http.post("/v1/tools/invoke", json=body, headers=headers)).json()


@asynccontextmanager
async def notes(home: Path, idempotency: str, *, approved: bool = True, **tools: Json) -> AsyncGenerator[Notes]:
    """Serve the notes with keys from there; calls of `bot` whose text begins with m are approved in advance."""
    file = home.parent / "notes.txt"
    async with Interlock.open(home, housekeeping=False) as app, wired(app) as wires:
        command = [*forked.python(), "-m", "tests.support.mcp_servers.notes", str(file)]
        config: Json = {"command": command, "cwd": str(ROOT)}
        tools = {"read": {"mutation_class": "read_only"}, **tools}
        overlay: Json = {"defaults": {"idempotency": idempotency}, "tools": tools}
        report = await app.upstreams.add("notes", "mcp", config, by=app.caller, overlay=overlay)
        assert {one.state for one in report.tools} == {"admitted"}, report.tools
        if approved:
            number = {"minimum": 1, "maximum": 99}
            bounds: Json = {
                "add": {"text": "m*"},
                "change": {"number": number, "text": "m*"},
                "remove": {"number": number},
            }
            for who, tool in product((did_of("bot"), app.caller.acting), bounds):
                await app.standing_approvals.grant(
                    f"notes.{tool}", by=REVIEWER, caller=who, tenant="local", arguments=bounds[tool], uses=100,
                    expires_ms=app.clock.now_ms() + 3_600_000,
                )  # fmt: skip
        yield Notes(app, wires, file)


def schema_of(listed: types.ListToolsResult, name: str = "notes-add") -> Json:
    return next(one.input_schema for one in listed.tools if one.name == name)


def words(result: types.CallToolResult) -> str:
    return "".join(block.text for block in result.content if isinstance(block, types.TextContent))


def the_record(app: Interlock) -> Json:
    """The last closing record of a call of `notes.add`."""
    return [one for one in records(app) if one.get("toolId") == "notes.add"][-1]


@pytest.mark.proves("IDEM-01")
@ERAS
async def test_a_key_is_the_callers_unless_the_operator_says_otherwise(home: Path, mode: str) -> None:
    async with notes(home, "caller") as world, world.client(mode) as client:
        schema = schema_of(await client.list_tools())
        assert "idempotency_key" in schema["required"]
        refused = await client.call_tool("notes-add", {"text": "milk"})
        assert (refused.is_error, "E3307" in words(refused), world.lines) == (True, True, [])
        for _ in range(2):
            done = await client.call_tool("notes-add", {"text": "milk", "idempotency_key": "one"})
            assert done.structured_content == {"number": 1}
        assert world.lines == ["milk"]
        assert "keyFrom" not in the_record(world.app)


@pytest.mark.proves("IDEM-01")
async def test_the_id_of_a_request_within_its_session_is_its_key(home: Path) -> None:
    """Sent twice it is done once; another request of the session, or of another session, is another action."""
    async with notes(home, "request") as world:
        async with world.client("legacy") as client:
            schema = schema_of(await client.list_tools())
            assert set(schema["properties"]) == {"text"}
            for number in (1, 2):
                done = await client.call_tool("notes-add", {"text": "milk"})
                assert done.structured_content == {"number": number}, words(done)
        record = the_record(world.app)
        assert record["keyFrom"] == "request"
        session, request = record["native"]["mcp_session_id"], record["native"]["jsonrpc_request_id"]
        assert record["idempotencyKey"] == f"mcp:{session}:{request}"
        first, second = await _raw_session(world), await _raw_session(world)
        for session, ident, expected in ((first, 7, 3), (first, 7, 3), (first, "7", 4), (second, 7, 5), (first, 7, 3)):
            answer = await _raw_call(world, session, ident, {"text": "milk"})
            assert answer["result"]["structuredContent"] == {"number": expected}, answer
        assert the_record(world.app)["replayOf"]
        other = await _raw_call(world, first, 7, {"text": "more milk"})
        assert "E3306" in other["result"]["content"][0]["text"], "one id, two actions"
        assert world.lines == ["milk"] * 5


async def _raw_session(world: Notes) -> str:
    about = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}
    body = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": about}
    answer = await world.wires.http.post("/mcp", json=body, headers=ACCEPT)
    headers = {**ACCEPT, "mcp-session-id": answer.headers["mcp-session-id"]}
    note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    await world.wires.http.post("/mcp", json=note, headers=headers)
    return answer.headers["mcp-session-id"]


ACCEPT = {"accept": "application/json, text/event-stream"}


async def _raw_call(world: Notes, session: str, ident: int | str, arguments: Json, tool: str = "add") -> Json:
    params = {"name": f"notes-{tool}", "arguments": arguments}
    body = {"jsonrpc": "2.0", "id": ident, "method": "tools/call", "params": params}
    headers = {**ACCEPT, "mcp-session-id": session, "mcp-protocol-version": "2025-11-25"}
    answer = await world.wires.http.post("/mcp", json=body, headers=headers)
    line = next(one for one in answer.text.splitlines() if one.startswith(("data: {", "{")))
    return orjson.loads(line.removeprefix("data: "))


@pytest.mark.proves("IDEM-01")
async def test_a_request_without_a_session_is_refused_and_told_what_to_send(home: Path) -> None:
    async with notes(home, "request") as world:
        async with world.client(MODERN) as client:
            assert set(schema_of(await client.list_tools())["properties"]) == {"text"}
            refused = await client.call_tool("notes-add", {"text": "milk"})
            assert refused.is_error
            assert "Idempotency-Key: order-17" in words(refused)
            meta: Any = {"interlock/key": "in-meta"}
            for _ in range(2):
                done = await client.call_tool("notes-add", {"text": "milk"}, meta=meta)
                assert done.structured_content == {"number": 1}
        for mode in (MODERN, "legacy"):
            async with world.client(mode, **{"idempotency-key": "in-header"}) as client:
                done = await client.call_tool("notes-add", {"text": "milk"})
                assert done.structured_content == {"number": 2}
        assert world.lines == ["milk", "milk"]


@pytest.mark.proves("IDEM-01")
async def test_over_rest_the_header_is_the_key_and_nothing_else_is_made_up(home: Path) -> None:
    async with notes(home, "request") as world:
        refused = await world.rest("milk")
        assert (refused["error"]["error_code"], "Idempotency-Key" in refused["error"]["message"]) == ("E3307", True)
        for number, key in ((1, "a"), (1, "a"), (2, "b")):
            done = await world.rest("milk", **{"idempotency-key": key})
            assert done["result"]["structuredContent"] == {"number": number}
        for wire in ("jsonrpc", "grpc"):
            heard = await world.wires.call(wire, "notes.add", {"text": "milk"})
            assert heard.envelope is not None
            assert heard.envelope["error_code"] == "E3307"


async def test_over_stdio_the_process_is_the_session(home: Path) -> None:
    """A client that is started again counts its requests from the beginning; they are other requests all the same."""
    async with notes(home, "request") as world:
        program, *before = forked.python()
        arguments = [*before, "-m", "interlock.cli", "serve", "--stdio"]
        command = StdioServerParameters(
            command=program, args=arguments, env={**os.environ, "INTERLOCK_HOME": str(home)}
        )
        for number in (1, 2):
            async with Client(command, mode="legacy", read_timeout_seconds=60) as client:
                assert set(schema_of(await client.list_tools())["properties"]) == {"text"}
                done = await client.call_tool("notes-add", {"text": "milk"})
                assert done.structured_content == {"number": number}, words(done)
        assert world.lines == ["milk", "milk"]


@ERAS
async def test_each_request_is_an_action_and_the_record_says_that_nothing_protects_it(home: Path, mode: str) -> None:
    async with notes(home, "each") as world, world.client(mode) as client:
        assert set(schema_of(await client.list_tools())["properties"]) == {"text"}
        for number in (1, 2):
            done = await client.call_tool("notes-add", {"text": "milk"})
            assert done.structured_content == {"number": number}, words(done)
        record = the_record(world.app)
        assert (record["resendProtection"], record.get("idempotencyKey")) == ("none", None)
        (intent,) = records(world.app, record["call"], "intent")
        assert intent["resendProtection"] == "none"
        read = await client.call_tool("notes-read", {"number": 1})
        assert read.structured_content == {"text": "milk"}
        # A key that a caller sends counts all the same.
        for _ in range(2):
            done = await world.rest("milk", **{"idempotency-key": "sent"})
            assert done["result"]["structuredContent"] == {"number": 3}
        assert "resendProtection" not in the_record(world.app)
        assert world.lines == ["milk"] * 3
        assert verify(world.app.home).faults == ()


@pytest.mark.proves("IDEM-01")
async def test_tools_of_one_upstream_may_have_their_keys_from_different_places(home: Path) -> None:
    """The upstream says `each`; one of its tools says `caller`, another `request`. The same over MCP and REST."""
    async with notes(home, "each", add={"idempotency": "caller"}, change={"idempotency": "request"}) as world:
        world.file.write_text("m\n" * 9)
        async with world.client("legacy") as client:
            listed = await client.list_tools()
        takes = {name: set(schema_of(listed, f"notes-{name}")["properties"]) for name in ("add", "change", "remove")}
        keyed = {"add": {"text", "idempotency_key"}, "change": {"number", "text"}, "remove": {"number"}}
        assert takes == keyed
        session = await _raw_session(world)
        milk: Json = {"number": 1, "text": "milk"}

        async def over_mcp(ident: int, tool: str, arguments: Json) -> str:
            answer = await _raw_call(world, session, ident, arguments, tool)
            about: Json = answer["result"]["_meta"]
            failed: Json | None = about.get("interlock/error")
            return str(about["interlock/call"]["source"] if failed is None else failed["error_code"])

        async def over_rest(tool: str, arguments: Json, **headers: str) -> str:
            answer = await world.rest_of(tool, arguments, **headers)
            failed: Json | None = answer.get("error")
            return str(answer["source"] if failed is None else failed["error_code"])

        over_wires = [
            # `caller`: the id of a request is no key, a key of the caller is.
            await over_mcp(1, "add", {"text": "milk"}),
            await over_mcp(2, "add", {"text": "milk", "idempotency_key": "one"}),
            await over_mcp(3, "add", {"text": "milk", "idempotency_key": "one"}),
            # `request`: the id of the request within its session.
            await over_mcp(4, "change", milk),
            await over_mcp(4, "change", milk),
            await over_mcp(5, "change", milk),
            # `each`: nothing.
            await over_mcp(6, "remove", {"number": 9}),
            await over_mcp(6, "remove", {"number": 8}),
        ]
        assert over_wires == ["E3307", "compute", "replay", "compute", "replay", "compute", "compute", "compute"]
        assert (len(world.lines), world.lines[0]) == (8, "milk")
        key = {"idempotency-key": "two"}
        over_wires = [
            await over_rest("add", {"text": "milk"}),
            await over_rest("add", {"text": "milk"}, **key),
            await over_rest("add", {"text": "milk"}, **key),
            await over_rest("change", milk),
            await over_rest("change", milk, **key),
            await over_rest("change", milk, **key),
            await over_rest("remove", {"number": 9}),
            await over_rest("remove", {"number": 8}),
        ]
        assert over_wires == ["E3307", "compute", "replay", "E3307", "compute", "replay", "compute", "compute"]
        assert len(world.lines) == 7
        removed = [one for one in records(world.app) if one.get("toolId") == "notes.remove"]
        assert [one["resendProtection"] for one in removed] == ["none"] * 4


@pytest.mark.parametrize("idempotency", ["request", "each"])
async def test_a_call_that_waited_goes_on_when_it_is_sent_again(home: Path, idempotency: str) -> None:
    """The second request is another one; it finds the ticket by its input, and the ticket lets one call run."""
    async with notes(home, idempotency) as world, world.client("legacy") as client:
        pending = await client.call_tool("notes-add", {"text": "bread"})
        again = await client.call_tool("notes-add", {"text": "bread"})
        (ticket,) = await world.app.approvals.list()
        assert ticket.id in words(pending)
        assert ticket.id in words(again)
        await world.app.approvals.approve(ticket.id, by=REVIEWER)
        done = await client.call_tool("notes-add", {"text": "bread"})
        assert done.structured_content == {"number": 1}, words(done)
        # The next request is a new action, and a person is asked anew.
        pending = await client.call_tool("notes-add", {"text": "bread"})
        (second,) = await world.app.approvals.list()
        assert second.id in words(pending)
        assert world.lines == ["bread"]


@pytest.mark.parametrize("idempotency", ["request", "each"])
async def test_a_call_that_was_continued_meanwhile_is_answered_once_with_what_came_of_it(
    home: Path, idempotency: str
) -> None:
    async with notes(home, idempotency) as world, world.client("legacy") as client:
        await client.call_tool("notes-add", {"text": "bread"})
        (ticket,) = await world.app.approvals.list()
        await world.app.approvals.approve(ticket.id, by=REVIEWER)
        (continued,) = await world.app.approved_calls.resume_all()
        assert continued.ok, continued.error
        told = await client.call_tool("notes-add", {"text": "bread"})
        assert told.structured_content == {"number": 1}, words(told)
        assert the_record(world.app)["replayOf"] == continued.invocation_id
        await client.call_tool("notes-add", {"text": "bread"})
        (second,) = await world.app.approvals.list()
        await world.app.approvals.deny(second.id, by=REVIEWER)
        refused = await client.call_tool("notes-add", {"text": "bread"})
        assert "E3209" in words(refused)
        assert world.lines == ["bread"]
        assert verify(world.app.home).faults == ()


@pytest.mark.parametrize("wire", ["rest", "jsonrpc", "grpc", "mcp-modern", "mcp-legacy"])
async def test_an_empty_key_is_none(home: Path, wire: str) -> None:
    async with notes(home, "caller") as world:
        refused = await world.wires.call(wire, "notes.add", {"text": "milk"}, "")
        assert refused.envelope is not None
        assert refused.envelope["error_code"] == "E3307"
        assert "missing" in refused.envelope["message"]
        assert world.lines == []
        assert code(await world.app.call("notes.add", {"text": "milk"}, key="")) == "E3307"


async def test_only_tools_of_upstreams_may_have_keys_from_elsewhere(home: Path) -> None:
    from interlock.contract.contract import parse_contract
    from interlock.core.errors import Failure
    from tests.sample import increment

    document = {**increment.manifest.document(), "idempotency": {"key": "each"}}
    with pytest.raises(Failure) as refused:
        parse_contract(document)
    assert "tools of an upstream" in refused.value.message

"""By which ids others know a call: read back from its record, as the native side reported them."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from interlock import Interlock
from interlock.contract.standard import ToolExternalMapping
from interlock.registry.source import load
from tests.support.calls import admit
from tests.support.mcp_upstreams import SCRIPTED, sdk_server
from tests.support.programs import NAMED, written
from tests.support.upstream_servers import HttpServer, json_answer

Json = dict[str, Any]
REST = "A2A and browsers, which have no adapter yet"
OPENAPI: Json = {
    "openapi": "3.1.0",
    "info": {"title": "Shop", "version": "1"},
    "paths": {
        "/items/{id}": {
            "get": {
                "operationId": "getItem",
                "summary": "One item of the shop.",
                "security": [{"key": []}],
                "parameters": [
                    {"name": "id", "in": "path", "required": True, "description": "which", "example": "7",
                     "schema": {"type": "string"}},
                ],
                "responses": {"200": {"description": "it", "content": {"application/json": {
                    "schema": {"type": "object"}}}}},
            }
        }
    },
    "components": {"securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "x-key"}}},
}  # fmt: skip


def mapping(app: Interlock) -> Json:
    """The one mapping in the newest record of a call, which the standard accepts as it is."""
    rows = app.journal.reader.all("SELECT body FROM journal WHERE kind = 'closed' ORDER BY seq DESC LIMIT 1")
    record: Json = orjson.loads(rows[0][0])
    (found,) = record["externalMappings"]
    assert ToolExternalMapping.parse(found).document() == found
    assert record["call"], "our own id stands beside it"
    return found


@pytest.mark.proves("EXEC-10")
@pytest.mark.part_of("CONTRACT-20", rest=REST)
@pytest.mark.parametrize(("options", "protocol"), [((), "2025-06-18"), (("--modern",), "2026-07-28")])
async def test_a_call_of_an_mcp_server_over_pipes(tmp_path: Path, options: tuple[str, ...], protocol: str) -> None:
    command = [sys.executable, "-I", "-S", str(SCRIPTED), "--failing", *options]
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        await app.upstreams.add("desk", "mcp", {"command": command, "accept_hints": True}, by=app.caller)
        numbers: list[int] = []
        for _ in range(2):
            answered = await app.call("desk.echo", text="a")
            # What the server answered is in the result as it came, and by AUDIT-02 not in the record.
            assert answered.value["structuredContent"] == {"text": "a"}
            assert "seen" in answered.value["_meta"]
            await app.journal.commit(lambda _: None)
            found = mapping(app)
            numbers.append(found.pop("jsonrpc_request_id"))
            assert found == {
                "schema_version": "0.2.0", "kind": "mcp", "server_id": "desk", "method": "tools/call",
                "tool_name": "echo", "mcp_protocol_version": protocol, "mcp_session_id": None, "isError": False,
            }  # fmt: skip
        assert numbers[1] > numbers[0] > 0
        failed = await app.call("desk.moody", word="ada@example.com")
        assert failed.error is not None
        assert failed.error.details is not None
        assert failed.error.details["structuredContent"] == {"why": 7}
        assert failed.error.details["_meta"] == {"example.org/case": "12 [EMAIL_REDACTED]"}, "kept, and cleaned"
        await app.journal.commit(lambda _: None)
        found = mapping(app)
        assert (found["tool_name"], found["isError"]) == ("moody", True)
        assert found["jsonrpc_request_id"] > numbers[1]


@pytest.mark.part_of("CONTRACT-20", rest=REST)
async def test_a_call_of_an_mcp_server_in_a_session_of_its_own(tmp_path: Path) -> None:
    async with sdk_server() as url, Interlock.open(tmp_path, housekeeping=False) as app:
        config = {"url": url, "allow_private": True, "protocol": "handshake"}
        tools = {"echo": {"mutation_class": "read_only", "result_schema": {"type": "object"}}}
        await app.upstreams.add("desk", "mcp", config, by=app.caller, overlay={"tools": tools})
        await app.call("desk.echo", text="a")
        await app.journal.commit(lambda _: None)
        assert len(mapping(app)["mcp_session_id"]) >= 16


@pytest.mark.part_of("CONTRACT-20", rest=REST)
async def test_a_call_of_an_openapi_operation(tmp_path: Path) -> None:
    async with HttpServer.open() as server, Interlock.open(tmp_path, housekeeping=False) as app:
        server.otherwise = lambda got: json_answer(OPENAPI if got.path == "/openapi.json" else {"id": "7"})
        await app.secrets.set("shop/key", "s3cret", by="test")
        config: Json = {
            "openapi": f"{server.url}/openapi.json", "urls": [server.url], "allow_private": True, "accept_hints": True,
            "auth": {"kind": "header", "secret": "shop/key", "name": "x-key"},
        }  # fmt: skip
        report = await app.upstreams.add("shop", "openapi", config, by=app.caller)
        (offered,) = report.tools
        assert offered.state == "admitted", offered.why
        result = await app.call(offered.address, id="7")
        assert result.ok, result.error
        await app.journal.commit(lambda _: None)
        assert mapping(app) == {
            "schema_version": "0.2.0", "kind": "openapi", "operation_id": "getItem", "method": "GET",
            "path": "/items/{id}", "server_url": server.url, "security_scheme_refs": ["key"],
        }  # fmt: skip


@pytest.mark.part_of("CONTRACT-20", rest=REST)
async def test_a_run_of_a_program(tmp_path: Path) -> None:
    _, programs = load(written(tmp_path / "programs.json", NAMED["option"], NAMED["exits"], NAMED["segv"]))
    async with Interlock.open(tmp_path / "home", housekeeping=False) as app:
        await admit(app, *programs)
        assert (await app.call("prog.option", text="a")).unwrap() == "--name=a"
        await app.journal.commit(lambda _: None)
        words = hashlib.sha256("\0".join(("printf", "--", "%s", "--name=a")).encode()).hexdigest()
        found = mapping(app)
        assert (found["kind"], found["command_id"], found["argv_ref"]) == ("cli", "printf", f"sha256:{words}")
        assert (found["cwd_ref"], found["env_policy_ref"]) == ("/tmp", "profile:prog.option@1.0.0")
        assert found["sandbox_ref"].startswith("tier-")
        await app.call("prog.exits", status=3)
        await app.journal.commit(lambda _: None)
        assert mapping(app)["exit_code"] == 3
        await app.call("prog.segv")
        await app.journal.commit(lambda _: None)
        assert 11 in (mapping(app)["signal"], (mapping(app)["exit_code"] or 0) - 128)


@pytest.mark.part_of("CONTRACT-20", rest=REST)
async def test_a_call_of_a_function_of_somebody_elses_library(tmp_path: Path) -> None:
    overlay = {"tools": {"shout": {"mutation_class": "read_only"}}}
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        module = {"module": "tests.support.langchain_tools"}
        await app.upstreams.add("chain", "langchain", module, by=app.caller, overlay=overlay)
        assert (await app.call("chain.shout", {"text": "a"})).ok
        await app.journal.commit(lambda _: None)
        assert mapping(app) == {"schema_version": "0.2.0", "kind": "function_calling", "function_name": "shout"}


@pytest.mark.part_of("CONTRACT-20", rest=REST)
async def test_a_call_that_a_model_made_keeps_the_ids_that_its_provider_gave(app: Interlock) -> None:
    native = {
        "kind": "function_calling", "tool_call_id": "call_9", "function_name": "demo__add", "tool_choice": "auto",
        "parallel_tool_calls": True, "strict": False, "defer_loading": False,
    }  # fmt: skip
    result = await app.call("demo.add", {"a": 1}, native=native)
    await app.journal.commit(lambda _: None)
    rows = app.journal.reader.all("SELECT body FROM journal WHERE call = ?", (result.invocation_id,))
    record: Json = orjson.loads(rows[-1][0])
    assert record["native"] == native
    # What telemetry knows the same call by.
    assert (record["traceId"], record["latencyMs"], record["outputSummary"]["bytes"]) == (
        result.trace_id, result.metadata["latency_ms"], 1,
    )  # fmt: skip

"""The MCP door, as clients that others wrote see it: both eras, over HTTP and stdio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import mcp_types as types
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp import Client, MCPError
from mcp.server.mcpserver import MCPServer

from interlock import Interlock, tool
from interlock.api import mcp_names
from interlock.api.service import Service
from interlock.doors.mcp import METADATA_PATH, McpDoor
from tests import sample
from tests.sample import TOOLS
from tests.support.calls import records, until, use_policy
from tests.support.identities import OPERATOR
from tests.support.mcp import AGENT, DOOR, OTHER, OWN, PATIENCE_S, REVIEWER, VALUES, World, serving, stdio, text
from tests.support.mcp import world as world
from tests.thorough import examples

ERAS = pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])


@tool(version="1.0.0", mutation_class="read_only", namespace="shapes")
async def added_later(x: sample.Number) -> int:
    """A tool that is registered while clients are connected."""
    return x


# The handshake and its absence


@DOOR
@pytest.mark.parametrize("version", ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "1999-01-01"])
async def test_the_handshake_settles_on_a_version_both_know(world: World, version: str) -> None:
    headers = {"authorization": f"Bearer {await world.token()}", "accept": "application/json, text/event-stream"}
    hello = {"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    async with httpx2.AsyncClient(headers=headers, timeout=PATIENCE_S) as http:
        answer = await http.post(world.url, json={"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello})
    told = orjson.loads(answer.text.partition("data: ")[2])["result"]
    assert told["protocolVersion"] == (version if version > "2000" else "2025-11-25")
    assert told["serverInfo"]["name"] == "interlock"
    assert told["capabilities"]["tools"] == {"listChanged": True}


@DOOR
async def test_the_modern_era_needs_no_handshake_and_refuses_versions_it_does_not_know(world: World) -> None:
    async with world.client("auto") as client:
        assert client.session.protocol_version == "2026-07-28"
        assert client.server_capabilities.tools == types.ToolsCapability(list_changed=True)
    headers = {
        "authorization": f"Bearer {await world.token()}",
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": "2099-01-01",
        "mcp-method": "tools/list",
    }
    meta: dict[str, Any] = {
        "io.modelcontextprotocol/protocolVersion": "2099-01-01",
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    async with httpx2.AsyncClient(headers=headers, timeout=PATIENCE_S) as http:
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": meta}}
        answer = await http.post(world.url, json=body)
    assert answer.status_code == 400
    data = answer.json()["error"]["data"]
    assert (data["supported"], data["requested"]) == (["2026-07-28"], "2099-01-01")
    assert (data["errorCode"], data["error_code"]) == ("INVALID_INPUT", "E3004")


# Lists


@DOOR
@ERAS
async def test_a_caller_is_shown_the_tools_they_may_use_and_what_was_admitted_of_them(world: World, mode: str) -> None:
    async with world.client(mode, await world.token(["demo.*"])) as client:
        tools = {one.name: one for one in (await client.list_tools()).tools}
    assert sorted(tools) == [f"demo-{one}" for one in ("add", "echo", "increment", "send", "shout", "unsteady")]
    add, send = tools["demo-add"], tools["demo-send"]
    assert add.description == "Add two whole numbers."
    assert set(add.input_schema["properties"]) == {"a", "b"}
    assert add.annotations is not None
    assert send.annotations is not None
    assert (add.annotations.read_only_hint, add.annotations.destructive_hint) == (True, False)
    assert (send.annotations.read_only_hint, send.annotations.destructive_hint) == (False, True)
    assert add.meta is not None
    assert add.meta["interlock/address"] == "demo.add"
    assert (add.meta["interlock/version"], add.meta["interlock/class"]) == ("1.0.0", "read_only")


@DOOR
@ERAS
async def test_a_list_comes_page_by_page(world: World, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlock.doors.mcp.listing.PAGE", 2)
    found: list[str] = []
    async with world.client(mode) as client:
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            assert len(page.tools) <= 2
            found += [one.name for one in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                break
    assert len(found) == len(set(found)) == len(TOOLS) + len(OWN)


@DOOR
@ERAS
async def test_two_callers_at_once_never_see_each_others_tools(world: World, mode: str) -> None:
    tokens = [await world.token(["demo.add"]), await world.token(["demo.shout", "slow.*"], OTHER)]
    wanted = [["demo-add"], ["demo-shout", "slow-count"]]

    async def look(token: str, expected: list[str]) -> None:
        async with world.client(mode, token) as client:
            for _ in range(5):
                assert [one.name for one in (await client.list_tools()).tools] == expected
                added, shouted = await asyncio.gather(
                    client.call_tool("demo-add", {"a": 1}), client.call_tool("demo-shout", {"text": "a"})
                )
                assert ("E3204" in text(added)) is ("demo-add" not in expected)
                assert ("E3204" in text(shouted)) is ("demo-shout" not in expected)

    await asyncio.gather(*(look(*one) for one in zip(tokens, wanted, strict=True)))


@DOOR
async def test_a_session_answers_only_to_whoever_opened_it(world: World) -> None:
    async with world.client("legacy") as client:
        await client.list_tools()
        sdk = world.door._sdk  # pyright: ignore[reportPrivateUsage]
        (session,) = sdk.sessions.held(f"local/{AGENT}")
        (within,) = sdk._manager._server_instances  # pyright: ignore[reportPrivateUsage]
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        for subject, named, status in ((AGENT, session, 200), (OTHER, session, 404), (AGENT, within, 404)):
            headers = {
                "authorization": f"Bearer {await world.token(subject=subject)}",
                "accept": "application/json, text/event-stream",
                "mcp-session-id": named,
            }
            async with httpx2.AsyncClient(headers=headers, timeout=PATIENCE_S) as http:
                assert (await http.post(world.url, json=body)).status_code == status


@DOOR
@ERAS
async def test_clients_hear_of_a_tool_that_is_registered_later(world: World, mode: str) -> None:
    heard = asyncio.Event()

    async def hear(message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            heard.set()

    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(world.client(mode, message_handler=hear))
        if mode != "legacy":
            await stack.enter_async_context(client.listen(tools_list_changed=True))
        before = {one.name for one in (await client.list_tools()).tools}
        await world.app.add(added_later)
        await asyncio.wait_for(heard.wait(), PATIENCE_S)
        assert {one.name for one in (await client.list_tools()).tools} - before == {"shapes-added_later"}


@given(
    namespace=st.from_regex(r"[a-z][a-z0-9_-]{0,80}", fullmatch=True),
    tool_id=st.from_regex(r"[a-z][a-z0-9_]{2,80}", fullmatch=True),
)
def test_a_name_fits_every_client_and_stands_for_one_address(namespace: str, tool_id: str) -> None:
    address = f"{namespace}.{tool_id}"
    name = mcp_names.shown(address)
    assert len(name) <= 64
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
    if len(address) <= 64:
        head, _, tail = name.rpartition("-")
        assert f"{head}.{tail}" == address
    else:
        assert not name.rpartition("-")[2][0].islower()  # cannot be taken for one that is read


# Calls


@DOOR
@ERAS
async def test_a_call_gives_structured_content_that_fits_the_schema_and_a_text(world: World, mode: str) -> None:
    async with world.client(mode) as client:
        await client.list_tools()  # from here on, the client checks results against their schemas
        added = await client.call_tool("demo-add", {"a": 1, "b": 2})
        assert (added.is_error, added.structured_content, text(added)) == (False, {"result": 3}, "3")
        shaped = await client.call_tool("shapes-point", {"x": 1})
        assert (shaped.structured_content, orjson.loads(text(shaped))) == ({"x": 1, "y": 2}, {"x": 1, "y": 2})
        for key, count in (("one", 1), ("two", 2), ("one", 1)):
            written = await client.call_tool("demo-increment", {"name": "a", "idempotency_key": key})
            assert written.structured_content == {"result": count}
    doors = {record["door"] for record in records(world.app) if record.get("door")}
    assert doors <= {"mcp"}


@DOOR
@ERAS
async def test_the_plain_address_and_the_bare_name_are_understood(world: World, mode: str) -> None:
    async with world.client(mode) as client:
        for name in ("demo-add", "demo.add", "add"):
            assert (await client.call_tool(name, {"a": 1, "b": 2})).structured_content == {"result": 3}


@DOOR
@ERAS
async def test_what_a_client_says_in_meta_holds(world: World, mode: str) -> None:
    async with world.client(mode) as client:
        key: Any = {"interlock/key": "order-17", "interlock/session": "s"}
        first, second = [await client.call_tool("demo-increment", {"name": "k"}, meta=key) for _ in range(2)]
        assert first.structured_content == second.structured_content == {"result": 1}
        assert second.meta is not None
        assert second.meta["interlock/call"]["source"] == "replay"
        dry: Any = {"interlock/dryRun": True}
        preview = await client.call_tool("demo-increment", {"name": "k"}, meta=dry)
        assert preview.structured_content is not None
        assert "would go up" in text(preview)
        assert "preview" in preview.structured_content["interlock"]
        assert sample.world.counters == {"k": 1}
        wrong: Any = {"interlock/key": 17}
        with pytest.raises(MCPError, match="must be a string"):
            await client.call_tool("demo-increment", {"name": "k"}, meta=wrong)


@DOOR
@ERAS
async def test_a_failure_is_a_result_that_a_model_can_read(world: World, mode: str) -> None:
    async with world.client(mode) as client:
        result = await client.call_tool("demo-add", {"a": "many"})
    assert result.is_error
    assert result.structured_content is None
    assert text(result).startswith("INVALID_INPUT (E3301): ")
    assert "What to do: correct every listed argument" in text(result)
    assert result.meta is not None
    assert result.meta["interlock/error"]["error_class"] == "schema_validation_failed"


@DOOR
@ERAS
async def test_only_a_name_that_means_nothing_is_a_fault_of_the_protocol(world: World, mode: str) -> None:
    async with world.client(mode) as client:
        with pytest.raises(MCPError) as raised:
            await client.call_tool("demo-nothing", {})
    assert raised.value.code == types.INVALID_PARAMS
    assert raised.value.error.message == "Unknown tool: demo-nothing"
    assert raised.value.error.data["error_code"] == "E3101"


@DOOR
@ERAS
async def test_a_call_that_waits_for_a_person_says_so_and_goes_on_when_made_again(world: World, mode: str) -> None:
    await use_policy(world.app, "permit(principal, action, resource);\n")
    async with world.client(mode) as client:
        await client.list_tools()
        wanted = {"to": "ann", "idempotency_key": "mail-1"}
        pending = await client.call_tool("demo-send", wanted)
        assert (pending.is_error, sample.world.runs) == (False, 0)
        assert pending.meta is not None
        ticket = pending.meta["interlock/pending"]["ticketId"]
        assert "Not done yet" in text(pending)
        assert "`approvers` must agree" in text(pending)
        assert f"interlock approvals show {ticket}" in text(pending)
        waiting = await client.call_tool("demo-send", wanted)
        assert waiting.meta is not None
        assert waiting.meta["interlock/pending"]["ticketId"] == ticket
        await world.app.approvals.approve(ticket, by=REVIEWER)
        done = await client.call_tool("demo-send", wanted)
        assert (done.structured_content, sample.world.runs) == ({"result": "ann"}, 1)


@DOOR
@ERAS
async def test_a_long_result_is_kept_and_read_as_a_resource_by_its_caller_alone(world: World, mode: str) -> None:
    async with world.client(mode) as client:
        await client.list_tools()
        result = await client.call_tool("shapes-long_text", {"length": 5000})
        (link,) = [block for block in result.content if isinstance(block, types.ResourceLink)]
        assert len(text(result)) < 2000
        (read,) = (await client.read_resource(link.uri)).contents
        assert isinstance(read, types.TextResourceContents)
        assert orjson.loads(read.text) == "x" * 5000
    async with world.client(mode, await world.token(subject=OTHER)) as client:
        with pytest.raises(MCPError):
            await client.read_resource(link.uri)


# Upstreams


LARGE_IMAGE = "aGho" * 10_000


@asynccontextmanager
async def upstream(world: World) -> AsyncGenerator[None]:
    """An MCP server of somebody else's, added under the name `other`."""
    server = MCPServer("other")

    @server.tool()
    def picture() -> list[types.ContentBlock]:
        """A picture and a word."""
        return [types.ImageContent(data="aGk=", mime_type="image/png"), types.TextContent(text="hi")]

    @server.tool()
    def photo() -> list[types.ContentBlock]:
        """A large picture and a word."""
        return [types.ImageContent(data=LARGE_IMAGE, mime_type="image/png"), types.TextContent(text="hi")]

    @server.resource("note://first")
    def note() -> str:
        return "a note"

    @server.prompt()
    def greet(who: str) -> str:
        """A greeting."""
        return f"greet {who}"

    app = server.streamable_http_app()
    async with server.session_manager.run(), serving(app) as port:
        config = {"url": f"http://127.0.0.1:{port}/mcp", "allow_private": True}
        report = await world.app.upstreams.add("other", "mcp", config, by=world.app.caller)
        assert report.count("admitted") == 2
        until_ms = world.app.clock.now_ms() + 60_000
        for one in ("other.picture", "other.photo"):
            await world.app.standing_approvals.grant(
                one, by=REVIEWER, caller=AGENT, arguments={}, uses=9, expires_ms=until_ms
            )
        yield


@pytest.mark.shows("MCP over HTTP", "resources and prompts")
@DOOR
@ERAS
async def test_what_an_upstream_offers_is_passed_on_under_its_name(world: World, mode: str) -> None:
    await use_policy(world.app, "permit(principal, action, resource);\n")
    async with upstream(world), world.client(mode) as client:
        assert "other-picture" in {one.name for one in (await client.list_tools()).tools}
        image, word = (await client.call_tool("other-picture", {"idempotency_key": "k"})).content
        assert isinstance(image, types.ImageContent)
        assert isinstance(word, types.TextContent)
        assert (image.data, word.text) == ("aGk=", "hi")
        words, link, photo = (await client.call_tool("other-photo", {"idempotency_key": "k"})).content
        assert isinstance(words, types.TextContent)
        assert isinstance(link, types.ResourceLink)
        assert isinstance(photo, types.ImageContent), "a large one is not only linked"
        assert (photo.data, "hi" in words.text, "aGk" in words.text) == (LARGE_IMAGE, True, False)
        (resource,) = (await client.list_resources()).resources
        assert str(resource.uri) == "upstream:other:note://first"
        (read,) = (await client.read_resource(str(resource.uri))).contents
        assert isinstance(read, types.TextResourceContents)
        assert (str(read.uri), read.text) == (str(resource.uri), "a note")
        (prompt,) = (await client.list_prompts()).prompts
        (message,) = (await client.get_prompt(prompt.name, {"who": "ann"})).messages
        assert (prompt.name, message.content) == ("other-greet", types.TextContent(text="greet ann"))
        for missing in (client.read_resource("upstream:other:note://none"), client.get_prompt("other-none", {})):
            with pytest.raises(MCPError):
                await missing
        read_of = [record["act"] for record in records(world.app, "upstream:other", "authority")]
        assert read_of[-4:] == ["resource.read", "prompt.read", "resource.read", "prompt.read"]


@DOOR
async def test_an_upstreams_resources_are_for_those_who_may_use_its_tools(world: World) -> None:
    async with upstream(world), world.client("2026-07-28", await world.token(["demo.*"])) as client:
        assert (await client.list_resources()).resources == []
        assert (await client.list_prompts()).prompts == []
        for refused in (client.read_resource("upstream:other:note://first"), client.get_prompt("other-greet", {})):
            with pytest.raises(MCPError):
                await refused


# Progress and cancellation


@DOOR
@ERAS
async def test_progress_is_told_in_order_before_the_result(world: World, mode: str) -> None:
    told: list[tuple[float, str | None]] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, message))

    async with world.client(mode) as client:
        result = await client.call_tool("slow-count", {"to": 3}, progress_callback=hear)
    assert result.structured_content == {"result": 3}
    assert [message for _, message in told][-3:] == ["step 0", "step 1", "step 2"]
    assert [progress for progress, _ in told] == sorted({progress for progress, _ in told})


@DOOR
@ERAS
@pytest.mark.parametrize("progress", [True, False])
async def test_a_call_that_its_client_gives_up_on_ends_on_record(world: World, mode: str, progress: bool) -> None:
    running = asyncio.Event()

    def hear(event: Any) -> None:
        if event.type == "tool.invocation.progress" and event.data["message"] == "waiting":
            running.set()

    def closed() -> list[dict[str, Any]]:
        return [record for record in records(world.app) if record["toolId"] == "slow.count"]

    async def told(progress: float, total: float | None, message: str | None) -> None: ...

    world.app.listen(hear)
    async with world.client(mode) as client:
        callback = told if progress else None
        call = asyncio.ensure_future(client.call_tool("slow-count", {"to": 101}, progress_callback=callback))
        await asyncio.wait_for(running.wait(), PATIENCE_S)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(closed)
    (record,) = closed()
    assert record["states"][-1] == "canceled"


# Tokens


@DOOR
async def test_a_request_without_a_good_token_learns_what_is_missing_and_where_to_read_of_it(world: World) -> None:
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    where = f'resource_metadata="{world.base}{METADATA_PATH}/mcp"'
    async with httpx2.AsyncClient(timeout=PATIENCE_S) as http:
        bare = await http.post(world.url, json=body)
        wrong = await http.post(world.url, json=body, headers={"authorization": 'Bearer "nonsense"'})
    assert (bare.status_code, wrong.status_code) == (401, 401)
    assert bare.headers["www-authenticate"] == f"Bearer {where}"
    assert wrong.headers["www-authenticate"].startswith('Bearer error="invalid_token", error_description="')
    assert wrong.headers["www-authenticate"].endswith(where)
    assert bare.json()["interlock"]["error_code"] == "E3212"
    assert wrong.json()["interlock"]["error_code"] == "E3203"
    assert world.door.metadata(world.base)["resource"] == world.url
    assert "authorization_servers" not in world.door.metadata(world.base)


@DOOR
async def test_whoever_looks_for_a_token_is_sent_to_the_issuers_that_are_trusted(tmp_path: Path) -> None:
    issuer = {"iss": "https://id.example", "jwks": "https://id.example/jwks", "algorithms": ["RS256"], "audience": "x"}
    async with Interlock.open(tmp_path, trusted_issuers=(issuer,), housekeeping=False) as app:
        told = McpDoor(Service(app)).metadata("https://tools.example")
    assert told["authorization_servers"] == ["https://id.example"]


@DOOR
async def test_a_revoked_token_is_refused_in_the_middle_of_a_session(world: World) -> None:
    token = await world.token()
    async with world.client("2026-07-28", token) as client:
        assert (await client.call_tool("demo-add", {"a": 1})).structured_content == {"result": 6}
        await world.app.tokens.revoke(token, reason="lost", by=OPERATOR)
        with pytest.raises(MCPError):
            await client.call_tool("demo-add", {"a": 1})


@DOOR
@pytest.mark.parametrize(
    ("header", "value", "status"), [("host", "evil.example", 421), ("origin", "http://evil.example", 403)]
)
async def test_a_page_elsewhere_cannot_reach_the_door(world: World, header: str, value: str, status: int) -> None:
    headers = {"authorization": f"Bearer {await world.token()}", header: value}
    headers |= {"accept": "application/json, text/event-stream", "mcp-protocol-version": "2026-07-28"}
    async with httpx2.AsyncClient(timeout=PATIENCE_S) as http:
        answer = await http.post(world.url, json={"jsonrpc": "2.0", "id": 1, "method": "tools/list"}, headers=headers)
    assert answer.status_code == status


# Frames that are not what they should be

FRAMES = st.one_of(
    st.binary(max_size=200),
    VALUES.map(orjson.dumps),
    st.fixed_dictionaries(
        {},
        optional={
            "jsonrpc": st.sampled_from(["2.0", "1.0", 2]),
            "method": st.sampled_from(["tools/call", "tools/list", "initialize", "ping", "x", 1]),
            "id": st.integers(0, 9) | st.text(max_size=3) | st.none(),
            "params": VALUES,
        },
    ).map(orjson.dumps),
)


@DOOR
async def test_malformed_frames_never_break_the_door(world: World) -> None:
    token = await world.token()
    loop = asyncio.get_running_loop()

    @settings(max_examples=examples(200))
    @given(body=FRAMES, version=st.sampled_from(["2026-07-28", "2025-11-25", "", "x"]))
    def send(body: bytes, version: str) -> None:
        sending = asyncio.run_coroutine_threadsafe(_status(world.door, token, body, version), loop)
        assert 200 <= sending.result(PATIENCE_S) < 500

    await asyncio.to_thread(send)
    async with world.client("2026-07-28") as client:
        assert (await client.call_tool("demo-add", {"a": 1})).structured_content == {"result": 6}


async def _status(door: McpDoor, token: str, body: bytes, version: str) -> int:
    statuses: list[int] = []
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": body}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    headers = {"host": "localhost:1", "accept": "*/*", "content-type": "application/json"}
    headers |= {"authorization": f"Bearer {token}", "content-length": str(len(body))}
    headers |= {"mcp-protocol-version": version, "mcp-method": "tools/call"} if version else {}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": "/mcp", "headers": raw, "query_string": b""}
    await door(scope, receive, send)
    (status,) = statuses
    return status


# Stdio


@DOOR
@ERAS
@pytest.mark.supports("AUTH-01", "OBS-02")
async def test_stdio_serves_the_bearer_of_a_token_or_the_local_user(world: World, mode: str) -> None:
    local = mode == "legacy"
    command = stdio(world, **({} if local else {"INTERLOCK_TOKEN": await world.token(["demo.add"])}))
    async with Client(command, mode=mode, read_timeout_seconds=PATIENCE_S) as client:
        assert len((await client.list_tools()).tools) == (len(TOOLS) + len(OWN) if local else 1)
        assert (await client.call_tool("demo-add", {"a": 1, "b": 2})).structured_content == {"result": 3}
        trace = "4bf92f3577b34da6a3ce929d0e0e4736"
        meta: Any = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01", "tracestate": "vendor=value"}
        traced = await client.call_tool("demo-add", {"a": 1, "b": 2}, meta=meta)
        assert traced.meta is not None
        assert traced.meta["interlock/call"]["traceId"] == trace
        with pytest.raises(MCPError):
            await client.call_tool("demo-nothing", {})


@pytest.mark.parametrize(
    ("token", "as_argument", "mode"),
    # Each is a process of its own: every token in both ways and in both eras.
    [
        (token, as_argument, "legacy" if as_argument is first else "2026-07-28")
        for token, first in (("", False), (" ", True), ("a.b.c", False))
        for as_argument in (False, True)
    ],
)
@pytest.mark.supports("AUTH-01")
async def test_stdio_serves_nobody_whose_token_does_not_hold(
    world: World, mode: str, token: str, as_argument: bool
) -> None:
    """An empty token, whichever way it comes, does not stand for the local user."""
    command = stdio(world, token) if as_argument else stdio(world, INTERLOCK_TOKEN=token)
    async with Client(command, mode=mode, read_timeout_seconds=PATIENCE_S) as client:
        with pytest.raises(MCPError) as listed:
            await client.list_tools()
        with pytest.raises(MCPError) as called:
            await client.call_tool("demo-add", {"a": 1, "b": 2})
    assert all("E3203" in str(refused.value.error) for refused in (listed, called))


# Frameworks


@DOOR
async def test_an_agent_framework_calls_a_governed_tool(world: World) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.mcp import MCPToolset
    from pydantic_ai.models.test import TestModel

    headers = {"authorization": f"Bearer {await world.token(['demo.add'])}"}
    agent = Agent(TestModel(), toolsets=[MCPToolset(world.url, headers=headers)])
    async with agent:
        result = await agent.run("add something")
    assert "demo-add" in result.output
    assert any(record["toolId"] == "demo.add" for record in records(world.app))

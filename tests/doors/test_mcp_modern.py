"""The route of the modern era and the SDK give the same answers, whatever is asked of whichever of the two."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import orjson
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock import Caller, Interlock
from interlock.api.service import Service
from interlock.doors.mcp import McpDoor
from interlock.http.route import Reply, ResponseStream
from tests import sample
from tests.support.calls import use_policy
from tests.support.identities import OPERATOR
from tests.support.mcp import AGENT, DOOR, PATIENCE_S, VALUES, prepare
from tests.thorough import examples

VERSION = "io.modelcontextprotocol/protocolVersion"
CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"
INFO = "io.modelcontextprotocol/clientInfo"

# Ids, traces and times.
CHANGING = re.compile(r"[0-9A-Z]{26}|[0-9a-f]{32}|\d{4}-\d\d-\d\dT[\d:.]+Z")

Json = dict[str, Any]
Headers = list[tuple[str, str]]


class Answer(NamedTuple):
    """What matters of an HTTP answer."""

    status: int
    type: str | None
    body: Any


class Sent(NamedTuple):
    """A request as it goes over the wire."""

    headers: Headers
    body: bytes


def request(method: str = "tools/call", params: Json | None = None, **other: Any) -> Sent:
    """A request as a good client makes it."""
    meta = {VERSION: "2026-07-28", CAPABILITIES: {}, INFO: {"name": "t", "version": "1"}}
    wanted = {"name": "demo-add", "arguments": {"a": 1, "b": 2}} if params is None else params
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"_meta": meta, **wanted}}
    headers = [
        ("host", "localhost:80"),
        ("content-type", "application/json"),
        ("accept", "application/json, text/event-stream"),
        ("mcp-protocol-version", "2026-07-28"),
        ("mcp-method", method),
    ]
    if "name" in wanted:
        headers.append(("mcp-name", str(wanted["name"])))
    return Sent(headers, orjson.dumps({**body, **other}))


class Both:
    """One endpoint, asked through its route and through the SDK."""

    def __init__(self, app: Interlock, door: McpDoor, caller: Caller, token: str) -> None:
        self.app = app
        self.caller = caller
        self.token = token
        self.route = door.route
        self.handle = door._sdk.handle  # pyright: ignore[reportPrivateUsage]
        self.fell_through = 0
        self.route._sdk = self._count  # pyright: ignore[reportPrivateUsage]
        self.loop = asyncio.get_running_loop()

    async def _count(self, *args: Any) -> None:
        self.fell_through += 1
        await self.handle(*args)

    async def sdk(self, scope: Any, receive: Any, send: Any) -> None:
        await self.handle(scope, receive, send, self.caller)

    async def ask(self, app: Callable[..., Any], sent: Sent) -> Answer:
        await self._begin()
        messages = [{"type": "http.request", "body": sent.body, "more_body": False}]
        heard: list[Any] = []

        async def receive() -> Json:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            heard.append(message)

        await asyncio.wait_for(app(self.scope(sent), receive, send), PATIENCE_S)
        start, *rest = heard
        headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        body = b"".join(message.get("body", b"") for message in rest)
        if "content-length" in headers:
            assert int(headers["content-length"]) == len(body)
        kind = headers.get("content-type")
        return Answer(start["status"], kind, _settled(orjson.loads(body)) if kind == "application/json" else body)

    async def compare(self, sent: Sent) -> Answer:
        """Ask both, and see that they agree."""
        usual = await self.ask(self.sdk, sent)
        assert await self.ask(self.route, sent) == usual
        return usual

    async def is_answered_at_once(self, sent: Sent) -> bool:
        """Whether a request has its reply without a stream that watches for the client's going."""
        await self._begin()
        handler = await self.route.prepare(self.scope(sent))
        assert not isinstance(handler, Reply | ResponseStream)
        return isinstance(await handler(sent.body, {}), Reply)

    def scope(self, sent: Sent) -> Json:
        said = [*sent.headers, ("authorization", f"Bearer {self.token}"), ("content-length", str(len(sent.body)))]
        raw = [(name.encode(), value.encode("latin-1")) for name, value in said]
        return {"type": "http", "method": "POST", "path": "/mcp", "headers": raw, "query_string": b""}

    async def _begin(self) -> None:
        sample.reset()
        await self.app.journal.commit(lambda made: made.execute("DELETE FROM reservation") and None)


def _settled(value: Any) -> Any:
    """A body without what differs from call to call: ids, times and traces."""
    if isinstance(value, str):
        return CHANGING.sub("…", value)
    if isinstance(value, dict):
        return {
            name: "…" if name in ("executionDurationMs", "latencyMs") else _settled(one)
            for name, one in cast("Json", value).items()
        }
    if isinstance(value, list):
        return [_settled(one) for one in cast("list[Any]", value)]
    return value


@pytest_asyncio.fixture
async def both(home: Path) -> AsyncGenerator[Both]:
    async with Interlock.open(home, housekeeping=False) as app:
        await prepare(app)
        door = McpDoor(Service(app))
        token = await app.tokens.issue(subject=AGENT, by=OPERATOR)
        async with door.lifespan():
            yield Both(app, door, await app.caller_of(token), token)


CALLS: dict[str, Json] = {
    "a number": {"name": "demo-add", "arguments": {"a": 1, "b": 2}},
    "by address": {"name": "demo.add", "arguments": {"a": 1}},
    "an object": {"name": "shapes-point", "arguments": {"x": 1}},
    "anything": {"name": "demo-echo", "arguments": {"value": {"a": [None, 1.5, "é\\u2028\\x00", {}]}}},
    "nothing": {"name": "demo-echo", "arguments": {"value": None}},
    "a write": {"name": "demo-increment", "arguments": {"name": "a", "idempotency_key": "w"}},
    "a write without a key": {"name": "demo-increment", "arguments": {"name": "a"}},
    "long": {"name": "shapes-long_text", "arguments": {"length": 3000}},
    "slow": {"name": "slow-count", "arguments": {"to": 2}},
    "bad input": {"name": "demo-add", "arguments": {"a": "x"}},
    "no arguments": {"name": "demo-add"},
    "unknown": {"name": "demo-nothing", "arguments": {}},
    "failing": {"name": "shapes-broken", "arguments": {"x": 0}},
    "failing with content": {"name": "shapes-broken", "arguments": {"x": 1}},
    "pending": {"name": "demo-send", "arguments": {"to": "ann", "idempotency_key": "p"}},
}


@DOOR
@pytest.mark.parametrize("which", CALLS)
async def test_calls_are_answered_alike(both: Both, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlock.doors.mcp.modern.WATCH_AFTER_S", 60.0)
    await use_policy(both.app, "permit(principal, action, resource);\n")
    await both.compare(request(params=CALLS[which]))
    assert both.fell_through == (which == "unknown")
    if which != "unknown":
        assert await both.is_answered_at_once(request(params=CALLS[which]))


@DOOR
async def test_a_whole_number_of_any_size_is_told(both: Both) -> None:
    answer = await both.compare(request(params={"name": "demo-add", "arguments": {"a": 2**63, "b": 2**63}}))
    assert answer.body["result"]["content"] == [{"type": "text", "text": str(2**64)}]


@DOOR
async def test_lists_are_answered_alike_page_by_page(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = await both.compare(request("tools/list", {}))
    assert len(whole.body["result"]["tools"]) > 5
    monkeypatch.setattr("interlock.doors.mcp.listing.PAGE", 4)
    page = await both.compare(request("tools/list", {}))
    await both.compare(request("tools/list", {"cursor": page.body["result"]["nextCursor"]}))
    assert both.fell_through == 0


HEADER = st.sampled_from(
    ["host", "content-type", "accept", "mcp-protocol-version", "mcp-method", "mcp-name", "origin", "mcp-param-a", "x"]
)
WORD = st.sampled_from(
    ["", "localhost:80", "localhost", "evil:80", "http://localhost:80", "http://evil", "*/*", "1",
     "application/*;q=1, text/*", "Application/JSON; charset=utf-8", "text/plain", "2026-07-28", "2025-11-25",
     "tools/call", "tools/list", "demo-add", "=?base64?ZGVtby1hZGQ=?="],
)  # fmt: skip
LONG = {"experimental": {"long": {"number": 2**70}}}
META = st.fixed_dictionaries(
    {},
    optional={
        VERSION: st.sampled_from(["2026-07-28", "2025-11-25", "x", 1, None]),
        CAPABILITIES: st.sampled_from([{}, {"elicitation": {}}, {"roots": 1}, LONG, [], None]),
        INFO: st.sampled_from([{"name": "t", "version": "1"}, {"name": "t"}, {}, None, "x"]),
        "io.modelcontextprotocol/logLevel": st.sampled_from(["info", "x"]),
        "interlock/key": st.sampled_from(["k", 1, ""]),
        "interlock/dryRun": st.sampled_from([True, "x"]),
        "interlock/version": st.sampled_from(["^1.0.0", "9.9.9", 1]),
        "traceparent": st.sampled_from(["00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "x", 1]),
        "other": VALUES,
    },
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.sampled_from(["2.0", "1.0", None]),
        "id": st.sampled_from([0, 1, "a", "", 1.5, True, None, [], 2**63, 2**70]),
        "method": st.sampled_from(["tools/call", "tools/list", "resources/list", "x", None]),
        "extra": VALUES,
    },
)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["demo-add", "demo-echo", "demo-increment", "demo-nothing", "", 1, None]),
        "arguments": VALUES
        | st.fixed_dictionaries({"a": st.integers() | VALUES})
        | st.sampled_from([{"value": 1}, {"value": 2**70}, {"value": [2**70]}, {"a": 2**70, "b": 1}]),
        "cursor": st.sampled_from(["", "demo.echo", "zzz", 1, None]),
        "_meta": META | VALUES,
        "inputResponses": VALUES,
        "requestState": st.sampled_from(["x", 1]),
        "other": VALUES,
    },
)


@st.composite
def requests(draw: st.DrawFn) -> Sent:
    """Good requests with something, often nothing, wrong with them."""
    method = draw(st.sampled_from(["tools/call", "tools/call", "tools/list"]))
    sent = request(method, {} if method == "tools/list" else None)
    body: Json = orjson.loads(sent.body)
    if draw(st.booleans()):
        body |= draw(FIELDS)
    if draw(st.booleans()):
        changed = draw(PARAMS)
        meta = body["params"]["_meta"]
        body["params"] |= changed
        if isinstance(changed.get("_meta"), dict) and draw(st.booleans()):
            body["params"]["_meta"] = meta | changed["_meta"]
    headers = list(sent.headers)
    if isinstance(body["params"].get("name"), str) and draw(st.booleans()):
        headers = [(name, value) for name, value in headers if name != "mcp-name"]
        headers.append(("mcp-name", body["params"]["name"]))
    for name, value in draw(st.lists(st.tuples(HEADER, WORD), max_size=2)):
        if draw(st.booleans()):
            headers = [one for one in headers if one[0] != name]
        headers.append((name, value))
    return Sent(headers, _encoded(body))


def _encoded(body: Json) -> bytes:
    try:
        return orjson.dumps(body, default=str)
    except TypeError:  # a whole number that is too long for it
        return json.dumps(body, default=str).encode()


@DOOR
async def test_whatever_is_asked_the_two_agree(both: Both) -> None:
    @settings(max_examples=examples(250))
    @given(sent=requests())
    def compare(sent: Sent) -> None:
        asyncio.run_coroutine_threadsafe(both.compare(sent), both.loop).result(PATIENCE_S)

    await asyncio.to_thread(compare)


@DOOR
async def test_a_body_in_parts_is_one_body_and_too_much_of_it_is_refused(both: Both) -> None:
    sent = request()
    parts = [{"type": "http.request", "body": sent.body[at : at + 20], "more_body": True} for at in range(0, 400, 20)]
    parts.append({"type": "http.request", "body": b"", "more_body": False})
    heard: list[Any] = []

    async def send(message: Any) -> None:
        heard.append(message)

    async def receive() -> Json:
        return parts.pop(0)

    await both.route(both.scope(sent), receive, send)
    assert orjson.loads(heard[1]["body"])["result"]["structuredContent"] == {"result": 3}
    huge = Sent(sent.headers, b" " * (5 * 1024 * 1024))
    assert (await both.compare(huge)).status == 413


@DOOR
async def test_a_call_that_takes_long_is_kept_alive_and_still_answered(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interlock.doors.mcp.modern.WATCH_AFTER_S", 0)
    monkeypatch.setattr("interlock.doors.mcp.watched.PING_AFTER_S", 0)
    sent = request(params=CALLS["slow"])
    assert not await both.is_answered_at_once(sent)
    answer = await both.ask(both.route, sent)
    assert (answer.status, answer.type) == (200, "text/event-stream")
    *pings, last = answer.body.split(b"\r\n\r\n")[:-1]
    assert pings
    assert set(pings) == {b": ping"}
    assert orjson.loads(last.partition(b"data: ")[2])["result"]["structuredContent"] == {"result": 2}

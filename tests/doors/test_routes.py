"""A handler that was prepared for a head answers every further body as a new one would: what may change is checked."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict

import orjson
import pytest
import pytest_asyncio

from interlock import Failure, Field, Hook, HookResult, tool
from interlock.call.prepared import Prepared as Tool
from interlock.doors.server import Gate
from interlock.http import route
from interlock.http.asgi import Scope
from interlock.store.changes import FRESH_S
from tests.sample import Number
from tests.support.calls import until
from tests.support.servers import Peer, Place, place

Json = dict[str, Any]
META: Json = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
# Ids, traces and times, in bodies and headers.
CHANGING = re.compile(
    rb"[0-9A-Z]{26}|[0-9a-f]{32}|\d{4}-\d\d-\d\dT[\d:.]+Z|(?<=Ms\":)[\d.]+|(?<=_ms\":)[\d.]+|(?<=-length: )\d+|date: .*"
)


class Sum(TypedDict):
    """What the next version of a tool answers."""

    sum: int


class Heard(NamedTuple):
    """An answer as it came over the wire."""

    head: bytes
    body: bytes

    @property
    def status(self) -> int:
        return int(self.head.split()[1])

    @property
    def said(self) -> Json:
        return orjson.loads(self.body)

    @property
    def settled(self) -> tuple[bytes, bytes]:
        return CHANGING.sub(b"*", self.head), CHANGING.sub(b"*", self.body)


def post(here: Place, path: str, body: Json | bytes, *lines: str) -> bytes:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1", "host: 127.0.0.1", f"authorization: {here.bearer['authorization']}",
        "content-type: application/json", *lines, f"content-length: {len(sent)}", "", "",
    )  # fmt: skip
    return "\r\n".join(head).encode() + sent


def rest(here: Place, body: Json | bytes, *lines: str) -> bytes:
    return post(here, "/v1/tools/invoke", body, *lines)


def rpc(here: Place, body: Json | list[Json] | bytes, *lines: str) -> bytes:
    return post(here, "/rpc", body if isinstance(body, bytes) else json.dumps(body).encode(), *lines)


def mcp(here: Place, name: str, arguments: Any, *more: str, **meta: Any) -> bytes:
    params = {"_meta": {**META, **meta}, "name": name, "arguments": arguments}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    lines = ("accept: application/json, text/event-stream", "mcp-protocol-version: 2026-07-28")
    return post(here, "/mcp", body, *lines, "mcp-method: tools/call", f"mcp-name: {name}", *more)


async def ask(peer: Peer, request: bytes) -> Heard:
    peer.writer.write(request)
    async with asyncio.timeout(60):
        head = await peer.reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        return Heard(head, await peer.reader.readexactly(0 if length is None else int(length[1])))


class Prepared:
    """Counts how often the server prepared to answer a head."""

    count = 0


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Prepared:
    counted, real = Prepared(), Gate.prepare

    async def prepare(gate: Gate, head: Scope) -> route.Prepared:
        counted.count += 1
        return await real(gate, head)

    monkeypatch.setattr(Gate, "prepare", prepare)
    return counted


@pytest_asyncio.fixture
async def here(home: Path, prepared: Prepared) -> AsyncGenerator[Place]:
    async with place(home) as made:
        await made.server.warm()
        yield made


@tool(
    version="2.0.0", mutation_class="read_only", namespace="demo", timeout_class="interactive", external_io=False,
    concurrency_safe=True, breaking_changes=True,
)  # fmt: skip
async def add(a: Number, b: Number = 5) -> Sum:
    """Add two whole numbers."""
    return {"sum": a + b}


@tool(
    version="1.0.0", mutation_class="read_only", namespace="demo", timeout_class="interactive", external_io=False,
    concurrency_safe=True,
)  # fmt: skip
async def odd(which: Annotated[int, Field(description="which one", examples=[1])]) -> int:
    """Fail in words that are no Unicode, or not at all."""
    if which > 1:
        raise Failure("E3401", "no \ud800")
    return which


ADD: Json = {"tool_id": "demo.add", "parameters": {"a": 1, "b": 2}}
CALL: Json = {"jsonrpc": "2.0", "id": 7, "method": "tools.invoke", "params": ADD}
BODIES: dict[str, list[Json | bytes]] = {
    "/v1/tools/invoke": [
        ADD,
        {"tool_id": "demo.add", "parameters": {"a": 1000, "b": 2}},
        {"tool_id": "demo.add", "parameters": {"a": "x"}},
        {"tool_id": "demo.nothing", "parameters": {}},
        {"tool_id": "demo.echo", "parameters": {"value": [None, "é\u2028", 2**70]}},
        {"tool_id": "demo.increment", "parameters": {"name": "a"}, "idempotency_key": "k"},
        {"tool_id": "demo.increment", "parameters": {"name": "a"}},
        {"tool_id": "demo.send", "parameters": {"to": "ann"}, "idempotency_key": "p"},
        {**ADD, "dry_run": True},
        {**ADD, "tool_version": "9.9.9"},
        {**ADD, "other": 1},
        b"{",
        b"",
        b"[]",
    ],
    "/rpc": [
        CALL,
        {**CALL, "id": "x" * 50},
        {**CALL, "id": None},
        {**CALL, "params": {"tool_id": "demo.echo", "parameters": {"value": "%b ⟦call⟧"}}},
        {**CALL, "params": {"tool_id": "demo.add", "parameters": {"a": "x"}}},
        {**CALL, "method": "nothing"},
        {"jsonrpc": "2.0", "method": "tools.invoke", "params": ADD},
        json.dumps([CALL, {**CALL, "id": 8}, {"jsonrpc": "2.0", "method": "tools.invoke", "params": ADD}]).encode(),
        b"[",
        b"[]",
    ],
}


@pytest.mark.parametrize("path", BODIES)
async def test_every_body_is_answered_as_on_a_new_connection(here: Place, prepared: Prepared, path: str) -> None:
    peer = await here.raw()
    await ask(peer, post(here, path, BODIES[path][0]))
    before = prepared.count
    for body in BODIES[path]:
        request = post(here, path, body)
        first = await ask(await here.raw(), request)
        assert (await ask(peer, request)).settled[0] == first.settled[0], body
        again = await ask(peer, request)
        assert again.settled == (await ask(await here.raw(), request)).settled, body
    assert prepared.count - before == 2 * len(BODIES[path]), "only the new connections prepared anything"


async def test_an_mcp_call_is_answered_as_on_a_new_connection(here: Place, prepared: Prepared) -> None:
    peer = await here.raw()
    await ask(peer, mcp(here, "demo-add", {"a": 5}))
    before = prepared.count
    inputs: list[Any] = [{"a": 1, "b": 2}, {"a": 1000}, {"a": "x"}, {}, [], None]
    every: list[tuple[Any, Json]] = [(one, {}) for one in inputs]
    metas = ({"interlock/dryRun": True}, {"interlock/version": "9.9.9"}, {"interlock/session": "s"}, {"x": 1})
    every += [({"a": 1}, meta) for meta in metas]
    for arguments, meta in every:
        request = mcp(here, "demo-add", arguments, **meta)
        assert (await ask(peer, request)).settled == (await ask(await here.raw(), request)).settled, (arguments, meta)
    assert prepared.count - before == len(every), "only the new connections prepared anything"


async def known(here: Place, prepared: Prepared) -> list[tuple[bytes, Peer]]:
    """Requests over each wire, with connections whose handlers are prepared."""
    asked = [(request, await here.raw()) for request in requests(here)]
    for request, peer in asked:
        before = prepared.count
        for _ in range(3):
            assert (await ask(peer, request)).status == 200
        assert prepared.count - before == 1
    return asked


def requests(here: Place) -> list[bytes]:
    return [rest(here, ADD), rpc(here, CALL), mcp(here, "demo-add", {"a": 1, "b": 2})]


# Headers that belong to one request

TRACES = [f"{number}f" * 16 for number in range(1, 5)]
PARENT = f"00-{TRACES[0]}-00f067aa0ba902b7-01"
LINES: list[list[str]] = [
    [f"traceparent: {PARENT}"], [f"TRACEPARENT:\t{PARENT}"], [f"traceparent: {PARENT}", "tracestate: a=1,b=2"],
    [f"traceparent: {PARENT}", f"traceparent: {PARENT.replace('1', '2')}"], [f"traceparent: {PARENT.upper()}x"],
    ["traceparent: 00-0-0-01"], ["traceparent: é"], ["traceparent:"], [f"traceparent: {'0' * 600}"],
    ["tracestate: a=1", f"traceparent: {PARENT}"], ["x-request-id: 1", "baggage: a=b"], ["idempotency-key: é"],
    [f"traceparent: ff{PARENT[2:]}"], [f"traceparent: {PARENT}", "tracestate: a=1, b = 2,,"], [],
]  # fmt: skip


def with_lines(here: Place, *lines: str) -> list[bytes]:
    """A read over each wire, with further headers."""
    return [rest(here, ADD, *lines), rpc(here, CALL, *lines), mcp(here, "demo-add", {"a": 1, "b": 2}, *lines)]


@pytest.mark.parametrize("ratio", [0.0, 1.0])
async def test_each_request_of_a_connection_is_in_its_own_trace(home: Path, prepared: Prepared, ratio: float) -> None:
    async with place(home, trace_ratio=ratio) as here:
        await here.server.warm()
        for wire in range(3):
            peer, before = await here.raw(), prepared.count
            for trace in (*TRACES, *TRACES):
                span = f"{wire + 1:08x}{trace[-8:]}"
                heard = await ask(peer, with_lines(here, f"traceparent: 00-{trace}-{span}-01")[wire])
                said = heard.head + heard.body
                assert [one for one in TRACES if one.encode() in said] == [trace]
                rows = here.app.journal.reader.all("SELECT body FROM journal WHERE kind = 'closed' ORDER BY seq")
                assert orjson.loads(rows[-1][0])["traceId"] == trace
                tracer = here.app.gateway.telemetry.tracer
                assert (tracer is not None) == bool(ratio)
                if tracer is not None:
                    spans = tracer.of(trace, here.app.caller)
                    assert span in {one["parent_span_id"] for one in spans if one["name"] == "tool.invoke"}
                    assert {one["trace_id"] for one in spans} == {trace}
            # None of them has left its trace to a request without one.
            heard = await ask(peer, with_lines(here)[wire])
            assert not any(one.encode() in heard.head + heard.body for one in TRACES)
            assert prepared.count - before == 2


async def test_headers_of_one_request_are_understood_as_on_a_new_connection(here: Place, prepared: Prepared) -> None:
    def own(heard: Heard) -> tuple[object, ...]:
        head = re.sub(rb"(?<=-)[0-9a-f]{16}(?=-00\r\n)", b"*", heard.settled[0])  # the span of the answer
        return head, heard.settled[1], [one for one in TRACES if one.encode() in heard.head + heard.body]

    for wire in range(3):
        peer = await here.raw()
        for lines in [*LINES, *reversed(LINES), *LINES]:
            request = with_lines(here, *lines)[wire]
            assert own(await ask(peer, request)) == own(await ask(await here.raw(), request)), lines


async def test_each_request_of_a_connection_has_its_own_idempotency_key(here: Place, prepared: Prepared) -> None:
    body = {"tool_id": "demo.increment", "parameters": {"name": "a"}}
    for number, wire in enumerate((rest, mcp)):
        peer, before = await here.raw(), prepared.count
        told: list[int] = []
        for key in ("a", "b", "a", "c", "b"):
            line = f"Idempotency-Key: {number}{key}"
            request = rest(here, body, line) if wire is rest else mcp(here, "demo-increment", {"name": "a"}, line)
            said = (await ask(peer, request)).said
            told.append(said["result"] if wire is rest else said["result"]["structuredContent"]["result"])
        first = told[0]
        assert told == [first, first + 1, first, first + 2, first + 1]
        assert prepared.count - before == 1


def refused(heard: Heard) -> str:
    """The code of a refusal, wherever its wire has it."""
    found = re.search(rb'"error_code":"(E\d{4})"', heard.body)
    return "" if found is None else found[1].decode()


async def test_a_token_that_is_revoked_is_refused_at_once(here: Place, prepared: Prepared) -> None:
    asked = await known(here, prepared)
    token = here.bearer["authorization"].removeprefix("Bearer ")
    await here.app.tokens.revoke(token, reason="lost", by=here.app.caller)
    for request, peer in asked:
        assert refused(await ask(peer, request)) == "E3201", request


async def test_a_policy_that_changes_decides(here: Place, prepared: Prepared) -> None:
    asked = await known(here, prepared)
    here.app.home.policy.write_text("permit(principal, action, resource);\nforbid(principal, action, resource);\n")
    for request, peer in asked:
        async with asyncio.timeout(60):
            while not (code := refused(await ask(peer, request))):  # the file is looked at every so often
                pass
        assert code == "E3206", request


@pytest.mark.parametrize("times", [1, 3])
async def test_what_goes_wrong_before_a_call_is_told_in_the_same_words(
    here: Place, prepared: Prepared, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Whether the handler has answered once or more often."""
    asked = [(request, await here.raw()) for request in requests(here)]
    for request, peer in asked * times:
        assert (await ask(peer, request)).status == 200

    def broken(*_: object) -> list[Any]:
        raise Failure("E3801", "the journal cannot be read")

    for kind in ("one", "all", "each"):
        monkeypatch.setattr(type(here.app.journal.reader), kind, broken)
    await asyncio.sleep(2 * FRESH_S)
    for request, peer in asked:
        assert (await ask(peer, request)).settled == (await ask(await here.raw(), request)).settled, request


async def test_what_cannot_be_written_is_told_in_the_same_words_and_the_connection_stays(
    here: Place, prepared: Prepared
) -> None:
    await here.app.add(odd)
    for wire in (rest, rpc, mcp):

        def request(which: int, wire: Any = wire) -> bytes:
            asked: Json = {"tool_id": "demo.odd", "parameters": {"which": which}}
            if wire is mcp:
                return mcp(here, "demo-odd", asked["parameters"])
            return wire(here, asked if wire is rest else {**CALL, "params": asked})

        peer = await here.raw()
        for _ in range(3):
            await ask(peer, request(1))
        fresh, before = await ask(await here.raw(), request(2)), prepared.count
        assert refused(fresh) == "E3000"
        assert (await ask(peer, request(2))).settled == fresh.settled
        assert (await ask(peer, request(1))).status == 200
        assert prepared.count == before


async def test_a_hook_that_comes_later_is_heeded(here: Place, prepared: Prepared) -> None:
    asked = await known(here, prepared)
    here.app.hook(Hook(id="no", when="pre", run=lambda _: HookResult(stop="not today")))
    for request, peer in asked:
        assert refused(await ask(peer, request)) == "E3211", request


async def test_a_call_is_told_in_the_form_of_the_version_that_ran(
    here: Place, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may publish a version after the endpoint has looked. Either version may run."""
    request, peer = mcp(here, "demo-add", {"a": 1, "b": 2}), await here.raw()
    for _ in range(2):
        await ask(peer, request)
    before, find = await here.app.catalog.prepared("demo.add", None), here.app.catalog.at_hand
    await here.app.add(add)
    looked: list[object] = []

    def looked_up(*asked: Any) -> Tool | None:
        looked.append(asked)
        return before if len(looked) == 1 else find(*asked)

    monkeypatch.setattr(here.app.catalog, "at_hand", looked_up)
    count = prepared.count
    heard = [await ask(peer, request) for _ in range(2)]
    assert prepared.count == count
    first, second = (one.said["result"]["structuredContent"] for one in heard)
    # Where the call leaves the fast path, the gateway looks again and finds the new version.
    assert first in ({"result": 3}, {"sum": 3})
    assert second == {"sum": 3}


async def test_a_client_that_goes_takes_nothing_with_it(here: Place, prepared: Prepared) -> None:
    """What it asked for is on record all the same, and the next one is answered."""
    asked = await known(here, prepared)

    def closed() -> int:
        return len(here.app.journal.reader.all("SELECT 1 FROM journal WHERE kind = 'closed'"))

    before = closed()
    for request, peer in asked:
        peer.writer.write(request)
        await peer.writer.drain()
        peer.writer.close()
    await until(lambda: closed() == before + len(asked))
    for request in requests(here):
        assert (await ask(await here.raw(), request)).status == 200


async def test_what_is_asked_for_in_the_end_is_answered_and_the_connection_closed(
    here: Place, prepared: Prepared
) -> None:
    for request, peer in await known(here, prepared):
        before = prepared.count
        peer.writer.write(request)
        peer.writer.write_eof()
        async with asyncio.timeout(60):
            heard = await peer.reader.read()
        assert heard.startswith(b"HTTP/1.1 200 OK")
        assert prepared.count == before

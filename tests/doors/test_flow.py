"""One flow through each door: find a tool, call it, see it traced, counted and on record, be denied, be cut off; write
to one place with others at the same time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from interlock import Context, Effect, Interlock, Preview, tool
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from interlock.doors.server import Listening, serving
from interlock.telemetry.w3c import read as read_trace
from tests import sample
from tests.doors.test_parity import DOORS, Told, Ways, Wish
from tests.support.calls import admit
from tests.support.identities import did_of
from tests.telemetry.test_metrics import of, render
from tests.upstreams.test_manager import Scripted
from tests.upstreams.test_manager import opened as far

Json = dict[str, Any]
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
GOOD = f"00-{TRACE}-00f067aa0ba902b7-01"


@tool(version="1.0.0", mutation_class="read_only", namespace="notes", scopes=("notes:read",))
async def read(text: sample.Text) -> str:
    """Read a note, for those who may."""
    return text


@tool(
    version="1.0.0", mutation_class="read_only", namespace="notes", scopes=("notes:read",), timeout_s=1
)  # fmt: skip
async def wait(text: sample.Text) -> str:
    """Take longer than its contract allows."""
    await asyncio.Event().wait()
    return text


ledger: Counter[str] = Counter()


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="notes", scopes=("notes:read",),
    effects=[Effect("ledger:{name}", "UPDATE")],
)  # fmt: skip
async def post(ctx: Context, name: sample.Text, cents: sample.Number) -> int:
    """Add to an account, in two steps; an odd amount is not what it claims to be."""
    before = ledger[name]
    await asyncio.sleep(0)  # whoever else could write now would be overwritten
    ledger[name] = before + cents
    ctx.effect(f"ledger:{name}", "UPDATE", before=before, after=before + cents)
    ctx.compensate_with(name=name, cents=cents)
    ctx.attest("cents", cents, lambda: cents - cents % 2)
    return cents


@post.preview
def _(name: str, cents: int) -> Preview:
    return Preview(impact=f"would add {cents} to {name}")


@post.compensate
async def _(name: str, cents: int) -> None:
    ledger[name] -= cents


class Finding(Ways):
    """The ways in, with their ways of finding tools."""

    async def found(self, door: str) -> list[str]:
        bearer = self._bearer(Wish("", {}, token="least"))
        ways: Mapping[str, Callable[[], Awaitable[list[str]]]] = {
            "library": self._in_process,
            "rest": lambda: self._over_rest(bearer),
            "jsonrpc": lambda: self._over_jsonrpc(bearer),
            "grpc": lambda: self._over_grpc(bearer),
            "mcp-modern": lambda: self._over_mcp(bearer, "2026-07-28"),
            "mcp-legacy": lambda: self._over_mcp(bearer, "legacy"),
        }
        return await ways[door]()

    async def _in_process(self) -> list[str]:
        caller = await self.lock.caller_of(self._tokens["least"])
        return [one.row.address for one in await Service(self.lock).tools.visible(caller)]

    async def _over_rest(self, bearer: dict[str, str]) -> list[str]:
        listed: Json = (await self._http.get("/v1/tools", headers=bearer)).json()
        return [one["tool_id"] for one in listed["tools"]]

    async def _over_jsonrpc(self, bearer: dict[str, str]) -> list[str]:
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools.list"}
        listed: Json = (await self._http.post("/rpc", json=request, headers=bearer)).json()
        return [one["tool_id"] for one in listed["result"]["tools"]]

    async def _over_grpc(self, bearer: dict[str, str]) -> list[str]:
        listed = await self._stub.Discover(wire.DiscoverRequest(), metadata=tuple(bearer.items()))
        return [one.tool_id for one in listed.tools]

    async def _over_mcp(self, bearer: dict[str, str], era: str) -> list[str]:
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=bearer, timeout=30))
            transport = streamable_http_client(f"{self._base}/mcp", http_client=http)
            client = await stack.enter_async_context(Client(transport, mode=era, read_timeout_seconds=30))
            return [one.name.replace("-", ".") for one in (await client.list_tools()).tools]


@asynccontextmanager
async def opened(home: Path) -> AsyncGenerator[Finding]:
    async with Interlock.open(home, housekeeping=False, trace_ratio=1.0) as lock:
        await admit(lock, read, wait, post)
        lock.issuer_keys.init("EdDSA")
        for name, kind in (("ann", "human"), ("bot", "agent")):
            await lock.identities.register(Identity(did=did_of(name), name=name, kind=kind, trust=80), by="test")  # pyright: ignore[reportArgumentType] - both are kinds
        tokens = {
            name: await lock.tokens.issue(
                subject=did_of("bot"), user=did_of("ann"), tools=[ToolGrant("notes.*")], scopes=scopes, by=lock.caller
            )
            for name, scopes in (("least", ("notes:read",)), ("empty", ()))
        }
        async with serving(Service(lock), Listening(port=0, grpc_port=0)) as server:
            assert server.grpc_port is not None
            ways = Finding(lock, f"http://127.0.0.1:{server.port}", server.grpc_port, tokens)
            try:
                yield ways
            finally:
                await ways.close()


@pytest.mark.proves("OBS-01")
@pytest.mark.part_of("TEST-03", rest="Postgres and Redis")
@pytest.mark.parametrize("door", DOORS)
async def test_a_tool_is_found_called_traced_counted_recorded_denied_and_cut_off(home: Path, door: str) -> None:
    async with opened(home) as ways:
        lock, way = ways.lock, ways.ways[door]
        assert await ways.found(door) == ["notes.post", "notes.read", "notes.wait"]
        assert await way(Wish("notes.read", {"text": "hello"}, token="least")) == Told("hello")

        await lock.journal.commit(lambda _: None)
        rows = lock.journal.reader.all("SELECT body FROM journal WHERE kind = 'closed' ORDER BY seq")
        record: Json = orjson.loads(rows[-1][0])
        assert (record["status"], record["callerId"], record["agentId"]) == ("SUCCESS", did_of("ann"), did_of("bot"))
        assert record["door"] == door.partition("-")[0]

        caller = await lock.caller_of(ways.token("least"))
        spans = lock.gateway.telemetry.trace(record["traceId"], caller)
        assert {"tool.invoke", "Validate", "Authorize", "Execute", "Verify", "Return"} <= {one["name"] for one in spans}

        facts = {"toolId": "notes.read", "version": "1.0.0"}
        samples = await render(lock)
        assert of(samples, "tool_invocation_count", **facts, status="succeeded", mutationClass="read_only") == 1
        assert of(samples, "tool_invocation_latency_ms_count", **facts, timeoutClass="standard") == 1

        denied = await way(Wish("notes.read", {"text": "hello"}, token="empty"))
        assert denied.error is not None
        assert denied.error[1] == "AUTHORIZATION_DENIED"
        late = await way(Wish("notes.wait", {"text": "hello"}, token="least"))
        assert late.error is not None
        assert late.error[1] == "DEADLINE_EXCEEDED"

        # Ten write to one account at once. What verifies is committed, what does not is undone, and neither is lost.
        posts = [Wish("notes.post", {"name": door, "cents": n}, key=f"{door}-{n}", token="least") for n in range(1, 11)]
        told = await asyncio.gather(*map(way, posts))
        assert [one.data for one in told] == [None if n % 2 else n for n in range(1, 11)]
        assert {one.error and one.error[0] for one in told} == {None, "E3417"}
        assert ledger[door] == 2 + 4 + 6 + 8 + 10
        await lock.journal.commit(lambda _: None)
        closed = [
            orjson.loads(body) for (body,) in lock.journal.reader.all("SELECT body FROM journal WHERE kind = 'closed'")
        ]
        ended = Counter((one["operation"], one["status"]) for one in closed if one["toolId"] == "notes.post")
        assert ended == {("invoke", "SUCCESS"): 5, ("invoke", "ERROR"): 5, ("compensate", "SUCCESS"): 5}


class Traced(Ways):
    """The ways in, with a trace to hang the call under."""

    traceparent = ""

    def _bearer(self, wish: Wish) -> dict[str, str]:
        return {**super()._bearer(wish), "traceparent": self.traceparent, "tracestate": "vendor=value"}

    async def _library(self, wish: Wish) -> Told:
        result = await self.lock.call(
            wish.tool, wish.arguments, token=self.token(wish.token), trace_id=f"{self.traceparent} vendor=value"
        )
        return Told(result.value)


@pytest.mark.supports("LIFE-03")
@pytest.mark.proves("OBS-02")
@pytest.mark.parametrize("door", DOORS)
async def test_a_trace_runs_from_the_client_to_the_upstream(home: Path, door: str) -> None:
    server = Scripted()
    async with far(home, server) as (lock, upstreams):
        await upstreams.add("far", "http", {"accept_hints": True}, by=lock.caller)
        token = await issued(lock)
        async with serving(Service(lock), Listening(port=0, grpc_port=0)) as serving_:
            assert serving_.grpc_port is not None
            ways = Traced(lock, f"http://127.0.0.1:{serving_.port}", serving_.grpc_port, {"full": token})
            try:
                for said, kept in ((GOOD, True), ("00-zz-1-01", False), ("00-" + "a" * 5000, False)):
                    ways.traceparent = said
                    assert (await ways.ways[door](Wish("far.look", {"text": "a"}))).data == {"said": "a"}
                    heard = read_trace(server.calls[-1].traceparent)
                    assert heard is not None
                    assert (heard.trace_id == TRACE) is kept
                    assert server.calls[-1].tracestate == ("vendor=value" if kept else "")
                    await lock.journal.commit(lambda _: None)
                    rows = lock.journal.reader.all("SELECT body FROM journal WHERE kind = 'closed' ORDER BY seq")
                    assert orjson.loads(rows[-1][0])["traceId"] == heard.trace_id
            finally:
                await ways.close()


async def issued(lock: Interlock) -> str:
    lock.issuer_keys.init("EdDSA")
    await lock.identities.register(Identity(did=did_of("bot"), name="bot", kind="agent", trust=80), by="test")
    return await lock.tokens.issue(subject=did_of("bot"), tools=[ToolGrant("*")], by=lock.caller)

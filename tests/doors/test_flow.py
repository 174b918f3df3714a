"""One flow through each door: find a tool, call it, see it traced, counted and on record, be denied, be cut off; write
to one place with others at the same time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema_rs
import orjson
import pytest

from interlock import Context, Effect, Interlock, Preview, tool
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.telemetry.w3c import read as read_trace
from tests import sample
from tests.support.answers import Told, Wish
from tests.support.calls import admit
from tests.support.endpoints import register_people
from tests.support.identities import did_of
from tests.support.metrics import of, render
from tests.support.upstreams import Scripted
from tests.support.upstreams import opened as far
from tests.support.wires import DOORS, SdkWires, served

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


@asynccontextmanager
async def opened(home: Path) -> AsyncGenerator[SdkWires]:
    async with Interlock.open(home, housekeeping=False, trace_ratio=1.0) as app:
        await admit(app, read, wait, post)
        app.issuer_keys.init("EdDSA")
        await register_people(app)
        tokens = {
            name: await app.tokens.issue(
                subject=did_of("bot"), user=did_of("ann"), tools=[ToolGrant("notes.*")], scopes=scopes, by=app.caller
            )
            for name, scopes in (("least", ("notes:read",)), ("empty", ()))
        }
        async with served(app, tokens) as ways:
            yield ways


@pytest.mark.proves("OBS-01")
@pytest.mark.proves("TEST-03")
@pytest.mark.parametrize("door", DOORS)
async def test_a_tool_is_found_called_traced_counted_recorded_denied_and_cut_off(home: Path, door: str) -> None:
    async with opened(home) as ways:
        app, way = ways.app, ways.rows[door].call
        assert await ways.rows[door].listed("least") == ["notes.post", "notes.read", "notes.wait"]
        told = await way(Wish("notes.read", {"text": "hello"}, token="least"))
        assert told == Told("hello")
        promised = await ways.http.get("/v1/tools/notes.read", headers=ways.bearer("least"))
        assert jsonschema_rs.validator_for(promised.json()["result_schema"]).is_valid(told.data)

        await app.journal.commit(lambda _: None)
        rows = app.journal.reader.all("SELECT body FROM journal WHERE kind = 'closed' ORDER BY seq")
        record: Json = orjson.loads(rows[-1][0])
        assert (record["status"], record["callerId"], record["agentId"]) == ("SUCCESS", did_of("ann"), did_of("bot"))
        assert record["door"] == door.partition("-")[0]

        caller = await app.caller_of(ways.tokens["least"])
        spans = app.gateway.telemetry.trace(record["traceId"], caller)
        assert {"tool.invoke", "Validate", "Authorize", "Execute", "Verify", "Return"} <= {one["name"] for one in spans}

        facts = {"toolId": "notes.read", "version": "1.0.0"}
        samples = await render(app)
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
        ends = await asyncio.gather(*map(way, posts))
        assert [one.data for one in ends] == [None if n % 2 else n for n in range(1, 11)]
        assert {one.error and one.error[0] for one in ends} == {None, "E3417"}
        assert ledger[door] == 2 + 4 + 6 + 8 + 10
        await app.journal.commit(lambda _: None)
        closed = [
            orjson.loads(body) for (body,) in app.journal.reader.all("SELECT body FROM journal WHERE kind = 'closed'")
        ]
        ended = Counter((one["operation"], one["status"]) for one in closed if one["toolId"] == "notes.post")
        assert ended == {("invoke", "SUCCESS"): 5, ("invoke", "ERROR"): 5, ("compensate", "SUCCESS"): 5}


class Traced(SdkWires):
    """Every wire, with a trace to hang the call under."""

    traceparent = ""

    def bearer(self, token: str = "full") -> dict[str, str]:
        return {**super().bearer(token), "traceparent": self.traceparent, "tracestate": "vendor=value"}


@pytest.mark.supports("LIFE-03")
@pytest.mark.proves("OBS-02")
@pytest.mark.parametrize("door", DOORS)
async def test_a_trace_runs_from_the_client_to_the_upstream(home: Path, door: str) -> None:
    server = Scripted()
    async with far(home, server) as (app, upstreams):
        await upstreams.add("far", "http", {"accept_hints": True}, by=app.caller)
        token = await issued(app)
        async with served(app, {"full": token}, Traced) as ways:
            for said, kept in ((GOOD, True), ("00-zz-1-01", False), ("00-" + "a" * 5000, False)):
                ways.traceparent = said
                assert (await ways.rows[door].call(Wish("far.look", {"text": "a"}))).data == {"said": "a"}
                heard = read_trace(server.calls[-1].traceparent)
                assert heard is not None
                assert (heard.trace_id == TRACE) is kept
                assert server.calls[-1].tracestate == ("vendor=value" if kept else "")
                await app.journal.commit(lambda _: None)
                rows = app.journal.reader.all("SELECT body FROM journal WHERE kind = 'closed' ORDER BY seq")
                assert orjson.loads(rows[-1][0])["traceId"] == heard.trace_id


async def issued(app: Interlock) -> str:
    app.issuer_keys.init("EdDSA")
    await app.identities.register(Identity(did=did_of("bot"), name="bot", kind="agent", trust=80), by="test")
    return await app.tokens.issue(subject=did_of("bot"), tools=[ToolGrant("*")], by=app.caller)

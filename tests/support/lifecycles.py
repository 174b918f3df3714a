"""Each endpoint over tools that wait, with what it tells of a call from its beginning to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, cast

import grpc.aio
import orjson

from interlock import Caller, Context, Effect, Failure, Field, Interlock, Preview, tool
from interlock.audit.invocations import invocation_of
from interlock.call.capability import ToolGrant
from interlock.call.events import Event
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from tests import sample
from tests.gateway import isolated_tools as cell
from tests.sample import TOOLS
from tests.support.calls import admit
from tests.support.identities import did_of
from tests.support.tokens import issuer_keys as _issuer_keys
from tests.support.ways import DOORS, Told, Ways, Wish, failed, register_people, served

Json = dict[str, Any]
# Each door once: that both eras of MCP answer alike is for test_parity to say.
ONE_EACH = DOORS[:5]
CHANNELS = [{"name": "chat", "url": "json://127.0.0.1:9/{secret}", "secret": "chat", "allow_private": True}]
Private = Annotated[
    str, Field(description="for nobody else", examples=["x"], json_schema_extra={"x-sensitivity": "pii"})
]


class Stage:
    """What holds the tools of these tests back."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.sent: list[str] = []
        self.talkers: list[Context] = []
        self.aborted: list[tuple[str, bool]] = []


stage = Stage()


@tool(version="1.0.0", mutation_class="read_only", namespace="life")
async def waits(ctx: Context) -> str:
    """Wait to be stopped."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        stage.aborted.append((ctx.invocation_id, ctx.cancelled))
        raise
    return "never"


@tool(version="1.0.0", mutation_class="read_only", namespace="life", cancellable=False)
async def insists(ctx: Context) -> str:
    """Run on, whoever asks it to stop."""
    await stage.release.wait()
    return "done"


@tool(version="1.0.0", mutation_class="read_only", namespace="life", timeout_class="long_running", timeout_s=60)
async def climbs(ctx: Context, steps: sample.Number) -> int:
    """Say how far it is, once the test lets it."""
    await stage.release.wait()
    for step in range(steps):
        ctx.progress(f"step {step}", percent=100 * (step + 1) / steps, current_step=step, total_steps=steps)
    return steps


@tool(version="1.0.0", mutation_class="read_only", namespace="life", timeout_class="async", timeout_s=60)
async def talks(ctx: Context) -> str:
    """Report progress, and leave behind what could report more."""
    stage.talkers.append(ctx)
    await stage.release.wait()
    ctx.progress("at work")
    return "done"


@tool(version="1.0.0", mutation_class="read_only", namespace="life")
async def left(ctx: Context) -> float:
    """How much time it has."""
    return ctx.remaining_s


@tool(version="1.0.0", mutation_class="write_irreversible", namespace="life", effects=[Effect("mail:{to}", "CREATE")])
async def mail(ctx: Context, to: sample.Text, note: Private = "none") -> str:
    """Send a mail that cannot be called back."""
    stage.sent.append(to)
    ctx.effect(f"mail:{to}", "CREATE", after=note)
    return to


@mail.preview
async def _(to: str, note: str) -> Preview:
    return Preview(preconditions={"reachable": True}, impact=f"{to} would read {note}")


@tool(version="1.0.0", mutation_class="read_only", namespace="life")
async def gives_up() -> str:
    """Run out of the time that somebody else gave it."""
    raise Failure("DEADLINE_EXCEEDED", "there is no time left")


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="life", effects=[Effect("clock:{name}", "UPDATE")],
)  # fmt: skip
async def measures(ctx: Context, name: sample.Text) -> float:
    """Write, and say how much time it has."""
    ctx.effect(f"clock:{name}", "UPDATE")
    return ctx.remaining_s


@measures.preview
async def _measured(name: str) -> Preview:
    return Preview(impact=name)


@measures.compensate
async def _unmeasured(name: str) -> None: ...


LIFE = (measures, waits, insists, climbs, talks, left, mail, gives_up)


class Place(Ways):
    """The ways in, with what else each door can be asked and told of a call."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.events: list[Event] = []
        self.app.listen(self.events.append)

    def records(self, *kinds: str) -> list[Json]:
        marks = ", ".join("?" * len(kinds))
        rows = self.app.journal.reader.all(f"SELECT body FROM journal WHERE kind IN ({marks}) ORDER BY seq", kinds)
        return [orjson.loads(body) for (body,) in rows]

    def invocation(self, call: str) -> Json:
        found = invocation_of([one for one in self.records("pending", "intent", "closed") if one["call"] == call])
        assert found is not None
        return found

    async def last(self, *kinds: str) -> Json:
        await self.app.journal.commit(lambda _: None)
        return self.records(*(kinds or ("closed", "pending")))[-1]

    def heard(self, call_id: str) -> list[str]:
        """The events of a call."""
        return [event.type for event in self.events if event.invocation_id == call_id]

    async def caller(self) -> Caller:
        return await self.app.caller_of(self.token("full"))

    async def _mcp(self, wish: Wish, door: str) -> Told:
        """Without the SDK's client where one request is all there is to it."""
        if door == "mcp-legacy":
            return await super()._mcp(wish, door)
        said: Json = {"interlock/dryRun": True} if wish.dry_run else {}
        said |= MODERN if wish.key is None else {**MODERN, "interlock/key": wish.key}
        params = {"name": wish.tool, "arguments": wish.arguments, "_meta": said}
        headers = {**self.bearer(wish.token), **TALK, "mcp-method": "tools/call", "mcp-name": wish.tool}
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        text = (await self.http.post("/mcp", json=request, headers=headers)).text
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
        answer: Json = orjson.loads(events[-1] if events else text)
        if "error" in answer:
            return failed(answer["error"]["data"])
        result: Json = answer["result"]
        told: Json = result["_meta"]
        if "interlock/error" in told:
            assert result["isError"]
            return failed(told["interlock/error"])
        if "interlock/pending" in told:
            return Told(pending=True)
        value: Json = told.get("interlock/preview") or result["structuredContent"]
        return Told(value["result"] if value.keys() == {"result"} else value)

    # What one call says of another

    async def cancel(self, door: str, call_id: str) -> str:
        bearer = self.bearer()
        if door == "library":
            if await self.app.approvals.withdraw(call_id, by=await self.caller()):
                return "canceled"
            return await self.app.cancel(call_id)
        if door == "rest":
            answer: Json = (await self.http.post(f"/v1/calls/{call_id}/cancel", headers=bearer)).json()
            return answer["outcome"]
        if door == "jsonrpc":
            return (await self.rpc("calls.cancel", {"invocation_id": call_id}))["result"]["answer"]
        request = wire.CancelRequest(invocation_id=call_id)
        told = await self.stub.Cancel(request, metadata=tuple(bearer.items()))
        return wire.CancelOutcome.Name(told.outcome).removeprefix("CANCEL_OUTCOME_").lower()

    # What is told of a call that waits, and of who may not call

    async def pending(self, door: str, wish: Wish) -> Json:
        """The pending envelope as it comes through a door."""
        bearer = self.bearer(wish.token)
        if door == "library":
            result = await self.app.call(wish.tool, wish.arguments, key=wish.key, token=self.token("full"))
            assert not result.document()["is_error"]
            return result.document()["pending"]
        if door == "rest":
            answer = await self.http.post("/v1/tools/invoke", json=self.body(wish), headers=bearer)
            assert answer.status_code == 202
            return answer.json()["pending"]
        if door == "jsonrpc":
            return (await self.rpc("tools.invoke", self.body(wish)))["result"]["pending"]
        if door == "grpc":
            request = wire.InvokeRequest(
                tool_id=wish.tool, arguments_json=orjson.dumps(wish.arguments), idempotency_key=wish.key
            )
            told = await self.stub.Invoke(request, metadata=tuple(bearer.items()))
            assert told.WhichOneof("outcome") == "pending"
            return orjson.loads(told.metadata_json)["pending"]
        async with self.mcp(door) as client:
            answer = await client.call_tool(wish.tool, {**wish.arguments, "idempotency_key": wish.key})
            assert not answer.is_error
            return answer.meta["interlock/pending"]

    async def knock(self, door: str, authorization: str | None) -> tuple[str | None, str | None]:
        """What a call is refused with under a header, in the wire's own words and by its code; None if it is not."""
        headers = {} if authorization is None else {"authorization": authorization}
        wish = Wish("demo.add", {"a": 1, "b": 1})
        if door == "rest":
            answer = await self.http.post("/v1/tools/invoke", json=self.body(wish), headers=headers)
            return str(answer.status_code), _code(answer.json().get("error"))
        if door == "jsonrpc":
            request = {"jsonrpc": "2.0", "id": 1, "method": "tools.invoke", "params": self.body(wish)}
            body: Json = (await self.http.post("/rpc", json=request, headers=headers)).json()
            answered: Json = body.get("error", {})
            return str(answered.get("code")), _code(answered.get("data"))
        if door == "grpc":
            asked = wire.InvokeRequest(tool_id=wish.tool, arguments_json=orjson.dumps(wish.arguments))
            try:
                await self.stub.Invoke(asked, metadata=tuple(headers.items()))
            except grpc.aio.AioRpcError as error:
                details = dict(cast("Any", error.trailing_metadata()))["grpc-status-details-bin"]
                return error.code().name, next(code for code in ("E3201", "E3202", "E3203", "E3212", "E3207")
                                               if code.encode() in details)  # fmt: skip
            return "OK", None
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call",
                "params": {"name": "demo-add", "arguments": wish.arguments}}  # fmt: skip
        headers |= {"accept": "application/json, text/event-stream"}
        if door == "mcp-modern":
            body["params"] |= {"_meta": MODERN}
            headers |= {**TALK, "mcp-method": "tools/call", "mcp-name": "demo-add"}
        else:
            body = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": HELLO}
        answer = await self.http.post("/mcp", json=body, headers=headers)
        told: Json = orjson.loads(answer.text) if answer.text.startswith("{") else {}
        return str(answer.status_code), _code(told.get("interlock"))


MODERN: Json = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {},
}  # fmt: skip
TALK = {"accept": "application/json, text/event-stream", "mcp-protocol-version": "2026-07-28"}
HELLO: Json = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}


def _code(envelope: Any) -> str | None:
    return None if envelope is None else cast("Json", envelope)["error_code"]


@asynccontextmanager
async def opened(home: Path, **settings: Any) -> AsyncGenerator[Place]:
    stage.__init__()
    given: Json = {"housekeeping": False, "trace_ratio": 1.0, "channels": CHANNELS, **settings}
    async with Interlock.open(home, **given) as app:
        for one in TOOLS:
            app.catalog.attach(one)
        await admit(app, *LIFE, cell.double, cell.lingers)
        for name, pem in _issuer_keys("RS256").items():
            (app.home.keys / "issuer").mkdir(exist_ok=True)
            (app.home.keys / "issuer" / name).touch(mode=0o600)
            (app.home.keys / "issuer" / name).write_bytes(pem)
        await register_people(app)
        token = await app.tokens.issue(subject=did_of("bot"), user=did_of("ann"), tools=[ToolGrant("*")], by=app.caller)
        async with served(app, {"full": token}, Place) as place:
            yield place

"""The life of a call through every door: phases, keys, tokens, approvals, deadlines, progress and cancellation."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import hmac
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, cast

import grpc.aio
import orjson
import pytest
import pytest_asyncio

from interlock import Caller, Context, Effect, Failure, Field, Hook, HookResult, Interlock, Preview, tool
from interlock.audit.invocations import invocation_of
from interlock.call.capability import ToolGrant
from interlock.call.events import Event
from interlock.contract.standard import ToolInvocation, ToolProgress, ToolResult
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from tests import processes, sample
from tests.authority.test_tokens import _issuer_keys, part, parts, sign  # pyright: ignore[reportPrivateUsage]
from tests.conftest import TOOLS
from tests.gateway import isolated_tools as cell
from tests.support import source
from tests.support.calls import admit, until
from tests.support.identities import did_of, private_key
from tests.support.ways import DOORS, Told, Ways, Wish, failed, register_people, served

Json = dict[str, Any]
SIX = ["request", "validate", "authorize", "execute", "verify", "return"]
REVIEWER = Caller(id="local:reviewer", groups=frozenset({"approvers"}))
# Each door once: that both eras of MCP answer alike is for test_parity to say.
ONE_EACH = DOORS[:5]
# The doors by which one call can be spoken of in another; MCP's clients cancel what they wait for themselves.
BY_ID = ("library", "rest", "jsonrpc", "grpc")
CANARY = "Quux-private-7731"
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
        self.lock.listen(self.events.append)

    def records(self, *kinds: str) -> list[Json]:
        marks = ", ".join("?" * len(kinds))
        rows = self.lock.journal.reader.all(f"SELECT body FROM journal WHERE kind IN ({marks}) ORDER BY seq", kinds)
        return [orjson.loads(body) for (body,) in rows]

    def invocation(self, call: str) -> Json:
        found = invocation_of([one for one in self.records("pending", "intent", "closed") if one["call"] == call])
        assert found is not None
        return found

    async def last(self, *kinds: str) -> Json:
        await self.lock.journal.commit(lambda _: None)
        return self.records(*(kinds or ("closed", "pending")))[-1]

    def heard(self, call_id: str) -> list[str]:
        """The events of a call."""
        return [event.type for event in self.events if event.invocation_id == call_id]

    async def caller(self) -> Caller:
        return await self.lock.caller_of(self.token("full"))

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
            if await self.lock.approvals.withdraw(call_id, by=await self.caller()):
                return "canceled"
            return await self.lock.cancel(call_id)
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
            result = await self.lock.call(wish.tool, wish.arguments, key=wish.key, token=self.token("full"))
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
    async with Interlock.open(home, **given) as lock:
        for one in TOOLS:
            lock.catalog.attach(one)
        await admit(lock, *LIFE, cell.double, cell.lingers)
        for name, pem in _issuer_keys("RS256").items():
            (lock.home.keys / "issuer").mkdir(exist_ok=True)
            (lock.home.keys / "issuer" / name).touch(mode=0o600)
            (lock.home.keys / "issuer" / name).write_bytes(pem)
        await register_people(lock)
        token = await lock.tokens.issue(
            subject=did_of("bot"), user=did_of("ann"), tools=[ToolGrant("*")], by=lock.caller
        )
        async with served(lock, {"full": token}, Place) as place:
            yield place


@pytest_asyncio.fixture
async def place(home: Path) -> AsyncGenerator[Place]:
    async with opened(home) as made:
        yield made


# Phases


@pytest.mark.part_of("LIFE-01", rest="composites, sagas and fallbacks, which do not exist yet")
async def test_through_every_door_a_call_passes_the_six_phases_in_order(place: Place) -> None:
    for door in DOORS:
        way = place.ways[door]
        for wish in (
            Wish("demo.add", {"a": 1}),
            Wish("cell.double", {"n": 2}),
            Wish("demo.increment", {"name": door}, key=f"k-{door}"),
            Wish("demo.increment", {"name": door}, key=f"k-{door}"),
            Wish("demo.increment", {"name": door}, dry_run=True),
        ):
            told = await way(wish)
            assert told.error is None, (door, wish)
            record = await place.last()
            assert (record["phases"], record["states"][-1]) == (SIX, "succeeded"), (door, wish)
        # One that waited goes on by being sent again, and passes all of them again.
        gated = Wish("life.mail", {"to": door}, key=f"m-{door}")
        assert (await way(gated)).pending
        asked = await place.last()
        assert asked["phases"] == SIX[:3]
        await place.lock.approvals.approve(asked["approvalTicketId"], by=REVIEWER)
        assert (await way(gated)).data == door
        record = await place.last()
        assert (record["phases"], record["call"]) == (SIX, asked["call"])
    assert stage.sent == list(DOORS)


@pytest.mark.part_of("LIFE-01", rest="composites, sagas and fallbacks, which do not exist yet")
async def test_every_attempt_and_every_resumption_passes_the_phases_again(place: Place) -> None:
    sample.flaky.failures = [Failure("E3502", retry_after_ms=1), Failure("E3502", retry_after_ms=1)]
    assert (await place.lock.call_with_retries("demo.unsteady", {"name": "a"}, key="r")).ok
    attempts = place.records("closed")[-3:]
    assert [one["phases"] for one in attempts] == [[*SIX[:4], "return"], [*SIX[:4], "return"], SIX]
    for door in BY_ID[1:]:
        call = (await place.pending(door, Wish("life.mail", {"to": door}, key=door)))["ticketId"]
        await place.lock.approvals.approve(call, by=REVIEWER)
        waiting = (await place.lock.approvals.show(call)).call
        await _resume(place, door, waiting)
        record = await place.last()
        assert (record["call"], record["phases"], record["status"]) == (waiting, SIX, "SUCCESS")


async def _resume(place: Place, door: str, call_id: str) -> None:
    bearer = {"authorization": f"Bearer {place.token('full')}"}
    if door == "rest":
        assert (await place.http.post(f"/v1/tools/resume/{call_id}", headers=bearer)).status_code == 200
    elif door == "jsonrpc":
        assert "result" in await place.rpc("calls.resume", {"invocation_id": call_id})
    else:
        request = wire.ResumeRequest(invocation_id=call_id)
        await place.stub.Resume(request, metadata=tuple(bearer.items()))


# What a request carries


@pytest.mark.proves("LIFE-03")
async def test_what_a_request_leaves_out_is_refused_or_filled_in_by_every_door(place: Place) -> None:
    for door in ONE_EACH:
        way = place.ways[door]
        assert (await way(Wish("demo.add", {}))).error == ("E3301", "INVALID_INPUT", "schema_validation_failed", False)
        keyless = await way(Wish("demo.increment", {"name": "a"}))
        assert keyless.error is not None
        assert keyless.error[:2] == ("E3307", "INVALID_INPUT")
        # No version: the newest. No trace: a new one, no two alike. No deadline: the class's.
        bounded = await way(Wish("life.left", {}))
        first = await place.last()
        await way(Wish("life.left", {}))
        second = await place.last()
        assert 0 < bounded.data <= 5.0
        assert first["version"] == "1.0.0"
        assert len({first["traceId"], second["traceId"], ""}) == 3
        assert (first["callerId"], first["agentId"]) == (did_of("ann"), did_of("bot"))
        assert {"timestamp", "latencyMs", "policy", "rules", "states", "door", "inputHash"} <= first.keys()
        if door != "library":
            assert (await place.knock(door, None))[1] == "E3212"


@pytest.mark.proves("LIFE-03")
@pytest.mark.part_of("CONTRACT-20", rest="A2A and browsers, which have no adapter yet")
async def test_what_is_on_record_of_a_call_is_a_tool_invocation_whichever_door_it_came_by(place: Place) -> None:
    for door in DOORS:
        for wish in (Wish("demo.add", {"a": 1}), Wish("demo.increment", {"name": door}, key=f"on-record-{door}")):
            await place.ways[door](wish)
            call = (await place.last("closed"))["call"]
            found = place.invocation(call)
            written = wish.key is not None
            assert ToolInvocation.parse(found).document() == found
            assert (found["invocation_id"], found["tool_id"], found["status"]) == (call, wish.tool, "succeeded")
            states = [one["state"] for one in found["transitions"]]
            middle = ["queued", "running"] if written else ["running"]
            assert states == ["planned", "selected", "arguments_ready", *middle, "succeeded"]
            known = [one["at"] for one in found["transitions"] if one["at"] is not None]
            assert known == sorted(known)
            assert (known[0], known[-1], len(known)) == (found["started_at"], found["ended_at"], 3 if written else 2)
            assert [f"caller:{did_of('ann')}", f"agent:{did_of('bot')}"] == found["actor_refs"][1:]
            assert found["runtime_refs"][:2] == [f"door:{door.partition('-')[0]}", "version:1.0.0"]
            assert all(found[refs] for refs in ("policy_refs", "evidence_refs", "telemetry_refs"))
            assert (found["native_call_id"] is not None) == (door in ("jsonrpc", "mcp-modern", "mcp-legacy"))
            kinds = [(one["kind"], one["jsonrpc_request_id"]) for one in found["external_mappings"]]
            assert [(kind, str(own)) for kind, own in kinds] == (
                [("mcp", found["native_call_id"])] if door.startswith("mcp") else []
            )
            told = await place.http.get(f"/v1/calls/{call}", headers=place.bearer(wish.token))
            assert told.json()["invocation"] == found


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


async def _carried(place: Place, door: str, key: str) -> Any:
    """A write that carries everything a request can, by one door; the time that its tool had."""
    headers = {**place.bearer(), "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    body: Json = {
        "tool_id": "life.measures", "tool_version": "1.0.0", "parameters": {"name": door}, "idempotency_key": key,
        "timeout_ms": 2000,
    }  # fmt: skip
    if door == "library":
        options: Json = {"version": "1.0.0", "key": key, "timeout_s": 2.0, "trace_id": headers["traceparent"]}
        return (await place.lock.call("life.measures", {"name": door}, token=place.token("full"), **options)).unwrap()
    if door == "rest":
        return (await place.http.post("/v1/tools/invoke", json=body, headers=headers)).json()["result"]
    if door == "jsonrpc":
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools.invoke", "params": body}
        answer: Json = (await place.http.post("/rpc", json=request, headers=headers)).json()
        return answer["result"]["structured_content"]
    if door == "grpc":
        asked = wire.InvokeRequest(
            tool_id="life.measures", version="1.0.0", arguments_json=orjson.dumps({"name": door}), idempotency_key=key
        )
        told = await place.stub.Invoke(asked, metadata=tuple(headers.items()), timeout=2)
        return orjson.loads(told.value_json)
    async with place.mcp(door) as client:
        meta = {
            "interlock/key": key, "interlock/version": "1.0.0", "interlock/timeoutMs": 2000,
            "traceparent": headers["traceparent"],
        }  # fmt: skip
        return (await client.call_tool("life-measures", {"name": door}, meta=meta)).structured_content["result"]


@pytest.mark.proves("LIFE-03")
@pytest.mark.parametrize("door", DOORS)
async def test_a_request_carries_version_key_trace_and_deadline_through_every_door(place: Place, door: str) -> None:
    left_s = await _carried(place, door, f"whole-{door}")
    assert 0 < left_s <= 2.1, "5 s are what its class allows; gRPC rounds a timeout up"
    record = await place.last("closed")
    assert (record["toolId"], record["version"], record["idempotencyKey"]) == (
        "life.measures", "1.0.0", f"whole-{door}",
    )  # fmt: skip
    assert (record["callerId"], record["traceId"]) == (did_of("ann"), TRACE)


async def _answered_trace(place: Place, door: str) -> str:
    """The trace id that the answer to a call carries, which was made under a trace of the caller's."""
    traceparent = f"00-{TRACE}-00f067aa0ba902b7-01"
    headers = {**place.bearer(), "traceparent": traceparent}
    body: Json = {"tool_id": "demo.add", "parameters": {"a": 1}}
    if door == "library":
        options: Json = {"token": place.token("full"), "trace_id": traceparent}
        return (await place.lock.call("demo.add", {"a": 1}, **options)).trace_id
    if door == "rest":
        return (await place.http.post("/v1/tools/invoke", json=body, headers=headers)).json()["trace_id"]
    if door == "jsonrpc":
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools.invoke", "params": body}
        (ref,) = (await place.http.post("/rpc", json=request, headers=headers)).json()["result"]["telemetry_refs"]
        return ref.removeprefix("trace:")
    if door == "grpc":
        asked = wire.InvokeRequest(tool_id="demo.add", arguments_json=b'{"a":1}')
        return (await place.stub.Invoke(asked, metadata=tuple(headers.items()))).trace_id
    async with place.mcp(door) as client:
        answer = await client.call_tool("demo-add", {"a": 1}, meta={"traceparent": traceparent})
        return answer.meta["interlock/call"]["traceId"]


@pytest.mark.proves("OBS-02")
@pytest.mark.parametrize("door", DOORS)
async def test_the_answer_of_every_door_carries_the_callers_trace(place: Place, door: str) -> None:
    assert await _answered_trace(place, door) == TRACE
    assert (await place.last("closed"))["traceId"] == TRACE


@pytest.mark.proves("LIFE-03")
@pytest.mark.parametrize("state", ["failed", "validation_failed", "denied", "blocked", "timed_out", "canceled"])
async def test_an_invocation_has_every_transition_to_each_end(place: Place, state: str) -> None:
    place.lock.hook(Hook(id="hush", when="pre", tools="demo.shout", run=lambda _: HookResult(stop="hush")))
    place.lock.hook(Hook(id="no", when="pre", tools="demo.send", run=lambda _: HookResult(permission="deny")))
    if state == "canceled":
        task, call = await _begun(place, "rest", Wish("life.waits", {}))
        await place.cancel("rest", call)
        await task
    else:
        await place.ways["rest"](ENDS[state][0])
        call = (await place.last("closed"))["call"]
    await place.lock.journal.commit(lambda _: None)
    found = place.invocation(call)
    assert ToolInvocation.parse(found).document() == found
    assert ([one["state"] for one in found["transitions"]], found["status"]) == (PASSED[state], state)
    assert found["ended_at"] is not None


READY = ["planned", "selected", "arguments_ready"]
PASSED: Mapping[str, list[str]] = {
    "failed": ["planned", "failed"],
    "validation_failed": ["planned", "selected", "validation_failed"],
    "denied": [*READY, "pre_hooks_running", "denied"],
    "blocked": [*READY, "pre_hooks_running", "blocked"],
    "timed_out": [*READY, "running", "timed_out"],
    "canceled": [*READY, "running", "canceled"],
}


@pytest.mark.proves("LIFE-03")
async def test_an_approved_call_is_one_invocation_from_its_request_to_its_end(place: Place) -> None:
    wish = Wish("life.mail", {"to": "ann"}, key="agreed")
    ticket = (await place.pending("rest", wish))["ticketId"]
    await place.lock.approvals.approve(ticket, by=REVIEWER)
    assert (await place.ways["rest"](wish)).data == "ann"
    states = [one["state"] for one in place.invocation((await place.last("closed"))["call"])["transitions"]]
    assert states == [*READY, "awaiting_approval", "approved", "queued", "running", "succeeded"]


@pytest.mark.proves("LIFE-03")
@pytest.mark.parametrize("sent", [0, -7, "7", "a" * 200, "é\u2028", "a" * 201])
async def test_a_client_finds_its_call_by_its_own_id(place: Place, sent: int | str) -> None:
    body = {"jsonrpc": "2.0", "id": sent, "method": "tools.invoke", "params": ["demo.add", {"a": 1}]}
    answer = await place.http.post("/rpc", json=body, headers={"authorization": f"Bearer {place.token('full')}"})
    assert answer.json()["id"] == sent
    kept = place.invocation((await place.last("closed"))["call"])["native_call_id"]
    if len(str(sent)) > 200:
        assert kept == f"sha256:{hashlib.sha256(str(sent).encode()).hexdigest()}"
    else:
        assert kept == str(sent)


@pytest.mark.proves("LIFE-03")
async def test_a_call_that_waits_for_a_person_is_an_invocation_already(place: Place) -> None:
    wish = Wish("life.mail", {"to": "ann"}, key="not-yet")
    await place.pending("rest", wish)
    found = place.invocation((await place.last("pending"))["call"])
    assert ToolInvocation.parse(found).document() == found
    assert (found["status"], found["ended_at"]) == ("awaiting_approval", None)


# Ends

ENDS: Mapping[str, tuple[Wish, str, int]] = {
    "failed": (Wish("demo.nothing", {}), "E3101", 404),
    "validation_failed": (Wish("demo.add", {"a": "many"}), "E3301", 400),
    "denied": (Wish("demo.send", {"to": "eve"}, key="no"), "E3206", 403),
    "blocked": (Wish("demo.shout", {"text": "hush"}), "E3211", 403),
    "timed_out": (Wish("life.gives_up", {}), "E3402", 504),
}


@pytest.mark.part_of(
    "LIFE-08",
    rest="in batched audit mode, records of reads that were answered just before a kill",
)
@pytest.mark.parametrize("state", ENDS)
async def test_through_every_door_each_end_is_one_result_one_record_and_one_event(place: Place, state: str) -> None:
    wish, code, status = ENDS[state]
    place.lock.hook(Hook(id="hush", when="pre", tools="demo.shout", run=lambda _: HookResult(stop="hush")))
    place.lock.hook(Hook(id="no", when="pre", tools="demo.send", run=lambda _: HookResult(permission="deny")))
    for door in DOORS:
        told = await place.ways[door](wish)
        assert told.error is not None, door
        record = await place.last()
        assert (told.error[0], record["error_code"], record["states"][-1]) == (code, code, state), door
        assert sum(one["call"] == record["call"] for one in place.records("closed")) == 1
        heard = place.heard(record["call"])
        assert heard.count("tool.result.created") == 1
        assert heard[-1] == "tool.result.created"
    answer = await place.http.post("/v1/tools/invoke", json=place.body(wish), headers=place.bearer(wish.token))
    assert answer.status_code == status
    told = answer.json()["tool_result"]
    ToolResult.parse(told)
    assert (told["status"], told["is_error"], told["error"]["error_code"]) == (state, True, code)
    if state != "failed":
        async with place.mcp("mcp-modern") as client:
            key = {} if wish.key is None else {"idempotency_key": wish.key}
            assert (await client.call_tool(wish.tool, {**wish.arguments, **key})).is_error


@pytest.mark.part_of(
    "LIFE-08",
    rest="in batched audit mode, records of reads that were answered just before a kill",
)
async def test_a_rejected_approval_is_one_end_whichever_door_asks_again(place: Place) -> None:
    for door in DOORS:
        wish = Wish("life.mail", {"to": door}, key=door)
        ticket = (await place.pending(door, wish))["ticketId"]
        await place.lock.approvals.deny(ticket, by=REVIEWER)
        closed = await place.last("closed")
        assert (closed["states"][-1], closed["error_code"], closed["status"]) == ("denied", "E3209", "ERROR")
        again = await place.ways[door](wish)
        assert again.error is not None
        assert again.error[0] == "E3209"
        assert sum(one["call"] == closed["call"] for one in place.records("closed")) == 1
        assert "approval.denied" in place.heard(closed["call"])
    assert stage.sent == []


# Time


@pytest.mark.proves("LIFE-10", "AUDIT-01")
async def test_at_every_door_a_tool_that_overruns_is_cut_off_with_all_its_processes(place: Place) -> None:
    calls = [
        place.ways[door](Wish("cell.lingers", {"marker": f"86{place_of:04}"})) for place_of, door in enumerate(DOORS)
    ]
    for told in await asyncio.gather(*calls):
        assert told.error is not None
        assert told.error == ("E3402", "DEADLINE_EXCEEDED", "timeout", True)
    await place.last()
    closed = [one for one in place.records("closed") if one["toolId"] == "cell.lingers"]
    assert [(one["status"], one["errorCode"]) for one in closed] == [("TIMEOUT", "DEADLINE_EXCEEDED")] * len(DOORS)
    assert len({one["call"] for one in closed}) == len(DOORS)
    await until(lambda: not _running("86000"))


def _running(marker: str) -> bool:
    """Whether a sleeper that was given a marker runs on this machine."""
    lines = processes.told("cmdline")
    return any(line.startswith(b"/bin/sleep") and marker.encode() in line for line in lines)


# Progress


@pytest.mark.proves("LIFE-14")
async def test_the_same_progress_arrives_in_order_over_the_library_rest_grpc_and_mcp(place: Place) -> None:
    def seen(records: list[Json]) -> list[tuple[Any, ...]]:
        return [(one["sequence"], one["message"], one["percent"], one["current_step"]) for one in records]

    expected = [(step + 2, f"step {step}", 100 * (step + 1) / 5, step) for step in range(5)]
    heard: list[Json] = []
    stage.release.set()
    await place.lock.call("life.climbs", {"steps": 5}, on_progress=heard.append, token=place.token("full"))
    assert heard[0]["message"] == "started"  # a call that may take long says so at least once
    assert seen(heard[1:]) == expected
    fields = {
        "schema_version", "progress_id", "invocation_id", "sequence", "status", "message", "percent", "current_step",
        "total_steps", "elapsed_ms", "bytes_read", "bytes_written", "line_count", "partial_result_refs",
        "artifact_refs", "timestamp",
    }  # fmt: skip
    for record in heard:
        ToolProgress.parse(record)
        assert set(record) == fields

    over_rest = await _followed(place)
    assert seen(over_rest) == expected
    assert all(set(record) == fields for record in over_rest)

    async def start() -> AsyncGenerator[wire.RunRequest]:
        yield wire.RunRequest(start=wire.InvokeRequest(tool_id="life.climbs", arguments_json=b'{"steps":5}'))

    bearer = (("authorization", f"Bearer {place.token('full')}"),)
    stream = place.stub.Run(start(), metadata=bearer)
    events = [event async for event in stream]
    told = [event.progress for event in events if event.HasField("progress")]
    over_grpc = [
        {"sequence": one.sequence, "message": one.message, "percent": one.percent, **orjson.loads(one.facts_json)}
        for one in told[1:]
    ]
    assert seen(over_grpc) == expected
    assert events[-1].HasField("result")

    for door in ("mcp-modern", "mcp-legacy"):
        notified: list[tuple[Any, ...]] = []

        async def note(far: float, total: float | None, message: str | None, into: Any = notified) -> None:
            into.append((message, far, total))

        async with place.mcp(door) as client:
            await client.call_tool("life.climbs", {"steps": 5}, progress_callback=note)
        assert notified[1:] == [(message, percent, 100.0) for _, message, percent, _ in expected], door


@pytest.mark.proves("LIFE-14")
async def test_the_event_stream_of_a_call_that_has_ended_takes_no_more_progress(place: Place) -> None:
    bearer = {"authorization": f"Bearer {place.token('full')}"}
    body: Json = {"tool_id": "life.talks", "parameters": {}, "execution_mode": "async"}
    call: Json = (await place.http.post("/v1/tools/invoke", json=body, headers=bearer)).json()
    async with place.http.stream("GET", call["events"], headers=bearer) as stream:
        await until(lambda: len(place.lock.gateway.observer.followers) > 0)
        stage.release.set()
        first = _told([line async for line in stream.aiter_lines()])
    stage.talkers[0].progress("too late")
    again = await place.http.get(call["events"], headers={**bearer, "last-event-id": "0"})
    for heard in (first, _told(again.text.splitlines())):
        assert heard[-1]["event_class"] == "tool.invocation.status"
        steps = [one["data"]["message"] for one in heard if one["event_class"] == "tool.invocation.progress"]
        assert steps == ["at work"]


def _told(lines: list[str]) -> list[Json]:
    """The events of a stream."""
    return [orjson.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


async def _followed(place: Place) -> list[Json]:
    """The progress of a background call, as its event stream tells it."""
    stage.release.clear()
    http, bearer = place.http, {"authorization": f"Bearer {place.token('full')}"}
    body = {"tool_id": "life.climbs", "parameters": {"steps": 5}, "execution_mode": "async"}
    call: Json = (await http.post("/v1/tools/invoke", json=body, headers=bearer)).json()
    listening = len(place.lock.gateway.observer.followers)
    async with http.stream("GET", call["events"], headers=bearer) as stream:
        await until(lambda: len(place.lock.gateway.observer.followers) > listening)
        stage.release.set()
        heard = _told([line async for line in stream.aiter_lines()])
    assert heard[-1]["event_class"] == "tool.invocation.status"  # and none after the end
    return [one["data"] for one in heard if one["event_class"] == "tool.invocation.progress" and "step" in str(one)]


# Cancellation


@pytest.mark.supports("OPS-03")
@pytest.mark.proves("LIFE-15")
async def test_a_running_call_is_cancelled_through_every_door(place: Place) -> None:
    for door in DOORS:
        task, call_id = await _begun(place, door, Wish("life.waits", {}))
        assert await _stopped(place, door, task, call_id) in ("canceled", None)
        await until(lambda call_id=call_id: any(one["call"] == call_id for one in place.records("closed")))
        (record,) = [one for one in place.records("closed") if one["call"] == call_id]
        assert (record["states"][-1], record["error_code"]) == ("canceled", "E3703"), door
        assert stage.aborted[-1] == (call_id, True), "the tool was stopped, and its context says so"
        assert place.heard(call_id).count("tool.invocation.cancel_requested") == 1
        if door in BY_ID:
            told = await task
            assert told.error is not None
            assert told.error[0] == "E3703"


async def _begun(place: Place, door: str, wish: Wish) -> tuple[asyncio.Future[Told], str]:
    """A call on its way, and its id once its tool runs."""
    before = len(place.events)
    task = asyncio.ensure_future(place.ways[door](wish))

    def started() -> list[str]:
        return [event.invocation_id for event in place.events[before:] if event.type == "tool.invocation.started"]

    await until(started)
    call_id = started()[0]
    await until(lambda: any(one["call"] == call_id for one in place.records("started", "intent")))
    return task, call_id


async def _stopped(place: Place, door: str, task: asyncio.Future[Told], call_id: str) -> str | None:
    """Ask for a call to end in the door's own way: by its id, or by no longer waiting for it."""
    if door in BY_ID:
        return await place.cancel(door, call_id)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return None


@pytest.mark.proves("LIFE-15")
async def test_a_call_in_the_queue_is_cancelled_through_every_door_and_never_runs(place: Place) -> None:
    for door in DOORS:
        sample.world.gate = asyncio.Event()
        first, _ = await _begun(place, "library", Wish("demo.increment", {"name": door}, key=f"1-{door}"))
        intents = len(place.records("intent"))
        second = asyncio.ensure_future(place.ways[door](Wish("demo.increment", {"name": door}, key=f"2-{door}")))
        await until(lambda intents=intents: len(place.records("intent")) > intents)
        waiting = (await place.last("intent"))["call"]
        assert await _stopped(place, door, second, waiting) in ("canceled", None)
        await until(lambda waiting=waiting: any(one["call"] == waiting for one in place.records("closed")))
        (record,) = [one for one in place.records("closed") if one["call"] == waiting]
        assert (record["states"][-2:], record["error_code"]) == (["queued", "canceled"], "E3703"), door
        assert place.heard(waiting).count("tool.invocation.cancel_requested") == 1, door
        sample.world.gate.set()
        assert (await first).data == 1
        # It left nothing behind: its key is free for the same call.
        assert (await place.ways[door](Wish("demo.increment", {"name": door}, key=f"2-{door}"))).data == 2
    assert sample.world.runs == 2 * len(DOORS)


@pytest.mark.proves("LIFE-15")
async def test_a_call_that_waits_for_a_person_is_taken_back_by_id_and_never_runs(place: Place) -> None:
    for door in BY_ID:
        wish = Wish("life.mail", {"to": door}, key=door)
        ticket_id = (await place.pending(door, wish))["ticketId"]
        call_id = (await place.lock.approvals.show(ticket_id)).call
        assert await place.cancel(door, call_id) == "canceled"
        closed = await place.last("closed")
        assert (closed["call"], closed["states"][-2:]) == (call_id, ["awaiting_approval", "canceled"])
        assert closed["error_code"] == "E3703"
        assert place.heard(call_id)[-2:] == ["tool.invocation.cancel_requested", "tool.invocation.canceled"]
        assert (await place.lock.approvals.show(ticket_id)).state == "VOID"
        with pytest.raises(Failure) as refused:
            await place.lock.approvals.approve(ticket_id, by=REVIEWER)
        assert refused.value.code == "E3411"
        # Ended is ended; and whoever wants it after all asks anew.
        assert await place.cancel(door, call_id) == "finished"
        assert (await place.pending(door, wish))["ticketId"] != ticket_id
    assert stage.sent == []


@pytest.mark.proves("LIFE-15")
async def test_what_has_ended_or_cannot_be_cancelled_says_so_and_changes_nothing(place: Place) -> None:
    for door in BY_ID:
        await place.ways[door](Wish("demo.add", {"a": 1}))
        ended = await place.last()
        assert await place.cancel(door, ended["call"]) == "finished"
        assert (await place.last("closed"))["call"] == ended["call"]
        assert place.heard(ended["call"])[-1] == "tool.invocation.cancel_requested"
    for door in DOORS:
        stage.release.clear()
        task, call_id = await _begun(place, door, Wish("life.insists", {}))
        assert await _stopped(place, door, task, call_id) in ("unsupported", None)
        await until(lambda call_id=call_id: "tool.invocation.cancel_requested" in place.heard(call_id))
        stage.release.set()
        await until(lambda call_id=call_id: any(one["call"] == call_id for one in place.records("closed")))
        assert (await place.last("closed"))["states"][-1] == "succeeded", door
        assert place.heard(call_id).count("tool.invocation.cancel_requested") == 1
        if door in BY_ID:
            assert (await task).data == "done"
    answers = [record["answer"] for record in place.records("cancel")]
    assert answers == ["finished"] * len(BY_ID) + ["unsupported"] * len(DOORS)


# Keys


@pytest.mark.proves("IDEM-01", "LIFE-07")
async def test_no_door_lets_a_write_through_without_a_proper_key_of_its_callers_own(place: Place) -> None:
    for door in ONE_EACH:
        for key in (None, "", "has space", "x" * 256):
            told = await place.ways[door](Wish("demo.increment", {"name": "a"}, key=key))
            assert told.error is not None, (door, key)
            assert told.error[:2] == ("E3307", "INVALID_INPUT"), (door, key)
            record = await place.last()
            assert record["phases"] == ["request", "validate", "return"]  # before anybody was asked
    for door in ("mcp-modern", "mcp-legacy"):
        async with place.mcp(door) as client:
            listed = {one.name: one.input_schema for one in (await client.list_tools()).tools}
            assert "idempotency_key" in listed["demo-increment"]["required"]
            assert "idempotency_key" not in listed["demo-add"]["properties"]
            for given in ({"idempotency_key": 7}, {"idempotency_key": "has space"}, {"idempotency_key": None}, {}):
                refused = await client.call_tool("demo-increment", {"name": "a", **given})
                assert refused.meta["interlock/error"]["error_code"] == "E3307"
            taken = await client.call_tool("demo-increment", {"name": door, "idempotency_key": door})
            assert taken.structured_content == {"result": 1}
            assert (await place.last())["idempotencyKey"] == door
    assert sample.world.runs == 2


@pytest.mark.proves("IDEM-01")
def test_no_part_of_the_server_makes_a_key_for_a_caller() -> None:
    """Whatever hands a call on hands on the key it was given; only what Interlock itself undoes has one of its own."""
    makers: set[str] = set()
    for file, node in source.nodes_with("key="):
        if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] not in MAKERS:
            continue
        for given in node.keywords:
            if given.arg == "key" and any(isinstance(one, ast.Call | ast.JoinedStr) for one in ast.walk(given.value)):
                makers.add(f"{file}: {ast.unparse(given.value)}")
    assert makers - ALLOWED == set()


MAKERS = ("Request", "Ask", "replace", "invoke", "call", "request")
ALLOWED = {
    "gateway/results/roll_back.py: f'rollback-{call.id}'",  # undoes what did not verify
    # As a caller would: handing on what a wire says, and derived by the library for whoever asks it to.
    "doors/grpc/messages.py: request.idempotency_key if request.HasField('idempotency_key') else None",
    "doors/jsonrpc.py: _text(idempotency_key, 'idempotency_key')",
    "doors/mcp/calling.py: key if isinstance(key, str) else ''",
    "doors/mcp/calling.py: meta.get(_KEY) or wanted.key",
    "gateway/execution/tool_context.py: options.pop('key', None)",
    "trials.py: f'{request.key}-undo'",  # a contract test is its own caller
}


@pytest.mark.proves("IDEM-06")
async def test_at_every_door_a_known_key_with_another_argument_is_a_conflict(place: Place) -> None:
    for door in DOORS:
        wish = Wish("demo.increment", {"name": door}, key=door)
        assert (await place.ways[door](wish)).data == 1
        for other in ({"name": door, "by": 2}, {"name": f"{door}-other"}):
            told = await place.ways[door](Wish("demo.increment", other, key=door))
            assert told.data is None
            assert told.error is not None
            assert told.error[:2] == ("E3306", "CONFLICT"), door
        assert sample.world.counters[door] == 1
    assert sample.world.runs == len(DOORS)
    await _conflicts_on_the_wires(place, Wish("demo.increment", {"name": "z"}, key="rest"))
    assert sample.world.runs == len(DOORS)


@tool(
    version="1.1.0", mutation_class="write_reversible", namespace="demo", effects=[Effect("counter:{name}", "UPDATE")]
)
async def increment(ctx: Context, name: sample.Name, by: sample.Number = 1) -> int:
    """Count, as the next version does it."""
    sample.world.runs += 1
    return -1


@increment.preview
def _(name: str, by: int) -> Preview:
    return Preview()


@increment.compensate
async def _(name: str) -> None:
    return None


@pytest.mark.proves("IDEM-06")
async def test_at_every_door_a_known_key_at_another_version_is_a_conflict(place: Place) -> None:
    for door in DOORS:
        assert (await place.ways[door](Wish("demo.increment", {"name": door}, key=door))).data == 1
    # The same call, word for word: only the version that the name stands for is another one.
    await admit(place.lock, increment)
    await place.lock.catalog.forget()
    for door in DOORS:
        told = await place.ways[door](Wish("demo.increment", {"name": door}, key=door))
        assert told.data is None, door
        assert told.error is not None, door
        assert told.error[:2] == ("E3306", "CONFLICT"), door
        assert (await place.last())["version"] == "1.1.0"
        assert sample.world.counters[door] == 1
    assert sample.world.runs == len(DOORS)
    await _conflicts_on_the_wires(place, Wish("demo.increment", {"name": "rest"}, key="rest"))
    assert sample.world.runs == len(DOORS)
    assert (await place.ways["library"](Wish("demo.increment", {"name": "fresh"}, key="fresh"))).data == -1


async def _conflicts_on_the_wires(place: Place, wish: Wish) -> None:
    """A conflict is 409 over HTTP; JSON-RPC and gRPC have codes of their own for it."""
    body, bearer = place.body(wish), place.bearer(wish.token)
    assert (await place.http.post("/v1/tools/invoke", json=body, headers=bearer)).status_code == 409
    asked = {"jsonrpc": "2.0", "id": 1, "method": "tools.invoke", "params": body}
    error = (await place.http.post("/rpc", json=asked, headers=bearer)).json()["error"]
    assert (error["code"], error["data"]["errorCode"]) == (-32009, "CONFLICT")
    request = wire.InvokeRequest(
        tool_id=wish.tool, arguments_json=orjson.dumps(wish.arguments), idempotency_key=wish.key
    )
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await place.stub.Invoke(request, metadata=tuple(bearer.items()))
    assert refused.value.code().name == "ABORTED"


# Tokens


async def _corpus(place: Place) -> dict[str, tuple[str | None, str | None]]:
    """Headers, and the code that each is refused with; None for the good one."""
    good = await place.lock.tokens.issue(subject=did_of("bot"), tools=[ToolGrant("*")], by=place.lock.caller)
    header, claims = parts(good)
    key = place.lock.issuer_keys.active()
    head, body, signature = good.split(".")
    shared = f"{part(header | {'alg': 'HS256'})}.{part(claims)}"
    pem = key.public.key.public_bytes(*_PEM())
    now = claims["iat"]

    def made(private: Any = None, alg: str = "RS256", **changes: Any) -> str:
        changed = {name: value for name, value in (claims | changes).items() if value is not ...}
        return sign(header | {"alg": alg}, changed, private or key.private)

    return {
        "good": (f"Bearer {good}", None),
        "expired": (f"Bearer {made(iat=now - 900, nbf=now - 900, exp=now - 600)}", "E3201"),
        "tampered": (f"Bearer {head}.{part(claims | {'sub': did_of('eve')})}.{signature}", "E3202"),
        "unsigned": (f"Bearer {part(header | {'alg': 'none'})}.{body}.", "E3202"),
        "confused": (f"Bearer {shared}.{part(hmac.new(pem, shared.encode(), hashlib.sha256).digest())}", "E3202"),
        "another key": (f"Bearer {made(private_key('mallory', 'RS256'))}", "E3202"),
        "another kind of key": (f"Bearer {made(private_key('mallory'), 'EdDSA')}", "E3202"),
        "no subject": (f"Bearer {made(sub=...)}", "E3203"),
        "no expiry": (f"Bearer {made(exp=...)}", "E3203"),
        "no tools": (f"Bearer {made(tools=...)}", "E3203"),
        "not yet": (f"Bearer {made(nbf=now + 600)}", "E3201"),
        "nonsense": ("Bearer a.b.c", "E3203"),
        "no bearer": (f"Basic {good}", "E3203"),
        "nothing": (None, "E3212"),
    }


def _PEM() -> tuple[Any, Any]:  # noqa: N802
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return Encoding.PEM, PublicFormat.SubjectPublicKeyInfo


@pytest.mark.supports("OPS-05")
@pytest.mark.proves("AUTH-01")
async def test_at_every_door_only_the_good_token_passes_and_each_other_has_its_code(place: Place) -> None:
    assert parts(place.token("full"))[0]["alg"] == "RS256"
    unknown: Mapping[str, str | None] = {
        "rest": "401", "jsonrpc": "-32001", "grpc": "UNAUTHENTICATED", "mcp-modern": "401", "mcp-legacy": "401",
    }  # fmt: skip
    for name, (header, code) in (await _corpus(place)).items():
        for door in DOORS[1:]:
            told, refused = await place.knock(door, header)
            assert refused == code, (name, door)
            if code is not None:
                assert told == unknown[door], (name, door)
        token = "" if header is None else header.partition(" ")[2]
        if header is None or header.startswith("Basic"):
            continue
        result = await place.lock.call("demo.add", {"a": 1}, token=token)
        assert (None if result.error is None else result.error.code) == code, name


@pytest.mark.proves("AUDIT-01")
async def test_a_token_that_a_door_refuses_is_counted_and_leaves_no_record(place: Place) -> None:
    """Strangers must not be able to fill the journal. A call in the process is on record, whatever its token."""
    signals = place.lock.gateway.telemetry.metrics.signals

    async def size() -> int:
        await place.lock.journal.drain()
        ((rows,),) = place.lock.journal.reader.all("SELECT COUNT(*) FROM journal")
        return rows

    tried = 0
    for name, (header, code) in (await _corpus(place)).items():
        if code is None:
            continue
        for door in DOORS[1:]:
            before, counted = await size(), signals["IDENTITY_REFUSED"]
            assert (await place.knock(door, header))[1] == code, (name, door)
            assert await size() == before, (name, door)
            assert signals["IDENTITY_REFUSED"] == counted + 1, (name, door)
            tried += 1
    assert tried >= 5 * len(DOORS[1:])
    refused = await place.lock.call("demo.add", {"a": 1}, token="not.a.token")
    await place.lock.journal.drain()
    assert [one["error_code"] for one in place.records("closed") if one["call"] == refused.invocation_id] == ["E3203"]


# A person's word


@pytest.mark.part_of("HITL-02", rest="composites, sagas and fallbacks, which do not exist yet")
async def test_nothing_opens_the_gate_of_what_cannot_be_undone_at_any_door(home: Path) -> None:
    (home / "policy.cedar").write_text("permit (principal, action, resource);\n")
    generous: Json = {"environment": "local", "theta_auto": 0, "sigma_critical": "system"}
    async with opened(home, **generous) as place:
        place.lock.hook(Hook(id="wave", when="pre", run=lambda _: HookResult(permission="allow")))
        for door in DOORS:
            assert (await place.ways[door](Wish("life.mail", {"to": door}, key=door))).pending, door
            record = await place.last()
            assert (record["authDecision"], record["phases"]) == ("REQUIRES_APPROVAL", SIX[:3])
        assert stage.sent == []


@pytest.mark.proves("HITL-03")
async def test_at_every_door_a_gated_call_leaves_a_ticket_a_span_event_and_nothing_private(place: Place) -> None:
    caller = await place.caller()
    for door in DOORS:
        pending = await place.pending(door, Wish("life.mail", {"to": door, "note": CANARY}, key=door))
        ticket = (await place.lock.approvals.show(pending["ticketId"])).document()
        record = await place.last()
        assert (pending["code"], pending["expiresAt"]) == ("APPROVAL_REQUIRED", ticket["expiresAt"])
        assert pending["pollEndpoint"] == f"/v1/approvals/{ticket['id']}"
        assert (ticket["status"], ticket["toolId"], ticket["operation"]) == ("PENDING", "life.mail", "invoke")
        assert ticket["params"]["to"] == door
        assert ticket["requestedBy"] == did_of("bot")
        assert ticket["requestedAt"] < ticket["expiresAt"]
        assert [step["group"] for step in ticket["escalationChain"]] == ["approvers", "managers", "admins"]
        assert (record["approvalTicketId"], record["states"][-1]) == (ticket["id"], "awaiting_approval")
        spans = place.lock.gateway.telemetry.trace(record["traceId"], caller)
        events = [event for span in spans for event in span["events"] if event["name"] == "approval_requested"]
        assert [event["ticketId"] for event in events] == [ticket["id"]]
    assert stage.sent == []
    rows = place.lock.journal.reader.all("SELECT * FROM ticket") + place.lock.journal.reader.all(
        "SELECT * FROM notification"
    )
    assert len(rows) == 2 * len(DOORS)
    assert CANARY not in repr(rows)
    await place.lock.journal.drain()
    for file in place.lock.home.path.rglob("*"):
        assert not file.is_file() or CANARY.encode() not in file.read_bytes(), file

"""The life of a call through every door: phases, keys, tokens, approvals, deadlines, progress and cancellation."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import hmac
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import grpc.aio
import orjson
import pytest
import pytest_asyncio

from interlock import Caller, Context, Effect, Failure, Hook, HookResult, Preview, tool
from interlock.call.capability import ToolGrant
from interlock.contract.standard import ToolInvocation, ToolProgress, ToolResult
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from tests import processes, sample
from tests.support import source
from tests.support.answers import Told, Wish
from tests.support.calls import admit, until
from tests.support.identities import did_of, private_key
from tests.support.lifecycles import Place, opened, stage
from tests.support.tokens import part, parts, sign
from tests.support.wires import BY_ID, DOORS

Json = dict[str, Any]
SIX = ["request", "validate", "authorize", "execute", "verify", "return"]
REVIEWER = Caller(id="local:reviewer", groups=frozenset({"approvers"}))
# The doors by which one call can be spoken of in another; MCP's clients cancel what they wait for themselves.
CANARY = "Quux-private-7731"


@pytest_asyncio.fixture
async def place(home: Path) -> AsyncGenerator[Place]:
    async with opened(home) as made:
        yield made


# Phases


@pytest.mark.part_of("LIFE-01", rest="composites, sagas and fallbacks, which do not exist yet")
async def test_through_every_door_a_call_passes_the_six_phases_in_order(place: Place) -> None:
    for door in DOORS:
        way = place.rows[door].call
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
        await place.app.approvals.approve(asked["approvalTicketId"], by=REVIEWER)
        assert (await way(gated)).data == door
        record = await place.last()
        assert (record["phases"], record["call"]) == (SIX, asked["call"])
    assert stage.sent == list(DOORS)


@pytest.mark.part_of("LIFE-01", rest="composites, sagas and fallbacks, which do not exist yet")
async def test_every_attempt_and_every_resumption_passes_the_phases_again(place: Place) -> None:
    sample.flaky.failures = [Failure("E3502", retry_after_ms=1), Failure("E3502", retry_after_ms=1)]
    assert (await place.app.call_with_retries("demo.unsteady", {"name": "a"}, key="r")).ok
    attempts = place.records("closed")[-3:]
    assert [one["phases"] for one in attempts] == [[*SIX[:4], "return"], [*SIX[:4], "return"], SIX]
    for door in BY_ID[1:]:
        call = (await place.rows[door].pending(Wish("life.mail", {"to": door}, key=door)))["ticketId"]
        await place.app.approvals.approve(call, by=REVIEWER)
        waiting = (await place.app.approvals.show(call)).call
        await place.rows[door].resume(waiting)
        record = await place.last()
        assert (record["call"], record["phases"], record["status"]) == (waiting, SIX, "SUCCESS")


# What a request carries


@pytest.mark.proves("LIFE-03")
async def test_what_a_request_leaves_out_is_refused_or_filled_in_by_every_door(place: Place) -> None:
    for door in DOORS:
        way = place.rows[door].call
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
            assert (await place.rows[door].knock(None))[1] == "E3212"


@pytest.mark.proves("LIFE-03")
@pytest.mark.part_of("CONTRACT-20", rest="A2A and browsers, which have no adapter yet")
async def test_what_is_on_record_of_a_call_is_a_tool_invocation_whichever_door_it_came_by(place: Place) -> None:
    for door in DOORS:
        for wish in (Wish("demo.add", {"a": 1}), Wish("demo.increment", {"name": door}, key=f"on-record-{door}")):
            await place.rows[door].call(wish)
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


TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.mark.proves("LIFE-03")
@pytest.mark.parametrize("door", DOORS)
async def test_a_request_carries_version_key_trace_and_deadline_through_every_door(place: Place, door: str) -> None:
    wish = Wish(
        "life.measures", {"name": door}, key=f"whole-{door}", version="1.0.0", timeout_ms=2000, traceparent=TRACEPARENT
    )
    left_s = (await place.rows[door].call(wish)).data
    assert 0 < left_s <= 2.1, "5 s are what its class allows; gRPC rounds a timeout up"
    record = await place.last("closed")
    assert (record["toolId"], record["version"], record["idempotencyKey"]) == (
        "life.measures", "1.0.0", f"whole-{door}",
    )  # fmt: skip
    assert (record["callerId"], record["traceId"]) == (did_of("ann"), TRACE)


@pytest.mark.proves("OBS-02")
@pytest.mark.parametrize("door", DOORS)
async def test_the_answer_of_every_door_carries_the_callers_trace(place: Place, door: str) -> None:
    heard = await place.rows[door].heard(Wish("demo.add", {"a": 1}, traceparent=TRACEPARENT))
    assert heard.trace_id == TRACE
    assert (await place.last("closed"))["traceId"] == TRACE


@pytest.mark.proves("LIFE-03")
@pytest.mark.parametrize("state", ["failed", "validation_failed", "denied", "blocked", "timed_out", "canceled"])
async def test_an_invocation_has_every_transition_to_each_end(place: Place, state: str) -> None:
    place.app.hook(Hook(id="hush", when="pre", tools="demo.shout", run=lambda _: HookResult(stop="hush")))
    place.app.hook(Hook(id="no", when="pre", tools="demo.send", run=lambda _: HookResult(permission="deny")))
    if state == "canceled":
        task, call = await _begun(place, "rest", Wish("life.waits", {}))
        await place.rows["rest"].cancel(call)
        await task
    else:
        await place.rows["rest"].call(ENDS[state][0])
        call = (await place.last("closed"))["call"]
    await place.app.journal.commit(lambda _: None)
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
    ticket = (await place.rows["rest"].pending(wish))["ticketId"]
    await place.app.approvals.approve(ticket, by=REVIEWER)
    assert (await place.rows["rest"].call(wish)).data == "ann"
    states = [one["state"] for one in place.invocation((await place.last("closed"))["call"])["transitions"]]
    assert states == [*READY, "awaiting_approval", "approved", "queued", "running", "succeeded"]


@pytest.mark.proves("LIFE-03")
@pytest.mark.parametrize("sent", [0, -7, "7", "a" * 200, "é\u2028", "a" * 201])
async def test_a_client_finds_its_call_by_its_own_id(place: Place, sent: int | str) -> None:
    body = {"jsonrpc": "2.0", "id": sent, "method": "tools.invoke", "params": ["demo.add", {"a": 1}]}
    answer = await place.http.post("/rpc", json=body, headers={"authorization": f"Bearer {place.tokens['full']}"})
    assert answer.json()["id"] == sent
    kept = place.invocation((await place.last("closed"))["call"])["native_call_id"]
    if len(str(sent)) > 200:
        assert kept == f"sha256:{hashlib.sha256(str(sent).encode()).hexdigest()}"
    else:
        assert kept == str(sent)


@pytest.mark.proves("LIFE-03")
async def test_a_call_that_waits_for_a_person_is_an_invocation_already(place: Place) -> None:
    wish = Wish("life.mail", {"to": "ann"}, key="not-yet")
    await place.rows["rest"].pending(wish)
    found = place.invocation((await place.last("pending"))["call"])
    assert ToolInvocation.parse(found).document() == found
    assert (found["status"], found["ended_at"]) == ("awaiting_approval", None)


# Ends

ENDS: Mapping[str, tuple[Wish, str, int]] = {
    "failed": (Wish("demo.nothing", {}), "E3101", 404),
    "validation_failed": (Wish("demo.add", {"a": "many"}), "E3301", 400),
    "denied": (Wish("demo.send", {"to": "eve"}, key="no"), "E3206", 403),
    "blocked": (Wish("demo.shout", {"text": "hush"}), "E3211", 403),
    "timed_out": (Wish("life.overruns", {}), "E3402", 504),
}


@pytest.mark.proves("LIFE-08")
@pytest.mark.parametrize("state", ENDS)
async def test_through_every_door_each_end_is_one_result_one_record_and_one_event(place: Place, state: str) -> None:
    wish, code, status = ENDS[state]
    place.app.hook(Hook(id="hush", when="pre", tools="demo.shout", run=lambda _: HookResult(stop="hush")))
    place.app.hook(Hook(id="no", when="pre", tools="demo.send", run=lambda _: HookResult(permission="deny")))
    for door in DOORS:
        told = await place.rows[door].call(wish)
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
        async with place.session("mcp-modern") as client:
            key = {} if wish.key is None else {"idempotency_key": wish.key}
            assert (await client.call_tool(wish.tool, {**wish.arguments, **key})).is_error


REFUSED = ["approval.denied", "tool.invocation.failed", "tool.result.created"]


@pytest.mark.proves("LIFE-08")
async def test_a_rejected_approval_is_one_end_whichever_door_asks_again(place: Place) -> None:
    for door in DOORS:
        wish = Wish("life.mail", {"to": door}, key=door)
        ticket = (await place.rows[door].pending(wish))["ticketId"]
        await place.app.approvals.deny(ticket, by=REVIEWER)
        closed = await place.last("closed")
        assert (closed["states"][-1], closed["error_code"], closed["status"]) == ("denied", "E3209", "ERROR")
        await until(lambda call=closed["call"]: place.heard(call)[-3:] == REFUSED)
        again = await place.rows[door].call(wish)
        assert again.error is not None
        assert again.error[0] == "E3209"
        assert sum(one["call"] == closed["call"] for one in place.records("closed")) == 1
        assert place.heard(closed["call"]).count("tool.result.created") == 1
    assert stage.sent == []


# Time


@pytest.mark.proves("LIFE-10", "AUDIT-01")
async def test_at_every_door_a_tool_that_overruns_is_cut_off_with_all_its_processes(place: Place) -> None:
    calls = [
        place.rows[door].call(Wish("cell.lingers", {"marker": f"86{place_of:04}"}))
        for place_of, door in enumerate(DOORS)
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
    await place.app.call("life.climbs", {"steps": 5}, on_progress=heard.append, token=place.tokens["full"])
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

    bearer = place.metadata()
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

        async with place.session(door) as client:
            await client.call_tool("life.climbs", {"steps": 5}, progress_callback=note)
        assert notified[1:] == [(message, percent, 100.0) for _, message, percent, _ in expected], door


@pytest.mark.proves("LIFE-14")
async def test_the_event_stream_of_a_call_that_has_ended_takes_no_more_progress(place: Place) -> None:
    bearer = {"authorization": f"Bearer {place.tokens['full']}"}
    body: Json = {"tool_id": "life.talks", "parameters": {}, "execution_mode": "async"}
    call: Json = (await place.http.post("/v1/tools/invoke", json=body, headers=bearer)).json()
    async with place.http.stream("GET", call["events"], headers=bearer) as stream:
        await until(lambda: len(place.app.gateway.observer.followers) > 0)
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
    http, bearer = place.http, {"authorization": f"Bearer {place.tokens['full']}"}
    body = {"tool_id": "life.climbs", "parameters": {"steps": 5}, "execution_mode": "async"}
    call: Json = (await http.post("/v1/tools/invoke", json=body, headers=bearer)).json()
    listening = len(place.app.gateway.observer.followers)
    async with http.stream("GET", call["events"], headers=bearer) as stream:
        await until(lambda: len(place.app.gateway.observer.followers) > listening)
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
    task = asyncio.ensure_future(place.rows[door].call(wish))

    def started() -> list[str]:
        return [event.invocation_id for event in place.events[before:] if event.type == "tool.invocation.started"]

    await until(started)
    call_id = started()[0]
    await until(lambda: any(one["call"] == call_id for one in place.records("started", "intent")))
    return task, call_id


async def _stopped(place: Place, door: str, task: asyncio.Future[Told], call_id: str) -> str | None:
    """Ask for a call to end in the door's own way: by its id, or by no longer waiting for it."""
    if door in BY_ID:
        return await place.rows[door].cancel(call_id)
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
        second = asyncio.ensure_future(place.rows[door].call(Wish("demo.increment", {"name": door}, key=f"2-{door}")))
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
        assert (await place.rows[door].call(Wish("demo.increment", {"name": door}, key=f"2-{door}"))).data == 2
    assert sample.world.runs == 2 * len(DOORS)


@pytest.mark.proves("LIFE-15")
async def test_a_call_that_waits_for_a_person_is_taken_back_by_id_and_never_runs(place: Place) -> None:
    for door in BY_ID:
        wish = Wish("life.mail", {"to": door}, key=door)
        ticket_id = (await place.rows[door].pending(wish))["ticketId"]
        call_id = (await place.app.approvals.show(ticket_id)).call
        assert await place.rows[door].cancel(call_id) == "canceled"
        closed = await place.last("closed")
        assert (closed["call"], closed["states"][-2:]) == (call_id, ["awaiting_approval", "canceled"])
        assert closed["error_code"] == "E3703"
        ended = ["tool.invocation.canceled", "tool.result.created"]
        assert place.heard(call_id)[-3:] == ["tool.invocation.cancel_requested", *ended]
        assert (await place.app.approvals.show(ticket_id)).state == "VOID"
        with pytest.raises(Failure) as refused:
            await place.app.approvals.approve(ticket_id, by=REVIEWER)
        assert refused.value.code == "E3411"
        # Ended is ended; and whoever wants it after all asks anew.
        assert await place.rows[door].cancel(call_id) == "finished"
        assert (await place.rows[door].pending(wish))["ticketId"] != ticket_id
    assert stage.sent == []


@pytest.mark.proves("LIFE-15")
async def test_what_has_ended_or_cannot_be_cancelled_says_so_and_changes_nothing(place: Place) -> None:
    for door in BY_ID:
        await place.rows[door].call(Wish("demo.add", {"a": 1}))
        ended = await place.last()
        assert await place.rows[door].cancel(ended["call"]) == "finished"
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
    for door in DOORS:
        for key in (None, "", "has space", "x" * 256):
            told = await place.rows[door].call(Wish("demo.increment", {"name": "a"}, key=key))
            assert told.error is not None, (door, key)
            assert told.error[:2] == ("E3307", "INVALID_INPUT"), (door, key)
            record = await place.last()
            assert record["phases"] == ["request", "validate", "return"]  # before anybody was asked
    for door in ("mcp-modern", "mcp-legacy"):
        async with place.session(door) as client:
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
        if not isinstance(node, ast.Call) or source.called(node).rpartition(".")[2] not in MAKERS:
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
    "doors/jsonrpc/methods.py: text_in(idempotency_key, 'idempotency_key')",
    "doors/mcp/calling.py: key if isinstance(key, str) else ''",
    "doors/mcp/calling.py: meta.get(_KEY) or wanted.key",
    "gateway/execution/tool_context.py: options.pop('key', None)",
    "trials.py: f'{request.key}-undo'",  # a contract test is its own caller
}


@pytest.mark.proves("IDEM-06")
async def test_at_every_door_a_known_key_with_another_argument_is_a_conflict(place: Place) -> None:
    for door in DOORS:
        wish = Wish("demo.increment", {"name": door}, key=door)
        assert (await place.rows[door].call(wish)).data == 1
        for other in ({"name": door, "by": 2}, {"name": f"{door}-other"}):
            told = await place.rows[door].call(Wish("demo.increment", other, key=door))
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
        assert (await place.rows[door].call(Wish("demo.increment", {"name": door}, key=door))).data == 1
    # The same call, word for word: only the version that the name stands for is another one.
    await admit(place.app, increment)
    await place.app.catalog.forget()
    for door in DOORS:
        told = await place.rows[door].call(Wish("demo.increment", {"name": door}, key=door))
        assert told.data is None, door
        assert told.error is not None, door
        assert told.error[:2] == ("E3306", "CONFLICT"), door
        assert (await place.last())["version"] == "1.1.0"
        assert sample.world.counters[door] == 1
    assert sample.world.runs == len(DOORS)
    await _conflicts_on_the_wires(place, Wish("demo.increment", {"name": "rest"}, key="rest"))
    assert sample.world.runs == len(DOORS)
    assert (await place.rows["library"].call(Wish("demo.increment", {"name": "fresh"}, key="fresh"))).data == -1


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
    good = await place.app.tokens.issue(subject=did_of("bot"), tools=[ToolGrant("*")], by=place.app.caller)
    header, claims = parts(good)
    key = place.app.issuer_keys.active()
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
    assert parts(place.tokens["full"])[0]["alg"] == "RS256"
    unknown: Mapping[str, str | None] = {
        "rest": "401", "jsonrpc": "-32001", "grpc": "UNAUTHENTICATED", "mcp-modern": "401", "mcp-legacy": "401",
    }  # fmt: skip
    for name, (header, code) in (await _corpus(place)).items():
        for door in DOORS[1:]:
            told, refused = await place.rows[door].knock(header)
            assert refused == code, (name, door)
            if code is not None:
                assert told == unknown[door], (name, door)
        token = "" if header is None else header.partition(" ")[2]
        if header is None or header.startswith("Basic"):
            continue
        result = await place.app.call("demo.add", {"a": 1}, token=token)
        assert (None if result.error is None else result.error.code) == code, name


@pytest.mark.proves("AUDIT-01")
async def test_a_token_that_a_door_refuses_is_counted_and_leaves_no_record(place: Place) -> None:
    """Strangers must not be able to fill the journal. A call in the process is on record, whatever its token."""
    signals = place.app.gateway.telemetry.metrics.signals

    async def size() -> int:
        await place.app.journal.drain()
        ((rows,),) = place.app.journal.reader.all("SELECT COUNT(*) FROM journal")
        return rows

    tried = 0
    for name, (header, code) in (await _corpus(place)).items():
        if code is None:
            continue
        for door in DOORS[1:]:
            before, counted = await size(), signals["IDENTITY_REFUSED"]
            assert (await place.rows[door].knock(header))[1] == code, (name, door)
            assert await size() == before, (name, door)
            assert signals["IDENTITY_REFUSED"] == counted + 1, (name, door)
            tried += 1
    assert tried >= 5 * len(DOORS[1:])
    refused = await place.app.call("demo.add", {"a": 1}, token="not.a.token")
    await place.app.journal.drain()
    assert [one["error_code"] for one in place.records("closed") if one["call"] == refused.invocation_id] == ["E3203"]


# A person's word


@pytest.mark.part_of("HITL-02", rest="composites, sagas and fallbacks, which do not exist yet")
async def test_nothing_opens_the_gate_of_what_cannot_be_undone_at_any_door(home: Path) -> None:
    (home / "policy.cedar").write_text("permit (principal, action, resource);\n")
    generous: Json = {"environment": "local", "theta_auto": 0, "sigma_critical": "system"}
    async with opened(home, **generous) as place:
        place.app.hook(Hook(id="wave", when="pre", run=lambda _: HookResult(permission="allow")))
        for door in DOORS:
            assert (await place.rows[door].call(Wish("life.mail", {"to": door}, key=door))).pending, door
            record = await place.last()
            assert (record["authDecision"], record["phases"]) == ("REQUIRES_APPROVAL", SIX[:3])
        assert stage.sent == []


@pytest.mark.proves("HITL-03")
async def test_at_every_door_a_gated_call_leaves_a_ticket_a_span_event_and_nothing_private(place: Place) -> None:
    caller = await place.caller()
    for door in DOORS:
        pending = await place.rows[door].pending(Wish("life.mail", {"to": door, "note": CANARY}, key=door))
        ticket = (await place.app.approvals.show(pending["ticketId"])).document()
        record = await place.last()
        assert (pending["code"], pending["expiresAt"]) == ("APPROVAL_REQUIRED", ticket["expiresAt"])
        assert pending["pollEndpoint"] == f"/v1/approvals/{ticket['id']}"
        assert (ticket["status"], ticket["toolId"], ticket["operation"]) == ("PENDING", "life.mail", "invoke")
        assert ticket["params"]["to"] == door
        assert ticket["requestedBy"] == did_of("bot")
        assert ticket["requestedAt"] < ticket["expiresAt"]
        assert [step["group"] for step in ticket["escalationChain"]] == ["approvers", "managers", "admins"]
        assert (record["approvalTicketId"], record["states"][-1]) == (ticket["id"], "awaiting_approval")
        spans = place.app.gateway.telemetry.trace(record["traceId"], caller)
        events = [event for span in spans for event in span["events"] if event["name"] == "approval_requested"]
        assert [event["ticketId"] for event in events] == [ticket["id"]]
    assert stage.sent == []
    rows = place.app.journal.reader.all("SELECT * FROM ticket") + place.app.journal.reader.all(
        "SELECT * FROM notification"
    )
    assert len(rows) == 2 * len(DOORS)
    assert CANARY not in repr(rows)
    await place.app.journal.drain()
    for file in place.app.home.path.rglob("*"):
        assert not file.is_file() or CANARY.encode() not in file.read_bytes(), file

"""The result of a call that has ended, as every endpoint reads it back: one per call, whatever happened to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
import orjson
import pytest
import pytest_asyncio

from interlock import BatchPolicy, Caller, Failure, Hook, HookResult
from interlock.api.service import Service
from interlock.authority.cedar import DEFAULT as DEFAULT_POLICY
from interlock.call.capability import ToolGrant
from interlock.contract.standard import ToolResult
from interlock.doors.grpc.v1 import gateway_pb2 as messages
from tests import sample
from tests.support import isolated_tools as cell
from tests.support.answers import Wish, typed_refusal
from tests.support.calls import FIELDS, admit, slow_write, until
from tests.support.identities import did_of
from tests.support.lifecycles import Place, opened
from tests.support.wires import DOORS, WIRES

Json = dict[str, Any]
REVIEWER = Caller(id="local:reviewer", groups=frozenset({"approvers"}))
TASKS: Json = {"extensions": {"io.modelcontextprotocol/tasks": {}}}
# What a result says: its call, its state, its code and what cut the call short.
Told = tuple[str, str, str | None, str | None]


@dataclass(frozen=True)
class Outcome:
    """A call that ends in a certain way, and what its result says of it.

    `reason`: why it is cancelled while it runs. `rejected`: a person says no. `again`: the same call was made before.
    `late`: its tool runs on when it is cut off, and ends later.
    """

    wish: Wish
    code: str | None
    state: str
    cause: str | None = None
    reason: str | None = None
    rejected: bool = False
    again: bool = False
    late: bool = False


WAITS = Wish("life.climbs", {"steps": 1})
OUTCOMES: Mapping[str, Outcome] = {
    "success": Outcome(Wish("demo.add", {"a": 1}), None, "succeeded"),
    "replay": Outcome(Wish("demo.increment", {"name": "a"}, key="twice"), None, "succeeded", again=True),
    "dry run": Outcome(Wish("demo.increment", {"name": "a"}, key="dry", dry_run=True), None, "succeeded"),
    "unknown tool": Outcome(Wish("demo.nothing", {}), "E3101", "failed"),
    "unknown version": Outcome(Wish("demo.add", {"a": 1}, version="9.0.0"), "E3102", "failed"),
    "schema failure": Outcome(Wish("demo.add", {"a": "many"}), "E3301", "validation_failed"),
    "denied permission": Outcome(Wish("demo.send", {"to": "eve"}, key="no"), "E3206", "denied"),
    "forbidden by a policy": Outcome(Wish("life.left", {}), "E3206", "denied"),
    "token for other tools": Outcome(Wish("demo.add", {"a": 1}, token="narrow"), "E3204", "denied"),
    "blocked by a hook": Outcome(Wish("demo.shout", {"text": "hush"}), "E3211", "blocked"),
    "rejected approval": Outcome(Wish("life.mail", {"to": "eve"}, key="m"), "E3209", "denied", rejected=True),
    "cancelled sibling": Outcome(WAITS, "E3412", "canceled", "sibling_error", "sibling"),
    "discarded fallback": Outcome(WAITS, "E3413", "canceled", "fallback", "fallback"),
    "discarded": Outcome(WAITS, "E3703", "canceled", "discarded_execution", "discard"),
    "cancelled": Outcome(WAITS, "E3703", "canceled", "user_interruption", "interruption"),
    "timeout": Outcome(Wish("life.overruns", {}), "E3402", "timed_out", "timeout"),
    "timeout of a write that goes on": Outcome(
        Wish("demo.pay", {}, key="pay"), "E3402", "timed_out", "timeout", late=True
    ),
    "crash of its process": Outcome(Wish("cell.attempt", {"what": "crash"}), "E3404", "failed"),
}


# The last events of a call but one, by the state in which it ends; of others, it has failed.
LAST = {"canceled", "succeeded", "timed_out", "validation_failed"}


def _forbid(home: Path, tool: str) -> None:
    """Write the policy of a new data directory, which nobody lets call a tool."""
    forbid = f'forbid (principal, action == Action::"{tool}", resource);'
    (home / "policy.cedar").write_text(f"{DEFAULT_POLICY}\n{forbid}\n")


@pytest_asyncio.fixture
async def place(home: Path) -> AsyncGenerator[Place]:
    _forbid(home, "life.left")
    async with opened(home) as made:
        made.tokens["narrow"] = await made.app.tokens.issue(
            subject=did_of("bot"), user=did_of("ann"), tools=[ToolGrant("life.*")], by=made.app.caller
        )
        made.app.hook(Hook(id="hush", when="pre", tools="demo.shout", run=lambda _: HookResult(stop="hush")))
        made.app.hook(Hook(id="no", when="pre", tools="demo.send", run=lambda _: HookResult(permission="deny")))
        await admit(
            made.app,
            cell.attempt,
            slow_write(threading.Event(), restart_safe=False, timeout_class="interactive", external_io=False),
        )
        yield made


@pytest.mark.proves("LIFE-08")
@pytest.mark.parametrize("name", OUTCOMES)
async def test_whichever_door_a_call_came_by_every_door_reads_its_one_result_back(place: Place, name: str) -> None:
    outcome = OUTCOMES[name]
    for door in DOORS:
        call = await _made(place, door, outcome)
        await _check(place, call, outcome, door)


@pytest.mark.proves("LIFE-08")
@pytest.mark.parametrize("door", WIRES)
async def test_the_result_of_a_call_whose_schema_was_not_loaded_is_read_back_at_every_door(
    home: Path, door: str
) -> None:
    async with opened(home, surface="search", surface_doors=("mcp", "rest", "jsonrpc", "grpc")) as place:
        deferred = Outcome(Wish("demo.add", {"a": 1}), "E3107", "blocked")
        await _check(place, await _made(place, door, deferred), deferred, door)


@pytest.mark.proves("LIFE-08")
@pytest.mark.parametrize("name", OUTCOMES)
async def test_a_call_in_the_background_stores_one_result_whatever_happens_to_it(place: Place, name: str) -> None:
    outcome = OUTCOMES[name]
    for door in ("rest", "jsonrpc"):
        call = await _begun(place, door, outcome)
        if outcome.reason is not None:
            await _on_record(place, call)
            assert await place.rows[door].cancel(call, outcome.reason) == "canceled"
        if outcome.rejected:
            await until(lambda call=call: place.records("pending") and place.records("pending")[-1]["call"] == call)
            await _reject(place, call)
        await until(lambda call=call: "tool.result.created" in place.heard(call))
        # Another server on the store has nothing of it in memory, and hears when its end is stored.
        caller, other = await place.caller(), Service(place.app).calls
        await asyncio.wait_for(other.background.ended(call, caller), 60)
        told = _in_result((await other.status(call, caller))["result"])
        assert told == (call, outcome.state, outcome.code, outcome.cause), door
        await _check(place, call, outcome, door, kept=True)
        stored = place.app.journal.reader.all("SELECT ref FROM payload WHERE call = ?", (call,))
        assert stored == [(f"background:{call}",)]


@pytest.mark.proves("AUDIT-01")
async def test_a_call_that_is_tried_again_leaves_one_closing_record_for_each_try(place: Place) -> None:
    """After a failure that may be tried again, as a replay, and with another input, which is refused."""
    for door in DOORS:
        before = len(place.events)
        sample.flaky.failures = [Failure("E3502")]
        for name, expected in (("a", "E3502"), ("a", None), ("a", None), ("b", "E3306")):
            heard = await place.rows[door].heard(Wish("demo.unsteady", {"name": name}, key=f"again-{door}"))
            assert (None if heard.envelope is None else heard.failure["error_code"]) == expected, door
        await place.last()
        tries = list(dict.fromkeys(one.invocation_id for one in place.events[before:] if one.invocation_id))
        closed = [one for one in place.records("closed") if one["call"] in tries]
        assert [one["call"] for one in closed] == tries, "one record for each, in the order in which they ended"
        about = [(one["status"], one.get("error_code"), one["source"]) for one in closed]
        assert about == [
            ("ERROR", "E3502", "compute"), ("SUCCESS", None, "compute"), ("SUCCESS", None, "replay"),
            ("ERROR", "E3306", "compute"),
        ]  # fmt: skip
        assert all(one.keys() >= FIELDS and one["idempotencyKey"] == f"again-{door}" for one in closed)
        assert closed[2]["replayOf"] == tries[1]
    # The retries that a caller leaves to Interlock are calls of their own as well.
    before = len(place.records("closed"))
    sample.flaky.failures = [Failure("E3502", retry_after_ms=1), Failure("E3502", retry_after_ms=1)]
    assert (await place.app.call_with_retries("demo.unsteady", {"name": "a"}, key="by-itself")).ok
    await place.last()
    tries = [one["call"] for one in place.records("closed")[before:]]
    assert len(tries) == len(set(tries)) == 3
    assert sum(one["call"] in tries for one in place.records("closed")) == 3


SIBLING = ["tool.invocation.canceled", "tool.result.created"]


@pytest.mark.proves("LIFE-08")
async def test_the_end_of_a_cancelled_sibling_is_told_once_on_every_stream_of_events(place: Place) -> None:
    place.tokens["auditor"] = await place.app.tokens.issue(
        subject=did_of("ann"), scopes=["audit:read"], by=place.app.caller
    )
    streamed: list[Json] = []
    reading = asyncio.create_task(_listen(place, streamed))
    await until(lambda: streamed)
    caller = await place.caller()
    # In a batch of the library, one that has not started.
    wanted = [
        place.app.request(one.tool, one.arguments, caller=caller) for one in (Wish("demo.add", {"a": "x"}), WAITS)
    ]
    first, second = await place.app.batch(wanted, BatchPolicy(sibling_failure="cancel_siblings"))
    assert (first.error and first.error.code, second.error and second.error.code) == ("E3301", "E3412")
    cancelled = [second.invocation_id]
    # In the background, followed over REST.
    for door in ("rest", "jsonrpc"):
        cancelled.append(call := await _begun(place, door, OUTCOMES["cancelled sibling"]))
        following = asyncio.create_task(place.http.get(f"/v1/calls/{call}/events"))
        await _on_record(place, call)
        await until(lambda: place.app.gateway.observer.followers)
        assert await place.rows[door].cancel(call, "sibling") == "canceled"
        lines = (await following).text.splitlines()
        events: list[Json] = [orjson.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        assert [one["event_class"] for one in events][-3:] == [*SIBLING, "tool.invocation.status"]
        assert (events[-1]["status"], events[-1]["result"]["error"]["error_code"]) == ("canceled", "E3412")
    # On a stream of gRPC, whose end is the failure.
    stream: Any = aiter(place.stub.Run(_start(), metadata=place.metadata()))
    cancelled.append(call := (await anext(stream)).started.invocation_id)
    await _on_record(place, call)
    assert await place.rows["grpc"].cancel(call, "sibling") == "canceled"
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await _read_to_its_end(stream)
    assert (ended.value.code(), typed_refusal(ended.value).triple[0]) == (grpc.StatusCode.CANCELLED, "E3412")
    ends = [*SIBLING] * len(cancelled)
    await until(lambda: len(_of(streamed, cancelled)) == len(ends))
    assert _of(streamed, cancelled) == ends
    for call in cancelled:
        assert place.heard(call).count("tool.result.created") == 1
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def _start() -> AsyncGenerator[messages.RunRequest]:
    arguments = orjson.dumps(WAITS.arguments)
    yield messages.RunRequest(start=messages.InvokeRequest(tool_id=WAITS.tool, arguments_json=arguments))


async def _read_to_its_end(stream: Any) -> None:
    async for _ in stream:
        pass


async def _listen(place: Place, into: list[Json]) -> None:
    """Read the stream of all events as an auditor."""
    async with place.http.stream("GET", "/v1/events", headers=place.bearer("auditor"), timeout=None) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                into.append(orjson.loads(line.removeprefix("data: ")))  # noqa: PERF401 - as they come


def _of(events: list[Json], calls: list[str]) -> list[str]:
    """What the stream of all events told of the ends of some calls."""
    return [one["event_class"] for one in events if one.get("invocation_id") in calls and one["event_class"] in SIBLING]


async def _check(place: Place, call: str, outcome: Outcome, door: str, *, kept: bool = False) -> None:
    """Check that a call has one end, on record and told once, and that every door gives its result.

    A success is read back where its result is kept.
    """
    if outcome.late:
        sample.world.release.set()
        await until(lambda: any(one["call"] == call for one in place.records("late")))
        sample.world.release.clear()
    await place.last()
    (closed,) = [one for one in place.records("closed") if one["call"] == call]
    assert closed.keys() >= FIELDS, door
    assert (closed["states"][-1], closed.get("error_code")) == (outcome.state, outcome.code), door
    heard = [one for one in place.events if one.invocation_id == call]
    names = [one.type for one in heard]
    assert (names.count("tool.result.created"), names[-1]) == (1, "tool.result.created"), door
    end = outcome.state if outcome.state in LAST else "failed"
    assert (names[-2], heard[-2].data.get("error_code")) == (f"tool.invocation.{end}", outcome.code), door
    if outcome.code is None and not kept:
        status = await place.service.calls.status(call, await place.caller())
        assert (status["invocation_id"], status["status"], status["error_code"]) == (call, "succeeded", None)
        return
    for reader, told in (await _read_back(place, call, failed=outcome.code is not None)).items():
        assert told == (call, outcome.state, outcome.code, outcome.cause), (door, reader)


async def _made(place: Place, door: str, outcome: Outcome) -> str:
    """A call that came by a door, was waited for, and has ended; its id."""
    wish = outcome.wish if outcome.wish.key is None else replace(outcome.wish, key=f"{outcome.wish.key}-{door}")
    if outcome.again:
        assert (await place.rows[door].heard(wish)).envelope is None
    before = len(place.events)
    making = asyncio.ensure_future(place.rows[door].heard(wish))
    if outcome.reason is not None:
        await until(lambda: any(one.type == "tool.invocation.started" for one in place.events[before:]))
        call = place.events[-1].invocation_id
        await _on_record(place, call)
        ending = place.rows[door if door in ("library", "rest", "jsonrpc", "grpc") else "rest"]
        assert await ending.cancel(call, outcome.reason) == "canceled"
    heard = await asyncio.wait_for(making, 60)
    call = next(one.invocation_id for one in place.events[before:] if one.invocation_id)
    if outcome.rejected:
        assert heard.pending is not None
        await _reject(place, call)
    else:
        # What was answered at once is what is read back.
        envelope = heard.envelope or {"error_code": None}
        assert (envelope["error_code"], envelope.get("details", {}).get("synthetic_cause")) == (
            outcome.code, outcome.cause,
        )  # fmt: skip
    await until(lambda: "tool.result.created" in place.heard(call))
    return call


async def _on_record(place: Place, call: str) -> None:
    """Wait until a call is on record as begun, so that others know of it."""
    await until(lambda: any(one["call"] == call for one in place.records("started")))


async def _reject(place: Place, call: str) -> None:
    waiting = await place.last("pending")
    assert waiting["call"] == call
    await place.app.approvals.deny(waiting["approvalTicketId"], by=REVIEWER)


async def _begun(place: Place, door: str, outcome: Outcome) -> str:
    """A call in the background, begun at a door; its id."""
    key = {} if outcome.wish.key is None else {"idempotency_key": f"{outcome.wish.key}-{door}"}
    body = {**place.body(outcome.wish), **key, "execution_mode": "async"}
    token = outcome.wish.token
    if outcome.again:
        assert (await place.http.post("/v1/tools/invoke", json={**body, "execution_mode": "sync"})).status_code == 200
    if door == "rest":
        answer = await place.http.post("/v1/tools/invoke", json=body, headers=place.bearer(token))
        return answer.json()["invocation_id"]
    return (await place.rpc("tools.invoke", body, token))["result"]["invocation_id"]


async def _read_back(place: Place, call: str, *, failed: bool) -> dict[str, Told]:
    """The result of a call that has ended, by the door that was asked for it."""
    shown: Json = (await place.http.get(f"/v1/calls/{call}")).json()
    status = await place.service.calls.status(call, await place.caller())
    told: dict[str, Told] = {
        "jsonrpc": _in_result((await place.rpc("calls.status", {"invocation_id": call}))["result"]["result"]),
        "library": _in_result(status["result"]),
        "rest": _in_result(shown["tool_result"])
        if failed
        else (shown["invocation_id"], shown["state"], shown.get("error"), None),
    }
    over_grpc = await place.stub.Status(messages.StatusRequest(invocation_id=call), metadata=place.metadata())
    kept = over_grpc.result
    assert (over_grpc.invocation_id, over_grpc.state) == (kept.invocation_id, kept.state)
    about: Json = orjson.loads(kept.metadata_json)
    state = messages.CallState.Name(kept.state).removeprefix("CALL_STATE_").lower()
    code = kept.error.code or None
    assert (over_grpc.code or None, kept.WhichOneof("outcome")) == (code, "error" if failed else "value_json")
    told["grpc"] = kept.invocation_id, state, code, about.get("synthetic_cause")
    place.declare(TASKS)
    task: Json = orjson.loads(await place.mcp("tasks/get", {"taskId": call}, modern=True))["result"]
    place.declare({})
    if told["library"][1] == "canceled":
        assert task["status"] == "cancelled"
    elif code == "E3101":  # an error of the protocol
        assert (task["status"], task["error"]["data"]["error_code"]) == ("failed", code)
    else:
        assert (task["status"], task["result"].get("isError", False)) == ("completed", failed)
        if failed:
            envelope: Json = task["result"]["_meta"]["interlock/error"]
            assert envelope["error_code"] == code
    return told


def _in_result(document: Json) -> Told:
    """What a tool_result of the standard says of its end."""
    ToolResult.parse(document)
    error: Json | None = document["error"]
    assert document["is_error"] is (error is not None)
    cause = document["metadata"].get("synthetic_cause")
    return document["invocation_id"], document["status"], None if error is None else error["error_code"], cause

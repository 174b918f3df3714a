"""The gRPC door: a real server and a real client over a real home."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import grpc
import grpc.aio
import orjson
import pytest
from google.protobuf import json_format, message_factory, struct_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock import Caller, Failure, Interlock
from interlock.api.listing import STATES_OF_CALLS
from interlock.api.service import Service
from interlock.call.capability import ToolGrant
from interlock.contract.manifest import MutationClass, TimeoutClass
from interlock.contract.standard.states import STATES
from interlock.core.errors import CODES
from interlock.doors.grpc import GrpcDoor, generate, places, servicer
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from interlock.doors.grpc.v1.gateway_pb2_grpc import GatewayStub
from interlock.testing import FakeClock
from tests import sample
from tests.support.calls import records, until
from tests.support.endpoints import dialled
from tests.support.grpc import World, certificate, refusal, served, stage, told
from tests.support.grpc import world as world
from tests.support.identities import AGENT, OPERATOR, USER

OPS_04 = pytest.mark.proves("OPS-04")
BEN = Caller(id="local:ben", groups=frozenset({"approvers"}))
WIDE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


async def events(stream: Any, heard: list[wire.RunEvent] | None = None) -> list[wire.RunEvent]:
    """What a stream tells until it ends; raises what it ends with."""
    found: list[wire.RunEvent] = [] if heard is None else heard
    while (event := await stream.read()) is not cast("Any", grpc.aio).EOF:
        found.append(event)
    return found


def kinds(heard: list[wire.RunEvent]) -> list[str | None]:
    return [event.WhichOneof("event") for event in heard]


# Tools


@OPS_04
async def test_discover_gives_the_callers_tools_a_page_at_a_time(world: World) -> None:
    found: list[wire.Tool] = []
    request = wire.DiscoverRequest(page_size=3)
    while True:
        page = await world.stub.Discover(request, metadata=world.bearer)
        assert len(page.tools) <= 3
        found += page.tools
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    caller = await world.app.caller_of(world.token)
    visible = await Service(world.app).tools.visible(caller)
    assert [one.tool_id for one in found] == [one.row.address for one in visible]
    assert "locked.vault" not in [one.tool_id for one in found]
    (add,) = (one for one in found if one.tool_id == "demo.add")
    assert json.loads(add.input_schema_json)["required"] == ["a"]
    assert json.loads(add.output_schema_json) == {"type": "integer"}
    assert (add.mutation_class, add.timeout_class) == (wire.MUTATION_CLASS_READ_ONLY, wire.TIMEOUT_CLASS_INTERACTIVE)
    assert add == await world.stub.Describe(wire.DescribeRequest(tool_id="demo.add"), metadata=world.bearer)
    (increment,) = (one for one in found if one.tool_id == "demo.increment")
    assert increment.mutation_class == wire.MUTATION_CLASS_WRITE_REVERSIBLE
    assert increment.key_required


async def test_discover_searches_and_refuses_pages_of_less_than_nothing(world: World) -> None:
    page = await world.stub.Discover(wire.DiscoverRequest(query="whole numbers"), metadata=world.bearer)
    assert page.tools[0].tool_id == "demo.add"
    refused = await refusal(world.stub.Discover(wire.DiscoverRequest(page_size=-1), metadata=world.bearer))
    assert (refused.status, refused.envelope.code) == (grpc.StatusCode.INVALID_ARGUMENT, "E3004")


@pytest.mark.parametrize("token", ["nonsense", "demo.", "demo.add@1.0.0", "Demo.add", "§", "demo.add " * 100])
async def test_discover_refuses_a_page_token_that_it_never_gave(world: World, token: str) -> None:
    refused = await refusal(world.stub.Discover(wire.DiscoverRequest(page_token=token), metadata=world.bearer))
    assert (refused.status, refused.envelope.code) == (grpc.StatusCode.INVALID_ARGUMENT, "E3004")
    assert "cursor" in refused.envelope.message


async def test_calls_refuses_a_state_that_no_call_has_and_takes_every_other(world: World) -> None:
    refused = await refusal(world.stub.Calls(wire.CallsRequest(state="frobnicated"), metadata=world.bearer))
    assert (refused.status, refused.envelope.code) == (grpc.StatusCode.INVALID_ARGUMENT, "E3004")
    assert "awaiting_approval" in refused.envelope.message
    for state in STATES_OF_CALLS:
        await world.stub.Calls(wire.CallsRequest(state=state), metadata=world.bearer)


async def test_a_tool_that_the_caller_may_not_use_does_not_exist(world: World) -> None:
    for name in ("locked.vault", "no.such"):
        refused = await refusal(world.stub.Describe(wire.DescribeRequest(tool_id=name), metadata=world.bearer))
        assert (refused.status, refused.envelope.code) == (grpc.StatusCode.NOT_FOUND, "E3101")
    request = wire.DescribeRequest(tool_id="demo.add", version="^7")
    assert (await refusal(world.stub.Describe(request, metadata=world.bearer))).envelope.code == "E3102"


def test_every_class_and_state_has_its_label() -> None:
    for prefix, names, labels in (
        ("MUTATION_CLASS", get_args(MutationClass), wire.MutationClass.keys()),
        ("TIMEOUT_CLASS", get_args(TimeoutClass), wire.TimeoutClass.keys()),
        ("CALL_STATE", STATES, wire.CallState.keys()),
    ):
        assert [f"{prefix}_{name.upper()}" for name in ("unspecified", *names)] == list(labels)


# Calls


@OPS_04
async def test_a_call_gives_the_value_and_says_where_it_came_from(world: World) -> None:
    result = await world.invoke("demo.add", {"a": 2, "b": 3}, version="^1")
    assert (result.value_json, result.tool, result.state) == (b"5", "demo.add@1.0.0", wire.CALL_STATE_SUCCEEDED)
    (record,) = world.closed()
    assert (record["call"], record["door"], record["callerId"]) == (result.invocation_id, "grpc", USER)
    request = wire.StatusRequest(invocation_id=result.invocation_id)
    status = await world.stub.Status(request, metadata=world.bearer)
    assert (status.state, status.tool_id, status.version) == (wire.CALL_STATE_SUCCEEDED, "demo.add", "1.0.0")


async def test_arguments_may_come_as_a_struct_and_may_be_left_out(world: World) -> None:
    request = wire.InvokeRequest(tool_id="demo.echo")
    sent = {"value": {"whole": 3, "half": 0.5, "list": [None, True, "x", {"deep": -1}], "large": 2.0**60}}
    json_format.ParseDict(sent, request.arguments)
    result = await world.stub.Invoke(request, metadata=world.bearer)
    assert orjson.loads(result.value_json) == sent["value"]
    assert repr(orjson.loads(result.value_json)["whole"]) == "3"
    refused = await refusal(world.stub.Invoke(wire.InvokeRequest(tool_id="demo.add"), metadata=world.bearer))
    assert refused.envelope.code == "E3301"


# Whole numbers of more than 308 digits are refused: see test_bounds.py.
longest = 10**308 - 1
numbers = (
    st.integers(-longest, longest)
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([longest, -longest])
)
names = st.sampled_from(["a", "b", "é", "日"])  # others may stand for secrets, which are taken out
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=10,
)


@WIDE
@given(
    value=values
    | st.sampled_from([sys.float_info.max, 1e308, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1, 2**64 + 1, 10**40])
)
async def test_numbers_of_up_to_308_digits_and_all_text_arrive_as_they_were_sent(world: World, value: Any) -> None:
    result = await world.invoke("demo.echo", {"value": value})
    here = await world.app.call("demo.echo", {"value": value})
    assert repr(json.loads(result.value_json)) == repr(here.unwrap())
    assert json.loads(result.value_json) == value


async def test_a_key_makes_a_call_run_once(world: World) -> None:
    first = await world.invoke("demo.increment", {"name": "a"}, idempotency_key="k")
    again = await world.invoke("demo.increment", {"name": "a"}, idempotency_key="k")
    assert (first.value_json, again.value_json) == (b"1", b"1")
    assert (first.source, again.source, sample.world.runs) == ("compute", "replay", 1)
    other = await refusal(world.invoke("demo.increment", {"name": "b"}, idempotency_key="k"))
    assert (other.status, other.envelope.code) == (grpc.StatusCode.ABORTED, "E3306")
    for said in ({}, {"idempotency_key": ""}):
        assert (await refusal(world.invoke("demo.increment", {"name": "a"}, **said))).envelope.code == "E3307"
    look = await world.invoke("demo.increment", {"name": "a"}, idempotency_key="l", dry_run=True)
    assert (look.source, sample.world.runs) == ("preview", 1)


async def test_a_result_that_is_kept_is_referred_to(world: World) -> None:
    result = await world.invoke("long.writes_much")
    assert result.WhichOneof("outcome") == "kept"
    assert result.kept.size_chars == 1002
    caller = await world.app.caller_of(world.token)
    assert await world.app.read_payload(result.kept.ref, caller=caller) == orjson.dumps("x" * 1000)


@pytest.mark.supports("OBS-02")
async def test_a_call_is_traced_under_the_callers_trace(world: World) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    metadata = (*world.bearer, ("traceparent", f"00-{trace}-b7ad6b7169203331-01"))
    request = wire.InvokeRequest(tool_id="demo.add", arguments_json=b'{"a": 1}')
    assert (await world.stub.Invoke(request, metadata=metadata)).trace_id == trace
    lost = await refusal(world.stub.Describe(wire.DescribeRequest(tool_id="no.such"), metadata=metadata))
    assert lost.envelope.trace_id == trace


# Failures


@OPS_04
async def test_every_code_has_the_status_of_the_table_and_the_envelope_in_its_details(world: World) -> None:
    for code, row in CODES.items():
        stage.failure = Failure(code, f"because of {code}", details={"code": code})
        if row.grpc == "OK":
            result = await world.invoke("long.fails", {"why": code})
            envelope = result.error
        else:
            failed = await refusal(world.invoke("long.fails", {"why": code}))
            envelope = failed.envelope
            assert failed.status.name == row.grpc
        here = await world.app.call("long.fails", why=code)
        assert here.error is not None
        same = here.error.envelope(envelope.trace_id)
        assert (envelope.code, envelope.error_code, envelope.error_class) == (code, row.error_code, row.error_class)
        assert (envelope.message, envelope.resolution) == (same["message"], same["resolution"])
        assert (envelope.retryable, json.loads(envelope.details_json)) == (same["retryable"], same["details"])
        assert records(world.app, envelope.invocation_id)[0]["error_code"] == code


async def test_input_that_does_not_fit_names_every_fault(world: World) -> None:
    refused = await refusal(world.invoke("demo.add", {"a": "x", "c": 1}))
    assert (refused.status, refused.envelope.error_code) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_INPUT")
    here = await world.app.call("demo.add", a="x", c=1)
    assert here.error is not None
    assert json.loads(refused.envelope.details_json) == here.error.details


async def test_arguments_that_are_no_object_as_json_are_refused(world: World) -> None:
    for raw in (
        b"",
        b"{",
        b"nonsense",
        b'{"a": 1',
        b"\xff\xfe",
        b'{"a": NaN, "b": 12345678901234567890}',
        b"[1]",
        b"1",
    ):
        request = wire.InvokeRequest(tool_id="demo.add", arguments_json=raw)
        refused = await refusal(world.stub.Invoke(request, metadata=world.bearer))
        assert (refused.status, refused.envelope.code) == (grpc.StatusCode.INVALID_ARGUMENT, "E3004")


@pytest.mark.supports("OPS-05")
async def test_what_the_token_does_not_cover_is_denied(world: World) -> None:
    assert (await refusal(world.invoke("locked.vault"))).envelope.code == "E3206"
    world.token = await world.app.tokens.issue(subject=AGENT, user=USER, by=OPERATOR, tools=[ToolGrant("demo.echo")])
    denied = await refusal(world.invoke("demo.add", {"a": 1}))
    assert (denied.status, denied.envelope.code) == (grpc.StatusCode.PERMISSION_DENIED, "E3204")
    assert denied.envelope.invocation_id == world.closed()[-1]["call"]


@pytest.mark.supports("OPS-05", "AUTH-01")
async def test_without_a_good_token_there_is_nothing_to_see(world: World) -> None:
    bad = {None: "E3212", "": "E3203", "Bearer": "E3203", "Basic eDp5": "E3203", "Bearer nonsense": "E3203"}
    stub = world.stub
    for header, code in bad.items():
        metadata = () if header is None else (("authorization", header),)
        attempts: list[Awaitable[Any]] = [
            stub.Discover(wire.DiscoverRequest(), metadata=metadata),
            stub.Describe(wire.DescribeRequest(tool_id="demo.add"), metadata=metadata),
            stub.Invoke(wire.InvokeRequest(tool_id="demo.add"), metadata=metadata),
            stub.Status(wire.StatusRequest(invocation_id="x"), metadata=metadata),
            stub.Cancel(wire.CancelRequest(invocation_id="x"), metadata=metadata),
            stub.Resume(wire.ResumeRequest(invocation_id="x"), metadata=metadata),
            events(stub.Run(None, metadata=metadata)),
        ]
        for attempt in attempts:
            refused = await refusal(attempt)
            assert (refused.status, refused.envelope.code) == (grpc.StatusCode.UNAUTHENTICATED, code)


async def test_a_token_that_expires_between_two_calls_is_refused(home: Path) -> None:
    clock = FakeClock()
    async with Interlock.open(home, clock=clock.clock, housekeeping=False) as app, served(app) as world:
        assert (await world.invoke("demo.add", {"a": 1})).value_json == b"6"
        clock.advance(3601)
        expired = await refusal(world.invoke("demo.add", {"a": 1}))
        assert (expired.status, expired.envelope.code) == (grpc.StatusCode.UNAUTHENTICATED, "E3201")


async def test_waiting_is_told_in_the_way_of_grpc_too(world: World) -> None:
    stage.failure = Failure("E3003", "too much", retry_after_ms=1500)
    told = await refusal(world.invoke("long.fails"))
    assert told.retry is not None
    assert told.retry.retry_delay.ToMilliseconds() == told.envelope.retry_after_ms == 1500
    stage.failure = Failure("E3401", "no")
    assert (await refusal(world.invoke("long.fails"))).retry is None


@pytest.mark.parametrize("character", ["x", "é", "🔒"])
async def test_a_failure_of_many_words_still_arrives(world: World, character: str) -> None:
    stage.failure = Failure("E3401", character * 5000, details={"all": [character * 50] * 200})
    failed = await refusal(world.invoke("long.fails"))
    assert (failed.status, failed.envelope.code) == (grpc.StatusCode.INTERNAL, "E3401")
    assert failed.envelope.shortened
    assert not failed.envelope.HasField("details_json")


def broken(authorization: str | None) -> Caller | None:
    """A bug in the service."""
    raise RuntimeError("sec" + "ret")


@pytest.mark.proves("CONTRACT-13")
async def test_an_error_inside_tells_nothing_of_itself(app: Interlock, caplog: pytest.LogCaptureFixture) -> None:
    service = Service(app)
    service.known = broken
    door = GrpcDoor(service, address="127.0.0.1:0")
    port = await door.start()
    async with dialled(port) as stub:
        failed = await refusal(stub.Discover(wire.DiscoverRequest()))
        streamed = await refusal(events(stub.Run(None)))
    await door.stop()
    for one in (failed, streamed):
        assert (one.status, one.envelope.code) == (grpc.StatusCode.INTERNAL, "E3000")
        assert "secret" not in str(one)
        assert "Traceback" not in str(one)
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text


# Time


# Whoever is quicker, the gateway at the end of the call's time or the client that goes away then: it is on record.
ENDED = {("timed_out", "E3402"), ("canceled", "E3703")}


async def late(attempt: Callable[[float], Awaitable[Any]], world: World) -> None:
    """An RPC runs out of time, and so do its call and its tool.

    On a busy machine its time may be over before the tool has begun. Then another one has more of it.
    """
    attempts = 0
    for timeout_s in (2.0, 10.0, 50.0):
        attempts += 1
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await attempt(timeout_s)
        assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        if stage.entered.is_set():
            break
    await until(lambda: stage.cancelled == 1)
    await until(world.closed)
    assert 1 <= len(world.closed()) <= attempts
    assert {(record["states"][-1], record["error_code"]) for record in world.closed()} <= ENDED


@OPS_04
@pytest.mark.proves("LIFE-10")
async def test_the_clients_deadline_ends_the_call_and_the_tool(world: World) -> None:
    await late(lambda timeout_s: world.invoke("long.waits", timeout=timeout_s), world)


@OPS_04
@pytest.mark.proves("LIFE-10")
async def test_a_tool_has_no_more_time_than_the_clients_deadline_leaves(world: World) -> None:
    for timeout, most in ((20, 20.0), (None, 300.0)):
        left = json.loads((await world.invoke("long.left", timeout=timeout)).value_json)
        assert most - 15 < left <= most + 1, "of 300 s that its class allows; gRPC rounds a timeout up"
    stream = world.stub.Run(None, metadata=world.bearer, timeout=20)
    await stream.write(wire.RunRequest(start=wire.InvokeRequest(tool_id="long.left")))
    told = [event async for event in stream]
    assert 5 < json.loads(told[-1].result.value_json) <= 21


@OPS_04
async def test_a_stream_has_a_deadline_too(world: World) -> None:
    async def attempt(timeout_s: float) -> None:
        stream = world.stub.Run(None, metadata=world.bearer, timeout=timeout_s)
        await stream.write(wire.RunRequest(start=wire.InvokeRequest(tool_id="long.waits")))
        await events(stream)

    await late(attempt, world)


@pytest.mark.supports("LIFE-15")
@OPS_04
async def test_cancelling_the_rpc_cancels_the_call(world: World) -> None:
    call = world.stub.Invoke(wire.InvokeRequest(tool_id="long.waits"), metadata=world.bearer)
    waiting = asyncio.ensure_future(call)
    await stage.entered.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(world.closed)
    (record,) = world.closed()
    assert (record["states"][-1], record["error_code"]) == ("canceled", "E3703")
    assert stage.cancelled == 1


@OPS_04
async def test_cancelling_a_stream_cancels_its_call(world: World) -> None:
    stream = await world.run("long.waits")
    started = await stream.read()
    await stage.entered.wait()
    stream.cancel()
    await until(world.closed)
    (record,) = world.closed()
    assert record["call"] == started.started.invocation_id
    assert (record["states"][-1], record["error_code"], stage.cancelled) == ("canceled", "E3703", 1)


@OPS_04
async def test_a_message_on_the_stream_cancels_its_call_and_the_end_is_told(world: World) -> None:
    stream = await world.run("long.waits")
    assert (await stream.read()).WhichOneof("event") == "started"
    await stage.entered.wait()
    await stream.write(wire.RunRequest(cancel=wire.CancelCall()))
    heard: list[wire.RunEvent] = []
    ended = await refusal(events(stream, heard))
    assert (ended.status, ended.envelope.code) == (grpc.StatusCode.CANCELLED, "E3703")
    assert heard[-1].cancel.outcome == wire.CANCEL_OUTCOME_CANCELED
    assert (world.closed()[0]["error_code"], stage.cancelled) == ("E3703", 1)


async def test_a_tool_that_cannot_be_cancelled_goes_on(world: World) -> None:
    stream = await world.run("long.stubborn")
    await stage.entered.wait()
    await stream.write(wire.RunRequest(cancel=wire.CancelCall()))
    while not (event := await stream.read()).HasField("cancel"):
        pass
    assert event.cancel.outcome == wire.CANCEL_OUTCOME_UNSUPPORTED
    stage.release.set()
    assert (await events(stream))[-1].result.value_json == b'"at last"'


async def test_a_flood_of_cancels_waits_at_its_sender(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[int] = []
    put = servicer.CallStream.put

    def note(self: servicer.CallStream, event: wire.RunEvent) -> None:
        put(self, event)
        waiting.append(self._events.qsize())  # pyright: ignore[reportPrivateUsage] - what the bound is about

    monkeypatch.setattr(servicer.CallStream, "put", note)
    stream = await world.run("long.stubborn")
    await stage.entered.wait()
    for _ in range(500):
        await stream.write(wire.RunRequest(cancel=wire.CancelCall()))
    answered = 0
    while answered < 500:
        answered += (await stream.read()).HasField("cancel")
    stage.release.set()
    assert (await events(stream))[-1].result.value_json == b'"at last"'
    assert max(waiting) <= 3, "the next cancel is read when the one before it was answered"


async def test_a_call_that_has_not_begun_can_be_cancelled_on_its_stream(world: World) -> None:
    sample.world.gate = asyncio.Event()
    first = asyncio.ensure_future(world.invoke("demo.increment", {"name": "a"}, idempotency_key="k"))
    await until(lambda: records(world.app, kind="intent"))
    second = await world.run("demo.increment", {"name": "a"}, idempotency_key="k")
    await second.write(wire.RunRequest(cancel=wire.CancelCall()))
    event = await second.read()
    assert event.cancel.outcome == wire.CANCEL_OUTCOME_CANCELED
    assert (await refusal(events(second))).envelope.code == "E3703"
    sample.world.gate.set()
    assert (await first).value_json == b"1"


@OPS_04
async def test_cancel_ends_a_running_call_of_the_same_caller_and_no_other(world: World) -> None:
    sample.world.gate = asyncio.Event()
    stream = await world.run("demo.increment", {"name": "a"}, idempotency_key="k")
    call_id = (await stream.read()).started.invocation_id
    request = wire.CancelRequest(invocation_id=call_id)
    status = await world.stub.Status(wire.StatusRequest(invocation_id=call_id), metadata=world.bearer)
    assert status.state == wire.CALL_STATE_RUNNING
    mine = world.bearer
    world.token = await world.app.tokens.issue(subject=AGENT, by=OPERATOR)
    assert (await refusal(world.stub.Cancel(request, metadata=world.bearer))).envelope.code == "E3702"
    answer = await world.stub.Cancel(request, metadata=mine)
    assert answer.outcome == wire.CANCEL_OUTCOME_CANCELED
    assert (await refusal(events(stream))).envelope.code == "E3703"
    assert (await world.stub.Cancel(request, metadata=mine)).outcome == wire.CANCEL_OUTCOME_FINISHED
    status = await world.stub.Status(wire.StatusRequest(invocation_id=call_id), metadata=mine)
    assert status.state == wire.CALL_STATE_CANCELED


# Streams


@OPS_04
@WIDE
@given(words=st.integers(1, 30))
async def test_events_come_in_order_and_the_result_is_the_last(world: World, words: int) -> None:
    heard = await events(await world.run("long.talks", {"words": words}))
    order = kinds(heard)
    assert order[0] == "started"
    assert order[-1] == "result"
    assert [kind for kind in order[1:-1] if kind == "partial"] == ["partial"] * words
    steps = [event.progress for event in heard if event.HasField("progress")]
    assert [step.sequence for step in steps] == list(range(1, len(steps) + 1))
    told = [json.loads(step.facts_json)["current_step"] for step in steps if step.message.startswith("word")]
    parts = [event.partial for event in heard if event.HasField("partial")]
    assert told == [int(json.loads(part.value_json)) for part in parts] == list(range(1, words + 1))
    assert [part.index for part in parts] == list(range(1, words + 1))
    assert heard[-1].result.value_json == b'"that was all"'
    assert heard[-1].result.invocation_id == heard[0].started.invocation_id


async def test_streams_side_by_side_hear_of_their_own_calls_only(world: World) -> None:
    streams = [await world.run("long.talks", {"words": number}) for number in range(1, 9)]
    told = await asyncio.gather(*map(events, streams))
    for number, heard in enumerate(told, 1):
        assert kinds(heard).count("partial") == number
        assert heard[0].started.invocation_id == heard[-1].result.invocation_id
    assert len({heard[0].started.invocation_id for heard in told}) == 8
    assert world.app.gateway.observer.listeners == []


async def test_a_slow_reader_misses_progress_and_no_part(world: World) -> None:
    stream = await world.run("long.talks", {"words": 1500})
    await until(world.closed)  # nothing was read meanwhile
    heard = await events(stream)
    assert kinds(heard).count("partial") == 1500
    steps = [event.progress.sequence for event in heard if event.HasField("progress")]
    assert steps == sorted(steps)
    assert kinds(heard)[-1] == "result"


async def test_a_call_that_is_refused_never_starts_on_its_stream(world: World) -> None:
    stream = await world.run("demo.add", {"a": "x"})
    assert (await refusal(stream.read())).envelope.code == "E3301"


@pytest.mark.parametrize(
    "sent",
    [
        [],
        [wire.RunRequest()],
        [wire.RunRequest(cancel=wire.CancelCall())],
        [wire.RunRequest(start=wire.InvokeRequest(tool_id="long.waits"))] * 2,
        [wire.RunRequest(start=wire.InvokeRequest(tool_id="long.waits")), wire.RunRequest()],
    ],
)
async def test_a_stream_takes_a_start_and_then_cancels_only(world: World, sent: list[wire.RunRequest]) -> None:
    stream = world.stub.Run(None, metadata=world.bearer)
    for message in sent:
        await stream.write(message)
    await stream.done_writing()
    refused = await refusal(events(stream))
    assert (refused.status, refused.envelope.code) == (grpc.StatusCode.INVALID_ARGUMENT, "E3004")


async def test_a_stream_that_says_nothing_does_not_stay(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "START_WITHIN_S", 0.0)
    refused = await refusal(events(world.stub.Run(None, metadata=world.bearer)))
    assert (refused.status, refused.envelope.code) == (grpc.StatusCode.DEADLINE_EXCEEDED, "E3002")


# Approval


@OPS_04
async def test_a_call_that_a_person_must_agree_to_is_pending_and_goes_on_when_they_have(world: World) -> None:
    asked = await world.invoke("demo.send", {"to": "carl"}, idempotency_key="k")
    assert asked.WhichOneof("outcome") == "pending"
    assert (asked.state, asked.pending.status) == (wire.CALL_STATE_AWAITING_APPROVAL, "PENDING")
    assert asked.pending.agree_in_advance.startswith("interlock approvals grant demo.send --caller did:")
    request = wire.ResumeRequest(invocation_id=asked.invocation_id)
    early = await refusal(world.stub.Resume(request, metadata=world.bearer))
    assert (early.status, early.envelope.code) == (grpc.StatusCode.FAILED_PRECONDITION, "E3411")
    status = await world.stub.Status(wire.StatusRequest(invocation_id=asked.invocation_id), metadata=world.bearer)
    assert (status.state, status.approval_ticket_id) == (wire.CALL_STATE_AWAITING_APPROVAL, asked.pending.ticket_id)
    assert sample.world.runs == 0
    await world.app.approvals.approve(asked.pending.ticket_id, by=BEN)
    done = await world.stub.Resume(request, metadata=world.bearer)
    assert (done.value_json, done.invocation_id, sample.world.runs) == (b'"carl"', asked.invocation_id, 1)


async def test_a_call_sent_again_on_a_stream_after_approval_is_heard_under_its_first_id(world: World) -> None:
    asked = (await events(await world.run("demo.send", {"to": "carl"}, idempotency_key="k")))[-1].result
    assert asked.HasField("pending")
    await world.app.approvals.approve(asked.pending.ticket_id, by=BEN)
    heard = await events(await world.run("demo.send", {"to": "carl"}, idempotency_key="k"))
    assert heard[0].started.invocation_id == heard[-1].result.invocation_id == asked.invocation_id


async def test_a_call_that_was_denied_says_so(world: World) -> None:
    asked = await world.invoke("demo.send", {"to": "carl"}, idempotency_key="k")
    await world.app.approvals.deny(asked.pending.ticket_id, by=BEN)
    request = wire.ResumeRequest(invocation_id=asked.invocation_id)
    denied = await refusal(world.stub.Resume(request, metadata=world.bearer))
    assert (denied.status, denied.envelope.code) == (grpc.StatusCode.PERMISSION_DENIED, "E3209")


# The server


@dataclass(frozen=True)
class Asking:
    """A channel to one version of reflection: they differ in nothing but their names."""

    channel: Any
    version: str

    def stream_stream(self, method: str, **options: Any) -> Any:
        return self.channel.stream_stream(method.replace("v1alpha", self.version), **options)


def _by_reflection(port: int, token: str, version: str) -> tuple[list[str], str]:
    """What a client does that knows the address and nothing else: read the contract, make a call by it."""
    with cast("Any", grpc).insecure_channel(f"127.0.0.1:{port}") as channel:

        def unread() -> Any:
            return ProtoReflectionDescriptorDatabase(cast("Any", Asking(channel, version)))

        database = unread()
        services = sorted(database.get_services())
        for name in services:
            file = database.FindFileContainingSymbol(name)
            (service,) = [one for one in file.service if f"{file.package}.{one.name}" == name]
            for one in service.method:
                assert unread().FindFileContainingSymbol(f"{name}.{one.name}") == file
        with pytest.raises(KeyError):
            database.FindFileContainingSymbol("google.protobuf.FileDescriptorProto")
        method = DescriptorPool(database).FindServiceByName("interlock.v1.Gateway").FindMethodByName("Invoke")
        sent = message_factory.GetMessageClass(method.input_type)
        got = message_factory.GetMessageClass(method.output_type)
        call = channel.unary_unary(
            "/interlock.v1.Gateway/Invoke",
            request_serializer=sent.SerializeToString,
            response_deserializer=got.FromString,
        )
        request = json_format.ParseDict({"toolId": "demo.add", "arguments": {"a": 4}}, sent())
        answer: Message = call(request, metadata=(("authorization", f"Bearer {token}"),))
        return services, json_format.MessageToDict(answer)["valueJson"]


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_a_client_can_learn_the_contract_from_the_server(world: World, version: str) -> None:
    services, value = await asyncio.to_thread(_by_reflection, world.port, world.token, version)
    assert services == [
        "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection",
        "interlock.v1.Gateway",
    ]  # fmt: skip
    assert value == "OQ=="  # 9 in base64


SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


async def test_health_says_whether_calls_are_taken(app: Interlock) -> None:
    async with served(app, drain_s=30.0) as world:
        channel = cast("Any", world.channel)
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\n\x14interlock.v1.Gateway")
        assert await check(b"") == SERVING
        assert await watch.read() == SERVING
        stopping = asyncio.ensure_future(world.door.stop())
        assert await watch.read() == NOT_SERVING
        watch.cancel()
        await stopping


async def test_a_message_that_is_too_large_is_refused_and_the_server_goes_on(app: Interlock) -> None:
    async with served(app, max_message_bytes=10_000) as world:
        answer = await refusal(world.invoke("demo.echo", {"value": "x" * 10_000}))
        assert (answer.status, answer.envelope.code) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "E3309")
        # What is far too large is not read at all.
        with pytest.raises(grpc.aio.AioRpcError) as unread:
            await world.invoke("demo.echo", {"value": "x" * 100_000})
        assert unread.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await world.invoke("demo.echo", {"value": "x" * 5000})).HasField("value_json")


@WIDE
@given(raw=st.binary(max_size=300), preface=st.booleans())
async def test_bytes_that_are_no_http_do_not_disturb_it(world: World, raw: bytes, preface: bool) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    writer.write((b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if preface else b"") + raw)
    writer.close()
    reader.feed_eof()
    assert (await world.invoke("demo.echo", {"value": 6})).value_json == b"6"


words = st.text(st.characters(codec="utf-8"), max_size=20)
some_value = st.deferred(
    lambda: (
        st.builds(struct_pb2.Value, number_value=st.floats())
        | st.builds(struct_pb2.Value, string_value=words)
        | st.builds(struct_pb2.Value, struct_value=some_struct)
        | st.just(struct_pb2.Value())
    )
)
some_struct = st.builds(struct_pb2.Struct, fields=st.dictionaries(words, some_value, max_size=3))
some_name = st.sampled_from(["demo.add", "demo.echo", "demo.increment", "no.such"]) | words
some_call = st.builds(
    wire.InvokeRequest,
    tool_id=some_name,
    version=st.none() | words,
    arguments_json=st.binary(max_size=30) | st.sampled_from([b'{"a": 1}', b'{"value": [1e400]}', b'{"value": -0.0}']),
    idempotency_key=st.none() | words,
    session=words,
    dry_run=st.booleans(),
    task=st.none() | words,
) | st.builds(wire.InvokeRequest, tool_id=some_name, arguments=some_struct, idempotency_key=words)
SOME: dict[str, st.SearchStrategy[Message]] = {
    "Discover": st.builds(
        wire.DiscoverRequest, page_size=st.integers(-(2**31), 2**31 - 1), page_token=words, query=words
    ),
    "Describe": st.builds(wire.DescribeRequest, tool_id=some_name, version=st.none() | words),
    "Invoke": some_call,
    "Run": st.builds(wire.RunRequest, start=some_call) | st.builds(wire.RunRequest, cancel=st.builds(wire.CancelCall)),
    "Status": st.builds(wire.StatusRequest, invocation_id=words),
    "Cancel": st.builds(wire.CancelRequest, invocation_id=words),
    "Resume": st.builds(wire.ResumeRequest, invocation_id=words),
    "Calls": st.builds(
        wire.CallsRequest, state=words, tool=words, since=words, before=st.integers(-1, 9), limit=st.integers(-1, 9)
    ),
    "Trace": st.builds(wire.TraceRequest, invocation_id=words),
    "Top": st.builds(wire.TopRequest, by=words, since=words, limit=st.integers(-1, 9)),
}
frames = st.sampled_from(sorted(SOME)).flatmap(
    lambda name: st.tuples(
        st.just(name), st.binary(max_size=200) | SOME[name].map(lambda message: message.SerializeToString())
    )
)


@settings(WIDE, max_examples=150)
@given(frame=frames)
async def test_no_message_whatever_disturbs_it(world: World, frame: tuple[str, bytes]) -> None:
    name, raw = frame
    path, channel = f"/interlock.v1.Gateway/{name}", cast("Any", world.channel)
    try:
        if name == "Run":
            stream = channel.stream_stream(path)(metadata=world.bearer)
            await stream.write(raw)
            await stream.done_writing()
            await events(stream)
        else:
            await channel.unary_unary(path)(raw, metadata=world.bearer)
    except grpc.aio.AioRpcError as error:
        failed = told(error)
        assert failed.envelope.code != "E3000"
        assert failed.status not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)


async def refused_from_now_on(world: World) -> None:
    """Ask until the door is shut."""
    async with asyncio.timeout(30):
        while True:
            try:
                await world.stub.Discover(wire.DiscoverRequest(), metadata=world.bearer, timeout=1.0)
            except grpc.aio.AioRpcError as error:
                # What came in just as the door was shut is kept by grpc and seen by nobody, until it is cancelled.
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    continue
                shut = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
                assert error.code() in shut  # noqa: PT017 - which attempt fails is open
                return


async def test_a_stop_waits_for_calls_under_way_and_loses_none(app: Interlock) -> None:
    async with served(app, drain_s=30.0) as world:
        calls = [
            asyncio.ensure_future(world.invoke("long.counts", {"name": f"n{n}"}, idempotency_key=f"k{n}"))
            for n in range(20)
        ]
        streams = [await world.run("long.counts", {"name": f"s{n}"}, idempotency_key=f"s{n}") for n in range(5)]
        await until(lambda: len(records(app, kind="intent")) == 25)
        stopping = asyncio.ensure_future(world.door.stop())
        await refused_from_now_on(world)
        assert not stopping.done()
        stage.release.set()
        results = await asyncio.gather(*calls)
        results += [(await events(stream))[-1].result for stream in streams]
        await stopping
        assert [result.value_json for result in results] == [b"1"] * 25
        succeeded = {record["call"] for record in world.closed() if record["states"][-1] == "succeeded"}
        assert {result.invocation_id for result in results} <= succeeded


async def test_what_does_not_end_in_time_is_cut_off_and_on_record(world: World) -> None:
    call = asyncio.ensure_future(world.invoke("long.waits"))
    stream = await world.run("long.waits")
    await until(lambda: len(world.app.gateway.runner.active) == 2)
    await world.door.stop()
    assert [record["error_code"] for record in world.closed()] == ["E3703", "E3703"]
    assert stage.cancelled == 2
    for attempt in (call, events(stream)):
        with pytest.raises(grpc.aio.AioRpcError):
            await attempt


async def test_stopping_twice_or_before_the_start_does_nothing(app: Interlock) -> None:
    door = GrpcDoor(Service(app), address="127.0.0.1:0")
    await door.stop()
    await door.start()
    await door.stop()
    await door.stop()


async def test_a_port_that_is_taken_is_refused(app: Interlock) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(Failure) as refused:
            await GrpcDoor(Service(app), address=f"127.0.0.1:{taken.getsockname()[1]}").start()
    assert refused.value.code == "E3108"


async def test_it_speaks_tls_with_two_files(app: Interlock, tmp_path: Path) -> None:
    files = certificate(tmp_path)
    async with served(app, tls=files) as world:
        trusted = grpc.ssl_channel_credentials(files[0].read_bytes())
        async with grpc.aio.secure_channel(f"localhost:{world.port}", trusted) as channel:
            answer = await GatewayStub(channel).Discover(wire.DiscoverRequest(), metadata=world.bearer)
        assert answer.tools
        with pytest.raises(grpc.aio.AioRpcError) as plain:
            await world.invoke("demo.add", {"a": 1})
        assert plain.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_files_that_are_no_certificate_are_refused(app: Interlock, tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("nothing")
    for files, code in (((junk, junk), "E3108"), ((tmp_path / "none.pem", junk), "E3001")):
        with pytest.raises(Failure) as refused:
            await GrpcDoor(Service(app), address="127.0.0.1:0", tls=files).start()
        assert refused.value.code == code
        assert str(tmp_path) not in refused.value.message


def test_the_door_costs_nothing_until_it_opens() -> None:
    heavy = "import sys, interlock.doors.grpc; print([m for m in ('grpc', 'google.protobuf') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", heavy], capture_output=True, check=True)
    assert shown.stdout == b"[]\n"


# The contract


def contract() -> FileDescriptorProto:
    made = FileDescriptorProto()
    wire.DESCRIPTOR.CopyToProto(made)
    return made


def released() -> FileDescriptorProto:
    return FileDescriptorProto.FromString(generate.GATEWAY.released.read_bytes())


@OPS_04
def test_the_contract_breaks_no_client_of_the_released_one() -> None:
    assert generate.breaks(released(), contract()) == []


@pytest.mark.parametrize("contract", [generate.GATEWAY, generate.POLICY])
def test_the_python_of_the_contract_is_up_to_date(contract: generate.Contract) -> None:
    for name, content in generate.generate(contract).items():
        assert (contract.folder / name).read_bytes() == content, "run python -m interlock.doors.grpc.generate"


def _message(file: FileDescriptorProto, name: str) -> Any:
    return next(message for message in file.message_type if message.name == name)


def _field(file: FileDescriptorProto, message: str, name: str) -> FieldDescriptorProto:
    return next(field for field in _message(file, message).field if field.name == name)


def _drop_field(file: FileDescriptorProto) -> None:
    del _message(file, "Tool").field[0]


def _renumber(file: FileDescriptorProto) -> None:
    _field(file, "InvokeRequest", "session").number = 99


def _retype(file: FileDescriptorProto) -> None:
    _field(file, "CallResult", "created_ms").type = FieldDescriptorProto.TYPE_STRING


def _rename(file: FileDescriptorProto) -> None:
    _field(file, "CallResult", "tool").name = "tool_ref"


def _repeat(file: FileDescriptorProto) -> None:
    _field(file, "Pending", "reason").label = FieldDescriptorProto.LABEL_REPEATED


def _leave_oneof(file: FileDescriptorProto) -> None:
    _field(file, "CallResult", "value_json").ClearField("oneof_index")


def _drop_message(file: FileDescriptorProto) -> None:
    del file.message_type[0]


def _drop_enum(file: FileDescriptorProto) -> None:
    del file.enum_type[0]


def _change_value(file: FileDescriptorProto) -> None:
    file.enum_type[0].value[1].number = 42


def _drop_method(file: FileDescriptorProto) -> None:
    del file.service[0].method[0]


def _stop_streaming(file: FileDescriptorProto) -> None:
    next(method for method in file.service[0].method if method.name == "Run").client_streaming = False


def _move(file: FileDescriptorProto) -> None:
    file.package = "interlock.v2"


@OPS_04
@pytest.mark.parametrize(
    "change",
    [
        _drop_field, _renumber, _retype, _rename, _repeat, _leave_oneof, _drop_message, _drop_enum, _change_value,
        _drop_method, _stop_streaming, _move,
    ],
)  # fmt: skip
def test_what_breaks_clients_is_noticed(change: Callable[[FileDescriptorProto], None]) -> None:
    changed = released()
    change(changed)
    assert generate.breaks(released(), changed)
    assert generate.breaks(released(), released()) == []


def test_a_contract_may_grow_and_may_retire_a_field_for_good() -> None:
    grown = released()
    _message(grown, "Tool").field.add(name="more", number=900, type=FieldDescriptorProto.TYPE_STRING)
    grown.message_type.add(name="More")
    grown.enum_type[0].value.add(name="MUTATION_CLASS_MORE", number=99)
    grown.service[0].method.add(name="More", input_type=".interlock.v1.More", output_type=".interlock.v1.More")
    number = _message(grown, "Tool").field[0].number
    _drop_field(grown)
    _message(grown, "Tool").reserved_range.add(start=number, end=number + 1)
    assert generate.breaks(released(), grown) == []

"""A hostile caller over gRPC: ids, keys and sessions of others, absurd values, a token at the instant of its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio

from interlock import Interlock
from interlock.authority.identities import Identity
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from interlock.testing import FakeClock
from tests import sample
from tests.support.calls import until
from tests.support.grpc import World, refusal, served, stage, told, world
from tests.support.identities import OPERATOR, did_of

__all__ = ["world"]

EVE = did_of("eve")
UNKNOWN = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


async def _as_eve(world: World) -> tuple[tuple[str, str], ...]:
    """The metadata of a caller who has nothing to do with the others."""
    await world.app.identities.register(Identity(did=EVE, kind="human"), by="test")
    token = await world.app.tokens.issue(subject=EVE, by=OPERATOR, ttl_s=3600)
    return (("authorization", f"Bearer {token}"),)


async def _stolen(world: World, call_id: str, bearer: Any) -> list[tuple[str, str]]:
    """The answers to everything that can be asked about a call."""
    stub = world.stub
    return [
        (one.envelope.code, one.message.replace(call_id, "ID"))
        for one in [
            await refusal(stub.Status(wire.StatusRequest(invocation_id=call_id), metadata=bearer)),
            await refusal(stub.Trace(wire.TraceRequest(invocation_id=call_id), metadata=bearer)),
            await refusal(stub.Cancel(wire.CancelRequest(invocation_id=call_id), metadata=bearer)),
            await refusal(stub.Resume(wire.ResumeRequest(invocation_id=call_id), metadata=bearer)),
        ]
    ]


async def test_calls_of_others_are_to_a_stranger_as_calls_that_never_were(world: World) -> None:
    eve = await _as_eve(world)
    never = await _stolen(world, UNKNOWN, eve)
    assert {code for code, _ in never} == {"E3702"}
    done = (await world.invoke("demo.increment", {"name": "a"}, idempotency_key="k")).invocation_id
    waits = (await world.invoke("demo.send", {"to": "ann"}, idempotency_key="k")).invocation_id
    stream = await world.run("long.waits")
    runs = (await stream.read()).started.invocation_id
    await stage.entered.wait()
    for call_id in (done, waits, runs):
        assert await _stolen(world, call_id, eve) == never
    listed = await world.stub.Calls(wire.CallsRequest(), metadata=eve)
    assert list(listed.calls) == []
    assert stage.cancelled == 0
    stream.cancel()
    await until(lambda: stage.cancelled)


async def test_a_key_and_a_session_of_another_caller_are_not_shared(world: World) -> None:
    eve = await _as_eve(world)
    mine = await world.invoke("demo.increment", {"name": "a"}, idempotency_key="k", session="s")
    asked = wire.InvokeRequest(
        tool_id="demo.increment", arguments_json=b'{"name": "a"}', idempotency_key="k", session="s"
    )
    theirs = await world.stub.Invoke(asked, metadata=eve)
    assert (mine.value_json, theirs.value_json) == (b"1", b"2"), "a stranger's key is another key"
    assert sample.world.runs == 2
    again = await world.invoke("demo.increment", {"name": "a"}, idempotency_key="k", session="s")
    assert (again.value_json, sample.world.runs) == (b"1", 2)


LONG = "x" * 1_000_000
ABSURD: dict[str, Callable[[World], Any]] = {
    "a long call id": lambda w: w.stub.Status(wire.StatusRequest(invocation_id=LONG), metadata=w.bearer),
    "a call id with a null": lambda w: w.stub.Status(wire.StatusRequest(invocation_id="a\0b"), metadata=w.bearer),
    "no call id": lambda w: w.stub.Cancel(wire.CancelRequest(), metadata=w.bearer),
    "a long reason": lambda w: w.stub.Cancel(wire.CancelRequest(invocation_id=UNKNOWN, reason=LONG), metadata=w.bearer),
    "a long tool": lambda w: w.invoke(LONG, {}),
    "a long version": lambda w: w.invoke("demo.add", {"a": 1, "b": 2}, version=LONG),
    "a long key": lambda w: w.invoke("demo.increment", {"name": "a"}, idempotency_key=LONG),
    "a long session": lambda w: w.invoke("demo.add", {"a": 1, "b": 2}, session=LONG),
    "a long task": lambda w: w.invoke("demo.add", {"a": 1, "b": 2}, task=LONG),
    "a negative page": lambda w: w.stub.Discover(wire.DiscoverRequest(page_size=-(2**31)), metadata=w.bearer),
    "arguments that are a list": lambda w: w.invoke("demo.add", [1, 2]),
    "a strange moment": lambda w: w.stub.Calls(wire.CallsRequest(since=LONG), metadata=w.bearer),
    "a strange lead": lambda w: w.stub.Top(wire.TopRequest(by=LONG), metadata=w.bearer),
    "two tokens": lambda w: w.stub.Status(
        wire.StatusRequest(invocation_id=UNKNOWN), metadata=(("authorization", "Bearer x"), *w.bearer)
    ),
}


async def test_absurd_values_are_refused_in_few_words(world: World) -> None:
    found: dict[str, str] = {}
    for name, attempt in ABSURD.items():
        said = await refusal(attempt(world))
        found[name] = said.envelope.code
        assert len(said.message) < 2000, name
        assert said.envelope.code != "E3000", name
    assert found.pop("two tokens") == "E3203", "the first counts"
    assert set(found.values()) <= {"E3004", "E3101", "E3702"}
    assert (await world.invoke("demo.add", {"a": 1, "b": 2})).value_json == b"3", "others are served"


async def test_a_token_holds_until_its_last_instant_and_no_longer(home: Path) -> None:
    clock = FakeClock()
    async with Interlock.open(home, clock=clock.clock, housekeeping=False) as app, served(app) as world:
        clock.advance(3599)
        assert (await world.invoke("demo.add", {"a": 1, "b": 2})).value_json == b"3"
        clock.advance(1)
        for _ in range(2):  # it was known by its digest a moment ago
            expired = await refusal(world.invoke("demo.add", {"a": 1, "b": 2}))
            assert (expired.status, expired.envelope.code) == (grpc.StatusCode.UNAUTHENTICATED, "E3201")
        late = world.stub.Run(None, metadata=world.bearer)

        async def ask() -> None:
            # The refusal needs nothing of what is written: it may come before it or after it.
            await late.write(wire.RunRequest(start=wire.InvokeRequest(tool_id="demo.add")))
            await late.read()

        assert (await refusal(ask())).envelope.code == "E3201"


async def test_a_call_that_is_cancelled_by_many_at_once_ends_once(world: World) -> None:
    stream = await world.run("long.waits")
    runs = (await stream.read()).started.invocation_id
    await stage.entered.wait()
    asked = wire.CancelRequest(invocation_id=runs)
    await stream.write(wire.RunRequest(cancel=wire.CancelCall()))
    cancels = (world.stub.Cancel(asked, metadata=world.bearer) for _ in range(20))
    answers = await asyncio.gather(*cancels, return_exceptions=True)
    stream.cancel()
    for one in answers:
        # A call that has just ended may not be on record yet.
        if isinstance(one, BaseException):
            assert told(cast("grpc.aio.AioRpcError", one)).envelope.code == "E3702"
        else:
            assert one.outcome in (wire.CANCEL_OUTCOME_CANCELED, wire.CANCEL_OUTCOME_FINISHED)
    await until(world.closed)
    (record,) = world.closed()
    assert (record["error_code"], stage.cancelled) == ("E3703", 1)

"""Which calls there are, and which tools and callers lead: the same through every door, a page at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock import Context, Failure, Field, Interlock, tool
from interlock.api import listing
from interlock.api.listing import Lead, Listing, Wanted, every_call, top_of_all
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.call.context import Caller
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from tests import sample
from tests.support.calls import admit, until, write
from tests.support.identities import did_of
from tests.support.wires import served

Json = dict[str, Any]
Number = Annotated[int, Field(description="a number", examples=[1])]
ANN, BOB = Caller(id="user:ann", tenant="north"), Caller(id="user:bob", tenant="north")
EVE = Caller(id="user:eve", tenant="south")


class Gate:
    """Holds calls back. Each test closes it anew, on its own event loop."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def close(self) -> None:
        self.event = asyncio.Event()

    def open(self) -> None:
        self.event.set()


gate = Gate()


@tool(version="1.0.0", mutation_class="read_only", namespace="li")
async def look(number: Number) -> int:
    """Look at a number; a negative one is refused."""
    if number < 0:
        raise ValueError
    return number


@tool(version="1.0.0", mutation_class="read_only", namespace="li")
async def pay(ctx: Context, number: Number) -> int:
    """Spend a number of units."""
    ctx.cost(external_api=float(number))
    return number


async def hold(number: Number) -> int:
    """Wait until the gate is open."""
    await gate.event.wait()
    return number


holding = write(hold, timeout_class="async")


@pytest_asyncio.fixture
async def app(tmp_path: Path) -> AsyncGenerator[Interlock]:
    async with Interlock.open(tmp_path, housekeeping=False) as opened:
        await admit(opened, look, pay, holding)
        yield opened


async def one_page(
    app: Interlock, wanted: Wanted, by: Caller | None, before: int | None, limit: int
) -> tuple[list[Json], int | None]:
    """A page as a caller sees it, or as a person at the data directory does."""
    if by is not None:
        return await Listing(app).page(wanted, by=by, before=before, limit=limit)
    return await app.readers.read(lambda reader: every_call(reader, wanted, before=before, limit=limit))


async def every_page(app: Interlock, wanted: Wanted, by: Caller | None, limit: int) -> list[Json]:
    found: list[Json] = []
    before = None
    for _ in range(100):
        page, before = await one_page(app, wanted, by, before, limit)
        assert len(page) <= limit
        found += page
        if before is None:
            return found
    raise AssertionError("the pages do not end")


def auditor(tenant: str) -> Caller:
    return Caller(id="user:auditor", tenant=tenant, scopes=frozenset({"audit:read"}))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    made=st.lists(st.tuples(st.sampled_from([ANN, BOB, EVE]), st.sampled_from([-1, 1])), max_size=12),
    limit=st.integers(1, 5),
    looked=st.integers(1, 7),
)
async def test_pages_hold_each_call_once_and_nobody_elses(
    tmp_path_factory: pytest.TempPathFactory, made: list[tuple[Caller, int]], limit: int, looked: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listing, "LOOKED_THROUGH", looked)
        async with Interlock.open(tmp_path_factory.mktemp("pages"), housekeeping=False) as app:
            await admit(app, look)
            calls = [
                (by, number, (await app.call("li.look", number=number, caller=by)).invocation_id) for by, number in made
            ]
            calls.reverse()
            for by in (ANN, BOB, EVE):
                found = await every_page(app, Wanted(), by, limit)
                assert [line["invocation_id"] for line in found] == [one for who, _, one in calls if who is by]
            for wanted, sign in ((Wanted(state="succeeded"), 1), (Wanted(error="E3401"), -1)):
                found = await every_page(app, wanted, None, limit)
                assert [line["invocation_id"] for line in found] == [one for _, number, one in calls if number == sign]
            north = await every_page(app, Wanted(tool="li.look"), auditor("north"), limit)
            assert [line["invocation_id"] for line in north] == [one for who, _, one in calls if who is not EVE]


async def test_a_span_of_time_is_found_whatever_is_on_record_around_it(app: Interlock) -> None:
    for number in range(30):
        assert (await app.call("li.look", number=number, caller=ANN)).ok
    everything = await every_page(app, Wanted(), None, 100)
    times = sorted({line["at"] for line in everything})
    for since in times:
        found = await every_page(app, Wanted(since=since), None, 7)
        assert found == [line for line in everything if line["at"] >= since]
        found = await every_page(app, Wanted(until=since), None, 7)
        assert found == [line for line in everything if line["at"] < since]


async def test_a_first_page_holds_no_more_than_its_limit_however_many_calls_run(
    app: Interlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.close()
    tasks = [
        asyncio.create_task(app.call("demo.hold", number=number, key=f"k{number}", caller=ANN)) for number in range(30)
    ]
    running = "SELECT COUNT(*) FROM reservation WHERE state = 'executing'"
    await until(lambda: app.journal.reader.all(running) == [(30,)])
    looked: list[str] = []
    real = listing._records_of  # pyright: ignore[reportPrivateUsage]

    def noted(connection: Any, call: str) -> list[Json]:
        looked.append(call)
        return real(connection, call)

    monkeypatch.setattr(listing, "_records_of", noted)
    found, _ = await one_page(app, Wanted(), None, None, 5)
    assert len(found) == 5
    assert {line["state"] for line in found} == {"running"}
    assert len(looked) <= 10, "those that are not shown are not read"
    every = (await one_page(app, Wanted(state="running"), None, None, 100))[0]
    assert found == every[:5], "the newest"
    assert len(every) == 30
    assert len(looked) <= 10 + 30
    assert await every_page(app, Wanted(state="running"), None, 7) == every, "those beyond the first page as well"
    assert await every_page(app, Wanted(), ANN, 7) == every
    monkeypatch.setattr(listing, "LIVE_LOOKED_THROUGH", 4)
    assert await every_page(app, Wanted(state="running"), None, 7) == every
    assert await every_page(app, Wanted(), BOB, 7) == []
    gate.open()
    await asyncio.gather(*tasks)
    assert len(await every_page(app, Wanted(), None, 7)) == 30


async def test_what_runs_now_is_told_and_when_it_has_ended_is_told_once(app: Interlock) -> None:
    gate.close()
    task = asyncio.create_task(app.call("demo.hold", number=1, key="k", caller=ANN))
    await until(lambda: app.journal.reader.all("SELECT 1 FROM reservation WHERE state = 'executing'"))
    (line,) = await every_page(app, Wanted(state="running"), ANN, 10)
    assert (line["tool"], line["caller"], line["key"]) == ("demo.hold@1.0.0", "user:ann", "k")
    assert await every_page(app, Wanted(state="running"), BOB, 10) == []
    gate.open()
    result = await task
    assert await every_page(app, Wanted(state="running"), ANN, 10) == []
    assert [one["invocation_id"] for one in await every_page(app, Wanted(), ANN, 10)] == [result.invocation_id]


async def test_the_tools_that_fail_most_lead_and_so_do_those_who_spent_most(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        await admit(app, look, pay)
        for by, number in ((ANN, 3), (BOB, 5), (EVE, 9)):
            assert (await app.call("li.pay", number=number, caller=by)).ok
            assert not (await app.call("li.look", number=-1, caller=by)).ok

        async def top(lead: Lead) -> Json:
            now_ms = app.clock.now_ms()
            return await app.readers.read(
                lambda reader: top_of_all(reader, lead, now_ms=now_ms, since=None, until=None, limit=10)
            )

        told = Listing(app)
        failures = await top("failures")
        assert [(one["tool"], one["failures"]) for one in failures["top"]] == [("li.look", 3)]
        cost = await top("cost")
        assert [(one["caller"], one["cost"]) for one in cost["top"]] == [
            ("user:eve", 9),
            ("user:bob", 5),
            ("user:ann", 3),
        ]
        calls = await told.top("calls", by=auditor("north"))
        assert [(one["tool"], one["calls"]) for one in calls["top"]] == [("li.look", 2), ("li.pay", 2)]
        with pytest.raises(Failure, match="audit:read"):
            await told.top("calls", by=ANN)
        read = app.journal.reader.all("SELECT count(*) FROM journal WHERE kind = 'audit.read'")
        assert read == [(1,)], "who reads the calls of others is on record"


async def test_every_door_tells_the_same(app: Interlock) -> None:
    app.issuer_keys.init("EdDSA")
    await app.identities.register(Identity(did=did_of("ops"), name="ops", kind="human"), by="test")
    token = await app.tokens.issue(subject=did_of("ops"), by=app.caller, scopes=["audit:read"], tools=[ToolGrant("*")])
    caller = await app.caller_of(token)
    await app.call("li.look", number=1, caller=caller)
    await app.call("li.look", number=-1, caller=caller)
    async with served(app, {"full": token}) as wires:
        http, stub, rpc = wires.http, wires.stub, wires.rpc
        gate.close()
        tasks = [asyncio.create_task(app.call("demo.hold", number=one, key=f"k{one}", caller=ANN)) for one in range(5)]
        await until(
            lambda: app.journal.reader.all("SELECT count(*) FROM reservation WHERE state = 'executing'") == [(5,)]
        )
        running = [one["invocation_id"] for one in await every_page(app, Wanted(state="running"), None, 100)]

        for one in (wires.rows["rest"], wires.rows["jsonrpc"], wires.rows["grpc"]):
            found, page = list[str](), await one.calls(state="running", limit=2)
            for _ in range(10):
                found += [line["invocation_id"] for line in page["calls"]]
                if page["before"] is None:
                    break
                page = await one.calls(state="running", limit=2, before=page["before"])
            assert found == running, one.name
        gate.open()
        await asyncio.gather(*tasks)
        asked: Json = {"tool": "li.look", "state": "failed", "limit": 5, "since": "2020-01-01T00:00:00Z"}
        rest = (await http.get("/v1/calls", params=asked)).json()
        assert [line["error_code"] for line in rest["calls"]] == ["E3401"]
        assert [(line["caller_name"], line["tenant"]) for line in rest["calls"]] == [("ops", "local")]
        assert (await http.get("/v1/calls", params={**asked, "caller": "ops"})).json() == rest
        assert (await http.get("/v1/calls", params={**asked, "caller": "nobody"})).json()["calls"] == []
        assert (await rpc("calls.list", asked))["result"] == rest
        answered = await stub.Calls(wire.CallsRequest(**asked), metadata=wires.metadata())
        assert [line.caller_name for line in answered.calls] == ["ops"]
        assert [(line["agent"], line["agent_name"]) for line in rest["calls"]] == [(None, None)]
        assert (await app.call("li.look", number=-1, caller=replace(ANN, agent=did_of("ops")))).error is not None
        acted: Json = {"caller": "ops", "limit": 1}
        (line,) = (await http.get("/v1/calls", params=acted)).json()["calls"]
        assert (line["caller"], line["agent"], line["agent_name"]) == (ANN.id, did_of("ops"), "ops")
        (told_line,) = (await stub.Calls(wire.CallsRequest(**acted), metadata=wires.metadata())).calls
        assert (told_line.caller, told_line.agent, told_line.agent_name) == (ANN.id, did_of("ops"), "ops")
        assert [line.invocation_id for line in answered.calls] == [line["invocation_id"] for line in rest["calls"]]
        asked = {"by": "failures", "since": "2020-01-01T00:00:00Z"}
        rest = (await http.get("/v1/calls/top", params=asked)).json()
        assert [one["tool"] for one in rest["top"]] == ["li.look"]
        assert (await rpc("calls.top", asked))["result"] == rest
        told = await stub.Top(wire.TopRequest(**asked), metadata=wires.metadata())
        assert [(one.name, one.failures) for one in told.top] == [("li.look", 2)]
        for bad in ({"since": "yesterday"}, {"since": "0001-01-01T00:00:00+14:00"}, {"limit": 0}, {"before": -1}):
            assert (await http.get("/v1/calls", params=bad)).status_code == 400
            assert "error" in await rpc("calls.list", bad)


async def test_a_read_that_has_just_ended_is_found_although_its_record_is_not_written_yet(home: Path) -> None:
    async with Interlock.open(home, housekeeping=False, audit="batched") as app:
        await admit(app, sample.add)
        calls = Service(app).calls
        assert (await app.call("demo.add", a=1)).ok
        with app.journal.writer.lock:  # nothing is written meanwhile
            ended = await app.call("demo.add", a=1)
            with pytest.raises(Failure):
                await calls.status(ended.invocation_id, app.caller)
        found = await calls.find(ended.invocation_id, app.caller)
        assert (found["status"], found["tool_id"]) == ("succeeded", "demo.add")
        with pytest.raises(Failure) as unknown:
            await calls.find("01M7M9J0J0750EE1EE10850B5A", app.caller)
        assert unknown.value.code == "E3702"

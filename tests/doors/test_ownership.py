"""Calls afterwards: theirs who made them, as far as the token reaches that they come with; from any process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from interlock import Caller, Effect, Failure, Interlock, tool
from interlock.api.service import Ask, Service
from tests import sample
from tests.sample import TOOLS
from tests.support.calls import admit, turn, until
from tests.support.rest import COMPLETE, EVERYTHING, World, crawl, refused, wordy, world

__all__ = ["world"]

Json = dict[str, Any]


# By narrower tokens


async def narrowed(world: World) -> list[str]:
    """Tokens of the same agent for the same person, of which none could have made a call of demo.increment."""
    return [
        await world.token("scout", user="alice", tools=("demo.add",)),
        await world.token("scout", user="alice", tools=("*@^2.0.0",)),
        await world.token("scout", user="alice", constraints={"mutation_class": "read_only"}),
        await world.token("scout", user="alice", constraints={"environments": ["elsewhere"]}),
    ]


async def refuse_all(world: World, call_id: str, token: str) -> None:
    """To whoever could not have made a call there is none, whatever they want of it."""
    path = f"/v1/calls/{call_id}"
    for part in ("", "/events", "/checkpoints"):
        refused(await world.get(path + part, token), 404, "E3702")
    refused(await world.post(f"{path}/cancel", by=token), 404, "E3702")
    refused(await world.post(f"{path}/undo", {"idempotency_key": "stolen"}, token), 404, "E3702")
    refused(await world.post(f"/v1/tools/resume/{call_id}", by=token), 404, "E3702")


async def test_a_narrowed_token_reaches_no_call_that_it_could_not_have_made(world: World) -> None:
    tokens = await narrowed(world)
    sample.world.gate = asyncio.Event()
    runs = (await world.invoke("increment", {"name": "a"}, execution_mode="async", idempotency_key="k")).json()
    for token in tokens:
        await refuse_all(world, runs["invocation_id"], token)
    assert (await world.get(runs["poll"])).json()["status"] == "running"
    sample.world.gate.set()
    await until(lambda: sample.world.counters)
    await until(lambda: not world.service.calls.background.running)
    for token in tokens:
        await refuse_all(world, runs["invocation_id"], token)
    assert (await world.get(runs["poll"])).json()["result"] == 1
    # Those of which only the journal tells, too.
    plain = (await world.invoke("demo.increment", {"name": "b"}, idempotency_key="k2")).json()
    for token in tokens:
        await refuse_all(world, plain["invocation_id"], token)
    assert (await world.get(f"/v1/calls/{plain['invocation_id']}")).json()["tool_id"] == "demo.increment"
    # A token that covers the tool is as good as the one that made the call.
    enough = await world.token("scout", user="alice", tools=("demo.increment@^1.0.0",))
    assert (await world.get(runs["poll"], enough)).json()["result"] == 1
    undone = await world.post(f"/v1/calls/{plain['invocation_id']}/undo", {"idempotency_key": "u"}, enough)
    assert (undone.status_code, sample.world.counters) == (200, {"a": 1, "b": 0})


async def test_what_waits_for_a_person_is_not_called_off_with_a_narrowed_token(world: World) -> None:
    waits = (await world.invoke("demo.send", {"to": "ann"}, idempotency_key="k")).json()
    for token in await narrowed(world):
        await refuse_all(world, waits["invocation_id"], token)
        assert (await world.get("/v1/approvals", token)).json() == {"tickets": []}
        refused(await world.get(f"/v1/approvals/{waits['pending']['ticketId']}", token), 404, "E3702")
    assert (await world.get(f"/v1/approvals/{waits['pending']['ticketId']}")).status_code == 200
    assert (await world.post(f"/v1/calls/{waits['invocation_id']}/cancel")).json()["outcome"] == "canceled"


async def test_what_a_call_kept_is_not_read_with_a_narrowed_token(world: World) -> None:
    await admit(world.app, crawl)
    large = (await world.invoke("demo.wordy", {"text": "abc"})).json()
    saved = (await world.invoke("demo.crawl", {"steps": 1})).json()["invocation_id"]
    ref = large["payload_ref"]
    assert (await world.get(f"/v1/payloads/{ref}")).json() == "abc" * 100
    assert await world.app.checkpoints(saved, caller=await world.app.caller_of(world.tokens["scout"]))
    for token in (await narrowed(world))[:2]:
        refused(await world.get(f"/v1/payloads/{ref}", token), 404, "E3702")
        refused(await world.get(f"/v1/calls/{saved}/checkpoints", token), 404, "E3702")
        with pytest.raises(Failure, match="no call"):
            await world.app.checkpoints(saved, caller=await world.app.caller_of(token))


async def test_whoever_is_refused_hears_why(world: World) -> None:
    for token, code in zip(await narrowed(world), ("E3204", "E3103", "E3206", "E3206"), strict=True):
        asked = {"execution_mode": "async", "idempotency_key": code}
        started = await world.invoke("demo.increment", {"name": "a"}, token, **asked)
        told: Json = {"status": "running"}
        async with asyncio.timeout(60):
            while told["status"] == "running":
                await turn()
                told = (await world.get(started.json()["poll"], token)).json()
        assert told["error"]["error_code"] == code
        # Another server tells it by the stored result, or by the journal where the token covers no tool.
        others, caller = Service(world.app).calls, await world.app.caller_of(token)
        await others.background.ended(told["invocation_id"], caller)
        again = await others.status(told["invocation_id"], caller)
        assert again.get("result", {"error": again})["error"]["error_code"] == code
    assert sample.world.runs == 0


# From another tenant


GOVERNING: tuple[tuple[str, str, Json | None], ...] = (
    ("POST", "/v1/tools/register", COMPLETE),
    ("POST", "/v1/tools/demo.add/deprecate", {"version": "1.0.0"}),
    ("GET", "/v1/upstreams", None),
    ("POST", "/v1/upstreams", {"name": "bank", "kind": "mcp", "config": {"url": "https://bank.example/mcp"}}),
    ("GET", "/v1/upstreams/bank", None),
    ("POST", "/v1/upstreams/bank/probe", None),
    ("DELETE", "/v1/upstreams/bank", None),
    ("POST", "/v1/upstreams/bank/refresh", {}),
    ("POST", "/v1/upstreams/bank/accept", {"reason": "x"}),
    ("GET", "/v1/policy", None),
    ("PUT", "/v1/policy", {"text": '@id("no") forbid (principal, action, resource);'}),
    ("POST", "/v1/policy/check", {"text": ""}),
    ("POST", "/v1/policy/forget", {"subjects": ["alice"]}),
    ("POST", "/v1/policy/explain", {"principal": "alice", "tool": "demo.add", "arguments": {"a": 1}}),
    ("GET", "/v1/audit/verify", None),
    ("GET", "/v1/audit/export", None),
)


@pytest.mark.parametrize(("method", "path", "body"), GOVERNING)
async def test_scopes_of_another_tenant_do_not_run_this_place(
    world: World, method: str, path: str, body: Json | None
) -> None:
    await world.identity("eve", "human", tenant="acme", groups=frozenset({"approvers"}))
    eve = await world.token("eve", scopes=(*EVERYTHING, "secrets:admin"))
    before = world.app.home.policy.read_text(), await world.app.catalog.rows(), world.records("authority")
    envelope = refused(await world.ask(method, path, eve, json=body), 403, "E3206")
    assert "`local`" in envelope["humanMessage"]
    assert before == (world.app.home.policy.read_text(), await world.app.catalog.rows(), world.records("authority"))


# From another process


@tool(version="1.0.0", mutation_class="read_only", namespace="demo", timeout_class="long_running")
async def slow() -> str:
    """Take until the test lets go."""
    assert sample.world.gate is not None
    await sample.world.gate.wait()
    return "done"


ANN = Caller(id="local:ann")


@asynccontextmanager
async def two(home: Path, **settings: Any) -> AsyncGenerator[tuple[Service, Service]]:
    """Two servers on one home: the first runs what the second is asked about."""
    async with AsyncExitStack() as stack:
        opened: list[Service] = []
        for _ in range(2):
            app = await stack.enter_async_context(Interlock.open(home, **settings))
            for one in (*TOOLS, wordy):
                app.catalog.attach(one)
            await admit(app, slow)
            opened.append(Service(app))
            stack.push_async_callback(opened[-1].close, 0.1)
        sample.world.gate = asyncio.Event()
        yield opened[0], opened[1]


async def begun(service: Service, tool_id: str, key: str | None = None, **arguments: Any) -> str:
    """A background call that is on record as under way."""
    call_id = await service.calls.start(Ask(tool=tool_id, arguments=arguments, key=key), ANN, door="rest")
    await until(lambda: service.app.ownership.history(call_id))
    return call_id


async def test_a_call_of_another_process_is_followed_to_its_end(home: Path) -> None:
    async with two(home, housekeeping=False) as (here, there):
        call_id = await begun(here, "demo.increment", "k", name="a")
        stream = there.calls.follow(call_id, ANN)
        ended = asyncio.ensure_future(anext(stream))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not ended.done()
        assert (await there.calls.status(call_id, ANN))["status"] == "running"
        assert sample.world.gate is not None
        sample.world.gate.set()
        async with asyncio.timeout(60):
            number, event = await ended
            assert (number, event["status"]) == (1, "succeeded")
        await stream.aclose()


async def test_a_call_of_another_process_that_ends_right_after_the_first_look_is_followed_to_its_end(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two(home, housekeeping=False) as (here, there):
        call_id = await begun(here, "demo.slow")
        find = there.calls.find

        async def find_then_end(call_id: str, caller: Caller, *, own: bool = False) -> Json:
            status = await find(call_id, caller, own=own)
            assert sample.world.gate is not None
            sample.world.gate.set()
            await here.calls.background.ended(call_id, caller)
            return status

        monkeypatch.setattr(there.calls, "find", find_then_end)
        async with asyncio.timeout(60):
            ((_, event),) = [told async for told in there.calls.follow(call_id, ANN)]
        assert event["status"] == "succeeded"


@tool(version="1.0.0", mutation_class="write_irreversible", namespace="demo", effects=[Effect("mail:x", "CREATE")])
async def parting() -> str:
    """Send something once the test lets go."""
    assert sample.world.gate is not None
    await sample.world.gate.wait()
    return "sent"


async def test_a_call_that_goes_on_in_another_process_is_followed_to_its_end_where_it_waited(home: Path) -> None:
    async with two(home, housekeeping=False) as (here, there):
        for service in (here, there):
            await admit(service.app, parting)
        call_id = await here.calls.start(Ask(tool="demo.parting", arguments={}, key="k"), ANN, door="rest")
        (*_, (number, asked)) = [told async for told in here.calls.follow(call_id, ANN)]
        ticket = asked["result"]["metadata"]["pending"]["ticketId"]
        await there.app.approvals.approve(ticket, by=Caller(id="local:ben", groups=frozenset({"approvers"})))
        going_on = asyncio.ensure_future(there.app.approved_calls.resume(ticket))
        await until(lambda: here.app.remote_cancel.runs(call_id))
        stream = here.calls.follow(call_id, ANN, after=number)
        ended = asyncio.ensure_future(anext(stream))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not ended.done()
        assert sample.world.gate is not None
        sample.world.gate.set()
        async with asyncio.timeout(60):
            assert (await ended)[1]["status"] == (await going_on).state == "succeeded"
        await stream.aclose()


@pytest.mark.parametrize(("tool_id", "key"), [("demo.increment", "k"), ("demo.slow", None)])
async def test_a_call_of_another_process_is_called_off_there(home: Path, tool_id: str, key: str | None) -> None:
    async with two(home) as (here, there):
        call_id = await begun(here, tool_id, key, **({"name": "a"} if key else {}))
        assert await there.app.cancel(call_id) == "unsupported"
        async with asyncio.timeout(60):
            assert await there.calls.cancel(call_id, ANN) == "canceled"
            await there.app.remote_cancel.ended(call_id)
            await there.calls.background.ended(call_id, ANN)
        assert (await there.calls.status(call_id, ANN))["result"]["error"]["error_code"] == "E3703"
        assert await there.calls.cancel(call_id, ANN) == "finished"
        assert sample.world.runs == 0


async def test_a_wish_that_nobody_takes_up_is_taken_back(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlock.gateway.remote_cancel.TRIES", 2)
    async with two(home, housekeeping=False) as (here, there):
        call_id = await begun(here, "demo.increment", "k", name="a")
        assert await there.calls.cancel(call_id, ANN) == "unsupported"
        assert there.app.journal.reader.all("SELECT 1 FROM fact WHERE name LIKE 'cancel:%'") == []
        assert (await there.calls.status(call_id, ANN))["status"] == "running"
        # It was the other process that did not listen: asked itself, it obeys.
        assert await here.calls.cancel(call_id, ANN) == "canceled"

"""Results that stand for a tool's own where a call is cut short, and results that a tool yields before it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from interlock import Context, Interlock, tool
from interlock.call.events import Event
from interlock.contract.standard import ToolResult
from tests import sample
from tests.support.calls import admit, until
from tests.support.cli import Cli
from tests.support.wire_rows import ROWS
from tests.support.wires import WIRES, Wires, wired

Json = dict[str, Any]
# The doors by which one call can be spoken of in another; MCP's clients cancel what they wait for themselves.
BY_ID = ("library", "rest", "jsonrpc", "grpc", "command line")
CAUSES = {
    "interruption": "user_interruption", "discard": "discarded_execution", "fallback": "fallback",
    "sibling": "sibling_error",
}  # fmt: skip
CODES = {"interruption": "E3703", "discard": "E3703", "fallback": "E3413", "sibling": "E3412"}


@tool(version="1.0.0", mutation_class="read_only", namespace="short", timeout_s=1)
async def dawdles(text: sample.Text) -> str:
    """Take longer than it may."""
    await asyncio.Event().wait()
    return text


@tool(version="1.0.0", mutation_class="read_only", namespace="short", timeout_class="long_running", timeout_s=60)
async def waits(text: sample.Text) -> str:
    """Wait to be stopped."""
    await asyncio.Event().wait()
    return text


@tool(version="1.0.0", mutation_class="read_only", namespace="short")
async def yields(ctx: Context, text: sample.Text) -> str:
    """Give parts and interim results, then the result."""
    ctx.partial(f"{text} 1")
    ctx.yield_result(f"{text} 2")
    ctx.yield_result(f"{text} 3")
    ctx.partial(f"{text} 4")
    return f"all of {text}"


@tool(version="1.0.0", mutation_class="read_only", namespace="short", timeout_class="long_running", timeout_s=60)
async def streams(ctx: Context, text: sample.Text) -> str:
    """Give a part of the result, then wait to be stopped."""
    ctx.partial(f"{text} 1")
    await asyncio.Event().wait()
    return text


@pytest_asyncio.fixture
async def wires(home: Path) -> AsyncGenerator[Wires]:
    async with Interlock.open(home) as app:
        await admit(app, dawdles, waits, yields, streams)
        async with wired(app) as made:
            yield made


async def closed(app: Interlock, call: str) -> Json:
    await app.journal.commit(lambda _: None)
    ((body,),) = app.journal.reader.all("SELECT body FROM journal WHERE kind = 'closed' AND call = ?", (call,))
    return orjson.loads(body)


@pytest.mark.proves("LIFE-16")
@pytest.mark.parametrize("door", ["library", *WIRES])
async def test_a_timeout_is_told_through_every_door_as_a_synthetic_result(wires: Wires, door: str) -> None:
    if door == "library":
        result = await wires.app.call("short.dawdles", text="x")
        assert result.error is not None
        envelope = result.error.envelope("")
        document = result.document()
        ToolResult.parse(document)
        assert (document["metadata"]["synthetic"], document["metadata"]["synthetic_cause"]) == (True, "timeout")
    else:
        envelope = (await wires.call(door, "short.dawdles", {"text": "x"})).failure
    assert (envelope["error_code"], envelope["details"]["synthetic_cause"]) == ("E3402", "timeout")
    ((body,),) = wires.app.journal.reader.all(
        "SELECT body FROM journal WHERE kind = 'closed' ORDER BY seq DESC LIMIT 1"
    )
    record = orjson.loads(body)
    assert (record["source"], record["syntheticCause"]) == ("synthetic", "timeout")


async def stop(wires: Wires, home: Path, door: str, call: str, reason: str) -> str:
    if door in ROWS:
        return await wires.rows[door].cancel(call, reason)
    cli = Cli(home.parent)
    return (await asyncio.to_thread(cli.ask, "calls", "cancel", call, "--reason", reason))["outcome"]


@pytest.mark.proves("LIFE-16")
@pytest.mark.parametrize("door", BY_ID)
async def test_a_call_is_cut_short_for_a_reason_that_labels_its_result(wires: Wires, home: Path, door: str) -> None:
    """The command line is another process, so its wish goes by the store."""
    for reason, cause in CAUSES.items():
        if door in ("library", "command line"):
            request = wires.app.gateway.with_id(wires.app.request("short.waits", {"text": "x"}))
            call = request.id or ""
            task = asyncio.create_task(wires.app.gateway.invoke(request))
        else:
            body = {"tool_id": "short.waits", "parameters": {"text": "x"}, "execution_mode": "async"}
            answer = await wires.http.post("/v1/tools/invoke", json=body)
            call = answer.json()["invocation_id"]
            task = None
        await until(lambda call=call: wires.app.gateway.runner.active.get(call))
        if door == "command line":
            await _noted(wires.app, call)
        assert await stop(wires, home, door, call, reason) == "canceled"
        if task is not None:
            document = (await asyncio.wait_for(task, 30)).document()
        else:
            caller = await wires.app.caller_of(_token(wires))
            await until(lambda call=call, caller=caller: wires.service.calls.result(call, caller))
            kept = await wires.service.calls.result(call, caller)
            assert kept is not None
            document = kept.document()
        ToolResult.parse(document)
        assert (document["status"], document["metadata"]["synthetic"]) == ("canceled", True)
        assert document["metadata"]["synthetic_cause"] == cause
        assert document["error"]["error_code"] == CODES[reason]
        record = await closed(wires.app, call)
        assert (record["source"], record["syntheticCause"]) == ("synthetic", cause)
        ((noted,),) = wires.app.journal.reader.all(
            "SELECT body FROM journal WHERE kind = 'cancel' AND call = ?", (call,)
        )
        assert orjson.loads(noted)["reason"] == reason


@pytest.mark.proves("LIFE-08")
@pytest.mark.parametrize("door", ["library", *WIRES])
async def test_a_stream_that_is_discarded_for_a_fallback_ends_once_through_every_door(wires: Wires, door: str) -> None:
    heard: list[Event] = []
    wires.app.listen(heard.append)
    if door == "library":
        making = asyncio.create_task(wires.app.call("short.streams", text="x"))
    else:
        making = asyncio.create_task(wires.call(door, "short.streams", {"text": "x"}))
    await until(lambda: any(one.type.endswith(".partial_result") for one in heard))
    call = heard[-1].invocation_id
    assert await wires.app.call_off(call, "fallback") == "canceled"
    told: Any = await asyncio.wait_for(making, 60)
    envelope = told.error.envelope("") if door == "library" else told.failure
    assert (envelope["error_code"], envelope["error_class"]) == ("E3413", "streaming_fallback_discarded")
    assert envelope["details"]["synthetic_cause"] == "fallback"
    if door in ("rest", "mcp-modern", "mcp-legacy"):
        assert told.status == {"rest": 499}.get(door, "isError")
    if door == "rest":
        result = orjson.loads(told.text[told.text.index('{"error"') :])["tool_result"]
        ToolResult.parse(result)
        assert (result["invocation_id"], result["status"], result["is_error"]) == (call, "canceled", True)
    # The part that was given is no result, and the call has one end: `closed` finds one record.
    assert (await closed(wires.app, call))["states"][-1] == "canceled"
    assert [one.type for one in heard if one.invocation_id == call].count("tool.result.created") == 1
    assert heard[-1].type == "tool.result.created"


async def _noted(app: Interlock, call: str) -> None:
    """Wait until a read is on record as begun, so that other processes know of it."""
    async with asyncio.timeout(30):
        while not app.journal.reader.all("SELECT 1 FROM journal WHERE kind = 'started' AND call = ?", (call,)):
            await app.journal.commit(lambda _: None)


def _token(wires: Wires) -> str:
    return wires.http.headers["authorization"].removeprefix("Bearer ")


async def test_a_reason_that_there_is_not_is_refused(wires: Wires) -> None:
    answer = await wires.http.post("/v1/calls/01M7JQ9AJG6CC9359201E27AFF/cancel", params={"reason": "boredom"})
    assert answer.status_code == 400
    told = await wires.rpc("calls.cancel", {"invocation_id": "x", "reason": "boredom"})
    assert told["error"]["data"]["error_code"] == "E3004"


@pytest.mark.proves("LIFE-16")
@pytest.mark.parametrize("door", ["library", *WIRES])
async def test_parts_and_yielded_results_are_ordered_and_never_replace_the_result(wires: Wires, door: str) -> None:
    heard: list[Event] = []
    wires.app.listen(heard.append)
    if door == "library":
        result = await wires.app.call("short.yields", text="x")
        data, about = result.value, result.metadata
    else:
        told = await wires.call(door, "short.yields", {"text": "x"})
        data, about = told.data, told.about
    assert data in ("all of x", {"result": "all of x"})
    if door in ("library", "jsonrpc", "grpc"):
        assert (about["parts"], about["yielded_parts"]) == (["x 1", "x 2", "x 3", "x 4"], [2, 3])
    parts = [event for event in heard if event.type.endswith((".partial_result", ".yielded"))]
    assert [event.type.rpartition(".")[2] for event in parts] == [
        "partial_result", "yielded", "yielded", "partial_result",
    ]  # fmt: skip
    assert [(event.data["index"], event.data["value"]) for event in parts] == [(n, f"x {n}") for n in range(1, 5)]
    record = await closed(wires.app, heard[0].invocation_id)
    assert record["states"].count("yielded") == 2
    assert record["states"][-1] == "succeeded"
    assert [event.type for event in heard].count("tool.result.created") == 1

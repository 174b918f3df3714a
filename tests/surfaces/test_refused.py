"""A call of a tool that is not loaded ends like any other call: one result, one record, one event."""

from __future__ import annotations

import hashlib
from pathlib import Path

import orjson
import pytest

from interlock import Hook, Interlock
from interlock.call.events import Event
from tests.sample import TOOLS
from tests.support.calls import records
from tests.support.wires import wired


@pytest.mark.proves("LIFE-02")
@pytest.mark.proves("LIFE-08")
@pytest.mark.parametrize("modern", [True, False], ids=["modern", "handshake"])
async def test_a_call_of_a_deferred_tool_is_one_result_one_record_and_one_event(home: Path, modern: bool) -> None:
    async with Interlock.open(home, housekeeping=False, surface="search") as app:
        for one in TOOLS:
            app.catalog.attach(one)
        heard: list[Event] = []
        app.listen(heard.append)
        hooked: list[str] = []
        app.hook(Hook(id="seen", when="pre", tools="*", run=lambda call: hooked.append(str(call))))
        async with wired(app) as wires:
            params = {"name": "demo-add", "arguments": {"a": "many"}}  # its values are not looked at
            told = orjson.loads(await wires.mcp("tools/call", params, modern=modern))["result"]
        assert told["isError"]
        assert told["_meta"]["interlock/error"]["error_code"] == "E3107"
        await app.journal.drain()
        (closed,) = [one for one in records(app) if one.get("toolId") == "demo.add"]
        assert (closed["error_code"], closed["status"]) == ("E3107", "ERROR")
        ends = [one for one in heard if one.type == "tool.result.created"]
        assert [one.invocation_id for one in ends] == [closed["call"]]
        assert "tool.invocation.started" not in {one.type for one in heard if one.invocation_id != closed["call"]}
        assert hooked == []


@pytest.mark.proves("LIFE-02")
async def test_the_input_of_a_deferred_tool_is_parsed_before_it_is_refused(home: Path) -> None:
    async with Interlock.open(home, housekeeping=False, surface="search", surface_doors=("mcp", "rest")) as app:
        for one in TOOLS:
            app.catalog.attach(one)
        hooked: list[str] = []
        app.hook(Hook(id="seen", when="pre", tools="*", run=lambda call: hooked.append(str(call))))
        async with wired(app) as wires:
            caller = await wires.service.surfaces.attach(app.caller, "mcp")
            for arguments, code, state in (
                ({"a": float("nan")}, "E3004", "schema_parse_failed"),
                ({"a": "\ud800"}, "E3004", "schema_parse_failed"),
                ({"a": "many"}, "E3107", "blocked"),
            ):
                result = await app.call("demo.add", arguments, caller=caller)
                assert (result.error and result.error.code, result.state) == (code, state)
                (closed,) = records(app, result.invocation_id)
                assert closed["states"][-1] == state
                assert "selected" not in closed["states"]
            assert closed["inputHash"] == hashlib.sha256(b'{"a":"many"}').hexdigest()
        assert hooked == []

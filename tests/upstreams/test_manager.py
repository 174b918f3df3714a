"""The book of upstreams: nothing is trusted unasked, what changes is kept out, and readers never see half a change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from interlock import Caller
from interlock.call.connector import Connector, RemoteCall
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.telemetry.alerts import Alert
from interlock.testing import FakeClock
from tests.support.calls import code, turn
from tests.support.upstreams import Scripted, definition, opened, states
from tests.support.wires import wired


@pytest.mark.proves("REG-10")
async def test_what_an_upstream_says_of_itself_gives_its_tools_no_privilege(tmp_path: Path) -> None:
    server = Scripted()
    server.refused = [("broken", "INVALID_TOOL_SCHEMA: its schema is not an object")]
    server.offers.append(definition("odd", input_schema={"type": "array"}))
    async with opened(tmp_path, server) as (app, upstreams):
        preview = await upstreams.try_connecting("far", "http", {})
        assert {one.name: one.mutation_class for one in preview.tools if one.mutation_class}[
            "look"
        ] == "write_irreversible"
        assert await app.catalog.addresses() == [], "only looked at"
        report = await upstreams.add("far", "http", {}, by=app.caller)
        assert {one.name: one.state for one in report.tools} == {
            "look": "admitted", "say": "admitted", "odd": "refused", "broken": "refused",
        }  # fmt: skip
        asked = await app.call("far.look", text="a", key="1")
        assert asked.pending, "an unknown tool is irreversible, and a person is asked"
        assert server.calls == []
        with pytest.raises(Failure) as twice:
            await upstreams.add("far", "http", {}, by=app.caller)
        assert twice.value.code == "E3411"
        with pytest.raises(Failure) as stranger:
            await upstreams.add("near", "http", {}, by=Caller(id="local:x"))
        assert stranger.value.code == "E3206"


@pytest.mark.proves("CONTRACT-06")
async def test_what_the_documentation_of_a_discovered_tool_lacks_is_a_warning_on_its_contract(tmp_path: Path) -> None:
    """It is admitted and called all the same, and gets the defaults inside of what was sent."""
    server = Scripted()
    size: Json = {"type": "integer", "default": 3}
    line: Json = {"type": "object", "description": "a line", "properties": {"size": size}}
    text: Json = {"type": "string", "description": "what to say", "examples": ["a"]}
    schema: Json = {"type": "object", "properties": {"text": text, "line": line}}
    server.offers = [
        definition("look", hints={"readOnlyHint": True}, input_schema=schema),
        definition("full", hints={"readOnlyHint": True}, input_schema={"type": "object", "properties": {"text": text}}),
    ]
    lacking = ("`line` has no example", "`line.size` has no description", "`line.size` has no example")
    async with opened(tmp_path, server) as (app, upstreams):
        report = await upstreams.add("far", "http", {"accept_hints": True}, by=app.caller)
        assert {one.name: one.state for one in report.tools} == {"look": "admitted", "full": "admitted"}
        contract = (await app.catalog.resolve("far.look")).contract
        assert contract.warnings == lacking
        assert (await app.catalog.resolve("far.full")).contract.warnings == ()
        async with wired(app) as wires:
            shown = (await wires.http.get("/v1/tools/far.look")).json()
            told = await wires.rpc("tools.describe", {"tool_id": "far.look"})
        assert tuple(shown["warnings"]) == tuple(told["result"]["warnings"]) == lacking
        assert (await app.call("far.look", text="a", line={})).ok
        assert server.calls[-1].arguments == {"text": "a", "line": {"size": 3}}


@pytest.mark.proves("LIFE-10")
@pytest.mark.parametrize(("asked_s", "given_s"), [(2.0, 2.0), (3600.0, 300.0), (None, 30.0)])
async def test_a_connector_is_handed_the_deadline_of_the_call(
    tmp_path: Path, asked_s: float | None, given_s: float
) -> None:
    server = Scripted()
    async with opened(tmp_path, server) as (app, upstreams):
        await upstreams.add("far", "http", {"accept_hints": True}, by=app.caller)
        before = app.clock.monotonic()
        assert (await app.call("far.look", {"text": "a"}, timeout_s=asked_s)).ok
        (call,) = server.calls
        assert before + given_s <= call.deadline <= app.clock.monotonic() + given_s


async def test_hints_count_once_an_operator_accepts_them_and_an_overlay_beats_them(tmp_path: Path) -> None:
    server = Scripted()
    async with opened(tmp_path, server) as (app, upstreams):
        overlay = {"tools": {"say": {"mutation_class": "read_only"}}}
        await upstreams.add("far", "http", {"accept_hints": True}, by=app.caller, overlay=overlay)
        assert (await app.call("far.look", text="a")).unwrap() == {"said": "a"}
        assert (await app.call("far.say", text="b")).unwrap() == {"said": "b"}
        assert [call.native["name"] for call in server.calls] == ["look", "say"]
        assert all(call.traceparent.startswith("00-") and call.left_s > 0 for call in server.calls)
        assert code(await app.call("far.say", text=5)) == "E3301"
    async with opened(tmp_path, server) as (app, upstreams):
        assert (await app.call("far.say", text="after a restart")).unwrap() == {"said": "after a restart"}
        with pytest.raises(Failure) as unknown:
            await upstreams.refresh("far", by=app.caller, overlay={"tools": {"sya": {"mutation_class": "read_only"}}})
        assert "did you mean `say`" in unknown.value.message


async def test_a_definition_that_changes_is_kept_out_until_a_person_has_looked(tmp_path: Path) -> None:
    server = Scripted()
    async with opened(tmp_path, server) as (app, upstreams):
        await upstreams.add("far", "http", {"accept_hints": True}, by=app.caller)
        assert (await app.call("far.look", text="a")).ok
        before = server.offers[1]
        server.offers[1] = replace(before, description="Says a text again, and sends it to somebody else.")
        await upstreams.refresh("far")
        assert await states(upstreams) == {"look": "changed", "say": "admitted"}
        refused = await app.call("far.look", text="a")
        assert code(refused) == "E3210"
        server.offers[1] = before
        await upstreams.refresh("far")
        assert (await states(upstreams))["look"] == "changed", "changing back lifts nothing"
        server.offers[1] = replace(before, description="Says a text again, and sends it to somebody else.")
        agent = Caller(id="local:x", agent="did:key:z", kind="agent", scopes=frozenset({"tools:admin"}))
        for by, reason in ((agent, "fine"), (app.caller, " ")):
            with pytest.raises(Failure):
                await upstreams.accept("far", by=by, reason=reason)
        with pytest.raises(Failure) as again:
            await upstreams.accept("far", by=app.caller, reason="read it")
        assert again.value.code == "E3103", "it is not what was there when they looked"
        (look,) = (one for one in await upstreams.offers("far") if one.name == "look")
        assert look.document()["definition"]["description"] == server.offers[1].description
        report = await upstreams.accept("far", by=app.caller, reason="read it", shown={"look": look.seen})
        assert [one.version for one in report.tools if one.name == "look"] == ["1.1.0"]
        assert (await app.call("far.look", text="a")).ok
        assert code(await app.call("far.look@1.0.0", text="a")) == "E3210", "the old promise is not kept any more"


async def test_a_change_that_breaks_callers_is_accepted_as_a_major_version_that_says_so(tmp_path: Path) -> None:
    server = Scripted()
    async with opened(tmp_path, server) as (app, upstreams):
        await upstreams.add("far", "http", {"accept_hints": True}, by=app.caller)
        say, look = server.offers
        for number, required in enumerate((["text", "tongue"], ["text"], ["tongue"]), 2):
            tongue = {"type": "string", "description": "the language of the text"}
            schema: Json = {**look.input_schema, "properties": {**look.input_schema["properties"], "tongue": tongue}}
            server.offers = [say, replace(look, input_schema={**schema, "required": required})]
            await upstreams.refresh("far")
            assert (await states(upstreams))["look"] == "changed"
            assert code(await app.call("far.look", text="a")) == "E3210"
            await upstreams.accept("far", by=app.caller, reason="read it")
            (found,) = [one for one in await upstreams.offers("far") if one.name == "look"]
            # Where a parameter becomes optional again, nothing breaks.
            expected = {2: "2.0.0", 3: "2.1.0", 4: "3.0.0"}[number]
            assert (found.state, found.version) == ("admitted", expected), found.reason
            version = await app.catalog.resolve("far.look", None, None)
            assert (version.row.version, version.contract.manifest.breaking_changes) == (expected, number != 3)
            assert (await app.call("far.look", {"text": "a", "tongue": "b"})).ok
            assert not (await app.call("far.look", {})).ok
            await upstreams.refresh("far")
            assert (await states(upstreams))["look"] == "admitted"


async def test_an_alert_about_an_upstream_names_it_and_is_of_no_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, heard = Scripted(), list[Alert]()
    server.refused = [("broken", "its schema is not an object")]
    async with opened(tmp_path, server) as (app, upstreams):
        app.gateway.telemetry.alerts.listeners.append(heard.append)
        await upstreams.add("far", "http", {}, by=app.caller)
        server.offers[1] = replace(server.offers[1], description="Says a text again, and sends it to somebody else.")
        await upstreams.refresh("far")
        server.away = True
        assert await upstreams.probe("far") == "unavailable"
    assert [(one.name, one.tool, one.invocation_id, one.facts["upstream"]) for one in heard] == [
        ("INVALID_TOOL_SCHEMA", "", "", "far"),
        ("TOOL_DEFINITION_CHANGED", "far.look", "", "far"),
        ("INVALID_TOOL_SCHEMA", "", "", "far"),
        ("UPSTREAM_UNAVAILABLE", "", "", "far"),
    ]
    lines = [line for line in caplog.records if line.name == "interlock.alerts"]
    assert {vars(line)["invocation_id"] for line in lines} == {""}
    assert lines[1].getMessage().startswith("TOOL_DEFINITION_CHANGED: far.look of upstream far: ")
    assert lines[3].getMessage().startswith("UPSTREAM_UNAVAILABLE: upstream far: ")


async def test_tools_that_go_are_sunset_and_come_back_as_they_were(tmp_path: Path) -> None:
    server = Scripted()
    async with opened(tmp_path, server) as (app, upstreams):
        await upstreams.add("far", "http", {"accept_hints": True}, by=app.caller)
        look = server.offers.pop()
        await upstreams.refresh("far")
        assert await states(upstreams) == {"look": "gone", "say": "admitted"}
        assert not (await app.call("far.look", text="a")).ok
        server.offers.append(look)
        await upstreams.refresh("far")
        assert (await app.call("far.look", text="a")).ok
        await upstreams.remove("far", by=app.caller)
        assert not (await app.call("far.look", text="a")).ok
        assert await upstreams.list() == []


@pytest.mark.proves("REG-11")
async def test_an_upstream_that_does_not_answer_is_not_asked_until_it_does(tmp_path: Path) -> None:
    server = Scripted()
    async with opened(tmp_path, server) as (app, upstreams):
        await upstreams.add("far", "http", {"accept_hints": True}, by=app.caller)
        since = (await upstreams.get("far")).discovered_ms
        server.away = True
        await upstreams.probe_all()
        away = await app.call("far.look", text="a")
        assert away.error is not None
        assert (away.error.code, away.error.row.error_class) == ("E3502", "dependency_unavailable")
        assert server.calls == []
        assert (await states(upstreams))["look"] == "admitted"
        server.away = False
        await upstreams.probe_all()
        assert (await app.call("far.look", text="a")).ok
        assert (await upstreams.get("far")).discovered_ms == since


@pytest.mark.supports("REG-12")
async def test_a_reader_sees_the_old_set_or_the_new_one(tmp_path: Path) -> None:
    server = Scripted()
    old = [definition(f"old_{n}") for n in range(50)]
    new = [definition(f"new_{n}") for n in range(50)]
    server.offers = old
    async with opened(tmp_path, server) as (app, upstreams):
        await upstreams.add("far", "http", {}, by=app.caller)
        seen: set[frozenset[str]] = set()
        done = asyncio.Event()

        async def read() -> None:
            while not done.is_set():
                rows = await app.catalog.rows()
                seen.add(frozenset(row.address for row in rows if row.state == "active"))
                await asyncio.sleep(0)

        reader = asyncio.create_task(read())
        server.offers = new
        await upstreams.refresh("far")
        done.set()
        await reader
        sets = {frozenset(f"far.{one.name}" for one in offers) for offers in (old, new)}
        assert seen <= sets
        assert frozenset(row.address for row in await app.catalog.rows() if row.state == "active") in sets


REVIEWER = Caller(id="local:reviewer", groups=frozenset({"approvers"}))


@pytest.mark.parametrize("sent", [True, None, False])
@pytest.mark.supports("CONTRACT-14")
async def test_a_write_that_may_have_arrived_is_never_sent_again(tmp_path: Path, sent: bool | None) -> None:
    server = Scripted()
    async with opened(tmp_path, server) as (app, upstreams):
        await upstreams.add("far", "http", {}, by=app.caller)
        details = None if sent is None else {"sent": sent}
        server.failure = Failure("E3502", "the connection was lost", details=details)
        pending = await app.call("far.say", text="a", key="k")
        ticket = pending.metadata["pending"]["ticketId"]
        await app.approvals.approve(ticket, by=REVIEWER)
        assert code(await app.approved_calls.resume(ticket)) == "E3502"
        server.failure = None
        again = await app.call("far.say", text="a", key="k")
        assert (again.pending, code(again)) == ((True, "E3208") if sent is False else (False, "E3409"))
        assert len(server.calls) == 1


@pytest.mark.proves("RESIL-04")
async def test_a_service_that_keeps_failing_is_left_alone_and_tried_again(tmp_path: Path) -> None:
    server, clock = Scripted(), FakeClock()
    async with opened(tmp_path, server, clock) as (app, upstreams):
        await upstreams.add("far", "http", {"accept_hints": True}, by=app.caller)
        for _ in range(100):
            assert code(await app.call("far.look", text=5)) == "E3301", "a caller's fault opens nothing"
        server.failure = Failure("E3502", "it is down")
        for _ in range(5):
            assert code(await app.call("far.look", text="a")) == "E3502"
        refused = await app.call("far.look", text="a")
        assert refused.error is not None
        assert (refused.error.code, refused.error.row.http, len(server.calls)) == ("E3501", 503, 5)
        assert refused.error.retry_after_ms is not None
        server.failure = None
        clock.advance(refused.error.retry_after_ms / 1000 + 0.001)
        for _ in range(3):
            assert (await app.call("far.look", text="a")).ok
        assert [one.state for one in app.gateway.services.snapshot()] == ["closed"]


@pytest.mark.proves("RESIL-04")
async def test_a_service_that_lets_calls_wait_in_vain_opens_its_breaker_too(tmp_path: Path) -> None:
    server = Scripted()
    async with opened(tmp_path, server) as (app, upstreams):
        await upstreams.add("far", "http", {"accept_hints": True}, by=app.caller)
        server.failure = Failure("E3503", "it did not answer in time")
        codes = [code(await app.call("far.look", text="a")) for _ in range(7)]
        assert codes == ["E3503"] * 5 + ["E3501"] * 2
        assert len(server.calls) == 5


@pytest.mark.proves("RESIL-01")
@pytest.mark.parametrize("per", ["service", "tool"])
async def test_an_operator_sets_breakers_by_service_and_by_tool(tmp_path: Path, per: str) -> None:
    server = Scripted()
    server.offers.append(definition("find", hints={"readOnlyHint": True}))
    rules: list[Json] = [
        {"services": "far", "per": per, "failure_threshold": 4},
        {"services": "elsewhere", "failure_threshold": 1},
        {"tools": "far.find", "failure_threshold": 2, "timeout_seconds": 7},
    ]
    async with opened(tmp_path, server, FakeClock(), breakers=rules) as (app, upstreams):
        await upstreams.add("far", "http", {"accept_hints": True}, by=app.caller)
        server.failure = Failure("E3502", "it is down")
        found = [await app.call("far.find", text="a") for _ in range(3)]
        assert [code(one) for one in found] == ["E3502", "E3502", "E3501"]
        assert found[2].error is not None
        assert found[2].error.retry_after_ms == 7000
        looked = [code(await app.call("far.look", text="a")) for _ in range(5)]
        assert looked == (["E3501"] * 5 if per == "service" else ["E3502"] * 4 + ["E3501"])
        health = {one.service: one.state for one in app.gateway.services.snapshot()}
        own = {"far#far.find": "open", "far#far.look": "open"}
        assert health == ({"far": "open"} if per == "service" else own)


@pytest.mark.proves("RESIL-01")
async def test_an_operator_sets_a_share_of_failures_that_opens_a_breaker(tmp_path: Path) -> None:
    server = Scripted()
    rule: Json = {"failure_rate": 0.5, "failure_rate_calls": 4, "failure_threshold": 100}
    async with opened(tmp_path, server, breakers=[rule]) as (app, upstreams):
        await upstreams.add("far", "http", {"accept_hints": True}, by=app.caller)
        for _ in range(2):
            assert (await app.call("far.look", text="a")).ok
        server.failure = Failure("E3502", "it is down")
        codes = [code(await app.call("far.look", text="a")) for _ in range(3)]
        assert codes == ["E3502", "E3502", "E3501"]


@pytest.mark.proves("RESIL-02")
async def test_an_operator_sets_how_many_calls_and_which_share_try_a_service(tmp_path: Path) -> None:
    server, clock = Scripted(), FakeClock()
    rule: Json = {"services": "far", "half_open_max_calls": 2, "canary_share": 0.5, "success_threshold": 2}
    async with opened(tmp_path, server, clock, breakers=[rule]) as (app, upstreams):
        await upstreams.add("far", "http", {"accept_hints": True}, by=app.caller)
        server.failure = Failure("E3502", "it is down")
        for _ in range(5):
            await app.call("far.look", text="a")
        server.failure = None
        clock.advance(60)
        codes = [code(await app.call("far.look", text="a")) for _ in range(4)]
        assert codes == [None, "E3501", None, None], "every second call, then three of four; then it is closed"


async def test_a_new_overlay_is_told_apart_and_a_tool_that_it_renames_leaves_its_old_name(tmp_path: Path) -> None:
    server = Scripted()
    async with opened(tmp_path, server) as (app, upstreams):
        reads: Json = {"defaults": {"mutation_class": "read_only"}}
        await upstreams.add("far", "http", {}, by=app.caller, overlay=reads)
        renamed: Json = {**reads, "tools": {"look": {"rename": "find"}}}
        report = await upstreams.refresh("far", by=app.caller, overlay=renamed)
        changed = {one.name: one.reason for one in report.tools if one.state == "changed"}
        assert changed == {"look": "your overlay has changed since; it would be served as far.find"}
        assert await upstreams.changes("far") == {"look": {"tool_id": ["look", "find"]}}
        refused = await app.call("far.look", text="a")
        assert refused.error is not None
        assert "interlock upstream accept far" in refused.error.resolution
        accepted = await upstreams.accept("far", by=app.caller, reason="a better name")
        assert {one.address: one.version for one in accepted.tools} == {"far.find": "1.0.0", "far.say": "1.0.0"}
        assert (await app.call("far.find", text="a")).unwrap() == {"said": "a"}
        assert code(await app.call("far.look", text="a")) == "E3102"
        assert {row.address: row.state for row in await app.catalog.rows()}["far.look"] == "sunset"
        back = await upstreams.refresh("far", by=app.caller, overlay=reads)
        assert {one.name: one.state for one in back.tools} == {"look": "changed", "say": "admitted"}


async def test_a_tool_that_is_gone_is_proposed_to_nobody(tmp_path: Path) -> None:
    server = Scripted()
    async with opened(tmp_path, server) as (app, upstreams):
        await upstreams.add("far", "http", {}, by=app.caller)
        near = await app.call("far.loook")
        assert near.error is not None
        assert "`far.look`" in near.error.message
        await upstreams.remove("far", by=app.caller)
        gone = await app.call("far.loook")
        assert gone.error is not None
        assert "did you mean" not in gone.error.message


class Lingering(Scripted):
    """An upstream that takes a while to say goodbye to."""

    def __init__(self) -> None:
        super().__init__()
        self.leaving, self.answered = asyncio.Event(), asyncio.Event()
        self.closed = False

    async def close(self) -> None:
        self.leaving.set()
        await self.answered.wait()
        self.closed = True


async def test_the_connection_to_a_removed_upstream_is_closed_although_the_program_ends_meanwhile(
    tmp_path: Path,
) -> None:
    server = Lingering()
    async with opened(tmp_path, server) as (app, upstreams):
        await upstreams.add("far", "http", {}, by=app.caller)
        await upstreams.remove("far", by=app.caller)
        async with asyncio.timeout(60):
            await server.leaving.wait()
            ending = asyncio.create_task(upstreams.close())
            for _ in range(10):
                await turn()
            server.answered.set()
            await ending
        assert server.closed


async def test_what_is_told_of_an_upstream_later_says_as_much_as_the_first_report(tmp_path: Path) -> None:
    server = Scripted()
    async with opened(tmp_path, server) as (app, upstreams):
        added = await upstreams.add("far", "http", {"accept_hints": True}, by=app.caller)
        told = {one.name: (one.mutation_class, one.why) for one in await upstreams.offers("far")}
        assert told == {one.name: (one.mutation_class, one.why) for one in added.tools}
        server.offers[0] = definition("say", description="The tool say whispers a text again.")
        await upstreams.refresh("far")
        assert list((await upstreams.changes("far"))["say"]) == ["description"]
        server.offers[0] = definition("say")
        await upstreams.refresh("far")
        assert await upstreams.changes("far") == {"say": {}}, "it changed and changed back"


@pytest.mark.parametrize("reports", [2, 0])
async def test_a_read_passes_on_the_progress_that_its_upstream_reports(tmp_path: Path, reports: int) -> None:
    """Its context is made with the first report; the result and the record tell of the last one."""

    class Reporting(Scripted):
        async def call(self, call: RemoteCall) -> Any:
            assert call.progress is not None
            for part in range(reports):
                call.progress({"message": f"part {part}", "percent": 50.0 * part})
            return {"content": [], "structuredContent": await super().call(call)}

    server, heard = Reporting(), list[Json]()
    server.offers = [definition("look", hints={"readOnlyHint": True}, native={"protocol": "mcp", "name": "look"})]
    async with opened(tmp_path, server) as (app, upstreams):
        await upstreams.add("far", "mcp", {"accept_hints": True}, by=app.caller)
        result = await app.call("far.look", {"text": "a"}, on_progress=heard.append)
    assert result.ok, result.error
    heard_of = [(one["message"], one["percent"]) for one in heard]
    assert heard_of == [("started", 0.0), ("part 0", 0.0), ("part 1", 50.0)][: reports + 1]
    assert ("progress" in result.metadata) is bool(reports)


async def test_an_upstream_that_announces_a_change_while_it_is_closed_is_not_connected_to_anew(tmp_path: Path) -> None:
    """The new connection would be closed by nobody, and a program that it started would outlive the server."""

    class Parting(Scripted):
        made = 0

        def make(self, name: str, kind: str, config: Json, changed: Callable[[], None]) -> Connector:
            self.made += 1
            return super().make(name, kind, config, changed)

        async def close(self) -> None:
            self.changed()
            for _ in range(100):
                await asyncio.sleep(0)

    server = Parting()
    async with opened(tmp_path, server) as (app, upstreams):
        await upstreams.add("far", "http", {}, by=app.caller)
    assert server.made == 1

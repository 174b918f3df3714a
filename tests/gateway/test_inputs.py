"""The four inputs of a call: as it was sent, as hooks see it, as policy judged it, as the tool got it."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import hypothesis.strategies as st
import orjson
import pytest
from hypothesis import given, settings
from pydantic import BaseModel

from interlock import Caller, Context, Failure, Field, Hook, HookResult, Interlock, Seen, tool
from interlock.api.service import Service
from interlock.audit.invocations import invocation_of
from interlock.contract.standard import ToolInvocation
from interlock.data.canonical import digest
from interlock.gateway.hooks import thawed
from interlock.gateway.inputs import replay
from interlock.registry.source import load
from interlock.store.homes import home_at
from tests import sample
from tests.support import forked, isolated_tools
from tests.support.calls import admit, prepare, records, use_policy
from tests.support.cli import Cli
from tests.support.counter import mark
from tests.support.failures import fall
from tests.support.identities import did_of
from tests.support.paging import rows
from tests.support.private import CANARY
from tests.support.programs import NUMBER, manifest, written
from tests.support.source import ROOT
from tests.support.stores import bury
from tests.support.upstream_servers import HttpServer, json_answer
from tests.support.wires import opened

Json = dict[str, Any]
APPROVER = Caller(id="local:approver", groups=frozenset({"approvers"}))
Count = Annotated[int, Field(description="how many", examples=[1])]
Counts = Annotated[list[int], Field(description="how many of each", examples=[[1]])]
Note = Annotated[str | None, Field(description="anything", examples=["x"])]
Password = Annotated[str, Field(description="for nobody else", examples=["x"])]


@tool(version="1.0.0", mutation_class="read_only", namespace="in")
async def take(count: Count, counts: Counts, note: Note = "none", more: Note = None) -> Json:
    """Give back what it was given."""
    return {"count": count, "counts": counts, "note": note, "more": more}


@tool(version="1.0.0", mutation_class="read_only", namespace="in")
async def login(user: Note, password: Password, tries: Count = 3) -> int:
    """Give nothing back."""
    return tries


@tool(version="1.0.0", mutation_class="read_only", namespace="in")
async def fails(count: Count, note: Note = None) -> int:
    """Never give anything back."""
    raise Failure("E3401", "no")


@tool(version="1.1.0", mutation_class="read_only", namespace="in", name="take")
async def newer_take(count: Count, counts: Counts, note: Note = "other", more: Note = "also") -> Json:
    """Give back what it was given, with other defaults."""
    return {"count": count, "counts": counts, "note": note, "more": more}


@tool(version="1.0.0", mutation_class="read_only", namespace="in")
async def passes_on(ctx: Context, count: Count) -> Json:
    """Give back what another tool gives back."""
    return await ctx.call("in.take", count=str(count), counts=[])


@tool(version="1.0.0", mutation_class="read_only", namespace="in")
async def hangs(count: Count) -> int:
    """Give nothing back in time."""
    await asyncio.Event().wait()
    return count


@tool(version="1.0.0", mutation_class="read_only", namespace="in")
async def routed(
    count: Count,
    hint: Annotated[str, Field(description="for the runtime", examples=["x"], json_schema_extra={"x-internal": True})],
) -> str:
    """Say which hint came."""
    return f"{count} {hint}"


def _contents(home: Path) -> bytes:
    return b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file() and "keys" not in path.parts)


def stored(app: Interlock) -> int:
    return app.journal.reader.all("SELECT count(*) FROM payload WHERE ref LIKE 'inputs:%'")[0][0]


number = st.integers(-99, 99) | st.integers(-99, 99).map(str)
sent = st.fixed_dictionaries(
    {"count": number, "counts": st.lists(number, max_size=4)},
    optional={"note": st.none() | st.just("a/b~c"), "more": st.none() | st.just("m")},
)
changed = st.fixed_dictionaries({}, optional={"count": st.integers(), "note": st.none() | st.just("hooked")})
dropped = st.sets(st.sampled_from(["note", "more"]))


@pytest.mark.proves("LIFE-05")
@pytest.mark.parametrize("mode", ["changed", "always"])
@settings(max_examples=25)
@given(arguments=sent, change=changed, drop=dropped, hooked=st.booleans())
def test_replaying_the_recorded_changes_on_the_model_input_gives_the_call_input(
    mode: str, arguments: Json, change: Json, drop: set[str], hooked: bool
) -> None:
    seen: list[Any] = []

    def edits(shown: Seen) -> HookResult:
        seen.append(dict(shown.input))
        kept = {name: value for name, value in shown.input.items() if name not in drop}
        return HookResult(updated_input={**kept, **change})

    async def scenario() -> None:
        with tempfile.TemporaryDirectory() as directory:
            async with Interlock.open(directory, housekeeping=False, keep_inputs=mode) as app:
                await admit(app, take)
                if hooked:
                    app.hook(Hook(id="edits", when="pre", run=edits))
                result = await app.call("in.take", arguments)
                assert result.ok, result
                found = await app.inputs(result.invocation_id)
                call_input = replay(arguments, found.changes)
                # A parameter that the hook took away is the function's own default again.
                assert result.value == {"note": "none", "more": None, **call_input}
                assert {one["source"] for one in found.changes} <= {"coercion", "default", "hook:edits"}
                told = [{"source": one["source"], "pointer": one["pointer"]} for one in found.changes]
                (record,) = records(app, result.invocation_id)
                assert record.get("inputMutations", []) == told
                if mode == "changed" and {one["source"] for one in found.changes} <= {"default"}:
                    assert (found.model_input, found.call_input) == (None, None)  # the contract tells them
                    return
                assert found.model_input == arguments
                assert found.permission_input == found.call_input == call_input
                if hooked:
                    (observed,) = seen
                    assert found.observable_input == {**observed, "counts": list(observed["counts"])}

    asyncio.run(scenario())


@pytest.mark.proves("LIFE-05")
@pytest.mark.parametrize("members", [1, 3, 1500])
async def test_very_many_conversions_are_all_told_and_replayed_exactly(home: Path, members: int) -> None:
    numbers = {"type": "array", "items": {"type": "integer"}}
    sums: Json = {
        "name": "sums",
        "description": "Adds up lists of numbers.",
        "method": "POST",
        "path": "/sums",
        "input_schema": {"type": "object", "additionalProperties": numbers},
        "output_schema": {"type": "integer"},
    }
    async with HttpServer.open() as server, Interlock.open(home, housekeeping=False) as app:
        server.otherwise = lambda _: json_answer(1)
        config: Json = {"urls": [server.url], "allow_private": True, "tools": [sums]}
        overlay = {"defaults": {"mutation_class": "read_only"}}
        await app.upstreams.add("in", "http", config, by=app.caller, overlay=overlay)
        given = {f"of/{member}": ["7"] * (4500 // members) for member in range(members)}
        result = await app.call("in.sums", given)
        assert result.ok, result
        assert orjson.loads(server.got[-1].body) == {name: [7] * len(one) for name, one in given.items()}
        found = await app.inputs(result.invocation_id)
        assert found.model_input == given
        assert replay(found.model_input, found.changes) == found.call_input
        assert found.call_input == {name: [7] * len(one) for name, one in given.items()}
        told = records(app, result.invocation_id)[0]["inputMutations"]
        assert {one["source"] for one in told} == {"coercion"}
        assert [one["pointer"] for one in told] == [one["pointer"] for one in found.changes]
        # Every conversion lies in a place that the record names.
        places = {one["pointer"] for one in told}
        for name, values in given.items():
            member = f"/{name.replace('/', '~1')}"
            assert places & {"", member} or all(f"{member}/{at}" in places for at in range(len(values)))


@pytest.mark.proves("LIFE-05")
async def test_each_hook_sees_the_input_that_the_hook_before_it_left(app: Interlock) -> None:
    await admit(app, take)
    seen: list[Any] = []

    def counting(shown: Seen) -> HookResult:
        seen.append(shown.input["count"])
        return HookResult(updated_input={**shown.input, "count": shown.input["count"] + 1})

    for name in ("first", "second"):
        app.hook(Hook(id=name, when="pre", run=counting))
    result = await app.call("in.take", {"count": "7", "counts": []})
    assert result.ok, result
    assert seen == [7, 8]
    found = await app.inputs(result.invocation_id)
    told = (found.observable_input["count"], found.permission_input["count"], found.call_input["count"])
    assert told == (7, 9, 9)
    changed = [one["source"] for one in found.changes if one["pointer"] == "/count"]
    assert changed == ["coercion", "hook:first", "hook:second"]


@pytest.mark.proves("LIFE-05")
async def test_what_a_reviewer_changes_lies_between_what_was_judged_and_what_ran(app: Interlock) -> None:
    await admit(app, take)
    app.hook(Hook(id="asks", when="pre", run=lambda _: HookResult(permission="ask")))
    asked = {"count": "7", "counts": [1]}
    pending = await app.call("in.take", asked)
    ticket = pending.metadata["pending"]["ticketId"]
    await app.approvals.approve(ticket, by=APPROVER, edit={"count": 8, "counts": [], "note": "less"})
    result = await app.call("in.take", asked)
    assert result.value == {"count": 8, "counts": [], "note": "less", "more": None}
    found = await app.inputs(result.invocation_id)
    assert found.model_input == asked
    assert found.permission_input == {"count": 7, "counts": [1], "note": "none", "more": None}
    assert found.call_input == result.value
    changes = {(one["before"], one["after"], one["source"], one["pointer"]) for one in found.changes}
    reviewer = ("permission_input", "call_input", "reviewer:local:approver")
    assert changes == {
        ("model_input", "observable_input", "coercion", "/count"),
        ("model_input", "observable_input", "default", "/note"),
        ("model_input", "observable_input", "default", "/more"),
        (*reviewer, "/count"), (*reviewer, "/counts"), (*reviewer, "/note"),
    }  # fmt: skip
    kinds = ("pending", "closed")
    told = [one for kind in kinds for one in records(app, result.invocation_id, kind)]
    invocation = invocation_of(told)
    assert invocation is not None
    parsed = ToolInvocation.parse(invocation)
    assert {(one.before, one.after, one.source, one.pointer) for one in parsed.input_changes} == changes


@pytest.mark.proves("LIFE-05")
async def test_a_call_whose_input_only_lacked_defaults_keeps_nothing_more_than_its_record(app: Interlock) -> None:
    await admit(app, take)
    plain = await app.call("in.take", count=1, counts=[], note="a", more="b")
    filled = await app.call("in.take", count=1, counts=[])
    assert stored(app) == 0
    assert (await app.inputs(plain.invocation_id)).changes == ()
    changes = {
        one["pointer"]: (one["source"], one["value"]) for one in (await app.inputs(filled.invocation_id)).changes
    }
    assert changes == {"/note": ("default", "none"), "/more": ("default", None)}


DEFAULTS = [{"source": "default", "pointer": "/note"}, {"source": "default", "pointer": "/more"}]


@pytest.mark.proves("LIFE-05")
@pytest.mark.parametrize(("mode", "kept"), [("never", 0), ("changed", 2), ("always", 4)])
async def test_a_setting_says_whose_inputs_are_kept_and_the_record_names_every_difference(
    home: Path, mode: str, kept: int
) -> None:
    def injects(seen: Seen) -> HookResult | None:
        return HookResult(updated_input={**seen.input, "note": "hooked"}) if seen.input["count"] == 2 else None

    cases: list[tuple[Json, list[Json]]] = [
        ({"count": 1, "note": "a", "more": "b"}, []),
        ({"count": 1}, DEFAULTS),
        ({"count": "1"}, [{"source": "coercion", "pointer": "/count"}, *DEFAULTS]),
        ({"count": 2}, [*DEFAULTS, {"source": "hook:injects", "pointer": "/note"}]),
    ]
    async with Interlock.open(home, housekeeping=False, keep_inputs=mode) as app:
        await admit(app, take)
        app.hook(Hook(id="injects", when="pre", run=injects))
        for arguments, differences in cases:
            result = await app.call("in.take", {**arguments, "counts": []})
            assert result.ok
            (record,) = records(app, result.invocation_id)
            assert len(record["inputHash"]) == 64
            assert record.get("inputMutations", []) == differences
            told = (await app.inputs(result.invocation_id)).changes
            assert [{"source": one["source"], "pointer": one["pointer"]} for one in told] == differences
        assert stored(app) == kept


@pytest.mark.proves("LIFE-05")
async def test_what_a_cursor_stands_for_is_a_recorded_difference_too(app: Interlock) -> None:
    await admit(app, rows)
    first = await app.call("p.rows", prefix="a", secret="hush")
    seen: list[Any] = []
    app.hook(Hook(id="after", when="post", run=lambda shown: seen.append(dict(shown.input))))
    asked = {"cursor": first.metadata["pagination"]["cursor"]}
    second = await app.call("p.rows", asked)
    assert second.value == list(range(10, 20))
    found = await app.inputs(second.invocation_id)
    whole = {"prefix": "a", "secret": "hush", "cursor": "10"}
    assert (found.model_input, found.observable_input, found.call_input) == (asked, whole, whole)
    assert seen == [whole]
    (record,) = records(app, second.invocation_id)
    assert record["inputMutations"] == [
        {"source": "cursor", "pointer": pointer} for pointer in ("/cursor", "/prefix", "/secret")
    ]


class Part(BaseModel):
    number: int = Field(description="which", examples=[1])
    count: int = Field(2, description="how many", examples=[2])


class Order(BaseModel):
    parts: list[Part] = Field(description="what is ordered", examples=[[{"number": 1}]])
    urgent: bool = Field(False, description="whether it is urgent", examples=[True])


@tool(version="1.0.0", mutation_class="read_only", namespace="in", timeout_class="interactive", external_io=False)
def order(order: Annotated[Order, Field(description="an order", examples=[{"parts": []}])], by: Note = "post") -> Json:
    """Give back the order as it arrived."""
    return {**order.model_dump(), "by": by}


@pytest.mark.proves("LIFE-05", "CONTRACT-06")
async def test_defaults_inside_of_objects_are_filled_in_before_hooks_and_policy_and_on_record(app: Interlock) -> None:
    await admit(app, order)
    sent: Json = {"order": {"parts": [{"number": 1}, {"number": 2, "count": 5}]}}
    filled: Json = {"parts": [{"number": 1, "count": 2}, {"number": 2, "count": 5}], "urgent": False}
    whole: Json = {"order": filled, "by": "post"}
    places = ["/order/parts/0/count", "/order/urgent", "/by"]
    result = await app.call("in.order", sent)
    for _ in range(2):  # a plain read may take another path from the second call on
        result = await app.call("in.order", sent)
        assert result.unwrap() == {**filled, "by": "post"}
        (record,) = records(app, result.invocation_id)
        assert record["inputMutations"] == [{"source": "default", "pointer": one} for one in places]
        assert record["inputHash"] == digest(sent)
    told = (await app.inputs(result.invocation_id)).changes
    assert [(one["pointer"], one["value"]) for one in told] == list(zip(places, (2, False, "post"), strict=True))
    seen: list[Any] = []
    app.hook(Hook(id="looks", when="pre", run=lambda shown: seen.append(thawed(shown.input))))
    text = app.policy.path.read_text()
    await use_policy(
        app, text + "forbid (principal, action, resource) when { context.arguments.order.urgent == false };\n"
    )
    denied = await app.call("in.order", sent)
    assert denied.error is not None
    assert (denied.error.code, seen) == ("E3206", [whole])
    assert sent == {"order": {"parts": [{"number": 1}, {"number": 2, "count": 5}]}}


@pytest.mark.proves("LIFE-05")
@pytest.mark.parametrize("large", [False, True])
async def test_hooks_before_and_after_a_call_see_the_observable_input_and_nothing_that_was_injected(
    app: Interlock, large: bool
) -> None:
    await admit(app, take, fails)
    seen: dict[str, list[Any]] = {"pre": [], "post": [], "failure": []}

    def injects(shown: Seen) -> HookResult:
        seen["pre"].append(dict(shown.input))
        return HookResult(updated_input={**shown.input, "count": 13})

    def writes(shown: Seen) -> None:
        seen["post"].append(dict(shown.input))
        with pytest.raises(TypeError):
            shown.input["count"] = 1  # pyright: ignore[reportIndexIssue] - that is what is tried

    app.hook(Hook(id="injects", when="pre", run=injects))
    app.hook(Hook(id="after", when="post", run=writes))
    app.hook(Hook(id="failed", when="failure", run=lambda shown: seen["failure"].append(dict(shown.input))))
    note = "x" * (300_000 if large else 1)
    result = await app.call("in.take", {"count": "7", "counts": ["1"], "note": note})
    assert result.value["count"] == 13
    observable = {"count": 7, "counts": (1,), "note": note, "more": None}
    assert (seen["pre"], seen["post"]) == ([observable], [observable])
    assert not (await app.call("in.fails", {"count": "5", "note": note})).ok
    assert seen["failure"] == [{"count": 5, "note": note}]


@pytest.mark.proves("LIFE-05")
async def test_what_a_sandboxed_tool_and_a_program_get_is_the_call_input_that_is_kept(
    home: Path, tmp_path: Path
) -> None:
    tally = manifest(
        "tally", ["cat"], {"type": "object"}, parameters={"n": NUMBER}, execution={"stdin": "json", "parse": "json"}
    )  # fmt: skip
    _, programs = load(written(tmp_path / "programs.json", tally))
    async with Interlock.open(home, housekeeping=False, keep_inputs="always") as app:
        await admit(app, isolated_tools.double, *programs)
        app.hook(Hook(id="fills", when="pre", run=lambda _: HookResult(updated_input={"n": 21})))
        for name, value in (("cell.double", 42), ("prog.tally", {"n": 21})):
            called = await app.call(name, {"n": "1"})
            assert called.value == value, called
            found = await app.inputs(called.invocation_id)
            assert (found.model_input, found.observable_input) == ({"n": "1"}, {"n": 1})
            assert (found.permission_input, found.call_input) == ({"n": 21}, {"n": 21})
            (record,) = records(app, called.invocation_id)
            assert record["inputMutations"] == [
                {"source": "coercion", "pointer": "/n"}, {"source": "hook:fills", "pointer": "/n"}
            ]  # fmt: skip


def expect_hooked_login(told: Json) -> None:
    """The inputs of ann's login, where a hook wrote another user, as an auditor reads them."""
    hidden = {"password": "[REDACTED]"}
    assert told["model_input"] == {"user": "ann", "tries": "5", **hidden}
    assert told["observable_input"] == {"user": "ann", "tries": 5, **hidden}
    assert told["permission_input"] == told["call_input"] == {"user": "hooked", "tries": 5, **hidden}
    assert [(one["before"], one["after"], one["source"], one["pointer"]) for one in told["input_changes"]] == [
        ("model_input", "observable_input", "coercion", "/tries"),
        ("observable_input", "permission_input", "hook:injects", "/user"),
    ]
    assert told["withheld"] is None


@pytest.mark.proves("LIFE-05")
async def test_the_inputs_of_a_call_are_read_over_rest_by_auditors_redacted(home: Path) -> None:
    async with opened(home) as wires:
        await admit(wires.app, login)
        wires.app.hook(
            Hook(id="injects", when="pre", run=lambda seen: HookResult(updated_input={**seen.input, "user": "hooked"}))
        )
        called = (await wires.call("rest", "in.login", {"user": "ann", "password": CANARY, "tries": "5"})).about
        path = f"/v1/calls/{called['invocation_id']}/inputs"
        refused = await wires.http.get(path)
        assert (refused.status_code, refused.json()["error"]["error_code"]) == (403, "E3206")
        issue = wires.app.tokens.issue(subject=did_of("bot"), scopes=("audit:read",), by=wires.app.caller)
        wires.bear(await issue)
        answer = await wires.http.get(path)
        assert answer.status_code == 200
        assert CANARY not in answer.text
        expect_hooked_login(answer.json())
        missing = await wires.http.get("/v1/calls/01JCXK2M4Q8ZZZZZZZZZZZZZZZ/inputs")
        assert (missing.status_code, missing.json()["error"]["error_code"]) == (404, "E3702")


@pytest.mark.proves("LIFE-05")
async def test_inputs_are_sealed_at_rest_and_shown_redacted_to_auditors_alone(home: Path) -> None:
    def injects(seen: Seen) -> HookResult:
        return HookResult(updated_input={**seen.input, "user": "hooked", "tries": 5})

    async with Interlock.open(home, housekeeping=False) as app:
        await admit(app, login)
        app.hook(Hook(id="injects", when="pre", run=injects))
        result = await app.call("in.login", user="ann", password=CANARY)
        call = result.invocation_id
        found = await app.inputs(call)
        assert (found.model_input["password"], found.call_input["password"]) == (CANARY, CANARY)
        calls = Service(app).calls
        auditor = Caller(id="local:auditor", scopes=frozenset({"audit:read"}))
        shown = await calls.inputs(call, auditor)
        assert CANARY not in str(shown)
        assert shown["model_input"]["user"] == "ann"
        assert shown["call_input"]["user"] == "hooked"
        assert [one["source"] for one in shown["input_changes"]] == ["default", "hook:injects", "hook:injects"]
        with pytest.raises(Failure) as refused:
            await calls.inputs(call, Caller(id=app.caller.id))
        assert refused.value.code == "E3206"
        with pytest.raises(Failure):
            await app.read_payload(f"inputs:{call}")
        await app.journal.commit(lambda _: None)
        looks = app.journal.reader.all("SELECT body FROM journal WHERE kind = 'audit.read'")
        assert orjson.loads(looks[-1][0])["by"] == "local:auditor"
        await calls.close()
    assert CANARY.encode() not in _contents(home)
    told = (await asyncio.to_thread(Cli(home.parent), "calls", "inputs", call)).out
    assert CANARY not in told
    assert "hook:injects" in told
    assert all(name in told for name in ("model_input", "observable_input", "permission_input", "call_input"))


@pytest.mark.proves("LIFE-05")
@pytest.mark.parametrize("mode", ["changed", "always"])
async def test_a_large_input_is_kept_whole_in_mode_always_and_otherwise_by_its_hash(home: Path, mode: str) -> None:
    async with Interlock.open(home, housekeeping=False, keep_inputs=mode) as app:
        await admit(app, take)
        given: Json = {"count": "1", "counts": [], "note": f"{CANARY} " + "x" * 3_000_000}
        result = await app.call("in.take", given)
        assert result.ok
        found = await app.inputs(result.invocation_id)
        assert [one["source"] for one in found.changes] == ["coercion", "default"]
        record = records(app, result.invocation_id)[0]
        if mode == "changed":
            assert stored(app) == 0
            assert found.model_input is None
            assert "262,144 bytes" in record["inputsWithheld"]
            assert found.withheld == record["inputsWithheld"]
        else:
            assert found.model_input == given
            assert found.call_input == {**given, "count": 1, "more": None}
            assert "inputsWithheld" not in record
            auditor = Caller(id="local:auditor", scopes=frozenset({"audit:read"}))
            calls = Service(app).calls
            shown = await calls.inputs(result.invocation_id, auditor)
            assert (shown["model_input"], shown["withheld"]) == (given, None)
            await calls.close()
    assert CANARY.encode() not in _contents(home)


@pytest.mark.proves("LIFE-05")
async def test_in_mode_always_calls_that_were_refused_failed_or_answered_again_keep_their_inputs_too(
    home: Path,
) -> None:
    async with Interlock.open(home, housekeeping=False, keep_inputs="always") as app:
        for one in (take, fails, sample.increment):
            await admit(app, one)
        unfit = await app.call("in.take", {"count": "many", "counts": []})
        found = await app.inputs(unfit.invocation_id)
        assert found.model_input == {"count": "many", "counts": []}
        assert (found.observable_input, found.permission_input, found.call_input) == (None, None, None)
        strange = await app.call("in.nothing", {"a": 1})
        assert (await app.inputs(strange.invocation_id)).model_input == {"a": 1}
        failed = await app.call("in.fails", {"count": "3"})
        assert (await app.inputs(failed.invocation_id)).call_input == {"count": 3, "note": None}
        first = await app.call("demo.increment", {"name": "a"}, key="k")
        again = await app.call("demo.increment", {"name": "a"}, key="k")
        assert again.source == "replay"
        for result in (first, again):
            assert (await app.inputs(result.invocation_id)).model_input == {"name": "a"}
        undone = await app.undo(first.invocation_id, key="u")
        assert undone.ok, undone
        assert (await app.inputs(undone.invocation_id)).call_input == {"name": "a", "by": 1}


@pytest.mark.proves("LIFE-05")
@pytest.mark.parametrize("ends", ["succeeded", "failed"])
async def test_the_record_says_so_where_a_quota_has_no_room_for_the_inputs(home: Path, ends: str) -> None:
    quota: Json = {"payload_bytes_per_caller": 1 << 20}
    async with Interlock.open(home, housekeeping=False, keep_inputs="always", **quota) as app:
        await admit(app, login, fails)
        name, text, rest = ("in.login", "user", {"password": "x"}) if ends == "succeeded" else ("in.fails", "note", {})
        given: Json = {**rest, text: "x", **({} if rest else {"count": 1})}
        kept = await app.call(name, given)
        assert kept.state == ends
        assert (await app.inputs(kept.invocation_id)).model_input == given
        full = await app.call(name, {**given, text: "x" * 1_100_000})
        assert full.state == kept.state
        (record,) = records(app, full.invocation_id)
        assert "payload_bytes_per_caller" in record["inputsWithheld"]
        found = await app.inputs(full.invocation_id)
        assert (found.model_input, found.withheld) == (None, record["inputsWithheld"])
        assert len(record["inputHash"]) == 64


@pytest.mark.proves("LIFE-05")
async def test_the_model_input_is_kept_as_it_was_sent_whatever_its_sender_does_to_it_later(home: Path) -> None:
    async with Interlock.open(home, housekeeping=False, keep_inputs="always") as app:
        await admit(app, take)
        given: Json = {"count": 1, "counts": [1, 2]}

        async def alters(seen: Seen) -> None:
            given["counts"].append(99)
            given["count"] = 7

        app.hook(Hook(id="alters", when="pre", run=alters))
        result = await app.call("in.take", given)
        assert result.value["counts"] == [1, 2]
        found = await app.inputs(result.invocation_id)
        assert found.model_input == {"count": 1, "counts": [1, 2]}
        assert found.call_input == result.value


@pytest.mark.proves("LIFE-05")
async def test_policy_judges_the_permission_input_and_the_record_names_what_was_injected(home: Path) -> None:
    (home / "policy.cedar").write_text(
        'permit (principal, action, resource);\n@id("not-13") forbid (principal, action == Action::"in.take", resource)'
        " when { context.arguments.count == 13 };\n"
    )
    async with Interlock.open(home, housekeeping=False, keep_inputs="always") as app:
        await admit(app, take)
        app.hook(Hook(id="injects", when="pre", run=lambda seen: HookResult(updated_input={**seen.input, "count": 13})))
        denied = await app.call("in.take", count=1, counts=[], note="a", more="b")
        assert denied.error is not None
        assert denied.error.code == "E3206"
        found = await app.inputs(denied.invocation_id)
        assert (found.observable_input["count"], found.permission_input["count"]) == (1, 13)
        (record,) = records(app, denied.invocation_id)
        assert record["inputMutations"] == [{"source": "hook:injects", "pointer": "/count"}]


# Calls that are not closed in the usual way

DYING = """
import asyncio, sys
from interlock import Hook, HookResult, Interlock
from tests.support.counter import mark

async def main():
    async with Interlock.open(sys.argv[1], housekeeping=False, keep_inputs="always") as app:
        app.catalog.attach(mark)
        app.hook(Hook(id="edits", when="pre", run=lambda _: HookResult(updated_input={"name": "hooked"})))
        await app.call("demo.mark", {"name": "a"}, key="k")

asyncio.run(main())
"""


async def _has_the_hash_alone(app: Interlock, call: str, model_input: Json) -> None:
    assert stored(app) == 0
    found = await app.inputs(call)
    assert (found.model_input, found.observable_input) == (None, None)
    assert (found.permission_input, found.call_input, found.changes) == (None, None, ())
    (record,) = records(app, call)
    assert record["inputHash"] == digest(model_input)
    assert not {"inputMutations", "inputsWithheld"} & record.keys()


@pytest.mark.proves("LIFE-05")
async def test_of_a_call_whose_process_died_the_record_has_the_hash_alone(home: Path, tmp_path: Path) -> None:
    await prepare(home, mark)
    died = await asyncio.create_subprocess_exec(
        *forked.python(), "-c", DYING, str(home), cwd=ROOT,
        env={**os.environ, "EFFECTS": str(tmp_path / "effects"), "CRASH_AT": "after the effect"},
    )  # fmt: skip
    assert await died.wait() == -9
    bury(home_at(home))
    async with Interlock.open(home, housekeeping=False, keep_inputs="always") as app:
        ((call, state),) = app.journal.reader.all("SELECT call, state FROM reservation")
        assert state == "unknown"
        await _has_the_hash_alone(app, call, {"name": "a"})


@pytest.mark.proves("LIFE-05")
async def test_of_a_call_that_could_not_be_closed_the_record_has_the_hash_alone(home: Path) -> None:
    async with Interlock.open(home, housekeeping=False, keep_inputs="always") as app:
        await admit(app, fall)
        odd = "a message that is no text"
        app.hook(Hook(id="edits", when="pre", run=lambda _: HookResult(updated_input={"name": odd})))
        result = await app.call("demo.fall", name="a", key="k")
        (record,) = records(app, result.invocation_id)
        assert (record["source"], record["status"]) == ("synthetic", "ERROR")
        await _has_the_hash_alone(app, result.invocation_id, {"name": "a"})


@pytest.mark.proves("LIFE-05")
async def test_in_mode_always_blocked_previewed_and_nested_calls_keep_their_model_input(home: Path) -> None:
    async with Interlock.open(home, housekeeping=False, keep_inputs="always") as app:
        await admit(app, take, passes_on, sample.increment)

        def stops(seen: Seen) -> HookResult | None:
            return HookResult(stop="not today") if seen.input.get("count") == 1 else None

        app.hook(Hook(id="stops", when="pre", run=stops))
        ended: dict[str, tuple[str, Json]] = {}

        async def asked(how: str, name: str, given: Json, **options: Any) -> None:
            ended[(await app.call(name, given, **options)).invocation_id] = (how, given)

        await asked("hook-blocked", "in.take", {"count": "1", "counts": []})
        await asked("dry run", "demo.increment", {"name": "a", "by": "5"}, key="k", dry_run=True)
        await asked("nesting", "in.passes_on", {"count": "6"})
        (inner,) = [one["call"] for one in records(app) if one["toolId"] == "in.take" and one["status"] == "SUCCESS"]
        ended[inner] = ("nested", {"count": "6", "counts": []})
        codes: dict[str, str | None] = {}
        for call, (how, given) in ended.items():
            (record,) = records(app, call)
            codes[how] = record.get("error_code")
            assert (await app.inputs(call)).model_input == given, how
        assert codes == {"hook-blocked": "E3211", "dry run": None, "nesting": None, "nested": None}


@pytest.mark.proves("LIFE-05")
async def test_in_mode_always_a_call_that_ran_out_of_time_keeps_its_inputs(home: Path) -> None:
    async with Interlock.open(home, housekeeping=False, keep_inputs="always") as app:
        await admit(app, hangs)
        late = await app.call("in.hangs", {"count": "4"}, timeout_s=0.05)
        assert late.error is not None
        assert late.error.code == "E3402"
        found = await app.inputs(late.invocation_id)
        assert (found.model_input, found.call_input) == ({"count": "4"}, {"count": 4})


@pytest.mark.proves("LIFE-05")
async def test_the_command_line_tells_the_four_inputs_as_json(home: Path) -> None:
    async with Interlock.open(home, housekeeping=False) as app:
        await admit(app, login)
        app.hook(
            Hook(id="injects", when="pre", run=lambda seen: HookResult(updated_input={**seen.input, "user": "hooked"}))
        )
        call = (await app.call("in.login", user="ann", password=CANARY, tries="5")).invocation_id
    expect_hooked_login(await asyncio.to_thread(Cli(home.parent).ask, "calls", "inputs", call))


@pytest.mark.proves("LIFE-05")
async def test_by_default_inputs_of_262144_bytes_are_kept_and_larger_ones_are_not(app: Interlock) -> None:
    await admit(app, take)
    bare = len(orjson.dumps({"count": "1", "counts": [], "note": ""}))
    for size in (262_144, 262_145):
        given: Json = {"count": "1", "counts": [], "note": "x" * (size - bare)}
        found = await app.inputs((await app.call("in.take", given)).invocation_id)
        kept = size == 262_144
        assert found.model_input == (given if kept else None), size
        assert ("262,144 bytes" in found.withheld) is not kept


@pytest.mark.proves("LIFE-05")
async def test_a_default_is_that_of_the_version_that_was_called(home: Path) -> None:
    called: list[tuple[str, Json]] = []
    for version, tools in (("1.0.0", (take,)), ("1.1.0", (take, newer_take))):
        async with Interlock.open(home, housekeeping=False) as app:
            await admit(app, *tools[-1:])
            app.catalog.attach(take)
            result = await app.call(f"in.take@{version}", count=1, counts=[])
            assert result.ok, result.error
            called.append((result.invocation_id, result.value))
            for call, value in called:
                changes = {one["pointer"]: one["value"] for one in (await app.inputs(call)).changes}
                assert changes == {"/note": value["note"], "/more": value["more"]}
    assert [value["note"] for _, value in called] == ["none", "other"]


@pytest.mark.proves("LIFE-05")
async def test_by_default_too_the_record_says_so_where_a_quota_has_no_room_for_changed_inputs(home: Path) -> None:
    quota: Json = {"payload_bytes_per_caller": 1 << 20}
    async with Interlock.open(home, housekeeping=False, **quota) as app:
        await admit(app, login)
        given: Json = {"user": "x" * 250_000, "password": "x", "tries": "1"}
        told = [records(app, (await app.call("in.login", given)).invocation_id)[0] for _ in range(6)]
        withheld = [one["inputsWithheld"] for one in told if "inputsWithheld" in one]
        assert stored(app) == len(told) - len(withheld) > 0
        assert withheld
        assert all("payload_bytes_per_caller" in one for one in withheld)


@pytest.mark.proves("LIFE-05")
async def test_a_field_for_the_runtime_alone_has_the_hook_that_injected_it_as_its_source_on_record(
    app: Interlock,
) -> None:
    await admit(app, routed)
    app.hook(Hook(id="router", when="pre", run=lambda seen: HookResult(updated_input={**seen.input, "hint": "t7"})))
    result = await app.call("in.routed", count=1)
    assert result.value == "1 t7"
    (record,) = records(app, result.invocation_id)
    assert record["inputMutations"] == [{"source": "hook:router", "pointer": "/hint"}]
    found = await app.inputs(result.invocation_id)
    assert (found.model_input, found.observable_input) == ({"count": 1}, {"count": 1})
    assert found.permission_input == found.call_input == {"count": 1, "hint": "t7"}


@pytest.mark.proves("LIFE-05")
async def test_the_kept_model_input_is_unchanged_where_a_hook_tries_to_write_it(home: Path) -> None:
    async with Interlock.open(home, housekeeping=False, keep_inputs="always") as app:
        await admit(app, take)

        def writes(seen: Seen) -> HookResult:
            with pytest.raises(TypeError):
                seen.input["count"] = 9  # pyright: ignore[reportIndexIssue] - that is what is tried
            with pytest.raises(AttributeError):
                seen.input["counts"].append(9)
            return HookResult(updated_input={**seen.input, "count": 7})

        app.hook(Hook(id="writes", when="pre", run=writes))
        given: Json = {"count": 1, "counts": [1], "note": "a", "more": "b"}
        result = await app.call("in.take", given)
        found = await app.inputs(result.invocation_id)
        assert found.model_input == found.observable_input == {"count": 1, "counts": [1], "note": "a", "more": "b"}
        assert found.call_input == result.value == {**given, "count": 7}

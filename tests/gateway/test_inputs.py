"""The four inputs of a call: as it was sent, as hooks see it, as policy judged it, as the tool got it."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated, Any

import hypothesis.strategies as st
import orjson
import pytest
from hypothesis import given, settings

from interlock import Caller, Failure, Field, Hook, HookResult, Interlock, Seen, tool
from interlock.audit.invocations import invocation_of
from interlock.core.objects import ToolInvocation
from interlock.gateway.inputs import replay
from interlock.service import Service
from tests.cli.conftest import Cli
from tests.gateway.test_interleavings import admit
from tests.gateway.test_lifecycle import records

Json = dict[str, Any]
APPROVER = Caller(id="local:approver", groups=frozenset({"approvers"}))
CANARY = "Quux-7731-canary"
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


def _contents(home: Path) -> bytes:
    return b"".join(path.read_bytes() for path in home.rglob("*") if path.is_file() and "keys" not in path.parts)


def stored(lock: Interlock) -> int:
    return lock.journal.read("SELECT count(*) FROM payload WHERE ref LIKE 'inputs:%'")[0][0]


number = st.integers(-99, 99) | st.integers(-99, 99).map(str)
sent = st.fixed_dictionaries(
    {"count": number, "counts": st.lists(number, max_size=4)},
    optional={"note": st.none() | st.just("a/b~c"), "more": st.none() | st.just("m")},
)
changed = st.fixed_dictionaries({}, optional={"count": st.integers(), "note": st.none() | st.just("hooked")})
dropped = st.sets(st.sampled_from(["note", "more"]))


@pytest.mark.proves("LIFE-05")
@settings(max_examples=25)
@given(arguments=sent, change=changed, drop=dropped)
def test_replaying_the_kept_changes_on_the_model_input_gives_the_call_input(
    arguments: Json, change: Json, drop: set[str]
) -> None:
    seen: list[Any] = []

    def edits(shown: Seen) -> HookResult:
        seen.append(dict(shown.input))
        kept = {name: value for name, value in shown.input.items() if name not in drop}
        return HookResult(updated_input={**kept, **change})

    async def scenario() -> None:
        with tempfile.TemporaryDirectory() as directory:
            async with Interlock.open(directory, housekeeping=False, keep_inputs="always") as lock:
                await admit(lock, take)
                lock.hook(Hook(id="edits", when="pre", run=edits))
                result = await lock.call("in.take", arguments)
                assert result.ok, result
                found = lock.inputs(result.invocation_id)
                assert found.model_input == arguments
                (observed,) = seen
                assert found.observable_input == {**observed, "counts": list(observed["counts"])}
                assert replay(found.model_input, found.changes) == found.call_input
                # A parameter that the hook took away is the function's own default again.
                got = {"note": "none", "more": None, **found.call_input}
                assert result.value == got
                assert found.permission_input == found.call_input
                assert {one["source"] for one in found.changes} <= {"coercion", "default", "hook:edits"}
                told = [{"source": one["source"], "pointer": one["pointer"]} for one in found.changes]
                (record,) = records(lock, result.invocation_id)
                assert record.get("inputMutations", []) == told

    asyncio.run(scenario())


@pytest.mark.proves("LIFE-05")
async def test_what_a_reviewer_changes_lies_between_what_was_judged_and_what_ran(lock: Interlock) -> None:
    await admit(lock, take)
    lock.hook(Hook(id="asks", when="pre", run=lambda _: HookResult(permission="ask")))
    asked = {"count": "7", "counts": [1]}
    pending = await lock.call("in.take", asked)
    ticket = pending.metadata["pending"]["ticketId"]
    await lock.approvals.approve(ticket, by=APPROVER, edit={"count": 8, "counts": [], "note": "less"})
    result = await lock.call("in.take", asked)
    assert result.value == {"count": 8, "counts": [], "note": "less", "more": None}
    found = lock.inputs(result.invocation_id)
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
    told = [one for kind in kinds for one in records(lock, result.invocation_id, kind)]
    invocation = invocation_of(told)
    assert invocation is not None
    parsed = ToolInvocation.parse(invocation)
    assert {(one.before, one.after, one.source, one.pointer) for one in parsed.input_changes} == changes


@pytest.mark.part_of(
    "LIFE-05", rest="by default an input that nothing but defaults changed, or of over 256 KiB, is kept as a hash"
)
async def test_a_call_whose_input_only_lacked_defaults_keeps_nothing_more_than_its_record(lock: Interlock) -> None:
    await admit(lock, take)
    plain = await lock.call("in.take", count=1, counts=[], note="a", more="b")
    filled = await lock.call("in.take", count=1, counts=[])
    assert stored(lock) == 0
    assert lock.inputs(plain.invocation_id).changes == ()
    changes = {one["pointer"]: (one["source"], one["value"]) for one in lock.inputs(filled.invocation_id).changes}
    assert changes == {"/note": ("default", "none"), "/more": ("default", None)}


@pytest.mark.parametrize(("mode", "kept"), [("never", 0), ("changed", 1), ("always", 3)])
async def test_a_setting_says_whose_inputs_are_kept(home: Path, mode: str, kept: int) -> None:
    async with Interlock.open(home, housekeeping=False, keep_inputs=mode) as lock:
        await admit(lock, take)
        for arguments in ({"count": 1, "note": "a", "more": "b"}, {"count": 1}, {"count": "1"}):
            result = await lock.call("in.take", {**arguments, "counts": []})
            assert result.ok
            hashed = records(lock, result.invocation_id)[0]["inputHash"]
            assert len(hashed) == 64
        assert stored(lock) == kept


@pytest.mark.proves("LIFE-05")
async def test_inputs_are_sealed_at_rest_and_shown_redacted_to_auditors_alone(home: Path) -> None:
    def injects(seen: Seen) -> HookResult:
        return HookResult(updated_input={**seen.input, "user": "hooked", "tries": 5})

    async with Interlock.open(home, housekeeping=False) as lock:
        await admit(lock, login)
        lock.hook(Hook(id="injects", when="pre", run=injects))
        result = await lock.call("in.login", user="ann", password=CANARY)
        call = result.invocation_id
        found = lock.inputs(call)
        assert (found.model_input["password"], found.call_input["password"]) == (CANARY, CANARY)
        calls = Service(lock).calls
        auditor = Caller(id="local:auditor", scopes=frozenset({"audit:read"}))
        shown = calls.inputs(call, auditor)
        assert CANARY not in str(shown)
        assert shown["model_input"]["user"] == "ann"
        assert shown["call_input"]["user"] == "hooked"
        assert [one["source"] for one in shown["input_changes"]] == ["default", "hook:injects", "hook:injects"]
        with pytest.raises(Failure) as refused:
            calls.inputs(call, Caller(id=lock.caller.id))
        assert refused.value.code == "E3206"
        with pytest.raises(Failure):
            await lock.read_payload(f"inputs:{call}")
        await lock.journal.commit(lambda _: None)
        looks = lock.journal.read("SELECT body FROM journal WHERE kind = 'audit.read'")
        assert orjson.loads(looks[-1][0])["by"] == "local:auditor"
        await calls.close()
    assert CANARY.encode() not in _contents(home)
    told = (await asyncio.to_thread(Cli(home.parent), "calls", "inputs", call)).out
    assert CANARY not in told
    assert "hook:injects" in told


async def test_an_input_that_is_too_large_to_be_kept_is_on_record_by_its_hash(lock: Interlock) -> None:
    await admit(lock, take)
    result = await lock.call("in.take", {"count": "1", "counts": [], "note": "x" * 300_000})
    assert result.ok
    assert stored(lock) == 0
    assert [one["source"] for one in lock.inputs(result.invocation_id).changes] == ["coercion", "default"]

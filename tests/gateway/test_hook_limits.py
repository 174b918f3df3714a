"""Limits of hooks: what they return is judged by policy and by the contract, and what they break is withheld."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from interlock import Hook, HookResult, Interlock, Seen
from interlock.core.errors import Failure
from tests import sample
from tests.sample import world
from tests.support.calls import code, records

PERMIT = "permit (principal, action, resource);\n"


@pytest.fixture
def allowing() -> Hook:
    return Hook(id="generous", when="pre", run=lambda _: HookResult(permission="allow"))


@pytest.mark.proves("LIFE-06")
@pytest.mark.parametrize(
    ("name", "arguments", "key"), [("demo.add", {"a": 1, "b": 2}, None), ("demo.increment", {"name": "a"}, "k")]
)
async def test_a_hook_that_allows_does_not_lift_a_forbid_of_the_policy(
    home: Path, allowing: Hook, name: str, arguments: dict[str, Any], key: str | None
) -> None:
    (home / "policy.cedar").write_text(
        f'{PERMIT}@id("not-that") forbid (principal, action, resource == Tool::"{name}");\n'
    )
    async with Interlock.open(home, housekeeping=False) as app:
        for one in (sample.add, sample.increment):
            app.catalog.attach(one)
        app.hook(allowing)
        denied = await app.call(name, arguments, key=key)
        assert denied.error is not None
        assert (denied.error.code, denied.error.row.error_code) == ("E3206", "AUTHORIZATION_DENIED")
        assert (denied.state, denied.error.policy_refs) == ("denied", ("not-that",))
        (record,) = records(app, denied.invocation_id)
        assert (record["authDecision"], record["phases"]) == ("DENY", ["request", "validate", "authorize", "return"])
    assert world.runs == 0


@pytest.mark.proves("LIFE-06")
async def test_policy_decides_about_the_input_that_a_hook_has_updated(home: Path) -> None:
    (home / "policy.cedar").write_text(
        f'{PERMIT}@id("not-mallory") forbid (principal, action == Action::"demo.increment", resource)'
        ' when { context.arguments.name == "mallory" };\n'
    )
    async with Interlock.open(home, housekeeping=False) as app:
        app.catalog.attach(sample.increment)
        app.hook(Hook(id="swaps", when="pre", run=_swap))
        swapped = await app.call("demo.increment", name="ann", key="1")
        assert code(swapped) == "E3206"
        assert swapped.error is not None
        assert swapped.error.policy_refs == ("not-mallory",)
        assert world.counters == {}
        # What was sent would have been forbidden; what the hook made of it is not.
        saved = await app.call("demo.increment", name="mallory", key="2")
        assert saved.unwrap() == 1
        assert world.counters == {"ann": 1}
        mutations = records(app, saved.invocation_id)[0]["inputMutations"]
        assert {"source": "hook:swaps", "pointer": "/name"} in mutations


def _swap(seen: Seen) -> HookResult:
    return HookResult(updated_input={**seen.input, "name": {"ann": "mallory", "mallory": "ann"}[seen.input["name"]]})


@pytest.mark.proves("LIFE-06")
@pytest.mark.parametrize("updated", [{"name": 7}, {"nmae": "a"}, {}, {"name": "a", "by": "many"}])
async def test_input_that_a_hook_made_invalid_is_refused_before_anybody_is_asked(
    app: Interlock, updated: dict[str, Any]
) -> None:
    app.hook(Hook(id="spoils", when="pre", run=lambda _: HookResult(updated_input=updated)))
    result = await app.call("demo.increment", name="a", key="k")
    assert (result.state, code(result)) == ("blocked", "E3211")
    (record,) = records(app, result.invocation_id)
    assert (record["phases"], record["authDecision"]) == (["request", "validate", "return"], "DENY")
    assert world.runs == 0


async def _raises(_: Seen) -> None:
    raise ValueError("a private detail")


async def _overruns(_: Seen) -> None:
    await asyncio.Event().wait()


async def _stops(_: Seen) -> HookResult:
    return HookResult(stop="not in this house")


@pytest.mark.proves("LIFE-06")
@pytest.mark.parametrize(
    ("run", "words"), [(_raises, "failed"), (_overruns, "took too long"), (_stops, "not in this house")]
)
async def test_a_post_hook_that_raises_overruns_or_stops_withholds_the_result(
    app: Interlock, run: Any, words: str
) -> None:
    app.hook(Hook(id="guard", when="post", run=run, timeout_s=0.05 if run is _overruns else 10))
    result = await app.call("demo.add", a=20, b=22)
    assert (result.state, code(result), result.value) == ("blocked", "E3211", None)
    assert result.error is not None
    assert words in result.error.message
    assert "42" not in str(result.document()["content"])
    assert "a private detail" not in str(result.document())


@pytest.mark.proves("LIFE-06")
@pytest.mark.parametrize(("run", "warned"), [(_raises, "hook `guard` failed"), (_stops, "not in this house")])
async def test_a_failure_hook_sees_the_failure_behind_mapping_and_changes_nothing(
    app: Interlock, run: Any, warned: str
) -> None:
    seen: list[Failure | None] = []
    order: list[str] = []

    async def watches(shown: Seen) -> Any:
        seen.append(shown.error)
        return await run(shown)

    app.listen(lambda event: order.append(event.type))
    app.hook(Hook(id="guard", when="failure", run=watches))
    sample.flaky.failures = [Failure("E3502", "it is down")]
    result = await app.call("demo.unsteady", name="a", key="k")
    assert code(result) == "E3502"
    assert [one.code for one in seen if one is not None] == ["E3502"]
    assert any(warned in warning for warning in result.metadata["warnings"])
    bracket = ["tool.hook.post.started", "tool.hook.post.completed"]
    assert order[order.index("tool.invocation.started") + 1 :][:2] == bracket


@pytest.mark.proves("LIFE-06")
async def test_a_failure_hook_sees_an_exception_of_the_tool_as_the_failure_that_it_was_mapped_to(
    app: Interlock,
) -> None:
    seen: list[Seen] = []
    app.hook(Hook(id="guard", when="failure", run=seen.append))
    sample.flaky.failures = [ZeroDivisionError("a private detail")]
    result = await app.call("demo.unsteady", name="a", key="k")
    assert result.error is not None
    (shown,) = seen
    assert isinstance(shown.error, Failure)
    assert (shown.error.code, shown.error.message) == (result.error.code, result.error.message)
    assert shown.error.code in ("E3401", "E3404")
    assert "a private detail" not in str(shown.error.envelope(""))

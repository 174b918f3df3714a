"""Batches: what may overlap does, what may not does not, and nobody is left without a result."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from interlock import BatchPolicy, Caller, Interlock, Request
from interlock.call.events import Event
from interlock.gateway.hooks import Hook, HookResult
from interlock.testing import FakeClock
from tests.support.batches import (
    OVERLAPPING,
    checked,
    gates,
    judged,
    others_would_have_begun,
    overlaps,
    prepare,
    release,
    running,
    shift,
)
from tests.support.calls import code, records, until

KINDS = (*OVERLAPPING, "alone", "depends", "outside", "write", "destroy", "destroy_isolated")
REVIEWER = Caller(id="local:reviewer", groups=frozenset({"approvers"}))


@pytest.fixture
async def batches(app: Interlock) -> Interlock:
    await prepare(app)
    return app


def requests(app: Interlock, kinds: list[str]) -> list[Request]:
    keys = [f"k{index}" if kind.startswith(("write", "destroy")) else None for index, kind in enumerate(kinds)]
    return [app.request(f"b.{kind}", {"number": i}, key=keys[i]) for i, kind in enumerate(kinds)]


async def agree(app: Interlock, wanted: list[Request]) -> None:
    """Have a person agree to what needs it, so that the batch runs everything."""
    for request in wanted:
        if request.tool.startswith("b.destroy"):
            asked = await app.call(request.tool, request.arguments, key=request.key)
            await app.approvals.approve(asked.metadata["pending"]["ticketId"], by=REVIEWER)


@pytest.mark.proves("LIFE-17")
@settings(max_examples=25)
@given(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=7), data=st.data())
def test_unsafe_calls_never_overlap_and_results_keep_the_order_of_requests(kinds: list[str], data: Any) -> None:
    order = data.draw(st.permutations(range(len(kinds))))

    async def scenario() -> None:
        import tempfile

        with tempfile.TemporaryDirectory() as directory:
            async with Interlock.open(directory) as app:
                await prepare(app)
                wanted = requests(app, kinds)
                await agree(app, wanted)
                task = asyncio.create_task(app.batch(wanted))
                await release(list(order), task.done)
                results = await task
                assert [result.unwrap() for result in results] == list(range(len(kinds)))

    asyncio.run(scenario())

    def is_safe(number: int) -> bool:
        return kinds[number] in OVERLAPPING or (kinds[number] == "depends" and number % 2 == 0)

    for others, number in overlaps:
        assert not others or (is_safe(number) and all(is_safe(other) for other in others))


@pytest.mark.proves("LIFE-17")
@pytest.mark.parametrize("kind", OVERLAPPING)
async def test_safe_calls_really_run_at_the_same_time(batches: Interlock, kind: str) -> None:
    task = asyncio.create_task(batches.batch(requests(batches, [kind] * 5)))
    await until(lambda: len(running) == 5)
    for gate in gates.values():
        gate.set()
    assert [result.unwrap() for result in await task] == [0, 1, 2, 3, 4]


@pytest.mark.proves("LIFE-17")
@pytest.mark.parametrize("kind", ["destroy", "destroy_isolated", "write", "outside", "alone"])
async def test_what_destroys_writes_or_reaches_outside_runs_alone(batches: Interlock, kind: str) -> None:
    wanted = requests(batches, ["safe", kind, kind, "safe"])
    await agree(batches, wanted)
    task = asyncio.create_task(batches.batch(wanted))
    await release([0, 1, 2, 3], task.done)
    assert [result.unwrap() for result in await task] == [0, 1, 2, 3]
    assert overlaps == [(frozenset(), number) for number in range(4)]


@pytest.mark.proves("LIFE-17")
@pytest.mark.parametrize("by", [1, 2])
async def test_a_tool_decides_by_the_input_that_hooks_leave(batches: Interlock, by: int) -> None:
    seen = shift(batches, by)
    wanted = [batches.request("b.depends", {"number": number}) for number in (0, 2, 4)]
    task = asyncio.create_task(batches.batch(wanted))
    given = [0 + by, 2 + by, 4 + by]
    if by % 2 == 0:
        await until(lambda: len(running) == 3)
    else:
        await until(lambda: running == {1})
        await others_would_have_begun()
        assert seen == [0], "by the input as it was sent, all three would run now"
    await release(given, task.done)
    assert [result.unwrap() for result in await task] == given
    assert [set(others) for others, _ in overlaps] == [set(), set(), set()] if by % 2 else [set(), {2}, {2, 4}]
    assert seen == [0, 2, 4], "the hooks of a call run once"


@pytest.mark.proves("LIFE-17", "OBS-10")
async def test_a_call_that_decides_by_input_is_checked_once_and_told_under_its_id(batches: Interlock) -> None:
    heard: list[tuple[str, str]] = []
    batches.listen(lambda event: heard.append((event.invocation_id, event.type)))
    checked.clear()
    wanted = [batches.request("b.depends", {"number": number}) for number in (0, 1, 2, -1)]
    task = asyncio.create_task(batches.batch(wanted))
    await release([0, 1, 2], task.done)
    results = await task
    assert [code(result) for result in results] == [None, None, None, "E3308"]
    assert checked == [0, 1, 2, -1]
    assert {call for call, _ in heard} == {result.invocation_id for result in results}
    for result in results:
        told = [kind for call, kind in heard if call == result.invocation_id]
        assert len(told) == len(set(told)), "nothing is told twice"


@pytest.mark.proves("LIFE-17")
async def test_a_tool_decides_by_the_input_that_a_reviewer_wrote(batches: Interlock) -> None:
    batches.hook(Hook(id="asks", when="pre", tools="b.depends", run=lambda _: HookResult(permission="ask")))
    wanted = [batches.request("b.depends", {"number": number}) for number in (0, 2)]
    for request, written in zip(wanted, (4, 5), strict=True):
        asked = await batches.call(request.tool, request.arguments)
        ticket = asked.metadata["pending"]["ticketId"]
        await batches.approvals.approve(ticket, by=REVIEWER, edit={"number": written})
    decided: list[str] = []
    batches.listen(lambda event: decided.append(event.type) if event.type == "tool.permission.decided" else None)
    task = asyncio.create_task(batches.batch(wanted))
    await until(lambda: len(decided) >= 4)  # the caller's input and the reviewer's, of both calls
    for _ in range(50):
        await asyncio.sleep(0)
    await release([4, 5], task.done)
    assert [result.unwrap() for result in await task] == [4, 5]
    assert overlaps == [(frozenset(), 4), (frozenset(), 5)]


@pytest.mark.proves("LIFE-17")
async def test_a_decision_that_fails_or_is_no_yes_means_alone(batches: Interlock) -> None:
    wanted = [batches.request("b.depends", {"number": number}) for number in (0, 100, 101)]
    task = asyncio.create_task(batches.batch(wanted))
    await release([0, 100, 101], task.done)
    assert [result.unwrap() for result in await task] == [0, 100, 101]
    assert [set(others) for others, _ in overlaps] == [set(), set(), set()]


@pytest.mark.proves("LIFE-17")
@pytest.mark.parametrize(
    ("policy", "codes"),
    [
        (BatchPolicy(sibling_failure="cancel_siblings"), ["E3411", "E3412"]),
        (BatchPolicy(interrupt="block"), ["E3411", "E3703"]),
        (BatchPolicy(interrupt="cancel"), ["E3703", "E3703"]),
    ],
)
async def test_a_call_that_waits_for_its_turn_is_called_off_like_one_that_has_not_started(
    batches: Interlock, policy: BatchPolicy, codes: list[str]
) -> None:
    stop = asyncio.Event()
    wanted = [batches.request("b.safe", {"number": 0, "fail": True}), batches.request("b.refuses", {"number": 1})]
    task = asyncio.create_task(batches.batch(wanted, policy, interrupt=stop))
    await until(lambda: judged == [1] and running == {0})
    if policy.sibling_failure == "ignore":
        stop.set()
        await asyncio.sleep(0)
    gates[0].set()
    results = await asyncio.wait_for(task, 60)
    assert [code(result) for result in results] == codes
    assert results[1].source == "synthetic"
    assert [number for _, number in overlaps] == [0]
    assert all(len(records(batches, result.invocation_id)) == 1 for result in results)


@pytest.mark.supports("LIFE-17")
async def test_a_call_that_is_cancelled_while_it_waits_for_its_turn_takes_no_other_with_it(batches: Interlock) -> None:
    heard: list[str] = []
    batches.listen(lambda event: heard.append(event.invocation_id))
    task = asyncio.create_task(batches.batch(requests(batches, ["safe", "refuses", "safe"])))
    await until(lambda: judged == [1] and running == {0})
    await batches.cancel(heard[-1])
    await release([0, 2], task.done)
    results = await task
    assert [code(result) for result in results] == [None, "E3703", None]
    assert [number for _, number in overlaps] == [0, 2]


@pytest.mark.supports("LIFE-17")
async def test_a_batch_that_is_cancelled_ends_the_call_that_waits_for_its_turn(batches: Interlock) -> None:
    task = asyncio.create_task(batches.batch(requests(batches, ["safe", "refuses"])))
    await until(lambda: judged == [1] and running == {0})
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)
    assert [number for _, number in overlaps] == [0]
    assert len(records(batches)) == 2


@pytest.mark.supports("LIFE-17", "LIFE-10")
async def test_the_time_that_a_call_waits_for_its_turn_is_not_its_own(home: Path) -> None:
    time = FakeClock()
    async with Interlock.open(home, clock=time.clock, housekeeping=False) as app:
        await prepare(app)
        wanted = [app.request("b.safe", {"number": 0}), app.request("b.refuses", {"number": 1}, timeout_s=1)]
        task = asyncio.create_task(app.batch(wanted))
        await until(lambda: judged == [1])
        time.advance(2)
        await release([0, 1], task.done)
        assert [code(result) for result in await task] == [None, None]


@pytest.mark.proves("LIFE-17")
async def test_progress_is_heard_at_once_and_results_wait_for_their_turn(batches: Interlock) -> None:
    heard: list[str] = []

    def hear(step: dict[str, Any]) -> None:
        heard.append(step["message"])

    wanted = [
        batches.request("b.safe", {"number": 0}),
        batches.request("b.tells", {"number": 1}, on_progress=hear),
    ]
    task = asyncio.create_task(batches.batch(wanted))
    await until(lambda: bool(heard))
    assert (heard, running, task.done()) == (["1 is half way"], {0}, False)
    gates[0].set()
    assert [result.unwrap() for result in await task] == [0, 1]


def failing(app: Interlock) -> list[Request]:
    first = app.request("b.safe", {"number": 0, "fail": True})
    return [first, *requests(app, ["safe"] * 4)[1:], app.request("b.alone", {"number": 9})]


@pytest.mark.proves("LIFE-17", "LIFE-08")
@pytest.mark.proves("LIFE-16")
async def test_cancel_siblings_cuts_off_the_others_and_labels_their_results(batches: Interlock) -> None:
    policy = BatchPolicy(sibling_failure="cancel_siblings")
    heard: list[Event] = []
    batches.listen(heard.append)
    task = asyncio.create_task(batches.batch(failing(batches), policy))
    await until(lambda: len(running) == 4)
    gates[0].set()
    results = await task
    assert [code(result) for result in results] == ["E3411", "E3412", "E3412", "E3412", "E3412"]
    ends = [one.invocation_id for one in heard if one.type == "tool.result.created"]
    assert sorted(ends) == sorted(result.invocation_id for result in results)
    assert [result.source for result in results] == ["compute"] + ["synthetic"] * 4
    assert [result.metadata.get("synthetic_cause") for result in results] == [None] + ["sibling_error"] * 4
    assert all(len(records(batches, result.invocation_id)) == 1 for result in results)


@pytest.mark.proves("LIFE-17")
async def test_cancel_dependent_spares_those_that_do_not_depend(batches: Interlock) -> None:
    policy = BatchPolicy(sibling_failure="cancel_dependent", depends_on={1: (0,), 4: (1,)})
    task = asyncio.create_task(batches.batch(failing(batches), policy))
    await until(lambda: len(running) == 4)
    gates[0].set()
    await until(lambda: 1 not in running)
    for number in (2, 3):
        gates[number].set()
    results = await task
    assert [code(result) for result in results] == ["E3411", "E3412", None, None, "E3412"]


@pytest.mark.proves("LIFE-17")
async def test_ignore_lets_everybody_finish(batches: Interlock) -> None:
    task = asyncio.create_task(batches.batch(failing(batches)))
    await release([0, 1, 2, 3, 9], task.done)
    assert [code(result) for result in await task] == ["E3411", None, None, None, None]


@pytest.mark.proves("LIFE-16", "LIFE-17")
@pytest.mark.parametrize(("interrupt", "codes"), [("cancel", ["E3703", "E3703"]), ("block", [None, "E3703"])])
async def test_an_interrupt_cancels_or_waits_as_declared(
    batches: Interlock, interrupt: Any, codes: list[str | None]
) -> None:
    stop = asyncio.Event()
    wanted = requests(batches, ["alone", "alone"])
    task = asyncio.create_task(batches.batch(wanted, BatchPolicy(interrupt=interrupt), interrupt=stop))
    await until(lambda: bool(running))
    stop.set()
    if interrupt == "block":
        for _ in range(50):
            await asyncio.sleep(0)
        assert running == {0}, "what runs is left to finish"
        gates[0].set()
    results = await asyncio.wait_for(task, 60)
    assert [code(result) for result in results] == codes
    assert [number for _, number in overlaps] == [0], "the other was never started"
    for result in results[1:] if interrupt == "block" else results:
        assert result.source == "synthetic"
        assert result.document()["metadata"]["synthetic"]
        assert result.document()["metadata"]["synthetic_cause"] == "user_interruption"
    # Of a batch that was interrupted beforehand nothing starts.
    refused = await asyncio.wait_for(batches.batch(requests(batches, ["safe", "alone"]), interrupt=stop), 20)
    assert [code(result) for result in refused] == ["E3703", "E3703"]
    assert len(overlaps) == 1
    # And an event that nobody sets changes nothing.
    gates[0].set()
    (quiet,) = await batches.batch(requests(batches, ["safe"]), interrupt=asyncio.Event())
    assert quiet.unwrap() == 0


@pytest.mark.proves("LIFE-17")
@pytest.mark.parametrize("allowed", [False, True])
async def test_context_modifiers_of_calls_that_overlapped_are_refused_unless_allowed(
    batches: Interlock, allowed: bool
) -> None:
    both = [batches.request("b.modifies", {"text": text}) for text in ("a", "b")]
    results = await batches.batch(both, BatchPolicy(concurrent_modifiers=allowed))
    assert [("context_modifiers" in result.metadata) for result in results] == [allowed, allowed]
    warned = None if allowed else ["CONTEXT_MODIFIERS_REFUSED"]
    assert [result.metadata.get("warnings") for result in results] == [warned, warned]
    (single,) = await batches.batch(both[:1])
    assert single.metadata["context_modifiers"] == {"topic": "a"}

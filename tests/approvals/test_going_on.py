"""A call that was approved goes on: everything that could have changed while it waited is checked again."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any

import pytest
import pytest_asyncio

from interlock import (
    Context,
    Deadline,
    Effect,
    Field,
    Hook,
    HookResult,
    Interlock,
    Precondition,
    Preview,
    tool,
)
from interlock.gateway.hooks import Seen
from interlock.testing import FakeClock
from tests.sample import Text
from tests.support.calls import admit, code, records, until
from tests.support.tickets import ANN, BEN, DAY, ask, opened, outbox, refusal, ticket_of

Json = dict[str, Any]
Read = Annotated[str, Field(description="the version that was read", examples=["1"])]
Forever = Annotated[bool, Field(description="whether it never ends", examples=[False])]

versions: dict[str, int] = {}
published: list[str] = []
left_s: list[float] = []


@tool(
    version="1.0.0", mutation_class="write_irreversible", namespace="demo", effects=[Effect("doc:{name}", "UPDATE")],
    preconditions=[Precondition("doc:{name}", "{seen}")],
)  # fmt: skip
async def publish(name: Text, seen: Read) -> str:
    """Publish a document as it was read."""
    published.append(name)
    return name


@publish.preview
def _(name: str, seen: str) -> Preview:
    return Preview(impact=f"everybody would read {name}")


@publish.version_of
def _(resource: str) -> int | None:
    return versions.get(resource.removeprefix("doc:"))


@tool(
    version="1.0.0", mutation_class="write_irreversible", namespace="demo", effects=[Effect("mail:{to}", "CREATE")],
    timeout_s=4, estimated_cost=0.6,
)  # fmt: skip
async def linger(ctx: Context, to: Text, forever: Forever = False) -> str:
    """Note how much time is left, and perhaps never end."""
    left_s.append(ctx.remaining_s)
    ctx.cost(external_api=0.6)
    if forever:
        await asyncio.Event().wait()
    outbox.sent.append((to, ""))
    return to


@linger.preview
def _(to: str, forever: bool) -> Preview:
    return Preview(impact=to)


@pytest.fixture
def clock() -> FakeClock:
    outbox.__init__()
    versions.clear()
    published.clear()
    left_s.clear()
    return FakeClock()


@pytest_asyncio.fixture
async def app(tmp_path: Path, clock: FakeClock) -> AsyncGenerator[Interlock]:
    async with opened(tmp_path / "home", clock) as made:
        await admit(made, publish, linger)
        yield made


async def approved(app: Interlock, called: str, /, **arguments: Any) -> str:
    """The ticket of a call that a person has agreed to and that has not run."""
    pending = await app.call(called, key="k", **arguments)
    await app.approvals.approve(ticket_of(pending), by=BEN)
    return ticket_of(pending)


# Preconditions


@pytest.mark.proves("HITL-10")
@pytest.mark.parametrize(
    ("now", "refused"), [(2, "E3410 CONFLICT"), (None, "E3410 CONFLICT"), (1, None)], ids=["changed", "gone", "same"]
)
async def test_a_precondition_is_checked_again_after_the_approval(
    app: Interlock, clock: FakeClock, now: int | None, refused: str | None
) -> None:
    versions["plan"] = 1
    ticket = await approved(app, "demo.publish", name="plan", seen="1")
    clock.advance(3600)
    if now is None:
        del versions["plan"]
    else:
        versions["plan"] = now
    result = await app.approved_calls.resume(ticket)
    if refused is None:
        assert (result.unwrap(), published) == ("plan", ["plan"])
        return
    assert result.error is not None
    assert f"{result.error.code} {result.error.row.error_code}" == refused
    assert published == []
    # It was good for one attempt at that state: whoever sends the call again asks a person again.
    assert (await app.approvals.show(ticket)).state == "USED"
    again = await app.call("demo.publish", name="plan", seen="1", key="k")
    assert ticket_of(again) != ticket
    assert published == []


@pytest.mark.proves("HITL-10")
async def test_a_document_that_must_be_there_and_is_gone_after_the_approval_is_a_failed_precondition(
    app: Interlock, clock: FakeClock
) -> None:
    versions["plan"] = 1
    ticket = await approved(app, "demo.publish", name="plan", seen="*")
    clock.advance(3600)
    del versions["plan"]
    result = await app.approved_calls.resume(ticket)
    assert result.error is not None
    assert (result.error.code, result.error.row.error_code) == ("E3411", "PRECONDITION_FAILED")
    assert published == []


# Time and budgets


@pytest.mark.proves("HITL-10")
async def test_waiting_takes_none_of_the_time_that_the_call_has(app: Interlock, clock: FakeClock) -> None:
    ticket = await approved(app, "demo.linger", to="carl")
    clock.advance(3 * 3600)  # the tool has 4 s
    assert (await app.approved_calls.resume(ticket)).ok
    assert left_s == [4.0]


@pytest.mark.proves("HITL-10")
async def test_a_call_that_goes_on_ends_when_its_time_is_up(app: Interlock, clock: FakeClock) -> None:
    pending = await app.call("demo.linger", to="carl", forever=True, key="k", timeout_s=0.25)
    await app.approvals.approve(ticket_of(pending), by=BEN)
    clock.advance(3 * 3600)
    going_on = asyncio.create_task(app.approved_calls.resume(ticket_of(pending)))
    await until(lambda: left_s)
    clock.advance(0.25)
    async with asyncio.timeout(60):
        result = await going_on
    assert (code(result), left_s, outbox.sent) == ("E3402", [0.25], [])


@pytest.mark.proves("HITL-10")
async def test_a_call_whose_callers_own_deadline_passed_while_it_waited_does_not_start(
    app: Interlock, clock: FakeClock
) -> None:
    until_then = Deadline(at=clock.monotonic_s + 4)
    pending = await app.call("demo.mail", to="carl", key="k", deadline=until_then)
    await app.approvals.approve(ticket_of(pending), by=BEN)
    clock.advance(4)
    late = await app.call("demo.mail", to="carl", key="k", deadline=until_then)
    assert (code(late), outbox.sent) == ("E3402", [])


@pytest.mark.proves("HITL-10")
async def test_a_budget_that_is_used_up_while_a_call_waits_stops_it(tmp_path: Path, clock: FakeClock) -> None:
    async with opened(tmp_path / "home", clock, budgets=[{"per": "tenant", "limit": 1.0}]) as app:
        await admit(app, linger)
        first = await app.call("demo.linger", to="carl", key="1")
        second = await app.call("demo.linger", to="dora", key="2")
        for pending in (first, second):
            await app.approvals.approve(ticket_of(pending), by=BEN)
        assert (await app.approved_calls.resume(ticket_of(first))).ok
        refused = await app.approved_calls.resume(ticket_of(second))
        assert code(refused) == "E3210"
        assert outbox.sent == [("carl", "")]


async def test_of_two_approved_calls_that_take_the_last_use_of_a_standing_approval_the_other_runs_when_tried_again(
    app: Interlock, clock: FakeClock
) -> None:
    """An attempt that loses the race is on record as a failure that allows another; nothing of the call began."""
    numbers = itertools.count()
    while True:
        number = next(numbers)
        tickets = [await ask(app, key=f"{key}{number}") for key in "ab"]
        for ticket in tickets:
            await app.approvals.approve(ticket, by=BEN)
        bounds = {"to": "carl", "note": "*"}
        standing = await app.standing_approvals.grant(
            "demo.mail", by=BEN, caller=ANN, arguments=bounds, uses=1, expires_ms=clock.now_ms + 60_000
        )
        before = len(outbox.sent)
        first = await asyncio.gather(*(app.approved_calls.resume(ticket) for ticket in tickets))
        if not all(one.ok for one in first):
            break
        # On a busy machine one of them may look only when the use is gone; then its own approval counts.
    assert sorted(str(code(one)) for one in first) == ["E3410", "None"]
    (lost,) = [ticket for ticket, one in zip(tickets, first, strict=True) if not one.ok]
    (won,) = [ticket for ticket in tickets if ticket != lost]
    assert len(outbox.sent) == before + 1
    assert (await app.approvals.show(lost)).state == "APPROVED", "its own approval was not used"
    assert (await app.approved_calls.resume(lost)).ok
    assert len(outbox.sent) == before + 2
    calls = {ticket: (await app.approvals.show(ticket)).call for ticket in tickets}
    ended = {ticket: records(app, call) for ticket, call in calls.items()}
    assert [(one["status"], one["approvalTicketId"]) for one in ended[won]] == [("SUCCESS", standing.id)]
    refused, ran = ended[lost]
    assert (refused["status"], refused["error_code"]) == ("ERROR", "E3410")
    assert refused["approvalTicketId"] is None, "it used neither approval"
    assert "approval" not in refused
    assert (ran["status"], ran["approvalTicketId"]) == ("SUCCESS", lost)
    (intent,) = records(app, calls[lost], kind="intent")
    assert intent["approvalTicketId"] == lost
    assert [(await app.approvals.show(ticket)).state for ticket in (won, lost)] == ["VOID", "USED"]
    for ticket in tickets:
        assert (await refusal(app.approved_calls.resume(ticket))).code == "E3411"


@pytest.mark.proves("HITL-10")
async def test_silence_ends_a_call_with_approval_rejected(app: Interlock, clock: FakeClock) -> None:
    pending = await app.call("demo.mail", to="carl", key="k")
    clock.advance(DAY)
    await app.approvals.sweep()
    [closed] = [one for one in records(app, kind="closed") if one["call"] == pending.invocation_id]
    assert closed["error_class"] == "approval_rejected"
    for result in (await app.wait(pending), await app.call("demo.mail", to="carl", key="k")):
        assert result.error is not None
        assert (result.state, result.error.code, result.error.row.error_class) == (
            "denied", "E3209", "approval_rejected",
        )  # fmt: skip
    assert outbox.sent == []


# What the reviewer saw


def sha256(value: Json) -> str:
    """The digest of an input, made without the product's own functions."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def rewriting(app: Interlock) -> list[str]:
    """A hook that sends every mail to the name in the list."""
    name = ["xaver"]

    def update(_: Seen) -> HookResult:
        return HookResult(updated_input={"to": name[0], "note": "none"})

    app.hook(Hook(id="rewrite", when="pre", tools="demo.mail", run=update))
    return name


@pytest.mark.proves("HITL-08")
async def test_an_approval_is_of_the_input_as_the_hooks_left_it(app: Interlock) -> None:
    rewriting(app)
    ticket = await ask(app, to="carl")
    shown = (await app.approvals.show(ticket)).document()
    seen = sha256({"to": "xaver", "note": "none"})
    assert (shown["params"]["to"], shown["input_digest"]) == ("xaver", seen)
    assert [change["resource"] for change in shown["preview"]["predicted_effects"]] == ["mail:xaver"]
    await app.approvals.approve(ticket, by=BEN)
    [agreed] = [one for one in records(app, kind="approval") if one["act"] == "approved"]
    assert agreed["digest"] == seen
    assert (await app.approved_calls.resume(ticket)).ok
    assert outbox.sent == [("xaver", "none")]
    # The caller's own input stays on record as it was sent.
    [intent] = records(app, kind="intent")
    assert (intent["approvalTicketId"], intent["inputHash"]) == (ticket, sha256({"to": "carl"}))
    assert (await app.approvals.show(ticket)).document()["input_digest"] == seen


@pytest.mark.proves("HITL-08")
@pytest.mark.parametrize("goes_on", ["by the desk", "by its caller"])
async def test_a_hook_that_changes_the_input_after_the_approval_voids_it(app: Interlock, goes_on: str) -> None:
    name = rewriting(app)
    ticket = await ask(app, to="carl")
    await app.approvals.approve(ticket, by=BEN)
    name[0] = "yvonne"
    if goes_on == "by the desk":
        result = await app.approved_calls.resume(ticket)
    else:
        result = await app.call("demo.mail", to="carl", key="k")
    assert ticket_of(result) != ticket
    assert (await app.approvals.show(ticket)).state == "VOID"
    assert (await app.approvals.show(ticket_of(result))).params["to"] == "yvonne"
    assert outbox.sent == []
    # With the hook back as it was, the old approval is still void.
    name[0] = "xaver"
    assert (await refusal(app.approved_calls.resume(ticket))).code == "E3411"
    assert (await app.call("demo.mail", to="carl", key="k")).pending
    assert outbox.sent == []


@pytest.mark.proves("HITL-08")
async def test_a_hook_that_is_added_after_the_approval_voids_it(app: Interlock) -> None:
    ticket = await ask(app, to="carl")
    await app.approvals.approve(ticket, by=BEN)
    rewriting(app)
    assert (await app.approved_calls.resume(ticket)).pending
    assert (await app.approvals.show(ticket)).state == "VOID"
    assert outbox.sent == []

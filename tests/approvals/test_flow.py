"""Calls that wait for a person, through the doors that callers and reviewers use: every clause, and attacks on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import pytest_asyncio

from interlock import (
    Caller,
    Effect,
    Failure,
    Field,
    Hook,
    HookResult,
    Interlock,
    Preview,
    Result,
    Tool,
    demo_suspects,
    demo_tools,
    tool,
)
from interlock.api.calls import Calls
from interlock.approvals.ticket import Ticket
from interlock.audit.chain import verify
from interlock.audit.decisions import decision_of
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.call.events import Event
from interlock.contract.manifest import Approval, ApprovalStep
from interlock.contract.standard.calls import ToolPermissionDecision
from interlock.contract.standard.declarations import ToolPermissionProfile
from interlock.contract.standard.export import permission_profile, shown
from interlock.core.clock import iso
from interlock.data.canonical import digest
from interlock.gateway import idempotency
from interlock.gateway.hooks import Seen
from interlock.store.homes import home_at
from interlock.testing import FakeClock
from tests import sample
from tests.support.calls import admit, code, records
from tests.support.identities import AGENT, USER
from tests.support.stores import first_inserted
from tests.support.tickets import (
    ADA,
    ANN,
    ANYTHING,
    BEN,
    BOT,
    DAY,
    EVE,
    MAY,
    Private,
    Text,
    ask,
    opened,
    outbox,
    refusal,
    ticket_of,
)

Json = dict[str, Any]


@tool(
    version="1.1.0", mutation_class="write_irreversible", namespace="demo", name="mail",
    effects=[Effect("mail:{to}", "CREATE")],
)  # fmt: skip
async def newer_mail(to: Text, note: Private = "none") -> str:
    """Send a mail with a private note, the newer way."""
    outbox.sent.append((f"newer {to}", note))
    return to


@newer_mail.preview
async def _(to: str, note: str) -> Preview:
    return Preview(impact=f"{to} would get a mail")


@tool(version="1.0.0", mutation_class="write_irreversible", namespace="demo", effects=[Effect("mail:{to}", "CREATE")])
async def misdirected(to: Text) -> str:
    """Send a mail that does not arrive."""
    raise Failure("E3411", "no such mailbox")


@misdirected.preview
async def _(to: str) -> Preview:
    return Preview(impact=f"{to} would get a mail")


@tool(version="1.0.0", mutation_class="read_only", namespace="demo")
async def looked_up(name: Annotated[str, Field(description="whose address", examples=["ann"])]) -> str:
    """Look an address up."""
    return f"{name} Street"


@tool(version="1.0.0", mutation_class="write_irreversible", namespace="demo", effects=[Effect("mail:all", "CREATE")])
async def postless(to: Annotated[str | None, Field(description="whom", examples=["carl"])] = None) -> str:
    """Send a mail to somebody or to all."""
    return to or "all"


@postless.preview
async def _(to: str | None) -> Preview:
    return Preview(impact="a mail would be sent")


@pytest.fixture
def clock() -> FakeClock:
    outbox.__init__()
    sample.reset()
    return FakeClock()


@pytest_asyncio.fixture
async def app(tmp_path: Path, clock: FakeClock) -> AsyncGenerator[Interlock]:
    async with opened(tmp_path / "home", clock) as made:
        yield made
    verdict = verify(home_at(tmp_path / "home"))
    assert verdict.intact, verdict.faults


def acts(app: Interlock) -> list[str]:
    return [record["act"] for record in records(app, kind="approval")]


# Asking


@pytest.mark.proves("HITL-03")
async def test_a_gated_call_opens_a_ticket_and_answers_pending_with_nothing_run(
    app: Interlock, clock: FakeClock, tmp_path: Path
) -> None:
    secret = "s3cret-note-of-ann"
    events: list[str] = []
    app.listen(lambda event: events.append(event.type))
    result = await app.call("demo.mail", to="carl", note=secret, key="k")
    assert (result.state, code(result), result.ok) == ("awaiting_approval", "E3208", False)
    pending = result.document()["pending"]
    expires = iso(clock.now_ms + DAY * 1000)
    assert pending["code"] == "APPROVAL_REQUIRED"
    assert pending["expiresAt"] == expires
    assert pending["pollEndpoint"] == f"/v1/approvals/{pending['ticketId']}"
    assert not result.document()["is_error"]
    ticket = (await app.approvals.show(pending["ticketId"])).document()
    assert ticket["status"] == "PENDING"
    assert (ticket["toolId"], ticket["version"], ticket["operation"]) == ("demo.mail", "1.0.0", "invoke")
    assert (ticket["requestedBy"], ticket["requestedAt"], ticket["expiresAt"]) == (ANN, iso(clock.now_ms), expires)
    assert [step["group"] for step in ticket["escalationChain"]] == ["approvers", "managers", "admins"]
    assert ticket["params"]["to"] == "carl"
    assert ticket["preview"]["preconditions"] == {"reachable": True}
    assert ticket["preview"]["predicted_effects"][0]["resource"] == "mail:carl"
    [record] = records(app, kind="pending")
    assert record["states"][-1] == "awaiting_approval"
    assert (record["approvalTicketId"], record["authDecision"]) == (ticket["id"], "REQUIRES_APPROVAL")
    assert "tool.permission.requested" in events
    assert outbox.sent == []
    assert app.journal.reader.all("SELECT channel, state FROM notification") == [("chat", "due")]
    await app.journal.drain()
    for file in (tmp_path / "home").rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes(), file


async def test_a_call_sent_again_while_it_waits_is_the_same_call(app: Interlock) -> None:
    first = await app.call("demo.mail", to="carl", key="k")
    again = await asyncio.gather(*(app.call("demo.mail", to="carl", key="k") for _ in range(5)))
    assert {one.invocation_id for one in again} == {first.invocation_id}
    assert {ticket_of(one) for one in again} == {ticket_of(first)}
    assert len(await app.approvals.list()) == 1


@pytest.mark.part_of("HITL-02", rest="composites, sagas and fallbacks, which do not exist yet")
async def test_nothing_opens_the_gate_of_what_cannot_be_undone(tmp_path: Path, clock: FakeClock) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "policy.cedar").write_text(ANYTHING)
    settings: Json = {"environment": "local", "theta_auto": 0, "sigma_critical": "system"}
    almighty = Caller(id="local:root", trust=100, scopes=frozenset({"*"}), groups=frozenset({"admins"}))
    async with opened(home, clock, **settings) as app:
        app.hook(Hook(id="wave", when="pre", run=lambda _: HookResult(permission="allow")))
        assert (await app.call("demo.mail", to="a", key="1", caller=almighty)).pending
        assert (await app.call("demo.mail", to="b", key="2")).pending
        batch = await app.batch([app.request("demo.mail", {"to": name}, key=name) for name in "cd"])
        assert all(one.pending for one in batch)
        nested = await app.call("demo.forward", to="e", key="3")
        assert code(nested) == "E3208"
        assert len(await app.approvals.list()) == 5
        assert outbox.sent == []


@pytest.mark.part_of("HITL-02", rest="composites, sagas and fallbacks, which do not exist yet")
@pytest.mark.supports("EFFECT-01")
async def test_an_irreversible_tool_without_a_preview_is_not_admitted(app: Interlock) -> None:
    @tool(version="1.0.0", mutation_class="write_irreversible", namespace="demo", effects=[Effect("x:{to}", "CREATE")])
    async def blind(to: Text) -> str:
        """Do something nobody can look at first."""
        return to

    admission = await app.offer(blind, "library:")
    assert not admission.admitted
    assert "preview" in str(admission.verdict.failure("demo.blind").message)


@pytest.mark.part_of(
    "HITL-11", rest="composites, sagas, fallbacks, self-healing, agent-made tools and kits, which do not exist yet"
)
async def test_asking_for_all_writes_stops_every_write_before_it_changes_anything(
    tmp_path: Path, clock: FakeClock
) -> None:
    home = tmp_path / "home"
    async with opened(home, clock) as app:
        done = await app.call("demo.increment", name="a", key="before")
        assert done.ok
    async with opened(home, clock, ask_all_writes=True) as app:
        assert (await app.call("demo.add", a=1)).ok
        waiting = [
            await app.call("demo.increment", name="a", key="1"),
            await app.call("demo.send", to="x", key="2"),
            await app.call("demo.forward", to="x", key="3"),
            *await app.batch([app.request("demo.increment", {"name": "a"}, key="4")]),
            await app.undo(done.invocation_id, key="5"),
        ]
        assert all(one.pending for one in waiting)
        assert (sample.world.runs, sample.world.counters, outbox.sent) == (1, {"a": 1}, [])
        # The outer call is agreed to; the one that it makes is asked for on its own.
        await app.approvals.approve(ticket_of(waiting[2]), by=BEN)
        assert code(await app.approved_calls.resume(ticket_of(waiting[2]))) == "E3208"
        assert outbox.sent == []
        undo = ticket_of(waiting[4])
        assert (await app.approvals.show(undo)).operation == "compensate"
        refused = await refusal(app.approvals.approve(undo, by=BEN, edit={"by": 100}))
        assert refused.code == "E3411"
        await app.approvals.approve(undo, by=BEN)
        assert (await app.approved_calls.resume(undo)).ok
        assert sample.world.counters == {"a": 0}


# Deciding


@pytest.mark.proves("HITL-10")
async def test_an_approved_call_goes_on_as_the_same_call_and_runs_once(app: Interlock, clock: FakeClock) -> None:
    pending = await app.call("demo.mail", to="carl", key="k")
    ticket = await app.approvals.approve(ticket_of(pending), by=BEN, comment="fine")
    assert (ticket.state, ticket.resolved_by) == ("APPROVED", BEN.id)
    assert outbox.sent == []
    clock.advance(3 * 3600)  # far more than the tool's own timeout
    result = await app.wait(pending)
    assert result.unwrap() == "carl"
    assert result.invocation_id == pending.invocation_id
    assert outbox.sent == [("carl", "none")]
    [closed] = [one for one in records(app, kind="closed") if one["call"] == pending.invocation_id]
    assert closed["approvalTicketId"] == ticket.id
    assert closed["states"] == [
        "planned", "selected", "arguments_ready", "awaiting_approval", "approved", "queued", "running", "succeeded",
    ]  # fmt: skip
    assert closed["phases"] == ["request", "validate", "authorize", "execute", "verify", "return"]
    # Neither the caller nor a reviewer makes it run again.
    assert (await app.call("demo.mail", to="carl", key="k")).replayed
    assert (await refusal(app.approved_calls.resume(ticket.id))).code == "E3411"
    assert (await refusal(app.approvals.approve(ticket.id, by=BEN))).code == "E3411"
    assert len(outbox.sent) == 1
    assert acts(app) == ["approved", "used", "refused"]


@pytest.mark.proves("HITL-10")
async def test_a_denied_call_ends_with_approval_rejected_and_never_runs(app: Interlock) -> None:
    pending = await app.call("demo.mail", to="carl", key="k")
    await app.approvals.deny(ticket_of(pending), by=BEN, comment="not today")
    for result in (await app.wait(pending), await app.call("demo.mail", to="carl", key="k")):
        assert (result.state, code(result)) == ("denied", "E3209")
        assert result.error is not None
        assert result.error.row.error_class == "approval_rejected"
        assert "not today" in result.error.message
    [closed, *_] = records(app, kind="closed")
    assert (closed["call"], closed["error_class"]) == (pending.invocation_id, "approval_rejected")
    assert (await refusal(app.approvals.approve(ticket_of(pending), by=BEN))).code == "E3411"
    assert (await refusal(app.approved_calls.resume(ticket_of(pending)))).code == "E3209"
    assert outbox.sent == []


@pytest.mark.proves("HITL-10")
async def test_a_scope_that_is_taken_away_while_a_call_waits_is_missed_when_it_goes_on(
    tmp_path: Path, clock: FakeClock
) -> None:
    @tool(
        version="1.0.0", mutation_class="write_irreversible", namespace="demo", scopes=["mail:send"],
        effects=[Effect("mail:{to}", "CREATE")],
    )  # fmt: skip
    async def guarded(to: Text) -> str:
        """Send a mail, for those who may."""
        outbox.sent.append((to, ""))
        return to

    @guarded.preview
    def _(to: str) -> Preview:
        return Preview(impact=to)

    def say(scopes: str) -> None:
        people = f'[[principal]]\nid = "local:ann"\nkind = "human"\ntrust = 90\nscopes = [{scopes}]\n'
        (tmp_path / "home" / "principals.toml").write_text(people)

    async with opened(tmp_path / "home", clock) as app:
        await admit(app, guarded)
        say('"mail:send"')
        clock.advance(1)
        pending = await app.call("demo.guarded", to="carl", key="k")
        ticket = await app.approvals.approve(ticket_of(pending), by=BEN)
        say("")
        clock.advance(1)
        result = await app.approved_calls.resume(ticket.id)
        assert result.error is not None
        assert (result.error.code, result.error.row.error_code) == ("E3206", "AUTHORIZATION_DENIED")
        assert (await app.approvals.show(ticket.id)).state == "VOID"
        assert [one["status"] for one in records(app, kind="closed") if one["call"] == pending.invocation_id] == [
            "ERROR"
        ]
        # Given back, the scope does not bring the approval back.
        say('"mail:send"')
        clock.advance(1)
        assert (await app.call("demo.guarded", to="carl", key="k")).pending
        assert outbox.sent == []


@pytest.mark.proves("HITL-10")
async def test_a_token_that_is_revoked_while_a_call_waits_ends_it(app: Interlock, clock: FakeClock) -> None:
    app.issuer_keys.init("ES256")
    for did, kind in ((USER, "human"), (AGENT, "agent")):
        identity = Identity(did=did, kind=kind, name=kind, trust=90, groups=frozenset({"approvers"}))  # pyright: ignore[reportArgumentType]
        await app.identities.register(identity, by="test")
    operator = Caller(id="local:operator", scopes=frozenset({"tokens:issue"}))
    grant = [ToolGrant("demo.*", "^1.0.0")]
    token = await app.tokens.issue(subject=AGENT, user=USER, by=operator, scopes=[], tools=grant, ttl_s=600)
    pending = await app.call("demo.mail", to="carl", key="k", token=token)
    ticket = await app.approvals.show(ticket_of(pending))
    assert ticket.expires_ms == clock.now_ms + 600_000  # nobody is asked for longer than the token lasts
    assert (ticket.caller, ticket.requester) == (USER, AGENT)
    # The token's holder is an agent, whatever groups it is in.
    agent = await app.caller_of(token)
    assert (await refusal(app.approvals.approve(ticket.id, by=agent))).code == "E3206"
    await app.approvals.approve(ticket.id, by=BEN)
    await app.tokens.revoke(token, reason="lost", by=operator)
    clock.advance(1)
    result = await app.approved_calls.resume(ticket.id)
    assert result.error is not None
    assert (result.error.code, result.error.row.error_code) == ("E3201", "AUTHORIZATION_DENIED")
    assert (await app.approvals.show(ticket.id)).state == "VOID"
    assert outbox.sent == []


@pytest.mark.proves("HITL-06")
async def test_only_a_person_who_was_told_decides_and_every_other_attempt_is_on_record(
    app: Interlock, clock: FakeClock
) -> None:
    ticket = await ask(app)
    ann = Caller(id=ANN, groups=frozenset({"approvers", "managers", "admins"}))
    by_agent = Caller(id=BEN.id, agent="did:example:bot", groups=frozenset({"approvers"}))
    posing = Caller(id="did:example:bot", agent=ANN, groups=frozenset({"approvers"}))
    service = Caller(id="svc:ci", kind="service", groups=frozenset({"approvers"}))
    intruders = (ann, by_agent, posing, service, BOT, MAY, ADA, EVE)
    for by in intruders:
        for attempt in (
            app.approvals.approve(ticket, by=by),
            app.approvals.approve(ticket, by=by, edit={"to": "nobody"}),
            app.approvals.deny(ticket, by=by),
        ):
            assert (await refusal(attempt)).code == "E3206", by.id
    refused = [record for record in records(app, kind="approval") if record["act"] == "refused"]
    assert [record["by"] for record in refused] == [by.acting for by in intruders for _ in range(3)]
    assert {record["approvalTicketId"] for record in refused} == {ticket}
    assert (await app.approvals.show(ticket)).state == "PENDING"
    second = await ask(app, key="second")
    # Once the managers were told, theirs count too; the admins' do not yet.
    clock.advance(3601)
    await app.approvals.sweep()
    assert (await refusal(app.approvals.approve(ticket, by=ADA))).code == "E3206"
    assert (await app.approvals.approve(ticket, by=MAY)).state == "APPROVED"
    # Those of the earlier step may still decide.
    assert (await app.approvals.show(second)).step == 1
    assert (await app.approvals.deny(second, by=BEN)).state == "DENIED"
    assert outbox.sent == []


async def test_two_reviewers_at_the_same_moment_make_one_decision(app: Interlock) -> None:
    for number in range(10):
        ticket = await ask(app, key=f"k{number}")
        also = Caller(id="local:bea", groups=frozenset({"approvers"}))
        found = await asyncio.gather(
            app.approvals.approve(ticket, by=BEN), app.approvals.deny(ticket, by=also), return_exceptions=True
        )
        assert sum(isinstance(one, Ticket) for one in found) == 1
        results = await asyncio.gather(*(app.call("demo.mail", to="carl", key=f"k{number}") for _ in range(4)))
        agreed = (await app.approvals.show(ticket)).state == "USED"
        assert all(one.ok == agreed for one in results)
    assert len(outbox.sent) == acts(app).count("approved")


# Time


@pytest.mark.proves("HITL-04")
async def test_a_late_approval_is_refused_and_silence_is_a_no(app: Interlock, clock: FakeClock) -> None:
    just, late = await ask(app, key="just"), await ask(app, key="late")
    clock.advance(DAY - 0.001)
    await app.approvals.sweep()
    assert (await app.approvals.approve(just, by=BEN)).state == "APPROVED"
    clock.advance(0.001)
    refused = await refusal(app.approvals.approve(late, by=BEN))
    assert refused.code == "E3411"
    assert "nobody decided in time" in refused.message
    assert (await app.approvals.show(late)).state == "AUTO_DENIED"
    # What was approved in time and not run in time does not run either.
    assert code(await app.approved_calls.resume(just)) == "E3209"
    assert code(await app.call("demo.mail", to="carl", key="just")) == "E3209"
    assert (await app.approvals.show(just)).state == "LAPSED"
    assert outbox.sent == []
    assert sorted(
        one["approvalTicketId"] for one in records(app, kind="closed") if one["source"] == "synthetic"
    ) == sorted([just, late])


@pytest.mark.proves("HITL-04")
async def test_an_approval_that_expires_while_its_call_is_on_its_way_is_not_used(
    app: Interlock, clock: FakeClock
) -> None:
    ticket = await ask(app)
    await app.approvals.approve(ticket, by=BEN, edit={"to": "dora"})
    clock.advance(DAY - 1)
    # The caller's input is checked in time, the reviewer's when the ticket's time is up.
    outbox.checks = [lambda: None, lambda: clock.advance(1)]
    assert code(await app.approved_calls.resume(ticket)) == "E3209"
    assert (outbox.checks, outbox.sent) == ([], [])
    assert (await app.approvals.show(ticket)).state == "LAPSED"


@pytest.mark.proves("HITL-04")
@pytest.mark.parametrize("approved", [True, False])
async def test_a_ticket_expires_though_nobody_was_there(tmp_path: Path, clock: FakeClock, approved: bool) -> None:
    home = tmp_path / "home"
    async with opened(home, clock) as app:
        ticket = await ask(app)
        if approved:
            await app.approvals.approve(ticket, by=BEN)
    clock.advance(DAY)
    async with opened(home, clock) as app:
        assert (await app.approvals.show(ticket)).state == ("LAPSED" if approved else "AUTO_DENIED")
        assert await app.approved_calls.resume_all() == []
        assert code(await app.call("demo.mail", to="carl", key="k")) == "E3209"
        assert outbox.sent == []


@pytest.mark.proves("HITL-05")
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
async def test_each_step_is_told_once_and_at_its_time(
    tmp_path: Path, clock: FakeClock, length: int, fraction: float
) -> None:
    timeout = 9_000
    chain = tuple(ApprovalStep(group=f"g{place}", after_seconds=None) for place in range(length))
    approval = Approval(timeout_seconds=timeout, escalation_fraction=fraction, chain=chain)
    due = [fraction * timeout * place / length for place in range(length)]
    await follow_chain(tmp_path / "home", clock, due, timeout, approval=approval)


@pytest.mark.proves("HITL-05")
async def test_the_default_chain_is_approver_manager_admin_and_a_no_after_a_day(
    tmp_path: Path, clock: FakeClock
) -> None:
    await follow_chain(tmp_path / "home", clock, [0, 3600, 14_400], DAY)


async def follow_chain(home: Path, clock: FakeClock, due: list[float], lasts_s: int, **settings: Any) -> None:
    """Follow a ticket's time in steps of a millisecond around every moment that counts, restarting at each."""
    began = clock.now_ms
    async with opened(home, clock, **settings) as app:
        ticket = await ask(app)
    moments = [when for place, at in enumerate(due) for when in ((at, at + 0.001) if place else (0.0,))]
    for moment in [*moments, lasts_s - 0.001, lasts_s, lasts_s + 1]:
        clock.advance(moment - (clock.now_ms - began) / 1000)
        async with opened(home, clock, **settings) as app:  # opening sweeps, and a sweep more changes nothing
            assert await app.approvals.sweep() == []
            assert await app.approvals.sweep() == []
            by = first_inserted(app.home)
            told = app.journal.reader.all(f"SELECT step FROM notification WHERE ticket = ? ORDER BY {by}", (ticket,))
            reached = sum(moment > at for at in due[1:]) + 1
            assert [step for (step,) in told] == list(range(reached)), moment
            assert (await app.approvals.show(ticket)).state == ("PENDING" if moment < lasts_s else "AUTO_DENIED")
    async with opened(home, clock, **settings) as app:
        escalated = [one for one in records(app, kind="approval") if one["act"] == "escalated"]
        assert [one["step"] for one in escalated] == list(range(1, len(due)))
        assert [one["timestamp"] for one in escalated] == [iso(began + round(at * 1000) + 1) for at in due[1:]]
        assert acts(app).count("auto_denied") == 1


@pytest.mark.proves("HITL-05")
@pytest.mark.parametrize(("fraction", "due_s"), [(1.0, 300), (0.2, 60)])
async def test_a_manifest_has_a_timeout_and_a_fraction_of_its_own(
    app: Interlock, clock: FakeClock, fraction: float, due_s: int
) -> None:
    chain = (ApprovalStep(group="lawyers", after_seconds=None), ApprovalStep(group="board", after_seconds=None))

    @tool(
        version="1.0.0", mutation_class="write_irreversible", namespace="demo", effects=[Effect("deed:{to}", "CREATE")],
        approval=Approval(timeout_seconds=600, escalation_fraction=fraction, chain=chain),
    )  # fmt: skip
    async def sign(to: Text) -> str:
        """Sign a deed in somebody's favour."""
        return to

    @sign.preview
    def _(to: str) -> Preview:
        return Preview(impact=to)

    await admit(app, sign)
    began = clock.now_ms
    ticket = await app.approvals.show(ticket_of(await app.call("demo.sign", to="x", key="k")))
    steps = ticket.document()["escalationChain"]
    assert [(step["group"], step["at"]) for step in steps] == [
        ("lawyers", iso(began)), ("board", iso(began + due_s * 1000)),
    ]  # fmt: skip
    clock.advance(due_s)
    assert await app.approvals.sweep() == []
    clock.advance(0.001)
    assert [one.event for one in await app.approvals.sweep()] == ["APPROVAL_ESCALATED"]
    clock.advance(600 - due_s - 0.001)
    assert [one.event for one in await app.approvals.sweep()] == ["APPROVAL_AUTO_DENIED"]


@pytest.mark.proves("HITL-05")
async def test_every_step_is_told_as_an_event_of_its_own(tmp_path: Path, clock: FakeClock) -> None:
    chain = tuple(ApprovalStep(group=f"g{place}", after_seconds=None) for place in range(5))
    approval = Approval(timeout_seconds=1000, escalation_fraction=0.5, chain=chain)
    async with opened(tmp_path / "home", clock, approval=approval) as app:
        events: list[tuple[str, Any]] = []
        app.listen(lambda event: events.append((event.type, event.data.get("ticketId"))))
        ticket = await ask(app)
        events.clear()
        for moment in (100.001, 200.001, 300.001, 400.001, 1000.0):
            clock.advance(moment - (clock.monotonic_s - 1000.0))
            await app.approvals.sweep()
            await app.approvals.sweep()
        steps = [one for one in events if one[0].startswith("APPROVAL_")]
        assert steps == [("APPROVAL_ESCALATED", ticket)] * 4 + [("APPROVAL_AUTO_DENIED", ticket)]


@pytest.mark.proves("HITL-05")
async def test_time_is_told_as_events_and_a_manifest_has_a_chain_of_its_own(app: Interlock, clock: FakeClock) -> None:
    chain = (ApprovalStep(group="lawyers", after_seconds=0), ApprovalStep(group="board", after_seconds=30))

    @tool(
        version="1.0.0", mutation_class="write_irreversible", namespace="demo", effects=[Effect("deed:{to}", "CREATE")],
        approval=Approval(timeout_seconds=60, escalation_fraction=0.5, chain=chain),
    )  # fmt: skip
    async def sign(to: Text) -> str:
        """Sign a deed in somebody's favour."""
        return to

    @sign.preview
    def _(to: str) -> Preview:
        return Preview(impact=to)

    await admit(app, sign)
    events: list[str] = []
    app.listen(lambda event: events.append(event.type))
    ticket = ticket_of(await app.call("demo.sign", to="x", key="k"))
    assert (await refusal(app.approvals.approve(ticket, by=BEN))).code == "E3206"
    clock.advance(31)
    assert [one.event for one in await app.approvals.sweep()] == ["APPROVAL_ESCALATED"]
    clock.advance(29)
    assert [one.event for one in await app.approvals.sweep()] == ["APPROVAL_AUTO_DENIED"]
    assert {"APPROVAL_ESCALATED", "APPROVAL_AUTO_DENIED"} <= set(events)


# Bound to exactly what was seen


@pytest.mark.proves("HITL-08")
async def test_another_input_another_policy_or_another_version_voids_an_approval(
    app: Interlock, clock: FakeClock
) -> None:
    home = app.home

    async def approved(key: str) -> str:
        ticket = await ask(app, key=key)
        await app.approvals.approve(ticket, by=BEN)
        return ticket

    argument = await approved("argument")
    assert (await app.call("demo.mail", to="dora", key="argument")).pending
    private = await approved("private")
    assert (await app.call("demo.mail", to="carl", note="other", key="private")).pending
    policy = await approved("policy")
    home.policy.write_text(home.policy.read_text() + "\n// a later thought\n" + ANYTHING)
    clock.advance(1)
    resumed = await app.approved_calls.resume(policy)
    assert resumed.pending
    assert ticket_of(resumed) != policy
    agent = await approved("agent")
    assert (await app.call("demo.mail", to="carl", key="agent", caller=Caller(id=ANN, agent="did:x:bot"))).pending
    version = await approved("version")
    going_on = await approved("going-on")
    await admit(app, newer_mail)
    clock.advance(1)
    again = await app.call("demo.mail", to="carl", key="version")
    assert (again.pending, again.tool) == (True, "demo.mail@1.1.0")
    assert outbox.sent == []
    for ticket in (argument, private, policy, agent, version):
        assert (await app.approvals.show(ticket)).state == "VOID"
        assert (await refusal(app.approved_calls.resume(ticket))).code == "E3411"
        assert (await refusal(app.approvals.approve(ticket, by=BEN))).code == "E3411"
    # Going on means the version that was approved.
    assert (await app.approved_calls.resume(going_on)).tool == "demo.mail@1.0.0"
    assert outbox.sent == [("carl", "none")]
    # What was given up is closed; what goes on under a new ticket is still the same call.
    closed = {record["call"] for record in records(app, kind="closed")}
    assert {(await app.approvals.show(ticket)).call in closed for ticket in (argument, private, agent, version)} == {
        True
    }
    assert (await app.approvals.show(policy)).call == resumed.invocation_id


@pytest.mark.proves("HITL-08")
async def test_an_approval_serves_nobody_but_the_caller_it_was_given_for(app: Interlock) -> None:
    await app.approvals.approve(await ask(app), by=BEN)
    other = Caller(id="local:zoe", trust=100)
    assert (await app.call("demo.mail", to="carl", key="k", caller=other)).pending
    elsewhere = Caller(id=ANN, tenant="other", trust=100)
    assert (await app.call("demo.mail", to="carl", key="k", caller=elsewhere)).pending
    assert (await app.call("demo.mail", to="carl", key="other")).pending
    assert outbox.sent == []
    assert (await app.call("demo.mail", to="carl", key="k")).ok
    assert len(outbox.sent) == 1


@pytest.mark.proves("HITL-08")
async def test_an_edited_approval_runs_the_edited_input_and_leaves_the_callers_own_on_record(app: Interlock) -> None:
    pending = await app.call("demo.mail", to="carl", note="first-private", key="k")
    ticket = ticket_of(pending)
    for edit in ({"to": 7}, {"no_such": 1}, {"to": None}, {"to": "nobody"}):
        refused = await refusal(app.approvals.approve(ticket, by=BEN, edit=edit))
        assert refused.code == ("E3308" if edit == {"to": "nobody"} else "E3301"), edit
    assert (await app.approvals.show(ticket)).state == "PENDING"
    await app.approvals.approve(ticket, by=BEN, edit={"to": "dora", "note": "second-private"})
    result = await app.approved_calls.resume(ticket)
    assert result.unwrap() == "dora"
    assert result.metadata["input_mutations"] == [
        {"source": "reviewer:local:ben", "pointer": "/note"}, {"source": "reviewer:local:ben", "pointer": "/to"}
    ]  # fmt: skip
    assert outbox.sent == [("dora", "second-private")]
    document = (await app.approvals.show(ticket)).document()
    assert document["user_modified"]
    assert (document["params"]["to"], document["edit"]["params"]["to"]) == ("carl", "dora")
    assert [one["argument"] for one in document["edit"]["changes"]] == ["note", "to"]
    assert "dora" in str(document["edit"]["preview"])
    assert "dora" not in str(document["preview"])
    assert "-private" not in str(document)
    [approved] = [one for one in records(app, kind="approval") if one["act"] == "approved"]
    assert approved["user_modified"]
    assert approved["edited"].keys() == {"sha256"}
    assert approved["editedArguments"] == ["note", "to"]
    # The caller's own input is what its key stands for.
    [waiting], [intent] = records(app, kind="pending"), records(app, kind="intent")
    assert waiting["inputHash"] == intent["inputHash"]
    again = await app.call("demo.mail", to="carl", note="first-private", key="k")
    assert (again.replayed, again.metadata["input_mutations"]) == (True, result.metadata["input_mutations"])
    assert code(await app.call("demo.mail", to="dora", note="second-private", key="k")) == "E3306"
    text = b"".join(row[0] for row in app.journal.reader.all("SELECT body FROM journal"))
    assert b"-private" not in text
    assert len(outbox.sent) == 1


def _footing(seen: Seen) -> HookResult:
    note = str(seen.input.get("note") or "")
    return HookResult(updated_input={**seen.input, "note": note if note.endswith("!") else f"{note}!"})


@pytest.mark.proves("HITL-08")
@pytest.mark.proves("LIFE-05")
async def test_hooks_see_a_reviewers_edit_and_what_they_make_of_it_is_shown_and_runs(app: Interlock) -> None:
    app.hook(Hook(id="footer", when="pre", tools="demo.mail", run=_footing))
    pending = await app.call("demo.mail", to="carl", note="quarterly", key="k")
    ticket = ticket_of(pending)
    await app.approvals.approve(ticket, by=BEN, edit={"to": "dora"})
    document = (await app.approvals.show(ticket)).document()
    assert document["edit"]["params"]["to"] == "dora"
    assert [one["argument"] for one in document["edit"]["changes"]] == ["to"]
    result = await app.approved_calls.resume(ticket)
    assert result.unwrap() == "dora"
    assert outbox.sent == [("dora", "quarterly!")]
    assert "previewDifferences" not in result.metadata
    found = await app.inputs(result.invocation_id)
    assert found.model_input == {"to": "carl", "note": "quarterly"}
    assert (found.permission_input["to"], found.permission_input["note"]) == ("carl", "quarterly!")
    assert (found.call_input["to"], found.call_input["note"]) == ("dora", "quarterly!")
    reviewed = [one for one in found.changes if one["after"] == "call_input"]
    assert [(one["source"], one["pointer"]) for one in reviewed] == [("reviewer:local:ben", "/to")]
    assert [one["output"] for one in result.metadata["hook_outputs"]] == ["updated_input"]


@pytest.mark.supports("LIFE-21")
async def test_what_hooks_say_of_a_reviewers_edit_is_told_under_the_id_of_the_call_that_waits(app: Interlock) -> None:
    app.hook(Hook(id="speaks", when="pre", tools="demo.mail", run=lambda _: HookResult(messages=("mind the gap",))))
    pending = await app.call("demo.mail", to="carl", note="a", key="k")
    heard: list[Event] = []
    app.listen(heard.append)
    await app.approvals.approve(ticket_of(pending), by=BEN, edit={"to": "dora"})
    assert any("hook" in event.type for event in heard)
    assert {event.document()["invocation_id"] for event in heard} == {pending.invocation_id}
    assert (await app.approved_calls.resume(ticket_of(pending))).ok
    assert {event.document()["invocation_id"] for event in heard} == {pending.invocation_id}


@pytest.mark.proves("HITL-08")
async def test_an_edit_that_a_hook_overrules_is_refused_when_it_is_agreed_to(app: Interlock) -> None:
    app.hook(Hook(id="footer", when="pre", tools="demo.mail", run=_footing))
    ticket = ticket_of(await app.call("demo.mail", to="carl", note="a", key="k"))
    refused = await refusal(app.approvals.approve(ticket, by=BEN, edit={"note": "b"}))
    assert refused.code == "E3211"
    assert "`footer` changes `note`" in refused.message
    assert (await app.approvals.show(ticket)).state == "PENDING"
    await app.approvals.approve(ticket, by=BEN, edit={"note": "b!"})
    assert (await app.approved_calls.resume(ticket)).ok
    assert outbox.sent == [("carl", "b!")]


@pytest.mark.proves("HITL-08")
async def test_hooks_that_make_something_else_of_an_edit_after_it_was_agreed_to_stop_the_call(app: Interlock) -> None:
    words = ["x"]

    def changing(seen: Seen) -> HookResult | None:
        return HookResult(updated_input={**seen.input, "note": words[0]}) if seen.input["to"] == "dora" else None

    app.hook(Hook(id="changes", when="pre", tools="demo.mail", run=changing))
    same = await app.call("demo.mail", to="carl", note="a", key="same")
    await app.approvals.approve(ticket_of(same), by=BEN, edit={"to": "dora"})
    ran = await app.approved_calls.resume(ticket_of(same))
    assert outbox.sent == [("dora", "x")]
    sources = {one["pointer"]: one["source"] for one in (await app.inputs(ran.invocation_id)).changes}
    assert (sources["/to"], sources["/note"]) == ("reviewer:local:ben", "reviewer:local:ben+hook:changes")
    outbox.sent.clear()
    pending = await app.call("demo.mail", to="carl", note="a", key="k")
    ticket = ticket_of(pending)
    await app.approvals.approve(ticket, by=BEN, edit={"to": "dora"})
    words[0] = "y"
    tickets = [one.id for one in await app.approvals.list(every=True)]
    result = await app.approved_calls.resume(ticket)
    assert code(result) == "E3211"
    assert result.error is not None
    assert "under a new key" in (result.error.resolution or "")
    assert outbox.sent == []
    assert (await app.approvals.show(ticket)).state == "VOID"
    after = [one.id for one in await app.approvals.list(every=True)]
    assert after == tickets, "no ticket is made for a call that has ended"
    [closed] = [one for one in records(app, kind="closed") if one["call"] == pending.invocation_id]
    assert closed["status"] == "ERROR"
    assert (await app.call("demo.mail", to="carl", note="a", key="again")).pending, "a person is asked anew"


@pytest.mark.proves("HITL-08")
@pytest.mark.parametrize("answer", ["deny", "stop"])
async def test_a_hook_that_says_no_to_a_reviewers_edit_is_heard(app: Interlock, answer: str) -> None:
    def says_no(seen: Seen) -> HookResult | None:
        if seen.input["to"] != "dora":
            return None
        return HookResult(permission="deny") if answer == "deny" else HookResult(stop="not to dora")

    pending = await app.call("demo.mail", to="carl", key="k")
    await app.approvals.approve(ticket_of(pending), by=BEN, edit={"to": "dora"})
    app.hook(Hook(id="no", when="pre", tools="demo.mail", run=says_no))
    result = await app.approved_calls.resume(ticket_of(pending))
    assert code(result) == ("E3206" if answer == "deny" else "E3211")
    assert outbox.sent == []


@pytest.mark.proves("HITL-08")
async def test_a_reviewers_edit_is_judged_by_the_policy_like_any_input(app: Interlock, clock: FakeClock) -> None:
    rule = 'forbid (principal, action == Action::"demo.mail", resource) when { context.arguments.to == "dora" };\n'
    app.home.policy.write_text(ANYTHING + rule)
    clock.advance(1)
    pending = await app.call("demo.mail", to="carl", key="k")
    await app.approvals.approve(ticket_of(pending), by=BEN, edit={"to": "dora"})
    assert code(await app.approved_calls.resume(ticket_of(pending))) == "E3206"
    assert (await app.approvals.show(ticket_of(pending))).state == "VOID"
    assert outbox.sent == []
    [closed] = [one for one in records(app, kind="closed") if one["call"] == pending.invocation_id]
    assert closed["status"] == "ERROR"


@pytest.mark.proves("HITL-08")
async def test_whoever_goes_on_at_the_same_time_runs_it_once(app: Interlock) -> None:
    pending = await app.call("demo.mail", to="carl", key="k")
    ticket = ticket_of(pending)
    await app.approvals.approve(ticket, by=BEN)
    *results, waited = await asyncio.gather(
        *(app.call("demo.mail", to="carl", key="k") for _ in range(8)),
        *(app.approved_calls.resume(ticket) for _ in range(8)),
        *(app.approved_calls.resume_all() for _ in range(4)),
        app.wait(pending),
        return_exceptions=True,
    )
    assert len(outbox.sent) == 1
    assert isinstance(waited, Result)
    answers = [one for one in (*results, waited) if isinstance(one, Result)]
    assert len(answers) >= 9
    # The waiting caller may get the pending result: another one continued the call.
    assert [one.error for one in answers if not one.ok and (one is not waited or ticket_of(one) != ticket)] == []
    assert sum(one.ok and not one.replayed for one in answers) <= 1


@pytest.mark.proves("HITL-08")
async def test_whoever_goes_on_at_the_same_time_after_the_rules_changed_is_told_of_one_new_ticket(
    app: Interlock, clock: FakeClock
) -> None:
    ticket = await ask(app)
    await app.approvals.approve(ticket, by=BEN)
    app.home.policy.write_text(ANYTHING)
    clock.advance(1)
    results = await asyncio.gather(
        app.approved_calls.resume(ticket),
        app.approved_calls.resume(ticket[:-1]),
        app.call("demo.mail", to="carl", key="k"),
    )
    assert len({ticket_of(result) for result in results} - {ticket}) == 1
    assert len(await app.approvals.list()) == 1
    assert outbox.sent == []


@pytest.mark.proves("HITL-08")
async def test_two_processes_that_go_on_at_the_same_time_run_it_once(tmp_path: Path, clock: FakeClock) -> None:
    home = tmp_path / "home"
    async with opened(home, clock) as one, opened(home, clock) as other:
        ticket = await ask(one, timeout_s=30)
        await other.approvals.approve(ticket, by=BEN)
        *calls, first, second = await asyncio.gather(
            one.call("demo.mail", to="carl", key="k", timeout_s=30),
            other.call("demo.mail", to="carl", key="k", timeout_s=30),
            one.approved_calls.resume(ticket),
            other.approved_calls.resume(ticket),
            return_exceptions=True,
        )
        for ended in (*calls, first, second):
            if isinstance(ended, Failure):  # on a busy machine one may come to go on when the call has run
                assert ended not in calls
                assert (ended.code, "is USED" in ended.message) == ("E3411", True)
            else:
                assert not isinstance(ended, BaseException)
                assert ended.unwrap() == "carl"
        assert len(outbox.sent) == 1
    assert verify(home_at(home)).intact


async def test_whoever_waits_while_another_process_goes_on_gets_no_error_and_the_outcome_by_its_key(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    async with opened(home, clock) as one, opened(home, clock) as other:
        pending = await one.call("demo.mail", to="carl", key="k")
        resume = one.approved_calls.resume

        async def too_late(ticket: str) -> Result:
            """Go on only after the other process, which went on when this one had just seen the approval."""
            assert (await other.approved_calls.resume(ticket)).ok
            return await resume(ticket)

        monkeypatch.setattr(one.approved_calls, "resume", too_late)
        await other.approvals.approve(ticket_of(pending), by=BEN)
        assert (await one.wait(pending)).pending
        assert (await one.call("demo.mail", to="carl", key="k")).unwrap() == "carl"
        assert len(outbox.sent) == 1


async def test_a_call_whose_own_call_waits_is_sent_again_and_goes_through(app: Interlock) -> None:
    outer = await app.call("demo.forward", to="carl", key="k")
    assert outer.error is not None
    assert (outer.error.code, outer.error.retryable, outbox.sent) == ("E3208", True, [])
    [inner] = await app.approvals.list()
    assert inner.tool == "demo.mail"
    await app.approvals.approve(inner.id, by=BEN)
    assert (await app.call("demo.forward", to="carl", key="k")).unwrap() == "carl"
    assert (await app.call("demo.forward", to="carl", key="k")).replayed
    assert outbox.sent == [("carl", "none")]


async def test_what_an_agent_asked_for_on_behalf_of_a_local_user_goes_on(app: Interlock) -> None:
    pending = await app.call("demo.mail", to="carl", key="k", caller=Caller(id=ANN, agent="did:example:bot", trust=80))
    await app.approvals.approve(ticket_of(pending), by=BEN)
    assert (await app.approved_calls.resume(ticket_of(pending))).ok


async def test_a_call_that_was_cut_off_is_closed_under_its_approval(tmp_path: Path, clock: FakeClock) -> None:
    async with opened(tmp_path / "home", clock) as app:
        ticket = await ask(app)
        await app.approvals.approve(ticket, by=BEN)
        assert (await app.approved_calls.resume(ticket)).ok
        await app.journal.commit(  # as a process leaves it that dies while the tool runs
            lambda transaction: transaction.execute("UPDATE reservation SET state = 'executing', owner = 'dead'")
        )
        await app.journal.commit(idempotency.find_orphans(app.instance.alive))
        assert records(app, kind="closed")[-1].get("approvalTicketId") == ticket


async def test_an_approval_is_spent_though_the_key_is_free_again(app: Interlock, clock: FakeClock) -> None:
    ticket = await ask(app)
    await app.approvals.approve(ticket, by=BEN)
    assert (await app.call("demo.mail", to="carl", key="k")).ok
    clock.advance(400 * DAY)  # long after the window of its key, and before anybody has cleared it away
    again = await app.call("demo.mail", to="carl", key="k")
    assert ticket_of(again) != ticket
    assert len(outbox.sent) == 1


# In advance


@pytest.mark.proves("HITL-09")
async def test_a_standing_approval_needs_every_bound_and_somebody_who_may(app: Interlock, clock: FakeClock) -> None:
    now = clock.now_ms
    bounds: Json = {"caller": ANN, "arguments": {"to": "carl", "note": "*"}, "uses": 3, "expires_ms": now + 60_000}
    wrong: list[Json] = [
        {"arguments": {}}, {"arguments": {"note": "*"}},
        {"caller": ""}, {"caller": "local:*"}, {"uses": 0}, {"uses": -1}, {"uses": 10**9}, {"expires_ms": now},
        {"expires_ms": now + 91 * DAY * 1000}, {"versions": "*"}, {"arguments": {"to": "*", "note": "*"}},
        {"arguments": {"to": "**", "note": "?*"}},
    ]  # fmt: skip
    for change in wrong:
        assert (await refusal(app.standing_approvals.grant("demo.mail", by=BEN, **(bounds | change)))).code == "E3004"
    for name in ("", "demo.*", "*"):
        assert (await refusal(app.standing_approvals.grant(name, by=BEN, **bounds))).code == "E3101"
    for missing in bounds:
        left: Json = {name: value for name, value in bounds.items() if name != missing}
        with pytest.raises(TypeError):
            await app.standing_approvals.grant("demo.mail", by=BEN, **left)
    own = Caller(id=ANN, groups=frozenset({"approvers"}))
    for by in (own, BOT, EVE):
        assert (await refusal(app.standing_approvals.grant("demo.mail", by=by, **bounds))).code == "E3206"
    assert await app.standing_approvals.list() == []


@pytest.mark.supports("HITL-09")
async def test_a_standing_approval_for_a_directory_covers_no_other_spelling(
    app: Interlock, clock: FakeClock, tmp_path: Path
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to("/etc")
    standing = await app.standing_approvals.grant(
        "demo.mail", by=BEN, caller=ANN, arguments={"to": f"{inside}/*", "note": "*"}, uses=20,
        expires_ms=clock.now_ms + 60_000,
    )  # fmt: skip
    outside = (
        "/../../etc/passwd", "//../x", "/./../x", "/link/passwd", "/a/../../x", " ", "/\0", "/..",
    )  # fmt: skip
    for number, rest in enumerate(outside):
        asked = await app.call("demo.mail", to=f"{inside}{rest}", key=f"k{number}")
        assert asked.pending or not asked.ok
    assert outbox.sent == []
    assert (await app.call("demo.mail", to=f"{inside}/a/./b", key="in")).ok
    assert [(found.id, found.used) for found in await app.standing_approvals.list()] == [(standing.id, 1)]


@tool(version="1.0.0", mutation_class="write_irreversible", namespace="demo", effects=[Effect("stage:all", "UPDATE")])
async def stage(
    files: Annotated[list[str], Field(description="which files", examples=[["a.py"]])],
    groups: Annotated[list[list[str]] | None, Field(description="files by group", examples=[[["a.py"]]])] = None,
    options: Annotated[dict[str, Any] | None, Field(description="how", examples=[{"depth": 1}])] = None,
) -> str:
    """Stage files."""
    outbox.sent.append(("staged", " ".join(files)))
    return "staged"


@stage.preview
async def _(files: list[str], groups: Any, options: Any) -> Preview:
    return Preview(impact=f"{len(files)} files would be staged")


@pytest.mark.proves("HITL-09")
async def test_a_bound_for_each_path_of_a_list_covers_no_other_spelling(
    app: Interlock, clock: FakeClock, tmp_path: Path
) -> None:
    await admit(app, stage)
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to("/etc")
    bound: Json = {"items": f"{inside}/*"}
    arguments = {"files": bound, "groups": {"items": bound}, "options": None}
    granted = await app.standing_approvals.grant(
        "demo.stage", by=BEN, caller=ANN, arguments=arguments, uses=20, expires_ms=clock.now_ms + 60_000
    )
    good = f"{inside}/a"
    outside = ["/../../etc/passwd", "//../x", "/./../x", "/link/passwd", "/a/../../x", " ", "/..", "/\0"]
    wrong: list[Json] = [
        *({"files": [good, f"{inside}{rest}"], "groups": [[good]]} for rest in outside),
        *({"files": [good], "groups": [[good], [good, f"{inside}{rest}"]]} for rest in outside),
        {"files": [], "groups": [[good]]}, {"files": [good], "groups": []}, {"files": [good], "groups": [[good], []]},
        {"files": [good]}, {"files": [good], "groups": [[good]], "options": {}},
    ]  # fmt: skip
    for number, sent in enumerate(wrong):
        asked = await app.call("demo.stage", sent, key=f"k{number}")
        assert asked.pending or not asked.ok, sent
    assert outbox.sent == []
    ran = await app.call("demo.stage", {"files": [good, f"{inside}/b/./c"], "groups": [[good], [good]]}, key="in")
    assert ran.ok, ran.error
    assert [(found.id, found.used) for found in await app.standing_approvals.list()] == [(granted.id, 1)]


@pytest.mark.proves("HITL-09")
async def test_any_value_is_agreed_to_beside_a_bound_only(app: Interlock, clock: FakeClock) -> None:
    await admit(app, stage)
    anything: Json = {"x-any": True}

    def grant(**arguments: Any) -> Any:
        return app.standing_approvals.grant(
            "demo.stage", by=BEN, caller=ANN, arguments=arguments, uses=9, expires_ms=clock.now_ms + 60_000
        )

    for empty in (anything, {"items": "*"}, {"items": {"type": "string"}}, {"items": anything}):
        refused = await refusal(grant(files=empty, options=anything))
        assert (refused.code, "a pattern that says more than anything goes" in refused.message) == ("E3004", True)
    for wrong, bound, words in (
        ("options", {"items": "a"}, "`options` is not a list, so it has no bound for each item"),
        ("files", {"items": {"items": "a"}}, "an item of `files` is not a list, so it has no bound for each item"),
        ("files", {"items": {"minimum": 1}}, "an item of `files` is not a number, so it has no least and no most"),
        ("groups", {"items": {"type": "string"}}, "an item of `groups` is not a text, so it cannot be any text"),
    ):
        refused = await refusal(grant(**({"files": ["a"]} | {wrong: bound})))
        assert (refused.code, refused.message) == ("E3004", words)
    assert await app.standing_approvals.list() == []
    await grant(files={"items": "*.py"}, groups=None, options=anything)
    for number, options in enumerate(({}, {"depth": 3}, {"deep": [{"er": "*"}]})):
        assert (await app.call("demo.stage", {"files": ["a.py"], "options": options}, key=f"k{number}")).ok
    assert (await app.call("demo.stage", {"files": ["a.py"]}, key="without")).ok
    assert (await app.call("demo.stage", {"files": ["a.sh"], "options": {}}, key="other")).pending


@pytest.mark.proves("HITL-09")
async def test_fifty_calls_at_once_use_up_exactly_what_was_agreed_to(app: Interlock, clock: FakeClock) -> None:
    standing = await app.standing_approvals.grant(
        "demo.mail", by=BEN, caller=ANN, arguments={"to": "team-*", "note": "*"}, uses=20,
        expires_ms=clock.now_ms + 60_000,
    )  # fmt: skip

    async def one(number: int) -> Result:
        while True:
            result = await app.call("demo.mail", to=f"team-{number}", key=f"k{number}")
            if code(result) != "E3410":  # used up by another call meanwhile: asked again, a ticket is opened
                return result

    results = await asyncio.gather(*map(one, range(50)))
    assert sum(result.ok for result in results) == len(outbox.sent) == 20
    assert sum(result.pending for result in results) == 30
    assert [found.used for found in await app.standing_approvals.list()] == [20]
    intents = records(app, kind="intent")
    closed = [record for record in records(app, kind="closed") if record["status"] == "SUCCESS"]
    for cited in (intents, closed):
        assert [record["approvalTicketId"] for record in cited] == [standing.id] * 20
    ran_as = {result.invocation_id for result in results if result.ok}
    assert {record["call"] for record in intents} == {record["call"] for record in closed} == ran_as
    assert acts(app).count("standing.used") == 20
    # What ran is told again without asking anybody, though nothing is left of the approval.
    ran = next(number for number, result in enumerate(results) if result.ok)
    assert (await app.call("demo.mail", to=f"team-{ran}", key=f"k{ran}")).replayed


@pytest.mark.proves("HITL-09")
async def test_a_use_whose_tool_fails_cites_the_standing_approval_too(app: Interlock, clock: FakeClock) -> None:
    await admit(app, misdirected, postless)
    standing = await app.standing_approvals.grant(
        "demo.misdirected", by=BEN, caller=ANN, arguments={"to": "carl"}, uses=2, expires_ms=clock.now_ms + 60_000
    )
    failed = await app.call("demo.misdirected", to="carl", key="k")
    assert (failed.state, code(failed)) == ("failed", "E3411")
    told = (*records(app, kind="intent"), *records(app, kind="closed"))
    assert [(one["call"], one["approvalTicketId"]) for one in told] == [(failed.invocation_id, standing.id)] * 2
    assert [found.used for found in await app.standing_approvals.list()] == [1]


@pytest.mark.proves("HITL-09")
async def test_a_read_that_a_person_must_agree_to_cites_the_standing_approval(app: Interlock, clock: FakeClock) -> None:
    await admit(app, looked_up)
    app.hook(Hook(id="asks", when="pre", run=lambda _: HookResult(permission="ask")))
    assert (await app.call("demo.looked_up", name="ann")).pending
    standing = await app.standing_approvals.grant(
        "demo.looked_up", by=BEN, caller=ANN, arguments={"name": "bo*"}, uses=2, expires_ms=clock.now_ms + 60_000
    )
    result = await app.call("demo.looked_up", name="bob")
    assert result.ok, result
    (closed,) = [one for one in records(app, kind="closed") if one["call"] == result.invocation_id]
    assert closed["approvalTicketId"] == standing.id
    assert [found.used for found in await app.standing_approvals.list()] == [1]


@pytest.mark.proves("HITL-09")
async def test_an_approval_without_patterns_covers_calls_without_arguments_alone(
    app: Interlock, clock: FakeClock
) -> None:
    await admit(app, postless)
    standing = await app.standing_approvals.grant(
        "demo.postless", by=BEN, caller=ANN, arguments={}, uses=5, expires_ms=clock.now_ms + 60_000
    )
    assert (await app.call("demo.postless", to="carl", key="1")).pending
    assert (await app.call("demo.postless", to=None, key="2")).pending
    assert [found.used for found in await app.standing_approvals.list()] == [0]
    caller = app.caller
    assert standing.fits(caller, "demo.postless", "1.0.0", {}, clock.now_ms, lambda patterns, given: (patterns, given))


@pytest.mark.proves("HITL-09")
@pytest.mark.parametrize("goes_on", ["by the desk", "by its caller"])
@pytest.mark.parametrize("answered", [True, False])
async def test_a_call_that_ran_under_another_approval_does_not_run_again_under_its_ticket(
    app: Interlock, clock: FakeClock, goes_on: str, answered: bool
) -> None:
    pending = await app.call("demo.mail", to="carl", key="k")
    (ticket,) = await app.approvals.list()
    if answered:
        await app.approvals.approve(ticket.id, by=BEN)
    await app.standing_approvals.grant(
        "demo.mail", by=BEN, caller=ANN, arguments={"to": "carl", "note": "*"}, uses=1,
        expires_ms=clock.now_ms + 60_000,
    )  # fmt: skip
    if answered and goes_on == "by the desk":
        assert [one.ok for one in await app.approved_calls.resume_all()] == [True]
    else:
        assert (await app.call("demo.mail", to="carl", key="k")).ok
    assert (await app.approvals.show(ticket.id)).state == "VOID"
    clock.advance(40 * 86_400)  # the key is forgotten, and the ticket would have been agreed to long ago
    assert await app.approved_calls.resume_all() == []
    assert (await refusal(app.approvals.approve(ticket.id, by=BEN))).code.startswith("E3")
    await app.approvals.sweep()
    assert len(outbox.sent) == 1
    ended = [record for record in records(app, kind="closed") if record["call"] == pending.invocation_id]
    assert len(ended) == 1


@pytest.mark.proves("HITL-09")
async def test_what_a_standing_approval_does_not_cover_asks_for_a_ticket(app: Interlock, clock: FakeClock) -> None:
    standing = await app.standing_approvals.grant(
        "demo.mail", by=BEN, caller=ANN, arguments={"to": "carl", "note": "*"}, uses=5, expires_ms=clock.now_ms + 60_000
    )
    assert (await app.call("demo.mail", to="carl", note="any", key="1")).ok
    assert (await app.call("demo.mail", to="dora", key="2")).pending
    assert (await app.call("demo.mail", to="carl", key="3", caller=Caller(id="local:zoe"))).pending
    assert (await app.call("demo.send", to="carl", key="4")).pending
    await app.standing_approvals.revoke(standing.id, by=EVE)
    assert (await app.call("demo.mail", to="carl", key="5")).pending
    await app.standing_approvals.grant(
        "demo.mail", by=BEN, caller=ANN, arguments={"to": "carl", "note": "*"}, uses=5, expires_ms=clock.now_ms + 60_000
    )
    clock.advance(60)
    assert (await app.call("demo.mail", to="carl", key="6")).pending
    assert len(outbox.sent) == 1


@pytest.mark.proves("HITL-09")
async def test_a_standing_approval_for_a_group_covers_its_members_but_not_the_person_who_gave_it(
    app: Interlock, clock: FakeClock
) -> None:
    standing = await app.standing_approvals.grant(
        "demo.send", by=BEN, caller="group:clerks", arguments={"to": "carl"}, uses=2, expires_ms=clock.now_ms + 60_000
    )
    clerks = frozenset({"clerks"})
    for number, caller in enumerate(
        (
            Caller(id="local:zoe"),
            Caller(id="local:yan", groups=frozenset({"group:clerks", "clerk"})),
            Caller(id="group:clerks"),
            Caller(id="did:web:a.example:dan", tenant="a.example", groups=clerks),
            replace(BEN, groups=clerks),
            Caller(id=BEN.id, agent="did:web:example.org:bot", groups=clerks),
        )
    ):
        assert (await app.call("demo.send", to="carl", key=f"no-{number}", caller=caller)).pending, caller
    agent = Caller(id="local:zoe", agent="did:web:example.org:bot", groups=clerks, kind="agent")
    assert (await app.call("demo.send", to="carl", key="1", caller=agent)).ok
    assert (await app.call("demo.send", to="carl", key="2", caller=Caller(id="local:yan", groups=clerks))).ok
    assert (await app.call("demo.send", to="carl", key="3", caller=agent)).pending, "members share its uses"
    assert [(one.id, one.used) for one in await app.standing_approvals.list()] == [(standing.id, 2)]


@pytest.mark.proves("HITL-09")
async def test_a_person_who_is_alone_agrees_in_advance_to_their_own_calls_and_no_agent_does(
    app: Interlock, clock: FakeClock
) -> None:
    bounds: Json = {"arguments": {"to": "carl"}, "uses": 5, "expires_ms": clock.now_ms + 60_000}
    bot = "did:web:example.org:bot"
    assert (await refusal(app.standing_approvals.grant("demo.send", by=BEN, caller=BEN.id, **bounds))).code == "E3206"
    await app.approvals.state_alone(by=BEN, alone=True, reason="my own laptop")
    own = await app.standing_approvals.grant("demo.send", by=BEN, caller=BEN.id, **bounds)
    other = await app.standing_approvals.grant("demo.send", by=BEN, caller=ANN, **bounds)
    for agent in (replace(BEN, agent=bot), replace(BEN, id=bot, kind="agent")):
        for caller in (agent.id, bot):
            attempt = app.standing_approvals.grant("demo.send", by=agent, caller=caller, **bounds)
            assert (await refusal(attempt)).code == "E3206"
        assert (await app.call("demo.send", to="carl", key=f"no-{agent.id}", caller=agent)).pending
    assert (await app.call("demo.send", to="carl", key="1", caller=BEN)).ok
    assert (await app.call("demo.send", to="somebody else", key="2", caller=BEN)).pending
    # The statement of one person says nothing about another.
    eva = replace(BEN, id="local:eva")
    assert (await refusal(app.standing_approvals.grant("demo.send", by=eva, caller=eva.id, **bounds))).code == "E3206"
    assert await app.approvals.state_alone(by=BEN, alone=False, reason="") == [own.id]
    assert (await app.call("demo.send", to="carl", key="3", caller=BEN)).pending
    listed = {one.id: one.revoked_ms is None for one in await app.standing_approvals.list()}
    assert listed == {own.id: False, other.id: True}


@pytest.mark.proves("HITL-09")
async def test_what_is_taken_back_while_a_call_is_on_its_way_is_not_used(app: Interlock, clock: FakeClock) -> None:
    standing = await app.standing_approvals.grant(
        "demo.send", by=BEN, caller=ANN, arguments={"to": "carl"}, uses=5, expires_ms=clock.now_ms + 60_000
    )
    _, result = await asyncio.gather(
        app.standing_approvals.revoke(standing.id, by=BEN), app.call("demo.send", to="carl", key="k")
    )
    # From a server, the call may also read of approvals after the revocation.
    assert code(result) in (("E3410",) if app.home.near else ("E3410", "E3208"))
    assert (await app.call("demo.send", to="carl", key="k")).pending
    assert sample.world.runs == 0


@pytest.mark.proves("HITL-09")
async def test_agreeing_to_calls_in_advance_is_not_agreeing_to_undo_them(tmp_path: Path, clock: FakeClock) -> None:
    async with opened(tmp_path / "home", clock, ask_all_writes=True) as app:
        await app.standing_approvals.grant(
            "demo.increment", by=BEN, caller=ANN, arguments={"name": "a", "by": 1}, uses=5,
            expires_ms=clock.now_ms + 60_000,
        )  # fmt: skip
        done = await app.call("demo.increment", name="a", key="k")
        assert done.ok
        assert (await app.undo(done.invocation_id, key="u")).pending
        assert sample.world.counters == {"a": 1}


# Looking first


@pytest.mark.part_of("HITL-07", rest="the irreversible tools of the kits, which do not exist yet")
async def test_a_dry_run_commits_nothing_needs_nobody_and_says_what_would_happen(app: Interlock) -> None:
    before = app.journal.reader.all("SELECT (SELECT count(*) FROM ticket), (SELECT count(*) FROM reservation)")
    result = await app.call("demo.mail", to="carl", key="k", dry_run=True)
    assert result.ok
    assert result.value["predicted_effects"] == [{"resource": "mail:carl", "operation": "CREATE", "after": "carl"}]
    assert result.value["preconditions"] == {"reachable": True}
    assert "carl" in result.value["impact"]
    assert outbox.sent == []
    after = app.journal.reader.all("SELECT (SELECT count(*) FROM ticket), (SELECT count(*) FROM reservation)")
    assert after == before
    [closed] = records(app, kind="closed")
    assert (closed["operation"], closed["source"], closed["sideEffects"]) == ("preview", "preview", [])
    # The same call for real does what was said, and no difference is noted.
    ticket = await ask(app)
    await app.approvals.approve(ticket, by=BEN)
    real = await app.approved_calls.resume(ticket)
    assert "previewDifferences" not in real.metadata
    assert app.gateway.observer.metrics["PREVIEW_MISMATCH"] == 0
    assert records(app, kind="closed")[-1]["sideEffects"] == [{"resource": "mail:carl", "operation": "CREATE"}]


# A tool that is shipped from now on is called here too.
GIVEN: dict[str, Json] = {"demo.mail_statement": {"account": "cash", "to": "press"}}
SHIPPED: list[Any] = [
    one
    for module in (demo_tools, demo_suspects)
    for one in vars(module).values()
    if isinstance(one, Tool) and one.manifest.mutation_class == "write_irreversible"
]


@pytest.mark.part_of("HITL-07", rest="the irreversible tools of the kits, which do not exist yet")
@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda one: one.manifest.address)
async def test_a_shipped_tool_does_what_its_dry_run_said_and_nothing_before(
    app: Interlock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shipped: Any
) -> None:
    state = tmp_path / "state"
    monkeypatch.setenv("INTERLOCK_DEMO_LEDGER", str(state / "ledger"))
    state.mkdir()
    await admit(app, shipped)
    given = GIVEN[shipped.manifest.address]

    def digest_of_state() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(state.rglob("*")) if path.is_file()}

    before = digest_of_state()
    preview = (await app.call(shipped.manifest.address, given, dry_run=True)).unwrap()
    assert digest_of_state() == before
    assert preview.keys() >= {"predicted_effects", "preconditions", "impact"}
    assert records(app, kind="closed")[-1]["operation"] == "preview"
    pending = await app.call(shipped.manifest.address, given, key="k")
    await app.approvals.approve(ticket_of(pending), by=BEN)
    assert (await app.approved_calls.resume(ticket_of(pending))).ok
    assert digest_of_state() != before
    done = [(one["affectedResource"], one["mutationType"], one["newValue"]) for one in records(app, kind="mutation")]
    assert done == [(one["resource"], one["operation"], one["after"]) for one in preview["predicted_effects"]]


@pytest.mark.part_of("HITL-07", rest="the irreversible tools of the kits, which do not exist yet")
async def test_what_a_call_would_cost_is_part_of_its_preview(app: Interlock) -> None:
    @tool(
        version="1.0.0", mutation_class="write_irreversible", namespace="demo", effects=[Effect("x:{to}", "CREATE")],
        estimated_cost=2.5,
    )  # fmt: skip
    async def dear(to: Text) -> str:
        """Do something that costs."""
        return to

    @dear.preview
    def _(to: str) -> Preview:
        return Preview(preconditions={"there is money": False}, impact="all of it")

    await admit(app, dear)
    preview = (await app.call("demo.dear", to="x", dry_run=True)).unwrap()
    assert (preview["estimated_cost"], preview["preconditions"]) == (2.5, {"there is money": False})


@pytest.mark.proves("EFFECT-05")
@pytest.mark.supports("HITL-08", "EFFECT-01")
async def test_the_record_of_what_cannot_be_undone_names_who_agreed_and_what_they_saw(
    app: Interlock, clock: FakeClock
) -> None:
    ticket = await ask(app)
    seen = (await app.approvals.approve(ticket, by=BEN)).preview
    assert (await app.approved_calls.resume(ticket)).ok
    (change,) = records(app, kind="mutation")
    assert (change["approvalTicketId"], change["approvedBy"]) == (ticket, BEN.id)
    assert change["previewDigest"] == digest(seen)
    # Whoever agreed in advance agreed to bounds, and saw no preview.
    standing = await app.standing_approvals.grant(
        "demo.mail", by=BEN, caller=ANN, arguments={"to": "dora", "note": "*"}, uses=1,
        expires_ms=clock.now_ms + 60_000,
    )  # fmt: skip
    assert (await app.call("demo.mail", to="dora", key="k2")).ok
    change = records(app, kind="mutation")[-1]
    assert (change["approvalTicketId"], change["approvedBy"]) == (standing.id, BEN.id)
    assert change["previewDigest"] is None


@pytest.mark.supports("HITL-08")
async def test_a_tool_that_did_otherwise_than_its_preview_said_is_found_out(app: Interlock) -> None:
    ticket = await ask(app)
    await app.approvals.approve(ticket, by=BEN)
    outbox.claim = "carl/archive"  # within what is declared, and not what was previewed
    result = await app.approved_calls.resume(ticket)
    assert result.ok
    assert result.metadata["previewDifferences"] == [
        "CREATE of mail:carl/archive was not in the preview", "1 previewed changes were not made"
    ]  # fmt: skip
    assert records(app, kind="closed")[-1]["previewDifferences"] == result.metadata["previewDifferences"]
    assert app.gateway.observer.metrics["PREVIEW_MISMATCH"] == 1


# On record


@pytest.mark.proves("AUTH-10")
async def test_every_permission_check_is_on_record_as_a_decision(app: Interlock, clock: FakeClock) -> None:
    rule = '@id("not-dora")\nforbid (principal, action == Action::"demo.mail", resource)'
    app.home.policy.write_text(ANYTHING + rule + ' when { context.arguments.to == "dora" };\n')
    clock.advance(1)
    allowed = await app.call("demo.add", a=1)
    denied = await app.call("demo.mail", to="dora", key="1")
    pending = await app.call("demo.mail", to="carl", key="2")
    await app.approvals.approve(ticket_of(pending), by=BEN, edit={"to": "eric"}, comment="better so")
    edited = await app.approved_calls.resume(ticket_of(pending))
    refused = await app.call("demo.mail", to="carl", key="3")
    await app.approvals.deny(ticket_of(refused), by=BEN)
    faulty = await app.call("demo.mail", to=7, key="4")
    unknown = await app.call("demo.add", a=1, token="no.such.token")
    assert (allowed.ok, code(denied), edited.ok) == (True, "E3206", True)
    found: dict[str, list[Json]] = {}
    approvals = records(app, kind="approval")
    for record in (*records(app, kind="pending"), *records(app, kind="closed")):
        document = decision_of(record, approvals)
        if document is None:
            assert (record["call"], record["authDecision"]) == (faulty.invocation_id, None)
            continue
        ToolPermissionDecision.model_validate(document)
        found.setdefault(record["call"], []).append(document)
        assert ("decision" in record) == (record["call"] != unknown.invocation_id)
        if document["source"] != "approval":  # a person's yes to what was asked leaves the question on record
            assert record["authDecision"] == AUTH_DECISIONS[document["behavior"]]
        assert document["decided_at"] == "2027-01-15T08:00:01.000Z"
        if "decision" in record:
            assert document["expires_at"] == "2027-01-15T08:05:01.000Z"
            assert document["policy_refs"] == [record["policy"]]
            assert record["decision"].keys() >= {"behavior", "mode", "source", "reason"}
        else:
            assert (document["expires_at"], document["policy_refs"]) == (None, [])
        assert (document["mode"], document["decision_id"][:4]) == ("enforce", "dec_")
        # No classifier is run, no rule is proposed and nothing but text is said: these are there, and empty.
        assert (document["suggested_updates"], document["content_blocks"]) == ([], [])
        assert (document["pending_classifier_check"], document["blocked_path"]) == (False, None)
    [allow], [deny] = found[allowed.invocation_id], found[denied.invocation_id]
    assert (allow["behavior"], allow["user_modified"], allow["rule_refs"]) == ("allow", False, ["policy0"])
    assert (allow["reason"], allow["updated_input"], allow["accept_feedback"]) == ("rule policy0", None, None)
    assert (deny["behavior"], deny["source"], deny["rule_refs"]) == ("deny", "policy", ["not-dora"])
    asked, agreed = found[pending.invocation_id]
    assert (asked["behavior"], agreed["behavior"]) == ("ask", "allow")
    assert (agreed["source"], agreed["user_modified"]) == ("approval", True)
    assert (agreed["updated_input"].keys(), agreed["accept_feedback"]) == ({"sha256"}, "better so")
    assert [one["behavior"] for one in found[refused.invocation_id]] == ["ask", "deny"]
    assert faulty.invocation_id not in found  # its input was refused before anybody decided
    assert [one["behavior"] for one in found[unknown.invocation_id]] == ["deny"]
    ids = [one["decision_id"] for documents in found.values() for one in documents]
    assert len(ids) == len(set(ids))
    # The records hold how the check ended, and the status of a call tells it to whoever made the call.
    calls = Calls(app)
    for call, documents in found.items():
        told = (await calls.status(call, app.caller))["permission_decisions"]
        assert [one["decision_id"] for one in told] == [one["decision_id"] for one in documents]
        assert all(set(one) == DECISION_FIELDS for one in told)
        assert all(one["invocation_id"] == call for one in told)
    looked = await app.call("demo.mail", to="carl", dry_run=True)
    (look,) = (await calls.status(looked.invocation_id, app.caller))["permission_decisions"]
    assert look["mode"] == "dry_run"


AUTH_DECISIONS = {"allow": "ALLOW", "ask": "REQUIRES_APPROVAL", "deny": "DENY"}
DECISION_FIELDS = {
    "schema_version", "decision_id", "invocation_id", "behavior", "mode", "source", "reason", "rule_refs",
    "policy_refs", "updated_input", "user_modified", "suggested_updates", "pending_classifier_check", "blocked_path",
    "content_blocks", "accept_feedback", "decided_at", "expires_at",
}  # fmt: skip


@pytest.mark.proves("AUTH-10")
async def test_the_facts_that_a_check_judges_are_stored_apart_with_the_version(app: Interlock) -> None:
    for contract in (one.contract for one in await app.catalog.everything()):
        profile = permission_profile(contract).document()
        ToolPermissionProfile.parse(profile)
        assert shown(contract)["permission_profile"] == profile
        declared = [one for one in records(app, kind="registry") if one.get("tool") == contract.ref]
        assert [one["permissionProfile"] for one in declared if one["event"] == "tool.declared"] == [profile]
        assert profile.keys() - {"sandbox_profile"} == {
            "schema_version", "profile_id", "risk", "data_access", "write_effects", "network_scope", "credentials",
            "requires_approval", "redaction", "policy_refs",
        }  # fmt: skip
    mail = permission_profile((await app.catalog.resolve("demo.mail", None)).contract).document()
    assert (mail["risk"], mail["requires_approval"]) == ("write_irreversible", True)
    assert mail["write_effects"]
    add = permission_profile((await app.catalog.resolve("demo.add", None)).contract).document()
    assert (add["risk"], add["requires_approval"], add["write_effects"]) == ("read_only", False, [])


@pytest.mark.proves("AUTH-10")
async def test_a_read_that_is_asked_about_becomes_a_ticket_for_one_execution(app: Interlock) -> None:
    app.hook(Hook(id="doubt", when="pre", run=lambda _: HookResult(permission="ask")))
    result = await app.call("demo.add", a=1)
    ticket = await app.approvals.show(ticket_of(result))
    assert ticket.reason == "hook doubt"
    await app.approvals.approve(ticket.id, by=BEN)
    assert (await app.approved_calls.resume(ticket.id)).unwrap() == 6
    # One approval, one execution: the next is asked for again, though it is only a read.
    assert (await app.call("demo.add", a=1)).pending


@tool(
    version="1.0.0", mutation_class="write_irreversible", namespace="demo", effects=[Effect("vault:{name}", "UPDATE")]
)
async def lock_up(name: Text, password: Text) -> str:
    """Put something behind a password."""
    return name


@lock_up.preview
async def _(name: str, password: str) -> Preview:
    return Preview(impact=f"{name} would be locked up")


async def test_a_standing_approval_keeps_no_private_value_and_a_comment_no_credential(
    app: Interlock, clock: FakeClock
) -> None:
    await admit(app, lock_up)

    def grant(password: Any) -> Any:
        return app.standing_approvals.grant(
            "demo.lock_up", by=BEN, caller=ANN, arguments={"name": "box", "password": password}, uses=1,
            expires_ms=clock.now_ms + 60_000,
        )  # fmt: skip

    quoted: list[Any] = ["hunter2-hunter2", {"enum": ["hunter2-hunter2", "x"]}]
    for password in quoted:
        refused = await refusal(grant(password))
        assert (refused.code, "`password` is private" in refused.message) == ("E3004", True)
    assert (await grant("*")).arguments == {"name": "box", "password": "*"}
    assert (await grant({"x-any": True})).arguments["password"] == {"x-any": True}
    ticket = await ask(app)
    await app.approvals.approve(ticket, by=BEN, comment="fine, with Bearer abcdefghijklmnop for the desk")
    assert (await app.approvals.show(ticket)).comment == "fine, with [REDACTED] for the desk"
    stored = app.journal.reader.all("SELECT arguments FROM standing UNION ALL SELECT comment FROM ticket", ())
    assert "hunter2" not in str(stored)
    assert not any("abcdefghijklmnop" in str(record) for record in records(app, kind="approval"))

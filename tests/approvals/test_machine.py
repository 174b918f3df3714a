"""Whatever callers, reviewers, intruders and time do, in whatever order: nothing runs that nobody agreed to."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import orjson
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from interlock import Caller, Context, Effect, Failure, Interlock, Preview, Result, tool
from interlock.approvals.ticket import Ticket
from interlock.audit.chain import verify
from interlock.core.errors import CODES
from interlock.store.homes import home_at
from interlock.testing import FakeClock
from tests.support.calls import admit
from tests.support.stores import first_inserted
from tests.support.tickets import ADA, ANN, ANYTHING, BEN, BOT, CHANNELS, EVE, MAY, Text

T = TypeVar("T")
ZOE = "local:zoe"
REVIEWERS = (BEN, MAY, ADA, EVE, BOT, Caller(id=ANN, groups=BEN.groups), Caller(id=ZOE, groups=BEN.groups))


class Run(NamedTuple):
    """One execution, as the world outside saw it."""

    call: str
    to: str
    at_ms: int


class World:
    """Where effects can be seen, and the time at which they happen."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.runs: list[Run] = []


world = World()


@tool(version="1.0.0", mutation_class="write_irreversible", namespace="demo", effects=[Effect("parcel:{to}", "CREATE")])
async def deliver(ctx: Context, to: Text) -> str:
    """Deliver a parcel that nobody can call back."""
    world.runs.append(Run(ctx.invocation_id, to, world.clock.now_ms))
    ctx.effect(f"parcel:{to}", "CREATE")
    return to


@deliver.preview
def _(to: str) -> Preview:
    return Preview(impact=f"{to} would get a parcel")


class Agreement(NamedTuple):
    """What a reviewer agreed to, and for how long that holds."""

    to: str
    expires_ms: int


def is_expected(result: Result) -> bool:
    """Done, pending, said no, a key with other arguments, or an approval that another call took meanwhile."""
    return result.error is None or result.error.code in ("E3208", "E3209", "E3306", "E3410")


class Approvals(RuleBasedStateMachine):
    """One home, two callers, seven who would decide; restarts, changed rules and a clock that jumps."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.TemporaryDirectory()
        world.__init__()
        self.clock = world.clock
        self.app = self._do(self._open())
        self.agreed: dict[str, Agreement] = {}  # by ticket
        self.standing: dict[str, Agreement] = {}
        self.uses: dict[str, int] = {}
        self.refused: set[str] = set()
        self.thoughts = 0

    def _do(self, doing: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(doing)

    async def _open(self) -> Interlock:
        app = await Interlock.open(
            self.directory.name, clock=self.clock.clock, caller=ANN, housekeeping=False, channels=CHANNELS
        )
        await admit(app, deliver)
        return app

    def _tickets(self) -> list[Ticket]:
        return sorted(self._do(self.app.approvals.list(every=True)), key=lambda ticket: ticket.id)

    def _pick(self, number: int, *states: str) -> Ticket | None:
        """A ticket, rather one in these states than another."""
        found = self._tickets()
        better = [ticket for ticket in found if ticket.state in states] or found
        return better[number % len(better)] if better else None

    # What callers do

    def _send(self, key: str, to: str, who: str) -> Coroutine[Any, Any, Result]:
        return self.app.call("demo.deliver", to=to, key=key, caller=self.app.policy.principal(who))

    @rule(key=st.sampled_from("kl"), to=st.sampled_from("xy"), who=st.sampled_from([ANN, ZOE]), times=st.integers(1, 3))
    def send(self, key: str, to: str, who: str, times: int) -> None:
        async def at_once() -> list[Result]:
            return await asyncio.gather(*(self._send(key, to, who) for _ in range(times)))

        for result in self._do(at_once()):
            assert is_expected(result), result.error

    @rule(order=st.sampled_from(["xyy", "yxx", "xyx"]), who=st.sampled_from([ANN, ZOE]))
    def waver(self, order: str, who: str) -> None:
        """A caller who changes their mind, all within a millisecond."""
        for to in order:
            self.send("k", to, who, 1)

    # What reviewers and intruders do

    def _may_decide(self, ticket: Ticket, by: Caller) -> bool:
        told = {group for group, place in (("approvers", 0), ("managers", 1), ("admins", 2)) if place <= ticket.step}
        open_now = ticket.state == "PENDING" and self.clock.now_ms < ticket.expires_ms
        return open_now and by.kind == "human" and bool(by.groups & told) and by.id != ticket.requester

    @rule(number=st.integers(0, 20), by=st.sampled_from(REVIEWERS), edit=st.sampled_from([None, None, "z"]))
    def approve(self, number: int, by: Caller, edit: str | None) -> None:
        ticket = self._pick(number, "PENDING")
        if ticket is None:
            return
        allowed = self._may_decide(ticket, by)
        change = None if edit is None else {"to": edit}
        try:
            self._do(self.app.approvals.approve(ticket.id, by=by, edit=change))
        except Failure:
            assert not allowed
        else:
            assert allowed
            self.agreed[ticket.id] = Agreement(edit or ticket.params["to"], ticket.expires_ms)

    @rule(number=st.integers(0, 20), by=st.sampled_from(REVIEWERS))
    def deny(self, number: int, by: Caller) -> None:
        ticket = self._pick(number, "PENDING")
        if ticket is None:
            return
        allowed = self._may_decide(ticket, by)
        try:
            self._do(self.app.approvals.deny(ticket.id, by=by))
        except Failure:
            assert not allowed
        else:
            assert allowed
            self.refused.add(ticket.id)

    @rule(to=st.sampled_from(["x", "y*"]), who=st.sampled_from([ANN, ZOE]), uses=st.integers(1, 2))
    def agree_in_advance(self, to: str, who: str, uses: int) -> None:
        expires_ms = self.clock.now_ms + 7_200_000
        given = self.app.standing_approvals.grant(
            "demo.deliver", by=BEN, caller=who, arguments={"to": to}, uses=uses, expires_ms=expires_ms
        )
        made = self._do(given)
        self.standing[made.id] = Agreement(to.rstrip("*"), expires_ms)
        self.uses[made.id] = uses

    @precondition(lambda self: bool(self.standing))  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType, reportUnknownArgumentType]
    @rule(number=st.integers(0, 5))
    def take_back(self, number: int) -> None:
        standing = list(self.standing)[number % len(self.standing)]
        self._do(self.app.standing_approvals.revoke(standing, by=MAY))
        self.standing[standing] = self.standing[standing]._replace(expires_ms=self.clock.now_ms)
        self.uses[standing] = sum(self._allowed_by(run) == standing for run in world.runs)

    # What time and operators do

    @rule(seconds=st.sampled_from([1, 1800, 3601, 14_401, 43_200, 86_399, 86_400]))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @rule()
    def sweep(self) -> None:
        self._do(self.app.approvals.sweep())

    @rule(seconds=st.sampled_from([0, 0, 3601, 86_400]))
    def restart(self, seconds: int) -> None:
        self._do(self.app.close())
        self.clock.advance(seconds)
        self.app = self._do(self._open())

    @rule()
    def change_the_rules(self) -> None:
        self.thoughts += 1
        self.app.home.policy.write_text(f"{ANYTHING}// thought {self.thoughts}\n")
        self.clock.advance(1)

    # Going on

    @rule(number=st.integers(0, 20))
    def resume(self, number: int) -> None:
        ticket = self._pick(number, "APPROVED")
        if ticket is None:
            return
        before = len(world.runs)
        try:
            self._do(self.app.approved_calls.resume(ticket.id))
        except Failure:
            assert len(world.runs) == before

    @rule(key=st.sampled_from("kl"), to=st.sampled_from("xy"), number=st.integers(0, 20))
    def go_on_at_once(self, key: str, to: str, number: int) -> None:
        ticket = self._pick(number, "APPROVED")

        async def at_once() -> None:
            doing: list[Any] = [self.app.approved_calls.resume_all() for _ in range(2)]
            doing += [self._send(key, to, ANN), self.app.approvals.sweep()]
            if ticket is not None:
                doing += [self.app.approved_calls.resume(ticket.id) for _ in range(2)]
            for answer in await asyncio.gather(*doing, return_exceptions=True):
                assert not isinstance(answer, BaseException) or isinstance(answer, Failure), answer
                assert not isinstance(answer, Result) or is_expected(cast("Result", answer)), answer

        self._do(at_once())

    # What always holds

    def _allowed_by(self, run: Run) -> str:
        """The approval that an execution's own records cite: the intent before it and the closing after it agree.

        An attempt that could not run just then has a closing before the intent, with an error that allows another: it
        lost the last use of a standing approval to a call that ran at once, say, and its own approval is still there.
        """
        rows = self.app.journal.reader.all(
            "SELECT kind, body FROM journal WHERE call = ? AND kind IN ('intent', 'closed') ORDER BY seq", (run.call,)
        )
        bodies = [(kind, orjson.loads(body)) for kind, body in rows]
        [place] = [place for place, (kind, _) in enumerate(bodies) if kind == "intent"]
        intent = bodies[place][1]
        assert all(CODES[body["error_code"]].retryable for _, body in bodies[:place]), bodies
        ran = [body for _, body in bodies[place + 1 :] if body["source"] == "compute"]
        assert [body["status"] for body in ran] == ["SUCCESS"], bodies
        assert ran[0]["approvalTicketId"] == intent["approvalTicketId"]
        return intent["approvalTicketId"]

    @invariant()
    def every_execution_was_agreed_to_once_exactly_and_in_time(self) -> None:
        cited = [(run, self._allowed_by(run)) for run in world.runs]
        tickets = {ticket.id: ticket for ticket in self._tickets()}
        for run, approval in cited:
            agreement = self.agreed.get(approval)
            if agreement is not None:
                assert (run.to, tickets[approval].state) == (agreement.to, "USED")
                assert approval not in self.refused
            else:
                agreement = self.standing[approval]
                assert run.to.startswith(agreement.to)
        counts = Counter(approval for _, approval in cited)
        assert all(count <= self.uses.get(approval, 1) for approval, count in counts.items())
        assert {one.id: one.used for one in self._do(self.app.standing_approvals.list())} == {
            one: counts[one] for one in self.standing
        }
        used = {ticket.id for ticket in tickets.values() if ticket.state == "USED"}
        assert used == counts.keys() - self.standing.keys()
        if cited:
            run, approval = cited[-1]  # a standing approval that was taken back later ended later
            agreement = self.agreed.get(approval)
            assert agreement is None or run.at_ms < agreement.expires_ms

    @invariant()
    def nobody_else_approves_and_a_call_has_one_open_ticket(self) -> None:
        tickets = self._tickets()
        assert {ticket.id for ticket in tickets if ticket.state in ("APPROVED", "USED", "LAPSED")} <= self.agreed.keys()
        assert all(ticket.state == "DENIED" for ticket in tickets if ticket.id in self.refused)
        waiting = Counter(ticket.scope for ticket in tickets if ticket.state in ("PENDING", "APPROVED"))
        assert set(waiting.values()) <= {1}
        assert all((ticket.sealed is not None) == (ticket.state in ("PENDING", "APPROVED")) for ticket in tickets)

    @invariant()
    def each_step_is_told_once_and_in_order(self) -> None:
        told: dict[str, list[int]] = {}
        for ticket, step in self.app.journal.reader.all(
            f"SELECT ticket, step FROM notification ORDER BY {first_inserted(self.app.home)}"
        ):
            told.setdefault(ticket, []).append(step)
        for ticket in self._tickets():
            assert told[ticket.id] == list(range(ticket.step + 1))

    def teardown(self) -> None:
        self._do(self.app.close())
        verdict = verify(home_at(Path(self.directory.name)))
        assert verdict.intact, verdict.faults
        self.loop.close()
        self.directory.cleanup()


TestApprovals = pytest.mark.proves("HITL-04", "HITL-05", "HITL-08")(Approvals.TestCase)
TestApprovals.settings = settings(max_examples=25, stateful_step_count=30)

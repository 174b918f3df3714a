"""Data directories with a history: authority that was given and taken, and calls with every outcome."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from interlock import Caller, Context, Effect, Failure, Field, Interlock, Preview, tool
from interlock.audit.chain import verify
from interlock.authority.identities import Identity
from interlock.gateway import reconcile
from interlock.store import migrations
from interlock.store.home import Home
from interlock.store.homes import home_at
from interlock.testing import FakeClock
from tests.support.identities import AGENT, USER
from tests.support.tickets import ANN, BEN, ask, opened

ROOT = Caller(id="local:root", scopes=frozenset({"tokens:issue"}))


@dataclass
class World:
    """A home in which authority was given, changed, used and taken."""

    home: Home
    waiting: str
    approved: str
    denied: str
    used: str
    standing: str


async def make(path: Path, clock: FakeClock, *, in_advance: bool = True) -> World:
    """Live a history; `in_advance` says whether a standing approval is part of it."""
    async with opened(path, clock) as app:
        await app.identities.register(Identity(did=AGENT, name="bot", trust=10, groups=frozenset({"staff"})), by="ann")
        await app.identities.update(Identity(did=AGENT, name="bot", trust=20, groups=frozenset({"b", "a"})), by="ann")
        await app.identities.register(Identity(did=USER, kind="human", name="u"), by="ann")
        await app.identities.revoke(USER, reason="left", by="ann")
        await app.tokens.rotate_key("EdDSA", by=ROOT, first=True)
        await app.tokens.revoke(await app.tokens.issue(subject=AGENT, by=ROOT), reason="lost", by=ROOT)
        await app.tokens.revoke("did:web:elsewhere.example", reason="not one of ours", by=ROOT, unseen=True)
        tickets = [await ask(app, to=f"t{number}", key=f"k{number}") for number in range(4)]
        await app.approvals.approve(tickets[1], by=BEN)
        await app.approvals.deny(tickets[2], by=BEN, comment="no")
        await app.approvals.approve(tickets[3], by=BEN, edit={"to": "t9"})
        assert (await app.approved_calls.resume(tickets[3])).ok
        standing = ""
        if in_advance:
            given = await app.standing_approvals.grant(
                "demo.mail", by=BEN, caller=ANN, arguments={"to": "team-*", "note": "*"}, uses=3,
                expires_ms=clock.now_ms + 60_000,
            )  # fmt: skip
            standing = given.id
            assert (await app.call("demo.mail", to="team-a", key="s")).ok
    waiting, approved, denied, used = tickets
    return World(home_at(path), waiting, approved, denied, used, standing)


Text = Annotated[str, Field(description="any text", examples=["a"])]
BUDGETS = [{"per": "tenant", "limit": 1_000_000}, {"per": "session", "limit": 1_000_000}]
DAY_S = 86_400
VERSIONS = Path(migrations.__file__).parent / "versions"


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="out",
    effects=[Effect("thing:{name}", "UPDATE"), Effect("session:last", "UPDATE")], estimated_cost=1.0,
)  # fmt: skip
async def work(ctx: Context, name: Text, how: Text) -> str:
    """Do something, and end as asked."""
    if how == "again":
        raise Failure("E3501", "not now")
    ctx.effect(f"thing:{name}", "UPDATE", before=0, after=1)
    if how == "refused":
        raise Failure("E3411", "never")
    if how == "unclear":
        raise Failure("E3501", "perhaps")
    ctx.session["last"] = name
    ctx.cost(external_api=0.25)
    ctx.compensate_with(name=name)
    return name * 5000 if how == "large" else name


@work.preview
def _(name: str, how: str) -> Preview:
    return Preview(impact=name + how)


@work.compensate
async def _(name: str) -> None:
    return None


async def live(path: Path, acts: list[str], clock: FakeClock) -> None:
    """An honest history, each act with a key of its own."""
    async with Interlock.open(path, clock=clock.clock, budgets=BUDGETS, housekeeping=False) as app:
        app.catalog.attach(work)
        await app.add(work)
        for number, act in enumerate(acts):
            name = f"{act}-{number}"
            if act == "passing":
                clock.advance(40 * DAY_S)
                await app.maintain()
                continue
            if act == "charged":
                await app.charge(f"task-{number}", part="retrieval", amount=0.5, key=name)
                continue
            how = {"undone": "fine", "happened": "unclear", "never": "unclear"}.get(act, act)
            result = await app.call("out.work", name=name, how=how, key=name, session=f"s{number % 2}")
            if act == "undone":
                assert (await app.undo(result.invocation_id, key=f"undo-{name}")).ok
            elif act in ("happened", "never"):
                seal = app.gateway.storage.outcomes.seal
                await reconcile.reconcile(
                    app.journal, app.caller, result.invocation_id, seal=seal, happened=act == "happened"
                )
            assert verify(home_at(path)).faults == ()

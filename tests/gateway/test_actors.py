"""Every record of a call names the verified agent and the user behind it, whatever kind of record it is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from interlock import Caller, Effect, Interlock, Preview, tool
from interlock.authority.identities import Identity
from interlock.gateway import reconcile
from interlock.testing import FakeClock
from tests import sample
from tests.sample import TOOLS
from tests.support.calls import admit, slow_write, until
from tests.support.checkpoint_tools import awaits
from tests.support.identities import did_of
from tests.support.isolated_tools import attempt

USER, AGENT = did_of("user"), did_of("agent")
REVIEWER = Caller(id="local:reviewer", groups=frozenset({"approvers"}))
begun = asyncio.Event()

# Every kind of record that can be about a call.
KINDS = {
    "started", "intent", "closed", "mutation", "late", "settled", "cancel", "pending", "approval", "violation",
    "checkpoint",
}  # fmt: skip


@tool(version="1.0.0", mutation_class="write_reversible", namespace="actors", effects=[Effect("x:{name}", "UPDATE")])
async def strand(name: sample.Name) -> str:
    """Change something, or not, and never come back."""
    begun.set()
    await asyncio.Event().wait()
    return name


@strand.preview
def _(name: str) -> Preview:
    return Preview(impact=name)


@strand.compensate
async def _(name: str) -> None:
    return None


class World:
    """An Interlock, its clock, and an agent's token."""

    def __init__(self, app: Interlock, clock: FakeClock, token: str) -> None:
        self.app, self.clock, self.token = app, clock, token

    async def call(self, name: str, arguments: dict[str, Any], **more: Any) -> str:
        return (await self.app.call(name, arguments, token=self.token, **more)).invocation_id

    async def running(self, name: str, arguments: dict[str, Any], **more: Any) -> tuple[str, asyncio.Task[Any]]:
        caller = await self.app.caller_of(self.token)
        asked = self.app.gateway.with_id(self.app.request(name, arguments, caller=caller, **more))
        return asked.id or "", asyncio.create_task(self.app.gateway.invoke(asked))

    async def ticket(self, call: str) -> str:
        ((ticket,),) = self.app.journal.reader.all("SELECT id FROM ticket WHERE call = ?", (call,))
        return ticket


async def _write(world: World) -> str:
    return await world.call("demo.increment", {"name": "a"}, key="a")


async def _checkpoint(world: World) -> str:
    return await world.call("check.awaits", {"script": [["checkpoint", "half-way", {}]]})


async def _approved(world: World) -> str:
    call = await world.call("demo.send", {"to": "ann"}, key="approved")
    ticket = await world.ticket(call)
    await world.app.approvals.approve(ticket, by=REVIEWER)
    assert (await world.app.approved_calls.resume(ticket)).ok
    return call


async def _denied(world: World) -> str:
    call = await world.call("demo.send", {"to": "bob"}, key="denied")
    await world.app.approvals.deny(await world.ticket(call), by=REVIEWER, comment="no")
    return call


async def _withdrawn(world: World) -> str:
    call = await world.call("demo.send", {"to": "eve"}, key="withdrawn")
    assert await world.app.approvals.withdraw(call, by=await world.app.caller_of(world.token))
    return call


async def _late(world: World) -> str:
    entered = threading.Event()
    await admit(world.app, slow_write(entered, restart_safe=False))
    call, task = await world.running("demo.pay", {}, key="late", timeout_s=5)
    await until(entered.is_set)
    world.clock.advance(6)
    await task
    sample.world.release.set()
    await until(lambda: world.app.journal.reader.all("SELECT 1 FROM journal WHERE call = ? AND kind = 'late'", (call,)))
    return call


async def _settled(world: World) -> str:
    call, task = await world.running("actors.strand", {"name": "a"}, key="settled")
    await begun.wait()
    assert await world.app.cancel(call) == "canceled"
    await task
    assert await world.app.cancel(call) == "finished"
    seal = world.app.gateway.storage.outcomes.seal
    await reconcile.reconcile(world.app.journal, world.app.caller, call, seal=seal, happened=False)
    return call


async def _violation(world: World) -> str:
    return await world.call("cell.attempt", {"what": "network"})


CALLS: dict[str, tuple[Callable[[World], Awaitable[str]], set[str]]] = {
    "a write": (_write, {"intent", "mutation", "closed"}),
    "a checkpoint": (_checkpoint, {"started", "checkpoint", "closed"}),
    "an approved call": (_approved, {"pending", "approval", "intent", "closed"}),
    "a denied call": (_denied, {"pending", "approval", "closed"}),
    "a withdrawn call": (_withdrawn, {"pending", "approval", "cancel", "closed"}),
    "a late outcome": (_late, {"intent", "closed", "late"}),
    "a settled call": (_settled, {"intent", "cancel", "closed", "settled"}),
    "a violation": (_violation, {"violation", "closed"}),
}


def test_the_calls_below_leave_records_of_every_kind_that_is_about_a_call() -> None:
    assert {kind for _, kinds in CALLS.values() for kind in kinds} == KINDS


@pytest.mark.proves("AUTH-03")
@pytest.mark.parametrize("what", CALLS)
async def test_each_record_of_a_call_names_the_verified_agent(home: Path, what: str) -> None:
    begun.clear()
    make, kinds = CALLS[what]
    clock = FakeClock()
    async with Interlock.open(home, clock=clock.clock, housekeeping=False) as app:
        for one in TOOLS:
            app.catalog.attach(one)
        await admit(app, awaits, attempt, strand)
        app.issuer_keys.init("EdDSA")
        await app.identities.register(Identity(did=USER, kind="human"), by="test")
        await app.identities.register(Identity(did=AGENT, trust=90), by="test")
        token = await app.tokens.issue(subject=AGENT, user=USER, by=app.caller)
        call = await make(World(app, clock, token))
        await app.journal.drain()
        rows = app.journal.reader.all("SELECT kind, body FROM journal WHERE call = ? ORDER BY seq", (call,))
        assert {kind for kind, _ in rows} >= kinds
        for kind, body in rows:
            record = orjson.loads(body)
            assert (record["agentId"], record["callerId"], record["tenant"]) == (AGENT, USER, "local"), kind

"""Budgets over REST: everybody sees what is theirs, auditors what is their tenant's, and that they looked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson

from interlock.api.service import Service
from interlock.authority import budgets
from interlock.call.context import Caller
from interlock.core.amounts import millionths
from tests.support.identities import did_of
from tests.support.rest import World, refused, serving

SETTINGS = """
[[budgets]]
per = "tenant"
limit = 5.0

[[budgets]]
per = "session"
limit = 3.0

[[budgets]]
per = "task"
limit = 2.0
"""


async def spend(world: World, caller: Caller, session: str, task: str) -> None:
    now_ms = world.app.clock.now_ms()
    rules = world.app.settings.budgets
    held = budgets.budget_keys(rules, caller=caller, session=session, task=task, tool="any", now_ms=now_ms)
    owner = world.app.instance.id
    await world.app.journal.commit(lambda tx: budgets.hold(tx, f"{task}-{session}", owner, held, millionths(0.5)))


async def shown(world: World, by: str, **query: Any) -> list[list[str]]:
    """By budget, whose use of it is told."""
    told = (await world.get("/v1/budgets", by, **query)).json()["budgets"]
    assert [one["budget"] for one in told] == ["5 per tenant", "3 per session", "2 per task"]
    return [["/".join(str(use[name]) for name in use if isinstance(use[name], str)) for use in one["used"]]
            for one in told]  # fmt: skip


async def test_everybody_sees_what_is_theirs_and_auditors_all_of_their_tenant(home: Path) -> None:
    (home / "settings.toml").write_text(SETTINGS)
    async with serving(home) as world:
        alice, boss = await world.app.caller_of(world.tokens["alice"]), Caller(id=did_of("boss"))
        eve = Caller(id="eve", tenant="local2")
        await spend(world, alice, "s1", "t1")
        await spend(world, boss, "s2", "t2")
        await spend(world, eve, "s3", "t1")
        mine = f"local/{did_of('alice')}/s1"
        assert await shown(world, "alice") == [["local"], [mine], []]
        assert await shown(world, "alice", task="t1") == [["local"], [mine], ["local/t1"]]
        assert await shown(world, "alice", task="nothing") == [["local"], [mine], []]
        assert not world.records("audit.read")
        refused(await world.get("/v1/budgets", "alice", all="true"), 403, "E3206")
        everybody = await shown(world, "root", all="true")
        assert everybody == [
            ["local", "local2"],
            sorted((mine, f"local/{did_of('boss')}/s2", "local2/eve/s3")),
            ["local/t1", "local/t2", "local2/t1"],
        ]
        assert [one["what"] for one in world.records("audit.read")] == ["budgets"]
        await world.identity("mia", "human", tenant="local2")
        mia = await world.token("mia", scopes=("audit:read",))
        assert await shown(world, mia, all="true") == [["local2"], ["local2/eve/s3"], ["local2/t1"]]
        told = (await world.get("/v1/budgets", mia)).json()["budgets"][0]
        assert told["used"] == [{"tenant": "local2", "spent": 0.0, "held": 0.5, "left": 4.5}]
        refused(await world.get("/v1/budgets", "alice", tasks="t1"), 400, "E3004")


async def test_whoever_looks_through_many_uses_holds_up_nobody(home: Path) -> None:
    (home / "settings.toml").write_text(SETTINGS)
    async with serving(home) as world:
        alice = await world.app.caller_of(world.tokens["alice"])
        before = orjson.dumps(["session", "*", None, 0, alice.tenant, alice.id, ""]).decode().removesuffix('"]')
        await world.app.journal.commit(
            lambda tx: tx.execute(
                "WITH RECURSIVE number(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < 30000)"
                " INSERT INTO spend (budget, spent, held)"
                " SELECT ? || 's' || n || '\"]', n, 0 FROM number",
                (before,),
            )
        )
        looking = asyncio.ensure_future(Service(world.app).budgets.show(by=alice, door="rest"))
        await asyncio.sleep(0)
        assert not looking.done()
        used = (await looking)[1]["used"]
        assert (len(used), used[0]["session"]) == (100, "s30000")

"""Scopes of surfaces: the one that a token states, the id of that scope, and why the surface is as it is."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from interlock import Failure, Interlock
from interlock.authority.delegation import delegate_offline
from interlock.authority.dids import make_did_key
from interlock.authority.identities import Identity
from interlock.authority.keys import make_private
from interlock.call.capability import ToolGrant
from interlock.data.schema import Json
from tests.support.calls import admit, use_policy
from tests.support.identities import did_of
from tests.support.surface_tools import TOOLS
from tests.support.wires import BY_ID, Wires, wired

DOORS = ("mcp", "rest", "jsonrpc", "grpc")
EVE = did_of("eve")


@pytest_asyncio.fixture
async def wires(home: Path) -> AsyncGenerator[Wires]:
    async with Interlock.open(home, housekeeping=False, surface="search", surface_doors=DOORS) as app:
        await admit(app, *TOOLS)
        async with wired(app) as opened:
            await app.identities.register(Identity(did=EVE, name="eve", kind="agent", trust=80), by="test")
            yield opened


async def _issued(wires: Wires, surface: str | None = None) -> str:
    constraints = None if surface is None else {"surface": surface}
    app = wires.app
    return await app.tokens.issue(subject=EVE, tools=[ToolGrant("*")], constraints=constraints, by=app.caller)


async def _jti(wires: Wires, token: str) -> str:
    capability = (await wires.app.caller_of(token)).capability
    assert capability is not None
    return capability.leaf.jti


async def _scope(wires: Wires, wire: str) -> tuple[str, str]:
    told = (await wires.rows[wire].surface())["surface"]
    return told["scope"], told["scope_ref"]


STATED = {
    "tenant": ("tenant", "local"),
    "workspace": ("workspace", EVE),
    "task:ticket-7": ("task", "ticket-7"),
    "turn:conversation/12": ("turn", "conversation/12"),
    "skill:bookkeeping": ("skill", "bookkeeping"),
    "peer_agent": ("peer_agent", EVE),
    "peer_agent:https://peer.example/agent.json": ("peer_agent", "https://peer.example/agent.json"),
}


@pytest.mark.proves("SURF-01")
@pytest.mark.parametrize("wire", BY_ID)
async def test_a_surface_has_the_scope_that_its_token_states_over_every_wire(wires: Wires, wire: str) -> None:
    seen: dict[str, str] = {}
    for stated, expected in STATED.items():
        wires.tokens["full"] = await _issued(wires, stated)
        wires.bear(wires.tokens["full"])
        assert await _scope(wires, wire) == expected
        seen[stated] = (await wires.rows[wire].surface())["surface"]["surface_id"]
    assert len(set(seen.values())) == len(STATED), "each token has a surface of its own"
    for token in (await _issued(wires), await _issued(wires, "session")):
        wires.tokens["full"] = token
        wires.bear(token)
        assert await _scope(wires, wire) == ("session", await _jti(wires, token))


@pytest.mark.proves("SURF-01")
async def test_a_tool_that_is_loaded_for_one_task_is_not_loaded_for_another(wires: Wires) -> None:
    first, second = await _issued(wires, "task:first"), await _issued(wires, "task:second")
    wires.bear(first)
    assert (await wires.http.post("/v1/tools/load", json={"names": ["office.translate"]})).status_code == 200
    assert (await wires.call("rest", "office.translate", {"value": "x"})).envelope is None
    wires.bear(second)
    heard = await wires.call("rest", "office.translate", {"value": "x"})
    assert heard.failure["error_code"] == "E3107"


@pytest.mark.proves("SURF-01")
async def test_operators_see_the_scope_of_others_and_that_of_their_own_data_directory(wires: Wires) -> None:
    wires.bear(await _issued(wires, "task:ticket-7"))
    assert (await wires.http.get("/v1/tools")).status_code == 200  # it makes the surface
    views = wires.service.surface_views
    theirs: Json = (await views.show(by=wires.app.caller, who="eve"))["surface"]
    assert (theirs["scope"], theirs["scope_ref"]) == ("task", "ticket-7")
    own: Json = (await views.show(by=wires.app.caller))["surface"]
    assert (own["scope"], own["scope_ref"]) == ("workspace", wires.app.caller.id)


@pytest.mark.proves("SURF-01")
async def test_a_delegated_token_keeps_the_scope_or_states_another_and_holds_no_more(wires: Wires) -> None:
    app = wires.app
    private = make_private("EdDSA")
    holder = make_did_key(private.public_key())
    await app.identities.register(Identity(did=holder, name="holder", kind="agent", trust=80), by="test")
    parent = await app.tokens.issue(
        subject=holder, tools=[ToolGrant("office.*")], constraints={"surface": "task:t1"}, by=app.caller
    )
    kept = await app.tokens.delegate(parent, subject=EVE, by=app.caller)
    other = delegate_offline(
        parent, private=private, subject=EVE, clock=app.clock, constraints={"surface": f"peer_agent:{EVE}"}
    )
    for token, scope in ((kept, ("task", "t1")), (other, ("peer_agent", EVE))):
        wires.bear(token)
        assert await _scope(wires, "rest") == scope
    # Any other constraint still binds.
    with pytest.raises(Failure) as refused:
        delegate_offline(parent, private=private, subject=EVE, clock=app.clock, tools=[ToolGrant("*")])
    assert refused.value.code == "E3206"


@pytest.mark.parametrize("stated", ["task", "task:", "turn", "skill", "room:1", "tenant:acme", "task:a b", "", 7])
async def test_a_token_with_a_scope_that_does_not_exist_or_without_its_id_is_refused(wires: Wires, stated: Any) -> None:
    with pytest.raises(Failure) as refused:
        await _issued(wires, stated)
    assert refused.value.code == "E3004"
    assert "the constraint `surface` must be task:ID" in refused.value.message


async def test_a_token_that_states_a_scope_and_no_limit_is_not_a_limited_one(wires: Wires) -> None:
    stated = (await wires.app.caller_of(await _issued(wires, "task:a"))).capability
    assert stated is not None
    assert not stated.constrained


WHY: dict[str, tuple[Json, str, str]] = {
    "search": ({"surface": "search"}, "search", "the setting surface is search: tools are listed when they are pinned"),
    "all": ({"surface": "all"}, "all", "the setting surface is all"),
    "few": ({"surface_most": 50}, "all", "the caller may use no more than 50 tools"),
    "many": ({"surface_most": 2}, "search", "the caller may use more than 2 tools: those that are neither pinned"),
}


@pytest.mark.proves("SURF-01")
@pytest.mark.parametrize(("settings", "policy", "reason"), WHY.values(), ids=WHY)
async def test_a_surface_says_why_it_is_as_it_is_and_which_policy_made_it(
    home: Path, settings: Json, policy: str, reason: str
) -> None:
    async with Interlock.open(home, housekeeping=False, surface_doors=DOORS, **settings) as app:
        await admit(app, *TOOLS)
        async with wired(app) as wires:

            async def shown() -> list[Json]:
                return [(await wires.rows[wire].surface())["surface"] for wire in BY_ID]

            for one in await shown():
                assert one["selection_policy"] == policy
                assert one["surface_reason"].startswith(reason)
                assert one["policy_refs"] == [f"policy:{app.policy.rules.version}"]
            before = app.policy.rules.version
            await use_policy(app, app.policy.path.read_text() + "\n// another text\n")
            assert app.policy.rules.version != before
            for one in await shown():
                assert one["policy_refs"] == [f"policy:{app.policy.rules.version}"]

"""Attacks on a person's word: by somebody else, for another tenant, beyond their own token, in the database."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from interlock import Caller, Failure
from interlock.authority.delegation import delegate_offline
from tests import sample
from tests.support import stores
from tests.support.identities import did_of as did
from tests.support.identities import private_key
from tests.support.rest import World, refused, serving

Json = dict[str, Any]
APPROVERS = frozenset({"approvers"})
SEND = "demo.send"
TRUSTED_ONLY = """
@id("all") permit (principal, action, resource);
@id("ops") forbid (principal, action, resource == Tool::"demo.increment") unless { principal in Group::"ops" };
@id("new") forbid (principal, action, resource) when { principal.trust < 50 && resource.mutation_class != "read_only" };
"""
ADVANCE: Json = {"tool": SEND, "arguments": {"to": "*desk"}, "uses": 2, "expires_in_s": 60}


@pytest_asyncio.fixture
async def world(home: Path) -> AsyncGenerator[World]:
    async with serving(home) as made:
        yield made


async def ask(world: World, to: str = "press", by: str = "scout") -> str:
    """Ask for a call that a person must agree to; where its ticket is."""
    answer = await world.invoke(SEND, {"to": to}, by, idempotency_key=f"{by[-40:]}-{to}")
    assert answer.status_code == 202, answer.text
    return answer.json()["pending"]["pollEndpoint"]


async def go_on(world: World, to: str = "press") -> Any:
    return await world.invoke(SEND, {"to": to}, idempotency_key=f"scout-{to}")


def approvals(world: World, act: str) -> list[Json]:
    return [one for one in world.records("approval") if one["act"] == act]


# Whose word it is


async def test_an_agent_never_agrees_to_its_own_call_as_the_person_it_acts_for(world: World) -> None:
    """A token that leads back to the person is neither made, nor believed, nor a person's word."""
    agent = await world.token("scout", user="boss", scopes=("tokens:issue",))
    ticket = await ask(world, by=agent)
    for path, body in (("delegate", {"to": "boss"}), ("delegate", {"to": did("alice")}), ("issue", {"person": "boss"})):
        refused(await world.post(f"/v1/tokens/{path}", body, agent), 403, "E3206")
    refused(await world.post("/v1/tokens/issue", {"person": "newcomer"}, agent), 403, "E3206")
    assert await world.app.identities.find("newcomer") is None

    key, clock = private_key("scout"), world.clock.clock
    with pytest.raises(Failure, match="come back"):
        delegate_offline(agent, private=key, subject=did("boss"), clock=clock)
    other = delegate_offline(agent, private=key, subject=did("alice"), clock=clock)
    for path, body in ((f"{ticket}/approve", {}), ("/v1/approvals/standing", {**ADVANCE, "caller": "scout"})):
        refused(await world.post(path, body, other), 403, "E3206")
        refused(await world.post(path, body, agent), 403, "E3206")

    # Whatever a caller is said to be, a chain of several links is nobody's own word.
    forged = replace(await world.app.caller_of(agent), kind="human", agent=None, groups=APPROVERS)
    with pytest.raises(Failure, match="only a person"):
        await world.app.approvals.approve(ticket.rpartition("/")[2], by=forged)
    assert (approvals(world, "approved"), sample.world.runs) == ([], 0)

    # Nor does the person it acts for: somebody else decides, with a token of their own.
    refused(await world.post(f"{ticket}/approve", by="boss"), 403, "E3206")
    await world.identity("carol", "human", groups=APPROVERS)
    carol = await world.token("carol")
    agreed = await world.post(f"{ticket}/approve", by=carol)
    assert agreed.json()["status"] == "APPROVED"
    (record,) = approvals(world, "approved")
    own = (await world.post("/v1/tokens/inspect", {"token": carol}, carol)).json()["chain"][0]["jti"]
    assert (record["by"], record["token"]) == (did("carol"), own)


async def test_passing_a_token_on_lends_nobody_anothers_trust_groups_or_standing_approval(world: World) -> None:
    await world.identity("novice", "agent")
    await world.identity("deploybot", "agent", trust=90, groups=frozenset({"ops"}))
    novice = await world.token("novice", user="alice")
    trusted = await world.token("deploybot", user="alice")
    borrowed = (await world.post("/v1/tokens/delegate", {"to": "deploybot"}, novice)).json()["token"]
    caller = await world.app.caller_of(borrowed)
    assert (caller.trust, caller.groups, caller.passed_on) == (0, frozenset(), True)

    agreed = await world.post("/v1/approvals/standing", {**ADVANCE, "caller": "deploybot"}, "boss")
    assert agreed.status_code == 201, agreed.text
    await ask(world, "desk", by=borrowed)
    assert (await world.invoke(SEND, {"to": "desk"}, trusted, idempotency_key="own")).status_code == 200

    assert (await world.ask("PUT", "/v1/policy", "root", json={"text": TRUSTED_ONLY})).status_code == 200
    world.clock.advance(5)
    for token, status in ((novice, 403), (borrowed, 403), (trusted, 200)):
        answer = await world.invoke("demo.increment", {"name": "n"}, token, idempotency_key="n")
        assert answer.status_code == status, answer.text


# Whose tenant


async def test_nobody_of_another_tenant_agrees_sees_or_takes_back(world: World) -> None:
    await world.identity("eve", "human", tenant="acme", groups=APPROVERS)
    await world.identity("acmebot", "agent", tenant="acme")
    eve, acmebot = await world.token("eve"), await world.token("acmebot")
    for whom in ("local:root", "local:ann", "scout", did("scout"), "nobody"):
        refused(await world.post("/v1/approvals/standing", {**ADVANCE, "caller": whom}, eve), 404, "E3207")
    # Not even an approval that was given past the door serves a caller of another tenant.
    by = await world.app.caller_of(eve)
    for whom, tenant in (("local:ann", None), (did("scout"), None), ("local:ann", "local")):
        grant = world.app.standing_approvals.grant(
            SEND, by=by, caller=whom, tenant=tenant, arguments={"to": "*desk"}, uses=2,
            expires_ms=world.clock.now_ms + 60_000,
        )  # fmt: skip
        if tenant is None:
            assert (await grant).tenant == "acme"
        else:
            with pytest.raises(Failure, match="belongs to local"):
                await grant
    ticket = await ask(world, "desk")
    assert (await world.app.call(SEND, to="desk", caller=Caller(id="local:ann"), key="k")).pending

    # Of what is there and of what is not they are told the same, whoever they are; that they tried is on record.
    real, invented = ticket.rpartition("/")[2], "apr_01M7ETAX1RAFF8FEA10B286E99"
    for method, act in (("GET", ""), ("POST", "/approve"), ("POST", "/deny")):
        words: set[str] = set()
        for one in (real, invented):
            answer = await world.ask(
                method, f"/v1/approvals/{one}{act}", eve, **({} if method == "GET" else {"json": {}})
            )
            words.add(refused(answer, 404, "E3702")["humanMessage"].replace(one, "X"))
        assert len(words) == 1, words
    for stranger in (by, await world.app.caller_of(acmebot)):
        told: set[str] = set()
        for one in (real, real[-8:], invented):
            with pytest.raises(Failure) as caught:
                await world.app.approvals.approve(one, by=stranger)
            told.add(f"{caught.value.code} {caught.value.message.replace(one, 'X')}")
        assert told == {"E3702 no ticket has the id `X`; see interlock approvals list"}
    assert {(one["by"], "belongs to local" in one["why"]) for one in approvals(world, "refused")} == {
        (did("eve"), True), (did("acmebot"), True),
    }  # fmt: skip
    ours = (await world.post("/v1/approvals/standing", {**ADVANCE, "caller": "scout"}, "boss")).json()
    assert ours["id"] not in str((await world.get("/v1/approvals/standing", eve)).json())
    refused(await world.ask("DELETE", f"/v1/approvals/standing/{ours['id']}", eve), 404, "E3702")
    with pytest.raises(Failure, match="no standing approval"):
        await world.app.standing_approvals.revoke(ours["id"], by=by)

    # Among themselves they may; and whoever runs the place decides for all of it.
    theirs = await world.post("/v1/approvals/standing", {**ADVANCE, "caller": "acmebot", "uses": 1}, eve)
    assert (theirs.status_code, theirs.json()["tenant"]) == (201, "acme")
    assert (await world.invoke(SEND, {"to": "desk"}, acmebot, idempotency_key="1")).status_code == 200
    second = await ask(world, "front-desk", by=acmebot)
    assert (await world.post(f"{second}/approve", by="boss")).json()["status"] == "APPROVED"


# How far their own token reaches


@pytest.mark.parametrize(
    "narrowing",
    [
        {"tools": ("demo.add",)},
        {"tools": (f"{SEND}@^2.0.0",)},
        {"constraints": {"mutation_class": "write_reversible"}},
        {"constraints": {"environments": ["elsewhere"]}},
        {"resources": ["mail:desk"]},
    ],
)
async def test_a_person_agrees_to_nothing_that_their_own_token_does_not_cover(world: World, narrowing: Json) -> None:
    narrow = await world.token("boss", **narrowing)
    ticket = await ask(world)
    for body in ({}, {"edit": {"to": "nowhere"}}):
        answer = await world.post(f"{ticket}/approve", body, narrow)
        assert (answer.status_code, answer.json()["error"]["error_code"][:4]) == (403, "E320"), answer.text
    assert {one["by"] for one in approvals(world, "refused")} == {did("boss")}
    for versions in ("1.0.0", ">=1.0.0"):
        wish = {**ADVANCE, "caller": "scout", "versions": versions}
        assert (await world.post("/v1/approvals/standing", wish, narrow)).status_code == 403
    assert (await world.get("/v1/approvals/standing", "boss")).json()["standing"] == []
    # A no lets nothing happen, so it takes no more than being asked.
    assert (await world.post(f"{ticket}/deny", by=narrow)).json()["status"] == "DENIED"


async def test_a_person_agrees_to_what_their_narrow_token_covers(world: World) -> None:
    narrow = await world.token(
        "boss",
        tools=(f"{SEND}@^1.0.0",),
        resources=["mail:desk"],
        constraints={"mutation_class": "write_irreversible", "max_cost": 1},
    )
    ticket = await ask(world, "press")
    agreed = await world.post(f"{ticket}/approve", {"edit": {"to": "desk"}}, narrow)
    assert agreed.json()["status"] == "APPROVED", agreed.text
    assert (await go_on(world)).json()["result"] == "desk"
    exact = {**ADVANCE, "caller": "scout", "arguments": {"to": "desk"}}
    assert (await world.post("/v1/approvals/standing", exact, narrow)).status_code == 201
    for wish in ({"arguments": {"to": "press"}}, {"arguments": {"to": "desk*"}}, {"versions": "^1.0.0"}):
        assert (await world.post("/v1/approvals/standing", {**exact, **wish}, narrow)).status_code == 403


async def test_agreeing_is_a_use_of_a_token_that_has_few(world: World) -> None:
    three = await world.token("boss", constraints={"max_uses": 3})
    wish = {**ADVANCE, "caller": "scout"}
    refused(await world.post("/v1/approvals/standing", {**wish, "uses": 4}, three), 403, "E3206")
    first, second = await ask(world, "a"), await ask(world, "b")
    assert (await world.post(f"{first}/approve", by=three)).status_code == 200
    assert (await world.post("/v1/approvals/standing", wish, three)).status_code == 201
    refused(await world.post(f"{second}/approve", by=three), 403, "E3206")
    refused(await world.post("/v1/approvals/standing", {**wish, "uses": 1}, three), 403, "E3206")
    refused(await world.invoke("demo.add", {"a": 1}, three), 403, "E3206")
    assert "used up" in approvals(world, "refused")[-1]["why"]


# In the database


def tamper(world: World, statement: str, *values: Any) -> list[Any]:
    """Write to the database as somebody would who can."""
    with stores.opened(world.app.home) as connection:
        done = connection.execute(statement, values)
        return done.fetchall() if done.description else []


AGREED = "UPDATE ticket SET state = 'APPROVED', resolved_by = ?, resolved_ms = created_ms"


@pytest.mark.parametrize("decided", [False, True])
async def test_a_ticket_that_only_its_row_calls_approved_does_not_run(world: World, decided: bool) -> None:
    ticket = await ask(world)
    if decided:
        before = tamper(world, "SELECT sealed FROM ticket")
        await world.post(f"{ticket}/deny", by="boss")
        tamper(world, "UPDATE ticket SET sealed = ?", before[0][0])
    tamper(world, AGREED, did("boss"))
    refused(await go_on(world), 403, "E3209")
    resumed = await world.app.approved_calls.resume(ticket.rpartition("/")[2])
    assert resumed.error is not None
    assert resumed.error.code == "E3209"
    with pytest.raises(Failure, match="nothing to go on with"):
        await world.app.approved_calls.resume(ticket.rpartition("/")[2])
    assert (sample.world.runs, approvals(world, "used")) == (0, [])


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ("expires_ms = expires_ms + 1", 403),
        ("resolved_by = 'local:ghost'", 403),
        ("edited = NULL", 403),
        # No ticket of this caller any more: a new one is asked for.
        ("policy = 'another', requester = 'did:example:other'", 202),
    ],
)
async def test_an_approval_that_was_bent_in_its_row_does_not_count(world: World, change: str, status: int) -> None:
    ticket = await ask(world)
    await world.post(f"{ticket}/approve", {"edit": {"to": "desk"}}, "boss")
    tamper(world, f"UPDATE ticket SET {change}")
    assert (await go_on(world)).status_code == status
    assert (sample.world.runs, approvals(world, "used")) == (0, [])


async def test_an_approval_is_not_used_again_because_its_row_was_put_back(world: World) -> None:
    ticket = await ask(world)
    await world.post(f"{ticket}/approve", by="boss")
    ((sealed,),) = tamper(world, "SELECT sealed FROM ticket")
    assert (await go_on(world)).json()["result"] == "press"
    tamper(world, "UPDATE ticket SET state = 'APPROVED', sealed = ?", sealed)
    tamper(world, "DELETE FROM reservation")
    refused(await go_on(world), 403, "E3209")
    assert sample.world.runs == 1


@pytest.mark.parametrize(
    "change", ["uses = 99", "used = 0", "revoked_ms = NULL, used = 1", 'arguments = \'{"to": "f*"}\'']
)
async def test_a_standing_approval_that_was_bent_in_its_row_does_not_count(world: World, change: str) -> None:
    made = (await world.post("/v1/approvals/standing", {**ADVANCE, "caller": "scout"}, "boss")).json()
    assert (await go_on(world, "desk")).status_code == 200
    if "revoked" in change:
        await world.ask("DELETE", f"/v1/approvals/standing/{made['id']}", "boss")
    tamper(world, f"UPDATE standing SET {change}")
    refused(await go_on(world, "front-desk"), 403, "E3209")
    assert sample.world.runs == 1


async def test_nobody_on_whose_behalf_an_irreversible_call_is_asked_for_decides_on_it(world: World) -> None:
    await world.identity("carol", "human", groups=frozenset({"approvers"}))
    carol, agent = await world.token("carol"), await world.token("scout", user="carol")
    ticket = await ask(world, "press", by=agent)
    for decision in ("approve", "deny"):
        envelope = refused(await world.post(f"{ticket}/{decision}", by=carol), 403, "E3206")
        assert "on whose behalf" in envelope["humanMessage"]
    assert {one["by"] for one in approvals(world, "refused")} == {did("carol")}
    assert (await world.post(f"{ticket}/approve", by="boss")).json()["status"] == "APPROVED"


async def test_four_eyes_can_be_left_to_those_who_did_not_ask(world: World) -> None:
    await world.identity("carol", "human", groups=frozenset({"approvers"}))
    carol, agent = await world.token("carol"), await world.token("scout", user="carol")
    ticket = await ask(world, "press", by=agent)
    lax = world.app.settings.model_copy(update={"four_eyes": "never"})
    world.app.approvals._settings = lax  # pyright: ignore[reportPrivateUsage] - as if it were opened so
    assert (await world.post(f"{ticket}/approve", by=carol)).json()["status"] == "APPROVED"

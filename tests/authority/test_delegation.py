"""Delegation: whoever signs, nobody below holds more; and what is revoked takes everything below with it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.authority.delegation import delegate_offline, narrowed
from interlock.authority.identities import Identity
from interlock.call.capability import DEEPEST, Link, ToolGrant, read_above, read_link, write_above, write_link
from interlock.call.context import CallerKind
from interlock.core.errors import Failure
from tests.support.identities import AGENT, HELPER, OPERATOR, USER, did_of, private_key
from tests.support.stores import notice
from tests.support.tokens import DEPUTIES, NAMES, World, opened, parts, sign
from tests.support.tokens import world as world

Json = dict[str, Any]
T = TypeVar("T")


def chain_of(token: str) -> tuple[Link, ...]:
    """What a token states, believed or not."""
    _, claims = parts(token)
    return (*read_above(claims.get("act")), read_link(claims))


def passed_on(world: World, parent: str, *, by: str = "agent", to: str = HELPER, **claims: Any) -> str:
    """A child that its holder signs himself, with nothing checked and anything changed."""
    links = chain_of(parent)
    now_s = world.clock.now_ms // 1000
    link = narrowed(links[-1], subject=to, jti=f"{links[-1].jti}/1", now_s=now_s)
    stated: Json = {
        "iss": did_of(by),
        "aud": "interlock",
        "iat": now_s,
        "proof": parent,
        **write_link(link),
        "act": write_above(links),
    }
    changed = {name: value for name, value in (stated | claims).items() if value is not ...}
    return sign({"alg": "EdDSA", "typ": "JWT"}, changed, private_key(by))


GRANT: Json = {
    "tools": [ToolGrant("demo.*", "^1.0.0")],
    "resources": ["file:/a/*"],
    "constraints": {"max_uses": 5, "mutation_class": "write_reversible"},
}


# Passing on


@pytest.mark.proves("AUTH-08")
async def test_a_token_is_passed_on_through_the_issuer(world: World) -> None:
    token = await world.issue(**GRANT)
    below = await world.tokens.delegate(
        token, subject=HELPER, by=OPERATOR, scopes=["a:read"], tools=[ToolGrant("demo.add", "~1.2.0")], ttl_s=60,
        constraints={"max_uses": 1},
    )  # fmt: skip
    caller = await world.tokens.verifier.verify(below)
    assert (caller.id, caller.agent, caller.scopes) == (USER, HELPER, {"a:read"})
    capability = caller.capability
    assert capability is not None
    assert [link.subject for link in capability.links] == [USER, AGENT, HELPER]
    assert capability.leaf.constraints == {"max_uses": 1, "mutation_class": "write_reversible"}
    assert capability.leaf.expires - capability.leaf.not_before == 60
    assert capability.covers("demo.add", "1.2.9")
    assert not capability.covers("demo.add", "1.3.0")
    assert [act["act"] for act in world.acts()][-2:] == ["token.issued", "token.delegated"]


async def test_a_holder_passes_his_token_on_without_asking_anybody(world: World) -> None:
    token = await world.issue(**GRANT)
    below = delegate_offline(
        token, private=private_key("agent"), subject=HELPER, clock=world.clock.clock, scopes=["a:read"], ttl_s=60
    )
    caller = await world.tokens.verifier.verify(below)
    assert (caller.id, caller.agent, caller.scopes) == (USER, HELPER, {"a:read"})
    assert caller.capability is not None
    assert caller.capability.issuer == "interlock"
    assert caller.capability.keys[0] == world.keys.active().kid
    assert caller.capability.keys[1].startswith(f"{AGENT}#")
    # And on, from either kind, by either way.
    first, second = map(did_of, DEPUTIES[:2])
    again = delegate_offline(below, private=private_key("helper"), subject=first, clock=world.clock.clock)
    assert (await world.tokens.verifier.verify(again)).agent == first
    signed = await world.tokens.delegate(again, subject=second, by=OPERATOR)
    assert len(chain_of(signed)) == 5
    assert (await world.tokens.verifier.verify(signed)).agent == second


async def test_a_token_comes_back_to_nobody_who_passed_it_on(world: World) -> None:
    token = await world.issue()
    below = await world.tokens.delegate(token, subject=HELPER, by=OPERATOR)
    for parent, holder, back in ((token, "agent", AGENT), (token, "agent", USER), (below, "helper", AGENT)):
        with pytest.raises(Failure) as asked:
            await world.tokens.delegate(parent, subject=back, by=OPERATOR)
        with pytest.raises(Failure) as alone:
            delegate_offline(parent, private=private_key(holder), subject=back, clock=world.clock.clock)
        forged = await world.refusal(passed_on(world, parent, by=holder, to=back))
        assert (asked.value.code, alone.value.code, forged) == ("E3206", "E3206", "E3206")


async def test_a_token_is_passed_on_to_no_person(world: World) -> None:
    carol = did_of("carol")
    await world.identities.register(Identity(did=carol, kind="human", groups=frozenset({"approvers"})), by="test")
    token = await world.issue(scopes=["tokens:issue"])
    with pytest.raises(Failure) as asked:
        await world.tokens.delegate(token, subject=carol, by=OPERATOR)
    by_token = await world.issue_refusal(
        subject=carol, user=None, scopes=[], by=await world.tokens.verifier.verify(token)
    )
    offline = delegate_offline(token, private=private_key("agent"), subject=carol, clock=world.clock.clock)
    assert (asked.value.code, by_token, await world.refusal(offline)) == ("E3206", "E3206", "E3206")
    # Whom a token is for already, it need not be issued for again.
    held = await world.tokens.verifier.verify(await world.issue(subject=USER, user=None, scopes=["tokens:issue"]))
    again = await world.tokens.verifier.verify(await world.issue(user=USER, scopes=[], by=held))
    assert (again.id, again.agent, again.kind) == (USER, AGENT, "agent")


async def test_only_the_holder_s_key_passes_a_token_on(world: World) -> None:
    token = await world.issue()
    with pytest.raises(Failure) as refused:
        delegate_offline(token, private=private_key("helper"), subject=HELPER, clock=world.clock.clock)
    assert refused.value.code == "E3206"
    header, claims = parts(passed_on(world, token))
    assert await world.refusal(sign(header, claims, private_key("helper"))) == "E3202"
    # The signer's name put in place of the holder's does not help.
    assert await world.refusal(passed_on(world, token, by="helper")) == "E3203"


WIDER: list[tuple[Json, str]] = [
    ({"scopes": ["a:read", "a:write", "admin"]}, "admin"),
    ({"tools": [ToolGrant("*")]}, "`*`"),
    ({"tools": [ToolGrant("demo.add", ">=1.0.0")]}, ">=1.0.0"),
    ({"tools": [ToolGrant("mail.send")]}, "mail.send"),
    ({"resources": ["file:/*"]}, "file:/*"),
    ({"constraints": {"max_uses": 6}}, "max_uses"),
    ({"constraints": {"mutation_class": "write_irreversible"}}, "mutation_class"),
    ({"ttl_s": 601}, "ends after"),
]


@pytest.mark.proves("AUTH-08")
@pytest.mark.parametrize(("more", "words"), WIDER)
async def test_a_wider_child_is_refused_at_issue_and_the_widening_is_named(
    world: World, more: Json, words: str
) -> None:
    token = await world.issue(**GRANT)
    with pytest.raises(Failure) as refused:
        await world.tokens.delegate(token, subject=HELPER, by=OPERATOR, **more)
    assert refused.value.code == "E3206"
    assert words in refused.value.message
    with pytest.raises(Failure) as offline:
        delegate_offline(token, private=private_key("agent"), subject=HELPER, clock=world.clock.clock, **more)
    assert offline.value.code == "E3206"
    assert [act["act"] for act in world.acts()].count("token.issued") == len(world.acts()) - len(NAMES) == 1


@pytest.mark.parametrize(
    "more",
    [
        {"scopes": ["a:read", "admin"]},
        {"tools": [{"tool_id": "*", "version_range": "*"}]},
        {"tools": [{"tool_id": "demo.add", "version_range": "^1.0.0 || ^2.0.0"}]},
        {"resources": ...},
        {"resources": ["*"]},
        {"constraints": {}},
        {"constraints": ...},
        {"constraints": {"max_uses": 6, "mutation_class": "read_only"}},
        {"exp": 1_800_000_601},
        {"nbf": 1_799_999_999},
    ],
)
@pytest.mark.proves("AUTH-08")
async def test_a_forged_wider_child_signed_by_a_valid_agent_key_is_refused(world: World, more: Json) -> None:
    token = await world.issue(**GRANT)
    assert (await world.tokens.verifier.verify(passed_on(world, token))).agent == HELPER
    forged = passed_on(world, token, **more)
    with pytest.raises(Failure) as refused:
        await world.tokens.verifier.verify(forged)
    assert refused.value.code == "E3203"
    assert "holds more than the one above it" in refused.value.message


async def test_a_chain_is_what_its_proof_says(world: World) -> None:
    token = await world.issue(scopes=["a:read"])
    links = chain_of(token)
    wider = tuple(replace(link, scopes=frozenset({"a:read", "admin"})) for link in links)
    others: list[Any] = [
        write_above(wider),
        write_above(links[1:]),
        write_above((*links, links[-1])),
        write_above((replace(links[0], subject=HELPER), links[1])),
        write_above((replace(links[0], jti="another"), links[1])),
        write_above((links[0], replace(links[1], expires=links[1].expires + 1))),
        ...,
        None,
    ]
    for act in others:
        assert await world.refusal(passed_on(world, token, act=act, scopes=["a:read"])) == "E3203"


async def test_a_token_signed_by_a_did_needs_the_proof_it_hangs_on(world: World) -> None:
    token, helpers = await world.issue(), await world.issue(subject=HELPER)
    for proof in (..., None, 5, "", "x.y.z", [token], token[:-8]):
        expected = "E3202" if proof == token[:-8] else "E3203"
        assert await world.refusal(passed_on(world, token, proof=proof)) == expected, proof
    # Somebody else's token is no proof, nor is one that has ended.
    assert await world.refusal(passed_on(world, token, proof=helpers)) == "E3203"
    brief = await world.issue(ttl_s=1)
    below = passed_on(world, brief)
    world.clock.advance(1)
    assert await world.refusal(below) == "E3201"
    # Nobody signs for himself out of nothing.
    alone = passed_on(world, token, proof=..., act=..., sub=AGENT)
    assert await world.refusal(alone) == "E3203"


async def test_a_holder_cannot_take_another_link_s_id(world: World) -> None:
    token, other = await world.issue(), await world.issue()
    for jti in (chain_of(other)[-1].jti, chain_of(token)[-1].jti, f"{chain_of(other)[-1].jti}/1"):
        assert await world.refusal(passed_on(world, token, jti=jti)) == "E3203"


async def test_a_chain_has_at_most_eight_links(world: World) -> None:
    token = await world.issue(scopes=[])
    for deputy in DEPUTIES:
        token = await world.tokens.delegate(token, subject=did_of(deputy), by=OPERATOR)
    assert len(chain_of(token)) == DEEPEST
    assert (await world.tokens.verifier.verify(token)).agent == did_of(DEPUTIES[-1])
    with pytest.raises(Failure) as refused:
        await world.tokens.delegate(token, subject=HELPER, by=OPERATOR)
    assert refused.value.code == "E3004"
    links = chain_of(token)
    header, claims = parts(token)
    ninth = claims | {"act": write_above((*links[:-1], replace(links[-1], jti="x"), links[-1]))}
    assert await world.refusal(sign(header, ninth, world.keys.active().private)) == "E3203"
    # The same by proofs within proofs.
    proven = await world.issue(user=None, scopes=[])
    for holder, deputy in pairwise(("agent", *DEPUTIES, "helper", "ninth")):
        proven = passed_on(world, proven, by=holder, to=did_of(deputy))
    assert await world.refusal(proven) == "E3203"


@pytest.mark.proves("AUTH-08")
async def test_an_issuer_s_own_wider_chain_is_refused_too(world: World) -> None:
    header, claims = parts(await world.issue(scopes=["a:read"]))
    wider = claims | {"scopes": ["a:read", "admin"]}
    assert await world.refusal(sign(header, wider, world.keys.active().private)) == "E3203"


# Revoking


@pytest.mark.parametrize("level", range(4))
@pytest.mark.proves("AUTH-08")
async def test_revoking_a_link_voids_it_and_everything_below(world: World, level: int) -> None:
    first = await world.issue()
    second = await world.tokens.delegate(first, subject=HELPER, by=OPERATOR)
    deputy = did_of(DEPUTIES[0])
    third = delegate_offline(second, private=private_key("helper"), subject=deputy, clock=world.clock.clock)
    links = chain_of(third)
    held = {token: (await world.tokens.verifier.verify(token)).capability for token in (first, second, third)}
    await world.tokens.revoke(links[level].jti, reason="no longer needed", by=OPERATOR)
    for depth, token in enumerate((first, second, third), start=1):
        capability = held[token]
        assert capability is not None
        if level <= depth:
            with pytest.raises(Failure) as void:
                world.tokens.verifier.check(capability)
            assert void.value.code == "E3201"
            assert "revoked" in void.value.message
            assert await world.refusal(token) == "E3201"
        else:
            world.tokens.verifier.check(capability)
            await world.tokens.verifier.verify(token)


@pytest.mark.parametrize("what", ["token", "user", "agent", "holder key"])
async def test_tokens_identities_and_keys_can_be_revoked_by_what_names_them(world: World, what: str) -> None:
    token, bystander = await world.issue(), await world.issue(subject=HELPER, user=None)
    below = delegate_offline(token, private=private_key("agent"), subject=HELPER, clock=world.clock.clock)
    capability = (await world.tokens.verifier.verify(below)).capability
    assert capability is not None
    ref = {"token": token, "user": USER, "agent": AGENT, "holder key": capability.keys[-1]}[what]
    await world.tokens.revoke(ref, reason="lost", by=OPERATOR)
    assert await world.refusal(below) == "E3201"
    assert (await world.tokens.verifier.verify(bystander)).agent == HELPER
    assert token not in str(world.acts())


async def test_a_key_takes_down_what_the_issuer_passed_on_from_what_it_signed(world: World) -> None:
    token = await world.issue()
    below = delegate_offline(token, private=private_key("agent"), subject=HELPER, clock=world.clock.clock)
    again = await world.tokens.delegate(below, subject=did_of(DEPUTIES[0]), by=OPERATOR)
    capability = (await world.tokens.verifier.verify(again)).capability
    assert capability is not None
    assert set(capability.keys) == {world.keys.active().kid, f"{AGENT}#{AGENT.rpartition(':')[2]}"}
    await world.tokens.revoke(capability.keys[1], reason="leaked", by=OPERATOR)
    assert await world.refusal(again) == "E3201"
    assert (await world.tokens.verifier.verify(token)).agent == AGENT
    for via in ("x", [1], None):
        header, claims = parts(token)
        assert await world.refusal(sign(header, claims | {"via": via}, world.keys.active().private)) == "E3203"


async def test_a_forgery_gets_nobody_s_token_revoked(world: World) -> None:
    token = await world.issue()
    forged = sign(*parts(token), private_key("mallory", "RS256"))
    with pytest.raises(Failure) as refused:
        await world.tokens.revoke(forged, reason="trust me", by=OPERATOR)
    assert refused.value.code == "E3202"
    with pytest.raises(Failure) as scope:
        await world.tokens.revoke(token, reason="trust me", by=await world.tokens.verifier.verify(token))
    assert scope.value.code == "E3206"
    assert (await world.tokens.verifier.verify(token)).agent == AGENT


@pytest.mark.parametrize("what", ["link", "identity", "update", "key"])
async def test_another_process_on_the_home_notices_within_50_ms(world: World, what: str) -> None:
    token = await world.issue()
    other = World(world.home.path, world.clock)
    try:
        caller = await other.tokens.verifier.verify(token)
        assert other.tokens.verifier.known(token) is caller
        if what == "link":
            await world.tokens.revoke(chain_of(token)[0].jti, reason="lost", by=OPERATOR)
        elif what == "identity":
            await world.identities.revoke(USER, reason="left", by="operator")
        elif what == "update":
            await world.identities.update(Identity(did=AGENT, name="agent", trust=1), by="operator")
        else:
            await world.tokens.revoke(world.keys.active().kid, reason="leaked", by=OPERATOR)
        await notice(world.clock, other.journal)
        assert other.tokens.verifier.known(token) is None
        assert caller.capability is not None
        if what == "update":
            assert (await other.tokens.verifier.verify(token)).trust == 1
            return
        with pytest.raises(Failure) as void:
            other.tokens.verifier.check(caller.capability)
        assert void.value.code == "E3201"
    finally:
        await other.journal.close()


# Random trees

TOOLS = ["*", "demo.*", "demo.add"]
RANGES = ["*", "^1.0.0", "^1.2.0", ">=1.0.0", "2.x"]
CALLS = list(product(["demo.add", "demo.sub", "mail.send"], ["1.0.0", "1.2.0", "2.0.0", "3.0.0-a"]))
PLACES = ["file:/a/b", "file:/a/c", "file:/b"]
HOLDERS = ["user", "agent", "helper", *DEPUTIES[:3]]

grants = st.builds(ToolGrant, st.sampled_from(TOOLS), st.sampled_from(RANGES))
options: dict[str, st.SearchStrategy[Any]] = {
    "scopes": st.lists(st.sampled_from(["a", "b", "c"]), unique=True),
    "tools": st.lists(grants, min_size=1, max_size=1),
    "resources": st.lists(st.sampled_from(["*", "file:/a/*", "file:/a/b"]), max_size=2),
    "constraints": st.builds(dict[str, Any], max_uses=st.integers(1, 3)),
    "ttl_s": st.sampled_from([100, 200, 300, 400]),
}
asked: st.SearchStrategy[Json] = st.fixed_dictionaries({}, optional=options)


@dataclass(frozen=True)
class Step:
    """One attempt to make a token: the parent it hangs on, the holder it is for, by which way, and what is asked."""

    parent: int
    holder: str
    way: str
    asked: Json


steps = st.builds(
    Step,
    parent=st.integers(0, 20),
    holder=st.sampled_from(HOLDERS),
    way=st.sampled_from(["issue", "delegate", "offline", "forge"]),
    asked=asked,
)


def holds_no_more(parent: Link, child: Link) -> bool:
    """An oracle of its own: what can be done with the one can be done with the other."""
    return (
        child.scopes <= parent.scopes
        and parent.not_before <= child.not_before
        and child.expires <= parent.expires
        and all(parent.covers(*call) for call in CALLS if child.covers(*call))
        and all(parent.covers_resource(place) for place in PLACES if child.covers_resource(place))
        and ("max_uses" not in parent.constraints or child.constraints["max_uses"] <= parent.constraints["max_uses"])
    )


async def make(world: World, step: Step, tokens: list[str]) -> str:
    """The token a step asks for; raises what refuses it."""
    if step.way == "issue" or not tokens:
        stated: Json = {"subject": did_of(step.holder), "user": None, "scopes": ["a", "b"], **step.asked}
        return await world.issue(**stated)
    parent = tokens[step.parent % len(tokens)]
    links = chain_of(parent)
    to, by = did_of(step.holder), next(name for name in HOLDERS if did_of(name) == links[-1].subject)
    if step.way == "delegate":
        return await world.tokens.delegate(parent, subject=to, by=OPERATOR, **step.asked)
    if step.way == "offline":
        return delegate_offline(parent, private=private_key(by), subject=to, clock=world.clock.clock, **step.asked)
    now_s = world.clock.now_ms // 1000
    jti = f"{links[-1].jti}/{len(tokens)}"
    wanted = narrowed(links[-1], subject=to, jti=jti, now_s=now_s, **step.asked)
    return passed_on(world, parent, by=by, to=to, **({"resources": ...} | write_link(wanted)))


async def outcome(work: Awaitable[T]) -> tuple[T | None, str | None]:
    """What came of it: a value, or the code of the refusal."""
    try:
        return await work, None
    except Failure as refused:
        return None, refused.code


@pytest.mark.proves("AUTH-08")
@settings(max_examples=25)
@given(plan=st.lists(steps, min_size=3, max_size=12), doomed=st.integers(0, 50))
def test_no_descendant_holds_more_and_revoking_a_link_voids_exactly_its_subtree(plan: list[Step], doomed: int) -> None:
    async def run(path: Path) -> None:
        async with opened(path, "EdDSA") as world:
            tokens: list[str] = []
            for step in plan:
                token, code = await outcome(make(world, step, tokens))
                if token is None:
                    assert code in ("E3206", "E3004")
                    continue
                caller, code = await outcome(world.tokens.verifier.verify(token))
                if caller is None:
                    # Only a forger gets as far as a token that does not verify, or who signs for a person by himself.
                    assert (step.way, code) in (("forge", "E3203"), ("forge", "E3206"), ("offline", "E3206"))
                    assert step.way == "forge" or step.holder == "user"
                    continue
                assert all(holds_no_more(above, below) for above, below in pairwise(chain_of(token)))
                tokens.append(token)
            if not tokens:
                return
            links = chain_of(tokens[doomed % len(tokens)])
            void = links[doomed % len(links)].jti
            await world.tokens.revoke(void, reason="chosen", by=OPERATOR)
            for token in tokens:
                _, code = await outcome(world.tokens.verifier.verify(token))
                assert code == ("E3201" if void in [link.jti for link in chain_of(token)] else None)

    with tempfile.TemporaryDirectory() as home:
        asyncio.run(run(Path(home) / "home"))


KINDS: tuple[CallerKind, ...] = ("human", "agent", "service")


@settings(max_examples=25)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=5),
    trusts=st.lists(st.integers(0, 100), min_size=5, max_size=5),
    groups=st.lists(st.frozensets(st.sampled_from(["a", "b", "c"])), min_size=5, max_size=5),
)
def test_passing_a_token_on_raises_no_trust_adds_no_group_and_makes_no_person(
    kinds: list[CallerKind], trusts: list[int], groups: list[frozenset[str]]
) -> None:
    async def run(path: Path) -> None:
        async with opened(path, "EdDSA") as world:
            people = [
                Identity(did=did_of(name), kind=kind, trust=trust, groups=within)
                for name, kind, trust, within in zip(DEPUTIES, kinds, trusts, groups, strict=False)
            ]
            for one in people:
                await world.identities.update(one, by="test")
            token = await world.issue(subject=people[0].did, user=None)
            before = await world.tokens.verifier.verify(token)
            assert (before.kind, before.trust, before.groups) == (kinds[0], trusts[0], groups[0])
            for above, one in pairwise(people):
                token, code = await outcome(world.tokens.delegate(token, subject=one.did, by=OPERATOR))
                if token is None:
                    assert (one.kind, code) == ("human", "E3206")
                    return
                caller = await world.tokens.verifier.verify(token)
                assert caller.kind != "human"
                assert caller.trust <= one.trust
                assert caller.groups <= one.groups
                # What the operator says of an agent a person chose counts; what an agent chooses adds nothing.
                assert caller.passed_on == (above.kind != "human")
                if above.kind != "human":
                    assert caller.trust <= before.trust
                    assert caller.groups <= before.groups
                    assert caller.kind in (before.kind, "agent")
                before = caller

    with tempfile.TemporaryDirectory() as home:
        asyncio.run(run(Path(home) / "home"))

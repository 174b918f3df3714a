"""Authority through the gateway: a call runs with what its caller was granted and its tool requires, and no more."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock import Caller, Context, Effect, Failure, Field, Interlock, tool
from interlock.authority.dids import make_did_key
from interlock.authority.identities import Identity
from interlock.authority.keys import make_private
from interlock.call.capability import ToolGrant
from interlock.call.results import Result
from interlock.core.errors import ErrorCode
from interlock.testing import FakeClock
from tests.sample import Name, increment, send, world
from tests.support.calls import code, publish, records
from tests.support.stores import notice

LEAST = pytest.mark.proves("AUTH-07")
SANDBOX = pytest.mark.supports("AUTH-09")
CANARY = "canary-in-the-environment-5512"

USER, AGENT, HELPER = (make_did_key(make_private("EdDSA").public_key()) for _ in range(3))
OPERATOR = Caller(id="local:operator", scopes=frozenset({"tokens:issue"}))
SCOPES = ("a:read", "b:read", "c:read")
SETS = tuple(itertools.chain.from_iterable(itertools.combinations(SCOPES, size) for size in range(4)))

Below = Annotated[str, Field(description="a tool to call next, or nothing", examples=[""])]
Path_ = Annotated[str, Field(description="where", examples=["a"])]


class Seen:
    """What tools found in their contexts."""

    def __init__(self) -> None:
        self.callers: list[Caller] = []
        self.contexts: list[Context] = []
        self.widen = False


seen = Seen()


def name_of(required: Sequence[str]) -> str:
    return "needs_" + ("_".join(scope[0] for scope in required) or "nothing")


def needing(required: Sequence[str]) -> Any:
    """A tool that requires some scopes, shows its context to the test, and calls on if it is told to."""

    @tool(
        version="1.0.0", mutation_class="read_only", namespace="least", name=name_of(required), scopes=required,
    )  # fmt: skip
    async def needs(ctx: Context, below: Below = "") -> str:
        """Look at the caller, and call another tool if one is named."""
        seen.callers.append(ctx.caller)
        seen.contexts.append(ctx)
        if seen.widen:
            ctx.caller = dataclasses.replace(ctx.caller, id="local:root", scopes=frozenset(SCOPES))
            ctx.task = ctx.invocation_id = "another"
        return await ctx.call(below) if below else "done"

    return needs


NEEDING = {required: needing(required) for required in SETS}


@tool(version="1.0.0", mutation_class="read_only", namespace="least")
async def versioned(ctx: Context) -> str:
    """The first version of something."""
    return "1"


@tool(version="2.0.0", mutation_class="read_only", namespace="least", name="versioned", behaviour_change=True)
async def versioned_anew(ctx: Context) -> str:
    """The second version of something."""
    return "2"


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="least", effects=[Effect("counter:{name}", "UPDATE")],
)  # fmt: skip
async def outer(ctx: Context, name: Name) -> int:
    """A write that makes another."""
    ctx.effect(f"counter:{name}", "UPDATE", after=1)
    return await ctx.call("demo.increment", name=name, key="inner")


@outer.compensate
async def _(result: int) -> None:
    return None


TOOLS = (*NEEDING.values(), versioned, versioned_anew, outer)


@pytest.fixture
def time() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def held(home: Path, time: FakeClock) -> AsyncGenerator[Interlock]:
    """A home with a user, an agent and a helper, and an issuer."""
    seen.__init__()
    async with Interlock.open(home, clock=time.clock, housekeeping=False) as app:
        for one in TOOLS:
            await app.journal.commit(publish(one))
        for one in (*TOOLS, increment, send):
            app.catalog.attach(one)
        await app.identities.register(Identity(did=USER, kind="human"), by="test")
        for did in (AGENT, HELPER):
            await app.identities.register(Identity(did=did, trust=90), by="test")
        app.issuer_keys.init("EdDSA")
        yield app


async def token_of(app: Interlock, **said: Any) -> str:
    stated: dict[str, Any] = {"subject": AGENT, "user": USER, "by": OPERATOR}
    return await app.tokens.issue(**(stated | said))


def answer(result: Result) -> tuple[str | None, int]:
    return code(result), 200 if result.error is None else result.error.row.http


# Least privilege


some = st.sampled_from(SETS)


@LEAST
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(granted=some, required=some, extra=st.booleans())
async def test_a_call_is_allowed_if_all_it_requires_is_granted_and_sees_just_that(
    held: Interlock, granted: Sequence[str], required: Sequence[str], extra: bool
) -> None:
    seen.callers.clear()
    scopes = frozenset(granted).union(["z:other"] if extra else [])
    result = await held.call(f"least.{name_of(required)}", caller=Caller(id="user:ann", scopes=scopes))
    assert result.ok == (set(required) <= set(granted))
    if result.ok:
        (caller,) = seen.callers
        assert caller.scopes == scopes & set(required)
        assert caller.id == "user:ann"
    else:
        assert result.error is not None
        assert (result.error.code, result.error.row.error_code) == ("E3206", ErrorCode.AUTHORIZATION_DENIED)
        assert not seen.callers


@LEAST
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(granted=some, outer=some, inner=some)
async def test_a_call_below_has_no_more_than_the_call_above_it_had(
    held: Interlock, granted: Sequence[str], outer: Sequence[str], inner: Sequence[str]
) -> None:
    seen.callers.clear()
    caller = Caller(id="user:ann", scopes=frozenset(granted))
    result = await held.call(f"least.{name_of(outer)}", below=f"least.{name_of(inner)}", caller=caller)
    assert result.ok == (set(inner) <= set(outer) <= set(granted))
    views = [caller.scopes for caller in seen.callers]
    assert views == [set(outer), set(inner)][: len(views)]


@LEAST
async def test_a_tool_cannot_give_itself_another_caller(held: Interlock) -> None:
    seen.widen = True
    ann = Caller(id="user:ann")
    result = await held.call("least.needs_nothing", below="least.needs_a_b_c", caller=ann)
    assert code(result) == "E3206"
    below, above = records(held)
    assert (below["callerId"], above["callerId"]) == ("user:ann", "user:ann")
    assert (below["parent"], below["task"]) == (above["call"], above["call"])


@LEAST
async def test_a_token_grants_the_scopes_it_names_and_no_others(held: Interlock) -> None:
    token = await token_of(held, scopes=["a:read", "b:read"])
    assert (await held.call("least.needs_a", token=token)).ok
    assert seen.callers[0].scopes == {"a:read"}
    assert answer(await held.call("least.needs_a_c", token=token)) == ("E3206", 403)
    narrow = await held.tokens.delegate(token, subject=HELPER, by=OPERATOR, scopes=["b:read"])
    assert answer(await held.call("least.needs_a", token=narrow)) == ("E3206", 403)


# What a token says


@pytest.mark.proves("AUTH-02")
async def test_a_narrow_token_gains_nothing_from_what_a_wide_one_was_allowed(held: Interlock) -> None:
    wide = await token_of(held)
    narrow = await token_of(held, tools=[ToolGrant("least.versioned", "^1.0.0")])
    for again in (False, True):
        evaluations = held.policy.evaluations
        assert (await held.call("least.versioned@2.0.0", token=wide)).unwrap() == "2"
        assert (held.policy.evaluations == evaluations) is again, "the second time the decision is a cached one"
        assert answer(await held.call("least.versioned@2.0.0", token=narrow)) == ("E3204", 403)
        assert (await held.call("least.versioned@1.0.0", token=narrow)).unwrap() == "1"
        assert answer(await held.call("demo.increment", name="a", key="k", token=narrow)) == ("E3204", 403)
        if again:
            assert held.policy.evaluations == evaluations, "no refused call reached the policy"


@pytest.mark.proves("AUTH-02")
async def test_a_token_that_names_no_tool_calls_none(held: Interlock) -> None:
    result = await held.call("least.versioned", token=await token_of(held, tools=[]))
    assert answer(result) == ("E3204", 403)
    assert "E3204" in str(result.document()["error"])


async def test_a_refused_token_is_a_result_and_on_record(held: Interlock, time: FakeClock) -> None:
    good = await token_of(held, ttl_s=60)
    head, claims, signature = good.split(".")
    forged = f"{head}.{claims}.{signature[:-4]}AAAA"
    unknown = make_did_key(make_private("EdDSA").public_key())
    revoked = await token_of(held, subject=HELPER)
    await held.identities.revoke(HELPER, reason="gone", by="test")
    with pytest.raises(Failure) as refused:
        await token_of(held, subject=unknown)
    assert refused.value.code == "E3207"
    given = {"not.a.token": ("E3203", 401), "junk": ("E3203", 401), forged: ("E3202", 401), revoked: ("E3201", 401)}
    for token, expected in given.items():
        result = await held.call("demo.increment", name="a", key="k", token=token)
        assert answer(result) == expected
        (record,) = records(held, result.invocation_id)
        assert (record["error_code"], record["toolId"], record["callerId"]) == (expected[0], "demo.increment", None)
        assert token not in str(records(held))
    time.advance(61)
    assert answer(await held.call("demo.increment", name="a", key="k", token=good)) == ("E3201", 401)
    assert world.runs == 0


@pytest.mark.proves("AUTH-02")
async def test_a_revocation_counts_from_the_next_call_on(held: Interlock, home: Path, time: FakeClock) -> None:
    token, other = await token_of(held), await token_of(held)
    assert (await held.call("least.needs_nothing", token=token)).ok
    assert (await held.call("least.needs_nothing", token=other)).ok
    await held.tokens.revoke(token, reason="lost", by=OPERATOR)
    assert answer(await held.call("least.needs_nothing", token=token)) == ("E3201", 401)
    assert (await held.call("least.needs_nothing", token=other)).ok
    async with Interlock.open(home, clock=time.clock, housekeeping=False) as elsewhere:
        await elsewhere.tokens.revoke(AGENT, reason="stolen", by=OPERATOR)
    await notice(time, held.journal)
    assert answer(await held.call("least.needs_nothing", token=other)) == ("E3201", 401)


@pytest.mark.supports("AUTH-02")
async def test_a_caller_that_was_known_is_refused_once_the_token_is_revoked(held: Interlock) -> None:
    """Also where somebody kept the caller instead of the token."""
    token = await token_of(held)
    caller = await held.caller_of(token)
    assert (await held.call("least.needs_nothing", caller=caller)).ok
    await held.tokens.revoke(token, reason="lost", by=OPERATOR)
    assert code(await held.call("least.needs_nothing", caller=caller)) == "E3201"


@pytest.mark.parametrize("what", ["link", "identity", "key"])
async def test_a_call_that_waited_is_refused_if_its_token_was_revoked_meanwhile(held: Interlock, what: str) -> None:
    token = await token_of(held)
    pending = await held.call("demo.send", to="b", key="k", token=token)
    ticket = pending.metadata["pending"]["ticketId"]
    await held.approvals.approve(ticket, by=Caller(id="local:reviewer", groups=frozenset({"approvers"})))
    ref = {"link": token, "identity": AGENT, "key": held.issuer_keys.active().kid}[what]
    await held.tokens.revoke(ref, reason="stolen", by=OPERATOR)
    assert answer(await held.approved_calls.resume(ticket)) == ("E3201", 401)
    assert world.runs == 0


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("a", True), ("a1", True), ("abc", True), ("b", False), ("", False), ("A", False), (" a", False),
        ("a/../b", False), ("a/./b", False), ("a//b", False), ("a%2f..%2fb", False), ("a%2e%2e", False),
        ("a\\..\\b", False), ("a\x00b", False), ("../a", False), ("b/../a", False),
        ("a\nb", False), ("а", False),  # the last is Cyrillic
    ],
)  # fmt: skip
async def test_a_token_for_some_resources_reaches_those_and_none_in_disguise(
    held: Interlock, name: str, allowed: bool
) -> None:
    token = await token_of(held, resources=["counter:a*"])
    result = await held.call("demo.increment", name=name, key="k", token=token)
    assert (code(result), world.runs) == ((None, 1) if allowed else ("E3206", 0))


async def test_a_token_for_some_resources_does_not_serve_a_tool_that_names_none(held: Interlock) -> None:
    token = await token_of(held, resources=["counter:a*"])
    assert code(await held.call("least.needs_nothing", token=token)) == "E3206"
    assert code(await held.call("least.outer", name="b", key="k", token=token)) == "E3206"
    assert (await held.call("least.outer", name="a", key="k", token=token)).ok


@pytest.mark.parametrize(
    ("constraints", "allowed"),
    [
        ({"mutation_class": "read_only"}, (True, False, False)),
        ({"mutation_class": "write_reversible"}, (True, True, False)),
        ({"mutation_class": "write_irreversible"}, (True, True, True)),
        ({"environments": ["production"]}, (False, False, False)),
        ({"environments": ["production", "local"]}, (True, True, True)),
    ],
)
async def test_a_token_can_be_bound_to_a_class_of_change_and_to_environments(
    held: Interlock, constraints: dict[str, Any], allowed: Sequence[bool]
) -> None:
    token = await token_of(held, constraints=constraints)
    calls: tuple[tuple[str, dict[str, Any]], ...] = (
        ("least.needs_nothing", {}),
        ("demo.increment", {"name": "a", "key": "k"}),
        ("demo.send", {"to": "b", "key": "k"}),
    )
    for (name, arguments), expected in zip(calls, allowed, strict=True):
        refused = code(await held.call(name, token=token, **arguments)) == "E3206"
        assert refused != expected, name


# Who it was


@SANDBOX
@pytest.mark.proves("AUTH-03")
async def test_every_record_names_the_verified_agent_and_the_user_it_began_with(held: Interlock) -> None:
    token = await token_of(held)
    result = await held.call("least.outer", name="a", key="k", token=token)
    assert result.ok
    narrow = await held.tokens.delegate(token, subject=HELPER, by=OPERATOR)
    pending = await held.call("demo.send", to="b", key="k", token=narrow)
    assert code(pending) == "E3208"
    for kind in ("intent", "closed", "mutation"):
        found = records(held, kind=kind)
        assert {(record["callerId"], record["agentId"]) for record in found} == {(USER, AGENT)}
        assert {record["toolId"] for record in found} >= {"least.outer", "demo.increment"}
    (asked,) = records(held, kind="pending")
    assert (asked["callerId"], asked["agentId"]) == (USER, HELPER)
    (below,) = [record for record in records(held) if record["toolId"] == "demo.increment"]
    assert below["parent"] == result.invocation_id


@SANDBOX
async def test_a_tool_is_handed_neither_the_token_nor_the_environment(
    held: Interlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERLOCK_TEST_CANARY", CANARY)
    token = await token_of(held, scopes=["a:read"])
    assert (await held.call("least.needs_a", token=token)).ok
    (context,) = seen.contexts
    handed = repr({name: value for name, value in vars(context).items() if not callable(value)})
    assert "a:read" in handed
    assert CANARY in os.environ.values()
    for secret in (token, token.split(".")[2], CANARY):
        assert secret not in handed

"""The last link of a chain is the invocation: it holds what its tool requires and its call touches, and no more."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import orjson
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock import Caller, Context, Effect, Failure, Field, Interlock, Preview, tool
from interlock.authority.identities import Identity
from interlock.call.capability import Capability
from interlock.gateway.approval.waiting_call import _caller_document, stored_caller  # pyright: ignore[reportPrivateUsage]
from interlock.testing import FakeClock
from tests.sample import Name, increment, send, world
from tests.support.calls import code, publish
from tests.support.identities import did_of

CHAIN = pytest.mark.proves("AUTH-08")
USER, AGENT = did_of("user"), did_of("agent")
SCOPES = ("a:read", "b:read", "c:read")
SETS = tuple(itertools.chain.from_iterable(itertools.combinations(SCOPES, size) for size in range(4)))
NAMES = ("a1", "a2", "b1")
Below = Annotated[str, Field(description="a counter to increment below, or nothing", examples=[""])]
_numbers = itertools.count()


def fresh() -> str:
    """An idempotency key that no call had before."""
    return f"k{next(_numbers)}"


class Seen:
    """The contexts' callers, and what happens inside the tool before it calls on."""

    def __init__(self) -> None:
        self.callers: list[Caller] = []
        self.first: Callable[[], None] = lambda: None


seen = Seen()


def name_of(required: Sequence[str]) -> str:
    return "holds_" + ("_".join(scope[0] for scope in required) or "nothing")


def holding(required: Sequence[str]) -> Any:
    """A write to one counter that requires some scopes and may call another write below."""

    @tool(
        version="1.0.0", mutation_class="write_reversible", namespace="link", name=name_of(required), scopes=required,
        effects=[Effect("counter:{name}", "UPDATE")], restart_safe=True,
    )  # fmt: skip
    async def holds(ctx: Context, name: Name, below: Below = "", tool: Below = "demo.increment") -> str:
        """Look at the caller, and change a counter below if one is named."""
        seen.callers.append(ctx.caller)
        seen.first()
        ctx.effect(f"counter:{name}", "UPDATE", after=1)
        if not below:
            return "done"
        try:
            await ctx.call(tool, name=below, key=fresh())
        except Failure as failure:
            return failure.code
        return "called"

    @holds.preview
    def _(name: str, below: str = "", tool: str = "") -> Preview:
        return Preview(impact=name)

    @holds.compensate
    async def _(result: str) -> None:
        return None

    return holds


HOLDING = {required: holding(required) for required in SETS}


@pytest.fixture
def time() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def held(home: Path, time: FakeClock) -> AsyncGenerator[Interlock]:
    seen.__init__()
    async with Interlock.open(home, clock=time.clock, housekeeping=False) as app:
        for one in HOLDING.values():
            await app.journal.commit(publish(one))
        for one in (*HOLDING.values(), increment, send):
            app.catalog.attach(one)
        await app.identities.register(Identity(did=USER, kind="human"), by="test")
        await app.identities.register(Identity(did=AGENT, trust=90), by="test")
        app.issuer_keys.init("EdDSA")
        yield app


async def of_agent(
    app: Interlock,
    user: Sequence[str] = SCOPES,
    agent: Sequence[str] = SCOPES,
    resources: Sequence[str] | None = None,
    ttl_s: int = 60,
) -> str:
    """A token that a person got and passed on to an agent, each with some scopes."""
    owned = await app.tokens.issue(subject=USER, scopes=user, ttl_s=600, by=app.caller)
    return await app.tokens.delegate(
        owned, subject=AGENT, scopes=agent, resources=resources, ttl_s=ttl_s, by=app.caller
    )


def chain(caller: Caller) -> Capability:
    assert caller.capability is not None
    return caller.capability


some = st.sampled_from(SETS)


@CHAIN
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    user=some,
    agent=some,
    required=some,
    name=st.sampled_from(NAMES),
    below=st.sampled_from(NAMES),
    bound=st.sampled_from([None, ("counter:a*",), ("counter:a1", "counter:b1")]),
)
async def test_an_invocation_holds_no_more_than_its_agent_and_the_agent_no_more_than_the_user(
    held: Interlock,
    user: Sequence[str],
    agent: Sequence[str],
    required: Sequence[str],
    name: str,
    below: str,
    bound: tuple[str, ...] | None,
) -> None:
    seen.callers.clear()
    agent = tuple(set(agent) & set(user))
    token = await of_agent(held, user, agent, bound)
    result = await held.call(f"link.{name_of(required)}", {"name": name, "below": below}, key=fresh(), token=token)
    reached = bound is None or any(f"counter:{name}".startswith(one.rstrip("*")) for one in bound)
    if not (set(required) <= set(agent) and reached):
        assert (code(result), seen.callers) == ("E3206", [])
        return
    (caller,) = seen.callers
    root, leaf = chain(caller).links
    assert caller.scopes == set(required)
    assert caller.scopes <= leaf.scopes <= root.scopes
    assert leaf.expires <= root.expires
    assert leaf.expires - leaf.not_before == 60
    if bound is None:
        assert result.unwrap() == "called"
    else:
        assert chain(caller).within == (f"counter:{name}",)
        assert result.unwrap() == ("called" if below == name else "E3206"), "no other counter, even one of the token's"


@CHAIN
async def test_what_a_tool_calls_ends_with_the_token_it_was_called_with(held: Interlock, time: FakeClock) -> None:
    token = await of_agent(held, ttl_s=2)
    seen.first = lambda: time.advance(2)
    result = await held.call("link.holds_nothing", {"name": "a1", "below": "a1"}, key="k", token=token)
    assert (result.unwrap(), world.runs) == ("E3201", 0)


@CHAIN
async def test_a_call_that_waits_for_a_person_keeps_the_bounds_of_the_call_above(held: Interlock) -> None:
    token = await of_agent(held, resources=["counter:a*"])
    assert (await held.call("link.holds_a", {"name": "a1"}, key="k", token=token)).ok
    (caller,) = seen.callers
    kept = stored_caller(orjson.loads(orjson.dumps(_caller_document(caller))))
    assert _caller_document(kept) == _caller_document(caller)
    assert chain(kept).within == ("counter:a1",)
    assert not chain(kept).covers_resource("counter:a2")

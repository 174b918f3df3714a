"""Budgets, rates and uses through the gateway: kept by any number of calls at once, and used up by no refused one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock import Caller, Context, Effect, Failure, Field, Interlock, Preview, tool
from interlock.authority.dids import make_did_key
from interlock.authority.identities import Identity
from interlock.authority.keys import make_private
from interlock.call.capability import ToolGrant
from interlock.call.events import Event
from interlock.call.results import Result
from interlock.core.errors import ErrorClass, ErrorCode
from interlock.executors.sandbox.job import JobOutcome
from interlock.executors.sandbox.supervisor import Sandbox
from interlock.testing import FakeClock
from tests.gateway.metered_tools import burn
from tests.support.calls import code, lateness, publish
from tests.support.payments import Amount, route, world
from tests.support.stores import busy

BUDGETS = pytest.mark.proves("OBS-08")
COSTS = pytest.mark.part_of("OBS-07", rest="fallbacks, of which there are none yet")
RATES = pytest.mark.proves("RESIL-05")

Flag = Annotated[bool, Field(description="whether to", examples=[False])]
Name = Annotated[str, Field(description="a name", examples=["a"])]
Tree = Annotated[list[Any], Field(description="cost, retries and calls below", examples=[[1, 0, []]])]

Options = dict[str, Any]

ANN, BOB = Caller(id="user:ann", tenant="acme", trust=90), Caller(id="user:bob", tenant="acme", trust=90)
EVE = Caller(id="user:eve", tenant="other", trust=90)
OPERATOR = Caller(id="local:operator", scopes=frozenset({"tokens:issue"}))
AGENT = make_did_key(make_private("EdDSA").public_key())


@tool(version="1.0.0", mutation_class="read_only", namespace="pay", estimated_cost=1.0)
async def look(ctx: Context, actual: Amount = 1.0) -> str:
    """A read that costs about one."""
    world.runs += 1
    ctx.cost(external_api=actual)
    if world.failure is not None:
        raise world.failure
    return "seen"


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="pay", effects=[Effect("thing:a", "UPDATE")],
    estimated_cost=1.0,
)  # fmt: skip
async def buy(ctx: Context, actual: Amount = 1.0) -> str:
    """A write that costs about one."""
    world.runs += 1
    ctx.cost(external_api=actual / 2, token=actual / 2)
    if world.failure is not None:
        raise world.failure
    ctx.effect("thing:a", "UPDATE", after=1)
    return "bought"


@buy.preview
def _(actual: float) -> Preview:
    return Preview(impact="would buy")


@buy.compensate
async def _(result: str) -> None:
    return None


@tool(
    version="1.0.0", mutation_class="write_irreversible", namespace="pay", effects=[Effect("thing:a", "UPDATE")],
    estimated_cost=1.0,
)  # fmt: skip
async def sign(ctx: Context) -> str:
    """A write that a person must agree to."""
    world.runs += 1
    ctx.cost(external_api=1.0)
    return "signed"


@sign.preview
def _() -> Preview:
    return Preview(impact="would sign")


@tool(version="1.0.0", mutation_class="read_only", namespace="pay", external_service="maps")
async def places(actual: Amount = 1.0) -> str:
    """Another read that asks the same service."""
    world.runs += 1
    return "here"


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="pay", effects=[Effect("thing:{name}", "UPDATE")],
    restart_safe=True,
)  # fmt: skip
async def branch(
    ctx: Context,
    name: Name,
    cost: Amount,
    fails: Annotated[int, Field(description="how often it fails first", examples=[0])],
    below: Tree,
) -> int:
    """Cost something, fail a few times first, and call others, each twice under one key."""
    world.runs += 1
    ctx.cost(network=cost)
    if world.failures.setdefault(name, fails):
        world.failures[name] -= 1
        raise Failure("E3501", "try again", retryable=True)
    for number, call in enumerate(below):
        for _ in range(2):
            await _until_done(ctx, {"name": f"{name}.{number}", **call}, key=f"{name}.{number}")
    return len(below)


@branch.compensate
async def _(result: int) -> None:
    return None


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="pay", effects=[Effect("thing:a", "UPDATE")],
    estimated_cost=1.0,
)  # fmt: skip
def linger(ctx: Context) -> str:
    """Outstay the time, and cost something only then."""
    world.began.set()
    assert world.go.wait(60)
    ctx.cost(external_api=1.0)
    return "done"


@linger.compensate
async def _(result: str) -> None:
    return None


@tool(version="1.0.0", mutation_class="read_only", namespace="pay", external_service="mail")
async def letter(ctx: Context, ask: Flag = False) -> str:
    """A read that asks one service, and through another tool another."""
    return await ctx.call("pay.route") if ask else "written"


async def _until_done(ctx: Context, arguments: Options, key: str) -> None:
    while True:
        try:
            return await ctx.call("pay.branch", arguments, key=key)
        except Failure as failure:
            if failure.code != "E3501":
                raise


TOOLS = (look, buy, sign, route, places, branch, linger, letter)


@asynccontextmanager
async def opened(home: Path, **settings: Any) -> AsyncGenerator[Interlock]:
    async with Interlock.open(home, housekeeping=False, **settings) as app:
        for one in TOOLS:
            await _offer(app, one)
        yield app


@pytest.fixture(autouse=True)
def _fresh_world() -> None:
    world.__init__()


@pytest.fixture
def time() -> FakeClock:
    return FakeClock()


async def together(app: Interlock, name: str, times: int, **options: Any) -> list[Result]:
    """Many calls at once, each under a key of its own."""
    return await asyncio.gather(*(app.call(name, **_keyed(name, number), **options) for number in range(times)))


def _keyed(name: str, number: int) -> Options:
    return {} if name == "pay.look" else {"key": f"k{number}"}


def held(app: Interlock) -> int:
    return app.journal.reader.all("SELECT (SELECT count(*) FROM hold) + (SELECT coalesce(sum(held), 0) FROM spend)")[0][
        0
    ]


# Budgets


@BUDGETS
@pytest.mark.parametrize("name", ["pay.look", "pay.buy"])
@pytest.mark.parametrize("per", ["task", "session", "tenant", "caller"])
async def test_a_hundred_calls_at_once_against_a_budget_for_ten_admit_exactly_ten(
    home: Path, name: str, per: str
) -> None:
    async with opened(home, budgets=[{"per": per, "limit": 10}]) as app:
        results = await together(app, name, 100, caller=ANN, task="t", session="s")
        assert [sum(result.ok for result in results), world.runs] == [10, 10]
        refused = next(result for result in results if not result.ok)
        assert refused.error is not None
        assert (refused.error.code, refused.error.row.error_class) == ("E3210", ErrorClass.POLICY_BLOCKED)
        assert refused.error.details is not None
        assert refused.error.details["budget"] == f"10 per {per}"
        assert held(app) == 0


@BUDGETS
async def test_everybody_on_a_home_shares_one_budget(home: Path) -> None:
    budgets = [{"per": "tenant", "limit": 10}]
    async with opened(home, budgets=budgets) as one, opened(home, budgets=budgets) as other:
        results = await asyncio.gather(
            together(one, "pay.look", 20, caller=ANN), together(other, "pay.look", 20, caller=BOB)
        )
        assert sum(result.ok for result in itertools.chain(*results)) == world.runs == 10


@BUDGETS
@pytest.mark.parametrize(
    ("per", "same", "other"),
    [
        ("task", {"task": "a", "caller": BOB}, {"task": "b"}),
        ("session", {"session": "a"}, {"session": "b"}),
        ("session", {"session": "a"}, {"session": "a", "caller": BOB}),
        ("caller", {"session": "b", "task": "b"}, {"caller": BOB}),
        ("tenant", {"caller": BOB}, {"caller": EVE}),
    ],
)
async def test_a_budget_is_for_one_of_its_kind(home: Path, per: str, same: Options, other: Options) -> None:
    first: Options = {"caller": ANN, "task": "a", "session": "a"}
    async with opened(home, budgets=[{"per": per, "limit": 1}]) as app:
        assert (await app.call("pay.look", **first)).ok
        assert code(await app.call("pay.look", **(first | same))) == "E3210"
        assert (await app.call("pay.look", **(first | other))).ok


@BUDGETS
async def test_an_estimate_above_the_budget_of_a_call_is_refused_unrun(home: Path) -> None:
    async with opened(home, budgets=[{"per": "call", "limit": 0.5, "tools": "pay.buy"}]) as app:
        refused = await app.call("pay.buy", key="k")
        assert (code(refused), refused.state, world.runs) == ("E3210", "blocked", 0)
        assert refused.error is not None
        assert "0.5 per call for pay.buy" in refused.error.message
        assert (await app.call("pay.look")).ok
        (row,) = app.journal.reader.all(
            "SELECT body FROM journal WHERE kind = 'closed' AND call = ?", (refused.invocation_id,)
        )
        assert b'"error_class":"policy_blocked"' in row[0]
        assert app.journal.reader.all("SELECT count(*) FROM reservation") == [(0,)]


@BUDGETS
@COSTS
async def test_what_a_call_did_cost_is_spent_and_not_its_estimate(home: Path) -> None:
    async with opened(home, budgets=[{"per": "tenant", "limit": 2}]) as app:
        result = await app.call("pay.buy", actual=0.25, key="a", task="t")
        assert result.metadata["cost"] == 0.25
        assert result.metadata["cost_parts"] == {"external_api": 0.125, "token": 0.125, "total": 0.25}
        assert [(await app.call("pay.look", actual=0.25, task="t")).ok for _ in range(4)] == [True] * 4
        # 1.25 is spent, so an estimate of 1 no longer fits.
        assert code(await app.call("pay.look", task="t")) == "E3210"
        assert (await app.cost_of("t")).parts == {"external_api": 1_125_000, "token": 125_000}


@BUDGETS
async def test_an_overrun_is_alerted_and_the_next_call_is_refused(home: Path) -> None:
    alerts: list[Event] = []
    async with opened(home, budgets=[{"per": "tenant", "limit": 5}]) as app:
        app.listen(lambda event: alerts.append(event) if event.type == "tool.alert" else None)
        assert (await app.call("pay.buy", actual=7, key="a")).ok
        assert [alert.data for alert in alerts] == [
            {"alert": "BUDGET_OVERRUN", "budget": "5 per tenant", "limit": 5.0, "spent": 7.0}
        ]
        assert code(await app.call("pay.buy", key="b")) == "E3210"
        assert (await app.call("pay.buy", actual=7, key="a")).replayed
        assert len(alerts) == 1


@BUDGETS
@COSTS
async def test_a_replay_costs_nothing_more_and_passes_a_budget_that_is_used_up(home: Path) -> None:
    async with opened(home, budgets=[{"per": "tenant", "limit": 1}]) as app:
        for _ in range(3):
            assert (await app.call("pay.buy", key="a", task="t")).ok
        assert (world.runs, (await app.cost_of("t")).total) == (1, 1_000_000)
        assert (await app.call("pay.buy", dry_run=True)).ok
        assert (await app.cost_of("t")).total == 1_000_000


@BUDGETS
@COSTS
@pytest.mark.parametrize("failure", [Failure("E3401", "no"), ValueError("no")])
@pytest.mark.parametrize("name", ["pay.look", "pay.buy"])
async def test_a_call_that_fails_is_settled_by_what_it_cost(home: Path, failure: Exception, name: str) -> None:
    world.failure = failure
    async with opened(home, budgets=[{"per": "tenant", "limit": 10}]) as app:
        (result,) = await together(app, name, 1, actual=0.5, task="t")
        assert not result.ok
        assert result.metadata["cost"] == 0.5
        assert (held(app), (await app.cost_of("t")).total) == (0, 500_000)


@BUDGETS
@pytest.mark.parametrize("name", ["pay.look", "pay.buy"])
async def test_a_call_that_is_cancelled_while_it_asks_sets_nothing_aside(home: Path, name: str) -> None:
    async with opened(home, budgets=[{"per": "tenant", "limit": 1}]) as app:
        asked = asyncio.Event()
        app.listen(lambda event: asked.set() if event.type == "tool.permission.decided" else None)
        with busy(app.home):
            calling = asyncio.create_task(app.call(name, **_keyed(name, 0)))
            await asked.wait()
            await asyncio.sleep(0)
            calling.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await calling
        await app.journal.drain()
        assert (world.runs, held(app)) == (0, 0)
        assert all(result.ok for result in await together(app, name, 1))


@BUDGETS
@COSTS
async def test_what_a_task_used_besides_calls_counts_in_its_budget_once(home: Path) -> None:
    async with opened(home, budgets=[{"per": "task", "limit": 2}]) as app:
        for _ in range(2):
            await app.charge("t", part="llm_inference", amount=1.5, key="turn-1")
        assert (await app.cost_of("t")).parts == {"llm_inference": 1_500_000}
        assert code(await app.call("pay.look", task="t")) == "E3210"
        assert (await app.call("pay.look", task="u")).ok


@pytest.mark.parametrize("order", [(0, 100), (100, 0)])
async def test_a_policy_can_look_at_the_tightest_budget_of_a_call(home: Path, order: tuple[float, float]) -> None:
    budgets = [{"per": "tenant", "limit": limit, "period_s": 3600 + number} for number, limit in enumerate(order)]
    async with opened(home, budgets=budgets) as app:
        rule = '@id("left")\nforbid (principal, action, resource) when { context.budgets.left <= 0 };\n'
        app.home.policy.write_text(app.home.policy.read_text() + rule)
        refused = await app.call("pay.look")
        assert (code(refused), world.runs) == ("E3206", 0)
        assert refused.error is not None
        assert refused.error.policy_refs == ("left",)


def trees() -> st.SearchStrategy[Options]:
    """Calls that call others: each with a cost in quarters, and failures before it succeeds."""
    facts = {"cost": st.integers(0, 8).map(lambda quarters: quarters / 4), "fails": st.integers(0, 2)}
    leaf = st.fixed_dictionaries({**facts, "below": st.just([])})
    return st.recursive(
        leaf, lambda inner: st.fixed_dictionaries({**facts, "below": st.lists(inner, max_size=2)}), max_leaves=5
    )


def total(tree: Options) -> float:
    """What a tree costs by hand: every attempt of every node, replays not at all."""
    attempts = tree["fails"] + 1
    return tree["cost"] * attempts + sum(total(below) for below in tree["below"])


_numbers = itertools.count()


@pytest_asyncio.fixture
async def plenty(home: Path) -> AsyncGenerator[Interlock]:
    async with opened(
        home, budgets=[{"per": "task", "limit": 1000}], loops={"identical": 10**6, "calls": 10**6}
    ) as app:
        yield app


@COSTS
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees())
async def test_the_cost_of_a_task_is_the_sum_over_its_calls_each_counted_once(plenty: Interlock, tree: Options) -> None:
    task = f"task-{next(_numbers)}"
    calls = [
        await plenty.call("pay.branch", {"name": task, **tree}, key=task, task=task) for _ in range(tree["fails"] + 2)
    ]
    assert calls[-1].replayed
    cost = await plenty.cost_of(task)
    assert cost.parts.get("network", 0) == cost.total == total(tree) * 1_000_000
    spent = plenty.journal.reader.all(
        "SELECT coalesce(sum(spent), 0), coalesce(sum(held), 0) FROM spend WHERE instr(budget, ?) > 0", (f'"{task}"',)
    )
    assert spent == [(total(tree) * 1_000_000, 0)]


@COSTS
@BUDGETS
async def test_calls_below_belong_to_the_task_of_the_call_above(home: Path) -> None:
    leaf: Options = {"cost": 1, "fails": 0, "below": []}
    async with opened(home, budgets=[{"per": "task", "limit": 1}]) as app:
        # The first call below spends what the task may cost, so the second is refused.
        refused = await app.call("pay.branch", {"name": "a", "cost": 0, "fails": 0, "below": [leaf, leaf]}, key="a")
        assert (code(refused), world.runs) == ("E3210", 2)
        assert (await app.cost_of(refused.invocation_id)).total == 1_000_000
        assert (await app.call("pay.look")).ok


@BUDGETS
async def test_calls_below_count_in_the_budget_of_the_session_above(home: Path) -> None:
    leaf: Options = {"cost": 1, "fails": 0, "below": []}
    async with opened(home, budgets=[{"per": "session", "limit": 1}]) as app:
        arguments: Options = {"name": "a", "cost": 0, "fails": 0, "below": [leaf]}
        assert (await app.call("pay.branch", arguments, key="a", session="one")).ok
        assert code(await app.call("pay.look", session="one")) == "E3210"
        assert (await app.call("pay.look", session="")).ok


@BUDGETS
@COSTS
async def test_what_a_call_that_outstays_its_time_costs_is_spent(home: Path, time: FakeClock) -> None:
    async with opened(home, budgets=[{"per": "tenant", "limit": 1}], clock=time.clock) as app:
        running = asyncio.create_task(app.call("pay.linger", key="k", task="t", timeout_s=5))
        assert await asyncio.to_thread(world.began.wait, 10)
        time.advance(6)
        result = await running
        assert code(result) == "E3402"
        assert code(await app.call("pay.look")) == "E3210", "what it will cost is not known yet"
        world.go.set()
        await lateness(app, result)
        assert (await app.cost_of("t")).total == 1_000_000
        assert code(await app.call("pay.look")) == "E3210"


@COSTS
async def test_what_an_isolated_call_uses_is_metered_by_the_process_it_had_to_itself(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[JobOutcome] = []
    run = Sandbox.run

    async def watched(self: Sandbox, *given: Any, **options: Any) -> JobOutcome:
        ended.append(await run(self, *given, **options))
        return ended[-1]

    monkeypatch.setattr(Sandbox, "run", watched)
    async with opened(home, prices={"cpu_s": 1.0}) as app:
        await _offer(app, burn)
        result = await app.call("cell.burn", milliseconds=300, mib=1)
        burnt_s = result.unwrap() / 1e9
        # The price of what the kernel counted for the process, which also starts and ends: no more and no less.
        (cpu_ns,) = (outcome.cpu_ns for outcome in ended)
        assert cpu_ns is not None
        assert cpu_ns / 1e9 >= burnt_s
        assert result.metadata["cost_parts"]["compute"] == round(cpu_ns / 1e9, 6)
    async with opened(home, prices={"memory_gib_s": 1024.0}) as app:  # a unit for a MiB in a second
        app.catalog.attach(burn)
        little, much = [await app.call("cell.burn", milliseconds=50, mib=mib) for mib in (1, 200)]
        for result, at_least in ((little, 1), (much, 200)):
            assert result.metadata["cost_parts"]["compute"] >= at_least * result.unwrap() / 1e9
            assert (await app.cost_of(result.invocation_id)).document() == result.metadata["cost_parts"]


async def _offer(app: Interlock, one: Any) -> None:
    await app.journal.commit(publish(one))
    app.catalog.attach(one)


# Tokens


async def token_of(app: Interlock, **said: Any) -> str:
    if await app.identities.find(AGENT) is None:
        await app.identities.register(Identity(did=AGENT, trust=90), by="test")
        app.issuer_keys.init("EdDSA")
    return await app.tokens.issue(subject=AGENT, by=OPERATOR, tools=[ToolGrant("pay.*")], **said)


@pytest.mark.parametrize("name", ["pay.look", "pay.buy"])
async def test_a_hundred_calls_at_once_use_a_token_for_three_exactly_three_times(home: Path, name: str) -> None:
    async with opened(home) as app:
        token = await token_of(app, constraints={"max_uses": 3})
        results = await together(app, name, 100, token=token)
        assert [sum(result.ok for result in results), world.runs] == [3, 3]
        assert {code(result) for result in results} == {None, "E3206"}


async def test_a_grant_for_one_call_is_good_for_one_call_and_its_replays(home: Path) -> None:
    async with opened(home) as app:
        token = await token_of(app, constraints={"max_uses": 1})
        assert (await app.call("pay.buy", dry_run=True, token=token)).ok
        assert code(await app.call("pay.buy", {"actual": -1}, key="a", token=token)) == "E3301"
        assert (await app.call("pay.buy", key="a", token=token)).ok
        assert (await app.call("pay.buy", key="a", token=token)).replayed
        assert code(await app.call("pay.buy", key="b", token=token)) == "E3206"
        assert world.runs == 1
    async with opened(home) as app:
        assert code(await app.call("pay.buy", key="c", token=token)) == "E3206"


@BUDGETS
async def test_a_token_can_spend_what_it_says_and_no_more(home: Path) -> None:
    async with opened(home) as app:
        token = await token_of(app, constraints={"max_cost": 10.0})
        results = await together(app, "pay.look", 100, token=token)
        assert [sum(result.ok for result in results), world.runs] == [10, 10]
        refused = next(result for result in results if not result.ok)
        assert code(refused) == "E3210"
        assert refused.error is not None
        assert "the token" in refused.error.message
        assert (await app.call("pay.look")).ok


# Rates


@RATES
@pytest.mark.parametrize(
    ("per", "first", "same", "other"),
    [
        ("caller", ("pay.look", ANN), ("pay.route", ANN), ("pay.look", BOB)),
        ("tool", ("pay.look", ANN), ("pay.look", EVE), ("pay.route", ANN)),
        ("service", ("pay.route", ANN), ("pay.places", EVE), ("pay.look", ANN)),
        ("tenant", ("pay.look", ANN), ("pay.route", BOB), ("pay.look", EVE)),
    ],
)
async def test_a_rate_is_kept_and_the_envelope_says_when_the_next_call_passes(
    home: Path,
    time: FakeClock,
    per: str,
    first: tuple[str, Caller],
    same: tuple[str, Caller],
    other: tuple[str, Caller],
) -> None:
    rates = [{"per": per, "limit": 3, "window_s": 10}]
    async with opened(home, rate_limits=rates, clock=time.clock) as app:
        results = await asyncio.gather(*(app.call(first[0], caller=first[1]) for _ in range(20)))
        assert [sum(result.ok for result in results), world.runs] == [3, 3]
        time.advance(4)
        refused = await app.call(same[0], caller=same[1])
        envelope = refused.document()["error"]
        assert (envelope["errorCode"], refused.error and refused.error.code) == (ErrorCode.RATE_LIMITED, "E3003")
        assert envelope["retryAfterMs"] == 6000
        assert (await app.call(other[0], caller=other[1])).ok
        time.advance(5.999)
        assert code(await app.call(same[0], caller=same[1])) == "E3003"
        time.advance(0.001)
        assert (await app.call(same[0], caller=same[1])).ok


@RATES
async def test_a_service_that_says_not_now_is_left_alone_by_every_tool_that_asks_it(
    home: Path, time: FakeClock
) -> None:
    async with opened(home, clock=time.clock) as app:
        world.failure = Failure("E3504", "slow down", retry_after_ms=5000)
        limited = await app.call("pay.route", caller=ANN)
        assert limited.document()["error"]["retryAfterMs"] == 5000
        world.failure = None
        time.advance(1)
        for name, caller in (("pay.places", EVE), ("pay.route", ANN)):
            waiting = await app.call(name, caller=caller)
            envelope = waiting.document()["error"]
            assert (code(waiting), envelope["errorCode"]) == ("E3504", ErrorCode.RATE_LIMITED)
            assert envelope["retryAfterMs"] == 4000
        assert world.runs == 1
        assert (await app.call("pay.look")).ok
        time.advance(4)
        assert (await app.call("pay.places", caller=EVE)).ok


@pytest.mark.proves("CONTRACT-04")
async def test_five_failures_of_one_tool_open_the_breaker_of_its_service_for_every_tool_that_names_it(
    home: Path, time: FakeClock
) -> None:
    async with opened(home, clock=time.clock) as app:
        world.failure = Failure("E3502", "the service broke", retryable=False)
        for _ in range(5):
            assert code(await app.call("pay.route", caller=ANN)) == "E3502"
        world.failure, runs = None, world.runs
        refused = await app.call("pay.places", caller=EVE)
        assert (code(refused), world.runs) == ("E3501", runs)
        assert "maps" in str(refused.error)
        assert (await app.call("pay.look")).ok


@RATES
async def test_a_service_is_not_left_alone_for_what_another_one_said(home: Path) -> None:
    async with opened(home) as app:
        world.failure = Failure("E3504", "slow down", retry_after_ms=60_000)
        assert code(await app.call("pay.letter", ask=True)) == "E3504"
        assert code(await app.call("pay.places")) == "E3504"
        assert (await app.call("pay.letter")).ok


# Refused calls


REFUSALS: Sequence[tuple[str, Options]] = [
    ("budget", {"budgets": [{"per": "call", "limit": 0.5}]}),
    ("rate", {"rate_limits": [{"per": "caller", "limit": 1, "window_s": 60}]}),
    ("uses", {}),
]


@BUDGETS
@RATES
@pytest.mark.parametrize(("why", "setting"), REFUSALS, ids=[why for why, _ in REFUSALS])
async def test_a_refused_call_uses_nothing_up(home: Path, why: str, setting: Options) -> None:
    """Whatever a call is refused for, its approval, its key, its budget, its rate and its token's uses stay."""
    plenty = {
        "budgets": [{"per": "tenant", "limit": 100}],
        "rate_limits": [{"per": "tenant", "limit": 100, "window_s": 60}],
    }
    for name, rules in setting.items():
        plenty[name] = [*rules, *plenty[name]]
    reviewer = Caller(id="local:reviewer", groups=frozenset({"approvers"}))
    async with opened(home, **plenty) as app:
        token = await token_of(app, constraints={"max_uses": 1})
        if why == "rate":
            assert (await app.call("pay.route", caller=Caller(id=AGENT, trust=90))).ok
        if why == "uses":
            assert (await app.call("pay.route", token=token)).ok
        pending = await app.call("pay.sign", key="k", token=token)
        ticket = pending.metadata["pending"]["ticketId"]
        await app.approvals.approve(ticket, by=reviewer)
        before = _used(app)
        refused = await app.call("pay.sign", key="k", token=token)
        assert code(refused) in {"budget": ["E3210"], "rate": ["E3003"], "uses": ["E3206"]}[why]
        assert _used(app) == before
        assert (await app.approvals.show(ticket)).state == "APPROVED"
        assert app.journal.reader.all("SELECT count(*) FROM reservation") == [(0,)]
    world.runs = 0
    async with opened(home, rate_limits=[], budgets=[]) as app:
        done = await app.call("pay.sign", key="k", token=token)
        assert (code(done), world.runs) == (("E3206", 0) if why == "uses" else (None, 1))


def _used(app: Interlock) -> list[Any]:
    return [
        app.journal.reader.all(f"SELECT * FROM {table} ORDER BY 1, 2")
        for table in ("spend", "hold", "rate", "grant_use")
    ]


# Loops


@BUDGETS
@pytest.mark.parametrize("kind", ["identical", "calls"])
async def test_a_caller_that_is_caught_in_a_loop_is_alerted_once(home: Path, time: FakeClock, kind: str) -> None:
    alerts: list[Event] = []
    loops = {"identical": 10**6, "calls": 10**6, "window_s": 60} | {kind: 5}
    async with opened(home, loops=loops, clock=time.clock) as app:
        app.listen(lambda event: alerts.append(event) if event.data.get("alert") == "RUNAWAY_LOOP" else None)
        for number in range(20):
            actual = 1.0 if kind == "identical" else float(number)
            assert (await app.call("pay.look", actual=actual, caller=ANN)).ok
        assert len(alerts) == app.gateway.observer.metrics["RUNAWAY_LOOP"] == 1
        assert "user:ann" in alerts[0].data["what"]
        assert (await app.call("pay.look", caller=BOB)).ok
        assert len(alerts) == 1

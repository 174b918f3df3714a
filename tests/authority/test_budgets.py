"""Budgets hold whoever calls at the same time; costs add up, are counted once, and are metered as they were used."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pydantic
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.authority import budgets
from interlock.authority.budgets import Allowance, Overrun
from interlock.call.allowances import Budget, Prices
from interlock.call.context import Caller
from interlock.call.cost import CALL_PARTS, FREE, TASK_PARTS, Cost, Meter, compute_cost, reported
from interlock.core.clock import Clock
from interlock.core.errors import ErrorClass, Failure
from interlock.store.homes import home_at
from interlock.store.journal import Journal
from interlock.store.port import Transaction
from interlock.store.signing import Signer
from interlock.testing import FakeClock
from tests import warm
from tests.support.stores import bury

ROOT = Path(__file__).parents[2]
ANN = Caller(id="user:ann", tenant="acme")
UNIT = 1_000_000
BEFORE_THE_GATEWAY = pytest.mark.supports("OBS-08")
COSTS = pytest.mark.part_of("OBS-07", rest="fallbacks, of which there are none yet")


@asynccontextmanager
async def opened(home: Path, clock: Clock) -> AsyncGenerator[Journal]:
    place = home_at(home)
    place.prepare()
    journal = Journal(place, clock=clock, signer=Signer(place.keys))
    try:
        yield journal
    finally:
        await journal.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def journal(tmp_path: Path, clock: FakeClock) -> AsyncGenerator[Journal]:
    async with opened(tmp_path, clock.clock) as made:
        yield made


def covering(
    *rules: Budget, caller: Caller = ANN, session: str = "", task: str = "t", tool: str = "demo.add", now_ms: int = 0
) -> tuple[Allowance, ...]:
    return budgets.budget_keys(rules, caller=caller, session=session, task=task, tool=tool, now_ms=now_ms)


async def hold(journal: Journal, call: str, allowances: Sequence[Allowance], amount: int) -> Failure | None:
    try:
        await journal.commit(lambda transaction: budgets.hold(transaction, call, "owner", allowances, amount))
    except Failure as failure:
        return failure
    return None


async def settle(journal: Journal, call: str, cost: Cost, allowances: Sequence[Allowance] = ()) -> tuple[Overrun, ...]:
    booked = await journal.commit(
        lambda transaction: budgets.settle(transaction, call, cost, allowances, task="t", session="", tenant="acme")
    )
    return booked.overrun


def books(journal: Journal) -> list[tuple[int, int]]:
    return journal.reader.all("SELECT spent, held FROM spend ORDER BY budget")


# Budgets


@BEFORE_THE_GATEWAY
async def test_of_a_hundred_calls_at_once_a_budget_for_ten_admits_exactly_ten(journal: Journal) -> None:
    allowances = covering(Budget(per="tenant", limit=1.0))
    answers = await asyncio.gather(*(hold(journal, f"call-{n}", allowances, UNIT // 10) for n in range(100)))
    assert sum(answer is None for answer in answers) == 10
    assert books(journal) == [(0, UNIT)]


@BEFORE_THE_GATEWAY
async def test_an_estimate_above_a_budget_is_refused_by_name_and_leaves_nothing(journal: Journal) -> None:
    roomy, tight = Budget(per="tenant", limit=100), Budget(per="session", limit=0.5, tools="demo.*", period_s=60)
    failure = await hold(journal, "call", covering(roomy, tight), UNIT)
    assert failure is not None
    assert failure.code == "E3210"
    assert failure.row.error_class is ErrorClass.POLICY_BLOCKED
    assert failure.message == (
        "the budget of 0.5 per session and 1 min for demo.* does not allow it: "
        "0 is spent and 0 set aside, and this call needs 1"
    )
    assert failure.details == {
        "budget": "0.5 per session and 1 min for demo.*", "limit": 0.5, "spent": 0, "held": 0, "needed": 1,
    }  # fmt: skip
    assert books(journal) == []
    assert journal.reader.all("SELECT COUNT(*) FROM hold") == [(0,)]


@BEFORE_THE_GATEWAY
async def test_a_refusal_says_when_there_is_room_again_exactly_where_waiting_helps(
    journal: Journal, clock: FakeClock
) -> None:
    minute, hour = Budget(per="tenant", limit=1.0, period_s=60), Budget(per="caller", limit=1.0, period_s=3600)
    clock.advance(3600 - clock.now_ms / 1000 % 3600 + 15)

    async def wait_ms(*rules: Budget, amount: int = UNIT) -> int | None:
        failure = await hold(journal, "next", covering(*rules, now_ms=clock.now_ms), amount)
        assert failure is not None
        assert failure.code == "E3210"
        return failure.retry_after_ms

    lasting = Budget(per="session", limit=1.0)
    assert await hold(journal, "first", covering(minute, hour, lasting, now_ms=clock.now_ms), UNIT) is None
    assert await wait_ms(minute) == 45_000
    assert await wait_ms(minute, hour) == await wait_ms(hour, minute) == 3_585_000
    assert await wait_ms(minute, amount=2 * UNIT) is None
    assert await wait_ms(minute, lasting) is None
    assert await wait_ms(Budget(per="task", limit=0, period_s=60), amount=0) is None
    clock.advance(45)
    assert await hold(journal, "again", covering(minute, now_ms=clock.now_ms), UNIT) is None


@BEFORE_THE_GATEWAY
async def test_a_call_may_cost_more_than_it_held_and_then_the_next_is_refused(journal: Journal) -> None:
    allowances = covering(Budget(per="task", limit=1.0))
    assert await hold(journal, "one", allowances, UNIT // 2) is None
    overrun = await settle(journal, "one", Cost(external_api=2 * UNIT), allowances)
    assert [one.document() for one in overrun] == [{"budget": "1 per task", "limit": 1.0, "spent": 2.0}]
    assert books(journal) == [(2 * UNIT, 0)]
    failure = await hold(journal, "two", allowances, 0)
    assert failure is not None
    assert "so it is used up" in failure.message


@BEFORE_THE_GATEWAY
async def test_a_call_without_an_estimate_passes_until_the_budget_is_used_up(journal: Journal) -> None:
    allowances = covering(Budget(per="caller", limit=1.0))
    for number in range(4):
        assert await hold(journal, str(number), allowances, 0) is None
        assert await settle(journal, str(number), Cost(token=UNIT // 4), allowances) == ()
    assert await hold(journal, "last", allowances, 0) is not None


@BEFORE_THE_GATEWAY
async def test_a_limit_per_call_judges_the_estimate_before_and_the_actual_after(journal: Journal) -> None:
    allowances = covering(Budget(per="call", limit=1.0))
    failure = await hold(journal, "dear", allowances, 2 * UNIT)
    assert failure is not None
    assert failure.message == "the budget of 1 per call does not allow it: this call would cost 2"
    for number in range(3):
        assert await hold(journal, str(number), allowances, UNIT) is None
    assert await settle(journal, "0", Cost(network=UNIT), allowances) == ()
    assert await settle(journal, "1", Cost(network=UNIT + 1), allowances) == (Overrun("1 per call", UNIT, UNIT + 1),)
    assert books(journal) == []


async def test_a_call_that_ends_before_it_runs_gives_back_what_it_held(journal: Journal) -> None:
    allowances = covering(Budget(per="tenant", limit=1.0))
    assert await hold(journal, "one", allowances, UNIT) is None
    assert await hold(journal, "two", allowances, 1) is not None
    assert await settle(journal, "one", FREE, allowances) == ()
    assert books(journal) == [(0, 0)]
    assert await hold(journal, "two", allowances, UNIT) is None


async def test_a_period_begins_with_the_whole_limit_and_an_old_one_is_let_go(
    journal: Journal, clock: FakeClock
) -> None:
    rule = Budget(per="tenant", limit=1.0, period_s=3600)
    allowances = covering(rule, now_ms=clock.now_ms)
    assert await hold(journal, "one", allowances, UNIT) is None
    clock.advance(3600)
    await journal.commit(budgets.evict)
    assert books(journal) == [(0, UNIT)], "what is held outlives its period"
    await settle(journal, "one", Cost(token=UNIT), allowances)
    assert await hold(journal, "two", covering(rule, now_ms=clock.now_ms), UNIT) is None
    await journal.commit(budgets.evict)
    assert books(journal) == [(0, UNIT)]


async def test_a_budget_of_a_session_is_forgotten_only_long_after_its_last_call(
    journal: Journal, clock: FakeClock
) -> None:
    rules = (Budget(per="session", limit=1.0), Budget(per="tenant", limit=1.0))
    for number in range(2):
        allowances = covering(*rules, now_ms=clock.now_ms)
        await settle(journal, str(number), Cost(token=10), allowances)
        clock.advance(60 * 86_400)
        await journal.commit(budgets.evict)
        assert len(books(journal)) == 2
    clock.advance(31 * 86_400)
    await journal.commit(budgets.evict)
    assert books(journal) == [(20, 0)]


NAMES = st.text('ab",[]\\é', max_size=4)
SUBJECTS = st.tuples(NAMES, NAMES, NAMES)


@given(one=SUBJECTS, other=SUBJECTS)
def test_no_choice_of_names_reaches_another_callers_session_or_another_tenants_task(
    one: tuple[str, str, str], other: tuple[str, str, str]
) -> None:
    def keys(names: tuple[str, str, str]) -> list[str | None]:
        tenant, caller, name = names
        rules = (Budget(per="session", limit=1), Budget(per="task", limit=1))
        who = Caller(id=caller, tenant=tenant)
        return [allowance.key for allowance in covering(*rules, caller=who, session=name, task=name)]

    assert (keys(one)[0] == keys(other)[0]) == (one == other)
    assert (keys(one)[1] == keys(other)[1]) == (one[::2] == other[::2])


def test_budgets_cover_the_tools_they_name_and_the_stricter_of_two_counts() -> None:
    mail, lax, strict = (
        Budget(per="tenant", limit=9, tools="mail.*"), Budget(per="tenant", limit=9), Budget(per="tenant", limit=2),
    )  # fmt: skip
    assert [one.name for one in covering(mail, lax, strict)] == ["2 per tenant"]
    assert len(covering(mail, lax, tool="mail.send")) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"per": "tenant", "limit": -1},
        {"per": "tenant", "limit": float("nan")},
        {"per": "tenant", "limit": float("inf")},
        {"per": "tenant", "limit": 1, "period_s": 0},
        {"per": "call", "limit": 1, "period_s": 60},
        {"per": "tenant", "limit": 1, "tool": "demo.*"},
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError):
        Budget.model_validate(wrong)


ACTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(0, 100)), max_size=40)


@BEFORE_THE_GATEWAY
@settings(max_examples=25)
@given(acts=ACTS)
def test_while_estimates_hold_no_budget_is_ever_exceeded(acts: list[tuple[int, int, int]]) -> None:
    """Each act starts the call of a slot with an estimate, or ends the one that runs there with a share of it."""
    rules = (Budget(per="tenant", limit=100e-6), Budget(per="caller", limit=60e-6))

    async def play(journal: Journal) -> None:
        allowances = covering(*rules)
        running: dict[int, tuple[str, int]] = {}
        spent = 0
        for number, (slot, estimate, share) in enumerate(acts):
            if slot in running:
                call, held = running.pop(slot)
                actual = held * share // 100
                assert await settle(journal, call, Cost(compute=actual), allowances) == ()
                spent += actual
            else:
                free = 60 - spent - sum(held for _, held in running.values())
                refusal = await hold(journal, str(number), allowances, estimate)
                assert (refusal is None) == (estimate <= free and free > 0)
                if refusal is None:
                    running[slot] = (str(number), estimate)
            in_hand = sum(held for _, held in running.values())
            assert spent + in_hand <= 60
            assert all(row == (spent, in_hand) for row in books(journal))

    _with_a_journal(play)


def _with_a_journal(play: Callable[[Journal], Any]) -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory() as directory:
            async with opened(Path(directory), FakeClock().clock) as journal:
                await play(journal)

    asyncio.run(run())


# Crashes


HOLDER = """
import asyncio, sys
from interlock.authority.budgets import Allowance, hold
from interlock.core.clock import Clock
from interlock.store import records
from interlock.store.homes import home_at
from interlock.store.journal import Journal
from interlock.store.port import Transaction
from interlock.store.signing import Signer

async def main() -> None:
    home = home_at(sys.argv[1])
    home.prepare()
    instance = home.instance(sys.argv[2])
    journal = Journal(home, clock=Clock(), signer=Signer(home.keys))
    allowances = [Allowance("purse", 1_000_000, None, "1 per tenant")]

    def unit(transaction):
        hold(transaction, "began", instance.id, allowances, 300_000)
        transaction.append("intent", "began", records.plain("intent", "began", transaction.now_ms))
        hold(transaction, "waiting", instance.id, allowances, 500_000)

    await journal.commit(unit)
    print("holding", flush=True)
    sys.stdin.readline()

asyncio.run(main())
"""


def start_holding(home: Path, instance: str) -> warm.Started:
    holder = warm.start(["-c", HOLDER, str(home), instance], os.environ, ROOT, python=True)
    assert holder.stdout.readline() == b"holding\n"
    return holder


@BEFORE_THE_GATEWAY
async def test_what_a_killed_process_held_is_spent_where_it_may_have_run_and_free_where_not(tmp_path: Path) -> None:
    dead, ours = "0" * 25 + "D", "0" * 25 + "A"
    with start_holding(tmp_path, dead) as holder:
        await _take_over(tmp_path, ours, dead, holder)


async def _take_over(path: Path, ours: str, dead: str, holder: warm.Started) -> None:
    async with opened(path, Clock()) as journal:
        instance = home_at(path).instance(ours)
        assert await journal.commit(budgets.release_orphans(instance.alive)) == []
        assert books(journal) == [(0, 800_000)]
        purse = [Allowance("purse", UNIT, None, "1 per tenant")]
        await journal.commit(lambda transaction: budgets.hold(transaction, "mine", ours, purse, 100_000))
        holder.send_signal(signal.SIGKILL)
        await asyncio.to_thread(holder.communicate)
        bury(home_at(path), dead)
        assert await journal.commit(budgets.release_orphans(instance.alive)) == ["began", "waiting"]
        assert books(journal) == [(300_000, 100_000)]
        assert await journal.commit(budgets.release_orphans(instance.alive)) == []
        assert await settle(journal, "mine", Cost(token=100_000), purse) == ()
        assert books(journal) == [(400_000, 0)]
        instance.close()


# Costs


@dataclass(frozen=True)
class Node:
    """A call as it is made: what each attempt costs, how often it is replayed, and what it calls in turn."""

    attempts: list[dict[str, int]]
    replays: int = 0
    nested: list[Node] = field(default_factory=list["Node"])


AMOUNTS = st.dictionaries(st.sampled_from(CALL_PARTS), st.integers(0, 10_000_000), max_size=3)
ATTEMPTS = st.lists(AMOUNTS, min_size=1, max_size=3)
TREES = st.recursive(
    st.builds(Node, ATTEMPTS, st.integers(0, 2)),
    lambda nested: st.builds(Node, ATTEMPTS, st.integers(0, 2), st.lists(nested, max_size=3)),
    max_leaves=12,
)
CHARGES = st.lists(st.tuples(st.sampled_from(TASK_PARTS), st.integers(0, 1_000_000)), max_size=4)


@COSTS
@settings(max_examples=25)
@given(tree=TREES, charges=CHARGES)
def test_the_cost_of_a_task_is_the_sum_over_its_calls_and_charges(tree: Node, charges: list[tuple[str, int]]) -> None:
    allowances = covering(Budget(per="task", limit=1e9))
    expected: list[Cost] = []
    units: list[Callable[[Transaction], Any]] = []

    def settled(cost: Cost, task: str = "t") -> None:
        call = f"call-{len(units)}"
        unit = partial(
            budgets.settle, call_id=call, actual=cost, allowances=allowances if task == "t" else (), task=task,
            session="", tenant="acme",
        )  # fmt: skip
        units.extend([unit, unit])  # an outcome that had to be written twice is no second call

    def call(node: Node) -> None:
        for attempt in node.attempts:
            for one in node.nested:
                call(one)
            expected.append(Cost(**attempt))
            settled(expected[-1])
        for _ in range(node.replays):
            settled(FREE)

    call(tree)
    settled(Cost(token=5), task="another")
    for index, (part, amount) in enumerate(charges):
        expected.append(Cost(**{part: amount}))
        unit = budgets.charge(
            f"charge-{index}", part, amount / UNIT, allowances, task="t", session="", tenant="acme", by=ANN.id
        )
        units.extend([unit, unit])

    async def play(journal: Journal) -> None:
        await asyncio.gather(*map(journal.commit, units))
        found = budgets.task_cost(journal.reader, "t", tenant="acme")
        assert found.parts == sum(expected, FREE).parts
        assert found.total == sum(one.total for one in expected)
        assert budgets.task_cost(journal.reader, "t", tenant="other").total == 0
        assert sum(spent for spent, _ in books(journal)) == found.total

    _with_a_journal(play)


@COSTS
async def test_a_calls_cost_is_stored_with_it_and_a_charge_is_on_record(journal: Journal) -> None:
    await settle(journal, "one", Cost(compute=5, token=UNIT // 2))
    ((parts, total),) = journal.reader.all("SELECT parts, total FROM cost WHERE call = 'one'")
    assert (orjson.loads(parts), total) == ({"compute": 5, "token": 500_000}, 500_005)
    allowances = covering(Budget(per="task", limit=1.0), Budget(per="call", limit=0.1))
    overrun = await journal.commit(
        budgets.charge("c", "llm_inference", 1.5, allowances, task="t", session="", tenant="acme", by=ANN.id)
    )
    assert overrun == (Overrun("1 per task", UNIT, 3 * UNIT // 2),)
    ((kind, body),) = journal.reader.all("SELECT kind, body FROM journal")
    assert kind == "authority"
    record = orjson.loads(body)
    assert (record["act"], record["by"], record["millionths"]) == ("cost.charged", ANN.id, 3 * UNIT // 2)
    assert await hold(journal, "next", allowances, 0) is not None


@pytest.mark.parametrize(("part", "amount"), [("token", 1.0), ("retrieval", -1.0), ("retrieval", float("nan"))])
def test_a_charge_that_cannot_be_is_refused(part: str, amount: float) -> None:
    with pytest.raises(Failure) as refused:
        budgets.charge("c", part, amount, (), task="t", session="", tenant="acme", by=ANN.id)
    assert refused.value.code == "E3004"


def test_what_a_tool_reports_is_taken_by_its_parts() -> None:
    assert reported({"external_api": 0.25, "network": 0}).parts == {"external_api": 250_000}


@pytest.mark.parametrize(
    "parts", [{"token": -0.01}, {"token": float("nan")}, {"token": float("inf")}, {"llm_inference": 1}, {"tips": 1}]
)
def test_no_tool_can_report_a_cost_that_cannot_be(parts: dict[str, float]) -> None:
    with pytest.raises(Failure) as refused:
        reported(parts)
    assert refused.value.code == "E3303"


def test_time_is_priced_to_the_nearest_millionth() -> None:
    prices = Prices(cpu_s=0.5, wall_s=0.001)
    assert compute_cost(2_000_000_000, 10_000_000_000, prices) == 1_010_000
    assert compute_cost(999, 0, prices) == 0
    assert compute_cost(0, 2_000_000_000, Prices(memory_gib_s=0.5), 1 << 29) == 500_000
    assert not Prices().metered


# Metering


def burn(milliseconds: int) -> int:
    """Use so much of this thread's CPU time; returns how much it was, in nanoseconds."""
    began = time.thread_time_ns()
    while (used := time.thread_time_ns() - began) < milliseconds * 1_000_000:
        pass
    return used


def about(measured: int, burned: int) -> bool:
    return burned * 0.9 <= measured <= burned * 1.1


@COSTS
async def test_the_cpu_of_an_awaitable_is_its_own_whatever_runs_in_its_pauses() -> None:
    async def work() -> int:
        used = 0
        for _ in range(10):
            used += burn(4)
            await asyncio.sleep(0)
        return used

    meters = [Meter() for _ in range(3)]
    burned = await asyncio.gather(*(meter.awaiting(work()) for meter in meters), work())
    assert all(about(meter.cpu_ns, used) for meter, used in zip(meters, burned, strict=False))
    assert meters[0].cost(Prices(cpu_s=1.0)).compute == round(meters[0].cpu_ns / 1000)


@COSTS
async def test_the_cpu_of_a_thread_is_that_of_its_function_over_all_attempts() -> None:
    meter = Meter()
    with ThreadPoolExecutor(2) as threads:
        loop = asyncio.get_running_loop()
        other = loop.run_in_executor(threads, burn, 40)
        burned = 0
        for _ in range(2):
            burned += await loop.run_in_executor(threads, meter.calling(lambda: burn(20)))
        await other
    assert about(meter.cpu_ns, burned)
    assert meter.wall_ns >= meter.cpu_ns * 0.9


@COSTS
@pytest.mark.parametrize("side_by_side", [False, True])
async def test_what_a_nested_call_uses_is_counted_once_and_by_the_nested_one(side_by_side: bool) -> None:
    outer, inner = Meter(), [Meter(), Meter()]

    async def child() -> int:
        used = burn(10)
        await asyncio.sleep(0)
        return used + burn(10)

    async def parent() -> tuple[int, int]:
        own = burn(10)
        calls = [meter.awaiting(child()) for meter in inner]
        used = await asyncio.gather(*calls) if side_by_side else [await call for call in calls]
        return own + burn(10), sum(used)

    began = time.perf_counter_ns()
    own, nested = await outer.awaiting(parent())
    elapsed = time.perf_counter_ns() - began
    assert about(outer.cpu_ns, own)
    assert about(sum(meter.cpu_ns for meter in inner), nested)
    longest = max(meter.wall_ns for meter in inner) if side_by_side else sum(meter.wall_ns for meter in inner)
    assert outer.wall_ns + longest <= elapsed


async def test_a_nested_call_that_outlives_its_parent_leaves_the_parents_time_alone() -> None:
    outer, inner = Meter(), Meter()
    go = asyncio.Event()

    async def parent() -> asyncio.Task[object]:
        task = asyncio.ensure_future(inner.awaiting(go.wait()))
        await asyncio.sleep(0)
        return task

    child = await outer.awaiting(parent())
    before = outer.wall_ns
    go.set()
    await child
    assert outer.wall_ns == before >= 0
    assert inner.wall_ns > 0


async def test_a_metered_awaitable_behaves_as_it_would_unmetered() -> None:
    seen: list[str] = []

    async def stubborn() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
        await asyncio.sleep(0)
        return "went on"

    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    task = asyncio.ensure_future(Meter().awaiting(stubborn()))
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "went on"
    assert seen == ["cancelled"]
    with pytest.raises(KeyError):
        await Meter().awaiting(fails())
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, 7)
    assert await Meter().awaiting(future) == 7
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await Meter().awaiting(asyncio.Event().wait())


def test_closing_a_metered_awaitable_closes_what_it_awaits() -> None:
    seen: list[str] = []

    class Pause:
        def __await__(self) -> Any:
            yield

    async def work() -> None:
        try:
            await Pause()
        finally:
            seen.append("closed")

    metered: Any = Meter().awaiting(work())
    metered.send(None)
    metered.close()
    assert seen == ["closed"]


def test_a_function_that_raises_is_metered_all_the_same() -> None:
    meter = Meter()

    def fails() -> None:
        burn(1)
        raise KeyError("x")

    with pytest.raises(KeyError):
        meter.calling(fails)()
    assert meter.cpu_ns >= 1_000_000

"""Rate limits hold in every window, for one process and for three; a refusal says when the next call will pass."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pydantic
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.call.allowances import LoopLimits, RateLimit
from interlock.call.context import Caller
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.resilience import limits
from interlock.resilience.limits import Bucket, LoopWatch
from interlock.store.homes import home_at
from interlock.store.journal import Journal
from interlock.store.signing import Signer
from interlock.testing import FakeClock
from tests.support import forked

ROOT = Path(__file__).parents[2]
ANN = Caller(id="user:ann", tenant="acme")
BOB = Caller(id="user:bob", tenant="acme")
IN_THE_STORE = pytest.mark.proves("RESIL-05")


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
def time() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def journal(tmp_path: Path, time: FakeClock) -> AsyncGenerator[Journal]:
    async with opened(tmp_path, time.clock) as made:
        yield made


async def refused(journal: Journal, among: Sequence[Bucket]) -> Failure | None:
    try:
        await journal.commit(lambda transaction: limits.admit(transaction, among))
    except Failure as failure:
        return failure
    return None


def covering(
    *rules: RateLimit, caller: Caller = ANN, tool: str = "mail.send", services: Sequence[str] = ()
) -> list[Bucket]:
    return list(limits.buckets(rules, caller=caller, tool=tool, services=services))


RULES = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 60)).map(
        lambda pair: RateLimit(per="caller", limit=pair[0], window_s=pair[1] / 1000)
    ),
    min_size=1,
    max_size=3,
)


@IN_THE_STORE
@settings(max_examples=25)
@given(rules=RULES, gaps=st.lists(st.integers(0, 30), min_size=1, max_size=40))
def test_no_window_holds_more_than_its_limit_and_the_wait_that_is_named_is_exact(
    rules: list[RateLimit], gaps: list[int]
) -> None:
    async def play() -> None:
        time = FakeClock()
        with tempfile.TemporaryDirectory() as directory:
            async with opened(Path(directory), time.clock) as journal:
                among = covering(*rules)
                admitted: list[int] = []
                passes_at: int | None = None
                for gap in gaps:
                    time.now_ms += gap
                    failure = await refused(journal, among)
                    if passes_at is not None:
                        # Sufficient and necessary: refused before that moment, let through from it on.
                        assert (failure is None) == (time.now_ms >= passes_at)
                    if failure is None:
                        admitted.append(time.now_ms)
                        passes_at = None
                    else:
                        assert failure.code == "E3003"
                        assert failure.retry_after_ms is not None
                        assert failure.retry_after_ms > 0
                        passes_at = time.now_ms + failure.retry_after_ms
                for bucket in among:
                    for end in admitted:
                        within = [at for at in admitted if end - bucket.window_ms < at <= end]
                        assert len(within) <= bucket.limit

    asyncio.run(play())


async def test_a_call_is_let_through_at_the_very_moment_that_was_named(journal: Journal, time: FakeClock) -> None:
    among = covering(RateLimit(per="caller", limit=2, window_s=10))
    for _ in range(2):
        assert await refused(journal, among) is None
        time.advance(3)
    failure = await refused(journal, among)
    assert failure is not None
    assert failure.retry_after_ms == 4000
    assert "2 calls per caller in 10 s" in failure.message
    time.advance(3.999)
    assert await refused(journal, among) is not None
    time.advance(0.001)
    assert await refused(journal, among) is None


async def test_a_call_under_several_limits_is_counted_by_all_or_by_none(journal: Journal, time: FakeClock) -> None:
    wide = covering(RateLimit(per="tenant", limit=3, window_s=60))
    both = covering(RateLimit(per="caller", limit=1, window_s=60), RateLimit(per="tenant", limit=3, window_s=60))
    assert await refused(journal, both) is None
    assert await refused(journal, both) is not None
    assert journal.reader.all("SELECT COUNT(*) FROM rate WHERE bucket = ?", (wide[0].key,)) == [(1,)]
    assert await refused(journal, wide) is None
    assert await refused(journal, wide) is None
    time.advance(30)
    failure = await refused(journal, both)
    assert failure is not None
    assert failure.retry_after_ms == 30_000


async def test_callers_tools_and_services_are_counted_apart(journal: Journal) -> None:
    per_caller = RateLimit(per="caller", limit=1, window_s=60)
    assert await refused(journal, covering(per_caller, caller=ANN)) is None
    assert await refused(journal, covering(per_caller, caller=BOB)) is None
    elsewhere = Caller(id=ANN.id, tenant="other")
    assert await refused(journal, covering(per_caller, caller=elsewhere)) is None
    per_tool = RateLimit(per="tool", limit=1, window_s=60, tools="mail.*")
    assert await refused(journal, covering(per_tool, tool="mail.send")) is None
    assert await refused(journal, covering(per_tool, tool="mail.read")) is None
    assert await refused(journal, covering(per_tool, tool="mail.send", caller=BOB)) is not None
    assert covering(per_tool, tool="demo.add") == []
    per_service = RateLimit(per="service", limit=1, window_s=60)
    assert covering(per_service) == []
    assert await refused(journal, covering(per_service, services=["bank", "post"])) is None
    assert await refused(journal, covering(per_service, tool="mail.read", services=["post"])) is not None


def test_of_two_rules_about_the_same_thing_the_stricter_counts() -> None:
    lax, strict = (RateLimit(per="caller", limit=limit, window_s=60) for limit in (9, 2))
    assert [bucket.limit for bucket in covering(lax, strict)] == [2]
    assert [bucket.limit for bucket in covering(strict, lax)] == [2]


async def test_logs_do_not_grow_beyond_what_a_window_needs(journal: Journal, time: FakeClock) -> None:
    among = covering(RateLimit(per="caller", limit=5, window_s=1), RateLimit(per="tool", limit=5, window_s=1))
    for _ in range(100):
        time.advance(0.5)
        assert await refused(journal, among) is None
    assert journal.reader.all("SELECT COUNT(*) FROM rate")[0][0] <= len(among) * (limits.PRUNE_EVERY + 5)
    time.advance(86_400)
    await journal.commit(limits.evict)
    assert journal.reader.all("SELECT COUNT(*) FROM rate") == [(0,)]


NODE = """
import asyncio, sys
from interlock.core.clock import Clock
from interlock.resilience.limits import Bucket, admit
from interlock.store.homes import home_at
from interlock.store.journal import Journal
from interlock.store.signing import Signer

async def main() -> None:
    home = home_at(sys.argv[1])
    home.prepare()
    journal = Journal(home, clock=Clock(), signer=Signer(home.keys))
    print("ready", flush=True)
    sys.stdin.readline()
    among = [Bucket("everybody", 50, 86_400_000, "50 calls")]
    answers = await asyncio.gather(
        *(journal.commit(lambda transaction: admit(transaction, among)) for _ in range(100)), return_exceptions=True
    )
    print(sum(answer is None for answer in answers))
    await journal.close()

asyncio.run(main())
"""


@IN_THE_STORE
def test_three_processes_together_admit_no_more_than_the_limit(tmp_path: Path) -> None:
    nodes = [
        subprocess.Popen(
            [*forked.python(), "-c", NODE, str(tmp_path)],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(3)
    ]
    try:
        for node in nodes:
            assert node.stdout is not None
            assert node.stdout.readline() == "ready\n"
        for node in nodes:
            assert node.stdin is not None
            node.stdin.write("go\n")
            node.stdin.flush()
        admitted = [int(node.communicate(timeout=60)[0]) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
    assert sum(admitted) == 50


@IN_THE_STORE
async def test_a_service_that_asks_to_be_left_alone_is_until_it_is_ready(journal: Journal, time: FakeClock) -> None:
    async def failure(*services: str) -> Failure | None:
        try:
            await journal.commit(lambda transaction: limits.check_suspended(transaction, services))
        except Failure as found:
            return found
        return None

    await journal.commit(limits.suspend("bank", time.now_ms + 5000))
    await journal.commit(limits.suspend("bank", time.now_ms + 2000))
    assert await failure("post") is None
    found = await failure("post", "bank")
    assert found is not None
    assert (found.code, found.retry_after_ms) == ("E3504", 5000)
    assert "`bank`" in found.message
    time.advance(4.999)
    assert await failure("bank") is not None
    time.advance(0.001)
    assert await failure("bank") is None
    await journal.commit(limits.evict)
    assert journal.reader.all("SELECT COUNT(*) FROM suspension") == [(0,)]


async def test_no_service_can_ask_to_be_left_alone_for_ever(journal: Journal, time: FakeClock) -> None:
    await journal.commit(limits.suspend("bank", time.now_ms * 10))
    time.advance(limits.MAX_SUSPENSION_MS / 1000)
    await journal.commit(lambda transaction: limits.check_suspended(transaction, ["bank"]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"per": "caller", "limit": 0, "window_s": 1},
        {"per": "caller", "limit": 1, "window_s": 0},
        {"per": "planet", "limit": 1, "window_s": 1},
        {"per": "caller", "limit": 1, "window_s": 1, "tool": "demo.*"},
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError):
        RateLimit.model_validate(wrong)


@pytest.mark.supports("OBS-08")
def test_a_loop_of_identical_calls_is_told_once_in_a_window(time: FakeClock) -> None:
    watch = LoopWatch(LoopLimits(identical=3, calls=1000, window_s=60))
    told = [watch.seen(ANN, "demo.add", "a" * 64, time.clock.monotonic()) for _ in range(20)]
    assert [index for index, text in enumerate(told) if text is not None] == [3]
    assert told[3] == "`user:ann` made 4 calls of demo.add with the same input within 60 s"
    time.advance(60)
    told = [watch.seen(ANN, "demo.add", "a" * 64, time.clock.monotonic()) for _ in range(20)]
    assert [index for index, text in enumerate(told) if text is not None] == [3]


@pytest.mark.supports("OBS-08")
def test_a_caller_that_calls_too_often_is_told_of_whatever_it_calls(time: FakeClock) -> None:
    watch = LoopWatch(LoopLimits(identical=3, calls=50, window_s=60))
    told = [watch.seen(ANN, "demo.add", str(number), time.clock.monotonic()) for number in range(100)]
    assert [text for text in told if text is not None] == ["`user:ann` made 51 calls within 60 s"]
    assert all(watch.seen(BOB, "demo.add", str(number), time.clock.monotonic()) is None for number in range(50))


def test_the_watch_for_loops_keeps_its_memory_small(time: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoopWatch, "MAX_COUNTS", 10)
    watch = LoopWatch(LoopLimits(identical=100, calls=40, window_s=60))
    told = [watch.seen(ANN, "demo.add", str(number), time.clock.monotonic()) for number in range(41)]
    # What is forgotten is which calls were alike, never how many there were.
    assert told[-1] == "`user:ann` made 41 calls within 60 s"

"""A breaker opens, tries and closes as its contract says; what calls a breaker off is the service, never a caller."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from interlock.contract.manifest import CircuitBreakerConfig
from interlock.core.errors import CODES, Failure
from interlock.resilience.breaker import SLICES, Breaker, State, answered, counts
from interlock.testing import FakeClock
from tests.support.each import each


def config(**numbers: float | None) -> CircuitBreakerConfig:
    return CircuitBreakerConfig.model_validate(numbers)


def breaker(time: FakeClock, **numbers: float | None) -> Breaker:
    return Breaker(config(**numbers), monotonic=time.clock.monotonic, service="bank")


def refusal(of: Breaker) -> Failure | None:
    try:
        of.admit()
    except Failure as failure:
        return failure
    return None


def trip(of: Breaker) -> None:
    """Let the service fail until the breaker opens."""
    while of.state == "closed":
        of.failed(of.admit())


def half_open(time: FakeClock, **numbers: float | None) -> Breaker:
    """A breaker that the next call makes half open."""
    made = breaker(time, **numbers)
    trip(made)
    time.advance(made.config.timeout_seconds)
    return made


@pytest.fixture
def time() -> FakeClock:
    return FakeClock()


# The five cases of the specification


@pytest.mark.proves("RESIL-01")
def test_it_stays_closed_while_calls_succeed(time: FakeClock) -> None:
    made = breaker(time)
    for _ in range(10):
        made.succeeded(made.admit())
    assert made.state == "closed"


@pytest.mark.proves("RESIL-01")
def test_it_opens_at_the_threshold_and_says_when_to_come_back(time: FakeClock) -> None:
    made = breaker(time)
    for _ in range(5):
        made.failed(made.admit())
    assert made.state == "open"
    time.advance(20)
    refused = refusal(made)
    assert refused is not None
    assert (refused.code, refused.row.http, refused.retry_after_ms) == ("E3501", 503, 40_000)
    assert "`bank`" in refused.message


@pytest.mark.proves("RESIL-01")
def test_the_first_call_after_the_timeout_makes_it_half_open(time: FakeClock) -> None:
    made = breaker(time, failure_threshold=3, timeout_seconds=2)
    trip(made)
    time.advance(1.999)
    refused = refusal(made)
    assert refused is not None
    assert refused.retry_after_ms == 1
    time.advance(0.001)
    assert made.state == "open"
    assert refusal(made) is None
    assert made.state == "half_open"


@pytest.mark.proves("RESIL-02")
def test_half_open_lets_exactly_so_many_through(time: FakeClock) -> None:
    made = half_open(time, half_open_max_calls=5)
    for _ in range(5):
        made.admit()
    refused = refusal(made)
    assert refused is not None
    assert refused.code == "E3501"
    assert refused.retry_after_ms == 1000


@pytest.mark.proves("RESIL-01")
def test_successes_since_it_became_half_open_close_it(time: FakeClock) -> None:
    made = breaker(time, timeout_seconds=2)
    for _ in range(10):
        made.succeeded(made.admit())
    trip(made)
    time.advance(2)
    for _ in range(3):
        assert made.state != "closed"
        made.succeeded(made.admit())
    assert made.state == "closed"
    # And it begins anew: what failed before it opened no longer counts.
    for _ in range(4):
        made.failed(made.admit())
    assert made.state == "closed"


# What else the rules mean


@pytest.mark.proves("RESIL-01")
def test_failures_that_the_window_has_left_behind_do_not_open_it(time: FakeClock) -> None:
    made = breaker(time)
    made.failed(made.admit())
    time.advance(59)
    for _ in range(3):
        made.failed(made.admit())
    assert made.failures == 4
    time.advance(1)
    made.failed(made.admit())
    assert (made.state, made.failures) == ("closed", 4)
    made.failed(made.admit())
    assert made.state == "open"


@pytest.mark.proves("RESIL-01")
def test_a_share_of_failures_opens_it_where_one_is_set(time: FakeClock) -> None:
    made = breaker(time, failure_rate=0.5, failure_rate_calls=10, failure_threshold=100)
    for _ in range(6):
        made.succeeded(made.admit())
    for _ in range(5):
        made.failed(made.admit())
    assert made.state == "closed", "five of eleven are not yet half"
    made.failed(made.admit())
    assert made.state == "open"


def test_calls_admitted_before_it_opened_say_nothing_once_it_is_tried(time: FakeClock) -> None:
    made = breaker(time, success_threshold=1)
    early = [made.admit() for _ in range(3)]
    trip(made)
    time.advance(60)
    trying = made.admit()
    made.succeeded(early[0])
    assert made.state == "half_open"
    made.failed(early[1])
    assert made.state == "half_open"
    made.abandoned(early[2])
    made.succeeded(trying)
    assert made.state == "closed"


def test_a_call_that_says_nothing_gives_its_place_back(time: FakeClock) -> None:
    made = half_open(time, half_open_max_calls=1)
    made.abandoned(made.admit())
    made.admit()
    assert refusal(made) is not None


def test_calls_that_are_never_heard_of_again_do_not_keep_it_half_open(time: FakeClock) -> None:
    made = half_open(time, half_open_max_calls=2, success_threshold=2)
    made.succeeded(made.admit())
    lost = made.admit()
    time.advance(59)
    assert refusal(made) is not None
    time.advance(1)
    again = made.admit()
    assert refusal(made) is not None, "only the lost place is given again"
    made.failed(lost)
    made.succeeded(again)
    assert made.state == "closed"


def test_more_successes_than_may_pass_are_not_waited_for(time: FakeClock) -> None:
    made = half_open(time, half_open_max_calls=2, success_threshold=100)
    for _ in range(2):
        made.succeeded(made.admit())
    assert made.state == "closed"


@pytest.mark.proves("RESIL-02")
def test_a_share_of_the_calls_is_let_through_and_more_with_each_success(time: FakeClock) -> None:
    made = breaker(time, canary_share=0.1, success_threshold=3, half_open_max_calls=10)
    trip(made)
    time.advance(60)

    def passes() -> int:
        """How many calls it takes until one passes."""
        for asked in range(1, 100):
            try:
                admitted = made.admit()
            except Failure:
                continue
            made.succeeded(admitted)
            return asked
        raise AssertionError("none passes")

    assert [passes() for _ in range(3)] == [1, 3, 2]
    assert made.state == "closed"


@pytest.mark.proves("RESIL-02")
def test_without_a_success_the_share_stays_what_it_is(time: FakeClock) -> None:
    made = breaker(time, canary_share=0.1, half_open_max_calls=5)
    trip(made)
    time.advance(60)
    passed = [refusal(made) is None for _ in range(100)]
    assert [index for index, one in enumerate(passed) if one] == [0, 10, 20, 30, 40]


@pytest.mark.proves("RESIL-02")
async def test_of_200_calls_at_the_transition_no_more_than_the_limit_reach_the_upstream(time: FakeClock) -> None:
    made = half_open(time, half_open_max_calls=10, success_threshold=100)
    reached, everybody = 0, asyncio.Event()

    async def call() -> bool:
        nonlocal reached
        admitted = made.admit()
        reached += 1
        await everybody.wait()
        made.succeeded(admitted)
        return True

    calls = [asyncio.create_task(call()) for _ in range(200)]
    await asyncio.sleep(0)
    everybody.set()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert reached == answers.count(True) == 10
    assert all(isinstance(answer, Failure) and answer.code == "E3501" for answer in answers if answer is not True)


@pytest.mark.proves("RESIL-02")
@pytest.mark.parametrize("numbers", [{"half_open_max_calls": 10}, {"half_open_max_calls": 1, "success_threshold": 1}])
def test_of_200_threads_at_the_transition_no_more_than_the_limit_reach_the_upstream(
    time: FakeClock, numbers: dict[str, int]
) -> None:
    made = half_open(time, **numbers)
    together = threading.Barrier(20)

    def ask() -> list[int]:
        together.wait()
        return [refusal(made) is None for _ in range(10)]

    with ThreadPoolExecutor(20) as pool:
        answers = [one for answer in [pool.submit(ask) for _ in range(20)] for one in answer.result()]
    assert len(answers) == 200
    assert sum(answers) == numbers["half_open_max_calls"]


def test_failures_in_many_threads_open_it_once(time: FakeClock) -> None:
    moves: list[tuple[State, State]] = []
    made = Breaker(config(), monotonic=time.clock.monotonic, moved=lambda old, new: moves.append((old, new)))
    admitted = [made.admit() for _ in range(200)]
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(made.failed, admitted))
    assert moves == [("closed", "open")]


def test_what_somebody_else_found_out_counts_and_is_not_told_on(time: FakeClock) -> None:
    moves: list[tuple[State, State]] = []
    made = Breaker(config(), monotonic=time.clock.monotonic, moved=lambda old, new: moves.append((old, new)))
    made.hold(time.monotonic_s + 5)
    refused = refusal(made)
    assert refused is not None
    assert refused.retry_after_ms == 5000
    assert made.wait_s == 5
    made.close()
    assert refusal(made) is None
    assert (made.wait_s, moves) == (0, [])


def test_other_numbers_count_from_the_next_failure_on(time: FakeClock) -> None:
    made = breaker(time, failure_threshold=5)
    for _ in range(3):
        made.failed(made.admit())
    made.retune(config(failure_threshold=2))
    assert made.state == "closed"
    made.failed(made.admit())
    assert made.state == "open"


# What counts

TIMEOUTS = {"E3002", "E3402", "E3503", "E3853"}
COUNT = {"E3001", "E3002", "E3402", "E3502", "E3503", "E3851", "E3853", "E3856", "E3901", "E3907"}


@pytest.mark.proves("RESIL-04")
@each("code", sorted(CODES))
def test_only_the_service_itself_can_count_against_it(code: str) -> None:
    failure = Failure(code, native_error_ref="http:503")
    assert counts(failure, own_deadline=False) == (code in COUNT)
    assert counts(failure, own_deadline=True) == (code in COUNT - TIMEOUTS)
    # What is known to be its answer is none of its failures.
    assert not (answered(failure) and counts(failure, own_deadline=False))


def test_an_answer_shows_that_the_service_is_there_even_if_it_is_no() -> None:
    assert answered(Failure("E3401", native_error_ref="http:422"))
    assert answered(Failure("E3303"))
    assert not answered(Failure("E3401")), "a tool may have failed before it asked"
    assert not answered(Failure("E3504", native_error_ref="http:429"))
    assert not answered(Failure("E3703"))


# Any sequence


class Reference:
    """The rules written down as plainly as possible: everything is remembered, nothing is clever."""

    def __init__(self, config: CircuitBreakerConfig) -> None:
        self.config = config
        self.state: State = "closed"
        self.round = object()
        self.since = 0.0
        self.ended: list[tuple[float, bool]] = []
        self.out = 0
        self.successes = 0
        self.saved = Fraction(0)

    def enter(self, state: State, now: float) -> None:
        self.__init__(self.config)
        self.state, self.since = state, now

    @property
    def needed(self) -> int:
        return min(self.config.success_threshold, self.config.half_open_max_calls)

    def admits(self, now: float) -> bool:
        first = False
        if self.state == "open" and now >= self.since + self.config.timeout_seconds:
            self.enter("half_open", now)
            first = True
        if self.state != "half_open":
            return self.state == "closed"
        most = self.config.half_open_max_calls
        if self.out + self.successes == most and now >= self.since + self.config.timeout_seconds:
            self.round, self.since, self.out = object(), now, 0
        if self.out + self.successes == most or not (first or self.draws()):
            return False
        self.out += 1
        return True

    def draws(self) -> bool:
        if self.config.canary_share is None:
            return True
        share = Fraction(self.config.canary_share).limit_denominator(100)
        self.saved += share + (1 - share) * Fraction(self.successes, self.needed)
        if self.saved < 1:
            return False
        self.saved -= 1
        return True

    def end(self, admitted: object, outcome: str, now: float) -> None:
        if admitted is not self.round:
            return
        if self.state == "half_open":
            self.out -= 1
            if outcome == "failed":
                self.enter("open", now)
            elif outcome == "succeeded":
                self.successes += 1
                if self.successes == self.needed:
                    self.enter("closed", now)
        elif self.state == "closed" and outcome != "abandoned":
            self.ended.append((now, outcome == "failed"))
            if outcome == "failed" and self.trips(now):
                self.enter("open", now)

    def trips(self, now: float) -> bool:
        window_s, rate = self.config.window_seconds, self.config.failure_rate
        if sum(failed for at, failed in self.ended if now - at < window_s) >= self.config.failure_threshold:
            return True
        if rate is None:
            return False
        slice_s = window_s / SLICES
        recent = [failed for at, failed in self.ended if now // slice_s - at // slice_s < SLICES]
        return len(recent) >= self.config.failure_rate_calls and sum(recent) >= rate * len(recent)


SMALL = st.integers(1, 3)
NUMBERS = st.fixed_dictionaries(
    {
        "failure_threshold": st.sampled_from([1, 2, 3, 50]),
        "success_threshold": SMALL,
        "timeout_seconds": st.sampled_from([2, 20]),
        "half_open_max_calls": st.integers(1, 4),
        "window_seconds": st.sampled_from([15, 60]),
        "failure_rate": st.sampled_from([None, 0.5, 1.0]),
        "failure_rate_calls": SMALL,
        "canary_share": st.sampled_from([None, None, 0.1, 0.25]),
    }
)
OUTCOMES = st.sampled_from(["succeeded", "succeeded", "failed", "failed", "abandoned"])
STEPS = st.one_of(
    # Binary fractions, so that sums of them are exact.
    st.sampled_from([0.25, 0.5, 1.75, 2.0, 14.75, 15.0, 20.0, 45.0]),
    # Calls that begin, and calls of which one ends: the n-th of those that are out.
    st.integers(1, 12),
    st.tuples(st.integers(0, 5), OUTCOMES),
    # Calls that begin and end.
    OUTCOMES,
    OUTCOMES,
)


@pytest.mark.proves("RESIL-01", "RESIL-02")
@settings(max_examples=150)
@given(numbers=NUMBERS, steps=st.lists(STEPS, min_size=10, max_size=60))
def test_whatever_happens_in_whatever_order_it_does_as_the_reference_does(
    numbers: dict[str, Any], steps: list[float | int | tuple[int, str] | str]
) -> None:
    time, chosen = FakeClock(), config(**numbers)
    moves: list[tuple[State, State]] = []
    made = Breaker(chosen, monotonic=time.clock.monotonic, moved=lambda old, new: moves.append((old, new)))
    reference = Reference(chosen)
    out: list[tuple[int, object]] = []

    def call() -> None:
        if reference.admits(time.monotonic_s):
            out.append((made.admit(), reference.round))
        else:
            refused = refusal(made)
            assert refused is not None
            assert (refused.retry_after_ms or 0) > 0

    def end(which: int, outcome: str) -> None:
        if which < len(out):
            admitted, in_reference = out.pop(which)
            {"succeeded": made.succeeded, "failed": made.failed, "abandoned": made.abandoned}[outcome](admitted)
            reference.end(in_reference, outcome, time.monotonic_s)

    for step in steps:
        match step:
            case float():
                time.advance(step)
            case int():
                for _ in range(step):
                    call()
            case str():
                before = len(out)
                call()
                end(before, step)
            case (which, outcome):
                end(which, outcome)
        assert made.state == reference.state
    states = ["closed", *(new for _, new in moves)]
    assert [*(old for old, _ in moves), made.state] == states

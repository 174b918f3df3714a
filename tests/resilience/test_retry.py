"""A request is sent again to an upstream only if it may be, as often as one allowance for the whole call permits."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from interlock import Context, Interlock, tool
from interlock.call.results import Result
from interlock.contract.manifest import RetryPolicy
from interlock.core.errors import Failure
from interlock.resilience.retry import Pacing, call_with_retries, delay_s, http_status, sending
from interlock.testing import FakeClock
from tests.support.calls import admit

DOWN = Failure("E3502", details={"sent": True})
UNSENT = Failure("E3502", details={"sent": False})


class Upstream:
    """An upstream that answers by a script, and a clock that sleeping moves."""

    def __init__(self, *outcomes: Failure | str) -> None:
        self.outcomes = outcomes
        self.asked = 0
        self.now = 0.0
        self.pauses: list[float] = []
        self.deadlines: list[float] = []
        self.takes_s = 0.0

    async def attempt(self, until: float) -> str:
        self.deadlines.append(until)
        self.now += self.takes_s
        outcome = self.outcomes[min(self.asked, len(self.outcomes) - 1)]
        self.asked += 1
        if isinstance(outcome, Failure):
            raise outcome
        return outcome

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    @property
    def pacing(self) -> Pacing:
        return Pacing(monotonic=lambda: self.now, sleep=self.sleep, uniform=lambda low, high: high, base_s=1.0)

    async def send(self, *, safe: bool, deadline: float = 1e9, **policy: Any) -> str | Failure:
        chosen = RetryPolicy.model_validate(policy)
        try:
            return await sending(self.attempt, chosen, self.pacing, deadline=deadline, safe=safe)
        except Failure as failure:
            return failure


async def test_what_may_be_done_twice_is_sent_again_until_it_is_answered() -> None:
    upstream = Upstream(DOWN, Failure("E3503"), "yes")
    assert await upstream.send(safe=True) == "yes"
    assert upstream.pauses == [1.0, 2.0]


async def test_what_must_not_be_done_twice_is_sent_again_only_if_it_never_arrived() -> None:
    assert await Upstream(UNSENT, UNSENT, "yes").send(safe=False) == "yes"
    for outcome in (DOWN, Failure("E3502"), Failure("E3503"), Failure("E3504", retry_after_ms=1)):
        upstream = Upstream(outcome, "yes")
        assert await upstream.send(safe=False) is outcome
        assert upstream.asked == 1


@given(
    outcomes=st.lists(
        st.sampled_from([UNSENT, DOWN, Failure("E3503"), Failure("E3401"), Failure("E3504"), "yes"]), min_size=1
    ),
    safe=st.booleans(),
    attempts=st.integers(1, 10),
)
async def test_nothing_that_may_have_arrived_is_repeated_unless_it_is_safe(
    outcomes: list[Failure | str], safe: bool, attempts: int
) -> None:
    upstream = Upstream(*outcomes)
    answer = await upstream.send(safe=safe, max_attempts=attempts)
    assert upstream.asked <= attempts
    seen = [outcomes[min(index, len(outcomes) - 1)] for index in range(upstream.asked)]
    if not safe:
        assert all(outcome is UNSENT for outcome in seen[:-1])
    if isinstance(answer, Failure):
        unsent = (answer.details or {}).get("sent") is False
        assert unsent == all(outcome is UNSENT for outcome in seen)


async def test_the_last_failure_is_told_as_it_was_with_the_number_of_attempts() -> None:
    upstream = Upstream(DOWN, Failure("E3502", "no route", details={"sent": False}, native_error_ref="http:503"))
    failure = await upstream.send(safe=True, max_attempts=3)
    assert isinstance(failure, Failure)
    assert (failure.code, failure.message, failure.retryable) == ("E3502", "no route", True)
    assert failure.native_error_ref == "http:503"
    assert failure.details == {"sent": True, "attempts": 3}, "the first one may have arrived"


async def test_a_refusal_by_a_breaker_is_not_waited_out() -> None:
    refused = Failure("E3501", details={"sent": False}, retry_after_ms=10)
    upstream = Upstream(refused, "yes")
    assert await upstream.send(safe=True) is refused
    assert upstream.pauses == []


@pytest.mark.proves("IDEM-11")
async def test_a_retry_after_of_seven_seconds_is_honoured_and_never_past_the_deadline() -> None:
    asked = Failure("E3504", retry_after_ms=7000)
    upstream = Upstream(asked, "yes")
    assert await upstream.send(safe=True, deadline=7.5) == "yes"
    assert upstream.pauses == [7.0]
    upstream = Upstream(asked, "yes")
    assert await upstream.send(safe=True, deadline=6.9) is asked
    assert upstream.pauses == []


@pytest.mark.proves("IDEM-11")
async def test_only_the_named_statuses_are_tried_again() -> None:
    for status, asked in ((503, 2), (404, 1), (501, 1)):
        upstream = Upstream(Failure("E3502", native_error_ref=f"http:{status}"), "yes")
        await upstream.send(safe=True)
        assert upstream.asked == asked
    upstream = Upstream(Failure("E3502", native_error_ref="http:501"), "yes")
    assert await upstream.send(safe=True, retry_on_status_codes=[501]) == "yes"


async def test_a_protocol_with_other_statuses_says_what_they_mean() -> None:
    upstream = Upstream(Failure("E3502", native_error_ref="grpc:UNIMPLEMENTED"), "yes")
    policy = RetryPolicy.model_validate({})
    with pytest.raises(Failure):
        await sending(upstream.attempt, policy, upstream.pacing, deadline=1e9, safe=True, status_of=lambda _: 501)
    assert upstream.asked == 1
    assert http_status(Failure("E3502", native_error_ref="grpc:UNIMPLEMENTED")) is None


@pytest.mark.proves("IDEM-10")
async def test_attempts_within_a_call_count_for_whoever_repeats_the_call() -> None:
    upstream, policy, exhausted = Upstream(DOWN), RetryPolicy.model_validate({"max_attempts": 4}), list[int]()

    async def call(until: float) -> Result:
        within = RetryPolicy.model_validate({"max_attempts": 2})
        with pytest.raises(Failure) as caught:
            await sending(upstream.attempt, within, upstream.pacing, deadline=1e9, safe=True)
        return Result(
            invocation_id="1", tool="t@1.0.0", state="failed", created_ms=0, trace_id="t", metadata={},
            error=caught.value,
        )  # fmt: skip

    result = await call_with_retries(
        call, policy, upstream.pacing, deadline=1e9, on_exhausted=lambda _, attempts: exhausted.append(attempts)
    )
    assert upstream.asked == 4
    assert exhausted == [4]
    assert result.error is not None
    assert result.error.code == "E3415"
    assert result.error.details is not None
    assert result.error.details["last_error"]["error_code"] == "E3502"


@pytest.mark.proves("IDEM-11")
@pytest.mark.parametrize("retry", [1, 4, 10])
def test_a_thousand_clients_spread_evenly_over_the_window_of_every_retry(retry: int) -> None:
    dice, policy = random.Random(retry), RetryPolicy.model_validate({})
    pacing = Pacing(monotonic=lambda: 0.0, sleep=Upstream().sleep, uniform=dice.uniform)
    window_s = min(60.0, 0.1 * 2.0 ** (retry - 1))
    buckets = Counter(int(delay_s(policy, pacing, retry) / window_s * 20) for _ in range(1000))
    assert len(buckets) == 20
    assert max(buckets.values()) <= 3 * 1000 / 20


@pytest.mark.proves("IDEM-11")
def test_proportional_delays_keep_to_their_factor() -> None:
    dice = random.Random(3)
    pacing = Pacing(monotonic=lambda: 0.0, sleep=Upstream().sleep, uniform=dice.uniform)
    for factor, low, high in ((0.2, 1.6, 2.4), (0.0, 2.0, 2.0), (3.0, 0.0, 8.0)):
        said = {"backoff_max_seconds": 2, "jitter": "proportional", "jitter_factor": factor}
        policy = RetryPolicy.model_validate(said)
        assert all(low <= delay_s(policy, pacing, 9) <= high for _ in range(200))


@pytest.mark.proves("RESIL-11")
@given(
    takes_s=st.floats(0, 30), deadline=st.floats(0.1, 100), attempts=st.integers(1, 10), wanted_ms=st.integers(0, 5000)
)
async def test_deadlines_of_attempts_never_fall_and_never_exceed_the_calls(
    takes_s: float, deadline: float, attempts: int, wanted_ms: int
) -> None:
    upstream = Upstream(Failure("E3503", retry_after_ms=wanted_ms))
    upstream.takes_s = takes_s
    await upstream.send(safe=True, deadline=deadline, max_attempts=attempts)
    assert 1 <= len(upstream.deadlines) <= attempts
    assert upstream.deadlines == sorted(upstream.deadlines)
    assert all(until <= deadline for until in upstream.deadlines)
    if len(upstream.deadlines) == attempts:
        assert upstream.deadlines[-1] == deadline, "the last one leaves nothing to another"
    if attempts > 1:  # of a fifth, another attempt has to have a share after the pause, which is a second at most
        assert upstream.deadlines[0] == pytest.approx(
            deadline if 0.2 * deadline <= 1 + 0.01 * deadline else 0.8 * deadline
        )


@pytest.mark.proves("RESIL-11")
@pytest.mark.proves("LIFE-10")
@given(
    deadline=st.floats(0.1, 600), attempts=st.integers(1, 10), draws=st.randoms(use_true_random=False),
    jitter=st.sampled_from(["full", "proportional"]),
)  # fmt: skip
async def test_a_call_whose_attempts_all_hang_ends_at_its_deadline_and_not_before(
    deadline: float, attempts: int, draws: random.Random, jitter: str
) -> None:
    upstream = Upstream()

    async def hangs(until: float) -> str:
        upstream.deadlines.append(until)
        upstream.now = until
        raise Failure("E3503", details={"sent": True})

    pacing = Pacing(monotonic=lambda: upstream.now, sleep=upstream.sleep, uniform=draws.uniform)
    policy = RetryPolicy.model_validate({"max_attempts": attempts, "jitter": jitter})
    with pytest.raises(Failure):
        await sending(hangs, policy, pacing, deadline=deadline, safe=True)
    assert upstream.now == deadline
    assert upstream.deadlines[-1] == deadline


@pytest.mark.proves("RESIL-11")
@pytest.mark.parametrize(("left_s", "asked"), [(0.9, 1), (1.1, 2)])
async def test_an_attempt_with_too_little_time_left_is_not_begun(left_s: float, asked: int) -> None:
    upstream = Upstream(Failure("E3503", retry_after_ms=1000), "yes")
    upstream.takes_s = 99 - left_s
    await upstream.send(safe=True, deadline=100.0)
    assert upstream.asked == asked


@pytest.mark.proves("RESIL-11")
async def test_what_must_not_be_sent_twice_has_all_of_the_calls_time() -> None:
    upstream = Upstream("yes")
    await upstream.send(safe=False, deadline=100.0, max_attempts=5)
    assert upstream.deadlines == [100.0]


@pytest.mark.proves("RESIL-11")
async def test_each_repeated_call_has_the_deadline_of_its_attempt() -> None:
    upstream, given, policy = Upstream(), list[float](), RetryPolicy.model_validate({"max_attempts": 3})

    async def call(until: float) -> Result:
        given.append(until)
        return Result(
            invocation_id="1", tool="t@1.0.0", state="failed", created_ms=0, trace_id="t", metadata={}, error=DOWN
        )

    await call_with_retries(call, policy, upstream.pacing, deadline=100.0, on_exhausted=lambda _, attempts: None)
    assert given == [pytest.approx(80.0), pytest.approx(90.1), 100.0]


@pytest.mark.proves("RESIL-11")
@pytest.mark.parametrize(
    ("timeout_class", "attempts", "within_s", "expected"),
    [
        ("interactive", 3, 60.0, [0.5, 0.5, 0.5]),
        ("standard", 3, 60.0, [5.0, 5.0, 5.0]),
        ("standard", 3, 5.0, [4.0, 4.5, 5.0]),
        ("standard", 2, 6.0, [4.8, 5.0]),
        ("long_running", 2, 60.0, [48.0, 60.0]),
    ],
)
async def test_a_tool_is_given_the_deadline_of_its_class_and_of_its_attempt(
    home: Path, timeout_class: Any, attempts: int, within_s: float, expected: list[float]
) -> None:
    left: list[float] = []

    @tool(
        version="1.0.0", mutation_class="read_only", namespace="often", name=timeout_class,
        timeout_class=timeout_class, external_io=False, retry={"max_attempts": attempts},
    )  # fmt: skip
    async def fails(ctx: Context) -> str:
        """Note the time it has, and fail."""
        left.append(ctx.remaining_s)
        raise Failure("E3502", "it is down", retry_after_ms=1)

    clock = FakeClock()  # it stands still, so nothing of a deadline is used up
    async with Interlock.open(home, housekeeping=False, clock=clock.clock) as app:
        await admit(app, fails)
        result = await app.call_with_retries(f"often.{timeout_class}", within_s=within_s)
        assert result.error is not None
        assert result.error.code == "E3415"
    assert left == [pytest.approx(seconds) for seconds in expected]

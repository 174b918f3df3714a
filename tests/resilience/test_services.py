"""What one process learns about a service, every process on the home goes by, and so does the next one to start."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest
import pytest_asyncio

from interlock import Interlock
from interlock.api.shared_config import SharedConfiguration
from interlock.contract.manifest import BreakerRule, CircuitBreakerConfig
from interlock.core.errors import Failure
from interlock.resilience import limits
from interlock.resilience.services import Services
from interlock.store.homes import home_at
from interlock.store.journal import Journal
from interlock.store.signing import Signer
from interlock.testing import FakeClock
from tests.support import forked, stores
from tests.support.stores import notice, passes

ROOT = Path(__file__).parents[2]
CONFIG = CircuitBreakerConfig.model_validate({})
DOWN = Failure("E3502")
SHARED = pytest.mark.proves("RESIL-03")


@asynccontextmanager
async def opened(home: Path, time: FakeClock) -> AsyncGenerator[Journal]:
    place = home_at(home)
    place.prepare()
    journal = Journal(place, clock=time.clock, signer=Signer(place.keys))
    try:
        yield journal
    finally:
        await journal.close()


@pytest.fixture
def time() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def journal(tmp_path: Path, time: FakeClock) -> AsyncGenerator[Journal]:
    async with opened(tmp_path, time) as made:
        yield made


def call(services: Services, failure: Failure | None = None, *, config: CircuitBreakerConfig = CONFIG) -> str | None:
    """A call of the service that ends in a way; the code with which it was refused instead."""
    try:
        entry = services.enter("bank", config)
    except Failure as refused:
        return refused.code
    entry.done(failure)
    return None


async def trip(services: Services) -> None:
    for _ in range(5):
        assert call(services, DOWN) is None
    await services.settle()


def listener() -> tuple[list[tuple[str, str, str]], Callable[[str, str, str], None]]:
    """A listener, and what it is told."""
    told: list[tuple[str, str, str]] = []
    return told, lambda service, old, new: told.append((service, old, new))


def recorded(journal: Journal) -> list[tuple[str, str]]:
    rows = journal.reader.all("SELECT body FROM journal WHERE kind = 'registry' AND call = 'bank' ORDER BY seq")
    bodies = [orjson.loads(body) for (body,) in rows]
    return [(body["from"], body["to"]) for body in bodies if body["event"] == "service.breaker"]


@pytest.mark.proves("RESIL-04")
async def test_after_five_failures_the_sixth_call_is_refused_and_says_when_to_come_back(
    journal: Journal, time: FakeClock
) -> None:
    services = Services(journal, time.clock)
    await trip(services)
    await passes(time, 15, journal)
    with pytest.raises(Failure) as caught:
        services.enter("bank", CONFIG)
    assert (caught.value.code, caught.value.row.http, caught.value.retry_after_ms) == ("E3501", 503, 45_000)
    services.enter("post", CONFIG).done()


@pytest.mark.proves("RESIL-04")
@pytest.mark.parametrize("code", ["E3301", "E3206", "E3703", "E3404", "E3401", "E3501"])
async def test_what_callers_do_wrong_leaves_the_breaker_closed(journal: Journal, time: FakeClock, code: str) -> None:
    services = Services(journal, time.clock)
    for _ in range(100):
        assert call(services, Failure(code)) is None
    for _ in range(100):
        services.enter("bank", CONFIG).done(Failure("E3503"), own_deadline=True)
    for _ in range(100):
        services.enter("bank", CONFIG).abandoned()
    (health,) = services.snapshot()
    assert (health.state, health.failures) == ("closed", 0)


async def test_every_change_is_told_and_on_record(journal: Journal, time: FakeClock) -> None:
    told, listen = listener()
    services = Services(journal, time.clock, listen=listen)
    await trip(services)
    row = journal.reader.all("SELECT service, state, until_ms - since_ms, reason FROM breaker")
    assert row == [("bank", "open", 60_000, "E3502 upstream unavailable")]
    await passes(time, 60, journal)
    assert call(services, DOWN) is None
    await services.settle()
    await passes(time, 60, journal)
    for _ in range(3):
        assert call(services) is None
    await services.settle()
    changes = [("closed", "open"), ("open", "half_open"), ("half_open", "open"), ("open", "half_open")]
    changes.append(("half_open", "closed"))
    assert told == [("bank", *change) for change in changes]
    assert recorded(journal) == changes
    assert journal.reader.all("SELECT * FROM breaker") == []


@SHARED
async def test_a_restart_keeps_a_breaker_open(tmp_path: Path, time: FakeClock) -> None:
    async with opened(tmp_path, time) as journal:
        await trip(Services(journal, time.clock))
    time.advance(30)
    async with opened(tmp_path, time) as journal:
        services = Services(journal, time.clock)
        (health,) = services.snapshot()
        assert (health.service, health.state, health.retry_after_ms) == ("bank", "open", 30_000)
        assert call(services) == "E3501"
        await passes(time, 30, journal)
        assert call(services) is None
        assert services.snapshot()[0].state == "half_open", "a restart does not close it either"
        await services.settle()


@SHARED
async def test_another_process_hears_of_a_breaker_that_opens_and_closes(tmp_path: Path, time: FakeClock) -> None:
    told, listen = listener()
    async with opened(tmp_path, time) as one, opened(tmp_path, time) as two:
        here, there = Services(one, time.clock), Services(two, time.clock, listen=listen)
        assert call(there) is None
        await trip(here)
        await notice(time, one, two)
        assert call(there) == "E3501"
        await passes(time, 60, one, two)
        assert call(here) is None
        await here.settle()
        await notice(time, one, two)
        # Who tries the service tries it alone.
        assert call(there) == "E3501"
        for _ in range(2):
            assert call(here) is None
        await here.settle()
        await notice(time, one, two)
        assert call(there) is None
        assert told == [("bank", "closed", "open"), ("bank", "open", "closed")]
        assert recorded(two) == [("closed", "open"), ("open", "half_open"), ("half_open", "closed")]


@SHARED
async def test_of_two_that_open_at_the_same_time_one_does_and_the_other_follows(
    tmp_path: Path, time: FakeClock
) -> None:
    async with opened(tmp_path, time) as one, opened(tmp_path, time) as two:
        both = Services(one, time.clock), Services(two, time.clock)
        for _ in range(5):
            for services in both:
                assert call(services, DOWN) is None
            time.advance(0.01)
        for services in both:
            await services.settle()
        assert recorded(one) == [("closed", "open")]
        # And of two that try at the same time, one goes on.
        await passes(time, 60, one, two)
        assert [call(services) for services in both] == [None, None]
        for services in both:
            await services.settle()
        assert sorted(call(services) or "" for services in both) == ["", "E3501"]
        assert recorded(one) == [("closed", "open"), ("open", "half_open")]


@SHARED
async def test_failures_that_each_of_two_processes_saw_open_it_together(tmp_path: Path, time: FakeClock) -> None:
    async with opened(tmp_path, time) as one, opened(tmp_path, time) as two:
        first, second = Services(one, time.clock), Services(two, time.clock)
        for _ in range(2):
            for services in (first, second):
                assert call(services, DOWN) is None
                await services.settle()
        await notice(time, one, two)
        assert call(first) is call(second) is None
        assert call(second, DOWN) is None
        await second.settle()
        await notice(time, one, two)
        assert call(first) == call(second) == "E3501"
        assert recorded(one) == [("closed", "open")]

        # When it is closed again, they begin anew.
        await passes(time, 61, one, two)
        for _ in range(3):
            assert call(second) is None
        await second.settle()
        await notice(time, one, two)
        for _ in range(2):
            for services in (first, second):
                assert call(services, DOWN) is None
                await services.settle()
        await notice(time, one, two)
        assert call(first) is call(second) is None


@SHARED
async def test_failures_of_others_count_for_as_long_as_the_window(tmp_path: Path, time: FakeClock) -> None:
    async with opened(tmp_path, time) as one, opened(tmp_path, time) as two:
        first, second = Services(one, time.clock), Services(two, time.clock)
        for _ in range(4):
            assert call(first, DOWN) is None
        await first.settle()
        await passes(time, 61, one, two)
        assert call(second, DOWN) is None
        await second.settle()
        assert call(second) is None


@SHARED
async def test_a_process_that_died_while_it_tried_does_not_keep_others_out(tmp_path: Path, time: FakeClock) -> None:
    async with opened(tmp_path, time) as journal:
        services = Services(journal, time.clock)
        await trip(services)
        await passes(time, 60, journal)
        services.enter("bank", CONFIG)
        await services.settle()
    async with opened(tmp_path, time) as journal:
        services = Services(journal, time.clock)
        assert call(services) == "E3501"
        await passes(time, 60, journal)
        for _ in range(3):
            assert call(services) is None
        await services.settle()
        assert services.snapshot()[0].state == "closed"


async def test_a_quick_life_is_written_in_order(journal: Journal, time: FakeClock) -> None:
    services = Services(journal, time.clock)
    for _ in range(5):
        call(services, DOWN)
    await passes(time, 60, journal)
    for _ in range(3):
        call(services)
    await services.settle()
    assert recorded(journal) == [("closed", "open"), ("open", "half_open"), ("half_open", "closed")]


async def test_a_look_while_a_change_is_being_written_takes_it_for_nobody_elses(
    journal: Journal, time: FakeClock
) -> None:
    services = Services(journal, time.clock)
    await trip(services)
    await passes(time, 60, journal)
    entry = services.enter("bank", CONFIG)
    for _ in range(20):
        assert services.snapshot()[0].state == "half_open"
        await asyncio.sleep(0)
    await services.settle()
    assert journal.reader.all("SELECT state FROM breaker") == [("half_open",)]
    entry.abandoned()


@pytest.mark.proves("RESIL-02")
async def test_of_200_calls_at_the_transition_only_the_limit_reach_the_service(
    journal: Journal, time: FakeClock
) -> None:
    services = Services(journal, time.clock)
    await trip(services)
    await passes(time, 60, journal)
    reached = 0

    async def one() -> None:
        nonlocal reached
        entry = services.enter("bank", CONFIG)
        reached += 1
        await asyncio.sleep(0)
        entry.done(Failure("E3703"))
        entry.done(DOWN)

    async with asyncio.timeout(30):
        answers = await asyncio.gather(*(one() for _ in range(200)), return_exceptions=True)
    assert reached == 10
    assert sum(isinstance(answer, Failure) and answer.code == "E3501" for answer in answers) == 190
    assert services.snapshot()[0].state == "half_open", "what has ended cannot end again"
    await services.settle()


@pytest.mark.proves("RESIL-05")
async def test_a_service_that_says_not_now_is_left_alone_by_every_process(tmp_path: Path, time: FakeClock) -> None:
    async with opened(tmp_path, time) as one, opened(tmp_path, time) as two:
        here, there = Services(one, time.clock), Services(two, time.clock)
        for _ in range(20):
            entry = here.enter("bank", CONFIG)
            entry.done(Failure("E3504"))
        here.enter("bank", CONFIG).done(Failure("E3504", retry_after_ms=7000))
        await one.drain()
        assert call(here) == "E3504"
        assert call(there) == "E3504"
        await passes(time, 6.999, one, two)
        with pytest.raises(Failure) as caught:
            there.enter("bank", CONFIG)
        assert caught.value.retry_after_ms == 1
        assert here.snapshot()[0].suspended_ms == 1
        await passes(time, 0.001, one, two)
        assert call(here) is None
        assert call(there) is None
        assert here.snapshot()[0].document() == {
            "service": "bank", "state": "closed", "failures": 0, "retryAfterMs": 0, "suspendedMs": 0,
        }  # fmt: skip


async def test_a_suspension_that_others_wrote_counts_and_shows(journal: Journal, time: FakeClock) -> None:
    await journal.commit(limits.suspend("bank", time.now_ms + 1000))
    services = Services(journal, time.clock)
    assert [(one.service, one.suspended_ms) for one in services.snapshot()] == [("bank", 1000)]
    assert call(services) == "E3504"


async def test_another_process_hears_of_a_suspension_soon_although_it_has_just_looked(
    tmp_path: Path, time: FakeClock
) -> None:
    async with opened(tmp_path, time) as one, opened(tmp_path, time) as two:
        here, there = Services(one, time.clock), Services(two, time.clock)
        assert call(there) is None
        here.enter("bank", CONFIG).done(Failure("E3504", retry_after_ms=7000))
        await one.drain()
        await notice(time, one, two)
        assert call(there) == "E3504"


async def test_of_tools_that_are_configured_differently_the_most_careful_numbers_count(
    journal: Journal, time: FakeClock
) -> None:
    quick, slow = (
        CircuitBreakerConfig.model_validate({"failure_threshold": threshold, "timeout_seconds": timeout_s})
        for threshold, timeout_s in ((2, 10), (9, 100))
    )
    services = Services(journal, time.clock)
    assert call(services, DOWN, config=slow) is None
    assert call(services, DOWN, config=quick) is None
    await passes(time, 99, journal)
    assert call(services, config=quick) == "E3501"
    await passes(time, 1, journal)
    assert call(services, config=quick) is None
    await services.settle()


async def test_an_operator_may_set_more_for_a_service(journal: Journal, time: FakeClock) -> None:
    rules = (BreakerRule.model_validate({"services": "ba*", "canary_share": 0.5}),)
    services = Services(journal, time.clock, rules=rules)
    await trip(services)
    await passes(time, 60, journal)
    entries = [call(services, Failure("E3703")) for _ in range(5)]
    assert entries == [None, "E3501", None, "E3501", None]
    await services.settle()


@SHARED
async def test_a_machine_that_follows_takes_the_breaker_of_a_service_from_the_store(tmp_path: Path) -> None:
    settings = '[[breakers]]\nservices = "bank"\nfailure_threshold = 2\n'
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        texts = {name: (tmp_path / name).read_text() for name in ("policy.cedar", "principals.toml")}
        await SharedConfiguration(app).push({**texts, "settings.toml": settings}, by=app.caller, instead_of=None)
        assert [call(app.gateway.services, DOWN) for _ in range(3)] == [None] * 3, "it has settings of its own"
        call(app.gateway.services)
    (tmp_path / "settings.toml").write_text("shared_config = true\n")
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        services = app.gateway.services
        assert [call(services, DOWN) for _ in range(3)] == [None, None, "E3501"]
        other = [services.enter("shop", CONFIG) for _ in range(4)]
        for entry in other:
            entry.done(DOWN)
        services.enter("shop", CONFIG).abandoned()
        await services.settle()


async def test_a_journal_that_cannot_be_written_costs_only_the_sharing(
    tmp_path: Path, time: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "interlock.services")

    def fails(*change: str) -> None:
        raise RuntimeError("a listener of somebody")

    async with opened(tmp_path, time) as journal:
        services = Services(journal, time.clock, listen=fails)
        for _ in range(5):
            assert call(services, DOWN) is None
        with stores.opened(home_at(tmp_path)) as database:
            database.execute("ALTER TABLE breaker RENAME TO gone")
            await services.settle()
            database.execute("ALTER TABLE gone RENAME TO breaker")
        assert "known to this process only" in caplog.text
        await notice(time, journal)
        assert call(services) == "E3501"
        await passes(time, 60, journal)
        for _ in range(3):
            assert call(services) is None
        await services.settle()
        assert call(services) is None


NODE = """
import asyncio, sys
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.contract.manifest import BreakerRule, CircuitBreakerConfig
from interlock.resilience.services import Services
from interlock.store.homes import home_at
from interlock.store.journal import Journal
from interlock.store.signing import Signer

async def main() -> None:
    home = home_at(sys.argv[1])
    home.prepare()
    journal = Journal(home, clock=Clock(), signer=Signer(home.keys))
    services, config = Services(journal, Clock()), CircuitBreakerConfig()
    entries = [services.enter("bank", config) for _ in range(int(sys.argv[2]))]
    print("ready", flush=True)
    sys.stdin.readline()
    for entry in entries:
        entry.done(Failure("E3502"))
    await services.settle()
    for _ in range(2000):
        try:
            services.enter("bank", config).abandoned()
        except Failure as failure:
            print(failure.code)
            break
        await asyncio.sleep(0.01)  # until it is noticed
    await journal.close()

asyncio.run(main())
"""


@SHARED
@pytest.mark.parametrize("failures", [5, 2])
def test_three_processes_that_fail_together_open_it_once(tmp_path: Path, time: FakeClock, failures: int) -> None:
    """Each of them sees enough failures, or all of them together do."""
    nodes = [
        subprocess.Popen(
            [*forked.python(), "-c", NODE, str(tmp_path), str(failures)],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(3)
    ]
    for node in nodes:
        assert node.stdout is not None
        assert node.stdout.readline() == "ready\n"
    for node in nodes:
        assert node.stdin is not None
        node.stdin.write("go\n")
        node.stdin.flush()
    assert [node.communicate(timeout=60)[0] for node in nodes] == ["E3501\n"] * 3

    async def on_record() -> list[tuple[str, str]]:
        async with opened(tmp_path, time) as journal:
            return recorded(journal)

    assert asyncio.run(on_record()) == [("closed", "open")]


async def test_one_that_is_found_to_be_there_is_tried_at_once_and_by_everybody(
    journal: Journal, time: FakeClock
) -> None:
    here, there = Services(journal, time.clock), Services(journal, time.clock)
    await trip(here)
    await notice(time, journal)
    assert (call(here), call(there)) == ("E3501", "E3501")
    await here.answers("bank")
    await notice(time, journal)
    assert call(there, DOWN) is None, "it is tried"
    await there.settle()
    await notice(time, journal)
    assert (call(here), call(there)) == ("E3501", "E3501"), "that it is there does not mean that it works"
    await here.answers("bank")
    await notice(time, journal)
    assert call(here) is None

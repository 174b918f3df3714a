"""Retirement: announced, watched, refused from its date on, removed when nobody asks any more, never forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import orjson
import pytest

from interlock import Clock, Interlock, Result
from interlock.api import background
from interlock.contract.manifest import LifecycleState
from interlock.core.clock import iso
from interlock.core.errors import Failure
from interlock.registry import retirement
from interlock.registry.retirement import Milestone, Usage, amend, deprecate, move, sweep, usage
from interlock.store.changes import MAX_STALE_S
from interlock.store.port import Store
from interlock.store.tools import Notice
from tests.support.versions import GUIDE, versioned

Json = dict[str, Any]
DAY_MS = 86_400_000
STATES: tuple[LifecycleState, ...] = ("active", "deprecated", "sunset", "removed")


class FakeTime:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.ms = 1_800_000_000_000

    @property
    def clock(self) -> Clock:
        return Clock(now_ms=lambda: self.ms, monotonic=lambda: self.ms / 1000)

    def pass_days(self, days: float) -> None:
        self.ms += int(days * DAY_MS)

    def pass_a_moment(self) -> None:
        """Long enough for every process to notice what another one did to the registry."""
        self.ms += int(MAX_STALE_S * 1000)


@asynccontextmanager
async def opened(home: Path, time: FakeTime, *versions: str, **said: Any) -> AsyncGenerator[Interlock]:
    given: Json = {"housekeeping": False, **said}
    async with Interlock.open(home, clock=time.clock, **given) as app:
        for version in versions:
            await app.add(versioned(version))
        yield app


async def announce(app: Interlock, time: FakeTime, version: str = "1.0.0", **options: Any) -> Notice:
    told: Json = {"successor": "demo.answer@2.0.0", "migration_guide": GUIDE} | options
    notice = await app.journal.commit(deprecate("demo.answer", version, by="ann", **told))
    time.pass_a_moment()
    return notice


async def swept(app: Interlock, time: FakeTime, **options: Any) -> list[Milestone]:
    happened = await sweep(app.journal, time.ms, by="ann", **options)
    time.pass_a_moment()
    return happened


async def events(app: Interlock, time: FakeTime, **options: Any) -> list[str]:
    return [milestone.event for milestone in await swept(app, time, **options)]


def code(result: Result) -> str | None:
    return None if result.error is None else result.error.code


async def state(app: Interlock, version: str = "1.0.0") -> str:
    return next(row.state for row in await app.catalog.rows() if row.version == version)


def recorded(app: Interlock, version: str = "1.0.0") -> list[Json]:
    rows = app.journal.reader.all(
        "SELECT body FROM journal WHERE kind = 'registry' AND call = ? ORDER BY seq", (f"demo.answer@{version}",)
    )
    return [orjson.loads(row[0]) for row in rows]


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


# Callers are told, and later refused

ENDS = pytest.mark.proves("REG-05")


@ENDS
async def test_a_pinned_deprecated_version_runs_and_says_until_when(tmp_path: Path, time: FakeTime) -> None:
    async with opened(tmp_path, time, "1.0.0", "2.0.0") as app:
        assert "deprecation" not in (await app.call("demo.answer", version="1.0.0")).metadata
        notice = await announce(app, time)
        result = await app.call("demo.answer", version="1.0.0")
        assert result.unwrap() == "1.0.0"
        assert result.metadata["deprecation"] == notice.document()
        assert result.document()["metadata"]["deprecation"] == {
            "deprecatedAt": iso(notice.deprecated_ms),
            "removalDate": iso(notice.deprecated_ms + 90 * DAY_MS),
            "successor": "demo.answer@2.0.0",
            "migrationGuide": GUIDE,
        }
        assert "deprecation" not in (await app.call("demo.answer")).metadata


@ENDS
async def test_from_its_removal_date_a_version_is_refused_with_its_successor(tmp_path: Path, time: FakeTime) -> None:
    async with opened(tmp_path, time, "1.0.0", "2.0.0") as app:
        notice = await announce(app, time)
        time.ms = notice.removal_ms - 1
        assert (await app.call("demo.answer", version="1.0.0")).ok
        time.ms = notice.removal_ms
        error = (await app.call("demo.answer", version="1.0.0")).error
        assert error is not None
        assert (error.code, error.row.http) == ("E3104", 410)
        assert "demo.answer@2.0.0" in error.message
        assert error.details == {"deprecation": notice.document()}


@ENDS
async def test_latest_and_ranges_pass_over_a_deprecated_version_throughout(tmp_path: Path, time: FakeTime) -> None:
    async with opened(tmp_path, time, "1.0.0", "1.1.0", "2.0.0") as app:
        await announce(app, time, "2.0.0", successor=None)
        await announce(app, time, "1.1.0")
        seen: list[str] = []
        for _ in range(4):
            for spec in (None, "LATEST", "*", "^1.0.0", ">=1.0.0"):
                assert (await app.call("demo.answer", version=spec)).unwrap() == "1.0.0"
            seen.append(await state(app, "2.0.0"))
            time.pass_days(45)
            await swept(app, time)
        assert seen == ["deprecated", "deprecated", "removed", "removed"]


@ENDS
async def test_where_every_version_is_deprecated_the_highest_runs(tmp_path: Path, time: FakeTime) -> None:
    async with opened(tmp_path, time, "1.0.0", "2.0.0") as app:
        await announce(app, time, "1.0.0")
        await announce(app, time, "2.0.0", successor=None)
        result = await app.call("demo.answer")
        assert result.unwrap() == "2.0.0"
        assert "deprecation" in result.metadata


# The order of states


@pytest.mark.proves("REG-08")
async def test_deprecating_records_the_dates_successor_and_guide(tmp_path: Path, time: FakeTime) -> None:
    async with opened(tmp_path, time, "1.0.0", "1.1.0", "2.0.0") as app:
        at_ms = time.ms
        notice = await announce(app, time)
        assert notice == Notice(at_ms, at_ms + 90 * DAY_MS, "demo.answer@2.0.0", GUIDE)
        shorter = await announce(app, time, "1.1.0", grace_days=30)
        assert shorter.removal_ms - shorter.deprecated_ms == 30 * DAY_MS
        assert {row.version: (row.state, row.notice) for row in await app.catalog.rows()} == {
            "1.0.0": ("deprecated", notice),
            "1.1.0": ("deprecated", shorter),
            "2.0.0": ("active", None),
        }
        last = recorded(app)[-1]
        assert (last["event"], last["by"]) == ("tool.deprecated", "ann")
        assert {name: last[name] for name in notice.document()} == notice.document()


async def brought_to(app: Interlock, version: str, wanted: LifecycleState) -> None:
    for _, following in pairwise(STATES[: STATES.index(wanted) + 1]):
        await app.journal.commit(step("demo.answer", version, following))


def step(address: str, version: str, to: LifecycleState) -> Any:
    if to == "deprecated":
        return deprecate(address, version, by="ann")
    assert to != "active"
    return move(address, version, to, by="ann")


@pytest.mark.proves("REG-08")
async def test_states_only_go_one_way_and_skip_nothing(tmp_path: Path, time: FakeTime) -> None:
    async with opened(tmp_path, time) as app:
        for number, (current, to) in enumerate(product(STATES, STATES[1:])):
            version = f"1.0.{number}"
            await app.add(versioned(version))
            await brought_to(app, version, current)
            before = recorded(app, version)
            if STATES.index(to) == STATES.index(current) + 1:
                await app.journal.commit(step("demo.answer", version, to))
                assert await state(app, version) == to
                continue
            with pytest.raises(Failure) as caught:
                await app.journal.commit(step("demo.answer", version, to))
            assert caught.value.code == "E3103"
            assert current in caught.value.message
            assert to in caught.value.message
            assert await state(app, version) == current
            assert recorded(app, version) == before


@pytest.mark.proves("REG-08")
async def test_registering_a_removed_version_again_does_not_bring_it_back(tmp_path: Path, time: FakeTime) -> None:
    async with opened(tmp_path, time, "1.0.0", "2.0.0") as app:
        await brought_to(app, "1.0.0", "removed")
        [again] = await app.add(versioned("1.0.0"))
        assert not again.new
        assert await state(app) == "removed"
        assert code(await app.call("demo.answer", version="1.0.0")) == "E3104"


@pytest.mark.proves("REG-08")
@pytest.mark.supports("CONTRACT-10")
async def test_sunset_refuses_calls_and_keeps_the_record(tmp_path: Path, time: FakeTime) -> None:
    async with opened(tmp_path, time, "1.0.0", "2.0.0") as app:
        await announce(app, time)
        await app.journal.commit(move("demo.answer", "1.0.0", "sunset", by="ann"))
        time.pass_a_moment()
        assert code(await app.call("demo.answer", version="1.0.0")) == "E3104"
        assert (await usage(app.journal, "demo.answer", "1.0.0", time.ms)) == Usage(week=1, day=1)
        # Not removed before its date, and no longer reported on: it is not deprecated, but refused.
        time.pass_days(30)
        assert await events(app, time) == []
        assert await state(app) == "sunset"


@pytest.mark.proves("REG-08")
async def test_calls_of_a_removed_version_still_find_their_declaration(tmp_path: Path, time: FakeTime) -> None:
    async with opened(tmp_path, time, "1.0.0", "2.0.0") as app:
        call = await app.call("demo.answer", version="1.0.0")
        await announce(app, time)
        time.pass_days(91)
        assert await events(app, time) == ["TOOL_VERSION_REMOVED"]
    async with opened(tmp_path, time) as app:
        rows = app.journal.reader.all(
            "SELECT body FROM journal WHERE kind = 'closed' AND call = ?", (call.invocation_id,)
        )
        past = orjson.loads(rows[0][0])
        version = (await app.catalog.versions(past["toolId"]))[past["version"]]
        assert version.row.state == "removed"
        assert version.contract.manifest == versioned("1.0.0").manifest


@pytest.mark.proves("REG-08")
async def test_only_what_is_registered_can_be_deprecated_and_only_sensibly(tmp_path: Path, time: FakeTime) -> None:
    async with opened(tmp_path, time, "1.0.0") as app:
        for address, version, expected in (("demo.other", "1.0.0", "E3101"), ("demo.answer", "3.0.0", "E3102")):
            with pytest.raises(Failure) as caught:
                await app.journal.commit(deprecate(address, version, by="ann"))
            assert caught.value.code == expected
        wrong: list[Json] = [
            {"grace_days": -1},
            {"migration_guide": "ask me"},
            {"successor": "demo.answer@1.0.0"},
            {"successor": "1.0.0"},
        ]
        for options in wrong:
            with pytest.raises(Failure) as caught:
                await announce(app, time, **options)
            assert caught.value.code == "E3004"
        assert await state(app) == "active"


@pytest.mark.parametrize(
    "successor", ["demo.nope", "demo.answer@3.0.0", "demo.answer@^7", "demo.reply@1.0.0", "answer", "demo.answer@", ""]
)
async def test_a_successor_is_a_tool_that_can_be_called_instead(tmp_path: Path, time: FakeTime, successor: str) -> None:
    async with opened(tmp_path, time, "1.0.0") as app:
        with pytest.raises(Failure, match=r"the successor `.*` is not registered beside it") as caught:
            await announce(app, time, successor=successor)
        assert caught.value.code == "E3004"
        assert await state(app) == "active"
        notice = await announce(app, time, successor=successor, anyway=True)
        assert notice.successor == successor


@pytest.mark.parametrize("successor", ["demo.answer@2.0.0", "demo.answer@^2", "demo.answer", "demo.reply@2.0.0"])
async def test_a_successor_may_be_named_by_version_range_or_alias(
    tmp_path: Path, time: FakeTime, successor: str
) -> None:
    async with opened(tmp_path, time, "1.0.0", "2.0.0") as app:
        assert (await announce(app, time, successor=successor)).successor == successor


async def test_what_a_deprecated_version_says_can_be_corrected_and_the_rest_stays(
    tmp_path: Path, time: FakeTime
) -> None:
    async with opened(tmp_path, time, "1.0.0", "2.0.0") as app:
        with pytest.raises(Failure) as caught:
            await app.journal.commit(amend("demo.answer", "1.0.0", by="ann", successor="demo.answer@2.0.0"))
        assert caught.value.code == "E3103"
        first = await announce(app, time, successor="demo.nope", anyway=True)
        with pytest.raises(Failure) as caught:
            await app.journal.commit(amend("demo.answer", "1.0.0", by="ann", successor="demo.nothing"))
        assert caught.value.code == "E3004"
        corrected = await app.journal.commit(amend("demo.answer", "1.0.0", by="bob", successor="demo.answer@2.0.0"))
        time.pass_a_moment()
        assert corrected == replace(first, successor="demo.answer@2.0.0")
        assert (await app.call("demo.answer", version="1.0.0")).metadata["deprecation"] == corrected.document()
        later = await app.journal.commit(amend("demo.answer", "1.0.0", by="bob", grace_days=200))
        assert later == replace(corrected, removal_ms=time.ms + 200 * DAY_MS)
        acts = [(one["event"], one["by"]) for one in recorded(app)[-3:]]
        assert acts == [("tool.deprecated", "ann"), *[("tool.deprecation_amended", "bob")] * 2]


# What a sweep does


@pytest.mark.proves("REG-09")
async def test_every_seven_days_the_usage_is_reported_until_there_is_none(tmp_path: Path, time: FakeTime) -> None:
    async with opened(tmp_path, time, "1.0.0", "2.0.0") as app:
        await announce(app, time)
        time.pass_days(1)
        for _ in range(3):
            await app.call("demo.answer", version="1.0.0")
        await app.call("demo.answer")
        await app.call("reply", version="1.0.0")
        assert (await app.call("demo.answer", {"nothing": 1}, version="1.0.0")).error is not None
        time.pass_days(5)
        assert await events(app, time) == []
        time.pass_days(0.9)
        await app.call("demo.answer", version="1.0.0")
        time.pass_days(0.05)
        assert await events(app, time) == []
        time.pass_days(0.05)
        [report] = await swept(app, time)
        assert (report.event, report.tool) == ("DEPRECATION_MIGRATION_PROGRESS", "demo.answer@1.0.0")
        assert report.usage == Usage(week=6, day=1)
        assert recorded(app)[-1] | report.facts() == recorded(app)[-1]
        assert await events(app, time) == []
        time.pass_days(6.5)
        assert await events(app, time) == []
        time.pass_days(0.5)
        [report] = await swept(app, time)
        assert (report.event, report.usage) == ("DEPRECATION_MIGRATION_COMPLETE", Usage(week=0, day=0))
        assert await state(app) == "deprecated"
        assert "DEPRECATION_MIGRATION_COMPLETE" not in [fact.get("event") for fact in recorded(app, "2.0.0")]


@pytest.mark.proves("REG-09")
async def test_a_version_nobody_asks_for_is_removed_at_the_end_of_its_grace(tmp_path: Path, time: FakeTime) -> None:
    async with opened(tmp_path, time, "1.0.0", "2.0.0") as app:
        notice = await announce(app, time)
        time.ms = notice.removal_ms - DAY_MS - 1
        assert (await app.call("demo.answer", version="1.0.0")).ok
        time.ms = notice.removal_ms - 1
        assert "TOOL_VERSION_REMOVED" not in await events(app, time)
        time.ms = notice.removal_ms
        [removed] = await swept(app, time)
        assert (removed.event, removed.usage.day, removed.forced) == ("TOOL_VERSION_REMOVED", 0, False)
        # It went through sunset on its way, and both moves are on record.
        assert [fact["event"] for fact in recorded(app)[-2:]] == ["tool.sunset", "TOOL_VERSION_REMOVED"]
        assert await state(app) == "removed"
        time.pass_days(30)
        assert await events(app, time) == []


@pytest.mark.proves("REG-09")
async def test_a_refused_attempt_within_a_day_blocks_the_removal_and_moves_the_date(
    tmp_path: Path, time: FakeTime
) -> None:
    async with opened(tmp_path, time, "1.0.0", "2.0.0") as app:
        notice = await announce(app, time)
        time.ms = notice.removal_ms + DAY_MS
        assert code(await app.call("demo.answer", version="1.0.0")) == "E3104"
        time.pass_days(0.9)
        [blocked] = await swept(app, time, extend_days=2)
        assert (blocked.event, blocked.usage) == ("DEPRECATION_REMOVAL_BLOCKED", Usage(week=1, day=1))
        assert blocked.removal_ms == blocked.at_ms + 2 * DAY_MS
        assert await state(app) == "sunset"
        stored = next(row.notice for row in await app.catalog.rows() if row.version == "1.0.0")
        assert stored is not None
        assert stored.removal_ms == blocked.removal_ms
        assert code(await app.call("demo.answer", version="1.0.0")) == "E3104"
        assert await events(app, time) == []
        time.pass_days(2)
        assert await events(app, time) == ["TOOL_VERSION_REMOVED"]


@pytest.mark.proves("REG-09")
@pytest.mark.parametrize(
    ("name", "spec"), [("demo.answer", "=1.0.0"), ("answer", "1.0.0"), ("demo.reply", "1.x"), ("reply", "^1.0.0")]
)
async def test_an_attempt_counts_under_whatever_name_and_range_it_is_made(
    tmp_path: Path, time: FakeTime, name: str, spec: str
) -> None:
    async with opened(tmp_path, time, "1.0.0", "2.0.0") as app:
        await announce(app, time)
        time.pass_days(91)
        assert not (await app.call(name, version=spec)).ok
        assert await events(app, time, extend_days=1) == ["DEPRECATION_REMOVAL_BLOCKED"]
        time.pass_days(0.9)
        # In sunset a range no longer finds it; to ask for it is an attempt all the same.
        assert not (await app.call(name, version=spec)).ok
        time.pass_days(0.1)
        assert await events(app, time, extend_days=1) == ["DEPRECATION_REMOVAL_BLOCKED"]


@pytest.mark.proves("REG-09")
async def test_attempts_at_other_versions_and_tools_do_not_keep_a_version(tmp_path: Path, time: FakeTime) -> None:
    async with opened(tmp_path, time, "1.0.0", "2.0.0") as app:
        await announce(app, time)
        time.pass_days(91)
        for name, spec in (("demo.answer", None), ("demo.answer", "2.0.0"), ("demo.answr", "1.0.0"), ("other", None)):
            await app.call(name, version=spec)
        assert await events(app, time) == ["TOOL_VERSION_REMOVED"]


@pytest.mark.proves("REG-09")
async def test_asking_for_a_version_that_never_was_does_not_keep_one_that_is_going(
    tmp_path: Path, time: FakeTime
) -> None:
    async with opened(tmp_path, time, "1.0.0", "2.0.0") as app:
        await announce(app, time)
        time.pass_days(91)
        assert code(await app.call("demo.answer", version="9.9.9")) == "E3102"
        assert await events(app, time) == ["TOOL_VERSION_REMOVED"]


@pytest.mark.proves("REG-09")
async def test_force_removes_in_spite_of_attempts_and_says_so(tmp_path: Path, time: FakeTime) -> None:
    async with opened(tmp_path, time, "1.0.0", "2.0.0") as app:
        notice = await announce(app, time)
        assert await events(app, time, force=True) == []
        time.pass_days(91)
        assert code(await app.call("demo.answer", version="1.0.0")) == "E3104"
        blocked, removed = await swept(app, time, force=True)
        assert (blocked.event, blocked.removal_ms) == ("DEPRECATION_REMOVAL_BLOCKED", notice.removal_ms)
        assert (removed.event, removed.forced, removed.usage.day) == ("TOOL_VERSION_REMOVED", True, 1)
        assert await state(app) == "removed"


@pytest.mark.proves("REG-09")
async def test_a_restart_between_the_phases_loses_no_schedule(tmp_path: Path, time: FakeTime) -> None:
    async with opened(tmp_path, time, "1.0.0", "2.0.0") as app:
        await announce(app, time, grace_days=10)
        time.pass_days(0.5)
        await app.call("demo.answer", version="1.0.0")
    seen: list[tuple[int, list[str]]] = []
    for day in range(1, 25):
        time.pass_days(1 if day > 1 else 0.5)
        async with opened(tmp_path, time) as app:
            if day == 12:
                assert code(await app.call("demo.answer", version="1.0.0")) == "E3104"
            happened = await events(app, time) if day not in (10, 11) else []
            seen.append((day, happened))
    assert [(day, happened) for day, happened in seen if happened] == [
        (7, ["DEPRECATION_MIGRATION_PROGRESS"]),
        (12, ["DEPRECATION_REMOVAL_BLOCKED"]),
        (19, ["TOOL_VERSION_REMOVED"]),
    ]


@pytest.mark.proves("REG-09")
async def test_two_processes_that_sweep_at_once_do_nothing_twice(tmp_path: Path, time: FakeTime) -> None:
    async with opened(tmp_path, time, "1.0.0", "1.1.0", "2.0.0") as app, opened(tmp_path, time) as other:
        await announce(app, time, "1.0.0", grace_days=7)
        await announce(app, time, "1.1.0")
        time.pass_days(8)
        at_ms = time.ms
        sweeps = [sweep(each.journal, at_ms, by="ann") for each in (app, other, app)]
        happened = [milestone.event for found in await asyncio.gather(*sweeps) for milestone in found]
        assert sorted(happened) == ["DEPRECATION_MIGRATION_COMPLETE", "TOOL_VERSION_REMOVED"]


@pytest.mark.proves("REG-09")
async def test_an_attempt_that_comes_while_the_journal_is_read_still_blocks(
    tmp_path: Path, time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[Result] = []
    async with opened(tmp_path, time, "1.0.0", "2.0.0") as app:

        async def counted_before_a_call(journal: Store, now_ms: int) -> object:
            tally = await count(journal, now_ms)
            results.append(await app.call("demo.answer", version="1.0.0"))
            return tally

        count = retirement._count  # pyright: ignore[reportPrivateUsage]
        monkeypatch.setattr(retirement, "_count", counted_before_a_call)
        await announce(app, time)
        time.pass_days(91)
        happened = await sweep(app.journal, time.ms, by="ann")
        assert [code(result) for result in results] == ["E3104"]
        assert [(each.event, each.usage) for each in happened] == [("DEPRECATION_REMOVAL_BLOCKED", Usage(1, 1))]


@pytest.mark.proves("REG-09")
async def test_usage_is_counted_over_many_pages_of_the_journal(
    tmp_path: Path, time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interlock.registry.retirement._PAGE", 3)
    async with opened(tmp_path, time, "1.0.0", "2.0.0") as app:
        await announce(app, time)
        for _ in range(10):
            await app.call("demo.answer", version="1.0.0")
            await app.call("demo.answer")
        assert await usage(app.journal, "demo.answer", "1.0.0", time.ms) == Usage(week=10, day=10)
        time.pass_days(1.1)
        assert await usage(app.journal, "demo.answer", "1.0.0", time.ms) == Usage(week=10, day=0)
        time.pass_days(6)
        assert await usage(app.journal, "demo.answer", "1.0.0", time.ms) == Usage(week=0, day=0)


# The operator's policy


@pytest.mark.proves("REG-09")
@pytest.mark.parametrize(
    ("extend_days", "event"), [(None, "DEPRECATION_REMOVAL_BLOCKED"), (3, "DEPRECATION_REMOVAL_BLOCKED"), (0, None)]
)
async def test_a_setting_extends_the_removal_of_a_version_in_use_or_forces_it(
    tmp_path: Path, time: FakeTime, extend_days: int | None, event: str | None
) -> None:
    said = {} if extend_days is None else {"deprecation_extend_days": extend_days}
    async with opened(tmp_path, time, "1.0.0", "2.0.0", **said) as app:
        notice = await announce(app, time)
        time.pass_days(91)
        assert code(await app.call("demo.answer", version="1.0.0")) == "E3104"
        now_ms = time.clock.now_ms()
        happened = [one.event for one in await app.maintain() if one.event != "DEPRECATION_MIGRATION_PROGRESS"]
        if event is None:
            assert happened == ["DEPRECATION_REMOVAL_BLOCKED", "TOOL_VERSION_REMOVED"]
            assert await state(app) == "removed"
            return
        assert happened == [event]
        moved = next(row.notice for row in await app.catalog.rows() if row.version == "1.0.0")
        assert moved is not None
        days = 7 if extend_days is None else extend_days
        assert moved.removal_ms == max(now_ms, notice.removal_ms) + days * 86_400_000


@pytest.mark.proves("REG-09")
async def test_a_running_place_reports_by_itself_after_seven_days(
    tmp_path: Path, time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "HOUSE_EVERY_S", 0.01)
    heard: asyncio.Queue[str] = asyncio.Queue()
    async with opened(tmp_path, time, "1.0.0", "2.0.0", housekeeping=True) as app:
        app.gateway.telemetry.alerts.listeners.append(lambda alert: heard.put_nowait(alert.name))
        await announce(app, time)
        assert (await app.call("demo.answer", version="1.0.0")).ok
        for event in ("DEPRECATION_MIGRATION_PROGRESS", "DEPRECATION_MIGRATION_COMPLETE"):
            time.pass_days(7)
            async with asyncio.timeout(30):
                while await heard.get() != event:
                    pass

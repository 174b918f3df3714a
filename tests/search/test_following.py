"""Whatever changes, in this process or in another one: a search answers as in a process that has just been started."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from interlock import Failure, Field, Interlock, Tool, tool
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.call.context import Caller
from interlock.contract import contract as contracts
from interlock.registry import quarantine
from interlock.registry.retirement import deprecate, move
from interlock.search import index as module
from interlock.search.index import Index
from interlock.store import registry_changes
from interlock.store.port import Transaction, Unit
from interlock.store.tools import bump_epoch
from interlock.testing import FakeClock
from tests.support.calls import admit, publish, use_policy
from tests.support.identities import did_of
from tests.thorough import THOROUGH

T = TypeVar("T")
NUMBERS = st.integers(0, 7)
PROCESSES = st.sampled_from((0, 1))
TEXTS = ("Send a letter to a customer.", "Delete a file from a folder.", "Weather in a city.", "Send a parcel by post.")
QUERIES = ("send a letter", "weather of a city. delete the parcel", "tool_3", "office.tool_1", "a file by post")
NAMES = (*(f"office.tool_{number}" for number in range(8)), "tool_2", "tool_5", "office.nothing")
SCORES = "scores"
POLICIES = (
    "permit (principal, action, resource);",
    'permit (principal, action, resource); forbid (principal, action == Action::"office.tool_1", resource);',
    'permit (principal, action, resource) when { resource.mutation_class == "read_only" };',
    'permit (principal, action, resource); forbid (principal, action, resource) when { resource.address like "*_3" };',
)
Value = Annotated[str, Field(description="a value", examples=["x"])]


def _offer(name: str, text: str, version: str = "1.0.0") -> Tool[..., Any]:
    async def function(value: Value) -> str:
        return value

    function.__name__, function.__doc__ = name, text
    return tool(version=version, mutation_class="read_only", namespace="office", external_io=False)(function)


class Changes(RuleBasedStateMachine):
    """Two processes on one data directory, and callers with and without tokens."""

    prepared: ClassVar[Path]

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.runner = asyncio.Runner()
        self.clock = FakeClock()
        self.locks: list[Interlock] = []
        self.closing: list[Any] = []
        self.callers: list[Caller] = []
        # The last version of each tool, and the digest of each version.
        self.latest: dict[int, int] = {}
        self.digests: dict[str, str] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @initialize()
    def open(self) -> None:
        self.run(self._open())

    async def _open(self) -> None:
        home = shutil.copytree(self.prepared, Path(self.folder) / "home")
        self.locks = [await self._opened(home) for _ in range(2)]
        first = self.locks[0]
        if not first.issuer_keys.all():
            first.issuer_keys.init("EdDSA")
        grants = [ToolGrant("office.tool_1"), ToolGrant("office.tool_3", "<=1.1.0"), ToolGrant("office.tool_4")]
        await first.identities.register(Identity(did=did_of("bot"), name="bot", kind="agent", tenant="red"), by="test")
        token = await first.tokens.issue(subject=did_of("bot"), tools=grants, by=first.caller)
        self.callers = [first.caller, await first.caller_of(token), replace(first.caller, groups=frozenset({"night"}))]
        await self._commit(0, *(self._publication(number) for number in range(4)))

    async def _opened(self, home: Path) -> Interlock:
        opening = Interlock.open(home, clock=self.clock.clock, housekeeping=False)
        self.closing.append(opening)
        return await opening.__aenter__()

    def _publication(self, number: int) -> Unit[Any]:
        self.latest[number] = minor = self.latest.get(number, -1) + 1
        return publish(_offer(f"tool_{number}", f"{TEXTS[(number + minor) % 4]} Form {minor}.", f"1.{minor}.0"))

    async def _commit(self, process: int, *units: Unit[Any]) -> None:
        """Commit units in one transaction. What they refuse is left out."""

        def together(transaction: Transaction) -> None:
            for unit in units:
                unit(transaction)

        with suppress(Failure):
            await self.locks[process].journal.commit(together)
        await self.locks[process].catalog.look()

    @rule(process=PROCESSES, numbers=st.sets(NUMBERS, min_size=1, max_size=3))
    def publish(self, process: int, numbers: set[int]) -> None:
        self.run(self._commit(process, *(self._publication(number) for number in sorted(numbers))))

    @rule(process=PROCESSES, number=NUMBERS, days=st.sampled_from((0, 2, 90)))
    def deprecate(self, process: int, number: int, days: int) -> None:
        version = f"1.{self.latest.get(number, 0)}.0"
        self.run(self._commit(process, deprecate(f"office.tool_{number}", version, by="test", grace_days=days)))

    @rule(process=PROCESSES, number=NUMBERS, to=st.sampled_from(("sunset", "removed")))
    def retire(self, process: int, number: int, to: Any) -> None:
        version = f"1.{self.latest.get(number, 0)}.0"
        self.run(self._commit(process, move(f"office.tool_{number}", version, to, by="test")))

    @rule(process=PROCESSES, number=NUMBERS)
    def hold(self, process: int, number: int) -> None:
        self.run(self._hold(process, f"office.tool_{number}"))

    async def _hold(self, process: int, address: str) -> None:
        app = self.locks[process]
        found = await app.catalog.versions(address)
        if found:
            row = list(found.values())[-1].row
            self.digests[address] = row.digest
            await self._commit(process, quarantine.impose(row.digest, f"{address}@{row.version}", "a-call", "it lied"))

    @rule(process=PROCESSES, number=NUMBERS)
    def release(self, process: int, number: int) -> None:
        digest = self.digests.pop(f"office.tool_{number}", "")
        by = self.locks[process].caller
        self.run(self._commit(process, quarantine.lift(digest, by=by, reason="looked at")))

    @rule(process=PROCESSES)
    def change_anything(self, process: int) -> None:
        """A change of which is not known what it was about."""

        def unit(transaction: Transaction) -> None:
            bump_epoch(transaction, None)

        self.run(self._commit(process, unit))

    @rule(text=st.sampled_from(POLICIES))
    def rule_anew(self, text: str) -> None:
        self.locks[0].policy.path.write_text(text)
        for app in self.locks:
            app.policy.state(anew=True)

    @rule(days=st.sampled_from((1, 3)))
    def wait(self, days: int) -> None:
        self.clock.advance(days * 86_400)

    @rule(process=PROCESSES)
    def look(self, process: int) -> None:
        """A process that looks in between has another past than one that does not."""
        self.clock.advance(1)
        self.run(self._state(self.locks[process]))

    @rule()
    def compare(self) -> None:
        self.clock.advance(1)
        self.run(self._compare())

    async def _compare(self) -> None:
        fresh = await self._opened(self.locks[0].home.path)
        expected = await self._state(fresh)
        await self.closing.pop().__aexit__(None, None, None)
        for app in self.locks:
            found = await self._state(app)
            for (what, one), (_, other) in zip(found, expected, strict=True):
                assert one == (pytest.approx(other, abs=3e-4) if what == SCORES else other), what

    async def _state(self, app: Interlock) -> list[tuple[object, object]]:
        """Everything that can be seen of the catalog."""
        state: list[tuple[object, object]] = []
        for number, caller in enumerate(self.callers):
            visible = [f"{one.row.address}@{one.row.version}" for one in await app.tools.visible(caller)]
            state.append((number, visible))
            surface = await app.tools.index.surface(caller)
            state.append((number, [(one, two.row.state) for one, two in surface.items()]))
            for query in QUERIES:
                answer = await app.search(query, caller=caller, limit=100)
                found = [(one.version.row.address, one.version.row.version) for one in answer]
                state.append(((number, query), found))
                state.append((SCORES, [one.score for one in answer]))
        for name in NAMES:
            try:
                version = await app.catalog.resolve(name)
                state.append((name, (version.row.version, version.row.state, version.row.notice)))
            except Failure as failure:
                state.append((name, failure.message))
        return state

    def teardown(self) -> None:
        if self.locks:
            self.compare()
        for opening in self.closing:
            self.run(opening.__aexit__(None, None, None))
        self.runner.close()
        shutil.rmtree(self.folder)


def test_a_process_that_followed_changes_answers_like_a_new_one(prepared_home: Path) -> None:
    Changes.prepared = prepared_home
    machine = Changes.TestCase
    machine.settings = settings(max_examples=40 if THOROUGH else 6, stateful_step_count=20, deadline=None)
    machine().runTest()


# Work


class Counted:
    """How many rows of the table of versions and how many contracts were read, and how many tools were indexed."""

    def __init__(self, app: Interlock, patch: pytest.MonkeyPatch) -> None:
        self.rows = self.contracts = self.indexed = 0
        self._reader = app.journal.reader
        read, weigh = contracts.admitted_contract, module.weigh

        def contract(text: str, digest: str) -> Any:
            self.contracts += 1
            return read(text, digest)

        def weighed(entry: module.IndexedTool) -> dict[str, float]:
            self.indexed += 1
            return weigh(entry)

        patch.setattr(contracts, "admitted_contract", contract)
        patch.setattr(module, "weigh", weighed)
        patch.setattr(app.journal, "reader", self)

    def all(self, statement: str, parameters: Sequence[Any] = (), /) -> list[Any]:
        rows = self._reader.all(statement, parameters)
        self.rows += len(rows) if "tool_version" in statement else 0
        return rows

    def one(self, statement: str, parameters: Sequence[Any] = (), /) -> Any:
        row = self._reader.one(statement, parameters)
        self.rows += "tool_version" in statement and row is not None
        return row

    def each(self, statement: str, parameters: Sequence[Any] = (), /) -> Iterator[Any]:
        return iter(self.all(statement, parameters))

    def since(self) -> tuple[int, int, int]:
        found = self.rows, self.contracts, self.indexed
        self.rows = self.contracts = self.indexed = 0
        return found


MANY = 60


@pytest.fixture
async def many(app: Interlock) -> Interlock:
    await admit(app, *(_offer(f"tool_{number}", TEXTS[number % 4]) for number in range(MANY)))
    return app


async def test_a_change_of_one_tool_reads_and_indexes_that_tool_alone(
    many: Interlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await many.identities.register(Identity(did=did_of("bot"), name="bot", kind="agent"), by="test")
    token = await many.tokens.issue(subject=did_of("bot"), tools=[ToolGrant("office.*")], by=many.caller)
    callers = [many.caller, await many.caller_of(token)]

    async def search() -> None:
        for caller in callers:
            await many.search("send a letter", caller=caller)

    await search()
    counted = Counted(many, monkeypatch)
    await search()
    assert counted.since() == (0, 0, 0)
    async with Interlock.open(many.home.path, housekeeping=False) as other:
        for change, expected in (
            (publish(_offer("tool_new", "Send a letter by night.")), (2, 0, 1)),  # its row, and its manifest
            (publish(_offer("tool_new", "Send a letter by day.", "1.1.0")), (3, 0, 1)),
            (deprecate("office.tool_3", "1.0.0", by="test"), (1, 0, 0)),
            (move("office.tool_3", "1.0.0", "sunset", by="test"), (1, 0, 0)),
        ):
            await other.journal.commit(change)
            await many.catalog.look()
            await search()
            assert counted.since() == expected
        digest = (await many.catalog.resolve("office.tool_4")).row.digest
        counted.since()
        for change, held in (
            (quarantine.impose(digest, "office.tool_4@1.0.0", "a-call", "it lied"), True),
            (quarantine.lift(digest, by=many.caller, reason="looked at"), False),
        ):
            await other.journal.commit(change)
            await many.catalog.look()
            await search()
            assert counted.since() == (0, 0, 0)
            found = [one.version.row.address for one in await many.search("send a letter", limit=100)]
            assert "office.tool_new" in found
            assert "office.tool_3" not in found
            assert ("office.tool_4" in found) is not held


async def test_a_version_past_its_removal_date_is_not_found_although_nothing_was_changed(home: Path) -> None:
    time = FakeClock()
    async with Interlock.open(home, clock=time.clock, housekeeping=False) as app:
        await admit(app, _offer("letter", TEXTS[0]), _offer("parcel", TEXTS[3]))
        await app.journal.commit(deprecate("office.letter", "1.0.0", by="test", grace_days=2))
        await app.catalog.look()
        for days, there in ((0, True), (1, True), (2, False)):
            time.advance(days * 86_400)
            found = [one.version.row.address for one in await app.search("send a letter")]
            assert ("office.letter" in found) is there
            assert "office.parcel" in found


@pytest.mark.parametrize("changes", [registry_changes.MOST_CHANGES + 1, 2])
async def test_a_process_that_is_far_behind_reads_everything(
    many: Interlock, monkeypatch: pytest.MonkeyPatch, changes: int
) -> None:
    await many.search("send a letter")

    def unit(transaction: Transaction) -> None:
        for _ in range(changes):
            bump_epoch(transaction, ())
        publish(_offer("tool_new", "Send a letter by night."))(transaction)

    counted = Counted(many, monkeypatch)
    async with Interlock.open(many.home.path, housekeeping=False) as other:
        await other.journal.commit(unit)
    await many.catalog.look()
    found = [one.version.row.address for one in await many.search("send a letter by night")]
    assert found[0] == "office.tool_new"
    assert (counted.since()[0] > MANY) is (changes > registry_changes.MOST_CHANGES)


async def test_a_release_that_does_not_note_what_changed_is_followed_all_the_same(many: Interlock) -> None:
    await many.search("send a letter")

    def unit(transaction: Transaction) -> None:
        publish(_offer("tool_new", "Send a letter by night."))(transaction)
        transaction.execute("DELETE FROM fact WHERE name LIKE 'registry_change:%'")

    await many.journal.commit(unit)
    await many.catalog.look()
    assert (await many.search("send a letter by night"))[0].version.row.address == "office.tool_new"


# What is hidden


@pytest.mark.parametrize("by", ["words", "meaning", "both"])
async def test_a_denied_tool_changes_no_score_and_no_note(app: Interlock, by: str) -> None:
    await admit(app, *(_offer(f"tool_{number}", TEXTS[number % 4]) for number in range(8)))
    forbid = 'permit (principal, action, resource); forbid (principal, action, resource in Namespace::"hidden");'
    await use_policy(app, forbid)

    async def seen() -> list[list[tuple[str, float]]]:
        answers = [await app.search(query, limit=100, by=by) for query in (*QUERIES, "hidden.letter", "letter")]
        return [[(one.version.row.address, one.score) for one in answer] for answer in answers]

    before = await seen()

    async def letter(value: Value) -> str:
        """Send a letter to a customer. Send a letter, send a parcel by post, weather in a city."""
        return value

    hidden = tool(version="1.0.0", mutation_class="read_only", namespace="hidden", external_io=False)(letter)
    await admit(app, hidden)
    assert await seen() == before
    await use_policy(app, POLICIES[0])
    after = await seen()
    assert "hidden.letter" in {name for found in after for name, _ in found}
    assert after != before


def test_the_work_of_a_search_does_not_grow_with_tools_that_are_not_visible() -> None:
    from interlock.search.table import shipped

    def work(hidden: int) -> int:
        index = Index(shipped())
        index.add(module.IndexedTool(f"seen {number}", "send", "Send a letter.") for number in range(10))
        index.add(module.IndexedTool(f"hidden {number}", "send", "Send a letter.") for number in range(hidden))
        mask = index.mask(f"seen {number}" for number in range(10))
        found = index.search("send a letter. it goes by post today", 100, mask)
        assert len(found) == 10
        return index.looked_at

    # Two terms and the vectors.
    assert work(100) == work(400) == 30
    assert work(0) == 30

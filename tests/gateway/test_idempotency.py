"""Run once and only once: keys, replays, conflicts, windows, and the outcomes nobody can know."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any, Literal

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from interlock import Caller, Context, Failure, Interlock, Preview, Result
from interlock.contract.manifest import parse_manifest
from interlock.contract.manifest_tools import from_manifest
from interlock.gateway import idempotency
from interlock.registry.admission import TrialEvidence, publish
from interlock.registry.catalog import contract_digest
from interlock.settings import load_settings
from interlock.testing import FakeClock
from tests import sample
from tests.sample import flaky, world
from tests.support.calls import code, records


@pytest.mark.proves("IDEM-01")
@pytest.mark.parametrize("key", [None, "", "has space", "é", "x" * 256, "tab\t"])
async def test_a_write_without_a_proper_key_of_the_callers_own_reaches_nothing(app: Interlock, key: str | None) -> None:
    result = await app.call("demo.increment", {"name": "a"}, key=key)
    assert code(result) == "E3307"
    assert result.error is not None
    assert result.error.row.error_code == "INVALID_INPUT"
    assert world.runs == 0


@pytest.mark.proves("IDEM-03")
async def test_a_key_means_something_only_within_its_tenant_caller_session_and_tool(app: Interlock) -> None:
    first = await app.call("demo.increment", name="a", key="k")
    others = [
        await app.call("demo.increment", {"name": "a"}, key="k", session="other"),
        await app.call("demo.increment", {"name": "a"}, key="k", caller=Caller(id="local:somebody")),
        await app.call("demo.increment", {"name": "a"}, key="k", caller=Caller(id=app.caller.id, tenant="rival")),
        await app.call("demo.unsteady", {"name": "a"}, key="k"),
    ]
    assert first.ok
    assert all(result.ok and not result.replayed for result in others)
    assert [result.value for result in others] == [2, 3, 4, "a"]  # what each of them did, and not what the first did
    assert all("original_invocation_id" not in result.metadata for result in others)
    assert (world.runs, flaky.runs) == (4, 1)


def strangers(app: Interlock) -> list[Any]:
    """The same call under the same key, from everybody whose key it is not."""
    return [
        {"session": "other"}, {"caller": Caller(id="local:somebody")},
        {"caller": Caller(id=app.caller.id, tenant="rival")},
        {"caller": Caller(id=app.caller.id, tenant="rival"), "session": "other"},
    ]  # fmt: skip


@pytest.mark.proves("IDEM-03")
async def test_nobody_blocks_anothers_call_by_its_key(app: Interlock) -> None:
    reached = asyncio.Event()

    class Gate(asyncio.Event):
        async def wait(self) -> Literal[True]:
            reached.set()
            return await super().wait()

    world.gate = gate = Gate()
    first = asyncio.create_task(app.call("demo.increment", {"name": "a"}, key="k"))
    await asyncio.wait_for(reached.wait(), 30)
    world.gate = None
    for number, stranger in enumerate(strangers(app)):
        # Other arguments are no conflict with a key that is not theirs.
        result = await app.call("demo.increment", {"name": "b", "by": 2}, key="k", **stranger)
        assert (result.value, result.replayed) == (2 * number + 2, False)
    assert not first.done()
    gate.set()
    assert (await first).unwrap() == 1


@pytest.mark.proves("IDEM-03")
async def test_an_unknown_outcome_blocks_the_key_of_its_own_caller_only(app: Interlock) -> None:
    assert (await app.call("demo.increment", {"name": "a"}, key="k")).ok
    await app.journal.commit(lambda tx: tx.execute("UPDATE reservation SET state = 'unknown'") and None)
    for stranger in strangers(app):
        result = await app.call("demo.increment", {"name": "b"}, key="k", **stranger)
        assert result.ok, result.error
        assert not result.replayed
    assert code(await app.call("demo.increment", {"name": "a"}, key="k")) == "E3409"


@pytest.mark.proves("IDEM-05")
@pytest.mark.parametrize("submissions", [1, 2, 20])
async def test_n_submissions_under_one_key_change_things_once(app: Interlock, submissions: int) -> None:
    results = [await app.call("demo.increment", name="a", key="k") for _ in range(submissions)]
    assert {result.unwrap() for result in results} == {1}
    assert [result.replayed for result in results] == [False] + [True] * (submissions - 1)
    assert world.counters == {"a": 1}
    assert len(records(app, kind="mutation")) == 1
    assert app.gateway.observer.metrics["IDEMPOTENT_REPLAY"] == submissions - 1
    assert all(r.metadata["original_invocation_id"] == results[0].invocation_id for r in results[1:])


@pytest.mark.proves("IDEM-05")
async def test_who_lost_the_permission_does_not_get_the_stored_result(app: Interlock, home: Path) -> None:
    await app.call("demo.increment", name="a", key="k")
    (home / "policy.cedar").write_text('@id("none") forbid (principal, action, resource);')
    app.policy._looked_at = float("-inf")  # pyright: ignore[reportPrivateUsage] - do not wait for the next look
    again = await app.call("demo.increment", name="a", key="k")
    assert again.error is not None
    assert again.error.row.error_code == "AUTHORIZATION_DENIED"
    assert again.value is None


@pytest.mark.proves("IDEM-06")
async def test_a_known_key_with_other_arguments_or_version_is_a_conflict(app: Interlock) -> None:
    await app.call("demo.increment", name="a", by=1, key="k")
    other = await app.call("demo.increment", name="a", by=2, key="k")
    assert code(other) == "E3306"
    assert other.error is not None
    assert (other.error.row.http, other.error.retryable) == (409, False)
    assert other.value is None
    assert world.counters == {"a": 1}


@pytest.mark.proves("EFFECT-07")
async def test_a_mutation_has_one_entry_with_all_its_facts_and_a_replay_adds_one_that_changes_nothing(
    app: Interlock,
) -> None:
    done = await app.call("demo.increment", name="a", by=1, key="k")
    (entry,), (change,) = records(app, done.invocation_id), records(app, done.invocation_id, kind="mutation")
    assert (entry["toolId"], entry["version"], entry["idempotencyKey"]) == ("demo.increment", "1.0.0", "k")
    assert entry["inputHash"] == hashlib.sha256(b'{"by":1,"name":"a"}').hexdigest()
    assert entry["resultHash"] == hashlib.sha256(b"1").hexdigest()
    assert entry["compensation"]["ref"] == f"undo:{done.invocation_id}"
    assert re.fullmatch(r"[0-9a-f]{64}", entry["compensation"]["sha256"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry["timestamp"])
    assert entry["sideEffects"] == [{"resource": "counter:a", "operation": "UPDATE"}]
    for fact in ("toolId", "version", "idempotencyKey", "inputHash", "timestamp"):
        assert change[fact] == entry[fact]
    for number in (1, 2):
        again = await app.call("demo.increment", name="a", by=1, key="k")
        (nothing,) = records(app, again.invocation_id)
        assert (nothing["source"], nothing["replayOf"]) == ("replay", done.invocation_id), number
        assert (nothing["sideEffects"], nothing["idempotencyKey"]) == ([], "k")
    assert len(records(app, kind="mutation")) == 1


@pytest.mark.proves("IDEM-07")
async def test_fifty_simultaneous_submissions_run_once_and_agree(app: Interlock) -> None:
    world.gate = asyncio.Event()
    calls = [asyncio.create_task(app.call("demo.increment", name="a", key="k")) for _ in range(50)]
    await asyncio.sleep(0)
    world.gate.set()
    results = await asyncio.gather(*calls)
    assert {result.unwrap() for result in results} == {1}
    assert world.runs == 1


@pytest.mark.proves("IDEM-07")
async def test_a_duplicate_that_cannot_wait_is_told_that_the_call_is_running(app: Interlock) -> None:
    world.gate = asyncio.Event()
    first = asyncio.create_task(app.call("demo.increment", name="a", key="k"))
    await asyncio.sleep(0)
    second = await app.call("demo.increment", {"name": "a"}, key="k", timeout_s=1)
    assert code(second) == "E3408"
    assert second.error is not None
    assert second.error.retry_after_ms is not None
    world.gate.set()
    assert (await first).ok


@pytest.mark.proves("IDEM-09")
async def test_a_retryable_failure_without_effect_frees_the_key_and_a_definite_one_is_replayed(app: Interlock) -> None:
    flaky.failures = [Failure("UPSTREAM_FAILURE", "down"), Failure("UPSTREAM_FAILURE", "down")]
    outcomes = [await app.call("demo.unsteady", name="a", key="k") for _ in range(4)]
    assert [code(result) for result in outcomes] == ["E3502", "E3502", None, None]
    assert [result.replayed for result in outcomes] == [False, False, False, True]
    assert flaky.runs == 3
    flaky.failures = [Failure("PRECONDITION_FAILED", "closed account")]
    definite = [await app.call("demo.unsteady", name="b", key="p") for _ in range(3)]
    assert [code(result) for result in definite] == ["E3411"] * 3
    assert [result.source for result in definite] == ["compute", "replay", "replay"]
    assert flaky.runs == 4


async def test_an_unforeseen_failure_of_a_write_is_definite_because_it_may_have_come_half_way(app: Interlock) -> None:
    flaky.failures = [ValueError("boom")]
    first = await app.call("demo.unsteady", name="a", key="k")
    again = await app.call("demo.unsteady", name="a", key="k")
    assert [code(first), code(again)] == ["E3401", "E3401"]
    assert flaky.runs == 1
    assert first.error is not None
    assert not first.error.retryable


@pytest.mark.proves("IDEM-04")
async def test_the_window_is_kept_by_the_stores_clock_whatever_the_nodes_think(home: Path) -> None:
    store, early, late = FakeClock(), FakeClock(seed="early"), FakeClock(seed="late")
    early.advance(-6 * 3600)
    late.advance(6 * 3600)
    async with (
        Interlock.open(home, clock=early.clock, store_clock=store.clock, caller="local:u") as one,
        Interlock.open(home, clock=late.clock, store_clock=store.clock, caller="local:u") as two,
    ):
        for node in (one, two):
            node.catalog.attach(sample.increment)
        assert (await one.call("demo.increment", name="a", key="k")).unwrap() == 1
        store.advance(3599)
        assert (await two.call("demo.increment", name="a", key="k")).replayed
        store.advance(1)
        fresh = await one.call("demo.increment", name="a", key="k")
        assert (fresh.unwrap(), fresh.replayed) == (2, False)


@pytest.mark.proves("IDEM-04")
@pytest.mark.parametrize(("settings_", "window_s"), [({"min_window_s": 60}, 60), ({}, 3600), ({"min_window_s": 9}, 10)])
async def test_the_shortest_window_is_a_setting_of_an_hour_by_default(
    home: Path, settings_: dict[str, Any], window_s: int
) -> None:
    # demo.increment is of the standard class, which lasts 5 s at most: its own window is 10 s.
    clock = FakeClock()
    assert load_settings(home / "settings.toml").min_window_s == 3600
    async with Interlock.open(home, clock=clock.clock, housekeeping=False, **settings_) as app:
        app.catalog.attach(sample.increment)
        assert (await app.call("demo.increment", name="a", key="k")).unwrap() == 1
        clock.advance(window_s - 1)
        assert (await app.call("demo.increment", name="a", key="k")).replayed
        clock.advance(1)
        assert (await app.call("demo.increment", name="a", key="k")).unwrap() == 2


def preview(name: str, by: int) -> Preview:
    return Preview(impact=name)


async def keep(name: str, by: int) -> None: ...


@pytest.mark.proves("IDEM-04")
async def test_what_may_take_a_day_is_remembered_for_two(home: Path) -> None:
    clock = FakeClock()
    sample.reset()
    async with Interlock.open(home, clock=clock.clock, housekeeping=False) as app:
        # Only a manifest can say so; the function is that of demo.increment.
        said = {"tool_id": "lasting", "timeout_class": "async", "timeout_default": 7200, "timeout_max": 86_400}
        handlers = {"preview": preview, "compensate": keep}
        lasting = from_manifest(
            parse_manifest({**sample.increment.manifest.document(), **said}), sample.increment.function, handlers
        )
        digest = contract_digest(lasting)
        await app.journal.commit(
            publish(lasting.manifest, digest, "library:", TrialEvidence(digest, True, "test", ""), "test")
        )
        app.catalog.attach(lasting)
        assert (await app.call("demo.lasting", name="a", key="k")).ok
        clock.advance(48 * 3600 - 1)
        assert (await app.call("demo.lasting", name="a", key="k")).replayed
        clock.advance(1)
        again = await app.call("demo.lasting", name="a", key="k")
        assert (again.ok, again.replayed, world.runs) == (True, False, 2)


@pytest.mark.proves("IDEM-04")
async def test_expired_outcomes_are_evicted_and_unknown_ones_are_not(home: Path) -> None:
    clock = FakeClock()
    async with Interlock.open(home, clock=clock.clock, housekeeping=False) as app:
        app.catalog.attach(sample.increment)
        await app.call("demo.increment", name="a", key="k")
        await app.call("demo.increment", name="b", key="u")
        await app.journal.commit(
            lambda tx: tx.execute("UPDATE reservation SET state = 'unknown' WHERE key = 'u'") and None
        )
        clock.advance(3599)
        await app.maintain()
        assert app.journal.reader.all("SELECT key FROM reservation ORDER BY key") == [("k",), ("u",)]
        clock.advance(1)
        await app.maintain()
        assert app.journal.reader.all("SELECT key FROM reservation") == [("u",)]
        clock.advance(400 * 86_400)
        assert await app.journal.commit(idempotency.evict) == 0
        assert code(await app.call("demo.increment", name="b", key="u")) == "E3409"


class Idempotency(RuleBasedStateMachine):
    """Submit, crash, retry, let windows pass, skew clocks: an effect per key and window, and never a silent second."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.TemporaryDirectory()
        self.store, self.node = FakeClock(), FakeClock()
        sample.reset()
        self.app = self.loop.run_until_complete(self._open())
        self.expected: dict[str, tuple[int, int]] = {}  # key -> (amount, store time of the run)
        self.unknown: set[str] = set()
        self.effects = 0

    async def _open(self) -> Interlock:
        app = await Interlock.open(
            self.directory.name, clock=self.node.clock, store_clock=self.store.clock, caller="local:u"
        )
        digest = contract_digest(sample.increment)
        evidence = TrialEvidence(digest, True, "test", "")
        await app.journal.commit(publish(sample.increment.manifest, digest, "library:", evidence, "test"))
        app.catalog.attach(sample.increment)
        return app

    def _call(self, key: str, amount: int) -> Result:
        return self.loop.run_until_complete(self.app.call("demo.increment", {"name": "x", "by": amount}, key=key))

    @rule(key=st.sampled_from("abc"), amount=st.integers(1, 3))
    def submit(self, key: str, amount: int) -> None:
        result = self._call(key, amount)
        known = self.expected.get(key)
        alive = known is not None and self.store.now_ms < known[1] + 3_600_000
        if key in self.unknown:
            assert code(result) in ("E3409", "E3306")
        elif known is not None and alive:
            assert result.replayed if known[0] == amount else code(result) == "E3306"
        else:
            assert result.ok
            assert not result.replayed
            self.expected[key] = (amount, self.store.now_ms)
            self.effects += amount

    @rule(key=st.sampled_from("abc"))
    def crash_in_the_middle(self, key: str) -> None:
        """The process dies between intent and outcome: what it leaves is an executing row of a dead owner."""
        if key in self.unknown:
            return
        known = self.expected.pop(key, None)
        if known is not None and self.store.now_ms < known[1] + 3_600_000:
            self.expected[key] = known
            return
        claim_of_the_dead = f"{key}-dead"
        self._leave_intent(key, claim_of_the_dead)
        self.unknown.add(key)

    def _leave_intent(self, key: str, owner: str) -> None:
        from interlock.data.canonical import digest, sealed_digest
        from interlock.gateway import idempotency
        from interlock.store.idempotency import NewKey

        caller = self.app.caller
        wanted = NewKey(
            scope=sealed_digest(caller.tenant, caller.id, "", "demo.increment#invoke", key), tool="demo.increment",
            version="1.0.0",
            key=key, caller=caller.id, input_hash=digest({"name": "x", "by": 1}), call=f"dead-{key}", owner=owner,
            window_ms=3_600_000,
        )  # fmt: skip
        intent = b'{"call":"dead-%s","kind":"intent"}' % key.encode()
        self.loop.run_until_complete(self.app.journal.commit(idempotency.reserve(wanted, intent, lambda owner: False)))

    @rule(hours=st.sampled_from([0.2, 0.9, 1.1]))
    def time_passes(self, hours: float) -> None:
        self.store.advance(hours * 3600)

    @rule(hours=st.sampled_from([-6, 6]))
    def node_clock_jumps(self, hours: int) -> None:
        self.node.now_ms += hours * 3_600_000

    @rule()
    def restart(self) -> None:
        self.loop.run_until_complete(self.app.close())
        self.app = self.loop.run_until_complete(self._open())

    @rule(key=st.sampled_from("abc"))
    def settle(self, key: str) -> None:
        """A person looks and finds that it did not happen."""
        if key in self.unknown:
            self.loop.run_until_complete(
                self.app.journal.commit(lambda tx: tx.execute("DELETE FROM reservation WHERE key = ?", (key,)) and None)
            )
            self.unknown.discard(key)
            self.expected.pop(key, None)

    @invariant()
    def effects_are_exactly_those_acknowledged(self) -> None:
        assert world.counters.get("x", 0) == self.effects

    def teardown(self) -> None:
        self.loop.run_until_complete(self.app.close())
        self.loop.close()
        self.directory.cleanup()


Idempotency.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestIdempotency = pytest.mark.proves("IDEM-05")(Idempotency.TestCase)


CANARY = "replayed-canary-5120"


def _holds(directory: Path, text: bytes) -> bool:
    return any(text in file.read_bytes() for file in directory.iterdir() if file.is_file())


@pytest.mark.proves("EFFECT-07")
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["set", "del", "fail", "lie", "replay", "undo"]),
            st.sampled_from(["p", "q", "password", "api_key"]),
            st.integers(0, 9),
        ),
        max_size=12,
    )
)
def test_replaying_the_journal_gives_the_sessions_state(steps: list[tuple[str, str, int]]) -> None:
    async def scenario() -> None:
        from interlock import Effect, tool
        from interlock.call.context import Preview
        from interlock.gateway.persistence.sessions import session_id

        @tool(
            version="1.0.0",
            mutation_class="write_reversible",
            namespace="demo",
            effects=[Effect("session:*", "UPDATE")],
        )
        async def remember(ctx: Context, what: sample.Text, name: sample.Text, value: sample.Number) -> str:
            """Keep, forget or fail."""
            ctx.compensate_with(name=name, before=ctx.session.get(name))
            if what == "set":
                ctx.session[name] = f"{CANARY}-{value}" if name in ("password", "api_key") else value
            elif what == "lie":
                ctx.effect(f"session:{name}", "UPDATE", before=None, after=-7)
            elif what == "del":
                ctx.session.pop(name, None)
            else:
                ctx.session[name] = -1
                raise Failure("PRECONDITION_FAILED", "no")
            return what

        @remember.preview
        def _(what: str, name: str, value: int) -> Preview:
            return Preview()

        @remember.compensate
        async def _(ctx: Context, name: str, before: Any) -> None:
            if before is None:
                ctx.session.pop(name, None)
            else:
                ctx.session[name] = before

        with tempfile.TemporaryDirectory() as directory:
            async with Interlock.open(directory) as app:
                digest = contract_digest(remember)
                await app.journal.commit(
                    publish(remember.manifest, digest, "library:", TrialEvidence(digest, True, "test", ""), "test")
                )
                app.catalog.attach(remember)
                previous: tuple[dict[str, Any], str] | None = None
                done: list[str] = []
                for number, (what, name, value) in enumerate(steps):
                    if what == "replay" and previous is not None:
                        await app.call("demo.remember", previous[0], key=previous[1])
                        continue
                    if what == "undo" and done:
                        assert (await app.undo(done.pop(), key=f"u{number}")).ok
                        continue
                    arguments: dict[str, Any] = {"what": what, "name": name, "value": value}
                    previous = (arguments, f"k{number}")
                    result = await app.call("demo.remember", arguments, key=previous[1])
                    done += [result.invocation_id] if result.ok else []
                live = json.loads(app.gateway.storage.sessions.read(app.caller, "")[1])
                assert live == await app.replay_session()
                await app.journal.drain()
                assert not _holds(Path(directory), CANARY.encode())
                assert session_id(app.caller, "") != session_id(app.caller, "x")

    asyncio.run(scenario())


async def test_two_calls_that_change_one_session_at_once_do_not_lose_a_change(app: Interlock) -> None:
    from interlock import Effect, Preview, tool

    gate = asyncio.Event()

    @tool(version="1.0.0", mutation_class="write_reversible", namespace="demo", effects=[Effect("session:n", "UPDATE")])
    async def bump(ctx: Context) -> int:
        """Count in the session, slowly."""
        ctx.session["n"] = ctx.session.get("n", 0) + 1
        await gate.wait()
        return ctx.session["n"]

    @bump.preview
    def _() -> Preview:
        return Preview()

    @bump.compensate
    async def _(result: int) -> None:
        return None

    await app.add(bump)
    both = [asyncio.create_task(app.call("demo.bump", key=f"k{i}")) for i in range(2)]
    await asyncio.sleep(0)
    gate.set()
    results = await asyncio.gather(*both)
    # Both declare that they change it, so they run one after the other.
    assert sorted(result.unwrap() for result in results) == [1, 2]

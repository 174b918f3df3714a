"""Effects through the gateway: who lies about them is caught and kept out, and who would collide waits."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock import Caller, Context, Effect, Field, Interlock, Preview, tool
from interlock.core.errors import Failure
from interlock.gateway.hooks import Hook, HookResult
from tests.gateway.test_idempotency import code
from tests.gateway.test_lifecycle import _publish, records  # pyright: ignore[reportPrivateUsage]
from tests.sample import Name, Text

Way = Annotated[str, Field(description="how to lie", examples=["not"])]


class World:
    """Where the tools do what they do, and who was there at the same time."""

    def __init__(self) -> None:
        self.root = Path()
        self.database = Path()
        self.inside: dict[str, int] = {}
        self.together = 0
        self.most = 0
        self.values: dict[str, int] = {}
        self.wrote = asyncio.Event()


world = World()


@tool(version="1.0.0", mutation_class="read_only", namespace="eff")
async def honest(ctx: Context, way: Way) -> str:
    """Says it only reads, and may do otherwise."""
    file = world.root / "a.txt"
    match way:
        case "session":
            ctx.session["seen"] = 1
        case "report":
            ctx.effect("thing:a", "UPDATE")
        case "write":
            file.write_text("changed")
        case "delete":
            file.unlink()
        case "rename":
            file.rename(world.root / "b.txt")
        case "chmod":
            file.chmod(0o600)
        case "create":
            (world.root / "new.txt").write_text("new")
        case "write, then fail":
            file.write_text("changed")
            raise ValueError("and that was that")
        case "write, then wait":
            file.write_text("changed")
            world.wrote.set()
            await asyncio.sleep(60)
        case "sql":
            with sqlite3.connect(world.database) as connection:
                connection.execute("INSERT INTO t VALUES (2)")
            connection.close()
        case _:
            return file.read_text()
    return way


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="eff",
    effects=[Effect("thing:{name}", "UPDATE")],
)  # fmt: skip
async def put(ctx: Context, name: Name, truly: Text = "", result: Text = "fine") -> int:
    """Change one thing, and say so; or another."""
    changed = truly or name
    world.values[changed] = world.values.get(changed, 0) + 1
    ctx.effect(f"thing:{changed}", "UPDATE")
    ctx.compensate_with(name=changed)
    return 1 if result == "fine" else "nonsense"  # pyright: ignore[reportReturnType] - on purpose


@put.preview
def _(name: str, truly: str, result: str) -> Preview:
    return Preview(impact=name)


@put.compensate
async def _(name: str) -> None:
    if name == "stuck":
        raise Failure("E3401", "it cannot be undone after all")
    world.values[name] -= 1


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="eff",
    effects=[Effect("row:{one}", "UPDATE"), Effect("row:{two}", "UPDATE")],
)  # fmt: skip
async def both(one: Name, two: Name) -> str:
    """Change two rows, and notice who else does."""
    world.together += 1
    world.most = max(world.most, world.together)
    for row in {one, two}:
        world.inside[row] = world.inside.get(row, 0) + 1
        assert world.inside[row] == 1, "somebody else is changing it"
    for _ in range(3):
        await asyncio.sleep(0)
    for row in {one, two}:
        world.inside[row] -= 1
    world.together -= 1
    return one


@both.preview
def _(one: str, two: str) -> Preview:
    return Preview(impact=one)


@both.compensate
async def _(result: str) -> None:
    return None


TOOLS = (honest, put, both)


@asynccontextmanager
async def opened(home: Path, **options: Any) -> AsyncGenerator[Interlock]:
    async with Interlock.open(home, housekeeping=False, **options) as lock:
        for one in TOOLS:
            await lock.journal.commit(_publish(one))
            lock.catalog.attach(one)
        yield lock


@pytest.fixture
def watched(tmp_path: Path) -> dict[str, Any]:
    world.__init__()
    world.root = tmp_path / "watched"
    world.root.mkdir()
    (world.root / "a.txt").write_text("as it was")
    world.database = tmp_path / "data.db"
    connection = sqlite3.connect(world.database)
    connection.executescript("CREATE TABLE t (n); INSERT INTO t VALUES (1);")
    connection.close()
    return {"watched_files": (world.root,), "watched_databases": (world.database,)}


@pytest.mark.part_of("EFFECT-03", rest="Postgres; the span")
@pytest.mark.parametrize("way", ["session", "report", "write", "delete", "rename", "chmod", "create", "sql"])
async def test_a_read_only_tool_that_changes_something_is_caught_put_back_and_kept_out(
    tmp_path: Path, watched: dict[str, Any], way: str
) -> None:
    async with opened(tmp_path / "home", **watched) as lock:
        assert (await lock.call("eff.honest", way="not")).unwrap() == "as it was"
        lied = await lock.call("eff.honest", way=way, session="s")
        assert lied.error is not None
        assert (lied.error.code, lied.error.details and lied.error.details["violation"]) == (
            "E3417", "MUTATION_CLASS_VIOLATION",
        )  # fmt: skip
        assert lock.gateway.observer.metrics["MUTATION_CLASS_VIOLATION"] == 1
        assert [path.name for path in world.root.iterdir()] == ["a.txt"]
        assert (world.root / "a.txt").read_text() == "as it was"
        refused = await lock.call("eff.honest", way="not")
        assert refused.error is not None
        assert (refused.error.code, refused.error.row.error_class) == ("E3210", "policy_blocked")


@pytest.mark.part_of("EFFECT-03", rest="Postgres; the span")
@pytest.mark.parametrize("end", ["fails", "times out", "is abandoned"])
async def test_a_tool_that_lies_and_does_not_come_back_is_caught_too(
    tmp_path: Path, watched: dict[str, Any], end: str
) -> None:
    async with opened(tmp_path / "home", **watched) as lock:
        if end == "fails":
            assert code(await lock.call("eff.honest", way="write, then fail")) == "E3417"
        elif end == "times out":
            assert code(await lock.call("eff.honest", way="write, then wait", timeout_s=0.2)) == "E3417"
        else:
            call = asyncio.create_task(lock.call("eff.honest", way="write, then wait"))
            await world.wrote.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert (world.root / "a.txt").read_text() == "as it was"
        assert code(await lock.call("eff.honest", way="not")) == "E3210"


async def test_a_hook_that_says_no_afterwards_undoes_nothing(tmp_path: Path, watched: dict[str, Any]) -> None:
    """What a hook objects to is its own affair: the effect is what the contract promises, and stays."""
    async with opened(tmp_path / "home", **watched) as lock:
        lock.hook(Hook(id="objector", when="post", run=lambda _: HookResult(stop="not in this house")))
        assert code(await lock.call("eff.put", name="a", key="1")) == "E3211"
        assert world.values == {"a": 1}
        assert "compensate" not in [record["operation"] for record in records(lock)]


@pytest.mark.part_of("EFFECT-04", rest="doors and surfaces; several machines")
async def test_only_a_person_who_says_why_lifts_a_quarantine(tmp_path: Path, watched: dict[str, Any]) -> None:
    home = tmp_path / "home"
    async with opened(home, **watched) as lock, opened(home, **watched) as other:
        await lock.call("eff.honest", way="write")
        other.gateway.quarantine.look()
        assert code(await other.call("eff.honest", way="not")) == "E3210"
    async with opened(home, **watched) as lock:
        assert code(await lock.call("eff.honest", way="not")) == "E3210", "a restart lifts nothing"
        agent = Caller(id="local:x", agent="did:key:z", kind="agent", scopes=frozenset({"tools:admin"}))
        for by, reason in ((agent, "because"), (Caller(id="local:y"), "because"), (lock.caller, " ")):
            with pytest.raises(Failure):
                await lock.lift_quarantine("eff.honest@1.0.0", reason=reason, by=by)
        assert code(await lock.call("eff.honest", way="not")) == "E3210"
        await lock.lift_quarantine("eff.honest@1.0.0", reason="it was a test")
        assert (await lock.call("eff.honest", way="not")).ok
        events = [record["event"] for record in records(lock, kind="registry") if "quarantine" in str(record["event"])]
        assert events == ["tool.quarantined", "tool.quarantine_lifted"]


@pytest.mark.part_of("EFFECT-03", rest="Postgres; the span")
async def test_a_write_outside_the_manifest_is_handled_alike(tmp_path: Path, watched: dict[str, Any]) -> None:
    async with opened(tmp_path / "home", **watched) as lock:
        assert (await lock.call("eff.put", name="a", key="1")).ok
        strayed = await lock.call("eff.put", name="a", truly="b", key="2")
        assert strayed.error is not None
        assert strayed.error.details is not None
        assert strayed.error.details["violation"] == "UNDECLARED_EFFECT"
        assert code(await lock.call("eff.put", name="a", key="3")) == "E3210"


async def test_a_thousand_honest_calls_are_never_blamed(tmp_path: Path, watched: dict[str, Any]) -> None:
    async with opened(tmp_path / "home", **watched) as lock:
        for round_ in range(10):
            calls = [lock.call("eff.honest", way="not") for _ in range(50)]
            calls += [lock.call("eff.put", name=f"n{n}", key=f"{round_}-{n}") for n in range(50)]
            assert all(result.ok for result in await asyncio.gather(*calls))
        assert lock.gateway.quarantine.all() == []


@pytest.mark.part_of("EFFECT-09", rest="the span")
async def test_what_does_not_verify_is_undone_and_says_so(tmp_path: Path, watched: dict[str, Any]) -> None:
    async with opened(tmp_path / "home", **watched) as lock:
        garbage = await lock.call("eff.put", name="a", result="garbage", key="1")
        assert garbage.error is not None
        assert (garbage.error.code, garbage.error.row.error_code) == ("E3303", "INTERNAL_TOOL_ERROR")
        assert garbage.error.details is not None
        assert garbage.error.details["rolled_back"] is True
        assert world.values == {"a": 0}
        stuck = await lock.call("eff.put", name="stuck", result="garbage", key="2")
        assert stuck.error is not None
        assert stuck.error.details is not None
        assert stuck.error.details["rolled_back"] is False
        assert lock.gateway.observer.metrics["ROLLBACK_FAILED"] == 1
        # The undoing is a call of its own, on record.
        assert [record["operation"] for record in records(lock)].count("compensate") == 2


@pytest.mark.part_of("EFFECT-06", rest="preconditions; Postgres; several machines")
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd")), min_size=2, max_size=12))
async def test_calls_that_change_the_same_never_meet_and_all_finish(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]
) -> None:
    world.__init__()
    async with opened(tmp_path_factory.mktemp("home")) as lock:
        calls = [lock.call("eff.both", one=one, two=two, key=str(n)) for n, (one, two) in enumerate(pairs)]
        results = await asyncio.gather(*calls)
        assert all(result.ok for result in results)


@pytest.mark.part_of("EFFECT-06", rest="preconditions; Postgres; several machines")
async def test_calls_that_change_different_things_run_side_by_side(tmp_path: Path) -> None:
    world.__init__()
    async with opened(tmp_path / "home") as lock:
        await asyncio.gather(*(lock.call("eff.both", one=f"r{n}", two=f"s{n}", key=str(n)) for n in range(8)))
    assert world.most > 1

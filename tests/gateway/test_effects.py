"""Effects through the gateway: who lies about them is caught and kept out, and who would collide waits."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock import Caller, Change, Context, Effect, Event, Field, Interlock, Preview, Request, Tool, demo_tools, tool
from interlock.call.capability import Capability, Link, ToolGrant
from interlock.contract.declare import tools_in
from interlock.contract.effects import predict
from interlock.contract.hints import Annotations
from interlock.core.errors import Failure
from interlock.data.canonical import digest
from interlock.demo_tools import _balance as balance_of  # pyright: ignore[reportPrivateUsage] - the state it keeps
from interlock.demo_tools import _entries as read_entries  # pyright: ignore[reportPrivateUsage] - as above
from interlock.demo_tools import _ledger as ledger  # pyright: ignore[reportPrivateUsage] - as above
from interlock.effects.files import FileWatcher
from interlock.effects.watch import judge
from interlock.gateway.hooks import Hook, HookResult
from interlock.testing import FakeClock
from tests import sample
from tests.sample import Name, Number, Text
from tests.support.calls import admit, code, publish, records
from tests.thorough import THOROUGH

REVIEWER = Caller(id="local:reviewer", groups=frozenset({"approvers"}))
TEMPORARY = os.path.realpath(tempfile.gettempdir())
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


@tool(version="1.1.0", mutation_class="read_only", namespace="eff", name="honest")
async def honest_anew(ctx: Context, way: Way) -> str:
    """Says it only reads, and may do otherwise, in other words."""
    if way == "write":
        (world.root / "a.txt").write_text("changed")
    return (world.root / "a.txt").read_text()


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
    effects=[Effect("thing:{name}", "UPDATE"), Effect("session:last", "UPDATE")],
)  # fmt: skip
async def claim(ctx: Context, name: Name, value: Number) -> int:
    """Say that a thing has a value now, and stop half way when it is odd."""
    before = world.values.get(name, 0)
    ctx.compensate_with(name=name, before=before)
    ctx.session["last"] = name
    ctx.effect(f"thing:{name}", "UPDATE", before=before, after=value)
    world.values[name] = value // 2 * 2
    return value


@claim.preview
def _(name: str, value: int) -> Preview:
    return Preview(impact=name)


@claim.verify
def _(arguments: dict[str, Any], result: int) -> list[str]:
    there = world.values[arguments["name"]]
    return [] if there == result else [f"it should be {result} and is {there}"]


@claim.compensate
async def _(ctx: Context, name: str, before: int) -> None:
    world.values[name] = before
    ctx.session["last"] = "undone"


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


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="eff",
    effects=[Effect(f"file:{TEMPORARY}/*", "UPDATE"), Effect(f"file:{TEMPORARY}/*", "CREATE")],
    permissions=[f"filesystem:write:{TEMPORARY}"],
)  # fmt: skip
async def scribble(ctx: Context, text: Text, stray: Text = "") -> str:
    """Change a watched file, and report nothing of it."""
    if stray != "nothing":
        (world.root / "a.txt").write_text(text)
    if stray == "row":
        with sqlite3.connect(world.database) as connection:
            connection.execute("INSERT INTO t VALUES (2)")
        connection.close()
    if stray == "fail":
        raise Failure("E3401", "it broke half way")
    return text


@scribble.preview
def _(text: str, stray: str) -> Preview:
    return Preview(impact=text)


@scribble.compensate
async def _(ctx: Context, result: str) -> None:
    (world.root / "a.txt").write_text("as it was")


TOOLS = (honest, put, claim, both, scribble)


@asynccontextmanager
async def opened(home: Path, **options: Any) -> AsyncGenerator[Interlock]:
    async with Interlock.open(home, housekeeping=False, **options) as app:
        for one in TOOLS:
            await app.journal.commit(publish(one))
            app.catalog.attach(one)
        yield app


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


@pytest.mark.proves("EFFECT-03")
@pytest.mark.parametrize("way", ["session", "report", "write", "delete", "rename", "chmod", "create", "sql"])
async def test_a_read_only_tool_that_changes_something_is_caught_put_back_and_kept_out(
    tmp_path: Path, watched: dict[str, Any], way: str
) -> None:
    mode = (world.root / "a.txt").stat().st_mode
    async with opened(tmp_path / "home", **watched) as app:
        assert (await app.call("eff.honest", way="not")).unwrap() == "as it was"
        lied = await app.call("eff.honest", way=way, session="s")
        assert lied.error is not None
        assert (lied.error.code, lied.error.details and lied.error.details["violation"]) == (
            "E3417", "MUTATION_CLASS_VIOLATION",
        )  # fmt: skip
        assert app.gateway.observer.metrics["MUTATION_CLASS_VIOLATION"] == 1
        assert [path.name for path in world.root.iterdir()] == ["a.txt"]
        assert (world.root / "a.txt").read_text() == "as it was"
        assert (world.root / "a.txt").stat().st_mode == mode
        with sqlite3.connect(world.database) as connection:
            assert connection.execute("SELECT n FROM t").fetchall() == [(1,)]
        connection.close()
        assert json.loads(app.gateway.storage.sessions.read(app.caller, "s")[1]) == {}
        refused = await app.call("eff.honest", way="not")
        assert refused.error is not None
        assert (refused.error.code, refused.error.row.error_class) == ("E3210", "policy_blocked")


@pytest.mark.proves("EFFECT-03")
@pytest.mark.parametrize(("lying", "other"), [("1.0.0", "1.1.0"), ("1.1.0", "1.0.0")])
async def test_the_version_that_lied_is_kept_out_and_no_other(
    tmp_path: Path, watched: dict[str, Any], lying: str, other: str
) -> None:
    async with opened(tmp_path / "home", **watched) as app:
        await admit(app, honest_anew)
        assert code(await app.call(f"eff.honest@{lying}", way="write")) == "E3417"
        for _ in range(2):
            assert code(await app.call(f"eff.honest@{lying}", way="not")) == "E3210"
            assert (await app.call(f"eff.honest@{other}", way="not")).unwrap() == "as it was"


@pytest.mark.proves("EFFECT-03")
@pytest.mark.parametrize("end", ["fails", "times out", "is abandoned"])
async def test_a_tool_that_lies_and_does_not_come_back_is_caught_too(
    tmp_path: Path, watched: dict[str, Any], end: str
) -> None:
    clock = FakeClock()
    async with opened(tmp_path / "home", clock=clock.clock, **watched) as app:
        call = asyncio.create_task(app.call("eff.honest", way=f"write, then {'fail' if end == 'fails' else 'wait'}"))
        if end == "fails":
            assert code(await call) == "E3417"
        elif end == "times out":
            await world.wrote.wait()
            clock.advance(3600)
            assert code(await call) == "E3417"
        else:
            await world.wrote.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert (world.root / "a.txt").read_text() == "as it was"
        assert code(await app.call("eff.honest", way="not")) == "E3210"


async def test_a_hook_that_says_no_afterwards_undoes_nothing(tmp_path: Path, watched: dict[str, Any]) -> None:
    """What a hook objects to is its own affair: the effect is what the contract promises, and stays."""
    async with opened(tmp_path / "home", **watched) as app:
        app.hook(Hook(id="objector", when="post", run=lambda _: HookResult(stop="not in this house")))
        assert code(await app.call("eff.put", name="a", key="1")) == "E3211"
        assert world.values == {"a": 1}
        assert "compensate" not in [record["operation"] for record in records(app)]


def quarantine_events(app: Interlock) -> list[str]:
    events = [str(record["event"]) for record in records(app, kind="registry")]
    return [event for event in events if "quarantine" in event]


@pytest.mark.proves("EFFECT-04")
async def test_only_a_person_who_says_why_lifts_a_quarantine(tmp_path: Path, watched: dict[str, Any]) -> None:
    home, time = tmp_path / "home", FakeClock()
    given: dict[str, Any] = {**watched, "clock": time.clock, "purge_records": True}
    async with opened(home, **given) as app, opened(home, **given) as other:
        await app.call("eff.honest", way="write")
        await other.gateway.quarantine.look()
        assert code(await other.call("eff.honest", way="not")) == "E3210"
        assert quarantine_events(app) == ["tool.quarantined"]
        for days in (1, 400, 4000):
            time.advance(days * 86_400)
            await app.maintain()
            for one in (app, other):
                assert code(await one.call("eff.honest", way="not")) == "E3210", f"{days} days lift nothing"
        assert quarantine_events(app) == [], "its record is past its term and was removed"
    time.advance(10 * 366 * 86_400)
    async with opened(home, **given) as app:
        await app.maintain()
        assert code(await app.call("eff.honest", way="not")) == "E3210", "a restart lifts nothing"
        agent = Caller(id="local:x", agent="did:key:z", kind="agent", scopes=frozenset({"tools:admin"}))
        for by, reason in ((agent, "because"), (Caller(id="local:y"), "because"), (app.caller, " ")):
            with pytest.raises(Failure):
                await app.lift_quarantine("eff.honest@1.0.0", reason=reason, by=by)
        assert code(await app.call("eff.honest", way="not")) == "E3210"
        await app.lift_quarantine("eff.honest@1.0.0", reason="it was a test")
        assert (await app.call("eff.honest", way="not")).ok
        assert quarantine_events(app) == ["tool.quarantine_lifted"]


@pytest.mark.proves("EFFECT-03")
async def test_a_write_outside_the_manifest_is_handled_alike(tmp_path: Path, watched: dict[str, Any]) -> None:
    async with opened(tmp_path / "home", **watched) as app:
        assert (await app.call("eff.put", name="a", key="1")).ok
        strayed = await app.call("eff.put", name="a", truly="b", key="2")
        assert strayed.error is not None
        assert strayed.error.details is not None
        assert strayed.error.code == "E3417"
        assert strayed.error.details["violation"] == "UNDECLARED_EFFECT"
        assert strayed.error.details["changes"] == ["UPDATE thing:b"]
        assert "thing:b" in strayed.error.message
        assert app.gateway.observer.metrics["UNDECLARED_EFFECT"] == 1
        assert code(await app.call("eff.put", name="a", key="3")) == "E3210"


@pytest.mark.proves("EFFECT-03")
async def test_a_watched_write_outside_the_manifest_is_put_back(tmp_path: Path, watched: dict[str, Any]) -> None:
    async with opened(tmp_path / "home", **watched) as app:
        strayed = await app.call("eff.scribble", text="third", stray="row", key="1")
        assert strayed.error is not None
        assert strayed.error.details is not None
        assert (strayed.error.code, strayed.error.details["violation"]) == ("E3417", "UNDECLARED_EFFECT")
        assert [one.rpartition("/")[2] for one in strayed.error.details["changes"]] == ["t"]
        assert strayed.error.details["rolled_back"] is True
        assert (world.root / "a.txt").read_text() == "as it was"
        with sqlite3.connect(world.database) as connection:
            assert connection.execute("SELECT n FROM t").fetchall() == [(1,)]
        connection.close()
        assert code(await app.call("eff.scribble", text="x", key="2")) == "E3210"


def _mutations(app: Interlock, call: str) -> list[tuple[str, str]]:
    return [
        (one["affectedResource"].rpartition("/")[2], one["mutationType"]) for one in records(app, call, kind="mutation")
    ]


@pytest.mark.proves("EFFECT-05")
async def test_a_watched_change_that_is_declared_and_not_reported_is_on_record(
    tmp_path: Path, watched: dict[str, Any]
) -> None:
    async with opened(tmp_path / "home", **watched) as app:
        wrote = await app.call("eff.scribble", text="other", key="1")
        assert wrote.unwrap() == "other"
        assert _mutations(app, wrote.invocation_id) == [("a.txt", "UPDATE")]
        (change,) = records(app, wrote.invocation_id, kind="mutation")
        assert change["previousValue"]["size"] == 9
        assert change["newValue"]["size"] == 5
        assert (change["idempotencyKey"], change["callerId"]) == ("1", app.caller.id)
        (closed,) = records(app, wrote.invocation_id)
        assert [one["operation"] for one in closed["sideEffects"]] == ["UPDATE"]
        assert "WRITE_TOOL_NO_MUTATION" not in wrote.metadata.get("warnings", [])
        assert app.gateway.observer.metrics["WRITE_TOOL_NO_MUTATION"] == 0
        undone = await app.undo(wrote.invocation_id, key="2")
        assert _mutations(app, undone.invocation_id) == [("a.txt", "UPDATE")]
        same = await app.call("eff.scribble", text="other", stray="nothing", key="3")
        assert same.metadata["warnings"] == ["WRITE_TOOL_NO_MUTATION"]


@pytest.mark.proves("EFFECT-05")
async def test_a_watched_change_of_a_call_that_fails_is_on_record(tmp_path: Path, watched: dict[str, Any]) -> None:
    async with opened(tmp_path / "home", **watched) as app:
        failed = await app.call("eff.scribble", text="other", stray="fail", key="1")
        assert code(failed) == "E3401"
        assert _mutations(app, failed.invocation_id) == [("a.txt", "UPDATE")]
        # What was put back is on record too: once as the change and once as the change back.
        strayed = await app.call("eff.scribble", text="third", stray="row", key="2")
        assert code(strayed) == "E3417"
        changes = _mutations(app, strayed.invocation_id)
        assert changes == [("a.txt", "UPDATE"), ("t", "CREATE"), ("a.txt", "UPDATE"), ("t", "DELETE")]
        there, _, back, _ = records(app, strayed.invocation_id, kind="mutation")
        assert (there["previousValue"], there["newValue"]) == (back["newValue"], back["previousValue"])


async def test_honest_calls_are_never_blamed_however_many(tmp_path: Path, watched: dict[str, Any]) -> None:
    async with opened(tmp_path / "home", **watched) as app:
        for round_ in range(100 if THOROUGH else 2):  # of a hundred calls at once
            calls = [app.call("eff.honest", way="not") for _ in range(50)]
            calls += [app.call("eff.put", name=f"n{n}", key=f"{round_}-{n}") for n in range(50)]
            assert all(result.ok for result in await asyncio.gather(*calls))
        assert await app.gateway.quarantine.all() == []


@pytest.mark.proves("EFFECT-09")
async def test_what_does_not_verify_is_undone_and_says_so(tmp_path: Path, watched: dict[str, Any]) -> None:
    async with opened(tmp_path / "home", **watched) as app:
        garbage = await app.call("eff.put", name="a", result="garbage", key="1")
        assert garbage.error is not None
        assert (garbage.error.code, garbage.error.row.error_code) == ("E3303", "INTERNAL_TOOL_ERROR")
        assert garbage.error.details is not None
        assert garbage.error.details["rolled_back"] is True
        assert garbage.error.details["violation"] == "TOOL_OUTPUT_SCHEMA_VIOLATION"
        assert garbage.error.details["faults"] == [{"pointer": "", "message": 'is not of type "integer"; it is text'}]
        assert world.values == {"a": 0}
        alerts: list[str] = []
        app.gateway.telemetry.alerts.listeners.append(lambda alert: alerts.append(alert.name))
        stuck = await app.call("eff.put", name="stuck", result="garbage", key="2")
        assert stuck.error is not None
        assert stuck.error.details is not None
        assert stuck.error.details["rolled_back"] is False
        assert app.gateway.observer.metrics["ROLLBACK_FAILED"] == 1
        assert "ROLLBACK_FAILED" in alerts
        # The undoing is a call of its own, on record.
        assert [record["operation"] for record in records(app)].count("compensate") == 2


@pytest.mark.proves("EFFECT-09")
async def test_a_success_without_its_change_is_undone_and_the_span_says_what_was_found(
    tmp_path: Path, watched: dict[str, Any]
) -> None:
    async with opened(tmp_path / "home", **watched, trace_ratio=1.0) as app:
        assert (await app.call("eff.claim", name="a", value=4, key="1")).unwrap() == 4

        found: list[tuple[str, Any]] = []

        async def verdict(tool: str, key: str, **arguments: Any) -> str:
            result = await app.call(tool, arguments, name="a", key=key)
            assert result.error is not None
            assert result.error.row.error_code == "INTERNAL_TOOL_ERROR"
            assert result.error.details is not None
            assert result.error.details["rolled_back"] is True
            found.append((result.error.code, result.error.details["faults"]))
            tracer = app.gateway.telemetry.tracer
            assert tracer is not None
            spans = {span["name"]: span["status"] for span in tracer.of(result.trace_id, app.caller)[::-1]}
            assert spans["tool.invoke"] == spans["Verify"]
            return spans["Verify"]

        assert await verdict("eff.claim", "2", value=7) == "SIDE_EFFECT_INCONSISTENCY"
        assert found == [("E3417", [{"what": "verify", "message": "it should be 7 and is 6"}])]
        assert world.values == {"a": 4}
        assert await verdict("eff.put", "3", result="garbage") == "OUTPUT_SCHEMA_VIOLATION"
        assert found[-1][0] == "E3303"
        assert world.values == {"a": 4}


# Undoing


@pytest.mark.proves("EFFECT-08")
async def test_what_undoes_a_call_is_stored_before_anybody_hears_that_it_succeeded(tmp_path: Path) -> None:
    world.__init__()
    async with opened(tmp_path / "home") as app:
        stored: list[int] = []

        def hear(event: Event) -> None:
            if event.type == "tool.invocation.succeeded":
                rows = app.journal.reader.all(
                    "SELECT size FROM payload WHERE ref = ?", (f"undo:{event.invocation_id}",)
                )
                stored.extend(size for (size,) in rows)

        app.listen(hear)
        done = await app.call("eff.claim", name="a", value=4, key="1", session="s")
        assert len(stored) == 1
        (closed,) = records(app, done.invocation_id)
        assert closed["compensation"]["ref"] == f"undo:{done.invocation_id}"
        assert {"toolId", "inputHash", "resultHash", "timestamp", "idempotencyKey"} <= closed.keys()


@pytest.mark.shows("Python function", "undo")
@pytest.mark.proves("EFFECT-08")
async def test_an_undo_is_keyed_authorized_recorded_and_acts_where_the_call_did(tmp_path: Path) -> None:
    world.__init__()
    home = tmp_path / "home"
    async with opened(home) as app:
        done = await app.call("eff.claim", name="a", value=4, key="1", session="s")

        async def undo(by: Caller, key: str | None = "u") -> Any:
            request = Request(
                tool="eff.claim", arguments={}, caller=by, key=key, operation="compensate", parent=done.invocation_id
            )
            return await app.gateway.invoke(request)

        # Somebody else's session is nobody's to undo, whatever they may do otherwise; nor is one's own without a token
        # for it, or without a key.
        stranger = replace(app.caller, id="local:stranger")
        elsewhere = replace(app.caller, tenant="elsewhere")
        assert {code(await undo(one)) for one in (stranger, elsewhere)} == {"E3702"}
        link = Link(
            jti="j", subject="local:x", scopes=app.caller.scopes, tools=(ToolGrant("eff.put"),), not_before=0,
            expires=2**40, constraints={},
        )  # fmt: skip
        narrow = replace(app.caller, capability=Capability(digest="d", issuer="i", links=(link,)))
        assert code(await undo(narrow)) == "E3204"
        assert code(await undo(app.caller, None)) == "E3307"
        assert world.values == {"a": 4}
        undone = await undo(app.caller)
        assert undone.ok
        assert (await undo(app.caller)).replayed
        assert world.values == {"a": 0}
        record = records(app, undone.invocation_id)[-1]
        assert record["phases"] == ["request", "validate", "authorize", "execute", "verify", "return"]
        assert (record["operation"], record["session"]) == ("compensate", "s")
        (change,) = records(app, undone.invocation_id, kind="mutation")
        assert (change["affectedResource"], change["newValue"]) == ("session:last", "undone")
        assert records(app, undone.invocation_id, kind="intent")


@pytest.mark.proves("EFFECT-08")
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    calls=st.lists(
        st.sampled_from(["demo.post", "demo.increment", "eff.put", "eff.claim"]).flatmap(
            lambda name: st.tuples(
                st.just(name), st.sampled_from(["cash", "savings"]), st.integers(-100, 100).filter(bool)
            )
        ),
        min_size=1,
        max_size=6,
    )
)
async def test_a_call_and_its_undo_leave_things_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[str, str, int]]
) -> None:
    """Every reversible tool that is shipped, and others, in any order, undone from the last to the first."""
    world.__init__()
    sample.reset()
    place = tmp_path_factory.mktemp("home")

    def state() -> str:
        with ledger() as entries:
            balances = {name: balance_of(read_entries(entries), name) for name in ("cash", "savings")}
        counters = (sample.world.counters, world.values)
        return digest([balances, *({name: value for name, value in one.items() if value} for one in counters)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INTERLOCK_DEMO_LEDGER", str(place / "ledger.jsonl"))
        async with opened(place / "home") as app:
            await admit(app, demo_tools.post, sample.increment)
            states, done = [state()], list[str]()
            for number, (name, where, amount) in enumerate(calls):
                given: dict[str, Any] = {
                    "demo.post": {"account": where, "cents": amount},
                    "demo.increment": {"name": where, "by": amount},
                    "eff.put": {"name": where},
                    "eff.claim": {"name": where, "value": 2 * amount},
                }[name]
                result = await app.call(name, given, key=f"k{number}")
                assert result.ok, result.error
                done.append(result.invocation_id)
                states.append(state())
            for number, call in enumerate(reversed(done)):
                assert (await app.undo(call, key=f"u{number}")).ok
                assert state() == states[-2 - number]


def test_what_undoes_a_call_follows_from_its_arguments_and_its_result() -> None:
    def arguments(handler: Callable[..., Any]) -> Any:
        one = Tool(handler, {}, Annotations())
        one.handlers["compensate"] = handler
        return one.undo_arguments({"name": "a", "by": 2, "result": "given"}, 5)

    def by_name(name: str, by: int) -> None: ...
    def with_result(name: str, entry: int) -> None: ...
    def result_alone(result: int) -> None: ...
    def optional(ctx: Context, by: int, force: bool = False) -> None: ...
    def nothing() -> None: ...
    def anything(**_: Any) -> None: ...
    def too_much(entry: int, other: int) -> None: ...

    assert arguments(by_name) == {"name": "a", "by": 2}
    assert arguments(with_result) == {"name": "a", "entry": 5}
    assert arguments(result_alone) == {"result": 5}
    assert arguments(optional) == {"by": 2}
    assert arguments(nothing) == arguments(anything) == {}
    assert arguments(too_much) is None


# What shipped tools change


@pytest.mark.proves("EFFECT-02")
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["cash", "savings"]), st.integers(-100, 100).filter(bool), st.sampled_from(["press", "b/*"]))
async def test_what_a_shipped_tool_changes_was_predicted_from_its_input_alone(
    tmp_path_factory: pytest.TempPathFactory, account: str, cents: int, to: str
) -> None:
    place = tmp_path_factory.mktemp("home")
    given: dict[str, dict[str, Any]] = {
        "post": {"account": account, "cents": cents},
        "mail_statement": {"account": account, "to": to},
    }
    writing = [one for one in tools_in(vars(demo_tools)) if one.manifest.effects]
    assert {one.manifest.tool_id for one in writing} == given.keys(), "a tool that is shipped is not tried here"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INTERLOCK_DEMO_LEDGER", str(place / "ledger.jsonl"))
        (place / "ledger.jsonl").touch()
        async with opened(place / "home") as app:
            await admit(app, *writing)
            watcher = FileWatcher([place / "ledger.jsonl"])
            for one in writing:
                arguments = given[one.manifest.tool_id]
                predicted = predict(one.manifest.effects, arguments)
                looked = (await app.call(one.manifest.address, arguments, dry_run=True)).unwrap()
                assert [(change["resource"], change["operation"]) for change in looked["predicted_effects"]] == [
                    (change.resource, change.operation) for change in predicted
                ]
                before = await watcher.before()
                result = await app.call(one.manifest.address, arguments, key=one.manifest.tool_id)
                if result.pending:
                    await app.approvals.approve(result.metadata["pending"]["ticketId"], by=REVIEWER)
                    result = await app.call(one.manifest.address, arguments, key=one.manifest.tool_id)
                assert result.ok
                (intent,) = records(app, result.invocation_id, kind="intent")
                assert [(one["resource"], one["operation"]) for one in intent["predicted"]] == [
                    (change.resource, change.operation) for change in predicted
                ]
                made = records(app, result.invocation_id, kind="mutation")
                assert made, "it changed nothing, so nothing is shown here"
                for change in made:
                    found = Change(resource=change["affectedResource"], operation=change["mutationType"])
                    assert judge("write_reversible", predicted, [found]).ok
                # Seen from outside, the ledger changed exactly if it was to change.
                changed = bool(await watcher.after(before))
                assert changed == any(change.resource.startswith("account:") for change in predicted)


# What each class is governed by


@pytest.mark.proves("EFFECT-01")
async def test_what_cannot_be_undone_is_always_asked_for_and_recorded_with_who_agreed(tmp_path: Path) -> None:
    async with opened(tmp_path / "home") as app:
        await admit(app, sample.send, sample.increment, sample.add)
        # Reads and what can be undone pass, unless the operator wants the latter asked for too.
        assert (await app.call("demo.add", a=1)).ok
        assert (await app.call("demo.increment", name="a", key="1")).ok
        assert not await app.approvals.list(every=True)
        looked = await app.call("demo.send", to="x", dry_run=True)
        assert looked.unwrap()["impact"] == "x would get a mail"
        pending = await app.call("demo.send", to="x", key="2")
        assert pending.pending
        await app.approvals.approve(pending.metadata["pending"]["ticketId"], by=REVIEWER)
        sent = await app.call("demo.send", to="x", key="2")
        assert sent.ok
        (closed,) = [one for one in records(app, sent.invocation_id) if one["states"][-1] == "succeeded"]
        assert closed["approvalTicketId"] == pending.metadata["pending"]["ticketId"]
        ticket = await app.approvals.show(closed["approvalTicketId"])
        assert (ticket.state, ticket.resolved_by) == ("USED", REVIEWER.id)
    async with opened(tmp_path / "strict", ask_all_writes=True) as app:
        await admit(app, sample.increment, sample.add)
        assert (await app.call("demo.add", a=1)).ok
        assert (await app.call("demo.increment", name="a", key="1")).pending


@pytest.mark.proves("EFFECT-06")
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd")), min_size=2, max_size=12))
async def test_calls_that_change_the_same_never_meet_and_all_finish(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]
) -> None:
    world.__init__()
    async with opened(tmp_path_factory.mktemp("home")) as app:
        calls = [app.call("eff.both", one=one, two=two, key=str(n)) for n, (one, two) in enumerate(pairs)]
        results = await asyncio.gather(*calls)
        assert all(result.ok for result in results)


@pytest.mark.proves("EFFECT-06")
async def test_calls_that_change_different_things_run_side_by_side(tmp_path: Path) -> None:
    world.__init__()
    async with opened(tmp_path / "home") as app:
        await asyncio.gather(*(app.call("eff.both", one=f"r{n}", two=f"s{n}", key=str(n)) for n in range(8)))
    assert world.most > 1

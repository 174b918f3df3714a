"""The fast path: which calls take it, and that results, records and metrics are those of the regular phases."""

from __future__ import annotations

import ast
import asyncio
import gc
import shutil
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import orjson
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from typing_extensions import TypedDict

import interlock
from interlock import Caller, Context, Event, Failure, Field, Hook, Interlock, Request, Result, Tool, tool
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.call.phases import FastRead
from interlock.call.prepared import Prepared
from interlock.core.clock import Clock
from interlock.executors.function import make
from interlock.registry import quarantine
from interlock.telemetry import w3c
from interlock.testing import FakeClock
from tests.support import source
from tests.support.calls import admit, code, records, until
from tests.support.executors import site
from tests.support.identities import AGENT, did_of
from tests.support.stores import busy, impatient

pytestmark = pytest.mark.usefixtures("either_way")

plain = tool(
    version="1.0.0", mutation_class="read_only", namespace="line", timeout_class="interactive", external_io=False
)
Whole = Annotated[int, Field(description="a whole number", examples=[1])]
Words = Annotated[str, Field(description="any words", examples=["a"])]


class Item(TypedDict):
    name: Annotated[str, Field(description="its name")]
    prices: Annotated[list[float], Field(description="what it costs")]


Items = Annotated[list[Item], Field(description="items", examples=[[{"name": "a", "prices": [1.5]}]])]


@plain
async def divide(a: Whole, b: Whole = 2) -> float:
    """Divide, which fails at times."""
    return a / b


@plain
async def tell(words: Words) -> str:
    """Say what was said, addresses and all."""
    return words


@plain
async def use_up(items: Items) -> int:
    """Count items, and leave nothing of them."""
    count = 0
    while items:
        items.pop()["prices"].clear()
        count += 1
    return count


class Choice(BaseModel):
    """One of two letters."""

    letter: Annotated[str, Field(description="a letter")]

    def model_post_init(self, _: Any) -> None:
        next(letter for letter in "ab" if letter == self.letter)


Choices = Annotated[Choice, Field(description="a choice", examples=[{"letter": "a"}])]


@plain
async def choose(choice: Choices) -> None:
    """Choose, of which nothing comes."""


@plain
async def pause(turns: Whole) -> int:
    """Wait for a while, or not at all."""
    for _ in range(turns):
        await asyncio.sleep(0)
    return turns


class Ways:
    """How `end` comes to its end."""

    @staticmethod
    def refuse() -> Any:
        raise Failure("E3502", "the service has no time, says ann@example.org")

    @staticmethod
    def leave() -> Any:
        raise SystemExit(3)

    @staticmethod
    def give_up() -> Any:
        raise asyncio.CancelledError

    @staticmethod
    def lie() -> Any:
        return "not a number"

    @staticmethod
    def babble() -> Any:
        return float("nan")

    @staticmethod
    def make_no_sense() -> Any:
        return object()

    @staticmethod
    def answer() -> Any:
        return 7


WAYS = [name for name in vars(Ways) if not name.startswith("_")]


@plain
async def end(way: Words, turns: Whole) -> int:
    """End in one way or another, at once or after a while."""
    for _ in range(turns):
        await asyncio.sleep(0)
    return getattr(Ways, way)()


ordinary = tool(version="1.0.0", mutation_class="read_only", namespace="line")


@ordinary
async def stroll(way: Words, turns: Whole) -> int:
    """The same, in a task of its own."""
    for _ in range(turns):
        await asyncio.sleep(0)
    return getattr(Ways, way)()


@ordinary
def stay(way: Words) -> int:
    """The same, in a thread."""
    return getattr(Ways, way)()


USES: dict[str, Callable[[Context], Any]] = {
    "nothing": lambda ctx: ctx.caller.id and ctx.remaining_s,
    "its progress": lambda ctx: ctx.progress("half", percent=50),
    "a part": lambda ctx: ctx.partial(1),
    "an interim result": lambda ctx: ctx.yield_result(1),
    "an effect": lambda ctx: ctx.effect("a:b", "UPDATE"),
    "a cost": lambda ctx: ctx.cost(network=1.0),
    "a session that it reads": lambda ctx: ctx.session.get("a"),
    "a session that it changes": lambda ctx: ctx.session.update(a=1),
    "content": lambda ctx: ctx.attach("text", text="more"),
    "a view": lambda ctx: ctx.show(summary="short"),
    "a statement": lambda ctx: ctx.attest("so", 1, lambda: 1),
    "a wrong statement": lambda ctx: ctx.attest("so", 1, lambda: 2),
    "a changed conversation": lambda ctx: ctx.modify_context(a=1),
    "its log": lambda ctx: ctx.log.info("said"),
    "its place in the trace": lambda ctx: ctx.attach("text", text=str(ctx.trace_headers)),
    "what it has not": lambda ctx: ctx.secret("a"),
}


@ordinary
async def consult(ctx: Context, use: Words, turns: Whole) -> int:
    """Use the context of the call."""
    for _ in range(turns):
        await asyncio.sleep(0)
    USES[use](ctx)
    return turns


@ordinary
def ponder(use: Words, ctx: Context) -> int:
    """The same, in a thread."""
    USES[use](ctx)
    return 1


@plain
async def glance(ctx: Context, use: Words) -> int:
    """The same, at once."""
    USES[use](ctx)
    return 1


LONG = 200


@tool(
    version="1.0.0", mutation_class="read_only", namespace="line", timeout_class="interactive", external_io=False,
    max_inline_chars=LONG, persist_output=True,
)  # fmt: skip
async def repeat(words: Words, times: Whole) -> str:
    """Words, so many times."""
    return words * times


TOOLS: tuple[Tool[..., Any], ...] = (
    divide, tell, use_up, choose, pause, end, repeat, stroll, stay, consult, ponder, glance,
)  # fmt: skip
LIGHT: dict[str, dict[str, Any]] = {
    "divide": {"a": 3, "b": 2}, "tell": {"words": "a"}, "use_up": {"items": []}, "pause": {"turns": 0},
    "choose": {"choice": {"letter": "a"}},
    "end": {"way": "answer", "turns": 0}, "repeat": {"words": "a", "times": 1},
    "stroll": {"way": "answer", "turns": 0}, "stay": {"way": "answer"}, "consult": {"use": "nothing", "turns": 0},
    "ponder": {"use": "nothing"}, "glance": {"use": "nothing"},
}  # fmt: skip


@dataclass
class Taken:
    """What the line did with each request it was offered."""

    whole: int = 0
    started: int = 0
    left: int = 0
    kinds: list[str] = field(default_factory=list[str])


def watch(app: Interlock) -> Taken:
    """Look at the line from outside, without getting in its way."""
    seen, line = Taken(), app.gateway.fast_path
    real = line.take

    def take(request: Request, tool: Prepared | None = None) -> Any:
        found = real(request, tool)
        if found is None:
            seen.left += 1
        elif isinstance(found, Result) or found.written is not None:
            seen.whole += 1
        else:
            seen.started += 1
        return found

    line.take = take
    return seen


async def warm(app: Interlock, caller: Caller | None = None) -> None:
    """The first call of a tool by a caller goes through the phases, and prepares the fast path for the others."""
    for name, arguments in LIGHT.items():
        assert (await app.call(f"line.{name}", arguments, caller=caller)).ok


def bystander(app: Interlock) -> None:
    """A hook that concerns no call, but must be looked up for each: no call takes the fast path."""
    app.hook(Hook(id="bystander", when="pre", tools="nobody.*", run=lambda seen: None))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def line_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("line")
    async with Interlock.open(home) as app:
        await admit(app, *TOOLS)
    return home


@asynccontextmanager
async def opened(home: Path, **options: Any) -> AsyncGenerator[Interlock]:
    # The tools have half a second. On this clock that is most of a minute, so that a busy machine cuts none off.
    options.setdefault("clock", Clock(monotonic=lambda: time.monotonic() / 100))
    async with Interlock.open(home, housekeeping=False, **options) as app:
        for one in TOOLS:
            app.catalog.attach(one)
        yield app


@pytest_asyncio.fixture
async def app(line_home: Path, tmp_path: Path) -> AsyncGenerator[Interlock]:
    async with opened(Path(shutil.copytree(line_home, tmp_path / "home"))) as one:
        await warm(one)
        yield one


@pytest.fixture(autouse=True, scope="module")
def nobody_has_changed_the_policy() -> Generator[None]:
    """Its files are looked at now and then, by a call that leaves the fast path for that: here, when a test says so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("interlock.authority.policy.LOOK_EVERY_S", 3600.0)
        yield


# Calls that take it


PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACES = (
    None, "mine", PARENT, PARENT[:-1] + "0", f"{PARENT} a=1,b=2", f"{PARENT} =", f"{PARENT}-x", f"cc{PARENT[2:]}-x",
    f"ff{PARENT[2:]}", PARENT.upper(), "00-0-0-", "", "a b", '"', "x" * 129, "\ud800",
)  # fmt: skip


@pytest.mark.parametrize("audit", ["durable", "batched"])
async def test_a_simple_read_takes_the_fast_path_and_its_record_is_that_of_the_phases(
    line_home: Path, tmp_path: Path, audit: str
) -> None:
    async with opened(Path(shutil.copytree(line_home, tmp_path / "home")), audit=audit) as app:
        seen = watch(app)
        first, second = [await app.call("line.divide", a=3, b=2) for _ in range(2)]
        await app.journal.drain()
        assert (seen.left, seen.whole, seen.started) == (1, 1, 0)
        assert (first.unwrap(), second.unwrap()) == (1.5, 1.5)
        told = [records(app, one.invocation_id)[0] for one in (first, second)]
        own = ("call", "timestamp", "traceId", "latencyMs")
        assert [{name: fact for name, fact in one.items() if name not in own} for one in told][1:] == [
            {name: fact for name, fact in told[0].items() if name not in own}
        ]
        assert told[1]["phases"] == ["request", "validate", "authorize", "execute", "verify", "return"]


@pytest.mark.parametrize("trace", TRACES)
async def test_a_read_in_the_trace_of_its_caller_takes_the_fast_path(app: Interlock, trace: str | None) -> None:
    seen = watch(app)
    read = await app.call("line.divide", {"a": 3, "b": 2}, trace_id=trace)
    placed = await app.call("line.glance", {"use": "its place in the trace"}, trace_id=trace)
    assert (seen.left, seen.whole, seen.started) == (0, 1, 1)
    bystander(app)
    aside = await app.call("line.glance", {"use": "its place in the trace"}, trace_id=trace)
    assert seen.left == 1
    own = {one.trace_id for one in (read, placed, aside)}
    assert own == ({PARENT[3:35]} if trace and PARENT[3:35] in trace else {"mine"}) or len(own) == 3
    told = [ast.literal_eval(one.content[0]["text"]) for one in (placed, aside)]
    assert [one.get("tracestate") for one in told] == ["a=1,b=2" if trace and "a=1" in trace else None] * 2
    for result, headers in zip((placed, aside), told, strict=True):
        at = headers["traceparent"].split("-")
        assert at[1] == w3c.trace_hex(result.trace_id)
        assert (at[2:] == PARENT.split("-")[2:]) == (f"{PARENT} " in f"{trace} " or trace == f"cc{PARENT[2:]}-x")


@pytest.mark.parametrize(
    "options",
    [
        {"session": "s"}, {"task": "t"}, {"timeout_s": 5.0}, {"dry_run": True}, {"key": "k"}, {"on_progress": print},
        {"deadline": interlock.Deadline(at=1e12)},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
async def test_a_call_with_anything_particular_about_it_goes_through_the_phases(
    app: Interlock, options: dict[str, Any]
) -> None:
    seen = watch(app)
    result = await app.call("line.divide", {"a": 3, "b": 2}, **options)
    assert result.ok
    assert (seen.left, seen.whole) == (1, 0)


@pytest.mark.parametrize("arguments", [{"a": 3}, {"a": "3", "b": 2}, {"a": 3, "b": 2, "c": 1}, {"a": float("nan")}])
async def test_an_input_that_needs_more_than_a_nod_goes_through_the_phases(
    app: Interlock, arguments: dict[str, Any]
) -> None:
    seen = watch(app)
    await app.call("line.divide", arguments)
    assert (seen.left, seen.whole) == (1, 0)


async def test_budgets_limits_prices_and_traces_keep_every_call_off_the_line(line_home: Path, tmp_path: Path) -> None:
    for number, settings in enumerate(
        (
            {"rate_limits": [{"per": "caller", "limit": 100, "window_s": 60}]},
            {"budgets": [{"per": "tenant", "limit": 1.0}]},
            {"trace_ratio": 1.0},
        )
    ):
        async with opened(Path(shutil.copytree(line_home, tmp_path / str(number))), **settings) as app:
            seen = watch(app)
            for _ in range(3):
                assert (await app.call("line.divide", a=3, b=2)).ok
            assert (seen.left, seen.whole, seen.started) == (3, 0, 0)


# That nobody can tell


PRIVATE = ["write to ann@example.org", "key AKIAIOSFODNN7EXAMPLE", "4111111111111111"]
items = st.fixed_dictionaries({"name": st.text(), "prices": st.lists(st.integers() | st.floats())})
arguments_of: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "divide": st.fixed_dictionaries(
        {"a": st.integers() | st.floats() | st.text(max_size=3) | st.none()},
        optional={"b": st.integers(-1, 1), "c": st.none()},
    ),
    "tell": st.fixed_dictionaries({"words": st.text() | st.sampled_from(PRIVATE)}),
    "use_up": st.fixed_dictionaries({"items": st.lists(items, max_size=3)}),
    "choose": st.fixed_dictionaries({"choice": st.fixed_dictionaries({"letter": st.sampled_from("abc")})}),
    "pause": st.fixed_dictionaries({"turns": st.integers(0, 3)}),
    "end": st.fixed_dictionaries({"way": st.sampled_from(WAYS), "turns": st.integers(0, 2)}),
    "repeat": st.fixed_dictionaries({"words": st.text(max_size=4), "times": st.integers(0, 2 * LONG)}),
    "stroll": st.fixed_dictionaries({"way": st.sampled_from(WAYS), "turns": st.integers(0, 2)}),
    "stay": st.fixed_dictionaries({"way": st.sampled_from(WAYS)}),
    "consult": st.fixed_dictionaries({"use": st.sampled_from(list(USES)), "turns": st.integers(0, 2)}),
    "ponder": st.fixed_dictionaries({"use": st.sampled_from(list(USES))}),
    "glance": st.fixed_dictionaries({"use": st.sampled_from(list(USES))}),
}  # fmt: skip
CALLERS = (None, Caller(id="user:ann", agent="helper", scopes=frozenset({"x"})), Caller(id="user:bob", tenant="other"))
calls = st.lists(
    st.sampled_from(sorted(arguments_of)).flatmap(
        lambda name: st.tuples(
            st.just(name), arguments_of[name], st.sampled_from(CALLERS), st.none() | st.sampled_from(TRACES)
        )
    ),
    min_size=1,
    max_size=8,
)


Made = list[tuple[str, dict[str, Any], Caller | None, str | None]]


async def _history(home: Path, made: Made, *, aside: bool) -> Any:
    """Everything that some calls leave behind: their results, the journal, the metrics."""
    clock = FakeClock(seed="line")
    async with opened(home, clock=clock.clock) as app:
        for caller in CALLERS:
            await warm(app, caller)
        if aside:
            bystander(app)
        seen = watch(app)
        told: list[Any] = []
        for name, arguments, caller, trace in made:
            before = repr(arguments)
            result = await app.call(f"line.{name}", arguments, caller=caller, trace_id=trace)
            assert repr(arguments) == before
            told.append(repr(result.document()))
        await app.journal.drain()
        # What the process takes up differs from run to run.
        metrics = [one for one in (await app.gateway.telemetry.metrics.render()).splitlines() if b'"memory"' not in one]
        rows = app.journal.reader.all("SELECT kind, call, body FROM journal ORDER BY seq", ())
        alerts = sorted(app.gateway.telemetry.metrics.signals.items())
        assert seen.whole + seen.started == 0 if aside else seen.left + seen.whole + seen.started == len(made)
    return told, metrics, rows, alerts


@given(calls)
def test_no_result_record_metric_or_alert_tells_the_line_from_the_phases(line_home: Path, made: Made) -> None:
    async def both() -> None:
        with TemporaryDirectory() as place:
            homes = [Path(shutil.copytree(line_home, Path(place) / name)) for name in ("line", "phases")]
            line = await _history(homes[0], made, aside=False)
            phases = await _history(homes[1], made, aside=True)
        for one, other in zip(line, phases, strict=True):
            assert one == other

    asyncio.run(both())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("turns", [0, 1])
async def test_a_function_is_called_once_however_it_ends(
    app: Interlock, monkeypatch: pytest.MonkeyPatch, way: str, turns: int
) -> None:
    runs: list[str] = []
    real = getattr(Ways, way)

    def count() -> Any:
        runs.append(way)
        return real()

    monkeypatch.setattr(Ways, way, staticmethod(count))
    seen = watch(app)
    result = await app.call("line.end", way=way, turns=turns)
    assert runs == [way]
    assert seen.left == 0
    assert seen.whole == (way == "answer" and turns == 0)
    (record,) = records(app, result.invocation_id)
    assert record["states"][-1] == result.state


async def test_an_argument_that_cannot_be_made_is_no_success(app: Interlock) -> None:
    seen = watch(app)
    assert code(await app.call("line.choose", choice={"letter": "c"})) == "E3401"
    assert (seen.started, seen.whole) == (1, 0)


@pytest.mark.parametrize("turns", [0, 1])
async def test_a_function_may_return_a_task_in_place_of_a_coroutine(
    app: Interlock, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    real = pause.function

    def schedule(turns: int) -> asyncio.Task[int]:
        return asyncio.ensure_future(real(turns))

    monkeypatch.setattr(pause, "function", schedule)
    seen = watch(app)
    assert (await app.call("line.pause", turns=turns)).unwrap() == turns
    assert seen.started == 1


@pytest.mark.parametrize("inline_s", [0.0, 3600.0])
async def test_a_function_that_fails_lets_go_of_what_it_held(
    app: Interlock, monkeypatch: pytest.MonkeyPatch, inline_s: float
) -> None:
    """Whether its record was written on the loop or by the writer's thread."""
    monkeypatch.setattr("interlock.store.journal.INLINE_BELOW_S", inline_s)
    held: list[weakref.ref[Choice]] = []

    def fail() -> Any:
        choice = Choice(letter="a")
        held.append(weakref.ref(choice))
        raise ValueError

    monkeypatch.setattr(Ways, "answer", staticmethod(fail))
    gc.disable()  # which would let go of it too, in its own time
    try:
        assert code(await app.call("line.end", way="answer", turns=0)) == "E3401"
        assert held[0]() is None
    finally:
        gc.enable()


# What it stands on


async def test_whatever_forbids_a_tool_is_heeded_at_the_next_call(app: Interlock) -> None:
    seen = watch(app)
    assert (await app.call("line.tell", words="a")).ok
    assert seen.whole == 1
    policy = app.policy.path
    rules = policy.read_text()
    policy.write_text(rules + '\nforbid (principal, action, resource == Tool::"line.tell");\n')
    app.policy._looked_at = float("-inf")  # pyright: ignore[reportPrivateUsage] - as when its time has come
    assert code(await app.call("line.tell", words="a")) == "E3206"
    assert seen.whole == 1


async def test_content_in_quarantine_is_not_run(app: Interlock) -> None:
    prepared = await app.catalog.prepared("line.tell", None)
    await app.journal.commit(quarantine.impose(prepared.digest, prepared.ref, "a-call", "it lied"))
    await app.gateway.quarantine.look()
    # The registry has changed, so tools are prepared anew at its next look. It looks now, not when its time has come.
    await app.catalog.forget()
    assert (await app.call("line.divide", a=1, b=1)).ok
    seen = watch(app)
    assert code(await app.call("line.tell", words="a")) == "E3210"
    assert (await app.call("line.divide", a=1, b=1)).ok
    assert (seen.left, seen.whole) == (1, 1)


async def test_a_token_that_is_revoked_goes_no_further(app: Interlock) -> None:
    app.issuer_keys.init("EdDSA")
    await app.identities.register(Identity(did=AGENT), by="test")
    token = await app.tokens.issue(subject=AGENT, by=app.caller, tools=[ToolGrant("line.tell")])
    for _ in range(2):
        assert (await app.call("line.tell", words="a", token=token)).ok
    seen = watch(app)
    assert (await app.call("line.tell", words="a", token=token)).ok
    assert seen.whole == 1
    assert code(await app.call("line.divide", a=1, b=1, token=token)) == "E3204"
    await app.tokens.revoke(token, reason="lost", by=app.caller)
    assert code(await app.call("line.tell", words="a", token=token)) == "E3201"
    assert seen.whole == 1


async def test_the_line_is_taken_again_by_a_caller_whose_token_was_verified_anew(app: Interlock) -> None:
    """Which happens every minute, and whenever anybody's token or identity changes."""
    app.issuer_keys.init("EdDSA")
    for did in (AGENT, did_of("other")):
        await app.identities.register(Identity(did=did), by="test")
    token, others = [
        await app.tokens.issue(subject=did, by=app.caller, tools=[ToolGrant("line.tell")])
        for did in (AGENT, did_of("other"))
    ]
    for _ in range(2):
        assert (await app.call("line.tell", words="a", token=token)).ok
    before = app.tokens.verifier.known(token)
    await app.tokens.revoke(others, reason="lost", by=app.caller)
    assert (await app.call("line.tell", words="a", token=token)).ok
    assert app.tokens.verifier.known(token) is not before
    seen = watch(app)
    assert (await app.call("line.tell", words="a", token=token)).ok
    assert (seen.left, seen.whole) == (0, 1)


async def test_a_hook_or_a_listener_hears_of_every_call_from_then_on(app: Interlock) -> None:
    seen = watch(app)
    heard: list[Event] = []
    app.listen(heard.append)
    await app.call("line.tell", words="a")
    assert {"tool.invocation.started", "tool.invocation.succeeded"} <= {event.type for event in heard}
    assert (seen.whole, seen.left) == (0, 1)


@pytest.mark.parametrize("aside", [False, True], ids=["line", "phases"])
async def test_whoever_comes_to_listen_while_a_read_runs_hears_of_its_end(
    app: Interlock, monkeypatch: pytest.MonkeyPatch, aside: bool
) -> None:
    if aside:
        bystander(app)
    heard: list[Event] = []

    def answer() -> Any:
        app.listen(heard.append)
        return 7

    monkeypatch.setattr(Ways, "answer", staticmethod(answer))
    result = await app.call("line.end", way="answer", turns=0)
    assert [event.type for event in heard] == ["tool.invocation.succeeded", "tool.result.created"]
    assert {event.invocation_id for event in heard} == {result.invocation_id}


@pytest.mark.parametrize("aside", [False, True], ids=["line", "phases"])
async def test_a_hook_that_comes_while_a_read_runs_can_still_block_its_result(
    app: Interlock, monkeypatch: pytest.MonkeyPatch, aside: bool
) -> None:
    if aside:
        bystander(app)

    def block(seen: Any) -> Any:
        raise ValueError

    def answer() -> Any:
        app.hook(Hook(id="late", when="post", run=block))
        return 7

    monkeypatch.setattr(Ways, "answer", staticmethod(answer))
    assert code(await app.call("line.end", way="answer", turns=0)) == "E3211"


async def test_a_caller_in_a_loop_is_told_of_though_the_line_is_short(app: Interlock) -> None:
    seen = watch(app)
    for _ in range(app.settings.loops.identical + 5):
        assert (await app.call("line.tell", words="again")).ok
    assert seen.left == 0
    assert app.gateway.telemetry.metrics.signals["RUNAWAY_LOOP"] == 1


# The wait for the disk


@contextmanager
def held(app: Interlock) -> Generator[None]:
    """The journal in another's hands: nothing is written meanwhile."""
    with busy(app.home):
        yield


@pytest.mark.parametrize("aside", [False, True], ids=["line", "phases"])
async def test_a_caller_who_leaves_while_the_record_is_written_leaves_one_record(app: Interlock, aside: bool) -> None:
    if aside:
        bystander(app)
    before = len(records(app))
    with held(app):
        caller = asyncio.create_task(app.call("line.tell", words="a"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await caller
    await app.journal.drain()
    (record,) = records(app)[before:]
    assert record["states"][-1] == "succeeded"


@pytest.mark.parametrize("aside", [False, True], ids=["line", "phases"])
async def test_whoever_comes_to_listen_while_the_record_is_written_hears_of_it(app: Interlock, aside: bool) -> None:
    if aside:
        bystander(app)
    heard: list[Event] = []
    with held(app):
        caller = asyncio.create_task(app.call("line.tell", words="a"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        app.listen(heard.append)
    assert (await caller).ok
    assert [event.type for event in heard] == ["tool.invocation.succeeded", "tool.result.created"]


@pytest.mark.parametrize("aside", [False, True], ids=["line", "phases"])
async def test_a_read_that_cannot_be_recorded_is_no_success(
    app: Interlock, monkeypatch: pytest.MonkeyPatch, aside: bool
) -> None:
    impatient(app.home, app.journal, monkeypatch)
    if aside:
        bystander(app)
    with held(app):
        result = await app.call("line.tell", words="a")
    assert (code(result), result.value) == ("E3803", None)
    assert (await app.call("line.tell", words="a")).ok


# The grant


async def test_a_read_without_a_grant_is_not_started(app: Interlock) -> None:
    prepared = await app.catalog.prepared("line.tell", None)
    given = {"words": "a"}
    read = FastRead(app.request("line.tell", given), app.caller, prepared, given, 0, 0.0, b"", None)
    for executor in (make(site()), app.gateway.runner):
        with pytest.raises(Failure) as refused:
            executor.start(read, None)
        assert refused.value.code == "E3000"


def test_only_the_authorizer_grants_and_only_the_executor_begins() -> None:
    """A static look at the whole package."""
    granters: set[str] = set()
    beginners: set[str] = set()
    for name, node in source.nodes_with(".grant", "StartedFunction("):
        if isinstance(node, ast.Attribute) and node.attr == "grant" and isinstance(node.ctx, ast.Store):
            granters.add(name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "StartedFunction":
            beginners.add(name)
    assert granters == {"call/phases.py", "gateway/authorize.py"}  # the former with nothing
    assert beginners == {"executors/function.py"}


# Functions that run apart


RELEASE, RUNS = threading.Event(), list[str]()


@ordinary
async def linger(words: Words) -> str:
    """Wait until it is released, whoever cancels it."""
    RUNS.append(words)
    while words == "wait" and not RELEASE.is_set():
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.001)
    return words


@ordinary
def hang(words: Words) -> str:
    """The same, in a thread."""
    RUNS.append(words)
    if words == "wait":
        RELEASE.wait(30)
    return words


@dataclass
class Apart:
    """A read that was called before, so that it takes the fast path."""

    app: Interlock
    name: str

    async def begin(self) -> asyncio.Task[Result]:
        seen = watch(self.app)
        call = asyncio.create_task(self.app.call(f"line.{self.name}", words="wait"))
        await until(lambda: "wait" in RUNS)
        assert (seen.left, seen.started) == (0, 1)
        return call


@asynccontextmanager
async def apart_at(home: Path, name: str) -> AsyncGenerator[Apart]:
    RELEASE.clear()
    RUNS.clear()
    try:
        async with opened(home) as app:
            await admit(app, linger, hang)
            assert (await app.call(f"line.{name}", words="a")).ok
            yield Apart(app, name)
    finally:
        RELEASE.set()


APART = pytest.mark.parametrize("name", ["linger", "hang"])


@APART
async def test_a_read_that_takes_long_goes_on_in_the_phases(
    line_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("interlock.gateway.execution.active_calls.SLOW_AFTER_S", 0.0)
    async with apart_at(Path(shutil.copytree(line_home, tmp_path / "home")), name) as place:
        call = await place.begin()
        active = place.app.gateway.runner.active
        await until(lambda: active._calls)  # pyright: ignore[reportPrivateUsage]
        RELEASE.set()
        result = await call
        assert result.unwrap() == "wait"
        assert RUNS.count("wait") == 1
        (record,) = records(place.app, result.invocation_id)
        assert record["status"] == "SUCCESS"


@APART
async def test_a_read_that_has_no_time_left_is_answered_although_its_function_goes_on(
    line_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("interlock.gateway.execution.active_calls.SLOW_AFTER_S", 0.0)
    async with apart_at(Path(shutil.copytree(line_home, tmp_path / "home")), name) as place:
        monkeypatch.setattr("interlock.gateway.execution.active_calls.NOTE_AFTER_S", 1e9)
        call = await place.begin()
        active = place.app.gateway.runner.active
        await until(lambda: active._calls)  # pyright: ignore[reportPrivateUsage]
        (running,) = active._calls.values()  # pyright: ignore[reportPrivateUsage]
        running.deadline = float("-inf")
        assert code(await call) == "E3402"
        assert place.app.gateway.observer.metrics["TOOL_THREAD_HUNG"] == (name == "hang")


@APART
async def test_a_read_is_cancelled_by_whoever_awaits_it(line_home: Path, tmp_path: Path, name: str) -> None:
    async with apart_at(Path(shutil.copytree(line_home, tmp_path / "home")), name) as place:
        call = await place.begin()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert call.cancelling() == 1
        (body,) = place.app.journal.reader.one("SELECT body FROM journal WHERE kind = 'closed' ORDER BY seq DESC", ())
        assert orjson.loads(body)["error_code"] == "E3703"
        assert place.app.gateway.observer.metrics["TOOL_THREAD_HUNG"] == (name == "hang")


async def test_a_read_ends_when_a_timeout_around_it_does(line_home: Path, tmp_path: Path) -> None:
    async with apart_at(Path(shutil.copytree(line_home, tmp_path / "home")), "linger") as place:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await place.app.call("line.linger", words="wait")
        assert (await place.app.call("line.linger", words="a")).ok


@APART
async def test_a_read_is_cut_off_when_interlock_closes(line_home: Path, tmp_path: Path, name: str) -> None:
    async with apart_at(Path(shutil.copytree(line_home, tmp_path / "home")), name) as place:
        call = await place.begin()
    assert code(await call) == "E3703"

"""LangChain tools as an upstream."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from interlock import Interlock
from interlock.call.connector import Connector, RemoteCall
from interlock.call.context import Caller
from interlock.contract.contract import contract_of
from interlock.contract.manifest import CircuitBreakerConfig, RetryPolicy
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.schema import Schema
from interlock.registry.admission import TrialEvidence, examine
from interlock.upstreams.langchain import RESULT_SCHEMA, LangChainConfig, LangChainUpstream
from interlock.upstreams.manifests import import_all
from tests.support.calls import SIX, records
from tests.support.hostile import loop_is_free
from tests.support.upstream_servers import remote_call
from tests.support.upstreams import MODULE
from tests.upstreams.langchain_hostile import HUNG

HOSTILE = "tests.upstreams.langchain_hostile"


def upstream(module: str = MODULE, **config: Any) -> Connector:
    return LangChainUpstream("chain", LangChainConfig(module=module, **config), clock=Clock())


@asynccontextmanager
async def opened(module: str, **config: Any) -> AsyncGenerator[Connector]:
    one = upstream(module, **config)
    await one.discover()
    try:
        yield one
    finally:
        HUNG.close()
        await one.close()
        HUNG.event.clear()


async def called(tool: str, *, seconds: float = 60.0, **arguments: Any) -> Any:
    clock = Clock()
    call = RemoteCall(
        tool=f"chain.{tool}@1.0.0",
        native={"protocol": "langchain", "module": MODULE, "tool": tool},
        arguments=arguments,
        invocation_id="inv1",
        caller=Caller(id="ann"),
        deadline=clock.monotonic() + seconds,
        monotonic=clock.monotonic,
        traceparent="",
        retry=RetryPolicy.model_validate({}),
        breaker=CircuitBreakerConfig.model_validate({}),
        key="key-1",
        credentials={"maps": "key-for-secret-17"},
    )
    one = upstream(credentials={"token": "maps"})
    try:
        return await one.call(call)
    finally:
        await one.close()


def _call(tool: str, seconds: float = 60.0) -> RemoteCall:
    native = {"protocol": "langchain", "module": HOSTILE, "tool": tool}
    return remote_call(native, left_s=seconds)


async def test_tools_that_hang_take_no_thread_but_their_own() -> None:
    one = upstream(HOSTILE, max_threads=40)
    await one.discover()
    loop = asyncio.get_running_loop()
    with closing(HUNG):
        hung = await asyncio.gather(*(one.call(_call("hang", 0.5)) for _ in range(40)), return_exceptions=True)
        assert {type(outcome) for outcome in hung} == {Failure}
        assert {outcome.code for outcome in hung if isinstance(outcome, Failure)} == {"E3503"}
        async with asyncio.timeout(30):
            assert await asyncio.to_thread(lambda: "free") == "free"
            assert await loop.getaddrinfo("127.0.0.1", 1), "names are still resolved"
        with pytest.raises(Failure) as full:
            await one.call(_call("hang"))
        assert (full.value.code, full.value.details) == ("E3502", {"sent": False})
        assert "40 threads" in full.value.message
    outcome: Any = None
    for _ in range(3000):  # until the threads have ended, which are counted no longer then
        (outcome,) = await asyncio.gather(one.call(_call("quick")), return_exceptions=True)
        if outcome == "done":
            break
        await asyncio.sleep(0.01)
    assert outcome == "done"


@pytest.mark.shows("LangChain tools", "results bounded")
async def test_words_and_values_of_any_size_are_bounded() -> None:
    one = upstream(HOSTILE)
    await one.discover()
    async with loop_is_free():
        with pytest.raises(Failure) as words:
            await one.call(_call("complain"))
        with pytest.raises(Failure) as values:
            await one.call(_call("many"))
        with pytest.raises(Failure) as large:
            await one.call(_call("large"))
        with pytest.raises(Failure) as ended:
            await one.call(_call("leave"))
    assert (words.value.code, len(words.value.message) < 600) == ("E3401", True)
    assert (values.value.code, "max_response_values" in values.value.message) == ("E3416", True)
    assert (large.value.code, "max_response_bytes" in large.value.message) == ("E3416", True)
    assert ended.value.code == "E3401"


ENDINGS = ["SystemExit", "KeyboardInterrupt", "CancelledError", "GeneratorExit", "Outburst"]


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        *((f"async_{name}", f"failed with {name}") for name in ENDINGS),
        ("mute", "Mute, whose text cannot be read: RuntimeError"),
        ("leaving", "Leaving, whose text cannot be read: SystemExit"),
        ("broken", "returned a Broken, which JSON cannot hold"),
        ("exiting", "returned a Exiting, which JSON cannot hold"),
    ],
)
async def test_whatever_a_tool_raises_ends_its_call_and_nothing_else(tool: str, words: str) -> None:
    async with opened(HOSTILE) as one, loop_is_free(held_s=0.2):
        beside = asyncio.create_task(one.call(_call("insist")))
        with pytest.raises(Failure) as caught:
            await one.call(_call(tool))
        assert (caught.value.code, words in caught.value.message) == ("E3401", True), caught.value.message
        assert "17" not in caught.value.message
        assert await one.call(_call("calm")) == "done"
        HUNG.close()
        assert await beside == "at last", "a call beside it goes on"


async def test_coroutines_that_block_or_swallow_their_cancellation_are_left_and_counted() -> None:
    async with opened(HOSTILE, max_threads=3) as one:
        HUNG.begun.clear()
        for tool in ("insist", "block"):
            while tool not in HUNG.begun:  # one that is cancelled before it begins leaves nothing
                assert await _outcome(one, tool, 0.2) == "E3503"
        assert await _outcome(one, "calm", 0.05) == "E3503", "it cannot begin"
        with pytest.raises(Failure) as full:
            await one.call(_call("calm"))
        assert (full.value.code, full.value.details) == ("E3502", {"sent": False})
        assert await one.call(_call("quick")) == "done", "functions have threads of their own"
        HUNG.close()
        async with asyncio.timeout(30):
            while (outcome := await _outcome(one, "calm")) != "done":
                assert outcome == "E3502"
                await asyncio.sleep(0.01)


async def _outcome(one: Connector, tool: str, seconds: float = 60.0) -> Any:
    try:
        return await one.call(_call(tool, seconds))
    except Failure as failure:
        return failure.code


async def test_a_large_result_of_a_coroutine_is_dumped_apart_from_the_loop() -> None:
    async with opened(HOSTILE, max_response_values=200_000) as one, loop_is_free(held_s=0.2):
        assert len((await one.call(_call("heavy")))["parts"]) == 40_000


@pytest.mark.parametrize("tool", ["rewrite", "rewrite_plainly"])
async def test_a_tool_that_changes_its_arguments_changes_its_own_copy(tool: str) -> None:
    async with opened(HOSTILE) as one:
        call = remote_call(_call(tool).native, arguments={"given": {"list": [1, 2]}}, left_s=60)
        for _ in range(2):
            assert await one.call(call) == 3
        assert call.arguments == {"given": {"list": [1, 2]}}


HUGE = """
from langchain_core.tools import StructuredTool, Tool

def never(text: str) -> str:
    return "never"

class Shy(StructuredTool):
    @property
    def tool_call_schema(self):
        raise SystemExit

wordy = StructuredTool.from_function(never, name="wordy", description="Says very much. " * 100_000)
longer = StructuredTool.from_function(never, name="longer", description="Says very much. " * 600_000)
named = Tool(name="n" * 10_000_000, func=never, description="Has a very long name")
shy = Shy.from_function(never, name="shy", description="Says nothing of its input")
"""


async def test_huge_names_and_descriptions_are_read_apart_from_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "huge_module_of_a_test"
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / f"{name}.py").write_text(HUGE)
    async with AsyncExitStack() as stack:
        app = await stack.enter_async_context(Interlock.open(tmp_path / "home", housekeeping=False))
        await app.upstreams.add("plain", "langchain", {"module": MODULE}, by=app.caller)  # what is imported first
        await stack.enter_async_context(loop_is_free())
        report = await app.upstreams.add("chain", "langchain", {"module": name}, by=app.caller)
        states = {one.name[:10]: one.state for one in report.tools}
        assert states == {"wordy": "admitted", "longer": "refused", "n" * 10: "refused", "shy": "refused"}
        assert max(len(one.name) for one in report.tools) <= 200, "what is stored of it is short"
        shown = (await app.catalog.resolve("chain.wordy")).contract.manifest.description
        assert len(shown) <= 2000
    monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.shows("LangChain tools", "discovery")
@pytest.mark.proves("EXEC-12")
async def test_every_tool_of_a_module_becomes_a_contract_that_admission_takes() -> None:
    found = await upstream().discover()
    assert [tool.name for tool in found.tools] == [
        "borrow", "count", "crash", "forever", "late", "locate", "refuse", "shout", "strange",
    ]  # fmt: skip
    assert found.refused == []
    for one in import_all(found.tools, upstream="chain", kind="langchain", versions="1.0.0"):
        assert one.manifest is not None, one.refused
        digest = contract_of(one.manifest).digest
        assert examine(one.manifest, digest, {}, TrialEvidence(digest, True, "trial", "")).admitted
        assert one.manifest.protocol == "langchain"


@pytest.mark.shows("LangChain tools", "call")
@pytest.mark.proves("EXEC-12")
async def test_a_tool_is_added_and_called_like_any_other(tmp_path: Path) -> None:
    overlay = {"tools": {"shout": {"mutation_class": "read_only"}, "crash": {"mutation_class": "read_only"}}}
    async with Interlock.open(tmp_path) as app:
        await app.upstreams.add("chain", "langchain", {"module": MODULE}, by=app.caller, overlay=overlay)
        assert (await app.call("chain.shout", {"text": "a"})).unwrap() == "A"
        assert [record["phases"] for record in records(app)] == [SIX]
        refused = await app.call("chain.shout", {"text": 5, "times": "many"})
        assert refused.error is not None
        assert refused.error.code == "E3301"
        failed = await app.call("chain.crash", {"text": "x"})
        assert failed.error is not None
        assert (failed.error.code, failed.error.message) == ("E3401", "`crash` failed with ValueError")
        # What nobody called harmless is asked about first.
        assert (await app.call("chain.count", {"words": []}, key="k1")).pending


@pytest.mark.shows("LangChain tools", "no resent writes")
@pytest.mark.parametrize("kind", ["read_only", "write_irreversible"])
async def test_a_tool_that_fails_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "counting_chain.py").write_text(COUNTING)
    sys.modules.pop("counting_chain", None)
    importlib.invalidate_caches()
    overlay = {"tools": {"append": {"mutation_class": kind}}}
    async with Interlock.open(tmp_path / "home", housekeeping=False) as app:
        await app.upstreams.add("chain", "langchain", {"module": "counting_chain"}, by=app.caller, overlay=overlay)
        runs = importlib.import_module("counting_chain").RUNS
        runs.clear()
        first = await app.call("chain.append", {"error": "timeout"}, key="k1")
        if first.pending:
            reviewer = Caller(id="local:reviewer", groups=frozenset({"approvers"}))
            await app.approvals.approve(first.metadata["pending"]["ticketId"], by=reviewer)
            first = await app.call("chain.append", {"error": "timeout"}, key="k1")
        assert first.error is not None
        assert first.error.code == "E3401"
        assert runs == ["timeout"]


COUNTING = """
from langchain_core.tools import tool

RUNS = []

@tool
def append(error: str) -> str:
    \"\"\"Add a line to a list, and fail.\"\"\"
    RUNS.append(error)
    raise TimeoutError(error)
"""


async def test_what_langchain_injects_is_not_a_parameter() -> None:
    takes = {tool.name: Schema(tool.input_schema) for tool in (await upstream().discover()).tools}
    assert set(takes["locate"].properties) == {"city"}
    assert set(takes["borrow"].properties) == set()
    assert takes["shout"].defaults == (("times", 1),)
    assert not takes["shout"].valid({"text": 5})


async def test_results_are_json() -> None:
    assert await called("shout", text="a", times=2) == "AA"
    assert await called("count", words=["a", "b", "a"]) == {"a": 2, "b": 1}
    place = await called("locate", city="London")
    assert place == {"city": "London", "lat": 51.5}
    assert Schema(RESULT_SCHEMA).valid(place)


@pytest.mark.shows("LangChain tools", "credentials")
async def test_a_tool_finds_what_was_lent_to_the_call() -> None:
    assert await called("borrow") == [{"token": "key-for-secret-17"}, "key-1", "inv1"]


@pytest.mark.shows("LangChain tools", "errors")
@pytest.mark.parametrize(
    ("tool", "code", "words"),
    [
        ("refuse", "E3401", "no such thing as x"),
        ("crash", "E3401", "`crash` failed with ValueError"),
        ("late", "E3401", "`late` failed with TimeoutError"),
        ("gone", "E3502", "no longer in"),
    ],
)
async def test_a_failure_says_what_it_may(tool: str, code: str, words: str) -> None:
    with pytest.raises(Failure) as caught:
        await called(tool, text="x")
    assert caught.value.code == code
    assert words in caught.value.message
    assert "secret" not in caught.value.message
    assert "Traceback" not in caught.value.message


async def test_what_json_cannot_hold_is_the_tools_failure() -> None:
    with pytest.raises(Failure) as caught:
        await called("strange")
    assert (caught.value.code, caught.value.message) == ("E3401", "`strange` returned a object, which JSON cannot hold")


@pytest.mark.shows("LangChain tools", "deadline")
async def test_a_tool_that_gives_no_answer_is_not_waited_for_beyond_the_deadline() -> None:
    with pytest.raises(Failure) as caught:
        await called("forever", seconds=0.01)
    assert caught.value.code == "E3503"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no module named"),
        ("raise RuntimeError('password 17')", "cannot be loaded: RuntimeError"),
        ("raise SystemExit", "cannot be loaded: SystemExit"),
        ("x = 1", "no LangChain tools"),
    ],
)
async def test_a_module_that_cannot_be_used_is_refused(
    text: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "chain_module_of_a_test"
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, name, raising=False)
    if text is not None:
        (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(Failure) as caught:
        await upstream(name).discover()
    assert caught.value.code == "E3105"
    assert words in caught.value.message
    assert "17" not in caught.value.message
    with pytest.raises(Failure) as away:
        await upstream(name).probe()
    assert away.value.code == "E3502"
    monkeypatch.delitem(sys.modules, name, raising=False)


async def test_a_connector_that_was_closed_loads_again_when_needed() -> None:
    connector = upstream()
    await connector.probe()
    await connector.close()
    assert len((await connector.discover()).tools) == 9


INCOMPLETE = """
from collections.abc import Callable
from langchain_core.tools import StructuredTool, Tool, tool
from pydantic import BaseModel

class Odd(BaseModel):
    odd: Callable[[], int]

@tool
def good(text: str) -> str:
    "Say a text again."
    return text

def _never(**given: object) -> str:
    return "never"

REMOTE = {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/schema.json"}}}
WILD = {"type": "object", "patternProperties": {"((a{1000}){1000}){1000}": {"type": "string"}}}
odd = StructuredTool.from_function(_never, name="odd", description="Takes what is no JSON", args_schema=Odd)
remote = StructuredTool.from_function(_never, name="remote", description="Takes what is elsewhere", args_schema=REMOTE)
wild = StructuredTool.from_function(_never, name="wild", description="Takes what nobody can check", args_schema=WILD)
mute = Tool(name="mute", func=_never, description="")
blank = Tool(name="blank", func=_never, description="  ")
misnamed = Tool(name="a tool!", func=_never, description="Has a name that no model can write")
long_named = Tool(name="a" * 65, func=_never, description="Has a name that is too long")
"""


@pytest.mark.proves("EXEC-12")
async def test_an_incomplete_tool_is_refused_with_a_reason_and_the_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "incomplete_module_of_a_test"
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / f"{name}.py").write_text(INCOMPLETE)
    overlay = {"defaults": {"mutation_class": "read_only"}}
    async with Interlock.open(tmp_path / "home", housekeeping=False) as app:
        report = await app.upstreams.add("chain", "langchain", {"module": name}, by=app.caller, overlay=overlay)
        states = {one.name: (one.state, one.reason) for one in report.tools}
        assert {name: state for name, (state, _) in states.items()} == {
            "good": "admitted", "odd": "refused", "remote": "refused", "wild": "refused", "mute": "refused",
            "blank": "refused", "a tool!": "refused", "a" * 65: "refused",
        }  # fmt: skip
        assert (
            states["mute"][1]
            == states["blank"][1]
            == ("it does not say what it does; give it a description or a docstring")
        )
        assert "letters, digits" in states["a tool!"][1]
        assert "letters, digits" in states["a" * 65][1]
        assert (await app.call("chain.good", text="a")).value == "a"
        assert all(reason for name, (_, reason) in states.items() if name != "good"), "it says why"
        for refused in ("odd", "remote", "wild", "mute", "blank", "a_tool"):
            missing = await app.call(f"chain.{refused}")
            assert missing.error is not None
            assert missing.error.code == "E3101"
    monkeypatch.delitem(sys.modules, name, raising=False)

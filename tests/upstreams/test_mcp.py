"""MCP servers as upstreams: found, called, watched and left, in both eras, over pipes and over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import orjson
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.call.connector import ALONE, Connector, Interaction
from interlock.call.context import Caller
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.testing import FakeClock
from interlock.upstreams.mcp import McpConfig, McpUpstream, negotiation, sessions
from interlock.upstreams.mcp.session import Session
from interlock.upstreams.mcp.sessions import IDLE_S
from interlock.upstreams.supervisor import Restarts
from tests.support.calls import until
from tests.support.children import children, gone
from tests.support.mcp_upstreams import SCRIPTED, ask, by_address, failure_of, sdk_server, text
from tests.support.upstream_servers import (
    TRACEPARENT,
    Answer,
    Got,
    HttpServer,
    json_answer,
    new_certificate,
    remote_call,
)

ERAS = pytest.mark.parametrize("era", [(), ("--modern",)], ids=["handshake", "modern"])


@pytest.fixture(autouse=True)
def no_process_is_left() -> Generator[None]:
    before = children()
    yield
    assert children() <= before


class Changes:
    """How often the upstream announced a change."""

    def __init__(self) -> None:
        self.count = 0
        self.heard = asyncio.Event()

    def __call__(self) -> None:
        self.count += 1
        self.heard.set()


@asynccontextmanager
async def scripted(*options: str, **facts: Any) -> AsyncGenerator[McpUpstream]:
    """An upstream that is the scripted server."""
    said: Json = {"command": [sys.executable, "-I", "-S", str(SCRIPTED), *options], **facts.pop("said", {})}
    given: dict[str, Any] = {"clock": Clock(), "on_change": lambda: None, "restarts": Restarts(pause_s=0.0)}
    one = McpUpstream("desk", McpConfig.model_validate(said), **given | facts)
    try:
        yield one
    finally:
        async with asyncio.timeout(60):
            await one.close()


async def state(one: McpUpstream, **facts: Any) -> Json:
    return (await ask(one, "state", **facts))["structuredContent"]


def read_all(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_it_is_a_connector() -> None:
    config = McpConfig.model_validate({"command": ["true"]})
    one: Connector = McpUpstream("desk", config, clock=Clock(), on_change=lambda: None)
    assert one is not None


# Discovery


@pytest.mark.shows("MCP, handshake era", "discovery")
@pytest.mark.shows("MCP 2026-07-28", "discovery")
@pytest.mark.proves("REG-10")
@ERAS
@pytest.mark.supports("EXEC-10")
async def test_every_page_is_read_and_a_bad_descriptor_does_not_stop_the_others(era: tuple[str, ...]) -> None:
    async with scripted(*era) as one:
        found = await one.discover()
    assert [tool.name for tool in found.tools] == ["echo", "shuffle", "hang", "exit", "grow", "state"]
    assert list(found.refused) == [
        ("spoilt", "INVALID_TOOL_SCHEMA: its inputSchema is not the schema of an object"),
    ]
    echo = found.tools[0]
    assert echo.native == {"protocol": "mcp", "name": "echo"}
    assert (echo.title, echo.hints) == ("Echo", {"readOnlyHint": True, "x-odd": 1})
    assert echo.output_schema is not None
    about = found.about
    assert (about["name"], about["protocol"]) == ("scripted", "2026-07-28" if era else "2025-06-18")
    assert about["capabilities"]["tools"] == {"listChanged": True}
    if not era:
        assert about["instructions"] == "be kind"
        assert about["resources"] == [{"uri": "a:b", "name": "b"}]
        assert about["resourceTemplates"] == []
        assert about["prompts"] == [{"name": "greet"}]


GOOD: Json = {"name": "good", "inputSchema": {"type": "object"}}
BAD: Json = {**GOOD, "name": "bad"}


@pytest.mark.parametrize(
    ("descriptor", "reason"),
    [
        ("words", "it is not an object"),
        ({**BAD, "name": ""}, "its name"),
        ({**BAD, "name": 7}, "its name"),
        ({**BAD, "description": []}, "its description"),
        ({**BAD, "inputSchema": {}}, "its inputSchema"),
        ({**BAD, "inputSchema": {"type": "object", "properties": 3}}, "not a valid JSON Schema"),
        ({**BAD, "inputSchema": {"type": "object", "$ref": "http://else/where"}}, "not a valid JSON Schema"),
        ({**BAD, "outputSchema": True}, "its outputSchema"),
        ({**BAD, "outputSchema": {"type": 1}}, "not a valid JSON Schema"),
        (GOOD, "another tool"),
    ],
)
async def test_what_cannot_be_understood_is_refused_by_itself_with_the_reason(descriptor: Any, reason: str) -> None:
    def answer(got: Got) -> Answer:
        request = orjson.loads(got.body)
        results: Json = {
            "server/discover": {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}},
            "tools/list": {"tools": [GOOD, descriptor]},
        }
        return json_answer({"jsonrpc": "2.0", "id": request["id"], "result": results[request["method"]]})

    async with HttpServer.open() as server, by_address(server.url) as one:
        server.otherwise = answer
        found = await one.discover()
    assert [tool.name for tool in found.tools] == ["good"]
    ((_, told),) = found.refused
    assert told.startswith(f"INVALID_TOOL_SCHEMA: {reason}")


@pytest.mark.proves("REG-10")
@pytest.mark.parametrize(
    ("options", "said", "theirs"),
    [
        (("--protocol", "1999-01-01"), {}, "1999-01-01"),
        (("--future",), {}, "2027-01-01"),
        (("--modern",), {"protocol": "handshake"}, "2026-07-28"),
        ((), {"protocol": "modern"}, "nothing it would name"),
    ],
)
@pytest.mark.supports("EXEC-10")
async def test_without_a_common_version_that_is_the_reason(options: tuple[str, ...], said: Json, theirs: str) -> None:
    async with scripted(*options, said=said) as one:
        with pytest.raises(Failure) as caught:
            await one.discover()
        assert one.health()["restarts"] == 0
    assert caught.value.code == "E3502"
    assert f"the upstream speaks {theirs};" in caught.value.message
    assert caught.value.details == {"sent": False, "reason": "protocol_version_mismatch"}


@pytest.mark.supports("EXEC-10")
async def test_a_server_that_ends_at_the_first_unknown_word_is_greeted_the_old_way() -> None:
    async with scripted("--strict") as one:
        assert len((await one.discover()).tools) == 6


@pytest.mark.supports("REG-12")
@ERAS
async def test_a_change_of_the_list_is_announced_and_then_found(era: tuple[str, ...]) -> None:
    changes = Changes()
    async with scripted(*era, on_change=changes) as one:
        before = await one.discover()
        await ask(one, "grow")
        async with asyncio.timeout(60):
            await changes.heard.wait()
        after = await one.discover()
    assert len(after.tools) == len(before.tools) + 1
    assert changes.count == 1


# Calling


@pytest.mark.shows("MCP, handshake era", "call")
@pytest.mark.shows("MCP 2026-07-28", "call")
@pytest.mark.supports("OBS-02")
@ERAS
@pytest.mark.supports("EXEC-10")
async def test_a_call_keeps_content_structure_and_meta_and_carries_the_trace(era: tuple[str, ...]) -> None:
    async with scripted(*era) as one:
        value = await ask(one, "echo", {"text": "hi"})
        assert text(await ask(one, "several")) == "one of several"
    assert value["structuredContent"] == {"text": "hi"}
    assert value["content"] == [{"type": "text", "text": "hi"}]
    seen = value["_meta"]["seen"]
    assert (seen["traceparent"], seen["tracestate"]) == (TRACEPARENT, "vendor=value")
    assert seen["x-interlock-caller"] == "ada"
    assert "progressToken" not in seen
    assert ("io.modelcontextprotocol/protocolVersion" in seen) == bool(era)


@ERAS
async def test_whole_numbers_stay_exact_and_what_is_no_text_is_refused(era: tuple[str, ...]) -> None:
    async with scripted(*era) as one:
        sent = {"text": "long", "n": [2**70 + 1]}
        assert (await ask(one, "echo", sent))["structuredContent"] == sent
        assert (await failure_of(one, "echo", {"text": "\ud800"}, attempts=1)).code == "E3302"
        assert text(await ask(one, "echo", {"text": "on"})) == "on"


@pytest.mark.supports("CONTRACT-07")
@ERAS
async def test_the_version_and_the_confidence_that_a_server_states_are_those_of_the_call(era: tuple[str, ...]) -> None:
    async with scripted(*era) as one:
        sourced = remote_call({"protocol": "mcp", "name": "sourced"})
        plain = remote_call({"protocol": "mcp", "name": "echo"}, {"text": "hi"})
        await one.call(sourced)
        await one.call(plain)
    assert sourced.provenance == {"data_version": "rows-7", "confidence": 0.5}
    assert not any(plain.provenance.values())


@pytest.mark.proves("EXEC-10")
@pytest.mark.parametrize("bare", [True, False], ids=["tools only", "everything"])
async def test_a_server_is_greeted_and_asked_only_for_what_it_declares(bare: bool) -> None:
    async with scripted(*(["--bare"] if bare else [])) as one:
        found = await one.discover()
        assert "echo" in {tool.name for tool in found.tools}
        seen = await state(one)
    hello, heard = seen["hello"], seen["heard"]
    at = heard.index("initialize")
    assert (heard[:at], heard[at + 1]) == (["server/discover"], "notifications/initialized")
    assert heard.count("initialize") == 1
    assert hello["protocolVersion"] == "2025-11-25"
    # Nobody is there to answer questions, so the adapter declares that it answers none.
    assert hello["capabilities"] == {}
    assert hello["clientInfo"]["name"] == "interlock"
    assert "tools/list" in heard
    assert ("prompts/list" in heard, "resources/list" in heard) == (not bare, not bare)


@pytest.mark.proves("EXEC-10")
async def test_twenty_answers_out_of_order_reach_the_twenty_who_asked() -> None:
    """With a notification and a line of nonsense before each, and one more answer that nobody waits for."""
    async with scripted() as one:
        calls = [ask(one, "shuffle", {"number": number}) for number in range(20)]
        values = await asyncio.gather(*calls)
        assert text(await ask(one, "echo", {"text": "still there"})) == "still there"
    assert [text(value) for value in values] == [str(number) for number in range(20)]


@pytest.mark.shows("MCP, handshake era", "errors")
@pytest.mark.proves("EXEC-10")
@pytest.mark.parametrize(
    ("tool", "code", "message", "details"),
    [
        (
            "fail",
            "E3401",
            "no:",
            {
                "content": [{"type": "text", "text": "no: "}],
                "structuredContent": {"why": 7},
                "_meta": {"example.org/case": "12 "},
            },
        ),
        ("nothing", "E3401", "the upstream refused the arguments: there is no tool nothing", {"code": -32602}),
        ("broken", "E3502", "the upstream answered with an error: out of order", {"code": -32603, "sent": True}),
        ("odd", "E3502", "the upstream's answer is not the result of a tool", {"sent": True}),
        ("neither", "E3502", "the upstream's answer is neither a result nor an error", {"sent": True}),
        ("exit", "E3502", "the upstream's process ended: exit status 3", {"sent": True}),
        ("hang", "E3503", "the upstream did not answer in time", {"sent": True}),
    ],
)
async def test_each_way_to_fail_is_told_apart(tool: str, code: str, message: str, details: Json) -> None:
    async with scripted() as one:
        await ask(one, "echo", {"text": "warm"})
        failure = await failure_of(one, tool, attempts=1, writes=True, left_s=1.0 if tool == "hang" else 20.0)
        assert (failure.code, failure.message.strip(), failure.details) == (code, message, details)
        assert text(await ask(one, "echo", {"text": "on"})) == "on"


@pytest.mark.shows("MCP, handshake era", "errors")
@pytest.mark.shows("MCP 2026-07-28", "errors")
@pytest.mark.proves("EXEC-10")
@ERAS
async def test_the_structure_and_the_meta_of_a_long_error_are_kept_cut(era: tuple[str, ...]) -> None:
    async with scripted(*era) as one:
        failure = await failure_of(one, "fail", {"word": "at length"}, attempts=1)
    assert failure.details is not None
    assert failure.details["content"] == [{"type": "text", "text": "no: at length"}]
    assert failure.details["structuredContent"]["why"][:2] == ["because", "because"]
    assert "more items are not shown" in failure.details["structuredContent"]["why"][-1]
    assert failure.details["_meta"]["example.org/case"].startswith("xxx")
    assert "more characters]" in failure.details["_meta"]["example.org/case"]
    assert len(orjson.dumps(failure.details)) < 50_000


class Deaf:
    """A wire that leads nowhere, and remembers what it was handed."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.sent: list[Json] = []

    async def send(self, message: Json, headers: Mapping[str, str]) -> None:
        self.sent.append(message)
        if message.get("method") == "initialize":
            result: Json = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {"listChanged": True}}}
            self.session.hear({"id": message["id"], "result": result})

    async def connect(self, session: Session) -> Deaf:
        self.session = session
        return self

    def abort(self) -> None:
        pass

    async def close(self) -> None:
        if not self.ended.done():
            self.ended.set_result("closed")


PLAIN = st.none() | st.booleans() | st.integers(-3, 9) | st.floats(allow_nan=False) | st.text(max_size=5)
ANY = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
METHODS = st.sampled_from(
    ["ping", "elicitation/create", "sampling/createMessage", "roots/list", "notifications/progress",
     "notifications/tools/list_changed", "notifications/cancelled"]
)  # fmt: skip
WORDS = st.sampled_from(["progressToken", "progress", "total", "message", "code", "data", "resultType"])
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "id": ANY,
        "method": METHODS | ANY,
        "params": ANY | st.dictionaries(WORDS, ANY),
        "result": ANY,
        "error": ANY | st.dictionaries(WORDS, ANY),
    },
)


@settings(max_examples=30)
@given(frames=st.lists(ANY | MESSAGES | st.lists(MESSAGES, max_size=3), max_size=8))
def test_no_frame_of_a_server_harms_the_conversation_or_answers_another_call(frames: list[Any]) -> None:
    async def live() -> None:
        wire = Deaf()
        session = await Session.open(wire.connect, era="handshake", capabilities={}, on_change=lambda: None)
        calls = [
            asyncio.create_task(session.request("tools/call", {"n": n}, within_s=5, progress=lambda _: None))
            for n in range(2)
        ]
        await asyncio.sleep(0)
        numbers = [message["id"] for message in wire.sent if message["method"] == "tools/call"]
        for frame in frames:
            session.hear(frame)
        for number in reversed(numbers):
            session.hear({"jsonrpc": "2.0", "id": number, "result": {"mine": number}})
        spoilt = {number for frame in flat(frames) if (number := answered(frame)) is not None}
        for number, outcome in zip(numbers, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if number not in spoilt:
                assert outcome == {"mine": number}
        await session.close()

    asyncio.run(live())


def flat(frames: list[Any]) -> list[Any]:
    return [one for frame in frames for one in (flat(cast("list[Any]", frame)) if isinstance(frame, list) else [frame])]


def answered(frame: Any) -> int | None:
    """The call that a frame answers, well or badly."""
    said = cast("Json", frame) if isinstance(frame, dict) else {}
    number = said.get("id")
    return number if type(number) is int and not isinstance(said.get("method"), str) else None


@pytest.mark.shows("MCP, handshake era", "deadline")
@pytest.mark.shows("MCP 2026-07-28", "deadline")
@ERAS
async def test_a_server_is_told_when_nobody_waits_any_more(era: tuple[str, ...]) -> None:
    async with scripted(*era) as one:
        await ask(one, "echo", {"text": "warm"})
        # Asked once: with several attempts, the last one has what those before it left of the time.
        assert (await failure_of(one, "hang", left_s=1.0, attempts=1)).code == "E3503"
        waiting = asyncio.create_task(ask(one, "hang"))
        await until(lambda: one.health()["busy"] == 1)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert len((await state(one))["cancelled"]) == 2


@pytest.mark.shows("MCP, handshake era", "results bounded")
@pytest.mark.shows("MCP 2026-07-28", "results bounded")
@ERAS
async def test_an_oversized_answer_fails_its_call_and_the_next_one_works(era: tuple[str, ...]) -> None:
    async with scripted(*era, said={"max_response_bytes": 20_000}) as one:
        failure = await failure_of(one, "echo", {"text": "x" * 50_000}, attempts=1)
        assert (failure.code, "max_response_bytes" in failure.message) == ("E3416", True)
        assert text(await ask(one, "echo", {"text": "on"})) == "on"


@pytest.mark.shows("MCP, handshake era", "progress")
@pytest.mark.shows("MCP 2026-07-28", "progress")
@ERAS
async def test_progress_of_a_call_is_passed_on_and_that_of_others_is_not(era: tuple[str, ...]) -> None:
    heard: list[Json] = []
    async with scripted(*era) as one:
        await ask(one, "progress", progress=heard.append)
        await ask(one, "progress")
    assert heard == [{"message": "", "percent": 25.0}, {"message": "", "percent": 50.0}]


@pytest.mark.shows("MCP, handshake era", "retries of reads", "no resent writes")
@pytest.mark.shows("MCP 2026-07-28", "retries of reads", "no resent writes")
@pytest.mark.supports("CONTRACT-14")
@ERAS
async def test_a_read_that_was_broken_off_is_made_again_and_a_write_is_not(
    tmp_path: Path, era: tuple[str, ...]
) -> None:
    until_gone = tmp_path / "wait"

    async def broken_off(**facts: Any) -> Awaitable[Json]:
        until_gone.touch()
        pid = (await state(one))["pid"]
        waiting = asyncio.create_task(ask(one, "wait", {"until": str(until_gone)}, **facts))
        await until(lambda: one.health()["busy"] == 1)
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)
        until_gone.unlink()
        return waiting

    async with scripted(*era) as one:
        assert text(await (await broken_off(writes=False)))
        with pytest.raises(Failure) as caught:
            await (await broken_off(writes=True))
    assert (caught.value.code, caught.value.details) == ("E3502", {"sent": True})


async def test_what_a_failure_says_has_no_credential_in_it() -> None:
    async with scripted(said={"credentials": {"TOKEN": "desk-token"}}) as one:
        lent = {"desk-token": "abcdefgh12345678"}
        failure = await failure_of(one, "fail", {"word": "abcdefgh12345678"}, credentials=lent)
    assert "abcdefgh" not in failure.message


@pytest.mark.shows("MCP, handshake era", "resources and prompts")
@pytest.mark.shows("MCP 2026-07-28", "resources and prompts")
@ERAS
async def test_resources_and_prompts_are_passed_on(era: tuple[str, ...]) -> None:
    async with scripted(*era) as one:
        assert await one.content.list_resources() == [{"uri": "a:b", "name": "b"}]
        assert await one.content.list_resource_templates() == []
        assert await one.content.list_prompts() == [{"name": "greet"}]
        assert (await one.content.read_resource("a:b"))["contents"] == [{"uri": "a:b", "text": "hello"}]
        prompt = await one.content.get_prompt("greet", {"who": "Ada"})
        assert prompt["messages"][0]["content"]["text"] == "Ada"


# Questions in the middle of a call


@pytest.mark.shows("MCP, handshake era", "questions")
@pytest.mark.parametrize(
    ("tool", "method"),
    [("elicit", "elicitation/create"), ("sample", "sampling/createMessage"), ("roots", "roots/list")],
)
async def test_a_pushed_question_reaches_its_caller_or_fails(tool: str, method: str) -> None:
    asked: list[tuple[str, Json]] = []

    async def answer(method: str, params: Json) -> Json:
        asked.append((method, params))
        return {"action": "accept", "content": {"n": 3}}

    async def refuse(method: str, params: Json) -> Json:
        raise Failure("E3411", "rejected", details={"code": -1})

    async def fail(method: str, params: Json) -> Json:
        raise Failure("E3411", "the client has gone")

    able: Json = {"elicitation": {}, "sampling": {}, "roots": {}}
    async with scripted() as one:
        yes = await ask(one, tool, interaction=Interaction(able, answer))
        no = await ask(one, tool, interaction=Interaction(able, refuse))
        nobody = await ask(one, tool)
        gone = await ask(one, tool, interaction=Interaction(able, fail))
        # Another call of the same caller has a conversation of its own.
        other = asyncio.create_task(ask(one, "hang", interaction=Interaction(able, answer)))
        await until(lambda: one.health()["busy"] == 1)
        beside = await ask(one, tool, interaction=Interaction(able, answer))
        other.cancel()
        await asyncio.wait({other})
    told = [one["structuredContent"]["told"] for one in (yes, beside, no, nobody, gone)]
    assert told[:2] == [{"action": "accept", "content": {"n": 3}}] * 2
    assert [one["code"] for one in told[2:]] == [-1, -32601, -32603]
    assert [one[0] for one in asked] == [method] * 2


async def test_a_caller_has_a_bounded_number_of_conversations_and_then_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "PER_CALLER", 2)

    async def answer(method: str, params: Json) -> Json:
        return {"action": "accept"}

    interaction = Interaction({"elicitation": {}}, answer)
    async with scripted() as one:
        hanging = [asyncio.create_task(ask(one, "hang", interaction=interaction)) for _ in range(2)]
        await until(lambda: one.health()["busy"] == 2)
        full = await failure_of(one, "state", interaction=interaction, attempts=1, left_s=1.0)
        assert (full.code, full.details, full.retry_after_ms) == ("E3502", {"sent": False}, 1000)
        other = (await state(one, interaction=interaction, caller=Caller(id="bob")))["pid"]
        waiting = asyncio.create_task(state(one, interaction=interaction))
        for task in hanging:
            task.cancel()
        await asyncio.wait(hanging)
        assert (await waiting)["pid"] != other


@pytest.mark.parametrize("configured", [False, True])
async def test_a_caller_who_has_all_conversations_of_their_own_in_use_is_refused_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch, configured: bool
) -> None:
    if not configured:
        monkeypatch.setattr(sessions, "MAX_OF_ONE", 2)

    async def answer(method: str, params: Json) -> Json:
        return {"action": "accept"}

    def client(name: str) -> Interaction:
        return Interaction({name: {}}, answer)  # another capability is another conversation

    said = {"conversations_per_caller": 2} if configured else {}
    async with scripted(said=said) as one:
        idle = (await state(one, interaction=client("roots")))["pid"]
        hanging = [asyncio.create_task(ask(one, "hang", interaction=client("elicitation"))) for _ in range(2)]
        await until(lambda: one.health()["busy"] == 2)
        await until(lambda: gone(idle, 0))  # it made room for the second
        full = await failure_of(one, "state", interaction=client("sampling"), attempts=1)
        assert (full.code, full.retry_after_ms) == ("E3003", 1000)
        assert full.details == {"sent": False, "limit": 2}
        assert "2 conversations of this caller with `desk` are open, and all are in use" in full.message
        # Those of others, and the one that all share, are not counted.
        assert (await state(one, interaction=client("sampling"), caller=Caller(id="bob")))["pid"]
        assert (await state(one))["pid"]
        first = hanging.pop(0)
        first.cancel()
        await asyncio.wait([first])
        assert (await state(one, interaction=client("sampling")))["pid"]
        hanging[0].cancel()
        await asyncio.wait(hanging)


async def test_a_modern_question_ends_the_call_and_the_answers_go_with_the_next() -> None:
    able: Json = {"elicitation": {}}
    async with scripted("--modern") as one:
        failure = await failure_of(one, "input", interaction=Interaction(able))
        assert failure.code == "E3411"
        assert failure.details is not None
        wanted = failure.details["inputRequired"]
        answers = {"inputResponses": {"one": {"action": "accept"}}, "requestState": wanted["requestState"]}
        value = await ask(one, "input", interaction=Interaction(able, answers=answers))
        seen = (await ask(one, "echo", {"text": ""}, interaction=Interaction(able)))["_meta"]["seen"]
    assert list(wanted["inputRequests"]) == ["one"]
    assert orjson.loads(text(value)) == [{"one": {"action": "accept"}}, "s"]
    assert seen["io.modelcontextprotocol/clientCapabilities"] == able


@pytest.mark.shows("MCP 2026-07-28", "questions")
async def test_a_modern_question_is_put_to_a_client_that_can_be_asked_right_away() -> None:
    asked: list[str] = []

    async def answer(method: str, params: Json) -> Json:
        asked.append(f"{method}: {params['message']}")
        return {"action": "accept", "content": {}}

    async with scripted("--modern") as one:
        value = await ask(one, "input", interaction=Interaction({"elicitation": {}}, answer))
        assert one.health()["sessions"] == 1
    assert orjson.loads(text(value)) == [{"one": {"action": "accept", "content": {}}}, "s"]
    assert asked == ["elicitation/create: how many?"]


@ERAS
async def test_a_question_of_a_call_that_has_ended_is_put_to_no_other_caller(era: tuple[str, ...]) -> None:
    """Where callers share a conversation, in which no server may ask."""
    asked: list[str] = []

    async def answer(method: str, params: Json) -> Json:
        asked.append(method)
        return {"action": "accept", "content": {}}

    async with scripted(*era) as one:
        able = Interaction({"elicitation": {}}, answer) if era else ALONE
        waits = asyncio.create_task(ask(one, "late", interaction=able))
        await until(lambda: one.health()["busy"] == 1)
        ends = asyncio.create_task(ask(one, "hang"))
        await until(lambda: one.health()["busy"] == 2)
        ends.cancel()
        told = (await waits)["structuredContent"]["told"]
    assert (asked, told["code"]) == ([], -32603 if era else -32601)
    assert "nobody was asked" in told["message"]


async def test_clients_that_can_be_asked_share_the_process_where_questions_are_not_passed_on() -> None:
    async def answer(method: str, params: Json) -> Json:
        raise AssertionError

    interaction = Interaction({"elicitation": {}}, answer)
    async with scripted(said={"questions": False}) as one:
        told = await ask(one, "elicit", interaction=interaction)
        assert told["structuredContent"]["told"]["code"] == -32601
        await state(one)
        assert one.health()["sessions"] == 1
    async with scripted() as one:
        assert await state(one, interaction=interaction) != await state(one)
        assert one.health()["sessions"] == 2


# Identities


@pytest.mark.shows("MCP, handshake era", "credentials")
@pytest.mark.shows("MCP 2026-07-28", "credentials")
@ERAS
@pytest.mark.part_of(
    "EXEC-07",
    rest="an MCP server over stdio has its credentials in its environment, where its configuration names the variable, "
    "and keeps them past the call, until no call with them was made for 300 s",
)
async def test_each_set_of_credentials_has_a_process_of_its_own_and_the_log_has_no_secret(
    tmp_path: Path, era: tuple[str, ...]
) -> None:
    said = {"credentials": {"TOKEN": "desk-token"}}
    async with scripted(*era, said=said, logs=tmp_path) as one:
        ada, bob, again = [
            await state(one, credentials={"desk-token": token, "other": "x"}) for token in ("ada1", "bob1", "ada1")
        ]
        assert (ada["env"]["TOKEN"], bob["env"]["TOKEN"]) == ("ada1", "bob1")
        assert ada["pid"] == again["pid"] != bob["pid"]
        assert "other" not in ada["env"]
        assert (await failure_of(one, "state")).code == "E3602"
        late = await failure_of(one, "hang", credentials={"desk-token": "ada1"}, left_s=1.0, attempts=1)
        assert late.code == "E3503"
        assert len((await one.discover({"desk-token": "ada1"})).tools) == 6
    logs = read_all(tmp_path)
    assert list(logs.values()) == ["hanging\n"]
    assert not any("ada1" in name for name in logs)


async def test_conversations_are_bounded_and_closed_when_nobody_used_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    time = FakeClock()
    async with scripted(said={"credentials": {"TOKEN": "t"}}, clock=time.clock) as one:
        first = (await state(one, credentials={"t": "1"}))["pid"]
        await state(one, credentials={"t": "2"})
        busy = asyncio.create_task(ask(one, "hang", credentials={"t": "2"}))
        await until(lambda: one.health()["busy"] == 1)
        await state(one, credentials={"t": "3"})  # in the place of the first
        await until(lambda: gone(first, 0))
        other = asyncio.create_task(ask(one, "hang", credentials={"t": "3"}))
        await until(lambda: one.health()["busy"] == 2)
        full = await failure_of(one, "state", credentials={"t": "4"}, attempts=1)
        assert (full.code, full.details, full.retry_after_ms) == ("E3502", {"sent": False}, 1000)
        for task in (busy, other):
            task.cancel()
        await asyncio.wait({busy, other})
        time.advance(IDLE_S + 1)
        await state(one, credentials={"t": "3"})
        await one.probe()  # of all there are, which closes what is idle
        assert one.health()["sessions"] == 1


# Supervision


@pytest.mark.proves("OPS-10")
async def test_a_killed_child_is_restarted_and_greeted_and_the_next_call_works() -> None:
    changes = Changes()
    async with scripted(on_change=changes) as one:
        pid = (await state(one))["pid"]
        os.kill(pid, signal.SIGKILL)
        await until(lambda: one.health()["restarts"] == 1)
        again = (await state(one))["pid"]
        assert again != pid
        assert one.health()["state"] == "up"
        assert changes.count == 1  # it may offer something else now


@pytest.mark.proves("OPS-10")
async def test_a_child_that_always_dies_is_left_alone_after_ten_restarts_with_an_alert() -> None:
    alerts: list[str] = []
    async with scripted("--die", alert=alerts.append) as one:
        with pytest.raises(Failure):
            await one.discover()
        await until(lambda: one.health()["state"] == "failed")
        assert one.health()["restarts"] == 10
        assert len(alerts) == 1
        assert "exit status 1" in alerts[0]
        failure = await failure_of(one, "echo", attempts=1)
        assert (failure.code, failure.details) == ("E3502", {"sent": False})
        with pytest.raises(Failure):
            await one.probe()
        with pytest.raises(Failure):
            await one.replace()


@pytest.mark.proves("OPS-10")
async def test_a_child_is_replaced_under_load_without_losing_a_call(tmp_path: Path) -> None:
    until_gone = tmp_path / "wait"
    until_gone.touch()
    async with scripted() as one:
        old = (await state(one))["pid"]
        begun = asyncio.create_task(ask(one, "wait", {"until": str(until_gone)}, writes=True))
        await until(lambda: one.health()["busy"] == 1)
        replacing = asyncio.create_task(one.replace())
        await until(lambda: one.health()["busy"] == 0)  # the new one has taken over
        new = (await state(one))["pid"]
        assert new != old
        assert not begun.done()
        until_gone.unlink()
        assert text(await begun) == str(old)
        await replacing
        assert gone(old)
        assert (await state(one))["pid"] == new


@pytest.mark.proves("OPS-10")
async def test_replacement_after_replacement_loses_no_call_of_many_at_once() -> None:
    over = False

    async def caller(number: int) -> int:
        made = 0
        while not over:
            said = f"{number}/{made}"
            assert text(await ask(one, "echo", {"text": said}, writes=True, attempts=1)) == said
            made += 1
        return made

    async with scripted() as one:
        await state(one)
        callers = [asyncio.create_task(caller(number)) for number in range(8)]
        for _ in range(5):
            await one.replace()
            assert not any(task.done() for task in callers)
        over = True
        assert min(await asyncio.gather(*callers)) > 0
        assert one.health()["restarts"] == 0


@pytest.mark.proves("OPS-10")
async def test_a_child_that_does_not_answer_a_health_request_is_ended_and_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sessions, "PROBE_S", 0.2)
    until_gone = tmp_path / "wait"
    async with scripted() as one:
        pid = (await state(one))["pid"]
        await one.probe()
        until_gone.touch()
        stuck = asyncio.create_task(ask(one, "wait", {"until": str(until_gone)}, writes=True))
        await until(lambda: one.health()["busy"] == 1)
        with pytest.raises(Failure) as caught:
            await one.probe()
        assert caught.value.code == "E3502"
        with pytest.raises(Failure):
            await stuck
        assert gone(pid)
        assert (await state(one))["pid"] != pid


async def test_a_server_that_says_nothing_is_asked_the_old_way_and_then_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(negotiation, "DISCOVER_S", 0.05)
    monkeypatch.setattr(negotiation, "START_S", 0.2)
    async with scripted("--dumb") as one:
        with pytest.raises(Failure) as caught:
            await one.discover()
    assert caught.value.message == "the upstream did not agree on a version in time"


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"command": ["x"], "url": "http://localhost/mcp"},
        {"command": ["x"], "headers": {"A": "b"}},
        {"url": "http://localhost/mcp", "env": {"A": "b"}},
        {"url": "ftp://localhost"},
        {"url": "http://user:secret@localhost/mcp"},
        {"url": "http://localhost/mcp", "headers": {"Authorization": "Bearer clear"}},
        {"url": "http://localhost/mcp", "headers": {"A": "b\r\nC: d"}},
        {"command": ["x"], "unknown": 1},
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(said: Json) -> None:
    with pytest.raises(pydantic.ValidationError):
        McpConfig.model_validate(said)


# By address


@pytest.mark.shows("MCP over HTTP", "discovery", "progress")
@pytest.mark.parametrize("era", ["auto", "handshake"])
@pytest.mark.supports("EXEC-10")
async def test_the_sdks_own_server_is_found_and_called_over_http_in_both_eras(era: str) -> None:
    changes, heard = Changes(), list[Json]()
    async with sdk_server() as url, by_address(url, said={"protocol": era}, on_change=changes) as one:
        found = await one.discover()
        assert found.about["protocol"] == ("2026-07-28" if era == "auto" else "2025-11-25")
        echo = next(tool for tool in found.tools if tool.name == "echo")
        assert echo.native["headers"] == [["text", "Said"]]
        values = await asyncio.gather(
            *(one.call(remote_call(echo.native, {"text": f"é{number}"})) for number in range(20))
        )
        assert [value["structuredContent"]["text"] for value in values] == [f"é{number}" for number in range(20)]
        seen = values[0]["structuredContent"]["headers"]
        assert (seen["traceparent"], seen["tracestate"]) == (TRACEPARENT, "vendor=value")
        assert seen["x-interlock-caller"] == "ada"
        if era == "auto":
            assert seen["mcp-method"] == "tools/call"
            assert seen["mcp-param-said"].startswith("=?base64?")
        await ask(one, "count", {"to": 2}, progress=heard.append)
        assert [step["percent"] for step in heard] == [50.0, 100.0]
        assert (await failure_of(one, "nope")).code == "E3401"
        assert (await failure_of(one, "hang", left_s=1.0)).code == "E3503"
        await ask(one, "cancelled")  # which waits for that
        await ask(one, "grow")
        async with asyncio.timeout(60):
            await changes.heard.wait()
        assert len((await one.discover()).tools) == len(found.tools) + 1
        await one.probe()


class Far:
    """A server of the handshake's era behind the small HTTP server, whose accidents can be told beforehand."""

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.session = "one"
        self.accidents: dict[str, Answer] = {}
        self.calls: list[str] = []
        server.otherwise = self.answer

    def answer(self, got: Got) -> Answer:
        if got.method != "POST":
            return Answer(405)
        request: Json = orjson.loads(got.body)
        if "id" not in request:
            return Answer(202, b"")
        match request["method"]:
            case "initialize":
                result: Json = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
                reply = json_answer({"jsonrpc": "2.0", "id": request["id"], "result": result})
                reply.headers["mcp-session-id"] = self.session
                return reply
            case "tools/call":
                said = request["params"]["arguments"]["text"]
                self.calls.append(said)
                if said in self.accidents:
                    return self.accidents.pop(said)
                if got.headers.get("mcp-session-id") != self.session:
                    return Answer(404, b"gone", "text/plain")
                result = {"content": [{"type": "text", "text": said}]}
                return json_answer({"jsonrpc": "2.0", "id": request["id"], "result": result})
            case _:
                return Answer(400, b"what?", "text/plain")


@asynccontextmanager
async def far(**said: Any) -> AsyncGenerator[tuple[Far, McpUpstream]]:
    async with HttpServer.open() as server, by_address(server.url + "/mcp", said=said) as one:
        yield Far(server), one


@pytest.mark.shows("MCP over HTTP", "deadline")
@pytest.mark.parametrize(
    ("accident", "code", "details"),
    [
        (Answer(0), "E3502", {"sent": True}),
        (Answer(200, b'{"json', cut=True), "E3502", {"sent": True}),
        (Answer(200, b"data: {\n\n", "text/event-stream", cut=True), "E3502", {"sent": True}),
        (Answer(503, b"away", "text/plain"), "E3502", {"sent": True}),
        (Answer(401, b"who?", "text/plain"), "E3502", {"sent": False}),
        (Answer(429, b"", headers={"retry-after": "3"}), "E3504", {"sent": False}),
        (Answer(200, b"<html>", "text/html"), "E3502", {"sent": True}),
        (Answer(hang=True), "E3503", {"sent": True}),
    ],
    ids=["closed", "cut", "cut stream", "503", "401", "429", "html", "hang"],
)
async def test_an_accident_on_the_network_is_told_for_what_it_is_and_hurts_one_call(
    accident: Answer, code: str, details: Json
) -> None:
    async with far() as (server, one):
        await ask(one, "echo", {"text": "warm"})
        server.accidents["bad"] = accident
        left_s = 0.5 if accident.hang else 20.0
        bad = asyncio.create_task(failure_of(one, "echo", {"text": "bad"}, attempts=1, left_s=left_s))
        values = await asyncio.gather(*(ask(one, "echo", {"text": f"good{number}"}) for number in range(5)))
        failure = await bad
        assert text(await ask(one, "echo", {"text": "after"})) == "after"
        assert one.health()["sessions"] == 1
    assert [text(value) for value in values] == [f"good{number}" for number in range(5)]
    assert failure.code == code
    assert failure.details is not None
    assert failure.details["sent"] is details["sent"]
    assert failure.retry_after_ms == (3000 if accident.status == 429 else None)


async def test_a_session_that_was_forgotten_is_opened_anew_and_nothing_is_done_twice() -> None:
    async with far() as (server, one):
        await ask(one, "echo", {"text": "one"}, writes=True)
        server.session = "two"
        assert text(await ask(one, "echo", {"text": "two"}, writes=True)) == "two"
    assert server.calls == ["one", "two", "two"]
    sessions = [got.headers.get("mcp-session-id") for got in server.server.got if b"tools/call" in got.body]
    assert sessions == ["one", "one", "two"]


async def test_a_server_that_is_away_was_not_asked(closed_port: Callable[[], int]) -> None:
    port = closed_port()
    async with by_address(f"http://127.0.0.1:{port}/mcp") as one:
        failure = await failure_of(one, "echo", attempts=1)
        assert (failure.code, failure.details) == ("E3502", {"sent": False})
        with pytest.raises(Failure):
            await one.probe()
        assert one.health()["restarts"] == 0


@pytest.mark.shows("MCP over HTTP", "credentials")
async def test_credentials_go_as_headers_and_each_set_has_a_session_of_its_own() -> None:
    said = {"credentials": {"Authorization": "token", "X-Team": "team"}, "headers": {"X-Fixed": "1"}}
    async with far(**said) as (server, one):
        for token in ("ada", "Basic Ym9i"):
            await ask(one, "echo", {"text": token}, credentials={"token": token, "team": "t"})
        assert one.health()["sessions"] == 2
    calls = [got.headers for got in server.server.got if b"tools/call" in got.body]
    assert [call["authorization"] for call in calls] == ["Bearer ada", "Basic Ym9i"]
    assert all(call["x-team"] == "t" and call["x-fixed"] == "1" for call in calls)


async def test_a_private_address_is_refused_unless_it_was_allowed() -> None:
    async with far(allow_private=False) as (server, one):
        assert (await failure_of(one, "echo", {"text": "x"})).code == "E3406"
    assert server.server.got == []


async def test_a_server_is_trusted_by_the_authority_it_was_given(tmp_path: Path) -> None:
    made = new_certificate(tmp_path)
    async with HttpServer.open(made.server_context) as server:
        Far(server)
        async with by_address(server.url) as one:
            failure = await failure_of(one, "echo", {"text": "x"}, attempts=1)
            assert (failure.code, failure.details) == ("E3502", {"sent": False})
        trusted = {"tls": {"ca_file": str(made.cert_file)}}
        async with by_address(f"https://localhost:{server.port}", said=trusted) as one:
            assert text(await ask(one, "echo", {"text": "x"})) == "x"
    assert server.got[-2].headers["host"] == f"localhost:{server.port}"


async def test_a_modern_server_that_is_slow_to_start_is_not_taken_for_an_old_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(negotiation, "DISCOVER_S", 0.0)
    async with scripted("--modern") as one:
        assert (await one.discover()).about["protocol"] == "2026-07-28"
    async with scripted() as one:
        assert (await one.discover()).about["protocol"] == "2025-06-18"

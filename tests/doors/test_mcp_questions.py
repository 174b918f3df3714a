"""Questions of MCP upstreams reach the client whose call raised them, in both eras, over stdio and HTTP, or fail."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import anyio
import mcp_types as types
import pytest
from mcp import Client, MCPError

from interlock.doors.mcp import suspended, suspended_call
from interlock.upstreams.mcp import sessions
from tests.support.asking import call, upstream
from tests.support.calls import records, until
from tests.support.mcp import AGENT, OTHER, PATIENCE_S, Person, World, stdio, text, world
from tests.support.mcp_servers.asking import NOTE

__all__ = ["world"]

DOOR = pytest.mark.proves("OPS-02")
# The SDK's client warns of what the modern era gave up; clients of the handshake era go on using it.
pytestmark = pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")
WIRES = pytest.mark.parametrize("wire", ["http", "stdio"])


# A client that is asked in the middle of its call


@pytest.mark.shows("MCP, handshake era", "questions")
@pytest.mark.shows("MCP 2026-07-28", "questions")
@pytest.mark.shows("MCP over HTTP", "questions")
@DOOR
@WIRES
@pytest.mark.parametrize("era", ["handshake", "modern"])
async def test_every_kind_of_question_is_answered_by_the_client(world: World, wire: str, era: str) -> None:
    person = Person()
    async with upstream(world, wire, protocol=era), world.client("legacy", **person.options) as client:
        for tool, answer in (
            ("ask", "ann:n-x 0"),
            ("ask_twice", "ann:n-x 0 ann:n-x 1"),
            ("ask_aside", "ann:n-x 0"),
            ("sample", "ann"),
            ("roots", "file:///home/ann"),
        ):
            result = await call(client, tool, "x")
            assert (text(result), result.is_error) == (answer, False), tool


@DOOR
@WIRES
async def test_a_persons_own_refusal_is_passed_on_as_theirs(world: World, wire: str) -> None:
    async with upstream(world, wire, protocol="handshake"):
        for action in ("decline", "cancel"):
            async with world.client("legacy", **Person(action=action).options) as client:
                assert text(await call(client, "ask", action)) == action
                rejected = await call(client, "sample", action)
                assert rejected.is_error
                assert "User rejected sampling request" in text(rejected)


@DOOR
@WIRES
@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
async def test_no_kind_of_question_is_answered_for_a_client_that_cannot_be_asked(
    world: World, wire: str, mode: str
) -> None:
    kinds = (
        ("ask", "elicitation/create", "elicitation"),
        ("sample", "sampling/createMessage", "sampling"),
        ("roots", "roots/list", "roots"),
    )
    async with upstream(world, wire, protocol="handshake") as asking, world.client(mode) as client:
        for tool, method, capability in kinds:
            result = await call(client, tool, "x")
            error = result.meta["interlock/error"]
            assert (result.is_error, error["error_code"]) == (True, "E3411"), tool
            assert error["details"]["unanswered"]["method"] == method
            assert f"did not declare `{capability}`" in error["message"]
    assert asking.ran == []


@DOOR
@WIRES
@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        ({}, {}, "did not declare `elicitation`"),
        ({"questions": False}, Person().options, "questions are not passed on"),
    ],
    ids=["no client to ask", "not passed on"],
)
async def test_a_question_that_nobody_can_be_asked_fails_its_call_and_says_so(
    world: World, wire: str, config: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    async with upstream(world, wire, protocol="handshake", **config) as asking:
        async with world.client("legacy", **options) as client:
            result = await call(client, "ask", "x")
            assert text(await call(client, "calm", "y")).startswith("calm")
        assert (result.is_error, asking.ran) == (True, ["n-y"] if wire == "http" else [])
    error = result.meta["interlock/error"]
    assert error["error_code"] == "E3411"
    assert reason in error["message"]
    assert error["details"]["unanswered"]["method"] == "elicitation/create"
    assert error["resolution"]
    closed = next(one for one in records(world.app, result.meta["interlock/call"]["id"], "closed"))
    assert closed["error_code"] == "E3411"


@DOOR
@WIRES
async def test_questions_of_many_calls_at_once_reach_the_calls_that_raised_them(world: World, wire: str) -> None:
    """Two people, six calls each, all of them waiting for an answer at the same time over HTTP."""
    people = {AGENT: Person("ann"), OTHER: Person("bob")}
    count = 6
    async with upstream(world, wire, protocol="handshake") as asking:
        asking.expected = count * len(people) if wire == "http" else 1
        tokens = {agent: await world.token(subject=agent) for agent in people}
        async with (
            world.client("legacy", tokens[AGENT], **people[AGENT].options) as first,
            world.client("legacy", tokens[OTHER], **people[OTHER].options) as second,
        ):
            made = {
                (person.who, number): asyncio.ensure_future(call(client, "ask", f"{person.who}{number}"))
                for client, person in ((first, people[AGENT]), (second, people[OTHER]))
                for number in range(count)
            }
            results = dict(zip(made, await asyncio.gather(*made.values()), strict=True))
        for (who, number), result in results.items():
            assert text(result) == f"{who}:n-{who}{number} 0"
        for person in people.values():
            assert sorted(person.asked) == [f"n-{person.who}{number} 0" for number in range(count)]


@DOOR
@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
async def test_questions_outside_the_streams_of_calls_reach_the_clients_of_these_calls(world: World, mode: str) -> None:
    """Three clients of one caller, four calls each under way when all are asked, in ways that name no request."""
    people = [Person(who) for who in ("ann", "bea", "cam")]
    tools = ("ask_aside", "ask_aside", "ask_aside", "roots")
    async with upstream(world, "http", protocol="handshake") as asking, AsyncExitStack() as stack:
        token = await world.token()
        clients = [await stack.enter_async_context(world.client(mode, token, **one.options)) for one in people]
        for turn in range(2):  # again in the conversations that are there now
            asking.expected = (turn + 1) * len(people) * len(tools)
            asking.met = anyio.Event()
            made = {
                (person.who, f"{person.who}{turn}{number}", tool): call(client, tool, f"{person.who}{turn}{number}")
                for client, person in zip(clients, people, strict=True)
                for number, tool in enumerate(tools)
            }
            results = dict(zip(made, await asyncio.gather(*made.values()), strict=True))
            for (who, name, tool), result in results.items():
                assert text(result) == ("file:///home/ann" if tool == "roots" else f"{who}:n-{name} 0")
    for person in people:
        assert sorted(person.asked) == [f"n-{person.who}{turn}{number} 0" for turn in range(2) for number in range(3)]


@DOOR
@pytest.mark.parametrize("names", ["ab", "abc"])
async def test_a_question_that_may_be_of_several_clients_is_put_to_none_and_its_call_fails_saying_so(
    world: World, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of clients without sessions share a conversation when all others are in use, until one asks so."""
    monkeypatch.setattr(sessions, "PER_CALLER_BY_URL", 1)
    people = [Person("ann"), Person("bea")]
    async with upstream(world, "http", protocol="handshake") as asking, AsyncExitStack() as stack:
        token = await world.token()
        first, second = [
            await stack.enter_async_context(world.client("2026-07-28", token, **one.options)) for one in people
        ]
        asking.expected = len(names)
        made = await asyncio.gather(
            *(call(who, "ask_aside", name) for who, name in zip((first, second, first), names, strict=False))
        )
        told = [text(one) for one in made]
        # The one in the shared conversation may get the question of a call that has ended, so not even that is put.
        assert sum(not one.is_error for one in made) == 1
        assert sum("nothing says to which" in one for one in told) == len(names) - 1
        assert sum(len(person.asked) for person in people) == 1
        # From now on a call waits for a conversation of its own.
        for person in people:
            person.asked.clear()
        made = await asyncio.gather(*(call(who, "ask_aside", name) for who, name in ((first, "d"), (second, "e"))))
        assert [text(one) for one in made] == ["ann:n-d 0", "bea:n-e 0"]
        assert [one.asked for one in people] == [["n-d 0"], ["n-e 0"]]


@DOOR
async def test_a_caller_whose_clients_use_all_their_conversations_is_refused_and_another_caller_is_served(
    world: World,
) -> None:
    person, other = Person("ann"), Person("bob")
    person.held = asyncio.Event()
    async with upstream(world, "http", protocol="handshake", conversations_per_caller=1), AsyncExitStack() as stack:
        first, second, stranger = [
            await stack.enter_async_context(world.client("legacy", await world.token(subject=who), **one.options))
            for who, one in ((AGENT, person), (AGENT, person), (OTHER, other))
        ]
        held = asyncio.create_task(call(first, "ask", "x"))
        await until(lambda: person.asked == ["n-x 0"])
        refused = await call(second, "ask", "y")
        assert refused.is_error
        error = refused.meta["interlock/error"]
        assert (error["error_code"], error["retryable"]) == ("E3003", True)
        assert "1 conversations of this caller with `asks` are open, and all are in use" in error["humanMessage"]
        assert "conversations_per_caller" in error["resolution"]
        assert text(await call(stranger, "ask", "z")) == "bob:n-z 0"
        person.held.set()
        assert text(await held) == "ann:n-x 0"
        # The first is idle now, and makes room.
        assert text(await call(second, "ask", "w")) == "ann:n-w 0"


# A client that gets questions as the result of its request, and calls again


@DOOR
@WIRES
@pytest.mark.parametrize("era", ["handshake", "modern"])
async def test_a_client_that_calls_again_is_asked_whatever_era_the_upstream_speaks(
    world: World, wire: str, era: str
) -> None:
    person = Person()
    mode = "auto" if era == "handshake" else "2026-07-28"  # `auto` chooses the same version
    async with upstream(world, wire, protocol=era) as asking, world.client(mode, **person.options) as client:
        assert client.protocol_version == "2026-07-28"
        tools = (
            ("ask", "ann:n-x 0"),
            ("ask_twice", "ann:n-x 0 ann:n-x 1"),
            ("sample", "ann"),
            ("roots", "file:///home/ann"),
        )
        for tool, answer in tools:
            result = await call(client, tool, "x")
            assert (text(result), result.is_error) == (answer, False), tool
            again = await call(client, tool, "x")  # under the same key: nobody is asked, nothing runs
            assert (text(again), again.meta["interlock/call"]["source"]) == (answer, "replay")
        if wire == "http":
            assert len(asking.ran) == len(tools)
        declined = Person(action="decline")
        async with world.client("2026-07-28", **declined.options) as other:
            assert text(await call(other, "ask", "no")) == "decline"


@DOOR
async def test_the_sdk_in_auto_mode_tells_questions_of_many_calls_at_once_apart(world: World) -> None:
    """`auto` chooses 2026-07-28, and the upstream pushes its questions: 24 calls of two people, all of them waiting."""
    people = {AGENT: Person("ann"), OTHER: Person("bob")}
    names = [str(number) for number in range(8)]
    async with upstream(world, "http", protocol="handshake") as asking, AsyncExitStack() as stack:
        made: dict[tuple[str, str, str], Any] = {}
        for agent, person in people.items():
            token = await world.token(subject=agent)
            client = await stack.enter_async_context(world.client("auto", token, **person.options))
            assert client.protocol_version == "2026-07-28"
            for tool, name in [*(("ask", name) for name in names), *(("sample", f"s{name}") for name in names[:4])]:
                made[person.who, tool, name] = call(client, tool, f"{person.who}{name}")
        asking.expected = len(made)
        results = dict(zip(made, await asyncio.gather(*made.values()), strict=True))
    for (who, tool, name), result in results.items():
        assert text(result) == (f"{who}:n-{who}{name} 0" if tool == "ask" else who)
    for person in people.values():
        assert sorted(person.asked) == [f"n-{person.who}{name} 0" for name in names]


@DOOR
async def test_a_call_that_waits_for_an_answer_is_one_call_on_record(world: World) -> None:
    """The repeated request goes on with the call, once, for its caller, tool and arguments alone."""
    person = Person()
    answers: Any = {"question-1": {"action": "accept", "content": {"answer": "yes"}}}
    arguments = {"name": "n-x", "idempotency_key": "k"}
    async with upstream(world, "http", protocol="handshake") as asking:
        async with (
            world.client("2026-07-28", **person.options) as client,
            world.client("2026-07-28", await world.token(subject=OTHER), **person.options) as stranger,
        ):
            session: Any = client.session
            strange: Any = stranger.session
            first = await session.call_tool("asks-ask", arguments, allow_input_required=True)
            assert isinstance(first, types.InputRequiredResult)
            asked: Any = first.input_requests
            assert asked["question-1"].params.message == "n-x 0"
            busy = await session.call_tool("asks-ask", arguments, meta={"interlock/timeoutMs": 300})
            assert busy.is_error
            state = {"input_responses": answers, "request_state": first.request_state}
            for who, tool, name in ((strange, "ask", "n-z"), (session, "ask", "n-y"), (session, "sample", "n-v")):
                with pytest.raises(MCPError, match="Invalid or expired requestState"):
                    await who.call_tool(f"asks-{tool}", {"name": name, "idempotency_key": name}, **state)
            wrong: Any = {**state, "input_responses": {"question-1": {"roots": []}}}
            with pytest.raises(MCPError, match="question-1"):
                await session.call_tool("asks-ask", arguments, **wrong)
            second = await session.call_tool("asks-ask", arguments, **state)
            assert text(second) == "yes"
            replayed = await session.call_tool("asks-ask", arguments, **state)
            assert text(replayed) == "yes"
        assert (asking.begun, asking.ran) == (["n-x"], ["n-x"])
    (closed,) = records(world.app, second.meta["interlock/call"]["id"], "closed")
    assert closed["status"] == "SUCCESS"


@DOOR
async def test_a_client_that_does_not_come_back_has_its_call_cancelled(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspended, "ANSWER_S", 0.2)
    async with upstream(world, "http", protocol="handshake") as asking:
        async with world.client("2026-07-28", **Person().options) as client:
            arguments = {"name": "n-x", "idempotency_key": "k"}
            session: Any = client.session
            first = await session.call_tool("asks-ask", arguments, allow_input_required=True)
            assert isinstance(first, types.InputRequiredResult)
            await until(lambda: asking.cancelled == ["n-x"])
            late = await session.call_tool("asks-ask", arguments)
            assert "E3409" in text(late)
        assert asking.ran == []


@DOOR
async def test_calls_that_wait_for_answers_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspended_call, "MAX_PER_CALLER", 1)
    async with upstream(world, "http", protocol="handshake"):
        async with world.client("2026-07-28", **Person().options) as client:
            session: Any = client.session
            calls = [
                session.call_tool("asks-ask", {"name": f"n-{one}", "idempotency_key": one}, allow_input_required=True)
                for one in "ab"
            ]
            results: list[Any] = [await one for one in calls]
        assert isinstance(results[0], types.InputRequiredResult)
        assert "E3411" in text(results[1])


# Prompts and resources


async def read(client: Any) -> tuple[str, str]:
    """What a prompt and a resource of the upstream say, which ask first."""
    (message,) = (await client.get_prompt("asks-ask", {})).messages
    (content,) = (await client.read_resource(f"upstream:asks:{NOTE}")).contents
    return message.content.text, content.text


@DOOR
@WIRES
@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
@pytest.mark.parametrize("era", ["handshake", "modern"])
async def test_prompts_and_resources_ask_as_tools_do(world: World, wire: str, mode: str, era: str) -> None:
    ann, bob = Person("ann"), Person("bob")
    async with upstream(world, wire, protocol=era):
        async with (
            world.client(mode, **ann.options) as first,
            world.client(mode, await world.token(subject=OTHER), **bob.options) as second,
        ):
            told = await asyncio.gather(read(first), read(second))
        assert told == [(f"{who}:a prompt 0", f"{who}:a resource 0") for who in ("ann", "bob")]
        assert ann.asked == bob.asked == ["a prompt 0", "a resource 0"]
        async with world.client(mode, **Person(action="decline").options) as client:
            assert await read(client) == ("decline", "decline")
        async with world.client(mode) as client:
            why = "asks for more" if era == "modern" else "did not declare `elicitation`"
            for reading in (client.get_prompt("asks-ask", {}), client.read_resource(f"upstream:asks:{NOTE}")):
                with pytest.raises(MCPError, match=why):
                    await reading


@DOOR
async def test_a_prompt_that_waits_for_an_answer_is_read_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: Any = {"question-1": {"action": "accept", "content": {"answer": "yes"}}}
    async with (
        upstream(world, "http", protocol="handshake") as asking,
        world.client("2026-07-28", **Person().options) as client,
        world.client("2026-07-28", await world.token(subject=OTHER), **Person().options) as stranger,
    ):
        session: Any = client.session
        strange: Any = stranger.session
        first = await session.get_prompt("asks-ask", {}, allow_input_required=True)
        assert isinstance(first, types.InputRequiredResult)
        state = {"input_responses": answers, "request_state": first.request_state}
        with pytest.raises(MCPError, match="Invalid or expired requestState"):
            await strange.get_prompt("asks-ask", {}, **state)
        second = await session.get_prompt("asks-ask", {}, **state)
        assert second.messages[0].content.text == "yes"
        assert asking.begun == ["a prompt"]
        monkeypatch.setattr(suspended, "ANSWER_S", 0.2)
        await session.get_prompt("asks-ask", {}, allow_input_required=True)
        await until(lambda: asking.cancelled == ["a prompt"])
    acts = [record["act"] for record in records(world.app, "upstream:asks", "authority")]
    assert acts.count("prompt.read") == 3


# Over stdio


@DOOR
@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
async def test_a_client_over_stdio_is_asked_by_an_upstream_over_stdio(world: World, mode: str) -> None:
    person = Person()
    async with upstream(world, "stdio", protocol="handshake"):
        command = stdio(world, INTERLOCK_TOKEN=await world.token())
        async with Client(command, mode=mode, read_timeout_seconds=PATIENCE_S, **person.options) as client:
            results = await asyncio.gather(*(call(client, "ask", name) for name in "abc"))
    assert [text(one) for one in results] == [f"ann:n-{name} 0" for name in "abc"]


# Servers that speak both eras


@DOOR
@WIRES
async def test_a_server_of_both_eras_is_asked_in_the_era_of_a_client_that_can_be_asked(world: World, wire: str) -> None:
    spoken = {("legacy", True): "2025-11-25", ("legacy", False): "2026-07-28", ("2026-07-28", True): "2026-07-28"}
    async with upstream(world, wire):
        for (mode, able), era in spoken.items():
            async with world.client(mode, **(Person().options if able else {})) as client:
                assert text(await call(client, "calm", f"{mode}-{able}")) == f"calm {era}"
                if able:
                    assert text(await call(client, "ask", mode)) == f"ann:n-{mode} 0"

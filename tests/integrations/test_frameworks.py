"""LangChain and pydantic-ai call governed tools, as the libraries of the tests' own environment."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from langchain_core.messages import ToolMessage
from pydantic_ai import Agent, DeferredToolRequests, DeferredToolResults
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel

from interlock.api.tokens import Tokens
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.integrations import Toolkit
from tests import sample
from tests.integrations import page
from tests.integrations.provider_server import Call, Turn
from tests.integrations.scenario import play
from tests.integrations.world import PNG, World, opened, picture
from tests.support.calls import admit, until


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncGenerator[World]:
    async with opened(tmp_path / "home") as made:
        yield made


def speaking(turns: list[Turn]) -> FunctionModel:
    """A model that says these turns."""

    def speak(_: list[ModelMessage], __: AgentInfo) -> ModelResponse:
        turn = turns.pop(0)
        if isinstance(turn, str):
            return ModelResponse(parts=[TextPart(turn)])
        return ModelResponse(parts=[ToolCallPart(one.name, one.arguments, one.id) for one in turn])

    return FunctionModel(speak)


def _told(messages: Sequence[ModelMessage]) -> dict[str, str]:
    """What the model was told about its tool calls."""
    parts: list[Any] = [part for one in messages if isinstance(one, ModelRequest) for part in one.parts]
    return {one.tool_call_id: str(one.content) for one in parts if one.part_kind in ("tool-return", "retry-prompt")}


async def test_descriptions_of_upstreams_reach_models_whole(world: World):
    """The catalog keeps 2,000 characters for people; a model reads what the upstream wrote."""
    words = "Adds what it gets to the list. " * 120
    function: Json = {"name": "add", "description": words, "input_schema": {"type": "object", "properties": {}}}
    config: Json = {"declarations": [function], "urls": ["https://functions.example.com"]}
    added = await world.app.upstreams.add("lists", "functions", config, by=world.app.caller)
    assert [one.state for one in added.tools] == ["admitted"]
    kit = Toolkit(world.app, tools=["lists.add"])
    (chained,) = await kit.langchain()
    listed: list[Any] = []

    def look(_: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        listed.extend(info.function_tools)
        return ModelResponse(parts=[TextPart("seen")])

    await Agent(FunctionModel(look), toolsets=[kit.pydantic_ai()]).run("look")
    (declared,) = await kit.declarations("anthropic")
    assert {chained.description, listed[0].description, declared["description"]} == {words.strip()}


async def test_pydantic_ai_goes_through_the_conversation(world: World):
    ask = page.function("ask_pydantic_ai")

    async def converse(kit: Toolkit, turns: list[Turn]) -> dict[str, str]:
        told: dict[str, str] = {}

        def speak(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
            for message in messages:
                if isinstance(message, ModelRequest):
                    told.update(_told(messages))
            return inner(messages, info)

        inner: Any = speaking(turns).function
        assert await ask(FunctionModel(speak), kit, "please") == "done"
        return told

    await play(world, converse)


async def test_a_deferred_run_of_pydantic_ai_goes_on_only_if_the_reviewer_agreed(world: World):
    kit = Toolkit(world.app, token=world.token)
    turns: list[Turn] = [[Call("c1", "demo__send", {"to": "ann"})], "done"]
    agent = Agent(speaking(turns), toolsets=[kit.pydantic_ai(defer=True)], output_type=[str, DeferredToolRequests])
    waits = await agent.run("please")
    assert isinstance(waits.output, DeferredToolRequests)
    assert waits.output.metadata["c1"]["ticketId"].startswith("apr_")
    agreed = DeferredToolResults(approvals={"c1": True})
    again = await agent.run(message_history=waits.all_messages(), deferred_tool_results=agreed)
    assert isinstance(again.output, DeferredToolRequests), "the program agreed, and no reviewer of Interlock"
    assert sample.world.runs == 0
    assert await world.approve_all() == 1
    done = await agent.run(message_history=again.all_messages(), deferred_tool_results=agreed)
    assert done.output == "done"
    assert sample.world.runs == 1
    assert _told(done.all_messages())["c1"] == "ann"


async def test_langchain_tools_answer_tool_calls_and_plain_invocations(world: World):
    kit = Toolkit(world.app, token=world.token)

    async def converse(kit: Toolkit, turns: list[Turn]) -> dict[str, str]:
        tools = {one.name: one for one in await kit.langchain()}
        told: dict[str, str] = {}
        for turn in turns[:-1]:
            assert isinstance(turn, list)
            for one in turn:
                sent = {"type": "tool_call", "id": one.id, "name": one.name, "args": one.arguments}
                message = await tools[one.name].ainvoke(sent)
                assert isinstance(message, ToolMessage)
                failed = one.id == "c3"
                assert message.status == ("error" if failed else "success")
                assert failed or message.artifact["invocation_id"]
                told[one.id] = str(message.content)
        return told

    await play(world, converse)
    tools = {one.name: one for one in await kit.langchain()}
    assert await tools["demo__add"].ainvoke({"a": 1}) == "6"
    assert "key" in await tools["demo__increment"].ainvoke({"name": "visits"})
    assert sample.world.counters == {"visits": 1}
    with pytest.raises(NotImplementedError, match="use ainvoke"):
        tools["demo__add"].invoke({"a": 1})


async def test_images_are_native_content_of_the_frameworks(world: World):
    await admit(world.app, picture)
    kit = Toolkit(world.app, token=world.token, tools=["demo.picture"])
    (langchain,) = await kit.langchain()
    message = await langchain.ainvoke({"type": "tool_call", "id": "1", "name": langchain.name, "args": {"of": "sea"}})
    assert message.content == [
        {"type": "text", "text": "sea"},
        {"type": "image", "base64": base64.b64encode(PNG).decode(), "mime_type": "image/png"},
    ]
    seen: list[Any] = []

    def speak(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
        if len(messages) == 1:
            return ModelResponse(parts=[ToolCallPart("demo__picture", {"of": "sea"}, "2")])
        seen.extend(messages[-1].parts)
        return ModelResponse(parts=[TextPart("done")])

    await Agent(FunctionModel(speak), toolsets=[kit.pydantic_ai()]).run("please")
    text, image = seen[0].content
    assert (text, image.data, image.media_type) == ("sea", PNG, "image/png")


async def test_gemini_calls_are_answered_in_its_form(world: World):
    kit = Toolkit(world.app, token=world.token)
    parts: list[dict[str, Any]] = [
        {"functionCall": {"id": "g1", "name": "demo__add", "args": {"a": 1}}},
        {"functionCall": {"name": "demo__nothing", "args": {}}},
    ]
    reply: dict[str, Any] = {"candidates": [{"content": {"role": "model", "parts": parts}}]}
    first, second = await kit.answers(reply)
    assert first == {"functionResponse": {"id": "g1", "name": "demo__add", "response": {"output": 6}}}
    assert "no tool" in second["functionResponse"]["response"]["error"]


async def test_a_call_may_wait_for_the_decision(world: World):
    kit = Toolkit(world.app, token=world.token, wait_s=600)

    sent = {"type": "tool_use", "id": "t1", "name": "demo__send", "input": {"to": "ann"}}
    asked = asyncio.create_task(kit.answers({"content": [sent]}))
    await until(world.approve_all)
    assert await asked == [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "ann"}]},
    ]
    assert sample.world.runs == 1


async def test_a_toolkit_shows_what_its_caller_may_use_and_nothing_else(world: World):
    issued = await Tokens(world.app).issue(by=world.app.caller, agent="narrow", tools=["demo.add"])
    kit = Toolkit(world.app, token=issued["token"])
    assert [one["name"] for one in await kit.declarations("anthropic")] == ["demo__add"]
    sent = {"type": "tool_use", "id": "t1", "name": "demo__increment", "input": {"name": "x"}}
    (answer,) = await kit.answers({"content": [sent]})
    assert answer["is_error"]
    assert sample.world.counters == {}
    named = Toolkit(world.app, token=world.token, tools=["demo.send"])
    assert [one["name"] for one in await named.declarations("gemini")] == ["demo__send"]
    with pytest.raises(Failure):
        await Toolkit(world.app, token=issued["token"], tools=["demo.send"]).declarations("gemini")


async def test_a_token_that_is_not_valid_is_a_refusal_on_record(world: World):
    kit = Toolkit(world.app, token="not.a.token")
    sent = {"type": "tool_use", "id": "t1", "name": "demo__add", "input": {"a": 1}}
    (answer,) = await kit.answers({"content": [sent]})
    assert answer["is_error"]

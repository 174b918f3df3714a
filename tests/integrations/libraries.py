# pyright: basic, reportMissingImports=false
"""Tests with libraries that the environment of the tests does not have: `test_libraries.py` runs them in theirs."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from agents import OpenAIResponsesModel, set_tracing_disabled
from anthropic import AsyncAnthropic
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage
from openai import AsyncOpenAI

from interlock import Interlock
from interlock.integrations import Toolkit, adopt
from tests.integrations import fastmcp_shop, page, provider_server
from tests.integrations.provider_server import Call, Provider, Turn
from tests.integrations.scenario import play
from tests.integrations.world import World, opened, picture
from tests.support.calls import admit

Json = dict[str, Any]
set_tracing_disabled(True)


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncGenerator[World]:
    async with opened(tmp_path / "home") as made:
        yield made


def _of_chat(request: Json) -> dict[str, str]:
    return {one["tool_call_id"]: one["content"] for one in request["messages"] if one["role"] == "tool"}


def _of_responses(request: Json) -> dict[str, str]:
    return {one["call_id"]: one["output"] for one in request["input"] if one.get("type") == "function_call_output"}


def _of_anthropic(request: Json) -> dict[str, str]:
    blocks = [block for one in request["messages"] if isinstance(one["content"], list) for block in one["content"]]
    results = [one for one in blocks if one["type"] == "tool_result"]
    assert all(one.get("is_error", False) == (one["tool_use_id"] in ("c3", "x1")) for one in results)
    return {one["tool_use_id"]: one["content"][0]["text"] for one in results}


async def _converse(
    provider: Provider, ask: Any, client: Any, kit: Toolkit, turns: list[Turn], read: Callable[[Json], dict[str, str]]
) -> dict[str, str]:
    provider.say(*turns)
    provider.requests.clear()
    assert await ask(client, kit, "please") == "done"
    declared = json.dumps(provider.requests[0]["tools"])
    assert all(name in declared for name in ("demo__add", "demo__increment", "demo__send"))
    return read(provider.requests[-1])


LOOPS = {
    "openai": ("ask_openai", provider_server.chat, _of_chat),
    "openai-responses": ("ask_openai_responses", provider_server.responses, _of_responses),
    "anthropic": ("ask_anthropic", provider_server.anthropic, _of_anthropic),
}


@pytest.mark.parametrize("loop", LOOPS)
async def test_a_loop_of_your_own(loop: str, world: World):
    name, write, read = LOOPS[loop]
    ask = page.function(name)
    with provider_server.serving(write) as provider:
        made = AsyncAnthropic if loop == "anthropic" else AsyncOpenAI
        base = provider.url if loop == "anthropic" else f"{provider.url}/v1"
        async with made(base_url=base, api_key="none", max_retries=0) as client:

            async def converse(kit: Toolkit, turns: list[Turn]) -> dict[str, str]:
                return await _converse(provider, ask, client, kit, turns, read)

            await play(world, converse)
            wrong: list[Turn] = [[Call("x1", "demo__nothing", {})], "done"]
            assert "no tool" in (await converse(Toolkit(world.app, token=world.token), wrong))["x1"]


async def test_openai_agents(world: World):
    ask = page.function("ask_agents")
    with provider_server.serving(provider_server.responses) as provider:
        async with AsyncOpenAI(base_url=f"{provider.url}/v1", api_key="none", max_retries=0) as client:

            async def converse(kit: Toolkit, turns: list[Turn]) -> dict[str, str]:
                model = OpenAIResponsesModel("m", openai_client=client)
                return await _converse(provider, ask, model, kit, turns, _of_responses)

            await play(world, converse)
            strict = {one["name"]: one["strict"] for one in provider.requests[0]["tools"]}
            assert strict == {"demo__add": True, "demo__increment": True, "demo__send": True}


async def test_openai_agents_show_images(world: World):
    await admit(world.app, picture)
    kit = Toolkit(world.app, token=world.token, tools=["demo.picture"])
    ask = page.function("ask_agents")
    with provider_server.serving(provider_server.responses) as provider:
        async with AsyncOpenAI(base_url=f"{provider.url}/v1", api_key="none", max_retries=0) as client:
            provider.say([Call("c1", "demo__picture", {"of": "sea"})], "done")
            assert await ask(OpenAIResponsesModel("m", openai_client=client), kit, "please") == "done"
    (told,) = [one for one in provider.requests[-1]["input"] if one.get("type") == "function_call_output"]
    assert [one["type"] for one in told["output"]] == ["input_text", "input_image"]


class FakeModel(GenericFakeChatModel):
    """LangChain's fake model, which can be given tools."""

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self


async def test_langchain_agents(world: World):
    ask = page.function("ask_langchain")

    async def converse(kit: Toolkit, turns: list[Turn]) -> dict[str, str]:
        told: dict[str, str] = {}

        def speak() -> Any:
            for turn in turns:
                if isinstance(turn, str):
                    yield AIMessage(turn)
                else:
                    calls = [{"id": one.id, "name": one.name, "args": one.arguments} for one in turn]
                    yield AIMessage("", tool_calls=calls)

        class Model(FakeModel):
            def _generate(self, messages: Any, *args: Any, **more: Any) -> Any:
                told.update({one.tool_call_id: str(one.content) for one in messages if isinstance(one, ToolMessage)})
                return super()._generate(messages, *args, **more)

        assert await ask(Model(messages=speak()), kit, "please") == "done"
        return told

    await play(world, converse)


async def test_a_fastmcp_server_is_adopted_in_one_line(tmp_path: Path):
    async with Interlock.open(tmp_path / "home") as app:
        await adopt(app, fastmcp_shop.mcp, name="shop", accept_hints=True)
        result = await app.call("shop.price", article="lamp")
        assert result.unwrap()["structuredContent"] == {"result": 4}
    # The upstream is found again when the data directory is opened the next time.
    async with Interlock.open(tmp_path / "home") as app:
        assert (await app.call("shop.price", article="table")).unwrap()["structuredContent"] == {"result": 5}

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""An agent of the OpenAI Agents SDK with a scripted model, in front of a catalog that is too large to list."""

from __future__ import annotations

import json
from typing import Any

from agents import Agent, ModelResponse, Runner, Usage, set_tracing_disabled
from agents.mcp import MCPServerStreamableHttp
from agents.models.interface import Model
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

from tests.clients.common import PATIENCE_S, run
from tests.clients.large import FEWEST, MOST, TURNS, WANTED

set_tracing_disabled(True)


class Scripted(Model):
    """Calls one tool after the other, and says what it was told at the end."""

    def __init__(self) -> None:
        self.offered: list[set[str]] = []
        self.heard: Any = None

    async def get_response(self, system_instructions, input, model_settings, tools, *_, **__):  # noqa: A002
        self.offered.append({one.name for one in tools})
        turn, self.heard = len(self.offered) - 1, input
        if turn < len(TURNS):
            name, arguments = TURNS[turn]
            output: Any = ResponseFunctionToolCall(
                type="function_call", call_id=f"call-{turn}", name=name, arguments=json.dumps(arguments)
            )
        else:
            text = ResponseOutputText(type="output_text", text="done", annotations=[])
            output = ResponseOutputMessage(id="m", type="message", role="assistant", status="completed", content=[text])
        return ModelResponse(output=[output], usage=Usage(), response_id=None)

    def stream_response(self, *_: Any, **__: Any):
        raise NotImplementedError


async def probe(target: dict[str, Any], wire: str) -> set[str]:
    headers = {"Authorization": f"Bearer {target['token']}"}
    params = {"url": target["url"], "headers": headers, "timeout": PATIENCE_S}
    model = Scripted()
    async with MCPServerStreamableHttp(params, client_session_timeout_seconds=PATIENCE_S) as server:
        ended = await Runner.run(Agent(name="a", model=model, mcp_servers=[server]), "what is 20 + 22?", max_turns=8)
    assert ended.final_output == "done"
    assert FEWEST <= len(model.offered[0]) <= MOST, model.offered[0]
    assert WANTED not in model.offered[0]
    assert WANTED in model.offered[2], "the list was asked for again"
    assert "42" in json.dumps(model.heard[-1], default=str), model.heard[-1]
    return {"worked"}


if __name__ == "__main__":
    run(probe)

"""Run in an environment of the model providers' own libraries: makes tool calls, and checks tools and messages.

Prints tool calls as the libraries hand them to a program, then reads {provider: {"tools": [], "messages": []}} and
fails unless the types of the libraries fit them.
"""

# pyright: basic, reportMissingImports=false
# The libraries are in an environment of their own.

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from anthropic.types import ToolParam, ToolResultBlockParam, ToolUseBlock
from google.genai import types as gemini
from openai.types.chat import (
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.responses import FunctionToolParam, ResponseFunctionToolCall
from openai.types.responses.response_input_item_param import FunctionCallOutput
from pydantic import TypeAdapter

NAME, WRITTEN = "demo__add", '{"a": 2, "b": 3}'
TYPES: dict[str, tuple[Any, Any]] = {
    "openai-chat": (ChatCompletionFunctionToolParam, ChatCompletionToolMessageParam | ChatCompletionUserMessageParam),
    "openai-responses": (FunctionToolParam, FunctionCallOutput),
    "anthropic": (ToolParam, ToolResultBlockParam),
    "gemini": (gemini.FunctionDeclaration, gemini.Part),
}


def calls() -> dict[str, list[Any]]:
    arguments = json.loads(WRITTEN)
    chat = {"id": "call_1", "type": "function", "function": {"name": NAME, "arguments": WRITTEN}}
    anthropic = {"id": "call_1", "type": "tool_use", "name": NAME, "input": arguments}
    responses = {"call_id": "call_1", "type": "function_call", "name": NAME, "arguments": WRITTEN}
    part = gemini.Part(function_call=gemini.FunctionCall(name=NAME, args=arguments))
    assert part.function_call is not None
    return {
        "openai-chat": [ChatCompletionMessageFunctionToolCall.model_validate(chat).model_dump()],
        "openai-responses": [ResponseFunctionToolCall.model_validate(responses).model_dump()],
        "anthropic": [ToolUseBlock.model_validate(anthropic).model_dump()],
        "gemini": [
            part.model_dump(),
            part.model_dump(by_alias=True, exclude_none=True),
            part.function_call.model_dump(),
        ],
    }


def plain(value: Any) -> Any:
    """What a validator gave back, as JSON. It reads lists lazily."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | Iterator):
        return [plain(one) for one in value]
    return value


def check(sent: Any, kind: Any) -> None:
    if isinstance(kind, type) and issubclass(kind, gemini.Part | gemini.FunctionDeclaration):
        kind.model_validate(sent)  # refuses fields that it does not know
        return
    # Typed dictionaries ignore those, so what is left is compared.
    adapter = TypeAdapter[Any](kind)  # used for as long as lists are read
    assert plain(adapter.validate_python(sent)) == sent, sent


if __name__ == "__main__":
    print(json.dumps(calls()), flush=True)
    for provider, told in json.load(sys.stdin).items():
        tools, messages = TYPES[provider]
        for one in told["tools"]:
            check(one, tools)
        for one in told["messages"]:
            check(one, messages)

"""Functions and tool calls in the forms of the model providers."""

from __future__ import annotations

import json

from interlock.data.schema import Json
from interlock.upstreams.formats import Provider


def asked(provider: Provider, name: str, arguments: Json, ident: str = "call_1") -> Json:
    """A tool call as a model of this provider makes it."""
    match provider:
        case "openai-chat":
            return {"type": "function", "id": ident, "function": {"name": name, "arguments": json.dumps(arguments)}}
        case "openai-responses":
            return {"type": "function_call", "call_id": ident, "name": name, "arguments": json.dumps(arguments)}
        case "anthropic":
            return {"type": "tool_use", "id": ident, "name": name, "input": arguments}
        case "gemini":
            return {"functionCall": {"id": ident, "name": name, "args": arguments}}


def name_of(declared: Json) -> str:
    return declared.get("name") or declared["function"]["name"]


PROVIDERS: tuple[Provider, ...] = ("openai-chat", "openai-responses", "anthropic", "gemini")
TAKES: Json = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Which city."}},
    "required": ["city"],
    "additionalProperties": False,
}


def declared(provider: Provider, name: str, schema: Json, **flags: bool) -> Json:
    """A function as a provider's request declares it."""
    facts: Json = {"name": name, "description": f"Says something about {name}."}
    match provider:
        case "openai-chat":
            return {"type": "function", "function": {**facts, "parameters": schema, **flags}}
        case "openai-responses":
            return {"type": "function", **facts, "parameters": schema, **flags}
        case "anthropic":
            return {**facts, "input_schema": schema, **flags}
        case "gemini":
            return {"functionDeclarations": [{**facts, "parametersJsonSchema": schema}]}

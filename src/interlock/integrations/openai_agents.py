"""Governed tools for the OpenAI Agents SDK."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from interlock.upstreams import formats

if TYPE_CHECKING:
    from interlock.contract.contract import Contract
    from interlock.data.schema import Json
    from interlock.integrations.kit import Kit


def governed(kit: Kit, name: str, contract: Contract) -> Any:
    """One tool as a `FunctionTool`, in strict mode if its schema has such a form. Failures are sent to the model."""
    declared = formats.declare(contract, "openai-responses", name=name, strict=True)

    agents = import_module("agents")

    async def invoke(context: Any, arguments: str) -> Any:
        _, parts = await kit.call(name, arguments, context.tool_call_id)
        shown = [_shown(agents, one) for one in parts]
        return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else shown

    return agents.FunctionTool(
        name=name,
        description=declared["description"],
        params_json_schema=declared["parameters"],
        strict_json_schema=declared["strict"],
        on_invoke_tool=invoke,
    )


def _shown(agents: Any, part: Json) -> Any:
    match part["type"]:
        case "input_text":
            return agents.ToolOutputText(text=part["text"])
        case "input_image":
            return agents.ToolOutputImage(image_url=part["image_url"])
        case _:
            return agents.ToolOutputFileContent(file_data=part["file_data"], filename=part["filename"])

"""Governed tools for pydantic-ai."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic_ai import BinaryContent, ModelRetry, RunContext, ToolReturn
from pydantic_ai.exceptions import ApprovalRequired, ToolFailed
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.toolsets import AbstractToolset, ToolsetTool
from pydantic_core import SchemaValidator, core_schema

from interlock.call.media import text_for_model
from interlock.core.errors import ErrorCode

if TYPE_CHECKING:
    from interlock.data.schema import Json
    from interlock.integrations.kit import Kit

# Interlock checks the arguments against the contract. pydantic-ai only has to know that they are an object.
_OBJECT = SchemaValidator(core_schema.dict_schema(core_schema.str_schema(), core_schema.any_schema()))


class GovernedToolset(AbstractToolset[Any]):
    """The tools of one caller. Wrong arguments ask the model to try again, any other failure is final for the call."""

    def __init__(self, kit: Kit, *, defer: bool) -> None:
        self._kit = kit
        self._defer = defer

    @property
    def id(self) -> str | None:
        return "interlock"

    async def get_tools(self, ctx: RunContext[Any]) -> dict[str, ToolsetTool[Any]]:
        tools: dict[str, ToolsetTool[Any]] = {}
        for name, contract in await self._kit.named():
            described = ToolDefinition(
                name=name,
                description=contract.manifest.full_description or contract.manifest.description,
                parameters_json_schema=contract.input.model_facing,
            )
            tools[name] = ToolsetTool(
                toolset=self, tool_def=described, max_retries=ctx.max_retries, args_validator=_OBJECT
            )
        return tools

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: ToolsetTool[Any]
    ) -> Any:
        result, parts = await self._kit.call(name, tool_args, ctx.tool_call_id)
        facts = {"invocation_id": result.invocation_id, "state": result.state}
        if result.pending and self._defer:
            raise ApprovalRequired({**facts, **result.metadata["pending"]})
        if result.error is not None and not result.pending:
            wrong = result.error.row.error_code == ErrorCode.INVALID_INPUT
            raise (ModelRetry if wrong else ToolFailed)(text_for_model(result))
        shown = [_shown(one) for one in parts]
        return ToolReturn(shown[0] if len(shown) == 1 else shown, metadata=facts)


def _shown(part: Json) -> str | BinaryContent:
    """A part of a result as pydantic-ai gives it to a model: text, or data of its type."""
    if part["type"] == "input_text":
        return part["text"]
    return BinaryContent.from_data_uri(part.get("image_url") or part["file_data"])

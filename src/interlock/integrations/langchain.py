"""Governed tools for LangChain and LangGraph."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, cast

from langchain_core.tools import BaseTool, ToolException
from pydantic import PrivateAttr

from interlock.call.media import text_for_model

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig

    from interlock.contract.contract import Contract
    from interlock.data.schema import Json
    from interlock.integrations.kit import Kit

# The id of the tool call that runs. LangChain gives it to `ainvoke`, and to `_arun` only the arguments.
_call_id: ContextVar[str | None] = ContextVar("interlock_langchain_call", default=None)


class GovernedTool(BaseTool):
    """A governed tool. Its messages hold the text for the model, and the whole result as their `artifact`.

    It is asynchronous, like the gateway: use `ainvoke`. To call a tool that changes something, pass the tool call of
    the model with its id, as agents do, and not only the arguments.
    """

    response_format: Literal["content", "content_and_artifact"] = "content_and_artifact"
    _kit: Kit = PrivateAttr()

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002 - LangChain's name
        call = cast("Json", input) if isinstance(input, dict) else {}
        token = _call_id.set(call.get("id") if call.get("type") == "tool_call" else None)
        try:
            return await super().ainvoke(cast("Any", input), config, **kwargs)
        finally:
            _call_id.reset(token)

    async def _arun(self, /, **arguments: Any) -> Any:
        result, parts = await self._kit.call(self.name, arguments, _call_id.get())
        if not result.ok and not result.pending:
            raise ToolException(text_for_model(result))
        return _content(parts), result.document()

    def _run(self, /, **arguments: Any) -> Any:
        raise NotImplementedError("governed tools are asynchronous: use ainvoke, or astream of the agent")


def _content(parts: Sequence[Json]) -> str | list[Json]:
    """The parts of a result as the content of a message: its text, or blocks if there is more than text."""
    if all(one["type"] == "input_text" for one in parts):
        return "\n".join(one["text"] for one in parts)
    return [_block(one) for one in parts]


def _block(part: Json) -> Json:
    match part["type"]:
        case "input_text":
            return {"type": "text", "text": part["text"]}
        case "input_image":
            kind, url = "image", part["image_url"]
        case _:
            kind, url = "file", part["file_data"]
    mime_type, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": kind, "base64": data, "mime_type": mime_type}


def governed(kit: Kit, name: str, contract: Contract) -> GovernedTool:
    """One tool, which calls through the toolkit."""
    tool = GovernedTool(
        name=name,
        description=contract.manifest.full_description or contract.manifest.description,
        args_schema=contract.input.model_facing,
        handle_tool_error=True,
    )
    tool._kit = kit  # pyright: ignore[reportPrivateUsage] - a private attribute cannot be given to the constructor
    return tool

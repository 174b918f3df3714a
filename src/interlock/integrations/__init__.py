"""Governed tools for agent frameworks and for loops that talk to a model provider.

    kit = Toolkit(app, token=token)
    agent = Agent(model, toolsets=[kit.pydantic_ai()])           # pydantic-ai
    agent = create_agent(model, tools=await kit.langchain())     # LangChain, LangGraph
    agent = Agent(name="…", tools=await kit.openai_agents())     # OpenAI Agents SDK
    tools = await kit.declarations("openai-chat")                # OpenAI, Anthropic, Gemini

`adopt` goes the other way: the tools of a FastMCP server become governed tools.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlock.integrations.mcp_server import adopt
    from interlock.integrations.toolkit import Toolkit

__all__ = ["Toolkit", "adopt"]

# Looked up when first used: the process of an adopted server needs nothing of the gateway.
_HOMES = {"Toolkit": "interlock.integrations.toolkit", "adopt": "interlock.integrations.mcp_server"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

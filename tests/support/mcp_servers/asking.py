"""A server made with the official SDK whose tools, prompt and resource ask their client something; in both eras.

In the handshake era a question is pushed in the middle of a call, in the modern era it is the result of the call.
"""

from __future__ import annotations

from typing import Any

import anyio
import mcp_types as types
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server
from starlette.applications import Starlette

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"answer": {"type": "string"}}}
TAKES: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}}
NOTE = "note://ask"
TOOLS = ("ask", "ask_twice", "ask_aside", "sample", "roots", "calm")


class Asking:
    """The tools. `ran` counts calls that came to their end; `met` waits until so many calls are under way."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ran: list[str] = []
        self.cancelled: list[str] = []
        self.expected = 1
        self.met = anyio.Event()

    async def list(self, ctx: Any, params: Any) -> types.ListToolsResult:
        tools = [types.Tool(name=name, description="Ask, then answer.", input_schema=TAKES) for name in TOOLS]
        return types.ListToolsResult(tools=tools)

    async def call(self, ctx: ServerRequestContext[Any, Any], params: types.CallToolRequestParams) -> Any:
        name = str((params.arguments or {}).get("name", ""))
        if not params.input_responses:
            self.begun.append(name)
        if len(self.begun) >= self.expected:
            self.met.set()
        await self.met.wait()
        try:
            told = (
                await self._modern(ctx, params, name)
                if ctx.protocol_version == "2026-07-28"
                else await _pushed(ctx, params, name)
            )
        except anyio.get_cancelled_exc_class():
            self.cancelled.append(name)
            raise
        if isinstance(told, types.InputRequiredResult):
            return told
        self.ran.append(name)
        return types.CallToolResult(content=[types.TextContent(text=told)])

    async def prompts(self, ctx: Any, params: Any) -> types.ListPromptsResult:
        return types.ListPromptsResult(prompts=[types.Prompt(name="ask")])

    async def prompt(self, ctx: ServerRequestContext[Any, Any], params: types.GetPromptRequestParams) -> Any:
        told = await self._told(ctx, params, "a prompt")
        if isinstance(told, types.InputRequiredResult):
            return told
        content = types.TextContent(text=told)
        return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=content)])

    async def resources(self, ctx: Any, params: Any) -> types.ListResourcesResult:
        return types.ListResourcesResult(resources=[types.Resource(uri=NOTE, name="ask")])

    async def resource(self, ctx: ServerRequestContext[Any, Any], params: types.ReadResourceRequestParams) -> Any:
        told = await self._told(ctx, params, "a resource")
        if isinstance(told, types.InputRequiredResult):
            return told
        return types.ReadResourceResult(contents=[types.TextResourceContents(uri=params.uri, text=told)])

    async def _told(self, ctx: Any, params: Any, what: str) -> str | types.InputRequiredResult:
        """Ask for a prompt or a resource as the tool `ask` does."""
        asking = types.CallToolRequestParams(name="ask", input_responses=params.input_responses)
        self.begun.append(what)
        if ctx.protocol_version == "2026-07-28":
            return await self._modern(ctx, asking, what)
        try:
            return await _pushed(ctx, asking, what)
        except anyio.get_cancelled_exc_class():
            self.cancelled.append(what)
            raise

    async def _modern(
        self, ctx: ServerRequestContext[Any, Any], params: types.CallToolRequestParams, name: str
    ) -> str | types.InputRequiredResult:
        if params.name == "calm":
            return f"calm {ctx.protocol_version}"
        if params.input_responses:
            return " ".join(_words(one) for one in params.input_responses.values())
        asked: dict[str, Any] = {}
        if params.name == "sample":
            asked["one"] = types.CreateMessageRequest(
                params=types.CreateMessageRequestParams(messages=[], max_tokens=9)
            )
        elif params.name == "roots":
            asked["one"] = types.ListRootsRequest()
        else:
            for number in range(2 if params.name == "ask_twice" else 1):
                form = types.ElicitRequestFormParams(message=f"{name} {number}", requested_schema=SCHEMA)
                asked[f"q{number}"] = types.ElicitRequest(params=form)
        return types.InputRequiredResult(input_requests=asked, request_state=f"state of {name}")


async def _pushed(ctx: ServerRequestContext[Any, Any], params: types.CallToolRequestParams, name: str) -> str:
    session: Any = ctx.session
    related = None if params.name == "ask_aside" else ctx.request_id
    told: dict[int, str] = {}

    async def ask(number: int) -> None:
        told[number] = _words(await session.elicit_form(f"{name} {number}", SCHEMA, related_request_id=related))

    match params.name:
        case "calm":
            return f"calm {ctx.protocol_version}"
        case "sample":
            return _words(await session.create_message(messages=[], max_tokens=9, related_request_id=related))
        case "roots":
            return _words(await session.list_roots())
        case "ask_twice":
            async with anyio.create_task_group() as group:
                group.start_soon(ask, 0)
                group.start_soon(ask, 1)
            return f"{told[0]} {told[1]}"
        case _:
            await ask(0)
            return told[0]


def _words(answer: Any) -> str:
    match answer:
        case types.ElicitResult():
            return str((answer.content or {}).get("answer", "")) if answer.action == "accept" else answer.action
        case types.CreateMessageResult():
            return str(getattr(answer.content, "text", ""))
        case types.ListRootsResult():
            return ",".join(str(one.uri) for one in answer.roots)
        case _:
            return repr(answer)


def server(asking: Asking) -> Server[Any]:
    return Server(
        "asking",
        version="1",
        on_list_tools=asking.list,
        on_call_tool=asking.call,
        on_list_prompts=asking.prompts,
        on_get_prompt=asking.prompt,
        on_list_resources=asking.resources,
        on_read_resource=asking.resource,
    )


def app(asking: Asking) -> Starlette:
    return server(asking).streamable_http_app(stateless_http=False, json_response=False)


async def _main() -> None:
    one = server(Asking())
    async with stdio_server() as (incoming, outgoing):
        await one.run(incoming, outgoing, one.create_initialization_options())


if __name__ == "__main__":
    anyio.run(_main)

"""The peers as servers: `python -m bench.doors_peers NAME [ARGUMENT]` prints its port and serves until stdin closes.

Each does as little as it can for the answer, governs nothing and runs as its makers recommend for speed: uvicorn with
uvloop and httptools, no access log, stateless, JSON instead of streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

Json = dict[str, Any]
ACCOUNTS = {"cash": 1000, "savings": 0}


def sdk(_: str) -> Any:
    """The mcp SDK's low-level server with one tool, over HTTP."""
    return _sdk_server().streamable_http_app(stateless_http=True, json_response=True)


def _sdk_server() -> Any:
    """The mcp SDK's low-level server with one tool; its schema is at hand, so that no call lists tools."""
    import mcp_types as types
    from mcp.server import Server

    schema: Json = {"type": "object", "properties": {"account": {"type": "string"}}, "required": ["account"]}

    async def call(_: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        found = ACCOUNTS[(params.arguments or {})["account"]]
        return types.CallToolResult(content=[types.TextContent(text=str(found))], structured_content={"result": found})

    async def listed(_: Any, __: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[tool], ttl_ms=0, cache_scope="private")

    words = "Balance of one account, in cents."
    tool = types.Tool(
        name="balance", description=words, input_schema=schema, annotations=types.ToolAnnotations(read_only_hint=True)
    )
    server: Server[Any] = Server(
        "peer", version="1", on_call_tool=call, on_list_tools=listed, get_tool_input_schema=lambda _: schema
    )
    return server


def quick_mcp(_: str) -> Any:
    """An MCP server that only recognises the method of a request, over HTTP.

    It answers several times as fast as the SDK's server, so that what limits a proxy of it is the proxy.
    """
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        content = b""
        while (part := await receive())["type"] == "http.request":
            content += part["body"]
            if not part["more_body"]:
                break
        await Response(_quick_answer(content), media_type="application/json")(scope, receive, send)

    return app


def _quick_answer(content: bytes) -> bytes:
    """The answer of the quick server to a message; empty for a notification."""
    message: Json = json.loads(content)
    if "id" not in message:
        return b""
    found = ACCOUNTS["cash"]
    told = {"content": [{"type": "text", "text": str(found)}], "structuredContent": {"result": found}}
    schema: Json = {"type": "object", "properties": {"account": {"type": "string"}}, "required": ["account"]}
    words = "Balance of one account, in cents."
    tool = {"name": "balance", "description": words, "inputSchema": schema, "annotations": {"readOnlyHint": True}}
    info = {"io.modelcontextprotocol/serverInfo": {"name": "quick", "version": "1"}}
    about = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, "_meta": info}
    results: Json = {"tools/call": told, "tools/list": {"tools": [tool]}, "server/discover": about}
    result = results.get(message["method"])
    outcome = {"error": {"code": -32601, "message": "Method not found"}} if result is None else {"result": result}
    return json.dumps({"jsonrpc": "2.0", "id": message["id"], **outcome}).encode()


def sdk_list(path: str) -> Any:
    """The mcp SDK's low-level server with the tools of a file, made into its models once."""
    import mcp_types as types
    from mcp.server import Server

    tools = [types.Tool.model_validate(one) for one in json.loads(Path(path).read_text())]

    async def listed(_: Any, __: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=tools, ttl_ms=0, cache_scope="private")

    server: Server[Any] = Server("peer", version="1", on_list_tools=listed)
    return server.streamable_http_app(stateless_http=True, json_response=True)


def fastmcp(_: str) -> Any:
    from fastmcp import FastMCP

    server: Any = FastMCP("peer")

    @server.tool
    async def balance(account: str) -> int:  # pyright: ignore[reportUnusedFunction] - registered
        """Balance of one account, in cents."""
        return ACCOUNTS[account]

    return server.http_app(stateless_http=True, json_response=True)


def fastmcp_proxy(url: str) -> Any:
    """FastMCP's proxy of an MCP server, with one client that is connected beforehand, as its makers advise."""
    from fastmcp import Client
    from fastmcp.server import create_proxy
    from starlette.applications import Starlette
    from starlette.routing import Mount
    from starlette.types import Receive, Scope, Send

    apps: list[Any] = []

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        async with Client(url) as client:
            made: Any = create_proxy(client)
            app = made.http_app(stateless_http=True, json_response=True)
            async with app.router.lifespan_context(app):
                apps.append(app)
                yield

    async def forward(scope: Scope, receive: Receive, send: Send) -> None:
        await apps[0](scope, receive, send)

    return Starlette(routes=[Mount("/", forward)], lifespan=lifespan)


def fastapi(_: str) -> Any:
    """An echo with a model for what comes in and what goes out."""
    from fastapi import FastAPI
    from pydantic import BaseModel

    class Body(BaseModel):
        tool_id: str
        parameters: Json

    app = FastAPI()

    # Not a string annotation: FastAPI would look for the model among the module's names.
    async def echo(body: Any) -> Any:
        return body

    echo.__annotations__ = {"body": Body, "return": Body}
    app.post("/echo")(echo)
    return app


def starlette(_: str) -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def echo(request: Request) -> JSONResponse:
        return JSONResponse(await request.json())

    return Starlette(routes=[Route("/echo", echo, methods=["POST"])])


def backend(_: str) -> Any:
    """The server behind the proxy: it only answers."""
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await Response(b'{"balance":1000}', media_type="application/json")(scope, receive, send)

    return app


def proxy(origin: str) -> Any:
    """Starlette and one pooled aiohttp session: reads its caller's JSON, asks the backend, gives on what it says."""
    import aiohttp
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    sessions: list[aiohttp.ClientSession] = []

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        async with aiohttp.ClientSession(origin) as session:
            sessions.append(session)
            yield

    async def forward(request: Request) -> Response:
        asked = await request.json()
        async with sessions[0].get("/balance", params=asked["parameters"]) as answer:
            return Response(await answer.read(), status_code=answer.status, media_type=answer.content_type)

    return Starlette(routes=[Route("/proxy", forward, methods=["POST"])], lifespan=lifespan)


def grpc_echo() -> Any:
    """gRPC's own asyncio server, which gives every call of our contract the same answer, made beforehand."""
    import grpc.aio

    from interlock.doors.grpc.v1 import gateway_pb2 as messages

    answer = messages.CallResult(tool="balance", value_json=b"1000").SerializeToString()
    service = messages.DESCRIPTOR.services_by_name["Gateway"].full_name

    async def invoke(_: bytes, __: Any) -> bytes:
        return answer

    made: Any = grpc
    handler = made.method_handlers_generic_handler(service, {"Invoke": made.unary_unary_rpc_method_handler(invoke)})
    return made.aio.server(handlers=(handler,))


APPS: dict[str, Callable[[str], Any]] = {
    one.__name__: one for one in (sdk, quick_mcp, sdk_list, fastmcp, fastmcp_proxy, fastapi, starlette, backend, proxy)
}


async def _serve(app: Any) -> None:
    import uvicorn

    bound = socket.create_server(("127.0.0.1", 0), backlog=2048)
    server = uvicorn.Server(uvicorn.Config(app, http="httptools", log_level="error", access_log=False))
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    print(json.dumps({"port": bound.getsockname()[1]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = True
    await serving


async def _serve_stdio() -> None:
    from mcp.server.stdio import stdio_server

    server = _sdk_server()
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


async def _serve_quick_stdio() -> None:
    """The quick MCP server over stdio."""
    for line in sys.stdin.buffer:
        if answer := _quick_answer(line):
            sys.stdout.buffer.write(answer + b"\n")
            sys.stdout.buffer.flush()


async def _serve_grpc() -> None:
    server = grpc_echo()
    port: int = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"port": port}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


def main() -> None:
    import uvloop

    name, argument = (*sys.argv[1:], "")[:2]
    served = {grpc_echo.__name__: _serve_grpc, "sdk_stdio": _serve_stdio, "quick_stdio": _serve_quick_stdio}
    if name.endswith("_stdio"):
        os.sched_setaffinity(0, {int(argument)})  # its parent is one of the servers that are measured
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(served[name]() if name in served else _serve(APPS[name](argument)))


if __name__ == "__main__":
    main()

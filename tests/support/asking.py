"""An MCP upstream that asks the client whose call it answers, over HTTP or stdio."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from tests.support import forked
from tests.support.calls import use_policy
from tests.support.mcp import AGENT, OTHER, REVIEWER, World, serving
from tests.support.mcp_servers import asking as asking_server
from tests.support.mcp_servers.asking import TOOLS, Asking
from tests.support.source import ROOT


@asynccontextmanager
async def upstream(world: World, wire: str, **config: Any) -> AsyncGenerator[Asking]:
    """The server that asks, as the upstream `asks`; both agents may call its tools, which count as writes."""
    asking = Asking()
    await use_policy(world.app, "permit(principal, action, resource);\n")
    if wire == "stdio":
        command = [*forked.python(), "-m", "tests.support.mcp_servers.asking"]
        async with added(world, {"command": command, "cwd": str(ROOT), **config}):
            yield asking
        return
    app = asking_server.app(asking)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(app.router.lifespan_context(app))
        port = await stack.enter_async_context(serving(app))
        place = {"url": f"http://127.0.0.1:{port}/mcp", "allow_private": True}
        await stack.enter_async_context(added(world, {**place, **config}))
        yield asking


@asynccontextmanager
async def added(world: World, config: dict[str, Any]) -> AsyncGenerator[None]:
    """The server at a place of its own, as the upstream `asks`."""
    effects = [{"resource": "note:{name}", "operation": "UPDATE"}]  # so that calls for different names run side by side
    tools = {one: {"effects": effects} for one in TOOLS}
    report = await world.app.upstreams.add("asks", "mcp", config, by=world.app.caller, overlay={"tools": tools})
    assert report.count("admitted") == len(TOOLS)
    until_ms = world.app.clock.now_ms() + 600_000
    for agent in (AGENT, OTHER):
        for one in TOOLS:
            await world.app.standing_approvals.grant(
                f"asks.{one}", by=REVIEWER, caller=agent, arguments={"name": "n-*"}, uses=99, expires_ms=until_ms
            )
    try:
        yield
    finally:
        await world.app.upstreams.connections.get("asks").close()


def call(client: Any, tool: str, name: str) -> Any:
    """Call a tool of it."""
    return client.call_tool(f"asks-{tool}", {"name": f"n-{name}", "idempotency_key": f"{tool}-{name}"})

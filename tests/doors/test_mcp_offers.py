"""What an MCP upstream has besides tools, through the door: completed, asked, watched and logged, in both eras."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import mcp_types as types
import pytest
from mcp import Client, MCPError
from mcp.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    PromptsListChanged,
    ResourceUpdated,
)

from interlock.doors.mcp import resource_subscriptions
from tests.support.calls import records, until, use_policy
from tests.support.mcp import AGENT, OTHER, PATIENCE_S, REVIEWER, World, serving, world

__all__ = ["world"]

ERAS = pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
BEHIND = pytest.mark.parametrize("era", ["handshake", "modern"])
DOOR = pytest.mark.proves("OPS-02")
NOTE = "note://first"
SHOWN = f"upstream:other:{NOTE}"
TOOLS = ("work", "labour")
CLOSING = "closing of the upstream other"
# The SDK's client warns of what the modern era gave up; clients of the handshake era go on using it.
pytestmark = pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")


class Other:
    """Somebody else's server, of both eras: tools that log, a note that changes, a prompt that asks."""

    def __init__(self) -> None:
        self.bus = InMemorySubscriptionBus()
        self.subscribers: list[Any] = []
        self.levels: list[str] = []
        self.completed: list[Any] = []
        self.released = asyncio.Event()
        self.released.set()
        self.server = Server[Any]("other", on_subscriptions_listen=ListenHandler(self.bus))
        handlers: list[tuple[str, Any, Any]] = [
            ("tools/list", types.PaginatedRequestParams, self._tools),
            ("tools/call", types.CallToolRequestParams, self._call),
            ("resources/list", types.PaginatedRequestParams, self._resources),
            ("resources/subscribe", types.SubscribeRequestParams, self._subscribe),
            ("resources/unsubscribe", types.UnsubscribeRequestParams, self._unsubscribe),
            ("prompts/list", types.PaginatedRequestParams, self._prompts),
            ("prompts/get", types.GetPromptRequestParams, self._prompt),
            ("completion/complete", types.CompleteRequestParams, self._complete),
            ("logging/setLevel", types.SetLevelRequestParams, self._set_level),
        ]
        for method, params, handler in handlers:
            self.server.add_request_handler(method, params, handler)

    async def change(self) -> None:
        """Change the note."""
        await self.bus.publish(ResourceUpdated(NOTE))
        for session in self.subscribers:
            await session.send_resource_updated(NOTE)

    async def _tools(self, ctx: Any, params: Any) -> Any:
        schema: dict[str, Any] = {"type": "object"}
        tools = [types.Tool(name=name, description="Log, then wait.", input_schema=schema) for name in TOOLS]
        return types.ListToolsResult(tools=tools)

    async def _call(self, ctx: Any, params: Any) -> Any:
        for level in ("debug", "warning"):
            said = types.LoggingMessageNotificationParams(level=level, data=f"{level} word", logger="work")
            await ctx.session.send_notification(types.LoggingMessageNotification(params=said), ctx.request_id)
        await self.released.wait()
        return types.CallToolResult(content=[types.TextContent(text="done")])

    async def _resources(self, ctx: Any, params: Any) -> Any:
        return types.ListResourcesResult(resources=[types.Resource(uri=NOTE, name="first")])

    async def _subscribe(self, ctx: Any, params: Any) -> Any:
        self.subscribers.append(ctx.session)
        return types.EmptyResult()

    async def _unsubscribe(self, ctx: Any, params: Any) -> Any:
        self.subscribers.clear()
        return types.EmptyResult()

    async def _prompts(self, ctx: Any, params: Any) -> Any:
        return types.ListPromptsResult(prompts=[types.Prompt(name="greet")])

    async def _prompt(self, ctx: Any, params: types.GetPromptRequestParams) -> Any:
        if ctx.protocol_version == "2026-07-28" and not params.input_responses:
            schema: dict[str, Any] = {"type": "object", "properties": {"who": {"type": "string"}}}
            form = types.ElicitRequestFormParams(message="Whom?", requested_schema=schema)
            return types.InputRequiredResult(input_requests={"who": types.ElicitRequest(params=form)})
        answer = (params.input_responses or {}).get("who")
        who = answer.content["who"] if isinstance(answer, types.ElicitResult) and answer.content else "nobody"
        words = types.TextContent(text=f"greet {who}")
        return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=words)])

    async def _complete(self, ctx: Any, params: types.CompleteRequestParams) -> Any:
        self.completed.append(params.ref)
        return types.CompleteResult(completion=types.Completion(values=[f"{params.argument.value}nn"]))

    async def _set_level(self, ctx: Any, params: types.SetLevelRequestParams) -> Any:
        self.levels.append(params.level)
        return types.EmptyResult()


@asynccontextmanager
async def upstream(world: World, era: str) -> AsyncGenerator[Other]:
    """That server as the upstream `other`, spoken to in one era, of which each agent may call a tool."""
    other = Other()
    manager = StreamableHTTPSessionManager(other.server)
    await use_policy(world.app, "permit(principal, action, resource);\n")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await manager.handle_request(scope, receive, send)

    async with manager.run(), serving(app) as port:
        config = {"url": f"http://127.0.0.1:{port}/mcp", "allow_private": True, "protocol": era}
        report = await world.app.upstreams.add("other", "mcp", config, by=world.app.caller)
        assert report.count("admitted") == len(TOOLS)
        until_ms = world.app.clock.now_ms() + 60_000
        for agent, tool in zip((AGENT, OTHER), TOOLS, strict=True):
            await world.app.standing_approvals.grant(
                f"other.{tool}", by=REVIEWER, caller=agent, arguments={}, uses=9, expires_ms=until_ms
            )
        try:
            yield other
        finally:
            await world.app.upstreams.remove("other", by=world.app.caller)
            # The connector says farewell in a task. asyncio loses a connection that it accepts while the server closes.
            await until(lambda: not any(task.get_name() == CLOSING for task in asyncio.all_tasks()))


class Ear:
    """What a client hears besides answers."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, Any]] = []
        self.kinds: list[str] = []
        self.changed: list[str] = []

    async def log(self, said: types.LoggingMessageNotificationParams) -> None:
        self.logged.append((said.level, said.data))

    async def hear(self, message: Any) -> None:
        self.kinds.append(type(message).__name__)
        if isinstance(message, types.ResourceUpdatedNotification):
            self.changed.append(str(message.params.uri))

    @property
    def options(self) -> dict[str, Any]:
        return {"logging_callback": self.log, "message_handler": self.hear}


async def subscribe(client: Client, uri: str) -> None:
    await client.subscribe_resource(uri)  # pyright: ignore[reportDeprecated]


async def unsubscribe(client: Client, uri: str) -> None:
    await client.unsubscribe_resource(uri)  # pyright: ignore[reportDeprecated]


# Completion


@DOOR
@pytest.mark.parametrize(("mode", "era"), [("legacy", "modern"), ("2026-07-28", "handshake")])
async def test_arguments_of_an_upstreams_prompts_and_templates_are_completed_by_it(
    world: World, mode: str, era: str
) -> None:
    async with upstream(world, era) as other, world.client(mode) as client:
        prompt = types.PromptReference(name="other-greet")
        template = types.ResourceTemplateReference(uri=f"upstream:other:{NOTE}/{{who}}")
        for ref in (prompt, template):
            answer = await client.complete(ref, {"name": "who", "value": "a"})
            assert answer.completion.values == ["ann"]
        assert other.completed == [
            types.PromptReference(name="greet"),
            types.ResourceTemplateReference(uri=f"{NOTE}/{{who}}"),
        ]
        with pytest.raises(MCPError):
            await client.complete(types.PromptReference(name="greet"), {"name": "who", "value": "a"})
    acts = [record["act"] for record in records(world.app, "upstream:other", "authority")]
    assert [act for act in acts if "complete" in act] == ["prompt.complete", "resource.complete"]


# Questions


@DOOR
async def test_a_prompt_that_asks_first_asks_a_client_that_can_be_asked_and_no_other(world: World) -> None:
    async def answer(context: Any, params: Any) -> types.ElicitResult:
        return types.ElicitResult(action="accept", content={"who": "ann"})

    async with upstream(world, "modern"):
        for mode in ("legacy", "2026-07-28"):
            async with world.client(mode, elicitation_callback=answer) as client:
                (message,) = (await client.get_prompt("other-greet", {})).messages
            assert message.content == types.TextContent(text="greet ann")
            async with world.client(mode) as client:
                with pytest.raises(MCPError, match="asks for more"):
                    await client.get_prompt("other-greet", {})


# Changes


@DOOR
@ERAS
@BEHIND
async def test_a_client_that_watches_a_resource_is_told_when_it_changes_until_it_leaves(
    world: World, mode: str, era: str
) -> None:
    ear = Ear()
    async with upstream(world, era) as other, AsyncExitStack() as stack:
        client = await stack.enter_async_context(world.client(mode, **ear.options))
        if mode == "legacy":
            await subscribe(client, SHOWN)
            await subscribe(client, SHOWN)  # once is enough
            with pytest.raises(MCPError):
                await subscribe(client, "upstream:nobody:note://first")
        else:
            listening = client.listen(resource_subscriptions=[SHOWN, "upstream:nobody:note://first"])
            heard = await stack.enter_async_context(listening)
            assert heard.honored.resource_subscriptions == [SHOWN]
        for _ in range(2):
            await other.change()
            await until(lambda: ear.changed)
            assert ear.changed.pop() == SHOWN
        watches = world.door._sdk.changes._watching._watches  # pyright: ignore[reportPrivateUsage]
        assert list(watches) == [SHOWN]
        if mode == "legacy":
            await unsubscribe(client, SHOWN)
            assert not watches
            await subscribe(client, SHOWN)  # before the upstream has heard that it need not tell any more
            await other.change()
            await until(lambda: ear.changed)
            await unsubscribe(client, SHOWN)
            assert not watches
        else:
            await stack.aclose()
            await until(lambda: not watches)
    acts = [record["act"] for record in records(world.app, "upstream:other", "authority")]
    assert "resource.watch" in acts


@DOOR
@BEHIND
async def test_one_subscription_serves_all_and_is_made_again_when_the_conversation_broke(
    world: World, era: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource_subscriptions, "PAUSE_S", (0.0, 0.0))
    ears = Ear(), Ear()
    async with upstream(world, era) as other, AsyncExitStack() as stack:
        for ear in ears:
            client = await stack.enter_async_context(world.client("legacy", **ear.options))
            await subscribe(client, SHOWN)
        assert len(other.subscribers) == (1 if era == "handshake" else 0)
        await other.change()
        await until(lambda: all(ear.changed for ear in ears))
        before = [len(ear.changed) for ear in ears]
        server: Any = world.app.upstreams.connections.get("other")
        await server.replace()
        # What changed meanwhile was not heard, so they are told to look.
        await until(lambda: all(len(ear.changed) > had for ear, had in zip(ears, before, strict=True)))
    watches = world.door._sdk.changes._watching._watches  # pyright: ignore[reportPrivateUsage]
    await until(lambda: not watches)


@DOOR
async def test_what_a_caller_may_not_have_cannot_be_watched(world: World) -> None:
    async with upstream(world, "modern") as other:
        async with world.client("legacy", await world.token(["demo.*"])) as client:
            with pytest.raises(MCPError, match="Resource not found"):
                await subscribe(client, SHOWN)
        async with (
            world.client("2026-07-28", await world.token(["demo.*"])) as client,
            client.listen(resource_subscriptions=[SHOWN], tools_list_changed=True) as heard,
        ):
            assert heard.honored.resource_subscriptions is None
            await other.change()


@DOOR
@ERAS
async def test_clients_hear_that_an_upstreams_prompts_are_others(world: World, mode: str) -> None:
    ear = Ear()
    async with upstream(world, "modern") as other, AsyncExitStack() as stack:
        client = await stack.enter_async_context(world.client(mode, **ear.options))
        if mode != "legacy":
            await stack.enter_async_context(client.listen(prompts_list_changed=True))
        await client.list_prompts()
        ear.kinds.clear()
        await other.bus.publish(PromptsListChanged())
        await until(lambda: "PromptListChangedNotification" in ear.kinds)


# Logs

HEARD: tuple[tuple[types.LoggingLevel | None, list[str]], ...] = (
    ("debug", ["debug", "warning"]),
    ("error", []),
    ("notice", ["warning"]),
    (None, []),
)


@DOOR
@ERAS
@BEHIND
async def test_a_client_hears_what_a_tool_logs_from_the_level_it_asked_for(world: World, mode: str, era: str) -> None:
    async with upstream(world, era) as other:
        for level, heard in HEARD:
            ear = Ear()
            options = ear.options if mode == "legacy" else {**ear.options, "log_level": level}
            async with world.client(mode, **options) as client:
                if mode == "legacy" and level is not None:
                    await client.set_logging_level(level)  # pyright: ignore[reportDeprecated]
                key = {"idempotency_key": f"at-{level}"}
                result = await asyncio.wait_for(client.call_tool("other-work", key), PATIENCE_S)
                assert not result.is_error
                assert ear.logged == [(one, f"{one} word") for one in heard]
        assert other.levels == (["debug", "error", "notice"] if era == "handshake" else [])


@DOOR
@BEHIND
async def test_nobody_hears_what_is_logged_in_the_call_of_another(world: World, era: str) -> None:
    """Both calls are under way at once, and the server does not say whose it logs about."""
    mine, theirs = Ear(), Ear()
    async with upstream(world, era) as other:
        other.released.clear()
        options = [{**ear.options, "log_level": "debug"} for ear in (mine, theirs)]
        async with (
            world.client("2026-07-28", **options[0]) as first,
            world.client("2026-07-28", await world.token(subject=OTHER), **options[1]) as second,
        ):
            one = asyncio.ensure_future(first.call_tool("other-work", {"idempotency_key": "one"}))
            await until(lambda: len(mine.logged) == 2)
            two = asyncio.ensure_future(second.call_tool("other-labour", {"idempotency_key": "two"}))
            await until(lambda: len(theirs.logged) == 2)
            other.released.set()
            await asyncio.gather(one, two)
        assert len(mine.logged) == len(theirs.logged) == 2
        server: Any = world.app.upstreams.connections.get("other")
        assert server.health()["sessions"] == 3  # the shared one, and one for each who listens

"""The answers to MCP requests that go through the SDK: lists, calls, resources, prompts and completions.

The caller is read for each request. Over HTTP the entrance has put it into the request's scope; over stdio it is the
identity that started the process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import mcp_types as types
from mcp.shared.exceptions import MCPError

from interlock.api.mcp_names import Names
from interlock.api.service import Service
from interlock.call.connector import ALONE, Interaction
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.doors.mcp.calling import DOOR, Calling, Fault, Wanted, fault_of, no_trace, questions
from interlock.doors.mcp.context import (
    CALLER,
    Context,
    connection,
    faulty,
    meta,
    missing,
    named,
    native_ids,
    request_identity,
)
from interlock.doors.mcp.elicitation import LEVEL, News, hear, hears_log, interaction, listening, with_news
from interlock.doors.mcp.listing import EXPECTS, Listing, shows_apps
from interlock.doors.mcp.notifications import Changes
from interlock.doors.mcp.own_resources import TEMPLATE, is_own, read_own
from interlock.doors.mcp.surface_tools import SEARCH
from interlock.doors.mcp.suspended import SuspendedCalls
from interlock.telemetry.w3c import joined

if TYPE_CHECKING:
    from interlock.api.comparisons import Expected

Answer = Callable[[Context, Any], Awaitable[Json]]

_COMPLETE: Json = {"resultType": "complete"}
# An answer is for its caller alone and is not cached. The SDK omits these fields in earlier protocol versions.
_OWN: Json = {**_COMPLETE, "ttlMs": 0, "cacheScope": "private"}


class Handlers:
    """Answers the requests of MCP clients."""

    def __init__(self, service: Service, names: Names, listing: Listing, calling: Calling) -> None:
        self._service = service
        self._names = names
        self._listing = listing
        self._calling = calling
        self._suspended = SuspendedCalls(service, calling)
        self.changes = Changes(service, self._caller)
        self._offers = self.changes.offers
        # Asks who the client on stdin is. Not set over HTTP.
        self.stdio_caller: Callable[[], Awaitable[Caller]] | None = None
        # The one session that there is over stdio: requests of a process that is started again are others.
        self._stdio_session = service.app.clock.random_bytes(16).hex()

    def all(self) -> Iterator[tuple[str, type[types.RequestParams], Answer]]:
        """Each method with the type of its parameters and its handler."""
        answered: tuple[tuple[str, type[types.RequestParams], Answer], ...] = (
            ("tools/list", types.PaginatedRequestParams, self._list_tools),
            ("tools/call", types.CallToolRequestParams, self._call_tool),
            ("resources/list", types.PaginatedRequestParams, self._list_resources),
            ("resources/read", types.ReadResourceRequestParams, self._read_resource),
            ("resources/templates/list", types.PaginatedRequestParams, self._list_templates),
            ("prompts/list", types.PaginatedRequestParams, self._list_prompts),
            ("prompts/get", types.GetPromptRequestParams, self._get_prompt),
            ("resources/subscribe", types.SubscribeRequestParams, self.changes.subscribe),
            ("resources/unsubscribe", types.UnsubscribeRequestParams, self.changes.unsubscribe),
            ("completion/complete", types.CompleteRequestParams, self._complete),
            ("logging/setLevel", types.SetLevelRequestParams, self._set_level),
            *self._suspended.tasks.handlers(self._caller),
        )
        for method, params, handler in answered:
            yield method, params, _guarded(handler)

    # Lists

    async def _list_tools(self, ctx: Context, params: types.PaginatedRequestParams) -> Json:
        expected = _expected(ctx, self._names)
        caller = await self._caller(ctx)
        await self.changes.listed(ctx, caller)
        shows = _shows_apps(ctx)
        samples = self._calling.samples(interaction(ctx))
        described, cursor = await self._listing.page(caller, params.cursor, expected, shows_apps=shows, samples=samples)
        more = {} if cursor is None else {"nextCursor": cursor}
        return {"tools": [one.document for one in described], **_OWN, **more}

    def input_schema(self, name: str) -> Mapping[str, Any] | None:
        """The schema that the SDK compares a call's headers with. It asks before the caller is authenticated."""
        version = self._service.tools.named.known(self._names.address(name))
        return None if version is None else version.contract.input.model_facing

    async def look_up(self, name: str | None) -> None:
        """Find the tool that a request names in its headers: `input_schema` cannot wait."""
        if name is not None:
            with contextlib.suppress(Failure):
                await self._service.tools.named.resolve(self._names.address(name))

    # Calls

    async def _call_tool(self, ctx: Context, params: types.CallToolRequestParams) -> Json:
        caller = await self._caller(ctx)
        if caller.surface is not None:
            client = partial(interaction, ctx)
            apps = _shows_apps(ctx)
            expected = _expected(ctx, self._names) if params.name == SEARCH else None
            found = await self._calling.on_surface(
                params.name, params.arguments or {}, caller, client, meta=meta(ctx), apps=apps, expected=expected
            )
            if found is not None:
                if self._calling.loads(params.name):
                    await self.changes.loaded(ctx)
                return found
        sent = meta(ctx)
        headers: Mapping[str, str] = {} if ctx.request is None else ctx.request.headers
        trace = joined(headers.get("traceparent"), headers.get("tracestate"))
        news: News = asyncio.Queue()
        ids = native_ids(ctx)
        key, named = headers.get("idempotency-key"), request_identity(ctx, self._stdio_session)
        wanted = Wanted(
            params.name, params.arguments or {}, sent, trace, listening(ctx, news), native=ids, key=key, identity=named
        )
        progress = None if sent.get("progressToken") is None else partial(hear, news, "progress")
        if self._suspended.may_outlast(ctx, wanted):
            making = self._suspended.call(ctx, wanted, caller, news, progress=progress is not None)
        else:
            making = self._calling.call(wanted, caller, progress)
        if progress is None and not hears_log(wanted.interaction):
            return await making
        return await with_news(ctx, making, news)

    async def _set_level(self, ctx: Context, params: types.SetLevelRequestParams) -> Json:
        """From which level on a session of the handshake era hears what upstreams log during its calls."""
        connection(ctx).state[LEVEL] = params.level
        return {}

    # Resources and prompts

    async def _list_resources(self, ctx: Context, _: types.PaginatedRequestParams) -> Json:
        return {"resources": await self._offers.resources(await self._caller(ctx)), **_OWN}

    async def _list_templates(self, ctx: Context, _: types.PaginatedRequestParams) -> Json:
        offered = await self._offers.templates(await self._caller(ctx))
        return {"resourceTemplates": [TEMPLATE, *offered], **_OWN}

    async def _list_prompts(self, ctx: Context, _: types.PaginatedRequestParams) -> Json:
        return {"prompts": await self._offers.prompts(await self._caller(ctx)), **_OWN}

    async def _read_resource(self, ctx: Context, params: types.ReadResourceRequestParams) -> Json:
        """A resource of Interlock's own, for the caller that made the call; or one of an upstream."""
        caller, uri = await self._caller(ctx), named(str(params.uri))
        if not is_own(uri):
            read = partial(self._offers.read, uri, caller)
            return await self._offered(ctx, [uri], caller, read, _OWN, f"Resource not found: {uri}", uri=uri)
        try:
            return {"contents": [{"uri": uri, **await read_own(self._service, uri, caller)}], **_OWN}
        except Failure as failure:
            raise missing(failure, f"Resource not found: {uri}", uri=uri) from None

    async def _get_prompt(self, ctx: Context, params: types.GetPromptRequestParams) -> Json:
        name, arguments, caller = named(params.name), params.arguments or {}, await self._caller(ctx)
        get = partial(self._offers.prompt, name, arguments, caller)
        return await self._offered(ctx, [name, arguments], caller, get, _COMPLETE, f"Unknown prompt: {params.name}")

    async def _offered(
        self,
        ctx: Context,
        what: list[Any],
        caller: Caller,
        read: Callable[[Interaction], Coroutine[Any, Any, Json]],
        stamp: Json,
        absent: str,
        **data: str,
    ) -> Json:
        """The content of a resource or prompt of an upstream, or its questions to the client."""
        by = interaction(ctx) or ALONE
        reading = self._suspended.read([ctx.method, *what], by, caller, read) if by.calls_again else read(by)
        try:
            content = await reading
        except Failure as failure:
            asked = questions(by.answers if by.calls_again else None, failure)
            if asked is None:
                raise missing(failure, absent, **data) from None
            return asked
        return content if "inputRequests" in content else {**content, **stamp}

    async def _complete(self, ctx: Context, params: types.CompleteRequestParams) -> Json:
        sent, caller = ctx.params or {}, await self._caller(ctx)
        named(str(sent["ref"].get("name") or sent["ref"].get("uri")))
        try:
            answer = await self._offers.complete(sent["ref"], sent["argument"], sent.get("context"), caller)
        except Failure as failure:
            raise missing(failure, "There is nothing of that name to complete") from None
        return {**answer, **_COMPLETE}

    # Who calls

    async def _caller(self, ctx: Context) -> Caller:
        if ctx.request is not None:
            return cast("Caller", ctx.request.scope[CALLER])
        assert self.stdio_caller is not None
        try:
            return await self._service.surfaces.attach(await self.stdio_caller(), DOOR)
        except Failure as failure:
            raise MCPError(failure.row.jsonrpc, failure.message, failure.envelope(no_trace())) from None


def _guarded(handler: Answer) -> Answer:
    """A handler from which nothing but answers and faults gets out; the SDK would tell a client anything else."""

    async def answer(ctx: Context, params: Any) -> Json:
        try:
            return await handler(ctx, params)
        except MCPError:
            raise
        except Fault as fault:
            raise faulty(fault) from None
        except Exception as error:  # noqa: BLE001 - a door answers whatever happens
            raise faulty(fault_of(error)) from None

    return answer


def _expected(ctx: Context, names: Names) -> Expected | None:
    """The schemas that a client expects of tools, by address; None if it expects nothing."""
    sent: Any = meta(ctx).get(EXPECTS)
    if sent is None:
        return None
    if not isinstance(sent, dict):
        raise MCPError(types.INVALID_PARAMS, f"_meta[{EXPECTS!r}] must be an object, a schema for each tool")
    # Two names may be those of one tool: its id and the name at its upstream.
    return [(names.address(name), schema) for name, schema in cast("Json", sent).items()]


def _shows_apps(ctx: Context) -> bool:
    """Whether the client of a request shows the interfaces of MCP Apps."""
    declared = ctx.session.client_capabilities
    return declared is not None and shows_apps({"extensions": declared.extensions})

"""A client in the middle of its call: what an upstream asks of it, and what it hears while it waits."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine
from functools import partial
from typing import Any

import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata
from mcp_types import methods
from pydantic import ValidationError

from interlock.call.connector import ALONE, Interaction
from interlock.call.mcp import LOG_LEVEL, Listening
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.doors.mcp.context import Context, connection, meta, session_of
from interlock.doors.mcp.modern import MODERN

# What is heard of a call under way: progress, or a message of the log. None: it has ended.
News = asyncio.Queue[tuple[str, Json] | None]
# Where a session of the handshake era remembers from which level on it hears logs.
LEVEL = "interlock.level"
# Where it remembers its own name, by which calls of one client are known.
CLIENT = "interlock.client"
MAX_WAITING = 1000

# What an upstream may ask of a client, and how the modern era brings the answers.
_ASKED = ("elicitation", "sampling", "roots")
_ANSWERS = ("inputResponses", "requestState")
QUESTIONS: dict[str, tuple[Any, type[types.Result]]] = {
    "elicitation/create": (types.ElicitRequest, types.ElicitResult),
    "sampling/createMessage": (types.CreateMessageRequest, types.CreateMessageResult),
    "roots/list": (types.ListRootsRequest, types.ListRootsResult),
}
_LONGEST = 500


def listening(ctx: Context, news: News) -> Interaction | None:
    """Asks the client of a call, and sends it log messages if it asked for them."""
    asked = interaction(ctx)
    level = meta(ctx).get(LOG_LEVEL) if ctx.protocol_version == MODERN else connection(ctx).state.get(LEVEL)
    if level is None:
        return asked
    able = asked or ALONE
    tell = partial(hear, news, "message")
    return Listening(
        able.capabilities, able.ask, able.answers, able.calls_again, able.on_task, able.client, level=level, on_log=tell
    )


def hears_log(asked: Interaction | None) -> bool:
    """Whether a client asked for log messages during its call."""
    return isinstance(asked, Listening)


def interaction(ctx: Context) -> Interaction | None:
    """The way to ask the client of a request, if it supports elicitation."""
    declared = ctx.session.client_capabilities
    stated: Json = {} if declared is None else declared.model_dump(by_alias=True, mode="json", exclude_none=True)
    capabilities = {name: stated[name] for name in _ASKED if name in stated}
    if not capabilities:
        return None
    if ctx.protocol_version != MODERN:
        client = connection(ctx).state.setdefault(CLIENT, secrets.token_hex(16))
        return Interaction(capabilities, ask=lambda method, params: _ask(ctx, method, params), client=client)
    sent = ctx.params or {}
    return Interaction(capabilities, None, {name: sent[name] for name in _ANSWERS if name in sent}, calls_again=True)


async def _ask(ctx: Context, method: str, params: Json) -> Json:
    """Put an upstream's question to the client of this call; a Failure if it has no answer to it."""
    kind, expected = QUESTIONS[method]
    try:
        asked = kind.model_validate({"method": method, "params": params}, by_name=False)
        answer = await _answer_to(ctx, asked, expected)
    except MCPError as error:
        words = f"the client answered with an error: {error.error.message[:_LONGEST]}"
        raise Failure("E3411", words, details={"code": error.error.code}) from error
    except ValidationError as error:
        raise Failure("E3411", "the question or the client's answer to it is malformed") from error
    return answer.model_dump(by_alias=True, mode="json", exclude_none=True)


async def _answer_to(ctx: Context, asked: types.ServerRequest, expected: type[types.Result]) -> types.Result:
    """The client's answer. Over HTTP it may reach another server on the store, which must see that it is none of its
    own: the SDK counts its requests, and the same number is asked twice.
    """
    session = session_of(ctx)
    if session is None:
        metadata = ServerMessageMetadata(related_request_id=ctx.request_id)
        return await ctx.session.send_request(asked, expected, metadata=metadata)
    sent = asked.model_dump(by_alias=True, mode="json", exclude_none=True)
    channel = ctx.session._request_outbound  # pyright: ignore[reportPrivateUsage]
    answer = await channel.send_raw_request(asked.method, sent.get("params"), {"request_id": session.question()})
    methods.validate_client_result(asked.method, ctx.protocol_version, answer)
    return expected.model_validate(answer, by_name=False)


async def with_news(ctx: Context, making: Coroutine[Any, Any, Json], news: News) -> Json:
    """Make a call and pass on what is heard of it, in order and before its answer."""
    call = asyncio.ensure_future(making)
    call.add_done_callback(lambda _: news.put_nowait(None))
    far = -1.0
    try:
        while (item := await news.get()) is not None:
            kind, facts = item
            if kind == "message":
                await _pass_on(ctx, facts)
                continue
            # INVARIANT: progress never stands still or goes back, whatever the tool says.
            percent: float | None = facts["percent"]
            far = percent if percent is not None and percent > far else far + (1.0 if percent is None else 0.001)
            total = None if percent is None else 100.0
            await ctx.session.report_progress(far, total, facts["message"] or None)
    except BaseException:
        call.cancel()
        raise
    return await call


async def _pass_on(ctx: Context, params: Json) -> None:
    message = types.LoggingMessageNotification(params=types.LoggingMessageNotificationParams.model_validate(params))
    await ctx.session.send_notification(message, related_request_id=ctx.request_id)


def hear(news: News, kind: str, facts: Json) -> None:
    """Keep what is to be passed on. Who floods the client is not listened to until it has caught up."""
    if news.qsize() < MAX_WAITING:
        news.put_nowait((kind, facts))

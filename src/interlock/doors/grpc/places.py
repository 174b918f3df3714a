"""Bounds how many RPCs one peer without a token, or one caller with one, has open. Imported when the door opens.

An RPC takes one of the door's places from its first header on, before its message has come. So that nobody holds places
with headers alone, an RPC without a token that is known is handed its headers first and its message later:

    token known      the message is awaited by gRPC, then the method runs; so many of a caller are awaited at once
    token not known  the token is verified first. Then the message has 30 s to come
    health and reflection, which need no token: so many RPCs of one peer; the oldest ends to make room for a new one
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from interlock.core.errors import Failure
from interlock.doors.grpc import messages

# RPCs of health and reflection that one peer may have open, and all peers together.
VISITS_PER_PEER, VISITS = 32, 1024
# RPCs of one caller whose message gRPC awaits. Those on top are awaited by us, for a bounded time.
AWAITED = 500
# RPCs of one caller that are under way, out of the 10,000 that the door takes.
MOST_PER_CALLER = 2500
# How long a message may take to come once its RPC has begun.
START_WITHIN_S = 30.0

# A tenant and the id of a caller in it.
Owner = tuple[str, str]
Method: TypeAlias = Callable[[Any, Any], Awaitable[Any]]


class RunningRpcs:
    """Counts the running RPCs of each caller."""

    def __init__(self) -> None:
        self._under_way: Counter[Owner] = Counter()
        self._awaited: Counter[Owner] = Counter()

    def awaits(self, caller: Owner) -> bool:
        """Whether gRPC may await the message of one more RPC.

        An RPC that ends before its message comes is never taken off the count. Its caller's RPCs are then handled the
        other way, which differs in cost alone.
        """
        if self._awaited[caller] >= AWAITED:
            return False
        self._awaited[caller] += 1
        return True

    def came(self, caller: Owner) -> None:
        """A message that gRPC awaited is here."""
        _take(self._awaited, caller)

    def enter(self, caller: Owner) -> None:
        if self._under_way[caller] >= MOST_PER_CALLER:
            words = f"{MOST_PER_CALLER} RPCs of yours are under way, and no more are taken; wait until one has ended"
            raise Failure("E3701", words, retry_after_ms=1000)
        self._under_way[caller] += 1

    def leave(self, caller: Owner) -> None:
        _take(self._under_way, caller)


def _take(counts: Counter[Owner], name: Owner) -> None:
    left = counts[name] - 1
    if left > 0:
        counts[name] = left
    else:
        del counts[name]


async def first_message(context: Any) -> Any:
    """The first message of an RPC. E3002 if it does not come in time, E3004 if there is none."""
    try:
        async with asyncio.timeout(START_WITHIN_S):
            message = await context.read()
    except TimeoutError:
        raise Failure("E3002", "the RPC began, but its message did not come in time; send both together") from None
    if message is cast("Any", grpc.aio).EOF:
        raise Failure("E3004", "the RPC ended without a message; send one")
    return message


class Visits:
    """RPCs that need no token."""

    def __init__(self) -> None:
        self._all: dict[asyncio.Task[Any], str] = {}
        self._peers: dict[str, dict[asyncio.Task[Any], None]] = {}

    def bounded(self, method: Method) -> Method:
        """The method, as one of the visits of its peer."""

        async def act(requests: Any, context: Any) -> None:
            task = cast("asyncio.Task[Any]", asyncio.current_task())
            peer = context.peer().rpartition(":")[0]
            self._enter(task, peer)
            try:
                await method(requests, context)
            except Failure as failure:
                await refuse(context, failure)
            except asyncio.CancelledError:
                if task in self._all:
                    raise
                words = f"ended to make room: {VISITS_PER_PEER} RPCs without a token may be open from one address"
                await refuse(context, Failure("E3407", words))
            finally:
                self._leave(task, peer)

        return act

    def _enter(self, task: asyncio.Task[Any], peer: str) -> None:
        theirs = self._peers.setdefault(peer, {})
        self._all[task] = peer
        theirs[task] = None
        if len(theirs) > VISITS_PER_PEER:
            self._end(next(iter(theirs)))
        elif len(self._all) > VISITS:
            self._end(next(iter(self._all)))

    def _end(self, oldest: asyncio.Task[Any]) -> None:
        self._leave(oldest, self._all[oldest])
        oldest.cancel()

    def _leave(self, task: asyncio.Task[Any], peer: str) -> None:
        self._all.pop(task, None)
        theirs = self._peers.get(peer, {})
        theirs.pop(task, None)
        if not theirs:
            self._peers.pop(peer, None)


async def refuse(context: Any, failure: Failure, code: grpc.StatusCode | None = None) -> None:
    """End an RPC that no call came about for, with the envelope that every failure has."""
    code = code or grpc.StatusCode[failure.row.grpc]
    status = messages.status(failure, os.urandom(16).hex())
    status.code = code.value[0]
    await context.abort(code, status.message, (("grpc-status-details-bin", status.SerializeToString()),))


class Unknown(grpc.GenericRpcHandler):  # pyright: ignore[reportMissingTypeArgument] - it takes none at run time
    """The last handler: refuses RPCs that no other knows, in place of gRPC, whose refusal has no envelope."""

    def __init__(self, visits: Visits) -> None:
        async def act(_requests: Any, context: Any) -> None:
            words = "there is no such RPC here; reflection lists those that there are"
            await refuse(context, Failure("E3004", words), grpc.StatusCode.UNIMPLEMENTED)

        self._method: Any = cast("Any", grpc).stream_stream_rpc_method_handler(visits.bounded(act))

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._method


def health_handler(servicer: Any, name: str, visits: Visits) -> Any:
    """The health service over its servicer, with messages that are awaited for a bounded time."""

    async def check(_: Any, context: Any) -> None:
        await context.write(await servicer.Check(await first_message(context), context))

    async def watch(_: Any, context: Any) -> None:
        await servicer.Watch(await first_message(context), context)

    made = cast("Any", grpc)  # its stubs leave these functions open
    methods = {
        method: made.stream_stream_rpc_method_handler(
            visits.bounded(act),
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        for method, act in (("Check", check), ("Watch", watch))
    }
    return made.method_handlers_generic_handler(name, methods)

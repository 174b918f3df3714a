"""WebSocket services: many concurrent calls over a few connections, each answer matched to its call by an id.

Theory of operation. A connection is opened with a credential and serves only calls with that credential. A call is one
message out and one message in. The message is JSON-RPC, or a template that the operator wrote; the id in it is ours,
new for every call on a connection, and the answer that carries it in `id_field` belongs to the call. Messages that
answer no waiting call are dropped: events, and late answers.

`websocket_links` has the connections: how many there are, who shares one, and when one is opened again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from interlock.call.connector import Discovered, RemoteCall
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.net import addresses
from interlock.upstreams import templates, wire
from interlock.upstreams.kinds import Site
from interlock.upstreams.response_limits import Intake
from interlock.upstreams.sender import Sender, Sleep
from interlock.upstreams.websocket_config import WebSocketConfig
from interlock.upstreams.websocket_links import Links, value_at

if TYPE_CHECKING:
    from interlock.resilience.services import Services


class WebSocketUpstream:
    """Calls one WebSocket service."""

    def __init__(
        self,
        name: str,
        config: WebSocketConfig,
        *,
        clock: Clock,
        resolve: addresses.Resolve = addresses.resolve_by_system,
        sleep: Sleep = asyncio.sleep,
        services: Services | None = None,
    ) -> None:
        self._name = name
        self._config = config
        intake = Intake(name, config.max_response_bytes, config.max_response_values)
        self._sender = Sender(
            name, config.urls, idempotent=config.idempotent, clock=clock, sleep=sleep, services=services
        )
        self._links = Links(name, config, intake, clock=clock, resolve=resolve, pacing=self._sender.pacing)

    async def call(self, call: RemoteCall) -> Any:
        return await self._sender.send(call, lambda one, url: wire.within(one, self._name, self._ask(one, url)))

    def mapping(self, native: Json, reported: Json) -> Json | None:
        return None

    async def discover(self, credentials: Mapping[str, str] | None = None) -> Discovered:
        return Discovered(tools=[tool.definition() for tool in self._config.tools])

    async def probe(self, credentials: Mapping[str, str] | None = None) -> None:
        from websockets.exceptions import ConnectionClosed

        url = self._config.urls[0]
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                link = self._links.open_to(url)
                if link is not None:
                    await (await link.socket.ping())
                    return
                socket = await self._links.connect(url, {}, "")
                try:
                    # A service that only accepts connections has not answered yet. One that closes this one has.
                    with contextlib.suppress(ConnectionClosed):
                        await (await socket.ping())
                    await socket.close()
                finally:
                    socket.transport.abort()
                if socket.flooded:
                    raise wire.unreached(self._name, "sends far more than it is asked for")
        except TimeoutError:
            raise wire.unreached(self._name, "does not answer") from None
        except Failure as failure:
            if "status" not in (failure.details or {}):
                raise  # a service that asks for a credential which a probe lacks has answered

    def forget(self) -> None:
        self._sender.forget()

    async def close(self) -> None:
        self._sender.close()
        await self._links.close()

    async def _ask(self, call: RemoteCall, url: str) -> Any:
        """Make one attempt at one endpoint."""
        link = await self._links.get(call, url)
        ident = link.next_id()
        native = call.native
        answer = await link.ask(ident, wire.to_json(self._message(call, ident)))
        error = value_at(answer, str(native["error"]))
        if error is not None:
            message = wire.excerpt(error if isinstance(error, str) else templates.text_of(error), call)
            raise Failure("E3401", f"`{self._name}` answered: {message}", details={"sent": True, "body": message})
        return value_at(answer, str(native["result"]))

    def _message(self, call: RemoteCall, ident: int) -> Json:
        native, arguments = call.native, call.arguments
        if "send" in native:
            named = templates.placeholders(native["send"])
            rest = {name: value for name, value in arguments.items() if name not in named}
            message: Json = templates.fill(native["send"], {**arguments, "id": ident}, rest)
        else:
            message = {"jsonrpc": "2.0", "id": ident, "method": native["method"], "params": arguments}
        if self._config.context:
            context: Json = {**call.trace, "deadlineMs": int(call.left_s * 1000)}
            if self._config.sends_caller:
                context |= call.identity
            if (key := wire.sent_key(call)) is not None:
                context["idempotencyKey"] = key
            message[self._config.context] = context
        return message


def make(name: str, config: Json, site: Site) -> WebSocketUpstream:
    """Make the connector of one upstream, not connected yet."""
    return WebSocketUpstream(name, WebSocketConfig.from_document(config), clock=site.clock, services=site.services)

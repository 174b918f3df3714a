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

import pydantic

from interlock.call.connector import Definition, Discovered, RemoteCall
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.net import addresses
from interlock.upstreams import templates, wire
from interlock.upstreams.kinds import Site
from interlock.upstreams.remote_config import ConfigPart, RemoteConfig, checked_url, keep_hidden
from interlock.upstreams.response_limits import Intake
from interlock.upstreams.sender import Sender, Sleep
from interlock.upstreams.websocket_links import Links, value_at

if TYPE_CHECKING:
    from interlock.resilience.services import Services


class WebSocketTool(ConfigPart):
    """An operation: a JSON-RPC `method`, or the message to `send` with `{id}` in the place of the id.

    In a template, `{name}` stands for the argument `name` and `{*}` for all others. `result` and `error` are their
    paths in the answer, as names with dots; an empty `result` is the whole answer.
    """

    name: str = pydantic.Field(min_length=1, max_length=128)
    description: str = pydantic.Field(min_length=1)
    input_schema: dict[str, Any]
    output_schema: dict[str, Any] | None = None
    method: str | None = None
    send: dict[str, Any] | None = None
    result: str = "result"
    error: str = "error"

    @pydantic.model_validator(mode="after")
    def _of_one_kind(self) -> WebSocketTool:
        if (self.method is None) == (self.send is None):
            raise ValueError("a tool has a JSON-RPC `method` or a message to `send`")
        if self.send is not None and "id" not in templates.placeholders(self.send):
            raise ValueError("the message to send says `{id}` somewhere, by which its answer is known")
        return self

    def definition(self) -> Definition:
        message: Json = {"method": self.method} if self.send is None else {"send": self.send}
        return Definition(
            name=self.name,
            description=self.description,
            input_schema=self.input_schema,
            output_schema=self.output_schema,
            native={"protocol": "websocket", **message, "result": self.result, "error": self.error},
        )


class WebSocketConfig(RemoteConfig):
    """A WebSocket service. `context` names the member of each message for trace, deadline and idempotency key; empty
    for a service that does not accept an unknown member.
    """

    urls: tuple[str, ...] = pydantic.Field(min_length=1, max_length=3)
    tools: tuple[WebSocketTool, ...] = ()
    id_field: str = pydantic.Field("id", min_length=1)
    context: str = "meta"
    subprotocols: tuple[str, ...] = ()
    max_connections: int = pydantic.Field(8, ge=1, le=1000)
    calls_per_connection: int = pydantic.Field(64, ge=1, le=10_000)
    ping_s: float = pydantic.Field(20.0, gt=0, le=600)

    @pydantic.field_validator("urls")
    @classmethod
    def _endpoints(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(checked_url(url, ("ws", "wss")) for url in urls)

    @pydantic.model_validator(mode="after")
    def _hidden(self) -> WebSocketConfig:
        keep_hidden(self, plain=any(url.startswith("ws:") for url in self.urls))
        return self


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

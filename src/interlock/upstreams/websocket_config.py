"""The configuration of an upstream on a WebSocket, with its operations."""

from __future__ import annotations

from typing import Any

import pydantic

from interlock.call.connector import Definition
from interlock.data.schema import Json
from interlock.upstreams import templates
from interlock.upstreams.remote_config import ConfigPart, RemoteConfig, checked_url, keep_hidden


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

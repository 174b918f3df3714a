"""Which connector serves which kind of upstream. The one place that knows them all, each loaded when first needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pydantic

from interlock.core.clock import Clock
from interlock.core.connector import Connector, UpstreamKind
from interlock.core.errors import Failure
from interlock.core.schema import Json
from interlock.resilience.services import Services

Config = TypeVar("Config", bound=pydantic.BaseModel)
# What is said about an upstream that concerns its tools and not its connection.
_OF_TOOLS = frozenset(("accept_hints", "prefix"))


def connector(
    name: str,
    kind: UpstreamKind,
    config: Json,
    changed: Callable[[], None],
    *,
    clock: Clock,
    logs: Path,
    services: Services,
    alert: Callable[[str], None],
) -> Connector:
    """A connector, not connected yet. Refuses with E3004 a configuration that cannot be used."""
    said = {key: value for key, value in config.items() if key not in _OF_TOOLS}
    match kind:
        case "mcp":
            from interlock.upstreams.mcp import McpConfig, McpUpstream

            return McpUpstream(
                name, _read(McpConfig, said), clock=clock, on_change=changed, logs=logs, alert=alert, services=services
            )
        case "http" | "openapi":
            from interlock.upstreams.http import HttpConfig, HttpUpstream

            return HttpUpstream(name, _read(HttpConfig, said), clock=clock, services=services)
        case "grpc":
            from interlock.upstreams.grpc import GrpcConfig, GrpcUpstream

            return GrpcUpstream(name, _read(GrpcConfig, said), clock=clock, services=services)
        case "websocket":
            from interlock.upstreams.websocket import WebSocketConfig, WebSocketUpstream

            return WebSocketUpstream(name, _read(WebSocketConfig, said), clock=clock, services=services)
        case "langchain":
            from interlock.upstreams.langchain import LangChainConfig, LangChainUpstream

            return LangChainUpstream(name, _read(LangChainConfig, said), clock=clock)


def _read(model: type[Config], said: Json) -> Config:
    try:
        return model.model_validate(said)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "configuration"
        raise Failure("E3004", f"the upstream's `{where}` cannot be used: {first['msg'].lower()}") from None

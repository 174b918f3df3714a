"""Which connector serves which kind of upstream. The one place that knows them all, each loaded when first needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args

import pydantic

from interlock.core.clock import Clock
from interlock.core.connector import Connector, UpstreamKind
from interlock.core.errors import Failure
from interlock.core.schema import Json
from interlock.resilience.services import Services
from interlock.upstreams.overlay import unknown

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
        case "functions":
            from interlock.upstreams.functions import FunctionsConfig, FunctionsUpstream

            return FunctionsUpstream(name, _read(FunctionsConfig, said), clock=clock, services=services)
        case "grpc":
            from interlock.upstreams.grpc import GrpcConfig, GrpcUpstream

            return GrpcUpstream(name, _read(GrpcConfig, said), clock=clock, services=services)
        case "websocket":
            from interlock.upstreams.websocket import WebSocketConfig, WebSocketUpstream

            return WebSocketUpstream(name, _read(WebSocketConfig, said), clock=clock, services=services)
        case "langchain":
            from interlock.upstreams.langchain import LangChainConfig, LangChainUpstream

            return LangChainUpstream(name, _read(LangChainConfig, said), clock=clock, on_change=changed)


def _read(model: type[Config], said: Json) -> Config:
    try:
        return model.model_validate(said)
    except pydantic.ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
    raise Failure("E3004", "the upstream's configuration: " + "; ".join(_words(model, one) for one in faults[:5]))


def _words(model: type[pydantic.BaseModel], fault: Any) -> str:
    """One fault of a configuration: where it is, and what to write instead."""
    place: tuple[int | str, ...] = fault["loc"]
    where = f"`{'.'.join(map(str, place))}`" if place else "it"
    match fault["type"]:
        case "missing":
            return f"{where} is missing"
        case "extra_forbidden":
            return f"{where} is " + unknown(str(place[-1]), _fields_at(model, place[:-1]), "not a field there")
        case "literal_error":
            return f"{where} is one of {fault['ctx']['expected']}"
        case kind if kind.endswith("_type"):
            return f"{where} is not {_TYPES.get(kind.removesuffix('_type'), 'of the right type')}"
        case _:
            message = str(fault["msg"]).removeprefix("Value error, ")
            return f"{where}: {message[0].lower()}{message[1:]}"


_TYPES = {
    "string": "a text",
    "dict": "an object",
    "model": "an object",
    "tuple": "a list",
    "list": "a list",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
}


def _fields_at(model: type[pydantic.BaseModel], place: tuple[int | str, ...]) -> list[str]:
    """The fields that may stand at a place of a configuration."""
    for step in place:
        if isinstance(step, int):
            continue
        field = model.model_fields.get(step)
        inner = None if field is None else _model_of(field.annotation)
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _model_of(annotation: Any) -> type[pydantic.BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_of(part)) is not None), None)

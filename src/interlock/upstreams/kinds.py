"""The kinds of upstream, one row each. A new kind is a module with a function `make`, and a row here.

A row says everything about a kind that others need to know. The module is imported when an upstream of the kind is
first used, so that its libraries cost nothing where there is none. A kind whose configuration is a file needs nothing
else; for other arguments it has a command in `interlock.cli.upstream_add`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol, cast

from interlock.core.record import dataclass

if TYPE_CHECKING:  # the command line reads this table to show its help, and loads nothing else for it
    from interlock.call.connector import Connector
    from interlock.core.clock import Clock
    from interlock.data.schema import Json
    from interlock.resilience.services import Services

# Configuration of the upstream's tools, not of its connection.
_OF_TOOLS = frozenset(("accept_hints", "prefix"))


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of upstream.

    `help` is for a kind that a file configures: the help of its command in `interlock upstream add`, with an example.
    `protocol` and `tool_kind` are what the manifests of its tools say. With `named_secrets` its configuration takes
    any number of secrets by name (`credentials`), otherwise one (`auth`). `in_process`: its tools run in this process,
    so that it is never added through an endpoint. `offers_content`: an upstream of this kind has resources and prompts
    too, and its connector is a `ContentConnector`. `of_clients`: servers in configuration files of agents are of
    this kind; there is one such kind.
    """

    module: str
    help: str = ""
    protocol: Literal["mcp", "openapi", "langchain", "custom"] = "custom"
    tool_kind: Literal["mcp_tool", "openapi_operation", "function"] = "function"
    named_secrets: bool = False
    in_process: bool = False
    offers_content: bool = False
    of_clients: bool = False


KINDS: Final[Mapping[str, Kind]] = {
    "mcp": Kind(
        "interlock.upstreams.mcp",
        protocol="mcp",
        tool_kind="mcp_tool",
        named_secrets=True,
        offers_content=True,
        of_clients=True,
    ),
    "openapi": Kind("interlock.upstreams.http", protocol="openapi", tool_kind="openapi_operation"),
    "http": Kind(
        "interlock.upstreams.http",
        """An HTTP service whose operations a file describes: where it is, and each with its method, path and schemas.

        `{name}` in path, query, headers and body stands for the argument of that name.

        \b
        urls: [https://rates.example.com]
        tools:
          - name: rate
            description: The rate of one currency.
            method: GET
            path: /v1/rates/{of}
            input_schema:
              type: object
              properties: {of: {type: string, description: the currency, examples: [CHF]}}
              required: [of]
            output_schema: {type: object, properties: {rate: {type: number}}}
        """,
    ),
    "grpc": Kind("interlock.upstreams.grpc"),
    "websocket": Kind(
        "interlock.upstreams.websocket",
        """A service on a WebSocket, whose operations a file describes: a JSON-RPC method, or a message to send.

        `{id}` in the message is repeated by the service in the `id_field` of its answer.

        \b
        urls: [wss://feed.example.com/v1]
        id_field: ref
        tools:
          - name: quote
            description: The last price of one share.
            send: {ref: "{id}", kind: quote, share: "{share}"}
            result: price
            input_schema:
              type: object
              properties: {share: {type: string, description: the share, examples: [ACME]}}
              required: [share]
            output_schema: {type: number}
        """,
    ),
    "langchain": Kind("interlock.upstreams.langchain", protocol="langchain", named_secrets=True, in_process=True),
    "functions": Kind("interlock.upstreams.functions"),
}


@dataclass(frozen=True, slots=True)
class Site:
    """The parts of the server that a connector may use."""

    clock: Clock
    services: Services
    logs: Path
    changed: Callable[[], None]
    alert: Callable[[str], None]


class _Module(Protocol):
    """A module that serves a kind."""

    def make(self, name: str, config: Json, site: Site, /) -> Connector: ...


def kind_of(name: str) -> Kind:
    """The row of a kind. Refuses with E3004 one that does not exist."""
    if name in KINDS:
        return KINDS[name]
    from interlock.core.errors import Failure
    from interlock.upstreams.overlay import unknown

    raise Failure("E3004", f"`{name}` is {unknown(name, list(KINDS), 'not a kind of upstream')}")


def kind_of_clients() -> str:
    """The kind of the servers in the configuration files of agents."""
    return next(name for name, kind in KINDS.items() if kind.of_clients)


def connector(name: str, kind: str, config: Json, site: Site) -> Connector:
    """A connector, not connected yet. Refuses with E3004 a configuration that cannot be used."""
    module = cast("_Module", importlib.import_module(kind_of(kind).module))
    return module.make(name, {key: value for key, value in config.items() if key not in _OF_TOOLS}, site)

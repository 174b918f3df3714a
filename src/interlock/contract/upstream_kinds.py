"""The kinds of upstream, one row each. A new kind is a module with a function `make`, and a row here.

A row says everything about a kind that others need to know: what the manifests of its tools state, how it is added, and
the module of its connector (`interlock.upstreams.kinds`). That module is named here and imported when an upstream of
the kind is first used, so that its libraries cost nothing where there is none. A kind whose configuration is a file
needs nothing else; for other arguments it has a command in `interlock.cli.upstream_add`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from interlock.core.record import dataclass


@dataclass(frozen=True, slots=True)
class UpstreamKind:
    """One kind of upstream.

    `help` is for a kind that a file configures: the help of its command in `interlock upstream add`, with an example.
    `protocol` (a row of `executors.PROTOCOLS`) and `tool_kind` are what the manifests of its tools say. With
    `named_secrets` its configuration takes any number of secrets by name (`credentials`), otherwise one (`auth`).
    `in_process`: its tools run in this process, so that it is never added through an endpoint. `offers_content`: an
    upstream of this kind has resources and prompts too, and its connector is a `ContentConnector`. `of_clients`:
    servers in configuration files of agents are of this kind; there is one such kind. `on_machine` are the fields of
    its configuration that use the machine the server runs on, such as a program to start or a file to read: an endpoint
    refuses a configuration with one of them.
    """

    module: str
    help: str = ""
    protocol: Literal["mcp", "openapi", "langchain", "custom"] = "custom"
    tool_kind: Literal["mcp_tool", "openapi_operation", "function"] = "function"
    named_secrets: bool = False
    in_process: bool = False
    offers_content: bool = False
    of_clients: bool = False
    on_machine: frozenset[str] = frozenset()


KINDS: Final[Mapping[str, UpstreamKind]] = {
    "mcp": UpstreamKind(
        "interlock.upstreams.mcp",
        protocol="mcp",
        tool_kind="mcp_tool",
        named_secrets=True,
        offers_content=True,
        of_clients=True,
        on_machine=frozenset(("command", "env", "cwd")),
    ),
    "openapi": UpstreamKind("interlock.upstreams.http", protocol="openapi", tool_kind="openapi_operation"),
    "http": UpstreamKind(
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
    "grpc": UpstreamKind("interlock.upstreams.grpc"),
    "websocket": UpstreamKind(
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
    "langchain": UpstreamKind(
        "interlock.upstreams.langchain",
        protocol="langchain",
        named_secrets=True,
        in_process=True,
        on_machine=frozenset(("module",)),
    ),
    "functions": UpstreamKind("interlock.upstreams.functions"),
}

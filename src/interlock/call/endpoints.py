"""The endpoints, one row each. A new one is a module with a function `open_door`, and a row here.

A row says everything about an endpoint that others need to know: how `interlock serve` names it and where it is found,
the advice that its callers get, and how their surfaces are attached. The `Door` that its module opens has the rest:
its routes, a port of its own, and how it ends (`interlock.doors.door`). It is named here and imported by a server only.

The name of a row stands in `door` of requests and records. Calls that come through no endpoint have names there too:
`cli`, `library`, `tool` for calls that a tool makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Final

from interlock.core.record import NamedTuple, dataclass


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint.

    `label` and `path` are shown by `interlock serve`. An endpoint without a path has a port of its own; `port` is its
    default, if an option of `interlock serve` sets it. `pages` are further addresses that are shown, by their names: a
    label and a path each. `stdio`: its module has a function `open_stdio` too, for `interlock serve --stdio`.

    `lists_tools`: the setting `surface_doors` may name it, so that its callers are shown a part of the catalog.
    `attaches_surfaces`: it does that for each request when it authenticates; for other endpoints the api does.
    `key_example` is how its callers write an idempotency key. `no_identity` says what to send if the key of a tool is
    the identity of the request, and the request has none; None where requests have no identity. `native` are the kind
    of the protocol and its method, if calls are known to its clients by ids that belong into their records.
    """

    module: str
    label: str = ""
    path: str = ""
    port: int | None = None
    pages: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    stdio: bool = False
    lists_tools: bool = False
    attaches_surfaces: bool = False
    key_example: str = '"idempotency_key": "order-17"'
    no_identity: str | None = None
    native: tuple[str, str] | None = None


ENDPOINTS: Final[Mapping[str, Endpoint]] = {
    "rest": Endpoint(
        "interlock.doors.rest",
        "REST",
        "/v1",
        pages={"docs": ("Docs", "/docs")},
        lists_tools=True,
        no_identity="missing; the key of this tool is the identity of the request: send the header"
        " `Idempotency-Key: order-17`",
    ),
    "mcp": Endpoint(
        "interlock.doors.mcp",
        "MCP",
        "/mcp",
        stdio=True,
        lists_tools=True,
        attaches_surfaces=True,
        no_identity="missing; the key of this tool is the id of the request within its session, and this request has no"
        ' session: send the header `Idempotency-Key: order-17`, or "interlock/key": "order-17" in `_meta`',
        native=("mcp", "tools/call"),
    ),
    "jsonrpc": Endpoint("interlock.doors.jsonrpc", "JSON-RPC", "/rpc", lists_tools=True),
    "grpc": Endpoint("interlock.doors.grpc", "gRPC", port=8081, lists_tools=True),
    "operations": Endpoint("interlock.doors.operations", pages={"metrics": ("Metrics", "/metrics")}),
}

# How many seconds calls in flight have to end when a server ends, unless `--drain-timeout` says otherwise.
DRAIN_S: Final = 30

# How callers that come through no endpoint write an idempotency key.
_LOCAL_KEYS: Final = {"cli": "--key order-17", "library": 'key="order-17"'}


class Address(NamedTuple):
    """The address of an endpoint or page; None if it is not served."""

    name: str
    label: str
    url: str | None


def addresses(base: str, host: str, ports: Mapping[str, int]) -> Iterator[Address]:
    """The addresses of all endpoints, then of their pages. `ports` are those of endpoints that have their own."""
    for name, row in ENDPOINTS.items():
        if row.path:
            yield Address(name, row.label, f"{base}{row.path}")
        elif row.label:
            yield Address(name, row.label, f"{host}:{ports[name]}" if name in ports else None)
    for row in ENDPOINTS.values():
        for name, (label, path) in row.pages.items():
            yield Address(name, label, f"{base}{path}")


def default_ports() -> dict[str, int]:
    """The default ports of endpoints that have a port of their own."""
    return {name: row.port for name, row in ENDPOINTS.items() if row.port is not None}


def listing_tools() -> list[str]:
    """The endpoints where callers list tools, those first that attach surfaces themselves."""
    names = [name for name, row in ENDPOINTS.items() if row.lists_tools]
    return sorted(names, key=lambda name: not ENDPOINTS[name].attaches_surfaces)


def key_example(door: str) -> str:
    """An example of an idempotency key as callers write it, by the `door` of the request."""
    if (local := _LOCAL_KEYS.get(door)) is not None:
        return local
    return (ENDPOINTS.get(door) or _UNKNOWN).key_example


def no_identity(door: str) -> str | None:
    """Advice for a caller whose request has no identity, by the `door` of the request."""
    return (ENDPOINTS.get(door) or _UNKNOWN).no_identity


def native(door: str) -> tuple[str, str] | None:
    """The protocol and method of ids by which clients know their calls, by the `door` of a record."""
    return (ENDPOINTS.get(door) or _UNKNOWN).native


# Calls through no endpoint, and records of an endpoint that there is no more.
_UNKNOWN: Final = Endpoint("")

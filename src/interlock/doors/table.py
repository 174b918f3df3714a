"""The doors, one row for each endpoint. A new one is a module with a function `open_door`, and a row here.

A row says how `interlock serve` names the endpoint and where it is found. The module says the rest by the `Door` that
it opens: its routes, a port of its own, and how it ends (`interlock.doors.door`). It is imported when a server starts.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Final, Protocol, cast

from interlock.core.record import NamedTuple, dataclass

if TYPE_CHECKING:
    from interlock.api.service import Service
    from interlock.doors.door import Door
    from interlock.doors.listening import Listening


@dataclass(frozen=True, slots=True)
class DoorKind:
    """One endpoint.

    `label` and `path` are shown by `interlock serve`; an endpoint without a path has a port of its own. `pages` are
    further addresses that are shown, by their names: a label and a path each. `stdio`: its module has a function
    `open_stdio` too, for `interlock serve --stdio`.
    """

    module: str
    label: str = ""
    path: str = ""
    pages: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    stdio: bool = False


DOORS: Final[Mapping[str, DoorKind]] = {
    "rest": DoorKind("interlock.doors.rest", "REST", "/v1", pages={"docs": ("Docs", "/docs")}),
    "mcp": DoorKind("interlock.doors.mcp", "MCP", "/mcp", stdio=True),
    "jsonrpc": DoorKind("interlock.doors.jsonrpc", "JSON-RPC", "/rpc"),
    "grpc": DoorKind("interlock.doors.grpc", "gRPC"),
    "operations": DoorKind("interlock.doors.operations", pages={"metrics": ("Metrics", "/metrics")}),
}


class StdioDoor(Protocol):
    """A door that serves one client over stdin and stdout."""

    async def run_stdio(self, token: str | None = None) -> None: ...

    async def drain(self, within_s: float) -> None:
        """Wait until the calls under way have ended; after the given time they are cut off."""
        ...


class _Module(Protocol):
    """A module that serves an endpoint."""

    def open_door(self, service: Service, listening: Listening, /) -> Door | None:
        """A door that does not listen yet; None if `listening` leaves it out."""
        ...

    def open_stdio(self, service: Service, /) -> StdioDoor: ...


class Address(NamedTuple):
    """The address of an endpoint or page; None if it is not served."""

    name: str
    label: str
    url: str | None


def open_doors(service: Service, listening: Listening) -> dict[str, Door]:
    """The doors of a server by their names, in the order of the table."""
    opened = {name: _module(row).open_door(service, listening) for name, row in DOORS.items()}
    return {name: door for name, door in opened.items() if door is not None}


def open_stdio(service: Service) -> StdioDoor:
    """The door for one client over stdin and stdout."""
    return _module(next(row for row in DOORS.values() if row.stdio)).open_stdio(service)


def addresses(base: str, host: str, ports: Mapping[str, int]) -> Iterator[Address]:
    """The addresses of all endpoints, then of their pages. `ports` are those of endpoints that have their own."""
    for name, row in DOORS.items():
        if row.path:
            yield Address(name, row.label, f"{base}{row.path}")
        elif row.label:
            yield Address(name, row.label, f"{host}:{ports[name]}" if name in ports else None)
    for row in DOORS.values():
        for name, (label, path) in row.pages.items():
            yield Address(name, label, f"{base}{path}")


def _module(row: DoorKind) -> _Module:
    return cast("_Module", importlib.import_module(row.module))

"""Connectors of upstreams, made by the modules that the table of kinds names (`interlock.contract.upstream_kinds`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from interlock.contract import upstream_kinds
from interlock.contract.upstream_kinds import UpstreamKind
from interlock.core.record import dataclass

if TYPE_CHECKING:
    from interlock.call.connector import Connector
    from interlock.core.clock import Clock
    from interlock.data.schema import Json
    from interlock.resilience.services import Services

# Configuration of the upstream's tools, not of its connection.
_OF_TOOLS = frozenset(("accept_hints", "prefix"))


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


def kind_of(name: str) -> UpstreamKind:
    """The row of a kind. Refuses with E3004 one that does not exist."""
    if name in upstream_kinds.KINDS:
        return upstream_kinds.KINDS[name]
    from interlock.core.errors import Failure
    from interlock.upstreams.overlay import unknown

    raise Failure("E3004", f"`{name}` is {unknown(name, list(upstream_kinds.KINDS), 'not a kind of upstream')}")


def kind_of_clients() -> str:
    """The kind of the servers in the configuration files of agents."""
    return next(name for name, kind in upstream_kinds.KINDS.items() if kind.of_clients)


def connector(name: str, kind: str, config: Json, site: Site) -> Connector:
    """A connector, not connected yet. Refuses with E3004 a configuration that cannot be used."""
    module = cast("_Module", importlib.import_module(kind_of(kind).module))
    return module.make(name, {key: value for key, value in config.items() if key not in _OF_TOOLS}, site)

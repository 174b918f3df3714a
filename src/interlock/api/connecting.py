"""Builds the manager of upstreams over the parts of a data directory. Loaded only where there are upstreams."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from interlock.upstreams.kinds import Site, connector
from interlock.upstreams.manager import Upstreams

if TYPE_CHECKING:
    from interlock.api.parts import Parts, TryOut
    from interlock.call.connector import Connector
    from interlock.data.schema import Json


def make_upstreams(parts: Parts, try_out: TryOut) -> Upstreams:
    """The upstreams of a data directory. `try_out` runs the contract tests of tools that they offer."""
    observer, services = parts.observer, parts.gateway.services

    def alert(name: str, words: str) -> None:
        observer.announce("tool.alert", "", "", alert="UPSTREAM_FAILED", upstream=name, reason=words)

    def make(name: str, kind: str, config: Json, changed: Callable[[], None]) -> Connector:
        site = Site(parts.clock, services, parts.home.path / "logs", changed, partial(alert, name))
        return connector(name, kind, config, site)

    return Upstreams(
        journal=parts.journal,
        catalog=parts.catalog,
        clock=parts.clock,
        make=make,
        lend=parts.authority.lend,
        try_out=try_out,
        announce=observer.announce,
        mention=observer.mention,
        look=parts.quarantine.look,
        answers=services.answers,
        supervisor=parts.supervisor,
        owner=parts.instance.id,
        alive=parts.instance.alive,
        probe_every_s=parts.settings.upstream_probe_s,
    )

"""Builds the manager of upstreams over the parts of a data directory. Loaded only where there are upstreams."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from interlock.upstreams.decisions import TryOut
from interlock.upstreams.kinds import Site, connector
from interlock.upstreams.manager import Upstreams

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.api.wiring.shared import Outside, Shared
    from interlock.call.connector import Connector
    from interlock.data.schema import Json
    from interlock.resilience.services import Services
    from interlock.upstreams.states import UpstreamStates


def make_upstreams(
    outside: Outside, shared: Shared, services: Services, states: UpstreamStates, *, logs: Path, try_out: TryOut
) -> Upstreams:
    """The upstreams of a data directory. `try_out` runs the contract tests of tools that they offer."""
    observer = shared.observer

    def alert(name: str, words: str) -> None:
        observer.announce("tool.alert", "", "", alert="UPSTREAM_FAILED", upstream=name, reason=words)

    def make(name: str, kind: str, config: Json, changed: Callable[[], None]) -> Connector:
        site = Site(outside.clock, services, logs, changed, partial(alert, name))
        return connector(name, kind, config, site)

    return Upstreams(
        journal=outside.journal,
        catalog=outside.catalog,
        clock=outside.clock,
        states=states,
        make=make,
        lend=outside.lend,
        try_out=try_out,
        announce=observer.announce,
        mention=observer.mention,
        look=shared.quarantine.look,
        answers=services.answers,
        supervisor=outside.supervisor,
        owner=outside.instance.id,
        alive=outside.instance.alive,
        probe_every_s=outside.settings.upstream_probe_s,
    )

"""The parts of a data directory that is not opened, as far as a search of its tools needs them.

The tools that a caller sees, what the policy denies them and the ranking are those of an open data directory: the same
classes, on a store that only reads. There are such parts only where nothing else decides: a file as store, the settings
at their defaults, and every upstream available. Everything else is for an open data directory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.api.parts import Parts
    from interlock.api.search import SearchAnswer
    from interlock.call.context import Caller
    from interlock.settings import Settings
    from interlock.store.home import Home
    from interlock.store.port import Reader, Store


class PartsAtRest:
    """The attributes of `Parts` that a search reads. Whatever else is asked of it is a fault (AttributeError)."""

    def __init__(self, home: Home, settings: Settings, reader: Reader) -> None:
        from interlock.authority.policy import Policies
        from interlock.core.clock import Clock
        from interlock.registry.catalog import Catalog
        from interlock.registry.quarantine import Quarantine
        from interlock.store.at_rest import StoreAtRest

        store = cast("Store", StoreAtRest(reader))
        self.home = home
        self.settings = settings
        self.clock = clock = home.node_clock(Clock())
        self.journal = self.readers = store
        self.catalog = Catalog(store, clock, home.manifests)
        self.quarantine = Quarantine(store, clock.monotonic)
        self.policy = Policies(home.policy, home.principals, clock=clock, environment=settings.environment, shared=None)
        # The engine of the default settings.
        self.engine = self.policy
        self.upstreams = _Upstreams()

    @property
    def caller(self) -> Caller:
        """The local user."""
        from interlock.api.local_user import local_user

        return self.policy.principal(f"local:{local_user()}")


class _Upstreams:
    """Upstreams that are all available."""

    @property
    def connections(self) -> _Upstreams:
        return self

    def pending(self) -> dict[str, str]:
        """The upstreams that may offer more tools later: none of those that are available."""
        return {}


def parts_at_rest(reader: Reader, path: Path) -> PartsAtRest | None:
    """The parts of a data directory at rest; None if its search needs an open one."""
    from interlock.default_settings import defaults_if_unstated
    from interlock.store import upstreams
    from interlock.store.homes import home_at

    home = home_at(path)
    if not home.near or home.shared is not None:
        return None
    settings = defaults_if_unstated(home.settings)
    if settings is None or any(one.state != "available" for one in upstreams.every(reader)):
        return None
    return PartsAtRest(home, settings, reader)


def search(reader: Reader, path: Path, query: str, limit: int, by: str) -> SearchAnswer | None:
    """The tools that the local user finds, as `Interlock.search` returns them; None if that needs an open directory."""
    from interlock.api.search import needs_encoder

    parts = parts_at_rest(reader, path)
    if parts is None or needs_encoder(parts.settings.search_encoder):
        return None
    from interlock.api.tools import Tools
    from interlock.store.at_rest import at_once

    return at_once(Tools(cast("Parts", parts)).search(query, parts.caller, limit, by))

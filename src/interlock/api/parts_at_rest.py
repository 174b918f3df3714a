"""The parts of a data directory that is not opened, as far as commands that only read need them.

The tools that a caller sees, what the policy denies them and the ranking are those of an open data directory: the same
classes, on a store that only reads. There are such parts only where nothing else decides: a file as store, the settings
at their defaults, and every upstream available. Everything else is for an open data directory, and so is a question
that needs a part which is not here, such as the stored credentials.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.api.parts import Parts
    from interlock.api.search import SearchAnswer
    from interlock.approvals.standing import Standing
    from interlock.authority.identities import LocalIdentities
    from interlock.call.context import Caller
    from interlock.data.schema import Json
    from interlock.settings import Settings
    from interlock.store.home import Home
    from interlock.store.port import Reader, Store
    from interlock.upstreams.formats import Provider

T = TypeVar("T")


class NeedsOpening(Exception):  # noqa: N818 - no error: another way to answer
    """A part was asked for that only an open data directory has."""


class PartsAtRest:
    """The attributes of `Parts` that reads of tools and rules ask for. NeedsOpening for every other."""

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
        self.upstream_states = _AllAnswer()

    @property
    def caller(self) -> Caller:
        """The local user."""
        from interlock.api.local_user import local_user

        return self.policy.principal(f"local:{local_user()}")

    @property
    def identities(self) -> LocalIdentities:
        from interlock.authority.identities import LocalIdentities

        return LocalIdentities(self.journal)

    @property
    def standing_approvals(self) -> _StandingApprovals:
        return _StandingApprovals(self.journal)

    def __getattr__(self, name: str) -> NoReturn:
        raise NeedsOpening(name)


class _StandingApprovals:
    """The approvals that people gave in advance. They are read, and not used."""

    def __init__(self, journal: Store) -> None:
        self._journal = journal

    async def list(self) -> list[Standing]:
        from interlock.approvals.standing import listing

        return await self._journal.read(listing)


class _AllAnswer:
    """The states of upstreams that are all available."""

    def unanswered(self) -> frozenset[str]:
        """The upstreams that did not answer their last request: none."""
        return frozenset()


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
    from interlock.api.tools import Tools

    def ask(parts: PartsAtRest) -> Coroutine[Any, Any, SearchAnswer]:
        if needs_encoder(parts.settings.search_encoder):
            raise NeedsOpening("search_encoder")
        return Tools(cast("Parts", parts)).search(query, parts.caller, limit, by)

    return _answered(reader, path, ask)


def declarations(
    reader: Reader, path: Path, provider: Provider, names: tuple[str, ...], limit: int, *, strict: bool
) -> list[Json] | None:
    """The tools of the local user as a model provider takes them; None if that needs an open directory."""
    from interlock.api.declarations import Declarations
    from interlock.api.tools import Tools

    async def ask(parts: PartsAtRest) -> list[Json]:
        own = cast("Parts", parts)
        found = Declarations(own, Tools(own)).declarations(
            provider, parts.caller, strict=strict, names=names, limit=limit
        )
        return (await found)[0]

    return _answered(reader, path, ask)


def explain(reader: Reader, path: Path, who: str, tool: str, arguments: Json) -> Json | None:
    """The decision on a call that is not made; None if that needs an open directory."""
    from interlock.api.policy import explain_call

    def ask(parts: PartsAtRest) -> Coroutine[Any, Any, Json]:
        return explain_call(cast("Parts", parts), parts.caller, who, tool, arguments, door="cli")

    return _answered(reader, path, ask)


def _answered(reader: Reader, path: Path, ask: Callable[[PartsAtRest], Coroutine[Any, Any, T]]) -> T | None:
    from interlock.store.at_rest import at_once

    parts = parts_at_rest(reader, path)
    try:
        return None if parts is None else at_once(ask(parts))
    except NeedsOpening:
        return None

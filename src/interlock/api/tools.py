"""The tools a caller can see: those their token names and whose scopes they hold.

An agent may also say what it expects of tools: by name, a schema of the input it would send. A tool that does not offer
a part which the agent requires is then kept off its surface; how far each offers what is expected is told on request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from interlock.api.blocked import Blocked, credentials_of
from interlock.api.denials import Denials
from interlock.api.exclusions import Exclusions
from interlock.api.requests import DEFAULT_LIMIT
from interlock.api.search import MOST_FOUND, Search, SearchAnswer
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.core.record import dataclass
from interlock.data.schema import Json
from interlock.registry.version import Version

if TYPE_CHECKING:
    from interlock.api.comparisons import Expected, Match
    from interlock.api.parts import Parts
    from interlock.registry.catalog import Catalog

__all__ = ["DEFAULT_LIMIT", "PAGE", "Page", "Tools", "sees", "usable"]

PAGE = 100
Usable = Callable[[Version], bool]
_ADDRESS = expression(r"[a-z][a-z0-9_-]{0,254}\.[a-z][a-z0-9_]{0,254}")


@dataclass(frozen=True, slots=True)
class Page:
    """Some of the tools, and where to go on."""

    versions: Sequence[Version]
    cursor: str | None


class NamedTools:
    """Tools by the names that calls have for them. It checks no right: the call does.

    The functions are the catalog's own. The look-up is part of every call, which would pass one more function.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.at_hand, self.prepared, self.known = catalog.at_hand, catalog.prepared, catalog.known
        self.resolve, self.exact, self.addresses = catalog.resolve, catalog.exact, catalog.addresses


class Tools:
    """The catalog as one caller sees it."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.named = NamedTools(parts.catalog)
        self.exclusions = Exclusions(parts.settings.surface_excluded, parts.settings.surface_models)
        self.denials = Denials(parts)
        self.index = self._search = Search(parts, lambda caller, among: self.seen(caller, among=among), self.denials)

    async def visible(self, caller: Caller, expected: Expected | None = None) -> list[Version]:
        """The newest callable version of every tool that is the caller's to use, in order of name.

        Tools of which the caller expects something that they do not offer are left out.
        """
        return list(await self.seen(caller, expected))

    async def seen(
        self,
        caller: Caller,
        expected: Expected | None = None,
        after: str = "",
        among: Collection[str] | None = None,
    ) -> Iterator[Version]:
        """The same, one after the other; from behind a name on, or among some tools."""
        kept_out = self._parts.quarantine.holds
        offers = await usable(expected, caller, self._parts)
        return (
            one
            for one in await self._parts.catalog.newest(caller.capability, after, among)
            if self.sees(caller, one) and not kept_out(one.row.digest) and offers(one)
        )

    async def negotiate(self, expected: Expected, caller: Caller) -> list[Match]:
        """Compare tools with what an agent expects of them; E3101 for one that the caller does not see."""
        from interlock.api.comparisons import checked, match

        return [match(await self.find(name, None, caller), schema) for name, schema in checked(expected)]

    async def page(
        self, caller: Caller, cursor: str | None = None, limit: int = PAGE, expected: Expected | None = None
    ) -> Page:
        """A page of those that can be called. The cursor is the last name that the page before looked at.

        No tools are looked at but those of the page, so it has fewer than `limit` where some cannot be called.
        """
        if cursor and _ADDRESS.fullmatch(cursor) is None:
            raise Failure("E3004", "the cursor is not one that a page ended with")
        found = list(islice(await self.seen(caller, expected, cursor or ""), limit + 1))
        shown = found[:limit]
        more = shown[-1].row.address if len(found) > limit else None
        return Page(await self.callable(caller, shown), more)

    async def callable(self, caller: Caller, versions: Sequence[Version]) -> list[Version]:
        """Return the versions that the policy does not deny the caller outright, and whose credentials are stored.

        Tools of an upstream that does not answer are kept, and marked where they are shown.
        """
        allowed = [one for one in versions if not await self.denials.remembered(caller, one)]
        if not any(map(credentials_of, allowed)):
            return allowed
        state = await Blocked.read(self._parts, self, caller)
        return [one for one in allowed if state.missing(one) is None]

    async def find(self, name: str, spec: str | None, caller: Caller) -> Version:
        """One tool, by name and range. To a caller who may not use it, it does not exist (E3101).

        One that is in quarantine is refused (E3210), with the reason.
        """
        catalog, token = self._parts.catalog, caller.capability
        try:
            version = await catalog.resolve(name, spec, token)
        except Failure as failure:
            if failure.code == "E3101":
                raise
            # Details about versions are only for callers who see one of them.
            versions = await catalog.versions(await catalog.address(name, token))
            if not any(self.sees(caller, one) for one in versions.values()):
                raise await catalog.unknown(name, token) from None
            raise
        if not self.sees(caller, version):
            raise await catalog.unknown(name, token)
        self._parts.quarantine.check(version.row.digest, version.contract.ref, self._parts.clock.monotonic())
        return version

    async def existing(
        self, addresses: Iterable[str], caller: Caller, expected: Expected | None = None
    ) -> list[Version]:
        """Those of some tools that `find` finds, in the same order. One that it has found before costs a lookup.

        Tools of which the caller expects something that they do not offer are left out.
        """
        catalog, kept_out = self._parts.catalog, self._parts.quarantine.holds
        offers = await usable(expected, caller, self._parts)
        await catalog.current()
        known = catalog.known if caller.capability is None or not caller.capability.narrows else _unknown
        found: list[Version] = []
        for address in addresses:
            version = known(address)
            if version is None or version.row.notice is not None or version.row.state != "active":
                with suppress(Failure):  # it is gone, in quarantine, or not the caller's
                    found.append(await self.find(address, None, caller))
            elif self.sees(caller, version) and not kept_out(version.row.digest):
                found.append(version)
        return [one for one in found if offers(one)]

    def sees(self, caller: Caller, version: Version) -> bool:
        """Whether a tool exists for a caller: their token and scopes cover it, and the operator has not excluded it."""
        return sees(caller, version) and self.exclusions.reason(caller, version.row.address) is None

    async def versions(self, name: str, caller: Caller) -> list[Version]:
        """The versions of a tool that the caller may use, oldest first."""
        newest = await self.find(name, None, caller)
        versions = await self._parts.catalog.versions(newest.row.address)
        return [one for one in versions.values() if self.sees(caller, one)]

    async def compare(self, name: str, old: str, new: str, caller: Caller) -> Json:
        """The changes between two versions of a tool that the caller may use. Versions past removal are included."""
        from interlock.api.comparisons import compare_versions

        known = {one.row.version: one for one in await self.versions(name, caller)}
        before, after = [
            known.get(spec.lstrip("=v ")) or await self.find(name, f"={spec.lstrip('=v ')}", caller)
            for spec in (old, new)
        ]
        return compare_versions(before, after)

    def availability(self, version: Version) -> str:
        """AVAILABLE, or UNAVAILABLE while the upstream that serves the tool does not answer."""
        return self._parts.availability(version.row)

    def interface(self, version: Version) -> Json:
        """The tool_interface of a version for callers, with its state in the registry."""
        from interlock.contract.standard.export import interface  # the models of the standard; calls do without them

        return interface(version.contract, enabled=self._parts.enabled(version), for_callers=True).document()

    def timeout(self, version: Version) -> Json:
        """The timeout class of a version, where it comes from, and what was measured."""
        return self._parts.latencies.describe(version.contract.ref, version.content.document)

    async def search(
        self,
        query: str,
        caller: Caller,
        limit: int = DEFAULT_LIMIT,
        by: str = "both",
        *,
        apps: bool = False,
        usable: Usable | None = None,
    ) -> SearchAnswer:
        """The tools that fit a request best, best first; by words, meaning or both.

        Tools that the policy denies the caller, whatever they send, do not exist for a search. Nor do those for the
        interfaces of MCP Apps alone, unless the client shows interfaces (`apps`), and those that are not `usable`:
        not what the caller expects of them.
        """
        most = limit if usable is None or not 1 <= limit <= MOST_FOUND else MOST_FOUND
        answer = await self._search.find(query, caller, most, by, apps=apps, allowed=True)
        if usable is not None:
            answer[:] = [one for one in answer if usable(one.version)][:limit]
        settings = self._parts.settings
        if settings.selection_searches and settings.selection_requests == "sealed" and answer:
            from interlock.api.request_records import note_search

            await note_search(self._parts, query, [one.version.row.address for one in answer], caller)
        return answer


def _unknown(_: str) -> None:
    return None


async def usable(expected: Expected | None, caller: Caller, parts: Parts) -> Usable:
    """Whether a tool is one that a caller can use who expects this of tools. It remembers its answers.

    What is expected of one tool under several of its names has to be offered all together.
    """
    if expected is None:
        return _any
    from interlock.api.comparisons import checked, match  # for agents that expect something; most do not

    wanted: dict[str, list[Any]] = {}
    for name, schema in checked(expected):
        wanted.setdefault(await parts.catalog.address(name, caller.capability), []).append(schema)

    @cache
    def offers(version: Version) -> bool:
        return all(match(version, schema).usable for schema in wanted.get(version.row.address, ()))

    return offers


def _any(_: Version) -> bool:
    return True


def sees(caller: Caller, version: Version) -> bool:
    """Whether a tool is on a caller's surface."""
    return caller.covers(version.row.address, version.row.version, version.content.required_scopes)

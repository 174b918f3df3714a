"""Surfaces: the part of a large catalog that a model sees.

    tools/list ──► search_tools, load_tools, the pinned tools, the tools that were loaded
                   all others are deferred: found by a search, and called once their schemas are loaded

A surface belongs to a token, or to a local caller, and its loaded tools are in the store: every process knows them, and
a client without sessions needs nothing but its token. What it offers is a row of the store with a revision: of the
pinned and loaded tools, those that can be called as things are (`blocked`). Where a credential, the policy, a
quarantine or an upstream has changed that, the next request of the caller finds it, and each change is a record of the
journal and an event. A surface never widens what a caller may do. It holds back tools that the caller may use, and each
call of one passes the same checks as any other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal

from interlock.api.apps import is_for_apps
from interlock.api.blocked import Blocked
from interlock.api.deferred import deferred_ref
from interlock.api.search import FoundTool, SearchAnswer
from interlock.api.tools import Page, usable
from interlock.call import endpoints
from interlock.call.capability import SURFACE
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.core.record import NamedTuple
from interlock.registry.version import Version
from interlock.store import surfaces

if TYPE_CHECKING:
    from interlock.api.comparisons import Expected
    from interlock.api.parts import Parts
    from interlock.api.tools import Tools
    from interlock.data.schema import Json
    from interlock.store.port import Reader, Transaction

# pinned: for everybody; role: pinned for some groups or callers; retrieved: loaded, and not called yet; recent: called.
Reason = Literal["pinned", "role", "recent", "retrieved"]
# Loaded tools of one holder; those that were used longest ago are forgotten when there are more.
MOST_LOADED: Final = 100
MOST_AT_ONCE: Final = 20
MOST_QUERIES: Final = 10
MOST_PER_QUERY: Final = 20
# Callers that are remembered with what they see, at all endpoints together.
_MOST_CALLERS: Final = 1000
# How often it is stored which tools were used.
_STORE_USES_S: Final = 30.0


class CallerSurface:
    """The tools that a caller sees listed, each with the reason. Others are held back until they are loaded.

    If it does not defer, the caller sees the whole catalog but for the tools that it hides.
    """

    __slots__ = ("_hidden", "_unloaded", "_used", "defers", "id", "listed", "reasons")

    def __init__(
        self,
        surface_id: str,
        reasons: dict[str, Reason],
        listed: Collection[str],
        *,
        defers: bool,
        hidden: Callable[[str], object] | None,
        used: Callable[[str], None],
        unloaded: Callable[[str], None] | None,
    ) -> None:
        self.id = surface_id
        self.reasons = reasons
        # Of these, the ones that can be called as things are.
        self.listed = listed
        self.defers = defers
        self._hidden = hidden
        self._used = used
        self._unloaded = unloaded

    def has(self, address: str) -> bool:
        return not self.hides(address) and (not self.defers or address in self.reasons)

    def hides(self, address: str) -> bool:
        """Whether the operator has excluded a tool for the caller."""
        return self._hidden is not None and self._hidden(address) is not None

    def offers(self, address: str) -> bool:
        """Whether a tool can be called. If the operator lets calls load their tools, it is noted as loaded."""
        if self._hidden is not None and self._hidden(address) is not None:
            return False
        if not self.defers:
            return True
        reason = self.reasons.get(address)
        if reason is None:
            if self._unloaded is None:
                return False
            self._unloaded(address)
        elif reason == "retrieved" or reason == "recent":
            self.reasons[address] = "recent"
            self._used(address)
        return True


class _Attached(NamedTuple):
    """A caller with the surface that was attached, the rules that it was made by, and until when it holds."""

    caller: Caller
    attached: Caller
    rules: object
    until_ms: int | None


# many methods: one cache of callers, and what reads, changes and records the surfaces in it
class Surfaces:
    """The surfaces of one data directory."""

    def __init__(self, parts: Parts, tools: Tools) -> None:
        settings = parts.settings
        self._parts = parts
        self._tools = tools
        self._mode = settings.surface
        self._most = settings.surface_most
        self._pinned = settings.surface_pinned
        self._loads = settings.surface_unloaded == "load"
        self._doors = frozenset(settings.surface_doors)
        # Callers with a surface, and callers who see the whole catalog at an endpoint that attaches surfaces itself.
        # The keys are ids of objects: if the rights of a token change, its caller is another object.
        self._attached: dict[tuple[int, bool], _Attached] = {}
        self._whole: dict[str, dict[int, Caller]] = {
            name: {} for name, row in endpoints.ENDPOINTS.items() if row.attaches_surfaces
        }
        self._forgotten = 0
        # The tools that were used since that was stored last, by holder.
        self._uses: dict[str, dict[str, None]] = {}
        self._store_uses_at = float("-inf")
        self._changes = parts.journal.changes
        self._changes.watch(("registry", "surfaces", "quarantine", "upstreams", "secrets"), _nothing, self._forget)

    def concern(self, door: str) -> bool:
        """Whether callers of an endpoint may have a surface that is not attached yet.

        Some endpoints attach it by themselves.
        """
        return door not in self._whole and (door in self._doors or bool(self._tools.exclusions))

    def whole(self, door: str) -> Container[int]:
        """The identities of callers who see the whole catalog at an endpoint that attaches surfaces itself."""
        return self._whole[door]

    async def attach(self, caller: Caller, door: str) -> Caller:
        """The caller with their surface; the caller itself if they see the whole catalog."""
        if caller.surface is not None:
            return caller
        if self._parts.clock.monotonic() >= self._changes.fresh_until:
            await self._changes.caught_up()
        key = id(caller), door in self._doors
        known = self._attached.get(key)
        rules = self._parts.policy.state()
        if known is not None and known.rules is rules and not self._is_over(known):
            return known.attached
        if len(self._attached) + sum(map(len, self._whole.values())) >= _MOST_CALLERS:
            self._forget()
        made_at = self._forgotten
        attached, until_ms = await self._with_surface(caller, door)
        if made_at == self._forgotten:
            if attached is caller and (whole := self._whole.get(door)) is not None:
                whole[id(caller)] = caller
            else:
                self._attached[key] = _Attached(caller, attached, rules, until_ms)
        return attached

    def _is_over(self, known: _Attached) -> bool:
        return known.until_ms is not None and self._parts.clock.now_ms() >= known.until_ms

    async def _with_surface(self, caller: Caller, door: str) -> tuple[Caller, int | None]:
        """Return the caller with their current surface, and the time until which it holds."""
        exclusions = self._tools.exclusions
        hidden = partial(exclusions.reason, caller) if exclusions.concern(caller) else None
        defers = await self.defers(caller, door)
        if not defers and hidden is None:
            return caller, None
        holder = holder_of(caller)
        reasons, listed, until_ms = await self._offer(caller) if defers else ({}, (), None)
        surface = CallerSurface(
            id_of(holder),
            reasons,
            listed,
            defers=defers,
            hidden=hidden,
            used=partial(self._note_use, holder),
            unloaded=partial(self._note, caller) if self._loads else None,
        )
        return replace(caller, surface=surface), until_ms

    async def defers(self, caller: Caller, door: str) -> bool:
        """Whether a caller sees a part of the catalog at an endpoint, and has to load the rest."""
        if self._mode == "all" or door not in self._doors:
            return False
        if self._mode == "search":
            return True
        return len(list(islice(await self._tools.seen(caller), self._most + 1))) > self._most

    async def defers_anywhere(self, caller: Caller) -> bool:
        """The same for some endpoint."""
        return bool(self._doors) and await self.defers(caller, next(iter(self._doors)))

    async def offered(self, caller: Caller) -> dict[str, Reason]:
        """The tools that a surface offers: pinned ones, then loaded ones, the most recently used first."""
        holder = holder_of(caller)
        loaded = await self._parts.journal.read(lambda reader: surfaces.loaded(reader, holder))
        return self._reasons(caller, loaded)

    def _reasons(self, caller: Caller, loaded: Sequence[surfaces.Loaded]) -> dict[str, Reason]:
        reasons: dict[str, Reason] = {}
        for pin in self._pinned:
            if pin.concerns(caller.groups, caller.id, caller.agent):
                reasons |= dict.fromkeys(pin.tools, "pinned" if pin.for_everybody else "role")
        for one in loaded:
            reasons.setdefault(one.address, "retrieved" if one.used_ms is None else "recent")
        return reasons

    async def renew(self, caller: Caller) -> None:
        """Put on record what a caller is offered, if that is new."""
        if await self.defers_anywhere(caller):
            await self._offer(caller)

    async def _offer(self, caller: Caller) -> tuple[dict[str, Reason], Collection[str], int | None]:
        """Return the tools of a surface, those of them that can be called now, and until when that holds.

        The tools that can be called are put on record if they are others than before.
        """
        holder = holder_of(caller)
        reasons = await self.offered(caller)
        blocked = await Blocked.read(self._parts, self._tools, caller)
        listed: dict[str, Reason] = {}
        for address, reason in reasons.items():
            try:
                version = await self._tools.find(address, None, caller)
            except Failure:
                continue  # it is gone, in quarantine, or not the caller's
            if blocked.reason(version)[0] is None:
                listed[address] = reason
        stored = await self._parts.journal.read(lambda reader: surfaces.find(reader, holder))
        if stored is None or stored.names != listed.keys():
            unit = partial(
                surfaces.offer, holder=holder, surface_id=id_of(holder), facts=facts_of(caller), offered=listed
            )
            self._announce(await self._parts.journal.commit(unit))
        return reasons, listed, blocked.until_ms

    def _announce(self, row: surfaces.SurfaceRow | None) -> None:
        if row is not None:
            kind = "tool.surface.created" if row.revision == 1 else "tool.surface.updated"
            self._parts.observer.surface_event(kind, row.id, revision=row.revision, tools=sorted(row.names))

    def _forget(self, _: None = None) -> None:
        self._forgotten += 1
        self._attached.clear()
        for whole in self._whole.values():
            whole.clear()

    async def listed(self, caller: Caller, after: str = "", expected: Expected | None = None) -> list[Version]:
        """The tools of a surface that the caller may use, in order of name; from behind a name on.

        Tools of which the caller expects something that they do not offer are left out.
        """
        surface = caller.surface
        names = surface.listed if isinstance(surface, CallerSurface) else ()
        return await self._tools.existing(sorted(one for one in names if one > after), caller, expected)

    async def search(
        self,
        queries: Sequence[str],
        caller: Caller,
        limit: int,
        *,
        apps: bool = False,
        expected: Expected | None = None,
    ) -> list[tuple[SearchAnswer, list[Json]]]:
        """Search for several steps at once. Each answer comes with those of its tools that are deferred."""
        if not 1 <= len(queries) <= MOST_QUERIES or not 1 <= limit <= MOST_PER_QUERY:
            raise Failure("E3004", f"send 1 to {MOST_QUERIES} queries, and a limit from 1 to {MOST_PER_QUERY}")
        offers = None if expected is None else await usable(expected, caller, self._parts)
        found = [await self._tools.search(one, caller, limit, apps=apps, usable=offers) for one in queries]
        return [(answer, self.discovered(answer, caller)[1]) for answer in found]

    def discovered(self, answer: Sequence[FoundTool], caller: Caller) -> tuple[list[FoundTool], list[Json]]:
        """Divide what a search has found: tools that the caller has loaded, and others as `deferred_tool_ref`.

        The others are announced. Without a surface, everything is loaded.
        """
        surface = caller.surface
        if not isinstance(surface, CallerSurface) or not surface.defers:
            return list(answer), []
        loaded: list[FoundTool] = []
        deferred: list[Json] = []
        for one in answer:
            row = one.version.row
            if surface.has(row.address):
                loaded.append(one)
                continue
            away = self._tools.availability(one.version) != "AVAILABLE"
            pending = row.origin.removeprefix("upstream:") if away else None
            deferred.append({**deferred_ref(one.version, surface.id, pending), "score": one.score})
            announce = self._parts.observer.surface_event
            announce("tool.deferred.discovered", surface.id, row.address, score=one.score)
        return loaded, deferred

    async def page(
        self, caller: Caller, door: str, cursor: str | None, limit: int, expected: Expected | None = None
    ) -> Page:
        """A page of the tools that a caller is offered at an endpoint: all of a surface that defers, else as ever."""
        if self.concern(door):
            caller = await self.attach(caller, door)
            if caller.surface is not None and caller.surface.defers:
                return Page(await self.listed(caller, cursor or "", expected), None)
        return await self._tools.page(caller, cursor, limit, expected)

    async def search_at(
        self, query: str, caller: Caller, door: str, limit: int, by: str, expected: Expected | None = None
    ) -> tuple[SearchAnswer, list[FoundTool], list[Json]]:
        """Search at an endpoint: the whole answer, the loaded tools of it, and the deferred ones."""
        if self.concern(door):
            caller = await self.attach(caller, door)
        offers = None if expected is None else await usable(expected, caller, self._parts)
        answer = await self._tools.search(query, caller, limit, by, usable=offers)
        return answer, *self.discovered(answer, caller)

    async def load(self, names: Sequence[str], caller: Caller, *, apps: bool = True) -> list[Version]:
        """Load tools, by name. E3101 for one that the caller may not use: nothing is loaded then.

        Without `apps`, a tool for interfaces alone is such a tool.
        """
        if not 1 <= len(names) <= MOST_AT_ONCE:
            raise Failure("E3004", f"load 1 to {MOST_AT_ONCE} tools at a time")
        found = [await self._tools.find(name, None, caller) for name in names]
        for name, one in zip(names, found, strict=True):
            if not apps and is_for_apps(one):
                raise await self._parts.catalog.unknown(name, caller.capability)
        await self._store(caller, [one.row.address for one in found])
        return found

    async def _store(self, caller: Caller, addresses: Sequence[str]) -> None:
        holder = holder_of(caller)
        await self.store_uses()

        def unit(transaction: Transaction) -> set[str]:
            known = {one.address for one in surfaces.loaded(transaction, holder)}
            surfaces.load(transaction, holder, addresses, MOST_LOADED)
            return known

        known = await self._parts.journal.commit(unit)
        await self._changes.look()
        announce = self._parts.observer.surface_event
        for address in addresses:
            if address not in known:
                announce("tool.deferred.discovered", id_of(holder), address)
            announce("tool.deferred.loaded", id_of(holder), address)
        await self._offer(caller)

    def _note(self, caller: Caller, address: str) -> None:
        """Load a tool that is being called."""
        self._parts.supervisor.spawn(f"loading {address}", self._store(caller, [address]))

    def _note_use(self, holder: str, address: str) -> None:
        uses = self._uses.setdefault(holder, {})
        uses.pop(address, None)
        uses[address] = None
        now = self._parts.clock.monotonic()
        if now >= self._store_uses_at:
            self._store_uses_at = now + _STORE_USES_S
            self._parts.supervisor.spawn("storing the uses of loaded tools", self.store_uses())

    async def store_uses(self) -> None:
        """Store which loaded tools were called since this was stored last."""
        uses, self._uses = self._uses, {}
        if not uses:
            return

        def unit(transaction: Transaction) -> None:
            for holder, addresses in uses.items():
                surfaces.use(transaction, holder, addresses)

        await self._parts.journal.commit(unit)


def holder_of(caller: Caller) -> str:
    """The holder of a caller's surface: their token, or the local caller."""
    return f"local:{caller.id}" if caller.capability is None else caller.capability.digest


def id_of(holder: str) -> str:
    """The id of a holder's surface. It tells nothing about the token."""
    return f"surface-{hashlib.sha256(holder.encode()).hexdigest()[:20]}"


def facts_of(caller: Caller) -> Json:
    """For whom a surface was made: enough to tell later which tools were theirs to use, and nothing secret."""
    links = () if caller.capability is None else caller.capability.links
    return {
        "id": caller.id,
        "agent": caller.agent,
        "tenant": caller.tenant,
        "kind": caller.kind,
        "trust": caller.trust,
        "groups": sorted(caller.groups),
        "scopes": sorted(caller.scopes),
        "links": [
            {
                "jti": one.jti,
                "subject": one.subject,
                "scopes": sorted(one.scopes),
                "tools": [[grant.tool, grant.versions] for grant in one.tools],
                "not_before": one.not_before,
                "expires": one.expires,
                "surface": one.constraints.get(SURFACE),
            }
            for one in links
        ],
    }


def _nothing(_: Reader) -> None:
    return None

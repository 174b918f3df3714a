"""The surface of a caller as a document: a `tool_surface` of the standard, with the reason for each tool.

    loaded      listed with its schema: pinned, role, recent or retrieved; every tool where nothing is deferred
    deferred    found by a search, and listed once it is loaded
    blocked     cannot be called as things are: a credential is missing, the upstream does not answer, it is in
                quarantine, the policy forbids it, or the caller's token or scopes do not cover it
    excluded    does not exist for the caller: the operator says so (`surface_excluded`)

Callers see their own surface, without what they must not know of: tools that are excluded, and those that their token
or scopes do not cover. A call of such a tool is refused like that of a name which no tool has. Operators see
everybody's, with all of it. A page looks at a bounded number of tools.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Final, cast

import orjson

from interlock.api.blocked import Blocked
from interlock.api.deferred import deferred_ref
from interlock.api.rights import require_here
from interlock.api.surfaces import Surfaces, holder_of, id_of
from interlock.call.capability import SURFACE, Capability, Link, ToolGrant
from interlock.call.context import Caller
from interlock.core.clock import iso
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.data.bounds import check_unicode
from interlock.data.schema import Json
from interlock.store import surfaces as stored

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.api.tools import Tools
    from interlock.contract.standard.document import SurfaceScope
    from interlock.registry.version import Version

PAGE: Final = 200
MOST: Final = 1000
# How many tools are looked at before other tasks get their turn: the policy is asked about each.
_AT_ONCE: Final = 10
# A reason that only operators see: it names tools that the caller must not know of.
_FOR_OPERATORS: Final = frozenset({"role_not_allowed"})


@dataclass(slots=True)
class _Lists:
    loaded: list[str] = field(default_factory=list[str])
    deferred: list[Json] = field(default_factory=list[Json])
    blocked: list[Json] = field(default_factory=list[Json])
    excluded: list[Json] = field(default_factory=list[Json])
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    origins: set[str] = field(default_factory=set[str])


class SurfaceViews:
    """Shows surfaces, for those who may see them."""

    def __init__(self, parts: Parts, tools: Tools) -> None:
        self._parts = parts
        self._tools = tools
        self.surfaces = Surfaces(parts, tools)

    async def show(self, *, by: Caller, who: str | None = None, cursor: str | None = None, limit: int = PAGE) -> Json:
        """The surface of a caller; without `who`, of those who ask. Another's needs `tools:admin`, in `local`.

        All loaded tools of a surface that defers are on every page. The others come in order of name, `limit` looked at
        a page; `cursor` is where to go on.
        """
        if not 1 <= limit <= MOST:
            raise Failure("E3004", f"a page has from 1 to {MOST:,} tools")
        everything = by.governs("tools:admin")
        if who is None or who in (by.id, by.agent, "me"):
            caller = by
        else:
            require_here(by, "tools:admin", "looking at the surface of somebody else")
            caller = await self._somebody(who)
        await self.surfaces.store_uses()
        if caller is by:
            await self.surfaces.renew(caller)
        holder = holder_of(caller)
        row = await self._parts.journal.read(lambda reader: stored.find(reader, holder))
        defers = await self.surfaces.defers_anywhere(caller)
        reasons = await self.surfaces.offered(caller) if defers else {}
        lists, cursor = await self._lists(caller, reasons, defers, cursor, limit, everything)
        return self._document(caller, row, lists, defers, cursor)

    async def _lists(
        self, caller: Caller, offered: Mapping[str, str], defers: bool, cursor: str | None, limit: int, everything: bool
    ) -> tuple[_Lists, str | None]:
        catalog = self._parts.catalog
        lists = _Lists()
        state = await Blocked.read(self._parts, self._tools, caller)
        for address in offered:  # in the order of their use
            for version in await self._versions_of(address, caller):
                self._sort(state, version, offered, defers, lists, everything)
        page: list[Version] = []
        for number, version in enumerate(list(await catalog.newest(caller.capability, cursor or ""))):
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
            # A cursor names the last tool of its page, so nothing is on a page that the caller may not know.
            if everything or self._may_know(state, version):
                page.append(version)
            if len(page) > limit:
                break
        for version in page[:limit]:
            if version.row.address not in offered:
                self._sort(state, version, offered, defers, lists, everything)
        return lists, page[limit - 1].row.address if len(page) > limit else None

    def _may_know(self, state: Blocked, version: Version) -> bool:
        excluded = self._tools.exclusions.reason(state.caller, version.row.address)
        return excluded is None and state.reason(version)[0] not in _FOR_OPERATORS

    async def _versions_of(self, address: str, caller: Caller) -> list[Version]:
        try:
            return [await self._parts.catalog.resolve(address, None, caller.capability)]
        except Failure:
            return []  # it is gone

    def _sort(
        self,
        state: Blocked,
        version: Version,
        offered: Mapping[str, str],
        defers: bool,
        lists: _Lists,
        everything: bool,
    ) -> None:
        """Put a tool into its list."""
        address = version.row.address
        if (excluded := self._tools.exclusions.reason(state.caller, address)) is not None:
            if everything:
                lists.excluded.append({"tool_id": address, "reason": excluded})
                lists.reasons[address] = excluded
            return
        blocked, detail = state.reason(version)
        if blocked is not None:
            if everything or blocked not in _FOR_OPERATORS:
                lists.blocked.append({"tool_id": address, "reason": blocked, "detail": detail})
                lists.reasons[address] = blocked
            return
        origin = version.row.origin
        lists.origins.add(origin if origin.startswith("upstream:") else "interlock")
        if defers and address not in offered:
            lists.deferred.append(deferred_ref(version, id_of(holder_of(state.caller))))
            lists.reasons[address] = "deferred"
        else:
            lists.loaded.append(address)
            lists.reasons[address] = offered.get(address, "role")

    def _document(
        self, caller: Caller, row: stored.SurfaceRow | None, lists: _Lists, defers: bool, cursor: str | None
    ) -> Json:
        settings = self._parts.settings
        refs = [*lists.loaded, *(str(one["tool_id"]) for one in lists.deferred)]
        try:
            policy = [f"policy:{self._parts.policy.rules.version}"]
        except Failure:
            policy = []  # the policy is broken, and everything is blocked
        scope, scope_ref = _scope(caller)
        # In order of the fields of `ToolSurface`: loading that model takes longer than everything else done here.
        surface: Json = {
            "schema_version": "0.2.0",
            "surface_id": id_of(holder_of(caller)),
            "scope": scope,
            "created_at": iso(self._parts.clock.now_ms() if row is None else row.created_ms),
            "producer": f"interlock:{self._parts.instance.id}",
            "scope_ref": scope_ref,
            "tool_refs": refs,
            "loaded_tools": lists.loaded,
            "deferred_tools": [_stated(one) for one in lists.deferred],
            "blocked_tools": [_stated(one) for one in lists.blocked],
            "excluded_tools": lists.excluded,
            "selection_policy": "search" if defers else "all",
            "default_tool_choice": "auto",
            "capability_requirements": ["tool_calls", "tool_search", "tool_loading"] if defers else ["tool_calls"],
            "model_capabilities": list(self._tools.exclusions.capabilities(caller)),
            "role_constraints": [
                *(f"group:{one}" for one in sorted(caller.groups)),
                *(f"scope:{one}" for one in sorted(caller.scopes)),
            ],
            "policy_refs": policy,
            "runtime_refs": sorted(lists.origins),
            "surface_reason": _why(settings.surface, settings.surface_most, defers=defers),
        }
        return {
            "caller": caller.id,
            "agent": caller.agent,
            "tenant": caller.tenant,
            "revision": 0 if row is None else row.revision,
            "changed_at": None if row is None else iso(row.changed_ms),
            "surface": surface,
            "reasons": lists.reasons,
            "cursor": cursor,
        }

    async def _somebody(self, who: str) -> Caller:
        """A caller by name or id, as their surface was made last; as they are known if it never was."""
        from interlock.api.policy import somebody

        check_unicode("the name of a caller", who)
        identity = await self._parts.identities.find(who)
        did = who if identity is None else identity.did
        row = await self._parts.journal.read(lambda reader: stored.of_caller(reader, did))
        return await somebody(self._parts, who) if row is None else _remembered(row)


def _stated(part: Json) -> Json:
    return {name: value for name, value in part.items() if value is not None}


def _why(mode: str, most: int, *, defers: bool) -> str:
    if mode == "search":
        return "the setting surface is search: tools are listed when they are pinned or loaded"
    if defers:
        return f"the caller may use more than {most} tools: those that are neither pinned nor loaded are deferred"
    return "the setting surface is all" if mode == "all" else f"the caller may use no more than {most} tools"


def _scope(caller: Caller) -> tuple[SurfaceScope, str]:
    """Return the scope of a caller's surface, as their token states it, and the id within that scope.

    A token that says nothing is a session; a caller without a token works in the data directory.
    """
    if caller.capability is None:
        return "workspace", caller.acting
    leaf = caller.capability.leaf
    kind, _, ref = str(leaf.constraints.get(SURFACE, "session")).partition(":")
    known = {"session": leaf.jti, "workspace": caller.acting, "tenant": caller.tenant, "peer_agent": caller.acting}
    return cast("SurfaceScope", kind), ref or known[kind]


def _remembered(row: stored.SurfaceRow) -> Caller:
    """The caller for whom a surface was made. Good for showing it, and for nothing else."""
    facts: Json = orjson.loads(row.facts)
    links = tuple(_links(facts))
    capability = None if not links else Capability(digest=row.holder, issuer="", links=links)
    return Caller(
        id=row.caller,
        agent=row.agent,
        tenant=facts["tenant"],
        kind=facts["kind"],
        trust=facts["trust"],
        groups=frozenset(facts["groups"]),
        scopes=frozenset(facts["scopes"]),
        capability=capability,
    )


def _links(facts: Json) -> Iterator[Link]:
    for one in cast("list[Json]", facts["links"]):
        yield Link(
            jti=one["jti"],
            subject=one["subject"],
            scopes=frozenset(one["scopes"]),
            tools=tuple(ToolGrant(tool, versions) for tool, versions in one["tools"]),
            not_before=one["not_before"],
            expires=one["expires"],
            constraints={} if one.get(SURFACE) is None else {SURFACE: one[SURFACE]},
        )

"""Recommends tools to a caller, from the calls of their own tenant and of no other."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Final

from interlock.core.threads import WALKS
from interlock.selection.together import Recommendation, Used, recommend
from interlock.store.selections import Called, successes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock.api.parts import Parts
    from interlock.api.tools import Tools
    from interlock.call.context import Caller
    from interlock.store.port import Reader

_LOOKED_THROUGH: Final = 20_000


async def recommended(parts: Parts, tools: Tools, caller: Caller, tool: str | None) -> list[Recommendation]:
    """Tools that the caller may use and might want; E3101 for a `tool` that they do not see."""
    anchor = None if tool is None else (await tools.find(tool, None, caller)).row.address
    found = await parts.readers.read(partial(_used, caller.tenant))
    seen = list(await tools.seen(caller, among={one.tool for one in found}))
    visible = {one.row.address for one in await tools.callable(caller, seen)}
    known = {one.did: one.groups for one in await parts.identities.all() if one.tenant == caller.tenant}
    peers: dict[str, frozenset[str]] = {}
    for name in {one.caller for one in found}:
        groups = known.get(name)
        if groups is None:
            groups = parts.policy.principal(name).groups if parts.policy.knows(name) else frozenset[str]()
        peers[name] = groups & caller.groups
    least = parts.settings.recommend_callers
    # Up to 20,000 calls are looked through.
    work = partial(recommend, found, caller.id, tool=anchor, peers=peers, visible=visible, least=least)
    return await WALKS.run(work)


def _used(tenant: str, reader: Reader) -> Sequence[Used]:
    return [_one(call) for call in successes(reader, tenant, _LOOKED_THROUGH)]


def _one(call: Called) -> Used:
    return Used(call.caller, call.tool, datetime.fromisoformat(call.time).timestamp())

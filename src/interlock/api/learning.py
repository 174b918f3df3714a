"""The router of each tenant: what it is trained on, when it is used, and how selections are measured.

It learns from the tenant's own selections that were followed by a successful call, and from such searches where these
are stored (`selection_searches`). A fifth of the requests is held out.
A router is used if it is right more often than the search on these, and replaced by another one only if that is right
at least as often.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson

from interlock.api.request_records import PURPOSE, REQUEST
from interlock.api.rights import require, same_place
from interlock.core.clock import new_id
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.core.threads import DEFINITIONS
from interlock.store import payloads, records
from interlock.store.calls import ends
from interlock.store.selections import Called, Selected, selections, successes

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.api.tools import Tools
    from interlock.call.context import Caller
    from interlock.data.schema import Json
    from interlock.selection.router import Figures, Router
    from interlock.store.port import Reader

MOST_SELECTIONS: Final = 20_000
# A call belongs to the last selection of its caller before it, if that was not longer ago: one of a candidate, and one
# of a tool that the selection did not find.
FOLLOWS_S: Final = 600
FOLLOWS_OTHER_S: Final = 120
# So many searches of a caller wait for the calls that follow them.
MOST_SEARCHES: Final = 20
_MOST_ROUTERS: Final = 64
_RANKED: Final = 10


@dataclass(frozen=True, slots=True)
class Followed:
    """A selection with its request, and the tool that was called then."""

    request: str
    tool: str
    caller: str


class Learning:
    """The routers of one data directory, in its folder `selection`."""

    def __init__(self, parts: Parts, tools: Tools) -> None:
        self._parts = parts
        self._tools = tools
        # The router of a tenant, with the state of its file.
        self._routers: dict[str, tuple[tuple[int, int] | None, Router | None]] = {}

    async def router(self, tenant: str) -> Router | None:
        """The router of a tenant; None where there is none that is better than the search."""
        return await DEFINITIONS.run(self._loaded, tenant)

    def _loaded(self, tenant: str) -> Router | None:
        path = self._path(tenant)
        try:
            status = path.stat()
            state = (status.st_mtime_ns, status.st_size)
        except OSError:
            state = None
        known = self._routers.get(tenant)
        if known is None or known[0] != state:
            if len(self._routers) >= _MOST_ROUTERS:
                self._routers.clear()
            known = self._routers[tenant] = (state, None if state is None else _read(path))
        return known[1]

    def _path(self, tenant: str, ending: str = "npz") -> Path:
        name = hashlib.sha256(tenant.encode()).hexdigest()[:32]
        return self._parts.home.path / "selection" / f"router-{name}.{ending}"

    async def train(self, by: Caller, tenant: str | None = None) -> Json:
        """Train the router of a tenant on its own calls, and use it if it is better. Needs `tools:admin`."""
        from interlock.selection.router import FEWEST, Router, figures, is_held_out, train

        require(by, "tools:admin", "training the router")
        pairs = [(one.request, one.tool) for one in await self.followed(by, tenant)]
        learned = [pair for pair in pairs if not is_held_out(pair[0])]
        held_out = [pair for pair in pairs if is_held_out(pair[0])]
        answer: Json = {"tenant": tenant or by.tenant, "calls": len(pairs), "held_out": len(held_out)}
        if len(learned) < FEWEST or not held_out:
            why = f"it takes {FEWEST} selections that were followed by a successful call, and some to measure by"
            return {**answer, "in_use": False, "replaced": False, "why": why}
        made = await DEFINITIONS.run(train, learned)
        # Measured as it will be used: weights are saved with fewer digits.
        made = await DEFINITIONS.run(lambda: Router.load(made.save()))
        found = [(text, right, await self._scores(text, by)) for text, right in held_out]
        current = frozenset(one.row.address for one in (await self._tools.index.surface(by)).values())
        searched = figures([(list(scores)[:_RANKED], right) for _, right, scores in found])
        measured = await DEFINITIONS.run(_measured, made, found, current)
        name = tenant or by.tenant
        former = await DEFINITIONS.run(_read, self._path(name, "former")) or await self.router(name)
        before = None if former is None else await DEFINITIONS.run(_measured, former, found, current)
        replaced = before is None or measured.first >= before.first
        better = measured if replaced or before is None else before
        in_use = better.first > searched.first
        await DEFINITIONS.run(self._save, name, made if replaced else former, in_use)
        why = "it is right more often than the search" if in_use else "the search is right as often, so it is used"
        if not replaced:
            why = f"the router from before is right more often; {why}"
        return {
            **answer,
            "in_use": in_use,
            "replaced": replaced,
            "why": why,
            "router": measured.document(),
            "before": None if before is None else before.document(),
            "search": searched.document(),
        }

    def _save(self, tenant: str, router: Router | None, in_use: bool) -> None:
        """Save a router, as the one in use or beside it: one that is not used is still compared with the next."""
        used, former = self._path(tenant), self._path(tenant, "former")
        used.parent.mkdir(mode=0o700, exist_ok=True)
        assert router is not None
        target, other = (used, former) if in_use else (former, used)
        fresh = target.with_suffix(".new")
        fresh.write_bytes(router.save())
        os.chmod(fresh, 0o600)
        os.replace(fresh, target)
        other.unlink(missing_ok=True)

    async def _scores(self, text: str, by: Caller) -> Mapping[str, float]:
        found = await self._tools.index.find(text, by, 50, allowed=True)
        return {one.version.row.address: one.score for one in found}

    async def followed(self, by: Caller, tenant: str | None = None) -> list[Followed]:
        """The requests of a tenant with the tools that were called for them. Reading them is on record.

        Needs `audit:read`. Operators may name any tenant, others have their own.
        """
        name = by.tenant if tenant is None else tenant
        await self._note_reading(by, name)
        return await self._parts.readers.read(partial(_followed, name, self._opened))

    async def recorded(self, by: Caller, up_to: int | None = None) -> tuple[int, list[tuple[Json, str]]]:
        """The records of a tenant's own selections, each with the tool that was called then, up to a place in the
        journal, which is told. Needs `audit:read`; reading them is on record.
        """
        place = up_to or (await self._parts.readers.read(ends))[1]
        await self._note_reading(by, by.tenant)
        return place, await self._parts.readers.read(partial(_recorded, by.tenant, place))

    async def _note_reading(self, by: Caller, name: str) -> None:
        require(by, "audit:read", "reading the requests of selections")
        if not same_place(by, name):
            raise Failure("E3206", "the requests of another tenant are not yours to read")
        parts = self._parts
        ref = new_id(parts.clock.now_ms(), parts.clock.random_bytes(10))
        body = records.plain("audit.read", ref, parts.clock.now_ms(), by=by.acting, what="selections", tenant=name)
        await parts.journal.append("audit.read", ref, body)

    def _opened(self, reader: Reader, selection: str) -> str | None:
        ref = f"{REQUEST}{selection}"
        body = payloads.body(reader, ref)
        return None if body is None else self._parts.box.open(body, purpose=PURPOSE, about=ref).decode()


def _measured(
    router: Router, followed: Sequence[tuple[str, str, Mapping[str, float]]], current: frozenset[str]
) -> Figures:
    from interlock.selection.router import figures

    return figures([(router.best(text, scores, current, _RANKED), right) for text, right, scores in followed])


def _read(path: Path) -> Router | None:
    """A router of a file; None where there is none or it cannot be read."""
    from interlock.selection.router import Router

    try:
        return Router.load(path.read_bytes())
    except (OSError, ValueError):
        return None


def _followed(tenant: str, opened: Callable[[Reader, str], str | None], reader: Reader) -> list[Followed]:
    found: list[Followed] = []
    for selection, tool, caller in match(
        selections(reader, tenant, MOST_SELECTIONS), successes(reader, tenant, MOST_SELECTIONS)
    ):
        text = opened(reader, selection)
        if text is not None:
            found.append(Followed(text, tool, caller))
    return found


def _recorded(tenant: str, up_to: int, reader: Reader) -> list[tuple[Json, str]]:
    made = selections(reader, tenant, MOST_SELECTIONS, up_to)
    bodies: dict[str, Json] = {one.id: orjson.loads(one.body) for one in made}
    matched = match(made, successes(reader, tenant, MOST_SELECTIONS, up_to))
    return [(bodies[name], tool) for name, tool, _ in matched if bodies[name]["kind"] == "selection"]


def match(selected: Sequence[Selected], called: Sequence[Called]) -> list[tuple[str, str, str]]:
    """The first call that the caller of each selection or search made after it: its id, the tool and the caller.

    Only the last selection of a caller and searches after it are considered. A call belongs to the newest search that
    found its tool, or else to that selection. If the tool was not a candidate of the selection, the call counts only if
    no search came between, and within `FOLLOWS_OTHER_S`: the caller knew better. A search says nothing about tools
    that it did not find: it may be for one step of several.
    """
    events: list[tuple[int, Selected | Called]] = sorted(
        [*((one.place, one) for one in selected), *((one.place, one) for one in called)], key=lambda one: one[0]
    )
    waiting: dict[str, list[tuple[str, Json]]] = {}
    found: list[tuple[str, str, str]] = []
    for _, one in events:
        if isinstance(one, Selected):
            record: Json = orjson.loads(one.body)
            before = waiting.get(record["callerId"], []) if record.get("kind") == "search" else []
            waiting[record["callerId"]] = [*before[-MOST_SEARCHES:], (one.id, record)]
            continue
        open_ones = waiting.get(one.caller, [])
        for place in reversed(range(len(open_ones))):
            request, record = open_ones[place]
            if one.tool in record["candidates"]:
                most = FOLLOWS_S
            elif record.get("kind") != "search" and place == len(open_ones) - 1:
                most = FOLLOWS_OTHER_S
            else:
                continue
            if _seconds(record["timestamp"], one.time) <= most:
                found.append((request, one.tool, one.caller))
                del open_ones[place]
                break
    return found


def _seconds(earlier: str, later: str) -> float:
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()

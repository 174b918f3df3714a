"""What a model sees of a catalog that is too large to list.

    tools/list ──► search_tools, load_tools, the pinned tools, the tools that were loaded
                   all others are deferred: found by a search, and called once their schemas are loaded

A surface belongs to a token, or to a local caller, and its loaded tools are in the store: every process knows them, and
a client without sessions needs nothing but its token. A surface never widens what a caller may do. It holds back tools
that the caller may use, and each call of one passes the same checks as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal

from interlock.api.search import Answer
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.registry.catalog import Version
from interlock.store import surfaces

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.api.tools import Tools
    from interlock.store.port import Reader, Transaction

Reason = Literal["pinned", "role", "loaded"]
# Loaded tools of one holder; the first ones are forgotten when there are more.
MOST_LOADED: Final = 100
MOST_AT_ONCE: Final = 20
MOST_QUERIES: Final = 10
MOST_PER_QUERY: Final = 20
_KEPT: Final = 1000
_FORGOTTEN_AFTER_MS: Final = 30 * 86_400_000


class Surface:
    """The tools that a caller sees listed, each with the reason. Others are held back until they are loaded."""

    __slots__ = ("_unloaded", "reasons")

    def __init__(self, reasons: dict[str, Reason], unloaded: Callable[[str], None] | None) -> None:
        self.reasons = reasons
        self._unloaded = unloaded

    def has(self, address: str) -> bool:
        return address in self.reasons

    def offers(self, address: str) -> bool:
        """Whether a tool can be called. If the operator lets calls load their tools, it is noted as loaded."""
        if address in self.reasons:
            return True
        if self._unloaded is None:
            return False
        self._unloaded(address)
        return True


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
        # Callers with a surface, and those who see the whole catalog, by their identity as objects: a token may stand
        # for other rights later, and then for another object.
        self._attached: dict[int, tuple[Caller, Caller]] = {}
        self.whole: dict[int, Caller] = {}
        self._forgotten = 0
        self._changes = parts.journal.changes
        self._changes.watch(("registry", "surfaces"), _nothing, self._forget)

    async def attach(self, caller: Caller) -> Caller:
        """The caller with their surface; the caller itself if they see the whole catalog."""
        if self._parts.clock.monotonic() >= self._changes.fresh_until:
            await self._changes.caught_up()
        known = self._attached.get(id(caller))
        if known is not None:
            return known[1]
        if len(self._attached) + len(self.whole) >= _KEPT:
            self._forget()
        made_at, most = self._forgotten, self._most
        if self._mode != "search" and (
            self._mode == "all" or len(list(islice(await self._tools.seen(caller), most + 1))) <= most
        ):
            if made_at == self._forgotten:
                self.whole[id(caller)] = caller
            return caller
        reasons: dict[str, Reason] = dict.fromkeys(await self._read(holder_of(caller)), "loaded")
        for pin in self._pinned:
            if not pin.groups or not caller.groups.isdisjoint(pin.groups):
                reasons |= dict.fromkeys(pin.tools, "role" if pin.groups else "pinned")
        attached = replace(caller, surface=Surface(reasons, partial(self._note, caller) if self._loads else None))
        if made_at == self._forgotten:
            self._attached[id(caller)] = caller, attached
        return attached

    def _forget(self, _: None = None) -> None:
        self._forgotten += 1
        self._attached.clear()
        self.whole.clear()

    async def listed(self, caller: Caller) -> list[Version]:
        """The tools of a surface that the caller may use, in order of name."""
        found: list[Version] = []
        surface = caller.surface
        for address in sorted(surface.reasons) if isinstance(surface, Surface) else ():
            try:
                found.append(await self._tools.find(address, None, caller))
            except Failure:
                continue  # it is gone, in quarantine, or not the caller's
        return found

    async def search(self, queries: Sequence[str], caller: Caller, limit: int) -> list[Answer]:
        """Search for several steps at once."""
        if not 1 <= len(queries) <= MOST_QUERIES or not 1 <= limit <= MOST_PER_QUERY:
            raise Failure("E3004", f"send 1 to {MOST_QUERIES} queries, and a limit from 1 to {MOST_PER_QUERY}")
        return [await self._tools.search(one, caller, limit) for one in queries]

    async def load(self, names: Sequence[str], caller: Caller) -> list[Version]:
        """Load tools, by name. E3101 for one that the caller may not use: nothing is loaded then."""
        if not 1 <= len(names) <= MOST_AT_ONCE:
            raise Failure("E3004", f"load 1 to {MOST_AT_ONCE} tools at a time")
        found = [await self._tools.find(name, None, caller) for name in names]
        await self._store(holder_of(caller), [one.row.address for one in found])
        return found

    async def _store(self, holder: str, addresses: Sequence[str]) -> None:
        def unit(transaction: Transaction) -> None:
            surfaces.load(transaction, holder, addresses, MOST_LOADED)
            surfaces.forget_before(transaction, transaction.now_ms - _FORGOTTEN_AFTER_MS)

        await self._parts.journal.commit(unit)
        await self._changes.look()

    def _note(self, caller: Caller, address: str) -> None:
        """Load a tool that is being called."""
        self._parts.supervisor.spawn(f"loading {address}", self._store(holder_of(caller), [address]))

    async def _read(self, holder: str) -> list[str]:
        return await self._parts.journal.read(lambda reader: surfaces.loaded(reader, holder))


def holder_of(caller: Caller) -> str:
    """Whose surface it is: that of a token, or of a local caller."""
    return f"local:{caller.id}" if caller.capability is None else caller.capability.digest


def _nothing(_: Reader) -> None:
    return None

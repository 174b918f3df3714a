"""Nodes of one store share the work on upstreams: each upstream is probed and looked at by one of them at a time.

Theory of operation. Who probes an upstream has a claim on it, a fact of the store that runs out by the store's time and
is renewed with every probe. Other nodes leave that upstream alone while its holder lives. A holder whose probe fails
gives the claim up: perhaps it is only this node that does not reach the upstream, and the next one to try finds out.

An upstream that announces a change tells every node that is connected to it. A look that begins after a node has heard
of the change finds it, whichever node looks. So the first node notes that it will begin in a moment, and the others,
who hear of the change meanwhile, wait for the end of its look. If it fails or its node dies, another one looks.

On a store that only the processes of one machine use, each of them probes and looks, as each may end at any time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import orjson

from interlock.core.clock import Clock
from interlock.store import facts
from interlock.store.port import Store, Transaction, Unit
from interlock.store.upstreams import LOOK, PROBER
from interlock.upstreams.discovery import LOOK_LIMIT_S

# A claim lasts for so many probes that did not come, and the time that one may take.
PROBES = 2
PROBE_TAKES_MS = 15_000
# How long a node waits before it looks, so that others hear of the same change before it does.
GATHER_MS = 250
# By how much nodes may differ about the store's time.
_MARGIN_MS = 50
_ASK_AGAIN_S = 0.2


class Sharing:
    """The claims of one process, which is called `owner`. `alive` tells whether another process lives."""

    def __init__(
        self, journal: Store, clock: Clock, *, owner: str, alive: Callable[[str], bool], probe_every_s: float
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._owner = owner
        self._alive = alive
        self._claim_ms = round(probe_every_s * 1000 * PROBES) + PROBE_TAKES_MS
        self._shared = not journal.near

    async def to_probe(self, names: Sequence[str]) -> list[str]:
        """Those of some upstreams that this process is to probe now."""
        if not self._shared or not names:
            return list(names)
        return await self._journal.commit(_claiming(names, self._owner, self._claim_ms, self._alive))

    async def give_up(self, name: str) -> None:
        """Let another process probe an upstream, which did not answer this one."""
        if self._shared:
            await self._journal.commit(_giving_up(name, self._owner))

    async def look(self, name: str, look: Callable[[str], Awaitable[Any]]) -> None:
        """Look at an upstream that has announced a change, unless another process does."""
        if not self._shared:
            await look(name)
            return
        heard_ms = self._clock.now_ms()
        beginning = _beginning(name, self._owner, heard_ms, self._alive)
        while (turn := await self._journal.commit(beginning)) == "wait":  # noqa: ASYNC110 - another process ends it
            await asyncio.sleep(_ASK_AGAIN_S)
        if turn == "over":
            return
        ended = False
        try:
            await asyncio.sleep(GATHER_MS / 1000)
            await look(name)
            ended = True
        finally:
            await self._journal.commit(_ending(name, self._owner, ended=ended))


def _claiming(names: Sequence[str], owner: str, for_ms: int, alive: Callable[[str], bool]) -> Unit[list[str]]:
    """Unit that claims those upstreams that no living process has claimed, and returns them."""

    def unit(transaction: Transaction) -> list[str]:
        claimed: list[str] = []
        for name in names:
            holder, _, until = (facts.get(transaction, f"{PROBER}{name}") or "").partition(" ")
            if holder in ("", owner) or transaction.now_ms >= int(until) or not alive(holder):
                facts.put(transaction, f"{PROBER}{name}", f"{owner} {transaction.now_ms + for_ms}")
                claimed.append(name)
        return claimed

    return unit


def _giving_up(name: str, owner: str) -> Unit[None]:
    def unit(transaction: Transaction) -> None:
        if (facts.get(transaction, f"{PROBER}{name}") or "").startswith(f"{owner} "):
            facts.remove(transaction, f"{PROBER}{name}")

    return unit


def _beginning(name: str, owner: str, heard_ms: int, alive: Callable[[str], bool]) -> Unit[str]:
    """Unit that returns what to do about an announced change: `look`, `wait` for others, or nothing (`over`)."""

    def unit(transaction: Transaction) -> str:
        now_ms = transaction.now_ms
        known = orjson.loads(facts.get(transaction, f"{LOOK}{name}") or b"{}")
        if known:
            if known["over"] and known["begins_ms"] >= heard_ms + _MARGIN_MS:
                return "over"
            if not known["over"] and now_ms < known["until_ms"] and alive(known["owner"]):
                return "wait"
        begins_ms = now_ms + GATHER_MS
        until_ms = begins_ms + round(LOOK_LIMIT_S * 1000) + PROBE_TAKES_MS
        _put(transaction, name, owner=owner, begins_ms=begins_ms, until_ms=until_ms, over=False)
        return "look"

    return unit


def _ending(name: str, owner: str, *, ended: bool) -> Unit[None]:
    """Unit that notes the end of a look. One that failed leaves nothing, so that another process tries."""

    def unit(transaction: Transaction) -> None:
        known = orjson.loads(facts.get(transaction, f"{LOOK}{name}") or b"{}")
        if known.get("owner") != owner:
            return
        if ended:
            _put(transaction, name, **{**known, "over": True})
        else:
            facts.remove(transaction, f"{LOOK}{name}")

    return unit


def _put(transaction: Transaction, name: str, **look: Any) -> None:
    facts.put(transaction, f"{LOOK}{name}", orjson.dumps(look).decode())

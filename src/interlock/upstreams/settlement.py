"""Settles what follows from a look at an upstream: its tools are judged, admitted or refused, tried, and stored.

judge       every definition against the pinned ones, those of others, and the conditions of admission (`decisions`)
settle      in one transaction, if the stored state is still the one that was judged by; otherwise judge again
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from interlock.call.connector import Discovered
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.threads import DEFINITIONS
from interlock.data.schema import Json
from interlock.registry.admission import TrialEvidence
from interlock.registry.catalog import Catalog
from interlock.store.port import Store
from interlock.upstreams import repository
from interlock.upstreams.connections import Connections
from interlock.upstreams.decisions import TryOut, admit, gone, judge, once, refused, try_again
from interlock.upstreams.overlay import stored_overlay
from interlock.upstreams.repository import Offered, Outdated, Page, Report, Upstream

PROVE_EVERY_S = 300.0
_TRIES = 5


class Settlement:
    """Stores what looks at the upstreams of one home find.

    `look` tells the gateway that something may be in quarantine, and `answers` that an upstream has answered.
    """

    def __init__(
        self,
        *,
        journal: Store,
        catalog: Catalog,
        clock: Clock,
        connections: Connections,
        try_out: TryOut,
        announce: Callable[..., None],
        mention: Callable[..., None],
        look: Callable[[], Awaitable[None]],
        answers: Callable[[str], Awaitable[None]] | None,
    ) -> None:
        self._journal = journal
        self._catalog = catalog
        self._clock = clock
        self._connections = connections
        self._try_out = try_out
        self._announce = announce
        self._mention = mention
        self._look = look
        self._answers = answers
        self._changes = journal.changes
        self._busy: dict[str, asyncio.Lock] = {}
        self._proving: set[str] = set()  # upstreams whose unproven tools are being tried
        self._prove_at: dict[str, float] = {}  # when a probe tries those of an upstream again

    async def take_in(
        self,
        known: Upstream,
        discovered: Discovered,
        *,
        by: str,
        new: bool = False,
        overlay: Json | None = None,
        accepted: Mapping[str, str] | None = None,
    ) -> Report:
        """Judge a look and store the consequences; again if the stored state changed meanwhile."""
        async with self._busy.setdefault(known.name, asyncio.Lock()):
            tries = 1
            while True:
                if not new:
                    known = await get(self._journal, known.name)
                if overlay is not None:
                    known = replace(known, overlay=stored_overlay(overlay))
                page = await self.page(known.name)
                judged = await judge(self._journal, known, discovered, page, accepted or {})
                offered, evidence = await admit(self._catalog, self._try_out, judged)
                looked = (*offered, *gone(page, offered), *refused(discovered, offered))
                del judged, offered
                unit = await DEFINITIONS.run(
                    repository.settle, known, page, once(looked), evidence, by=by, new=new, lift=accepted or (),
                    text=discovered.text,
                )  # fmt: skip
                # The manifests of a large document take more memory than all else; the unit has them as texts.
                looked = repository.released(looked)
                try:
                    await self._journal.commit(unit)
                    break
                except Outdated:
                    if new or tries == _TRIES:
                        raise
                tries += 1
                await self._catalog.look()
            await self._catalog.look()
            await self._look()
            self._connections.set_state(known.name, "available")
            await self._changes.look()
        self._alert(known, page, looked, evidence, by)
        await self.answered(known.name)
        return Report(known.name, looked, dict(discovered.about))

    async def answered(self, name: str) -> None:
        """Tell the gateway that an upstream has answered."""
        if self._answers is not None:
            await self._answers(name)

    async def remove(self, name: str, by: str) -> None:
        """Store that an upstream was removed; its tools are sunset."""
        async with self._busy.setdefault(name, asyncio.Lock()):
            await self._journal.commit(repository.removal(name, by))
        await self._catalog.look()

    async def prove_if_due(self, name: str) -> None:
        """Try the unproven tools of an upstream again, if they were not tried just now."""
        if self._clock.monotonic() >= self._prove_at.get(name, 0.0):
            await self.prove(name)

    async def prove(self, name: str) -> dict[str, str]:
        """Run the contract tests of tools that could not be tried when they were admitted. Returns the remark on each.

        INVARIANT: a tool that was admitted unproven is tried at every refresh, and by probes now and then, until it is
        proven or in quarantine.
        """
        waiting = await self._journal.read(lambda reader: repository.unproven(reader, name))
        if not waiting or name in self._proving:
            return {}
        self._proving.add(name)
        self._prove_at[name] = self._clock.monotonic() + PROVE_EVERY_S
        try:
            tried = await try_again(self._catalog, self._try_out, waiting)
            refs = {digest: f"{address}@{version}" for address, version, digest in waiting}
            await self._journal.commit(repository.proving(name, tried, refs))
            await self._catalog.look()
            await self._look()
            await self._changes.look()
        finally:
            self._proving.discard(name)
        for digest, proof in tried.items():
            if not proof.passed:
                facts = {"alert": "TOOL_DISPROVEN", "upstream": name, "reason": proof.report}
                self._announce("tool.alert", "", refs[digest].partition("@")[0], **facts)
        return {address: repository.unproven_words(tried[digest]) for address, _, digest in waiting}

    async def page(self, name: str) -> Page:
        """Return what is stored of an upstream, by which a look at it is judged."""
        return await self._journal.read(lambda reader: repository.page(reader, name))

    def _alert(
        self, known: Upstream, page: Page, looked: Sequence[Offered], evidence: Mapping[str, TrialEvidence], by: str
    ) -> None:
        for one in looked:
            before = page.tools.get(one.name)
            facts = {"upstream": known.name, "offered": one.name, "reason": one.reason}
            if one.state == "changed" and (before is None or not before.held):
                self._announce("tool.alert", "", one.address, alert="TOOL_DEFINITION_CHANGED", **facts)
            if one.state == "admitted" and one.name in evidence:
                ref = f"{one.address}@{one.version}"
                self._mention("tool.declared", "", ref, digest=evidence[one.name].digest, by=by)
            if one.state == "refused":
                self._announce("INVALID_TOOL_SCHEMA", "", "", **facts)


async def get(journal: Store, name: str) -> Upstream:
    """Return one upstream; E3101 if there is none of that name."""
    upstream = next((one for one in await journal.read(repository.upstreams) if one.name == name), None)
    if upstream is None:
        words, advice = f"there is no upstream `{name}`", "see which there are: interlock upstream list"
        raise Failure("E3101", words, resolution=advice)
    return upstream

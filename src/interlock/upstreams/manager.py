"""Manages upstreams: connects to them, discovers their tools, and serves those that are admitted.

Adding one connects to it, discovers its tools and offers each for admission like any other; what is admitted is pinned
by the digest of the definition it was made from. When a definition changes, the version made from it is quarantined
until a person has reviewed it and accepted it as a new version; when a tool is no longer offered, its versions are
sunset; when an upstream does not answer, its tools stay registered and calls fail at once. All changes that follow from
one look at an upstream are made in one commit (`repository`), so a reader sees the catalog before or after it and
nothing between.

    states          which upstreams answer, by what is stored
    connections     this process's connections
    discovery       a look at one: the tools that it offers, with its secrets if it asks for them
    settlement      what follows from a look: every definition is judged, and the consequences are stored
    sharing         which node of a store probes an upstream, and which looks at one that has changed
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson

from interlock.call.context import Caller
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.core.supervise import Supervisor
from interlock.data.schema import Json
from interlock.registry.catalog import Catalog
from interlock.store.port import Store
from interlock.upstreams import repository
from interlock.upstreams.connections import Connections, Make
from interlock.upstreams.decisions import TryOut, judge, refused
from interlock.upstreams.discovery import LOOK_LIMIT_S, Lend, discover, with_secrets
from interlock.upstreams.manifests import to_manifest
from interlock.upstreams.overlay import parse_overlay, stored_overlay, with_hints
from interlock.upstreams.repository import Offered, Page, Report, Upstream
from interlock.upstreams.settlement import Settlement, get

if TYPE_CHECKING:
    from interlock.upstreams.states import UpstreamStates

__all__ = ["Offered", "Report", "Upstream", "Upstreams"]

PROBE_LIMIT_S = 5.0
_NAME = expression(r"[a-z][a-z0-9_-]{0,62}", re.ASCII)
_RESERVED = frozenset({"interlock"})

# The parts that a person compares before they accept a definition.
_COMPARED = ("tool_id", "title", "description", "parameters", "result_schema", "mutation_class")


class Upstreams:
    """The upstreams of one home. `connections` has this process's connections to them.

    `lend` fetches secrets for a look, `look` tells the gateway that something may be in quarantine, and `answers` that
    an upstream has answered. `owner` is the id of this process, which shares the work with others that are `alive`.
    """

    def __init__(
        self,
        *,
        journal: Store,
        catalog: Catalog,
        clock: Clock,
        states: UpstreamStates,
        make: Make,
        lend: Lend,
        try_out: TryOut,
        announce: Callable[..., None],
        mention: Callable[..., None],
        look: Callable[[], Awaitable[None]],
        supervisor: Supervisor,
        owner: str,
        alive: Callable[[str], bool],
        probe_every_s: float,
        answers: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._journal = journal
        self._catalog = catalog
        self._clock = clock
        self._states = states
        self._make = make
        self._lend = lend
        self.connections = Connections(
            journal=journal, clock=clock, states=states, make=make, supervisor=supervisor, announce=announce,
            look=self.refresh, owner=owner, alive=alive, probe_every_s=probe_every_s,
        )  # fmt: skip
        self._settlement = Settlement(
            journal=journal, catalog=catalog, clock=clock, connections=self.connections, try_out=try_out,
            announce=announce, mention=mention, look=look, answers=answers,
        )  # fmt: skip

    # Looking

    async def list(self) -> list[Upstream]:
        """Return every upstream, by name."""
        return await self._journal.read(repository.upstreams)

    async def get(self, name: str) -> Upstream:
        """Return one upstream; E3101 if there is none of that name."""
        return await get(self._journal, name)

    async def offers(self, name: str) -> tuple[Offered, ...]:
        """Return the tools that an upstream was last seen to offer, and the decision on each."""
        return await self._journal.read(lambda reader: repository.offers(reader, name))

    async def changes(self, name: str) -> dict[str, dict[str, list[Any]]]:
        """For the tools that changed, return each part that differs: as admitted, and as offered now."""
        known = await self.get(name)
        changed = [one for one in await self.offers(name) if one.state == "changed"]
        return {one.name: await _otherwise(self._catalog, known, one) for one in changed}

    async def document(self, name: str) -> Json:
        """Return one upstream, its tools, and the differences of those that changed."""
        changes = await self.changes(name)
        tools = [
            one.document() | ({"changes": changes[one.name]} if one.name in changes else {})
            for one in await self.offers(name)
        ]
        return {**(await self.get(name)).document(), "tools": tools}

    async def try_connecting(self, name: str, kind: str, config: Json, overlay: Json | None = None) -> Report:
        """Report the result of adding an upstream. Connects to it and changes nothing."""
        wanted = _new(await self.list(), name, kind, config, overlay, self._clock.now_ms(), "")
        connector = self._make(name, kind, config, _nobody)
        try:
            discovered = await discover(wanted, connector, self._lend)
        finally:
            await connector.close()
        offered = await judge(self._journal, wanted, discovered, Page(None, {}), {})
        return Report(name, (*offered, *refused(discovered, offered)), dict(discovered.about))

    # Changing

    async def add(self, name: str, kind: str, config: Json, *, by: Caller, overlay: Json | None = None) -> Report:
        """Connect to an upstream, and serve those of its tools that are admitted."""
        _may(by)
        wanted = _new(await self.list(), name, kind, config, overlay, self._clock.now_ms(), by.acting)
        async with self.connections.adding(name, kind, config) as connector:
            discovered = await discover(wanted, connector, self._lend)
            report = await self._settlement.take_in(wanted, discovered, by=by.acting, new=True)
        # What was committed is known by now, unless somebody has removed it again.
        self.connections.hold(self._states.known(name) or await self.get(name), connector)
        return report

    async def refresh(
        self, name: str, *, by: Caller | None = None, overlay: Json | None = None, accept_hints: bool = False
    ) -> Report:
        """Look again at the tools of an upstream. Changed ones are quarantined, new ones are offered for admission.

        With `accept_hints`, the overlay says from now on what the hints of these tools say. The tools count as changed
        then, like after any change of the overlay, until a person accepts them.
        """
        if by is not None:
            _may(by)
        known = await self.get(name)
        if by is not None and (held := self.connections.release(name, if_away=True)) is not None:
            await held.close()  # perhaps it was repaired, so a connection that was given up is tried again
        try:
            discovered = await discover(known, self.connections.of(known), self._lend)
        except Failure as failure:
            await self.connections.mark(known, "unavailable", failure.message)
            raise
        acting = "refresh" if by is None else by.acting
        if accept_hints:
            overlay = with_hints(known.overlay if overlay is None else overlay, discovered.tools)
        report = await self._settlement.take_in(known, discovered, by=acting, overlay=overlay)
        remarks = await self._settlement.prove(name)
        tools = tuple(replace(one, reason=remarks.get(one.address, one.reason)) for one in report.tools)
        return replace(report, tools=tools)

    async def accept(
        self,
        name: str,
        *,
        by: Caller,
        tools: Sequence[str] = (),
        reason: str,
        shown: Mapping[str, str] | None = None,
    ) -> Report:
        """Accept changed definitions that a person has reviewed: they become new versions, and are pinned.

        `shown` are the digests (`seen`) of the definitions they looked at; by default, the ones seen last. A definition
        that has changed again is not accepted: E3103, and it is there to be looked at.
        """
        _may(by)
        if by.kind != "human" or by.agent not in (None, by.id):
            raise Failure("E3206", "only a person can accept a changed definition; an agent never can")
        if not reason.strip():
            raise Failure("E3004", "say why the change is accepted")
        known = await self.get(name)
        changed = {one.name: one.seen for one in await self.offers(name) if one.state == "changed"}
        if unknown := sorted({*tools, *(shown or {})} - changed.keys()):
            raise Failure("E3101", f"`{unknown[0]}` has not changed; see interlock upstream show {name}")
        accepted = {one: (shown or {}).get(one, changed[one]) for one in (*tools, *(shown or {})) or changed}
        discovered = await discover(known, self.connections.of(known), self._lend)
        judged = await judge(self._journal, known, discovered, await self._settlement.page(name), {})
        there = {one.name: one.seen for one in judged}
        # INVARIANT: nothing is accepted that nobody has reviewed. The current definition is stored, to be reviewed.
        again = sorted(one for one, seen in accepted.items() if one in there and there[one] != seen)
        report = await self._settlement.take_in(
            known, discovered, by=f"{by.acting}: {reason}", accepted={} if again else accepted
        )
        if again:
            words = f"`{again[0]}` has changed again since it was shown"
            advice = f"look at it as it is now, then accept it: interlock upstream show {name}"
            raise Failure("E3103", words, details={"tools": again}, resolution=advice)
        return report

    async def remove(self, name: str, *, by: Caller) -> None:
        """Remove an upstream. Its tools are sunset; their calls stay on record."""
        _may(by)
        await self.get(name)
        await self._settlement.remove(name, by.acting)
        held = self.connections.release(name)
        await self._journal.changes.look()
        if held is not None:
            await held.close()

    # Liveness

    async def probe_all(self) -> None:
        """Probe all upstreams concurrently, but for those that another node of the store probes."""

        sharing = self.connections.sharing

        async def probe(name: str) -> None:
            if await self.probe(name) != "available":
                await sharing.give_up(name)

        await asyncio.gather(*map(probe, await sharing.to_probe([one.name for one in await self.list()])))

    async def probe(self, name: str) -> str:
        """Probe one upstream and return its state, which is stored if it changed."""
        known = await self.get(name)
        try:
            async with asyncio.timeout(PROBE_LIMIT_S):
                await with_secrets(known, self.connections.of(known).probe, self._lend)
        except (Failure, TimeoutError, OSError) as error:
            reason = error.message if isinstance(error, Failure) else "it did not answer a probe in time"
            await self.connections.mark(known, "unavailable", reason)
            return "unavailable"
        # If its offer has changed, it is available once that is known.
        await self.connections.looks.wait(name, LOOK_LIMIT_S)
        await self.connections.mark(known, "available", "")
        await self._settlement.answered(name)
        await self._settlement.prove_if_due(name)
        return "available"

    async def finish(self) -> None:
        """Let the looks under way finish, within a time limit."""
        await self.connections.looks.finish()

    async def close(self) -> None:
        await self.connections.close()


async def _otherwise(catalog: Catalog, known: Upstream, one: Offered) -> dict[str, list[Any]]:
    """Return each part of a changed tool that differs: as admitted, and as offered now."""
    if one.definition is None or one.version is None:
        return {}
    overlay = parse_overlay(known.overlay)
    now = to_manifest(
        one.definition,
        upstream=known.name,
        kind=known.kind,
        version=one.version,
        overlay=overlay,
        accept_hints=bool(known.config.get("accept_hints")),
        prefix=bool(known.config.get("prefix", True)),
        tool_id=overlay.of(one.name).rename or one.address.partition(".")[2],
    ).manifest
    if now is None:
        return {}
    was: Json = orjson.loads((await catalog.versions(one.address))[one.version].row.manifest)
    new: Json = orjson.loads(now.model_dump_json())
    return {part: [was.get(part), new.get(part)] for part in _COMPARED if was.get(part) != new.get(part)}


def _new(
    others: Sequence[Upstream], name: str, kind: str, config: Json, overlay: Json | None, now_ms: int, by: str
) -> Upstream:
    """Return an upstream that can be added beside the others; E3004 or E3411 for a name that it cannot have."""
    if not _NAME.fullmatch(name) or name in _RESERVED:
        raise Failure("E3004", "an upstream is named by up to 63 of `a-z 0-9 _ -`, a letter first; not `interlock`")
    for one in others:
        if one.name == name:
            raise Failure(
                "E3411",
                f"there is an upstream `{name}` already",
                resolution=f"look at it again: interlock upstream refresh {name}; or remove it first:"
                f" interlock upstream remove {name}",
            )
        if _alike(one.name) == _alike(name):
            words = f"`{name}` could be taken for the upstream `{one.name}`"
            raise Failure("E3411", words, resolution="name it otherwise")
    return Upstream.new(name, kind, config, stored_overlay(overlay), now_ms, by)


def _alike(name: str) -> str:
    """Normalise a name so that similar ones are detected."""
    return name.replace("-", "").replace("_", "")


def _may(by: Caller) -> None:
    if not by.governs("tools:admin"):
        raise Failure("E3206", "changing upstreams needs the scope tools:admin, in the tenant `local`")


def _nobody() -> None:
    """Default listener for changes of an upstream that is only looked at: does nothing."""

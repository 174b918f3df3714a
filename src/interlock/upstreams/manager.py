"""Manages upstreams: connects to them, discovers their tools, and serves those that are admitted.

Adding one connects to it, discovers its tools and offers each for admission like any other; what is admitted is pinned
by the digest of the definition it was made from. When a definition changes, the version made from it is quarantined
until a person has reviewed it and accepted it as a new version; when a tool is no longer offered, its versions are
sunset; when an upstream does not answer, its tools stay registered and calls fail at once. All changes that follow from
one look at an upstream are made in one commit (`repository`), so a reader sees the catalog before or after it and
nothing between.

    look        discover, with the upstream's secrets if it asks for them
    judge       every definition against the pinned ones, those of others, and the conditions of admission (`decisions`)
    settle      in one transaction, if the stored state is still the one that was judged by; otherwise judge again
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import orjson

from interlock.call.connector import Connector, Discovered, secret_of
from interlock.call.context import Caller
from interlock.call.phases import Lease
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.supervise import Supervisor
from interlock.core.threads import DEFINITIONS
from interlock.data.schema import Json
from interlock.registry.admission import Evidence
from interlock.registry.catalog import Catalog
from interlock.store.port import Store
from interlock.upstreams import repository
from interlock.upstreams.decisions import TryOut, admit, bounded, gone, judge, once, refused, try_again
from interlock.upstreams.manifests import to_manifest
from interlock.upstreams.overlay import parse_overlay
from interlock.upstreams.repository import Offered, Outdated, Page, Report, Upstream

__all__ = ["Offered", "Report", "Upstream", "Upstreams"]

_log = logging.getLogger("interlock.upstreams")
T = TypeVar("T")

PROBE_LIMIT_S = 5.0
LOOK_LIMIT_S = 120.0
FINISH_S = 5.0
PROVE_EVERY_S = 300.0
MAX_TOOLS = 5000
_TRIES = 5
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}", re.ASCII)
_RESERVED = frozenset({"interlock"})

# The parts that a person compares before they accept a definition.
_COMPARED = ("tool_id", "title", "description", "parameters", "result_schema", "mutation_class")

Make = Callable[[str, str, Json, Callable[[], None]], Connector]
Lend = Callable[[tuple[str, ...], float], Awaitable[Lease]]


class Upstreams:
    """The upstreams of one home, and this process's connections to them.

    `lend` fetches secrets for a look, `look` tells the gateway that something may be in quarantine, and `answers` that
    an upstream has answered.
    """

    def __init__(
        self,
        *,
        journal: Store,
        catalog: Catalog,
        clock: Clock,
        make: Make,
        lend: Lend,
        try_out: TryOut,
        announce: Callable[..., None],
        mention: Callable[..., None],
        look: Callable[[], Awaitable[None]],
        supervisor: Supervisor,
        answers: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._journal = journal
        self._catalog = catalog
        self._clock = clock
        self._make = make
        self._lend = lend
        self._try_out = try_out
        self._announce = announce
        self._mention = mention
        self._look = look
        self._supervisor = supervisor
        self._answers = answers
        self._connectors: dict[str, tuple[Upstream, Connector]] = {}
        self._trying: dict[str, Connector] = {}  # upstreams that are being added, for the contract tests of their tools
        self._missed: set[str] = set()  # of these, the ones that announced a change meanwhile
        self._known: dict[str, Upstream] = {}
        self._away: set[str] = set()  # upstreams that did not answer the last request of this process
        self._changes = journal.changes
        self._changes.watch(("upstreams",), repository.upstreams, self._follow)
        self._busy: dict[str, asyncio.Lock] = {}
        self._proving: set[str] = set()  # upstreams whose unproven tools are being tried
        self._prove_at: dict[str, float] = {}  # when a probe tries those of an upstream again
        self._changed: dict[str, asyncio.Event] = {}  # upstreams that announced a change and are being looked at again
        self._looks: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    # Connections

    def connect(self, name: str) -> Connector:
        """Return the connection to an upstream; E3502 at once for one that is away, E3108 for one that was removed."""
        trying = self._trying.get(name)
        if trying is not None:
            return trying
        self._refresh()
        known = self._known.get(name)
        if known is None:
            raise Failure("E3108", f"there is no upstream `{name}` any more: interlock upstream add")
        if known.state != "available":
            raise Failure("E3502", f"the upstream `{name}` does not answer: {known.reason}", details={"sent": False})
        return self._connector(known)

    def _connector(self, known: Upstream) -> Connector:
        held = self._connectors.get(known.name)
        if held is None:
            made = self._make(known.name, known.kind, known.config, self._on_change(known.name))
            held = self._connectors[known.name] = known, made
        return held[1]

    def _on_change(self, name: str) -> Callable[[], None]:
        def changed() -> None:
            if name in self._trying:
                self._missed.add(name)  # looked at again once it is added
                return
            # However often it announces changes: one look at a time, and one more for announcements during the last.
            again = self._changed.get(name)
            if again is not None:
                again.set()
                return
            again = self._changed[name] = asyncio.Event()
            again.set()
            self._looks[name] = self._spawn(f"look at the changed upstream {name}", self._look_again(name, again))

        return changed

    async def _look_again(self, name: str, again: asyncio.Event) -> None:
        try:
            while again.is_set():
                again.clear()
                await self.refresh(name)
        except Failure as failure:
            _log.warning("the upstream %s announced a change that could not be read: %s", name, failure.message)
        finally:
            del self._changed[name], self._looks[name]

    def _refresh(self) -> None:
        if self._clock.monotonic() >= self._changes.fresh_until:
            self._changes.catch_up()

    def _follow(self, upstreams: Sequence[Upstream]) -> None:
        """Apply the stored state; close connections to upstreams that were removed, or added again
        under the same name.
        """
        self._known = {one.name: one for one in upstreams}
        for name, (meant, connector) in list(self._connectors.items()):
            known = self._known.get(name)
            # One that did not answer us but answers others is connected to anew: our connection may be given up.
            if (
                known is None
                or (known.added_ms, known.kind, known.configured) != (meant.added_ms, meant.kind, meant.configured)
                or (name in self._away and known.state == "available")
            ):
                self._away.discard(name)
                del self._connectors[name]
                self._spawn(f"closing of the upstream {name}", connector.close())

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._supervisor.spawn(name, work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Looking

    async def list(self) -> list[Upstream]:
        """Return every upstream, by name."""
        return await self._journal.read(repository.upstreams)

    async def get(self, name: str) -> Upstream:
        """Return one upstream; E3101 if there is none of that name."""
        upstream = next((one for one in await self.list() if one.name == name), None)
        if upstream is None:
            words, advice = f"there is no upstream `{name}`", "see which there are: interlock upstream list"
            raise Failure("E3101", words, resolution=advice)
        return upstream

    def answers(self, name: str) -> bool:
        """Whether an upstream answered its last request."""
        self._refresh()
        known = self._known.get(name)
        return known is not None and known.state == "available"

    def unanswered(self) -> frozenset[str]:
        """The upstreams that did not answer their last request, of this process or another."""
        self._refresh()
        return frozenset(name for name, known in self._known.items() if known.state != "available")

    async def offers(self, name: str) -> tuple[Offered, ...]:
        """Return the tools that an upstream was last seen to offer, and the decision on each."""
        return await self._journal.read(lambda reader: repository.offers(reader, name))

    async def changes(self, name: str) -> dict[str, dict[str, list[Any]]]:
        """For the tools that changed, return each part that differs: as admitted, and as offered now."""
        known = await self.get(name)
        return {
            one.name: await self._otherwise(known, one) for one in await self.offers(name) if one.state == "changed"
        }

    async def _otherwise(self, known: Upstream, one: Offered) -> dict[str, list[Any]]:
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
        was: Json = orjson.loads((await self._catalog.versions(one.address))[one.version].row.manifest)
        new: Json = orjson.loads(now.model_dump_json())
        return {part: [was.get(part), new.get(part)] for part in _COMPARED if was.get(part) != new.get(part)}

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
        wanted = await self._wanted(name, kind, config, overlay, "")
        connector = self._make(name, kind, config, _nobody)
        try:
            discovered = await self._discover(wanted, connector)
        finally:
            await connector.close()
        offered = await judge(self._journal, wanted, discovered, Page(None, {}), {})
        return Report(name, (*offered, *refused(discovered, offered)), dict(discovered.about))

    async def _discover(self, known: Upstream, connector: Connector) -> Discovered:
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                discovered = await self._with_secrets(known, connector.discover)
        except TimeoutError:
            raise Failure("E3503", f"`{known.name}` did not say in {LOOK_LIMIT_S:.0f} s what it offers") from None
        if len(discovered.tools) + len(discovered.refused) > MAX_TOOLS:
            raise Failure("E3407", f"`{known.name}` offers more than {MAX_TOOLS} tools, which nobody could look at")
        return bounded(discovered)

    async def _with_secrets(self, known: Upstream, look: Callable[[Mapping[str, str]], Awaitable[T]]) -> T:
        """Look at an upstream. Secrets are lent for it only if it asks for them."""
        try:
            return await look({})
        except Failure as failure:
            if failure.code != "E3602" or not known.credentials:
                raise
        names = {name: secret_of(name, None) for name in known.credentials}
        lease = await self._lend(tuple(names.values()), LOOK_LIMIT_S)
        try:
            return await look({name: lease[secret].reveal() for name, secret in names.items()})
        finally:
            await lease.close()

    # Changing

    async def add(self, name: str, kind: str, config: Json, *, by: Caller, overlay: Json | None = None) -> Report:
        """Connect to an upstream, and serve those of its tools that are admitted."""
        _may(by)
        wanted = await self._wanted(name, kind, config, overlay, by.acting)
        if name in self._trying:
            raise Outdated(name)
        connector = self._trying[name] = self._make(name, kind, config, self._on_change(name))
        try:
            report = await self._take_in(wanted, await self._discover(wanted, connector), by=by.acting, new=True)
        except BaseException:
            await connector.close()
            raise
        finally:
            del self._trying[name]
            missed = name in self._missed
            self._missed.discard(name)
        # What was committed is known by now, unless somebody has removed it again.
        self._connectors[name] = self._known.get(name) or await self.get(name), connector
        if missed:
            self._on_change(name)()
        return report

    async def refresh(self, name: str, *, by: Caller | None = None, overlay: Json | None = None) -> Report:
        """Look again at the tools of an upstream. Changed ones are quarantined, new ones are offered for admission."""
        if by is not None:
            _may(by)
        known = await self.get(name)
        if by is not None and name in self._away and (held := self._connectors.pop(name, None)) is not None:
            await held[1].close()  # perhaps it was repaired, so a connection that was given up is tried again
        try:
            discovered = await self._discover(known, self._connector(known))
        except Failure as failure:
            await self._mark(known, "unavailable", failure.message)
            raise
        report = await self._take_in(known, discovered, by="refresh" if by is None else by.acting, overlay=overlay)
        remarks = await self._prove(name)
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
        discovered = await self._discover(known, self._connector(known))
        judged = await judge(self._journal, known, discovered, await self._page(name), {})
        there = {one.name: one.seen for one in judged}
        # INVARIANT: nothing is accepted that nobody has reviewed. The current definition is stored, to be reviewed.
        again = sorted(one for one, seen in accepted.items() if one in there and there[one] != seen)
        report = await self._take_in(known, discovered, by=f"{by.acting}: {reason}", accepted={} if again else accepted)
        if again:
            words = f"`{again[0]}` has changed again since it was shown"
            advice = f"look at it as it is now, then accept it: interlock upstream show {name}"
            raise Failure("E3103", words, details={"tools": again}, resolution=advice)
        return report

    async def remove(self, name: str, *, by: Caller) -> None:
        """Remove an upstream. Its tools are sunset; their calls stay on record."""
        _may(by)
        await self.get(name)
        async with self._busy.setdefault(name, asyncio.Lock()):
            await self._journal.commit(repository.removal(name, by.acting))
        await self._catalog.forget()
        held = self._connectors.pop(name, None)
        await self._changes.look()
        if held is not None:
            await held[1].close()

    # Liveness

    async def probe_all(self) -> None:
        """Probe all upstreams concurrently."""
        await asyncio.gather(*(self.probe(one.name) for one in await self.list()))

    async def probe(self, name: str) -> str:
        """Probe one upstream and return its state, which is stored if it changed."""
        known = await self.get(name)
        try:
            async with asyncio.timeout(PROBE_LIMIT_S):
                await self._with_secrets(known, self._connector(known).probe)
        except (Failure, TimeoutError, OSError) as error:
            reason = error.message if isinstance(error, Failure) else "it did not answer a probe in time"
            await self._mark(known, "unavailable", reason)
            return "unavailable"
        if name in self._looks:  # its offer has changed; the result is available once that is known
            await asyncio.wait((self._looks[name],), timeout=LOOK_LIMIT_S)
        await self._mark(known, "available", "")
        if self._answers is not None:
            await self._answers(name)
        if self._clock.monotonic() >= self._prove_at.get(name, 0.0):
            await self._prove(name)
        return "available"

    async def _mark(self, known: Upstream, state: str, reason: str) -> None:
        self._set_state(known.name, state)
        if (known.state, known.reason) == (state, reason):
            return
        await self._journal.commit(repository.marking(known, state, reason))
        await self._changes.look()
        if known.state != state:
            facts = {"alert": f"UPSTREAM_{state.upper()}", "upstream": known.name, "reason": reason}
            self._announce("tool.alert", "", "", **facts)

    def _set_state(self, name: str, state: str) -> None:
        (self._away.discard if state == "available" else self._away.add)(name)

    async def finish(self) -> None:
        """Let the looks under way finish, within a time limit."""
        if self._looks:
            await asyncio.wait(self._looks.values(), timeout=FINISH_S)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        connectors, self._connectors = [one for _, one in self._connectors.values()], {}
        await asyncio.gather(*(connector.close() for connector in connectors), return_exceptions=True)

    # Admission

    async def _wanted(self, name: str, kind: str, config: Json, overlay: Json | None, by: str) -> Upstream:
        if not _NAME.fullmatch(name) or name in _RESERVED:
            raise Failure("E3004", "an upstream is named by up to 63 of `a-z 0-9 _ -`, a letter first; not `interlock`")
        for one in await self.list():
            if one.name == name:
                raise Failure(
                    "E3103",
                    f"there is an upstream `{name}` already",
                    resolution=f"look at it again: interlock upstream refresh {name}; or remove it first:"
                    f" interlock upstream remove {name}",
                )
            if _alike(one.name) == _alike(name):
                words = f"`{name}` could be taken for the upstream `{one.name}`"
                raise Failure("E3103", words, resolution="name it otherwise")
        return Upstream.new(name, kind, config, _plain(overlay), self._clock.now_ms(), by)

    async def _take_in(
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
                    known = await self.get(known.name)
                if overlay is not None:
                    known = replace(known, overlay=_plain(overlay))
                page = await self._page(known.name)
                judged = await judge(self._journal, known, discovered, page, accepted or {})
                offered, evidence = await admit(self._catalog, self._try_out, judged)
                looked = (*offered, *gone(page, offered), *refused(discovered, offered))
                del judged, offered
                unit = await DEFINITIONS.run(
                    repository.settle, known, page, once(looked), evidence, by=by, new=new, lift=accepted or ()
                )
                # The manifests of a large document take more memory than all else; the unit has them as texts.
                looked = repository.released(looked)
                try:
                    await self._journal.commit(unit)
                    break
                except Outdated:
                    if new or tries == _TRIES:
                        raise
                tries += 1
                await self._catalog.forget()
            await self._catalog.forget()
            await self._look()
            self._set_state(known.name, "available")
            await self._changes.look()
        self._alert(known, page, looked, evidence, by)
        if self._answers is not None:
            await self._answers(known.name)
        return Report(known.name, looked, dict(discovered.about))

    async def _prove(self, name: str) -> dict[str, str]:
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
            await self._catalog.forget()
            await self._look()
            await self._changes.look()
        finally:
            self._proving.discard(name)
        for digest, proof in tried.items():
            if not proof.passed:
                facts = {"alert": "TOOL_DISPROVEN", "upstream": name, "reason": proof.report}
                self._announce("tool.alert", "", refs[digest].partition("@")[0], **facts)
        return {address: repository.unproven_words(tried[digest]) for address, _, digest in waiting}

    async def _page(self, name: str) -> Page:
        return await self._journal.read(lambda reader: repository.page(reader, name))

    def _alert(
        self, known: Upstream, page: Page, looked: Sequence[Offered], evidence: Mapping[str, Evidence], by: str
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


def _alike(name: str) -> str:
    """Normalise a name so that similar ones are detected."""
    return name.replace("-", "").replace("_", "")


def _may(by: Caller) -> None:
    if not by.governs("tools:admin"):
        raise Failure("E3206", "changing upstreams needs the scope tools:admin, in the tenant `local`")


def _plain(overlay: Json | None) -> Json:
    """Check an overlay and return its stored form."""
    return parse_overlay(overlay).model_dump(mode="json", exclude_unset=True)


def _nobody() -> None:
    """Default listener for changes of an upstream that is only looked at: does nothing."""

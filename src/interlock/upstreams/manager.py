"""The book kept of upstreams: which there are, what each offers, and what of it is served here.

Adding one connects to it, discovers its tools and offers each for admission like any other; what is admitted is pinned
by the digest of the definition it was made from. When a definition changes, the version made from it is quarantined
until a person has looked and accepted it as a new version; when a tool is no longer offered, its versions are sunset;
when an upstream does not answer, its tools stay registered and calls fail at once. All that one look at an upstream
changes is changed in one commit, so a reader sees the catalog before or after it and nothing between.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import orjson

from interlock.core.canonical import digest
from interlock.core.clock import Clock, iso
from interlock.core.connector import Connector, Definition, Discovered, UpstreamKind
from interlock.core.context import Caller
from interlock.core.declare import Tool, from_upstream
from interlock.core.errors import Failure
from interlock.core.manifest import Manifest
from interlock.core.schema import Json
from interlock.registry import admission, quarantine
from interlock.registry.admission import Evidence
from interlock.registry.catalog import Catalog, bump_epoch, contract_digest
from interlock.store import records
from interlock.store.journal import Journal, Transaction, Unit
from interlock.upstreams.overlay import Imported, definition_digest, import_all, parse_overlay

_log = logging.getLogger("interlock.upstreams")

FIRST_VERSION = "1.0.0"
PROBE_LIMIT_S = 5.0
_FRESH_S = 1.0

Make = Callable[[str, UpstreamKind, Json, Callable[[], None]], Connector]
TryOut = Callable[[Sequence[Tool[..., Any]]], Awaitable[Sequence[Evidence]]]


@dataclass(frozen=True, slots=True)
class Upstream:
    """One upstream as it is stored."""

    name: str
    kind: UpstreamKind
    config: Json
    overlay: Json
    state: str
    reason: str
    added_ms: int
    added_by: str
    discovered_ms: int
    probed_ms: int

    @property
    def credentials(self) -> tuple[str, ...]:
        """The secrets its calls are lent."""
        found = {str(name) for name in cast("Json", self.config.get("credentials") or {}).values()}
        auth = cast("Json | None", self.config.get("auth"))
        return tuple(sorted(found | ({str(auth["secret"])} if auth and "secret" in auth else set())))

    def document(self) -> Json:
        return {
            "name": self.name,
            "kind": self.kind,
            "state": self.state,
            "reason": self.reason,
            "added_at": iso(self.added_ms),
            "added_by": self.added_by,
            "discovered_at": iso(self.discovered_ms),
            "probed_at": iso(self.probed_ms) if self.probed_ms else None,
        }


@dataclass(frozen=True, slots=True)
class Offered:
    """One tool of an upstream, and what became of it: offered, admitted, refused, changed or gone."""

    name: str
    state: str
    address: str = ""
    version: str | None = None
    mutation_class: str = ""
    why: str = ""
    reason: str = ""
    needs: tuple[str, ...] = ()
    definition: Definition | None = field(default=None, compare=False)
    manifest: Manifest | None = field(default=None, compare=False)

    def document(self) -> Json:
        return {
            "name": self.name,
            "state": self.state,
            "tool_id": self.address,
            "version": self.version,
            "mutation_class": self.mutation_class,
            "why": self.why,
            "reason": self.reason,
            "needs": list(self.needs),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """What one look at an upstream found, tool by tool."""

    upstream: str
    tools: tuple[Offered, ...]
    about: Json = field(default_factory=dict[str, Any])

    def count(self, state: str) -> int:
        return sum(one.state == state for one in self.tools)

    def document(self) -> Json:
        return {"upstream": self.upstream, "tools": [one.document() for one in self.tools], "about": self.about}


class Upstreams:
    """The upstreams of one home, and this process's connections to them."""

    def __init__(
        self,
        *,
        journal: Journal,
        catalog: Catalog,
        clock: Clock,
        make: Make,
        try_out: TryOut,
        announce: Callable[..., None],
        look: Callable[[], None],
    ) -> None:
        self._journal = journal
        self._catalog = catalog
        self._clock = clock
        self._make = make
        self._try_out = try_out
        self._announce = announce
        self._look = look  # tells the gateway that something may be in quarantine
        self._connectors: dict[str, Connector] = {}
        self._trying: dict[str, Connector] = {}  # upstreams that are being added, for the contract tests of their tools
        self._known: dict[str, Upstream] = {}
        self._looked = float("-inf")
        self._busy: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    # Connections

    def connect(self, name: str) -> Connector:
        """The connection to an upstream; E3502 at once for one that is away, E3108 for one that was removed."""
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
        found = self._connectors.get(known.name)
        if found is None:
            changed = self._on_change(known.name)
            found = self._connectors[known.name] = self._make(known.name, known.kind, known.config, changed)
        return found

    def _on_change(self, name: str) -> Callable[[], None]:
        def changed() -> None:
            task = asyncio.get_running_loop().create_task(self._look_again(name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return changed

    async def _look_again(self, name: str) -> None:
        try:
            await self.refresh(name)
        except Failure as failure:
            _log.warning("the upstream %s announced a change that could not be read: %s", name, failure.message)

    def _refresh(self, *, now: bool = False) -> None:
        at = self._clock.monotonic()
        if not now and at - self._looked < _FRESH_S:
            return
        self._looked = at
        self._known = {one.name: one for one in self.list()}

    # Looking

    def list(self) -> list[Upstream]:
        """Every upstream there is, by name."""
        rows = self._journal.read(f"SELECT {_UPSTREAM} FROM upstream ORDER BY name")  # noqa: S608 - constant
        return [_upstream(row) for row in rows]

    def get(self, name: str) -> Upstream:
        """One upstream; E3101 when there is none of that name."""
        found = next((one for one in self.list() if one.name == name), None)
        if found is None:
            raise Failure("E3101", f"there is no upstream `{name}`; see interlock upstream list")
        return found

    def offers(self, name: str) -> tuple[Offered, ...]:
        """What an upstream was last seen to offer, and what became of each."""
        rows = self._journal.read(
            "SELECT name, state, address, version, reason FROM upstream_tool WHERE upstream = ? ORDER BY name", (name,)
        )
        return tuple(Offered(*row[:4], reason=row[4]) for row in rows)

    async def try_connecting(self, name: str, kind: UpstreamKind, config: Json, overlay: Json | None = None) -> Report:
        """What adding an upstream would bring. Connects to it and changes nothing."""
        wanted = self._wanted(name, kind, config, overlay, "")
        connector = self._make(name, kind, config, _nobody)
        try:
            discovered = await connector.discover()
        finally:
            await connector.close()
        offered = self._judge(wanted, discovered, {})
        return Report(name, (*offered, *_refused(discovered)), dict(discovered.about))

    # Changing

    async def add(
        self, name: str, kind: UpstreamKind, config: Json, *, by: Caller, overlay: Json | None = None
    ) -> Report:
        """Connect to an upstream, and serve those of its tools that are admitted."""
        _may(by)
        if any(one.name == name for one in self.list()):
            raise Failure("E3103", f"there is an upstream `{name}` already; refresh it, or remove it first")
        wanted = self._wanted(name, kind, config, overlay, by.acting)
        connector = self._trying[name] = self._make(name, kind, config, self._on_change(name))
        try:
            report = await self._take_in(wanted, await connector.discover(), by=by.acting, new=True)
        except BaseException:
            await connector.close()
            raise
        finally:
            del self._trying[name]
        self._connectors[name] = connector
        return report

    async def refresh(self, name: str, *, by: Caller | None = None, overlay: Json | None = None) -> Report:
        """Look again at what an upstream offers. What changed is quarantined, what is new is offered for admission."""
        if by is not None:
            _may(by)
        known = self.get(name)
        if overlay is not None:
            known = replace(known, overlay=_plain(overlay))
        try:
            discovered = await self._connector(known).discover()
        except Failure as failure:
            await self._mark(known, "unavailable", failure.message)
            raise
        return await self._take_in(known, discovered, by="refresh" if by is None else by.acting, new=False)

    async def accept(self, name: str, *, by: Caller, tools: Sequence[str] = (), reason: str) -> Report:
        """A person has looked at changed definitions: they become new versions, and are pinned."""
        _may(by)
        if by.kind != "human" or by.agent not in (None, by.id):
            raise Failure("E3206", "only a person can accept a changed definition; an agent never can")
        if not reason.strip():
            raise Failure("E3004", "say why the change is accepted")
        known = self.get(name)
        changed = {one.name for one in self.offers(name) if one.state == "changed"}
        if unknown := sorted(set(tools) - changed):
            raise Failure("E3101", f"`{unknown[0]}` has not changed; see interlock upstream show {name}")
        discovered = await self._connector(known).discover()
        accepted = frozenset(tools or changed)
        return await self._take_in(known, discovered, by=f"{by.acting}: {reason}", new=False, accepted=accepted)

    async def remove(self, name: str, *, by: Caller) -> None:
        """Let go of an upstream. Its tools are sunset; what they did stays on record."""
        _may(by)
        known = self.get(name)
        addresses = [one.address for one in self.offers(name) if one.address]

        def unit(transaction: Transaction) -> None:
            for address in addresses:
                _set_state(transaction, address, None, "sunset")
            transaction.execute("DELETE FROM upstream_tool WHERE upstream = ?", (name,))
            transaction.execute("DELETE FROM upstream WHERE name = ?", (name,))
            _note(transaction, known.name, "upstream.removed", by=by.acting)
            bump_epoch(transaction)

        await self._journal.commit(unit)
        self._catalog.forget()
        self._refresh(now=True)
        connector = self._connectors.pop(name, None)
        if connector is not None:
            await connector.close()

    # Liveness

    async def probe_all(self) -> None:
        """Ask every upstream whether it is there, all at once."""
        await asyncio.gather(*(self.probe(one.name) for one in self.list()))

    async def probe(self, name: str) -> str:
        """Ask one; its state, which is written down where it changed."""
        known = self.get(name)
        try:
            async with asyncio.timeout(PROBE_LIMIT_S):
                await self._connector(known).probe()
        except (Failure, TimeoutError, OSError) as error:
            reason = error.message if isinstance(error, Failure) else "it did not answer a probe in time"
            await self._mark(known, "unavailable", reason)
            return "unavailable"
        await self._mark(known, "available", "")
        return "available"

    async def _mark(self, known: Upstream, state: str, reason: str) -> None:
        if (known.state, known.reason) == (state, reason):
            return

        def unit(transaction: Transaction) -> None:
            transaction.execute(
                "UPDATE upstream SET state = ?, reason = ?, probed_ms = ? WHERE name = ?",
                (state, reason, transaction.now_ms, known.name),
            )
            if known.state != state:
                _note(transaction, known.name, f"upstream.{state}", reason=reason)

        await self._journal.commit(unit)
        self._refresh(now=True)
        if known.state != state:
            self._announce("tool.alert", known.name, "", alert=f"UPSTREAM_{state.upper()}", reason=reason)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        connectors, self._connectors = list(self._connectors.values()), {}
        await asyncio.gather(*(connector.close() for connector in connectors), return_exceptions=True)

    # Taking in

    def _wanted(self, name: str, kind: UpstreamKind, config: Json, overlay: Json | None, by: str) -> Upstream:
        read = _plain(overlay)
        return Upstream(name, kind, config, read, "available", "", self._clock.now_ms(), by, self._clock.now_ms(), 0)

    def _judge(self, known: Upstream, discovered: Discovered, ids: Mapping[str, str]) -> list[Offered]:
        """What each definition would become, as a first version. `ids` are those that its tools have already."""
        overlay = parse_overlay(known.overlay)
        if faults := overlay.faults(one.name for one in discovered.tools):
            listing = "; ".join(f"{fault.pointer} {fault.message}" for fault in faults[:5])
            raise Failure("E3105", f"overlay refused: {listing}")
        imported = import_all(
            discovered.tools,
            upstream=known.name,
            kind=known.kind,
            versions=FIRST_VERSION,
            overlay=overlay,
            accept_hints=bool(known.config.get("accept_hints")),
            prefix=bool(known.config.get("prefix", True)),
            credentials=known.credentials,
            known=ids,
        )
        return [_offered(one) for one in imported]

    async def _take_in(
        self, known: Upstream, discovered: Discovered, *, by: str, new: bool, accepted: frozenset[str] = frozenset()
    ) -> Report:
        lock = self._busy.setdefault(known.name, asyncio.Lock())
        async with lock:
            before = self._pinned(known.name)
            ids = {name: str(row["address"]).partition(".")[2] for name, row in before.items()}
            judged = self._judge(known, discovered, ids)
            offered = [_against(known, one, before.get(one.name), accepted) for one in judged]
            offered, evidence = await self._admit(offered)
            gone = [
                Offered(name, "gone", row["address"], row["version"], reason="the upstream offers it no longer")
                for name, row in before.items()
                if name not in {one.name for one in offered}
            ]
            refused = _refused(discovered)
            units = [_publishing(known.name, one, before.get(one.name), evidence.get(one.name), by) for one in offered]
            everything = (*offered, *gone, *refused)

            def unit(transaction: Transaction) -> None:
                _store(transaction, known, new=new)
                for publish in units:
                    publish(transaction)
                for one in gone:
                    _set_state(transaction, one.address, None, "sunset")
                for one in everything:
                    _store_tool(transaction, known.name, one)
                _note(
                    transaction, known.name, "upstream.added" if new else "upstream.refreshed", by=by,
                    admitted=sum(one.state == "admitted" for one in everything),
                    changed=sum(one.state == "changed" for one in everything),
                    gone=len(gone), refused=sum(one.state == "refused" for one in everything),
                )  # fmt: skip
                bump_epoch(transaction)

            await self._journal.commit(unit)
            self._catalog.forget()
            self._look()
            self._refresh(now=True)
        for one in everything:
            if one.state == "changed" and (before.get(one.name) or {}).get("state") != "changed":
                self._announce("tool.alert", known.name, one.address, alert="TOOL_DEFINITION_CHANGED", offered=one.name)
            if one.state == "refused":
                self._announce("INVALID_TOOL_SCHEMA", known.name, "", offered=one.name, reason=one.reason)
        return Report(known.name, everything, dict(discovered.about))

    def _pinned(self, name: str) -> dict[str, Json]:
        rows = self._journal.read(
            "SELECT name, address, version, pinned, state FROM upstream_tool WHERE upstream = ?", (name,)
        )
        return {
            row[0]: {"address": row[1], "version": row[2], "pinned": row[3], "state": row[4]}
            for row in rows
            if row[2] is not None
        }

    async def _admit(self, offered: Sequence[Offered]) -> tuple[list[Offered], dict[str, Evidence]]:
        """Try those that are new, and judge them by all eight conditions."""
        fresh = [self._next_version(one) for one in offered if one.manifest is not None]
        tools = [from_upstream(cast("Manifest", one.manifest)) for one in fresh]
        evidence = dict(zip((one.name for one in fresh), await self._try_out(tools) if tools else (), strict=True))
        judged: dict[str, Offered] = {}
        for one, tool in zip(fresh, tools, strict=True):
            published = self._catalog.versions(one.address)
            verdict = admission.examine(tool.manifest, contract_digest(tool), published, evidence[one.name])
            state = "admitted" if verdict.admitted else "refused"
            reason = "" if verdict.admitted else verdict.failure(one.address).message
            judged[one.name] = replace(one, state=state, reason=reason)
        return [judged.get(one.name, one) for one in offered], evidence

    def _next_version(self, one: Offered) -> Offered:
        """The manifest under the version it needs: the first, or the next after what is published."""
        manifest = cast("Manifest", one.manifest)
        published = self._catalog.versions(one.address or manifest.address)
        if not published:
            return replace(one, address=manifest.address, version=manifest.version)
        latest = max(published, key=_numbers)
        for version in (_bumped(latest, 1), _bumped(latest, 0)):
            candidate = manifest.model_copy(update={"version": version})
            tool = from_upstream(candidate)
            pretend = Evidence(contract_digest(tool), True, "pending", "")
            if admission.examine(candidate, pretend.digest, published, pretend).admitted:
                return replace(one, manifest=candidate, version=version)
        version = _bumped(latest, 0)
        return replace(one, manifest=manifest.model_copy(update={"version": version}), version=version)


def _against(known: Upstream, one: Offered, pinned: Json | None, accepted: frozenset[str]) -> Offered:
    """A definition held against the one that was admitted."""
    if pinned is None or one.manifest is None or one.definition is None:
        return one
    current = replace(one, address=pinned["address"], version=pinned["version"])
    same = pinned["pinned"] == _pin(one.definition, known)
    if same and (pinned["state"] != "changed" or one.name in accepted):
        return replace(current, state="admitted", manifest=None)
    if one.name in accepted:
        return current
    # INVARIANT: what has changed once stays out until a person has looked, also if it changes back.
    reason = "its definition changed and changed back" if same else "its definition has changed since"
    return replace(current, state="changed", manifest=None, reason=reason)


def _publishing(upstream: str, one: Offered, pinned: Json | None, evidence: Evidence | None, by: str) -> Unit[None]:
    """What of a look at one tool is written: a version, a quarantine, or that it is back."""

    def unit(transaction: Transaction) -> None:
        if one.state == "admitted" and one.manifest is not None and evidence is not None:
            admission.publish(one.manifest, evidence.digest, f"upstream:{upstream}", evidence, by)(transaction)
        elif one.state == "admitted" and pinned is not None and pinned["state"] in ("gone", "changed"):
            _set_state(transaction, one.address, one.version, "active")
            _lift(transaction, one.address, one.version, by)
        elif one.state == "changed" and pinned is not None and pinned["state"] != "changed":
            row = transaction.one(
                "SELECT digest FROM tool_version WHERE address = ? AND version = ?", (one.address, one.version)
            )
            if row is not None:
                ref = f"{one.address}@{one.version}"
                quarantine.impose(row[0], ref, upstream, f"TOOL_DEFINITION_CHANGED: {one.reason}")(transaction)

    return unit


def _may(by: Caller) -> None:
    if "tools:admin" not in by.scopes:
        raise Failure("E3206", "changing upstreams needs the scope tools:admin")


def _plain(overlay: Json | None) -> Json:
    """An overlay as it is stored: what was said, checked."""
    return parse_overlay(overlay).model_dump(mode="json", exclude_unset=True)


def _nobody() -> None:
    """Nobody waits for news of an upstream that is only looked at."""


def _offered(imported: Imported) -> Offered:
    manifest, judged = imported.manifest, imported.judged
    return Offered(
        name=imported.definition.name,
        state="refused" if manifest is None else "offered",
        address="" if manifest is None else manifest.address,
        version=None if manifest is None else manifest.version,
        mutation_class=judged.mutation_class,
        why=judged.why,
        reason=imported.refused or "",
        needs=tuple(imported.needs),
        definition=imported.definition,
        manifest=manifest,
    )


def _refused(discovered: Discovered) -> list[Offered]:
    return [Offered(name, "refused", reason=reason) for name, reason in discovered.refused]


def _pin(definition: Definition, known: Upstream) -> str:
    """What was admitted: the definition as its upstream gave it, and what the operator said about it."""
    return digest({"definition": definition_digest(definition), "overlay": known.overlay})


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("-")[0].split("+")[0].split("."))


def _bumped(version: str, place: int) -> str:
    numbers = list(_numbers(version))
    return ".".join(str(n + 1) if at == place else "0" if at > place else str(n) for at, n in enumerate(numbers))


# Rows

_UPSTREAM = "name, kind, config, overlay, state, reason, added_ms, added_by, discovered_ms, probed_ms"


def _upstream(row: Sequence[Any]) -> Upstream:
    name, kind, config, overlay, *rest = row
    return Upstream(name, kind, orjson.loads(config), orjson.loads(overlay), *rest)


def _store(transaction: Transaction, known: Upstream, *, new: bool) -> None:
    config, overlay = orjson.dumps(known.config).decode(), orjson.dumps(known.overlay).decode()
    now = transaction.now_ms
    if new:
        if transaction.one("SELECT 1 FROM upstream WHERE name = ?", (known.name,)) is not None:
            raise Failure("E3103", f"there is an upstream `{known.name}` already; refresh it, or remove it first")
        transaction.execute(
            f"INSERT INTO upstream ({_UPSTREAM}) VALUES (?, ?, ?, ?, 'available', '', ?, ?, ?, ?)",  # noqa: S608 - constant
            (known.name, known.kind, config, overlay, now, known.added_by, now, now),
        )
        return
    transaction.execute(
        "UPDATE upstream SET overlay = ?, state = 'available', reason = '', discovered_ms = ?, probed_ms = ?"
        " WHERE name = ?",
        (overlay, now, now, known.name),
    )


def _store_tool(transaction: Transaction, upstream: str, one: Offered) -> None:
    found = transaction.one(
        "SELECT pinned, version, discovered_ms FROM upstream_tool WHERE upstream = ? AND name = ?", (upstream, one.name)
    )
    pinned, version, discovered_ms = found or (None, None, transaction.now_ms)
    seen = "" if one.definition is None else _seen(transaction, upstream, one.definition)
    if one.state == "admitted" and one.definition is not None:
        pinned, version = seen, one.version
    definition = {} if one.definition is None else _definition(one.definition)
    transaction.execute(
        "INSERT OR REPLACE INTO upstream_tool"
        " (upstream, name, address, version, pinned, seen, definition, state, reason, discovered_ms)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            upstream, one.name, one.address, version, pinned, seen, orjson.dumps(definition).decode(), one.state,
            one.reason, discovered_ms,
        ),
    )  # fmt: skip


def _seen(transaction: Transaction, upstream: str, definition: Definition) -> str:
    row = transaction.one(f"SELECT {_UPSTREAM} FROM upstream WHERE name = ?", (upstream,))  # noqa: S608 - constant
    return _pin(definition, _upstream(row))


def _definition(definition: Definition) -> Json:
    return {
        "name": definition.name,
        "title": definition.title,
        "description": definition.description,
        "input_schema": definition.input_schema,
        "output_schema": definition.output_schema,
        "hints": dict(definition.hints),
    }


def _set_state(transaction: Transaction, address: str, version: str | None, state: str) -> None:
    if version is None:
        transaction.execute("UPDATE tool_version SET state = ? WHERE address = ?", (state, address))
    else:
        transaction.execute(
            "UPDATE tool_version SET state = ? WHERE address = ? AND version = ?", (state, address, version)
        )


def _lift(transaction: Transaction, address: str, version: str | None, by: str) -> None:
    """A person has looked at a definition that is what was admitted: it is in quarantine for nothing any more."""
    ref = f"{address}@{version}"
    row = transaction.one("SELECT digest, reason FROM quarantine WHERE tool = ? AND lifted_ms IS NULL", (ref,))
    if row is None or not str(row[1]).startswith("TOOL_DEFINITION_CHANGED"):
        return
    transaction.execute(
        "UPDATE quarantine SET lifted_ms = ?, epoch = (SELECT MAX(epoch) + 1 FROM quarantine) WHERE digest = ?",
        (transaction.now_ms, row[0]),
    )
    _note(transaction, ref, "tool.quarantine_lifted", digest=row[0], by=by)


def _note(transaction: Transaction, ref: str, event: str, **facts: Any) -> None:
    body = records.plain("registry", ref, transaction.now_ms, event=event, upstream=ref, **facts)
    transaction.append("registry", ref, body)


def kinds() -> Mapping[UpstreamKind, str]:
    """What an upstream can be, in words."""
    return {
        "mcp": "a Model Context Protocol server, by command or address",
        "openapi": "an HTTP service with an OpenAPI document",
        "http": "an HTTP service whose operations are written down by hand",
        "grpc": "a gRPC service with reflection",
        "websocket": "a service that answers messages on a WebSocket",
        "langchain": "LangChain tools of a Python module",
    }

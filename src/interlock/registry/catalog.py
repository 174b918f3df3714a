"""The catalog: every admitted version, found by name and range.

Versions are in the store; those that a process has used are cached in memory, compiled. Other processes may publish,
deprecate or remove at any time: the store's reader of changes then tells which tools have changed, and these are read
again. Where that is not known (`store.registry_changes`), everything is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from interlock.contract.versions import resolve
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.record import NamedTuple
from interlock.core.shared_work import SharedWork
from interlock.data.bounds import check_unicode
from interlock.registry.stored_versions import StoredVersions
from interlock.registry.tool_code import (
    code_here,
    native_code,
    refuse_other_code,
    reload_admitted,
    stored_tool,
    tool_from_text,
)
from interlock.registry.version import Content, Row, Version
from interlock.registry.version import Stranded as Stranded
from interlock.registry.whole import Changelog, Whole, alive, deprecated, is_exact, within
from interlock.store import registry_changes, tools
from interlock.store.port import Reader, Store

# The models of contracts are loaded when a version is used. A version is found and shown without them.
if TYPE_CHECKING:
    from interlock.call.capability import Capability
    from interlock.call.prepared import Prepared
    from interlock.contract.declare import Tool

_LIKE = 20  # similar names that are searched for ones the caller may see


# many methods: one cache, filled and dropped as a whole; every look-up goes through the same freshness check
class Catalog:
    """Finds versions by name and range, and binds them to their functions."""

    def __init__(self, journal: Store, clock: Clock, manifests: Path, *, shared: bool = False) -> None:
        self._journal = journal
        # Whether several machines use the store, each with an installation of its own.
        self._shared = shared
        self._clock = clock
        self._manifests = manifests
        self._versions: dict[str, dict[str, Version]] = {}
        self._whole: Whole | None = None
        # The tools that have changed since the whole was read.
        self._pending: frozenset[str] = frozenset()
        self._stored = StoredVersions(shared=shared)
        self._resolved: dict[tuple[str, str | None], Version] = {}
        self._finding = SharedWork[Version]()
        self._ready: dict[tuple[str, str | None], Prepared] = {}
        self._attached: dict[tuple[str, str], Tool[..., Any]] = {}
        self._origins: dict[str, dict[str, Tool[..., Any]]] = {}
        self._codes: dict[str, str] = {}
        self._epoch = -1
        # Has another number after each change. A read that was under way while it changed is not cached.
        self._log = Changelog()
        self._changes = journal.changes
        self._changes.watch(("registry",), self._look, self._changed)
        # Finds the draft for a caller, a name and a range, while this process holds drafts (`registry.drafts`).
        self.find_draft: Callable[[object, str, str | None], Version | None] | None = None
        # Called with the new revision when the registry has changed, in whichever process.
        self.on_change: Callable[[int], None] = lambda revision: None
        # Whether a failure about an unknown name says which names are similar.
        self.suggests = True

    async def resolve(
        self, name: str, spec: str | None = None, capability: Capability | None = None, caller: object = None
    ) -> Version:
        """Return the version for a name and range. E3101 unknown tool, E3102 no such version, E3104 past removal.

        With a token it is the highest that both the range and the token admit; E3103 if they have none in common. A
        draft is found for the caller that it belongs to, and only where a caller is named.
        """
        draft = None if self.find_draft is None else self.find_draft(caller, name, spec)
        if draft is not None:
            return draft
        version = await self._resolve(name, spec, capability)
        if capability is None or not capability.narrows:
            return version
        return within(version, spec, await self.versions(version.row.address), capability, self._clock.now_ms())

    async def _resolve(self, name: str, spec: str | None, capability: Capability | None) -> Version:
        await self._refresh()
        version = self._resolved.get((name, spec))
        if version is None:
            find = partial(self._look_up, name, spec, capability)
            # What a failure tells depends on the token. A file is read at once, also where there is no event loop.
            key = name, spec, "" if capability is None else capability.digest, self._log.number
            version = await (find() if self._journal.near else self._finding.do(key, find))
        if version.row.notice is None and version.row.state == "active":
            return version
        now_ms = self._clock.now_ms()
        if version.gone(now_ms):
            # Its removal date has passed since it was chosen: a range may still match another version.
            version = alive(spec, await self.versions(await self.address(name)), now_ms) or version
            version.refuse_if_gone(now_ms)
        return version

    async def _look_up(self, name: str, spec: str | None, capability: Capability | None) -> Version:
        revision = self._log.number
        version = await self._find(name, spec, capability)
        if revision == self._log.number:
            if len(self._resolved) > 10_000:
                self._resolved.clear()
                self._ready.clear()
            self._resolved[(name, spec)] = version
        return version

    async def newest(
        self, capability: Capability | None = None, after: str = "", among: Collection[str] | None = None
    ) -> Iterator[Version]:
        """Iterate over the default version of every tool, in order of name, starting behind a name; or of some tools.

        INVARIANT: all are as they were at one moment. Of a change to many tools, a reader sees everything or nothing.
        """
        await self._refresh()
        return self._newest(await self._all(), capability, after, among)

    def _newest(
        self, whole: Whole, capability: Capability | None, after: str, among: Collection[str] | None
    ) -> Iterator[Version]:
        now_ms = self._clock.now_ms()
        for chosen, versions in whole.entries(after) if among is None else whole.some(among):
            version = chosen if chosen.row.notice is None else alive(None, versions, now_ms)
            if version is None:
                continue  # its removal date has passed
            if capability is not None and capability.narrows:
                try:
                    version = within(version, None, versions, capability, now_ms)
                except Failure:
                    continue  # the token allows none of its versions
            yield version

    async def current(self) -> int:
        """Return the number of the present state of the registry: another one after each change."""
        await self._refresh()
        return self._log.number

    def changed_since(self, state: int) -> frozenset[str] | None:
        """The tools that changed since a state that `current` has returned; None if that is not known."""
        return self._log.since(state)

    async def everything(self, among: Collection[str] | None = None) -> list[Version]:
        """Return every version of every tool, whatever its state; or of some tools."""
        await self._refresh()
        known = (await self._all()).tools
        found = known.values() if among is None else (known.get(one, {}) for one in among)
        return [version for versions in found for version in versions.values()]

    async def ending(self) -> frozenset[str]:
        """Return the tools of which a version reaches its removal date at some time."""
        await self._refresh()
        return (await self._all()).noticed

    async def _all(self) -> Whole:
        """Return every version of every tool. Of one that was read before, what has changed is read."""
        whole, pending = self._whole, self._pending
        if whole is not None and not pending:
            return whole
        revision, now_ms = self._log.number, self._clock.now_ms()
        some = None
        if whole is not None and len(pending) <= registry_changes.MOST:
            some = await self._journal.read(partial(self._stored.read_some, epoch=self._epoch, pending=pending))
        if whole is None or some is None:
            stored, sources = await self._journal.read(self._stored.read_all)
            versions = [one for row in stored if (one := self._version(row, sources.get(row.digest))) is not None]
            fresh = Whole.of(versions, now_ms)
            self._stored.contents = {one.row.digest: one.content for one in versions}
            changed = fresh.tools
        else:
            addresses, read = some
            changed = {address: dict[str, Version]() for address in addresses}
            for row, source in read:
                if (version := self._version(row, source)) is not None:
                    changed[row.address][row.version] = version
            fresh = whole.patched(changed, now_ms)
        if revision == self._log.number:
            self._versions.update({address: found for address, found in changed.items() if found})
            self._whole, self._pending = fresh, frozenset()
        return fresh

    def _version(self, stored: tools.ToolVersionRow, source: str | None) -> Version | None:
        """Return a version as it was read; None if it was removed since."""
        content = self._stored.contents.get(stored.digest)
        if content is None:
            if stored.manifest is None:
                return None
            content = self._stored.contents[stored.digest] = Content(stored.manifest, stored.digest)
        text = self._stored.texts.get(stored.digest)
        size = len(text) if isinstance(text, bytes) else 0
        return Version(_row(stored, content.manifest), partial(self._bind, source=source), content, size)

    async def exact(self, address: str, version: str, caller: object = None) -> Version:
        """Return a version by its full name, whatever its state: its calls must stay undoable."""
        draft = None if self.find_draft is None else self.find_draft(caller, address, version)
        if draft is not None:
            return draft
        row = (await self.versions(address)).get(version)
        if row is None:
            raise Failure("E3102", f"{address} has no version {version}")
        return row

    async def prepared(self, name: str, spec: str | None, capability: Capability | None = None) -> Prepared:
        """Return the version for a name, a range and a token, ready to be called."""
        ready = self.at_hand(name, spec, capability)
        return (await self.resolve(name, spec, capability)).prepared if ready is None else ready

    def at_hand(self, name: str, spec: str | None, capability: Capability | None = None) -> Prepared | None:
        """Return the same from memory; None if it is not there, or if a large contract has to be compiled first.

        `resolve` then finds the version, and `Version.compile` compiles it. Where drafts are held it always does:
        memory does not tell callers apart.
        """
        if self.find_draft is not None:
            return None
        monotonic = self._clock.monotonic
        if monotonic() >= self._changes.fresh_until and not self._changes.try_catch_up():
            return None
        narrowing = capability if capability is not None and capability.narrows else None
        if narrowing is None:
            ready = self._ready.get((name, spec))
            if ready is not None and ready.notice is None:
                return ready
        version = self._resolved.get((name, spec))
        if version is None:
            return None
        # A version with a removal date is looked at each time: the date may pass.
        if (version.row.notice is not None or version.row.state != "active") and version.gone(self._clock.now_ms()):
            return None
        if narrowing is not None:
            versions = self._versions.get(version.row.address)
            if versions is None:
                return None
            version = within(version, spec, versions, narrowing, self._clock.now_ms())
        if not version.at_hand:
            return None
        prepared = version.prepared
        if narrowing is None:
            self._ready[(name, spec)] = prepared
        return prepared

    def known(self, name: str) -> Version | None:
        """Return the version for a name from memory, where `resolve` has found it before."""
        return self._resolved.get((name, None))

    async def _find(self, name: str, spec: str | None, capability: Capability | None) -> Version:
        address = await self.address(name, capability)
        versions = await self.versions(address)
        if not versions:
            raise await self.unknown(name, capability)
        selectable = {v for v, version in versions.items() if version.row.state in ("active", "deprecated")}
        pool = selectable if spec is None or not is_exact(spec, versions) else versions.keys()
        if not pool:
            states = ", ".join(f"{v} is {version.row.state}" for v, version in versions.items())
            raise Failure(
                "E3102",
                f"no version of `{name}` is in use any more: {states}",
                resolution="use what has taken its place; if an upstream was removed, add it again",
            )
        return versions[resolve(spec, pool, deprecated=deprecated(versions))]

    async def unknown(self, name: str, capability: Capability | None = None) -> Failure:
        """The failure for an unknown tool (E3101), with similar names that exist.

        INVARIANT: with a token, only tools are named that it lets its holder see. Where the operator excludes tools for
        some callers, none are (`suggests`).
        """
        if not self.suggests:
            return Failure("E3101", f"no tool named `{name}`; see interlock tools list")
        import difflib

        known = [one for one in await self.addresses() if capability is None or capability.names(one)]
        near = difflib.get_close_matches(name, known, n=_LIKE, cutoff=0.5)
        shown = [one for one in near if await self._serves(one) and await self._shows(one, capability)][:3]
        hint = f"; did you mean {', '.join(f'`{one}`' for one in shown)}?" if shown else "; see interlock tools list"
        return Failure("E3101", f"no tool named `{name}`{hint}")

    async def _serves(self, address: str) -> bool:
        """Whether some version of a tool is available."""
        versions = await self.versions(address)
        return any(one.row.state in ("active", "deprecated") for one in versions.values())

    async def _shows(self, address: str, capability: Capability | None) -> bool:
        """Whether a token names some version of a tool, and holds the scopes for it."""
        if capability is None:
            return True
        versions = await self.versions(address)
        return any(
            capability.covers(address, one.row.version)
            and capability.leaf.scopes.issuperset(one.content.required_scopes)
            for one in versions.values()
        )

    async def address(self, name: str, capability: Capability | None = None) -> str:
        """Return the address for a name: itself, an alias, or the one tool of that bare name.

        If there are several, the failure lists those that the token shows; a bare name of tools that it does not show
        is like one that no tool has.
        """
        if len(name) > 600:
            raise Failure("E3101", "no tool has a name that long")
        check_unicode("the name of a tool", name)
        if "." in name:
            return await self._journal.read(lambda reader: tools.aliased(reader, name)) or name
        candidates = await self._journal.read(lambda reader: tools.with_bare_name(reader, name))
        if len(candidates) > 1:
            candidates = [one for one in candidates if await self._shows(one, capability)]
            if not candidates:
                return name
            if not self.suggests:
                raise Failure("E3101", f"`{name}` is ambiguous; name the tool with its namespace")
            listing = ", ".join(f"`{one}`" for one in candidates[:10])
            raise Failure(
                "E3101", f"`{name}` is ambiguous; say which of {listing}", details={"candidates": candidates[:100]}
            )
        return candidates[0] if candidates else name

    async def versions(self, address: str) -> dict[str, Version]:
        """Return every version of a tool, as registered."""
        await self._refresh()
        known = self._versions.get(address)
        if known is None:
            revision = self._log.number
            stored = await self._journal.read(lambda reader: self._stored.read_versions(reader, address))
            versions = (self._version(one, source) for one, source in stored)
            known = {one.row.version: one for one in versions if one is not None}
            if known and revision == self._log.number:
                self._versions[address] = known
        return known

    async def rows(self) -> list[Row]:
        """Return all registered versions, in order of name."""
        return [_row(one, one.manifest or "") for one in await self._journal.read(tools.all_versions)]

    async def addresses(self) -> list[str]:
        return await self._journal.read(lambda reader: tools.first_addresses(reader, _MOST_ADDRESSES))

    def attach(self, tool: Tool[..., Any]) -> None:
        """Serve this version with a function of this process."""
        manifest = tool.manifest
        self._attached[(manifest.address, manifest.version)] = tool
        for known in (self._versions, {} if self._whole is None else self._whole.tools):
            version = known.get(manifest.address, {}).get(manifest.version)
            if version is not None:
                version.unbind()
        self._resolved.clear()
        self._ready.clear()

    async def look(self) -> None:
        """Read what has changed, so that what this process has just committed counts."""
        await self._changes.look()

    async def forget(self) -> None:
        """Drop the cache; the store is read again."""
        self._drop()
        await self._changes.look()

    def release(self) -> None:
        """Release what is cached, at the end: parts of a closed data directory may refer to each other for a while."""
        self._drop()
        self._stored.contents.clear()
        self._stored.texts.clear()

    async def _refresh(self) -> None:
        if self._clock.monotonic() >= self._changes.fresh_until:
            await self._changes.caught_up()

    def _look(self, reader: Reader) -> _Looked:
        """The changes since the epoch that is known. Runs on any thread."""
        known = self._epoch
        return _Looked(known, registry_changes.since(reader, known))

    def _changed(self, looked: _Looked) -> None:
        (epoch, addresses), known = looked.since, self._epoch
        if epoch == known:
            return
        self._epoch = epoch
        # Reads may overlap: each reports every change since the epoch at which it began. One that began after ours
        # leaves a gap, so everything is dropped.
        if addresses is None or looked.known > known:
            self._drop()
        else:
            self._log.add(addresses)
            self._resolved.clear()
            self._ready.clear()
            self._pending |= addresses
            for address in addresses:
                self._versions.pop(address, None)
        if known >= 0:
            self.on_change(epoch)

    def _drop(self) -> None:
        self._log.add(None)
        self._whole = None
        self._pending = frozenset()
        self._versions.clear()
        self._resolved.clear()
        self._ready.clear()

    def _bind(self, row: Row, source: str | None) -> Tool[..., Any]:
        tool = self._attached.get((row.address, row.version)) or self._loaded(row, source)
        # INVARIANT: the code that runs is exactly what was admitted.
        if contract_digest(tool) != row.digest:
            raise _changed(row)
        return tool

    def _loaded(self, row: Row, source: str | None) -> Tool[..., Any]:
        if self._shared or row.origin.startswith("upstream:"):
            stored = stored_tool(row.manifest, row.origin)
            if stored is None and row.digest in self._stored.texts:
                stored = tool_from_text(row.manifest, self._stored.texts[row.digest])
            if stored is not None:
                return stored
        # INVARIANT: loading executes the module, so the text of an isolated tool is compared before it is loaded, and
        # that of every tool if other machines use the store.
        if self._shared:
            self._refuse_other_code(row, source)
        if row.origin not in self._origins:
            loaded = reload_admitted(source, row.manifest, row.origin, self._manifests)
            if loaded is None:
                raise _changed(row)
            self._origins[row.origin] = {_name(tool): tool for tool in loaded}
        tool = self._origins[row.origin].get(f"{row.address}@{row.version}")
        if tool is None:
            raise Failure("E3108", f"{row.address}@{row.version} is no longer where it was added from")
        return tool

    def _refuse_other_code(self, row: Row, source: str | None) -> None:
        """Refuse (E3108) a tool that is not isolated if its code is not among the code that was admitted.

        Code that is loaded is known by what it was then, whatever the files hold now.
        """
        admitted = native_code(source)
        if admitted is None:
            return

        loaded = self._codes.get(row.origin) if row.origin in self._origins else None
        here = loaded or code_here(row.manifest, row.origin, self._manifests)
        refuse_other_code(here, admitted, row.origin)
        if here is not None and not row.origin.startswith("manifest:"):  # whose tools may be in several modules
            self._codes[row.origin] = here


def _changed(row: Row) -> Failure:
    words = f"{row.address}@{row.version} has changed since it was admitted; publish the change as a new version"
    return Failure("E3103", words)


def contract_digest(tool: Tool[..., Any]) -> str:
    """The digest of a declared tool's content, without compiling its schemas. Admission needs it several times."""
    manifest = tool.manifest
    if tool.digested is None or tool.digested[0] is not manifest:
        from interlock.data.canonical import digest

        tool.digested = manifest, digest(manifest.document())
    return tool.digested[1]


_MOST_ADDRESSES = 20_000


class _Looked(NamedTuple):
    """The changes of the registry since an epoch."""

    known: int
    since: registry_changes.Changed


def _name(tool: Tool[..., Any]) -> str:
    return f"{tool.manifest.address}@{tool.manifest.version}"


def _row(stored: tools.ToolVersionRow, manifest: str) -> Row:
    address, version, digest, state, _, origin, published_ms, notice = stored
    parsed = None if notice is None else tools.Notice(**orjson.loads(notice))
    return Row(address, version, digest, state, manifest, origin, published_ms, parsed)

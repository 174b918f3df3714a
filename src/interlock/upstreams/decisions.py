"""Decides on each definition that an upstream offers, before anything is changed.

A definition is compared with the one that was pinned under its name, with the tools that others serve, and with the
conditions of admission. It becomes a first version, a next one, stays what it is, counts as changed, or is refused with
the reason.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from interlock.call.connector import Discovered
from interlock.contract.manifest import Manifest
from interlock.contract.manifest_tools import without_function
from interlock.contract.wire_names import shortened
from interlock.core.errors import Failure
from interlock.core.threads import DEFINITIONS
from interlock.registry import admission
from interlock.registry.admission import TrialEvidence
from interlock.registry.catalog import Catalog, Version, contract_digest
from interlock.store import tools as stored_tools
from interlock.store.port import Reader, Store
from interlock.upstreams import repository
from interlock.upstreams.manifests import Imported, definition_digest, import_all
from interlock.upstreams.overlay import Overlay, parse_overlay
from interlock.upstreams.recipes import partners_of, remark_on
from interlock.upstreams.repository import Offered, Page, Pinned, Upstream
from interlock.upstreams.schemas import visible

if TYPE_CHECKING:
    from interlock.contract.declare import Tool

FIRST_VERSION = "1.0.0"
TryOut = Callable[[Sequence["Tool[..., Any]"]], Awaitable[Sequence[TrialEvidence]]]


# Characters of a name and of a reason for a refusal: both are stored and shown, and an upstream chooses them.
LONGEST_NAME = 500
_LONGEST_REASON = 1000


def bounded(discovered: Discovered) -> Discovered:
    """Refuse definitions with very long names, and cut what is stored of those that could not be read."""
    tools = [one for one in discovered.tools if len(one.name) <= LONGEST_NAME]
    words = f"its name has more than {LONGEST_NAME} characters"
    long = [(one.name, words) for one in discovered.tools if len(one.name) > LONGEST_NAME]
    refusals = [(_cut(name), reason[:_LONGEST_REASON]) for name, reason in (*discovered.refused, *long)]
    return replace(discovered, tools=tools, refused=refusals)


def _cut(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[:100]}…"


async def judge(
    store: Store, known: Upstream, discovered: Discovered, page: Page, accepted: Mapping[str, str]
) -> Sequence[Offered]:
    """Decide on each definition: a first version, a next one, or unchanged. They are read apart from the loop."""
    overlay = parse_overlay(known.overlay)
    # What was offered before may be gone by now. That must not keep the change from being read.
    if faults := overlay.faults((*(one.name for one in discovered.tools), *page.tools)):
        listing = "; ".join(f"{fault.pointer} {fault.message}" for fault in faults[:5])
        raise Failure("E3105", f"overlay refused: {listing}")
    offered = await DEFINITIONS.run(_imported, known, discovered, page, overlay)
    shortens = {one.address: shortened(one.address) for one in offered if one.address}

    def others(reader: Reader) -> tuple[dict[str, str], list[str]]:
        there = sorted(stored_tools.addresses(reader)) if any(shortens.values()) else []
        return repository.foreign(reader, known.origin, {one.address for one in offered}), there

    taken, there = await store.read(others)
    offered = _distinct(offered, shortens, there)
    return [_against(one, page.tools.get(one.name), taken, accepted) for one in offered]


def _imported(known: Upstream, discovered: Discovered, page: Page, overlay: Overlay) -> list[Offered]:
    imported = import_all(
        discovered.tools,
        upstream=known.name,
        kind=known.kind,
        versions=FIRST_VERSION,
        overlay=overlay,
        accept_hints=bool(known.config.get("accept_hints")),
        prefix=bool(known.config.get("prefix", True)),
        credentials=known.credentials,
        known={name: one.address.partition(".")[2] for name, one in page.tools.items()},
    )
    return [_offered(known, one) for one in imported]


def _distinct(offered: list[Offered], mine: Mapping[str, Collection[str]], there: Sequence[str]) -> list[Offered]:
    """INVARIANT: no tool is admitted that clients would see under the shortened name of another.

    `mine` are the shortened names of those that are offered, and `there` the addresses of all tools that are stored.
    """
    owners = {name: address for address in there for name in shortened(address)}
    judged: list[Offered] = []
    for one in offered:
        names = mine.get(one.address, frozenset())
        other = next((owners[name] for name in names if owners.get(name, one.address) != one.address), None)
        if other is None:
            owners |= dict.fromkeys(names, one.address)
        else:
            one = replace(one, state="refused", manifest=None, reason=admission.same_name(one.address, other))
        judged.append(one)
    return judged


def _offered(known: Upstream, imported: Imported) -> Offered:
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
        seen=known.pin(imported.definition, partners_of(manifest)) if imported.digest else "",
        definition=imported.definition,
        manifest=manifest,
    )


def _against(one: Offered, pinned: Pinned | None, taken: Mapping[str, str], accepted: Mapping[str, str]) -> Offered:
    """Compare a definition with the one that was admitted, and with the tools that others serve."""
    if one.manifest is None:
        return one
    if pinned is None:
        # INVARIANT: no upstream adds a version to a tool that belongs to somebody else.
        if (owner := taken.get(one.address)) is not None:
            reason = f"`{one.address}` is served from {owner} already; rename it in the overlay"
            return replace(one, state="refused", manifest=None, reason=reason)
        return one
    current = replace(one, address=pinned.address, version=pinned.version)
    renamed = one.address != pinned.address
    if renamed and (owner := taken.get(one.address)) is not None:
        reason = f"your overlay has changed, and `{one.address}` is served from {owner} already; rename it otherwise"
        return replace(current, state="changed", manifest=None, reason=reason)
    same, seen = pinned.pinned == one.seen, accepted.get(one.name) == one.seen
    if same and (not pinned.held or seen):
        return replace(current, state="admitted", manifest=None)
    if seen:
        return one if renamed else current
    # INVARIANT: a changed definition stays out until a person has reviewed it, even if it changes back or goes
    # meanwhile.
    return replace(current, state="changed", manifest=None, reason=_change(one, pinned, same=same, renamed=renamed))


def _change(one: Offered, pinned: Pinned, *, same: bool, renamed: bool) -> str:
    """Describe what differs from the admitted definition: the upstream's statements, or the operator's."""
    if same:
        return "its definition changed and changed back"
    if one.definition is None or definition_digest(one.definition) != pinned.definition:
        return "its definition has changed since"
    return "your overlay has changed since" + (f"; it would be served as {one.address}" if renamed else "")


def gone(page: Page, offered: Sequence[Offered]) -> Sequence[Offered]:
    """Return the tools that were offered before and no longer are."""
    there = {one.name for one in offered}
    return [
        Offered(name, "gone", one.address, one.version, reason="the upstream offers it no longer", seen=one.seen)
        for name, one in page.tools.items()
        if name not in there
    ]


def refused(discovered: Discovered, offered: Sequence[Offered]) -> Sequence[Offered]:
    """Return the definitions that could not be read, with the reason.

    A name that is also offered is not listed twice.
    """
    there = {one.name for one in offered}
    strange = [(name, reason) for name, reason in discovered.refused if name not in there]
    return [Offered(visible(name), "refused", reason=visible(reason)) for name, reason in strange]


def once(looked: Sequence[Offered]) -> Sequence[Offered]:
    """Return what is stored: of several definitions with one name, the first, which is the valid one."""
    return list({one.name: one for one in reversed(looked)}.values())[::-1]


# Admission


async def admit(
    catalog: Catalog, try_out: TryOut, offered: Sequence[Offered]
) -> tuple[Sequence[Offered], dict[str, TrialEvidence]]:
    """Run the contract tests of new definitions, and check them against all eight conditions."""
    fresh = [
        await DEFINITIONS.run(_next_version, await catalog.versions(one.address), one)
        for one in offered
        if one.manifest is not None
    ]
    tools = [without_function(cast("Manifest", one.manifest)) for one in fresh]
    evidence = dict(zip((one.name for one in fresh), await try_out(tools) if tools else (), strict=True))
    judged: dict[str, Offered] = {}
    for one, tool in zip(fresh, tools, strict=True):
        published = await catalog.versions(one.address)
        judged[one.name] = await DEFINITIONS.run(_examined, one, tool, published, evidence[one.name])
    return [judged.get(one.name, one) if one.manifest is not None else one for one in offered], evidence


async def try_again(
    catalog: Catalog, try_out: TryOut, admitted: Sequence[tuple[str, str, str]]
) -> dict[str, TrialEvidence]:
    """Run the contract tests of versions that are admitted already: address, version and digest. By digest."""
    versions = [(await catalog.versions(address))[version] for address, version, _ in admitted]
    tried = await try_out([without_function(one.contract.manifest) for one in versions])
    return {one.digest: one for one in tried}


def _examined(one: Offered, tool: Tool[..., Any], published: Mapping[str, Version], evidence: TrialEvidence) -> Offered:
    verdict = admission.examine(tool.manifest, contract_digest(tool), published, evidence)
    if not verdict.admitted:
        return replace(one, state="refused", reason=verdict.failure(one.address).message)
    return replace(one, state="admitted", reason=repository.unproven_words(evidence) or remark_on(tool.manifest))


def _next_version(published: Mapping[str, Version], one: Offered) -> Offered:
    """Return the manifest with its version: the first, or the next after the published one.

    A change that breaks callers is a major version that says so: a person has looked at it, and accepts it.
    """
    manifest = cast("Manifest", one.manifest)
    if not published:
        return replace(one, address=manifest.address, version=manifest.version)
    latest = max(published, key=_numbers)
    minor = manifest.model_copy(update={"version": _bumped(latest, 1)})
    major = manifest.model_copy(update={"version": _bumped(latest, 0), "breaking_changes": True})
    pretend = TrialEvidence(contract_digest(without_function(minor)), True, "pending", "")
    fits = admission.examine(minor, pretend.digest, published, pretend).admitted
    candidate = minor if fits else major
    return replace(one, manifest=candidate, version=candidate.version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("-")[0].split("+")[0].split("."))


def _bumped(version: str, place: int) -> str:
    numbers = list(_numbers(version))
    return ".".join(str(n + 1) if at == place else "0" if at > place else str(n) for at, n in enumerate(numbers))

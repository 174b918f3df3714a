"""Stored state of upstreams: their configuration, the tools last seen, and those that are served.

Theory of operation. A look at an upstream is judged against the stored state, which takes time; then all changes are
written in one transaction. Others look and write meanwhile, also from other processes. A `Page` therefore holds the
state that the judgement was based on, and `settle` writes only if the stored state is still the same; otherwise it
raises `Outdated` before it has written anything, and the judgement is repeated.

Two facts about a tool are read from where they are in force and not stored twice: whether its version is in quarantine
because its definition changed, and whether it can be called at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import orjson

from interlock.call.connector import Definition
from interlock.core.clock import iso
from interlock.core.errors import Failure
from interlock.core.record import NamedTuple, dataclass
from interlock.data.canonical import digest, encode
from interlock.registry import quarantine
from interlock.store import records
from interlock.store import tools as stored_tools
from interlock.store import upstreams as store
from interlock.store.tools import bump_epoch
from interlock.upstreams.judgement import judge

if TYPE_CHECKING:
    from interlock.contract.manifest import Manifest
    from interlock.data.schema import Json
    from interlock.registry.admission import TrialEvidence
    from interlock.store.port import Reader, Transaction, Unit

_CHANGED = quarantine.DEFINITION_CHANGED
# Characters of what an upstream says about itself that are kept.
_MOST_TEXT = 500
_COUNTED = ("admitted", "changed", "gone", "refused")


@dataclass(frozen=True)
class Upstream:
    """One upstream as stored.

    Its configuration may contain a whole OpenAPI document. It is kept as the text that is stored, and parsed when it is
    first used: `given` is the configuration where the caller has it parsed already.
    """

    name: str
    kind: str
    configured: str
    overlay: Json
    state: str
    reason: str
    added_ms: int
    added_by: str
    discovered_ms: int
    probed_ms: int
    # Another one for every change of its tools.
    revision: str | None = None
    given: Json | None = field(default=None, compare=False, repr=False)

    @classmethod
    def new(cls, name: str, kind: str, config: Json, overlay: Json, now_ms: int, by: str) -> Upstream:
        """An upstream that is not stored yet."""
        return cls(name, kind, encode(config).decode(), overlay, "available", "", now_ms, by, now_ms, 0, given=config)

    @cached_property
    def config(self) -> Json:
        return orjson.loads(self.configured) if self.given is None else self.given

    @property
    def origin(self) -> str:
        """The origin of its tools in the catalog."""
        return f"upstream:{self.name}"

    @property
    def credentials(self) -> tuple[str, ...]:
        """The secrets that its calls are lent."""
        names = {str(name) for name in cast("Json", self.config.get("credentials") or {}).values()}
        auth = cast("Json | None", self.config.get("auth"))
        return tuple(sorted(names | ({str(auth["secret"])} if auth and "secret" in auth else set())))

    def pin(self, definition: Definition, partners: Mapping[str, str] | None = None) -> str:
        """The digest of what is admitted: a definition as its upstream gave it, the operator's statements about it, and
        the digests of the tools by which it is undone.
        """
        from interlock.upstreams.manifests import definition_digest
        from interlock.upstreams.overlay import parse_overlay

        stated = parse_overlay(self.overlay).of(definition.name).model_dump(mode="json", exclude_unset=True)
        own = {"definition": definition_digest(definition), "overlay": stated}
        return digest({**own, "partners": dict(partners)} if partners else own)

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
    """One tool of an upstream, and the decision on it: offered, admitted, refused, changed or gone.

    `seen` is the digest of the definition that was seen last, by which a person states which one they have reviewed;
    `definition` is that definition.
    """

    name: str
    state: str
    address: str = ""
    version: str | None = None
    mutation_class: str = ""
    why: str = ""
    reason: str = ""
    needs: tuple[str, ...] = ()
    seen: str = ""
    definition: Definition | None = field(default=None, compare=False)
    manifest: Manifest | None = field(default=None, compare=False)

    def document(self) -> Json:
        shown = self.state == "changed" and self.definition is not None
        return {
            "name": self.name,
            "state": self.state,
            "tool_id": self.address,
            "version": self.version,
            "mutation_class": self.mutation_class,
            "why": self.why,
            "reason": self.reason,
            "needs": list(self.needs),
            **({"seen": self.seen, "definition": _definition(cast("Definition", self.definition))} if shown else {}),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one look at an upstream, tool by tool."""

    upstream: str
    tools: tuple[Offered, ...]
    about: Json = field(default_factory=dict[str, Any])

    def count(self, state: str) -> int:
        return sum(one.state == state for one in self.tools)

    def document(self) -> Json:
        return {"upstream": self.upstream, "tools": [one.document() for one in self.tools], "about": self.about}


class Pinned(NamedTuple):
    """An admitted tool: its address and version, the definition it was made from, and the one seen last.

    `definition` is the digest of that definition, without the operator's statements. `held`: it is in quarantine
    because either changed. `served`: its version can be called, apart from that.
    """

    address: str
    version: str
    pinned: str
    seen: str
    state: str
    definition: str
    held: bool
    served: bool


class Page(NamedTuple):
    """The stored state of one upstream. `overlay` is None if there is no such upstream."""

    overlay: str | None
    tools: Mapping[str, Pinned]


class Outdated(Failure):
    """The stored state has changed since it was read; nothing was written."""

    def __init__(self, name: str) -> None:
        words = f"the upstream `{name}` is being changed by somebody else"
        super().__init__("E3103", words, resolution="send the request again")


# Reading


def upstreams(reader: Reader) -> list[Upstream]:
    """Return every upstream, by name."""
    return [_upstream(row) for row in store.every(reader)]


def offers(reader: Reader, name: str) -> tuple[Offered, ...]:
    """Return the tools that an upstream was last seen to offer, and the decision on each."""
    known = store.find(reader, name)
    if known is None:
        return ()
    upstream = _upstream(known)
    hints = bool(upstream.config.get("accept_hints"))
    return tuple(_seen(row, upstream.overlay, accept_hints=hints) for row in store.tools(reader, name))


def documents(reader: Reader, only: str | None = None) -> list[Json]:
    """Return every upstream, or only one, with its tools, for people and programs."""
    return [
        {**one.document(), "tools": [tool.document() for tool in offers(reader, one.name)]}
        for one in upstreams(reader)
        if only in (None, one.name)
    ]


def _seen(row: store.ToolRow, overlay: Json, *, accept_hints: bool) -> Offered:
    definition = _defined(orjson.loads(row.definition))
    # An overlay is stored as it was checked, so its models are not needed to read it.
    own = cast("Json", cast("Json", overlay.get("tools") or {}).get(row.name) or {})
    of_all = cast("Json", overlay.get("defaults") or {})
    judged = (
        None
        if definition is None
        else judge(definition.hints, own.get("mutation_class"), of_all.get("mutation_class"), accept_hints=accept_hints)
    )
    return Offered(
        row.name,
        row.state,
        row.address,
        row.version,
        mutation_class="" if judged is None else judged.mutation_class,
        why="" if judged is None else judged.why,
        reason=row.reason,
        seen=row.seen,
        definition=definition,
    )


def page(reader: Reader, name: str) -> Page:
    """Return the stored state of an upstream, to judge a look at it."""
    tools = {row.name: _pinned(row) for row in store.published(reader, name, _CHANGED)}
    return Page(store.overlay(reader, name), tools)


def _pinned(row: store.PublishedRow) -> Pinned:
    return Pinned(
        row.address, row.version, row.pinned, row.seen, row.state,
        definition=_implementation(row.manifest), held=bool(row.held), served=bool(row.served),
    )  # fmt: skip


def _implementation(manifest: str | None) -> str:
    document: Json = {} if manifest is None else orjson.loads(manifest)
    execution: Json = document.get("execution") or {}
    return str(execution.get("implementation") or "")


def foreign(reader: Reader, origin: str, addresses: Collection[str]) -> dict[str, str]:
    """Return those of some addresses under which others serve a tool or an alias, with their origins."""
    others = [*stored_tools.of_other_origins(reader, origin), *stored_tools.all_aliases(reader)]
    return {address: by for address, by in others if address in addresses}


# Writing


def settle(
    known: Upstream,
    judged_by: Page,
    looked: Sequence[Offered],
    evidence: Mapping[str, TrialEvidence],
    *,
    by: str,
    new: bool,
    lift: Collection[str] = (),
    text: str = "",
) -> Unit[None]:
    """Unit that writes all changes of one look at an upstream. `lift` are the tools that a person has found to be what
    was admitted. `text` is what the upstream says about itself; it is kept as it was when the upstream was added.

    It holds the manifests as the texts that it writes, so that the caller may release them before the commit.
    """
    from interlock.registry import admission
    from interlock.upstreams.schemas import visible

    # Prepared here: while the unit runs, nobody else writes.
    publications = {
        one.name: admission.publish(one.manifest, evidence[one.name].digest, known.origin, evidence[one.name], by)
        for one in looked
        if one.state == "admitted" and one.manifest is not None
    }
    looked = released(looked)
    fresh = [one for one in looked if one.name in publications]

    def unit(transaction: Transaction) -> None:
        # INVARIANT: whatever forbids the change is found before anything is written.
        taken = foreign(transaction, known.origin, {one.address for one in fresh})
        if page(transaction, known.name) != judged_by or taken:
            raise Outdated(known.name)
        for one in fresh:
            if stored_tools.digest(transaction, one.address, one.version or "") is not None:
                raise Outdated(known.name)
        _store(transaction, known, new=new)
        if new and (about := " ".join(visible(text[: 4 * _MOST_TEXT]).split())[:_MOST_TEXT]):
            store.put_text(transaction, known.name, about)
        changed: set[str] = set()
        for one in looked:
            before = judged_by.tools.get(one.name)
            if one.name in publications:
                publications[one.name](transaction)
                if before is not None and before.address != one.address:
                    stored_tools.sunset(transaction, before.address)  # it has another name now
                    changed.add(before.address)
            elif before is not None and _follow(transaction, known.name, one, before, by, lift=one.name in lift):
                changed.add(before.address)
        for one in looked:
            _store_tool(transaction, known, one)
        if publications or any(_differs(one, judged_by.tools.get(one.name)) for one in looked):
            store.mark_changed(transaction, known.name)
        counts = {state: sum(one.state == state for one in looked) for state in _COUNTED}
        note(transaction, known.name, "upstream.added" if new else "upstream.refreshed", by=by, **counts)
        bump_epoch(transaction, changed)  # what was published has been noted

    return unit


def released(looked: Sequence[Offered]) -> tuple[Offered, ...]:
    """Return the offered tools without their manifests."""
    return tuple(one if one.manifest is None else replace(one, manifest=None) for one in looked)


def unproven(reader: Reader, name: str) -> list[tuple[str, str, str]]:
    """The address, version and digest of each tool of an upstream that was admitted while it could not be tried."""
    from interlock.registry.admission import UNPROVEN

    return store.with_evidence(reader, name, UNPROVEN)


def unproven_words(proof: TrialEvidence) -> str:
    """The remark on a tool that was admitted unproven; empty if it is proven."""
    from interlock.registry.admission import UNPROVEN

    return f"not proven yet, tried again at every refresh: {proof.report}" if proof.mode == UNPROVEN else ""


def proving(name: str, tried: Mapping[str, TrialEvidence], refs: Mapping[str, str]) -> Unit[None]:
    """Unit that stores contract tests that were run later, by the digest of their content; `refs` names it.

    What fails goes into quarantine: it was admitted, and calls of it are on record. What could not be tried this time
    either stays unproven.
    """
    from interlock.registry import admission

    def unit(transaction: Transaction) -> None:
        for digest_, proof in tried.items():
            ref = refs[digest_]
            store.put_reason(transaction, ref.partition("@")[0], unproven_words(proof))
            if proof.mode == admission.UNPROVEN:
                continue
            admission.record_evidence(transaction, proof)
            if proof.passed:
                note(transaction, name, "tool.proven", tool=ref, digest=digest_, mode=proof.mode)
            else:
                quarantine.impose(digest_, ref, name, f"contract tests failed: {proof.report}")(transaction)

    return unit


def removal(name: str, by: str) -> Unit[None]:
    """Unit that removes an upstream and sunsets its tools."""

    def unit(transaction: Transaction) -> None:
        changed = stored_tools.sunset_of_upstream(transaction, name)
        store.delete(transaction, name)
        note(transaction, name, "upstream.removed", by=by)
        bump_epoch(transaction, changed)

    return unit


def marking(known: Upstream, state: str, reason: str) -> Unit[None]:
    """Unit that stores whether an upstream answers."""

    def unit(transaction: Transaction) -> None:
        store.mark_probed(transaction, known.name, state, reason, transaction.now_ms)
        if known.state != state:
            note(transaction, known.name, f"upstream.{state}", reason=reason)

    return unit


def note(transaction: Transaction, ref: str, event: str, **facts: Any) -> None:
    body = records.plain("registry", ref, transaction.now_ms, event=event, upstream=ref, **facts)
    transaction.append("registry", ref, body)


def _follow(transaction: Transaction, upstream: str, one: Offered, before: Pinned, by: str, *, lift: bool) -> bool:
    """Apply a look to a version that is published already: available again, changed, or unavailable.

    Returns whether the state of the version is another now.
    """
    ref = f"{before.address}@{before.version}"
    if one.state == "admitted":
        if lift:
            _lift(transaction, ref, by)
        if not before.served:
            stored_tools.activate(transaction, before.address, before.version)
            return True
    elif one.state != "changed":
        return stored_tools.sunset(transaction, before.address)
    elif not before.held:
        digest = stored_tools.digest(transaction, before.address, before.version)
        if digest is not None:
            quarantine.impose(digest, ref, upstream, f"{_CHANGED}: {one.reason}")(transaction)
    return False


def _differs(one: Offered, before: Pinned | None) -> bool:
    """Whether a published tool is seen to be another than before."""
    return before is not None and (one.state, one.seen) != (before.state, before.seen)


def _lift(transaction: Transaction, ref: str, by: str) -> None:
    """Release a definition from quarantine, because a person found it to be what was admitted."""
    lifted = quarantine.lift_changed(transaction, ref)
    if lifted is not None:
        note(transaction, ref, "tool.quarantine_lifted", digest=lifted, by=by)


def _store(transaction: Transaction, known: Upstream, *, new: bool) -> None:
    overlay, now = orjson.dumps(known.overlay).decode(), transaction.now_ms
    if not new:
        store.mark_discovered(transaction, known.name, overlay, now)
        return
    store.insert(
        transaction, known.name, kind=known.kind, config=known.configured, overlay=overlay, added_by=known.added_by,
        at_ms=now,
    )  # fmt: skip


def _store_tool(transaction: Transaction, known: Upstream, one: Offered) -> None:
    before = store.admitted(transaction, known.name, one.name)
    address, version, pinned, discovered_ms = before or (one.address, None, None, transaction.now_ms)
    if one.state == "admitted":
        address, version, pinned = one.address, one.version, one.seen
    # A refused definition is not stored: nobody reviews it, and its form may be unstorable.
    definition = {} if one.definition is None or one.state == "refused" else _definition(one.definition)
    row = store.ToolRow(
        one.name, one.state, address, version, one.reason, one.seen, orjson.dumps(definition).decode()
    )  # fmt: skip
    store.put_tool(transaction, known.name, row, pinned, discovered_ms)


def _upstream(row: store.UpstreamRow) -> Upstream:
    return Upstream(
        row.name, row.kind, row.config, orjson.loads(row.overlay), row.state,
        row.reason, row.added_ms, row.added_by, row.discovered_ms, row.probed_ms, row.revision,
    )  # fmt: skip


def _definition(definition: Definition) -> Json:
    return {
        "name": definition.name,
        "title": definition.title,
        "description": definition.description,
        "input_schema": definition.input_schema,
        "output_schema": definition.output_schema,
        "hints": dict(definition.hints),
        "native": definition.native,
    }


def _defined(document: Json) -> Definition | None:
    return None if not document else Definition(**document)

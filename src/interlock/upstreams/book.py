"""The book of upstreams as it is written: which there are, what each was seen to offer, and what of it is served.

Theory of operation. A look at an upstream is judged against a page of the book, which takes time; then all that it
changes is written in one transaction. Others look and write meanwhile, also from other processes. So a `Page` says what
the judgement was made from, and `settle` writes only if the book still says the same; otherwise it raises `Outdated`
before it has written anything, and whoever judged judges again.

Two facts about a tool are read from where they are in force and not noted twice: whether its version is in quarantine
because its definition changed, and whether it can be called at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import orjson

from interlock.core.canonical import digest
from interlock.core.clock import iso
from interlock.core.connector import Definition, UpstreamKind
from interlock.core.errors import Failure
from interlock.core.manifest import Manifest
from interlock.core.schema import Json
from interlock.registry import admission, quarantine
from interlock.registry.admission import Evidence
from interlock.registry.catalog import bump_epoch
from interlock.store import records
from interlock.store.journal import Transaction, Unit
from interlock.upstreams.manifests import definition_digest
from interlock.upstreams.overlay import Overlay, classify, parse_overlay

_CHANGED = quarantine.DEFINITION_CHANGED
_COUNTED = ("admitted", "changed", "gone", "refused")


class Read(Protocol):
    """Reads rows, within a transaction or outside of one."""

    def __call__(self, statement: str, parameters: Sequence[Any] = ()) -> list[Any]: ...


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
    def origin(self) -> str:
        """Where the catalog says that its tools come from."""
        return f"upstream:{self.name}"

    @property
    def credentials(self) -> tuple[str, ...]:
        """The secrets its calls are lent."""
        found = {str(name) for name in cast("Json", self.config.get("credentials") or {}).values()}
        auth = cast("Json | None", self.config.get("auth"))
        return tuple(sorted(found | ({str(auth["secret"])} if auth and "secret" in auth else set())))

    def pin(self, definition: Definition) -> str:
        """What is admitted: a definition as its upstream gave it, and what the operator says about it."""
        said = parse_overlay(self.overlay).of(definition.name).model_dump(mode="json", exclude_unset=True)
        return digest({"definition": definition_digest(definition), "overlay": said})

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
    """One tool of an upstream, and what became of it: offered, admitted, refused, changed or gone.

    `seen` is the digest of the definition that was seen last, by which a person says which one they have looked at;
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
    """What one look at an upstream found, tool by tool."""

    upstream: str
    tools: tuple[Offered, ...]
    about: Json = field(default_factory=dict[str, Any])

    def count(self, state: str) -> int:
        return sum(one.state == state for one in self.tools)

    def document(self) -> Json:
        return {"upstream": self.upstream, "tools": [one.document() for one in self.tools], "about": self.about}


class Pinned(NamedTuple):
    """A tool that was admitted: as what, from which definition, and what was seen of it last.

    `definition` is the digest of that definition, without what the operator says of it. `held`: it is in quarantine
    because either changed. `served`: its version can be called, but for that.
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
    """What the book says of one upstream. `overlay` is None where there is no such upstream."""

    overlay: str | None
    tools: Mapping[str, Pinned]


class Outdated(Failure):
    """The book has changed since it was read; nothing was written."""

    def __init__(self, name: str) -> None:
        words = f"the upstream `{name}` is being changed by somebody else"
        super().__init__("E3103", words, resolution="send the request again")


# Reading

_UPSTREAM = "name, kind, config, overlay, state, reason, added_ms, added_by, discovered_ms, probed_ms"


def upstreams(read: Read) -> list[Upstream]:
    """Every upstream there is, by name."""
    return [_upstream(row) for row in read(f"SELECT {_UPSTREAM} FROM upstream ORDER BY name")]  # noqa: S608 - constant


def offers(read: Read, name: str) -> tuple[Offered, ...]:
    """What an upstream was last seen to offer, and what became of each."""
    known = read(f"SELECT {_UPSTREAM} FROM upstream WHERE name = ?", (name,))  # noqa: S608 - constant
    if not known:
        return ()
    upstream = _upstream(known[0])
    overlay, hints = parse_overlay(upstream.overlay), bool(upstream.config.get("accept_hints"))
    rows = read(
        "SELECT name, state, address, version, reason, seen, definition FROM upstream_tool"
        " WHERE upstream = ? ORDER BY name",
        (name,),
    )
    return tuple(_seen(row, overlay, accept_hints=hints) for row in rows)


def _seen(row: Sequence[Any], overlay: Overlay, *, accept_hints: bool) -> Offered:
    definition = _defined(orjson.loads(row[6]))
    judged = None if definition is None else classify(definition, overlay, accept_hints=accept_hints)
    return Offered(
        *row[:4],
        mutation_class="" if judged is None else judged.mutation_class,
        why="" if judged is None else judged.why,
        reason=row[4],
        seen=row[5],
        definition=definition,
    )


def page(read: Read, name: str) -> Page:
    """What the book says of an upstream, to judge a look at it by."""
    overlay = read("SELECT overlay FROM upstream WHERE name = ?", (name,))
    rows = read(
        "SELECT name, u.address, u.version, pinned, seen, u.state,"
        " EXISTS (SELECT 1 FROM quarantine q WHERE q.tool = u.address || '@' || u.version AND q.lifted_ms IS NULL"
        " AND q.reason LIKE ? || '%'),"
        " COALESCE(v.state, '') <> 'sunset', v.manifest"
        " FROM upstream_tool u LEFT JOIN tool_version v ON v.address = u.address AND v.version = u.version"
        " WHERE upstream = ? AND u.version IS NOT NULL",
        (_CHANGED, name),
    )
    tools = {
        row[0]: Pinned(*row[1:6], definition=_implementation(row[8]), held=bool(row[6]), served=bool(row[7]))
        for row in rows
    }
    return Page(overlay[0][0] if overlay else None, tools)


def _implementation(manifest: str | None) -> str:
    found: Json = {} if manifest is None else orjson.loads(manifest)
    execution: Json = found.get("execution") or {}
    return str(execution.get("implementation") or "")


def foreign(read: Read, origin: str, addresses: Collection[str]) -> dict[str, str]:
    """Of some addresses, those under which others serve a tool or an alias, and who."""
    rows = [
        *read("SELECT address, origin FROM tool_version WHERE origin <> ?", (origin,)),
        *read("SELECT alias, address FROM tool_alias WHERE alias <> address"),
    ]
    return {row[0]: row[1] for row in rows if row[0] in addresses}


# Writing


def settle(
    known: Upstream,
    judged_by: Page,
    looked: Sequence[Offered],
    evidence: Mapping[str, Evidence],
    *,
    by: str,
    new: bool,
    lift: Collection[str] = (),
) -> Unit[None]:
    """A unit that writes down all that one look at an upstream changes. `lift` are the tools that a person has found
    to be what was admitted.
    """
    fresh = [one for one in looked if one.state == "admitted" and one.manifest is not None]

    def unit(transaction: Transaction) -> None:
        read = transaction.all
        # INVARIANT: whatever forbids the change is found before anything is written.
        if page(read, known.name) != judged_by or foreign(read, known.origin, {one.address for one in fresh}):
            raise Outdated(known.name)
        for one in fresh:
            if read("SELECT 1 FROM tool_version WHERE address = ? AND version = ?", (one.address, one.version)):
                raise Outdated(known.name)
        _store(transaction, known, new=new)
        for one in looked:
            before = judged_by.tools.get(one.name)
            if one.manifest is not None and one.state == "admitted":
                proof = evidence[one.name]
                admission.publish(one.manifest, proof.digest, known.origin, proof, by)(transaction)
                if before is not None and before.address != one.address:
                    _sunset(transaction, before.address)  # it has another name now
            elif before is not None:
                _follow(transaction, known.name, one, before, by, lift=one.name in lift)
        for one in looked:
            _store_tool(transaction, known, one)
        counts = {state: sum(one.state == state for one in looked) for state in _COUNTED}
        note(transaction, known.name, "upstream.added" if new else "upstream.refreshed", by=by, **counts)
        bump_epoch(transaction)

    return unit


def removal(name: str, by: str) -> Unit[None]:
    """A unit that strikes an upstream out and sunsets its tools."""

    def unit(transaction: Transaction) -> None:
        transaction.execute(
            "UPDATE tool_version SET state = 'sunset' WHERE address IN"
            " (SELECT address FROM upstream_tool WHERE upstream = ? AND version IS NOT NULL)",
            (name,),
        )
        transaction.execute("DELETE FROM upstream_tool WHERE upstream = ?", (name,))
        transaction.execute("DELETE FROM upstream WHERE name = ?", (name,))
        note(transaction, name, "upstream.removed", by=by)
        bump_epoch(transaction)

    return unit


def marking(known: Upstream, state: str, reason: str) -> Unit[None]:
    """A unit that notes whether an upstream answers."""

    def unit(transaction: Transaction) -> None:
        transaction.execute(
            "UPDATE upstream SET state = ?, reason = ?, probed_ms = ? WHERE name = ?",
            (state, reason, transaction.now_ms, known.name),
        )
        if known.state != state:
            note(transaction, known.name, f"upstream.{state}", reason=reason)

    return unit


def note(transaction: Transaction, ref: str, event: str, **facts: Any) -> None:
    body = records.plain("registry", ref, transaction.now_ms, event=event, upstream=ref, **facts)
    transaction.append("registry", ref, body)


def _follow(transaction: Transaction, upstream: str, one: Offered, before: Pinned, by: str, *, lift: bool) -> None:
    """What a look means for a version that is published already: back, changed, or not to be had."""
    ref = f"{before.address}@{before.version}"
    if one.state == "admitted":
        if lift:
            _lift(transaction, ref, by)
        if not before.served:
            transaction.execute(
                "UPDATE tool_version SET state = 'active' WHERE address = ? AND version = ?",
                (before.address, before.version),
            )
    elif one.state != "changed":
        _sunset(transaction, before.address)
    elif not before.held:
        row = transaction.one(
            "SELECT digest FROM tool_version WHERE address = ? AND version = ?", (before.address, before.version)
        )
        if row is not None:
            quarantine.impose(row[0], ref, upstream, f"{_CHANGED}: {one.reason}")(transaction)


def _sunset(transaction: Transaction, address: str) -> None:
    transaction.execute("UPDATE tool_version SET state = 'sunset' WHERE address = ?", (address,))


def _lift(transaction: Transaction, ref: str, by: str) -> None:
    """A person has looked at a definition that is what was admitted: it is in quarantine for nothing any more."""
    row = transaction.one("SELECT digest, reason FROM quarantine WHERE tool = ? AND lifted_ms IS NULL", (ref,))
    if row is None or not str(row[1]).startswith(_CHANGED):
        return
    transaction.execute(
        "UPDATE quarantine SET lifted_ms = ?, epoch = (SELECT MAX(epoch) + 1 FROM quarantine) WHERE digest = ?",
        (transaction.now_ms, row[0]),
    )
    note(transaction, ref, "tool.quarantine_lifted", digest=row[0], by=by)


def _store(transaction: Transaction, known: Upstream, *, new: bool) -> None:
    overlay, now = orjson.dumps(known.overlay).decode(), transaction.now_ms
    if new:
        transaction.execute(
            f"INSERT INTO upstream ({_UPSTREAM}) VALUES (?, ?, ?, ?, 'available', '', ?, ?, ?, ?)",  # noqa: S608 - constant
            (known.name, known.kind, orjson.dumps(known.config).decode(), overlay, now, known.added_by, now, now),
        )
        return
    transaction.execute(
        "UPDATE upstream SET overlay = ?, state = 'available', reason = '', discovered_ms = ?, probed_ms = ?"
        " WHERE name = ?",
        (overlay, now, now, known.name),
    )


def _store_tool(transaction: Transaction, known: Upstream, one: Offered) -> None:
    found = transaction.one(
        "SELECT address, version, pinned, discovered_ms FROM upstream_tool WHERE upstream = ? AND name = ?",
        (known.name, one.name),
    )
    address, version, pinned, discovered_ms = found or (one.address, None, None, transaction.now_ms)
    if one.state == "admitted":
        address, version, pinned = one.address, one.version, one.seen
    # What was refused is not kept: nobody looks at it again, and it may be of a form that cannot be written down.
    definition = {} if one.definition is None or one.state == "refused" else _definition(one.definition)
    transaction.execute(
        "INSERT OR REPLACE INTO upstream_tool"
        " (upstream, name, address, version, pinned, seen, definition, state, reason, discovered_ms)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            known.name, one.name, address, version, pinned, one.seen, orjson.dumps(definition).decode(), one.state,
            one.reason, discovered_ms,
        ),
    )  # fmt: skip


def _upstream(row: Sequence[Any]) -> Upstream:
    name, kind, config, overlay, *rest = row
    return Upstream(name, kind, orjson.loads(config), orjson.loads(overlay), *rest)


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

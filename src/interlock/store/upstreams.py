"""Tables `upstream` and `upstream_tool`: the upstreams that were added, and the tools that each was seen to offer.

A row of `upstream` has the configuration and the overlay as JSON, and whether the upstream answers. A row of
`upstream_tool` is one tool of an upstream as it was seen last. Its `version` is the version of the registry that serves
it, or NULL if none does; `pinned` is the digest of the definition that was admitted. Every change to `upstream` raises
the epoch of upstreams. The fact `upstream_tools:NAME` counts the looks that changed tools of an upstream, and the fact
`upstream_text:NAME` has what it said about itself when it was added.
"""

from __future__ import annotations

from collections.abc import Collection

from interlock.core.record import NamedTuple
from interlock.store import epochs, facts
from interlock.store.port import Reader, Transaction

_COLUMNS = "name, kind, config, overlay, state, reason, added_ms, added_by, discovered_ms, probed_ms"
_TOOLS = "upstream_tools:"
# Facts that say which process probes an upstream, and which one looks at one that has announced a change.
PROBER = "upstream_prober:"
LOOK = "upstream_look:"
_TEXT = "upstream_text:"
_SELECT = f"SELECT {_COLUMNS}, (SELECT value FROM fact WHERE fact.name = '{_TOOLS}' || upstream.name) FROM upstream"  # noqa: S608 - constants


class UpstreamRow(NamedTuple):
    """One upstream. `config` and `overlay` are JSON; `revision` changes when its tools do."""

    name: str
    kind: str
    config: str
    overlay: str
    state: str
    reason: str
    added_ms: int
    added_by: str
    discovered_ms: int
    probed_ms: int
    revision: str | None


class ToolRow(NamedTuple):
    """One tool as its upstream offered it last. `definition` is JSON."""

    name: str
    state: str
    address: str
    version: str | None
    reason: str
    seen: str
    definition: str


class PublishedRow(NamedTuple):
    """One tool that has a version in the registry, with what is in force for that version.

    `held` says whether the version is in quarantine for the reason that was asked for, `served` whether it can be
    called. `manifest` is JSON, or None where the version is gone.
    """

    name: str
    address: str
    version: str
    pinned: str
    seen: str
    state: str
    held: int
    served: int
    manifest: str | None


class Admitted(NamedTuple):
    """The admitted version of a tool, and when the tool was first seen."""

    address: str
    version: str | None
    pinned: str | None
    discovered_ms: int


# Upstreams


def every(reader: Reader) -> list[UpstreamRow]:
    """Every upstream, by name."""
    return [UpstreamRow._make(row) for row in reader.all(f"{_SELECT} ORDER BY name")]


def find(reader: Reader, name: str) -> UpstreamRow | None:
    row = reader.one(f"{_SELECT} WHERE name = ?", (name,))
    return None if row is None else UpstreamRow._make(row)


def overlay(reader: Reader, name: str) -> str | None:
    """The overlay of an upstream, as JSON; None where there is no such upstream."""
    row = reader.one("SELECT overlay FROM upstream WHERE name = ?", (name,))
    return None if row is None else row[0]


def configs(reader: Reader) -> list[tuple[str, str]]:
    """The name and the configuration (JSON) of every upstream."""
    return reader.all("SELECT name, config FROM upstream")


def insert(
    transaction: Transaction, name: str, *, kind: str, config: str, overlay: str, added_by: str, at_ms: int
) -> None:
    """Add an upstream that answers."""
    transaction.execute(
        f"INSERT INTO upstream ({_COLUMNS}) VALUES (?, ?, ?, ?, 'available', '', ?, ?, ?, ?)",  # noqa: S608 - constant
        (name, kind, config, overlay, at_ms, added_by, at_ms, at_ms),
    )
    epochs.advance(transaction, epochs.UPSTREAMS)


def mark_discovered(transaction: Transaction, name: str, overlay: str, at_ms: int) -> None:
    """Note that an upstream answered and was looked at."""
    transaction.execute(
        "UPDATE upstream SET overlay = ?, state = 'available', reason = '', discovered_ms = ?, probed_ms = ?"
        " WHERE name = ?",
        (overlay, at_ms, at_ms, name),
    )
    epochs.advance(transaction, epochs.UPSTREAMS)


def mark_probed(transaction: Transaction, name: str, state: str, reason: str, at_ms: int) -> None:
    """Note whether an upstream answers."""
    transaction.execute(
        "UPDATE upstream SET state = ?, reason = ?, probed_ms = ? WHERE name = ?", (state, reason, at_ms, name)
    )
    epochs.advance(transaction, epochs.UPSTREAMS)


def delete(transaction: Transaction, name: str) -> None:
    """Remove an upstream and its tools."""
    transaction.execute("DELETE FROM upstream_tool WHERE upstream = ?", (name,))
    transaction.execute("DELETE FROM upstream WHERE name = ?", (name,))
    for fact in (_TOOLS, _TEXT, PROBER, LOOK):
        facts.remove(transaction, f"{fact}{name}")
    epochs.advance(transaction, epochs.UPSTREAMS)


def put_text(transaction: Transaction, name: str, text: str) -> None:
    """Store what an upstream says about itself."""
    facts.put(transaction, f"{_TEXT}{name}", text)


def texts(reader: Reader, names: Collection[str]) -> dict[str, str]:
    """The descriptions that some upstreams gave of themselves when they were added, by their names."""
    found = facts.some(reader, [f"{_TEXT}{name}" for name in names])
    return {name.removeprefix(_TEXT): text for name, text in found.items()}


# Their tools


def mark_changed(transaction: Transaction, name: str) -> None:
    """Note that tools of an upstream have changed: no process may answer with what they answered before."""
    facts.increase(transaction, f"{_TOOLS}{name}")
    epochs.advance(transaction, epochs.UPSTREAMS)


def tools(reader: Reader, upstream: str) -> list[ToolRow]:
    """The tools of an upstream, by name."""
    rows = reader.all(
        "SELECT name, state, address, version, reason, seen, definition FROM upstream_tool"
        " WHERE upstream = ? ORDER BY name",
        (upstream,),
    )
    return [ToolRow._make(row) for row in rows]


def published(reader: Reader, upstream: str, held_for: str) -> list[PublishedRow]:
    """The tools of an upstream that have a version. `held_for` is how a reason for quarantine begins."""
    rows = reader.all(
        "SELECT name, u.address, u.version, pinned, seen, u.state,"
        " EXISTS (SELECT 1 FROM quarantine q WHERE q.tool = u.address || '@' || u.version AND q.lifted_ms IS NULL"
        " AND q.reason LIKE ? || '%'),"
        " COALESCE(v.state, '') <> 'sunset', v.manifest"
        " FROM upstream_tool u LEFT JOIN tool_version v ON v.address = u.address AND v.version = u.version"
        " WHERE upstream = ? AND u.version IS NOT NULL",
        (held_for, upstream),
    )
    return [PublishedRow._make(row) for row in rows]


def with_evidence(reader: Reader, upstream: str, mode: str) -> list[tuple[str, str, str]]:
    """The address, version and digest of each tool of an upstream whose contract tests ended in `mode`."""
    return reader.all(
        "SELECT v.address, v.version, v.digest FROM upstream_tool u"
        " JOIN tool_version v ON v.address = u.address AND v.version = u.version"
        " JOIN evidence e ON e.digest = v.digest"
        " WHERE u.upstream = ? AND u.state = 'admitted' AND e.mode = ? ORDER BY v.address",
        (upstream, mode),
    )


def put_reason(transaction: Transaction, address: str, reason: str) -> None:
    """Store the remark on an admitted tool."""
    transaction.execute(
        "UPDATE upstream_tool SET reason = ? WHERE address = ? AND state = 'admitted'", (reason, address)
    )


def published_names(reader: Reader) -> list[tuple[str, str, str]]:
    """The upstream, the name there and the address of each tool of an upstream that has a version, by address."""
    return reader.all("SELECT upstream, name, address FROM upstream_tool WHERE version IS NOT NULL ORDER BY address")


def admitted(reader: Reader, upstream: str, name: str) -> Admitted | None:
    row = reader.one(
        "SELECT address, version, pinned, discovered_ms FROM upstream_tool WHERE upstream = ? AND name = ?",
        (upstream, name),
    )
    return None if row is None else Admitted._make(row)


def put_tool(transaction: Transaction, upstream: str, tool: ToolRow, pinned: str | None, discovered_ms: int) -> None:
    """Store a tool as it was seen, in place of how it was seen before."""
    transaction.execute(
        "INSERT INTO upstream_tool"
        " (upstream, name, address, version, pinned, seen, definition, state, reason, discovered_ms)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (upstream, name) DO UPDATE SET address = excluded.address, version = excluded.version,"
        " pinned = excluded.pinned, seen = excluded.seen, definition = excluded.definition, state = excluded.state,"
        " reason = excluded.reason, discovered_ms = excluded.discovered_ms",
        (
            upstream, tool.name, tool.address, tool.version, pinned, tool.seen, tool.definition, tool.state,
            tool.reason, discovered_ms,
        ),
    )  # fmt: skip

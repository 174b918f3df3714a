"""Tables `tool_version`, `tool_alias` and `evidence`: the versions of tools that are registered.

A row of `tool_version` is one published version. Its content never changes; its state and its notice of deprecation do.
Rows stay when a version is removed. A row of `tool_alias` is another full name of a tool, and a row of `evidence` the
result of the contract tests on one exact content. Every change raises the registry's epoch (`store.epochs`) and notes
which tools it was about (`store.registry_changes`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from interlock.core.clock import iso
from interlock.core.record import NamedTuple, dataclass
from interlock.store import epochs, registry_changes
from interlock.store.expressions import after_dot
from interlock.store.port import Reader, Transaction

if TYPE_CHECKING:
    from interlock.contract.manifest import LifecycleState

_COLUMNS = "address, version, digest, state, manifest, origin, published_ms, notice"
_SELECT = f"SELECT {_COLUMNS} FROM tool_version"  # noqa: S608 - constants
_WITHOUT_MANIFEST = _SELECT.replace("manifest", "NULL")


class ToolVersionRow(NamedTuple):
    """One version. `manifest` and `notice` are JSON; the manifest is None where it was left out of the query."""

    address: str
    version: str
    digest: str
    state: LifecycleState
    manifest: str | None
    origin: str
    published_ms: int
    notice: str | None


class Lifecycle(NamedTuple):
    """The state of a version and the notice to its callers, as JSON."""

    state: LifecycleState
    notice: str | None


class StoredEvidence(NamedTuple):
    """The result of the contract tests on one content."""

    digest: str
    passed: int
    mode: str
    report: str


@dataclass(frozen=True)
class Notice:
    """The notice for callers of a deprecated version."""

    deprecated_ms: int
    removal_ms: int
    successor: str | None
    migration_guide: str | None

    def document(self) -> dict[str, Any]:
        return {
            "deprecatedAt": iso(self.deprecated_ms),
            "removalDate": iso(self.removal_ms),
            "successor": self.successor,
            "migrationGuide": self.migration_guide,
        }


def bump_epoch(transaction: Transaction, addresses: Collection[str] | None) -> None:
    """Make every process on this store notice a change of the registry.

    `addresses` are the tools whose versions, aliases or code have changed: these are read again, and no others. None
    stands for any tool.
    """
    epochs.advance(transaction, epochs.REGISTRY)
    registry_changes.note(transaction, addresses)


# Versions


def all_versions(reader: Reader) -> list[ToolVersionRow]:
    """Every version, by address and time of publication."""
    return [ToolVersionRow._make(row) for row in reader.all(f"{_SELECT} ORDER BY address, published_ms")]


def all_without_manifests(reader: Reader) -> list[ToolVersionRow]:
    """Every version without its manifest, by address and time of publication."""
    return [ToolVersionRow._make(row) for row in reader.all(f"{_WITHOUT_MANIFEST} ORDER BY address, published_ms")]


def versions(reader: Reader, address: str) -> list[ToolVersionRow]:
    """Every version of a tool."""
    return [ToolVersionRow._make(row) for row in reader.all(f"{_SELECT} WHERE address = ?", (address,))]


def versions_of(reader: Reader, addresses: Collection[str]) -> list[ToolVersionRow]:
    """Every version of some tools without its manifest, by address and time of publication."""
    marks = ", ".join("?" * len(addresses))
    rows = reader.all(f"{_WITHOUT_MANIFEST} WHERE address IN ({marks}) ORDER BY address, published_ms", [*addresses])
    return [ToolVersionRow._make(row) for row in rows]


def manifest(reader: Reader, address: str, version: str, digest: str) -> str | None:
    """The manifest of a version; None where there is none with this content."""
    statement = "SELECT manifest FROM tool_version WHERE address = ? AND version = ? AND digest = ?"
    row = reader.one(statement, (address, version, digest))
    return None if row is None else row[0]


def digest(reader: Reader, address: str, version: str) -> str | None:
    """The digest of a version's content; None where there is no such version."""
    row = reader.one("SELECT digest FROM tool_version WHERE address = ? AND version = ?", (address, version))
    return None if row is None else row[0]


def lifecycle(reader: Reader, address: str, version: str) -> Lifecycle | None:
    row = reader.one("SELECT state, notice FROM tool_version WHERE address = ? AND version = ?", (address, version))
    return None if row is None else Lifecycle._make(row)


def deprecated(reader: Reader) -> list[tuple[str, str]]:
    """The versions that are deprecated or sunset with a notice, in order: address and version."""
    return reader.all(
        "SELECT address, version FROM tool_version WHERE state IN ('deprecated', 'sunset') AND notice IS NOT NULL"
        " ORDER BY address, version"
    )


def callable_versions(reader: Reader, address: str, *, but: tuple[str, str]) -> list[str]:
    """The versions of a tool that can be called, but for the one of the given address and version."""
    rows = reader.all(
        "SELECT version FROM tool_version WHERE address = ? AND state IN ('active', 'deprecated')"
        " AND NOT (address = ? AND version = ?)",
        (address, *but),
    )
    return [version for (version,) in rows]


def insert(
    transaction: Transaction,
    address: str,
    version: str,
    *,
    digest: str,
    state: LifecycleState,
    manifest: str,
    origin: str,
    published_ms: int,
) -> None:
    transaction.execute(
        "INSERT INTO tool_version (address, version, digest, state, manifest, origin, published_ms)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (address, version, digest, state, manifest, origin, published_ms),
    )


def set_lifecycle(
    transaction: Transaction, address: str, version: str, state: LifecycleState, notice: str | None
) -> None:
    transaction.execute(
        "UPDATE tool_version SET state = ?, notice = ? WHERE address = ? AND version = ?",
        (state, notice, address, version),
    )


def activate(transaction: Transaction, address: str, version: str) -> None:
    """Make a version active again."""
    transaction.execute(
        "UPDATE tool_version SET state = 'active' WHERE address = ? AND version = ?", (address, version)
    )


def sunset(transaction: Transaction, address: str) -> bool:
    """Sunset every version of a tool. Returns whether there was one that was not."""
    statement = "UPDATE tool_version SET state = 'sunset' WHERE address = ? AND state <> 'sunset'"
    return transaction.execute(statement, (address,)).rowcount > 0


def sunset_of_upstream(transaction: Transaction, upstream: str) -> list[str]:
    """Sunset every version of the tools that were admitted from an upstream. Returns the addresses of these tools."""
    admitted = "SELECT address FROM upstream_tool WHERE upstream = ? AND version IS NOT NULL"
    transaction.execute(f"UPDATE tool_version SET state = 'sunset' WHERE address IN ({admitted})", (upstream,))  # noqa: S608 - constant
    return [address for (address,) in transaction.all(admitted, (upstream,))]


# Names


def exists(reader: Reader, address: str) -> bool:
    """Whether a tool has any version."""
    return reader.one("SELECT 1 FROM tool_version WHERE address = ?", (address,)) is not None


def addresses(reader: Reader) -> list[str]:
    """The address of every tool, in no order."""
    return [address for (address,) in reader.all("SELECT DISTINCT address FROM tool_version")]


def first_addresses(reader: Reader, most: int) -> list[str]:
    """The addresses of tools in order, at most so many."""
    rows = reader.all("SELECT DISTINCT address FROM tool_version ORDER BY 1 LIMIT ?", (most,))
    return [address for (address,) in rows]


def other_addresses(reader: Reader, address: str) -> list[str]:
    """The address of every tool but one."""
    rows = reader.all("SELECT DISTINCT address FROM tool_version WHERE address != ?", (address,))
    return [other for (other,) in rows]


def longer_addresses(reader: Reader, length: int) -> list[str]:
    """The addresses that have more characters than `length`."""
    rows = reader.all("SELECT DISTINCT address FROM tool_version WHERE length(address) > ?", (length,))
    return [address for (address,) in rows]


def of_other_origins(reader: Reader, origin: str) -> list[tuple[str, str]]:
    """The versions that come from elsewhere than `origin`: address and origin."""
    return reader.all("SELECT address, origin FROM tool_version WHERE origin <> ?", (origin,))


def with_bare_name(reader: Reader, name: str) -> list[str]:
    """The addresses of the tools that have a bare name (what follows the first dot), or an alias with it, in order."""
    # Namespaces have no dots, so the bare name is what follows the first one; both expressions are indexed.
    rows = reader.all(
        f"SELECT DISTINCT address FROM tool_version WHERE {after_dot('address')} = ?"  # noqa: S608 - constant
        f" UNION SELECT address FROM tool_alias WHERE {after_dot('alias')} = ? ORDER BY 1",
        (name, name),
    )
    return [address for (address,) in rows]


def aliased(reader: Reader, alias: str) -> str | None:
    """The address of the tool that has an alias."""
    row = reader.one("SELECT address FROM tool_alias WHERE alias = ?", (alias,))
    return None if row is None else row[0]


def aliased_by_other(reader: Reader, alias: str, address: str) -> str | None:
    """The address of the tool that has an alias, if it is another than `address`."""
    row = reader.one("SELECT address FROM tool_alias WHERE alias = ? AND address != ?", (alias, address))
    return None if row is None else row[0]


def aliases(reader: Reader, address: str) -> list[str]:
    """The aliases of a tool."""
    return [alias for (alias,) in reader.all("SELECT alias FROM tool_alias WHERE address = ?", (address,))]


def all_aliases(reader: Reader) -> list[tuple[str, str]]:
    """Every alias that is not the tool's own address: alias and address."""
    return reader.all("SELECT alias, address FROM tool_alias WHERE alias <> address")


def insert_alias(transaction: Transaction, alias: str, address: str) -> None:
    """Add an alias; one that is there already stays as it is."""
    transaction.execute(
        "INSERT INTO tool_alias (alias, address) VALUES (?, ?) ON CONFLICT DO NOTHING", (alias, address)
    )


# Evidence


def evidence(reader: Reader, digest: str) -> StoredEvidence | None:
    """The result of the latest contract tests on a content; None where there were none."""
    row = reader.one("SELECT digest, passed, mode, report FROM evidence WHERE digest = ?", (digest,))
    return None if row is None else StoredEvidence._make(row)


def put_evidence(transaction: Transaction, result: StoredEvidence, at_ms: int) -> None:
    """Store the result of contract tests, in place of an earlier one on the same content."""
    transaction.execute(
        "INSERT INTO evidence (digest, mode, passed, report, at_ms) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (digest) DO UPDATE SET mode = excluded.mode, passed = excluded.passed,"
        " report = excluded.report, at_ms = excluded.at_ms",
        (result.digest, result.mode, result.passed, result.report, at_ms),
    )

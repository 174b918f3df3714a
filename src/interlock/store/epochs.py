"""Epochs: values that change with every change to a family of tables, so that other processes notice it.

Most are facts that are raised by one in the transaction that changes the family (`advance`). Revocations and versions
of the shared configuration are only ever added and the rows of `quarantine` carry their own number: there the highest
number is the epoch.
"""

from __future__ import annotations

from interlock.core.record import NamedTuple
from interlock.store import facts
from interlock.store.port import Reader, Transaction

REGISTRY = "registry_epoch"
IDENTITIES = "identity_epoch"
SERVICES = "service_epoch"
UPSTREAMS = "upstream_epoch"
SURFACES = "surface_epoch"
DECISIONS = "decision_epoch"
SECRETS = "secret_epoch"


class Epochs(NamedTuple):
    """All epochs at one moment; None where a family was never changed."""

    revocations: int | None
    quarantine: int | None
    registry: str | None
    identities: str | None
    services: str | None
    upstreams: str | None
    surfaces: str | None
    decisions: str | None
    config: int | None
    secrets: str | None


READ = (
    "SELECT (SELECT max(seq) FROM revocation), (SELECT max(epoch) FROM quarantine),"
    " (SELECT value FROM fact WHERE name = 'registry_epoch'), (SELECT value FROM fact WHERE name = 'identity_epoch'),"
    " (SELECT value FROM fact WHERE name = 'service_epoch'), (SELECT value FROM fact WHERE name = 'upstream_epoch'),"
    " (SELECT value FROM fact WHERE name = 'surface_epoch'), (SELECT value FROM fact WHERE name = 'decision_epoch'),"
    " (SELECT max(version) FROM shared_config), (SELECT value FROM fact WHERE name = 'secret_epoch')"
)


def read(reader: Reader) -> Epochs:
    """All epochs, in one statement."""
    return Epochs._make(reader.one(READ))


def advance(transaction: Transaction, name: str) -> None:
    """Let every process on the home notice a change that this transaction makes."""
    facts.increase(transaction, name)
    transaction.notifies = True

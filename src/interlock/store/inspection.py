"""Reads of `interlock doctor` and of backups: a home that nobody has opened, looked at without changing it.

The database may be of an earlier schema, damaged, or not ours. All that is read through one `opened` is as it was at
one moment: others write meanwhile, and two counts of a table at two moments differ.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager

import orjson

from interlock.core.errors import Failure
from interlock.core.record import NamedTuple
from interlock.store.expressions import member, text_contains
from interlock.store.failures import no_room
from interlock.store.home import Home
from interlock.store.port import Reader, StoreError
from interlock.store.tools import manifest

# Versions that can be called, or could be if they were put back.
_IN_USE = "state NOT IN ('sunset', 'removed')"


@contextmanager
def opened(home: Home) -> Generator[Reader]:
    """The database in one read transaction, for reading only; refuses what is not ours or cannot be read."""
    try:
        connection = home.reading(5)
    except StoreError as error:
        raise Failure("E3801", f"the database cannot be opened: {error}") from None
    try:
        connection.execute("BEGIN")
        if not home.is_ours(connection):
            raise Failure("E3804", "the database in this data directory was not made by Interlock")
        yield connection
    except StoreError as error:
        if "not a database" in str(error) or "malformed" in str(error):
            raise Failure("E3804", "the database in this data directory is damaged or not a database") from None
        if (full := no_room(error)) is not None:
            raise full from None
        raise
    finally:
        connection.close()


# The ledger


def anchored_through(reader: Reader) -> int:
    """The last record that was signed; 0 when none was."""
    return reader.one("SELECT COALESCE(MAX(seq), 0) FROM anchor")[0]


def records_behind(reader: Reader, seq: int) -> tuple[int, int | None]:
    """The number of records behind one, and the first of them."""
    return reader.one("SELECT COUNT(*), MIN(seq) FROM journal WHERE seq > ?", (seq,))


def record(reader: Reader, seq: int) -> bytes:
    return reader.one("SELECT body FROM journal WHERE seq = ?", (seq,))[0]


def signed_ms(reader: Reader, before_ms: int) -> int | None:
    """The latest time of a signature, of those before a time."""
    return reader.one("SELECT MAX(at_ms) FROM anchor WHERE at_ms < ?", (before_ms,))[0]


def signing_key(reader: Reader) -> str | None:
    """The id of the key that signed last."""
    row = reader.one("SELECT key_id FROM anchor ORDER BY seq DESC LIMIT 1")
    return None if row is None else str(row[0])


def statements_of_lone_deciders(reader: Reader) -> Iterator[bytes]:
    """The newest record of each person who stated, or ended, that they decide on their own calls."""
    rows = reader.each(
        "SELECT body FROM journal WHERE seq IN (SELECT max(seq) FROM journal"
        " WHERE call >= 'alone:' AND call < 'alone;' AND kind = 'authority' GROUP BY call) ORDER BY call"
    )
    for (body,) in rows:
        yield body


def policy_applied(reader: Reader) -> bytes | None:
    """The newest record of a policy that somebody applied."""
    row = reader.one(
        "SELECT body FROM journal WHERE kind = 'authority'"  # noqa: S608 - constant
        f" AND {member('body', 'act')} = 'policy.applied' ORDER BY seq DESC LIMIT 1"
    )
    return None if row is None else row[0]


# Calls and tickets


def key_states(reader: Reader) -> dict[str, int]:
    """The number of idempotency keys in each state."""
    return dict(reader.all("SELECT state, COUNT(*) FROM reservation GROUP BY state"))


def ticket_states(reader: Reader) -> dict[str, int]:
    """The number of tickets in each state."""
    return dict(reader.all("SELECT state, COUNT(*) FROM ticket GROUP BY state"))


class Undelivered(NamedTuple):
    """Notifications of one channel that did not arrive and that somebody still waits for."""

    channel: str
    notifications: int
    error: str


def undelivered(reader: Reader) -> list[Undelivered]:
    rows = reader.all(
        "SELECT n.channel, COUNT(*), MAX(n.error) FROM notification n JOIN ticket t ON t.id = n.ticket"
        " WHERE n.error IS NOT NULL AND n.state IN ('retry', 'sending', 'failed') AND t.state = 'PENDING'"
        " GROUP BY n.channel ORDER BY 1"
    )
    return list(map(Undelivered._make, rows))


def open_breakers(reader: Reader) -> list[tuple[str, str, str]]:
    """Services whose breaker is not closed: the service, the state and the reason."""
    return [
        (str(service), str(state), str(reason))
        for service, state, reason in reader.all("SELECT service, state, reason FROM breaker ORDER BY service")
    ]


def open_calls(home: Home) -> tuple[int, int]:
    """Return how many calls a home was carrying out when it was copied, and how many it was yet to make by itself."""
    with closing(home.reading(alone=True)) as connection:
        return connection.one(
            "SELECT (SELECT COUNT(*) FROM reservation WHERE state = 'executing'),"
            " (SELECT COUNT(*) FROM ticket WHERE state = 'APPROVED' AND expires_ms > ?)",
            (home.now_ms(connection),),
        )


# Tools and callers


class Origin(NamedTuple):
    """The source of a version, and the digest of the contract that was admitted."""

    address: str
    version: str
    origin: str
    digest: str


def admitted_manifest(reader: Reader, row: Origin) -> str | None:
    """The manifest of a version as it was admitted."""
    return manifest(reader, row.address, row.version, row.digest)


def tool_count(reader: Reader) -> int:
    return reader.one("SELECT COUNT(DISTINCT address) FROM tool_version")[0]


def manifests(reader: Reader) -> Iterator[tuple[str, str]]:
    """Address and manifest of every version that can be called."""
    return reader.each(f"SELECT address, manifest FROM tool_version WHERE {_IN_USE}")  # noqa: S608 - a constant


def active_manifests(reader: Reader) -> Iterator[tuple[str, str, str]]:
    """Address, version and manifest of every active version."""
    return reader.each("SELECT address, version, manifest FROM tool_version WHERE state = 'active'")


def origins(reader: Reader) -> list[Origin]:
    """The versions that were added from files and modules."""
    rows = reader.all(
        f"SELECT address, version, origin, digest FROM tool_version WHERE {_IN_USE}"  # noqa: S608 - a constant
        " AND origin NOT LIKE 'library:%' AND origin NOT LIKE 'upstream:%' ORDER BY address, version"
    )
    return list(map(Origin._make, rows))


def has_sandboxed_tools(reader: Reader) -> bool:
    """Whether the home has sandboxed tools, from the text of the manifests: all of them are read."""
    sandboxed = text_contains("manifest", '"sandbox":{')
    return reader.one(f"SELECT 1 FROM tool_version WHERE {sandboxed} LIMIT 1") is not None  # noqa: S608 - constant


def groups(reader: Reader) -> frozenset[str]:
    """The groups that registered identities are in."""
    rows = reader.all("SELECT DISTINCT groups FROM identity")
    return frozenset(group for (groups,) in rows for group in orjson.loads(groups))


def revoked_keys(reader: Reader) -> set[str]:
    """The ids of the issuer's keys that were revoked."""
    return {kid for (kid,) in reader.all("SELECT ref FROM revocation WHERE kind = 'key'")}

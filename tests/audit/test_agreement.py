"""Tables that authority is read from: what is written into them behind the program's back shows in `audit verify`."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest

from interlock.audit.chain import verify
from interlock.audit.chain_verdict import ChainVerdict
from interlock.audit.retention import purge
from interlock.settings import Settings
from interlock.store.connection import SqliteConnection
from interlock.store.homes import home_at
from interlock.testing import FakeClock
from tests.support.histories import World, make
from tests.support.identities import AGENT, USER
from tests.support.stores import unguarded

FORGED = "UPDATE ticket SET state = 'APPROVED', resolved_by = 'local:ghost', resolved_ms = created_ms WHERE id = '{}'"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory() as directory:
        yield asyncio.run(make(Path(directory) / "home", FakeClock()))


def edited(world: World, act: Callable[[SqliteConnection], object]) -> ChainVerdict:
    """What the verification says of a copy after an edit."""
    with tempfile.TemporaryDirectory() as directory:
        copy = home_at(shutil.copytree(world.home.path, Path(directory) / "home"))
        with unguarded(copy) as db:
            act(db)
        return verify(copy)


def test_tables_that_nobody_wrote_into_agree_with_the_record(world: World) -> None:
    assert verify(world.home).faults == ()


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        (f"UPDATE identity SET trust = 100 WHERE did = '{AGENT}'", "trust is 100, on record 20"),
        (f"UPDATE identity SET trust = '20' WHERE did = '{AGENT}'", "intact"),  # the column makes it a number again
        (f"UPDATE identity SET kind = 'human' WHERE did = '{AGENT}'", "kind is 'human', on record 'agent'"),
        (f"UPDATE identity SET tenant = 'acme' WHERE did = '{AGENT}'", "tenant is 'acme'"),
        (f"""UPDATE identity SET groups = '["admins"]' WHERE did = '{AGENT}'""", "groups is ['admins']"),
        (f"UPDATE identity SET state = 'active' WHERE did = '{USER}'", "state is 'active', on record 'revoked'"),
        (f"UPDATE identity SET did = CAST(did AS BLOB) WHERE did = '{AGENT}'", f"`{AGENT}` is missing in the tables"),
        (f"DELETE FROM identity WHERE did = '{AGENT}'", f"the identity `{AGENT}` is missing in the tables"),
        (
            "INSERT INTO identity SELECT 'did:x', kind, name, tenant, 99, groups, state, 0 FROM identity LIMIT 1",
            "on no record",
        ),
        ("DELETE FROM revocation WHERE kind = 'jti'", "the revocation of jti `"),
        (f"DELETE FROM revocation WHERE ref = '{USER}'", f"the revocation of did `{USER}` is missing in the tables"),
        ("UPDATE revocation SET ref = 'other' WHERE kind = 'jti'", "of jti `other` is in the tables and on no record"),
        ("UPDATE revocation SET seq = -seq", "the revocation of jti `"),
        ("UPDATE ticket SET state = 'PENDING' WHERE state = 'DENIED'", "state is 'PENDING', on record 'DENIED'"),
        ("UPDATE ticket SET state = 'APPROVED' WHERE state = 'USED'", "state is 'APPROVED', on record 'USED'"),
        ("UPDATE ticket SET digest = 'x' WHERE state = 'APPROVED'", "digest is 'x', on record"),
        ("UPDATE ticket SET resolved_by = 'local:eve' WHERE state = 'APPROVED'", "resolved_by is 'local:eve'"),
        ("DELETE FROM ticket WHERE state = 'DENIED'", "is missing in the tables"),
        ("UPDATE standing SET uses = 10000", "uses is 10000, on record 3"),
        ("UPDATE standing SET used = 0", "used is 0, on record 1"),
        ("UPDATE standing SET caller = 'local:eve'", "caller is 'local:eve'"),
        ("UPDATE standing SET expires_ms = expires_ms + 1", "expiresAt is"),
        ("UPDATE standing SET id = 'another'", "the standing approval `another` is in the tables and on no record"),
    ],
    ids=itertools.count(),  # the identities have other names each time
)
def test_a_row_that_says_something_else_than_the_record_is_found(world: World, statement: str, found: str) -> None:
    verdict = edited(world, lambda db: db.execute(statement))
    assert verdict.intact == (found == "intact")
    assert verdict.intact or any(found in fault.what for fault in verdict.faults)


def test_a_forged_approval_is_found_before_it_is_used(world: World) -> None:
    verdict = edited(world, lambda db: db.execute(FORGED.format(world.waiting)))
    assert [fault.what for fault in verdict.faults] == [
        f"the ticket `{world.waiting}` is another in the tables: state is 'APPROVED', on record 'PENDING'"
    ]


def test_a_ticket_that_was_used_without_a_yes_on_record_is_found(world: World) -> None:
    """What a program that believed the row has written: a chain without a fault, and nobody who agreed."""

    def act(db: SqliteConnection) -> None:
        call = db.execute("SELECT call FROM ticket WHERE id = ?", (world.waiting,)).fetchone()[0]
        record = {"kind": "approval", "call": call, "act": "used", "approvalTicketId": world.waiting, "used_by": call}
        append(db, "approval", call, orjson.dumps(record))
        db.execute(FORGED.format(world.waiting).replace("APPROVED", "USED"))

    (fault,) = edited(world, act).faults
    assert fault.what == f"ticket `{world.waiting}` was used, and no approval of it is on record"
    assert fault.seq == verify(world.home).head[0] + 1


def append(db: SqliteConnection, kind: str, call: str, body: bytes) -> None:
    """One more record, rightly chained."""
    seq, head = db.execute("SELECT seq, hash FROM journal ORDER BY seq DESC LIMIT 1").fetchone()
    digest = hashlib.sha256(head + (seq + 1).to_bytes(8, "big") + body).digest()
    db.execute("INSERT INTO journal VALUES (?, ?, ?, ?, ?)", (seq + 1, kind, call, body, digest))


def test_a_revocation_that_an_index_or_another_table_hides_is_found(world: World) -> None:
    def view(db: SqliteConnection) -> None:
        db.execute("ALTER TABLE revocation RENAME TO former")
        db.execute("CREATE VIEW revocation AS SELECT * FROM former WHERE kind != 'jti'")

    found = [fault.what for fault in edited(world, view).faults]
    assert any("the view `revocation`" in what for what in found)


def test_what_retention_removed_is_not_held_against_the_tables(world: World) -> None:
    with tempfile.TemporaryDirectory() as directory:
        copy = home_at(shutil.copytree(world.home.path, Path(directory) / "home"))
        later = FakeClock().now_ms + 8 * 366 * 86_400_000
        whole = verify(copy).head[0]
        for through in (1, whole // 2, whole):
            purge(copy, Settings.model_validate({}), now_ms=later, by="local:auditor", through=through)
            verdict = verify(copy)
            assert verdict.intact, verdict.faults
            assert verdict.purged_through == through

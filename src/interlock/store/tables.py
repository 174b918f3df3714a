"""Every table there is. Migrations create them; a test holds the two equal."""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData()

# The append-only, hash-chained ledger. `kind` and `call` repeat what the body says so that they can be looked up; the
# verifier checks that they agree.
journal = sa.Table(
    "journal",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("call", sa.Text, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("hash", sa.LargeBinary, nullable=False),
    sa.Index("journal_call", "call"),
)

# Signed heads of the chain: what was there, proven by a key.
anchor = sa.Table(
    "anchor",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("hash", sa.LargeBinary, nullable=False),
    sa.Column("at_ms", sa.Integer, nullable=False),
    sa.Column("key_id", sa.Text, nullable=False),
    sa.Column("signature", sa.LargeBinary, nullable=False),
)

# What retention removed: the head it ended with, signed, so that the rest still verifies.
segment = sa.Table(
    "segment",
    metadata,
    sa.Column("last_seq", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("first_seq", sa.Integer, nullable=False),
    sa.Column("hash", sa.LargeBinary, nullable=False),
    sa.Column("at_ms", sa.Integer, nullable=False),
    sa.Column("key_id", sa.Text, nullable=False),
    sa.Column("signature", sa.LargeBinary, nullable=False),
)

# One row per idempotency key in its window: executing, done or unknown.
reservation = sa.Table(
    "reservation",
    metadata,
    sa.Column("scope", sa.LargeBinary, primary_key=True),
    sa.Column("tool", sa.Text, nullable=False),
    sa.Column("version", sa.Text, nullable=False),
    sa.Column("key", sa.Text, nullable=False),
    sa.Column("caller", sa.Text, nullable=False),
    sa.Column("input_hash", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("call", sa.Text, nullable=False),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("reserved_ms", sa.Integer, nullable=False),
    sa.Column("expires_ms", sa.Integer, nullable=False),
    sa.Column("result", sa.LargeBinary),
    sa.Index("reservation_state", "state"),
    sa.Index("reservation_call", "call"),
    sa.Index("reservation_expires", "expires_ms"),
)

# State that tools keep between calls of one session.
session = sa.Table(
    "session",
    metadata,
    sa.Column("id", sa.LargeBinary, primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
)

# Results too large or too private to travel inline.
payload = sa.Table(
    "payload",
    metadata,
    sa.Column("ref", sa.Text, primary_key=True),
    sa.Column("call", sa.Text, nullable=False),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("body", sa.LargeBinary),
    sa.Column("size", sa.Integer, nullable=False),
    sa.Column("created_ms", sa.Integer, nullable=False),
    sa.Column("expires_ms", sa.Integer, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Index("payload_expires", "expires_ms"),
)

tool_version = sa.Table(
    "tool_version",
    metadata,
    sa.Column("address", sa.Text, primary_key=True),
    sa.Column("version", sa.Text, primary_key=True),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("manifest", sa.Text, nullable=False),
    sa.Column("origin", sa.Text, nullable=False),
    sa.Column("published_ms", sa.Integer, nullable=False),
    sa.Column("notice", sa.Text),
    sa.Index("tool_version_name", sa.text("substr(address, instr(address, '.') + 1)")),
)

tool_alias = sa.Table(
    "tool_alias",
    metadata,
    sa.Column("alias", sa.Text, primary_key=True),
    sa.Column("address", sa.Text, nullable=False),
    sa.Index("tool_alias_name", sa.text("substr(alias, instr(alias, '.') + 1)")),
)

# Contract tests that passed, per exact content.
evidence = sa.Table(
    "evidence",
    metadata,
    sa.Column("digest", sa.Text, primary_key=True),
    sa.Column("mode", sa.Text, nullable=False),
    sa.Column("passed", sa.Integer, nullable=False),
    sa.Column("report", sa.Text, nullable=False),
    sa.Column("at_ms", sa.Integer, nullable=False),
)

# Small facts about this store: the registry's epoch, the tenant's key secret.
fact = sa.Table(
    "fact",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)

"""Every table there is. Migrations create them; a test holds the two equal."""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData()

# Columns of texts that hold sealed values. SQLite stores in any column what it is given; elsewhere they are binary.
SEALED = frozenset({("session", "state"), ("ticket", "params"), ("ticket", "preview"), ("ticket", "changed")})

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

# State that tools keep between calls of one session, encrypted; text in rows of an older version.
session = sa.Table(
    "session",
    metadata,
    sa.Column("id", sa.LargeBinary, primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
)

# Results too large or too private to travel inline. Of one in pieces, the body is the head of the encrypted bytes.
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
    sa.Column("pieces", sa.Integer, nullable=False, server_default="0"),
    sa.Index("payload_expires", "expires_ms"),
    sa.Index("payload_in_pieces", "ref", sqlite_where=sa.text("pieces > 0")),
)

# The rest of large payloads, in order. They are written before the row of `payload` that names them.
payload_piece = sa.Table(
    "payload_piece",
    metadata,
    sa.Column("ref", sa.Text, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("body", sa.LargeBinary, nullable=False),
)

# How many bytes of payloads are kept: for the home, for each tenant, for each caller. Kept by triggers on `payload`.
payload_use = sa.Table(
    "payload_use",
    metadata,
    sa.Column("scope", sa.Text, primary_key=True),
    sa.Column("bytes", sa.Integer, nullable=False),
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

# Who is known: agents, people and services by their DID, and what the operator says of them.
identity = sa.Table(
    "identity",
    metadata,
    sa.Column("did", sa.Text, primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("trust", sa.Integer, nullable=False),
    sa.Column("groups", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("registered_ms", sa.Integer, nullable=False),
)

# What is void: a link of a delegation chain, a signing key, an identity. Rows are only ever added.
revocation = sa.Table(
    "revocation",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("ref", sa.Text, nullable=False),
    sa.Column("at_ms", sa.Integer, nullable=False),
    sa.Column("by", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.UniqueConstraint("kind", "ref"),
)

# How often a grant with a bounded number of uses was used.
grant_use = sa.Table(
    "grant_use",
    metadata,
    sa.Column("jti", sa.Text, primary_key=True),
    sa.Column("used", sa.Integer, nullable=False),
)

# One row per call that a person must decide on. `sealed` holds what is needed to go on with the call, encrypted, and so
# do `params`, `preview` and `changed` what may be shown of it; rows of an older version have these in clear text.
ticket = sa.Table(
    "ticket",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("call", sa.Text, nullable=False),
    sa.Column("scope", sa.LargeBinary, nullable=False),
    sa.Column("tool", sa.Text, nullable=False),
    sa.Column("version", sa.Text, nullable=False),
    sa.Column("operation", sa.Text, nullable=False),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("caller", sa.Text, nullable=False),
    sa.Column("requester", sa.Text, nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("policy", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("chain", sa.Text, nullable=False),
    sa.Column("params", sa.Text, nullable=False),
    sa.Column("preview", sa.Text, nullable=False),
    sa.Column("head", sa.Text, nullable=False),
    sa.Column("sealed", sa.LargeBinary),
    sa.Column("created_ms", sa.Integer, nullable=False),
    sa.Column("expires_ms", sa.Integer, nullable=False),
    sa.Column("resolved_ms", sa.Integer),
    sa.Column("resolved_by", sa.Text),
    sa.Column("comment", sa.Text),
    sa.Column("edited", sa.LargeBinary),
    # As JSON, what may be shown of an edit: the input as its reviewer changed it, and what it would do.
    sa.Column("changed", sa.Text),
    sa.Index("ticket_scope", "scope"),
    sa.Index("ticket_state", "state", "expires_ms"),
    sa.Index("ticket_call", "call"),
)

# Approval given in advance, within bounds. `tenant` is the caller's.
standing = sa.Table(
    "standing",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("tool", sa.Text, nullable=False),
    sa.Column("versions", sa.Text, nullable=False),
    sa.Column("arguments", sa.Text, nullable=False),
    sa.Column("caller", sa.Text, nullable=False),
    sa.Column("uses", sa.Integer, nullable=False),
    sa.Column("used", sa.Integer, nullable=False),
    sa.Column("created_ms", sa.Integer, nullable=False),
    sa.Column("expires_ms", sa.Integer, nullable=False),
    sa.Column("granted_by", sa.Text, nullable=False),
    sa.Column("revoked_ms", sa.Integer),
    sa.Index("standing_tool", "tool"),
)

# The configuration that all machines share, in versions. `files` is a JSON object of texts.
shared_config = sa.Table(
    "shared_config",
    metadata,
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("files", sa.Text, nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("pushed_by", sa.Text, nullable=False),
    sa.Column("at_ms", sa.Integer, nullable=False),
)

# The text of sandboxed tools.
tool_source = sa.Table(
    "tool_source",
    metadata,
    sa.Column("digest", sa.Text, primary_key=True),
    sa.Column("body", sa.LargeBinary, nullable=False),
)

# The tools that the holder of a surface, a token or a local caller, has loaded.
surface_tool = sa.Table(
    "surface_tool",
    metadata,
    sa.Column("holder", sa.Text, primary_key=True),
    sa.Column("address", sa.Text, primary_key=True),
    sa.Column("loaded_ms", sa.Integer, nullable=False),
    sa.Column("used_ms", sa.Integer),
)

# The surfaces. `facts` says for whom each was made, `offered` which tools it lists, with the reason for each.
surface = sa.Table(
    "surface",
    metadata,
    sa.Column("holder", sa.Text, primary_key=True),
    sa.Column("id", sa.Text, nullable=False),
    sa.Column("caller", sa.Text, nullable=False),
    sa.Column("agent", sa.Text),
    sa.Column("facts", sa.Text, nullable=False),
    sa.Column("offered", sa.Text, nullable=False),
    sa.Column("revision", sa.Integer, nullable=False),
    sa.Column("created_ms", sa.Integer, nullable=False),
    sa.Column("changed_ms", sa.Integer, nullable=False),
)

# Who must be told of a ticket, by which channel, and whether they were. The message is made of the ticket when it is
# sent; `body` is that of a row of an older version.
notification = sa.Table(
    "notification",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("ticket", sa.Text, nullable=False),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("channel", sa.Text, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("next_ms", sa.Integer, nullable=False),
    sa.Column("owner", sa.Text),
    sa.Column("error", sa.Text),
    sa.Index("notification_due", "state", "next_ms"),
    sa.Index("notification_ticket", "ticket"),
)

# Credentials, each encrypted on its own. Several slots under one name form a pool.
secret = sa.Table(
    "secret",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("slot", sa.Text, primary_key=True),
    sa.Column("key_id", sa.Text, nullable=False),
    sa.Column("sealed", sa.LargeBinary, nullable=False),
    sa.Column("created_ms", sa.Integer, nullable=False),
    sa.Column("expires_ms", sa.Integer),
    sa.Column("resting_until_ms", sa.Integer, nullable=False),
)

# How far calls have come, as their tools saved it, numbered within each call. `body` is the state, packed with gzip and
# encrypted; `size` and `sha256` are those of the state itself. `redacted` lists what was taken out of it first.
checkpoint = sa.Table(
    "checkpoint",
    metadata,
    sa.Column("call", sa.Text, primary_key=True),
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("tool", sa.Text, nullable=False),
    sa.Column("version", sa.Text, nullable=False),
    sa.Column("type", sa.Text, nullable=False),
    sa.Column("label", sa.Text, nullable=False),
    sa.Column("at_ms", sa.Integer, nullable=False),
    sa.Column("size", sa.Integer, nullable=False),
    sa.Column("sha256", sa.Text, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("redacted", sa.Text, nullable=False),
)

# What has been spent and what is set aside, in millionths, per budget and period.
spend = sa.Table(
    "spend",
    metadata,
    sa.Column("budget", sa.Text, primary_key=True),
    sa.Column("spent", sa.Integer, nullable=False),
    sa.Column("held", sa.Integer, nullable=False),
    sa.Column("until_ms", sa.Integer),
)

# What a running call has set aside; gone when it is settled.
hold = sa.Table(
    "hold",
    metadata,
    sa.Column("call", sa.Text, primary_key=True),
    sa.Column("budget", sa.Text, primary_key=True),
    sa.Column("amount", sa.Integer, nullable=False),
    sa.Column("owner", sa.Text, nullable=False),
)

# Calls admitted under a rate limit, numbered, while they are in its window.
rate = sa.Table(
    "rate",
    metadata,
    sa.Column("bucket", sa.Text, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("at_ms", sa.Integer, nullable=False),
    sqlite_with_rowid=False,
)

# Services that asked to be left alone for a while.
suspension = sa.Table(
    "suspension",
    metadata,
    sa.Column("service", sa.Text, primary_key=True),
    sa.Column("until_ms", sa.Integer, nullable=False),
)

# What calls cost, in millionths, by part.
cost = sa.Table(
    "cost",
    metadata,
    sa.Column("call", sa.Text, primary_key=True),
    sa.Column("task", sa.Text, nullable=False),
    sa.Column("session", sa.Text, nullable=False),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("total", sa.Integer, nullable=False),
    sa.Column("parts", sa.Text, nullable=False),
    sa.Index("cost_task", "task"),
)

# Content that was caught doing what it said it would not. `epoch` grows with every change, so that others notice.
quarantine = sa.Table(
    "quarantine",
    metadata,
    sa.Column("digest", sa.Text, primary_key=True),
    sa.Column("tool", sa.Text, nullable=False),
    sa.Column("call", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("at_ms", sa.Integer, nullable=False),
    sa.Column("lifted_ms", sa.Integer),
    sa.Column("epoch", sa.Integer, nullable=False),
)

# Systems that others run and whose tools are served here. `state` is available, unavailable or failed.
upstream = sa.Table(
    "upstream",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("config", sa.Text, nullable=False),
    sa.Column("overlay", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("added_ms", sa.Integer, nullable=False),
    sa.Column("added_by", sa.Text, nullable=False),
    sa.Column("discovered_ms", sa.Integer, nullable=False),
    sa.Column("probed_ms", sa.Integer, nullable=False),
)

# What an upstream offers, by its own names. `pinned` is the digest of the definition that was admitted, `seen` that of
# the one seen last; `state` is admitted, refused, changed (until looked at) or gone.
upstream_tool = sa.Table(
    "upstream_tool",
    metadata,
    sa.Column("upstream", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("address", sa.Text, nullable=False),
    sa.Column("version", sa.Text),
    sa.Column("pinned", sa.Text),
    sa.Column("seen", sa.Text, nullable=False),
    sa.Column("definition", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("discovered_ms", sa.Integer, nullable=False),
)

# Breakers that are not closed, so that a restart and other processes know.
breaker = sa.Table(
    "breaker",
    metadata,
    sa.Column("service", sa.Text, primary_key=True),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("since_ms", sa.Integer, nullable=False),
    sa.Column("until_ms", sa.Integer, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
)

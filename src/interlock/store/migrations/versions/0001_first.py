"""The first schema.

Revision ID: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_GUARDS = (
    # INVARIANT: nobody changes a record, and only what retention has signed off may be removed.
    """CREATE TRIGGER journal_never_changes BEFORE UPDATE ON journal
       BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END""",
    """CREATE TRIGGER journal_keeps_its_term BEFORE DELETE ON journal
       WHEN OLD.seq > (SELECT COALESCE(MAX(last_seq), 0) FROM segment)
       BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END""",
    """CREATE TRIGGER journal_only_grows BEFORE INSERT ON journal
       WHEN EXISTS (SELECT 1 FROM journal WHERE seq = NEW.seq)
       BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END""",
    """CREATE TRIGGER anchor_only_grows BEFORE INSERT ON anchor
       WHEN EXISTS (SELECT 1 FROM anchor WHERE seq = NEW.seq)
       BEGIN SELECT RAISE(IGNORE); END""",
    """CREATE TRIGGER segment_only_grows BEFORE INSERT ON segment
       WHEN EXISTS (SELECT 1 FROM segment WHERE last_seq = NEW.last_seq)
       BEGIN SELECT RAISE(ABORT, 'segments are append-only'); END""",
    """CREATE TRIGGER anchor_never_changes BEFORE UPDATE ON anchor
       BEGIN SELECT RAISE(ABORT, 'anchors are append-only'); END""",
    """CREATE TRIGGER anchor_stays BEFORE DELETE ON anchor
       BEGIN SELECT RAISE(ABORT, 'anchors are append-only'); END""",
    """CREATE TRIGGER segment_never_changes BEFORE UPDATE ON segment
       BEGIN SELECT RAISE(ABORT, 'segments are append-only'); END""",
    """CREATE TRIGGER segment_stays BEFORE DELETE ON segment
       BEGIN SELECT RAISE(ABORT, 'segments are append-only'); END""",
)


def _signed_head(name: str, *extra: sa.Column[int], key: str) -> None:
    op.create_table(
        name,
        sa.Column(key, sa.Integer, primary_key=True, autoincrement=False),
        *extra,
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sa.Column("at_ms", sa.Integer, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("signature", sa.LargeBinary, nullable=False),
    )


def upgrade() -> None:
    op.create_table(
        "journal",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("call", sa.Text, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("hash", sa.LargeBinary, nullable=False),
    )
    op.create_index("journal_call", "journal", ["call"])
    _signed_head("anchor", key="seq")
    _signed_head("segment", sa.Column("first_seq", sa.Integer, nullable=False), key="last_seq")
    op.create_table(
        "reservation",
        sa.Column("scope", sa.LargeBinary, primary_key=True),
        *(sa.Column(name, sa.Text, nullable=False) for name in _RESERVATION_TEXTS),
        sa.Column("reserved_ms", sa.Integer, nullable=False),
        sa.Column("expires_ms", sa.Integer, nullable=False),
        sa.Column("result", sa.LargeBinary),
    )
    op.create_index("reservation_state", "reservation", ["state"])
    op.create_index("reservation_call", "reservation", ["call"])
    op.create_index("reservation_expires", "reservation", ["expires_ms"])
    op.create_table(
        "session",
        sa.Column("id", sa.LargeBinary, primary_key=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
    )
    op.create_table(
        "payload",
        sa.Column("ref", sa.Text, primary_key=True),
        sa.Column("call", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("body", sa.LargeBinary),
        sa.Column("size", sa.Integer, nullable=False),
        sa.Column("created_ms", sa.Integer, nullable=False),
        sa.Column("expires_ms", sa.Integer, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
    )
    op.create_index("payload_expires", "payload", ["expires_ms"])
    op.create_table(
        "tool_version",
        sa.Column("address", sa.Text, primary_key=True),
        sa.Column("version", sa.Text, primary_key=True),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("manifest", sa.Text, nullable=False),
        sa.Column("origin", sa.Text, nullable=False),
        sa.Column("published_ms", sa.Integer, nullable=False),
        sa.Column("notice", sa.Text),
    )
    op.create_table(
        "tool_alias",
        sa.Column("alias", sa.Text, primary_key=True),
        sa.Column("address", sa.Text, nullable=False),
    )
    op.create_table(
        "evidence",
        sa.Column("digest", sa.Text, primary_key=True),
        sa.Column("mode", sa.Text, nullable=False),
        sa.Column("passed", sa.Integer, nullable=False),
        sa.Column("report", sa.Text, nullable=False),
        sa.Column("at_ms", sa.Integer, nullable=False),
    )
    op.create_table(
        "fact",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )
    op.create_index("tool_version_name", "tool_version", [sa.text("substr(address, instr(address, '.') + 1)")])
    op.create_index("tool_alias_name", "tool_alias", [sa.text("substr(alias, instr(alias, '.') + 1)")])
    for guard in _GUARDS:
        op.execute(guard)


_RESERVATION_TEXTS = ("tool", "version", "key", "caller", "input_hash", "state", "call", "owner")

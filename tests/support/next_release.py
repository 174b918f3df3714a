"""The next release, for tests: this program with one migration more."""

from __future__ import annotations

import shutil
from pathlib import Path

from interlock.store import migration_list
from interlock.store.schema_version import SCHEMA_HEAD

NEXT = "9001"
TEXT = '''"""What the next release adds.

Revision ID: 9001
"""

import sqlalchemy as sa
from alembic import op

revision = "9001"
down_revision = "{before}"
compatible_since = "{compatible}"
loses = (("parcel", "true"), ("evidence.note", "note IS NOT NULL"))


def upgrade() -> None:
    op.create_table("parcel", sa.Column("id", sa.Text, primary_key=True), sa.Column("size", sa.Integer))
    op.add_column("evidence", sa.Column("note", sa.Text))
    {then}


def downgrade() -> None:
    op.drop_column("evidence", "note")
    op.drop_table("parcel")
'''

_PROGRAM = """
import pathlib
import sys

import interlock.cli
from interlock.store import migration_list, schema_version
from interlock.store.postgres import leases

migration_list.SCRIPTS = pathlib.Path({scripts!r})
schema_version.SCHEMA_HEAD = leases.SCHEMA_HEAD = {head!r}
sys.argv[0] = "interlock"
interlock.cli.main()
"""


def write_migrations(scripts: Path, compatible: str = SCHEMA_HEAD, then: str = "") -> Path:
    """Write the migrations of the next release to a directory."""
    shutil.rmtree(scripts, ignore_errors=True)
    shutil.copytree(migration_list.SCRIPTS, scripts, ignore=shutil.ignore_patterns("__pycache__"))
    text = TEXT.format(before=SCHEMA_HEAD, compatible=compatible, then=then)
    (scripts / "versions" / "9001_next.py").write_text(text)
    return scripts


def program(scripts: Path) -> tuple[str, str]:
    """The words with which an interpreter runs the command line of the next release."""
    return "-c", _PROGRAM.format(scripts=str(scripts), head=NEXT)

"""The migrations of this program, as their files state them.

Looking at them runs none: alembic and SQLAlchemy, which the files import, take a third of a second to load. The facts
of a migration are constants of its file.
"""

from __future__ import annotations

import ast
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock.core.errors import Failure
from interlock.core.record import NamedTuple

if TYPE_CHECKING:
    from interlock.store.port import Reader

SCRIPTS = Path(__file__).parent / "migrations"
_STATED = ("revision", "down_revision", "compatible_since", "loses")


class Migration(NamedTuple):
    """One step from the schema before it."""

    revision: str
    title: str
    # The oldest schema whose program can work after it.
    compatible_since: str
    can_be_undone: bool
    # What is lost when it is undone: a table, or a column of one, and which of the rows have it.
    loses: dict[str, str]


def migrations() -> list[Migration]:
    """The migrations of this program, the oldest first."""
    with os.scandir(SCRIPTS / "versions") as files:
        found = [(one.path, one.stat().st_mtime_ns) for one in files if one.name.endswith(".py")]
    return list(_read(tuple(sorted(found))))


@lru_cache(maxsize=4)
def _read(files: tuple[tuple[str, int], ...]) -> tuple[Migration, ...]:
    """The migrations of some files. Each names the one before it."""
    after: dict[str | None, Migration] = {}
    for path, _ in files:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"), path)
        stated = _constants(tree)
        if "revision" in stated:
            revision: str = stated["revision"]
            functions = {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
            after[stated["down_revision"]] = Migration(
                revision,
                (ast.get_docstring(tree) or "").partition("\n")[0].rstrip("."),
                stated.get("compatible_since", revision),
                "downgrade" in functions,
                dict(stated.get("loses", ())),
            )
    chain: list[Migration] = []
    while (following := after.get(chain[-1].revision if chain else None)) is not None:
        chain.append(following)
    return tuple(chain)


def _constants(tree: ast.Module) -> dict[str, Any]:
    """The constants of a file that state something of its migration."""
    return {
        target.id: ast.literal_eval(one.value)
        for one in tree.body
        if isinstance(one, ast.Assign)
        for target in one.targets
        if isinstance(target, ast.Name) and target.id in _STATED
    }


def compatible_since(schema: str) -> str:
    """The oldest schema whose program can work on a database at another one."""
    chain = [one for one in migrations() if one.revision <= schema]
    oldest, needed = schema, ""
    for one, before in zip(chain[:0:-1], chain[-2::-1], strict=True):
        needed = max(needed, one.compatible_since)
        if needed > before.revision:
            break
        oldest = before.revision
    return oldest


def head() -> str:
    """The schema of this program."""
    return migrations()[-1].revision


def pending_at(schema: str) -> list[Migration]:
    """The migrations of this program that a database at a schema lacks."""
    return [one for one in migrations() if one.revision > schema]


def last_applied(schema: str) -> tuple[Migration, str]:
    """The migration that led to a schema, if it can be undone (E3411), and the schema before it."""
    known = migrations()
    found = [place for place, one in enumerate(known) if one.revision == schema]
    if not found:
        words = f"schema {schema} is newer than this version, which cannot undo what it does not know"
        raise Failure("E3411", words, resolution="run the newer version's interlock migrate down")
    place = found[0]
    if place == 0 or not known[place].can_be_undone:
        advice = "restore the backup that was made before; see the how-to page on upgrades"
        raise Failure("E3411", f"migration {schema} cannot be undone", resolution=advice)
    return known[place], known[place - 1].revision


def at_stake(migration: Migration, reader: Reader) -> dict[str, int]:
    """The number of rows that undoing a migration would lose, of each table and column that has some."""
    found: dict[str, int] = {}
    for what, condition in migration.loses.items():
        table = what.partition(".")[0]
        query = f'SELECT count(*) FROM "{table}" WHERE {condition}'  # noqa: S608 - constants of a migration
        if rows := reader.one(query)[0]:
            found[what] = rows
    return found


def refuse_loss(lost: dict[str, int]) -> None:
    """Refuse (E3411) to undo a migration where something would be lost."""
    if lost:
        words = ", ".join(f"{rows:,} rows of `{what}`" for what, rows in lost.items())
        flags = " ".join(f"--lose {what}" for what in lost)
        raise Failure("E3411", f"undoing this migration would lose {words}", resolution=f"to lose them, add {flags}")

"""The source of the repository, parsed once in each process, for tests that look at all of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "interlock"

# Parsing all of the package takes seconds, and several tests look at all of it.
parse = cache(ast.parse)


def statements_in(node: ast.AST) -> Iterator[ast.AST]:
    """The statements directly within a node. Expressions, which are most of a module, hold none."""
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        yield from getattr(node, part, ())


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement below a node. Walking all nodes takes ten times as long."""
    for one in statements_in(node):
        yield one
        yield from statements(one)


def nodes_with(*words: str) -> Iterator[tuple[str, ast.AST]]:
    """Every node of the files that contain one of the words, with the file's name. Walking all files takes a second."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if any(word in text for word in words):
            name = path.relative_to(PACKAGE).as_posix()
            for node in ast.walk(parse(text)):
                yield name, node


# Files of the store that are for SQLite: a second database has others in their place.
FOR_SQLITE = {
    "administration.py": "gives pages back to the disk, and deletes what retention removes",
    "backup.py": "copies the file",
    "connection.py": "the driver",
    "copying.py": "writes the rows of a copy into a file",
    "expressions.py": "expressions that databases write in different ways",
    "failures.py": "the driver's errors in words",
    "home.py": "the paths of the file, and what opens it",
    "journal.py": "the queue of the writer, and short reads",
    "journal_connection.py": "sets up the connection of the writer",
    "layout.py": "compares the schema in the file with the one that the migrations make",
    "migration.py": "makes the file, and changes its schema in one transaction",
    "readers.py": "opens connections for reading",
    "tables.py": "the definitions of the tables",
    "transaction.py": "a transaction of the writer",
    "turns.py": "the queue of processes that wait for the lock of the file",
    "vector_cache.py": "a file beside the store",
    "verify_reads.py": "reads files that may be damaged or edited",
    "writer.py": "the writer",
}


def repositories() -> Iterator[Path]:
    for path in sorted((PACKAGE / "store").glob("*.py")):
        if path.name not in FOR_SQLITE:
            yield path

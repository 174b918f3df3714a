"""Only the store speaks SQL: no other file imports a database driver or holds a statement."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import interlock

SOURCE = Path(interlock.__file__).parent

DRIVERS = {"sqlite3", "sqlalchemy", "alembic"}
STATEMENT = re.compile(
    r"\b(SELECT\s.*\bFROM\s|SELECT\s+1\b|INSERT\s+(OR\s+\w+\s+)?INTO\s|UPDATE\s+\w+\s+SET\s|DELETE\s+FROM\s|PRAGMA\s"
    r"|(CREATE|ALTER|DROP)\s+(TABLE|TRIGGER|INDEX|VIEW)\s|BEGIN\s+(IMMEDIATE|EXCLUSIVE|DEFERRED))",
    re.DOTALL,
)

# Files that hold SQL for good.
EXCEPTED = {
    "effects/databases.py": "watches databases of other people for changes",
    "cli/demo.py": "edits the database in the part of an intruder, to show that it is noticed",
}


def outside() -> Iterator[str]:
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith("store/"):
            yield name


def faults(source: str) -> list[str]:
    """The imports of drivers and the statements in a file."""
    tree = ast.parse(source)
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [f"line {node.lineno}: imports {one.name}" for one in node.names if _is_driver(one.name)]
        elif isinstance(node, ast.ImportFrom) and _is_driver(node.module or ""):
            found.append(f"line {node.lineno}: imports from {node.module}")
    texts = ((line, STATEMENT.search(text)) for line, text in _texts(tree))
    return found + [f"line {line}: {match[0]!r}" for line, match in texts if match]


def _is_driver(module: str) -> bool:
    return module.partition(".")[0] in DRIVERS


def _texts(node: ast.AST) -> Iterator[tuple[int, str]]:
    """The texts in a piece of source without docstrings; what a text takes from a variable is left out."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    elif isinstance(node, ast.JoinedStr):
        parts = (str(one.value) if isinstance(one, ast.Constant) else "" for one in node.values)
        yield node.lineno, "".join(parts)
        for one in node.values:
            if isinstance(one, ast.FormattedValue):
                yield from _texts(one)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _texts(child)


def test_no_file_outside_of_the_store_imports_a_driver_or_holds_a_statement() -> None:
    found = {name: faults((SOURCE / name).read_text()) for name in outside() if name not in EXCEPTED}
    wrong = {name: lines for name, lines in found.items() if lines}
    assert wrong == {}, "move these statements to a repository in src/interlock/store"


def test_an_exception_is_needed() -> None:
    assert {name for name in EXCEPTED if not faults((SOURCE / name).read_text())} == set()


def test_imports_and_statements_are_found_and_prose_is_not() -> None:
    wrong = (
        "import sqlite3",
        "def f():\n    from sqlalchemy.orm import Session",
        "rows = read('SELECT a FROM b')",
        "text = f'SELECT {columns} FROM b'",
        "text = f'{read(\"DELETE FROM b\")} rows'",
        "text = ('UPDATE b SET c = ?'\n    ' WHERE d = ?')",
        "run('PRAGMA journal_mode=WAL')",
        "run('INSERT OR IGNORE INTO b (c) VALUES (?)')",
        "run('DELETE FROM b')",
    )
    for source in wrong:
        assert faults(source), source
    right = (
        '"""SELECT a FROM b is a statement."""',
        "def f():\n    'INSERT INTO b'\n",
        "text = 'select a tool from the list'",
        "text = 'UPDATED and DELETED'",
        "import sqlite3_of_somebody",
    )
    for source in right:
        assert faults(source) == [], source

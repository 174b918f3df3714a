"""Only the store speaks SQL, and its repositories speak SQL that a second database understands too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.support.source import FOR_SQLITE, PACKAGE, parse, repositories

DRIVERS = {"sqlite3", "psycopg", "sqlalchemy", "alembic"}
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


# What only SQLite understands, and what it does otherwise than others: time and random values come from the program.
OF_SQLITE_ONLY = re.compile(
    r"\b(?i:rowid|_rowid_|sqlite_\w+)\b|\bINSERT\s+OR\b|\bREPLACE\s+INTO\b|\bLIMIT\s+-1|\bPRAGMA\b|\bGLOB\b|\bMATCH\b"
    r"|\bNOT\s+INDEXED\b|\bINDEXED\s+BY\b|\bAUTOINCREMENT\b|\b(VACUUM|ATTACH|DETACH|REINDEX)\b"
    r"|\b(?i:json_\w+|strftime|datetime|date|julianday|unixepoch|ifnull|iif|instr|hex|unhex|printf|typeof|total|changes"
    r"|group_concat|total_changes|last_insert_rowid|randomblob|zeroblob|quote|glob)\(",
)
# Types of the driver, by which a signature would bind its callers to one database.
TYPES = re.compile(r"\bsqlite3\b|\b(Cursor|Connection|Sqlite\w*)\b")
# The same in the two classes that stand for a store: those of PostgreSQL may name types of their own driver.
OF_SQLITE = re.compile(r"\bsqlite3\b|\bSqlite\w*\b")
# Where errors of the driver are named. Everything else knows `StoreError` and its kinds.
CONVERT_ERRORS = {
    "backup.py": "the copy is written by the driver itself, page by page",
    "connection.py": "converts them",
    "journal.py": "short reads make failures of them at once",
    "journal_connection.py": "applying the log has a connection of its own",
    "migration.py": "those that SQLAlchemy passes on",
    "vector_cache.py": "a file beside the store, whose errors nobody else hears of",
}


def outside() -> Iterator[str]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("store/"):
            yield name


def faults(source: str) -> list[str]:
    """The imports of drivers and the statements in a file."""
    tree = parse(source)
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [f"line {node.lineno}: imports {one.name}" for one in node.names if _is_driver(one.name)]
        elif isinstance(node, ast.ImportFrom) and _is_driver(node.module or ""):
            found.append(f"line {node.lineno}: imports from {node.module}")
    texts = ((line, STATEMENT.search(text)) for line, text in _texts(tree))
    return found + [f"line {line}: {match[0]!r}" for line, match in texts if match]


def peculiarities(source: str) -> list[str]:
    """What in the statements of a file only SQLite understands, and the driver's types in signatures."""
    tree = parse(source)
    texts = ((line, OF_SQLITE_ONLY.search(text)) for line, text in _texts(tree))
    found = [f"line {line}: {match[0]!r}" for line, match in texts if match]
    return found + in_signatures(tree, TYPES)


def in_signatures(tree: ast.Module, types: re.Pattern[str]) -> list[str]:
    """The types that match in the signatures of a file."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            said = [one.annotation for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            words = " ".join(ast.unparse(one) for one in (*said, node.returns) if one is not None)
            found += [f"line {node.lineno}: {match[0]} in a signature" for match in types.finditer(words)]
    return found


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
    found = {name: faults((PACKAGE / name).read_text()) for name in outside() if name not in EXCEPTED}
    wrong = {name: lines for name, lines in found.items() if lines}
    assert wrong == {}, "move these statements to a repository in src/interlock/store"


def test_an_exception_is_needed() -> None:
    assert {name for name in EXCEPTED if not faults((PACKAGE / name).read_text())} == set()


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


def test_repositories_hold_no_statement_that_only_sqlite_understands_and_no_type_of_its_driver() -> None:
    found = {path.name: peculiarities(path.read_text()) for path in repositories()}
    drivers = {path.name: [one for one in faults(path.read_text()) if "imports" in one] for path in repositories()}
    wrong = {name: lines + drivers[name] for name, lines in found.items() if lines or drivers[name]}
    assert wrong == {}, "write it as PostgreSQL understands it too, or put it into store/expressions.py"


def test_a_file_for_sqlite_is_there_and_needs_to_be_excepted() -> None:
    texts = {name: (PACKAGE / "store" / name).read_text() for name in FOR_SQLITE}
    assert {name for name, text in texts.items() if not peculiarities(text) and not faults(text)} == set()


def test_signatures_outside_of_the_store_name_no_type_of_the_driver() -> None:
    wrong = {
        name: found
        for name in outside()
        if name not in EXCEPTED
        and "sqlite3" in (text := (PACKAGE / name).read_text())
        and (found := [one for one in peculiarities(text) if "sqlite3 in a signature" in one])
    }
    assert wrong == {}


def test_what_stands_for_a_store_names_no_type_of_sqlite() -> None:
    """A caller of a data directory must not be bound to one of the two databases, and no cast may say otherwise."""
    store = PACKAGE / "store"
    texts = {path.name: path.read_text() for path in (store / "home.py", *(store / "postgres").glob("*.py"))}
    wrong = {name: found for name, text in texts.items() if (found := in_signatures(parse(text), OF_SQLITE))}
    assert wrong == {}
    assert [path.name for path in store.rglob("*.py") if re.search(r"cast\(\s*\"[\w.]*Sqlite", path.read_text())] == []


def test_errors_of_the_driver_are_converted_in_few_places() -> None:
    store = PACKAGE / "store"
    naming = {path.name for path in store.rglob("*.py") if re.search(r"sqlite3\.\w*Error", path.read_text())}
    assert naming == CONVERT_ERRORS.keys()


def test_the_port_names_no_type_of_a_driver() -> None:
    assert faults((PACKAGE / "store" / "port.py").read_text()) == []


def test_what_only_sqlite_understands_is_found_and_common_sql_is_not() -> None:
    wrong = (
        "run('SELECT a FROM b ORDER BY rowid')",
        "run('INSERT OR REPLACE INTO b (c) VALUES (?)')",
        "run('INSERT  OR  IGNORE INTO b (c) VALUES (?)')",
        "run('REPLACE INTO b VALUES (?)')",
        "run('SELECT a FROM b LIMIT -1')",
        "run(f'SELECT a FROM b WHERE {c} IN (SELECT value FROM json_each(?))')",
        "run(\"SELECT json_extract(a, '$.b') FROM b\")",
        "run('PRAGMA data_version')",
        "run('SELECT name FROM sqlite_master')",
        "run('SELECT a FROM b INDEXED BY c')",
        "run('SELECT a FROM b WHERE c GLOB ?')",
        "run(\"SELECT strftime('%s', a) FROM b\")",
        "run('SELECT ifnull(a, 0) FROM b')",
        "def f(connection: sqlite3.Connection) -> None: ...",
        "def f(x: int, *, y: Connection | None = None) -> None: ...",
        "async def f() -> sqlite3.Cursor: ...",
        "def f(connection: SqliteConnection) -> None: ...",
    )
    for source in wrong:
        assert peculiarities(source), source
    right = (
        "run('SELECT a FROM b WHERE c = ? ORDER BY d LIMIT ?')",
        "run('INSERT INTO b (c) VALUES (?) ON CONFLICT (c) DO UPDATE SET d = excluded.d')",
        "run('SELECT coalesce(max(a), 0) + 1 FROM b')",
        "text = 'the date (of today) and the total (of all)'",
        "def f(reader: Reader, row: TicketRow) -> Changed: ...",
    )
    for source in right:
        assert peculiarities(source) == [], source

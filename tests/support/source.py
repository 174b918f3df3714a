"""The source of the repository, parsed once in each process, for tests that look at all of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

Node = TypeVar("Node", bound=ast.AST)

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


@cache
def _by_kind(tree: ast.Module) -> dict[type[ast.AST], list[ast.AST]]:
    """Every node of a module by its class. `ast.walk` takes twice as long, and several tests look at all modules."""
    found: dict[type[ast.AST], list[ast.AST]] = {}
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        found.setdefault(type(node), []).append(node)
        for field in node._fields:
            value: Any = getattr(node, field, None)
            if isinstance(value, list):
                pending.extend(one for one in cast("list[object]", value) if isinstance(one, ast.AST))
            elif field != "ctx" and isinstance(value, ast.AST):
                pending.append(value)
    return found


def nodes_of(tree: ast.Module, kind: type[Node]) -> list[Node]:
    """The nodes of one class anywhere in a module, in no order."""
    return cast("list[Node]", _by_kind(tree).get(kind, []))


def nodes_with(*words: str) -> Iterator[tuple[str, ast.AST]]:
    """Every node of the files that contain one of the words, with the file's name, in no order."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if any(word in text for word in words):
            name = path.relative_to(PACKAGE).as_posix()
            for nodes in _by_kind(parse(text)).values():
                yield from ((name, node) for node in nodes)


def called(node: ast.Call) -> str:
    """The text of what is called. Of a dotted name it is put together, as `ast.unparse` takes long for many."""
    parts, function = list[str](), node.func
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if not isinstance(function, ast.Name):
        return ast.unparse(node.func)
    return ".".join((function.id, *reversed(parts)))


# Files of the store that are for SQLite: a second database has others in their place.
FOR_SQLITE = {
    "administration.py": "gives pages back to the disk, and deletes what retention removes",
    "backup.py": "copies the file",
    "connection.py": "the driver",
    "copying.py": "writes the rows of a copy into a file",
    "expressions.py": "expressions that databases write in different ways",
    "home.py": "the paths of the file, and what opens it",
    "journal.py": "the connection for short reads",
    "journal_connection.py": "sets up the connection of the writer",
    "layout.py": "compares the schema in the file with the one that the migrations make",
    "migration.py": "makes the file, and changes its schema in one transaction",
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

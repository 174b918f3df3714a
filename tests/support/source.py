"""The source of the repository, parsed once in each process, for tests that look at all of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "interlock"

# Parsing all of the package takes seconds, and several tests look at all of it.
parse = cache(ast.parse)


def nodes_with(*words: str) -> Iterator[tuple[str, ast.AST]]:
    """Every node of the files that contain one of the words, with the file's name. Walking all files takes a second."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if any(word in text for word in words):
            name = path.relative_to(PACKAGE).as_posix()
            for node in ast.walk(parse(text)):
                yield name, node

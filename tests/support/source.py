"""The source of the package, for tests that look at all of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import interlock

PACKAGE = Path(interlock.__file__).parent


def nodes_with(*words: str) -> Iterator[tuple[str, ast.AST]]:
    """Every node of the files that contain one of the words, with the file's name. Parsing all files takes seconds."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if any(word in text for word in words):
            for node in ast.walk(ast.parse(text)):
                yield path.relative_to(PACKAGE).as_posix(), node

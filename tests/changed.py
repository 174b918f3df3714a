"""Which test files a change can touch: `./dev test --changed`.

A test file is touched when it, or a module that it imports directly or through others, was changed since the merge base
with main. Modules that are imported by name (`import_module("interlock.settings")`, a table of commands) count as
imported. A file whose readers are unknown touches every test.
"""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.source import parse
from tests.thorough import no_collection

ROOT = Path(__file__).parents[1]
PLACES = ("src/interlock", "tests", "docs")
# Every test has these fixtures and settings. What they import of Interlock is not followed: a test that uses it
# imports it too.
SHARED = "tests/conftest.py"
# It looks names up in other modules when they are first used. A module that imports such a name imports that module.
FRONT = "src/interlock/__init__.py"


def changed_files() -> set[str] | None:
    """The files that differ from the merge base with main, also those not committed; None where there is no main."""
    for main in ("main", "origin/main"):
        base = _git("merge-base", main, "HEAD")
        if base is not None:
            differing, new = _git("diff", "--name-only", base.strip()), _git("ls-files", "-o", "--exclude-standard")
            return None if differing is None or new is None else {*differing.splitlines(), *new.splitlines()}
    return None


def _git(*words: str) -> str | None:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def touched(changed: Iterable[str]) -> set[str] | None:
    """The test files that a change of these files can touch; None for all of them."""
    modules = read_modules()
    found: set[str] = set()
    shared = modules.of_tests_only(SHARED)
    for file in changed:
        if file in shared:
            return None
        if file.startswith("tests/") and file not in modules.names:
            place = (ROOT / file).parent
            while not list(place.glob("test_*.py")):
                place = place.parent
            found |= {one for one in modules.tests if one.startswith(f"{place.relative_to(ROOT)}/")}
        elif file.endswith(".md"):
            found |= {one for one in modules.tests if one.startswith("tests/docs/")}
            found |= {one for one in modules.tests if Path(file).name in (ROOT / one).read_text()}
        elif file in modules.names:
            found |= modules.importers(file)
        else:
            return None
    return found


class Modules:
    """The modules of the repository and what each of them imports, read from their source."""

    def __init__(self) -> None:
        paths = sorted(path for place in PLACES for path in (ROOT / place).rglob("*.py"))
        self.names = {path.relative_to(ROOT).as_posix(): _name(path) for path in paths}
        self._files = {name: file for file, name in self.names.items()}
        self.tests = [file for file in self.names if Path(file).name.startswith("test_")]
        self._homes = _homes((ROOT / FRONT).read_text())
        self._imports = {file: set(self._imported(file)) for file in self.names}

    def reached(self, file: str) -> set[str]:
        """The file and every file that it imports, directly or through others."""
        found, waiting = {file}, [file]
        while waiting:
            new = self._imports[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    def importers(self, file: str) -> set[str]:
        """The test files that reach a file. One that was removed has none but those that change with it."""
        return {test for test in self.tests if file in self.reached(test)}

    def of_tests_only(self, file: str) -> set[str]:
        """The file and what it imports of the tests."""
        return {file, *(one for one in self._imports[file] if one.startswith("tests/"))}

    def _imported(self, file: str) -> Iterator[str]:
        own = self.names[file]
        yield from self._known(own)
        package = own if file.endswith("__init__.py") else own.rpartition(".")[0]
        for node in _run(parse((ROOT / file).read_text())):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self._known(alias.name)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    home = self._homes.get(alias.name) if node.module == "interlock" else None
                    yield from self._known(home or f"{node.module}.{alias.name}")
            elif file == FRONT:
                continue
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                first = node.value.partition(":")[0]
                yield from self._known(first if first in self._files else f"{package}.{first}", whole=True)
            elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
                start = str(node.values[0].value)
                if start.startswith("interlock."):
                    yield from (one for name, one in self._files.items() if name.startswith(start))
        if file != SHARED:  # the fixtures of the directory, and of those around it
            for place in list((ROOT / file).parents)[: len(Path(file).parts) - 2]:
                name = (place / "conftest.py").relative_to(ROOT).as_posix()
                if name in self.names and name != file and file.startswith("tests/"):
                    yield name

    def _known(self, name: str, *, whole: bool = False) -> Iterator[str]:
        """The file of a module and of the packages around it; a name inside of a module stands for the module."""
        if whole and name not in self._files:
            return
        while name:
            if name in self._files:
                yield self._files[name]
            name = name.rpartition(".")[0]


@functools.cache
def read_modules() -> Modules:
    """The modules of the repository as they stand, read once."""
    with no_collection():
        return Modules()


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module, without what only type checkers read."""
    waiting = [node]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
                continue
            yield child
            if not isinstance(child, ast.Name | ast.Constant):  # these hold no nodes, and are most of a module
                waiting.append(child)


def _homes(source: str) -> dict[str, str]:
    """The table of names and modules in the front module."""
    (table,) = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES"
    )
    homes: dict[str, str] = ast.literal_eval(table)
    return homes


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    inside = parts[1:] if parts[0] == "src" else parts
    return ".".join(inside[:-1] if inside[-1] == "__init__" else inside)

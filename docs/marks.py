"""The marks of the tests, read from their source: the clauses of the ledger and the features that each test names.

Nothing is imported for it. To collect the tests would take many times as long, and would need what they need.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OF_CLAUSES = ("proves", "supports", "part_of")
MARKS = (*OF_CLAUSES, "shows")
# A mark of the whole module, and of each test of a Hypothesis state machine, is listed under the module.
WHOLE_MODULE = ""
SHARED = Path(__file__).parents[1] / "tests" / "support"
SHARED_NAME = "tests.support"


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark on a test: what it names, the test, and what is left of a clause if it says so.

    `kind` is the mark's name. A test marked `supports` asserts a part of a clause whose other parts are asserted by
    tests marked `proves`; a test marked `part_of` leaves a rest that no test asserts. A test marked `shows` names a
    kind of upstream, and the features that it shows with it.
    """

    kind: str
    names: tuple[str, ...]
    rest: str | None
    test: str


def marks_of(tests: Path, *kinds: str) -> Iterator[tuple[str, Mark]]:
    """The marks of these kinds on all tests in a directory, each with the file of its test."""
    for path in sorted(tests.rglob("*.py")):
        file = path.relative_to(tests.parent).as_posix()
        yield from ((file, mark) for mark in _of_source(path.read_text()) if mark.kind in kinds)


@functools.cache
def _of_source(source: str) -> tuple[Mark, ...]:
    """The marks of one test module, read once: there are hundreds of them, and several pages and tests ask."""
    if not any(f"mark.{kind}" in source for kind in MARKS) and not any(module in source for module in _with_marks()):
        return ()
    return tuple(marks_in(source))


@functools.cache
def _with_marks() -> tuple[str, ...]:
    """The modules of `tests/support` that keep marks under names, which test modules import."""
    found = (path for path in SHARED.glob("*.py") if any(f"pytest.mark.{kind}(" in path.read_text() for kind in MARKS))
    return tuple(f"{SHARED_NAME}.{path.stem}" for path in found)


def marks_in(source: str) -> Iterator[Mark]:
    """The marks of one test module: on a test, on all tests of the module, or kept under a name and used there.

    A name can also be imported from a module of `tests/support`.
    """
    tree = ast.parse(source)
    kept, texts = _names(tree)
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(f"{SHARED_NAME}."):
            shared_kept, shared_texts = _shared((statement.module or "").removeprefix(f"{SHARED_NAME}."))
            for one in statement.names:
                if one.name in shared_kept:
                    kept[one.asname or one.name] = shared_kept[one.name]
                if one.name in shared_texts:
                    texts[one.asname or one.name] = shared_texts[one.name]
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for decorated in _statements(statement):
                if isinstance(decorated, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    for decorator in decorated.decorator_list:
                        yield from _marks(decorator, decorated.name, kept, texts)
        elif isinstance(statement, ast.Assign):
            name = ast.unparse(statement.targets[0])
            if name == "pytestmark":
                yield from _marks(statement.value, WHOLE_MODULE, kept, texts)
            elif isinstance(statement.value, ast.Call):
                # TestMachine = pytest.mark.proves("ID")(Machine.TestCase), or a mark that is bound to a test by hand
                yield from _marks(statement.value.func, name, kept, texts)


def _statements(first: ast.stmt) -> Iterator[ast.AST]:
    """A statement and those below it. Expressions, of which a walk over everything consists, hold none."""
    found: list[ast.AST] = [first]
    for one in found:
        yield one
        for part in ("body", "handlers", "orelse", "finalbody", "cases"):
            found += getattr(one, part, ())


def _marks(node: ast.expr, test: str, kept: dict[str, ast.expr], texts: dict[str, str]) -> Iterator[Mark]:
    """The marks in one decorator, `pytestmark` or parameter list; a name stands for what it was assigned."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in kept and isinstance(kept[part.id], ast.Call | ast.List):
            yield from _marks(kept[part.id], test, {name: kept[name] for name in kept if name != part.id}, texts)
        if not isinstance(part, ast.Call):
            continue
        kind = ast.unparse(part.func).removeprefix("pytest.mark.")
        if kind not in MARKS or not isinstance(part.func, ast.Attribute):
            continue
        names = tuple(text for argument in part.args if (text := _text(argument, texts)) is not None)
        rest = next((_text(keyword.value, texts) for keyword in part.keywords if keyword.arg == "rest"), None)
        yield Mark(kind, names[:1] if kind == "part_of" else names, rest, test)


@functools.cache
def _shared(module: str) -> tuple[dict[str, ast.expr], dict[str, str]]:
    """The values of the names in a module of `tests/support`. A package keeps none."""
    file = SHARED / f"{module.replace('.', '/')}.py"
    return _names(ast.parse(file.read_text())) if file.is_file() else ({}, {})


def _names(tree: ast.Module) -> tuple[dict[str, ast.expr], dict[str, str]]:
    """The names that a module assigns at its level, with their values, and those that are texts."""
    kept = {
        target.id: statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    return kept, dict(_texts(tree))


def _texts(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            for target in statement.targets:
                if isinstance(target, ast.Name) and isinstance(statement.value.value, str):
                    yield target.id, statement.value.value


def _text(node: ast.expr, texts: dict[str, str]) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return texts.get(node.id) if isinstance(node, ast.Name) else None

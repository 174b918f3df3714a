"""Measures the source: sizes, fan-out, import cycles, large classes. `python -m tests.house` prints the table.

The measures are those of a code review, so that a change shows in numbers: lines of source and tests, sizes of files
and functions, modules that import each other in a circle, the module that imports most of our own, classes with many
methods, and mutable state at the level of a module. `test_house.py` holds the limits.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.source import parse

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "interlock"
PACKAGE = "interlock"
GENERATED = ("_pb2.py", "_pb2_grpc.py")
MOST_METHODS = 15
# Says beside a class why it has more methods than others.
REASON = "# many methods:"
# Says beside a list or dictionary at the level of a module why it is there.
STATE_REASON = "# module state:"


@dataclass(frozen=True, slots=True)
class Module:
    """One module of the source, parsed."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.text.count("\n")


@cache
def modules() -> dict[str, Module]:
    """All modules of the source by their dotted names, without generated ones."""
    found: dict[str, Module] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if path.name.endswith(GENERATED):
            continue
        parts = (PACKAGE, *path.relative_to(SOURCE).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        found[name] = Module(name, path, text, parse(text))
    return found


def packages() -> set[str]:
    """The packages and modules that stand directly in ours."""
    return {".".join(name.split(".")[:2]) for name in modules() if "." in name}


def imports(module: Module, *, lazily: bool, typed: bool = False) -> set[str]:
    """The modules of ours that a module imports.

    `lazily` adds imports inside functions, which happen when the function is called; `typed` adds those that only the
    type checker sees.
    """
    return {one for one in _imported(module.tree, lazily, typed) if one != module.name and one in modules()}


def _imported(tree: ast.AST, lazily: bool, typed: bool) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not typed:
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not lazily:
            continue
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for one in node.names:
                full = f"{node.module}.{one.name}"
                yield full if full in modules() else node.module
        yield from _imported(node, lazily, typed)


def cycles(*, typed: bool = False) -> list[list[str]]:
    """Groups of modules that import each other in a circle, also by imports inside functions (Tarjan's algorithm).

    `typed` adds the circles that only the type checker sees.
    """
    graph = {name: sorted(imports(one, lazily=True, typed=typed)) for name, one in modules().items()}
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            at = stack.index(name)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in order:
            visit(name)
    return found


def fan_out() -> dict[str, int]:
    """Return how many of our modules each module imports, the largest number first.

    `core.record` does not count: it stands for the `dataclasses` of the standard library.
    """
    counted = {name: len(imports(one, lazily=True) - {f"{PACKAGE}.core.record"}) for name, one in modules().items()}
    return dict(sorted(counted.items(), key=lambda one: -one[1]))


def functions() -> list[int]:
    """The lengths of all functions, in lines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for module in modules().values()
        for node in ast.walk(module.tree)
        if isinstance(node, kinds)
    ]


def large_classes() -> dict[str, int]:
    """Classes with more methods than `MOST_METHODS` and no reason beside them."""
    found: dict[str, int] = {}
    for module in modules().values():
        lines = module.text.split("\n")
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ClassDef):
                continue
            methods = sum(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body)
            around = lines[max(node.lineno - 2, 0) : node.body[0].lineno]
            if methods > MOST_METHODS and not any(REASON in line for line in around):
                found[f"{module.name}.{node.name}"] = methods
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def mutable_state() -> list[str]:
    """Lists, dictionaries and sets at the level of a module that are neither named as constants nor explained."""
    kinds = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    found: list[str] = []
    for module in modules().values():
        lines = module.text.split("\n")
        for node in module.tree.body:
            if isinstance(node, ast.Assign):
                targets, value = node.targets, node.value
            elif isinstance(node, ast.AnnAssign):
                targets, value = [node.target], node.value
            else:
                continue
            if not isinstance(value, kinds) or STATE_REASON in lines[node.lineno - 2]:
                continue
            names = [one.id for one in targets if isinstance(one, ast.Name)]
            found += [f"{module.name}.{name}" for name in names if not name.isupper() and not name.startswith("__")]
    return found


def synchronous_reads(module: Module) -> int:
    """How often a module uses the store's synchronous reader, `journal.reader`, or an attribute that it keeps it in."""
    names = [node.attr for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)]
    return names.count("reader") + names.count("_reader") if "reader" in names else 0


def sentences_with(words: Iterable[str]) -> list[str]:
    """The lines of the source and the documentation that have one of these words, each with its place."""
    odd = re.compile(rf"\b(?:{'|'.join(map(re.escape, words))})\b", re.IGNORECASE)
    files = [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.cedar"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    return [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in sorted(files)
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if odd.search(line)
    ]


def table() -> list[tuple[str, str, str]]:
    """The table: what is measured, what it was before the source was put in order, and what it is now."""
    sizes = [one.lines for one in modules().values() if one.lines > 1]
    lengths = sorted(functions())
    tests = sum(path.read_text().count("\n") for path in (ROOT / "tests").rglob("*.py"))
    widest = next(iter(fan_out().items()))
    p95 = lengths[int(len(lengths) * 0.95)]
    return [
        ("files / lines of source", "315 / 61,021", f"{len(modules())} / {sum(sizes):,}"),
        ("lines of tests", "59,633", f"{tests:,}"),
        ("file median / max", "160 / 706", f"{statistics.median(sizes):.0f} / {max(sizes)}"),
        ("function median / p95 / max", "7 / 26 / 134", f"{statistics.median(lengths):.0f} / {p95} / {lengths[-1]}"),
        ("import cycles", "2", f"{len(cycles())}"),
        ("import cycles that only the type checker sees", "-", f"{len(cycles(typed=True))}"),
        (f"classes over {MOST_METHODS} methods, without a reason", "-", f"{len(large_classes())}"),
        ("widest fan-out of one module", "42", f"{widest[1]} ({widest[0]})"),
        ("module-level mutable state, without a reason", "27", f"{len(mutable_state())}"),
    ]


if __name__ == "__main__":
    for row in [("", "before", "now"), *table()]:
        print(f"{row[0]:<48}{row[1]:>16}{row[2]:>44}")

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

from tests.support.source import nodes_of, parse, statements, statements_in

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "interlock"
PACKAGE = "interlock"
GENERATED = ("_pb2.py", "_pb2_grpc.py")
MOST_METHODS = 15
# An import from `tests`, or from a package around a module; and the names of modules that pytest loads by itself.
IMPORT_OF_TESTS = re.compile(
    r"^[ \t]*(?:from[ \t]+(?:tests|\.)[\w.]*[ \t]+import[ \t]+(?:\([^)]*\)|[^\n]*)|import[ \t]+tests[^\n]*)",
    re.MULTILINE,
)
OF_TESTS = re.compile(r"\b(?:test_\w+|conftest)\b")
# The first name below `tests` in an import.
BELOW_TESTS = re.compile(r"\btests(?:\.| import )(\w+)")
# Says beside a class why it has more methods than others.
REASON = "# many methods:"
# Says beside a list or dictionary at the level of a module why it is there.
STATE_REASON = "# module state:"
# The codebases that this one is compared with. Their columns were measured once.
PEERS = ("h11", "Starlette", "stamina", "procrastinate", "docket", "MCP SDK v2")
# Words with a meaning of their own here, which readers had to decode. The glossary has better ones.
RIDDLES = frozenset(
    {
        "straight", "thin", "hot", "desk", "elsewhere", "promises", "told", "said", "whoever", "whatever", "wherever",
        "whichever", "mend", "unsaid", "thereof", "therein", "hereby", "wherein", "whence", "thence", "hence",
    }
)  # fmt: skip
# Packages and modules whose docstrings people read: help of commands, the API of the library and that over REST.
PUBLIC = (
    "cli", "api.interlock", "api.client", "api.upstreams", "call.context", "call.results", "call.connector",
    "contract.declare", "contract.manifest", "doors.rest.models", "doors.rest.routes", "gateway.hooks", "integrations",
    "pytest_plugin", "settings", "testing",
)  # fmt: skip
MODULES = "(modules)"
# Lines of each package in the commit before the work on upstream recipes, search and PostgreSQL began (a3ba78fd~1).
BEFORE = {
    "(modules)": 1152, "api": 5050, "approvals": 2011, "audit": 1898, "authority": 6510, "call": 2650, "cli": 8972,
    "contract": 4759, "core": 1309, "data": 2450, "doors": 8554, "effects": 1580, "executors": 6769, "gateway": 8392,
    "http": 1306, "net": 989, "privacy": 1244, "registry": 2662, "resilience": 1201, "store": 8060, "telemetry": 1431,
    "upstreams": 10288,
}  # fmt: skip


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
    return set(_imports_of(module.name, lazily, typed))


@cache
def _imports_of(name: str, lazily: bool, typed: bool) -> frozenset[str]:
    found = _imported(modules()[name].tree, lazily, typed)
    return frozenset(one for one in found if one != name and one in modules())


def _is_for_types(test: ast.expr) -> bool:
    """Whether it is the condition `TYPE_CHECKING`."""
    name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
    return name == "TYPE_CHECKING"


def _imported(tree: ast.AST, lazily: bool, typed: bool) -> Iterator[str]:
    for node in statements_in(tree):
        if isinstance(node, ast.If) and not typed and _is_for_types(node.test):
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


def is_within(name: str, package: str) -> bool:
    """Whether a module is a package or one of its modules."""
    return name == package or name.startswith(f"{package}.")


def reached_from(names: Iterable[str]) -> set[str]:
    """The modules that some modules import, and all that these import in turn."""
    reached: set[str] = set()
    pending = list(names)
    while pending:
        new = imports(modules()[pending.pop()], lazily=True) - reached
        reached |= new
        pending += new
    return reached


def comparisons_with(attribute: str, names: Iterable[str]) -> list[str]:
    """The comparisons of an attribute, or of a variable or key of its name, with one of some names."""
    names = frozenset(names)
    found: list[str] = []
    for module in modules().values():
        for node in nodes_of(module.tree, ast.Compare):
            sides = (node.left, *node.comparators)
            constants = {part.value for side in sides for part in ast.walk(side) if isinstance(part, ast.Constant)}
            if constants & names and any(_is_named(side, attribute) for side in sides):
                found.append(f"{module.name}:{node.lineno}")
    return found


def _is_named(node: ast.expr, name: str) -> bool:
    """Whether an expression is a variable, attribute or key with a name: `door`, `x.door`, `x["door"]`."""
    text = ast.unparse(node).replace(".get('", "['").replace("')", "']").replace("['", ".").replace("']", "")
    return text == name or text.endswith(f".{name}")


# Rights are checked in `api`. These others check them too.
CHECKS_RIGHTS = {
    "authority.tokens": "a program issues and revokes tokens at this part without the operations of `api`",
    "gateway.reconcile": "a program settles calls at this part without the operations of `api`",
    "registry.quarantine": "only a person lifts a quarantine, whichever way the request came",
    "telemetry.trace": "spans of a call are filtered where they are stored",
    "upstreams.manager": "a program adds upstreams at this part without the operations of `api`",
    "cli.audit": "asks a server only for what it will answer",
    "cli.budgets": "asks a server only for what it will answer",
    "cli.call_details": "asks a server only for what it will answer",
}


def checks_of_rights() -> set[str]:
    """The modules in which a scope of ours is required of a caller, or looked for."""
    checking = [name for name, one in modules().items() if any(map(_is_check, ast.walk(one.tree)))]
    return {name.removeprefix(f"{PACKAGE}.") for name in checking}


def _is_check(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return called in ("require", "require_here", "governs")
    if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ast.In | ast.NotIn):
        return False
    left = node.left
    named = left.id.isupper() if isinstance(left, ast.Name) else ":" in str(getattr(left, "value", ""))
    return named and ast.unparse(node.comparators[0]).endswith(("scopes", "scopes()"))


def fan_out(*, typed: bool = False) -> dict[str, int]:
    """Return how many of our modules each module imports, the largest number first.

    `typed` adds imports that only the type checker sees.
    """
    counted = {name: len(imports(one, lazily=True, typed=typed)) for name, one in modules().items()}
    return dict(sorted(counted.items(), key=lambda one: -one[1]))


def functions() -> list[int]:
    """The lengths of all functions, in lines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for module in modules().values()
        for node in statements(module.tree)
        if isinstance(node, kinds)
    ]


def large_classes() -> dict[str, int]:
    """Classes with more methods than `MOST_METHODS` and no reason beside them."""
    found: dict[str, int] = {}
    for module in modules().values():
        lines = module.text.split("\n")
        for node in statements(module.tree):
            if not isinstance(node, ast.ClassDef):
                continue
            methods = sum(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body)
            around = lines[max(node.lineno - 2, 0) : node.body[0].lineno]
            if methods > MOST_METHODS and not any(REASON in line for line in around):
                found[f"{module.name}.{node.name}"] = methods
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def shared_names() -> dict[str, list[str]]:
    """The names that several classes have, each with the modules that define one."""
    found: dict[str, list[str]] = {}
    for module in modules().values():
        for node in statements(module.tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module.name)
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def mutable_state(*, explained: bool = False) -> list[str]:
    """Lists, dictionaries and sets at the level of a module that are not named as constants.

    Those with a reason beside them are left out, unless `explained`.
    """
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
            if not isinstance(value, kinds) or (STATE_REASON in lines[node.lineno - 2] and not explained):
                continue
            names = [one.id for one in targets if isinstance(one, ast.Name)]
            found += [f"{module.name}.{name}" for name in names if not name.isupper() and not name.startswith("__")]
    return found


def synchronous_reads(module: Module) -> int:
    """How often a module uses the store's synchronous reader, `journal.reader`, or an attribute that it keeps it in."""
    names = [node.attr for node in nodes_of(module.tree, ast.Attribute)]
    return names.count("reader") + names.count("_reader") if "reader" in names else 0


def imports_of_tests() -> list[str]:
    """Imports of a `test_*.py` or `conftest.py` by other modules, and of what another directory has; with their places.

    What several directories use is in `tests/support` or directly in `tests`. The imports are looked for in the text:
    to parse all tests takes seconds, and some are in programs that a test starts. Such a program may import the module
    of its own test.
    """
    found: list[str] = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text, own = path.read_text(), ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for one in IMPORT_OF_TESTS.finditer(text):
            said = " ".join(one[0].split())
            of_a_test = OF_TESTS.search(said) and not re.search(rf" {re.escape(own)}\b", said.replace(" import ", "."))
            if of_a_test or _is_of_another_directory(said, own.split(".")[1]):
                found.append(f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, one.start()) + 1}: {said}")
    return found


def _is_of_another_directory(imported: str, directory: str) -> bool:
    """Whether a module of the tests imports one that is for the tests of another directory."""
    first = BELOW_TESTS.search(imported)
    return first is not None and first[1] not in ("support", directory) and (ROOT / "tests" / first[1]).is_dir()


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


def names() -> Iterator[tuple[str, str]]:
    """The names of functions, classes, parameters, attributes and module variables, each with its module and line."""
    for module in modules().values():
        for name, line in _names(module.tree):
            yield name, f"{module.name}:{line}: {name}"


def constants() -> Iterator[tuple[str, str]]:
    """The names of constants of modules and classes, each with its module."""
    for module in modules().values():
        for node in nodes_of(module.tree, ast.Name):
            if isinstance(node.ctx, ast.Store) and node.id.isupper():
                yield node.id, f"{module.name}:{node.lineno}: {node.id}"


def _names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names of local variables do not count: a few lines explain them."""
    yield from ((node.arg, node.lineno) for node in nodes_of(tree, ast.arg))
    attributes = nodes_of(tree, ast.Attribute)
    yield from ((node.attr, node.lineno) for node in attributes if isinstance(node.ctx, ast.Store))
    for node in (tree, *statements(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        if isinstance(node, ast.Module | ast.ClassDef):
            for one in node.body:
                targets = one.targets if isinstance(one, ast.Assign) else []
                targets = [one.target] if isinstance(one, ast.AnnAssign) else targets
                yield from ((target.id, one.lineno) for target in targets if isinstance(target, ast.Name))


def texts_with(words: Iterable[str]) -> list[str]:
    """The texts for people that have one of these words as a word, and not as part of a name: `--home`, `"home"`.

    These are strings with a space in them, and the docstrings of what is public.
    """
    odd = re.compile(
        rf"(?<![-\w./`'\"])(?:{'|'.join(map(re.escape, words))})(?! directory)(?![-\w/`'\"(=]|\.\w)", re.IGNORECASE
    )
    return [
        f"{module.path.relative_to(ROOT)}:{node.lineno}: {node.value.strip()}"
        for module in modules().values()
        for node in _texts(module)
        if isinstance(node.value, str) and " " in node.value.strip() and odd.search(node.value)
    ]


def labels_with(words: Iterable[str]) -> list[str]:
    """The labels of rows and columns that commands print and that are one of these words, each with its place.

    A label is the first member of a tuple, or any member of one that has only texts and more than two of them.
    """
    words = frozenset(words)
    found: list[str] = []
    for module in modules().values():
        if not is_within(module.name, f"{PACKAGE}.cli"):
            continue
        for node in nodes_of(module.tree, ast.Tuple):
            texts = [one.value if isinstance(one, ast.Constant) else None for one in node.elts]
            labels = texts if len(texts) > 2 and all(isinstance(one, str) for one in texts) else texts[:1]
            found += [f"{module.name}:{node.lineno}: {one}" for one in labels if one in words]
    return found


def _texts(module: Module) -> Iterator[ast.Constant]:
    """The constants of a module, with docstrings only where people read them: as help, as reference, in an editor."""
    docstrings = {id(node) for _, node in docstrings_of(module)}
    helps = any(is_within(module.name, f"{PACKAGE}.{one}") for one in PUBLIC)
    for node in nodes_of(module.tree, ast.Constant):
        if helps or id(node) not in docstrings:
            yield node


def docstrings_of(module: Module) -> Iterator[tuple[str, ast.Constant]]:
    """The docstrings of a module, its classes and functions."""
    for node in (module.tree, *statements(module.tree)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            yield first.value.value, first.value


def docstrings_that_begin_with(words: Iterable[str]) -> list[str]:
    """The docstrings of the source whose first word is one of these, each with its place."""
    begins = re.compile(rf"\s*(?:{'|'.join(map(re.escape, words))})\b")
    return [
        f"{module.path.relative_to(ROOT)}:{node.lineno}: {text.strip().splitlines()[0]}"
        for module in modules().values()
        for text, node in docstrings_of(module)
        if begins.match(text)
    ]


def classes_over(most: int) -> int:
    """The number of classes with more methods, whether they have a reason or not."""
    classes = [node for one in modules().values() for node in statements(one.tree) if isinstance(node, ast.ClassDef)]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return sum(sum(isinstance(one, kinds) for one in node.body) > most for node in classes)


def odd_words_per_thousand() -> float:
    """How often the pages use a word that a reader has to decode (`RIDDLES`), for each 1,000 of their words."""
    texts = [path.read_text() for path in (ROOT / "docs").rglob("*.md") if "reference" not in path.parts]
    words = [
        word.lower()
        for text in texts
        for word in re.findall(r"[A-Za-z]+", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    ]
    return 1000 * sum(word in RIDDLES for word in words) / len(words)


def package_sizes() -> dict[str, int]:
    """The lines of source of each package."""
    found: dict[str, int] = {}
    for one in modules().values():
        parts = one.path.relative_to(SOURCE).parts
        name = parts[0] if len(parts) > 1 else MODULES
        found[name] = found.get(name, 0) + one.lines
    return found


def _about(lines: int, to: int = 1000) -> str:
    """A number of lines, rounded, so that the page changes only where the source does."""
    return f"{round(lines / to) * to:,}"


def table() -> list[tuple[str, ...]]:
    """The table: what is measured, what it was before the source was put in order, what it is now, and of others.

    The others are the columns of `PEERS`, read once.
    """
    sizes = [one.lines for one in modules().values() if one.lines > 1]
    lengths = sorted(functions())
    tests = sum(path.read_text().count("\n") for path in (ROOT / "tests").rglob("*.py"))
    widest, widest_typed = (next(iter(fan_out(typed=typed).values())) for typed in (False, True))
    p95 = lengths[int(len(lengths) * 0.95)]
    median = f"{statistics.median(lengths):.0f} / {p95} / {lengths[-1]}"
    none = ("-",) * len(PEERS)
    return [
        ("files / lines of source", "315 / 61,021", f"{round(len(modules()), -1)} / {_about(sum(sizes))}",
         "11 / 2,568", "34 / 6,712", "10 / 1,512", "117 / 9,772", "37 / 11,961", "122 / 27,188"),
        ("lines of tests", "59,633", _about(tests), *none),
        ("file median / max", "160 / 706", f"{round(statistics.median(sizes), -1):.0f} / {max(sizes)}",
         "153 / 659", "142 / 876", "54 / 913", "17 / 1,042", "215 / 1,388", "117 / 1,507"),
        ("function median / p95 / max", "7 / 26 / 134", median,
         "7 / 49 / 64", "5 / 39 / 149", "8.5 / 43 / 184", "8 / 45 / 126", "9 / 72 / 239", "11 / 63 / 206"),
        ("import cycles, with imports inside functions", "2 small", f"{len(cycles())}", "0", "0", "0", "2", "0", "3"),
        ("circles of types, for the type checker alone", "-", f"{len(cycles(typed=True))}", *none),
        ("classes over 12 methods", "43", f"{classes_over(12)}", "1", "8", "0", "11", "8", "13"),
        (f"classes over {MOST_METHODS} methods, without a reason", "-", f"{len(large_classes())}", *none),
        ("widest fan-out of one module, imports made at run time", "42", f"{widest}", "7", "11", "5", "9", "13", "26"),
        ("widest fan-out with imports for types alone", "-", f"{widest_typed}", *none),
        ("names of classes defined more than once", "75", f"{len(shared_names())}", *none),
        ("module-level mutable state", "27", f"{len(mutable_state(explained=True))}", "0", "1", "1", "2", "5", "6"),
        ("of these, without a reason", "-", f"{len(mutable_state())}", *none),
        ("words to decode per 1,000 words of docs", "-", f"{odd_words_per_thousand():.1f}", *none),
    ]  # fmt: skip


def growth() -> list[tuple[str, str, str]]:
    """Lines of each package before upstream recipes, search and PostgreSQL were built, and now."""
    now = package_sizes()
    rows = [(name, BEFORE.get(name, 0), now.get(name, 0)) for name in sorted({*BEFORE, *now})]
    rows.append(("all", sum(BEFORE.values()), sum(now.values())))
    return [(name, _about(before, 500), _about(after, 500)) for name, before, after in rows]


HEAD = ("", "before", "now", *PEERS)
GROWTH_HEAD = ("package", "before recipes, search and PostgreSQL", "now")

if __name__ == "__main__":
    for row in [HEAD, *table()]:
        print(f"{row[0]:<52}" + "".join(f"{cell:>16}" for cell in row[1:]))
    print()
    for row in [GROWTH_HEAD, *growth()]:
        print(f"{row[0]:<20}{row[1]:>40}{row[2]:>12}")

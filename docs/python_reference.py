"""The page of Python names: every name of `interlock.__all__`, of `interlock.integrations` and of the fixtures for
pytest, with its signature, its docstring and an example.

Signatures are taken from the source, so that they read as they were written. Examples are in `python_examples.txt`: a
section `== NAME` each, with what it prints after `-- prints`. The tests play the page from top to bottom, as they play
every page, so later examples use what earlier ones defined.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import interlock
from interlock.api.parts import Parts

EXAMPLES = Path(__file__).parent / "python_examples.txt"
WIDE = 100

# Every public name, by what a program wants to do; the order of the examples.
GROUPS: dict[str, tuple[str, ...]] = {
    "Declare tools": ("tool", "Tool", "Field", "Effect", "Preview", "Change"),
    "Call tools": ("Interlock", "Client", "Result", "Failure", "ErrorCode", "ErrorClass"),
    "Admission": ("Example", "Admission"),
    "Inside a tool": ("Context", "Checkpoint", "Deadline", "Caller"),
    "Many calls": ("Request", "BatchPolicy", "Event"),
    "Hooks": ("Hook", "HookResult", "Seen"),
    "More facts about a tool": ("Precondition", "Approval", "ApprovalStep", "Sandboxing", "Artifact"),
    "Around": ("Clock", "__version__"),
}
# Names of other modules, by their full names.
OTHERS: dict[str, tuple[str, ...]] = {
    "Agent frameworks": ("interlock.integrations.Toolkit", "interlock.integrations.adopt"),
    "Fixtures for pytest": (
        "interlock.pytest_plugin.interlock_app",
        "interlock.pytest_plugin.interlock_client",
        "interlock.testing.app",
        "interlock.testing.FakeClock",
    ),
}
# Made by Interlock and never by a program, so that the parameters of their constructors are of no use.
_GIVEN = {"Interlock", "Context", "Tool"}
# Members that stand in a class below it.
_INHERITED: dict[str, tuple[type, tuple[str, ...]]] = {"Interlock": (Parts, ("listen", "close"))}
_WORDS = {
    "Field": "Describe a parameter, in `Annotated[type, Field(…)]`: `description` and `examples`, which every parameter"
    " needs, and bounds such as `ge`, `le`, `min_length` and `pattern`. It is pydantic's own, for convenience.",
    "__version__": "`interlock.__version__`: the version of Interlock that is installed.",
}


@dataclass(frozen=True, slots=True)
class Example:
    """The code of an example, and what it prints, if anything."""

    code: str
    prints: str


@cache
def examples() -> dict[str, Example]:
    """The examples by name."""
    found: dict[str, Example] = {}
    for section in re.split(r"^== ", EXAMPLES.read_text(), flags=re.MULTILINE)[1:]:
        name, _, body = section.partition("\n")
        code, _, prints = body.partition("-- prints\n")
        found[name] = Example(code.strip("\n"), prints.strip("\n"))
    return found


def page() -> str:
    """The text of the page, below its heading."""
    groups = GROUPS | OTHERS
    return "\n".join(f"## {title}\n\n" + "\n".join(map(_section, names)) for title, names in groups.items())


def _section(name: str) -> str:
    example = examples()[name]
    parts = [f"### {name.replace('__', '')}\n", *_described(name)]
    parts.append(f"```python\n{example.code}\n```\n")
    if example.prints:
        parts.append(f"```text\n{example.prints}\n```\n")
    return "\n".join(parts)


def _described(name: str) -> Iterator[str]:
    """The signature, the docstring and the members of a name."""
    if name in _WORDS:
        yield f"{_WORDS[name]}\n"
        return
    module, _, short = name.rpartition(".")
    if not module:
        node = _node(getattr(interlock, name))
    else:
        yield f"From `{module}`.\n" if "plugin" not in module else "A fixture, which needs no import.\n"
        node, name = _other(import_module(module), short), short
    if isinstance(node, ast.ClassDef):
        yield from _class(name, node)
    else:
        yield _fenced(_signature(node, name))
        yield _prose(ast.get_docstring(node))


def _node(value: Any) -> ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef:
    """The definition of a name in its source."""
    return _defined(Path(inspect.getfile(inspect.unwrap(value))).read_text(), value.__name__)


def _defined(source: str, name: str) -> ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef:
    return next(
        one
        for one in ast.walk(_parsed(source))
        if isinstance(one, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and one.name == name
    )


@cache
def _parsed(source: str) -> ast.Module:
    """A module whose nodes know the lines that they are in."""
    tree, lines = ast.parse(source), source.encode().split(b"\n")
    for one in ast.walk(tree):
        setattr(one, _LINES, lines)
    return tree


def _other(module: ModuleType, name: str) -> ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef:
    """The definition of a name of another module. A fixture is found by its name in the source."""
    value = getattr(module, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        return _node(value)
    assert module.__file__ is not None
    return _defined(Path(module.__file__).read_text(), name)


_LINES = "lines_of_its_module"


def _said(node: ast.expr | ast.stmt) -> str:
    """A part of the source as it is written."""
    assert node.end_lineno is not None
    # `ast.get_source_segment` takes the whole source apart each time.
    lines: list[bytes] = getattr(node, _LINES)[node.lineno - 1 : node.end_lineno]
    lines = [*lines[:-1], lines[-1][: node.end_col_offset]]
    return b"\n".join([lines[0][node.col_offset :], *lines[1:]]).decode()


def _class(name: str, node: ast.ClassDef) -> Iterator[str]:
    fields = [
        one
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and _public(one.target.id)
    ]
    functions = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    maker = next((one for one in functions if one.name == "__init__"), None)
    members = [one for one in node.body if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant)]
    if maker is not None and name not in _GIVEN:
        yield _fenced(_signature(maker, name))
    elif fields:
        yield _fenced(f"class {name}:\n" + "\n".join(f"    {_said(one)}" for one in fields))
    yield _prose(ast.get_docstring(node))
    if members and any("Enum" in ast.unparse(base) for base in node.bases):
        yield ", ".join(f"`{ast.unparse(one.targets[0])}`" for one in members) + "\n"
    if name in _INHERITED:
        below, names = _INHERITED[name]
        functions += [
            one
            for one in _node(below).body
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name in names
        ]
    rows = [(one, _about(one)) for one in functions if _public(one.name) and not _is_overload(one)]
    if rows:
        lines = [f"| `{_cell(_member(one))}` | {_cell(words)} |" for one, words in rows]
        yield "\n".join(["| member | what it does |", "|---|---|", *lines]) + "\n"


def _public(name: str) -> bool:
    return not name.startswith("_") and name != "model_config"


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [ast.unparse(one) for one in node.decorator_list]


def _is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return "overload" in _decorators(node)


def _member(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """A method with its parameters, or a property with its type."""
    if any(one in ("property", "cached_property") for one in _decorators(node)):
        return f"{node.name}: {_said(node.returns)}" if node.returns else node.name
    begin = "await " if isinstance(node, ast.AsyncFunctionDef) else ""
    return begin + _signature(node, node.name, one_line=True)


def _about(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The first paragraph of a docstring."""
    return " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str, *, one_line: bool = False) -> str:
    """The parameters as they are written, without the object itself; one to a line where they are long."""
    parameters = list(_parameters(node.args))
    if parameters[:1] in (["self"], ["cls"]):
        parameters = parameters[1:]
    if parameters[:1] == ["/"]:
        parameters = parameters[1:]
    returns = "" if node.name == "__init__" or node.returns is None else f" -> {_said(node.returns)}"
    short = f"{name}({', '.join(parameters)}){returns}"
    if one_line or len(short) <= WIDE:
        return short
    return f"{name}(\n" + "".join(f"    {one},\n" for one in parameters) + f"){returns}"


def _parameters(given: ast.arguments) -> Iterator[str]:
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    for at, (one, default) in enumerate(zip(plain, defaults, strict=True), 1):
        yield _parameter(one, default)
        if at == len(given.posonlyargs):
            yield "/"
    if given.vararg is not None:
        yield f"*{_parameter(given.vararg, None)}"
    elif given.kwonlyargs:
        yield "*"
    for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield _parameter(one, default)
    if given.kwarg is not None:
        yield f"**{_parameter(given.kwarg, None)}"


def _parameter(one: ast.arg, default: ast.expr | None) -> str:
    text = one.arg if one.annotation is None else f"{one.arg}: {_said(one.annotation)}"
    return text if default is None else f"{text} = {_said(default)}"


def _fenced(text: str) -> str:
    # `py`, because blocks marked `python` are run.
    return f"```py\n{text}\n```\n"


def _prose(text: str | None) -> str:
    """A docstring as paragraphs; those that are indented are code."""
    parts: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text or "")):
        code = all(line.startswith("    ") for line in paragraph.splitlines()) or paragraph.startswith("async with")
        parts.append(f"```py\n{paragraph}\n```" if code else " ".join(paragraph.split()))
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

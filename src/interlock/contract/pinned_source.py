"""The pinned source of a sandboxed tool: its module, and the modules beside it that it imports.

The modules beside it are those of the package that its module belongs to or, for a module outside packages, of the
directory of its file. Python's own modules and installed distributions are not included: they exist inside the sandbox
as they do outside, and are pinned by their installation. The text is read once, and all of it is part of the tool's
digest.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from interlock.core.record import record

# Modules that were loaded from a file, rather than imported, are below this name.
LOADED = "interlock_tools."


@record
class Pinned:
    """The text of a module; its package, if it is in one; and the modules beside it: text, and whether a package."""

    text: str
    package: str = ""
    modules: dict[str, tuple[str, bool]]

    @property
    def digest(self) -> str:
        """SHA-256 over every character: a changed comment is a changed module."""
        content = json.dumps([self.text, sorted(self.modules.items())])
        return hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()


def pin(function: Callable[..., Any]) -> Pinned | None:
    """Read the text of a function's module and of the modules beside it that it imports; None if there is no source."""
    try:
        path = inspect.getsourcefile(function)
        if path is None:
            return None
        file = Path(path).resolve()
        text = file.read_text()
    except (OSError, TypeError, ValueError):
        return None
    package = _package_of(function)
    return Pinned(text=text, package=package, modules=_beside(file, text, package))


def source_digest(file: Path, package: str = "") -> str | None:
    """SHA-256 over the text that loading a module executes: its own, its packages' and that of the modules beside it.

    Everything is read from the disk and nothing is imported, so that code can be compared before it runs. None if the
    file cannot be read.
    """
    try:
        text = file.read_text()
    except (OSError, ValueError):
        return None
    imports = f"{text}\nimport {package}\n" if package else text
    return Pinned(text=text, modules=_beside(file, imports, package, on_disk=True)).digest


def module_file(name: str) -> tuple[Path, str] | None:
    """The file of a module and the package that it is in. Nothing is imported, also no package above it."""
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    spec, places = None, None
    for length in range(1, name.count(".") + 2):
        spec = PathFinder.find_spec(".".join(name.split(".")[:length]), places)
        if spec is None:
            return None
        places = spec.submodule_search_locations
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin).resolve(), spec.parent or ""


def _package_of(function: Callable[..., Any]) -> str:
    name = function.__module__
    if name.startswith(LOADED):
        return ""
    return getattr(sys.modules.get(name), "__package__", None) or ""


def _beside(file: Path, text: str, package: str, *, on_disk: bool = False) -> dict[str, tuple[str, bool]]:
    """Read the modules beside a file that its text imports, and those that they import in turn.

    A module of the same name that was loaded from elsewhere is not one of them, unless `on_disk` is set.
    """
    top = package.partition(".")[0]
    base = file.parents[len(package.split("."))] if package else file.parent
    if top == "interlock" or (not package and base in _installed()):
        return {}
    modules: dict[str, tuple[str, bool]] = {}
    waiting = [(text, package)]
    while waiting:
        for name in _imported(*waiting.pop()):
            one = None if name in modules or (top and name.partition(".")[0] != top) else _read(base, name, on_disk)
            if one is not None:
                modules[name] = one
                waiting.append((one[0], name if one[1] else name.rpartition(".")[0]))
    return modules


def _installed() -> set[Path]:
    return {Path(os.path.realpath(sysconfig.get_path(name))) for name in ("platlib", "purelib", "stdlib", "platstdlib")}


def _imported(text: str, package: str) -> Iterator[str]:
    """Return the names of all modules that a text may import, each after its packages."""
    for node in ast.walk(_parsed(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            start = ".".join([*filter(None, above), *filter(None, [node.module])])
            # A name imported from a package may be a module of it.
            names = [start, *(f"{start}.{one.name}" for one in node.names)] if start else []
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _parsed(text: str) -> ast.AST:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])  # importing it will report the fault


def _read(base: Path, name: str, on_disk: bool) -> tuple[str, bool] | None:
    """Read the text of a module below a directory, and whether it is a package; None for those from elsewhere."""
    top = name.partition(".")[0]
    if top == "interlock" or top in sys.stdlib_module_names:
        return None
    place, loaded = base.joinpath(*name.split(".")), None if on_disk else sys.modules.get(name)
    origin = getattr(loaded, "__file__", None)
    for file, is_package in ((place / "__init__.py", True), (place.with_suffix(".py"), False)):
        if file.is_file() and (origin is None or Path(origin).resolve() == file.resolve()):
            try:
                return file.read_text(), is_package
            except (OSError, ValueError):
                return None
    # A directory without __init__.py is a package too, without a text.
    return ("", True) if place.is_dir() and str(place) in getattr(loaded, "__path__", [str(place)]) else None

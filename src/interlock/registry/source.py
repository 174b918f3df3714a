"""Where tools come from: a Python file, an importable module, or a manifest in YAML or JSON."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import orjson

from interlock.core.declare import LOADED, Tool, from_manifest, tools_in
from interlock.core.errors import Failure
from interlock.core.manifest import parse_manifest
from interlock.core.schema import Json

_MANIFESTS = {".yaml", ".yml", ".json"}


def load(target: str) -> tuple[str, list[Tool[..., Any]]]:
    """The origin to remember and the tools found there. Refuses with E3105 what cannot be loaded."""
    path = Path(target)
    if path.suffix in _MANIFESTS:
        return f"manifest:{path.resolve()}", _from_manifests(path)
    if path.suffix == ".py":
        return f"file:{path.resolve()}", _some(target, tools_in(vars(_load_file(path.resolve()))))
    return f"module:{target}", _some(target, tools_in(vars(_import(target))))


def reload(origin: str) -> list[Tool[..., Any]]:
    """The tools of an origin that was remembered."""
    kind, _, target = origin.partition(":")
    if kind == "library":
        raise Failure("E3108", "the tool lives in a program that is not running here; add it from a file or module")
    return load(target)[1]


def _some(target: str, tools: list[Tool[..., Any]]) -> list[Tool[..., Any]]:
    if not tools:
        raise Failure("E3105", f"no tools in `{Path(target).name}`; decorate a function with @tool(…)")
    return tools


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise Failure("E3105", f"no module named `{error.name}`; give a .py file, a module or a manifest") from None
    except Failure:
        raise
    except Exception as error:  # the author's code runs at import; whatever it raises is a refusal
        raise _broken(name, error) from error


def _load_file(path: Path) -> ModuleType:
    name = f"{LOADED}{hashlib.sha256(str(path).encode()).hexdigest()[:12]}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise Failure("E3105", f"no such file: `{path.name}`")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Failure:
        raise
    except Exception as error:
        raise _broken(path.name, error) from error
    return module


def _broken(what: str, error: Exception) -> Failure:
    line = error.lineno if isinstance(error, SyntaxError) else _line_of(error)
    where = f", line {line}" if line else ""
    return Failure("E3105", f"`{what}` cannot be loaded{where}: {type(error).__name__}: {error}")


def _line_of(error: Exception) -> int | None:
    trace, line = error.__traceback__, None
    while trace is not None:
        line, trace = trace.tb_lineno, trace.tb_next
    return line


def _from_manifests(path: Path) -> list[Tool[..., Any]]:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise Failure("E3105", f"`{path.name}` cannot be read: {error.strerror}") from None
    documents = _parse(path, text)
    return [_bind(document, path.parent) for document in documents]


def _parse(path: Path, text: bytes) -> list[Any]:
    import yaml

    try:
        found: Any = orjson.loads(text) if path.suffix == ".json" else list(yaml.safe_load_all(text))
    except (orjson.JSONDecodeError, yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Failure("E3105", f"`{path.name}` is not a manifest: {reason}") from None
    documents = cast("list[Any]", found) if isinstance(found, list) else [found]
    flat: list[Any] = []
    for document in documents:
        flat.extend(cast("list[Any]", document) if isinstance(document, list) else [document])
    return flat


def _bind(document: Json, base: Path) -> Tool[..., Any]:
    manifest = parse_manifest(document)
    if manifest.execution is None:
        raise Failure("E3105", f"{manifest.address} names nothing to run: execution: {{target: module:function}}")
    target = _resolve(manifest.execution.target, base)
    handlers = {name: _function(_resolve(where, base)) for name, where in manifest.execution.handlers.items()}
    return from_manifest(manifest, _function(target), handlers)


def _function(found: Any) -> Any:
    return cast("Tool[..., Any]", found).function if isinstance(found, Tool) else found


def _resolve(target: str, base: Path) -> Any:
    """`module:name`, or `file.py:name` beside the manifest."""
    where, colon, name = target.rpartition(":")
    if not colon:
        raise Failure("E3105", f"`{target}` must be written module:function or file.py:function")
    module = _load_file((base / where).resolve()) if where.endswith(".py") else _import(where)
    found: Any = module
    for step in name.split("."):
        found = getattr(found, step, None)
    if not callable(found):
        raise Failure("E3105", f"`{target}` is not a function")
    return found

"""Loads tools from a Python file, an importable module, or a manifest in YAML or JSON."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from interlock.contract.declare import Tool, tools_in
from interlock.contract.function_identity import implementation_digest
from interlock.contract.manifest import Execution, Manifest, Sandboxing, parse_manifest
from interlock.contract.manifest_tools import from_manifest, without_function
from interlock.contract.pinned_source import LOADED, module_file, pin, source_digest
from interlock.core.errors import Failure
from interlock.data.documents import Malformed, read_json, read_yaml
from interlock.data.schema import Fault, Json

_MANIFESTS = {".yaml", ".yml", ".json"}
# Statements that a manifest must make exactly if it names the handler.
_FACTS = (
    ("previews", "preview"), ("compensable", "compensate"), ("versioned", "version_of"), ("has_fixture", "fixture"),
)  # fmt: skip


def load(target: str) -> tuple[str, list[Tool[..., Any]]]:
    """Return the origin to remember and the tools found there. E3105 if they cannot be loaded."""
    path = Path(target)
    if path.suffix in _MANIFESTS:
        return f"manifest:{path.resolve()}", _from_manifests(path)
    if path.suffix == ".py":
        return f"file:{path.resolve()}", _some(target, tools_in(vars(load_file(path.resolve()))))
    return f"module:{target}", _some(target, tools_in(vars(_import(target))))


def function(target: str, base: Path) -> Callable[..., Any]:
    """Load the function that FILE.py:NAME or MODULE:NAME names; a relative FILE.py is searched in `base`.

    Else E3105.
    """
    where, _, name = target.rpartition(":")
    module = load_file((base / where).resolve()) if where.endswith(".py") else _import(where)
    member = getattr(module, name, None)
    if not callable(member):
        raise Failure("E3105", f"there is no function `{name}` in `{Path(where).name}`")
    return member


def reload(origin: str, manifests: Path) -> list[Tool[..., Any]]:
    """Load the tools of a remembered origin.

    `manifests` is the directory of manifests in the home. Names in it are relative, so that the home can be moved.
    """
    kind, _, target = origin.partition(":")
    path = Path(target)
    if kind == "manifest" and _moved(path, manifests):
        return _from_manifests(manifests / path.name)
    if kind == "library":
        raise Failure("E3108", "the tool lives in a program that is not running here; add it from a file or module")
    return load(target)[1]


def source_of(manifest: Manifest, origin: str, manifests: Path) -> str | None:
    """The digest of the text that loading a tool executes here; None for a tool that is not isolated.

    Code that is not isolated is trusted, and may change around the functions that its tools' digests cover. None also
    if the text is not in a file.
    """
    if manifest.sandbox is None or not manifest.runs_as.in_process:
        return None
    found = located(manifest, origin, manifests)
    return None if found is None else source_digest(*found)


def located(manifest: Manifest, origin: str, manifests: Path) -> tuple[Path, str] | None:
    """The file of the module of a tool, and the package that it is in; None if the text is not in a file."""
    execution, (kind, _, where) = manifest.execution, origin.partition(":")
    base = Path()
    if execution is None or kind not in ("file", "module", "manifest"):
        return None
    if kind == "manifest":
        base = manifests if _moved(Path(where), manifests) else Path(where).parent
        where = execution.target.rpartition(":")[0]
    return ((base / where).resolve(), "") if where.endswith(".py") else module_file(where)


def _moved(path: Path, manifests: Path) -> bool:
    """Whether a manifest is one of the home, which may have been moved since."""
    return path.parent.name == manifests.name and (manifests / path.name).is_file()


def _some(target: str, tools: list[Tool[..., Any]]) -> list[Tool[..., Any]]:
    if not tools:
        raise Failure("E3105", f"no tools in `{Path(target).name}`; decorate a function with @tool(…)")
    return tools


def _import(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise Failure("E3105", f"`{name}` is not the name of a module; give a .py file, a module or a manifest")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise Failure("E3105", f"no module named `{error.name}`; give a .py file, a module or a manifest") from None
    except Failure:
        raise
    except (Exception, SystemExit) as error:  # the author's code runs at import; whatever it raises is a refusal
        raise _broken(name, error) from error


def load_file(path: Path) -> ModuleType:
    name = f"{LOADED}{hashlib.sha256(str(path).encode()).hexdigest()[:12]}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise Failure("E3105", f"no such file: `{path.name}`")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # Compiled from the text itself: a bytecode cache is trusted by second and size, which an edit may keep.
        exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), vars(module))  # noqa: S102 - as importing it would
    except Failure:
        raise
    except (Exception, SystemExit) as error:
        raise _broken(path.name, error) from error
    return module


def _broken(what: str, error: BaseException) -> Failure:
    line = error.lineno if isinstance(error, SyntaxError) else _line_of(error)
    where = f", line {line}" if line else ""
    words = f"`{what}` cannot be loaded{where}"
    return Failure("E3105", f"{words}: {type(error).__name__}: {error}", details={"where": words})


def _line_of(error: BaseException) -> int | None:
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
    if not documents:
        raise Failure("E3105", f"no tools in `{path.name}`")
    modules: dict[Path, ModuleType] = {}
    return [_bind(document, path.parent, modules) for document in documents]


def _parse(path: Path, text: bytes) -> list[Any]:
    try:
        parsed: Any = read_json(text) if path.suffix == ".json" else read_yaml(text)
    except Malformed as error:
        raise Failure("E3105", f"`{path.name}` is not a manifest: {error}") from None
    documents = cast("list[Any]", parsed) if isinstance(parsed, list) else [parsed]
    flat: list[Any] = []
    for document in documents:
        flat.extend(cast("list[Any]", document) if isinstance(document, list) else [document])
    return flat


def _bind(document: Json, base: Path, modules: dict[Path, ModuleType]) -> Tool[..., Any]:
    manifest = parse_manifest(document)
    if manifest.execution is None:
        raise Failure("E3105", f"{manifest.address} names nothing to run: execution: {{target: module:function}}")
    if not manifest.runs_as.in_process:
        return _without_function(manifest, manifest.execution)
    target = _function(_resolve(manifest.execution.target, base, modules))
    named = manifest.execution.handlers.items()
    handlers = {name: _function(_resolve(where, base, modules)) for name, where in named}
    for fact, name in _FACTS:
        if getattr(manifest, fact) != (name in handlers):
            raise Failure("E3105", f"{manifest.address} must say {fact} exactly where execution.handlers has `{name}`")
    # The digest covers the code, whatever the manifest states about it.
    pinned = None if manifest.sandbox is None else pin(target)
    implementation = implementation_digest(target, *handlers.values(), pinned=pinned)
    execution = manifest.execution.model_copy(update={"implementation": implementation})
    bound = from_manifest(manifest.model_copy(update={"execution": execution}), target, handlers)
    bound.pinned = pinned
    return bound


def _without_function(manifest: Manifest, execution: Execution) -> Tool[..., Any]:
    """Make a tool whose executor needs no Python function. It is previewed through its side-effect manifest."""
    row, derived = manifest.runs_as, dict[str, Any]()
    if row.provided_by is not None:
        raise Failure("E3105", f"{manifest.address} {row.provided_by}")
    faults = list(execution.faults(manifest.parameters))
    if manifest.mutation_class == "write_reversible" or manifest.compensable:
        faults.append(Fault("/mutation_class", f"{row.noun} cannot be undone; say write_irreversible"))
    if manifest.has_fixture:
        faults.append(Fault("/has_fixture", f"{row.noun} has no fixture"))
    if faults:
        listing = "; ".join(f"{fault.pointer} {fault.message}" for fault in faults[:5])
        details = {"faults": [fault.document() for fault in faults]}
        raise Failure("E3105", f"{manifest.address} was refused: {listing}", details=details)
    if row.always_sandboxed:
        derived["sandbox"] = (manifest.sandbox or Sandboxing()).model_copy(update={"tier": manifest.tier})
    derived["previews"] = manifest.mutation_class == "write_irreversible"
    return without_function(manifest.model_copy(update=derived))


def _function(value: Any) -> Any:
    return cast("Tool[..., Any]", value).function if isinstance(value, Tool) else value


def _resolve(target: str, base: Path, modules: dict[Path, ModuleType]) -> Any:
    """Resolve `module:name`, or `file.py:name` beside the manifest."""
    where, colon, name = target.rpartition(":")
    if not colon or not (where.endswith(".py") or all(part.isidentifier() for part in where.split("."))):
        raise Failure("E3105", f"`{target}` must be written module:function or file.py:function")
    if where.endswith(".py"):
        path = (base / where).resolve()
        module = modules[path] if path in modules else modules.setdefault(path, load_file(path))
    else:
        module = _import(where)
    member: Any = module
    for step in name.split("."):
        member = getattr(member, step, None)
    if not callable(member):
        raise Failure("E3105", f"`{target}` is not a function")
    return member

"""Sandboxed tools as text: what a store keeps of one, and the tool that is made of it without its file.

A sandboxed tool runs as the text of its module, in a process of its own. Around it, the gateway needs to know little:
the name of the function, whether it takes a context, and which arguments its compensation has. All of that is read from
the syntax of the text, and nothing of the text is executed here.

INVARIANT: a tool is made of a text only if the text has the digest of the implementation that the manifest states. The
digest covers every character, so it is the text that was admitted.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import orjson

from interlock.contract.context import CallContext
from interlock.contract.declare import Tool
from interlock.contract.function_identity import digest_of_sources
from interlock.contract.hints import Annotations
from interlock.contract.manifest import HandlerName, Manifest
from interlock.contract.pinned_source import Pinned
from interlock.core.errors import Failure

# The most bytes of a module with the modules beside it. A larger one is not stored, and needs its file.
MOST_BYTES = 4 * 2**20
_HANDLERS: frozenset[str] = frozenset(get_args(HandlerName))
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def stored_text(tool: Tool[..., Any]) -> bytes | None:
    """The text of a sandboxed tool, for the store; None if the same tool could not be made of it.

    That is so for functions that are not declared by `def` at the top of the module, with the decorators of `@tool`.
    """
    manifest, pinned = tool.manifest, tool.pinned
    if pinned is None:
        return None
    body = orjson.dumps([pinned.text, pinned.package, sorted(pinned.modules.items())])
    if len(body) > MOST_BYTES:
        return None
    try:
        made = tool_of_text(manifest, body)
    except Failure:
        return None
    return body if _shape(made) == _shape(tool) else None


def tool_of_text(manifest: Manifest, body: bytes) -> Tool[..., Any]:
    """The tool with this manifest, made of its text. E3103 if the text is not that of the tool."""
    pinned, execution = _pinned(body), manifest.execution
    found = None if pinned is None else _find(manifest, pinned.text)
    if (
        pinned is None
        or found is None
        or execution is None
        or execution.implementation is None
        or execution.implementation != digest_of_sources(_sources(pinned.text, *found), pinned)
        or not _is_package_of(pinned.package, execution.target)
    ):
        raise Failure("E3103", f"the text of {manifest.address}@{manifest.version} in the store is another one")
    return _make(manifest, pinned, *found)


def _pinned(body: bytes) -> Pinned | None:
    """The source in a stored text; None if it is of another form."""
    try:
        text, package, modules = orjson.loads(body)
        read = Pinned(
            text=text, package=package, modules={name: (one, bool(is_one)) for name, (one, is_one) in modules}
        )
    except (ValueError, TypeError):
        return None
    texts: list[Any] = [read.text, read.package, *read.modules, *(one for one, _ in read.modules.values())]
    return read if all(isinstance(one, str) for one in texts) else None


def _find(manifest: Manifest, text: str) -> tuple[_Function, dict[str, _Function]] | None:
    """The function of a tool in the text of its module, and its handlers in their order."""
    assert manifest.execution is not None
    try:
        top = [node for node in ast.parse(text).body if isinstance(node, _Function)]
    except (SyntaxError, ValueError, RecursionError):
        return None
    functions = {node.name: node for node in top}
    where, _, name = manifest.execution.target.rpartition(":")
    if name not in functions:
        return None
    named = manifest.execution.handlers
    if not named:
        return functions[name], {handler: node for node in top for handler in _handled(node, name)}
    handlers: dict[str, _Function] = {}
    for handler, target in named.items():
        module, _, own = target.rpartition(":")
        if module != where or own not in functions:
            return None
        handlers[handler] = functions[own]
    return functions[name], handlers


def _handled(node: _Function, tool: str) -> Iterator[str]:
    """The handlers of a tool that a function is declared as: `@tool.preview` and the like."""
    attributes = (one for one in node.decorator_list if isinstance(one, ast.Attribute) and one.attr in _HANDLERS)
    yield from (one.attr for one in attributes if isinstance(one.value, ast.Name) and one.value.id == tool)


def _sources(text: str, function: _Function, handlers: Mapping[str, _Function]) -> Iterator[str]:
    lines = text.split("\n")
    for node in (function, *handlers.values()):
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        yield "\n".join(lines[first - 1 : node.end_lineno])


def _is_package_of(package: str, target: str) -> bool:
    module = target.rpartition(":")[0]
    return package in ("", module, module.rpartition(".")[0])


def _make(manifest: Manifest, pinned: Pinned, function: _Function, handlers: Mapping[str, _Function]) -> Tool[..., Any]:
    contexts = _names_of_context(pinned.text)
    context = next((one.arg for one in _arguments(function) if _asks_for(one.annotation, contexts)), None)
    stand_in = _stand_in(manifest, function, contexts)
    tool: Tool[..., Any] = Tool(stand_in, manifest.model_dump(), Annotations(context=context), manifest)
    tool.is_async = isinstance(function, ast.AsyncFunctionDef)
    tool.handlers.update({name: _stand_in(manifest, node, contexts) for name, node in handlers.items()})
    tool.pinned = pinned
    return tool


def _stand_in(manifest: Manifest, node: _Function, contexts: frozenset[str]) -> Callable[..., Any]:
    """A function with the name and the parameters of one in the text, which the sandbox alone calls."""

    def stand_in(*_: Any, **__: Any) -> Any:
        raise Failure("E3405", f"{manifest.address} runs in the sandbox: only Interlock calls it there")

    stand_in.__name__ = stand_in.__qualname__ = node.name
    stand_in.__annotations__ = {one.arg: CallContext for one in _arguments(node) if _asks_for(one.annotation, contexts)}
    stand_in.__signature__ = inspect.Signature(list(_parameters(node.args)))  # pyright: ignore[reportFunctionMemberAccess]
    return stand_in


def _arguments(node: _Function) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def _parameters(arguments: ast.arguments) -> Iterator[inspect.Parameter]:
    kinds = inspect.Parameter
    named = [*arguments.posonlyargs, *arguments.args]
    required = len(named) - len(arguments.defaults)
    for at, one in enumerate(named):
        kind = kinds.POSITIONAL_ONLY if at < len(arguments.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD
        yield kinds(one.arg, kind, default=kinds.empty if at < required else None)
    if arguments.vararg is not None:
        yield kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL)
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield kinds(one.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None)
    if arguments.kwarg is not None:
        yield kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD)


def _names_of_context(text: str) -> frozenset[str]:
    """The words by which a module names the type of the context: as it imports it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "interlock":
            names.update(one.asname or one.name for one in node.names if one.name == "Context")
        elif isinstance(node, ast.Import):
            names.update(f"{one.asname or one.name}.Context" for one in node.names if one.name == "interlock")
    return frozenset(names)


def _asks_for(annotation: ast.expr | None, contexts: frozenset[str]) -> bool:
    if isinstance(annotation, ast.Constant):
        return annotation.value in contexts  # in quotes
    if isinstance(annotation, ast.Attribute) and isinstance(annotation.value, ast.Name):
        return f"{annotation.value.id}.{annotation.attr}" in contexts
    return isinstance(annotation, ast.Name) and annotation.id in contexts


def _parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _shape(tool: Tool[..., Any]) -> object:
    """All that the gateway needs to know of a sandboxed tool besides its manifest and its text."""
    undo = tool.handlers.get("compensate")
    return (
        tool.function.__name__,
        tool.function.__qualname__,
        tool.is_async,
        tool.takes_context,
        list(tool.handlers),
        [] if undo is None else [(one.name, one.kind, one.default is one.empty) for one in _parameters_of(undo)],
        tool.undo_takes_context,
    )

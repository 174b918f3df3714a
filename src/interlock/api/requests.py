"""Requests as a program writes them: a tool by name or as it was declared, and arguments by name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from interlock.call.phases import Request

if TYPE_CHECKING:
    from interlock.call.context import Caller
    from interlock.call.results import Result
    from interlock.contract.declare import Tool
    from interlock.data.schema import Json

# How many tools a search returns, where nothing else is asked.
DEFAULT_LIMIT = 10


def make_request(
    tool: str | Tool[..., Any], arguments: Mapping[str, Any] | None = None, /, *, caller: Caller, **options: Any
) -> Request:
    """A request to invoke a tool. Options are the fields of `Request`."""
    if "operation" in options:
        raise TypeError("a request invokes a tool; to undo a call, use undo()")
    name, spec = named_tool(tool)
    version = options.pop("version", None) or spec
    return Request(tool=name, version=version, arguments=dict(arguments or {}), caller=caller, **options)


def named_tool(tool: str | Tool[..., Any]) -> tuple[str, str | None]:
    """The name and the range of versions of `demo.post@^1`, or of a declared tool, which means its exact version."""
    if not isinstance(tool, str):
        require_tool(tool)
        return tool.manifest.address, tool.manifest.version
    if "@" not in tool:
        return tool, None
    name, _, spec = tool.partition("@")
    return name, spec


def require_tool(given: object) -> None:
    """Refuse (TypeError) an object that is not a declared tool, and tell how to make it one."""
    # Loaded here: most programs and commands name tools by their addresses, and need no models of contracts.
    from interlock.contract.declare import Tool

    if isinstance(given, Tool):
        return
    if isinstance(given, str | os.PathLike):
        raise TypeError(f"{os.fspath(given)!r} is a place, not a tool; write add_from({os.fspath(given)!r})")
    what = getattr(given, "__name__", None) or type(given).__name__
    raise TypeError(f'{what} is not a tool; put @tool(version="1.0.0", mutation_class="read_only") above the function')


def arguments_of(tool: str | Tool[..., Any], given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call: one mapping and names, or, of a declared tool, as its function takes them."""
    first: Any = given[0] if given else None
    # Nearly all are dicts, and the question whether something is a Mapping takes ten times as long.
    if first.__class__ is dict and len(given) == 1:
        return {**first, **named}
    if len(given) <= 1 and (first is None or isinstance(first, Mapping)):
        if first is None and not isinstance(tool, str):
            return by_name(tool, (), named)
        return {**cast("Mapping[str, Any]", first or {}), **named}
    if isinstance(tool, str):
        raise TypeError('arguments are named, or one mapping: app.call("demo.post", account="cash")')
    return by_name(tool, given, named)


def by_name(tool: Tool[..., Any], given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a function by their names, as JSON data."""
    from pydantic_core import to_jsonable_python  # loaded with the models, as above

    names = [name for name in inspect.signature(tool.function).parameters if name != tool.context]
    if len(given) > len(names) or named.keys() & set(names[: len(given)]):
        raise TypeError(f"{tool!r} takes {', '.join(names) or 'no arguments'}, each once")
    return to_jsonable_python({**dict(zip(names, given, strict=False)), **named})


# Options of `call` that are often written under another name, and are then taken for arguments of the tool.
_OPTIONS = {"timeout": "timeout_s", "idempotency_key": "key", "idempotencyKey": "key", "dryrun": "dry_run"}


def suggest_options(result: Result, named: Mapping[str, Any]) -> Result:
    """A refusal of arguments that the tool does not have, with the option that was probably meant."""
    error = result.error
    hints = [f"`{name}` was sent to the tool; the option is `{_OPTIONS[name]}`" for name in named if name in _OPTIONS]
    faults: list[Json] = [] if error is None else (error.details or {}).get("faults", [])
    strange = [fault["pointer"] for fault in faults if "is not a parameter" in fault["message"]]
    if error is None or not hints or not any(f"/{name}" in strange for name in named if name in _OPTIONS):
        return result
    return replace(result, error=error.saying("; ".join([error.message, *hints]), error.details))

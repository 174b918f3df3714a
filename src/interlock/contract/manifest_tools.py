"""Tools that a manifest declares, and not the decorator of a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from interlock.contract.declare import Tool
from interlock.contract.hints import Annotations, hints_of, is_context
from interlock.contract.manifest import Manifest
from interlock.core.errors import Failure


def from_manifest(manifest: Manifest, function: Callable[..., Any], handlers: Mapping[str, Any]) -> Tool[..., Any]:
    """Make a tool that a manifest declares and a plain function serves: JSON in, JSON out."""
    context = next((name for name, hint in hints_of(function).items() if is_context(hint)), None)
    plain = Annotations(context=context)
    tool: Tool[..., Any] = Tool(function, manifest.model_dump(), plain, manifest)
    tool.handlers.update(handlers)
    return tool


def without_function(manifest: Manifest) -> Tool[..., Any]:
    """Make a tool that a manifest declares and no Python function serves: its executor does everything."""
    execution = manifest.execution
    assert execution is not None

    def stand_in(**_: Any) -> Any:
        where = "" if manifest.sandbox is None else ", in the sandbox"
        raise Failure("E3405", f"{manifest.address} is {manifest.runs_as.noun}: only Interlock calls it{where}")

    async def check(**arguments: Any) -> None:
        execution.words(arguments)

    stand_in.__name__ = manifest.tool_id
    tool: Tool[..., Any] = Tool(
        stand_in,
        {"namespace": manifest.namespace, "tool_id": manifest.tool_id, "version": manifest.version},
        Annotations(),
        manifest,
    )
    if execution.argv:
        tool.handlers["check"] = check
    tool.is_async = True  # nothing of it runs in a thread
    # Progress that its executor reports is passed on.
    tool.takes_context = manifest.reports_progress
    return tool


def from_nowhere(manifest: Manifest, why: Failure) -> Tool[..., Any]:
    """Make a tool whose code is unavailable. Nothing of it runs."""

    async def missing(**_: Any) -> Any:
        raise why

    missing.__name__ = manifest.tool_id
    return Tool(missing, manifest.model_dump(), Annotations(), manifest)

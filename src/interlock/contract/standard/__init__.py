"""The nineteen objects of the Agent Tool standard, version 0.2.0, as typed models.

`document` defines the base of all of them, and the rules they follow. `mappings` and `results` build on it;
`declarations` builds on `mappings`; `calls` on both; `catalogue` on all of them. Imports point that way only. This
module contains only the names that others import from the package. They are looked up when first used: commands that
need the states of a call alone must not wait for the models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlock.contract.standard.calls import ToolInvocation, ToolProgress
    from interlock.contract.standard.catalogue import OBJECTS, published_schemas
    from interlock.contract.standard.declarations import (
        Execution,
        Identity,
        Persistence,
        Safety,
        Schemas,
        ToolDeclaration,
        ToolExecutionProfile,
        ToolInputContract,
        ToolInterface,
        ToolOutputContract,
        ToolPermissionProfile,
    )
    from interlock.contract.standard.document import (
        LIFECYCLE_OF_REGISTRY_STATE,
        SELECTABLE_REGISTRY_STATES,
        VERSION,
        ContentType,
        Document,
        DocumentPart,
        EventClass,
        ExecutionKind,
        Lifecycle,
        RegistryState,
    )
    from interlock.contract.standard.mappings import ToolExternalMapping
    from interlock.contract.standard.results import TextContent, ToolError, ToolResult, ToolResultPersistence

_MODULES = {
    "calls": ("ToolInvocation", "ToolProgress"),
    "catalogue": ("OBJECTS", "published_schemas"),
    "declarations": (
        "Execution",
        "Identity",
        "Persistence",
        "Safety",
        "Schemas",
        "ToolDeclaration",
        "ToolExecutionProfile",
        "ToolInputContract",
        "ToolInterface",
        "ToolOutputContract",
        "ToolPermissionProfile",
    ),
    "document": (
        "ContentType",
        "Document",
        "EventClass",
        "ExecutionKind",
        "LIFECYCLE_OF_REGISTRY_STATE",
        "Lifecycle",
        "DocumentPart",
        "RegistryState",
        "SELECTABLE_REGISTRY_STATES",
        "VERSION",
    ),
    "mappings": ("ToolExternalMapping",),
    "results": ("TextContent", "ToolError", "ToolResult", "ToolResultPersistence"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "LIFECYCLE_OF_REGISTRY_STATE",
    "OBJECTS",
    "SELECTABLE_REGISTRY_STATES",
    "VERSION",
    "ContentType",
    "Document",
    "DocumentPart",
    "EventClass",
    "Execution",
    "ExecutionKind",
    "Identity",
    "Lifecycle",
    "Persistence",
    "RegistryState",
    "Safety",
    "Schemas",
    "TextContent",
    "ToolDeclaration",
    "ToolError",
    "ToolExecutionProfile",
    "ToolExternalMapping",
    "ToolInputContract",
    "ToolInterface",
    "ToolInvocation",
    "ToolOutputContract",
    "ToolPermissionProfile",
    "ToolProgress",
    "ToolResult",
    "ToolResultPersistence",
    "published_schemas",
]


def __getattr__(name: str) -> Any:
    if (module := _HOMES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value

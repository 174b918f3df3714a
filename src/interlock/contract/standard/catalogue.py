"""The nineteen objects by name, in the order of the standard, and their published JSON Schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interlock.contract.standard.calls import (
    ToolEvent,
    ToolHook,
    ToolInvocation,
    ToolPermissionDecision,
    ToolProgress,
    ToolSchedulerPolicy,
)
from interlock.contract.standard.declarations import (
    DeferredToolRef,
    ToolDeclaration,
    ToolExecutionProfile,
    ToolInputContract,
    ToolInterface,
    ToolNamespace,
    ToolOutputContract,
    ToolPermissionProfile,
    ToolSurface,
)
from interlock.contract.standard.document import VERSION, Document, reader
from interlock.contract.standard.mappings import ToolExternalMapping
from interlock.contract.standard.results import ToolError, ToolResult, ToolResultPersistence

_MODELS: tuple[type[Document], ...] = (
    ToolDeclaration,
    ToolInterface,
    ToolSurface,
    ToolNamespace,
    ToolInputContract,
    ToolOutputContract,
    ToolExecutionProfile,
    ToolPermissionProfile,
    ToolPermissionDecision,
    ToolHook,
    ToolInvocation,
    ToolSchedulerPolicy,
    DeferredToolRef,
    ToolProgress,
    ToolResult,
    ToolResultPersistence,
    ToolError,
    ToolEvent,
    ToolExternalMapping,
)
OBJECTS: Mapping[str, type[Document]] = {model.OBJECT: model for model in _MODELS}


def published_schemas() -> dict[str, dict[str, Any]]:
    """The JSON Schema (2020-12) of each object, in the order of the standard."""
    return {name: _published(name, model) for name, model in OBJECTS.items()}


def _published(name: str, model: type[Document]) -> dict[str, Any]:
    schema = reader(model).json_schema(by_alias=True, mode="validation")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:interlock:agent-tool:{VERSION}:{name}",
        **schema,
        "required": ["schema_version", *schema.get("required", ())],
    }

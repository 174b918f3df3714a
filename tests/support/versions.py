"""A tool in any version."""

from __future__ import annotations

from typing import Any

from interlock import Tool
from interlock.contract.manifest import parse_manifest
from interlock.contract.manifest_tools import from_manifest

Json = dict[str, Any]
GUIDE = "https://example.com/to-2"


def versioned(version: str) -> Tool[..., Any]:
    document: Json = {
        "tool_id": "answer",
        "namespace": "demo",
        "version": version,
        "name": "Answer",
        "description": "Answers with its own version.",
        "provider": "local",
        "protocol": "native",
        "parameters": {"type": "object", "properties": {}},
        "result_schema": {"type": "string"},
        "required_permissions": [],
        "timeout_class": "interactive",
        "idempotency": {},
        "mutation_class": "read_only",
        "observability": {},
        "aliases": ["reply"],
    }
    return from_manifest(parse_manifest(document), lambda: version, {})

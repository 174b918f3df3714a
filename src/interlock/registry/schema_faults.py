"""Admission of the schemas of a tool: that they can be used, and leave no value that rules may miss."""

from __future__ import annotations

from interlock.contract.executors import PROTOCOLS
from interlock.contract.manifest import Manifest
from interlock.core.errors import Failure
from interlock.data.explain import authoring_faults
from interlock.data.schema import properties_of, require_schema, resolve_ref
from interlock.data.subschemas import Places

# Handlers that the gateway calls in its own process.
_RUN_OUTSIDE = frozenset({"check", "preflight", "version_of", "verify", "concurrent", "fixture"})


def schema_faults(manifest: Manifest) -> list[str]:
    """The reasons why a tool with these schemas is not admitted, each as one sentence."""
    faults: list[str] = []
    if manifest.result_schema is None:
        faults.append("say result_schema: what the tool returns")
    for schema in (manifest.parameters, manifest.result_schema, manifest.error_schema):
        try:
            require_schema(schema or {})
        except Failure as failure:
            faults.append(failure.message)
    blind = Places(manifest.parameters).blind
    if blind is not None:
        faults.append(f"`parameters` marks a path, URL, host, command or fragment that rules may miss: {blind}")
    if manifest.paged:
        faults.extend(_paging_faults(manifest))
    if manifest.sandbox is not None and manifest.execution is not None:
        outside = sorted(manifest.execution.handlers.keys() & _RUN_OUTSIDE)
        faults.extend(f"a sandboxed tool has no `{name}` handler: it would run outside" for name in outside)
    if PROTOCOLS[manifest.protocol].written_here:
        faults.extend(fault.message for fault in authoring_faults(manifest.parameters))
    return faults


def _paging_faults(manifest: Manifest) -> list[str]:
    result = manifest.result_schema or {}
    items = resolve_ref(result, properties_of(resolve_ref(result, result)).get("items", {}))
    optional = "cursor" not in manifest.parameters.get("required", ())
    conditions = (
        ("cursor" in properties_of(manifest.parameters), "a paged tool takes `cursor`: str | None = None"),
        (optional, "the `cursor` of a paged tool is optional: the first page has none"),
        (items.get("type") == "array", "a paged tool returns an object with `items` and a next `cursor`"),
    )
    return [words for holds, words in conditions if not holds]

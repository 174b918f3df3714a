"""Side-effect manifests: which resources a call would touch, said before it runs.

A write tool lists its effects as templates over its input, `account:{account}`. From the manifest and the input alone
the affected resources follow; nothing is asked of the tool.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from interlock.core.context import Change
from interlock.core.manifest import Effect, Manifest

_FIELD = re.compile(r"\{([a-zA-Z_][a-zA-Z0-9_.]*)\}")


def manifest_faults(manifest: Manifest) -> list[str]:
    """What is wrong between a tool's mutation class and the facts that class demands."""
    faults: list[str] = []
    writes = manifest.mutation_class in ("write_reversible", "write_irreversible")
    if writes and not manifest.effects:
        faults.append('a write tool lists what it may change: effects=[Effect("account:{account}", "UPDATE")]')
    if manifest.mutation_class == "read_only" and manifest.effects:
        faults.append("a read_only tool has no effects; remove them or choose a write class")
    if manifest.mutation_class == "write_reversible" and not manifest.compensable:
        faults.append("a write_reversible tool can be undone: add a @tool.compensate handler")
    if manifest.mutation_class == "write_irreversible" and not manifest.previews:
        faults.append("a write_irreversible tool can be looked at first: add a @tool.preview handler")
    known = manifest.parameters.get("properties", {})
    for effect in manifest.effects:
        unknown = [name for name in _FIELD.findall(effect.resource) if name.split(".")[0] not in known]
        faults.extend(f"effect `{effect.resource}` names `{name}`, which is not a parameter" for name in unknown)
    return faults


def predict(effects: Iterable[Effect], arguments: Mapping[str, Any]) -> tuple[Change, ...]:
    """The resources a call with these arguments may change."""
    return tuple(Change(resource=_fill(effect.resource, arguments), operation=effect.operation) for effect in effects)


def _fill(template: str, arguments: Mapping[str, Any]) -> str:
    def value(match: re.Match[str]) -> str:
        found: Any = arguments
        for step in match.group(1).split("."):
            found = found.get(step) if isinstance(found, Mapping) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] - arguments are JSON
        # An absent argument may name any resource, and says so.
        return "*" if found is None else str(found)  # pyright: ignore[reportUnknownArgumentType] - arguments are JSON

    return _FIELD.sub(value, template)

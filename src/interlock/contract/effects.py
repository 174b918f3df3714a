"""Side-effect manifests: the resources that a call would touch, known before it runs.

A write tool lists its effects as templates over its input, `account:{account}`. The affected resources follow from the
manifest and the input alone; the tool is not consulted. Preconditions on resources are written the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from interlock.core.expressions import expression
from interlock.core.record import dataclass

if TYPE_CHECKING:
    from interlock.contract.manifest import Effect, Manifest, Operation, Precondition
    from interlock.data.schema import Json

_FIELD = expression(r"\{([a-zA-Z_][a-zA-Z0-9_.]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change that a call made: the resource, the operation, and the values before and after."""

    resource: str
    operation: Operation
    before: Any = None
    after: Any = None


def manifest_faults(manifest: Manifest) -> list[str]:
    """List the contradictions between a tool's mutation class and the facts that the class requires."""
    faults: list[str] = []
    writes = manifest.mutation_class in ("write_reversible", "write_irreversible")
    if writes and not manifest.effects:
        faults.append('a write tool lists what it may change: effects=[Effect("account:{account}", "UPDATE")]')
    if manifest.mutation_class == "read_only" and manifest.effects:
        faults.append("a read_only tool has no effects; remove them or choose a write class")
    if manifest.mutation_class == "write_reversible" and not manifest.compensable:
        how = "say how in the overlay: undo" if manifest.runs_as.of_upstream else "add a @tool.compensate handler"
        faults.append(f"a write_reversible tool can be undone: {how}")
    if manifest.mutation_class == "write_irreversible" and not manifest.previews:
        faults.append("a write_irreversible tool can be looked at first: add a @tool.preview handler")
    known = manifest.parameters.get("properties", {})
    for effect in manifest.effects:
        unknown = [name for name in _FIELD.findall(effect.resource) if name.split(".")[0] not in known]
        faults.extend(f"effect `{effect.resource}` names `{name}`, which is not a parameter" for name in unknown)
    return [*faults, *_precondition_faults(manifest, known)] if manifest.preconditions else faults


def _precondition_faults(manifest: Manifest, known: Json) -> Iterator[str]:
    if manifest.mutation_class == "read_only":
        yield "a read_only tool changes nothing that could have a precondition; remove them or choose a write class"
    if manifest.sandbox is not None:
        yield "a sandboxed tool has no preconditions: what says whether they hold would run outside"
    if not manifest.versioned:
        yield "preconditions are checked against what there is: add a @tool.version_of handler"
    filled = {*manifest.parameters.get("required", ()), *(name for name, one in known.items() if "default" in one)}
    for one in manifest.preconditions:
        # INVARIANT: a caller can leave out the version they saw, but never the resource it belongs to.
        absent = [name for name in _FIELD.findall(one.resource) if name.split(".")[0] not in filled]
        yield from (f"precondition `{one.resource}` names `{name}`, which may be absent" for name in absent)
        unknown = [name for name in _FIELD.findall(one.version) if name.split(".")[0] not in known]
        yield from (f"precondition `{one.resource}` names `{name}`, which is not a parameter" for name in unknown)


def fields_of(effects: Iterable[Effect]) -> set[str]:
    """Return the parameters that occur in effects."""
    return {name.partition(".")[0] for effect in effects for name in _FIELD.findall(effect.resource)}


def predict(effects: Iterable[Effect], arguments: Mapping[str, Any]) -> tuple[Change, ...]:
    """Return the resources that a call with these arguments may change."""
    return tuple([Change(resource=_fill(effect.resource, arguments), operation=effect.operation) for effect in effects])


def expected(preconditions: Iterable[Precondition], arguments: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the resources that a call with these arguments depends on, and the expected version of each."""
    return tuple(
        (_fill(one.resource, arguments), _fill(one.version, arguments))
        for one in preconditions
        if all(_argument(name, arguments) is not None for name in _FIELD.findall(one.version))
    )


def _fill(template: str, arguments: Mapping[str, Any]) -> str:
    form, paths = _form(template)
    found = [arguments.get(path) if "." not in path else _argument(path, arguments) for path in paths]
    # An absent argument may name any resource, hence the star.
    return form % tuple(["*" if argument is None else argument for argument in found])


@lru_cache(maxsize=4096)
def _form(template: str) -> tuple[str, tuple[str, ...]]:
    """Read a template, once: the text with a `%s` for each parameter, and their names."""
    literal, *rest = _FIELD.split(template.replace("%", "%%"))
    return "%s".join((literal, *rest[1::2])), tuple(rest[::2])


def _argument(path: str, arguments: Mapping[str, Any]) -> Any:
    value: Any = arguments
    for step in path.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] - arguments are JSON
    return value  # pyright: ignore[reportUnknownVariableType] - as above

"""Pins compensation recipes: an overlay names tools of the upstream, a manifest holds their operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from interlock.call.connector import Definition
from interlock.contract import recipes
from interlock.contract.manifest import Manifest
from interlock.contract.recipes import Step, Undo
from interlock.core.errors import Failure
from interlock.data.schema import Json, Schema, properties_of, resolve_ref
from interlock.upstreams.judgement import Judged
from interlock.upstreams.overlay import unknown


def recipe_of(
    undo: Undo,
    definition: Definition,
    others: Mapping[str, Definition],
    judge: Callable[[Definition], Judged],
    digest_of: Callable[[Definition], str],
) -> Json:
    """Return the recipe of a tool for its manifest; E3105 if the tools that it names cannot carry it out."""
    given = properties_of(resolve_ref(definition.input_schema, definition.input_schema))
    for fault in recipes.faults(undo, given):
        raise Failure("E3105", f"undo: {fault}")
    pinned = _pinned(undo, others, digest_of)
    if undo.before is not None:
        pinned["before"] = _pinned(undo.before, others, digest_of)
        if judge(others[undo.before.tool]).mutation_class != "read_only":
            words = f"say mutation_class: read_only of `{undo.before.tool}`, if that holds"
            raise Failure("E3105", f"undo: what is there before is read with a tool that only reads; {words}")
    if undo.example is None:
        raise Failure("E3105", f"undo: {_ask_for_example(given, definition)}")
    if not Schema(definition.input_schema).valid(undo.example):
        raise Failure("E3105", "undo: the example does not fit the input schema of the tool")
    return pinned | {"example": undo.example}


def _ask_for_example(given: Mapping[str, Any], definition: Definition) -> str:
    """Say which example a recipe lacks. INVARIANT: no write counts as reversible before one was undone."""
    schema: Json = resolve_ref(definition.input_schema, definition.input_schema)
    needed = [str(name) for name in schema.get("required") or given]
    listed = ", ".join(f"{name}: …" for name in needed[:5]) + (", …" if len(needed) > 5 else "")
    return (
        f"add `example: {{{listed}}}`, an input with which admission makes the write and undoes it again,"
        " to see that it works; or say mutation_class: write_irreversible without `undo`, and a person is asked"
        " for each call"
    )


def partners_of(manifest: Manifest | None) -> dict[str, str]:
    """Return the digests of the tools that a recipe uses, by their names: if one of them changes, the recipe does."""
    recipe = None if manifest is None or manifest.execution is None else manifest.execution.undo
    steps = [] if recipe is None else [recipe, *([] if recipe.before is None else [recipe.before])]
    return {step.tool: step.implementation for step in steps}


def remark_on(manifest: Manifest) -> str:
    """The parts of a tried recipe that were not proven; empty if all were."""
    recipe = None if manifest.execution is None else manifest.execution.undo
    return recipes.ONLY_RUN if recipe is not None and recipe.before is None else ""


def _pinned(step: Step, others: Mapping[str, Definition], digest_of: Callable[[Definition], str]) -> Json:
    other = others.get(step.tool)
    if other is None:
        listing = unknown(step.tool, list(others), "is not a tool of this upstream")
        raise Failure("E3105", f"undo: `{step.tool}` {listing}")
    schema: Json = resolve_ref(other.input_schema, other.input_schema)
    known, required = properties_of(schema), tuple[Any, ...](schema.get("required") or ())
    for name in step.arguments:
        if name not in known:
            raise Failure("E3105", f"undo: `{step.tool}` has no parameter `{name}`{unknown(name, list(known), '')}")
    for name in required:
        if name not in step.arguments:
            raise Failure("E3105", f"undo: `{step.tool}` needs `{name}`; say where it comes from")
    return {
        "tool": step.tool,
        "arguments": step.model_dump(mode="json", exclude_unset=True).get("arguments", {}),
        "native": dict(other.native),
        "implementation": digest_of(other),
        "required": [str(name) for name in required],
    }

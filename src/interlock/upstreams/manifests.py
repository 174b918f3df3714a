"""Converts a foreign definition to a manifest: the upstream's statements, combined with the operator's (`overlay`).

The upstream's names, descriptions and schemas are used after cleaning. A definition becomes a manifest that admission
accepts, or is refused by name with what it needs; the others go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from interlock.call.connector import Definition
from interlock.contract.executors import OWN_DESCRIPTION, PROTOCOLS
from interlock.contract.manifest import Effect, Manifest, parse_manifest
from interlock.contract.timeouts import infer_class
from interlock.contract.upstream_kinds import UpstreamKind
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.data.canonical import digest as digest_of
from interlock.data.schema import Json, Schema, close, copied, properties_of, resolve_ref
from interlock.registry.admission import examine
from interlock.upstreams.kinds import kind_of
from interlock.upstreams.names import clean_id, in_words, tool_ids
from interlock.upstreams.overlay import NO_OVERLAY, Judged, Overlay, ParameterOverlay, ToolOverlay, classify, unknown
from interlock.upstreams.recipes import recipe_of
from interlock.upstreams.schemas import Shared, cleaned, mcp_result, visible


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of importing one definition: a manifest that admission accepts, or the reason why there is none.

    `needs` lists what was invented because the upstream does not state it, so that the operator can state it in the
    overlay.
    """

    definition: Definition
    tool_id: str
    digest: str
    judged: Judged
    manifest: Manifest | None = None
    needs: tuple[str, ...] = ()
    refused: str | None = None


# Limits on the schemas of one definition and of everything that an upstream offers, in objects and lists, and on the
# texts of one. Admission and the first call take time in proportion to them. An OpenAPI document of some megabytes can
# describe far more.
MOST_PARTS = 20_000
MOST_PARTS_OF_ALL = 1_000_000
MOST_CHARACTERS = 2_000_000
_UNPREFIXED = "default"
_TIMEOUT_S = 30
# A manifest's description has 10 to 2,000 characters. If an upstream's is shorter or longer, models get the original.
_SHORTEST_DESCRIPTION, _LONGEST_DESCRIPTION = 10, 2000
_LONGEST_OWN = 50_000


def import_all(
    definitions: Sequence[Definition],
    *,
    upstream: str,
    kind: str,
    versions: Mapping[str, str] | str,
    overlay: Overlay = NO_OVERLAY,
    accept_hints: bool = False,
    prefix: bool = True,
    credentials: Sequence[str] = (),
    known: Mapping[str, str] | None = None,
) -> list[Imported]:
    """Import everything that an upstream offers. `known` are the ids that its tools have already, by their names.

    `versions` is the version to publish under: one for all, or one for each by the upstream's name.
    """
    before = known or {}
    ids = tool_ids((one.name for one in definitions), overlay, before)
    shared = Counter(ids.values())
    seen: set[str] = set()
    imported: list[Imported] = []
    left = MOST_PARTS_OF_ALL
    by_name = {one.name: one for one in reversed(definitions)}
    common: Shared = {}
    for one in definitions:
        parts, excess = _measured(one, left)
        if excess:
            judged = classify(one, overlay, accept_hints=accept_hints)
            imported.append(Imported(one, ids[one.name], "", judged, refused=excess))
            continue
        left -= parts
        done = to_manifest(
            one,
            others=by_name,
            upstream=upstream,
            kind=kind,
            version=versions if isinstance(versions, str) else versions.get(one.name, "1.0.0"),
            overlay=overlay,
            accept_hints=accept_hints,
            prefix=prefix,
            credentials=credentials,
            tool_id=ids[one.name],
            shared=common,
        )
        if one.name in seen:
            done = _refusal(done, "its name was offered before; an upstream's names must differ")
        elif shared[done.tool_id] > 1 and before.get(one.name) != done.tool_id:
            done = _refusal(done, f"the overlay gives the name `{done.tool_id}` to two tools; rename one of them")
        seen.add(one.name)
        imported.append(done)
    return imported


def _measured(definition: Definition, left: int) -> tuple[int, str]:
    """Count the objects and lists of a definition's schemas, and say which limit they exceed, if any."""
    parts, characters = 0, 0
    waiting: list[Any] = [
        definition.input_schema, definition.output_schema, definition.description, definition.title,
    ]  # fmt: skip
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            characters += len(one)
        elif isinstance(one, dict):
            parts += 1
            members = cast("Json", one)
            characters += sum(len(str(name)) for name in members)
            waiting.extend(members.values())
        elif isinstance(one, list):
            parts += 1
            waiting.extend(cast("list[Any]", one))
        if parts > MOST_PARTS:
            return parts, f"its schemas have more than {MOST_PARTS:,} parts"
        if parts > left:
            return parts, f"its schemas and those before it have more than {MOST_PARTS_OF_ALL:,} parts"
        if characters > MOST_CHARACTERS:
            return parts, f"its definition has more than {MOST_CHARACTERS:,} characters"
    return parts, ""


def to_manifest(
    definition: Definition,
    *,
    upstream: str,
    kind: str,
    version: str,
    overlay: Overlay = NO_OVERLAY,
    accept_hints: bool = False,
    prefix: bool = True,
    credentials: Sequence[str] = (),
    tool_id: str | None = None,
    others: Mapping[str, Definition] | None = None,
    shared: Shared | None = None,
) -> Imported:
    """Make the manifest of a foreign definition, or the reason why it has none. `others` are those it may name, and
    `shared` the parts of schemas that it may share with them.
    """
    stated = overlay.of(definition.name)
    judged = classify(definition, overlay, accept_hints=accept_hints)
    given = tool_id or stated.rename or clean_id(definition.name)
    try:
        done = Imported(definition, given, definition_digest(definition), judged)
    except Failure as failure:
        return Imported(definition, given, "", judged, refused=f"its definition is not JSON: {failure.message}")
    if stated.hide:
        return _refusal(done, "hidden by the overlay")
    if judged.mutation_class == "write_reversible" and stated.undo is None:
        return _refusal(done, "say in the overlay how it is undone (`undo`), or say write_irreversible")
    if stated.undo is not None and judged.mutation_class != "write_reversible":
        return _refusal(done, f"the overlay says how it is undone, and it is {judged.mutation_class}: say which holds")
    needs: list[str] = []
    try:
        contract = _contract(done, upstream, kind_of(kind), stated, needs, shared)
        contract["execution"]["native"] |= overlay.marks(definition.name)
        if stated.if_match is not None:
            contract["execution"]["native"] |= stated.if_match.native(
                definition,
                others or {},
                judged.mutation_class,
                lambda one: classify(one, overlay, accept_hints=accept_hints).mutation_class,
            )
        if stated.undo is not None:
            contract["execution"]["undo"] = recipe_of(
                stated.undo,
                definition,
                others or {},
                lambda one: classify(one, overlay, accept_hints=accept_hints),
                definition_digest,
            )
        manifest = parse_manifest(
            {
                "version": version,
                "namespace": upstream if prefix else _UNPREFIXED,
                "required_permissions": [f"credentials:{name}" for name in credentials],
                **contract,
            }
        )
    except Failure as failure:
        return _refusal(done, failure.message.removeprefix("manifest refused: "), needs)
    # All conditions except for the contract tests, which have not run yet.
    verdict = examine(manifest, done.digest, {}, None)
    against = [
        fault for name, faults in verdict.refused.items() if name != "contract_tests_passing" for fault in faults
    ]
    if against:
        return _refusal(done, "; ".join(against), needs)
    return Imported(definition, given, done.digest, judged, manifest, tuple(needs))


def _contract(
    done: Imported, upstream: str, kind: UpstreamKind, stated: ToolOverlay, needs: list[str], shared: Shared | None
) -> Json:
    """The parts of the manifest that follow from the definition and the overlay."""
    definition, judged = done.definition, done.judged
    name = visible(definition.name)
    own: Json = {"idempotent_by_key": True} if stated.idempotent_by_key else {}
    if stated.off_schema == "warn":
        own["off_schema"] = "warn"
    if stated.stale_s is not None and judged.mutation_class == "read_only":
        own["stale_s"] = stated.stale_s
    described = visible(definition.description).strip()
    description = stated.description or _description(definition, upstream, described, needs)
    if stated.description is None and description != described:
        own[OWN_DESCRIPTION] = described[:_LONGEST_OWN]
    return {
        "tool_id": done.tool_id,
        "name": name if 3 <= len(name) <= 255 else done.tool_id,
        "title": stated.title or visible(definition.title or "") or name,
        "description": description,
        "provider": upstream,
        "external_service": upstream,
        "protocol": kind.protocol,
        "tool_kind": kind.tool_kind,
        "parameters": _parameters(definition, stated, needs, shared),
        "result_schema": _result(definition, kind, stated, shared),
        "mutation_class": judged.mutation_class,
        "idempotency": {} if stated.idempotency in (None, "caller") else {"key": stated.idempotency},
        "observability": {},
        "previews": judged.mutation_class != "read_only",
        "compensable": stated.undo is not None,
        "annotations": _annotations(definition, stated, needs),
        **_effects(done.tool_id, upstream, judged, stated),
        **_time(judged, stated),
        **_as_stated(stated),
        "execution": {
            "kind": "upstream",
            "target": upstream,
            "native": {**_native(definition, stated), **own},
            "implementation": done.digest,
        },
    }


def _annotations(definition: Definition, stated: ToolOverlay, needs: list[str]) -> Json:
    """The upstream's hints, and what its description leaves open: then nothing is checked there."""
    notes = () if stated.result_schema is not None else definition.notes
    needs += notes
    hints: Json = {"hints": dict(definition.hints)} if definition.hints else {}
    return hints | ({"unchecked": list(notes)} if notes else {})


def _refusal(done: Imported, reason: str, needs: Sequence[str] = ()) -> Imported:
    return Imported(done.definition, done.tool_id, done.digest, done.judged, None, tuple(needs), reason)


def definition_digest(definition: Definition) -> str:
    """The digest by which a definition is pinned: over everything that the upstream stated, in one form."""
    return digest_of(
        {
            "name": definition.name,
            "title": definition.title,
            "description": definition.description,
            "input_schema": definition.input_schema,
            "output_schema": definition.output_schema,
            "native": definition.native,
            "hints": dict(definition.hints),
        }
    )


def _effects(tool_id: str, upstream: str, judged: Judged, stated: ToolOverlay) -> Json:
    if stated.effects:
        return {"effects": stated.effects}
    if judged.mutation_class == "read_only":
        return {}
    return {"effects": [Effect(f"upstream:{upstream}/{tool_id}", "UPDATE", "system")]}


def _time(judged: Judged, stated: ToolOverlay) -> Json:
    """Its timeouts: half a minute by default. A write that must not run twice is then of class async."""
    if stated.timeout_class is not None and stated.timeout_default is None:
        return {"timeout_class": stated.timeout_class}
    seconds = stated.timeout_default or _TIMEOUT_S
    fitting = stated.timeout_class or infer_class(seconds)
    again = judged.mutation_class == "read_only" or stated.restart_safe or stated.idempotent_by_key
    if stated.timeout_class is None and fitting == "long_running" and not again:
        fitting = "async"
    return {"timeout_class": fitting, "timeout_default": seconds}


_COPIED = (
    "timeout_max", "required_scopes", "approval", "concurrency_safe", "isolated_calls", "tags", "max_inline_chars",
    "max_result_bytes", "private_output", "estimated_cost", "search_hint", "examples",
)  # fmt: skip


def _as_stated(stated: ToolOverlay) -> Json:
    """The parts of the manifest that the operator stated."""
    facts: Json = {name: getattr(stated, name) for name in _COPIED if name in stated.model_fields_set}
    facts = {name: fact for name, fact in facts.items() if fact is not None}
    if stated.restart_safe or stated.idempotent_by_key:
        facts["restart_safe"] = True
    return facts


def _description(definition: Definition, upstream: str, described: str, needs: list[str]) -> str:
    """The description in the catalog, for people: within the bounds of a manifest, and made up where there is none."""
    if len(described) < _SHORTEST_DESCRIPTION:
        needs.append("a description of what it does")
        made = f"{in_words(visible(definition.title or definition.name))}, a tool of {upstream}"
        return f"{made}: {described}" if described else made
    if len(described) > _LONGEST_OWN:
        needs.append(f"a description of at most {_LONGEST_OWN:,} characters: it has {len(described):,}, cut")
    if len(described) > _LONGEST_DESCRIPTION:
        return described[: _LONGEST_DESCRIPTION - 2].rpartition(" ")[0] + " …"
    return described


# Schemas


def _parameters(definition: Definition, stated: ToolOverlay, needs: list[str], shared: Shared | None) -> Json:
    schema: Any = definition.input_schema
    if not isinstance(schema, dict) or not schema:
        raise Failure("E3105", "its input schema says nothing; it needs `type: object` and its properties")
    root = cleaned(cast("Json", schema), "input", shared)
    kind = resolve_ref(root, root).get("type", "object" if "properties" in root else None)
    if kind != "object":
        raise Failure("E3105", f"its input schema must have type `object`, not `{kind}`")
    root = {"type": "object", **resolve_ref(root, root)}
    # A property may be described by `true`: anything is allowed.
    known: Json = {
        name: {} if part is True else {"not": {}} if part is False else part
        for name, part in cast("Json", root.get("properties") or {}).items()
    }
    root["properties"] = known
    if stated.if_match is not None:
        stated.if_match.add_argument(definition, root, known)
    strange = [name for name in stated.parameters if name not in known]
    if strange:
        listing = unknown(strange[0], list(known), "which it does not take")
        raise Failure("E3105", f"the overlay describes `{strange[0]}`, {listing}")
    for name, part in properties_of(root).items():
        _document(root, name, part, stated.parameters.get(name), needs)
    if stated.closed:
        root = close(copied(root), free_form=False)
    fits = Schema(root)
    for index, example in enumerate(stated.examples):
        if not fits.valid(example):
            raise Failure("E3105", f"example {index + 1} of the overlay does not fit its input schema")
    return root


def _document(root: Json, name: str, part: Json, stated: ParameterOverlay | None, needs: list[str]) -> None:
    """Add what the operator states of a parameter, and remove examples that do not fit it: they would be tried."""
    whole = resolve_ref(root, part)
    if stated is not None and stated.description:
        part["description"] = stated.description
    elif not str(whole.get("description") or "").strip():
        needs.append(f"a description of `{name}`")
    if stated is not None and stated.sensitivity:
        part["x-sensitivity"] = stated.sensitivity
    if stated is not None and stated.kind:
        part[f"x-{stated.kind}"] = True
    if stated is not None and stated.examples:
        part["examples"] = list(stated.examples)
    if "examples" in part:
        fits = Schema(_alone(root, part))
        part["examples"] = [example for example in part["examples"] if fits.valid(example)]
        if not part["examples"]:
            del part["examples"]


def _alone(root: Json, part: Json) -> Json:
    """Return one property as a schema by itself, with the definitions it refers to."""
    beside = {word: root[word] for word in ("$schema", "$defs", "definitions") if word in root}
    return {**part, **beside}


def _native(definition: Definition, stated: ToolOverlay) -> Json:
    """The operation of the upstream. A result schema of the overlay takes the place of the upstream's altogether."""
    if stated.result_schema is None:
        return definition.native
    return {word: value for word, value in definition.native.items() if word != "whole_result"}


def _result(definition: Definition, kind: UpstreamKind, stated: ToolOverlay, shared: Shared | None) -> Json:
    declared = stated.result_schema if stated.result_schema is not None else definition.output_schema
    schema = None if declared is None else cleaned(declared, "output", shared)
    if PROTOCOLS[kind.protocol].mcp_form:
        return mcp_result(schema)
    if schema is None:
        raise Failure("E3105", "it does not say what it gives back; say result_schema in the overlay")
    return schema

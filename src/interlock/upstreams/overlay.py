"""From a foreign definition to a contract: what the upstream says, what the operator says, and which of them counts.

An upstream describes its tools as it likes. Its names, descriptions and schemas are taken, cleaned; its word about
safety is not: until the operator says otherwise, in an overlay kept under version control or by accepting the
upstream's hints, every tool is irreversible, and asked for as such. The overlay may also supply whatever a definition
lacks.

    defaults:
      required_scopes: [github]
    tools:
      list_issues: {mutation_class: read_only}
      create_issue:
        effects: [{resource: "repo:{owner}/{repo}", operation: CREATE}]
        parameters: {body: {description: The text of the issue, sensitivity: confidential}}
      delete_repository: {hide: true}

A definition becomes a manifest that admission takes, or is refused by name with what it needs; the others go on.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import pydantic
from pydantic import Field

from interlock.core.canonical import digest as digest_of
from interlock.core.connector import Definition, UpstreamKind
from interlock.core.contract import infer_class
from interlock.core.errors import Failure
from interlock.core.manifest import (
    Approval,
    Effect,
    Manifest,
    MutationClass,
    Part,
    SchemaDocument,
    TimeoutClass,
    ToolIdText,
    parse_manifest,
)
from interlock.core.schema import Fault, Json, Schema, pointer, properties_of, resolve_ref
from interlock.registry.admission import examine
from interlock.upstreams.schemas import cleaned, mcp_result, visible

# ── what the operator says ──────────────────────────────────────────────────────────────────────────────────────────


class ParameterOverlay(Part):
    """What the operator says of one parameter."""

    description: str | None = None
    sensitivity: Literal["pii", "secret", "credential", "confidential"] | None = None
    examples: tuple[Any, ...] = Field((), strict=False)


class ToolOverlay(Part):
    """What the operator says of one tool; unsaid, the upstream's word or the safe value stands.

    `restart_safe` says that the tool may be run again after a call of unknown outcome, `idempotent_by_key` that its
    upstream takes the caller's key and acts once under it, `stale_s` that a read may be answered with what its caller
    was told up to so many seconds ago while the upstream does not answer; such an answer is marked.
    """

    mutation_class: MutationClass | None = None
    effects: tuple[Effect, ...] = Field((), strict=False)
    timeout_class: TimeoutClass | None = None
    timeout_default: int | None = Field(None, ge=1, le=7200)
    timeout_max: int | None = Field(None, ge=1, le=86_400)
    required_scopes: tuple[str, ...] = Field((), strict=False)
    approval: Approval | None = None
    restart_safe: bool | None = None
    idempotent_by_key: bool | None = None
    concurrency_safe: bool | None = None
    tags: tuple[str, ...] = Field((), strict=False)
    max_inline_chars: int | None = Field(None, ge=100, le=10_000_000)
    estimated_cost: float | None = Field(None, ge=0)
    stale_s: int | None = Field(None, ge=1, le=604_800)
    hide: bool | None = None
    # Of one tool only: said of all of them they would make no sense.
    rename: ToolIdText | None = None
    title: str | None = None
    description: str | None = Field(None, min_length=10, max_length=2000)
    search_hint: str | None = None
    parameters: dict[str, ParameterOverlay] = Field(default_factory=dict[str, ParameterOverlay])
    result_schema: SchemaDocument | None = None
    examples: tuple[dict[str, Any], ...] = Field((), strict=False)


_OF_ONE = ("rename", "title", "description", "search_hint", "parameters", "result_schema", "examples")


class Overlay(Part):
    """What the operator says of an upstream's tools, by the upstream's own names."""

    defaults: ToolOverlay = ToolOverlay()  # pyright: ignore[reportCallIssue] - pydantic fills the defaults
    tools: dict[str, ToolOverlay] = Field(default_factory=dict[str, ToolOverlay])

    @pydantic.field_validator("defaults")
    @classmethod
    def _of_all(cls, said: ToolOverlay) -> ToolOverlay:
        strange = [name for name in _OF_ONE if name in said.model_fields_set]
        if strange:
            raise ValueError(f"`{strange[0]}` is said of one tool, not of all")
        return said

    def of(self, name: str) -> ToolOverlay:
        """All that is said of one tool: its own entry, and the defaults where that is silent."""
        own = self.tools.get(name)
        if own is None:
            return self.defaults
        silent = self.defaults.model_fields_set - own.model_fields_set
        return own.model_copy(update={field: getattr(self.defaults, field) for field in silent})

    def faults(self, names: Iterable[str]) -> list[Fault]:
        """Tools the overlay speaks of that the upstream does not have."""
        known = list(names)
        return [
            Fault(pointer(["tools", name]), _unknown(name, known, "not a tool of this upstream"))
            for name in self.tools
            if name not in known
        ]


NO_OVERLAY = Overlay()  # pyright: ignore[reportCallIssue] - pydantic fills the defaults


def parse_overlay(document: Json | str | bytes | None) -> Overlay:
    """Read an overlay, given as JSON or as a text of YAML or JSON; refuses with E3105 and each fault."""
    if isinstance(document, str | bytes):
        document = cast("Json | None", _loaded(document))
    if document is None:
        return NO_OVERLAY
    try:
        return Overlay.model_validate(document)
    except pydantic.ValidationError as error:
        entries = error.errors(include_url=False, include_context=False, include_input=False)
    faults = [_fault(entry) for entry in entries]
    listing = "; ".join(f"{fault.pointer or '/'} {fault.message}" for fault in faults[:5])
    details = {"faults": [fault.document() for fault in faults]}
    raise Failure("E3105", f"overlay refused: {listing}", details=details)


def _loaded(text: str | bytes) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Failure("E3105", f"the overlay is neither YAML nor JSON: {reason}") from None


def _fault(entry: Any) -> Fault:
    message = str(entry["msg"]).removeprefix("Value error, ")
    if entry["type"] == "extra_forbidden":
        place = entry["loc"]
        message = _unknown(str(place[-1]), _fields_at(place[:-1]), "not a field of an overlay")
    return Fault(pointer(entry["loc"]), message[0].lower() + message[1:])


def _fields_at(place: tuple[int | str, ...]) -> list[str]:
    """The fields that may stand at a place of an overlay, where it is one of its own."""
    match place:
        case ():
            return list(Overlay.model_fields)
        case ("defaults",) | ("tools", _):
            return list(ToolOverlay.model_fields)
        case ("tools", _, "parameters", _):
            return list(ParameterOverlay.model_fields)
        case _:
            return []


def _unknown(name: str, known: Sequence[str], words: str) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"{words}; did you mean `{near[0]}`?" if near else words


# ── what is believed ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Judged:
    """The class a tool gets, and why, in one line for people."""

    mutation_class: MutationClass
    why: str


def classify(definition: Definition, overlay: Overlay, *, accept_hints: bool) -> Judged:
    """Which class a tool gets. INVARIANT: nothing but the operator's word makes a tool less than irreversible."""
    own = overlay.tools.get(definition.name)
    if own is not None and own.mutation_class is not None:
        return Judged(own.mutation_class, "the overlay says so")
    if overlay.defaults.mutation_class is not None:
        return Judged(overlay.defaults.mutation_class, "the overlay says so of all its tools")
    if not accept_hints:
        return Judged("write_irreversible", "unknown, so treated as irreversible")
    hints = definition.hints
    if hints.get("readOnlyHint") is True:
        if hints.get("destructiveHint") is True:
            return Judged("write_irreversible", "its hints contradict one another, so treated as irreversible")
        return Judged("read_only", "its hint readOnlyHint was accepted")
    method = str(hints.get("method", "")).upper()
    if method in ("GET", "HEAD"):
        return Judged("read_only", f"{method}, and hints were accepted")
    if method or "readOnlyHint" in hints:
        return Judged("write_irreversible", f"{method or 'its hints'} may change things, so treated as irreversible")
    return Judged("write_irreversible", "no hint says otherwise, so treated as irreversible")


# ── the manifest ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of one definition: a manifest that admission takes, or the reason there is none.

    `needs` lists what was made up for want of the upstream's word, for the operator to say better in the overlay.
    """

    definition: Definition
    tool_id: str
    digest: str
    judged: Judged
    manifest: Manifest | None = None
    needs: tuple[str, ...] = ()
    refused: str | None = None


_PROTOCOLS: Mapping[UpstreamKind, str] = {"mcp": "mcp", "openapi": "openapi", "langchain": "langchain"}
_TOOL_KINDS: Mapping[UpstreamKind, str] = {"mcp": "mcp_tool", "openapi": "openapi_operation"}
_UNPREFIXED = "default"
_TIMEOUT_S = 30
_LONGEST_DESCRIPTION = 2000


def import_all(
    definitions: Sequence[Definition],
    *,
    upstream: str,
    kind: UpstreamKind,
    versions: Mapping[str, str] | str,
    overlay: Overlay = NO_OVERLAY,
    accept_hints: bool = False,
    prefix: bool = True,
    credentials: Sequence[str] = (),
    known: Mapping[str, str] | None = None,
) -> list[Imported]:
    """What becomes of everything an upstream offers. `known` are the ids its tools were given before, by their names.

    `versions` is the version to publish under: one for all, or one for each by the upstream's name.
    """
    before = known or {}
    ids = tool_ids((one.name for one in definitions), overlay, before)
    shared = Counter(ids.values())
    seen: set[str] = set()
    imported: list[Imported] = []
    for one in definitions:
        done = to_manifest(
            one,
            upstream=upstream,
            kind=kind,
            version=versions if isinstance(versions, str) else versions.get(one.name, "1.0.0"),
            overlay=overlay,
            accept_hints=accept_hints,
            prefix=prefix,
            credentials=credentials,
            tool_id=ids[one.name],
        )
        if one.name in seen:
            done = _refusal(done, "its name was offered before; an upstream's names must differ")
        elif shared[done.tool_id] > 1 and before.get(one.name) != done.tool_id:
            done = _refusal(done, f"the overlay gives the name `{done.tool_id}` to two tools; rename one of them")
        seen.add(one.name)
        imported.append(done)
    return imported


def to_manifest(
    definition: Definition,
    *,
    upstream: str,
    kind: UpstreamKind,
    version: str,
    overlay: Overlay = NO_OVERLAY,
    accept_hints: bool = False,
    prefix: bool = True,
    credentials: Sequence[str] = (),
    tool_id: str | None = None,
) -> Imported:
    """The manifest of a foreign definition, or why it has none."""
    said = overlay.of(definition.name)
    judged = classify(definition, overlay, accept_hints=accept_hints)
    given = tool_id or said.rename or clean_id(definition.name)
    try:
        done = Imported(definition, given, definition_digest(definition), judged)
    except Failure as failure:
        return Imported(definition, given, "", judged, refused=f"its definition is not JSON: {failure.message}")
    if said.hide:
        return _refusal(done, "hidden by the overlay")
    if judged.mutation_class == "write_reversible":
        return _refusal(done, "Interlock cannot undo what an upstream did; say write_irreversible in the overlay")
    needs: list[str] = []
    try:
        manifest = parse_manifest(
            {
                "version": version,
                "namespace": upstream if prefix else _UNPREFIXED,
                "required_permissions": [f"credentials:{name}" for name in credentials],
                **_contract(done, upstream, kind, said, needs),
            }
        )
    except Failure as failure:
        return _refusal(done, failure.message.removeprefix("manifest refused: "), needs)
    # What stands against it, but for the contract tests, which nobody has run yet.
    verdict = examine(manifest, done.digest, {}, None)
    against = [
        fault for name, faults in verdict.refused.items() if name != "contract_tests_passing" for fault in faults
    ]
    if against:
        return _refusal(done, "; ".join(against), needs)
    return Imported(definition, given, done.digest, judged, manifest, tuple(needs))


def _contract(done: Imported, upstream: str, kind: UpstreamKind, said: ToolOverlay, needs: list[str]) -> Json:
    """All of the manifest that follows from the definition and what is said of it."""
    definition, judged = done.definition, done.judged
    name = visible(definition.name)
    own: Json = {"idempotent_by_key": True} if said.idempotent_by_key else {}
    if said.stale_s is not None and judged.mutation_class == "read_only":
        own["stale_s"] = said.stale_s
    return {
        "tool_id": done.tool_id,
        "name": name if 3 <= len(name) <= 255 else done.tool_id,
        "title": said.title or visible(definition.title or "") or name,
        "description": said.description or _description(definition, upstream, needs),
        "provider": upstream,
        "external_service": upstream,
        "protocol": _PROTOCOLS.get(kind, "custom"),
        "tool_kind": _TOOL_KINDS.get(kind, "function"),
        "parameters": _parameters(definition.input_schema, said, needs),
        "result_schema": _result(definition, kind, said),
        "mutation_class": judged.mutation_class,
        "idempotency": {},
        "observability": {},
        "previews": judged.mutation_class == "write_irreversible",
        "annotations": {"hints": dict(definition.hints)} if definition.hints else {},
        **_effects(done.tool_id, upstream, judged, said),
        **_time(judged, said),
        **_as_said(said),
        "execution": {
            "kind": "upstream",
            "target": upstream,
            "native": {**definition.native, **own},
            "implementation": done.digest,
        },
    }


def _refusal(done: Imported, reason: str, needs: Sequence[str] = ()) -> Imported:
    return Imported(done.definition, done.tool_id, done.digest, done.judged, None, tuple(needs), reason)


def definition_digest(definition: Definition) -> str:
    """The digest by which a definition is pinned: over all that the upstream said, in one form."""
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


def _effects(tool_id: str, upstream: str, judged: Judged, said: ToolOverlay) -> Json:
    if said.effects:
        return {"effects": said.effects}
    if judged.mutation_class == "read_only":
        return {}
    return {"effects": [Effect(f"upstream:{upstream}/{tool_id}", "UPDATE", "system")]}


def _time(judged: Judged, said: ToolOverlay) -> Json:
    """How long it may take: half a minute unless said. A write that must not run twice is then of class async."""
    if said.timeout_class is not None and said.timeout_default is None:
        return {"timeout_class": said.timeout_class}
    seconds = said.timeout_default or _TIMEOUT_S
    fitting = said.timeout_class or infer_class(seconds)
    again = judged.mutation_class == "read_only" or said.restart_safe or said.idempotent_by_key
    if said.timeout_class is None and fitting == "long_running" and not again:
        fitting = "async"
    return {"timeout_class": fitting, "timeout_default": seconds}


_COPIED = (
    "timeout_max", "required_scopes", "approval", "concurrency_safe", "tags", "max_inline_chars", "estimated_cost",
    "search_hint", "examples",
)  # fmt: skip


def _as_said(said: ToolOverlay) -> Json:
    """What goes into the manifest as the operator said it."""
    facts: Json = {name: getattr(said, name) for name in _COPIED if name in said.model_fields_set}
    facts = {name: fact for name, fact in facts.items() if fact is not None}
    if said.restart_safe or said.idempotent_by_key:
        facts["restart_safe"] = True
    return facts


# ── names and descriptions ──────────────────────────────────────────────────────────────────────────────────────────

_HUMPS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_UNFIT = re.compile(r"[^a-z0-9]+")
_LONGEST_ID = 200


def clean_id(name: str) -> str:
    """A name as our ids are written: `getUserByName`, `get-user.by name` and `Get_User_By_Name` are one."""
    cleaned = _UNFIT.sub("_", _HUMPS.sub("_", name).lower()).strip("_")
    if len(cleaned) < 3 or not cleaned[0].isalpha():
        cleaned = f"tool_{cleaned}".rstrip("_")
    return cleaned[:_LONGEST_ID]


def tool_ids(names: Iterable[str], overlay: Overlay, known: Mapping[str, str]) -> dict[str, str]:
    """An id for every name, whatever the order they come in.

    INVARIANT: a newcomer never takes the id of a tool that has one: first come what the operator said, then the ids
    that were given before, then the names that are ids already, then the others, numbered where they collide.
    """
    left = sorted(set(names), key=lambda name: (clean_id(name) != name, name))
    given = {name: rename for name in left if (rename := overlay.of(name).rename) is not None}
    given |= {name: known[name] for name in left if name in known and name not in given}
    taken = set(given.values())
    for name in left:
        if name in given:
            continue
        plain = candidate = clean_id(name)
        number = 2
        while candidate in taken:
            candidate, number = f"{plain}_{number}", number + 1
        taken.add(candidate)
        given[name] = candidate
    return given


def in_words(name: str) -> str:
    """A name as words: `issueNumber` is `issue number`."""
    return " ".join(_UNFIT.sub(" ", _HUMPS.sub(" ", name).lower()).split()) or name


def _description(definition: Definition, upstream: str, needs: list[str]) -> str:
    text = visible(definition.description).strip()
    if len(text) < 10:
        needs.append("a description of what it does")
        made = f"{in_words(visible(definition.title or definition.name))}, a tool of {upstream}"
        return f"{made}: {text}" if text else made
    if len(text) > _LONGEST_DESCRIPTION:
        needs.append(f"a description of at most {_LONGEST_DESCRIPTION} characters: it has {len(text)}, cut")
        text = text[: _LONGEST_DESCRIPTION - 2].rpartition(" ")[0] + " …"
    return text


# ── schemas ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _parameters(schema: Any, said: ToolOverlay, needs: list[str]) -> Json:
    if not isinstance(schema, dict) or not schema:
        raise Failure("E3105", "its input schema says nothing; it needs `type: object` and its properties")
    root = cleaned(cast("Json", schema), "input")
    kind = resolve_ref(root, root).get("type", "object" if "properties" in root else None)
    if kind != "object":
        raise Failure("E3105", f"its input schema must have type `object`, not `{kind}`")
    root = {"type": "object", **resolve_ref(root, root)}
    # A property may be described by `true`: anything goes.
    known: Json = {
        name: {} if part is True else {"not": {}} if part is False else part
        for name, part in cast("Json", root.get("properties") or {}).items()
    }
    root["properties"] = known
    strange = [name for name in said.parameters if name not in known]
    if strange:
        listing = _unknown(strange[0], list(known), "which it does not take")
        raise Failure("E3105", f"the overlay describes `{strange[0]}`, {listing}")
    for name, part in properties_of(root).items():
        _document(root, name, part, said.parameters.get(name), needs)
    fits = Schema(root)
    for index, example in enumerate(said.examples):
        if not fits.valid(example):
            raise Failure("E3105", f"example {index + 1} of the overlay does not fit its input schema")
    return root


def _document(root: Json, name: str, part: Json, said: ParameterOverlay | None, needs: list[str]) -> None:
    """Give one parameter the words it lacks, and take from it a default or examples that do not fit it."""
    whole = resolve_ref(root, part)
    if said is not None and said.description:
        part["description"] = said.description
    elif not str(whole.get("description") or "").strip():
        part["description"] = f"The {in_words(name)}."
        needs.append(f"a description of `{name}`")
    if said is not None and said.sensitivity:
        part["x-sensitivity"] = said.sensitivity
    if said is not None and said.examples:
        part["examples"] = list(said.examples)
    if not {"default", "examples"} & part.keys():
        return
    fits = Schema(_alone(root, part))
    if "default" in part and not fits.valid(part["default"]):
        del part["default"]
    if "examples" in part:
        part["examples"] = [example for example in part["examples"] if fits.valid(example)]
        if not part["examples"]:
            del part["examples"]


def _alone(root: Json, part: Json) -> Json:
    """One property as a schema by itself, with what its references lead to."""
    beside = {word: root[word] for word in ("$schema", "$defs", "definitions") if word in root}
    return {**part, **beside}


def _result(definition: Definition, kind: UpstreamKind, said: ToolOverlay) -> Json:
    declared = said.result_schema if said.result_schema is not None else definition.output_schema
    schema = None if declared is None else cleaned(declared, "output")
    if kind == "mcp":
        return mcp_result(schema)
    if schema is None:
        raise Failure("E3105", "it does not say what it gives back; say result_schema in the overlay")
    return schema

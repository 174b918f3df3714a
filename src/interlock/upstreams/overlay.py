"""The operator's overlay on an upstream's tools, and the rules on whose statement counts.

An upstream describes its tools as it likes. Its statements about safety are not trusted: until the operator says
otherwise, in an overlay kept under version control or by accepting the upstream's hints, every tool is irreversible,
and needs approval as such. The overlay may also supply whatever a definition lacks.

    defaults:
      required_scopes: [github]
    tools:
      list_issues: {mutation_class: read_only}
      create_issue:
        effects: [{resource: "repo:{owner}/{repo}", operation: CREATE}]
        parameters: {body: {description: The text of the issue, sensitivity: confidential}}
      read_file:
        parameters: {path: {kind: path}}
      delete_repository: {hide: true}
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

import pydantic
from pydantic import Field

from interlock.call.conditional import READ_BY
from interlock.call.connector import Definition
from interlock.contract.manifest import (
    Approval,
    Effect,
    KeyFrom,
    ManifestPart,
    MutationClass,
    SchemaDocument,
    ToolIdText,
)
from interlock.contract.recipes import Step, Undo
from interlock.contract.timeouts import TimeoutClass
from interlock.core.errors import Failure
from interlock.data.documents import Malformed, read_yaml
from interlock.data.schema import Fault, Json, pointer
from interlock.upstreams.conditions import IfMatch
from interlock.upstreams.judgement import Judged, judge


class ParameterOverlay(ManifestPart):
    """The operator's statements about one parameter.

    `kind` states what its texts are, so that rules see them in normal form: a path, a URL, a host or a command. For a
    list or an object it applies to every text in it; a list that is a command is one program and its words.
    """

    description: str | None = None
    kind: Literal["path", "url", "host", "command"] | None = None
    sensitivity: Literal["pii", "secret", "credential", "confidential"] | None = None
    examples: tuple[Any, ...] = Field((), strict=False)


class ToolOverlay(ManifestPart):
    """The operator's statements about one tool; where they are silent, the upstream's statement or the safe value
    applies.

    `restart_safe` states that the tool may be run again after a call of unknown outcome, `idempotent_by_key` that its
    upstream takes the idempotency key and acts once under it, `idempotency` where that key comes from, `stale_s` that
    a read may be answered with an answer of up to that age while the upstream does not answer; such an answer is
    marked. `closed` refuses arguments that an input schema does not declare where it says nothing of them, which lets
    them in otherwise. `off_schema: warn` passes on a result that does not fit its schema, with a warning; by default
    such a call fails. Calls of a batch run beside others if `concurrency_safe` and, because an upstream is another
    system, `isolated_calls` are set.
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
    idempotency: KeyFrom | None = None
    undo: Undo | None = None
    if_match: IfMatch | None = None
    concurrency_safe: bool | None = None
    isolated_calls: bool | None = None
    tags: tuple[str, ...] = Field((), strict=False)
    max_inline_chars: int | None = Field(None, ge=100, le=10_000_000)
    max_result_bytes: int | None = Field(None, ge=100, le=1 << 30)
    private_output: bool | None = None
    estimated_cost: float | None = Field(None, ge=0)
    stale_s: int | None = Field(None, ge=1, le=604_800)
    off_schema: Literal["error", "warn"] | None = None
    closed: bool | None = None
    hide: bool | None = None
    # For one tool only: as defaults for all they would make no sense.
    rename: ToolIdText | None = None
    title: str | None = None
    description: str | None = Field(None, min_length=10, max_length=2000)
    search_hint: str | None = None
    parameters: dict[str, ParameterOverlay] = Field(default_factory=dict[str, ParameterOverlay])
    result_schema: SchemaDocument | None = None
    examples: tuple[dict[str, Any], ...] = Field((), strict=False)


# Fields that make no sense as defaults of all tools.
OF_ONE = (
    "rename",
    "title",
    "description",
    "search_hint",
    "parameters",
    "result_schema",
    "examples",
    "undo",
    "if_match",
)


class Overlay(ManifestPart):
    """The operator's statements about an upstream's tools, by the upstream's own names."""

    defaults: ToolOverlay = ToolOverlay.model_construct()
    tools: dict[str, ToolOverlay] = Field(default_factory=dict[str, ToolOverlay])

    @pydantic.field_validator("defaults")
    @classmethod
    def _of_all(cls, defaults: ToolOverlay) -> ToolOverlay:
        strange = [name for name in OF_ONE if name in defaults.model_fields_set]
        if strange:
            raise ValueError(f"`{strange[0]}` is set for one tool, not for all")
        return defaults

    def of(self, name: str) -> ToolOverlay:
        """Return all statements about one tool: its own entry, then the defaults."""
        own = self.tools.get(name)
        if own is None:
            return self.defaults
        silent = self.defaults.model_fields_set - own.model_fields_set
        return own.model_copy(update={field: getattr(self.defaults, field) for field in silent})

    def marks(self, name: str) -> Json:
        """Return what the statements on other tools add to a tool's operation: writes are for the version it reads."""
        read_by = any(one.if_match is not None and one.if_match.read_by == name for one in self.tools.values())
        return {READ_BY: True} if read_by else {}

    def faults(self, names: Iterable[str]) -> list[Fault]:
        """List the tools of the overlay that the upstream does not have."""
        known = list(names)
        return [
            Fault(pointer(["tools", name]), unknown(name, known, "not a tool of this upstream"))
            for name in self.tools
            if name not in known
        ]


NO_OVERLAY = Overlay.model_construct()


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
    try:
        documents = read_yaml(text)
    except Malformed as error:
        raise Failure("E3105", f"the overlay is neither YAML nor JSON: {error}") from None
    if len(documents) > 1:
        raise Failure("E3105", "the overlay is several documents; write one")
    return documents[0] if documents else None


def _fault(entry: Any) -> Fault:
    message = str(entry["msg"]).removeprefix("Value error, ")
    if entry["type"] == "extra_forbidden":
        place = entry["loc"]
        message = unknown(str(place[-1]), _fields_at(place[:-1]), "not a field of an overlay")
    return Fault(pointer(entry["loc"]), message[0].lower() + message[1:])


def _fields_at(place: tuple[int | str, ...]) -> list[str]:
    """Return the fields that are allowed at a place of an overlay, if it is a part of its own."""
    match place:
        case ():
            return list(Overlay.model_fields)
        case ("defaults",) | ("tools", _):
            return list(ToolOverlay.model_fields)
        case ("tools", _, "parameters", _):
            return list(ParameterOverlay.model_fields)
        case ("tools", _, "if_match"):
            return list(IfMatch.model_fields)
        case ("tools", _, "undo"):
            return list(Undo.model_fields)
        case ("tools", _, "undo", "before"):
            return list(Step.model_fields)
        case _:
            return []


def unknown(name: str, known: Sequence[str], words: str) -> str:
    """Describe an unknown name, with the one that was perhaps meant."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"{words}; did you mean `{near[0]}`?" if near else words


# Trust


def classify(definition: Definition, overlay: Overlay, *, accept_hints: bool) -> Judged:
    """Determine the class of a tool by its definition and an overlay."""
    own = overlay.tools.get(definition.name)
    stated = None if own is None else own.mutation_class
    return judge(definition.hints, stated, overlay.defaults.mutation_class, accept_hints=accept_hints)


def hinted(overlay: Json, definitions: Iterable[Definition]) -> list[str]:
    """The names of tools that are read-only by their hints alone: nobody has stated it, nor anything else."""
    parsed = parse_overlay(overlay)
    return [
        one.name
        for one in definitions
        if classify(one, parsed, accept_hints=True).mutation_class == "read_only"
        and classify(one, parsed, accept_hints=False).mutation_class != "read_only"
    ]


def with_hints(overlay: Json, definitions: Iterable[Definition]) -> Json:
    """An overlay that states of these tools what their hints say of them; what it states already stays."""
    tools: Json = dict(overlay.get("tools") or {})
    for name in hinted(overlay, definitions):
        tools[name] = {**(tools.get(name) or {}), "mutation_class": "read_only"}
    return {**overlay, "tools": tools}


def stored_overlay(overlay: Json | None) -> Json:
    """Check an overlay and return its stored form."""
    return parse_overlay(overlay).model_dump(mode="json", exclude_unset=True)

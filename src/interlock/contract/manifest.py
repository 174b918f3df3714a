"""The manifest: the document that declares a tool.

Its fields, bounds and defaults follow the published manifest schema; the fields after `author` are what the contract
needs beyond it. Parts that admission requires are optional here, so that an incomplete manifest can be saved as a draft
and its refusal can name everything that is missing at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

from interlock.contract import executors
from interlock.contract.examples import KnownPair, RecordedExample
from interlock.contract.executors import OWN_DESCRIPTION, PROTOCOLS, ExecutorKind
from interlock.contract.recipes import Recipe
from interlock.contract.texts import (
    Day,
    NamespaceText,
    Permission,
    SchemaDocument,
    ToolIdText,
    Uri,
    check_domain,
    check_email,
    check_version,
)
from interlock.contract.timeouts import DEFAULT_S, LONGEST_S, TimeoutClass
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.data.canonical import canonical
from interlock.data.schema import (
    Fault,
    Json,
    Schema,
    pointer,
    properties_of,
    resolve_ref,
    walk,
)
from interlock.privacy.patterns import is_secret_name

MutationClass = Literal["read_only", "write_reversible", "write_irreversible"]
CompensationClass = Literal[
    "fully_reversible", "semantically_reversible", "compensable_with_side_effects", "irreversible"
]  # fmt: skip
LifecycleState = Literal["active", "deprecated", "sunset", "removed"]
Operation = Literal["CREATE", "UPDATE", "DELETE"]
Tier = Literal[0, 1, 2, 3]
HandlerName = Literal["preview", "compensate", "check", "preflight", "version_of", "verify", "fixture", "concurrent"]
ToolKind = Literal[
    "function", "mcp_tool", "openapi_operation", "native_tool", "browser_action", "shell_command", "code_execution",
    "file_operation", "web_search", "retrieval", "model_task", "skill_tool", "peer_agent_tool", "policy_check",
    "artifact_operation", "evidence_export", "custom",
]  # fmt: skip

# How well an effect can be undone, and the class that follows. An effect that leaves traces counts as not undone.
CLASS_OF_COMPENSATION: Mapping[CompensationClass, MutationClass] = {
    "fully_reversible": "write_reversible",
    "semantically_reversible": "write_reversible",
    "compensable_with_side_effects": "write_irreversible",
    "irreversible": "write_irreversible",
}

if TYPE_CHECKING:
    _Kind = type(BaseModel)
else:

    class _Kind(type(BaseModel)):
        """Makes a part that an author writes in Python: by name or in order, refused with a message (E3105)."""

        def __call__(cls, *values, **facts):
            named = dict(zip(cls.model_fields, values, strict=False))
            if len(values) > len(named) or named.keys() & facts.keys():
                raise Failure("E3105", f"{cls.__name__}(…) takes {', '.join(cls.model_fields)}, each once")
            try:
                return super().__call__(**named, **facts)
            except pydantic.ValidationError as error:
                faults = _faults_of(error)
                words = "; ".join(f"{fault.pointer[1:].replace('/', '.') or 'it'} {fault.message}" for fault in faults)
                details = {"faults": [fault.document() for fault in faults]}
                raise Failure("E3105", f"{cls.__name__}(…) was refused: {words}", details=details) from None


class ManifestPart(BaseModel, metaclass=_Kind):
    """A piece of a manifest: closed, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants", defer_build=True)


class RetryPolicy(ManifestPart):
    max_attempts: int = Field(3, ge=1, le=10)
    backoff_multiplier: float = Field(2.0, ge=1.0, le=10.0)
    backoff_max_seconds: int = Field(60, ge=1, le=300)
    retry_on_status_codes: tuple[Annotated[int, Field(ge=400, le=599)], ...] = Field(
        (429, 500, 502, 503, 504), strict=False
    )
    jitter: Literal["full", "proportional"] = Field(
        "full",
        description="full: a delay between 0 and the backoff; proportional: the backoff, more or less by jitter_factor",
    )
    jitter_factor: float = Field(0.2, ge=0.0, le=10.0)


class CircuitBreakerConfig(ManifestPart):
    per: Literal["service", "tool"] = Field(
        "service", description="service: all tools of the service share a breaker; tool: this tool has its own"
    )
    failure_threshold: int = Field(5, ge=1, le=100)
    success_threshold: int = Field(3, ge=1, le=100)
    timeout_seconds: int = Field(60, ge=1, le=3600)
    half_open_max_calls: int = Field(10, ge=1, le=100)
    window_seconds: int = Field(60, ge=1, le=3600)
    failure_rate: float | None = Field(
        None, gt=0.0, le=1.0, description="opens from this share of failures on, besides failure_threshold"
    )
    failure_rate_calls: int = Field(10, ge=1, le=10_000, description="how many calls the share is taken of at least")
    canary_share: float | None = Field(
        None, gt=0.0, le=1.0, description="half open, only this share of the calls passes at first"
    )


class BreakerRule(CircuitBreakerConfig):
    """An operator's settings for the breakers of some services and tools, in place of those of manifests."""

    services: str = Field("*", description="the services that it is for, as a pattern")
    tools: str = Field("*", description="the tools that it is for, as a pattern")

    def applied(self, config: CircuitBreakerConfig) -> CircuitBreakerConfig:
        overrides = {name: getattr(self, name) for name in self.model_fields_set - {"services", "tools"}}
        return config.model_copy(update=overrides)


class CheckpointConfig(ManifestPart):
    enabled: bool = False
    micro_interval_seconds: int = Field(30, ge=10, le=300)
    macro_events: tuple[str, ...] = Field((), strict=False)


class ResourceLimits(ManifestPart):
    cpu: str = Field("1", pattern=r"^[0-9]{1,15}m?$")
    memory: str = Field("512Mi", pattern=r"^[0-9]{1,15}(Mi|Gi)$")
    ephemeral_storage: str = Field("1Gi", pattern=r"^[0-9]{1,15}(Mi|Gi)$")

    @property
    def cores(self) -> float:
        return int(self.cpu[:-1]) / 1000 if self.cpu.endswith("m") else float(self.cpu)

    @property
    def memory_bytes(self) -> int:
        return _bytes(self.memory)

    @property
    def storage_bytes(self) -> int:
        return _bytes(self.ephemeral_storage)


def _bytes(text: str) -> int:
    return int(text[:-2]) * {"Mi": 2**20, "Gi": 2**30}[text[-2:]]


class NetworkPolicy(ManifestPart):
    allowed_domains: tuple[Annotated[str, AfterValidator(check_domain)], ...] = Field((), strict=False)
    allowed_ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = Field((80, 443), strict=False)
    deny_all_egress: bool = False


class Author(ManifestPart):
    name: str | None = None
    email: Annotated[str, AfterValidator(check_email)] | None = None
    url: Uri | None = None


class Effect(ManifestPart):
    """One change a write tool may make: a resource template over its input, what is done to it, and how far."""

    resource: str = Field(min_length=1, max_length=1000)
    operation: Operation
    scope: str = "resource"

    if TYPE_CHECKING:

        def __init__(self, resource: str, operation: Operation, scope: str = "resource") -> None: ...


class Precondition(ManifestPart):
    """A condition on a resource right before a call changes anything; both parts are templates over its input.

    The version is the one the caller saw, `*` where any will do, or empty where there must be none. A version that
    names an argument is stated by the caller, and not asked for where they leave it out.
    """

    resource: str = Field(min_length=1, max_length=1000)
    version: str = Field("*", max_length=1000)

    if TYPE_CHECKING:

        def __init__(self, resource: str, version: str = "*") -> None: ...


KeyFrom = Literal["caller", "request", "each"]


class IdempotencyPart(ManifestPart):
    """Keys come from the caller; the window defaults to max(2 x class maximum, the configured minimum).

    For a tool of an upstream, the operator may decide otherwise. `request`: the key is the client's own identity of the
    request. `each`: a request without a key is a new action, and its record says that nothing protected it from being
    sent twice.
    """

    key: KeyFrom = "caller"
    window_seconds: int | None = Field(None, ge=1, le=31_536_000)


class ObservabilityPart(ManifestPart):
    trace: bool = True
    metrics: bool = True
    audit: Literal[True] = True  # an unaudited tool does not exist


class ApprovalStep(ManifestPart):
    """A group of approvers, and when it is notified after the ticket was opened; by default, by the fraction."""

    group: str = Field(min_length=1, max_length=255)
    after_seconds: int | None = Field(None, ge=0)


class Approval(ManifestPart):
    """The approvers of a call, the steps of escalation, and the time after which no answer counts as a denial."""

    timeout_seconds: int = Field(86_400, ge=1, le=2_592_000)
    escalation_fraction: float = Field(0.5, gt=0.0, le=1.0)
    chain: tuple[ApprovalStep, ...] = Field(
        (
            ApprovalStep.model_construct(group="approvers", after_seconds=0),
            ApprovalStep.model_construct(group="managers", after_seconds=3600),
            ApprovalStep.model_construct(group="admins", after_seconds=14_400),
        ),
        min_length=1,
        max_length=10,
        strict=False,
    )


class Sandboxing(ManifestPart):
    """That the tool runs isolated, and what it finds there.

    Tier 0 has neither files nor network, tier 1 reads what `reads` names (as /in/NAME), tier 2 also reaches the hosts
    of its network policy, tier 3 has the host's files and network and is asked for at every call. Only that one has to
    be said; of the others a tool gets the lowest that will do.

    A tool may print `output_bytes`, and leave as much again in files: at most `artifacts` of them, in the directory
    that `context.out` and INTERLOCK_OUT name.
    """

    tier: Tier = 0
    imports: tuple[str, ...] = Field(default=(), strict=False)
    reads: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")], str] = Field(
        default_factory=dict[str, str]
    )
    pids: int = Field(default=64, ge=1, le=4096)
    tmp_bytes: int = Field(default=100 * 2**20, ge=2**12, le=2**34)
    output_bytes: int = Field(default=2**20, ge=1, le=2**28)
    artifacts: int = Field(default=0, ge=0, le=1000)


# Types of content that a tool adds by itself: see `ctx.attach`.
AddedType = Literal[
    "text", "json", "image", "audio", "video", "file", "resource_link", "embedded_resource", "log", "diff"
]
Expected = Annotated[str, StringConstraints(min_length=1, max_length=512)]


_PLACEHOLDER = expression(r"\{([A-Za-z_][A-Za-z0-9_]*)(\.\.\.)?\}")
_LONGEST_COMMAND = 1 << 17  # bytes; the kernel accepts no longer word, and no program should need more in all
Word = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]


def _known_kind(name: Any) -> Any:
    known = executors.kinds()
    if name in known:
        return name
    *first, last = (repr(one) for one in known)
    raise PydanticCustomError("literal_error", "Input should be {known}", {"known": f"{', '.join(first)} or {last}"})


class Execution(ManifestPart):
    """The way a tool is run: the kind of executor, what it is pointed at, and the digest of the admitted code.

    A program is written down word by word, and no shell reads the words. `{path}` in a word stands for the argument
    `path`, as one word; `{paths...}` gives one word for each item of a list, and none if it is absent. A tool of an
    upstream names the upstream, and in `native` the operation there.
    """

    kind: Annotated[str, BeforeValidator(_known_kind)] = Field(
        "function", json_schema_extra={"enum": [*executors.kinds()]}
    )
    target: str = Field(min_length=1, max_length=2000)
    implementation: str | None = None
    handlers: dict[HandlerName, str] = Field(default_factory=dict[HandlerName, str])
    argv: tuple[Word, ...] = Field(default=(), strict=False, max_length=1000)
    # `json`: the whole input; `none`; or the argument to send as text. `auto`: `json` unless `argv` names a parameter.
    stdin: str = Field(default="auto", min_length=1)
    parse: Literal["json", "text", "lines"] = "text"
    env: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], Word] = Field(
        default_factory=dict[str, str]
    )
    cwd: str = Field(default="/tmp", pattern=r"^/[^\x00]*$")  # noqa: S108 - the sandbox's own, private to the call
    # the upstream's own operation, as pinned at admission
    native: dict[str, Any] = Field(default_factory=dict[str, Any])
    # how a tool of an upstream undoes the operation
    undo: Recipe | None = None

    @pydantic.model_validator(mode="after")
    def _of_one_kind(self) -> Execution:
        row = executors.kind_of(self.kind)
        stated = {name for name in self.model_fields_set if name not in ("native", "undo") or getattr(self, name)}
        if (found := executors.foreign_field(self.kind, frozenset(stated))) is not None:
            name, kind = found
            raise ValueError(f"`{name}` is for {kind}s only; set kind: {kind}")
        if "native" in row.fields and (self.handlers or not self.native):
            raise ValueError(f"{row.noun} has `native`, which says what to ask for, and no handlers")
        if "argv" in row.fields:
            self._check_command()
        if self.handlers and not row.in_process:
            raise ValueError(f"{row.noun} has no handlers: what it would do is in `effects`")
        return self

    def _check_command(self) -> None:
        if not self.argv or self.argv[0] != self.target:
            raise ValueError("argv begins with the program that target names")
        if _PLACEHOLDER.search(self.target):
            raise ValueError("which program is run cannot come from the input")
        if "/" in self.target and not self.target.startswith("/"):
            raise ValueError("a program is a name that is on the PATH, or an absolute path")

    def faults(self, parameters: Json) -> Iterator[Fault]:
        """List the parts of a program's template that its input cannot fill, or could turn into an option."""
        schema = Schema(parameters)
        known, filled = schema.properties, {*parameters.get("required", ()), *(name for name, _ in schema.defaults)}
        for index, template in enumerate(self.argv):
            at, placeholders = f"/execution/argv/{index}", list(_PLACEHOLDER.finditer(template))
            if placeholders and template.startswith("-") and "=" not in template[: placeholders[0].start()]:
                yield Fault(at, f"`{template}` lets the input choose options; write --option={{name}} or two words")
            if len(placeholders) > 1 and any(one[2] for one in placeholders):
                yield Fault(at, f"`{template}` has a list and something else; give the list a word of its own")
            for name, many in (one.groups() for one in placeholders):
                if name not in known:
                    yield Fault(at, f"`{{{name}}}` is not a parameter")
                elif is_secret_name(name) or _holds_private(parameters, known[name], set()):
                    yield Fault(
                        at,
                        f"`{name}` is sensitive, and other users of the machine can read a command line;"
                        " send it by standard input (stdin)",
                    )
                elif not many and name not in filled:
                    yield Fault(at, f"`{name}` may be absent; require it, give it a default, or write {{{name}...}}")
        if self.stdin not in ("auto", "none", "json") and self.stdin not in known:
            yield Fault("/execution/stdin", f"`{self.stdin}` is neither auto nor none nor json nor a parameter")

    def words(self, arguments: Json) -> tuple[str, ...]:
        """Build the command for an input. Refuses values that the program could take for anything but data.

        INVARIANT: an argument is one word or a part of one, and never an option.
        """
        words: list[str] = []
        for template in self.argv:
            placeholder = _PLACEHOLDER.search(template)
            if placeholder is None:
                words.append(template)
                continue
            made = [_filled(template, given) for given in _each(placeholder, arguments)]
            if any("\0" in word for word in made):
                raise Failure("E3305", f"what stands for `{template}` holds a NUL character, which no word can")
            if placeholder.start() == 0 and "--" not in words and any(word.startswith("-") for word in made):
                raise Failure("E3305", f"what stands for `{template}` begins with `-`: it would be read as an option")
            words += made
        if sum(len(word.encode()) + 1 for word in words) > _LONGEST_COMMAND:
            raise Failure("E3308", f"the arguments make a command of more than {_LONGEST_COMMAND} bytes; send less")
        return tuple(words)

    def fed(self, arguments: Json) -> bytes:
        """The standard input of the program."""
        if self.stdin == "none" or (self.stdin == "auto" and any(map(_PLACEHOLDER.search, self.argv))):
            return b""
        return canonical(arguments) if self.stdin in ("auto", "json") else _text(arguments.get(self.stdin, "")).encode()


def _holds_private(root: Json, part: Json, seen: set[int]) -> bool:
    """Whether a part of a schema, or anything in it, is marked x-sensitivity or has the name of a secret."""
    node = resolve_ref(root, part)
    if id(node) in seen:
        return False
    seen.add(id(node))
    return any(
        "x-sensitivity" in one
        or any(map(is_secret_name, properties_of(one)))
        or ("$ref" in one and _holds_private(root, one, seen))
        for one in walk(node)
    )


def _each(placeholder: re.Match[str], arguments: Json) -> list[Json]:
    """Return the arguments once, or once per item of a list with the item in the list's place."""
    name, many = placeholder.groups()
    if not many:
        return [arguments]
    value = arguments.get(name)
    items = cast("list[Any]", value) if isinstance(value, list) else [] if value is None else [value]
    return [{name: item} for item in items]


def _filled(template: str, arguments: Json) -> str:
    return _PLACEHOLDER.sub(lambda match: _text(arguments[match[1]]), template)


def _text(value: Any) -> str:
    """Return text unchanged, anything else as JSON."""
    return value if isinstance(value, str) else canonical(value).decode()


class Manifest(ManifestPart):
    """A tool's declaration, checked field by field."""

    tool_id: ToolIdText
    version: Annotated[str, AfterValidator(check_version)]
    name: str = Field(min_length=3, max_length=255)
    description: str = Field(min_length=10, max_length=2000)
    provider: str
    protocol: Literal["native", "mcp", "openapi", "langchain", "custom"]
    parameters: SchemaDocument
    result_schema: SchemaDocument | None = None
    required_permissions: tuple[Permission, ...] | None = Field(None, strict=False)
    timeout_default: int = Field(DEFAULT_S, ge=1, le=LONGEST_S)
    timeout_max: int | None = Field(None, ge=1, le=86_400)
    # Defaults are made without a validator, which would be built when this module is imported.
    retry_policy: RetryPolicy = RetryPolicy.model_construct()
    circuit_breaker_config: CircuitBreakerConfig = CircuitBreakerConfig.model_construct()
    resource_limits: ResourceLimits = ResourceLimits.model_construct()
    network_policy: NetworkPolicy = NetworkPolicy.model_construct()
    external_service: str | None = None
    checkpoint_config: CheckpointConfig = CheckpointConfig.model_construct()
    lifecycle_state: LifecycleState = "active"
    deprecation_date: Day | None = None
    sunset_date: Day | None = None
    migration_guide_url: Uri | None = None
    replacement_tool_id: str | None = None
    priority: int = Field(5, ge=1, le=10)
    tags: tuple[str, ...] = Field((), strict=False)
    changelog: str | None = None
    breaking_changes: bool = False
    documentation_url: Uri | None = None
    source_code_url: Uri | None = None
    license: str | None = None
    author: Author | None = None

    # Beyond the published schema: parts that the ten-part contract needs.
    namespace: NamespaceText = "default"
    mutation_class: MutationClass | None = None
    compensation_class: CompensationClass | None = None
    timeout_class: TimeoutClass | None = None
    effects: tuple[Effect, ...] = Field((), strict=False)
    preconditions: tuple[Precondition, ...] = Field((), strict=False)
    idempotency: IdempotencyPart | None = None
    observability: ObservabilityPart | None = None
    error_schema: SchemaDocument | None = None
    required_scopes: tuple[str, ...] = Field((), strict=False)
    tool_kind: ToolKind = "function"
    title: str | None = None
    aliases: tuple[ToolIdText, ...] = Field((), strict=False)
    search_hint: str | None = None
    examples: tuple[dict[str, Any], ...] = Field((), strict=False)
    known_pairs: tuple[KnownPair, ...] = Field(
        (),
        strict=False,
        max_length=100,
        description="inputs, and the outputs the tool must give; run at admission",
    )
    recorded_examples: tuple[RecordedExample, ...] = Field(
        (),
        strict=False,
        max_length=100,
        description="inputs of examples that a read-only tool is not run with at admission, and recorded outputs",
    )
    annotations: dict[str, Any] = Field(default_factory=dict)
    compensable: bool = False
    previews: bool = False
    versioned: bool = False
    has_fixture: bool = False
    concurrency_safe: bool = False
    isolated_calls: bool = Field(
        False,
        description="no call of this tool sees or disturbs what another call does; needed for writes and tools with"
        " external_io to run beside others",
    )
    restart_safe: bool = False
    external_io: bool = True
    cancellable: bool = True
    paged: bool = False
    coerce_output: bool = False
    tolerant_output: bool = False
    behaviour_change: bool = False
    redact_results: bool = True
    max_inline_chars: int = Field(25_000, ge=100, le=10_000_000)
    max_result_bytes: int | None = Field(None, ge=100, le=1 << 30)
    persist_output: bool = True
    private_output: bool = Field(
        False, description="results are kept and referred to, whatever their size; no answer or transcript holds them"
    )
    content_types: tuple[AddedType, ...] = Field(
        default=(), strict=False, description="types of content that the tool adds to its result, beside the value"
    )
    expected_artifacts: tuple[Expected, ...] = Field(
        default=(), strict=False, description="names of the files that a call leaves, such as report.pdf or *.csv"
    )
    expected_resources: tuple[Expected, ...] = Field(
        default=(),
        strict=False,
        description="URIs of resources that a result refers to, such as https://wiki.example/*",
    )
    approval: Approval | None = None
    sandbox: Sandboxing | None = None
    estimated_cost: float | None = Field(None, ge=0)
    execution: Execution | None = None

    @property
    def address(self) -> str:
        """The global name: namespace plus tool_id."""
        return f"{self.namespace}.{self.tool_id}"

    @property
    def full_description(self) -> str:
        """The description for models and programs: of an upstream's tool, its own words whole."""
        own = None if self.execution is None else self.execution.native.get(OWN_DESCRIPTION)
        return self.description if own is None else str(own)

    @property
    def tier(self) -> Tier:
        """The lowest tier that covers what the tool requests."""
        sandbox, network = self.sandbox, self.network_policy
        if sandbox is not None and sandbox.tier == 3:
            return 3
        if (network.allowed_domains or self._lists("network:")) and not network.deny_all_egress:
            return 2
        files = (sandbox and sandbox.reads) or self._lists("filesystem:")
        return 1 if files or (self.execution and self.execution.env) else 0

    def _lists(self, family: str) -> bool:
        return any(one.startswith(family) for one in self.required_permissions or ())

    @property
    def runs_as(self) -> ExecutorKind:
        """The row of its kind of execution."""
        return executors.kind_of("function" if self.execution is None else self.execution.kind)

    @property
    def executor(self) -> str:
        """The module that runs it."""
        row = self.runs_as
        return row.module if self.sandbox is None or row.sandboxed_by is None else row.sandboxed_by

    @property
    def reports_progress(self) -> bool:
        """Whether a call can report progress: functions and MCP servers can; programs and other services cannot."""
        return self.runs_as.reports_progress or PROTOCOLS[self.protocol].reports_progress

    def document(self) -> Json:
        """The manifest as JSON, without defaults."""
        return self.model_dump(mode="json", exclude_unset=True)


def parse_manifest(document: Any) -> Manifest:
    """Read a manifest; refuses with E3105 and a JSON pointer to each fault."""
    if not isinstance(document, Mapping):
        raise Failure("E3105", "a manifest is an object", details={"faults": [Fault("", "not an object").document()]})
    try:
        manifest = Manifest.model_validate(document)
    except pydantic.ValidationError as error:
        raise _refused(_faults_of(error)) from None
    except RecursionError:
        raise _refused([Fault("", "nested too deeply")]) from None
    if manifest.timeout_max is not None and manifest.timeout_max < manifest.timeout_default:
        raise _refused([Fault("/timeout_max", "timeout_max is below timeout_default")])
    if manifest.compensation_class is not None:
        counts_as = CLASS_OF_COMPENSATION[manifest.compensation_class]
        if manifest.mutation_class not in (None, counts_as):
            raise _refused([Fault("/compensation_class", f"{manifest.compensation_class} is {counts_as}")])
        manifest = manifest.model_copy(update={"mutation_class": counts_as})
    sandbox = manifest.sandbox
    if sandbox is not None and manifest.runs_as.sandboxed_by is None:
        words = f"{manifest.runs_as.noun} runs there: it has no sandbox here, and leaves no artifacts"
        raise _refused([Fault("/sandbox", words)])
    if sandbox is not None and "tier" in sandbox.model_fields_set and sandbox.tier < manifest.tier:
        words = f"files, an environment or hosts are had at tier {manifest.tier}; say that one, or none"
        raise _refused([Fault("/sandbox/tier", words)])
    if manifest.recorded_examples and manifest.mutation_class != "read_only":
        raise _refused([Fault("/recorded_examples", "only a read_only tool may leave an example without a run")])
    unfit = [fault for name in ("annotations", "examples", *_SCHEMAS) for fault in _unfit(manifest, name)]
    if unfit:
        raise _refused(unfit)
    return manifest


_SCHEMAS = ("parameters", "result_schema", "error_schema")


def _unfit(manifest: Manifest, name: str) -> Iterator[Fault]:
    """List the values in a free part of the manifest that JSON cannot represent."""
    try:
        canonical(getattr(manifest, name))
    except Failure as failure:
        yield Fault(f"/{name}", failure.message)


def _refused(faults: list[Fault]) -> Failure:
    listing = "; ".join(f"{fault.pointer or '/'} {fault.message}" for fault in faults[:5])
    return Failure("E3105", f"manifest refused: {listing}", details={"faults": [fault.document() for fault in faults]})


def _faults_of(error: pydantic.ValidationError) -> list[Fault]:
    return [_fault(entry) for entry in error.errors(include_url=False, include_context=False, include_input=False)]


def _fault(entry: Any) -> Fault:
    message = str(entry["msg"]).removeprefix("Value error, ")
    if entry["type"] == "extra_forbidden":
        name = str(entry["loc"][-1])
        near = difflib.get_close_matches(name, _fields_at(entry["loc"][:-1]), n=1)
        message = f"not a field of a manifest; did you mean `{near[0]}`?" if near else "not a field of a manifest"
        if name in _OF_SANDBOXES:
            message = f"for sandboxed tools only: write sandbox: {{{name}: …}}"
    message = _WORDS.get(entry["type"], message)
    return Fault(pointer(entry["loc"]), message[0].lower() + message[1:])


_OF_SANDBOXES = Sandboxing.model_fields.keys()
# pydantic's messages on Python types, reworded for JSON types.
_WORDS = {
    "missing": "missing",
    "tuple_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
}


def _fields_at(path: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return the fields of the part of a manifest that a path leads to."""
    part: type[BaseModel] = Manifest
    for step in path:
        if isinstance(step, str) and step in part.model_fields:
            part = _model_in(part.model_fields[step].annotation) or part
    return tuple(part.model_fields)


def _model_in(hint: Any) -> type[BaseModel] | None:
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return hint
    return next((model for one in get_args(hint) if (model := _model_in(one))), None)

"""The tool contract: one typed value with ten mandatory parts."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import orjson

from interlock.contract.admitted import Admitted
from interlock.contract.executors import PROTOCOLS
from interlock.contract.timeouts import CLASS_MAX_S, TimeoutPolicy, stated_policy
from interlock.core.errors import ErrorClass, ErrorCode, Failure
from interlock.core.record import dataclass
from interlock.data.canonical import digest
from interlock.data.schema import Json, Schema, properties_of, resolve_ref

if TYPE_CHECKING:
    from interlock.contract.manifest import Effect, KeyFrom, Manifest, MutationClass

MIN_WINDOW_S = 3600

ERROR_SCHEMA: Json = {
    "type": "object",
    "properties": {
        "errorCode": {"enum": [code.value for code in ErrorCode]},
        "error_code": {"type": "string", "pattern": "^E[0-9]{4}$"},
        "error_class": {"enum": [name.value for name in ErrorClass]},
        "retryable": {"type": "boolean"},
        "retryAfterMs": {"type": "integer", "minimum": 0},
        "humanMessage": {"type": "string"},
        "details": {"type": "object"},
        "traceId": {"type": "string"},
    },
    "required": ["errorCode", "error_code", "error_class", "retryable", "humanMessage", "traceId"],
}


@dataclass(frozen=True, slots=True)
class ToolId:
    """A tool's global address: namespace and name."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}.{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthContract:
    """The scopes and permissions that a caller needs for the tool to run."""

    required_permissions: tuple[str, ...]
    required_scopes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencySpec:
    """Whether an idempotency key is required, where it comes from, and the minimum lifetime of its record."""

    key_required: bool
    window_s: int | None
    key_from: KeyFrom = "caller"

    def window(self, timeout: TimeoutPolicy, minimum_s: int = MIN_WINDOW_S) -> int:
        """Seconds a record lives: max(2 x class maximum, the configured minimum), or the author's value if longer."""
        longest = timeout.max_s if timeout.timeout_class == "async" else CLASS_MAX_S[timeout.timeout_class]
        return max(int(2 * longest), minimum_s, self.window_s or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """The changes that the tool may make, and whether they can be undone."""

    mutation_class: MutationClass
    effects: tuple[Effect, ...]

    @property
    def writes(self) -> bool:
        return self.mutation_class != "read_only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observability:
    """The traces of a call that people can see. Audit cannot be switched off."""

    trace: bool
    metrics: bool


@dataclass(frozen=True, kw_only=True)
class Contract:
    """The ten parts, and the manifest they were read from."""

    id: ToolId
    version: str
    input: Schema
    output: Schema
    error: Schema
    auth: AuthContract
    timeout: TimeoutPolicy
    idempotency: IdempotencySpec
    mutation: Mutation
    observability: Observability
    manifest: Manifest

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything the author published. Two versions with one digest are the same version."""
        return digest(self.manifest.document())

    @cached_property
    def address(self) -> str:
        """The namespace and the name of the tool: `namespace.name`."""
        return str(self.id)

    @cached_property
    def ref(self) -> str:
        return f"{self.id}@{self.version}"

    @cached_property
    def runs_here(self) -> bool:
        """Whether the tool is a function of this process, outside any sandbox."""
        return self.manifest.sandbox is None and self.manifest.runs_as.in_process

    @property
    def mcp_form(self) -> bool:
        """Whether definition and results are those of an MCP server, which are passed on as such."""
        return PROTOCOLS[self.manifest.protocol].mcp_form

    @cached_property
    def tolerates_off_schema(self) -> bool:
        """Whether a result of an upstream that does not fit the schema is passed on with a warning."""
        execution = self.manifest.execution
        if execution is None or not self.manifest.runs_as.of_upstream:
            return False
        return execution.native.get("off_schema") == "warn"

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """The documentation that the input schema of a discovered tool lacks. A tool for Interlock would be refused."""
        from interlock.data.explain import undocumented

        written_here = PROTOCOLS[self.manifest.protocol].written_here
        return () if written_here else undocumented(self.manifest.parameters)

    @cached_property
    def delivers(self) -> Json:
        """The schema of what callers receive: for a paged tool the items, because the rest of a page is returned beside
        them.
        """
        document = self.output.document
        if not self.manifest.paged:
            return document
        shared = {name: document[name] for name in ("$schema", "$defs", "definitions") if name in document}
        return {**shared, **properties_of(resolve_ref(document, document)).get("items", {})}

    def document(self) -> Json:
        return self.manifest.document()


def timeout_policy(manifest: Manifest) -> TimeoutPolicy:
    """Read class and bounds of a manifest; refuses a class that contradicts the rest of it (E3105)."""
    for fault in class_faults(manifest):
        raise Failure("E3105", fault)
    return _stated_policy(manifest)


def _stated_policy(manifest: Manifest) -> TimeoutPolicy:
    names = ("timeout_class", "timeout_default", "timeout_max")
    return stated_policy({name: getattr(manifest, name) for name in names if name in manifest.model_fields_set})


def class_faults(manifest: Manifest) -> list[str]:
    """List what contradicts the timeout class of a manifest."""
    policy = _stated_policy(manifest)
    timeout_class, default_s = policy.timeout_class, policy.default_s
    faults: list[str] = []
    if default_s > CLASS_MAX_S[timeout_class]:
        faults.append(f"timeout_default of {default_s:g} s is above the {timeout_class} maximum")
    networked = any(permission.startswith("network:") for permission in manifest.required_permissions or ())
    if timeout_class == "interactive" and networked:
        faults.append("an interactive tool does no external I/O; drop the network permission or choose standard")
    if timeout_class == "interactive" and manifest.network_policy.allowed_domains:
        faults.append("an interactive tool does no external I/O; drop allowed_domains or choose standard")
    declared = manifest.external_io and "external_io" in manifest.model_fields_set
    remote = manifest.runs_as.of_upstream
    if manifest.timeout_class == "interactive" and (declared or remote):
        words = "choose standard" if remote else "set external_io to false or choose standard"
        faults.append(f"an interactive tool does no external I/O; {words}")
    restartable = manifest.restart_safe or manifest.mutation_class == "read_only"
    if timeout_class == "long_running" and not (restartable or manifest.checkpoint_config.enabled):
        faults.append("a long_running tool must be restart_safe or have checkpoints enabled, else choose async")
    return faults


def contract_of(manifest: Manifest) -> Contract:
    """Make the contract of a complete manifest; an incomplete one is refused with everything that is missing."""
    missing = missing_parts(manifest)
    if missing:
        raise Failure("E3105", f"{manifest.address} is incomplete: {'; '.join(missing.values())}")
    assert manifest.result_schema is not None
    assert manifest.mutation_class is not None
    assert manifest.required_permissions is not None
    assert manifest.idempotency is not None
    assert manifest.observability is not None
    if manifest.private_output and not manifest.persist_output:
        raise Failure("E3105", "private_output keeps every result, and persist_output: false keeps none; drop one")
    if manifest.expected_artifacts and (manifest.sandbox is None or not manifest.sandbox.artifacts):
        raise Failure("E3105", "expected_artifacts names files, and only a tool with sandbox.artifacts leaves any")
    if manifest.idempotency.key != "caller" and not manifest.runs_as.of_upstream:
        raise Failure("E3105", "idempotency.key is caller, except for tools of an upstream, whose operator decides")
    writes = manifest.mutation_class != "read_only"
    # A manifest is not changed once it is read: its contracts, of which admission makes several, share its schemas.
    takes = Schema(manifest.parameters, closed=PROTOCOLS[manifest.protocol].written_here, shared=True)
    if not takes.can_hide:
        raise Failure("E3105", "/parameters: a field that is x-internal is named by a condition, where it would show")
    return Contract(
        id=ToolId(manifest.namespace, manifest.tool_id),
        version=manifest.version,
        input=takes,
        output=Schema(manifest.result_schema, shared=True),
        error=Schema(manifest.error_schema or ERROR_SCHEMA, shared=True),
        auth=AuthContract(required_permissions=manifest.required_permissions, required_scopes=manifest.required_scopes),
        timeout=timeout_policy(manifest),
        idempotency=IdempotencySpec(
            key_required=writes and manifest.idempotency.key != "each",
            window_s=manifest.idempotency.window_seconds,
            key_from=manifest.idempotency.key,
        ),
        mutation=Mutation(mutation_class=manifest.mutation_class, effects=manifest.effects),
        observability=Observability(trace=manifest.observability.trace, metrics=manifest.observability.metrics),
        manifest=manifest,
    )


def missing_parts(manifest: Manifest) -> dict[str, str]:
    """List the parts of the contract that a manifest lacks, each with the line to add."""
    lines = {
        "result_schema": "result_schema: say what the tool returns",
        "required_permissions": "required_permissions: list what it needs, [] if nothing",
        "mutation_class": "mutation_class: read_only, write_reversible or write_irreversible",
        "idempotency": "idempotency: {} for the default window",
        "observability": "observability: {} for traces, metrics and audit",
    }
    return {name: line for name, line in lines.items() if getattr(manifest, name) is None}


def parse_contract(document: Any) -> Contract:
    """Read a contract from its document."""
    from interlock.contract.manifest import parse_manifest

    return contract_of(parse_manifest(document))


def admitted_contract(text: str, admitted: str) -> Contract:
    """Read the contract of an admitted tool from the text of its document.

    INVARIANT: a document that has not the digest it was admitted with is checked like a new one.
    """
    document: Json = orjson.loads(text)
    if digest(document) != admitted:
        return parse_contract(document)
    return contract_of(cast("Manifest", Admitted(text, document)))

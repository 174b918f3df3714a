"""One type per phase of a call, so that the order is checked and not remembered.

    Request ─► Requested ─► Checked ─► Granted ─► Ran ─► Verified ─► Result

Each can only be made from the one before it. An executor takes `Granted`, whose grant only the Authorize phase can set,
so a tool that was not validated and authorized cannot run. Reads on the fast path take the first three steps at once,
as a `FastRead` that carries the grant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from interlock.contract.standard.states import FAST_PATH_STATES, Trail
from interlock.core.record import NamedTuple, dataclass, record, step

if TYPE_CHECKING:
    import asyncio

    from interlock.call.artifacts import Artifact, File
    from interlock.call.connector import Interaction
    from interlock.call.context import Attestation, Caller, Context
    from interlock.call.cost import Meter
    from interlock.call.prepared import Prepared
    from interlock.contract.effects import Change
    from interlock.core.clock import Deadline
    from interlock.data.schema import Fault, Json

Source = Literal["compute", "replay", "preview", "cache", "synthetic"]
ToolOperation = Literal["invoke", "preview", "compensate"]
Behavior = Literal["allow", "ask", "deny", "passthrough"]


@step
class Request:
    """A request from an endpoint: caller, tool, input, idempotency key and deadline."""

    tool: str
    arguments: Mapping[str, Any]
    caller: Caller | None
    id: str | None = None
    version: str | None = None
    key: str | None = None
    session: str = ""
    trace_id: str | None = None
    timeout_s: float | None = None
    deadline: Deadline | None = None
    dry_run: bool = False
    operation: ToolOperation = "invoke"
    native: Mapping[str, Any] | None = None
    parent: str | None = None
    door: str = "library"
    on_progress: Callable[[Json], None] | None = None
    task: str | None = None
    # Set by a tool's own calls: the call whose budget they count in, and the private values they received.
    billed_to: str | None = None
    hidden: tuple[str, ...] = ()
    # How the caller can be asked while the call is made.
    interaction: Interaction | None = None
    # The client's own identity of this request, where its wire has one: the key of tools whose operator says so.
    identity: str | None = None

    @property
    def own_key(self) -> str | None:
        """The key that the caller chose; None if the key is only the identity of the request."""
        return None if self.key == self.identity else self.key


class ResultPart(NamedTuple):
    """An ordered part of a result: a piece of it, or an interim result that the tool yielded."""

    value: Any
    yielded: bool


Input = Literal["model_input", "observable_input", "permission_input", "call_input"]
INPUTS: tuple[Input, ...] = ("model_input", "observable_input", "permission_input", "call_input")


def between(source: str) -> tuple[Input, Input]:
    """Return the inputs between which a change of this source makes a difference."""
    kind = source.partition(":")[0]
    if kind == "hook":
        return "observable_input", "permission_input"
    return ("permission_input", "call_input") if kind == "reviewer" else ("model_input", "observable_input")


class _Absent(Enum):
    """Marks an absent value, where null is a value."""

    ABSENT = "absent"


ABSENT = _Absent.ABSENT


class Mutated(NamedTuple):
    """One difference between two of a call's inputs, and its source; ABSENT if one has no such place."""

    source: str
    pointer: str
    before: Any
    after: Any


class More:
    """Fields that few calls need. `Call.extend` makes it; a call that needs none of them shares `NOTHING`."""

    __slots__ = (
        "agreed",
        "approval",
        "approval_outcome",
        "artifacts",
        "attestations",
        "borrowed",
        "changes",
        "collects",
        "compensation",
        "context",
        "detected",
        "faults",
        "files",
        "foreseen",
        "head",
        "held",
        "hidden",
        "hook_outputs",
        "lease",
        "looking",
        "mappings",
        "meter",
        "mutations",
        "noted",
        "pagination",
        "parts",
        "predicted",
        "previewed",
        "private",
        "progress",
        "provenance",
        "redacted",
        "resources",
        "runs_on",
        "scope",
        "source",
        "span",
        "task",
        "used",
        "uses",
        "waiter",
        "warnings",
        "why",
    )  # fmt: skip

    def __init__(self) -> None:
        # Private values that the call received, and whether it has any: these, lent credentials, or private arguments.
        # True until Validate has found that it has none.
        self.hidden: tuple[str, ...] = ()
        self.private = True
        # Changes to the input, and additions to the result.
        self.mutations: list[Mutated] = []
        self.warnings: list[str] = []
        # What an executor found wrong with the output, by a schema that its tool does not hold.
        self.faults: tuple[Fault, ...] = ()
        self.hook_outputs: list[Json] = []
        self.parts: list[ResultPart] = []
        self.pagination: Json | None = None
        # The statement of an upstream on its data.
        self.provenance: Json | None = None
        self.progress = 0
        # The ids under which the executor knows the call, as external mappings of the standard.
        self.mappings: tuple[Json, ...] = ()
        # Files that it produced, to be stored if it succeeds, and the references to them.
        self.files: tuple[File, ...] = ()
        self.artifacts: tuple[Artifact, ...] = ()
        # The changes predicted by its manifest, those its tool reported, and those an executor detected.
        # `foreseen` are the predicted ones as they were found when its resources were.
        self.predicted: tuple[Change, ...] = ()
        self.foreseen: tuple[Change, ...] = ()
        self.changes: tuple[Change, ...] = ()
        self.detected: tuple[Change, ...] = ()
        self.attestations: tuple[Attestation, ...] = ()
        self.compensation: Json | None = None
        # The resources its input names, as recorded; None if none are recorded.
        self.resources: tuple[str, ...] | None = None
        # The approval it runs under, the mechanism, who approved which preview, and what the preview promised.
        self.approval: str | None = None
        self.approval_outcome: Json | None = None
        self.agreed: Json | None = None
        self.previewed: Json | None = None
        # Actions that use up its approval, budgets and rate limits, run with its intent, and whether they have run.
        self.uses: list[Callable[[Any], None]] | None = None
        self.used = False
        # Its locks, the credentials lent to it, and a meter.
        self.held: HeldResources | None = None
        self.lease: Lease | None = None
        self.meter: Meter | None = None
        # While it runs: the fields that its intent shares with its other records, its idempotency key as the store has
        # it, and how it is reached and stopped.
        self.head: Json | None = None
        self.scope: bytes | None = None
        # The row whose outcome it is answered with, if a call that waited for a person has run meanwhile.
        self.collects: bytes | None = None
        self.context: Context | None = None
        self.task: asyncio.Task[Any] | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.why: Why | None = None
        # Whether only the tool's preview runs, its tool continues after the call was cut off, the journal has it as
        # begun, and whether its failure is that of a call it made.
        self.looking = self.runs_on = self.noted = self.borrowed = False
        # The source of its result, and the places of it that were redacted.
        self.source: Source = "compute"
        self.redacted: tuple[str, ...] = ()
        # Its position in a trace, if it came with one or is traced.
        self.span: Traced | None = None


class _Nothing(More):
    """The `More` of all calls that have no special fields. It cannot be written to."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()
        for name in ("mutations", "warnings", "hook_outputs", "parts"):
            object.__setattr__(self, name, ())
        _Nothing.__setattr__ = _refuse_to_set


def _refuse_to_set(_: object, name: str, value: object) -> None:
    raise AttributeError(f"`{name}` is set on what Call.extend() returns")


NOTHING: More = _Nothing()


class Call(Trail):
    """One call, from its request to its result. All data of its records is here or in `more`.

    Phases pass on the same object. The types below state how far it has come.
    """

    __slots__ = (
        "deadline", "decision", "encoded", "grant", "id", "input", "input_hash", "known", "launched", "model_input",
        "more", "output", "own_id", "phases", "recorded", "request", "returned", "started", "started_ms", "tool",
        "trace_id", "value",
    )  # fmt: skip

    def __init__(self, call_id: str, trace_id: str, started_ms: int, started: float, request: Request) -> None:
        self.state = "planned"
        self.states = ["planned"]
        # A call that is sent again while a person decides takes the id that it had first.
        self.id = self.own_id = call_id
        # Whether others know that id, and may stop the call by it.
        self.known = request.id is not None
        self.trace_id = trace_id
        self.started_ms = started_ms
        self.started = started
        self.request = request
        self.phases = ["request"]
        self.more = NOTHING
        self.tool: Prepared | None = None
        # The input as it was sent, in canonical form; empty until it was read.
        self.model_input = b""
        self.input_hash = ""
        # The input as policy sees it and as the tool receives it.
        self.input: Json | None = None
        self.deadline = started
        self.decision: Decision | None = None
        # Set by the Authorize phase only. Executors run nothing without it.
        self.grant: object = None
        # Progress: its tool was started, its tool returned, its success is being written.
        self.launched = self.returned = self.recorded = False

    # The output of the tool, then in the form of the contract, without private values, and as JSON.
    output: Any
    value: Any
    encoded: bytes

    def extend(self) -> More:
        """The fields that only some calls have, for writing."""
        more = self.more
        if more is NOTHING:
            more = self.more = More()
        return more

    def latency_ms(self, now: float) -> float:
        """Return how long the call has taken, in milliseconds with three decimals."""
        return int((now - self.started) * 1_000_000) / 1000

    @property
    def ref(self) -> str:
        """The tool and version, or the requested name while it is not resolved."""
        return self.request.tool if self.tool is None else self.tool.ref

    @property
    def own_deadline(self) -> bool:
        """Whether the caller allows less time than the contract of the tool does."""
        return self.tool is not None and self.deadline < self.started + self.tool.contract.timeout.default_s


# `expired`: its locks may soon be those of others, because the store does not answer.
Why = Literal["timeout", "canceled", "sibling", "discarded", "fallback", "expired"]
# Reasons that a caller may give for ending a call.
Reason = Literal["interruption", "discard", "fallback", "sibling"]
REASONS: Mapping[Reason, Why] = {
    "interruption": "canceled", "discard": "discarded", "fallback": "fallback", "sibling": "sibling",
}  # fmt: skip


class Traced(Protocol):
    """A position in a trace, for requests to others."""

    @property
    def traceparent(self) -> str: ...

    @property
    def state(self) -> str: ...


class HeldResources(Protocol):
    """Resources that a call holds exclusively until it releases them."""

    def rest(self) -> None: ...

    def release(self) -> None: ...


class Lease(Protocol):
    """Credentials lent to one call and withdrawn when it ends."""

    def __getitem__(self, name: str, /) -> Any: ...

    @property
    def closed(self) -> bool: ...

    def values(self) -> Sequence[str]: ...

    async def rate_limited(self, name: str, ms: int) -> None: ...

    async def close(self) -> None: ...


@record
class Decision:
    """The decision of policy: the rules, the policy, the source, and until when it may be relied on."""

    behavior: Behavior
    reason: str
    rules: tuple[str, ...]
    policy: str
    source: str = "policy"  # policy | remote | gate | hook | token | permissions | scopes | approval
    expires_ms: int | None = None
    obligations: tuple[str, ...] = ()
    # The path because of which the call is refused or needs approval.
    blocked_path: str | None = None


STRENGTH: Mapping[Behavior, int] = {"passthrough": -1, "allow": 0, "ask": 1, "deny": 2}


def stricter(one: Decision | None, other: Decision) -> Decision:
    """Return the stricter of two decisions."""
    # INVARIANT: a decision made before policy cannot turn a deny of policy into an allow.
    return other if one is None or STRENGTH[other.behavior] >= STRENGTH[one.behavior] else one


if TYPE_CHECKING:
    # Each type narrows what the type before it leaves open. `cast` to one of them stands at the end of its phase, and
    # nowhere else. A mutable attribute may not be narrowed by a subclass in general; here no one else writes to it.

    class Requested(Call):
        """1. A call whose tool is known and whose time is bounded."""

        @property
        def tool(self) -> Prepared: ...  # pyright: ignore[reportIncompatibleVariableOverride]

    class Checked(Requested):
        """2. A call whose input fits the contract. `more` can be written to from here on."""

        @property
        def input(self) -> Json: ...  # pyright: ignore[reportIncompatibleVariableOverride]

    class Granted(Checked):
        """3. A checked call and the decision that allows it. Only the Authorize phase sets its grant.

        A grant for looking runs the tool's preview and nothing else.
        """

        @property
        def grant(self) -> object: ...  # pyright: ignore[reportIncompatibleVariableOverride]

    class Ran(Granted):
        """4. A call whose tool has run, with its output and what the tool reported about its effects."""

    class Verified(Ran):
        """5. A call whose result fits its contract, whose effects were confirmed, without private values."""

else:
    Requested = Checked = Granted = Ran = Verified = Call


@dataclass(slots=True, eq=False)
class FastRead:
    """1 to 3 in one: a read on the fast path, from its request to the start of its function.

    Only the Authorize phase can grant it: it sets `decision` and `grant` together.
    """

    request: Request
    caller: Caller
    tool: Prepared
    arguments: Json
    started_ms: int
    started: float
    # The input in canonical form, and a copy of it for the function alone.
    model_input: bytes
    own: Json | None
    # The caller's position in the trace, if the request names it.
    span: Traced | None = None
    # Set together with its decision, and then the rest.
    grant: object = None
    decision: Decision = field(init=False)
    input_hash: str = field(init=False)
    id: str = field(init=False)
    trace_id: str = field(init=False)

    def requested(self) -> Requested:
        """Return the call in the regular phases, in the state in which its tool runs."""
        call = Call(self.id, self.trace_id, self.started_ms, self.started, self.request)
        if self.span is not None:
            call.extend().span = self.span
        call.tool = tool = self.tool
        call.input = self.arguments
        call.model_input = self.model_input
        call.input_hash = self.input_hash
        call.decision = self.decision
        call.phases += ("validate", "authorize", "execute")
        call.state, call.states = FAST_PATH_STATES[-1], [*FAST_PATH_STATES]
        call.launched = True
        call.deadline = self.started + tool.contract.timeout.default_s
        return cast("Requested", call)

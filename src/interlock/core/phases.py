"""One type per phase of a call, so that the order is checked and not remembered.

    Request ─► Requested ─► Checked ─► Granted ─► Ran ─► Verified ─► Result

Each can only be made from the one before it. An executor takes `Granted`, whose seal only the Authorize phase holds, so
there is no way to run a tool that was not validated and authorized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from interlock.core.clock import Deadline
from interlock.core.context import Attestation, Caller, Change, Context
from interlock.core.contract import Contract
from interlock.core.schema import Json
from interlock.core.states import Trail

Source = Literal["compute", "replay", "preview", "cache", "synthetic"]
ToolOperation = Literal["invoke", "preview", "compensate"]
Behavior = Literal["allow", "ask", "deny"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a door hands over: who wants which tool to do what, under which key, by when."""

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
    native: Mapping[str, Any] = field(default_factory=dict[str, Any])
    parent: str | None = None
    door: str = "library"
    on_progress: Callable[[Json], None] | None = None


class Mutated(NamedTuple):
    """One difference between two of a call's inputs, and where it came from."""

    source: str
    pointer: str
    before: Any
    after: Any


class Handle(Protocol):
    """A registered version as the phases see it: its contract, and the way to run it."""

    @property
    def contract(self) -> Contract: ...


@dataclass(slots=True, kw_only=True)
class Call:
    """The running account of one call. It outlives every phase; the journal's record is written from it."""

    id: str
    trace_id: str
    started_ms: int
    started: float
    request: Request
    trail: Trail = field(default_factory=Trail)
    phases: list[str] = field(default_factory=lambda: ["request"])
    contract: Contract | None = None
    input_hash: str = ""
    mutations: list[Mutated] = field(default_factory=list[Mutated])
    decision: Decision | None = None
    warnings: list[str] = field(default_factory=list[str])
    additional_context: list[str] = field(default_factory=list[str])
    progress: int = 0
    parts: list[Any] = field(default_factory=list[Any])
    intent_at: int | None = None
    scope: bytes | None = None
    context: Context | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """1. A call whose tool is known and whose time is bounded. `model_input` is as it was sent, byte for byte."""

    call: Call
    tool: Handle
    model_input: bytes
    deadline: Deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """2. A call whose input fits the contract. Holds the input as policy sees it and as the tool will get it."""

    requested: Requested
    permission_input: Mapping[str, Any]
    call_input: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What policy said, by which rule, under which policy."""

    behavior: Behavior
    reason: str
    rules: tuple[str, ...]
    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """3. A checked call and the decision that allows it. Only the Authorize phase can set the seal."""

    checked: Checked
    decision: Decision
    seal: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """4. What came out of the tool, and what it said about its effects."""

    granted: Granted
    output: Any
    changes: tuple[Change, ...] = ()
    attestations: tuple[Attestation, ...] = ()
    compensation: Json | None = None
    context: Context | None = None
    source: Source = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """5. A result that fits its contract, whose effects were confirmed, with nothing private in it."""

    ran: Ran
    value: Any
    encoded: bytes
    redacted: tuple[str, ...] = ()


class Executor(Protocol):
    """Runs granted calls. Has no other entrance."""

    async def run(self, granted: Granted, context: Context | None) -> Any: ...

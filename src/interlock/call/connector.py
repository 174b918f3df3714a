"""The interface between the gateway and upstream systems: requests to an upstream, and its tools.

A connector speaks one protocol to one upstream (an MCP server, an HTTP, gRPC or WebSocket service, a LangChain tool).
Only the executor passes calls to it, and only granted ones. `native` maps a call to the upstream's own operation; it
was pinned when the tool was admitted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from interlock.call.artifacts import File
from interlock.call.context import Caller
from interlock.core.expressions import expression
from interlock.core.record import NamedTuple, dataclass, record

if TYPE_CHECKING:
    from interlock.contract.manifest import CircuitBreakerConfig, RetryPolicy
    from interlock.data.schema import Fault, Json


@dataclass(frozen=True, slots=True)
class Interaction:
    """Ways to involve the caller's client in a call, in the words of the Model Context Protocol.

    `capabilities` are those it declared (elicitation, sampling, roots). A client that can be asked during the call has
    `ask`. One that `calls_again` takes questions as the result of its request: those of a server that puts them so end
    the call (E3411, details `inputRequired`), which is made again with `answers` (inputResponses, requestState).
    `on_task` is called when the upstream has made a task of the call, for a client that takes tasks itself. `client`
    names the session of the client that `ask` reaches: calls with the same name have one client. Empty if it has none.
    """

    capabilities: Json = field(default_factory=dict[str, Any])
    ask: Callable[[str, Json], Awaitable[Json]] | None = None
    answers: Json = field(default_factory=dict[str, Any])
    calls_again: bool = False
    on_task: Callable[[], None] | None = None
    client: str = ""


class Outbound(Protocol):
    """The span of something that leaves the process. As a context manager it ends with its body."""

    @property
    def traceparent(self) -> str: ...

    def below(self, name: str, deadline: float, attributes: Mapping[str, str | float], /) -> Outbound | None: ...

    def note(self, attributes: Mapping[str, str | float], /) -> None: ...

    def __enter__(self) -> Outbound: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any, /) -> None: ...


ALONE = Interaction()
_IN_A_HEADER = ":/@+,;=#?"  # beside letters, digits and `_.-~`; the rest of an identity is percent-encoded
_NEEDS_NO_QUOTES = expression(r"[A-Za-z0-9_.~:/@+,;=#?-]*")


def _quoted(identity: str) -> str:
    if _NEEDS_NO_QUOTES.fullmatch(identity):
        return identity  # as nearly all: quoting takes ten times as long
    return quote(identity, safe=_IN_A_HEADER, errors="replace")


# Reads a file that an earlier call of a caller left, by its reference; E3702 if it is not theirs.
ReadFile = Callable[[str, Caller], Awaitable[bytes]]


@record
class RemoteCall:
    """One granted call, in the terms of a connector. `deadline` is on the clock of `monotonic`.

    `definition` is the digest of the definition that was admitted. A connector that looks an operation up by its name
    refuses, with E3210, one whose description has changed.
    """

    tool: str
    native: Json
    arguments: Json
    invocation_id: str
    caller: Caller
    deadline: float
    monotonic: Callable[[], float]
    traceparent: str
    retry: RetryPolicy
    breaker: CircuitBreakerConfig | None  # None for a trial, which counts for no breaker and is stopped by none
    own_deadline: bool = False  # the caller allows less time than the contract gives the service
    definition: str | None = None
    tracestate: str = ""
    key: str | None = None
    writes: bool = True
    credentials: Mapping[str, str] = field(default_factory=dict[str, str])
    progress: Callable[[Json], None] | None = None
    interaction: Interaction = ALONE
    # Returns why a host and port may not be reached for this call, or None; None if there are no restrictions.
    objection: Callable[[str, int], str | None] | None = None
    # Reads a file that an earlier call of the caller left, by its reference; E3702 if it is not theirs.
    read_file: Callable[[str], Awaitable[bytes]] | None = None
    # Its span, if it is traced. Each attempt has a span of its own.
    span: Outbound | None = None
    # The upstream's ids for this call, by their names in the standard's external mappings; for the record.
    reported: Json = field(default_factory=dict[str, Any])
    # Files that the answer consists of: they become artifacts of the result.
    files: list[File] = field(default_factory=list[File])
    # What is wrong with the answer by a schema that its tool does not hold, and what its caller must know of it.
    faults: list[Fault] = field(default_factory=list["Fault"])
    warnings: list[str] = field(default_factory=list[str])
    # The upstream's statement on its data: `data_version`, `confidence`.
    provenance: Json = field(default_factory=dict[str, Any])

    @property
    def trace(self) -> dict[str, str]:
        """The position in its trace, as W3C headers."""
        if self.tracestate:
            return {"traceparent": self.traceparent, "tracestate": self.tracestate}
        return {"traceparent": self.traceparent}

    @property
    def identity(self) -> dict[str, str]:
        """The caller and the agent that acts for them, as headers or metadata."""
        headers = {"x-interlock-caller": _quoted(self.caller.id)}
        if self.caller.agent is not None:
            headers["x-interlock-agent"] = _quoted(self.caller.agent)
        return headers

    @property
    def left_s(self) -> float:
        """The time left; never negative."""
        return max(0.0, self.deadline - self.monotonic())


class Aged(NamedTuple):
    """A cached answer, given because there is none now and the contract permits it: `native` says `stale_s`."""

    value: Any
    age_s: float


@dataclass(frozen=True, slots=True)
class Definition:
    """A tool as its upstream describes it. Nothing of it is trusted, `hints` least of all.

    `notes` are for the operator: what the description leaves open, and the consequence. They are no part of it.
    """

    name: str
    description: str
    input_schema: Json
    output_schema: Json | None
    native: Json
    hints: Mapping[str, Any] = field(default_factory=dict[str, Any])
    title: str | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Discovered:
    """The tools that an upstream offers at one moment, and those that could not be read: name and reason.

    `text` is what the upstream says about itself.
    """

    tools: Sequence[Definition]
    refused: Sequence[tuple[str, str]] = ()
    about: Json = field(default_factory=dict[str, Any])
    text: str = ""


# Placeholder for the caller in a secret's name. Without a caller, the secret is stored under the name NOBODY.
CALLER = "{caller}"
NOBODY = "_look"
_AS_IT_IS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")
_LONGEST_PART = 100


def secret_of(name: str, caller: Caller | None) -> str:
    """Expand `{caller}` in a secret's name for one caller: `github/{caller}` becomes `github/local.ada`.

    INVARIANT: no two callers, of whatever tenants, share a secret, and NOBODY's is never a caller's.
    """
    if CALLER not in name:
        return name
    if caller is None:
        return name.replace(CALLER, NOBODY)
    tenant = "" if caller.tenant == "local" else f"{_part(caller.tenant)}/"
    return name.replace(CALLER, tenant + _part(caller.id))


def _part(text: str) -> str:
    """Encode an id as a part of a secret's name. A colon becomes a dot; other invalid characters become `_` and their
    bytes.
    """
    coded = "".join(
        letter
        if letter in _AS_IT_IS
        else "."
        if letter == ":" and at
        else "".join(f"_{byte:02x}" for byte in letter.encode(errors="surrogatepass"))
        for at, letter in enumerate(text)
    )
    if 0 < len(coded) <= _LONGEST_PART:
        return coded
    return f"_sha256.{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()}"


class Connector(Protocol):
    """One upstream, connected when first needed. Its methods may be called concurrently.

    `call` returns the tool's value (Aged, if it is cached), or raises Failure: E3502 not reached or broken off, E3503
    no answer in time, E3504 rate limited (with retry_after_ms), E3401 the tool itself failed. A call that may have been
    carried out and must not be repeated is never sent again.

    `discover` and `probe` belong to no call. They are tried without credentials; a connector that needs some raises
    E3602 before it sends anything, and the method is called again with them.
    """

    def call(self, call: RemoteCall) -> Coroutine[Any, Any, Any]: ...

    def mapping(self, native: Json, reported: Json) -> Json | None:
        """The upstream's ids for a request, as an external mapping of the standard; None if it has none.

        Those of the operation are pinned in `native`; those of one call were `reported` by it.
        """
        ...

    async def discover(self, credentials: Mapping[str, str] | None = None) -> Discovered: ...

    async def probe(self, credentials: Mapping[str, str] | None = None) -> None:
        """Check whether the upstream answers; raises E3502 if not."""
        ...

    def forget(self) -> None:
        """Drop cached answers, because tools of the upstream have changed."""
        ...

    async def close(self) -> None: ...

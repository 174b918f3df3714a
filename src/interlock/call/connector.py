"""The seam between the gateway and systems that other people run: what is asked of an upstream, and what it offers.

A connector speaks one protocol to one upstream (an MCP server, an HTTP, gRPC or WebSocket service, a LangChain tool).
It is handed calls by the executor alone, which hands over nothing that was not granted. How a call maps to the
upstream's own operation is in `native`, which was pinned when the tool was admitted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

from interlock.call.context import Caller
from interlock.contract.manifest import CircuitBreakerConfig, RetryPolicy
from interlock.core.record import record
from interlock.data.schema import Json


@dataclass(frozen=True, slots=True)
class Interaction:
    """How the caller's own client can be involved in a call, in the words of the Model Context Protocol.

    `capabilities` are those it declared (elicitation, sampling). A client that can be asked right away has `ask`,
    whichever era the server speaks. For another, the call ends with the question (E3411, details `inputRequired`) and
    is made again with `answers` (inputResponses, requestState).
    """

    capabilities: Json = field(default_factory=dict[str, Any])
    ask: Callable[[str, Json], Awaitable[Json]] | None = None
    answers: Json = field(default_factory=dict[str, Any])


class Outbound(Protocol):
    """The span of something that leaves the process. As a context manager it ends with what its body ends with."""

    @property
    def traceparent(self) -> str: ...

    def below(self, name: str, deadline: float, attributes: Mapping[str, str | float], /) -> Outbound | None: ...

    def note(self, attributes: Mapping[str, str | float], /) -> None: ...

    def __enter__(self) -> Outbound: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any, /) -> None: ...


ALONE = Interaction()
_IN_A_HEADER = ":/@+,;=#?"  # beside letters, digits and `_.-~`; the rest of an identity is percent-encoded


@record
class RemoteCall:
    """One granted call, in terms that a connector needs. `deadline` is on the clock of `monotonic`.

    `definition` is the digest of the definition that was admitted. A connector that looks an operation up by its name
    refuses, with E3210, one that is described otherwise now.
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
    breaker: CircuitBreakerConfig
    definition: str | None = None
    tracestate: str = ""
    key: str | None = None
    writes: bool = True
    credentials: Mapping[str, str] = field(default_factory=dict[str, str])
    progress: Callable[[Json], None] | None = None
    interaction: Interaction = ALONE
    # Why a host and port may not be reached for this call, if so; None where nothing can object.
    objection: Callable[[str, int], str | None] | None = None
    # Its span, if it is traced. An attempt at it has a span of its own.
    span: Outbound | None = None
    # The ids that the upstream has for this call, by their names in the standard's external mappings; for the record.
    reported: Json = field(default_factory=dict[str, Any])
    # What the upstream says of its data: `data_version`, `confidence`.
    provenance: Json = field(default_factory=dict[str, Any])

    @property
    def trace(self) -> dict[str, str]:
        """The place in its trace, under the names that the W3C gives it."""
        if self.tracestate:
            return {"traceparent": self.traceparent, "tracestate": self.tracestate}
        return {"traceparent": self.traceparent}

    @property
    def identity(self) -> dict[str, str]:
        """Who the call is made for, as headers or metadata: the caller, and the agent that acts for them."""
        told = {"x-interlock-caller": quote(self.caller.id, safe=_IN_A_HEADER, errors="replace")}
        if self.caller.agent is not None:
            told["x-interlock-agent"] = quote(self.caller.agent, safe=_IN_A_HEADER, errors="replace")
        return told

    @property
    def left_s(self) -> float:
        """How much time is left; never below nought."""
        return max(0.0, self.deadline - self.monotonic())


class Aged(NamedTuple):
    """An answer from before, given because there is none now and the contract permits it: `native` says `stale_s`."""

    value: Any
    age_s: float


@dataclass(frozen=True, slots=True)
class Definition:
    """A tool as its upstream describes it. Nothing of it is trusted; `hints` least of all."""

    name: str
    description: str
    input_schema: Json
    output_schema: Json | None
    native: Json
    hints: Mapping[str, Any] = field(default_factory=dict[str, Any])
    title: str | None = None


@dataclass(frozen=True, slots=True)
class Discovered:
    """What an upstream offers at one moment, and what of it could not be understood: name and reason."""

    tools: Sequence[Definition]
    refused: Sequence[tuple[str, str]] = ()
    about: Json = field(default_factory=dict[str, Any])


# In a secret's name: whoever calls. One that is looked for on nobody's behalf is kept under the name NOBODY.
CALLER = "{caller}"
NOBODY = "_look"
_AS_IT_IS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")
_LONGEST_PART = 100


def secret_of(name: str, caller: Caller | None) -> str:
    """The secret that a name with `{caller}` in it means for one caller: `github/{caller}` is `github/local.ada`.

    INVARIANT: no two callers, of whatever tenants, share one, and nobody's is also a caller's.
    """
    if CALLER not in name:
        return name
    if caller is None:
        return name.replace(CALLER, NOBODY)
    tenant = "" if caller.tenant == "local" else f"{_part(caller.tenant)}/"
    return name.replace(CALLER, tenant + _part(caller.id))


def _part(text: str) -> str:
    """An id as a part of a secret's name. A colon is a dot; what a name cannot hold is written `_` and its bytes."""
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

    `call` gives the tool's value (Aged, if it is an old one), or raises Failure: E3502 not reached or broken off, E3503
    no answer in time, E3504 asked too often (with retry_after_ms), E3401 the tool itself said no. A call that may have
    been carried out and must not be twice is never sent again.

    A look (`discover`, `probe`) is nobody's call. It is tried with no credentials on loan; one that has to show some
    says so with E3602, before it has asked anything, and is then made again with them.
    """

    async def call(self, call: RemoteCall) -> Any: ...

    def mapping(self, native: Json, reported: Json) -> Json | None:
        """The upstream's ids for what it was asked, as an external mapping of the standard; None where it has none.

        Those of the operation are pinned in `native`; those of one call were `reported` by it.
        """
        ...

    async def discover(self, credentials: Mapping[str, str] | None = None) -> Discovered: ...

    async def probe(self, credentials: Mapping[str, str] | None = None) -> None:
        """Whether it answers; raises E3502 if not."""
        ...

    async def close(self) -> None: ...

"""The seam between the gateway and systems that other people run: what is asked of an upstream, and what it offers.

A connector speaks one protocol to one upstream (an MCP server, an HTTP, gRPC or WebSocket service, a LangChain tool).
It is handed calls by the executor alone, which hands over nothing that was not granted. How a call maps to the
upstream's own operation is in `native`, which was pinned when the tool was admitted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from interlock.core.context import Caller
from interlock.core.manifest import CircuitBreakerConfig, RetryPolicy
from interlock.core.schema import Json

UpstreamKind = Literal["mcp", "openapi", "http", "grpc", "websocket", "langchain"]


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


ALONE = Interaction()


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """One granted call, in terms that a connector needs. `deadline` is on the clock of `monotonic`."""

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
    tracestate: str = ""
    key: str | None = None
    writes: bool = True
    credentials: Mapping[str, str] = field(default_factory=dict[str, str])
    progress: Callable[[Json], None] | None = None
    interaction: Interaction = ALONE

    @property
    def left_s(self) -> float:
        """How much time is left; never below nought."""
        return max(0.0, self.deadline - self.monotonic())


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


class Connector(Protocol):
    """One upstream, connected when first needed. Its methods may be called concurrently.

    `call` gives the tool's value, or raises Failure: E3502 not reached or broken off, E3503 no answer in time, E3504
    asked too often (with retry_after_ms), E3401 the tool itself said no. A call that may have been carried out and
    must not be twice is never sent again.
    """

    async def call(self, call: RemoteCall) -> Any: ...

    async def discover(self) -> Discovered: ...

    async def probe(self) -> None:
        """Whether it answers; raises E3502 if not."""
        ...

    async def close(self) -> None: ...

"""The types that the proxy and its conversations share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol

from interlock.core.clock import Clock
from interlock.executors.egress.policy import EgressPolicy, EgressRefusal, Limits, Seen
from interlock.net.addresses import Resolve

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Record(Protocol):
    """The proxy of a call, as its conversations see it: what is allowed, and the record of what happens."""

    policy: EgressPolicy
    clock: Clock
    resolve: Resolve
    limits: Limits
    requests: list[Seen]
    wire_bytes: int

    def dial(self, address: str, port: int, /) -> Awaitable[Streams]: ...

    def refuse(self, refusal: EgressRefusal, /) -> None: ...

    def begin(self, seen: Seen, /) -> None: ...

    def end(self, seen: Seen, /) -> None: ...

"""Opens conversations with one MCP server: connects, and greets it in the era of the protocol that it speaks."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import orjson

from interlock.call.context import Caller
from interlock.call.mcp import APPS
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.data.schema import Json
from interlock.upstreams import wire
from interlock.upstreams.children import Crashed, Program
from interlock.upstreams.mcp.config import McpConfig
from interlock.upstreams.mcp.pipes import Pipes
from interlock.upstreams.mcp.protocol import Era, Wire
from interlock.upstreams.mcp.session import Session
from interlock.upstreams.response_limits import Allowance, Intake, in_thread


@dataclass(frozen=True, slots=True)
class Conversation:
    """The conversation that a call needs: the credentials, abilities and log level that it is opened with, and the
    caller whose it is, if it is not shared.
    """

    lent: Mapping[str, str]
    capabilities: Json = field(default_factory=dict[str, Any])
    level: str | None = None
    caller: Caller | None = None
    # Whether a server that speaks both eras is spoken to in the handshake era.
    handshake: bool = False
    # The client's own session, if it is of one client alone. The number of a conversation that carries one call at a
    # time; 0 for one that carries any number.
    client: str = ""
    number: int = 0

    @property
    def owner(self) -> tuple[str, ...]:
        """The tenant and the id of the caller whose it is; empty for one that callers share."""
        return () if self.caller is None else (self.caller.tenant, self.caller.id)

    @property
    def key(self) -> str:
        """Its key, without the secrets that opened it; empty for the shared one."""
        one = self.caller
        owner = None if one is None else [*self.owner, one.acting]
        if not self.lent and owner is None:
            return ""
        facts = [self.lent, self.capabilities, self.level, owner, self.handshake, self.client, self.number]
        return hashlib.sha256(orjson.dumps(facts, option=orjson.OPT_SORT_KEYS)).hexdigest()

    @property
    def mixed(self) -> bool:
        """Whether it may carry calls of several clients that can be asked, whose questions must say whose they are."""
        return bool(self.capabilities) and not self.client and not self.number


# The conversation of all callers, where no credentials are lent.
SHARED = Conversation({})


class Opener:
    """Opens conversations with one server. It is greeted in the way that worked last time.

    `on_change` is called when its tools may have changed, `on_doubt` when a question could belong to several calls.
    """

    def __init__(
        self,
        name: str,
        config: McpConfig,
        *,
        clock: Clock,
        on_change: Callable[[], None],
        on_doubt: Callable[[], None],
        logs: Path | None,
    ) -> None:
        self._name = name
        self._config = config
        self._intake = Intake(name, config.max_response_bytes, config.max_response_values)
        self._clock = clock
        self._on_change = on_change
        self._on_doubt = on_doubt
        self._logs = logs
        self._era: Era = config.protocol
        self._met = False
        self._attending: set[Callable[[str], None]] = set()

    def attend(self, hear: Callable[[str], None]) -> None:
        """Call `hear` with the server's list that changed: tools, resources or prompts."""
        self._attending.add(hear)

    def _list_changed(self, kind: str) -> None:
        for hear in self._attending:
            hear(kind)

    async def open(self, key: str, wanted: Conversation) -> Session:
        """Open the conversation that is kept under a key; the shared one has the empty key."""

        async def connect(session: Session) -> Wire:
            return await self._connect(session, key, wanted.lent)

        async def greet(era: Era) -> Session:
            return await Session.open(
                connect,
                era=era,
                capabilities=wanted.capabilities,
                extensions=APPS if self._config.apps else None,
                on_change=self._on_change,
                on_list=self._list_changed,
                on_doubt=self._on_doubt,
                mixed=wanted.mixed,
            )

        session = await (greet("handshake") if wanted.handshake else self._greeted(greet))
        if key == "":
            if self._met:
                self._on_change()  # its tools may have changed while it was away
                for kind in ("resources", "prompts"):
                    self._list_changed(kind)
            self._met = True
        return session

    async def _greeted(self, greet: Callable[[Era], Awaitable[Session]]) -> Session:
        """Greet the server in the way that worked last time, or find out which does."""
        try:
            session = await greet(self._era)
        except Crashed:
            if self._era != "auto":
                raise
            # Some servers of the handshake era end if the first message is not the handshake.
            self._era = "handshake"
            session = await greet(self._era)
        except Failure:
            self._era = self._config.protocol
            raise
        if self._config.protocol == "auto":
            self._era = "auto" if session.server.modern else "handshake"
        return session

    async def _connect(self, session: Session, key: str, lent: Mapping[str, str]) -> Wire:
        config = self._config
        allowance = Allowance(self._clock.monotonic, config.max_response_bytes)
        if config.url is None:
            log = None if self._logs is None else self._logs / f"{self._name}{key and '-'}{key[:8]}.log"
            program = Program(config.command, config.env, lent, config.cwd, log)
            return await Pipes.open(program, session, self._intake, allowance)
        # These libraries take a second to load, during which other calls continue.
        await in_thread(importlib.import_module, "interlock.upstreams.mcp.http")
        from interlock.upstreams.mcp.http import Http

        headers = {**config.headers, **lent}
        try:
            return await Http.open(
                config.url,
                headers,
                session,
                clock=self._clock,
                intake=self._intake,
                allowance=allowance,
                allow_private=config.allow_private,
                tls=config.tls,
            )
        except OSError:
            raise wire.unreached(self._name, "has an address that cannot be found") from None

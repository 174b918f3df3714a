"""The conversations with one MCP server, each kept open by a supervisor.

Calls of all callers share one, unless the upstream is lent credentials: then there is one for each set of them, since a
conversation is opened with them and must never serve anybody else. In the handshake era it is also opened with the
questions that the client can answer, so clients that can be asked have another; and since the protocol does not say
which call a log message is about, a caller who listens has one of their own. Those are bounded in number and closed
when they were not used for a while.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import orjson

from interlock.call.context import Caller
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.upstreams import wire
from interlock.upstreams.children import Crashed, Program, Restarts, Supervisor
from interlock.upstreams.mcp.config import McpConfig
from interlock.upstreams.mcp.pipes import Pipes
from interlock.upstreams.mcp.protocol import Era, Listening, RpcError, Wire
from interlock.upstreams.mcp.session import LIST_S, Session
from interlock.upstreams.response_limits import Allowance, Intake, in_thread

_log = logging.getLogger("interlock.upstreams.mcp")

MAX_SESSIONS = 32
IDLE_S = 300.0
DRAIN_S = 30.0
# The limit of a health request is five seconds; this one must expire first.
PROBE_S = 4.5


class Sessions:
    """All conversations with one server. `alert` is called when it cannot be kept running."""

    def __init__(
        self,
        name: str,
        config: McpConfig,
        *,
        clock: Clock,
        on_change: Callable[[], None],
        logs: Path | None,
        alert: Callable[[str], None] | None,
        restarts: Restarts | None,
    ) -> None:
        self._name = name
        self._config = config
        self._intake = Intake(name, config.max_response_bytes, config.max_response_values)
        self._clock = clock
        self._on_change = on_change
        self._logs = logs
        self._alert = alert or self._complain
        self._restarts = (restarts or Restarts()) if config.command else None
        self._era: Era = config.protocol
        self._met = False
        self._attending: set[Callable[[str], None]] = set()
        self._slots: OrderedDict[str, Supervisor[Session]] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def _complain(self, reason: str) -> None:
        _log.error("%s: %s", self._name, reason)

    def lent(self, credentials: Mapping[str, str]) -> dict[str, str]:
        """Return the caller's secrets under the names that the upstream knows; E3602 if one is missing."""
        lent: dict[str, str] = {}
        for shown, secret in self._config.credentials.items():
            value = credentials.get(secret)
            if not value:
                raise Failure("E3602", f"the call needs the credential `{secret}`: interlock secrets set {secret}")
            if shown.lower() == "authorization" and " " not in value:
                value = f"Bearer {value}"
            lent[shown] = value
        return lent

    def slot(
        self,
        lent: Mapping[str, str],
        capabilities: Json,
        listens: Listening | None = None,
        caller: Caller | None = None,
    ) -> Supervisor[Session]:
        """Return the conversation for a call, opened when it is first used."""
        level = None if listens is None else listens.level
        ear = None if level is None or caller is None else [level, caller.tenant, caller.id, caller.acting]
        key = _key(lent, capabilities, ear)
        slot = self._slots.get(key)
        if slot is None:
            self._close_idle()
            self._make_room()

            async def start() -> Session:
                session = await self._open(key, lent, capabilities)
                if level is not None:
                    await session.log_from(level, LIST_S)
                return session

            slot = Supervisor(start, clock=self._clock, restarts=self._restarts, alert=self._alert, name=self._name)
            self._slots[key] = slot
        self._slots.move_to_end(key)
        return slot

    # Opening

    async def _open(self, key: str, lent: Mapping[str, str], capabilities: Json) -> Session:
        async def connect(session: Session) -> Wire:
            return await self._connect(session, key, lent)

        async def greet(era: Era) -> Session:
            return await Session.open(
                connect, era=era, capabilities=capabilities, on_change=self._on_change, on_list=self._list_changed
            )

        session = await self._greeted(greet)
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

    def attend(self, hear: Callable[[str], None]) -> None:
        """Call `hear` with the server's list that changed: tools, resources or prompts."""
        self._attending.add(hear)

    def _list_changed(self, kind: str) -> None:
        for hear in self._attending:
            hear(kind)

    # Letting go

    def _close_idle(self) -> None:
        """Close conversations that were not used for a while. The shared one stays."""
        now = self._clock.monotonic()
        for key, slot in list(self._slots.items()):
            if key and not slot.busy and now - slot.used > IDLE_S:
                self._let_go(key)

    def _make_room(self) -> None:
        while len(self._slots) >= MAX_SESSIONS:
            key = next((key for key, slot in self._slots.items() if key and not slot.busy), None)
            if key is None:
                raise wire.unreached(self._name, f"is in use by {MAX_SESSIONS} identities at once", retry_after_ms=1000)
            self._let_go(key)

    def _let_go(self, key: str) -> None:
        self._spawn(self._slots.pop(key).close(DRAIN_S))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # Supervision

    async def probe(self, credentials: Mapping[str, str] | None = None) -> None:
        """Check that it answers within five seconds. A program that does not is ended, and so restarted.

        Its tools are also listed: a server that changes them silently is looked at again.
        """
        self._close_idle()
        slots = [slot for slot in self._slots.values() if slot.current is not None]
        slots = slots or [self.slot({} if credentials is None else self.lent(credentials), {})]
        failures = [failure for failure in await asyncio.gather(*map(self._ping, slots)) if failure is not None]
        if len(failures) == len(slots):
            raise failures[0]

    async def _ping(self, slot: Supervisor[Session]) -> Failure | None:
        session: Session | None = None
        try:
            session = await slot.get(PROBE_S)
            await session.ping(PROBE_S)
            before = session.listed
            if await session.tools(PROBE_S, anew=True) != before:
                self._on_change()
        except RpcError:
            return None  # it answers
        except Failure as failure:
            if session is not None and failure.code == "E3503":
                session.wire.abort()
            return Failure("E3502", f"`{self._name}` does not answer a health request: {failure.message}")
        return None

    async def replace(self) -> None:
        """Restart everything without losing a call: the new one is up before the old one is asked to finish."""
        await asyncio.gather(*(slot.replace(DRAIN_S) for slot in self._slots.values()))

    async def close(self) -> None:
        """End every conversation and every program."""
        slots, self._slots = list(self._slots.values()), OrderedDict()
        await asyncio.gather(*(slot.close() for slot in slots), *self._closing)

    def health(self) -> Json:
        """The state of the shared conversation, and the number of conversations, for monitoring."""
        slot = self._slots.get("")
        return {
            "state": "idle" if slot is None else slot.state,
            "reason": "" if slot is None else slot.reason,
            "restarts": sum(one.restarted for one in self._slots.values()),
            "sessions": sum(one.current is not None for one in self._slots.values()),
            "busy": sum(one.busy for one in self._slots.values()),
        }


def _key(lent: Mapping[str, str], capabilities: Mapping[str, Any], ear: list[str] | None) -> str:
    """Return the key of a conversation, without the secrets that opened it; empty for the shared one."""
    if not lent and not capabilities and ear is None:
        return ""
    return hashlib.sha256(orjson.dumps([lent, capabilities, ear], option=orjson.OPT_SORT_KEYS)).hexdigest()

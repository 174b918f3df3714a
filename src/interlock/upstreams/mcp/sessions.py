"""The conversations with one MCP server, each kept open by a supervisor.

Calls of all callers share one, unless the upstream is lent credentials: then there is one for each set of them, since a
conversation is opened with them and must never serve anybody else. In the handshake era it is also opened with the
questions that the client can answer, and a server may ask or log something that does not say to which call it belongs.
A caller who can be asked or listens therefore has conversations of their own.

A question comes on the stream of the call that raised it, outside of these streams, or, over pipes, without a stream.
In the first case one conversation carries any number of calls. In the others, conversations are separated so that the
client of each question is known:

    by URL, a client with a session     has a conversation of its own, so each question in it is for this client
    by URL, a client without a session  has a conversation for each call. Beyond `PER_CALLER_BY_URL` calls at a time the
                                        rest share one, in which a question outside of a stream fails; after the first
                                        such question calls wait for a free conversation instead
    over pipes                          each call has a process; with `PER_CALLER` processes in use, calls wait. The
                                        clients of a caller use the same ones, because processes cost more

All of them are bounded in number, together and for each caller, and closed when they were not used for a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.upstreams import wire
from interlock.upstreams.children import Crashed
from interlock.upstreams.mcp.config import McpConfig
from interlock.upstreams.mcp.opening import Conversation, Opener
from interlock.upstreams.mcp.protocol import LIST_S, RpcError
from interlock.upstreams.mcp.session import Session
from interlock.upstreams.supervisor import Restarts, Supervisor

_log = logging.getLogger("interlock.upstreams.mcp")

MAX_SESSIONS = 32
MAX_SESSIONS_BY_URL = 256  # these cost no process
# Of these, the most that one caller may have open, unless the configuration sets another number.
MAX_OF_ONE = 8
MAX_OF_ONE_BY_URL = 64
PER_CALLER = 4
PER_CALLER_BY_URL = 16
IDLE_S = 300.0
DRAIN_S = 30.0
# The limit of a health request is five seconds; this one must expire first.
PROBE_S = 4.5


class _Lanes:
    """The conversations of one caller that carry one call at a time: which are free, and who waits for one."""

    def __init__(self, most: int) -> None:
        self.users = 0
        self._free = list(range(1, most + 1))
        self._room = asyncio.Semaphore(most)

    @property
    def full(self) -> bool:
        return self._room.locked()

    async def enter(self, within_s: float) -> int:
        """Return the number of a free one, the lowest: it knows most of what the caller did before."""
        self.users += 1
        try:
            async with asyncio.timeout(within_s):
                await self._room.acquire()
        except BaseException:
            self.users -= 1
            raise
        number = min(self._free)
        self._free.remove(number)
        return number

    def leave(self, number: int) -> None:
        self.users -= 1
        self._free.append(number)
        self._room.release()


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
        self._clock = clock
        self._on_change = on_change
        self.opener = Opener(name, config, clock=clock, on_change=on_change, on_doubt=self._in_doubt, logs=logs)
        self._alert = alert or self._complain
        self._restarts = (restarts or Restarts()) if config.command else None
        self._slots: OrderedDict[str, Supervisor[Session]] = OrderedDict()
        self._owners: dict[str, tuple[str, ...]] = {}
        preset = MAX_OF_ONE if config.url is None else MAX_OF_ONE_BY_URL
        self._most_of_one = config.conversations_per_caller or preset
        self._closing: set[asyncio.Task[None]] = set()
        self._lanes: dict[str, _Lanes] = {}
        # Whether a server of the modern era may speak the handshake era too.
        self._may_be_both = config.protocol == "auto"
        # Whether calls that share a conversation could get each other's questions.
        self._asks_aside = config.url is None

    def _complain(self, reason: str) -> None:
        _log.error("%s: %s", self._name, reason)

    def slot(self, wanted: Conversation) -> Supervisor[Session]:
        """Return a conversation, opened when it is first used."""
        key = wanted.key
        slot = self._slots.get(key)
        if slot is None:
            self._close_idle()
            self._make_room(wanted.owner)

            async def start() -> Session:
                session = await self.opener.open(key, wanted)
                if wanted.level is not None:
                    await session.log_from(wanted.level, LIST_S)
                return session

            slot = Supervisor(start, clock=self._clock, restarts=self._restarts, alert=self._alert, name=self._name)
            self._slots[key], self._owners[key] = slot, wanted.owner
        self._slots.move_to_end(key)
        return slot

    @asynccontextmanager
    async def lease(self, wanted: Conversation, within_s: float) -> AsyncGenerator[Supervisor[Session]]:
        """A conversation for one call, which no other call uses meanwhile if its questions could not be told apart."""
        if not wanted.capabilities or wanted.client:
            yield self.slot(wanted)
            return
        most = PER_CALLER if self._config.url is None else PER_CALLER_BY_URL
        lanes = self._lanes.get(wanted.key) or _Lanes(most)
        if lanes.full and not self._asks_aside:
            yield self.slot(wanted)
            return
        self._lanes[wanted.key] = lanes
        try:
            number = await lanes.enter(within_s)
        except TimeoutError:
            why = f"has {most} calls of this caller under way, each of which may ask questions"
            raise wire.unreached(self._name, why, retry_after_ms=1000) from None
        slot: Supervisor[Session] | None = None
        try:
            slot = self.slot(replace(wanted, number=number))
            yield slot
        except (asyncio.CancelledError, Failure) as error:
            # INVARIANT: a question of a call that nobody waits for any more is not taken for one of the next call.
            late = isinstance(error, asyncio.CancelledError) or error.code == "E3503"
            if late and slot is not None and slot.current is not None:
                slot.discard(slot.current)
            raise
        finally:
            lanes.leave(number)
            if not lanes.users and self._lanes.get(wanted.key) is lanes:
                del self._lanes[wanted.key]

    async def speaks_both(self, wanted: Conversation, within_s: float) -> Session | None:
        """Return a conversation in the handshake era with a server of the modern era; None if it speaks only that."""
        if not self._may_be_both:
            return None
        try:
            return await self.slot(wanted).get(within_s)
        except Failure as failure:
            if failure.code == "E3003":
                raise  # the caller has as many as they may: it says nothing about the server
            refused = (failure.details or {}).get("reason") in ("handshake_refused", "protocol_version_mismatch")
            if refused or isinstance(failure, Crashed):
                self._may_be_both = False
            if wanted.key in self._slots:
                self._let_go(wanted.key)
            return None

    def _in_doubt(self) -> None:
        """Let calls wait for a conversation of their own from now on: this server asks outside of their streams."""
        self._asks_aside = True

    # Letting go

    def _close_idle(self) -> None:
        """Close conversations that were not used for a while. The shared one stays."""
        now = self._clock.monotonic()
        for key, slot in list(self._slots.items()):
            if key and not slot.busy and now - slot.used > IDLE_S:
                self._let_go(key)

    def _make_room(self, owner: tuple[str, ...]) -> None:
        """Close the idle conversation that was used longest ago, where there are too many: of the caller, or in all."""
        theirs = [key for key, one in self._owners.items() if owner and one == owner]
        if len(theirs) >= self._most_of_one:
            key = next((key for key in self._slots if key in theirs and not self._slots[key].busy), None)
            if key is None:
                raise Failure(
                    "E3003",
                    f"{len(theirs)} conversations of this caller with `{self._name}` are open, and all are in use",
                    details={"sent": False, "limit": self._most_of_one},
                    retry_after_ms=1000,
                    resolution="wait until a call has ended, or raise conversations_per_caller of the upstream",
                )
            self._let_go(key)
        most = MAX_SESSIONS if self._config.url is None else MAX_SESSIONS_BY_URL
        while len(self._slots) >= most:
            key = next((key for key, slot in self._slots.items() if key and not slot.busy), None)
            if key is None:
                raise wire.unreached(self._name, f"is in use by {most} identities at once", retry_after_ms=1000)
            self._let_go(key)

    def _let_go(self, key: str) -> None:
        del self._owners[key]
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
        slots = slots or [self.slot(Conversation({} if credentials is None else self._config.lent(credentials)))]
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
        slots, self._slots, self._owners = list(self._slots.values()), OrderedDict(), {}
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

"""Messages between processes: cached decisions that have to go, and breakers that changed, sooner than by reading.

Theory of operation. The store is the truth. An order to drop cached decisions, and the state of breakers, are rows
there, and the reader of changes finds them: by a notice of a database server, or else within 30 ms, in a process
without calls within half a second. Redis, where the settings name one, brings the news as well. A message is never
believed:

    abac:policy:updates   {"affected_subjects": ["did:…", …]}   cached decisions about these subjects are dropped;
                                                                all of them if the message is anything else
    cb:state:changes      service:old->new                      its content is not looked at: any message lets the
                                                                store be read sooner, which has the breakers

Redis forgets messages for those who do not listen. So a process drops every cached decision when its subscription
begins. While it has none, it does so again with each attempt to get one, so that no decision is used for much longer
than a second. Without Redis calls are slower therefore, but not wrong.

Messages that come fast are taken together, so that a flood of them costs little. What cannot be sent is not sent again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Any, Literal, cast

import orjson

from interlock.core.errors import Failure
from interlock.store import decisions

if TYPE_CHECKING:
    from interlock.authority.decisions import Engine
    from interlock.core.clock import Clock
    from interlock.core.supervise import Supervisor
    from interlock.net.redis import RedisConnection
    from interlock.settings import Settings
    from interlock.store.port import Changes

POLICY = "abac:policy:updates"
BREAKERS = "cb:state:changes"
# The pause between two attempts to subscribe, and between two times that decisions are dropped.
AGAIN_S = 0.5
GATHER_S = 0.05
# How many messages are taken before calls have their turn.
AT_ONCE = 100
MOST_WAITING = 1000
# How long a process that ends waits until its messages are sent.
CLOSE_S = 2.0

_NOBODY: frozenset[str] = frozenset()
_log = logging.getLogger("interlock.messages")


class Messages:
    """Drops cached decisions when it is time, and exchanges messages over Redis where the settings name one."""

    def __init__(
        self,
        settings: Settings,
        *,
        engine: Engine,
        changes: Changes,
        secret: Callable[[str], Awaitable[list[str]]],
        supervisor: Supervisor,
        clock: Clock,
    ) -> None:
        self._url = settings.redis
        self._secret_name = settings.redis_secret
        self._engine = engine
        self._changes = changes
        self._secret = secret
        self._supervisor = supervisor
        self._random_bytes = clock.random_bytes
        self._number = 0
        self._gathered: frozenset[str] | None = _NOBODY
        self._timer: asyncio.TimerHandle | None = None
        self._outbox: deque[tuple[str, str]] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._listens = self._sends = False
        self._problem = ""
        changes.watch(("decisions",), decisions.last, self._follow)
        if self._url:
            self._sends = True
            supervisor.keep("messages of other processes", self._stay_subscribed)

    @property
    def condition(self) -> Literal["healthy", "degraded", "down"] | None:
        """The condition of Redis; None where there is none. `degraded`: messages arrive and could not be sent."""
        if not self._url:
            return None
        return "down" if not self._listens else "healthy" if self._sends else "degraded"

    def policy_changed(self, subjects: Collection[str] | None) -> None:
        """Tell other processes that decisions about these subjects may be others now; None for everybody."""
        self._post(POLICY, orjson.dumps({"affected_subjects": None if subjects is None else sorted(subjects)}).decode())

    def breaker_changed(self, service: str, old: str, new: str) -> None:
        """Tell other processes and other subscribers that a breaker is in another state."""
        self._post(BREAKERS, f"{service}:{old}->{new}")

    async def close(self) -> None:
        """Wait a moment until what was posted is sent."""
        if self._sender is not None:
            await asyncio.wait({self._sender}, timeout=CLOSE_S)
        if self._timer is not None:
            self._timer.cancel()

    # Dropping decisions

    def _follow(self, order: decisions.Order) -> None:
        """Follow an order of the store. One that was missed may have named anybody."""
        missed = order.number != self._number + 1
        self._number = order.number
        self._engine.forget(None if missed else order.subjects)

    def _drop(self, subjects: frozenset[str] | None) -> None:
        """Drop decisions as a message asks for: at once, and those of later messages together."""
        gathered = None if subjects is None or self._gathered is None else self._gathered | subjects
        self._gathered = None if gathered is None or len(gathered) > decisions.MOST_SUBJECTS else gathered
        if self._timer is None:
            self._drop_gathered()

    def _drop_gathered(self) -> None:
        self._timer = None
        if self._gathered is None or self._gathered:
            self._engine.forget(self._gathered)
            self._gathered = _NOBODY
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self._drop_gathered)

    # Listening

    async def _stay_subscribed(self) -> None:
        from interlock.net.redis import Lost

        while True:
            try:
                await self._listen()
            except (Lost, Failure) as error:
                self._report(error.message if isinstance(error, Failure) else str(error))
            self._listens = False
            self._drop(None)
            await asyncio.sleep(AGAIN_S * (0.5 + self._random_bytes(1)[0] / 256))

    async def _listen(self) -> None:
        connection = await self._connect()
        try:
            await connection.subscribe(POLICY, BREAKERS)
            # INVARIANT: after the subscription has begun, so that no message falls between the two.
            self._drop(None)
            self._changes.hurry()
            self._listens = True
            self._report("")
            while True:
                for _ in range(AT_ONCE):
                    channel, content = await connection.message()
                    if channel == POLICY:
                        self._drop(affected(content))
                    self._changes.hurry()
                # A flood is left to the server, which ends a subscription that does not keep up.
                await asyncio.sleep(GATHER_S)
        finally:
            connection.close()

    async def _connect(self) -> RedisConnection:
        from interlock.net.redis import RedisConnection

        password = (await self._secret(self._secret_name))[0] if self._secret_name else ""
        return await RedisConnection.open(self._url, password)

    def _report(self, problem: str) -> None:
        """Log that Redis cannot be used, or can be again, once each."""
        if bool(problem) != bool(self._problem):
            if problem:
                _log.warning("Redis cannot be used, so changes are found by reading the store: %s", problem)
            else:
                _log.info("Redis can be used again")
        self._problem = problem

    # Sending

    def _post(self, channel: str, text: str) -> None:
        if not self._url or len(self._outbox) >= MOST_WAITING:
            return
        self._outbox.append((channel, text))
        if self._sender is None or self._sender.done():
            self._sender = self._supervisor.spawn("sending of messages", self._send())

    async def _send(self) -> None:
        """Send what waits, over a connection of its own: there is rarely anything to send."""
        from interlock.net.redis import Lost

        connection: RedisConnection | None = None
        try:
            connection = await self._connect()
            while self._outbox:
                await connection.ask("PUBLISH", *self._outbox.popleft())
            self._sends = True
        except (Lost, Failure):
            self._sends = False
            self._outbox.clear()
        finally:
            if connection is not None:
                connection.close()


def affected(content: bytes) -> frozenset[str] | None:
    """The subjects that a message names; None, for everybody, if it is not of the form that it should have."""
    from interlock.data.documents import Malformed, read_json

    try:
        message: Any = read_json(content)
    except (Malformed, ValueError):
        return None
    named: Any = cast("dict[str, Any]", message).get("affected_subjects") if isinstance(message, dict) else None
    if not isinstance(named, list) or len(cast("list[Any]", named)) > decisions.MOST_SUBJECTS:
        return None
    subjects = cast("list[Any]", named)
    return frozenset(subjects) if all(isinstance(one, str) for one in subjects) else None

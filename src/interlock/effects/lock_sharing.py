"""Shares the locks of one process with the other processes of its store, by a board that all of them read.

`Sharing` uses a board that is a file: every step is done on the event loop, at once. `RemoteSharing` uses one that is
in a database: every step is done on a thread, one after the other, and what came up meanwhile is in the next one.
`effects.locks` explains the protocol.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, Protocol

from interlock.core.errors import Failure
from interlock.store.lock_board import Answer, Board, Claim, Posted

_log = logging.getLogger("interlock.locks")

# How often a process checks whether another has come, and how long it stays on the board without a call.
LOOK_S = 0.02
IDLE_S = 1.0
# A ticket on the board is checked again after this time, then after twice as long, and so on up to the second figure.
ASK_AFTER_S = 0.001
ASK_AT_LEAST_S = 0.02
# After the board could not be written: how long to wait before the locks of this process are written again.
_TELL_AGAIN_S = 0.5


class LockTicket(Claim, Protocol):
    """The locks of one call. `granted`: no other call of this process is before it."""

    granted: bool

    def expire(self) -> None:
        """Stop what works under these locks: others may soon take them."""
        ...


# many methods: one for each step of the protocol of locks; RemoteSharing overrides the steps that wait
class Sharing:
    """The part of the locks that concerns other processes."""

    def __init__(self, board: Board, tickets: Collection[LockTicket]) -> None:
        self._board = board
        self._tickets = tickets
        self._loop = asyncio.get_running_loop()
        # INVARIANT: while this is true, the board says so, and no other process holds any lock.
        self.alone = False
        # The number of times that locks were requested.
        self.uses = self._uses_seen = 0
        self._idle_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def on_board(self) -> bool:
        """Whether this process is on the board."""
        return self._timer is not None

    @property
    def decides(self) -> bool:
        """Whether this process alone decides who holds what."""
        return self.alone

    def sure(self) -> bool:
        """Whether an answer of the board still counts."""
        return True

    async def ask(self, ticket: LockTicket) -> Answer:
        """Write the locks of this process to the board, and return the state of one ticket."""
        return (self._post([ticket]) or ["handing over"])[0]

    def dropped(self, ticket: LockTicket) -> None:
        """Take a ticket off the board that is not among the tickets any more."""
        if ticket.number is not None and not self.alone and not self._closed:
            self._publish()

    def works(self, ticket: LockTicket, working: bool) -> None:
        """Note whether a tool works under the locks of a ticket. The kernel frees the locks of a process that ends."""

    def close(self) -> None:
        """Leave the board. Locks still held stay on it, and count until the process's sign of life is gone."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            if not self._tickets:
                self._leave()
            self._timer = None
        self._board.close()

    def _granted(self) -> list[LockTicket]:
        return [ticket for ticket in self._tickets if ticket.granted]

    def _post(self, requests: list[LockTicket]) -> list[Answer] | None:
        """Write the locks of this process. None while another process writes."""
        try:
            posted = self._board.post(self._granted(), requests)
        except BlockingIOError:
            return None
        except OSError as error:
            raise Failure("E3801", f"the data directory cannot be used: {error.strerror}") from None
        self._is_posted(posted)
        return posted.answers

    def _is_posted(self, posted: Posted) -> None:
        self.alone = posted.alone
        if self._timer is None and not self._closed:
            self._idle_since = self._loop.time()
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def _publish(self) -> None:
        """Write the locks of this process to the board; later, if that fails now."""
        try:
            done = self._post([]) is not None
        except Failure as failure:
            _log.warning("locks cannot be shared between processes: %s", failure.message)
            done = False
        if not done and self._timer is not None:
            self._loop.call_later(ASK_AFTER_S, self._retell)

    def _retell(self) -> None:
        if self._timer is not None and not self.alone:
            self._publish()

    def _look(self) -> None:
        """Check periodically whether another process has come, and whether to stay on the board."""
        now = self._loop.time()
        if self._tickets or self.uses != self._uses_seen:
            self._uses_seen, self._idle_since = self.uses, now
        elif now - self._idle_since >= IDLE_S and self._leave():
            return
        self._timer = self._loop.call_later(LOOK_S, self._look)
        if self.alone:
            self._listen()

    def _listen(self) -> None:
        if self._board.rung():
            self._share_all()

    def _share_all(self) -> None:
        self.alone = False
        self._publish()

    def _leave(self) -> bool:
        try:
            self._board.leave()
        except OSError:  # another process is writing the board; the next check tries again
            return False
        self.alone, self._timer = False, None
        return True


# many methods: overrides steps of Sharing, and handles the end of each on the event loop
class RemoteSharing(Sharing):
    """The same with a board that must not be waited for on the event loop.

    INVARIANT: one step is under way at a time, and while it writes the locks, this process is not alone. So the board
    has every lock that is granted meanwhile, or the next step asks for it.
    """

    def __init__(self, board: Board, tickets: Collection[LockTicket]) -> None:
        super().__init__(board, tickets)
        self._requests: dict[LockTicket, asyncio.Future[Answer]] = {}
        self._under_way = False
        # Whether the board may say something else than the tickets, though nobody asks.
        self._outdated = False
        self._reported = False
        # Tickets under whose locks a tool works, which therefore must not be lost.
        self._working: set[LockTicket] = set()

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="interlock-locks")

    @property
    def on_board(self) -> bool:
        return self._timer is not None or self._under_way

    @property
    def decides(self) -> bool:
        return self.alone and self._board.sure()

    def sure(self) -> bool:
        return self._board.sure()

    async def ask(self, ticket: LockTicket) -> Answer:
        if self._closed:
            raise _closed()
        answer = self._requests[ticket] = self._loop.create_future()
        self._next()
        return await answer

    def dropped(self, ticket: LockTicket) -> None:
        if not self.alone and (ticket.number is not None or self._under_way):
            self._publish()

    def works(self, ticket: LockTicket, working: bool) -> None:
        """Note whether a tool works under the locks of a ticket. As long as one does, the process ends with its lease.

        INVARIANT: no tool works under locks that another process may have.
        """
        had = bool(self._working)
        if working:
            self._working.add(ticket)
        else:
            self._working.discard(ticket)
        if bool(self._working) != had:
            self._board.guard(working)

    def _look(self) -> None:
        if self._working and self._board.expiring():
            for ticket in list(self._working):
                ticket.expire()
        super()._look()

    def close(self) -> None:
        """Let go of the board. The lease of this process ends next, and with it all that the board says of it."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._answer_all(_closed())
        if "_thread" in vars(self):
            self._thread.submit(self._board.close)
            self._thread.shutdown(wait=False)

    def _publish(self) -> None:
        self._outdated = True
        self._next()

    def _next(self) -> None:
        """Write the locks of this process on the thread, unless it is at work: then when it has done that."""
        if self._under_way or self._closed or not (self._requests or self._outdated):
            return
        # A caller that was cancelled has taken its ticket back.
        requests = {ticket: waiting for ticket, waiting in self._requests.items() if not waiting.done()}
        self._requests, self._outdated = {}, False
        self.alone = False
        self._step(partial(self._board.post, self._granted(), list(requests)), partial(self._answered, requests))

    def _step(self, work: Callable[[], Any], done: Callable[[asyncio.Future[Any]], None]) -> None:
        self._under_way = True

        def ended(future: asyncio.Future[Any]) -> None:
            self._under_way = False
            done(future)
            self._next()

        self._loop.run_in_executor(self._thread, work).add_done_callback(ended)

    def _answered(self, requests: dict[LockTicket, asyncio.Future[Answer]], future: asyncio.Future[Posted]) -> None:
        error = future.exception()
        if error is not None:
            self._failed(requests, error)
            return
        posted = future.result()
        self._reported = False
        self._is_posted(posted)
        for waiting, answer in zip(requests.values(), posted.answers, strict=True):
            _settle(waiting, answer)
        if posted.alone:
            self._outdated = False
            self._answer_all("alone")

    def _failed(self, requests: dict[LockTicket, asyncio.Future[Answer]], error: BaseException) -> None:
        failure = error if isinstance(error, Failure) else Failure("E3801", "locks cannot be shared between processes")
        if not self._reported and not self._closed:
            self._reported = True
            _log.warning("locks cannot be shared between processes: %s", failure.message)
        for waiting in requests.values():
            _settle(waiting, failure)
        self._loop.call_later(_TELL_AGAIN_S, self._publish)

    def _answer_all(self, answer: Answer | Failure) -> None:
        requests, self._requests = self._requests, {}
        for waiting in requests.values():
            _settle(waiting, answer)

    def _listen(self) -> None:
        if not self._under_way:
            self._step(self._board.rung, self._heard)

    def _heard(self, future: asyncio.Future[bool]) -> None:
        if future.exception() is not None or (future.result() and self.alone):
            self._share_all()

    def _leave(self) -> bool:
        if self._under_way or self._closed:
            return False
        self.alone, self._timer = False, None
        self._step(self._board.leave, self._left)
        return True

    def _left(self, future: asyncio.Future[None]) -> None:
        if future.exception() is not None and self._timer is None and not self._closed:
            # The board may still say that this process is alone. A process that comes waits until this one has noticed.
            self._timer = self._loop.call_later(LOOK_S, self._look)


def _closed() -> Failure:
    return Failure("E3801", "the store is closed")


def _settle(waiting: asyncio.Future[Answer], answer: Answer | Failure) -> None:
    if waiting.done():
        return
    if isinstance(answer, Failure):
        waiting.set_exception(answer)
    else:
        waiting.set_result(answer)

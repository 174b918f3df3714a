"""Resource locks: calls that would touch the same resource, at least one to change it, run one after the other.

Theory of operation. A resource is a name such as `account:cash` or `file:/srv/data/a.txt`: a kind, and a path of
segments. A name stands for itself and all that lies below it. `reach` writes that down as text: `account:cash/`,
`file:srv/data/a.txt/`, and for a name that ends in a star what stands before it, `account:`. Two names overlap if the
reach of one begins with the reach of the other. Nothing else is known of a name: two names for one thing (a link, a
relative path) are two things.

A call requests all its locks at once. It waits for each call before it, running or waiting, that it conflicts with, and
counts them; a call that ends counts down those behind. So nobody who waits holds anything, which rules deadlock out;
nobody is overtaken, which rules starvation out; and a release costs as much as there are calls that waited for it.

A call made from within a call that holds locks is another matter, for its parent holds while it waits. What its parent
and theirs hold is not in its way: an honest manifest names what the calls below will change. For calls below its own
parent it waits. Anybody else who holds what it wants means E3410 at once, and anybody else who merely waits for it is
stepped ahead of. Then every wait leads to a call whose parent began later, or to an earlier one of the same parent, and
no wait leads back.

Several processes share a store. While only one of them uses locks it says so once, on a board that all of them read,
and coordinates in memory. When a second comes it rings; the first writes down what it holds and from then on both ask
the board for every call. Tickets on the board are numbered, and a ticket waits for lower numbers and for the holders.
Only calls that wait for nobody in their own process get a number, so waits on the board lead nowhere but down.

The board (`store.lock_board`) is a file of the data directory or, for several machines, a row of the database. What a
dead process claimed counts for nothing. On one machine the kernel knows who is dead. On several, a process is taken for
dead when it has not renewed its lease: it believes its own locks only while it knows that nobody can have done so
(`sure`), and asks the board otherwise, which refuses a process that was taken for dead.

INVARIANT: two calls whose locks conflict, neither of which called the other, never hold them at the same time. A call
whose process was taken for dead holds nothing any more: it cannot settle, and is `unknown`. Before that, calls whose
tools work under locks are stopped (`HeldLocks.expire`). If such a tool does not stop, or its process is suspended, the
kernel ends a server (`store.postgres.fence`).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from typing import Literal

from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.core.record import NamedTuple, dataclass
from interlock.effects.lock_sharing import ASK_AFTER_S, ASK_AT_LEAST_S, RemoteSharing, Sharing
from interlock.store.home import Home
from interlock.store.instance import Instance

Mode = Literal["read", "write"]

RETRY_AFTER_MS = 250

_SEPARATOR = expression("[:/]")
_ENDS = ("", ":", "/")  # the ends of a reach that is not cut off within a segment


class LockRequest(NamedTuple):
    """A resource that a call would read or change."""

    resource: str
    mode: Mode = "write"


# Names


@lru_cache(maxsize=8192)
def _parse(resource: str) -> tuple[str, bool]:
    """Return the reach of a name, and whether the name is unambiguous."""
    kind, colon, path = resource.partition(":")
    kind += colon
    if not colon or "/" in kind or "*" in kind:
        kind, path = "", resource
    stem, star, rest = path.partition("*")
    segments = stem.split("/")
    last = segments.pop() if star else ""
    parts: list[str] = []
    for segment in segments:
        if segment not in ("", ".", ".."):
            parts.append(segment)
        elif segment == ".." and parts:
            parts.pop()
        elif segment == ".." and path[:1] != "/":
            return kind, False
    if ".." in rest.split("/"):
        return kind, False
    return kind + "".join(part + "/" for part in parts) + last, True


def reach(resource: str) -> str:
    """Return the reach of a name: it stands for every resource whose reach begins with this text.

    Empty and `.` segments are ignored and `..` goes one back. A star ends the name: it stands for everything that
    begins with the text before it. A name that climbs above its beginning, or that has `..` behind a star, may lead
    anywhere, and stands for everything of its kind.
    """
    return _parse(resource)[0]


def overlap(one: str, other: str) -> bool:
    """Whether two names have a resource in common."""
    mine, theirs = reach(one), reach(other)
    return mine.startswith(theirs) or theirs.startswith(mine)


def covers(wide: str, narrow: str) -> bool:
    """Whether everything that one name stands for lies within another. A name that may lead anywhere covers nothing."""
    text, known = _parse(wide)
    return known and _parse(narrow)[0].startswith(text)


# Stated preconditions

ANY, NONE = "*", ""


def check_preconditions(expected: Sequence[tuple[str, str]], now: Mapping[str, str | None]) -> None:
    """Compare the versions that a call expects with the actual ones.

    `expected` gives a version (an ETag, a number) for each resource, `*` for any, or nothing if the resource must not
    exist; `now` has the current version of each, None if there is none. E3411 if a resource is missing or exists
    unexpectedly, E3410 if it has another version than the caller saw.
    """
    missing = [resource for resource, version in expected if version == ANY and now[resource] is None]
    present = [resource for resource, version in expected if version == NONE and now[resource] is not None]
    if missing or present:
        words = f"{_names(missing)} must exist" if missing else f"{_names(present)} must not exist"
        raise Failure("E3411", words, details={"missing": missing, "present": present})
    stale = [name for name, version in expected if version not in (ANY, NONE) and now[name] != version]
    if stale:
        details = {"stale": stale, "current": {resource: now[resource] for resource in stale}}
        raise Failure("E3410", f"{_names(stale)} changed since it was read", details=details)


def _names(resources: Sequence[str]) -> str:
    return ", ".join(f"`{resource}`" for resource in resources)


# Tickets


@dataclass(slots=True, eq=False)
class HeldLocks:
    """The locks of one call, from the moment they are queued until they are released."""

    locks: Locks | None
    call: str
    above: HeldLocks | None
    # The reaches, and whether the call changes what they stand for.
    reaches: dict[str, bool]
    # The number of calls it waits for, and the calls that wait for it.
    blockers: int = 0
    behind: list[HeldLocks] = field(default_factory=list["HeldLocks"])
    waiter: asyncio.Future[None] | None = None
    # Nobody in this process is before it; nobody at all is; it is over.
    granted: bool = False
    held: bool = False
    released: bool = False
    number: int | None = None
    # Stops the call, when its locks may soon be those of others.
    on_expiry: Callable[[], None] | None = None

    @property
    def nested(self) -> bool:
        """Whether it was made from within a call that holds locks."""
        return self.above is not None

    def within(self, other: HeldLocks) -> bool:
        """Whether another call made this one, directly or through others."""
        above = self.above
        while above is not None and above is not other:
            above = above.above
        return above is not None

    def rest(self) -> None:
        """Note that nothing works under these locks any more. They are held until the outcome is on record."""
        if not self.released and self.locks is not None and self.locks.leased:
            self.locks.works(self, working=False)

    def expire(self) -> None:
        """Stop the call that has these locks: others may soon take them."""
        if self.on_expiry is not None:
            self.on_expiry()

    def release(self) -> None:
        """Release the locks and let the next calls go. Repeating it has no effect."""
        if not self.released and self.locks is not None:
            self.released = True
            self.locks.drop(self)

    def __enter__(self) -> HeldLocks:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_NOTHING = HeldLocks(None, "", None, {})


class Locks:
    """All locks of one process and, through the board, those of every process on its home."""

    def __init__(self, home: Home, *, clock: Clock, instance: Instance) -> None:
        self._monotonic = clock.monotonic
        self._loop = asyncio.get_running_loop()
        # Locks by reach: their tickets, and whether each writes; the reaches in order; those that end in a star.
        self._table: dict[str, dict[HeldLocks, bool]] = {}
        self._order: list[str] = []
        self._stems: set[str] = set()
        self._tickets: dict[HeldLocks, None] = {}
        self._calls: dict[str, HeldLocks] = {}
        board = home.lock_board(instance)
        self._near = board.near
        # Whether others may take the locks of this process when its lease has run out.
        self.leased = not board.near
        self._sharing = (Sharing if board.near else RemoteSharing)(board, self._tickets)

    async def hold(
        self, call: str, requests: Sequence[LockRequest], deadline: float, parent: str | None = None
    ) -> HeldLocks:
        """Take all locks of a call together, waiting until the deadline at most; E3410 if they cannot be had.

        The caller releases the `HeldLocks` once nothing of the call runs any more.
        """
        above = None if parent is None else self._calls.get(parent)
        if not requests and above is None:
            return _NOTHING
        reaches: dict[str, bool] = {}
        for resource, mode in requests:
            where, _ = _parse(resource)
            if mode == "write" or where not in reaches:
                reaches[where] = mode == "write"
        ticket = HeldLocks(self, call, above, reaches)
        self._queue(ticket, requests)
        sharing = self._sharing
        if ticket.granted and sharing.alone and (self._near or sharing.decides):
            ticket.held = True
            if self.leased:
                self.works(ticket, working=True)
            return ticket
        try:
            if not ticket.granted:
                await self._wait(ticket, requests, deadline)
            await self._share(ticket, requests, deadline)
        except BaseException:
            ticket.release()
            raise
        if self.leased:
            self.works(ticket, working=True)
        return ticket

    def works(self, ticket: HeldLocks, *, working: bool) -> None:
        """Note whether the tool of a call works under its locks, which matters where they are leased."""
        if ticket.reaches:
            self._sharing.works(ticket, working)

    # Within the process

    def _queue(self, ticket: HeldLocks, requests: Sequence[LockRequest]) -> None:
        """Queue a ticket: behind all that conflict or, for a call within a call, ahead of those that only wait."""
        if self._table:
            above, conflicting = ticket.above, self._conflicting(ticket)
            if above is not None and any(other.granted and not other.within(above) for other in conflicting):
                raise _taken(requests)
            for other in conflicting:
                first, second = (other, ticket) if above is None or other.within(above) else (ticket, other)
                first.behind.append(second)
                second.blockers += 1
        for where, write in ticket.reaches.items():
            tickets = self._table.get(where)
            if tickets is None:
                self._table[where] = {ticket: write}
                insort(self._order, where)
                if where[-1:] not in _ENDS:
                    self._stems.add(where)
            else:
                tickets[ticket] = write
        self._tickets[ticket] = None
        self._calls[ticket.call] = ticket
        self._sharing.uses += 1
        ticket.granted = ticket.blockers == 0

    def _conflicting(self, ticket: HeldLocks) -> Iterable[HeldLocks]:
        """Return every ticket that conflicts with this one, except those of its own callers."""
        tickets: dict[HeldLocks, None] = {}
        table, order = self._table, self._order
        for mine, write in ticket.reaches.items():
            # The locked reaches above this one, which are whole names or end in a star; then those at and below it.
            above = ("", *[mine[: match.end()] for match in _SEPARATOR.finditer(mine)])
            reaches = [where for where in above if where in table and where != mine]
            reaches += [where for where in self._stems if where != mine and mine.startswith(where)]
            index = bisect_left(order, mine)
            while index < len(order) and order[index].startswith(mine):
                reaches.append(order[index])
                index += 1
            for where in reaches:
                for other, writes in table[where].items():
                    if write or writes:
                        tickets[other] = None
        return [other for other in tickets if not ticket.within(other)] if ticket.above is not None else tickets

    async def _wait(self, ticket: HeldLocks, requests: Sequence[LockRequest], deadline: float) -> None:
        left_s = deadline - self._monotonic()
        if left_s <= 0:
            raise _taken(requests)
        ticket.waiter = self._loop.create_future()
        try:
            async with asyncio.timeout(left_s):
                await ticket.waiter
        except TimeoutError:
            raise _taken(requests) from None

    def drop(self, ticket: HeldLocks) -> None:
        """Remove a ticket, whether it was held or only waited; called by the ticket itself."""
        for where in ticket.reaches:
            tickets = self._table[where]
            del tickets[ticket]
            if not tickets:
                del self._table[where]
                del self._order[bisect_left(self._order, where)]
                self._stems.discard(where)
        if self.leased:
            self.works(ticket, working=False)
        del self._tickets[ticket]
        if self._calls.get(ticket.call) is ticket:
            del self._calls[ticket.call]
        for other in ticket.behind:
            other.blockers -= 1
            if other.blockers == 0 and not other.released:
                other.granted = True
                if other.waiter is not None and not other.waiter.done():
                    other.waiter.set_result(None)
        if ticket.number is not None or not self._near:
            self._sharing.dropped(ticket)

    # Between processes

    async def _share(self, ticket: HeldLocks, requests: Sequence[LockRequest], deadline: float) -> None:
        """Wait until no other process is in the way either."""
        sharing, pause_s = self._sharing, ASK_AFTER_S
        while ticket.reaches and not sharing.decides:
            answer = await sharing.ask(ticket)
            if answer in ("alone", "held") and sharing.sure():
                break
            left_s = deadline - self._monotonic()
            if left_s <= 0 or (answer == "taken" and ticket.above is not None):
                raise _taken(requests)
            await asyncio.sleep(min(left_s, pause_s))
            pause_s = min(pause_s * 2, ASK_AT_LEAST_S)
        ticket.held = True

    def close(self) -> None:
        """Leave the board. Locks still held stay on it, and count until the process's sign of life is gone."""
        self._sharing.close()


def _taken(requests: Sequence[LockRequest]) -> Failure:
    names = [one.resource for one in requests]
    shown = _names(names[:3]) + (" and more" if len(names) > 3 else "")
    return Failure(
        "E3410",
        f"another call is at work on {shown}, and this one ran out of time or may not wait",
        details={"resources": names},
        retry_after_ms=RETRY_AFTER_MS,
    )

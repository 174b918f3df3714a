"""Facts that pages need beside what they show: names of callers, the time, and the state of the place.

`Local` reads them from an open data directory, `Remote` from a server, as far as its REST interface tells them.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.approvals.ticket import Ticket
    from interlock.cli.remote import Server

Json = dict[str, Any]
_DID = r"did:[a-z0-9]+:[\w.:%-]*\w"


class Viewer(Protocol):
    """The questions of pages about tickets, calls and budgets."""

    def name_of(self, who: str) -> str:
        """The name that a DID was registered under; the id of anybody else."""
        ...

    def now_ms(self) -> int:
        """The time now."""
        ...

    def must_leave(self, ticket: Ticket) -> bool:
        """Whether the reader asked for the ticket, and so has to leave the decision to others."""
        ...

    def continues(self) -> bool:
        """Whether a server continues approved calls by itself."""
        ...

    def told(self, ticket: Ticket) -> list[str]:
        """The channels by which people were notified of a ticket."""
        ...

    def undelivered(self, ticket: Ticket) -> list[Json]:
        """Notifications about a ticket that did not arrive."""
        ...


def with_names(viewer: Viewer, text: str) -> str:
    """A text in which every DID that is known has its name before it."""

    def named(match: re.Match[str]) -> str:
        name = viewer.name_of(match[0])
        return name if name == match[0] else f"{name} ({match[0]})"

    return re.sub(_DID, named, text)


class Local:
    """The facts of an open data directory."""

    def __init__(self, lock: Interlock) -> None:
        self._lock = lock

    def name_of(self, who: str) -> str:
        known = self._lock.identities.find(who) if who.startswith("did:") else None
        if known is None or not known.name:
            return who
        return known.name if known.tenant == "local" else f"{known.name} of {known.tenant}"

    def now_ms(self) -> int:
        return self._lock.clock.now_ms()

    def must_leave(self, ticket: Ticket) -> bool:
        by = self._lock.caller
        return ticket.requester == by.acting and not self._lock.approvals.is_alone(by)

    def continues(self) -> bool:
        lock = self._lock
        others = (path.stem for path in lock.home.instances.glob("*.lock") if path.stem != lock.instance.id)
        return any(lock.instance.alive(other) for other in others)

    def told(self, ticket: Ticket) -> list[str]:
        from interlock.api.approvals import notified_channels

        return notified_channels(self._lock.journal, ticket)

    def undelivered(self, ticket: Ticket) -> list[Json]:
        from interlock.approvals.notify import undelivered
        from interlock.core.clock import iso

        return [
            {
                "channel": one.channel,
                "step": one.step,
                "state": one.state,
                "attempts": one.attempts,
                "next_attempt_at": None if one.state == "failed" else iso(one.next_ms),
                "error": one.error,
            }
            for one in undelivered(self._lock.journal, ticket=ticket.id)
        ]


class Remote:
    """The facts that a server tells the holder of a token. Of names it tells those in the token's own chain."""

    def __init__(self, names: dict[str, str], holder: str, ticket: Json | None = None) -> None:
        self._names = names
        self.holder = holder
        self._ticket: Json = ticket or {}

    @classmethod
    async def of(cls, server: Server, ticket: Json | None = None) -> Remote:
        """The facts that the holder of the server's token may know; `ticket` is a document of the server."""
        picture = await server.post("/v1/tokens/inspect", {"token": server.token})
        chain: list[Json] = picture["chain"]
        names = {one["subject"]: _called(one) for one in chain if one["name"]}
        return cls(names, chain[-1]["subject"] if chain else "", ticket)

    def name_of(self, who: str) -> str:
        return self._names.get(who, who)

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def must_leave(self, ticket: Ticket) -> bool:
        return ticket.requester == self.holder

    def continues(self) -> bool:
        return True

    def told(self, ticket: Ticket) -> list[str]:
        return list(self._ticket.get("told") or ())

    def undelivered(self, ticket: Ticket) -> list[Json]:
        return [{"next_attempt_at": None, **one} for one in self._ticket.get("undelivered") or ()]


def _called(link: Json) -> str:
    return link["name"] if link["tenant"] in (None, "local") else f"{link['name']} of {link['tenant']}"

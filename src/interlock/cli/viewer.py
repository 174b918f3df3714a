"""Facts that pages need beside what they show: names of callers, the time, and the state of the place.

`Local` reads them from an open data directory, `AtRest` from its database alone, and `Remote` from a server, as far as
its REST interface tells them.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.api.interlock import Interlock
    from interlock.api.types import Reader, Ticket
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

    def notified_channels(self) -> list[str]:
        """The channels by which people were notified of the ticket that the page shows."""
        ...

    def undelivered(self) -> list[Json]:
        """Notifications about that ticket that did not arrive."""
        ...


def with_names(viewer: Viewer, text: str) -> str:
    """A text in which every DID that is known has its name before it."""

    def named(match: re.Match[str]) -> str:
        name = viewer.name_of(match[0])
        return name if name == match[0] else f"{name} ({match[0]})"

    return re.sub(_DID, named, text)


class Local:
    """The facts of an open data directory, as they were when it was made."""

    def __init__(
        self, app: Interlock, names: dict[str, str], alone: bool, notified: list[str], undelivered: list[Json]
    ) -> None:
        self._app = app
        self._names = names
        self._alone = alone
        self._notified = notified
        self._undelivered = undelivered

    @classmethod
    async def of(cls, app: Interlock, ticket: Ticket | None = None) -> Local:
        """The facts of an open data directory, with those about the messages of one ticket."""
        known = {one.did: one for one in await app.identities.all()}
        names = {did: _called({"name": one.name, "tenant": one.tenant}) for did, one in known.items() if one.name}
        alone = await app.is_alone(app.caller)
        if ticket is None:
            return cls(app, names, alone, [], [])
        from interlock.api.approvals_at_rest import messages_of

        return cls(app, names, alone, *await messages_of(app, ticket.id))

    def name_of(self, who: str) -> str:
        return self._names.get(who, who)

    def now_ms(self) -> int:
        return self._app.clock.now_ms()

    def must_leave(self, ticket: Ticket) -> bool:
        return ticket.requester == self._app.caller.acting and not self._alone

    def continues(self) -> bool:
        return self._app.home.alive() > 1

    def notified_channels(self) -> list[str]:
        return self._notified

    def undelivered(self) -> list[Json]:
        return self._undelivered


def time_at_rest(reader: Reader, path: Path) -> int:
    """The time now, by the clock that the processes of a data directory go by."""
    from interlock.api.homes import home_at

    return home_at(path).now_ms(reader)


class AtRest:
    """The facts of a data directory that is read without being opened."""

    def __init__(self, reader: Reader, path: Path, ticket: Ticket | None = None) -> None:
        from interlock.api.approvals_at_rest import messages_about
        from interlock.api.at_rest import names

        self._reader = reader
        self._path = path
        named = names(reader)
        self._names = {did: _called({"name": name, "tenant": tenant}) for did, (name, tenant) in named.items()}
        self._notified, self._late = ([], []) if ticket is None else messages_about(reader, ticket.id)

    def name_of(self, who: str) -> str:
        return self._names.get(who, who)

    def now_ms(self) -> int:
        return time_at_rest(self._reader, self._path)

    def must_leave(self, ticket: Ticket) -> bool:
        from interlock.api.approvals_at_rest import must_leave

        return must_leave(self._reader, ticket)

    def continues(self) -> bool:
        from interlock.api.homes import home_at

        return home_at(self._path).alive() > 0

    def notified_channels(self) -> list[str]:
        return self._notified

    def undelivered(self) -> list[Json]:
        return self._late


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

    def notified_channels(self) -> list[str]:
        return list(self._ticket.get("told") or ())

    def undelivered(self) -> list[Json]:
        return [{"next_attempt_at": None, **one} for one in self._ticket.get("undelivered") or ()]


def _called(link: Json) -> str:
    return link["name"] if link["tenant"] in (None, "local") else f"{link['name']} of {link['tenant']}"

"""Selections and searches in the journal, and the calls that followed them. All of it is of one tenant."""

from __future__ import annotations

from typing import Final

from interlock.core.record import NamedTuple
from interlock.store.expressions import last_element, member
from interlock.store.port import Reader


class Selected(NamedTuple):
    """The record of a selection, or of a search."""

    place: int
    id: str
    body: bytes


class Called(NamedTuple):
    """A call that succeeded: where its record is, when it ended, and who called which tool."""

    place: int
    time: str
    caller: str
    tool: str


LAST: Final = 2**62  # behind every place


def selections(reader: Reader, tenant: str, most: int, up_to: int = LAST) -> list[Selected]:
    """The last selections and searches of a tenant up to a place in the journal, oldest first."""
    rows = reader.all(
        "SELECT seq, call, body FROM journal WHERE kind IN ('selection', 'search')"  # noqa: S608 - our words
        f" AND {member('body', 'tenant')} = ? AND seq <= ? ORDER BY seq DESC LIMIT ?",
        (tenant, up_to, most),
    )
    return [Selected._make(row) for row in reversed(rows)]


def successes(reader: Reader, tenant: str, most: int, up_to: int = LAST) -> list[Called]:
    """The last calls of a tenant that succeeded up to a place, oldest first. Previews are not among them."""
    rows = reader.all(
        f"SELECT seq, {member('body', 'timestamp')}, {member('body', 'callerId')}, {member('body', 'toolId')}"  # noqa: S608 - our words
        f" FROM journal WHERE kind = 'closed' AND {member('body', 'tenant')} = ?"
        f" AND {last_element('body', 'states')} = 'succeeded' AND {member('body', 'operation')} = 'invoke'"
        " AND seq <= ? ORDER BY seq DESC LIMIT ?",
        (tenant, up_to, most),
    )
    return [Called._make(row) for row in reversed(rows)]

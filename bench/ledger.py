"""Journals of any length: copies of one real record, chained and signed as the journal itself does it."""

from __future__ import annotations

from interlock.core.clock import Clock
from interlock.store import last_head
from interlock.store.administration import administered, anchor_head, writing
from interlock.store.home import Home
from interlock.store.signing import Signer

_LAST = "SELECT call, body FROM journal WHERE kind = 'closed' ORDER BY seq DESC LIMIT 1"
_CHUNK = 50_000


def fill(home: Home, rows: int) -> None:
    """Bring the journal of a data directory that nobody has open to so many records. One of them closes a call.

    The head is signed after each chunk, because a journal with a long unsigned end is not opened.
    """
    signer, now_ms, last = Signer(home.keys), Clock().now_ms, 0
    with administered(home) as connection:
        call, body = connection.one(_LAST)
        while last < rows:
            with writing(connection, now_ms()) as transaction:
                first = transaction.head[0]
                for number in range(first, min(first + _CHUNK, rows)):
                    copy = f"{number:026d}"
                    transaction.append("closed", copy, bytes(body).replace(call.encode(), copy.encode()))
                line = anchor_head(transaction, signer)
                last = transaction.head[0]
            last_head.note_anchor(home, line)
        if not home.near:
            connection.execute("ANALYZE journal")

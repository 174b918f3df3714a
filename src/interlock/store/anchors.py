"""Signed heads of the journal: when the next one is due, and where it is kept.

Every so often, and when the journal is closed, the head is signed and anchored in the database, in a file beside it and
beside the keys. Removing records from the end then contradicts an anchor. What a killed process left unsigned, the next
one signs before it writes; more than a killed process can leave is refused (`last_head`).
"""

from __future__ import annotations

import time

from interlock.core.record import NamedTuple
from interlock.store import last_head
from interlock.store.home import Home
from interlock.store.last_head import ANCHOR_EVERY, GENESIS, SignedHead, anchor_line, note_anchor
from interlock.store.port import Reader, Transaction
from interlock.store.signing import Signer
from interlock.store.timekeeping import StoreTime

ANCHOR_AFTER_S = 1.0


class Anchor(NamedTuple):
    """A signed head that a transaction has added."""

    seq: int
    head: bytes
    at_ms: int
    signature: bytes


class Anchors:
    """Signs the journal's heads for one process."""

    def __init__(self, home: Home, signer: Signer) -> None:
        self._home = home
        self._signer = signer
        self._unanchored = 0
        self._anchored_at = time.monotonic()
        # The newest signature that this process knows of: its place, and the store's time when it was made.
        self._anchored_through = self._anchored_ms = 0

    @property
    def pending(self) -> bool:
        """Whether this process knows of records that are not signed yet."""
        return self._unanchored != 0

    @property
    def unsigned(self) -> bool:
        """Whether records wait for a signature for longer than they should; any commit gives them one."""
        return self._unanchored > 0 and time.monotonic() - self._anchored_at >= ANCHOR_AFTER_S

    def take_over(self, reader: Reader) -> last_head.Ends:
        """Check that this process can sign, and that what is there was written and signed by Interlock.

        A key that is damaged or gone must not be noticed later: calls would go on, and nothing would vouch for them.
        """
        # The file first: what it names is in the database before.
        ends = last_head.ends(reader, last_head.read(self._home))
        if ends.anchor is None or not self._home.near:
            # There from the first day, so that a file that is missing later shows. With a shared store, the first day
            # of a data directory is that of its first process.
            self._home.anchors.touch(mode=0o600)
        self._signer.check(None if ends.signed is None else ends.signed.key_id)
        last_head.refuse_forged(self._signer.public, ends)  # makes the pair where there is none
        last_head.refuse_rewritten(reader, ends)
        if ends.signed is not None:
            self._anchored_through, self._anchored_ms = ends.signed.seq, ends.signed.at_ms
        self._unanchored = ends.unsigned
        return ends

    def first(self, now_ms: int) -> SignedHead:
        """The signed head of a journal without records."""
        self._anchored_ms = now_ms
        signature = self._signer.sign("head", 0, GENESIS, now_ms)
        return SignedHead(0, GENESIS, now_ms, self._signer.key_id, signature)

    def add_if_due(self, transaction: Transaction, store_time: StoreTime, *, now: bool = False) -> Anchor | None:
        """Sign the head and add the anchor where one is due, or `now`. `note` follows when it is committed."""
        seq, head = transaction.head
        # With what others wrote meanwhile, so that however many processes write, no more than this is ever unsigned.
        self._unanchored = seq - self._anchored_through
        waited = time.monotonic() - self._anchored_at
        # The time of records counts too: what is signed late by it looks as if its signature had been removed.
        aged = not 0 <= transaction.now_ms - self._anchored_ms < ANCHOR_AFTER_S * 1000
        if not self._unanchored or not (now or self._unanchored >= ANCHOR_EVERY or waited >= ANCHOR_AFTER_S or aged):
            return None
        store_time.write(transaction.execute, transaction)
        signature = self._signer.sign("head", seq, head, transaction.now_ms)
        added = transaction.execute(
            "INSERT INTO anchor (seq, hash, at_ms, key_id, signature) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (seq) DO NOTHING",
            (seq, head, transaction.now_ms, self._signer.key_id, signature),
        )
        if not added.rowcount:
            # Signed already, and noted by the signer: what was counted since was not written, or not by this process.
            # INVARIANT: the time of a signature is that at which it was made. By a later one, the next record would be
            # left unsigned, and the next process would find it made too long after the newest signature.
            row = transaction.one("SELECT at_ms FROM anchor WHERE seq = ?", (seq,))
            self._signed(seq, transaction.now_ms if row is None else row[0])
            return None
        return Anchor(seq, head, transaction.now_ms, signature)

    def _signed(self, seq: int, at_ms: int) -> None:
        self._unanchored = 0
        self._anchored_at = time.monotonic()
        self._anchored_through, self._anchored_ms = seq, at_ms

    def note(self, anchor: Anchor) -> None:
        """Keep a committed anchor outside the database as well, where an edit of the database does not reach it."""
        self._signed(anchor.seq, anchor.at_ms)
        line = anchor_line(anchor.seq, anchor.head, anchor.at_ms, self._signer.key_id, anchor.signature)
        note_anchor(self._home, line)

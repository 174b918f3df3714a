"""Outcomes of calls as their idempotency keys keep them, encrypted, for replays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from interlock.data.canonical import decode, encode

if TYPE_CHECKING:
    from interlock.data.schema import Json
    from interlock.gateway import idempotency
    from interlock.store.port import Transaction
    from interlock.store.sealing import Box

_OUTCOME = "outcome"


class OutcomeStore:
    """Encrypts and decrypts outcomes."""

    def __init__(self, box: Box) -> None:
        self.box = box
        # Refuses (E3601, E3604, E3804) to begin a call whose outcome could not be encrypted.
        self.check_key: Callable[[], object] = box.look

    def open(self, replay: idempotency.Replay) -> Json:
        """Return the outcome of a call, as stored under its key. JSON in clear text is of an older version."""
        sealed = replay.result
        if sealed.startswith(b"{"):
            return decode(sealed)
        return decode(self.box.open(sealed, purpose=_OUTCOME, about=replay.call))

    def seal(self, transaction: Transaction, call: str, outcome: Json) -> bytes:
        """Return the outcome of a call, encrypted for its key."""
        return self.box.seal(encode(outcome), purpose=_OUTCOME, about=call, within=transaction)

"""All that calls leave behind besides records, in one data directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.gateway.persistence.change_values import ChangeValues
from interlock.gateway.persistence.inputs import InputStore
from interlock.gateway.persistence.outcomes import OutcomeStore
from interlock.gateway.persistence.payloads import PayloadStore
from interlock.gateway.persistence.sessions import SessionStore
from interlock.gateway.persistence.undo import UndoStore

if TYPE_CHECKING:
    from interlock.gateway.persistence.pieces import Pieces
    from interlock.gateway.redaction import CallRedaction
    from interlock.settings import Settings
    from interlock.store.port import Store
    from interlock.store.sealing import Box


class CallStorage:
    """The stores of one data directory."""

    def __init__(self, journal: Store, redaction: CallRedaction, settings: Settings, box: Box, pieces: Pieces) -> None:
        self.sessions = SessionStore(journal, box)
        self.pieces = pieces
        self.payloads = PayloadStore(journal, settings, box, self.pieces)
        self.inputs = InputStore(journal, settings, box, self.payloads, self.pieces)
        self.outcomes = OutcomeStore(box)
        self.changes = ChangeValues(settings, box)
        self.undo = UndoStore(journal, redaction, settings, box)

"""The operations of those who operate a server: who may call, by which keys, and what happened to unfinished calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.api.identities import Identities
from interlock.api.reconciliation import Reconciliation
from interlock.api.settings_view import SettingsView
from interlock.api.signing_keys import SigningKeys
from interlock.api.tokens import Tokens

if TYPE_CHECKING:
    from interlock.api.parts import Parts


class Administration:
    """Tokens, identities, signing keys, the settings in effect, and calls whose outcome is unknown."""

    def __init__(self, parts: Parts) -> None:
        self.tokens = Tokens(parts)
        self.identities = Identities(parts)
        self.signing_keys = SigningKeys(parts)
        self.settings = SettingsView(parts)
        self.unknown_calls = Reconciliation(parts)

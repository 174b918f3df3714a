"""The shared policy and principals, as a process follows them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from interlock.authority.policy import SharedTexts
from interlock.store import shared_config
from interlock.store.shared_config import POLICY, PRINCIPALS, SETTINGS
from interlock.store.shared_version import SharedConfig

if TYPE_CHECKING:
    from interlock.store.home import Home
    from interlock.store.port import Store

_log = logging.getLogger("interlock.policy")


def follow(home: Home, journal: Store) -> SharedTexts | None:
    """The shared policy and principals, kept up to date; None for a home that has files of its own."""
    if home.shared is None:
        return None
    followed = SharedTexts(home.shared.files[PRINCIPALS], home.shared.files[POLICY])

    def apply(shared: SharedConfig | None) -> None:
        before = home.shared
        if shared is None or before is None or shared.version == before.version:
            return
        settings = before.files[SETTINGS]
        home.other_settings = shared.files[SETTINGS] != settings
        if home.other_settings:
            _log.warning(
                "version %s of the shared configuration has other settings: restart to use them", shared.version
            )
        # The settings are those that this process was started with.
        home.shared = shared._replace(files={**shared.files, SETTINGS: settings})
        followed.texts = (shared.files[PRINCIPALS], shared.files[POLICY])

    journal.changes.watch(("config",), shared_config.newest, apply)
    return followed

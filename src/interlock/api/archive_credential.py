"""The credential of the object store, for commands that open no data directory.

It is the one that the setting `archive_secret` names. The store is only read, whatever its schema.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.threads import DISK
from interlock.net.s3 import has_credentials
from interlock.store.homes import home_at
from interlock.store.inspection import opened
from interlock.store.shared_config import settings_of

if TYPE_CHECKING:
    from interlock.settings import Settings
    from interlock.store.home import Home
    from interlock.store.port import Store


async def archive_credential(path: Path) -> str:
    """The stored credential for the object store; empty where that of the environment is to be used.

    That is so without the setting, and where a new or lost store has no credential while the environment has one.
    """
    home = home_at(path)
    settings = settings_of(home).settings
    if not settings.archive_secret:
        return ""
    try:
        return await _stored(home, settings)
    except Failure:
        if has_credentials(os.environ):
            return ""
        raise


async def _stored(home: Home, settings: Settings) -> str:
    if not home.made:
        raise Failure("E3602", f"there is no store here that could hold the credential `{settings.archive_secret}`")
    from interlock.api.backends import secret_source
    from interlock.authority.secrets import Secrets
    from interlock.store.at_rest import StoreAtRest
    from interlock.store.sealing import Box

    box = Box(home.keys, where=settings.secrets_key)
    await DISK.run(box.prepare)
    with opened(home) as reader:
        embedded = Secrets(cast("Store", StoreAtRest(reader)), box, Clock())
        source = secret_source(settings, embedded, Clock())
        try:
            credential = await source.fetch(settings.archive_secret)
            try:
                return credential.reveal()
            finally:
                credential.wipe()
        finally:
            await source.close()

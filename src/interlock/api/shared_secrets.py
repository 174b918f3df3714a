"""The secret that all servers on one store share, and the keys derived from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.core.errors import Failure
from interlock.data.canonical import purpose_secret
from interlock.store import facts

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.store.journal import Journal


async def home_secret(journal: Journal) -> bytes:
    """The secret of the store. E3108 before a data directory has been opened for the first time."""
    known = await journal.read(lambda reader: facts.get(reader, "key_secret"))
    if known is None:
        raise Failure("E3108", "the data directory has no key secret yet")
    return bytes.fromhex(known)


async def shared_secret(parts: Parts, purpose: str) -> bytes:
    """The same key, of an open data directory."""
    return await secret_for(parts.journal, purpose)


async def secret_for(journal: Journal, purpose: str) -> bytes:
    """The key of one purpose, the same at every server on the store."""
    return purpose_secret(await home_secret(journal), purpose)

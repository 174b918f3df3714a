"""Operations on stored credentials: store, list and remove them, and change the key they are sealed with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.api.rights import require_here

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.authority.secrets import StoredCredential
    from interlock.call.context import Caller

_SCOPE = "secrets:admin"


class CredentialOperations:
    """The credentials of a data directory, for callers with `secrets:admin`. No operation returns a value."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def store(self, name: str, value: str, *, by: Caller, slot: str, lifetime_ms: int | None) -> int | None:
        """Store a credential, in place of an existing one. Returns when it expires, in milliseconds."""
        require_here(by, _SCOPE, "storing a credential")
        expires_ms = None if lifetime_ms is None else self._parts.clock.now_ms() + lifetime_ms
        await self._parts.secrets.set(name, value, by=by.acting, slot=slot, expires_ms=expires_ms)
        return expires_ms

    async def list(self, *, by: Caller) -> list[StoredCredential]:
        """Every stored credential, without its value."""
        require_here(by, _SCOPE, "listing credentials")
        return await self._parts.secrets.names()

    async def remove(self, name: str, *, by: Caller, slot: str | None) -> int:
        """Remove a credential, or one slot of it. Returns the number of slots removed."""
        require_here(by, _SCOPE, "removing a credential")
        return await self._parts.secrets.remove(name, by=by.acting, slot=slot)

    async def rotate_key(self, *, by: Caller) -> tuple[int, list[StoredCredential]]:
        """Seal every credential under a new key and drop the old one.

        Returns how many are sealed under it, and those that could not be opened and stay as they were.
        """
        require_here(by, _SCOPE, "changing the key")
        secrets, home = self._parts.secrets, self._parts.home
        left = await secrets.rotate_key(by=by.acting, others=None if home.near else home.others)
        return len(await secrets.names()) - len(left), left

"""Operations on the keys that sign this issuer's tokens: list, make and retire them, and publish their public halves.

A private key is made in the data directory and never leaves it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.api.rights import require_here

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.authority.keys import Algorithm
    from interlock.call.context import Caller
    from interlock.data.schema import Json

SCOPE = "tokens:issue"


class SigningKeys:
    """Lists, makes and retires signing keys, for callers with `tokens:issue` who operate the server."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def list(self, *, by: Caller) -> list[Json]:
        """Every key that verifies, oldest first, and which one signs."""
        require_here(by, SCOPE, "listing signing keys")
        return await every_key(self._parts)

    async def make(self, *, by: Caller, algorithm: Algorithm | None = None, first: bool = False) -> Json:
        """Make a key that signs from now on; with `first`, only if there is none yet."""
        require_here(by, SCOPE, "making a key")
        made = await self._parts.tokens.rotate_key(algorithm, by=by, first=first)
        return made.document(signs=True)

    async def retire(self, kid: str, *, by: Caller, reason: str) -> Json:
        """Remove a key that signs no longer. Every token it signed is void from now on, in every process."""
        require_here(by, SCOPE, "retiring a key")
        await self._parts.tokens.retire_key(kid, reason=reason, by=by)
        return {"kid": kid, "retired": True}

    def jwks(self) -> Json:
        """The public halves as a JWKS document. They are for everybody who verifies our tokens."""
        return self._parts.issuer_keys.jwks()


async def every_key(parts: Parts) -> list[Json]:
    """The same as `SigningKeys.list`, for a person at the data directory itself. E3804 if the signing key is lost."""
    held = parts.issuer_keys.all()
    if not held:
        await parts.tokens.check_signer()
    return [key.document(signs=key is held[-1]) for key in held]

"""Operations on the keys that sign this issuer's tokens: list, make and retire them, and publish their public halves.

A private key is made in the data directory and never leaves it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.api.rights import require_here
from interlock.core.clock import iso

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from interlock.api.parts import Parts
    from interlock.authority.keys import Algorithm, SigningKey
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
        return _document(await self._parts.tokens.rotate_key(algorithm, by=by, first=first), signs=True)

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
    return _documents(held)


def keys_at_rest(path: Path) -> list[Json]:
    """The same of a data directory that is not opened. An empty list does not tell whether keys were lost."""
    from interlock.authority.keys import IssuerKeys
    from interlock.core.clock import Clock
    from interlock.store.home import Home

    return _documents(IssuerKeys(Home(path).keys / "issuer", clock=Clock()).all())


def _documents(held: Sequence[SigningKey]) -> list[Json]:
    return [_document(key, signs=key is held[-1]) for key in held]


def _document(key: SigningKey, *, signs: bool) -> Json:
    return {"kid": key.kid, "algorithm": key.algorithm, "made": iso(key.created_ms), "signs": signs}

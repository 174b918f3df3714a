"""Callers of an endpoint, recognised by the token in their `Authorization` header."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.api.failed_authentication import Refusals
from interlock.authority.verifier import token_digest
from interlock.core.errors import Failure

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.call.context import Caller


class Authentication:
    """Verifies tokens, and raises alerts about those that are refused."""

    def __init__(self, parts: Parts) -> None:
        self._authority = parts.authority
        self.refusals = Refusals(parts.telemetry)
        # The caller whose token has this digest (`bearer`), if it was verified before. The verifier's own function:
        # every request of an endpoint would pass one more.
        self.recall = parts.authority.tokens.verifier.recall

    def known(self, authorization: str | None) -> Caller | None:
        """The caller of an `Authorization` header that was verified before; None where `authenticate` must."""
        digest = bearer(authorization)
        return None if digest is None else self.recall(digest)

    async def authenticate(self, authorization: str | None) -> Caller:
        """The caller of an `Authorization` header. E3212 without one; E3201, E3202, E3203 or E3207 for a bad one."""
        try:
            return await self._authority.caller_of(_token(authorization))
        except Failure as failure:
            self.refusals.note(failure)
            raise

    def refusal(self, caller: Caller) -> Failure | None:
        """The reason why the token of an authenticated caller no longer holds; None while it does."""
        try:
            if caller.capability is not None:
                self._authority.tokens.verifier.check(caller.capability)
        except Failure as failure:
            self.refusals.note(failure)
            return failure
        return None


def bearer(authorization: str | None) -> bytes | None:
    """The digest of the token in an `Authorization` header; None if there is none in it."""
    if authorization is None or authorization[:7].lower() != "bearer ":
        return None
    return token_digest(authorization[7:])


def _token(authorization: str | None) -> str:
    if authorization is None:
        raise Failure("E3212", "send a token: `Authorization: Bearer …` (interlock token issue makes one)")
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Failure("E3203", "the authorization header must read `Bearer TOKEN`")
    return token.strip()

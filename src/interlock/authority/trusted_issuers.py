"""Issuers of tokens that an operator trusts, and their keys.

Each has its audience, its algorithms and its key set: a file, read again when it changes, or an https address, fetched
when a key is not known yet and otherwise periodically. An address that does not answer leaves the last keys in force
for an hour; after that nothing verifies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from interlock.authority.keys import ALGORITHMS, Algorithm, PublicKey, read_jwks, strict_json
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.record import dataclass

if TYPE_CHECKING:
    from interlock.net.outgoing import Trouble


FETCH_S = 5.0
FETCH_BYTES = 65_536
REFETCH_S = 30.0  # at the earliest, however often keys are asked for that do not exist
FRESH_S = 300.0
KEEP_S = 3600.0
# Claims of other issuers that identify somebody, or say how and when they logged in. None of them restricts a token.
INFORMATIONAL = frozenset({
    "acr", "amr", "at_hash", "auth_time", "azp", "client_id", "email", "email_verified", "family_name", "given_name",
    "idp", "locale", "name", "nonce", "oid", "picture", "preferred_username", "session_state", "sid", "tid", "typ",
    "updated_at", "ver", "zoneinfo",
})  # fmt: skip
# Claims that bind a token to a key, to an actor or to certain requests. We check none of them, so we ignore none.
RESTRICTING = frozenset({"act", "authorization_details", "cnf", "crit", "may_act"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedIssuer:
    """Another issuer whose tokens are accepted. `jwks` is a path or an https address.

    `ignored_claims` are claims of its tokens that may be ignored, besides the informational ones.
    """

    iss: str
    audience: str
    algorithms: tuple[Algorithm, ...]
    jwks: str
    ignored_claims: frozenset[str] = frozenset()

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> TrustedIssuer:
        """Read an issuer from the settings; E3108 for missing or unknown members."""
        texts = {name: entry.get(name) for name in ("iss", "audience", "jwks")}
        listed: Any = entry.get("algorithms", ("RS256",))
        algorithms = tuple(cast("Iterable[Any]", listed)) if isinstance(listed, list | tuple) else ()
        known = {*texts, "algorithms", "ignored_claims"}
        passed: Any = entry.get("ignored_claims", ())
        ignored: tuple[Any, ...] = tuple(cast("Iterable[Any]", passed)) if isinstance(passed, list | tuple) else (None,)
        if not all(isinstance(text, str) and text for text in texts.values()) or not entry.keys() <= known:
            raise Failure("E3108", f"a trusted issuer is stated by {', '.join(sorted(known))}, and nothing else")
        if not algorithms or not set(algorithms) <= set(ALGORITHMS):
            raise Failure("E3108", f"a trusted issuer's algorithms are some of {', '.join(ALGORITHMS)}")
        if not all(isinstance(name, str) and name for name in ignored):
            raise Failure("E3108", "a trusted issuer's `ignored_claims` is a list of names")
        if binding := sorted(RESTRICTING.intersection(ignored)):
            raise Failure("E3108", f"the claim `{binding[0]}` restricts a token, so it cannot be ignored")
        iss = str(texts["iss"])
        if iss.startswith("did:"):
            raise Failure("E3108", f"`{iss}` is a DID; a trusted issuer has a name or an address of its own")
        audience, jwks = str(texts["audience"]), str(texts["jwks"])
        passed_over = INFORMATIONAL.union(ignored)
        return cls(iss=iss, audience=audience, algorithms=algorithms, jwks=jwks, ignored_claims=passed_over)


class TrustedIssuers:
    """The issuers an operator trusts besides our own, and their keys."""

    def __init__(
        self,
        issuers: Sequence[TrustedIssuer],
        *,
        clock: Clock,
        named: Callable[[str], Path] = Path,
        loopback_http: bool = False,
    ) -> None:
        """`named` returns the file that a path of the settings stands for."""
        self._issuers = {issuer.iss: issuer for issuer in issuers}
        if len(self._issuers) != len(issuers):
            raise Failure("E3108", "a trusted issuer is stated twice")
        self._sources: dict[str, KeyFile | FetchedKeys] = {
            issuer.iss: _source(issuer.jwks, clock, named, loopback_http) for issuer in issuers
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._issuers)

    def get(self, iss: str) -> TrustedIssuer | None:
        return self._issuers.get(iss)

    async def current(self, iss: str) -> bool:
        """Whether the issuer's keys are as new as they should be; False for older ones that are still in force.

        E3001 if its keys are unavailable.
        """
        source = self._sources[iss]
        await source.keys()
        return isinstance(source, KeyFile) or source.fresh

    async def find(self, iss: str, kid: str) -> PublicKey | None:
        """Return the issuer's key of this name; E3001 if its keys are unavailable."""
        keys = await self._sources[iss].keys(kid)
        return next((key for key in keys if key.kid == kid), None)


def _source(jwks: str, clock: Clock, named: Callable[[str], Path], loopback_http: bool) -> KeyFile | FetchedKeys:
    if "://" not in jwks:
        return KeyFile(named(jwks))

    async def fetch() -> tuple[PublicKey, ...]:
        return read_jwks(await fetch_json(jwks, loopback_http=loopback_http))

    return FetchedKeys(fetch, clock)


class KeyFile:
    """A key set in a file, read again when it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._keys: tuple[PublicKey, ...] = ()

    async def keys(self, kid: str | None = None) -> tuple[PublicKey, ...]:
        try:
            status = self._path.stat()
            seen = (status.st_mtime_ns, status.st_size, status.st_ino)
            if seen != self._seen:
                self._keys = read_jwks(strict_json(self._path.read_bytes()))
                self._seen = seen
        except (OSError, ValueError):
            raise Failure("E3001", f"the issuer's key set `{self._path.name}` cannot be read") from None
        return self._keys


class FetchedKeys:
    """Keys behind an address: fetched when one is missing or they are old, and at most every 30 seconds."""

    def __init__(self, fetch: Callable[[], Awaitable[tuple[PublicKey, ...]]], clock: Clock) -> None:
        self._fetch = fetch
        self._monotonic = clock.monotonic
        self._fetching: asyncio.Task[None] | None = None
        self._keys: tuple[PublicKey, ...] = ()
        self._fetched = self._tried = float("-inf")
        self._why = ""

    @property
    def fresh(self) -> bool:
        """Whether the last fetch that was due has succeeded."""
        return self._monotonic() - self._fetched <= FRESH_S

    async def keys(self, kid: str | None = None) -> tuple[PublicKey, ...]:
        """Return the keys, fetched again if one of this name is not among them.

        A known key does not wait for a fetch that another caller began: an unknown name and a slow host must not delay
        others. A fetch continues when its caller is cancelled, because other callers wait for it too.
        """
        known = bool(self._keys) if kid is None else any(key.kid == kid for key in self._keys)
        now = self._monotonic()
        if known and now - self._fetched <= (KEEP_S if self._fetching else FRESH_S):
            return self._keys
        if self._fetching is None and now - self._tried >= REFETCH_S:
            self._fetching = asyncio.create_task(self._renew(now))
        if self._fetching is not None:
            await asyncio.shield(self._fetching)
        if self._monotonic() - self._fetched > KEEP_S:
            raise Failure("E3001", self._why)
        return self._keys

    async def _renew(self, now: float) -> None:
        self._tried = now
        try:
            self._keys, self._fetched = await self._fetch(), now
        except Failure as failure:
            self._why = failure.message
        finally:
            self._fetching = None


async def fetch_json(url: str, *, public_only: bool = False, loopback_http: bool = False) -> Any:
    """Fetch a small JSON document over https, without redirects; E3001 if it does not come.

    With `public_only` the host must have public addresses only: the address comes from a stranger. Otherwise an
    operator configured it, and it may be on a private network. `loopback_http` is for tests.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname
        _ = parts.port
    except ValueError:
        parts, host = None, None
    local = loopback_http and parts is not None and parts.scheme == "http" and host in ("127.0.0.1", "localhost")
    if parts is None or (parts.scheme != "https" and not local) or not host or "@" in parts.netloc:
        raise Failure("E3001", "keys are fetched from https addresses only")
    from interlock.net.outgoing import Outgoing, Unanswered  # the HTTP client; most processes fetch no keys

    client = Outgoing("public" if public_only and not local else "any")
    try:
        answer = await client.ask("GET", url, most=FETCH_BYTES, timeout_s=FETCH_S)
    except Unanswered as silence:
        raise Failure("E3001", _TROUBLES.get(silence.why, _SILENT)) from None
    except Failure:
        whose = "keys of a DID are fetched from public addresses only" if public_only else _NEVER
        raise Failure("E3001", whose) from None
    finally:
        await client.close()
    if answer.status != 200:
        raise Failure("E3001", f"the address that keys are fetched from answers {answer.status}")
    try:
        return strict_json(answer.body)
    except ValueError:
        raise Failure("E3001", "the address that keys are fetched from does not answer with JSON") from None


_SILENT = "the address that keys are fetched from does not answer"
_NEVER = "the address that keys are fetched from is one that is never connected to"
_TROUBLES: Mapping[Trouble, str] = {
    "too long": f"the address that keys are fetched from sends more than {FETCH_BYTES} bytes",
    "flooded": "the address that keys are fetched from sends a flood of tiny pieces",
    "compressed": "the address that keys are fetched from sends a compressed answer",
}

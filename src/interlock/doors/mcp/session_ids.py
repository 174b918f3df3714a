"""Ids of handshake-era sessions, from which every server on the store can open the session again.

A session lives in the process that answered the handshake. Behind a load balancer its next request may reach another
one, or the same one after a restart. So an id contains what the handshake agreed on: the protocol version and what the
client is capable of. It is bound to its caller and authenticated with a key derived from the secret of the store.

An id gives no rights. Each request brings its token, and a caller with this token can open a session in any case.
"""

from __future__ import annotations

import hashlib
import hmac
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error
from secrets import token_hex
from typing import TYPE_CHECKING, Any, cast

import orjson

from interlock.api.shared_secrets import shared_secret
from interlock.core.clock import Clock
from interlock.core.record import dataclass
from interlock.data.schema import Json

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock

# After this long a session that no server holds any more is not opened again.
LIVES_S = 30 * 24 * 3600
# Of a client that states more than this, only the capabilities that this server uses are in the id.
MOST_STATED = 2000
# What a server asks clients for, and what clients show.
_USED = ("elicitation", "sampling", "roots", "extensions")
# How ids of questions to clients begin.
QUESTION = "question-"
_NONCE, _OWNER, _TIME, _MAC = 12, 12, 5, 16


@dataclass(frozen=True, slots=True)
class Agreed:
    """The agreement of a handshake."""

    version: str
    capabilities: Json


@dataclass(slots=True)
class Session:
    """A session that this server holds. `name` is its id for the client, `local` for the SDK."""

    name: str
    local: str
    owner: str
    server: str
    used: float
    in_flight: int = 0
    announced: bool = False

    def question(self) -> str:
        """An id for a question to the client. It tells which server asks, and is asked once in all servers."""
        return f"{QUESTION}{self.server}-{token_hex(8)}"


class SessionIds:
    """Makes and reads the ids of sessions. All servers on a store have the same key."""

    def __init__(self, app: Interlock) -> None:
        self._app = app
        self._clock: Clock = app.clock
        self._key = b""

    async def make(self, owner: str, agreed: Agreed) -> str:
        """A new id of a caller."""
        at = (self._clock.now_ms() // 1000).to_bytes(_TIME, "big")
        document = zlib.compress(_document(agreed))
        body = self._clock.random_bytes(_NONCE) + _short(owner) + at + document
        return urlsafe_b64encode(body + await self._mac(body)).rstrip(b"=").decode()

    async def read(self, session_id: str, owner: str) -> Agreed | None:
        """Return what an id of this caller contains; None for any other id, and for one that is too old."""
        try:
            raw = urlsafe_b64decode(session_id + "=" * (-len(session_id) % 4))
        except (Error, ValueError):
            return None
        body, mac = raw[:-_MAC], raw[-_MAC:]
        if len(body) <= _NONCE + _OWNER + _TIME or not hmac.compare_digest(mac, await self._mac(body)):
            return None
        at = int.from_bytes(body[_NONCE + _OWNER : _NONCE + _OWNER + _TIME], "big")
        if body[_NONCE : _NONCE + _OWNER] != _short(owner) or self._clock.now_ms() // 1000 - at > LIVES_S:
            return None
        version, capabilities = orjson.loads(zlib.decompress(body[_NONCE + _OWNER + _TIME :]))
        return Agreed(version, capabilities)

    async def _mac(self, body: bytes) -> bytes:
        if not self._key:
            self._key = await shared_secret(self._app, "mcp sessions")
        return hmac.new(self._key, body, hashlib.sha256).digest()[:_MAC]


def stated(greeting: bytes) -> Json:
    """The capabilities that a client states in its greeting."""
    document: Any = orjson.loads(greeting)
    found: Any = cast("Json", document).get("params") if isinstance(document, dict) else None
    capabilities: Any = cast("Json", found).get("capabilities") if isinstance(found, dict) else None
    return cast("Json", capabilities) if isinstance(capabilities, dict) else {}


def _document(agreed: Agreed) -> bytes:
    used: Json = {name: agreed.capabilities[name] for name in _USED if name in agreed.capabilities}
    named: Json = {name: {} for name in used if name != "extensions"}
    for capabilities in (used, named):
        document = orjson.dumps([agreed.version, capabilities])
        if len(document) <= MOST_STATED:
            return document
    return orjson.dumps([agreed.version, {}])


def _short(owner: str) -> bytes:
    return hashlib.sha256(owner.encode(errors="surrogatepass")).digest()[:_OWNER]

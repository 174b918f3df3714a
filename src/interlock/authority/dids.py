"""Decentralized identifiers: names that determine their public keys.

    did:key:z6Mk…      the key itself, in multibase (Ed25519, P-256, RSA)
    did:jwk:eyJr…      the key itself, as a JWK
    did:web:host:path  a document at https://host/path/did.json that lists keys

The first two are resolved by arithmetic alone. A did:web is fetched and, since its name may come from anybody, only
from public addresses, without redirects, with limits on time and size; only keys that the document offers for
delegating or asserting count.
"""

from __future__ import annotations

import base64
from typing import Any, cast
from urllib.parse import unquote

from interlock.authority.keys import PublicKey, algorithm_of, from_jwk, strict_json
from interlock.authority.trusted_issuers import FetchedKeys, fetch_json
from interlock.call.capability import is_did
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.expressions import expression

MOST_WEB = 256  # documents remembered

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_PREFIXES = {"EdDSA": b"\xed\x01", "ES256": b"\x80\x24", "RS256": b"\x85\x24"}  # multicodec
_LONGEST_KEY = 1024  # characters; base58 takes time in the square of its length
_WEB_HOST = expression(r"[a-z0-9-]+(\.[a-z0-9-]+)*(:[0-9]{1,5})?\Z")
_WEB_STEP = expression(r"[A-Za-z0-9._-]+\Z")


# Multibase


def base58(raw: bytes) -> str:
    """Bytes in Bitcoin's alphabet."""
    number, text = int.from_bytes(raw, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        text = _ALPHABET[digit] + text
    return "1" * (len(raw) - len(raw.lstrip(b"\0"))) + text


def from_base58(text: str) -> bytes:
    """The bytes behind base58; ValueError for a letter that is not in its alphabet."""
    number = 0
    for letter in text:
        number = number * 58 + _ALPHABET.index(letter)
    zeros = len(text) - len(text.lstrip("1"))
    return bytes(zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")


def to_multibase(public: Any) -> str:
    """Encode a public key with its type in multibase."""
    algorithm = algorithm_of(public)
    if algorithm == "EdDSA":
        raw = public.public_bytes_raw()
    else:
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        form = (
            (Encoding.X962, PublicFormat.CompressedPoint)
            if algorithm == "ES256"
            else (Encoding.DER, PublicFormat.PKCS1)
        )
        raw = public.public_bytes(*form)
    return "z" + base58(_PREFIXES[algorithm] + raw)


def from_multibase(text: str) -> Any:
    """Decode the public key of a multibase text; E3202 if it is invalid, or not in its one canonical form."""
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        key = _decoded(from_base58(text[1:])) if text[:1] == "z" and len(text) <= _LONGEST_KEY else None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    # INVARIANT: one key has one name. Otherwise a revoked identity could come back under another spelling.
    if key is None or to_multibase(key) != text:
        raise Failure("E3202", "the DID holds no key of a type that is accepted (Ed25519, P-256, RSA)")
    return key


def _decoded(raw: bytes) -> Any:
    prefix, rest = raw[:2], raw[2:]
    if prefix == _PREFIXES["EdDSA"]:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        return Ed25519PublicKey.from_public_bytes(rest)
    if prefix == _PREFIXES["ES256"]:
        from cryptography.hazmat.primitives.asymmetric import ec

        return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), rest)
    if prefix == _PREFIXES["RS256"]:
        from cryptography.hazmat.primitives.serialization import load_der_public_key

        return load_der_public_key(rest)
    return None


# Resolving


def make_did_key(public: Any) -> str:
    """Make the did:key of a public key."""
    return f"did:key:{to_multibase(public)}"


def keys_within(did: str) -> tuple[PublicKey, ...] | None:
    """Return the keys that a DID itself contains; None if they have to be fetched, E3202 if it is no such DID."""
    if not is_did(did):
        raise Failure("E3202", "the DID is malformed")
    method, _, rest = did.removeprefix("did:").partition(":")
    if method == "key":
        key = from_multibase(rest)
        return (PublicKey(f"{did}#{rest}", algorithm_of(key), key),)
    if method == "jwk":
        return (from_jwk(_jwk(rest), f"{did}#0"),)
    if method == "web":
        return None
    raise Failure("E3202", f"the DID method `{method}` is not known; known are key, jwk and web")


def _jwk(text: str) -> Any:
    try:
        return strict_json(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except ValueError:
        raise Failure("E3202", "the DID holds no JWK") from None


def web_address(did: str, *, loopback_http: bool = False) -> str:
    """Return the address of a did:web document; E3202 for an invalid name."""
    host, *path = did.removeprefix("did:web:").split(":")
    host = unquote(host)
    if not _WEB_HOST.match(host) or not all(_WEB_STEP.match(step) and step.strip(".") for step in path):
        raise Failure("E3202", f"`{did[:200]}` is not a did:web of a host and a path")
    local = loopback_http and host.partition(":")[0] in ("127.0.0.1", "localhost")
    where = "/".join(path) or ".well-known"
    return f"{'http' if local else 'https'}://{host}/{where}/did.json"


def read_document(did: str, document: Any) -> tuple[PublicKey, ...]:
    """Return the keys that a DID document offers for delegating or asserting; E3202 if it is another's document."""
    if not isinstance(document, dict) or cast("dict[str, Any]", document).get("id") != did:
        raise Failure("E3202", f"the document behind `{did}` is not its own")
    members = cast("dict[str, Any]", document)
    methods = {str(one.get("id")): one for one in _objects(members.get("verificationMethod"))}
    keys: dict[str, PublicKey] = {}
    for relation in ("capabilityDelegation", "assertionMethod"):
        listed: Any = members.get(relation)
        for entry in cast("list[Any]", listed) if isinstance(listed, list) else ():
            method = methods.get(entry) if isinstance(entry, str) else entry
            key = _method_key(did, method)
            if key is not None:
                keys.setdefault(key.kid, key)
    return tuple(keys.values())


def _method_key(did: str, method: Any) -> PublicKey | None:
    if not isinstance(method, dict):
        return None
    members = cast("dict[str, Any]", method)
    name = str(members.get("id"))
    kid = did + name if name.startswith("#") else name
    if members.get("controller", did) != did or not kid.startswith(f"{did}#"):
        return None  # another's key: this document cannot vouch for it
    try:
        if "publicKeyJwk" in members:
            return from_jwk(members["publicKeyJwk"], kid)
        key = from_multibase(str(members.get("publicKeyMultibase")))
        return PublicKey(kid, algorithm_of(key), key)
    except Failure:
        return None  # a key of an unsupported type


def _objects(value: Any) -> list[dict[str, Any]]:
    listed = cast("list[Any]", value) if isinstance(value, list) else []
    return [cast("dict[str, Any]", one) for one in listed if isinstance(one, dict)]


class DidResolver:
    """Finds the keys of DIDs, and caches those that had to be fetched."""

    def __init__(self, *, clock: Clock, loopback_http: bool = False) -> None:
        self._clock = clock
        self._loopback_http = loopback_http
        self._web: dict[str, FetchedKeys] = {}

    async def resolve(self, did: str, kid: str | None = None) -> tuple[PublicKey, ...]:
        """Return the keys of a DID; E3202 if it has none of a supported type, E3001 if its document is unavailable."""
        held = keys_within(did)
        if held is not None:
            return held
        source = self._web.get(did)
        if source is None:
            if len(self._web) >= MOST_WEB:
                del self._web[next(iter(self._web))]
            source = self._web[did] = self._fetched(did)
        return await source.keys(kid)

    def _fetched(self, did: str) -> FetchedKeys:
        url = web_address(did, loopback_http=self._loopback_http)

        async def fetch() -> tuple[PublicKey, ...]:
            document = await fetch_json(url, public_only=True, loopback_http=self._loopback_http)
            return read_document(did, document)

        return FetchedKeys(fetch, self._clock)

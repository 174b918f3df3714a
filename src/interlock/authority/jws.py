"""The wire form of tokens: JSON Web Signatures, parsed and written, with nothing in them trusted.

The allowed header members are listed; members that bring a key along or change the meaning of a signature are not among
them. A signature is checked under the one algorithm that its key is for, never the one that the token names.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, cast

from interlock.authority.keys import ALGORITHMS, Algorithm, PublicKey, algorithm_of, strict_json
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.core.record import dataclass

LARGEST = 16_384  # bytes
_P256_HALF = 32  # bytes of each of the two numbers of a signature

FORM = expression(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*\Z")
# `x5t` only names a certificate. Members that bring a key along, or change the meaning of a signature, are refused.
_HEADERS = {"alg", "typ", "kid", "x5t", "x5t#S256"}
_TYPES = {"JWT", "at+jwt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A well-formed token. Nothing in it is trusted yet."""

    algorithm: Algorithm
    kid: str | None
    claims: Mapping[str, Any]
    iss: str


def take_apart(token: str) -> Opened:
    """Parse a token; E3203 if it is malformed, E3202 if its header requests something unsupported."""
    if len(token) > LARGEST or not FORM.match(token):
        raise Failure("E3203", f"that is not a token: three parts in base64url, {LARGEST} bytes at most")
    header, claims = (_object(part) for part in token.split(".")[:2])
    algorithm, kid = header.get("alg"), header.get("kid")
    if steering := sorted(header.keys() - _HEADERS):
        raise Failure("E3202", f"the header `{steering[0][:40]}` is not accepted: keys come from known issuers only")
    if algorithm not in ALGORITHMS:
        raise Failure("E3202", f"the algorithm `{str(algorithm)[:40]}` is not accepted; {', '.join(ALGORITHMS)} are")
    if header.get("typ") not in _TYPES or not (kid is None or isinstance(kid, str)):
        raise Failure("E3203", "the token is malformed: `typ` must be JWT, and `kid` a name")
    iss = claims.get("iss")
    if not isinstance(iss, str):
        raise Failure("E3203", "the token is malformed: `iss` must name its issuer")
    return Opened(algorithm=algorithm, kid=kid, claims=claims, iss=iss)


def _object(part: str) -> dict[str, Any]:
    try:
        value = strict_json(_bytes(part))
    except ValueError as error:
        raise Failure("E3203", f"the token is malformed: {str(error)[:80]}") from None
    if not isinstance(value, dict):
        raise Failure("E3203", "the token is malformed: header and claims are objects")
    return cast("dict[str, Any]", value)


def _bytes(part: str) -> bytes:
    raw = base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))
    if base64.urlsafe_b64encode(raw).rstrip(b"=").decode() != part:
        raise ValueError("a part of it is not in base64url")
    return raw


def verify(token: str, opened: Opened, key: PublicKey) -> None:
    """Check a signature (E3202) under the one algorithm that the key is for."""
    if opened.algorithm != key.algorithm:
        raise Failure("E3202", f"the token says `{opened.algorithm}`, but its key is for {key.algorithm} only")
    signed, _, signature = token.rpartition(".")
    try:
        good = _is_signature(_bytes(signature), signed.encode(), key)
    except ValueError:
        good = False
    if not good:
        raise Failure("E3202", "the token's signature is wrong")


def sign(claims: Mapping[str, Any], private: Any, kid: str | None) -> str:
    """Sign a token with these claims; E3004 if it would be too large."""
    algorithm = algorithm_of(private)
    header = {"alg": algorithm, **({} if kid is None else {"kid": kid}), "typ": "JWT"}
    signed = ".".join(_text(json.dumps(part, separators=(",", ":")).encode()) for part in (header, dict(claims)))
    token = f"{signed}.{_text(_signature(signed.encode(), private, algorithm))}"
    if len(token) > LARGEST:
        raise Failure("E3004", f"the token would be larger than {LARGEST} bytes; grant less, or by patterns")
    return token


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


# Signatures as RFC 7518 and RFC 8037 define them. PyJWT has them too, and takes a seventh of the time of a command.


def _signature(data: bytes, private: Any, algorithm: Algorithm) -> bytes:
    if algorithm == "EdDSA":
        return private.sign(data)
    from cryptography.hazmat.primitives import hashes

    if algorithm == "RS256":
        from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15

        return private.sign(data, PKCS1v15(), hashes.SHA256())
    from cryptography.hazmat.primitives.asymmetric import ec, utils

    halves = utils.decode_dss_signature(private.sign(data, ec.ECDSA(hashes.SHA256())))
    return b"".join(half.to_bytes(_P256_HALF, "big") for half in halves)


def _is_signature(signature: bytes, data: bytes, key: PublicKey) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        if key.algorithm == "EdDSA":
            key.key.verify(signature, data)
            return True
        from cryptography.hazmat.primitives import hashes

        if key.algorithm == "RS256":
            from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15

            key.key.verify(signature, data, PKCS1v15(), hashes.SHA256())
            return True
        from cryptography.hazmat.primitives.asymmetric import ec, utils

        if len(signature) != 2 * _P256_HALF:
            return False
        halves = (signature[:_P256_HALF], signature[_P256_HALF:])
        r, s = (int.from_bytes(half, "big") for half in halves)
        key.key.verify(utils.encode_dss_signature(r, s), data, ec.ECDSA(hashes.SHA256()))
        return True
    except InvalidSignature:
        return False

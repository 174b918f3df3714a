"""Signing keys of our tokens. `trusted_issuers` has the keys of other issuers.

A public key verifies exactly one algorithm, the one that belongs to its type: RSA of 2048 bits or more RS256, Ed25519
EdDSA, P-256 ES256. A token's header can therefore only agree or be refused; it chooses nothing.

Our own keys are files that only their owner can read, named by the time they were made and by their thumbprint (RFC
7638), which is their `kid`. The newest signs; the older ones go on verifying until they are retired, which removes
them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, Literal, cast

from interlock.core.clock import Clock, iso
from interlock.core.errors import Failure
from interlock.core.event_loop import Exclusive
from interlock.core.expressions import expression
from interlock.core.record import dataclass
from interlock.store.signing import refuse_shared

Algorithm = Literal["RS256", "EdDSA", "ES256"]
ALGORITHMS: tuple[Algorithm, ...] = ("RS256", "EdDSA", "ES256")

RSA_BITS = 2048
MOST_KEYS = 32

_MEMBERS = {"RSA": ("e", "kty", "n"), "EC": ("crv", "kty", "x", "y"), "OKP": ("crv", "kty", "x")}
_KEY_FILE = expression(r"([0-9]{15})\.([A-Za-z0-9_-]{43})\.pem\Z")


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A key, its name, and the one algorithm it verifies."""

    kid: str
    algorithm: Algorithm
    key: Any


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key of ours."""

    kid: str
    algorithm: Algorithm
    private: Any
    created_ms: int

    @property
    def public(self) -> PublicKey:
        return PublicKey(self.kid, self.algorithm, self.private.public_key())

    def document(self, *, signs: bool) -> dict[str, Any]:
        """The key for people and programs, without either half of it."""
        return {"kid": self.kid, "algorithm": self.algorithm, "made": iso(self.created_ms), "signs": signs}


# Forms of keys


def algorithm_of(key: Any) -> Algorithm:
    """Return the one algorithm of a key, public or private; E3202 for a key of another or a weaker type."""
    from cryptography.hazmat.primitives.asymmetric import ed25519

    if isinstance(key, ed25519.Ed25519PublicKey | ed25519.Ed25519PrivateKey):
        return "EdDSA"
    from cryptography.hazmat.primitives.asymmetric import rsa

    if isinstance(key, rsa.RSAPublicKey | rsa.RSAPrivateKey) and key.key_size >= RSA_BITS:
        return "RS256"
    from cryptography.hazmat.primitives.asymmetric import ec

    if isinstance(key, ec.EllipticCurvePublicKey | ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP256R1):
        return "ES256"
    raise Failure("E3202", f"a key must be RSA of {RSA_BITS} bits or more, Ed25519 or P-256")


def make_private(algorithm: Algorithm) -> Any:
    """Make a private key for an algorithm."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

    if algorithm == "RS256":
        return rsa.generate_private_key(public_exponent=65537, key_size=RSA_BITS)
    if algorithm == "EdDSA":
        return ed25519.Ed25519PrivateKey.generate()
    return ec.generate_private_key(ec.SECP256R1())


def to_jwk(public: Any) -> dict[str, str]:
    """Encode a public key in RFC 7517's form.

    PyJWT could do it, and takes a tenth of the time of a command to load. Reading keys and tokens is left to it.
    """
    algorithm = algorithm_of(public)
    if algorithm == "EdDSA":
        return {"crv": "Ed25519", "kty": "OKP", "x": _base64(public.public_bytes_raw())}
    numbers = public.public_numbers()
    if algorithm == "ES256":
        x, y = (_base64(one.to_bytes(32, "big")) for one in (numbers.x, numbers.y))
        return {"crv": "P-256", "kty": "EC", "x": x, "y": y}
    e, n = (_base64(one.to_bytes((one.bit_length() + 7) // 8, "big")) for one in (numbers.e, numbers.n))
    return {"e": e, "kty": "RSA", "n": n}


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def from_jwk(jwk: Any, kid: str | None = None) -> PublicKey:
    """Read a public key from RFC 7517's form; E3202 if it may not verify tokens."""
    from jwt import algorithms
    from jwt.exceptions import PyJWTError

    forms: dict[Any, Any] = {
        "RSA": algorithms.RSAAlgorithm,
        "OKP": algorithms.OKPAlgorithm,
        "EC": algorithms.ECAlgorithm,
    }
    document = cast("dict[str, Any]", jwk) if isinstance(jwk, dict) else {}
    form = forms.get(document.get("kty")) if isinstance(document.get("kty"), str) else None
    if form is None or "d" in document or document.get("use", "sig") != "sig":
        raise Failure("E3202", "a JWK must be a public RSA, EC or OKP key for signatures")
    members = {name: document.get(name) for name in _MEMBERS[document["kty"]]}
    if not all(isinstance(member, str) for member in members.values()):
        raise Failure("E3202", "a JWK lacks one of its members")
    try:
        key = form.from_jwk(members)
    except (PyJWTError, ValueError):
        raise Failure("E3202", "a JWK is no valid key") from None
    algorithm = algorithm_of(key)
    if document.get("alg", algorithm) != algorithm:
        raise Failure("E3202", f"a JWK is for another algorithm than {algorithm}")
    return PublicKey(kid or str(document.get("kid") or thumbprint(key)), algorithm, key)


def thumbprint(public: Any) -> str:
    """The name of a key that follows from the key itself (RFC 7638)."""
    members = json.dumps(to_jwk(public), sort_keys=True, separators=(",", ":"))
    return _base64(hashlib.sha256(members.encode()).digest())


def read_jwks(document: Any) -> tuple[PublicKey, ...]:
    """Read the keys of a key set that may verify tokens. Others are left out; E3001 if it is no key set."""
    keys: Any = cast("dict[str, Any]", document).get("keys") if isinstance(document, dict) else None
    if not isinstance(keys, list):
        raise Failure("E3001", "the issuer's key set is not a JWKS document")
    by_kid: dict[str, PublicKey] = {}
    for jwk in cast("list[Any]", keys)[:MOST_KEYS]:
        try:
            key = from_jwk(jwk)
        except Failure:
            continue  # an encryption key, or an algorithm that is not supported
        if by_kid.setdefault(key.kid, key) is not key:
            raise Failure("E3001", f"the issuer's key set names `{key.kid}` twice")
    return tuple(by_kid.values())


def strict_json(raw: bytes) -> Any:
    """Parse JSON without repeated names and in UTF-8; ValueError otherwise."""
    try:
        return json.loads(raw.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name appears twice")
    return members


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# Private keys on disk


def to_pem(private: Any) -> bytes:
    """Encode a private key as PKCS #8."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    pem: bytes = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem


def load_private(path: Path) -> Any:
    """Load a private key from a file that only its owner can read; E3804 if others can, or if it is damaged."""
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        refuse_shared(path)
        # The checks of RSA's arithmetic take longer than a signature, and anybody who can edit the file holds the key.
        private = _pem_loader()(path.read_bytes(), None, unsafe_skip_rsa_key_validation=True)
    except OSError as error:
        raise Failure("E3801", f"the key `{path.name}` cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise _unfit(f"the key `{path.name}` is damaged") from None
    algorithm_of(private)
    return private


def _pem_loader() -> Callable[..., Any]:
    """`load_pem_private_key` of cryptography, without the package that has it: that loads all forms of SSH, 15 ms."""
    try:
        from cryptography.hazmat.bindings._rust import openssl

        return openssl.keys.load_pem_private_key
    except (ImportError, AttributeError):  # the binding is not part of the library's public interface
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        return load_pem_private_key


def _unfit(what: str) -> Failure:
    advice = "restore it from a backup, or take it away and make another; what it signed is void then"
    return Failure("E3804", what, resolution=advice)


def keep_private(path: Path, private: Any) -> None:
    """Write a private key so that only its owner can read it: whole, or not at all."""
    staged = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(to_pem(private))
            os.fsync(file.fileno())
        staged.replace(path)
    except OSError as error:
        staged.unlink(missing_ok=True)
        raise Failure("E3801", f"the key `{path.name}` cannot be made: {error.strerror}") from None


class IssuerKeys:
    """The keys of this home's issuer."""

    def __init__(self, directory: Path, *, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock
        # The files that were read, and the keys in them. Both change at once: keys are also made on other threads.
        self._read: tuple[tuple[str, ...], tuple[SigningKey, ...]] = (), ()
        self._making = Exclusive()

    def names(self) -> tuple[str, ...]:
        """The existing key files, oldest first. A changed answer means changed keys."""
        try:
            return tuple(sorted(filter(_KEY_FILE.match, os.listdir(self._directory))))
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise Failure("E3801", f"the issuer's keys cannot be read: {error.strerror}") from None

    def all(self) -> tuple[SigningKey, ...]:
        """Every key that is not retired, oldest first; the last one signs."""
        names = self.names()
        read, keys = self._read
        if names != read:
            keys = tuple(map(self.load, names))
            self._read = names, keys
        return keys

    def load(self, name: str) -> SigningKey:
        """Load the key of one of the files; E3804 if it is damaged, or if others can read it."""
        private = load_private(self._directory / name)
        made, kid, _ = name.split(".")
        if kid != thumbprint(private.public_key()):
            raise _unfit(f"the key `{name}` is not the key that its name says")
        return SigningKey(kid, algorithm_of(private), private, int(made))

    def check(self, signed_by: str | None, retired: Container[str]) -> None:
        """Refuse (E3804) if the key that has signed until now is gone and was not retired; makes nothing."""
        held = [name.split(".")[1] for name in self.names()]
        if signed_by is None or signed_by in held or (held and signed_by in retired):
            return
        advice = (
            "restore keys/issuer from a backup; or, knowing that every token it signed is void then,"
            " put a new key in its place: interlock keys rotate"
        )
        raise Failure(
            "E3804", f"the signing key `{signed_by}` of this data directory's tokens is missing", resolution=advice
        )

    def active(self) -> SigningKey:
        """The key that signs; the first one is made when it is first needed."""
        keys = self.all()
        return keys[-1] if keys else self.rotate("RS256")

    def find(self, kid: str) -> PublicKey | None:
        return next((key.public for key in self.all() if key.kid == kid), None)

    def init(self, algorithm: Algorithm = "RS256") -> SigningKey:
        """Make the first key; E3411 if there is one already."""
        if self.all():
            raise Failure("E3411", "the issuer has keys already; rotate makes a new one")
        return self.rotate(algorithm)

    def rotate(self, algorithm: Algorithm | None = None) -> SigningKey:
        """Make a new key that signs from now on. Tokens of the older ones stay valid until their keys are retired."""
        keys = self.all()
        chosen: Algorithm = algorithm or (keys[-1].algorithm if keys else "RS256")
        made = max(self._clock.now_ms(), keys[-1].created_ms + 1 if keys else 0)
        while True:
            private = make_private(chosen)
            kid = thumbprint(private.public_key())
            if not kid.startswith("-"):  # a command line would take it for an option
                break
        keep_private(self._directory / f"{made:015d}.{kid}.pem", private)
        return SigningKey(kid, chosen, private, made)

    async def made(self, make: Callable[[], SigningKey]) -> SigningKey:
        """Let `init`, `rotate` or `active` make a key beside the loop: finding the primes of RSA takes up to a second.

        One after the other, so that there is one first key.
        """
        from interlock.core.threads import DISK

        async with self._making:
            return await DISK.run(make)

    def retirable(self, kid: str) -> SigningKey:
        """Return a key that may be retired: one of ours (E3004) that no longer signs (E3411)."""
        keys = self.all()
        key_ = next((key for key in keys if key.kid == kid), None)
        if key_ is None:
            raise Failure("E3004", f"the issuer has no key `{kid}`; interlock keys list shows them")
        if key_ is keys[-1]:
            raise Failure("E3411", f"`{kid}` is the key that signs; rotate first, then retire it")
        return key_

    def retire(self, kid: str) -> None:
        """Remove a key: what it signed is void from now on."""
        retired = self.retirable(kid)
        (self._directory / f"{retired.created_ms:015d}.{kid}.pem").unlink(missing_ok=True)

    def jwks(self) -> dict[str, Any]:
        """The public keys, for verifiers of our tokens."""
        return {
            "keys": [
                {**to_jwk(key.public.key), "kid": key.kid, "alg": key.algorithm, "use": "sig"} for key in self.all()
            ]
        }


# Keys of others

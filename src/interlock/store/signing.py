"""The key that signs the chain's heads, and the check that needs only its public half."""

from __future__ import annotations

import hashlib
import os
from functools import cached_property
from pathlib import Path
from typing import Any

from interlock.core.errors import Failure


def own_secret(path: Path) -> bytes:
    """32 random bytes in a file that only its owner can read, made at first use."""
    try:
        if not path.exists():
            _make_secret(path)
    except OSError as error:
        raise Failure("E3801", f"the key `{path.name}` cannot be made: {error.strerror}") from None
    if path.stat().st_mode & 0o077:
        raise Failure("E3804", f"the key `{path.name}` can be read by others; chmod 600 it")
    return path.read_bytes()


def _make_secret(path: Path) -> None:
    # Staged under a name nobody else uses, so that what a killed process left behind is never written to again, and
    # linked into place: only one process can create the key, and whoever loses the race reads what the winner wrote.
    staged = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(os.urandom(32))
        os.fsync(file.fileno())
    try:
        os.link(staged, path)
    except FileExistsError:
        pass
    finally:
        staged.unlink()


def head_message(kind: str, seq: int, head: bytes, at_ms: int) -> bytes:
    """What a signature covers."""
    return f"interlock {kind} {seq} {head.hex()} {at_ms}".encode()


class Signer:
    """An Ed25519 key pair in a home's key directory, made at first use. Loading is put off until a signature is due."""

    def __init__(self, directory: Path) -> None:
        self._private = directory / "journal.ed25519"
        self._public = directory / "journal.pub"

    @cached_property
    def _key(self) -> Any:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        try:
            return Ed25519PrivateKey.from_private_bytes(self._private_bytes())
        except ValueError:
            raise Failure("E3804", "the journal's signing key in this home is damaged") from None

    def _private_bytes(self) -> bytes:
        if self._public.exists() and not self._private.exists():
            raise Failure("E3804", "the journal's signing key is missing; restore it from a backup")
        return own_secret(self._private)

    @cached_property
    def public(self) -> bytes:
        raw: bytes = self._key.public_key().public_bytes_raw()
        if not self._public.exists():
            self._public.write_text(raw.hex() + "\n")
        return raw

    @cached_property
    def key_id(self) -> str:
        return hashlib.sha256(self.public).hexdigest()[:16]

    def sign(self, kind: str, seq: int, head: bytes, at_ms: int) -> bytes:
        signature: bytes = self._key.sign(head_message(kind, seq, head, at_ms))
        return signature


def signed_by(public: bytes, kind: str, seq: int, head: bytes, at_ms: int, signature: bytes) -> bool:
    """Whether a signature over a head was made by the holder of the key."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, head_message(kind, seq, head, at_ms))
    except (InvalidSignature, ValueError):
        return False
    return True

"""The signing key of the chain's heads, and the check that needs only its public half."""

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
            _put(path, os.urandom(32), 0o600)
    except OSError as error:
        raise Failure("E3801", f"the key `{path.name}` cannot be made: {error.strerror}") from None
    refuse_shared(path)
    return path.read_bytes()


def refuse_shared(path: Path) -> None:
    """Refuse (E3804) a key that others on this machine can read."""
    if path.stat().st_mode & 0o077:
        advice = f"make it its owner's alone: chmod 600 {path.name}; if it may have been read, put a new one in force"
        raise Failure("E3804", f"the key `{path.name}` can be read by others; chmod 600 it", resolution=advice)


def _put(path: Path, content: bytes, mode: int) -> None:
    """Make a file whole or not at all, unless it is there."""
    # Staged under a name nobody else uses, so that what a killed process left behind is never written to again, and
    # linked into place: only one process can create the key, and the loser of a race reads what the winner wrote.
    staged = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        os.fsync(file.fileno())
    try:
        os.link(staged, path)
    except FileExistsError:
        pass
    finally:
        staged.unlink()


def head_message(kind: str, seq: int, head: bytes, at_ms: int) -> bytes:
    """The message that a signature covers."""
    return f"interlock {kind} {seq} {head.hex()} {at_ms}".encode()


class Signer:
    """An Ed25519 key pair in a home's key directory, made at first use."""

    def __init__(self, directory: Path) -> None:
        self._private = directory / "journal.ed25519"
        self._public = directory / "journal.pub"

    @property
    def published(self) -> bool:
        """Whether the public half is there, which is made last."""
        return self._public.exists()

    def check(self, signed_by: str | None) -> None:
        """Refuse (E3804) a key that cannot go on with the chain, which the key of this id has signed; makes nothing.

        That is one that is damaged, open to others or gone, or is not the one that has signed until now.
        """
        # Looked at first: a process that makes the pair makes this half last.
        published = self.published
        if not self._private.exists():
            if signed_by is not None or published:
                raise _unfit("the journal's signing key is missing")
            return
        public = self._key.public_key().public_bytes_raw()
        if published and self._public.read_bytes().strip() != public.hex().encode():
            raise _unfit("journal.pub is not the public half of the journal's signing key")
        if signed_by not in (None, _id_of(public)):
            raise _unfit("the journal was signed by another key than the one in this data directory")

    @cached_property
    def _key(self) -> Any:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        try:
            return Ed25519PrivateKey.from_private_bytes(self._private_bytes())
        except ValueError:
            raise _unfit("the journal's signing key is damaged") from None

    def _private_bytes(self) -> bytes:
        if self._public.exists() and not self._private.exists():
            raise _unfit("the journal's signing key is missing")
        return own_secret(self._private)

    @cached_property
    def public(self) -> bytes:
        raw: bytes = self._key.public_key().public_bytes_raw()
        if not self._public.exists():
            _put(self._public, raw.hex().encode() + b"\n", 0o644)
        return raw

    @cached_property
    def key_id(self) -> str:
        return _id_of(self.public)

    def sign(self, kind: str, seq: int, head: bytes, at_ms: int) -> bytes:
        signature: bytes = self._key.sign(head_message(kind, seq, head, at_ms))
        return signature


def _id_of(public: bytes) -> str:
    return hashlib.sha256(public).hexdigest()[:16]


def _unfit(what: str) -> Failure:
    advice = "restore keys/journal.ed25519 and keys/journal.pub from a backup: a new key cannot vouch for what is there"
    return Failure("E3804", what, resolution=advice)


def signed_by(public: bytes, kind: str, seq: int, head: bytes, at_ms: int, signature: bytes) -> bool:
    """Whether a signature over a head was made by the holder of the key."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, head_message(kind, seq, head, at_ms))
    except (InvalidSignature, ValueError):
        return False
    return True

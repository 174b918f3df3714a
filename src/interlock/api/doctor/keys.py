"""The checks of `interlock doctor` that concern keys: for signing the journal, for tokens, and for secrets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from interlock.api.doctor.findings import Finding, if_usable

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.store.home import Home


def check_key(home: Home) -> Iterator[Finding]:
    from interlock.store.inspection import signing_key
    from interlock.store.signing import Signer

    with if_usable(home) as reader:
        signed_by = None if reader is None else signing_key(reader)
    key = home.keys / "journal.ed25519"
    yield from _key("signing key", key, lambda: Signer(home.keys).check(signed_by), "none yet, made at first use")


def check_issuer(home: Home) -> Iterator[Finding]:
    from interlock.authority.chains import SIGNED_BY
    from interlock.authority.keys import IssuerKeys
    from interlock.core.clock import Clock
    from interlock.core.errors import Failure
    from interlock.store import facts
    from interlock.store.inspection import revoked_keys
    from interlock.store.schema_version import is_known

    issuer = IssuerKeys(home.keys / "issuer", clock=Clock())
    names = issuer.names()
    paths = sorted((home.keys / "issuer").glob("*.pem"))
    signed_by, retired = None, set[str]()
    with if_usable(home) as reader:
        if reader is not None and is_known(reader):
            signed_by = facts.get(reader, SIGNED_BY)
            retired = revoked_keys(reader)
    try:
        issuer.check(signed_by, retired)
        if not paths:
            yield Finding("issuer keys", "good", "none yet, made with the first token")
    except Failure as failure:
        yield Finding("issuer keys", "broken", f"{failure.code} {failure.in_full}", failure.resolution)
    for path in paths:
        yield from _key("issuer keys", path, partial(issuer.load, path.name) if path.name in names else None)


def check_secrets(home: Home) -> Iterator[Finding]:
    from interlock.store.schema_version import is_known
    from interlock.store.sealing import Box, keys_in_use
    from interlock.store.shared_config import settings_of

    where = settings_of(home).settings.secrets_key
    key = home.keys / f"secrets.{'key' if where == 'file' else 'keyring'}"
    in_use = set[str]()
    with if_usable(home) as reader:
        if reader is not None and is_known(reader):
            in_use = keys_in_use(reader)

    def check() -> None:
        from interlock.core.errors import Failure

        held = Box(home.keys, where=where).ids() if key.exists() else frozenset[str]()
        if lost := in_use - held:
            words = f"{len(lost)} of the keys that something is sealed under are not here"
            raise Failure("E3604", words, resolution="restore them from a backup: without them it cannot be read")

    yield from _key("secrets key", key, check, "none yet, made at first use")


def _key(name: str, key: Path, check: Callable[[], object] | None, absent: str = "") -> Iterator[Finding]:
    """Whether a key is its owner's alone, and good for what it is there for."""
    from interlock.core.errors import Failure

    try:
        if key.exists() and key.stat().st_mode & 0o077:
            yield Finding(name, "broken", "others on this machine can read it", f"chmod 600 {key}")
            return
        if check is not None:
            check()
    except Failure as failure:
        yield Finding(name, "broken", f"{failure.code} {failure.in_full}", failure.resolution)
        return
    yield Finding(name, "good", "in order, readable by its owner alone" if key.exists() else absent)

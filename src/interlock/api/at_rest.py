"""Reads of a data directory that is not opened, for commands that only look.

Opening one loads every part of the gateway, which takes most of the time of such a command. So the database alone is
read, and each function imports what it needs. No function checks rights: anybody who can read the files can read the
database. A function returns None if the answer needs an open data directory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.data.schema import Json
    from interlock.store.port import Reader
    from interlock.store.secrets import CredentialEntry


def identities(reader: Reader) -> list[Json]:
    """All identities, revoked ones included."""
    from interlock.authority.identities import identity_of
    from interlock.store.identities import all_identities

    return [identity_of(row).document() for row in all_identities(reader)]


def signing_keys(path: Path) -> list[Json] | None:
    """The keys that verify tokens, oldest first. None if there are none: opening tells if they were lost."""
    from interlock.authority.keys import IssuerKeys
    from interlock.core.clock import Clock
    from interlock.store.home import Home

    held = IssuerKeys(Home(path).keys / "issuer", clock=Clock()).all()
    return [key.document(signs=key is held[-1]) for key in held] or None


def names(reader: Reader) -> dict[str, tuple[str, str]]:
    """The name and the tenant of each identity that has a name, by DID."""
    from interlock.store.identities import all_identities

    return {one.did: (one.name, one.tenant) for one in all_identities(reader) if one.name}


def quarantined(reader: Reader) -> list[Json]:
    """The versions that are or were in quarantine, each with the reason."""
    from interlock.registry.quarantine import every_entry

    return [one.document() for one in every_entry(reader)]


def upstreams(reader: Reader) -> Json | None:
    """Every upstream with its tools. None while calls to one are paused: an open directory has the time."""
    from interlock.store import breakers
    from interlock.store import upstreams as stored

    if breakers.impaired(reader):
        return None
    known: list[Json] = []
    if stored.every(reader):
        from interlock.upstreams.repository import documents

        known = documents(reader)
    return {"upstreams": known, "services": []}


def upstream(reader: Reader, name: str) -> Json | None:
    """One upstream with its tools. None also if a tool changed: comparing it needs an open directory."""
    from interlock.store import breakers
    from interlock.store import upstreams as stored

    if breakers.impaired(reader) or stored.find(reader, name) is None:
        return None
    from interlock.upstreams.repository import documents

    (document,) = documents(reader, name)
    changed = any(tool["state"] == "changed" for tool in document["tools"])
    return None if changed else {**document, "services": []}


def credentials(reader: Reader, path: Path) -> list[CredentialEntry] | None:
    """The stored credentials, without values. None if principals.toml has changed: it may change who may list them."""
    from interlock.authority.default_principals import unchanged
    from interlock.store import secrets
    from interlock.store.home import Home

    return secrets.entries(reader) if unchanged(Home(path).principals) else None

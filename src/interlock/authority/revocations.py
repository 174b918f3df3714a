"""Everything that is revoked in a home: links of tokens, identities and keys.

The sets are in memory and only grow. The store's reader of changes adds what any process has revoked.
"""

from __future__ import annotations

from collections.abc import Set

import orjson

from interlock.call.capability import Capability, Link, is_jti
from interlock.core.errors import Failure
from interlock.store import tokens as table
from interlock.store.port import Reader


class Revocations:
    """The revoked links, subjects and keys that this process knows of."""

    def __init__(self) -> None:
        self._links: set[str] = set()
        self._subjects: set[str] = set()
        self._keys: set[str] = set()
        self._through = 0

    @property
    def keys(self) -> Set[str]:
        return self._keys

    def newer(self, reader: Reader) -> list[table.Revocation]:
        """The revocations that are not known yet. It changes nothing, so any thread may call it."""
        return table.revocations_after(reader, self._through)

    def add(self, revocations: list[table.Revocation]) -> None:
        """Take over revocations. Each is added once; none is ever removed."""
        sets = {"jti": self._links, "did": self._subjects, "key": self._keys}
        for seq, kind, ref in revocations:
            sets[kind].add(ref)
            self._through = max(self._through, seq)

    def has(self, link: Link) -> bool:
        """Whether a link or its subject is revoked."""
        return link.jti in self._links or link.subject in self._subjects

    def refuse(self, capability: Capability) -> None:
        """Refuse (E3201) a capability if any link, subject or key that it depends on is revoked."""
        for link in capability.links:
            if link.jti in self._links:
                raise Failure("E3201", f"the token is revoked: its link `{link.jti}` is")
            if link.subject in self._subjects:
                raise Failure("E3201", f"the token is revoked: the identity `{link.subject}` is")
        for key in capability.keys:
            if key in self._keys:
                raise Failure("E3201", f"the token is revoked: the key `{key}` that signed it is")


_SHORTEST = 6  # characters of a link's id that may stand for it
_GIVEN = (b'"act":"token.issued"', b'"act":"token.delegated"')


def seen_link(reader: Reader, ref: str) -> str:
    """Return the id of a link that was issued here, or derived from one; or the only one that begins so."""
    part = ref.strip().rstrip("….")
    root = part.partition("/")[0]
    matching = table.given_out(reader, root, *_GIVEN)
    if not matching and len(part) >= _SHORTEST:
        # Links above the last one of a chain are on record within the record of the last.
        bodies = table.authority_bodies_with(reader, f'"jti":"{part}'.encode())
        chains: list[list[dict[str, str]]] = [orjson.loads(body).get("chain", []) for body in bodies]
        matching = {link["jti"] for chain in chains for link in chain if link["jti"].startswith(part)}
    if part in matching or (root in matching and is_jti(part)):
        return part
    if len(matching) == 1 and len(part) >= _SHORTEST and "/" not in part:
        return matching.pop()
    if len(matching) > 1 and len(part) >= _SHORTEST:
        raise Failure("E3004", f"more than one link begins with `{part[:60]}`; write more of it")
    raise never_seen(ref, "no link")


def never_seen(ref: str, what: str) -> Failure:
    """The refusal to revoke a reference that may be a typing error."""
    words = f"{what} `{ref[:60]}` was ever seen here, so nothing was revoked"
    return Failure("E3207", words, resolution="name what is meant, or say that it is foreign")

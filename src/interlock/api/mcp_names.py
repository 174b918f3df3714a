"""The names of tools over MCP.

Most clients take only letters, digits, `_` and `-` in a name, at most 64 of them; our addresses are `namespace.tool`.
A tool's own id never has a dash and begins with a small letter, so `namespace-tool` can be read back without asking
anybody: the last dash is the dot. Two kinds of name must be looked up: addresses that are too long, which end in a dash
and a digest in capitals, and the tools of upstreams whose names are not ids of ours (`getUser`, `get-user`), which keep
the name they have there: after the upstream's and a dash, or alone if the upstream was added without a prefix. The
plain address, and the name with our id, are understood as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.contract.wire_names import LONGEST
from interlock.contract.wire_names import mcp_name as shown
from interlock.store import tools
from interlock.store.port import Reader
from interlock.upstreams.own_names import over_mcp

if TYPE_CHECKING:
    from interlock.api.parts import Parts

UI = "ui://"
_MOST_NAMES, _LONG = 1000, 200


class Names:
    """Both ways between addresses and names, over one home."""

    def __init__(self, parts: Parts) -> None:
        self._clock = parts.clock
        self._own: dict[str, str] = {}  # address -> name at its upstream
        self._looked_up: dict[str, str] = {}  # names that cannot be read -> address
        self._read: dict[str, str] = {}  # names that were read -> address
        self._changes = parts.journal.changes
        self._changes.watch(("registry", "upstreams"), _own_and_long, self._changed)

    def of(self, address: str) -> str:
        """The MCP name of a tool."""
        if self._clock.monotonic() >= self._changes.fresh_until:
            self._changes.catch_up()
        return self._own.get(address) or shown(address)

    def address(self, name: str) -> str:
        """The address that a name stands for; a name that stands for nothing comes back as it is."""
        if self._clock.monotonic() >= self._changes.fresh_until:
            self._changes.catch_up()
        found = self._looked_up.get(name)
        if found is None:
            found = self._read.get(name)
        if found is None:
            found = _read(name)
            if len(self._read) < _MOST_NAMES and len(name) <= _LONG:
                self._read[name] = found
        return found

    def _changed(self, loaded: tuple[dict[str, str], list[str]]) -> None:
        self._own, long = loaded
        self._looked_up = {shown(address): address for address in long}
        self._looked_up |= {name: address for address, name in self._own.items()}


def served_uri(upstream: str, own: str) -> str:
    """The address here of a resource of an upstream whose names have a prefix.

    Hosts of MCP Apps read an app only under `ui://`, so the address of one keeps that scheme.
    """
    return f"{UI}upstream.{upstream}/{own.removeprefix(UI)}" if own.startswith(UI) else f"upstream:{upstream}:{own}"


def _own_and_long(reader: Reader) -> tuple[dict[str, str], list[str]]:
    return over_mcp(reader), tools.longer_addresses(reader, LONGEST)


def _read(name: str) -> str:
    """The address that a name spells."""
    head, dash, tail = name.rpartition("-")
    return f"{head}.{tail}" if dash and "." not in name and tail[:1].islower() else name

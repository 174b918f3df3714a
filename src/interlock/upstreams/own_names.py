"""Tools of upstreams that keep the names they have there, where clients and model providers allow them.

An id of ours has small letters, digits and `_`. A tool called `getUser` or `get-user` has the id `get_user`, and is
shown under its own name: after the name of its upstream, or alone if the upstream was added without a prefix.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import orjson

from interlock.contract.wire_names import mcp_name, provider_name
from interlock.core.expressions import expression
from interlock.store import tools, upstreams
from interlock.store.port import Reader
from interlock.upstreams.names import clean_id

# A name that looks like a shortened one could come to mean another tool, so none of these is kept.
_MCP = expression(r"(?!.*-[0-9A-F]{16}\Z)[A-Za-z0-9_-]{1,64}\Z", re.ASCII)
# All providers take these: Gemini wants no digit at the beginning, the others no dot.
_PROVIDERS = expression(r"(?!.*_[0-9a-f]{12}\Z)[A-Za-z_][A-Za-z0-9_-]{0,63}\Z", re.ASCII)


def over_mcp(reader: Reader) -> dict[str, str]:
    """The names of tools over MCP that are their upstreams' own, by address."""
    return _own(reader, mcp_name, "-", _MCP)


def for_providers(reader: Reader) -> dict[str, str]:
    """The names of tools for model providers that are their upstreams' own, by address."""
    return _own(reader, provider_name, "__", _PROVIDERS)


def _own(reader: Reader, shown: Callable[[str], str], joint: str, legal: re.Pattern[str]) -> dict[str, str]:
    """Of two tools that want the same name, the first in order has it, and the other is shown under its id."""
    configs = upstreams.configs(reader)
    bare = {name for name, config in configs if orjson.loads(config).get("prefix") is False}
    wanted: dict[str, str] = {}
    for upstream, name, address in upstreams.published_names(reader) if configs else ():
        if upstream in bare:
            wanted[address] = name
        elif not address.endswith(f".{name}") and _is_id_of(address.partition(".")[2], name):
            wanted[address] = f"{upstream}{joint}{name}"  # unless the operator renamed it
    own: dict[str, str] = {}
    # INVARIANT: no upstream takes the name under which another tool is known.
    taken = set(map(shown, tools.addresses(reader))) if wanted else set[str]()
    for address, name in wanted.items():
        if legal.match(name) and name not in taken:
            own[address] = name
            taken.add(name)
    return own


def _is_id_of(tool_id: str, name: str) -> bool:
    """Whether an id was made from a name; with a number at its end, if several names make the same id."""
    return re.sub("_[0-9]+$", "", tool_id.removeprefix(clean_id(name))) == ""

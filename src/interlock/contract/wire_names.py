"""Tool names for clients and model providers, which accept at most 64 characters.

Two forms are in use. MCP clients see `namespace-tool`, model providers `namespace__tool`. An address that does not fit
is cut, and ends in a digest. A digest of that length can be made to collide, so no tool is admitted whose shortened
name another tool has already (`shortened`).
"""

from __future__ import annotations

import hashlib
import re

LONGEST = 64
_MCP_DIGEST = 16
_PROVIDER_DIGEST = 12


def mcp_name(address: str) -> str:
    """Return the name of a tool over MCP. A shortened one ends in a dash and a digest in capitals."""
    name = address.replace(".", "-", 1)
    if len(name) <= LONGEST:
        return name
    digest = hashlib.sha256(address.encode()).hexdigest()[:_MCP_DIGEST].upper()
    return f"{name[: LONGEST - _MCP_DIGEST - 1]}-{digest}"


def provider_name(address: str) -> str:
    """Return the name of a tool for a model provider. A shortened one has single underscores only."""
    plain = _plain_provider_name(address)
    if plain is not None:
        return plain
    digest = hashlib.sha256(address.encode()).hexdigest()[:_PROVIDER_DIGEST]
    cut = re.sub("_+", "_", address.replace(".", "_", 1))[: LONGEST - _PROVIDER_DIGEST - 1]
    return f"{cut.rstrip('_')}_{digest}"


def _plain_provider_name(address: str) -> str | None:
    namespace, _, name = address.partition(".")
    plain = f"{namespace}__{name}"
    fits = len(plain) <= LONGEST and plain.count("__") == 1 and not namespace.endswith("_")
    return plain if fits else None


def shortened(address: str) -> frozenset[str]:
    """Return the names of a tool that contain a digest, which another tool could be made to share; usually none."""
    names: list[str] = []
    if len(address) > LONGEST:
        names.append(mcp_name(address))
    if _plain_provider_name(address) is None:
        names.append(provider_name(address))
    return frozenset(names)

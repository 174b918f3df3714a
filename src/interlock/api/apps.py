"""Tools that are for the interfaces of MCP Apps alone.

An MCP server may say of a tool that its own interface uses it, and no model (`_meta.ui.visibility`). Such tools are
listed to clients that show interfaces. Everything that is meant for models leaves them out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from interlock.registry.version import Version


def is_for_apps(version: Version) -> bool:
    """Whether an upstream says of its tool that it is for the interface of an MCP App, and not for models."""
    manifest = version.row.manifest
    if '"visibility"' not in manifest:  # as nearly always: ten thousand tools are looked at in a row
        return False
    # Loaded here: no command without such tools needs what connects to upstreams.
    from interlock.contract.executors import PROTOCOLS
    from interlock.data.untrusted import members, strings

    document = members(orjson.loads(manifest))
    protocol = PROTOCOLS.get(str(document.get("protocol")))
    if protocol is None or not protocol.mcp_form:
        return False
    stated = members(members(members(document.get("execution")).get("native")).get("_meta"))
    visible = strings(members(stated.get("ui")).get("visibility"))
    return "app" in visible and "model" not in visible

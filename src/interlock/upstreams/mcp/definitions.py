"""The definition of one tool as a conversation with its server lists it now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.data.untrusted import members
from interlock.upstreams.manifests import definition_digest
from interlock.upstreams.mcp.answers import understood

if TYPE_CHECKING:
    from interlock.upstreams.mcp.session import Session


async def listed_digest(session: Session, name: str, within_s: float, *, headers: bool) -> str:
    """Return the digest of a tool as a conversation lists it now; empty if it does not."""
    listed = await session.tools(within_s)
    if name not in session.seen:
        same = [one for one in listed if members(one).get("name") == name]
        definitions, _ = understood(same, headers=headers)
        session.seen[name] = definition_digest(definitions[0]) if definitions else ""
    return session.seen[name]

"""MCP servers as upstreams, reached through the pipes of a program that we run or by their address.

    McpUpstream     finds the tools of one server
      ToolCalls     calls them
      Content       lists and reads its resources and prompts
      Sessions      its conversations: who shares one, when it is probed, closed
        Opener      opens one
        Session     one conversation, in either era of the protocol
          Wire      how its messages travel: Pipes, Http

A server's statements about its tools are recorded but not trusted (`answers`). A descriptor that cannot be read is
refused by itself; the others go on.
"""

from interlock.data.schema import Json
from interlock.upstreams.kinds import Site
from interlock.upstreams.mcp.config import McpConfig
from interlock.upstreams.mcp.upstream import McpUpstream

__all__ = ["McpConfig", "McpUpstream", "make"]


def make(name: str, config: Json, site: Site) -> McpUpstream:
    """Make the connector of one upstream, not connected yet."""
    return McpUpstream(
        name,
        McpConfig.from_document(config),
        clock=site.clock,
        on_change=site.changed,
        logs=site.logs,
        alert=site.alert,
        services=site.services,
    )

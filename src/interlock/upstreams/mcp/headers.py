"""Arguments that an MCP server wants repeated in headers."""

from __future__ import annotations

from mcp.shared.inbound import find_invalid_x_mcp_header, mcp_param_headers, x_mcp_header_map

from interlock.core.errors import Failure
from interlock.data.schema import Json


def header_parameters(schema: Json) -> list[list[str]]:
    """Return the arguments that a server wants repeated in headers: the path to each, then its header; E3105 if
    invalid.
    """
    if (fault := find_invalid_x_mcp_header(schema)) is not None:
        raise Failure("E3105", fault)
    return [[*path, header] for path, header in x_mcp_header_map(schema).items()]


def parameter_headers(wanted: list[list[str]], arguments: Json) -> dict[str, str]:
    """Make those headers for one call."""
    return mcp_param_headers({tuple(path): header for *path, header in wanted}, arguments)

"""The catalogs of real MCP servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson

from interlock.call.connector import Definition
from interlock.data.schema import Json
from interlock.upstreams.manifests import Imported, import_all


def definitions(path: Path) -> list[Definition]:
    tools: list[dict[str, Any]] = orjson.loads(path.read_bytes())["tools"]
    return [
        Definition(
            name=tool["name"],
            description=tool.get("description", ""),
            input_schema=tool["inputSchema"],
            output_schema=tool.get("outputSchema"),
            native={"protocol": "mcp", "name": tool["name"]},
            hints=tool.get("annotations", {}),
            title=tool.get("title"),
        )
        for tool in tools
    ]


def imported(path: Path, *, accept_hints: bool = False) -> list[Imported]:
    return import_all(definitions(path), upstream=path.stem, kind="mcp", versions="1.0.0", accept_hints=accept_hints)


CATALOGS = Path(__file__).parents[1] / "upstreams" / "data" / "catalogs"


def catalog_tools() -> list[tuple[str, Json]]:
    """The 231 tools of 22 real MCP servers, as manifests."""
    found: list[tuple[str, Json]] = []
    for path in sorted(CATALOGS.glob("*.json")):
        document: Json = json.loads(path.read_bytes())
        for one in document["tools"]:
            manifest = {
                "description": one.get("description", ""),
                "parameters": one["inputSchema"],
                "mutation_class": "read_only",
                "protocol": "mcp",
            }
            found.append((f"{document['name']}.{one['name']}", manifest))
    return found

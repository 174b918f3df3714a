"""An MCP server over its pipes whose tools are listed in a JSON file: all of them answer `done`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def answer(method: str, tools: list[Json]) -> Json | None:
    if method == "initialize":
        about = {"name": "listed", "version": "1"}
        return {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": "done"}]}
    return {"tools/list": {"tools": tools}, "ping": {}}.get(method)


def main() -> None:
    tools: list[Json] = json.loads(Path(sys.argv[1]).read_text())
    for line in sys.stdin:
        request: Json = json.loads(line)
        if "id" in request:
            result = answer(request["method"], tools)
            told = {"error": {"code": -32601, "message": "unknown"}} if result is None else {"result": result}
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **told}), flush=True)


if __name__ == "__main__":
    main()

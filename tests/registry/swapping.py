"""An MCP server over its pipes that offers fifty tools, and fifty others when it is told to.

It is told by files in the directory that the command line names. When `swapped` has come or gone since, it announces
the other fifty as soon as it is asked anything. Its tool `rate` is in both sets, and so is `shape`, which takes another
argument then. All tools answer while there is no `broken`. With `quiet` on the command line it announces nothing.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

Json = dict[str, Any]
OBJECT: Json = {"type": "object", "properties": {}}
SETS = [[f"{name}_{number}" for number in range(50)] for name in ("old", "new")]


def send(message: Json) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def described(name: str, schema: Json = OBJECT) -> Json:
    return {"name": name, "description": f"The tool {name} of a server that changes.", "inputSchema": schema}


def shape(swapped: bool) -> Json:
    length: Json = {"type": "integer", "description": f"a length in {'metres' if swapped else 'furlongs'}"}
    more: Json = {"rounded": {"type": "boolean"}} if swapped else {}
    return described("shape", {"type": "object", "properties": {"length": length, **more}})


def main() -> None:
    offered = False
    for line in sys.stdin:
        swapped = os.path.exists(f"{sys.argv[1]}/swapped")
        if swapped is not offered:
            offered = swapped
            if "quiet" not in sys.argv:
                send({"method": "notifications/tools/list_changed"})
        request: Json = json.loads(line)
        result: Json | None = None
        match request.get("method"):
            case "initialize":
                result = {
                    "protocolVersion": "2025-06-18",
                    "capabilities": {"tools": {"listChanged": True}},
                    "serverInfo": {"name": "swapping", "version": "1"},
                }
            case "tools/list":
                result = {"tools": [shape(offered), *(described(name) for name in ("rate", *SETS[offered]))]}
            case "tools/call" if not os.path.exists(f"{sys.argv[1]}/broken"):
                result = {"content": [{"type": "text", "text": "1.25"}]}
            case "ping":
                result = {}
            case _:
                pass
        if result is not None:
            send({"id": request["id"], "result": result})
        elif "id" in request:
            send({"id": request["id"], "error": {"code": -32603, "message": "out of order"}})


if __name__ == "__main__":
    main()

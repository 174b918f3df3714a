"""The upstream of the guided tour: an MCP server over its pipes, with two tools, in nothing but the standard library.

    python -m interlock.demo_server

It keeps notes in the file that INTERLOCK_DEMO_NOTES names. It knows nothing of Interlock, as other people's servers do.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

Json = dict[str, Any]
FILE = Path(os.environ.get("INTERLOCK_DEMO_NOTES", "notes.txt"))


def _takes(name: str, description: str) -> Json:
    property_ = {"type": "string", "description": description, "examples": ["milk"]}
    return {"type": "object", "properties": {name: property_}, "required": [name]}


TOOLS: list[Json] = [
    {
        "name": "search",
        "description": "Find the notes that contain a word.",
        "inputSchema": _takes("word", "the word to look for"),
        "annotations": {"readOnlyHint": True},
    },
    {
        "name": "note",
        "description": "Write a note, to be found later.",
        "inputSchema": _takes("text", "the note, on one line"),
    },
]


def call(name: str, given: Json) -> str:
    """Run a tool and return its text."""
    if name == "search":
        lines = FILE.read_text().splitlines() if FILE.exists() else []
        return "\n".join(line for line in lines if given["word"] in line)
    with FILE.open("a") as file:
        file.write(given["text"] + "\n")
    return "noted"


def answer(method: str, params: Json) -> Json | None:
    """The result of a request; None for one that this server does not know."""
    match method:
        case "initialize":
            about = {"name": "notes", "version": "1.0.0"}
            return {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": about}
        case "ping":
            return {}
        case "tools/list":
            return {"tools": TOOLS}
        case "tools/call":
            return {"content": [{"type": "text", "text": call(params["name"], params.get("arguments") or {})}]}
        case _:
            return None


def main() -> None:
    for line in sys.stdin:
        request: Json = json.loads(line)
        if "id" not in request:
            continue
        result = answer(request["method"], request.get("params") or {})
        unknown = {"error": {"code": -32601, "message": "no such method"}}
        reply = {"jsonrpc": "2.0", "id": request["id"], **(unknown if result is None else {"result": result})}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""A server of notes made with the official SDK, run as a program: `python -m tests.support.mcp_servers.notes FILE`.

Every note is a line of the file, so that tests see from outside how often something was done.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer

FILE = Path(sys.argv[1] if __name__ == "__main__" else "notes.txt")
server = MCPServer("notes")


def _lines() -> list[str]:
    return FILE.read_text().splitlines() if FILE.exists() else []


def _write(lines: list[str]) -> None:
    FILE.write_text("".join(f"{line}\n" for line in lines))


@server.tool()
def add(text: str) -> dict[str, int]:
    """Write a note at the end; its number is the answer."""
    lines = [*_lines(), text]
    _write(lines)
    return {"number": len(lines)}


@server.tool()
def remove(number: int) -> dict[str, str]:
    """Remove the note with this number; the answer is its text."""
    lines = _lines()
    text = lines.pop(number - 1)
    _write(lines)
    return {"text": text}


@server.tool()
def read(number: int) -> dict[str, str]:
    """The note with this number."""
    return {"text": _lines()[number - 1]}


@server.tool()
def change(number: int, text: str) -> dict[str, str]:
    """Replace the note with this number by another text."""
    lines = _lines()
    lines[number - 1] = text
    _write(lines)
    return {"text": text}


@server.tool()
def read_text(number: int) -> str:
    """The note with this number, as JSON in a text, as servers without output schemas answer."""
    return json.dumps({"note": {"text": _lines()[number - 1]}})


if __name__ == "__main__":
    server.run("stdio")

"""A FastMCP server's tools as governed tools: `adopt`, and the program that serves such a server over stdio.

`python -m interlock.integrations.mcp_server FILE.py:NAME` imports the file and serves the object NAME over stdio. Any
object with `run(transport="stdio")` will do: FastMCP, and `MCPServer` of the MCP SDK. The server runs in a process of
its own, so that it needs neither the libraries nor the memory of the gateway, and starts again whenever the data
directory is opened.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.data.schema import Json

_ADVICE = "give the place of the server: `adopt(app, 'server.py:mcp', name='shop')`"


async def adopt(
    app: Interlock,
    server: Any,
    *,
    name: str,
    accept_hints: bool = False,
    overlay: Json | None = None,
) -> Json:
    """Make the tools of a FastMCP server governed tools. Returns the report of `interlock upstream add`.

    `server` is a server at the top level of a module, or its place: `server.py:mcp` or `package.module:mcp`. It is an
    upstream like any other: its tools are pinned, an overlay states what they do, and `accept_hints` trusts its own
    statements. The program needs the libraries of the server in the environment of this one.
    """
    from interlock.api.upstreams import Upstreams

    config: Json = {"command": _command(server), "cwd": os.getcwd(), "accept_hints": accept_hints}
    return await Upstreams(app, on_machine=True).add(name, "mcp", config, by=app.caller, overlay=overlay)


def _command(server: Any) -> list[str]:
    """The command that serves a server. Refuses with E3004 one that no module has."""
    from interlock.core.errors import Failure

    place = server if isinstance(server, str) else _place_of(server)
    where, _, variable = place.rpartition(":")
    if not where or not variable.isidentifier():
        message = f"`{place[:80]}` is no place" if place else "no module has this server at its top level"
        raise Failure("E3004", message, resolution=_ADVICE)
    file = str(Path(where).resolve()) if where.endswith(".py") else where
    return [sys.executable, "-m", "interlock.integrations.mcp_server", f"{file}:{variable}"]


def _place_of(server: Any) -> str:
    """The module and the name under which it has the server: a module of a package by name, another by its file."""
    for module in list(sys.modules.values()):
        file = str(getattr(module, "__file__", None) or "")
        for name, value in list(vars(module).items()) if file.endswith(".py") else ():
            if value is server:
                return f"{module.__name__ if module.__package__ else file}:{name}"
    return ""


def load(place: str) -> Any:
    """The server at a place, `FILE.py:NAME` or `MODULE:NAME`."""
    where, _, name = place.rpartition(":")
    if where.endswith(".py"):
        path = Path(where)
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    return getattr(module, name)


if __name__ == "__main__":
    load(sys.argv[1]).run(transport="stdio")

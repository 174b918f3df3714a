"""Tools that run in the sandbox, some against their will. A module of its own: its text is sent inside."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated

from interlock import Change, Context, Effect, Field, Preview, Sandboxing, tool
from interlock.core.manifest import NetworkPolicy

Number = Annotated[int, Field(description="a whole number", examples=[2])]
What = Annotated[str, Field(description="what to try", examples=["nothing"])]
Name = Annotated[str, Field(description="name of a counter", examples=["a"])]


@tool(version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=True)
def double(n: Number) -> int:
    """Twice a number."""
    print("working")
    return n * 2


@tool(version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=True)
def attempt(what: What) -> str:
    """Try something that a tool should not do, and say how far it came."""
    if what == "files":
        return Path("/etc/shadow").read_text()
    if what == "environment":
        return repr(sorted(os.environ))
    if what == "network":
        socket.create_connection(("169.254.169.254", 80), timeout=2)
    if what == "memory":
        return str(len(bytearray(4 << 30)))
    if what == "time":
        while True:
            time.sleep(1)
    if what == "crash":
        os.abort()
    if what == "output":
        while True:
            os.write(1, b"x" * 65536)
    if what == "program":
        return subprocess.run(["/bin/sh", "-c", "id -u"], capture_output=True, text=True, check=False).stdout
    if what == "error":
        raise ValueError("/a/path and a secret")
    return "nothing"


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="cell", sandbox=True,
    effects=[Effect("counter:{name}", "UPDATE"), Effect("session:count", "UPDATE"), Effect("session:count", "CREATE")],
)  # fmt: skip
async def count(ctx: Context, name: Name) -> int:
    """Count up in the session."""
    ctx.progress("counting", percent=50)
    before = int(ctx.session.get("count", 0))
    ctx.session["count"] = before + 1
    ctx.effect(f"counter:{name}", "UPDATE", before=before, after=before + 1)
    ctx.compensate_with(name=name)
    return before + 1


@count.preview
def _(name: str) -> Preview:
    change = Change(resource=f"counter:{name}", operation="UPDATE")
    return Preview(effects=(change,), impact=f"looked at from uid {os.getuid()}")


@count.compensate
def _(name: str) -> None:
    if Path("/etc/shadow").exists():
        raise ValueError("this is not a sandbox")


@tool(
    version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=True, permissions=["credentials:cell/token"]
)  # fmt: skip
async def lent(ctx: Context, what: What) -> str:
    """Use a credential."""
    secret = ctx.secret("cell/token")
    found = [name for name, value in os.environ.items() if secret in value]
    return f"{len(secret)} {secret} {found}"


@tool(version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=Sandboxing(tier=3))
def unbound(what: What) -> str:
    """Ask for everything."""
    return what


@tool(
    version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=Sandboxing(tier=2),
    network=NetworkPolicy(allowed_domains=("localhost",)),  # pyright: ignore[reportCallIssue] - defaults
)  # fmt: skip
def fetch(url: Annotated[str, Field(description="what to fetch", examples=["http://localhost/"])]) -> str:
    """Fetch something through whatever proxy there is."""
    data = b"changed" if "post" in url else None
    try:
        with urllib.request.urlopen(url, data, timeout=5) as response:
            return f"{response.status} {response.read().decode()}"
    except urllib.error.HTTPError as error:
        return f"{error.code}"

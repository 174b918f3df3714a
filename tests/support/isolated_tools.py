"""Tools that run in the sandbox, some against their will. A module of its own: its text is sent inside."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated

from interlock import Change, Context, Effect, Field, Preview, Sandboxing, tool
from interlock.contract.manifest import NetworkPolicy

Number = Annotated[int, Field(description="a whole number", examples=[2])]
What = Annotated[str, Field(description="what to try", examples=["nothing"])]
Name = Annotated[str, Field(description="name of a counter", examples=["a"])]


@tool(version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=True, timeout_s=60)
def double(n: Number) -> int:
    """Twice a number."""
    print("working")
    return n * 2


@tool(version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=True, timeout_s=60)
async def sends(ctx: Context, what: What) -> list[int]:
    """Send a part of a list before the list."""
    ctx.partial(9 if what == "an element" else "7654321")
    return [1]


@tool(version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=True, timeout_s=60)
async def named(ctx: Context) -> str:
    """The caller's own name of the call, as it is seen inside."""
    return ctx.native["operation_id"]


@tool(
    version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=True, timeout_s=60,
    scopes=["a:read", "b:read"],
)  # fmt: skip
async def holding(ctx: Context) -> list[str]:
    """The scopes of the caller, as they are seen inside."""
    return sorted(ctx.caller.scopes)


@tool(version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=True, timeout_s=60)
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
    effects=[Effect("x:a", "UPDATE")], estimated_cost=0.1, timeout_s=30,
    restart_safe=True,
)  # fmt: skip
def forge(frame: What) -> str:
    """Say something in place of the sandbox: a kind, then a body."""
    body = frame[1:].encode()
    os.write(3, frame[:1].encode() + len(body).to_bytes(4, "little") + body)
    if "false" in frame:
        os._exit(0)
    time.sleep(60)
    return "never"


@forge.preview
def _(frame: str) -> Preview:
    return Preview(impact=frame)


@forge.compensate
def _(frame: str) -> None:
    return None


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="cell", sandbox=True,
    effects=[Effect("x:a", "UPDATE")], estimated_cost=0.1, timeout_s=60, restart_safe=True,
)  # fmt: skip
def utter(stream: What) -> str:
    """Say any bytes in place of the sandbox, given in base64, and end."""
    data = memoryview(base64.b64decode(stream))
    while data:
        data = data[os.write(3, data) :]
    os._exit(0)


@utter.preview
def _(stream: str) -> Preview:
    return Preview(impact="says something")


@utter.compensate
def _(stream: str) -> None:
    return None


@tool(version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=True, timeout_s=60)
def escape(what: What) -> str:
    """Try to get out, and give back what was found there. Who gets nowhere fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    match what:
        case "host files":
            return Path("/etc/shadow").read_text()
        case "other processes":
            others = [
                process for process in Path("/proc").glob("[0-9]*") if b"pytest" in (process / "cmdline").read_bytes()
            ]
            return others[0].joinpath("environ").read_text()
        case "ptrace":
            ended = libc.ptrace(16, os.getppid() or 1, None, None)
        case "mount":
            ended = libc.mount(b"/", b"/tmp", None, 4096, None)
        case "setuid":
            os.setuid(0)
            ended = 0
        case "raw socket":
            socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)
            ended = 0
        case "symlink":
            os.symlink("/etc/shadow", "/tmp/link")
            return Path("/tmp/link").read_text()
        case "descriptors":
            found: list[str] = []
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):  # the one by which the others are listed is closed by now
                    found.append(os.readlink(f"/proc/self/fd/{name}"))
            leaked = [one for one in found if not one.startswith(("pipe:", "socket:", "/dev/null", "/proc/"))]
            if not found or leaked:
                return repr(leaked)
            ended = 1
        case "sudo":
            return subprocess.run(["sudo", "-n", "id"], capture_output=True, text=True, check=True).stdout
        case "its own code":
            return str(Path(json.__file__).write_text("raise SystemExit"))
        case _:
            return "nothing"
    if ended != 0:
        raise OSError(ctypes.get_errno(), "no")
    return what


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="cell", sandbox=True,
    effects=[Effect("counter:{name}", "UPDATE"), Effect("session:count", "UPDATE"), Effect("session:count", "CREATE")],
    timeout_s=60, restart_safe=True,
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
    version="1.0.0", mutation_class="write_irreversible", namespace="cell", sandbox=True,
    effects=[Effect("counter:{name}", "DELETE")], timeout_s=60, restart_safe=True,
)  # fmt: skip
def drop(name: Name) -> None:
    """Drop a counter, and say in the wrong way what that would mean."""


@drop.preview
def _(name: str) -> str:
    return f"drops {name}"


@tool(
    version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=True, permissions=["credentials:cell/token"],
    timeout_s=60,
)  # fmt: skip
async def lent(ctx: Context, what: What) -> str:
    """Use a credential."""
    secret = ctx.secret("cell/token")
    found = [name for name, value in os.environ.items() if secret in value]
    return f"{len(secret)} {secret} {found}"


@tool(
    version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=True, permissions=["credentials:cell/token"],
    timeout_s=60,
)  # fmt: skip
async def dying(ctx: Context, what: What) -> str:
    """Hold a credential, and die of it if told to; else say what would become of the memory."""
    held = ctx.secret("cell/token")
    if what == "abort":
        os.abort()
    return f"{max(resource.getrlimit(resource.RLIMIT_CORE)) <= 1} {any(held in word for word in sys.argv)}"


@tool(version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=Sandboxing(tier=3), timeout_s=60)
def unbound(what: What) -> str:
    """Ask for everything."""
    return what


@tool(
    version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=Sandboxing(tier=2),
    network=NetworkPolicy(allowed_domains=("localhost",)),  # pyright: ignore[reportCallIssue] - defaults
    timeout_s=60,
)  # fmt: skip
def fetch(url: Annotated[str, Field(description="what to fetch", examples=["http://localhost/"])]) -> str:
    """Fetch something through whatever proxy there is."""
    data = b"changed" if "post" in url else None
    try:
        with urllib.request.urlopen(url, data, timeout=5) as response:
            return f"{response.status} {response.read().decode()}"
    except urllib.error.HTTPError as error:
        return f"{error.code}"


@tool(version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=True, timeout_s=1)
def lingers(
    marker: Annotated[str, Field(description="how many seconds, as a text to know it by", examples=["9"])],
) -> str:
    """Start a program that outlives it, and wait."""
    subprocess.Popen(["/bin/sleep", marker])
    while True:
        time.sleep(1)


@tool(version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=True, timeout_class="long_running")
def tells(
    ctx: Context,
    marker: Annotated[str, Field(description="how many seconds, as a text to know it by", examples=["9"])],
) -> str:
    """Start a program, tell what the call has left, and wait."""
    subprocess.Popen(["/bin/sleep", marker])
    ctx.progress(f"{ctx.remaining_s} {ctx.cancelled}", percent=50)
    while True:
        time.sleep(1)


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="cell", sandbox=True,
    effects=[Effect("purse:{name}", "UPDATE")], permissions=["credentials:cell/token"], timeout_s=60, restart_safe=True,
)  # fmt: skip
async def spends(ctx: Context, name: Name) -> int:
    """Use a credential for a change."""
    ctx.effect(f"purse:{name}", "UPDATE", after=1)
    ctx.compensate_with(name=name)
    return len(ctx.secret("cell/token"))


@spends.preview
def _(name: str) -> Preview:
    return Preview()


@spends.compensate
def _(name: str) -> None:
    return None


@tool(version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=True, timeout_s=60)
def fill(number: Number) -> int:
    """Write so many MiB to /tmp."""
    return _fill(number)


@tool(
    version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=Sandboxing(tmp_bytes=2 << 30), memory="3Gi",
    timeout_s=60,
)  # fmt: skip
def fill_more(number: Number) -> int:
    """Write so many MiB to /tmp, where that is larger than the tool's storage."""
    return _fill(number)


def _fill(mebibytes: int) -> int:
    with open("/tmp/large", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, (mebibytes - 1) << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"x" * (1 << 20))
    return mebibytes


@tool(version="1.0.0", mutation_class="read_only", namespace="cell", sandbox=True, memory="9Gi", timeout_s=60)
def hoard(n: Number) -> int:
    """Ask for more memory than an agent has."""
    return n

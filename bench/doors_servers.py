"""The servers that `doors` measures, ours and the peers', and the requests that they are asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure import process_clock

Json = dict[str, Any]

KEY = "<KEY>"  # no token has it in it
MODERN, LEGACY = "2026-07-28", "2025-11-25"
_META = "io.modelcontextprotocol/"


@dataclass(frozen=True, slots=True)
class Served:
    """A server's process, and what it said when it was ready."""

    pid: int
    facts: Json

    @property
    def port(self) -> int:
        return int(self.facts.get("port") or self.facts["base_url"].rpartition(":")[2])


@dataclass(frozen=True, slots=True)
class Subject:
    """A server, and the requests that are sent to it repeatedly."""

    name: str
    server: Served
    requests: Sequence[str] = ()
    grpc: Json | None = None

    def order(self, connections: int, seconds: float) -> Json:
        order: Json = {"wire": "http", "pid": self.server.pid, "port": self.server.port, **(self.grpc or {})}
        parts = [one.split(KEY) for one in self.requests]
        return {**order, "requests": parts, "connections": connections, "seconds": seconds}


# Servers


@contextmanager
def _child(*command: str, core: int) -> Generator[subprocess.Popen[str]]:
    """A process on a core of its own, ended with the block."""
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(child.pid, {core})
    try:
        yield child
    finally:
        child.terminate()
        child.communicate()


def cores() -> tuple[int, int]:
    """The cores on which servers and the load run."""
    available = sorted(os.sched_getaffinity(0))
    return available[0], available[-1]


def start_load() -> Any:
    """The process that asks, on the other core."""
    return _child(sys.executable, "-m", "bench.doors_load", core=cores()[1])


def start_peer(stack: ExitStack, name: str, argument: str = "", *, core: int | None = None) -> Served:
    command = (sys.executable, "-m", "bench.doors_peers", name, argument)
    child = stack.enter_context(_child(*command, core=cores()[0] if core is None else core))
    assert child.stdout is not None
    return Served(child.pid, json.loads(child.stdout.readline()))


def start_interlock(stack: ExitStack, home: Path, *arguments: str, program: Sequence[str] = ()) -> Served:
    options = ("--json", "--token", "--port", "0", "--grpc-port", "0", "--bare", *arguments)
    command = (*(program or PROGRAM), "--home", str(home), "serve", *options)
    child = stack.enter_context(_child(*command, core=cores()[0]))
    assert child.stdout is not None
    facts: Json = json.loads(child.stdout.readline())
    if "error" in facts:
        raise SystemExit(f"interlock serve: {facts['error']['message']}")
    return Served(child.pid, facts)


PROGRAM = (str(Path(sys.executable).parent / "interlock"),)


# Requests


def post(path: str, body: Json, token: str, **headers: str) -> str:
    """A request as bytes that need nothing more, but for a key where KEY stands (24 characters)."""
    text = json.dumps(body, separators=(",", ":"))
    length = len(text) + (text.count(KEY) * (24 - len(KEY)))
    lines = [
        f"POST {path} HTTP/1.1",
        "host: localhost:8080",
        f"authorization: Bearer {token}",
        "content-type: application/json",
        f"content-length: {length}",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", text])


def mcp(method: str, params: Json, token: str, version: str = MODERN, **more: str) -> str:
    headers = {"accept": "application/json, text/event-stream", "mcp_protocol_version": version, **more}
    if version == MODERN:
        client = {"name": "bench", "version": "1"}
        meta = {"protocolVersion": version, "clientCapabilities": dict[str, Any](), "clientInfo": client}
        params = {"_meta": {f"{_META}{name}": value for name, value in meta.items()}, **params}
        headers |= {"mcp_method": method, **({"mcp_name": params["name"]} if "name" in params else {})}
    return post("/mcp", {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}, token, **headers)


def ask(port: int, request: str) -> Json:
    head, _, body = request.partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    url = f"http://127.0.0.1:{port}{first.split()[1]}"
    headers = dict(line.split(": ", 1) for line in lines)
    with urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers)) as answer:
        return json.loads(answer.read())


# Measuring


def wait_until_idle(pid: int) -> None:
    """Wait until a process has used next to no CPU for a quarter of a second."""
    clock = process_clock(pid)
    deadline = time.monotonic() + _IDLE_WITHIN_S
    while time.monotonic() < deadline:
        began = time.clock_gettime(clock)
        time.sleep(0.25)
        if time.clock_gettime(clock) - began < 0.01:
            return
    raise SystemExit(f"a server (process {pid}) was not idle within {_IDLE_WITHIN_S:.0f} s of its start")


_IDLE_WITHIN_S = 60.0


def measure(load: subprocess.Popen[str], subject: Subject, connections: int, seconds: float) -> Json:
    """Have a server asked for so long; how often it answered, and what that took."""
    assert load.stdin is not None
    assert load.stdout is not None
    load.stdin.write(json.dumps(subject.order(connections, seconds)) + "\n")
    load.stdin.flush()
    outcome: Json = json.loads(load.stdout.readline())
    if "failed" in outcome:
        raise SystemExit(f"{subject.name} at {connections} connections: {outcome['failed']}")
    return outcome

"""The public MCP conformance suite against Interlock, with the SDK's everything-server behind it as an upstream.

The suite has no tokens and no keys, so they are put into its requests on the way. Every tool of the upstream is taken
for one that cannot be undone, as is anything an upstream does not speak of; a person has agreed to their calls in
advance.
What is expected to fail is in the `.yml` files, with its reason; what is listed there and passes fails the run too.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import socket
import sys
import tarfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from interlock import Caller, Interlock
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.core.errors import Failure
from interlock.doors.mcp import McpDoor
from tests.doors.test_mcp import AGENT, OPERATOR, PATIENCE_S, serving
from tests.upstreams.mcp_servers.real import (
    CACHE,
    _node,  # pyright: ignore[reportPrivateUsage]
    _once,  # pyright: ignore[reportPrivateUsage]
    _run,  # pyright: ignore[reportPrivateUsage]
)

HERE = Path(__file__).parent
EVERYTHING = "examples/servers/everything-server/mcp_everything_server"
NUMBERS = itertools.count()
APPROVER = Caller(id="local:approver", groups=frozenset({"approvers"}))
# For each era, the release that covers it, how many of its checks pass, and what to run of it.
RUNS = {
    "handshake": ("conformance-handshake", "44", "--suite", "all"),
    "modern": ("conformance-modern", "164", "--requirements", "2026-07-28"),
}


def _install_suite(folder: Path) -> None:
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, folder / name)
    node = _node()
    npm = node.parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    path = f"{node.parent}{os.pathsep}{os.environ['PATH']}"
    _run([str(node), str(npm), "ci", "--ignore-scripts", "--no-audit", "--no-fund"], folder, {"PATH": path})


def program(package: str, entry: str) -> list[str]:
    """The command of a program of the suite's lock."""
    folder = CACHE / "conformance"
    _once(folder, (HERE / "package.json", HERE / "package-lock.json"), _install_suite)
    return [str(_node()), str(folder / "node_modules" / package / entry)]


def _install_everything(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "mcp", "--require-hashes"]
    _run([*pip, "-r", str(HERE / "everything.txt"), "-d", str(folder)], folder)
    (packed,) = folder.glob("mcp-*.tar.gz")
    with tarfile.open(packed) as source:
        source.extractall(folder, filter="data")


@asynccontextmanager
async def upstream() -> AsyncGenerator[str]:
    """The everything-server on a port of its own: where it is."""
    folder = CACHE / "everything"
    _once(folder, (HERE / "everything.txt",), _install_everything)
    (package,) = folder.glob(f"mcp-*/{EVERYTHING}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", f"{package.name}.server", "--port", str(port), "--log-level", "ERROR"]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, cwd=package.parent, stdout=quiet, stderr=quiet)
    try:
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        await process.wait()


async def added(lock: Interlock, url: str, era: str) -> None:
    """Add the upstream once it is up, under its own names, and agree to its tools' calls."""
    config = {"url": url, "allow_private": True, "prefix": False, "protocol": era}
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                report = await lock.upstreams.add("everything", "mcp", config, by=lock.caller)
                break
            except Failure as failure:
                if failure.code != "E3502":
                    raise
                await asyncio.sleep(0)
    assert report.count("admitted") >= 25
    until_ms = lock.clock.now_ms() + 3_600_000
    for one in report.tools:
        assert one.definition is not None
        texts = dict.fromkeys(one.definition.input_schema.get("properties", {}), "*e*")
        required = one.definition.input_schema.get("required")
        for arguments in (texts,) if required else ({}, texts):
            await lock.standing_approvals.grant(
                one.address, by=APPROVER, caller=AGENT, arguments=arguments, uses=100, expires_ms=until_ms
            )


async def keyed(receive: Any) -> tuple[bytes, Any]:
    """The body of a request, with a key of its own if it is a call; and how the rest of the request is received."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    try:
        sent = orjson.loads(body)
        if sent["method"] == "tools/call":
            sent["params"].setdefault("arguments", {})["idempotency_key"] = f"conformance-{next(NUMBERS)}"
            body = orjson.dumps(sent)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        pass  # what is no request is answered as it is
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def rest() -> Any:
        return waiting.pop() if waiting else await receive()

    return body, rest


@asynccontextmanager
async def gateway(home: Path, era: str) -> AsyncGenerator[str]:
    """Interlock in front of the everything-server: where its door is."""
    async with upstream() as url, Interlock.open(home, housekeeping=False) as lock:
        lock.home.policy.write_text("permit(principal, action, resource);\n")
        await lock.identities.register(Identity(did=AGENT, trust=100), by="test")
        lock.issuer_keys.init("EdDSA")
        token = await lock.tokens.issue(subject=AGENT, by=OPERATOR)
        await added(lock, url, era)
        door = McpDoor(Service(lock))
        app = door

        async def with_token(scope: Any, receive: Any, send: Any) -> None:
            body, rest = await keyed(receive) if scope["method"] == "POST" else (None, receive)
            headers = [(name, value) for name, value in scope["headers"] if body is None or name != b"content-length"]
            headers += [] if body is None else [(b"content-length", str(len(body)).encode())]
            headers.append((b"authorization", f"Bearer {token}".encode()))
            await app({**scope, "headers": headers}, rest, send)

        async with door.lifespan(), serving(with_token) as port:
            yield f"http://localhost:{port}/mcp"


@pytest.mark.proves("OPS-02")
@pytest.mark.parametrize("era", RUNS)
async def test_the_public_suite_passes_but_for_what_has_a_reason(era: str, tmp_path: Path) -> None:
    package, passed, *options = RUNS[era]
    runner = program(package, "dist/index.js")
    async with gateway(tmp_path / "home", era) as url:
        process = await asyncio.create_subprocess_exec(
            *runner, "server", "--url", url, *options,
            "--expected-failures", str(HERE / f"{era}.yml"), "-o", str(tmp_path / "report"),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=tmp_path,
        )  # fmt: skip
        said, _ = await asyncio.wait_for(process.communicate(), 300)
    assert process.returncode == 0, said.decode()[-6000:]
    assert f"Total: {passed} passed" in said.decode()

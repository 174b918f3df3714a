"""The public MCP conformance suites against `interlock serve`, with the SDK's everything-server as an upstream.

The upstream is added by `interlock upstream add mcp`, with options that anybody can give. Each of its tools is taken
for one that cannot be undone, as is any tool of which nothing is known; a person has agreed to their calls in advance.
The suites send no token, so a proxy in front adds one to each request, and nothing else.

`expected.toml` has the number of checks that pass, and what is expected to fail, with its reason. A difference in
either direction fails the test.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tarfile
import tomllib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from interlock import Caller, Interlock
from tests import warm
from tests.support import forked
from tests.support.conformance import SUITE, program
from tests.support.mcp_servers.real import (
    CACHE,
    install_once,
    run_command,
)
from tests.support.ports import unused_port
from tests.thorough import THOROUGH

EVERYTHING = "examples/servers/everything-server/mcp_everything_server"
APPROVER = Caller(id="local:approver", groups=frozenset({"approvers"}))
EXPECTED: dict[str, Any] = tomllib.loads((SUITE / "expected.toml").read_text())
PATTERNS = {"filename": "*.txt"}
PATIENCE_S = 400.0


def _install_everything(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "mcp", "--require-hashes"]
    run_command([*pip, "-r", str(SUITE / "everything.txt"), "-d", str(folder)], folder)
    (packed,) = folder.glob("mcp-*.tar.gz")
    with tarfile.open(packed) as source:
        source.extractall(folder, filter="data")


@asynccontextmanager
async def everything() -> AsyncGenerator[str]:
    """The everything-server on a port of its own, listening: its address."""
    folder = CACHE / "everything"
    install_once(folder, (SUITE / "everything.txt",), _install_everything)
    (package,) = folder.glob(f"mcp-*/{EVERYTHING}")
    port = unused_port()
    command = [*forked.python(), "-m", f"{package.name}.server", "--port", str(port), "--log-level", "ERROR"]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, cwd=package.parent, stdout=quiet, stderr=quiet)
    try:
        while not await _listens(port):
            assert process.returncode is None
            await asyncio.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        await process.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def agree_in_advance(home: Path) -> None:
    """Agree to the calls that the suites make, as `interlock approvals grant` does."""
    async with Interlock.open(home, housekeeping=False) as app:
        agent = await app.identities.find("suite")
        assert agent is not None
        until_ms = app.clock.now_ms() + 3_600_000
        for version in await app.catalog.everything():
            schema = version.contract.input.model_facing
            texts = {name: PATTERNS.get(name, "*e*") for name in schema.get("properties", {})}
            for arguments in (texts,) if schema.get("required") else ({}, texts):
                await app.standing_approvals.grant(
                    version.row.address, by=APPROVER, caller=agent.did, arguments=arguments, uses=100,
                    expires_ms=until_ms,
                )  # fmt: skip


@asynccontextmanager
async def proxy(target: str, token: str) -> AsyncGenerator[str]:
    """A proxy that adds the token to the head of each request, and passes on everything else as it is: its address."""
    host, _, port = target.removeprefix("http://").rpartition(":")

    async def ask(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while True:
            head = await source.readuntil(b"\r\n\r\n")
            assert b"\r\ntransfer-encoding:" not in head.lower(), "the suites send bodies with their length"
            head = re.sub(rb"(?i)\r\nauthorization:[^\r]*", b"", head)
            sink.write(head[:-2] + f"Authorization: Bearer {token}\r\n\r\n".encode())
            if length := re.search(rb"(?i)\r\ncontent-length:\s*(\d+)", head):
                sink.write(await source.readexactly(int(length[1])))
            await sink.drain()

    async def answer(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        beyond, onward = await asyncio.open_connection(host, int(port))
        pumps = [asyncio.create_task(ask(reader, onward)), asyncio.create_task(answer(beyond, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            onward.close()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://localhost:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@asynccontextmanager
async def served(folder: Path, protocol: str) -> AsyncGenerator[str]:
    """`interlock serve` with the everything-server as an upstream: the address that the suites are given."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("INTERLOCK_")}
    environment["INTERLOCK_HOME"] = str(folder / "home")

    async def cli(*words: str) -> str:
        code, out, err = await asyncio.to_thread(warm.run, words, environment, folder)
        assert code == 0, err.decode()
        return out.decode()

    async with everything() as url:
        options = ("--no-prefix", "--allow-private", "--idempotency", "each")
        await cli("upstream", "add", "mcp", "everything", url, *options, "--protocol", protocol)
        # The everything-server has no tasks; they exist in 2026-07-28 only. A scenario wants a server to refuse clients
        # without tasks, so Interlock must not follow tasks in their place.
        overlay = ("--overlay", str(SUITE / "jobs.yaml"), "--cwd", str(SUITE.parents[2]))
        jobs = ("--", *forked.python(), "-m", "tests.support.mcp_servers.jobs")
        await cli("upstream", "add", "mcp", "jobs", *options, "--tasks", "relay", *overlay, *jobs)
        token = (await cli("token", "issue", "--agent", "suite")).strip()
        await agree_in_advance(folder / "home")
        with warm.start(("serve", "--port", "0", "--no-grpc", "--json"), environment, folder) as server:
            said = ""
            while not said.endswith("}\n"):
                line = await asyncio.to_thread(server.stdout.readline)
                assert line, server.communicate()[1].decode()
                said += line.decode()
            async with proxy(orjson.loads(said)["mcp"].removesuffix("/mcp"), token) as address:
                yield f"{address}/mcp"


def expected_failures(suite: str, protocol: str) -> set[str]:
    """The scenarios of a suite that are expected to fail."""
    clients, listed = EXPECTED["suites"][suite]["clients"], set[str]()
    for one in EXPECTED["failures"]:
        if protocol in one["protocols"] and clients in one["clients"]:
            listed.update(one["scenarios"])
    return listed


async def outcome(suite: str, url: str, report: Path) -> tuple[set[str], list[int], str]:
    """The scenarios in which a check failed, how many checks passed and of how many, and what was printed."""
    package, options = EXPECTED["suites"][suite]["package"], EXPECTED["suites"][suite]["options"]
    process = await asyncio.create_subprocess_exec(
        *program(package, "dist/index.js"), "server", "--url", url, *options, "-o", str(report),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=report.parent,
    )  # fmt: skip
    said, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    return *_counted(report), said.decode()


def _counted(report: Path) -> tuple[set[str], list[int]]:
    passed, of, failed = 0, 0, set[str]()
    for checks in report.glob("*/checks.json"):
        states = [check["status"] for check in orjson.loads(checks.read_bytes())]
        passed += states.count("SUCCESS")
        of += states.count("SUCCESS") + states.count("FAILURE")
        if "FAILURE" in states:
            failed.add(re.sub(r"-\d{4}-\d\d-\d\dT.*", "", checks.parent.name.removeprefix("server-")))
    return failed, [passed, of]


@pytest.mark.proves("OPS-02")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("protocol", EXPECTED["checks"] if THOROUGH else ("auto",))
async def test_the_public_suites_pass_but_for_what_has_a_reason(protocol: str, tmp_path: Path) -> None:
    async with served(tmp_path, protocol) as url:
        for suite, counts in EXPECTED["checks"][protocol].items():
            wanted = expected_failures(suite, protocol), counts
            *found, said = await outcome(suite, url, tmp_path / suite)
            if (*found,) != wanted:  # the scenarios have time limits of their own, which a busy machine may miss
                *found, said = await outcome(suite, url, tmp_path / f"{suite}, again")
            assert (*found,) == wanted, f"{suite}:\n{said[-6000:]}"

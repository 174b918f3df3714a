"""deploy/rollout.py, as an operator runs it: servers are updated one by one under load, and a bad release goes back."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.support.balancer import Balancer, balancing
from tests.support.cluster import Cluster, Node, load
from tests.support.postgres import Server
from tests.thorough import THOROUGH

SCRIPT = Path(__file__).parents[2] / "deploy" / "rollout.py"
# What a command of the operator does here: it asks the test.
COMMAND = (
    "import os, socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); "
    "s.sendall((sys.argv[2] + ' ' + os.environ['NODE'] + ' ' + os.environ['LEFT'] + chr(10)).encode()); "
    "sys.exit(s.recv(1) != b'.')"
)
NODES = 2
REST = ("REST", "REST, connections closed", "REST again")


class Machines:
    """Machines with a server each, at addresses that stay the same when the server is replaced."""

    def __init__(self, cluster: Cluster, balancer: Balancer, fronts: list[Balancer], nodes: list[Node]) -> None:
        self._cluster = cluster
        self.balancer = balancer
        self._fronts = fronts
        self._nodes = nodes
        self.asked: list[tuple[str, int, int]] = []
        self.port = 0

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{front.port}" for front in self._fronts]

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Do what a command asks for: install `good` or `bad` on a machine, or fail at `broken`."""
        release, url, left = (await reader.readline()).decode().split()
        number = self.urls.index(url)
        self.asked.append((release, number, int(left)))
        if release != "broken":
            front, old = self._fronts[number], self._nodes[number]
            fails = {"CLUSTER_FAILS": "50"} if release == "bad" else {}
            fresh = self._nodes[number] = await self._cluster.replace(self.balancer, old, **fails)
            await front.remove(old.port)
            front.add(fresh.port)
            writer.write(b".")
        writer.close()

    async def roll_out(self, release: str, *words: str) -> tuple[int, str, str]:
        """Run the script; what it ended with, and what it said."""
        update, rollback = (f'"{sys.executable}" -c "{COMMAND}" {self.port} {one}' for one in (release, "good"))
        quick = ("--watch", "0", "--calls", "100", "--every", "0.05")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(SCRIPT), "--update", update, "--rollback", rollback, *quick, *words, *self.urls),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        return await process.wait(), out.decode(), err.decode()


@asynccontextmanager
async def machines(cluster: Cluster) -> AsyncGenerator[Machines]:
    nodes = [cluster.start(number) for number in range(NODES)]
    async with AsyncExitStack() as stack:
        balancer, *fronts = [
            await stack.enter_async_context(balancing(*ports))
            for ports in ([node.port for node in nodes], *([node.port] for node in nodes))
        ]
        made = Machines(cluster, balancer, fronts, nodes)
        server = await asyncio.start_server(made.answer, "127.0.0.1")
        stack.callback(server.close)
        made.port = server.sockets[0].getsockname()[1]
        yield made


@pytest.mark.part_of("OPS-11", rest="manifests are validated and not applied to a cluster")
async def test_a_release_of_which_two_percent_of_the_calls_fail_is_taken_back(
    tmp_path: Path, postgres_server: Server
) -> None:
    cluster = Cluster(tmp_path, postgres_server.new_schema(), NODES)
    try:
        async with machines(cluster) as placed, load(cluster, placed.balancer.port, "good", wires=REST) as told:
            if THOROUGH:
                code, out, err = await placed.roll_out("good")
                assert code == 0, err
                assert out.count("updated: 0 of ") == NODES
                assert placed.asked == [("good", 0, 1), ("good", 1, 0)]
                placed.asked.clear()
            assert told.failed == []
            code, out, err = await placed.roll_out("bad")
            assert code == 1
            assert "calls failed, over 1 %" in err
            assert out == f"{placed.urls[0]} is back\n"
            assert placed.asked == [("bad", 0, 1), ("good", 0, 2)]
    finally:
        cluster.close()
    # Nothing has failed but the tools of the bad release: no call was lost when servers were replaced.
    assert told.failed
    assert {one["error"]["error_code"] for one in told.failed} == {"E3401"}


class Stub:
    """A server that says what a test wants, where no real one could be brought to it."""

    def __init__(self) -> None:
        self.ready = 200
        self.ended = 100
        self.failed = 0
        self.asked: list[str] = []
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).split()[1].decode()
        self.asked.append(path)
        status = self.ready if path == "/ready" else 200
        lines = [f'tool_invocation_count{{toolId="a",status="{one}"}} {n}' for one, n in self._counted.items()]
        body = "\n".join(lines).encode()
        writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (status, len(body), body))
        await writer.drain()
        writer.close()

    @property
    def _counted(self) -> dict[str, int]:
        return {"succeeded": self.ended - self.failed, "failed": self.failed}


Case = tuple[dict[str, int], tuple[str, ...], tuple[str, str], tuple[int, str, list[str]]]
CASES: list[Case] = [
    ({}, (), ("echo updated $LEFT", "false"), (0, "", ["updated 1", "updated 0"])),
    ({"failed": 1}, (), ("echo updated $LEFT", "false"), (0, "", ["updated 1", "updated 0"])),
    ({"failed": 2}, (), ("true", "echo back $LEFT"), (1, "2 of 100 calls failed, over 1 %", ["back 2"])),
    ({}, (), ("false", "echo back $LEFT"), (1, "ended with 1", ["back 2"])),
    ({"ended": 99}, ("--patience", "0"), ("true", "echo back $LEFT"), (1, "too few to judge", ["back 2"])),
    ({"ready": 503}, ("--ready-within", "0"), ("true", "echo back"), (2, "was not ready within", ["back"])),
    ({"failed": 2}, (), ("true", "false"), (2, "not rolled back", [])),
]


@pytest.mark.part_of("OPS-11", rest="manifests are validated and not applied to a cluster")
@pytest.mark.parametrize(
    ("said", "words", "commands", "expected"),
    CASES,
)
async def test_servers_are_updated_in_order_and_set_back_when_one_is_worse(
    said: dict[str, int], words: tuple[str, ...], commands: tuple[str, str], expected: tuple[int, str, list[str]]
) -> None:
    stub = Stub()
    vars(stub).update(said)
    server = await asyncio.start_server(stub.answer, "127.0.0.1")
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(SCRIPT), "--update", commands[0], "--rollback", commands[1], "--watch", "0"),
            *("--calls", "100", "--every", "0.01", *words, url, url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
    code, said_of_it, ran = expected
    assert process.returncode == code, err
    assert said_of_it in err.decode()
    assert [line for line in out.decode().splitlines() if not line.startswith("http:")] == ran

"""Clients over stdio that send what nobody should: each is answered or passed over, and the next request is served."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import pytest

from interlock.data.schema import Json
from tests.thorough import THOROUGH

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120
# Of the event loop's own CPU time.
HELD_S = 0.2
SERVER = f"""
import asyncio, sys
from interlock import Interlock
from interlock.doors.mcp import McpDoor
from interlock.api.service import Service
from tests.sample import add
from tests.support.hostile import loop_is_free

async def main() -> None:
    async with Interlock.open(sys.argv[1], housekeeping=False) as app:
        await app.add(add)
        async with loop_is_free(held_s={HELD_S}):
            await McpDoor(Service(app)).run_stdio()

asyncio.run(main())
"""
HELLO: Json = {
    "jsonrpc": "2.0", "id": 0, "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}  # fmt: skip
READY: Json = {"jsonrpc": "2.0", "method": "notifications/initialized"}
MOST = 4 << 20
# How many lines of a kind are sent at once: in the normal run still many times of what the server reads at a time.
MANY = 10 if THOROUGH else 2


def call(arguments: bytes, ident: bytes = b"1") -> bytes:
    head = b'{"jsonrpc":"2.0","id":' + ident + b',"method":"tools/call","params":{"name":"demo-add","arguments":'
    return head + arguments + b"}}\n"


def ping(ident: Any) -> bytes:
    return orjson.dumps({"jsonrpc": "2.0", "id": ident, "method": "ping"}) + b"\n"


def notification(name: str, params: Json) -> bytes:
    return orjson.dumps({"jsonrpc": "2.0", "method": f"notifications/{name}", "params": params}) + b"\n"


ODD_IDS: list[Any] = [None, True, 1.5, [], {}, "", -1, 2**62, "é", "x" * 300]
ODD = b'{"jsonrpc":"2.0","id":%b,"method":"ping"}\n'
ATTACKS: dict[str, bytes] = {
    "a line of the maximum size": call(b'{"a":"' + b"x" * (MOST - 200) + b'"}'),
    "many lines of many values": call(b'{"a":[' + b"1," * 20_000 + b'1]}') * (4 * MANY),
    "very many empty lines": b"\n" * (100_000 * MANY),
    "lines of blanks": b" \t\r\n" * (20_000 * MANY),
    "thousands of lines that are no JSON": b"{\n" * (1_000 * MANY),
    "lines that are no messages": b'[]\n1\n"x"\nnull\n{}\n' * (50 * MANY),
    "notifications that nobody knows": notification("x", {}) * (500 * MANY),
    "invalid UTF-8": call(b'{"a":"\xff\xfe\xc3"}') + b"\xff" * 100_000 + b"\n",
    "a lone surrogate": call(b'{"a":"\\ud800"}'),
    "a deep nest": call(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a nest that does not end": b"[" * 1_000_000 + b"\n",
    "a number of very many digits": call(b'{"a":' + b"9" * 1_000_000 + b"}"),
    "ids of odd kinds": b"".join(map(ping, ODD_IDS)),
    "an id that is not whole": b"".join(ODD % one for one in (b"1e400", b"NaN", b"1e2")),
    "answers to nothing": b'{"jsonrpc":"2.0","id":77,"result":{}}\n' * (200 * MANY),
    "the same id many times": ping(5) * (100 * MANY),
    "cancellations of nothing": notification("cancelled", {"requestId": {"a": 1}}) * (100 * MANY),
}  # fmt: skip


def test_hostile_lines_are_answered_or_passed_over_and_the_next_request_is_served(tmp_path: Path) -> None:
    with _serving(tmp_path) as server:
        stdin, stdout = _pipes(server)
        _send(stdin, orjson.dumps(HELLO) + b"\n" + orjson.dumps(READY) + b"\n")
        assert json.loads(stdout.readline())["id"] == 0
        for attack, data in ATTACKS.items():
            sender = threading.Thread(target=_send, args=(stdin, data + ping(f"after {attack}")))
            sender.start()
            try:
                _hear(stdout, f"after {attack}")
            finally:
                sender.join(PATIENCE_S)
        # A line that does not end for a long time. Of its hundred megabytes next to nothing is kept.
        before = _memory_kb(server.pid)
        for _ in range(100):
            _send(stdin, b"x" * 1_000_000)
        grown = _memory_kb(server.pid) - before
        _send(stdin, b"\n" + ping("after all"))
        _hear(stdout, "after all")
        assert grown < 50_000
        stdin.close()
        stdout.read()
        assert server.wait(PATIENCE_S) == 0, "the loop was never held for long, see its stderr"


def _hear(stdout: BinaryIO, last: str) -> None:
    """Read answers up to the one that is awaited. Each error has its envelope."""
    for line in stdout:
        heard: Json = json.loads(line)
        assert heard["jsonrpc"] == "2.0"
        assert "error" not in heard or heard["error"]["data"]["error_code"].startswith("E"), heard
        if heard["id"] == last:
            return
    pytest.fail(f"the request {last} was not answered")


def _serving(home: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SERVER, str(home)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)


def _pipes(server: subprocess.Popen[bytes]) -> tuple[BinaryIO, BinaryIO]:
    assert server.stdin is not None
    assert server.stdout is not None
    return server.stdin, server.stdout  # pyright: ignore[reportReturnType] - both are opened in binary mode


def _send(stdin: BinaryIO, data: bytes) -> None:
    stdin.write(data)
    stdin.flush()


def _memory_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))

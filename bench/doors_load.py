"""The load: one process on a core of its own, which keeps so many connections busy for so long.

    {"wire": "http", "port": …, "pid": …, "connections": 128, "seconds": 1.0, "requests": [[BEFORE, AFTER]], …}
    ─► {"laps": 9000, "wall_s": 1.0, "cpu_s": 0.9, "latencies_us": […]}

Orders come on stdin, a line each, and their outcomes go to stdout. Every connection sends its requests one after the
other, the next one when the answer to the one before is there. A lap is one turn through the requests. A request with
two parts gets a key of its own between them. An answer that is not a success ends the run: what is refused quickly
must not pass for quick.

The server's CPU time is read from its clock, all threads together, at the first request and at the last answer.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from typing import Any, cast

from bench.measure import process_clock

Json = dict[str, Any]
Latencies = list[float]
KEPT = 20_000


class Failed(Exception):  # noqa: N818 - what a server said
    """An answer that was not a success."""


class Run:
    """One order: when it ends, and what came of it."""

    def __init__(self, order: Json) -> None:
        self.requests = [[part.encode("latin-1") for part in parts] for parts in order["requests"]]
        self.seconds = float(order["seconds"])
        self.clock = process_clock(int(order["pid"]))
        self.keys = itertools.count()
        self.prefix = os.urandom(6).hex()
        self.laps = 0
        self.latencies: Latencies = []
        self.failed = ""

    def begin(self) -> None:
        self._cpu_s = time.clock_gettime(self.clock)
        self.began = time.perf_counter()
        self.ends = self.began + self.seconds

    def outcome(self) -> Json:
        wall_s = time.perf_counter() - self.began
        cpu_s = time.clock_gettime(self.clock) - self._cpu_s
        if self.failed or not self.laps:
            raise Failed(self.failed or "nothing was answered")
        return {"laps": self.laps, "wall_s": wall_s, "cpu_s": cpu_s, "latencies_us": self.latencies[:KEPT]}

    def key(self) -> bytes:
        """24 hexadecimal digits that no other request has: good as a key, and as most of a trace's id."""
        return b"%s%012d" % (self.prefix.encode(), next(self.keys))

    def lap(self, began: float, now: float) -> bool:
        """Count a lap. Whether there is time for another."""
        self.laps += 1
        self.latencies.append((now - began) * 1e6)
        return now < self.ends


class Client(asyncio.Protocol):
    """One HTTP connection. Answers are told apart by their length, or by the end of their chunks."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._turn = 0
        self._sent = self._now = 0.0
        self._heard = b""
        self._needed = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def start(self) -> None:
        self._send()

    def _send(self) -> None:
        parts = self._run.requests[self._turn]
        request = parts[0] if len(parts) == 1 else self._run.key().join(parts)
        self._heard, self._needed = b"", 0
        if not self._turn:
            self._sent = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        # What is measured ends when an answer is there, not when it has been looked at.
        self._now = time.perf_counter()
        self._heard = heard = self._heard + data if self._heard else data
        if not self._needed:
            head = heard.find(b"\r\n\r\n")
            if head < 0:
                return None
            if not heard.startswith(b"HTTP/1.1 200"):
                return self._end(heard[:600].decode("latin-1"))
            lower = heard[:head].lower()
            at = lower.find(b"\r\ncontent-length:")
            self._needed = -1 if at < 0 else head + 4 + int(lower[at + 17 :].split(b"\r\n", 1)[0])
        if len(heard) < self._needed or (self._needed < 0 and not heard.endswith(b"0\r\n\r\n")):
            return None
        return self._answered(heard)

    def _answered(self, heard: bytes) -> None:
        if b'"error":{' in heard or b'"isError":true' in heard:
            return self._end(heard[-600:].decode("latin-1"))
        self._turn += 1
        if self._turn == len(self._run.requests):
            self._turn = 0
            if not self._run.lap(self._sent, self._now):
                return self._end()
        return self._send()

    def _end(self, failed: str = "") -> None:
        self._run.failed = self._run.failed or failed
        self._transport.close()
        if not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self._end(f"the connection was lost: {exc}")


async def http(order: Json) -> Json:
    run = Run(order)
    loop = asyncio.get_running_loop()
    clients = [
        (await loop.create_connection(lambda: Client(run), "127.0.0.1", order["port"]))[1]
        for _ in range(order["connections"])
    ]
    run.begin()
    for client in clients:
        client.start()
    await asyncio.gather(*(client.done for client in clients))
    return run.outcome()


async def grpc(order: Json) -> Json:
    """The same over gRPC: a channel holds all connections' calls, as its clients do it."""
    import grpc.aio

    from interlock.doors.grpc.v1 import gateway_pb2 as messages
    from interlock.doors.grpc.v1.gateway_pb2_grpc import GatewayStub

    run = Run(order)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{order['port']}") as channel:
        stub: Any = GatewayStub(channel)
        request = messages.InvokeRequest(tool_id=order["tool"], arguments_json=json.dumps(order["arguments"]).encode())
        metadata = (("authorization", f"Bearer {order['token']}"),)
        await channel.channel_ready()

        async def caller() -> None:
            going = True
            while going and not run.failed:
                began = time.perf_counter()
                try:
                    await stub.Invoke(request, metadata=metadata)
                except grpc.aio.AioRpcError as error:
                    run.failed = str(error.details())
                going = run.lap(began, time.perf_counter())

        run.begin()
        await asyncio.gather(*(caller() for _ in range(order["connections"])))
        return run.outcome()


def main() -> None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for line in sys.stdin:
            order: Json = json.loads(line)
            try:
                outcome = runner.run((grpc if order["wire"] == "grpc" else http)(order))
            except (Failed, OSError) as error:
                outcome = {"failed": str(error)}
            print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()

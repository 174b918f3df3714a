"""Upstreams that flood, and a measure of how long the event loop is held. The servers run in threads of their own."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import hashlib
import re
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager

# The event loop's own thread may compute for so long between two beats. What is bounded takes some milliseconds; the
# holes that the tests are about took from one second to half a minute.
HELD_S = 0.75


class Beats:
    """How long the loop's thread was computing at most between two turns, in seconds of its own CPU time."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.count = 0
        self.many = asyncio.Event()

    async def beat(self) -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0.005)
            now = time.thread_time()
            self.longest_s = max(self.longest_s, now - before)
            self.count += 1
            if self.count >= 100:
                self.many.set()
            before = now


@asynccontextmanager
async def loop_is_free(held_s: float = HELD_S) -> AsyncGenerator[Beats]:
    """Fail unless the event loop goes on turning meanwhile."""
    beats = Beats()
    gc.collect()
    gc.disable()  # a full collection of everything the test run holds is no fault of what is measured
    task = asyncio.create_task(beats.beat())
    try:
        yield beats
        await asyncio.sleep(0.02)
    finally:
        gc.enable()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert beats.count > 0, "the loop never turned"
    assert beats.longest_s < held_s, f"the loop was held for {beats.longest_s:.2f} s"


class RawServer:
    """Serves raw connections, each in a thread: `serve` is handed the socket."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._serve = serve
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.accepted = 0
        self.open_now = 0
        self._changed = threading.Condition()
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with self._changed:
                    self.accepted += 1
                    self.open_now += 1
                self._connections.append(connection)
                thread = threading.Thread(target=self._run, args=(connection,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _run(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self._serve(connection)
        connection.close()
        with self._changed:
            self.open_now -= 1
            self._changed.notify_all()

    async def all_closed(self) -> bool:
        """Wait until no connection is open; False after half a minute."""

        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: self.open_now == 0, 30)

        return await asyncio.to_thread(wait)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)


@contextmanager
def raw_server(serve: Callable[[socket.socket], None]) -> Generator[RawServer]:
    server = RawServer(serve)
    try:
        yield server
    finally:
        server.close()


def read_head(connection: socket.socket) -> bytes:
    """The head of an HTTP request."""
    head = b""
    while b"\r\n\r\n" not in head:
        part = connection.recv(4096)
        if not part:
            raise OSError
        head += part
    return head


def websocket_accept(head: bytes) -> bytes:
    """The answer to a WebSocket handshake."""
    key = re.search(rb"(?i)sec-websocket-key: *(\S+)", head)
    assert key is not None
    proof = base64.b64encode(hashlib.sha1(key[1] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-accept: " + proof + b"\r\n\r\n"
    )


def text_frame(data: bytes) -> bytes:
    """An unmasked text frame, as servers send them."""
    size = len(data)
    head = bytes([size]) if size < 126 else b"\x7e" + size.to_bytes(2) if size < 65536 else b"\x7f" + size.to_bytes(8)
    return b"\x81" + head + data


def flood(connection: socket.socket, data: bytes) -> None:
    """Send the same bytes until the other side hangs up."""
    while True:
        connection.sendall(data)

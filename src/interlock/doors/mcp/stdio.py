"""MCP over this process's own input and output, for clients that start servers.

Reading and writing run in two daemon threads: standard streams may be pipes, files or terminals that others share, and
a client that does not read must not keep the process from ending. A line over the limit is skipped and answered with
an error, and so is one that holds too many values: they are counted before anything parses it. A long line is parsed
apart from the event loop. No more is read while too many requests are unanswered, so a client that does not read its
answers cannot fill the memory.

While it serves, descriptor 0 is the null device and descriptor 1 is stderr, so that nothing else reads or writes what
is the client's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
import threading
from collections.abc import AsyncGenerator, Generator
from typing import Any

import mcp_types as types
import orjson
from mcp.shared._context_streams import ContextReceiveStream, ContextSendStream, create_context_streams
from mcp.shared.message import SessionMessage

from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.data.bounds import check_values
from interlock.doors.ids import check
from interlock.doors.mcp.refusals import enveloped
from interlock.http.asgi import read_with, too_large

MAX_OPEN = 256
WRITTEN_S = 1.0
_CHUNK = 65_536
_PEEK = 256
_PER_TURN = 100
_ID = expression(rb'"id"\s*:\s*([0-9]{1,18}|"[^"\\]{1,200}")\s*[,}]')


class _Client:
    """The other end: lines in, messages out, and how many requests it waits for."""

    def __init__(self, source: int, sink: int, max_line: int, most_values: int, trace_id: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._source, self._sink = source, sink
        self._max_line = max_line
        self._most_values = most_values
        self._trace_id = trace_id
        self._chunks: asyncio.Queue[bytes] = asyncio.Queue(1)
        self._lines: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]]] = queue.SimpleQueue()
        self._open: set[types.RequestId] = set()
        self._room = asyncio.Event()
        for work in (self._read_chunks, self._write_lines):
            threading.Thread(target=work, name="interlock-stdio", daemon=True).start()

    # In the threads

    def _read_chunks(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # the loop has ended, and nobody reads
            while True:
                chunk = os.read(self._source, _CHUNK)
                asyncio.run_coroutine_threadsafe(self._chunks.put(chunk), self._loop).result()
                if not chunk:
                    return

    def _write_lines(self) -> None:
        with contextlib.suppress(RuntimeError):
            while True:
                line, written = self._lines.get()
                try:
                    view = memoryview(line)
                    while view:
                        view = view[os.write(self._sink, view) :]
                except OSError:
                    pass  # nobody reads any more; the end of the input says so too
                self._loop.call_soon_threadsafe(_done, written)

    # On the loop

    async def receive(self, onward: ContextSendStream[SessionMessage | Exception]) -> None:
        """Pass messages on until the input ends."""
        held, skipping = bytearray(), False
        async with onward:
            while chunk := await self._chunks.get():
                *ended, rest = chunk.split(b"\n")
                for number, line in enumerate(ended):
                    held += line
                    if skipping or len(held) > self._max_line:
                        await self._refuse(bytes(held[:_PEEK] + held[-_PEEK:]), too_large(self._max_line))
                    elif not held.isspace() and held:
                        await self._take(bytes(held), onward)
                    held.clear()
                    skipping = False
                    if number % _PER_TURN == _PER_TURN - 1:
                        await asyncio.sleep(0)  # empty lines and those that nobody answers have no other pause
                held += rest
                if len(held) > self._max_line:
                    skipping = True
                    del held[_PEEK:-_PEEK]

    async def _take(self, line: bytes, onward: ContextSendStream[SessionMessage | Exception]) -> None:
        """Pass on the message of a line, or refuse it."""
        try:
            message = await read_with(_message, line, self._most_values)
        except Failure as failure:
            await self._refuse(line[:_PEEK] + line[-_PEEK:], failure)
        except ValueError as error:
            await onward.send(error)
        else:
            await self._pass_on(message, onward)

    async def _pass_on(
        self, message: types.JSONRPCMessage, onward: ContextSendStream[SessionMessage | Exception]
    ) -> None:
        if isinstance(message, types.JSONRPCRequest):
            try:
                check(message.id, message.params)
            except Failure as failure:
                await self._refuse(b"", failure)
                return
            while len(self._open) >= MAX_OPEN:
                self._room.clear()
                await self._room.wait()
            self._open.add(message.id)
        elif isinstance(message, types.JSONRPCNotification) and message.method == "notifications/cancelled":
            self._answered((message.params or {}).get("requestId"))
        await onward.send(SessionMessage(message))

    async def _refuse(self, ends: bytes, failure: Failure) -> None:
        found = _ID.search(ends)
        error = {"code": failure.row.jsonrpc, "message": failure.message, "data": failure.envelope(self._trace_id)}
        ident: Any = None if found is None else orjson.loads(found[1])
        await self._write(orjson.dumps({"jsonrpc": "2.0", "id": ident, "error": error}))

    async def send(self, messages: ContextReceiveStream[SessionMessage]) -> None:
        """Write messages, each when the one before it has been taken."""
        async with messages:
            async for one in messages:
                message = one.message
                if isinstance(message, types.JSONRPCError):
                    message = message.model_copy(update={"error": enveloped(message.error)})
                await self._write(message.model_dump_json(by_alias=True, exclude_unset=True).encode())
                if isinstance(message, types.JSONRPCResponse | types.JSONRPCError):
                    self._answered(message.id)

    def _answered(self, ident: Any) -> None:
        if isinstance(ident, int | str):
            self._open.discard(ident)
            self._room.set()

    async def _write(self, text: bytes) -> None:
        written: asyncio.Future[None] = self._loop.create_future()
        self._lines.put((text + b"\n", written))
        await written


def _message(line: bytes, most_values: int) -> types.JSONRPCMessage:
    """The message of a line. E3004 where it holds too many values, which are counted before anything parses it."""
    check_values(line, most_values)
    return types.jsonrpc_message_adapter.validate_json(line, by_name=False)


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


@contextlib.contextmanager
def _own_streams() -> Generator[tuple[int, int]]:
    """Copies of the standard streams that are ours alone; the streams themselves lead elsewhere meanwhile."""
    source, sink = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    try:
        yield source, sink
    finally:
        sys.stdout.flush()  # what was held back for the diverted stream is not the client's
        # The copies stay open: a thread may still wait on them, and their numbers must not be given to others.
        os.dup2(source, 0)
        os.dup2(sink, 1)


@contextlib.asynccontextmanager
async def stdio_streams(
    max_line: int, most_values: int, trace_id: str
) -> AsyncGenerator[tuple[ContextReceiveStream[SessionMessage | Exception], ContextSendStream[SessionMessage]]]:
    """The client's messages, and where to send ours, while inside."""
    with _own_streams() as (source, sink):
        client = _Client(source, sink, max_line, most_values, trace_id)
        onward, incoming = create_context_streams[SessionMessage | Exception](0)
        outgoing, messages = create_context_streams[SessionMessage](0)
        tasks = [asyncio.create_task(client.receive(onward)), asyncio.create_task(client.send(messages))]
        try:
            yield incoming, outgoing
            await outgoing.aclose()
            await asyncio.wait(tasks[1:], timeout=WRITTEN_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for stream in (onward, incoming, outgoing, messages):
                stream.close()

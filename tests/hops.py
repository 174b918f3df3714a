"""Trace one call over MCP from the socket to the tool and back. `python -m tests.hops` prints every function it passes.

A hop is a call of a function of ours, on the thread of the event loop, between the bytes of a request and the bytes of
its answer. A coroutine that continues is not called again, and a comprehension is no function. The read is a small
async function; the write has an idempotency key, a context and a declared effect.

The journal writes the records of all calls of a turn together, in a thread or, where nothing else waits, on the loop.
That work is counted apart: it is done once for many calls. So are timers, of which a slow machine sees more in a call.
`test_hops.py` holds the numbers.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import orjson

from interlock import Interlock
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.doors.server import Listening, serving
from tests import sample
from tests.house import SOURCE
from tests.support.calls import admit
from tests.support.identities import did_of

WARM_UP, TRACED = 20, 20
_OURS = f"{SOURCE}/"
_PROTOCOL = "2026-07-28"
_META = {
    "io.modelcontextprotocol/protocolVersion": _PROTOCOL,
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "hops", "version": "1"},
}


# Functions that serve many calls: they write to the database, wake those who wait for that, look after all calls, or
# check the policy files for changes.
_FOR_MANY = frozenset((
    "Journal._flush", "Journal._settle", "ActiveCalls._arm", "ActiveCalls._sweep", "Sharing._look", "Policies._look",
))  # fmt: skip

# Functions of the catalog that find a tool or a version.
_LOOK_UPS = tuple(f"Catalog.{name}" for name in ("at_hand", "resolve", "newest", "exact", "address", "versions"))

Functions = Counter[tuple[str, str]]


class Trace(NamedTuple):
    """The functions that one call passes, in the order of their first call, and how often each is called.

    `tasks` are those that were created for it and ran functions of ours.
    """

    functions: Functions
    apart: Functions
    tasks: set[asyncio.Task[Any]]

    @property
    def hops(self) -> int:
        return self.functions.total()

    @property
    def files(self) -> int:
        return len({file for file, _ in self.functions})

    @property
    def look_ups(self) -> int:
        """How often the catalog was asked for a tool."""
        return sum(self.functions["registry/catalog.py", name] for name in _LOOK_UPS)


async def read() -> Trace:
    """Trace a read."""
    return await _least("demo-add", lambda _: {"a": 1, "b": 2})


async def write() -> Trace:
    """Trace a write with an idempotency key."""
    return await _least("demo-increment", lambda turn: {"name": "a", "by": 1, "idempotency_key": f"hops-{turn}"})


async def _least(tool: str, arguments: Callable[[int], dict[str, Any]]) -> Trace:
    """Return the trace with the fewest hops, because background tasks of the server may run during a call."""
    with tempfile.TemporaryDirectory() as home:
        async with Interlock.open(Path(home), housekeeping=False) as interlock:
            await admit(interlock, sample.add, sample.increment)
            interlock.issuer_keys.init("EdDSA")
            await interlock.identities.register(Identity(did=did_of("ann"), name="ann", kind="human"), by="test")
            tools = [ToolGrant("*")]
            token = await interlock.tokens.issue(subject=did_of("ann"), tools=tools, by=interlock.caller)
            async with serving(Service(interlock), Listening(port=0, ports={})) as server:
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                client = _Client(reader, writer, token, tool)
                for turn in range(WARM_UP):
                    await client.call(arguments(turn))
                traces = [await _traced(client, arguments(WARM_UP + turn)) for turn in range(TRACED)]
                writer.close()
                await writer.wait_closed()
            return min(traces, key=lambda one: one.hops)


async def _traced(client: _Client, arguments: dict[str, Any]) -> Trace:
    trace = Trace(Counter(), Counter(), set())
    entered: set[FrameType] = set()
    before = asyncio.all_tasks()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # The set holds the frames, so that the frame of a coroutine is known again when it continues.
        if event != "call" or not code.co_filename.startswith(_OURS) or frame in entered or _is_comprehension(frame):
            return
        entered.add(frame)
        many = _for_many(frame)
        functions = trace.apart if many else trace.functions
        functions[code.co_filename.removeprefix(_OURS), code.co_qualname] += 1
        task = asyncio.current_task()
        if not many and task is not None and task not in before:
            trace.tasks.add(task)

    sys.setprofile(note)
    try:
        await client.call(arguments)
    finally:
        sys.setprofile(None)
    return trace


def _is_comprehension(frame: FrameType) -> bool:
    return frame.f_code.co_name in ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


def _for_many(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_qualname not in _FOR_MANY:
        frame = frame.f_back
    return frame is not None


class _Client(NamedTuple):
    """A client that calls one tool over one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    token: str
    tool: str

    async def call(self, arguments: dict[str, Any]) -> None:
        params = {"_meta": _META, "name": self.tool, "arguments": arguments}
        body = orjson.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
        headers = {
            "host": "localhost", "authorization": f"Bearer {self.token}", "content-type": "application/json",
            "accept": "application/json, text/event-stream", "mcp-protocol-version": _PROTOCOL,
            "mcp-method": "tools/call", "mcp-name": self.tool, "content-length": str(len(body)),
        }  # fmt: skip
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.writer.write(f"POST /mcp HTTP/1.1\r\n{head}\r\n".encode() + body)
        answer = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(answer.partition("content-length:")[2].split("\r\n")[0])
        result = orjson.loads(await self.reader.readexactly(length))
        assert "result" in result, result
        assert not result["result"].get("isError"), result


async def _main() -> None:
    for name, trace in (("a read", await read()), ("a write with an idempotency key", await write())):
        print(f"{name}: {trace.hops} hops in {trace.files} files, and {trace.apart.total()} that serve many calls")
        print(f"{len(trace.tasks)} tasks, {trace.look_ups} look-ups in the catalog")
        for (file, function), count in trace.functions.items():
            print(f"{count:4}  {file}  {function}")
        print()


if __name__ == "__main__":
    asyncio.run(_main())

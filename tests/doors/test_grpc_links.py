"""One peer of the gRPC door does not take the connections, files and places of the others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock import Interlock
from interlock.doors import grpc as door
from interlock.doors.grpc import links, places
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from interlock.doors.grpc.v1.gateway_pb2_grpc import GatewayStub
from tests.support.calls import until
from tests.support.grpc import World, refusal, served, stage

pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="reads what Linux tells of sockets")
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
WAIT_S = 30


@asynccontextmanager
async def _silent(port: int, count: int, host: str = "127.0.0.1") -> AsyncGenerator[list[asyncio.StreamReader]]:
    """HTTP/2 connections without a call, all from one address."""
    async with AsyncExitStack() as stack:
        readers: list[asyncio.StreamReader] = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
            stack.callback(writer.close)
            writer.write(PREFACE)
            readers.append(reader)
        yield readers


async def _ended(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(WAIT_S):
        try:
            while await reader.read(1000):
                pass
        except ConnectionError:
            pass


async def _answered_in_time(world: World) -> bytes:
    """An honest caller's answer. Until grpcio has noticed that connections are closed, there may be no room."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return (await world.invoke("demo.echo", {"value": 6})).value_json
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.05)


def _accepted(port: int) -> int:
    """How many connections to a port of this process it holds as the server, counted by the system."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path("/proc/self/net", name).read_text().splitlines()[1:]
    ]
    return sum(int(line[1].rpartition(":")[2], 16) == port and line[3] == "01" for line in lines)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLOCK_MAX_CONNECTIONS_PER_PEER", "5")


@pytest.mark.usefixtures("few")
async def test_a_peer_without_a_token_holds_no_more_connections_than_its_cap(home: Path) -> None:
    async with Interlock.open(home) as app, served(app) as world, _silent(world.port, 40) as readers:
        ended = [asyncio.ensure_future(_ended(one)) for one in readers]
        await until(lambda: sum(one.done() for one in ended) >= 35)
        assert _accepted(world.port) <= 5
        # An honest caller of the same address is served, and so is one of another.
        assert (await world.invoke("demo.echo", {"value": 6})).value_json == b"6"
        async with _silent(world.port, 5, "127.0.0.2"):
            await until(lambda: _accepted(world.port) >= 8)
        for one in ended:
            one.cancel()
        await asyncio.gather(*ended, return_exceptions=True)


@pytest.mark.usefixtures("few")
async def test_a_connection_with_a_call_under_way_is_not_closed_to_make_room(home: Path) -> None:
    async with Interlock.open(home) as app, served(app) as world:
        call = asyncio.ensure_future(world.invoke("long.waits"))
        await asyncio.wait_for(stage.entered.wait(), WAIT_S)
        async with _silent(world.port, 20) as readers:
            # The call's connection has been silent longest, and stays.
            ended = [asyncio.ensure_future(_ended(one)) for one in readers]
            await until(lambda: sum(one.done() for one in ended) >= 15)
            stage.release.set()
            assert (await asyncio.wait_for(call, WAIT_S)).value_json == b'"at last"'
            for one in ended:
                one.cancel()
            await asyncio.gather(*ended, return_exceptions=True)


@pytest.mark.usefixtures("few")
async def test_where_every_connection_of_a_peer_has_a_call_the_newest_are_refused(home: Path) -> None:
    async with Interlock.open(home) as app, served(app) as world, AsyncExitStack() as stack:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
        calls: list[asyncio.Task[Any]] = []
        for _ in range(8):
            made = cast("Any", grpc.aio).insecure_channel(f"127.0.0.1:{world.port}", options=options)
            channel = await stack.enter_async_context(made)
            request = wire.InvokeRequest(tool_id="long.waits", arguments_json=b"{}")
            calls.append(asyncio.ensure_future(GatewayStub(channel).Invoke(request, metadata=world.bearer)))
            if len(calls) <= 5:
                await asyncio.wait_for(stage.entered.wait(), WAIT_S)
                stage.entered.clear()
        await asyncio.wait(calls[5:], timeout=WAIT_S)
        stage.release.set()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(one, wire.CallResult) for one in ends] == [True] * 5 + [False] * 3


async def test_the_door_leaves_files_of_the_process_to_the_other_doors(app: Interlock) -> None:
    """grpcio bounds the total itself, so that between two looks nobody takes all files of the process."""
    async with served(app, max_connections=16) as world:
        before = len(os.listdir("/proc/self/fd"))
        async with _silent(world.port, 60) as readers:
            ends = [asyncio.ensure_future(_ended(one)) for one in readers]
            await until(lambda: sum(one.done() for one in ends) >= 60 - 16)
            # Each connection is two files here, where client and server share a process.
            assert len(os.listdir("/proc/self/fd")) - before <= 60 + 16 + 8
            for one in ends:
                one.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
        assert await _answered_in_time(world) == b"6"


async def test_when_the_door_is_nearly_full_the_peer_that_holds_most_makes_room(app: Interlock) -> None:
    async with (
        served(app, max_connections=16) as world,
        _silent(world.port, 3, "127.0.0.3") as few,
        _silent(world.port, 12, "127.0.0.2") as many,
    ):
        ends = [asyncio.ensure_future(_ended(one)) for one in (*few, *many)]
        await asyncio.wait(ends, return_when="FIRST_COMPLETED")
        assert not any(one.done() for one in ends[:3])
        for one in ends:
            one.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=8), most=st.integers(1, 60))
def test_a_fair_share_fits_and_is_the_largest_that_does(sizes: list[int], most: int) -> None:
    share = links._fair(sorted(sizes), most)  # pyright: ignore[reportPrivateUsage]
    kept = sum(min(size, share) for size in sizes)
    assert kept <= max(most, len(sizes))
    assert sum(sizes) <= most or sum(min(size, share + 1) for size in sizes) > most


# Places for RPCs

PLACES = 40
HEADERS_ALONE = ["/interlock.v1.Gateway/Invoke", "/interlock.v1.Gateway/Run", "/grpc.health.v1.Health/Check"]
STREAMS = ["/grpc.health.v1.Health/Watch", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"]


@pytest.mark.parametrize("path", HEADERS_ALONE + STREAMS)
async def test_a_peer_without_a_token_does_not_hold_the_places_of_rpcs(
    app: Interlock, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(door, "MOST_CALLS", PLACES)
    async with served(app) as world, grpc.aio.insecure_channel(f"127.0.0.1:{world.port}") as channel:
        streams = [cast("Any", channel).stream_stream(path)() for _ in range(2 * PLACES)]
        try:
            for one in streams if "Watch" in path else ():
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await one.write(b"")
            check = cast("Any", channel).unary_unary("/grpc.health.v1.Health/Check")
            invoked = await _served_at_last(lambda: world.invoke("demo.echo", {"value": 6}))
            assert invoked.value_json == b"6"
            assert await _served_at_last(lambda: check(b"")) == b"\x08\x01"
        finally:
            for one in streams:
                one.cancel()


async def _served_at_last(ask: Callable[[], Awaitable[Any]]) -> Any:
    """The answer to an RPC, which is refused while the door ends what holds its places."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await ask()
            except grpc.aio.AioRpcError as error:
                if error.details() != "Concurrent RPC limit exceeded!":
                    raise


async def _headers_alone(world: World, count: int) -> list[Any]:
    method = cast("Any", world.channel).stream_stream("/interlock.v1.Gateway/Discover")
    return [method(metadata=world.bearer) for _ in range(count)]


async def test_a_caller_does_not_hold_places_with_headers_alone(
    app: Interlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "AWAITED", 3)
    async with served(app) as world:
        await world.invoke("demo.echo", {"value": 6})  # the token is known now
        monkeypatch.setattr(places, "START_WITHIN_S", 0.0)
        streams = await _headers_alone(world, 10)
        try:
            async with asyncio.timeout(WAIT_S):
                await asyncio.wait([asyncio.ensure_future(one.code()) for one in streams[3:]])
            assert [await one.code() for one in streams[3:]] == [grpc.StatusCode.DEADLINE_EXCEEDED] * 7
            assert not any(one.done() for one in streams[:3])
        finally:
            for one in streams:
                one.cancel()


async def test_a_caller_has_so_many_rpcs_under_way_and_no_more(app: Interlock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "MOST_PER_CALLER", 2)
    async with served(app) as world:
        calls: list[asyncio.Task[wire.CallResult]] = []
        for _ in range(2):
            stage.entered.clear()
            calls.append(asyncio.create_task(world.invoke("long.waits")))
            await asyncio.wait_for(stage.entered.wait(), WAIT_S)
        told = await refusal(world.invoke("long.waits", timeout=WAIT_S))
        assert (told.status, told.envelope.code) == (grpc.StatusCode.UNAVAILABLE, "E3701")
        stage.release.set()
        assert [one.value_json for one in await asyncio.gather(*calls)] == [b'"at last"'] * 2
        assert (await world.invoke("demo.echo", {"value": 6})).value_json == b"6"


async def test_a_first_message_that_comes_late_is_answered_as_one_that_is_there(app: Interlock) -> None:
    async with served(app) as world:
        method = cast("Any", world.channel).stream_unary("/interlock.v1.Gateway/Invoke")
        rpc = method(metadata=world.bearer)
        await rpc.write(wire.InvokeRequest(tool_id="demo.echo", arguments_json=b'{"value": 6}').SerializeToString())
        await rpc.done_writing()
        assert wire.CallResult.FromString(await rpc).value_json == b"6"


def _priority(task: int) -> int:
    try:
        return os.getpriority(os.PRIO_PROCESS, task)
    except ProcessLookupError:
        return 20  # it has ended


def _threads(named: str) -> list[int]:
    """The threads of this process with a name, by number."""
    tasks = Path("/proc/self/task").iterdir()
    found: list[int] = []
    for task in tasks:
        with contextlib.suppress(OSError):  # it has ended
            if task.joinpath("comm").read_text().startswith(named):
                found.append(int(task.name))
    return found


async def test_the_threads_of_grpc_s_core_have_a_lower_priority_than_the_event_loop(home: Path) -> None:
    async with Interlock.open(home) as app, served(app) as world:
        assert (await world.invoke("demo.echo", {"value": 6})).value_json == b"6"
        own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        # It starts further threads whenever it is busy.
        await until(lambda: all(_priority(task) > own for task in _threads("event_engine")))
        assert _threads("event_engine")

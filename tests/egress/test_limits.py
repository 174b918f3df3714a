"""What a call may use is bounded, and nothing a client or an upstream does holds, floods or breaks the proxy."""

from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.core.clock import Clock
from interlock.executors.egress import Egress, EgressRefusal, Limits, Seen, violation
from interlock.executors.egress.proxy import Streams
from tests.egress.world import OTHER, PUBLIC, SOON, becomes, both, world
from tests.support.hellos import client_hello

GET = b"GET http://api.example.com/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n"
CONNECT = b"CONNECT api.example.com:443 HTTP/1.1\r\nHost: api.example.com:443\r\n\r\n"
HELLO = client_hello("api.example.com")


@pytest.mark.parametrize(
    "said", [b"", b"GET http://api.example.com/ HTTP/1.1\r\nHost: api", CONNECT, CONNECT + HELLO[:50]]
)
async def test_a_client_that_does_not_get_on_with_it_is_let_go(said: bytes) -> None:
    async with world(limits=Limits(head_s=0.05, farewell_s=0.1)) as there:
        answer = await there.say(said, half_close=False)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 200 ")
        assert there.egress.refusals == []


async def test_a_client_that_sends_its_head_byte_by_byte_gets_no_more_time_for_it() -> None:
    async with world(limits=Limits(head_s=0.1, farewell_s=0.1)) as there:
        reader, writer = await there.connect()

        async def dribble() -> None:
            while True:
                writer.write(b"x")
                await asyncio.sleep(0.005)

        dribbling = asyncio.create_task(dribble())
        async with asyncio.timeout(SOON):
            assert await reader.read() == b""
        dribbling.cancel()
        writer.transport.abort()
        assert there.dialled == []


@pytest.mark.parametrize("path", ["/hang", "/big"])
async def test_a_side_that_hangs_is_given_up(path: str) -> None:
    """An upstream that does not answer, and a client that does not read."""
    async with world(limits=Limits(idle_s=0.5, farewell_s=0.1)) as there:
        reader, writer = await there.connect()
        writer.write(GET.replace(b"/ HTTP", path.encode() + b" HTTP") * (1 if path == "/hang" else 30))
        if path == "/hang":
            async with asyncio.timeout(SOON):
                assert (await reader.read()).startswith(b"HTTP/1.1 504 ")
        await becomes(lambda: 0 < len(there.egress.requests) == len(there.events))
        writer.transport.abort()
        assert there.egress.refusals == []


async def test_a_tunnel_is_given_up_when_neither_side_speaks() -> None:
    async with world(limits=Limits(idle_s=0.5, farewell_s=0.1)) as there:
        assert (await there.say(CONNECT + HELLO, half_close=False)).startswith(b"HTTP/1.1 200 ")
        assert there.egress.requests[0].bytes_out == len(HELLO)


async def test_a_connection_has_an_end_however_busy_it_is() -> None:
    async with world(limits=Limits(total_s=0.2)) as there:
        reader, writer = await there.connect()

        async def keep_asking() -> None:
            while True:
                writer.write(GET)
                await reader.readuntil(b"\r\n\r\nok")

        async with asyncio.timeout(SOON):
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await keep_asking()
        writer.transport.abort()


async def test_bytes_are_counted_over_the_whole_call() -> None:
    async with world(limits=Limits(wire_bytes=2_500_000)) as there:
        big = GET.replace(b"/ HTTP", b"/big HTTP")
        answers = [await there.say(big) for _ in range(4)]
        assert [len(answer) > 1_000_000 for answer in answers] == [True, True, False, False]
        assert answers[3].startswith(b"HTTP/1.1 429 ")
        assert violation(there.egress.refusals).code == "E3407"
        upload = b"POST http://api.example.com/ HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 9\r\n\r\n123456789"
        assert (await there.say(upload)).startswith(b"HTTP/1.1 429 ")
        assert there.egress.requests[-1].bytes_out == 0


async def test_bytes_of_tunnels_are_counted_too() -> None:
    async with world(limits=Limits(wire_bytes=100_000)) as there:
        await there.say(CONNECT + HELLO + b"x" * 200_000)
        assert [refusal.code for refusal in there.egress.refusals] == ["E3407"]
        assert there.egress.requests[0].bytes_out <= 100_000


async def test_requests_are_counted_and_none_is_forgotten() -> None:
    async with world(limits=Limits(requests=3)) as there:
        answer = await there.say(GET * 5)
        assert answer.count(b"HTTP/1.1 200 ") == 3
        assert answer.count(b"HTTP/1.1 429 ") == 1
        assert len(there.egress.requests) == 3


async def test_refusals_are_all_counted_and_the_first_are_kept() -> None:
    async with world(limits=Limits(refusals=2)) as there:
        for _ in range(5):
            await there.get("http://evil.example/")
        assert (there.egress.refused, len(there.egress.refusals)) == (5, 2)


async def test_connections_beyond_the_bound_wait_and_are_served_in_the_end() -> None:
    async with world(limits=Limits(connections=4)) as there:
        dial, at_once = there.egress.dial, [0]

        async def counted(address: str, port: int) -> Streams:
            at_once.append(len(there.egress.requests) - len(there.events))
            return await dial(address, port)

        there.egress.dial = counted
        answers = await asyncio.gather(*(there.say(GET) for _ in range(60)))
        assert all(answer.endswith(b"ok") for answer in answers)
        assert max(at_once) <= 4
        assert there.egress.refusals == []


@pytest.mark.parametrize(
    "raw",
    [
        GET[:-2] + b"X: " + b"x" * 100_000,
        GET[:-2] + b"X: x\r\n" * 20_000 + b"\r\n",
        b"GET http://api.example.com/" + b"x" * 100_000,
        b"G" * 100_000,
    ],
)
async def test_a_head_without_end_is_refused(raw: bytes) -> None:
    async with world() as there:
        assert (await there.say(raw, half_close=False)).startswith(b"HTTP/1.1 400 ")
        assert there.dialled == []


async def test_closing_cuts_everything_and_leaves_the_account() -> None:
    async with world() as there:
        writers = [(await there.connect())[1] for _ in range(3)]
        for writer, said in zip(writers, (b"", GET.replace(b"/ HTTP", b"/hang HTTP"), CONNECT + HELLO), strict=True):
            writer.write(said)
        await becomes(lambda: there.web.connections == there.secure.connections == 1)
        await there.egress.close()
        await there.egress.close()
        assert {event.method for event in there.events} == {"GET", "CONNECT"}
        with pytest.raises(OSError):
            await there.connect()
        for writer in writers:
            writer.transport.abort()


async def test_a_proxy_that_was_closed_first_serves_nothing() -> None:
    egress = Egress(both("api.example.com"), clock=Clock(), on_event=print)
    await egress.close()
    listener = socket.create_server(("127.0.0.1", 0))
    await egress.serve(listener)
    assert listener.fileno() == -1


async def test_whoever_serves_may_be_cancelled() -> None:
    egress = Egress(both("api.example.com"), clock=Clock(), on_event=print)
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(egress.serve(listener))
    _, writer = await asyncio.open_connection(*listener.getsockname())
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert listener.fileno() == -1
    writer.transport.abort()


fragments = st.sampled_from(
    (
        b"GET ", b"POST ", b"CONNECT ", b"http://", b"https://", b"api.example.com", b"evil.example", b"127.0.0.1",
        b"[::1]", b"@", b"#", b"/", b"\\", b"?", b":80", b":443", b":25", b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b"\r\n",
        b"\n", b"\r", b"\x00", b"Host: ", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"5\r\nhello",
        b"0\r\n\r\n", b"Connection: close\r\n", b"Upgrade: h2c\r\n", b"Expect: 100-continue\r\n", b" ", b"\t",
        b"Host: api.example.com\r\n", b"Host: evil.example\r\n", GET, GET[:-2], CONNECT, HELLO, HELLO[:40],
        client_hello("evil.example"), client_hello(None),
    )
)  # fmt: skip
garbage = st.lists(fragments | st.binary(max_size=20), max_size=12).map(b"".join)


@pytest.mark.proves("EXEC-06")
@given(garbage | garbage.map(lambda rest: GET + rest) | garbage.map(lambda rest: CONNECT + rest))
async def test_nothing_that_is_said_to_the_proxy_makes_it_dial_elsewhere_or_break(raw: bytes) -> None:
    async with world(both("api.example.com")) as there:
        await there.say(raw)
        assert set(there.dialled) <= {(PUBLIC, 80), (PUBLIC, 443)}
        for heard in there.web.heard:
            assert b"\r\nhost: api.example.com\r\n" in heard or heard == b""
        for heard in there.secure.heard:
            assert heard == b"" or heard.startswith(HELLO)
        # It still works.
        assert (await there.say(GET)).endswith(b"ok")


def _request(method: str, target: str, host: str, framing: str, body: str) -> bytes:
    return f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n{framing}\r\n{body}".encode()


requests = st.builds(
    _request,
    st.sampled_from(("GET", "POST", "DELETE", "CONNECT", "connect", "TRACE")),
    st.sampled_from(
        ("http://api.example.com/", "http://evil.example/", "api.example.com:443", "evil.example:443", "/", "*",
         "http://api.example.com:443/", "http://api.example.com@evil.example/", "api.example.com:80", "127.1:80")
    ),
    st.sampled_from(("api.example.com", "evil.example", "api.example.com:443", "", "api.example.com, evil.example")),
    st.sampled_from(("", "Content-Length: 4\r\n", "Transfer-Encoding: chunked\r\n", "Connection: host\r\n",
                     "Content-Length: 0\r\nTransfer-Encoding: chunked\r\n")),
    st.sampled_from(("", "body", "4\r\nbody\r\n0\r\n\r\n", "0\r\n\r\n")),
)  # fmt: skip


@pytest.mark.proves("EXEC-06")
@given(st.lists(requests, min_size=1, max_size=4).map(b"".join))
async def test_requests_put_together_at_random_reach_listed_hosts_only_and_are_all_remembered(raw: bytes) -> None:
    async with world(both("api.example.com")) as there:
        there.names["evil.example"] = [OTHER]
        await there.say(raw)
        assert {address for address, _ in there.dialled} <= {PUBLIC}
        assert len(there.dialled) == len(there.egress.requests)
        assert there.web.connections + there.secure.connections <= len(there.dialled)
        assert all(heard.count(b"host:") <= 1 for heard in there.web.heard)
        assert all(isinstance(event, Seen | EgressRefusal) for event in there.events)


async def test_a_body_in_tiny_pieces_leaves_others_their_turn() -> None:
    pieces = 6_000
    head = b"POST http://api.example.com/ HTTP/1.1\r\nHost: api.example.com\r\nTransfer-Encoding: chunked\r\n\r\n"
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with world() as there:
        beside = asyncio.create_task(others())
        answer = await there.say(head + b"1\r\nx\r\n" * pieces + b"0\r\n\r\n")
        beside.cancel()
        await asyncio.wait({beside})
    assert answer.count(b"HTTP/1.1 200 ") == 1
    assert there.web.bodies == [b"x" * pieces]
    assert turns >= pieces // 32

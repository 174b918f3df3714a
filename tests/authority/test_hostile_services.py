"""Services that an operator configured and that turn hostile: policy engine, key set, Vault, receiver of webhooks.

Whatever they send, the event loop goes on turning, the answer is refused and the connection is closed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from interlock.approvals.services import DeliveryOutcome
from interlock.approvals.webhook import Webhooks
from interlock.authority import keys, trusted_issuers
from interlock.authority.remote import Remote
from interlock.authority.trusted_issuers import fetch_json
from interlock.authority.vault import Vault
from interlock.core.errors import Failure
from interlock.net import addresses
from interlock.net.outgoing import Outgoing, Unanswered
from interlock.testing import FakeClock
from tests.authority.questions import contract, question
from tests.support.hostile import flood, loop_is_free, raw_server, read_head

TOOL = contract({})
SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"

Ask = Callable[[], Awaitable[Any]]


# The services


@asynccontextmanager
async def engine(port: int, timeout_s: float, _: Path) -> AsyncGenerator[Ask]:
    remote = Remote(f"http://127.0.0.1:{port}", clock=FakeClock().clock, timeout_s=timeout_s)
    yield lambda: remote.decide(question(TOOL))
    await remote.close()


@asynccontextmanager
async def key_set(port: int, timeout_s: float, _: Path) -> AsyncGenerator[Ask]:
    kept, trusted_issuers.FETCH_S = trusted_issuers.FETCH_S, timeout_s

    async def fetch() -> Any:
        return keys.read_jwks(await fetch_json(f"http://127.0.0.1:{port}/jwks", loopback_http=True))

    try:
        yield fetch
    finally:
        trusted_issuers.FETCH_S = kept


@asynccontextmanager
async def vault(port: int, timeout_s: float, home: Path) -> AsyncGenerator[Ask]:
    (home / "token").write_text("hvs.t")
    source = Vault(f"http://127.0.0.1:{port}", clock=FakeClock().clock, token_file=home / "token", timeout_s=timeout_s)
    yield lambda: source.fetch("github/token")
    await source.close()


@asynccontextmanager
async def webhook(port: int, timeout_s: float, _: Path) -> AsyncGenerator[Ask]:
    webhooks = Webhooks(FakeClock().clock)

    async def send() -> DeliveryOutcome:
        async with asyncio.timeout(timeout_s):
            return await webhooks.send(f"http://127.0.0.1:{port}/", b"{}", [SECRET], "m", allow_private=True)

    yield send
    await webhooks.close()


SERVICES = {"engine": (engine, "E3205"), "keys": (key_set, "E3001"), "vault": (vault, "E3601")}


# What they send


def _asked(connection: socket.socket) -> None:
    head = read_head(connection)
    sized = re.search(rb"(?i)content-length: *([0-9]+)", head)
    missing = int(sized[1]) - len(head.partition(b"\r\n\r\n")[2]) if sized else 0
    while missing > 0:
        missing -= len(connection.recv(missing))


def _flooding(before: bytes, piece: bytes) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        _asked(connection)
        connection.sendall(before)
        flood(connection, piece * (65_536 // len(piece)))

    return serve


FLOODS = {
    "chunks of one byte": _flooding(CHUNKED, b"1\r\n \r\n"),
    "extensions of chunks": _flooding(CHUNKED, b"1;" + b"x" * 200 + b"\r\n \r\n"),
    "answers before the answer": _flooding(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "hints before the answer": _flooding(b"", b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"),
    "headers": _flooding(HEAD, b"x: y\r\n"),
    "trailers": _flooding(CHUNKED + b"0\r\n", b"x: y\r\n"),
    "a body without an end": _flooding(HEAD + b"connection: close\r\n\r\n", b" "),
    "a length that is a lie": _flooding(HEAD + b"content-length: 4000000000\r\n\r\n", b" "),
    "the same answer again and again": _flooding(b"", HEAD + b"content-length: 2\r\n\r\n[]"),
}


@pytest.mark.parametrize("kind", FLOODS)
@pytest.mark.parametrize("service", SERVICES)
async def test_a_flood_is_refused_and_ends_its_connection(service: str, kind: str, tmp_path: Path) -> None:
    opened, code = SERVICES[service]
    with raw_server(FLOODS[kind]) as server:
        async with opened(server.port, 60.0, tmp_path) as ask:
            async with loop_is_free():
                with pytest.raises(Failure) as caught:
                    await ask()
            assert caught.value.code == code, caught.value.message
            assert "in time" not in caught.value.message, "it was ended by its size and not by the clock"
            assert await server.all_closed()


# Whether the status is seen before the trailers break off depends on how they are cut into packets.
@pytest.mark.parametrize("kind", [kind for kind in FLOODS if kind != "trailers"])
async def test_a_flood_from_a_receiver_of_webhooks_ends_its_connection(kind: str, tmp_path: Path) -> None:
    with raw_server(FLOODS[kind]) as server:
        async with webhook(server.port, 60.0, tmp_path) as ask:
            async with loop_is_free():
                outcome = await ask()
            # Where the status came first, the receiver has taken the message.
            assert outcome.result == ("retry" if kind.endswith("the answer") or kind == "headers" else "sent")
            assert await server.all_closed()


DEEP = b"[" * 60_000
BODIES = {
    "deep lists": DEEP,
    "deep objects": b'{"a":' * 10_000,
    "digits": b"1" * 60_000,
    "long numbers": b"[" + b",".join([b"9" * 4301] * 13) + b"]",
    "not UTF-8": b'{"decision": "\xff"}',
    "a name twice": b'{"decision": "deny", "decision": "allow", "keys": 1, "keys": [], "data": {}, "data": 1}',
    "NaN": b'{"decision": NaN, "keys": NaN, "data": NaN}',
    "nothing": b"",
}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("service", SERVICES)
async def test_a_hostile_body_is_refused(service: str, kind: str, tmp_path: Path) -> None:
    def serve(connection: socket.socket) -> None:
        _asked(connection)
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(BODIES[kind]) + BODIES[kind])

    opened, code = SERVICES[service]
    with raw_server(serve) as server:
        async with opened(server.port, 60.0, tmp_path) as ask, loop_is_free():
            with pytest.raises(Failure) as caught:
                await ask()
        assert caught.value.code == code, caught.value.message


@pytest.mark.parametrize("service", SERVICES)
async def test_an_answer_that_drips_ends_with_the_time_it_has(service: str, tmp_path: Path) -> None:
    def serve(connection: socket.socket) -> None:
        _asked(connection)
        connection.sendall(HEAD + b"content-length: 1000000\r\n\r\n")
        connection.settimeout(0.01)
        while True:
            connection.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                if not connection.recv(1):
                    return

    opened, code = SERVICES[service]
    with raw_server(serve) as server:
        async with opened(server.port, 0.5, tmp_path) as ask:
            with pytest.raises(Failure) as caught:
                await ask()
            assert caught.value.code == code
            assert await server.all_closed(), "nothing goes on after the time is over"


@pytest.mark.parametrize("service", [*SERVICES, "webhook"])
async def test_a_redirect_leads_nowhere(service: str, tmp_path: Path) -> None:
    reached: list[bytes] = []
    with raw_server(lambda connection: reached.append(read_head(connection))) as inner:

        def serve(connection: socket.socket) -> None:
            _asked(connection)
            connection.sendall(
                b"HTTP/1.1 307 Temporary Redirect\r\nlocation: http://127.0.0.1:%d/\r\ncontent-length: 0\r\n\r\n"
                % inner.port
            )

        with raw_server(serve) as server:
            if service == "webhook":
                async with webhook(server.port, 60.0, tmp_path) as send:
                    assert (await send()).result == "failed"
            else:
                opened, code = SERVICES[service]
                async with opened(server.port, 60.0, tmp_path) as ask:
                    with pytest.raises(Failure) as caught:
                        await ask()
                assert caught.value.code == code
    assert reached == []


@pytest.mark.parametrize("service", [*SERVICES, "webhook"])
async def test_proxies_of_the_environment_are_not_used(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(connection: socket.socket) -> None:
        _asked(connection)
        connection.sendall(b"HTTP/1.1 500 Broken\r\ncontent-length: 0\r\n\r\n")

    with raw_server(serve) as proxy, raw_server(serve) as server:
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        opened = webhook if service == "webhook" else SERVICES[service][0]
        async with opened(server.port, 60.0, tmp_path) as ask:
            with contextlib.suppress(Failure):
                await ask()
        assert (server.accepted, proxy.accepted) == (1, 0)


async def test_a_second_answer_on_a_kept_connection_answers_no_other_question() -> None:
    """The second answer arrives while nobody waits: the connection is closed and the next request opens another."""
    first, gone = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(path) + path)
                await first.wait()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nstolen")
                await writer.drain()
        gone.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = Outgoing("any", keep_alive=True)
    try:
        assert (await client.ask("GET", f"{url}/a", most=100, timeout_s=60)).body == b"/a"
        first.set()
        await asyncio.wait_for(gone.wait(), 60)
        for path in ("/b", "/c"):
            assert (await client.ask("GET", f"{url}{path}", most=100, timeout_s=60)).body == path.encode()
    finally:
        await client.close()
        server.close()


# Where to


def _names(*answers: Sequence[str]) -> addresses.Resolve:
    left = list(answers)

    async def resolve(host: str) -> Sequence[str]:
        return left.pop(0) if len(left) > 1 else left[0]

    return resolve


@pytest.mark.parametrize(
    ("allowed", "host", "found"),
    [
        ("private", "engine.internal", ["93.184.216.34"]),  # in clear, to a stranger
        ("private", "engine.internal", ["10.0.0.7", "93.184.216.34"]),
        ("private", "93.184.216.34", []),
        ("private", "engine.internal", ["169.254.169.254"]),
        ("any", "engine.internal", ["169.254.169.254"]),
        ("any", "keys.example.com", ["fd00:ec2::254"]),
        ("any", "localhost", ["10.0.0.7"]),
        ("any", "LOCALHOST.", ["93.184.216.34"]),
        ("public", "hook.example.com", ["127.0.0.1"]),
    ],
)
async def test_an_answer_of_dns_leads_nowhere_else(allowed: addresses.Allowed, host: str, found: Sequence[str]) -> None:
    client = Outgoing(allowed, resolve=_names(found))
    with pytest.raises(Failure) as caught:
        await client.ask("GET", f"http://{host}:9/", most=100, timeout_s=60)
    assert caught.value.code == "E3406"
    await client.close()


@pytest.mark.parametrize("scheme", ["http", "grpc"])
async def test_without_tls_a_policy_engine_on_a_public_address_is_not_asked(scheme: str) -> None:
    remote = Remote(f"{scheme}://93.184.216.34:9", clock=FakeClock().clock, timeout_s=60)
    with pytest.raises(Failure) as caught:
        await remote.decide(question(TOOL))
    assert (caught.value.code, "without TLS" in caught.value.message) == ("E3205", True)
    await remote.close()


@pytest.mark.parametrize("url", ["http://169.254.169.254:80", "https://169.254.169.254", "grpcs://169.254.169.254:443"])
async def test_a_policy_engine_is_never_a_metadata_service(url: str) -> None:
    remote = Remote(url, clock=FakeClock().clock, timeout_s=60)
    with pytest.raises(Failure) as caught:
        await remote.decide(question(TOOL))
    assert (caught.value.code, "never connected to" in caught.value.message) == ("E3205", True)
    await remote.close()


async def test_keys_are_never_fetched_from_a_metadata_service() -> None:
    with pytest.raises(Failure) as caught:
        await fetch_json("https://169.254.169.254/jwks")
    assert (caught.value.code, "never connected to" in caught.value.message) == ("E3001", True)


async def test_a_resolver_that_hangs_holds_no_thread_of_the_event_loop() -> None:
    """Names are looked up on threads of their own, so the default ones are free whatever the resolver does."""
    client = Outgoing("any")
    loop = asyncio.get_running_loop()
    used: list[str] = []

    def refuse(*_: Any) -> Any:
        used.append("the default threads")
        raise OSError

    kept, loop.getaddrinfo = loop.getaddrinfo, refuse  # type: ignore[method-assign]
    try:
        with pytest.raises(Unanswered):
            await client.ask("GET", "http://nobody.invalid:9/", most=100, timeout_s=60)
    finally:
        loop.getaddrinfo = kept  # type: ignore[method-assign]
        await client.close()
    assert used == []


def test_the_document_of_an_engine_is_read_strictly() -> None:
    assert json.loads(b'{"a": 1, "a": 2}') == {"a": 2}, "what the standard library would have made of it"
    with pytest.raises(ValueError, match="twice"):
        keys.strict_json(b'{"a": 1, "a": 2}')

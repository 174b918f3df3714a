"""An issuer of tokens with its parts within reach, and tokens of any content."""

from __future__ import annotations

import base64
import functools
import json
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import orjson
import pytest
import pytest_asyncio

from interlock.authority.dids import DidResolver
from interlock.authority.identities import DidRegistry, Identity, LocalIdentities
from interlock.authority.keys import IssuerKeys
from interlock.authority.tokens import Tokens
from interlock.call.context import CallerKind
from interlock.core.errors import Failure
from interlock.store.homes import home_at
from interlock.store.journal import Journal
from interlock.store.signing import Signer
from interlock.testing import FakeClock
from tests.support.identities import AGENT, OPERATOR, USER, did_of

Json = dict[str, Any]
DEPUTIES = tuple(f"deputy{number}" for number in range(6))
NAMES: dict[str, CallerKind] = {"user": "human", **dict.fromkeys(("agent", "helper", *DEPUTIES), "agent")}


class World:
    """A home's issuer with its parts within reach, and a clock that stands still."""

    def __init__(self, path: Path, clock: FakeClock, registry: DidRegistry | None = None, **options: Any) -> None:
        self.clock = clock
        self.home = home_at(path)
        self.journal = Journal(self.home, clock=clock.clock, signer=Signer(self.home.keys))
        self.keys = IssuerKeys(self.home.keys / "issuer", clock=clock.clock)
        self.identities = LocalIdentities(self.journal)
        self.tokens = Tokens(
            journal=self.journal,
            clock=clock.clock,
            keys=self.keys,
            registry=registry or self.identities,
            resolver=DidResolver(clock=clock.clock, loopback_http=True),
            **options,
        )

    async def issue(self, **given: Any) -> str:
        stated: Json = {"subject": AGENT, "user": USER, "by": OPERATOR, "scopes": ["a:read", "a:write"], "ttl_s": 600}
        return await self.tokens.issue(**(stated | given))

    async def refusal(self, token: str) -> str:
        """The code with which a token is refused."""
        with pytest.raises(Failure) as refused:
            await self.tokens.verifier.verify(token)
        assert self.tokens.verifier.known(token) is None
        return refused.value.code

    async def refusal_after_a_while(self, token: str) -> str:
        """The same, once nothing of an earlier verification is remembered."""
        self.clock.advance(61)
        return await self.refusal(token)

    async def issue_refusal(self, **given: Any) -> str:
        """The code with which a token is not even issued."""
        with pytest.raises(Failure) as refused:
            await self.issue(**given)
        return refused.value.code

    def acts(self) -> list[Json]:
        rows = self.journal.reader.all("SELECT body FROM journal WHERE kind = 'authority' ORDER BY seq")
        return [orjson.loads(body) for (body,) in rows]


@functools.cache
def issuer_keys(algorithm: Any) -> dict[str, bytes]:
    """Key files of an issuer, made once."""
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        IssuerKeys(directory, clock=FakeClock().clock).init(algorithm)
        return {path.name: path.read_bytes() for path in directory.iterdir()}


@asynccontextmanager
async def opened(path: Path, algorithm: Any = "RS256", **options: Any) -> AsyncGenerator[World]:
    directory = path / "keys" / "issuer"
    directory.mkdir(parents=True)
    for name, pem in issuer_keys(algorithm).items():
        (directory / name).touch(mode=0o600)
        (directory / name).write_bytes(pem)
    world = World(path, FakeClock(), **options)
    for name, kind in NAMES.items():
        identity = Identity(did=did_of(name), kind=kind, name=name, trust=40, groups=frozenset({"staff"}))
        await world.identities.register(identity, by="test")
    try:
        yield world
    finally:
        await world.journal.close()


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncGenerator[World]:
    async with opened(tmp_path / "home") as made:
        yield made


def part(value: Any) -> str:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def parts(token: str) -> tuple[Json, Json]:
    header, claims, _ = token.split(".")
    return tuple(orjson.loads(base64.urlsafe_b64decode(one + "==")) for one in (header, claims))  # pyright: ignore[reportReturnType]


def sign(header: Any, claims: Any, private: Any) -> str:
    """A token with any header and claims at all, signed as its key signs."""
    signed = f"{part(header)}.{part(claims)}"
    algorithm = {"RSAPrivateKey": "RS256", "Ed25519PrivateKey": "EdDSA"}.get(type(private).__name__, "ES256")
    return f"{signed}.{part(jwt.get_algorithm_by_name(algorithm).sign(signed.encode(), private))}"


class Site:
    """Documents over HTTP on a port of this machine, which count how often they are asked for."""

    def __init__(self) -> None:
        self.documents: dict[str, bytes] = {}
        self.status = 200
        self.asked = 0
        self.url = ""


@contextmanager
def site() -> Generator[Site]:
    state = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked += 1
            body = state.documents.get(self.path, b"")
            self.send_response(state.status if body else 404)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

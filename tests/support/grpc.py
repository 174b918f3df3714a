"""The gRPC service with tools that wait, and a client of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, cast

import grpc.aio
import pytest
import pytest_asyncio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from interlock import Context, Effect, Failure, Field, Interlock, tool
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.doors.grpc import GrpcDoor
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from interlock.doors.grpc.v1.gateway_pb2_grpc import GatewayStub
from tests import sample
from tests.support.calls import admit, records
from tests.support.identities import AGENT, OPERATOR, USER

Text = Annotated[str, Field(description="any text", examples=["hello"])]


class Stage:
    """What the tools of these tests wait for, and what became of them."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.release = asyncio.Event()
        self.cancelled = 0
        self.failure = Failure("E3401", "said so")


stage = Stage()


@tool(version="1.0.0", mutation_class="read_only", namespace="long", timeout_class="long_running")
async def waits(ctx: Context) -> str:
    """Wait until told otherwise, and say when it was cut off."""
    stage.entered.set()
    try:
        await stage.release.wait()
    except asyncio.CancelledError:
        stage.cancelled += 1
        raise
    return "at last"


@tool(version="1.0.0", mutation_class="read_only", namespace="long", timeout_class="long_running", cancellable=False)
async def stubborn(ctx: Context) -> str:
    """Wait, and by contract do not stop before the end."""
    stage.entered.set()
    await stage.release.wait()
    return "at last"


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="long", timeout_class="long_running",
    restart_safe=True, effects=[Effect("counter:{name}", "UPDATE")],
)  # fmt: skip
async def counts(ctx: Context, name: Text) -> int:
    """Count to one, once it may."""
    await stage.release.wait()
    ctx.effect(f"counter:{name}", "UPDATE", before=0, after=1)
    ctx.compensate_with(name=name)
    return 1


@counts.compensate
async def _(name: str) -> None:
    """Nothing is left of it."""


@tool(version="1.0.0", mutation_class="read_only", namespace="long")
async def talks(ctx: Context, words: Annotated[int, Field(description="how many", examples=[2])]) -> str:
    """Tell of every step, and give a part of the result after each."""
    for number in range(1, words + 1):
        ctx.progress(f"word {number}", percent=100 * number / words, current_step=number)
        ctx.partial(str(number))
    return "that was all"


@tool(version="1.0.0", mutation_class="read_only", namespace="long", redact_results=False, max_inline_chars=100)
async def writes_much() -> str:
    """Give more than is sent along."""
    return "x" * 1000


@tool(version="1.0.0", mutation_class="read_only", namespace="long")
async def fails(why: Text = "") -> str:
    """Fail as the test asks for."""
    raise stage.failure


@tool(version="1.0.0", mutation_class="read_only", namespace="locked", scopes=["vault:open"])
async def vault() -> str:
    """Open what is not everybody's."""
    return "open"


@tool(version="1.0.0", mutation_class="read_only", namespace="long", timeout_class="long_running")
async def left(ctx: Context) -> float:
    """Say how much time it has."""
    return ctx.remaining_s


TOOLS = (waits, left, stubborn, counts, talks, writes_much, fails, vault)


@dataclass
class World:
    """A server, a client of it, and a token."""

    app: Interlock
    door: GrpcDoor
    port: int
    channel: grpc.aio.Channel
    stub: GatewayStub
    token: str

    @property
    def bearer(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),)

    async def invoke(self, tool_id: str, arguments: Any = None, **said: Any) -> wire.CallResult:
        """A call on the token's authority."""
        timeout = said.pop("timeout", None)
        raw = json.dumps(arguments or {}).encode()
        request = wire.InvokeRequest(tool_id=tool_id, arguments_json=raw, **said)
        return await self.stub.Invoke(request, metadata=self.bearer, timeout=timeout)

    async def run(self, tool_id: str, arguments: Any = None, **said: Any) -> Any:
        """A stream on which a call has been started."""
        stream = self.stub.Run(None, metadata=self.bearer)
        raw = json.dumps(arguments or {}).encode()
        request = wire.InvokeRequest(tool_id=tool_id, arguments_json=raw, **said)
        await stream.write(wire.RunRequest(start=request))
        return stream

    def closed(self) -> list[dict[str, Any]]:
        return records(self.app)


@asynccontextmanager
async def served(app: Interlock, **options: Any) -> AsyncGenerator[World]:
    """The door over a home in which the tools of these tests are admitted and an agent holds a token."""
    stage.__init__()
    for one in (sample.add, sample.echo, sample.increment, sample.send):
        app.catalog.attach(one)
    await admit(app, *TOOLS)
    app.issuer_keys.init("EdDSA")
    await app.identities.register(Identity(did=USER, kind="human"), by="test")
    await app.identities.register(Identity(did=AGENT, trust=90), by="test")
    token = await app.tokens.issue(subject=AGENT, user=USER, by=OPERATOR, ttl_s=3600)
    service = Service(app)
    given: dict[str, Any] = {"address": "127.0.0.1:0", "drain_s": 0.0} | options
    door = GrpcDoor(service, **given)
    port = await door.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield World(app, door, port, channel, GatewayStub(channel), token)
    finally:
        await door.stop()
        await service.close()


@pytest_asyncio.fixture
async def world(app: Interlock) -> AsyncGenerator[World]:
    async with served(app) as made:
        yield made


@dataclass
class Told:
    """A failure as its client reads it."""

    status: grpc.StatusCode
    message: str
    envelope: wire.ErrorEnvelope
    info: ErrorInfo
    retry: RetryInfo | None


async def refusal(attempt: Awaitable[Any]) -> Told:
    """The status of an RPC that fails, with everything in its details."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await attempt
    return told(raised.value)


def told(error: grpc.aio.AioRpcError) -> Told:
    trailing = dict(cast("Any", error.trailing_metadata()))
    assert "grpc-status-details-bin" in trailing, error
    status = Status.FromString(trailing["grpc-status-details-bin"])
    assert (status.code, status.message) == (error.code().value[0], error.details())
    envelope, info, retry = wire.ErrorEnvelope(), ErrorInfo(), RetryInfo()
    assert [detail.Unpack(envelope) for detail in status.details].count(True) == 1
    assert [detail.Unpack(info) for detail in status.details].count(True) == 1
    waits = any(detail.Unpack(retry) for detail in status.details)
    assert (info.domain, info.reason) == ("interlock", envelope.code)
    assert info.metadata["errorCode"] == envelope.error_code
    return Told(error.code(), status.message, envelope, info, retry if waits else None)


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for localhost and its key, made now."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    files = folder / "cert.pem", folder / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files

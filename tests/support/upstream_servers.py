"""Services on this machine that answer as they are told and remember what they were sent."""

from __future__ import annotations

import asyncio
import datetime
import gc
import importlib
import ipaddress
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from interlock import Interlock
from interlock.call.connector import RemoteCall
from interlock.call.context import Caller
from interlock.call.results import Result
from interlock.contract.manifest import CircuitBreakerConfig, RetryPolicy
from interlock.core.clock import Clock
from interlock.data.schema import Json
from interlock.resilience.services import Services
from interlock.store.homes import home_at
from interlock.store.journal import Journal
from interlock.store.signing import Signer

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def remote_call(native: Json, arguments: Json | None = None, **facts: Any) -> RemoteCall:
    """A granted call, as the executor would hand it over."""
    given: dict[str, Any] = {
        "tool": "upstream.thing@1.0.0",
        "native": native,
        "arguments": arguments or {},
        "invocation_id": "01J0000000000000000000TEST",
        "caller": Caller(id="ada"),
        "deadline": time.monotonic() + facts.pop("left_s", 20.0),
        "monotonic": time.monotonic,
        "traceparent": TRACEPARENT,
        "tracestate": "vendor=value",
        "retry": RetryPolicy.model_validate({"max_attempts": facts.pop("attempts", 3)}),
        "breaker": CircuitBreakerConfig.model_validate({}),
        "writes": False,
    }
    return RemoteCall(**given | facts)


@dataclass
class Pauses:
    """Stands in for sleeping: remembers how long, and goes on at once."""

    taken: list[float] = field(default_factory=list[float])

    async def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)
        await asyncio.sleep(0)


@dataclass
class Got:
    """A request that arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Answer:
    """What to answer. `hang`: nothing at all; `cut`: break off after the body, whatever length was promised."""

    status: int = 200
    body: bytes = b"{}"
    media: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict[str, str])
    hang: bool = False
    cut: bool = False


def json_answer(value: Any) -> Answer:
    return Answer(body=orjson.dumps(value))


class HttpServer:
    """A small HTTP server. `answers` are used up first; then `otherwise` answers."""

    def __init__(self) -> None:
        self.got: list[Got] = []
        self.answers: list[Answer] = []
        self.otherwise: Callable[[Got], Answer] = lambda _: Answer()
        self.connections = 0
        self.open_now = 0
        self.most_open = 0
        self.port = 0
        self.scheme = "http"
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        self._writers.add(writer)
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            pass
        finally:
            self.open_now -= 1
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {line.split(":", 1)[0].lower(): line.split(":", 1)[1].strip() for line in lines[1:] if line}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = lines[0].split()
        got = Got(method, path, headers, body)
        self.got.append(got)
        answer = self.answers.pop(0) if self.answers else self.otherwise(got)
        if answer.hang:
            await reader.read()  # until the client gives up
            return False
        if answer.status == 0:
            return False  # closed without a word
        promised = len(answer.body) + (1000 if answer.cut else 0)
        head = {"content-type": answer.media, "content-length": str(promised), **answer.headers}
        text = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        writer.write(f"HTTP/1.1 {answer.status} x\r\n{text}\r\n".encode() + (b"" if method == "HEAD" else answer.body))
        await writer.drain()
        return not answer.cut

    @classmethod
    @asynccontextmanager
    async def open(cls, tls: ssl.SSLContext | None = None) -> AsyncGenerator[HttpServer]:
        one = cls()
        one.scheme = "https" if tls else "http"
        server = await asyncio.start_server(one._serve, "127.0.0.1", 0, ssl=tls)
        one.port = server.sockets[0].getsockname()[1]
        try:
            yield one
        finally:
            server.close()
            for writer in list(one._writers):
                writer.close()
            await server.wait_closed()


@asynccontextmanager
async def services_of(place: Path) -> AsyncGenerator[Services]:
    """Breakers and limits of services, as a server has them."""
    home = home_at(place)
    home.prepare()
    journal = Journal(home, clock=Clock(), signer=Signer(home.keys))
    try:
        yield Services(journal, Clock())
    finally:
        await journal.close()


@asynccontextmanager
async def served(app: Any) -> AsyncGenerator[str]:
    """An ASGI application on this machine; its address."""
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve([listening]))
    async with asyncio.timeout(60):
        while not server.started:  # noqa: ASYNC110 - there is nothing to be told by
            await asyncio.sleep(0.001)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        listening.close()


def tls_contexts() -> int:
    """How many TLS contexts there are in this process, but for those that other tests have let go of."""
    gc.collect()
    return sum(issubclass(type(one), ssl.SSLContext) for one in gc.get_objects())


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate for 127.0.0.1 and some names, as files."""

    cert_file: Path
    key_file: Path

    @property
    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert_file, self.key_file)
        return context


def new_certificate(folder: Path) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "service.example")])
    names = x509.SubjectAlternativeName(
        [
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
            x509.DNSName("localhost"),
            x509.DNSName("service.example"),
        ]
    )
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.KeyUsage(
                digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
                key_agreement=False, key_cert_sign=True, crl_sign=False, encipher_only=False, decipher_only=False,
            ),
            critical=True,
        )
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    made = Certificate(folder / "cert.pem", folder / "key.pem")
    made.cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    made.key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return made


class Tap:
    """Stands between a client and a server: counts connections, and cuts them when told to."""

    def __init__(self, target: int) -> None:
        self.connections = 0
        self.port = 0
        self._target = target
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Break every connection off, without a word to either side."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        beyond, onward = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, onward}
        try:
            await asyncio.gather(self._pump(reader, onward), self._pump(beyond, writer))
        finally:
            self._writers -= {writer, onward}

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()

    @classmethod
    @asynccontextmanager
    async def open(cls, target: int) -> AsyncGenerator[Tap]:
        one = cls(target)
        server = await asyncio.start_server(one._serve, "127.0.0.1", 0)
        one.port = server.sockets[0].getsockname()[1]
        try:
            yield one
        finally:
            server.close()
            one.cut()
            await server.wait_closed()


SHOP_PROTO = """
syntax = "proto3";
package shop.v1;
import "shop/common.proto";
import "google/protobuf/struct.proto";
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";

service Shop {
  rpc Get(GetRequest) returns (shop.common.Thing) { option idempotency_level = NO_SIDE_EFFECTS; }
  rpc Put(shop.common.Thing) returns (shop.common.Thing);
  rpc List(GetRequest) returns (stream shop.common.Thing);
  rpc Upload(stream shop.common.Thing) returns (shop.common.Thing);
  rpc Chat(stream shop.common.Thing) returns (stream shop.common.Thing);
  rpc Echo(Everything) returns (Everything);
}

message GetRequest { int64 thing_id = 1; optional string note = 2; }
message Unrelated { string x = 1; }

message Everything {
  enum Colour { COLOUR_UNSPECIFIED = 0; RED = 1; }
  message Inner { bool yes = 1; }
  int32 i32 = 1; uint32 u32 = 2; int64 i64 = 3; uint64 u64 = 4; sint64 s64 = 5; fixed32 f32 = 6;
  float small = 7; double large = 8; bool flag = 9; string text = 10; bytes raw = 11;
  Colour colour = 12; Inner inner = 13;
  repeated string words = 14; map<string, Inner> by_name = 15;
  oneof choice { string left = 16; int32 right = 17; }
  google.protobuf.Timestamp at = 18; google.protobuf.StringValue maybe = 19; google.protobuf.Struct free = 20;
  google.protobuf.Value any_value = 21;
}
"""
COMMON_PROTO = """
syntax = "proto3";
package shop.common;
message Thing { int64 id = 1; string name = 2; repeated Thing parts = 3; Size size = 4; }
message NotUsed { string y = 1; }
enum Size { SIZE_UNSPECIFIED = 0; LARGE = 1; }
"""


@dataclass
class Asked:
    """A gRPC call that arrived."""

    method: str
    message: Any
    metadata: dict[str, str]
    left_s: float


def _bytes_of(message: Any) -> bytes:
    return message.SerializeToString()


class ShopServer:
    """A gRPC service made of its own description, with reflection. `answer` gives what a call is answered with."""

    def __init__(self, folder: Path) -> None:
        from google.protobuf import descriptor_pb2, descriptor_pool

        protoc: Any = importlib.import_module("grpc_tools.protoc")
        (folder / "shop").mkdir()
        (folder / "shop/shop.proto").write_text(SHOP_PROTO)
        (folder / "shop/common.proto").write_text(COMMON_PROTO)
        well_known = Path(protoc.__file__).parent / "_proto"
        out = folder / "set.bin"
        said = ["protoc", f"-I{folder}", f"-I{well_known}", "--include_imports", f"--descriptor_set_out={out}"]
        assert protoc.main([*said, "shop/shop.proto"]) == 0
        self.pool = descriptor_pool.DescriptorPool()
        for file in descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file:
            self.pool.AddSerializedFile(file.SerializeToString())
        self.asked: list[Asked] = []
        self.port = 0
        self.answer: Callable[[Asked, Any], Any] = self._thing

    def message(self, name: str) -> Any:
        """The class of a message."""
        from google.protobuf import message_factory

        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(name))

    async def _thing(self, asked: Asked, context: Any) -> Any:
        if asked.method == "Echo":
            return asked.message
        return self.message("shop.common.Thing")(id=7, name="seven", size=1)

    def _heard(self, method: str, request: Any, context: Any) -> Asked:
        metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        asked = Asked(method, request, metadata, context.time_remaining() or 0.0)
        self.asked.append(asked)
        return asked

    def _handlers(self) -> Any:
        grpc: Any = importlib.import_module("grpc")

        def unary(method: str, taken: str) -> Any:
            async def handle(request: Any, context: Any) -> Any:
                return await self.answer(self._heard(method, request, context), context)

            return grpc.unary_unary_rpc_method_handler(handle, self.message(taken).FromString, _bytes_of)

        async def many(request: Any, context: Any) -> Any:
            asked = self._heard("List", request, context)
            for _ in range(asked.message.thing_id):
                yield await self.answer(asked, context)

        stream = grpc.unary_stream_rpc_method_handler(many, self.message("shop.v1.GetRequest").FromString, _bytes_of)
        return grpc.method_handlers_generic_handler(
            "shop.v1.Shop",
            {
                "Get": unary("Get", "shop.v1.GetRequest"),
                "Put": unary("Put", "shop.common.Thing"),
                "Echo": unary("Echo", "shop.v1.Everything"),
                "List": stream,
            },
        )

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        folder: Path,
        *,
        certificate: Certificate | None = None,
        reflection: bool = True,
        handlers: Any = (),
        port: int = 0,
    ) -> AsyncGenerator[ShopServer]:
        grpc: Any = importlib.import_module("grpc")
        reflecting: Any = importlib.import_module("grpc_reflection.v1alpha.reflection")
        one = cls(folder)
        server: Any = importlib.import_module("grpc.aio").server()
        server.add_generic_rpc_handlers((one._handlers(), *handlers))
        if reflection:
            reflecting.enable_server_reflection(("shop.v1.Shop", reflecting.SERVICE_NAME), server, pool=one.pool)
        if certificate is None:
            one.port = server.add_insecure_port(f"127.0.0.1:{port}")
        else:
            pair = (certificate.key_file.read_bytes(), certificate.cert_file.read_bytes())
            one.port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
        await server.start()
        try:
            yield one
        finally:
            await server.stop(None)


class SocketServer:
    """A WebSocket service. `answer` is handed each message, and gives what is sent back: nothing, one or several."""

    def __init__(self) -> None:
        self.heard: list[Json] = []
        self.handshakes: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.open_now = 0
        self.most_open = 0
        self.port = 0
        self.scheme = "ws"
        self.refuse: tuple[int, dict[str, str]] | None = None
        self.answer: Callable[[Json, Any], Any] = self._echo
        self.arrived = asyncio.Condition()

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    async def _echo(self, message: Json, _: Any) -> list[Any]:
        return [{"jsonrpc": "2.0", "id": message["id"], "result": message.get("params")}]

    async def has_heard(self, count: int) -> None:
        """Wait until so many messages have arrived."""
        async with asyncio.timeout(60), self.arrived:
            await self.arrived.wait_for(lambda: len(self.heard) >= count)

    def _greet(self, connection: Any, request: Any) -> Any:
        self.handshakes.append({name.lower(): value for name, value in request.headers.raw_items()})
        self.paths.append(request.path)
        if self.refuse is None:
            return None
        response = connection.respond(self.refuse[0], "no")
        for name, value in self.refuse[1].items():
            response.headers[name] = value
        return response

    async def _serve(self, connection: Any) -> None:
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            async with asyncio.TaskGroup() as group:
                async for text in connection:
                    message = orjson.loads(text)
                    async with self.arrived:
                        self.heard.append(message)
                        self.arrived.notify_all()
                    group.create_task(self._reply(message, connection))
        except* Exception as broken:  # noqa: BLE001 - a connection that was cut takes its tasks with it
            del broken
        finally:
            self.open_now -= 1

    async def _reply(self, message: Json, connection: Any) -> None:
        for one in await self.answer(message, connection):
            await connection.send(one if isinstance(one, str | bytes) else orjson.dumps(one).decode())

    @classmethod
    @asynccontextmanager
    async def open(cls, tls: ssl.SSLContext | None = None, *, max_size: int = 1 << 20) -> AsyncGenerator[SocketServer]:
        from websockets.asyncio.server import serve

        one = cls()
        one.scheme = "wss" if tls else "ws"
        said: dict[str, Any] = {"process_request": one._greet, "compression": None, "max_size": max_size}
        async with serve(one._serve, "127.0.0.1", 0, ssl=tls, **said) as server:
            one.port = next(iter(server.sockets)).getsockname()[1]
            yield one


async def governed(
    home: Path, kind: str, config: Json, *, tool: str, asked: Callable[[], int], fail: Callable[[], None]
) -> str:
    """Hold a service behind Interlock to what every upstream is held to; the trace id of a call that succeeded.

    `asked` says how often the service was asked, `fail` makes it fail from then on.
    """
    overlay = {"tools": {tool: {"mutation_class": "read_only"}}}
    async with Interlock.open(home, housekeeping=False, rate_limits=[_rate(1)]) as app:
        await app.secrets.set("svc/token", "s3cret", by=app.caller.id)
        said = {**config, "allow_private": True, "auth": {"kind": "bearer", "secret": "svc/token"}}
        report = await app.upstreams.add("svc", kind, said, by=app.caller, overlay=overlay)
        (offered,) = (one for one in report.tools if one.name == tool)
        assert offered.state == "admitted", offered.reason
        good = await app.call(offered.address, {})
        assert good.ok, good.error
        limited = await app.call(offered.address, {})
        assert code_of(limited) == "E3003"
        assert asked() == 1, "a limit stands before the service"
    async with Interlock.open(home, housekeeping=False, rate_limits=[_rate(100)]) as app:
        fail()
        failed = [await app.call(offered.address, {}) for _ in range(5)]
        assert {one.error and (one.error.row.error_code, one.error.code) for one in failed} == {
            ("UPSTREAM_FAILURE", "E3502")
        }
        assert asked() == 1 + 5 * 3, "a read is sent as often as its policy says"
        broken = await app.call(offered.address, {})
        assert code_of(broken) == "E3501"
        assert asked() == 16, "a breaker stands before the service"
    assert "s3cret" not in repr([one.document() for one in (good, limited, *failed, broken)])
    return good.trace_id


def code_of(result: Result) -> str | None:
    return None if result.error is None else result.error.code


def _rate(limit: int) -> Json:
    return {"per": "service", "limit": limit, "window_s": 3600}

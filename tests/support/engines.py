"""Policy engines over HTTP and gRPC that answer as a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Literal, Protocol

import grpc
import pytest
import pytest_asyncio
from google.protobuf import json_format

from interlock.authority.policy_v1 import policy_pb2

Wire = Literal["http", "grpc"]
untyped: Any = grpc  # its stubs leave most types open
YES: dict[str, Any] = {"decision": "allow"}


class FakeEngine(Protocol):
    """A server that answers with what the test gives it, and keeps what it was asked."""

    wire: Wire
    answer: Any
    asked: list[dict[str, Any]]
    tokens: list[str | None]
    hang: asyncio.Event | None
    reached: asyncio.Event
    url: str


class FakeHttpEngine:
    """An HTTP server, down to its bytes."""

    wire: Wire = "http"

    def __init__(self) -> None:
        self.answer: Any = YES
        self.status = "200 OK"
        self.headers = ""
        self.trailing = b""
        self.asked: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.lines: list[str] = []
        self.hang: asyncio.Event | None = None
        self.reached = asyncio.Event()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().splitlines()
                said = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
                self.lines = lines
                self.tokens.append(said.get("authorization"))
                self.asked.append(json.loads(await reader.readexactly(int(said["content-length"]))))
                if self.hang is not None:
                    self.reached.set()
                    await self.hang.wait()
                answer: Any = self.answer(self.asked[-1]) if callable(self.answer) else self.answer
                body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                writer.write(
                    f"HTTP/1.1 {self.status}\r\n{self.headers}Content-Length: {len(body)}\r\n\r\n".encode()
                    + body
                    + self.trailing
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        yield
        if self.hang is not None:
            self.hang.set()
        server.close()


class FakeGrpcEngine:
    """A gRPC server of policy.proto, which can also answer with any bytes and any status."""

    wire: Wire = "grpc"

    def __init__(self) -> None:
        self.answer: Any = YES
        self.status: grpc.StatusCode | None = None
        self.asked: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.hang: asyncio.Event | None = None
        self.reached = asyncio.Event()
        self.url = ""

    async def authorize(self, request: bytes, context: Any) -> bytes:
        self.tokens.append(dict(context.invocation_metadata()).get("authorization"))
        self.asked.append(_told(policy_pb2.AuthorizeRequest.FromString(request)))
        if self.hang is not None:
            self.reached.set()
            await self.hang.wait()
        if self.status is not None:
            await context.abort(self.status, "as the test says")
        answer: Any = self.answer(self.asked[-1]) if callable(self.answer) else self.answer
        return answer if isinstance(answer, bytes) else _message(answer)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        handler = untyped.unary_unary_rpc_method_handler(self.authorize, None, None)
        server = untyped.aio.server()
        server.add_generic_rpc_handlers(
            (untyped.method_handlers_generic_handler("interlock.policy.v1.PolicyEngine", {"Authorize": handler}),)
        )
        self.url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        yield
        if self.hang is not None:
            self.hang.set()
        await server.stop(None)


def _told(request: policy_pb2.AuthorizeRequest) -> dict[str, Any]:
    """The question as the HTTP wire writes it."""
    told = json_format.MessageToDict(
        request, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    context = told["context"]
    context.pop("arguments_json", None)
    if request.context.HasField("arguments_json"):
        context["arguments"] = json.loads(request.context.arguments_json)
    context.setdefault("native", None)
    return told


def _message(answer: dict[str, Any]) -> bytes:
    """The message that says what a document says."""
    decision = f"DECISION_{answer['decision'].upper()}"
    obligations = [
        one if isinstance(one, str) else one.get("id") or one.get("name") or one.get("type")
        for one in answer.get("obligations", ())
    ]
    return policy_pb2.AuthorizeResponse(
        decision=decision, reason=answer.get("reason", ""), obligations=obligations
    ).SerializeToString()


@pytest_asyncio.fixture
async def http() -> AsyncGenerator[FakeHttpEngine]:
    engine = FakeHttpEngine()
    async with engine.running():
        yield engine


@pytest_asyncio.fixture(params=["http", "grpc"])
async def fake(request: pytest.FixtureRequest) -> AsyncGenerator[FakeHttpEngine | FakeGrpcEngine]:
    engine = FakeHttpEngine() if request.param == "http" else FakeGrpcEngine()
    async with engine.running():
        yield engine

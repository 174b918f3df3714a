"""The connections to a policy engine elsewhere: HTTP with JSON, and gRPC.

Both take the question as a document and return the answer as one. Both bound the answer at 64 KiB before it is parsed,
take no compressed answer, follow no redirect, retry nothing and use neither the proxies nor the credentials of the
environment. Anything but a well-formed answer in time is E3205.

HTTP opens a connection per question: on one that is used again, an engine that answers twice would answer the next
question with what it said of this one. gRPC numbers its streams, so one channel carries all questions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import urlsplit

import orjson

from interlock.authority.keys import strict_json
from interlock.core.errors import Failure
from interlock.core.schema import Json

if TYPE_CHECKING:
    import grpc.aio
    import httpx

MAX_ANSWER = 64 * 1024
GRPC_SCHEMES = ("grpc", "grpcs")
# Bits of the compressions that a channel takes: the lowest one stands for none.
_UNCOMPRESSED = 1


class Wire(Protocol):
    """A connection to an engine. `encode` makes the message of a question; it may be called in a thread."""

    def encode(self, document: Json) -> bytes: ...

    async def ask(self, message: bytes, timeout_s: float) -> Json: ...

    async def close(self) -> None: ...


class HttpWire:
    """Posts the question as JSON."""

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url
        self._token = token

    @cached_property
    def _client(self) -> httpx.AsyncClient:
        import httpx

        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        # The environment's proxies and credentials are not for this connection.
        limits = httpx.Limits(max_keepalive_connections=0)
        return httpx.AsyncClient(headers=headers, follow_redirects=False, trust_env=False, limits=limits)

    def encode(self, document: Json) -> bytes:
        return encoded(document)

    async def ask(self, message: bytes, timeout_s: float) -> Json:
        import httpx

        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._post(message, timeout_s)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError):
            raise unanswered() from None
        try:
            document: Any = strict_json(answer)
        except ValueError:
            raise garbled() from None
        if not isinstance(document, dict):
            raise garbled()
        return cast("Json", document)

    async def close(self) -> None:
        if "_client" in self.__dict__:
            await self._client.aclose()

    async def _post(self, body: bytes, timeout_s: float) -> bytes:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
        async with self._client.stream("POST", self._url, content=body, headers=headers, timeout=timeout_s) as response:
            if response.status_code != 200:
                raise Failure("E3205", f"the policy engine answered with status {response.status_code}")
            answer = b""
            async for piece in response.aiter_raw():
                answer += piece
                if len(answer) > MAX_ANSWER:
                    raise _too_long()
        return answer


class GrpcWire:
    """Calls interlock.policy.v1.PolicyEngine/Authorize (policy.proto)."""

    def __init__(self, url: str, token: str | None) -> None:
        parts = urlsplit(url)
        self._target = f"{parts.hostname}:{parts.port}" if ":" not in str(parts.hostname) else parts.netloc
        self._secure = parts.scheme == "grpcs"
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    @cached_property
    def _channel(self) -> Any:  # the stubs of grpc leave the types of its methods open
        import grpc
        import grpc.aio

        options = [
            ("grpc.max_receive_message_length", MAX_ANSWER),
            ("grpc.max_send_message_length", -1),
            ("grpc.compression_enabled_algorithms_bitset", _UNCOMPRESSED),
            ("grpc.per_message_decompression", 0),
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),
            ("grpc.service_config_disable_resolution", 1),
            ("grpc.use_local_subchannel_pool", 1),
            # An engine that was down and is back answers within a second or so.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        if self._secure:
            return grpc.aio.secure_channel(self._target, grpc.ssl_channel_credentials(), options=options)
        return grpc.aio.insecure_channel(self._target, options=options)

    def encode(self, document: Json) -> bytes:
        from interlock.authority.policy_v1.policy_pb2 import AuthorizeRequest, Context

        context: dict[str, Any] = {**document["context"]}
        if "arguments" in context:
            context["arguments_json"] = encoded(context.pop("arguments"))
        try:
            request = AuthorizeRequest(
                subject=document["subject"],
                action=document["action"],
                resource=document["resource"],
                context=Context(**context),
            )
        except (TypeError, ValueError):
            raise untellable() from None
        return request.SerializeToString()

    async def ask(self, message: bytes, timeout_s: float) -> Json:
        import grpc
        import grpc.aio

        call = self._channel.unary_unary(_AUTHORIZE, None, None)
        try:
            async with asyncio.timeout(timeout_s):
                answer: bytes = await call(message, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from None
        except (TimeoutError, grpc.aio.UsageError, OSError):
            raise unanswered() from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise unanswered() from None  # this task was not cancelled: the channel was closed
        return _read(answer)

    async def close(self) -> None:
        if "_channel" in self.__dict__:
            await self._channel.close(None)


_AUTHORIZE = "/interlock.policy.v1.PolicyEngine/Authorize"
_DECISIONS: Mapping[int, str] = {1: "allow", 2: "deny", 3: "ask", 4: "passthrough"}


def _read(answer: bytes) -> Json:
    """The document that a message stands for.

    A field that comes twice would be read as its last value, as a name that stands twice in JSON would be. The message
    written anew is then shorter than the one that came.
    """
    from google.protobuf.message import DecodeError

    from interlock.authority.policy_v1.policy_pb2 import AuthorizeResponse

    try:
        message = AuthorizeResponse.FromString(answer)
    except DecodeError:
        raise garbled() from None
    if message.ByteSize() != len(answer):
        raise garbled()
    document: Json = {"decision": _DECISIONS.get(message.decision), "obligations": list(message.obligations)}
    if message.reason:
        document["reason"] = message.reason
    return document


def _failure(error: grpc.aio.AioRpcError) -> Failure:
    import grpc

    code = error.code()
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return unanswered()
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in (error.details() or ""):
        return _too_long()
    return Failure("E3205", f"the policy engine answered with status {code.name}")


def encoded(document: Any) -> bytes:
    """JSON with its names in order."""
    try:
        return orjson.dumps(document, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        raise untellable() from None


def untellable() -> Failure:
    return Failure("E3206", "the call holds values that the policy engine cannot be told")


def unanswered() -> Failure:
    return Failure("E3205", "the policy engine does not answer")


def garbled() -> Failure:
    return Failure("E3205", "the policy engine's answer is not understood")


def _too_long() -> Failure:
    return Failure("E3205", "the policy engine's answer is too long")

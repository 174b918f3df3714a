"""The connections to a remote policy engine: HTTP with JSON, and gRPC.

Both take the question as a document and return the answer as one. Both limit the answer to 64 KiB before it is parsed,
accept no compressed answer, follow no redirect, retry nothing and use neither the proxies nor the credentials of the
environment. Anything but a well-formed answer in time is E3205.

The engine's host is resolved and checked here (`net.addresses`), and the connection goes to an address that was
checked. With TLS it may be public or private, because the certificate is checked for the name. Without TLS it must be
private, because only DNS then identifies the engine.

HTTP opens a connection per question: on a reused one, an engine that answers twice would answer the next question with
its answer to this one. gRPC numbers its streams, so one channel carries all questions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import urlsplit

import orjson

from interlock.authority.keys import strict_json
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.net import addresses
from interlock.net.outgoing import Outgoing, Trouble, Unanswered

if TYPE_CHECKING:
    import grpc.aio

MAX_ANSWER = 64 * 1024
GRPC_SCHEMES = ("grpc", "grpcs")
# Bits of the compressions that a channel takes: the lowest one stands for none.
_UNCOMPRESSED = 1
# Concurrent questions over HTTP. Others wait, within their time.
_MOST_AT_ONCE = 100


class Wire(Protocol):
    """A connection to an engine. `encode` makes the message of a question; it may be called in a thread."""

    def encode(self, document: Json) -> bytes: ...

    async def ask(self, message: bytes, timeout_s: float) -> Json: ...

    async def close(self) -> None: ...


class HttpWire:
    """Posts the question as JSON."""

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url
        self._headers = {"content-type": "application/json", "accept": "application/json"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        self._client = Outgoing(_allowed(secure=url.startswith("https:")), connections=_MOST_AT_ONCE)

    def encode(self, document: Json) -> bytes:
        return encoded(document)

    async def ask(self, message: bytes, timeout_s: float) -> Json:
        try:
            answer = await self._client.ask(
                "POST", self._url, headers=self._headers, body=message, most=MAX_ANSWER, timeout_s=timeout_s
            )
        except Unanswered as silence:
            raise _TROUBLES[silence.why]() from None
        except Failure as refused:
            raise misled(refused) from None
        if answer.status != 200:
            raise Failure("E3205", f"the policy engine answered with status {answer.status}")
        try:
            document: Any = strict_json(answer.body)
        except ValueError:
            raise garbled() from None
        if not isinstance(document, dict):
            raise garbled()
        return cast("Json", document)

    async def close(self) -> None:
        await self._client.close()


class GrpcWire:
    """Calls interlock.policy.v1.PolicyEngine/Authorize (policy.proto).

    A channel that does not connect is closed when its last question has ended; the next question resolves the name
    anew.
    """

    def __init__(self, url: str, token: str | None) -> None:
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), parts.port
        self._authority = parts.netloc
        self._secure = parts.scheme == "grpcs"
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._opening = asyncio.Lock()
        self._line: _Line | None = None

    async def _opened(self) -> _Line:
        async with self._opening:
            if self._line is None:
                self._line = _Line(await self._channel())
            return self._line

    async def _channel(self) -> Any:  # the stubs of grpc leave the types of its methods open
        import grpc
        import grpc.aio

        allowed = _allowed(secure=self._secure)
        addresses_ = await addresses.checked(
            self._host, allow_private=allowed == "any", private_only=allowed == "private"
        )
        target = addresses.grpc_target(addresses_, str(self._port))
        options: list[tuple[str, Any]] = [
            ("grpc.default_authority", self._authority),
            ("grpc.max_receive_message_length", MAX_ANSWER),
            ("grpc.max_send_message_length", -1),
            ("grpc.compression_enabled_algorithms_bitset", _UNCOMPRESSED),
            ("grpc.per_message_decompression", 0),
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),
            ("grpc.service_config_disable_resolution", 1),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if not self._secure:
            return grpc.aio.insecure_channel(target, options=options)
        # The certificate is checked for the name, although the channel connects to an address.
        options.append(("grpc.ssl_target_name_override", self._host))
        return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(), options=options)

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

        line: _Line | None = None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._opened()
                line.users += 1
                call = line.channel.unary_unary(_AUTHORIZE, None, None)
                answer: bytes = await call(message, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and self._line is line:
                self._line = None
            raise _failure(error) from None
        except (TimeoutError, grpc.aio.UsageError, OSError):
            raise unanswered() from None
        except Failure as refused:
            raise misled(refused) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise unanswered() from None  # the channel was closed; this task was not cancelled
        finally:
            if line is not None:
                line.users -= 1
                if self._line is not line and not line.users:
                    await line.channel.close(None)
        return _read(answer)

    async def close(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            await line.channel.close(None)


class _Line:
    """A channel, and the number of questions on it."""

    __slots__ = ("channel", "users")

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.users = 0


_AUTHORIZE = "/interlock.policy.v1.PolicyEngine/Authorize"
_DECISIONS: Mapping[int, str] = {1: "allow", 2: "deny", 3: "ask", 4: "passthrough"}


def _read(answer: bytes) -> Json:
    """Convert a message to its document.

    A repeated field would be read as its last value, as a repeated name in JSON would be. The message written anew is
    then shorter than the one received.
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
    """Encode JSON with sorted names."""
    try:
        return orjson.dumps(document, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        raise untellable() from None


def _allowed(*, secure: bool) -> addresses.Allowed:
    return "any" if secure else "private"


def misled(refused: Failure) -> Failure:
    """The failure of an engine whose name leads to a forbidden address."""
    return Failure("E3205", f"the policy engine is not asked: {refused.message}")


def untellable() -> Failure:
    return Failure("E3206", "the call holds values that the format of the policy engine cannot represent")


def unanswered() -> Failure:
    return Failure("E3205", "the policy engine does not answer")


def garbled() -> Failure:
    return Failure("E3205", "the policy engine's answer is not understood")


def _too_long() -> Failure:
    return Failure("E3205", "the policy engine's answer is too long")


def _flooded() -> Failure:
    return Failure("E3205", "the policy engine sent a flood of tiny pieces, so the connection was closed")


_TROUBLES: Mapping[Trouble, Callable[[], Failure]] = {
    "unreachable": unanswered,
    "late": unanswered,
    "flooded": _flooded,
    "too long": _too_long,
    "compressed": garbled,
}

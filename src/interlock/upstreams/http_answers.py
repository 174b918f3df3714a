"""Reads the answers of HTTP services: status, size, compression, charset and media type become a value or a failure."""

from __future__ import annotations

import base64
import mimetypes
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from interlock.call.artifacts import File
from interlock.call.conditional import tells_version, version_of
from interlock.call.connector import RemoteCall
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.data.schema import Json
from interlock.net.client import Response
from interlock.upstreams import conditions, wire
from interlock.upstreams.openapi_content import is_text
from interlock.upstreams.openapi_results import WholeResults
from interlock.upstreams.remote_config import Look
from interlock.upstreams.response_limits import CODINGS, Intake, decoded

# Bytes of an answer that is no success: its beginning explains the error.
EXPLAINED = wire.EXCERPT * 8
_TEXTS = frozenset({"application/xml", "application/yaml", "application/x-yaml"})
_CHARSET = expression(r';\s*charset\s*=\s*"?([^\s;"]+)', re.IGNORECASE)


class Answers:
    """Reads the answers of one service, under the limits of its `intake`. `whole` checks results whose tools hold
    only a part of the schema; `schemas` reads the schemas of the whole document for it.
    """

    def __init__(
        self, name: str, intake: Intake, clock: Clock, schemas: Callable[[RemoteCall], Awaitable[Json]]
    ) -> None:
        self.whole = WholeResults(schemas, clock)
        self._name = name
        self._intake = intake
        self._clock = clock

    async def read(
        self, response: Response, call: RemoteCall | Look, sent: Mapping[str, str], *, redirected: bool = False
    ) -> Any:
        """Read the value of an answer; a Failure if it is invalid. `sent` are the headers of its request."""
        if not 200 <= response.status < 300:
            beginning = await self._expanded(response, EXPLAINED, cut=True)
            raise self._refusal(response, wire.excerpt(beginning.decode(errors="replace"), call), sent)
        body = await self._expanded(response, self._intake.max_bytes)
        if isinstance(call, RemoteCall) and (tag := response.headers.get("etag")):
            # INVARIANT: a write is not for the version of something at another address.
            elsewhere = redirected and tells_version(call.native)
            call.provenance["data_version"] = None if elsewhere else version_of(tag)
        kind = response.headers.get("content-type", "")
        media = kind.partition(";")[0].strip().lower()
        mode = _mode(call, response.status)
        if mode == "none" or not body:
            return None
        if mode == "text" or (mode == "any" and is_text(media)):
            return self._text(body, kind)
        if mode == "file" and isinstance(call, RemoteCall):
            return _file(call, body, media)
        if mode == "json" or media == "application/json" or media.endswith("+json"):
            try:
                return await self._intake.json(body)
            except orjson.JSONDecodeError:
                raise Failure("E3401", f"what `{self._name}` answered is not the JSON that it should be") from None
        if media.startswith("text/") or media in _TEXTS:
            return {"text": self._text(body, kind)}
        if mode == "any" and isinstance(call, RemoteCall):
            return _file(call, body, media)
        return {"base64": base64.b64encode(body).decode(), "mediaType": media or "application/octet-stream"}

    def _text(self, body: bytes, kind: str) -> str:
        named = _CHARSET.search(kind)
        charset = None if named is None else named[1]
        text = decoded(body, charset)
        if text is None:
            shown = wire.excerpt(charset or "", None)[:40]
            raise Failure("E3401", f"`{self._name}` answered in the charset `{shown}`, which is not read; use UTF-8")
        return text

    async def _expanded(self, response: Response, limit: int, *, cut: bool = False) -> bytes:
        """Return the body, no more than `limit` of it. With `cut` the rest is left out, else it is a Failure."""
        body, coding = response.body, response.headers.get("content-encoding", "").strip().lower()
        if body and coding in CODINGS:
            try:
                body = await self._intake.expanded(body, coding, limit, cut=cut)
            except ValueError:
                raise wire.broken(self._name) from None
        if len(body) > limit and not cut:
            raise self._intake.too_large()
        return body[:limit]

    def _refusal(self, response: Response, message: str, sent: Mapping[str, str]) -> Failure:
        """Convert a status that is no success to a failure."""
        status = response.status
        pause_ms = wire.retry_after_ms(response.headers.get("retry-after"), self._clock.now_ms())
        details: Json = {"status": status, "sent": True, "body": message}
        ref = f"http:{status}"
        if (unmet := conditions.refusal(status, sent, self._name, details)) is not None:
            return unmet
        if status == 429 or (status == 503 and pause_ms is not None):
            words = f"`{self._name}` is asked too often"
            return Failure("E3504", words, details=details, retry_after_ms=pause_ms, native_error_ref=ref)
        if status in (408, 504):
            return Failure("E3503", f"`{self._name}` answered {status}", details=details, native_error_ref=ref)
        if status >= 500:
            return Failure("E3502", f"`{self._name}` answered {status}", details=details, native_error_ref=ref)
        words = f"`{self._name}` answered {status}" + (f": {message}" if message else "")
        return Failure("E3401", words, details=details, native_error_ref=ref)


def _file(call: RemoteCall, body: bytes, media: str) -> Json:
    """Leave an answer as a file of the call, and return its description for the caller."""
    media = media or "application/octet-stream"
    path = f"answer{mimetypes.guess_extension(media) or '.bin'}"
    call.files.append(File(path, body))
    return {"path": path, "mediaType": media, "size": len(body)}


def _mode(call: RemoteCall | Look, status: int) -> str | None:
    """Return how the operation's document says that an answer is read, if there is one: see `openapi_content`."""
    modes: Json = call.native.get("responses", {}) if isinstance(call, RemoteCall) else {}
    return modes.get(str(status)) or modes.get(f"{status // 100}XX")

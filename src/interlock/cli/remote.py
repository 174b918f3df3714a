"""Reads from a running server over its REST interface, for commands that need what only its process knows."""

from __future__ import annotations

import asyncio
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, cast
from urllib.parse import urlsplit

from interlock.core.errors import CODES, Failure
from interlock.data.schema import Json

TIMEOUT_S = 30.0
_MOST_BYTES = 16 << 20


async def fetched(url: str, path: str, token: str | None) -> Json:
    """The JSON object at a path of a server. Its refusals are raised as they are; E3502 where it does not answer.

    No proxy is asked and no redirect followed: the token is for this server alone.
    """
    if token is None:
        raise Failure("E3212", "a server needs a token: give --token, or set INTERLOCK_TOKEN")
    base = urlsplit(url)
    if base.scheme not in ("http", "https") or base.hostname is None:
        raise Failure("E3004", f"`{url}` is not the URL of a server; write http://HOST:PORT")
    try:
        status, body = await asyncio.to_thread(_get, base.scheme, base.netloc, base.path.rstrip("/") + path, token)
    except (OSError, HTTPException) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise Failure("E3502", f"{url} does not answer: {why}; see whether `interlock serve` runs there") from None
    return _read(url, status, body)


def _get(scheme: str, place: str, path: str, token: str) -> tuple[int, bytes]:
    connect = HTTPSConnection if scheme == "https" else HTTPConnection
    connection = connect(place.rpartition("@")[2], timeout=TIMEOUT_S)
    try:
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(_MOST_BYTES)
    finally:
        connection.close()


def _read(url: str, status: int, body: bytes) -> Json:
    from interlock.data.canonical import decode

    try:
        told: Any = decode(body)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise Failure("E3502", f"{url} answered {status} without a JSON object; it is not an Interlock server")
    found = cast("Json", told)
    if status == 200:
        return found
    error: Any = found.get("error")
    said = cast("Json", error) if isinstance(error, dict) else {}
    if said.get("error_code") in CODES:
        raise Failure(said["error_code"], str(said.get("message")))
    raise Failure("E3502", f"{url} answered {status}")

"""Objects in an S3-compatible store: put, get, list and remove, with signed requests (AWS Signature Version 4).

Addresses and credentials come from the variables that every tool for S3 reads: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, and AWS_ENDPOINT_URL for stores that are not Amazon's. Objects are
small enough to be sent at once; larger ones are cut into parts by the caller. A request that can be repeated is sent up
to three times.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import field
from datetime import UTC, datetime
from urllib.parse import quote, unquote, urlsplit

from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.core.record import dataclass
from interlock.net.outgoing import HttpAnswer, Outgoing, Unanswered

MOST_BYTES = 32 << 20
_LIST_BYTES = 4 << 20
_TIMEOUT_S = 300.0
_ATTEMPTS = 3
_PAUSE_S = 0.5
_BUCKET = expression(r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")
_KEYS = expression(rb"<Key>([^<]*)</Key>")
_NEXT = expression(rb"<NextContinuationToken>([^<]*)</NextContinuationToken>")


def is_address(place: str) -> bool:
    """Whether a place is an address in an object store, s3://BUCKET/PREFIX, and not a directory."""
    return place.startswith("s3://")


def has_credentials(environment: Mapping[str, str]) -> bool:
    """Whether the environment has credentials for the object store."""
    return bool(environment.get("AWS_ACCESS_KEY_ID") and environment.get("AWS_SECRET_ACCESS_KEY"))


@dataclass(frozen=True, slots=True)
class Account:
    """The address of the S3 service, and the credentials that requests are signed with."""

    endpoint: str
    region: str
    key_id: str
    secret: str = field(repr=False)
    session_token: str = field(default="", repr=False)

    @classmethod
    def of(cls, environment: Mapping[str, str], credential: str = "") -> Account:
        """The account that the environment names, with a credential KEY_ID:SECRET instead of the one there.

        Refuses (E3411) an incomplete one, and plain HTTP to elsewhere.
        """
        key_id, secret = environment.get("AWS_ACCESS_KEY_ID", ""), environment.get("AWS_SECRET_ACCESS_KEY", "")
        session = environment.get("AWS_SESSION_TOKEN", "")
        if credential:
            key_id, _, secret = credential.strip().partition(":")
            session = ""
        if not key_id or not secret:
            advice = (
                "name a stored credential in the setting archive_secret, or set AWS_ACCESS_KEY_ID and"
                " AWS_SECRET_ACCESS_KEY in the environment of this command"
            )
            if credential:
                advice = "store it as KEY_ID:SECRET with interlock secrets set"
            raise Failure("E3411", "there are no credentials for the object store", resolution=advice)
        region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
        given = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
        endpoint = (given or f"https://s3.{region}.amazonaws.com").rstrip("/")
        parts = urlsplit(endpoint)
        if parts.scheme != "https" and not (parts.scheme == "http" and _is_here(parts.hostname or "")):
            advice = "write https://HOST in AWS_ENDPOINT_URL; http only for this machine"
            raise Failure("E3411", "backups hold keys, and are not sent over plain HTTP", resolution=advice)
        return cls(endpoint, region, key_id, secret, session)


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Bucket:
    """The objects of one bucket. Belongs to one event loop."""

    def __init__(self, account: Account, name: str) -> None:
        if not _BUCKET.match(name):
            raise Failure("E3411", f"`{name}` is no name of a bucket", resolution="write s3://BUCKET/PREFIX")
        self._account = account
        self._base = f"{account.endpoint}/{name}"
        # An operator names the endpoint, which may well be in a private network.
        self._outgoing = Outgoing("any", keep_alive=True, connections=4)

    async def put(self, key: str, body: bytes) -> None:
        """Store an object, or replace it."""
        await self._ask("PUT", key, body=body)

    async def get(self, key: str) -> bytes | None:
        """The content of an object; None where there is none."""
        answer = await self._ask("GET", key, most=MOST_BYTES, missing=True)
        return None if answer.status == 404 else answer.body

    async def remove(self, key: str) -> None:
        """Remove an object, if it is there."""
        await self._ask("DELETE", key, missing=True)

    async def list(self, prefix: str) -> list[str]:
        """The names of all objects that begin with a prefix."""
        found: list[str] = []
        query = {"list-type": "2", "prefix": prefix, "encoding-type": "url"}
        while True:
            answer = await self._ask("GET", "", query=query, most=_LIST_BYTES)
            found += [unquote(key.decode()) for key in _KEYS.findall(answer.body)]
            if (more := _NEXT.search(answer.body)) is None:
                return found
            query["continuation-token"] = more[1].decode()

    async def check(self, prefix: str) -> None:
        """List one object at most: E3411 if the store does not answer, or refuses."""
        query = {"list-type": "2", "prefix": prefix, "max-keys": "1"}
        await self._ask("GET", "", query=query, most=_LIST_BYTES)

    async def close(self) -> None:
        await self._outgoing.close()

    async def _ask(
        self,
        method: str,
        key: str,
        *,
        query: Mapping[str, str] | None = None,
        body: bytes = b"",
        most: int = 65_536,
        missing: bool = False,
    ) -> HttpAnswer:
        path = "/" + quote(key, safe="/-_.~") if key else ""
        url = self._base + path + ("?" + _canonical(query) if query else "")
        words = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(_PAUSE_S * 2**attempt)
            headers = signed(self._account, method, url, body, datetime.now(UTC))
            sent = body if method == "PUT" else None
            try:
                answer = await self._outgoing.ask(
                    method, url, most=most, timeout_s=_TIMEOUT_S, headers=headers, body=sent
                )
            except Unanswered as unanswered:
                words = f"the object store gave no answer: {unanswered.why}"
                continue
            if answer.status < 300 or (missing and answer.status == 404):
                return answer
            code = re.search(rb"<Code>(\w{1,64})</Code>", answer.body)
            words = f"the object store refused {method} with {answer.status}{' ' + code[1].decode() if code else ''}"
            if answer.status < 500 and answer.status != 429:
                break
        advice = "check the bucket, its rights, AWS_REGION and AWS_ENDPOINT_URL; then run this again"
        raise Failure("E3411", words, resolution=advice)


def signed(account: Account, method: str, url: str, body: bytes, now: datetime, **more: str) -> dict[str, str]:
    """The headers that sign a request. `url` is already quoted, and `more` are further headers that are signed."""
    parts = urlsplit(url)
    day, moment = now.strftime("%Y%m%d"), now.strftime("%Y%m%dT%H%M%SZ")
    digest = hashlib.sha256(body).hexdigest()
    headers = {"x-amz-content-sha256": digest, "x-amz-date": moment, **more}
    if account.session_token:
        headers["x-amz-security-token"] = account.session_token
    default = {"http": 80, "https": 443}[parts.scheme]
    host = (parts.hostname or "") if parts.port in (None, default) else f"{parts.hostname}:{parts.port}"
    covered = dict(sorted({**headers, "host": host}.items()))
    names = ";".join(covered)
    lines = "".join(f"{name}:{value.strip()}\n" for name, value in covered.items())
    request = "\n".join((method, parts.path or "/", parts.query, lines, names, digest))
    scope = f"{day}/{account.region}/s3/aws4_request"
    text = "\n".join(("AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(request.encode()).hexdigest()))
    key = f"AWS4{account.secret}".encode()
    for part in (day, account.region, "s3", "aws4_request", text):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    credential = f"{account.key_id}/{scope}"
    headers["authorization"] = f"AWS4-HMAC-SHA256 Credential={credential},SignedHeaders={names},Signature={key.hex()}"
    return headers


def _canonical(query: Mapping[str, str]) -> str:
    return "&".join(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in sorted(query.items()))

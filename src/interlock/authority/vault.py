"""Credentials from Vault: its key-value store (version 2), and credentials it issues for one call.

A name is a path below the mount and prefix. The field `value` stored there is the credential; further fields
`value-SLOT` make a pool. Custom metadata `expires` (ISO 8601) or a set deletion time limit its life. Names that the
operator lists as *issued* are paths of an engine that makes a fresh credential each time (`database/creds/NAME`). Its
lease is renewed once, when the call starts, for as long as the call may take: that makes a long lease shorter and a
short one longer, as far as the role allows. It is revoked when the call ends, also if nobody waited for the answer.
INVARIANT: an issued credential is not lent past the term that Vault gave it last, whatever the wall clock says.

Nothing is cached: the next call gets a new value from Vault. The token comes from a file or an environment variable
each time it is used, so that an agent may renew it, and is never stored. Requests are made with `net.outgoing`: no
redirect is followed (the token would go along), proxies of the environment are not used, and an answer is limited in
bytes, values and time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
from collections.abc import Coroutine, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import quote, urlsplit

import orjson

from interlock.authority.secrets import LONGEST_REST_MS, Credential, PoolSlot, check_name, first_ready
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.core.threads import DISK, WALKS
from interlock.data.bounds import LARGE_INPUT, TooManyValues, parse
from interlock.data.schema import Json
from interlock.net.outgoing import HttpAnswer, Outgoing, Trouble, Unanswered

T = TypeVar("T")

_log = logging.getLogger("interlock.secrets")

CONNECTIONS = 4
MAX_ANSWER = 1_048_576
# Answers about Vault's own state: active, standby, and standby that serves reads.
_SERVING = frozenset({200, 429, 473})
# A credential that is issued after its call stopped waiting is awaited for this long, to be revoked.
LATE_S = 30.0
_FIELD = expression(r"value(?:-([a-z0-9_-]{1,50}))?", re.ASCII)
_UNDECRYPTED = expression(rb"decrypt|message authentication failed")
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class Vault:
    """A source of credentials over one Vault."""

    def __init__(
        self,
        address: str,
        *,
        clock: Clock,
        token_file: Path | None = None,
        token_variable: str = "VAULT_TOKEN",  # noqa: S107 - the name of a variable, not a token
        mount: str = "secret",
        prefix: str = "",
        namespace: str | None = None,
        issued: Mapping[str, str] | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        """Make a source. `issued` maps names to the paths that issue them, such as `{"db/reader":
        "database/creds/reader"}`.
        """
        parts = urlsplit(address)
        if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
            raise Failure(
                "E3108", "the vault's address must begin with https://, or the token could be read on its way"
            )
        self._address = address.rstrip("/")
        self._clock = clock
        self._token_file = token_file
        self._token_variable = token_variable
        # Servers remove credentials from their environment before tools run.
        self._held = os.environ.get(token_variable, "")
        self._mount = mount
        self._prefix = prefix.strip("/")
        self._namespace = namespace
        self._issued = dict(issued or {})
        self._timeout_s = timeout_s
        self._resting: dict[tuple[str, str], int] = {}
        allowed = "any" if parts.scheme == "https" else "private"
        self._http = Outgoing(allowed, keep_alive=True, connections=CONNECTIONS)
        self._late: set[asyncio.Task[Any]] = set()

    async def fetch(self, name: str, lifetime_s: float | None = None) -> Credential:
        """Return the credential that Vault stores, or issues for as long as it is needed."""
        check_name(name)
        path = self._issued.get(name)
        if path is None:
            return await self._in_time(name, self._read(name))
        issuing = asyncio.create_task(self._issue(name, path, lifetime_s))
        try:
            return await self._in_time(name, asyncio.shield(issuing))
        except BaseException:
            if not issuing.done():
                self._later(self._revoke_late(issuing))
            raise

    async def rest(self, name: str, slot: str, ms: int) -> None:
        """Do not use a slot for a while, in this process."""
        until_ms = self._clock.now_ms() + min(ms, LONGEST_REST_MS)
        self._resting[name, slot] = max(until_ms, self._resting.get((name, slot), 0))

    async def release(self, credential: Credential) -> None:
        """Revoke what was issued."""
        if credential.issued is not None:
            await self._in_time(credential.name, self._revoke(credential))

    async def check(self) -> None:
        """Ask Vault whether it is initialised, unsealed and active, or stands by. E3601 if not, or without a token."""
        await self._token()
        try:
            answer = await self._http.ask(
                "GET", f"{self._address}/v1/sys/health", most=MAX_ANSWER, timeout_s=self._timeout_s
            )
        except Unanswered:
            raise Failure("E3601", "the vault does not answer") from None
        if answer.status not in _SERVING:
            raise Failure("E3601", f"the vault answers {answer.status}, so it gives no credentials")

    async def close(self) -> None:
        """Revoke credentials that nobody waited for, and close the connections."""
        while self._late:
            await asyncio.wait(self._late)
        await self._http.close()

    # Requests

    async def _read(self, name: str) -> Credential:
        path = f"{self._prefix}/{name}" if self._prefix else name
        answer = await self._ask(name, "GET", f"{self._mount}/data/{path}")
        data, metadata = (_object(_object(answer, "data"), member) for member in ("data", "metadata"))
        expires_ms = _expiry(name, metadata)
        fields = {match[1] or "main": data[field] for field in data if (match := _FIELD.fullmatch(field))}
        if not fields:
            raise Failure("E3602", f"the vault's secret `{name}` has no field `value`")
        pool = [
            PoolSlot(slot, expires_ms, self._resting.get((name, slot), 0))
            for slot in sorted(fields, key=lambda slot: (slot != "main", slot))
        ]
        slot = first_ready(name, pool, self._clock.now_ms())
        if not isinstance(fields[slot], str) or not fields[slot]:
            raise Failure("E3604", f"the vault's secret `{name}` [{slot}] is not text")
        return Credential(
            fields[slot].encode(),
            name=name,
            slot=slot,
            version=str(metadata.get("version", "")),
            expires_ms=expires_ms,
            clock=self._clock,
        )

    async def _issue(self, name: str, path: str, lifetime_s: float | None) -> Credential:
        asked_at, asked_ms = self._clock.monotonic(), self._clock.now_ms()
        answer = await self._ask(name, "GET", path.strip("/"), timeout_s=LATE_S)
        data, lease = _object(answer, "data"), answer.get("lease_id")
        if not isinstance(lease, str) or not lease:
            raise Failure("E3601", f"the vault gave `{name}` without a lease, so it could not be revoked")
        term_s = _term(answer)
        if term_s > 0 and lifetime_s is not None and answer.get("renewable") is True:
            renewed, renewed_ms = self._clock.monotonic(), self._clock.now_ms()
            given_s = await self._renew(name, lease, lifetime_s)
            if given_s is not None:
                asked_at, asked_ms, term_s = renewed, renewed_ms, given_s
        credential = Credential(
            orjson.dumps(data),
            name=name,
            slot="main",
            version=lease,
            expires_ms=asked_ms + round(term_s * 1000),
            issued=lease,
            clock=self._clock,
        )
        # Counted from before the request: at Vault the term begins later.
        credential.end_at(asked_at + term_s)
        if term_s <= 0:
            await self._revoke(credential)
            raise Failure("E3603", f"the vault issued `{name}` already expired")
        return credential

    async def _renew(self, name: str, lease: str, lifetime_s: float) -> float | None:
        """Renew a lease until the end of the call, or as near to that as the role allows. None: it stays as it was."""
        body = orjson.dumps({"lease_id": lease, "increment": max(1, math.ceil(lifetime_s))})
        try:
            return _term(await self._ask(name, "PUT", "sys/leases/renew", body, timeout_s=LATE_S))
        except Failure as failure:
            _log.warning("the lease of the credential %s keeps the term that its role gives: %s", name, failure)
            return None

    async def _revoke(self, credential: Credential) -> None:
        body = orjson.dumps({"lease_id": credential.issued})
        await self._ask(credential.name, "PUT", "sys/leases/revoke", body)

    async def _ask(
        self, name: str, method: str, path: str, body: bytes | None = None, *, timeout_s: float | None = None
    ) -> Json:
        """Send a request and return Vault's document, empty if there is none; a Failure for a refusal."""
        token = await self._token()
        headers = {"X-Vault-Token": token, "X-Vault-Request": "true"}
        if self._namespace:
            headers["X-Vault-Namespace"] = self._namespace
        url = f"{self._address}/v1/{quote(path)}"
        try:
            answer = await self._http.ask(
                method, url, headers=headers, body=body, most=MAX_ANSWER, timeout_s=timeout_s or self._timeout_s
            )
        except Unanswered as silence:
            # Raised outside the handler: the cause must not travel as its context.
            failure = Failure("E3601", _TROUBLES[silence.why].format(name))
        except Failure as refused:
            failure = Failure("E3601", f"the vault is not asked for `{name}`: {refused.message}")
        else:
            return await _document(name, answer)
        raise failure

    async def _token(self) -> str:
        if self._token_file is None:
            token = os.environ.get(self._token_variable) or self._held
            where = f"the variable `{self._token_variable}`"
        else:
            where = f"the file `{self._token_file.name}`"
            try:
                token = (await DISK.run(self._token_file.read_text)).strip()
            except (OSError, UnicodeDecodeError):
                token = ""
        if not token:
            raise Failure("E3601", f"there is no token for the vault in {where}")
        if not token.isascii() or not token.isprintable():
            raise Failure("E3601", f"the token for the vault in {where} cannot stand in a header; store it again")
        return token

    # Time

    async def _in_time(self, name: str, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
        try:
            return await asyncio.wait_for(work, self._timeout_s)
        except TimeoutError:
            raise Failure("E3601", f"the vault does not answer in time for `{name}`") from None

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _revoke_late(self, issuing: asyncio.Task[Credential]) -> None:
        """Revoke a credential that is issued after its call stopped waiting."""
        try:
            await self._revoke(await issuing)
        except Failure:
            pass  # none was issued, or Vault ends it by itself when its lease runs out


_LONGEST_LEASE_S = 10 * 366 * 86_400
_TROUBLES: Mapping[Trouble, str] = {
    "unreachable": "the vault cannot be reached for `{}`",
    "late": "the vault does not answer in time for `{}`",
    "flooded": "the vault sent a flood of tiny pieces for `{}`, so the connection was closed",
    "too long": "the vault's answer for `{}` is too long",
    "compressed": "the vault's answer for `{}` is compressed, which it was asked not to do",
}


async def _document(name: str, answer: HttpAnswer) -> Json:
    if not 200 <= answer.status < 300:
        raise _meaning(name, answer)
    if not answer.body:
        return {}
    large = len(answer.body) > LARGE_INPUT
    try:
        document: Any = await WALKS.run(parse, answer.body) if large else parse(answer.body)
    except (ValueError, TooManyValues):
        document = None
    return cast("Json", document) if isinstance(document, dict) else _strange()


def _meaning(name: str, answer: HttpAnswer) -> Failure:
    """Convert a refusal to a failure."""
    status = answer.status
    if status == 404:
        return Failure("E3602", f"the vault has no credential `{name}`, or its latest version was deleted")
    if status in (401, 403):
        return Failure("E3601", f"the vault refuses its token for `{name}`; check the token and its policy")
    if status in (501, 503):
        return Failure("E3601", f"the vault is sealed or not ready, so `{name}` cannot be had; unseal it")
    if status == 500 and _UNDECRYPTED.search(answer.body):
        return Failure("E3604", f"the vault cannot decrypt `{name}`; check its storage")
    return Failure("E3601", f"the vault does not serve `{name}`: it answered {status}")


def _strange() -> Json:
    raise Failure("E3601", "the vault answers in a form that is not its own; check the address and the mount")


def _term(answer: Json) -> float:
    """Return the duration of a lease in seconds; 0 if the answer has no such number."""
    duration: object = answer.get("lease_duration")
    return min(float(duration), _LONGEST_LEASE_S) if isinstance(duration, int | float) and duration > 0 else 0.0


def _object(answer: Any, member: str) -> Json:
    value: object = cast("Json", answer).get(member) if isinstance(answer, dict) else None
    return cast("Json", value) if isinstance(value, dict) else _strange()


def _expiry(name: str, metadata: Json) -> int | None:
    """Return the sooner of the operator's expiry and Vault's own deletion time."""
    custom: object = metadata.get("custom_metadata")
    noted = cast("Json", custom).get("expires") if isinstance(custom, dict) else None
    moments = [str(moment) for moment in (noted, metadata.get("deletion_time")) if moment]
    try:
        return min((_ms(datetime.fromisoformat(moment)) for moment in moments), default=None)
    except (ValueError, OverflowError):
        raise Failure("E3603", f"the vault's `expires` of `{name}` is not a time; write it 2030-01-31") from None


def _ms(stamp: datetime) -> int:
    return round((stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp() * 1000)

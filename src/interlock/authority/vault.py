"""Credentials from Vault: its key-value store (version 2), and credentials it issues for one call.

A name is a path below the mount and prefix. Of what is stored there, the field `value` is the credential; further
fields `value-SLOT` make a pool. Custom metadata `expires` (ISO 8601) or a set deletion time bound its life. Names that
the operator lists as *issued* are paths of an engine that makes a fresh credential each time (`database/creds/NAME`);
these are revoked when their call ends, also when nobody waited for the answer any more.

Nothing is cached: a new value at Vault is what the next call gets. The token comes from a file or an environment
variable each time it is used, so that an agent may renew it, and is never stored. Proxies that the environment names
are not used. The client (`hvac`) blocks, so it
runs in a few threads of its own, each with a session that keeps its connection.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import orjson

from interlock.authority.secrets import LONGEST_REST_MS, Credential, Slot, check_name, first_ready
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.schema import Json

T = TypeVar("T")

THREADS = 4
_FIELD = re.compile(r"value(?:-([a-z0-9_-]{1,50}))?", re.ASCII)
_UNDECRYPTED = re.compile(r"decrypt|message authentication failed")
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
        """`issued` maps names to the paths that issue them, such as `{"db/reader": "database/creds/reader"}`."""
        parts = urlsplit(address)
        if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
            raise Failure(
                "E3108", "the vault's address must begin with https://, or the token could be read on its way"
            )
        self._address = address
        self._clock = clock
        self._token_file = token_file
        self._token_variable = token_variable
        # Servers take credentials out of their environment before tools run.
        self._held = os.environ.get(token_variable, "")
        self._mount = mount
        self._prefix = prefix.strip("/")
        self._namespace = namespace
        self._issued = dict(issued or {})
        self._timeout_s = timeout_s
        self._resting: dict[tuple[str, str], int] = {}
        self._local = threading.local()
        self._sessions: list[Any] = []

    async def fetch(self, name: str) -> Credential:
        """The credential that Vault holds or issues now."""
        check_name(name)
        path = self._issued.get(name)
        if path is not None:
            return await self._run(name, lambda: self._issue(name, path), late=self._revoke)
        return await self._run(name, lambda: self._read(name))

    async def rest(self, name: str, slot: str, ms: int) -> None:
        """Pass a slot over for a while, in this process."""
        until_ms = self._clock.now_ms() + min(ms, LONGEST_REST_MS)
        self._resting[name, slot] = max(until_ms, self._resting.get((name, slot), 0))

    async def release(self, credential: Credential) -> None:
        """Revoke what was issued."""
        if credential.issued is not None:
            await self._run(credential.name, lambda: self._revoke(credential))

    async def close(self) -> None:
        """Let go of threads and connections."""
        if "_threads" in self.__dict__:
            await asyncio.to_thread(self._threads.shutdown)
        for session in self._sessions:
            session.close()

    # In a thread

    def _read(self, name: str) -> Credential:
        path = f"{self._prefix}/{name}" if self._prefix else name
        answer: Any = self._client().secrets.kv.v2.read_secret_version(
            path, mount_point=self._mount, raise_on_deleted_version=True
        )
        data, metadata = (_object(_object(answer, "data"), member) for member in ("data", "metadata"))
        expires_ms = _expiry(name, metadata)
        fields = {match[1] or "main": data[field] for field in data if (match := _FIELD.fullmatch(field))}
        if not fields:
            raise Failure("E3602", f"the vault's secret `{name}` has no field `value`")
        pool = [
            Slot(slot, expires_ms, self._resting.get((name, slot), 0))
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

    def _issue(self, name: str, path: str) -> Credential:
        answer: Any = self._client().read(path)
        if answer is None:
            raise Failure("E3602", f"the vault issues no credential `{name}`")
        data, lease = _object(answer, "data"), answer.get("lease_id")
        if not lease:
            raise Failure("E3601", f"the vault gave `{name}` without a lease, so it could not be revoked")
        lifetime_s = answer.get("lease_duration") or 0
        credential = Credential(
            orjson.dumps(data),
            name=name,
            slot="main",
            version=str(lease),
            expires_ms=self._clock.now_ms() + round(lifetime_s * 1000),
            issued=str(lease),
            clock=self._clock,
        )
        if lifetime_s <= 0:
            self._revoke(credential)
            raise Failure("E3603", f"the vault issued `{name}` already expired")
        return credential

    def _revoke(self, credential: Credential) -> None:
        self._client().sys.revoke_lease(credential.issued)

    def _client(self) -> Any:
        """This thread's client, with the token that is in force now."""
        token = self._token()
        client = getattr(self._local, "client", None)
        if client is None:
            import hvac

            # INVARIANT: no redirect is followed; the token would go along to wherever it leads.
            client = self._local.client = hvac.Client(
                url=self._address,
                token=token,
                timeout=self._timeout_s,  # pyright: ignore[reportArgumentType] - passed on to one that takes fractions
                namespace=self._namespace,
                allow_redirects=False,
            )
            # INVARIANT: nothing but the settings leads the token anywhere: no proxy and no .netrc of the environment.
            client.session.trust_env = False
            self._sessions.append(client.session)
        client.token = token
        return client

    def _token(self) -> str:
        if self._token_file is None:
            token = os.environ.get(self._token_variable) or self._held
            where = f"the variable `{self._token_variable}`"
        else:
            where = f"the file `{self._token_file.name}`"
            try:
                token = self._token_file.read_text().strip()
            except (OSError, UnicodeDecodeError):
                token = ""
        if not token:
            raise Failure("E3601", f"there is no token for the vault in {where}")
        return token

    # Between the loop and the threads

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, thread_name_prefix="interlock-vault")

    async def _run(self, name: str, work: Callable[[], T], late: Callable[[T], None] | None = None) -> T:
        """Run in a thread, for so long. `late` deals with an answer that comes when nobody waits for it any more."""
        future = self._threads.submit(_answered, name, work)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._timeout_s)
        except TimeoutError:
            failure = Failure("E3601", f"the vault does not answer in time for `{name}`")
        except asyncio.CancelledError:
            _settle_late(name, future, late)
            raise
        _settle_late(name, future, late)
        raise failure


def _settle_late(name: str, future: Future[T], late: Callable[[T], None] | None) -> None:
    if late is None:
        return

    def settle(done: Future[T]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        try:
            _answered(name, lambda: late(done.result()))
        except Failure:
            pass  # Vault ends it by itself when its lease runs out

    future.add_done_callback(settle)


def _answered(name: str, work: Callable[[], T]) -> T:
    """What Vault answered, or what its refusal means."""
    import requests
    from hvac.exceptions import VaultError

    try:
        return work()
    except requests.RequestException as error:
        failure = Failure("E3601", f"the vault cannot be reached for `{name}` ({type(error).__name__})")
    except VaultError as error:
        failure = _meaning(name, error)
    # Raised outside the handler: the cause holds the request with its token, and must not travel as its context.
    raise failure


def _meaning(name: str, error: Exception) -> Failure:
    from hvac import exceptions

    if isinstance(error, exceptions.InvalidPath):
        return Failure("E3602", f"the vault has no credential `{name}`, or its latest version was deleted")
    if isinstance(error, exceptions.Forbidden | exceptions.Unauthorized):
        return Failure("E3601", f"the vault refuses its token for `{name}`; check the token and its policy")
    if isinstance(error, exceptions.VaultDown | exceptions.VaultNotInitialized):
        return Failure("E3601", f"the vault is sealed or not ready, so `{name}` cannot be had; unseal it")
    if isinstance(error, exceptions.InternalServerError) and _UNDECRYPTED.search(str(error.args[0])):
        return Failure("E3604", f"the vault cannot decrypt `{name}`; check its storage")
    return Failure("E3601", f"the vault does not serve `{name}` ({type(error).__name__})")


def _object(answer: Any, member: str) -> Json:
    # Anything but JSON of the known form comes as a response object, or as something else entirely.
    found: object = cast("Json", answer).get(member) if isinstance(answer, dict) else None
    if not isinstance(found, dict):
        raise Failure("E3601", "the vault answers in a form that is not its own; check the address and the mount")
    return cast("Json", found)


def _expiry(name: str, metadata: Json) -> int | None:
    """The sooner of what the operator noted and what Vault itself has planned."""
    noted = cast("Json", metadata.get("custom_metadata") or {}).get("expires")
    moments = [str(moment) for moment in (noted, metadata.get("deletion_time")) if moment]
    try:
        stamps = [datetime.fromisoformat(moment) for moment in moments]
    except ValueError:
        raise Failure("E3603", f"the vault's `expires` of `{name}` is not a time; write it 2030-01-31") from None
    return min((_ms(stamp) for stamp in stamps), default=None)


def _ms(stamp: datetime) -> int:
    return round((stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp() * 1000)

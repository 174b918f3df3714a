"""The services outside of this machine that calls or the server depend on, asked whether they work.

    policy    a remote policy engine, asked a question about no call: without it no call is decided
    vault     where credentials come from: without it, tools that need one are refused
    issuers   key sets of other issuers: without one, its tokens are refused
    archive   the object store of backups and of old records
    traces    the collector of traces

They are asked at the same time, for `ASK_S` at most, and seldom: anybody may ask for readiness. The answer says
healthy, degraded or down and nothing else, because it is for everybody. Reasons are in the log, once for each change.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Literal

from interlock.core.errors import Failure

if TYPE_CHECKING:
    from interlock.api.parts import Parts

_log = logging.getLogger("interlock.readiness")

ASK_S = 2.0
# How long an answer counts. Credentials and keys are cached or fetched by each call, so it is no older than this.
ASKED_FOR_S = 5.0

_ANSWER_BYTES = 65_536

Condition = Literal["healthy", "degraded", "down"]


class Dependencies:
    """The services that the settings of one server name."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._asked: tuple[float, asyncio.Future[dict[str, Condition]]] | None = None
        self._known: dict[str, str] = {}
        settings = parts.settings
        self._archives = _addresses(str(settings.backup_to or ""), settings.archive_to)
        checks: dict[str, tuple[bool, Callable[[], Awaitable[Condition]]]] = {
            "policy": (parts.engine is not parts.policy, self._policy),
            "vault": (settings.secrets != "embedded", self._vault),
            "issuers": (bool(settings.trusted_issuers), self._issuers),
            "archive": (bool(self._archives), self._archive),
            "traces": (parts.telemetry.export_fails is not None, self._traces),
        }
        self._checks: Mapping[str, Callable[[], Awaitable[Condition]]] = {
            name: check for name, (named, check) in checks.items() if named
        }

    def conditions(self) -> asyncio.Future[dict[str, Condition]]:
        """Ask all of them, unless that was done a moment ago."""
        now = self._parts.clock.monotonic()
        if self._asked is None or (self._asked[1].done() and now >= self._asked[0]):
            self._asked = now + ASKED_FOR_S, asyncio.ensure_future(self._ask_all())
        return self._asked[1]

    async def _ask_all(self) -> dict[str, Condition]:
        conditions = await asyncio.gather(*(self._ask(name, check) for name, check in self._checks.items()))
        return dict(zip(self._checks, conditions, strict=True))

    async def _ask(self, name: str, check: Callable[[], Awaitable[Condition]]) -> Condition:
        why = "does not work fully"
        try:
            condition = await asyncio.wait_for(check(), ASK_S)
        except Failure as failure:
            condition, why = "down", failure.message
        except TimeoutError:
            condition, why = self._unanswered(name), "does not answer in time"
        except OSError:
            condition, why = "down", "cannot be reached"
        if self._known.get(name, "healthy") != condition:
            if condition == "healthy":
                _log.warning("readiness: %s is healthy again", name)
            else:
                _log.warning("readiness: %s is %s: %s", name, condition, why)
        self._known[name] = condition
        return condition

    def _unanswered(self, name: str) -> Condition:
        """The condition of a service that has not answered for `ASK_S`.

        A policy engine that may take longer than this is asked by calls for as long as the settings say.
        """
        return "degraded" if name == "policy" and self._parts.settings.policy_timeout_s > ASK_S else "down"

    async def _policy(self) -> Condition:
        from interlock.authority.remote import Remote

        engine = self._parts.engine
        if not isinstance(engine, Remote):  # an engine of the program that embeds us answers for itself
            return "healthy"
        await engine.check()
        return "healthy"

    async def _vault(self) -> Condition:
        from interlock.authority.vault import Vault

        source = self._parts.authority.lent_from
        if isinstance(source, Vault):
            await source.check()
        return "healthy"

    async def _issuers(self) -> Condition:
        trusted = self._parts.tokens.trusted

        async def condition(iss: str) -> Condition:
            try:
                return "healthy" if await trusted.current(iss) else "degraded"
            except Failure:
                return "down"

        found = set(await asyncio.gather(*map(condition, trusted.names)))
        if found == {"down"}:
            return "down"
        return "healthy" if found == {"healthy"} else "degraded"

    async def _archive(self) -> Condition:
        from interlock.audit.archive import archive_at

        credential = await self._parts.background.archive_credential()
        for place in self._archives:
            async with archive_at(place, credential) as archive:
                await archive.check()
        return "healthy"

    async def _traces(self) -> Condition:
        """Any answer will do: what a collector says to anything but spans differs from one to the other."""
        from interlock.net.outgoing import Outgoing, Unanswered

        fails = self._parts.telemetry.export_fails
        client = Outgoing("any")
        try:
            await client.ask("GET", self._parts.settings.otlp_endpoint, most=_ANSWER_BYTES, timeout_s=ASK_S)
        except Unanswered:
            return "down"
        finally:
            await client.close()
        return "degraded" if fails is not None and fails() else "healthy"


def _addresses(*places: str) -> list[str]:
    """The places that are addresses in an object store."""
    if not any(places):
        return []
    from interlock.net.s3 import is_address  # loads the HTTP client

    return [place for place in places if is_address(place)]

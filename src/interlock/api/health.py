"""Readiness: whether calls can be served, and which part prevents it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from interlock._version import __version__
from interlock.approvals.notify import undelivered
from interlock.core.errors import Failure
from interlock.core.threads import CHECKS
from interlock.store import readiness

if TYPE_CHECKING:
    from interlock.api.dependencies import Condition, Dependencies
    from interlock.api.parts import Parts
    from interlock.call.context import Caller
    from interlock.data.schema import Json

READY_WITHIN_S = 2.0
READY_FOR_S = 1.0
WRITE_EVERY_S = 3.0
_ONE_UPSTREAM = "upstreams."


class Health:
    """The readiness of the server. Anybody may ask, so the answer has no reasons and is cached."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._ready: tuple[float, asyncio.Future[tuple[Condition, dict[str, Condition]]]] | None = None
        self._services: Dependencies | None = None
        self._write_due = float("-inf")
        self._wrote = False
        # Whether the server is about to end: it is not ready any more, though it still answers.
        self.ending = False

    async def ready(self) -> tuple[Condition, dict[str, Condition]]:
        """The readiness of the server and of each part that it depends on. Cached, because anybody may ask."""
        if self.ending:
            return "down", {"server": "down"}
        now = self._parts.clock.monotonic()
        if self._ready is None or now >= self._ready[0]:
            self._ready = now + READY_FOR_S, asyncio.ensure_future(self._look_around())
        return await asyncio.shield(self._ready[1])

    def alive(self) -> tuple[int, Json]:
        """The HTTP status and the document that say that the process is there."""
        return 200, {"status": "healthy", "version": __version__}

    def check_watcher(self, by: Caller) -> None:
        """Refuse (E3206) a caller who may not see the metrics and the names of upstreams."""
        if not by.governs("metrics:read"):
            raise Failure("E3206", "reading metrics needs the scope `metrics:read`, in the tenant `local`")

    async def readiness(self, *, names: bool = False) -> tuple[int, Json]:
        """The HTTP status and the document that say whether calls can be served.

        `names`: with each upstream by its name, which is not for everybody; otherwise they are told together.
        """
        status, parts = await self.ready()
        if not names:
            parts = {name: condition for name, condition in parts.items() if not name.startswith(_ONE_UPSTREAM)}
        return 503 if status == "down" else 200, {"status": status, "dependencies": parts}

    async def _look_around(self) -> tuple[Condition, dict[str, Condition]]:
        outside = self._outside()
        parts: dict[str, Condition] = {
            "store": await _holds(self._store_answers()),
            "signer": await _holds(self._signer_signs()),
        }
        if self._parts.engine is self._parts.policy:
            parts["policy"] = self._policy()
        others: dict[str, Condition] = {} if outside is None else await asyncio.shield(outside)
        if "policy" in others:
            parts["policy"] = others["policy"]
        if parts["store"] == "healthy" and self._parts.journal.crowded:
            parts["store"] = "degraded"
        if "down" in parts.values():
            return "down", parts
        # Without these, calls are still served.
        parts |= {"sinks": await self._sinks(), **await self._upstreams(), "background": self._background(), **others}
        if self._parts.settings.backup_to is not None:
            parts["backups"] = await self._backups()
        if not self._parts.home.near:
            parts["nodes"] = await self._nodes()
        if (redis := self._parts.messages.condition) is not None:
            parts["redis"] = redis
        if self._parts.makes_calls:
            parts |= self._parts.gateway.runner.health()
        return "healthy" if set(parts.values()) == {"healthy"} else "degraded", parts

    def _outside(self) -> asyncio.Future[dict[str, Condition]] | None:
        """The conditions of services that the settings name; None, and nothing is loaded, if they name none."""
        if self._services is None:
            parts, settings = self._parts, self._parts.settings
            places = settings.backup_to, settings.archive_to, settings.otlp_endpoint, settings.trusted_issuers
            if parts.engine is parts.policy and settings.secrets == "embedded" and not any(places):
                return None
            from interlock.api.dependencies import Dependencies

            self._services = Dependencies(parts)
        return self._services.conditions()

    async def _store_answers(self) -> None:
        """Check that the store answers. Every `WRITE_EVERY_S` it is written, because only a write finds a full disk."""
        now = self._parts.clock.monotonic()
        if now >= self._write_due:
            self._write_due, self._wrote = now + WRITE_EVERY_S, False
            await self._parts.journal.commit(readiness.write)
            self._wrote = True
        elif self._wrote:
            await self._parts.journal.commit(readiness.ask)
        else:
            raise Failure("E3803", "the store could not be written a moment ago")
        # Refuses, as calls do, where the database was removed or replaced: writes go to the open file all the same.
        await self._parts.journal.changes.caught_up()

    async def _signer_signs(self) -> None:
        check = await self._parts.tokens.signer_check()
        await CHECKS.run(self._parts.issuer_keys.all)
        await CHECKS.run(check)

    def _policy(self) -> Condition:
        try:
            _ = self._parts.policy.rules
        except Failure:
            return "down"
        return "healthy"

    async def _sinks(self) -> Condition:
        return "degraded" if await undelivered(self._parts.journal, limit=1) else "healthy"

    def _background(self) -> Condition:
        return "degraded" if self._parts.supervisor.failing else "healthy"

    async def _nodes(self) -> Condition:
        """Whether the files that all machines of the store must share are the same here and there."""
        from interlock.store.node_files import differences

        return "degraded" if await CHECKS.run(differences, self._parts.home) else "healthy"

    async def _backups(self) -> Condition:
        from interlock.audit.backups import failing

        now_ms, every_ms = self._parts.clock.now_ms(), self._parts.settings.backup_every_ms
        fail = await self._parts.journal.read(lambda reader: failing(reader, now_ms, every_ms))
        return "degraded" if fail else "healthy"

    async def _upstreams(self) -> dict[str, Condition]:
        """The upstreams together, and each by its name."""
        every: dict[str, Condition] = {
            f"{_ONE_UPSTREAM}{name}": "healthy" if state == "available" else "down"
            for name, state in (await self._parts.journal.read(readiness.upstream_states)).items()
        }
        if not every:
            return {"upstreams": "healthy"}
        found = set(every.values())
        together: Condition = "down" if found == {"down"} else "degraded" if "down" in found else "healthy"
        return {"upstreams": together, **every}


async def _holds(attempt: Awaitable[None]) -> Condition:
    try:
        await asyncio.wait_for(attempt, READY_WITHIN_S)
    except (Failure, TimeoutError, OSError):
        return "down"
    return "healthy"

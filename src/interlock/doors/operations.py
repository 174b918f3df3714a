"""The endpoints for operators: `/health`, `/ready` and `/metrics`.

Monitoring asks for these first. They do not wait until anything is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import orjson

from interlock.api.service import Service
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.doors.door import Door, Key
from interlock.doors.gate import without_port
from interlock.doors.listening import LOOPBACK, Listening
from interlock.http.asgi import Receive, Scope, Send, answer, header, refuse
from interlock.http.route import Application, Route


def open_door(service: Service, listening: Listening) -> Door:
    return OperationsDoor(service, listening)


class OperationsDoor(Door):
    """Health, readiness and metrics of one service."""

    def __init__(self, service: Service, listening: Listening) -> None:
        self._service = service
        self._listening = listening

    def routes(self) -> Mapping[Key, Route]:
        return {
            ("GET", "/metrics"): Application(self._metrics),
            ("GET", "/health"): Application(self._alive),
            ("GET", "/ready"): Application(self._ready),
        }

    async def _alive(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._tell_health(send, self._service.health.alive())

    async def _ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """For everybody. The names of upstreams are for those who may see the metrics."""
        try:
            names = self._is_near(scope) or header(scope, b"authorization") is not None
            if names:
                await self._check_watcher(scope)
        except Failure:
            names = False
        await self._tell_health(send, await self._service.health.readiness(names=names))

    @staticmethod
    async def _tell_health(send: Send, health: tuple[int, Json]) -> None:
        status, document = health
        await answer(send, status, orjson.dumps(document), [(b"x-trace-id", os.urandom(16).hex().encode())])

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve metrics for Prometheus.

        Requests over loopback to a loopback name need no token; all others need `metrics:read`.
        """
        try:
            await self._check_watcher(scope)
        except Failure as failure:
            await refuse(send, failure)
            return
        kind = b"text/plain; version=0.0.4; charset=utf-8"
        await answer(send, 200, await self._service.app.telemetry.metrics.render(), kind=kind)

    async def _check_watcher(self, scope: Scope) -> None:
        """Raise a Failure for those who may not see the metrics."""
        if not self._is_near(scope):
            self._service.health.check_watcher(await self._service.authenticate(header(scope, b"authorization")))

    def _is_near(self, scope: Scope) -> bool:
        """Whether a request came over loopback and by such a name. Another name may stand for a proxy."""
        host = without_port((header(scope, b"host") or "").lower().encode()).decode()
        return self._listening.loopback and host in LOOPBACK

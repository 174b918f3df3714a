"""The REST endpoint: the route `POST /v1/tools/invoke`, and the rest of the API with its OpenAPI document.

`invoke_route(service)` is the one route that most requests want, and costs little more than the call it makes.
`rest_app` is everything, that route included. Both are ASGI applications that can be served alone, and both write
answers with answers.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from interlock.api.service import Service
from interlock.doors.door import EVERYTHING_ELSE, Door, Key
from interlock.doors.listening import Listening
from interlock.doors.rest.invoke import PATH as INVOKE_PATH
from interlock.doors.rest.invoke import Invoke, invoke_route
from interlock.http.asgi import App, Scope
from interlock.http.route import Application, Route

__all__ = ["INVOKE_PATH", "Invoke", "invoke_route", "open_door", "rest_app"]


def rest_app(service: Service) -> App:
    """The wide API of one service. FastAPI is loaded here and not before."""
    from interlock.doors.rest.api import make_app

    return make_app(service)


def open_door(service: Service, listening: Listening) -> Door:
    return _RestDoor(service)


class _RestDoor(Door):
    loaded_later = (EVERYTHING_ELSE,)

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> Mapping[Key, Route]:
        return {("POST", INVOKE_PATH): invoke_route(self._service)}

    async def load(self) -> Route:
        return Application(await asyncio.to_thread(rest_app, self._service))

    def is_endless(self, head: Scope) -> bool:
        return head["method"] == "GET" and head["path"].endswith("/events")

"""The REST door: the route `POST /v1/tools/invoke`, and the wide API with its OpenAPI document behind it.

`invoke_route(service)` is the one route that most requests want, and costs little more than the call it makes.
`rest_app` is everything, that route included. Both are ASGI applications that can be served alone, and both write
answers with answers.py.
"""

from __future__ import annotations

from interlock.api.service import Service
from interlock.doors.rest.invoke import PATH as INVOKE_PATH
from interlock.doors.rest.invoke import Invoke, invoke_route
from interlock.http.asgi import App

__all__ = ["INVOKE_PATH", "Invoke", "invoke_route", "rest_app"]


def rest_app(service: Service) -> App:
    """The wide API of one service. FastAPI is loaded here and not before."""
    from interlock.doors.rest.api import make_app

    return make_app(service)

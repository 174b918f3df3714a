"""HTTP upstreams, and calls of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.upstreams.http import HttpUpstream
from interlock.upstreams.http_requests import HttpConfig
from tests.support.upstream_servers import Pauses, remote_call

READ: Json = {"protocol": "http", "method": "GET", "path": "/things/{id}"}
WRITE: Json = {"protocol": "http", "method": "POST", "path": "/things"}


@asynccontextmanager
async def upstream(*urls: str, pauses: Pauses | None = None, **said: Any) -> AsyncGenerator[HttpUpstream]:
    more = {name: said.pop(name) for name in ("resolve", "services") if name in said}
    config = HttpConfig.model_validate({"urls": list(urls), "allow_private": True, **said})
    one = HttpUpstream("shop", config, clock=Clock(), sleep=pauses or Pauses(), **more)
    try:
        yield one
    finally:
        await one.close()


async def failure_of(one: HttpUpstream, native: Json = READ, **facts: Any) -> Failure:
    facts.setdefault("arguments", {"id": "7"})
    with pytest.raises(Failure) as caught:
        await one.call(remote_call(native, **facts))
    return caught.value


ONE_THING: Json = {"protocol": "http", "method": "GET", "path": "/thing"}

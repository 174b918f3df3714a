"""gRPC upstreams, and their tools."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from interlock.call.connector import Definition
from interlock.core.clock import Clock
from interlock.upstreams.grpc import GrpcUpstream
from interlock.upstreams.grpc_config import GrpcConfig
from tests.support.upstream_servers import Pauses


@asynccontextmanager
async def upstream(*ports: int, **said: Any) -> AsyncGenerator[GrpcUpstream]:
    resolve = said.pop("resolve", None)
    targets = said.pop("targets", [f"127.0.0.1:{port}" for port in ports])
    services = said.pop("services", None)
    config = GrpcConfig.model_validate({"targets": targets, "allow_private": True, "plaintext": True, **said})
    more = {} if resolve is None else {"resolve": resolve}
    one = GrpcUpstream("shop", config, clock=Clock(), sleep=Pauses(), services=services, **more)
    try:
        yield one
    finally:
        await one.close()


async def found_in(one: GrpcUpstream) -> dict[str, Definition]:
    return {tool.name.rpartition(".")[2]: tool for tool in (await one.discover()).tools}

"""The tasks extension for the client of the official SDK, which takes extensions and brings none for tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import mcp_types as types
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim
from mcp_types import Request, RequestParams, Result
from pydantic import Field

PATIENCE_S = 60
VERSIONS = frozenset({"2026-07-28"})


class _Created(Result):
    result_type: Literal["task"] = Field(alias="resultType")
    task_id: str = Field(alias="taskId")


class _State(Result):
    status: str
    result: dict[str, Any] | None = None


class _Params(RequestParams):
    task_id: str = Field(serialization_alias="taskId")


class _Get(Request[_Params, Literal["tasks/get"]]):
    method: Literal["tasks/get"] = "tasks/get"
    params: _Params


class TasksExtension(ClientExtension):
    """Follows each task to its end. `seen` are the states that its server answered with, of all tasks."""

    identifier = "io.modelcontextprotocol/tasks"

    def __init__(self) -> None:
        self.seen: list[str] = []

    def claims(self) -> Sequence[ResultClaim[Any]]:
        return (ResultClaim(result_type="task", model=_Created, resolve=self._follow, protocol_versions=VERSIONS),)

    async def _follow(self, created: _Created, ctx: ClaimContext) -> types.CallToolResult:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                state = await ctx.session.send_request(_Get(params=_Params(task_id=created.task_id)), _State)
                self.seen.append(state.status)
                if state.result is not None:
                    return types.CallToolResult.model_validate(state.result)
                await asyncio.sleep(0.2)

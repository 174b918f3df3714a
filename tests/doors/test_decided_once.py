"""Many reads of one caller are decided once: those after the first find the decision, and take the fast path.

What a server knows is checked again every 50 ms: its policy, and what other processes have changed. All reads that come
in at that moment must find their decision as well.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import orjson
import pytest

from interlock import Context, Interlock, tool
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.call.capability import ToolGrant
from interlock.doors.server import Listening, serving
from interlock.testing import FakeClock
from tests import sample
from tests.support.calls import admit
from tests.support.endpoints import BOTH, META, MODERN
from tests.support.identities import did_of

TURNS, AT_ONCE = 6, 16
# A step of the clock after which the files of the policy and the store have to be looked at.
LATER_S = 0.06


@tool(version="1.0.0", mutation_class="read_only", namespace="often")
async def looks_up(x: sample.Number) -> int:
    """An async function, declared without flags."""
    return x


@tool(version="1.0.0", mutation_class="read_only", namespace="often")
def looks_up_here(x: sample.Number) -> int:
    """A plain function."""
    return x


@tool(version="1.0.0", mutation_class="read_only", namespace="often")
async def looks_up_with_context(ctx: Context, x: sample.Number) -> int:
    """A function that takes the context of its call."""
    return x


READS = {"looks_up": looks_up, "looks_up_here": looks_up_here, "looks_up_with_context": looks_up_with_context}


class _Counting:
    """Counts the calls of some functions of ours on this thread."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self.calls = Counter[str]()

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_qualname in self._names:
            self.calls[frame.f_code.co_qualname] += 1

    def __enter__(self) -> Counter[str]:
        sys.setprofile(self._note)
        return self.calls

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


@pytest.mark.parametrize("read", READS)
async def test_reads_of_one_caller_that_come_at_once_are_decided_once(tmp_path: Path, read: str) -> None:
    time = FakeClock()
    async with Interlock.open(tmp_path, housekeeping=False, clock=time.clock) as app:
        await admit(app, READS[read])
        app.issuer_keys.init("EdDSA")
        await app.identities.register(Identity(did=did_of("ann"), name="ann", kind="human"), by="test")
        token = await app.tokens.issue(subject=did_of("ann"), tools=[ToolGrant("*")], by=app.caller)
        name = f"often-{read}"
        headers = {
            "authorization": f"Bearer {token}", "accept": BOTH, "mcp-protocol-version": MODERN,
            "mcp-method": "tools/call", "mcp-name": name,
        }  # fmt: skip

        async with (
            serving(Service(app), Listening(port=0, ports={})) as server,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", headers=headers, timeout=60) as client,
        ):

            async def call(number: int) -> None:
                params = {"_meta": META, "name": name, "arguments": {"x": number}}
                body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
                answer = orjson.loads((await client.post("/mcp", json=body)).content)
                assert answer["result"]["structuredContent"] == {"result": number}, answer

            await asyncio.gather(*(call(number) for number in range(AT_ONCE)))  # the first one is decided
            evaluations = app.policy.evaluations
            with _Counting("FastPath.take", "Authorizer.authorize") as calls:
                for turn in range(TURNS):
                    time.advance(LATER_S)
                    await asyncio.gather(*(call(AT_ONCE * turn + number) for number in range(AT_ONCE)))
            assert calls == {"FastPath.take": TURNS * AT_ONCE}, "a read left the fast path"
            assert (evaluations, app.policy.evaluations) == (1, 1)

"""A server that has lost its keys says that it cannot check tokens (503). It does not call a good token a bad one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from interlock import Interlock
from interlock.api.service import Service
from interlock.authority.identities import Identity
from interlock.doors.grpc.v1 import gateway_pb2 as wire
from interlock.doors.server import Listening, serving
from tests.support.endpoints import dialled
from tests.support.identities import did_of

ASKED: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}


def _key_files(home: Path) -> list[Path]:
    return sorted((home / "keys" / "issuer").glob("*.pem"))


def _removed(home: Path) -> None:
    for path in _key_files(home):
        path.unlink()


def _moved(home: Path) -> None:
    shutil.move(home, home.with_name("elsewhere"))


def _directory_gone(home: Path) -> None:
    shutil.rmtree(home / "keys")


KEYS_LOST, STORE_LOST = ("E3001", "keep the token"), ("E3801", "put the database back")
LOSSES = [(_removed, KEYS_LOST), (_moved, STORE_LOST), (_directory_gone, KEYS_LOST)]


@pytest.mark.parametrize(("lose", "words"), LOSSES)
async def test_a_server_that_lost_its_keys_answers_503_at_every_door(
    tmp_path: Path, lose: Callable[[Path], None], words: tuple[str, str]
) -> None:
    home = tmp_path / "home"
    async with Interlock.open(home, housekeeping=False) as app:
        app.issuer_keys.init("EdDSA")
        await app.identities.register(Identity(did=did_of("ann"), name="ann", kind="human"), by="test")
        token = await app.tokens.issue(subject=did_of("ann"), by=app.caller)
        async with serving(Service(app), Listening(port=0, ports={"grpc": 0})) as server:
            lose(home)
            bearer = {"authorization": f"Bearer {token}", "accept": "application/json, text/event-stream"}
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{server.port}", headers=bearer, timeout=60
            ) as client:
                answers = [
                    await client.get("/v1/tools"),
                    await client.post("/v1/tools/invoke", json={"tool_id": "demo.add", "parameters": {}}),
                    await client.post("/rpc", json={**ASKED, "method": "tools.list"}),
                    await client.post("/mcp", json=ASKED),
                ]
            if lose is _moved and not app.home.near:
                words = KEYS_LOST  # the store is elsewhere, and is still there
            for answer in answers:
                # An error of JSON-RPC is in the body, whatever it is.
                assert answer.status_code == (200 if answer.url.path == "/rpc" else 503), (answer.url, answer.text)
                assert all(word in answer.text for word in words), answer.text
            async with dialled(server.ports["grpc"]) as stub:
                request = wire.InvokeRequest(tool_id="demo.add", arguments_json=b"{}")
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Invoke(request, metadata=(("authorization", f"Bearer {token}"),))
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE

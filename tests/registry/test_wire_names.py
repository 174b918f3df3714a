"""Names on the wire: no two tools are shown to clients under one name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from interlock import Interlock, tool
from interlock.contract.wire_names import LONGEST, mcp_name, provider_name, shortened
from interlock.core.errors import Failure
from tests.support.upstream_servers import HttpServer, json_answer

LONG = "a_tool_with_an_id_that_is_so_long_that_no_client_takes_it_whole_"


def _colliding(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Two ids that share a shortened name, for which the digests are cut to what can be tried here."""
    monkeypatch.setattr("interlock.contract.wire_names._PROVIDER_DIGEST", 2)
    monkeypatch.setattr("interlock.contract.wire_names._MCP_DIGEST", 2)
    seen: dict[str, str] = {}
    for number in range(10_000):
        name = f"{LONG}{number}"
        other = seen.setdefault(provider_name(f"demo.{name}"), name)
        if other != name:
            return other, name
    raise AssertionError("no two of them collide")


def _tool(name: str) -> Any:
    async def work() -> int:
        """Give a number that is always the same."""
        return 1

    return tool(name=name, namespace="demo", version="1.0.0", mutation_class="read_only")(work)


async def test_a_tool_that_would_share_a_shortened_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = _colliding(monkeypatch)
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        await app.add(_tool(first))
        with pytest.raises(Failure) as caught:
            await app.add(_tool(second))
        assert caught.value.code == "E3103"
        assert first in caught.value.message
        assert "shorter id" in caught.value.message
        assert len(await app.catalog.addresses()) == 1


async def test_of_two_tools_of_an_upstream_that_would_share_a_name_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = _colliding(monkeypatch)
    async with HttpServer.open() as server, Interlock.open(tmp_path, housekeeping=False) as app:
        server.otherwise = lambda _: json_answer({})
        said = {"description": "Gives the one thing there is.", "path": "/thing", "input_schema": {"type": "object"}}
        tools = [{"name": name, "output_schema": {"type": "object"}, **said} for name in names]
        config = {"urls": [server.url], "tools": tools, "allow_private": True}
        overlay = {"defaults": {"mutation_class": "read_only"}}
        report = await app.upstreams.add("demo", "http", config, by=app.caller, overlay=overlay)
        assert sorted(one.state for one in report.tools) == ["admitted", "refused"]
        (refused,) = (one for one in report.tools if one.state == "refused")
        assert "the same shortened name" in refused.reason


@pytest.mark.parametrize("address", ["demo.add", "a-b.c_d", "demo." + "x" * 59])
def test_names_that_fit_hold_no_digest(address: str) -> None:
    assert not {mcp_name(address)} & shortened(address)
    assert len(mcp_name(address)) <= LONGEST
    assert len(provider_name("demo." + "x" * 200)) <= LONGEST

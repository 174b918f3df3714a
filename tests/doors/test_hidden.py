"""Tools that are not a caller's to use: no door tells their names, what they take or which versions they have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest

from interlock import Field, Interlock, tool
from interlock.call.capability import ToolGrant
from tests import sample
from tests.support.calls import admit
from tests.support.identities import did_of
from tests.support.wires import WIRES, Wires, wired


@tool(version="1.3.0", mutation_class="read_only", namespace="vault")
async def ledger(password_hint: Annotated[str, Field(description="colour of the dog", examples=["x"])]) -> str:
    """Read what is kept in the vault."""
    return password_hint


@tool(version="1.0.0", mutation_class="read_only", namespace="demo", scopes=["vault:open"])
async def ledgers(colour_of_dog: Annotated[str, Field(description="colour of the dog", examples=["x"])]) -> str:
    """List what is kept in the vault."""
    return colour_of_dog


@tool(version="1.0.0", mutation_class="read_only", namespace="other")
async def echo(value: sample.Text) -> str:
    """Another tool of a name that there is twice."""
    return value


TELLING = ("password_hint", "colour_of_dog", "1.3.0", "vault.ledger", "vault-ledger", "demo.ledgers", "demo-ledgers")


async def narrow(wires: Wires, app: Interlock) -> None:
    """From here on every wire is of somebody who may call demo.add and demo.echo."""
    grants = [ToolGrant("demo.add", "^1.0.0"), ToolGrant("demo.echo"), ToolGrant("demo.ledgers")]
    token = await app.tokens.issue(subject=did_of("bot"), tools=grants, by=app.caller)
    wires.bear(token)


@pytest.mark.parametrize("door", WIRES)
async def test_nothing_is_told_of_a_tool_to_those_who_may_not_use_it(home: Path, door: str) -> None:
    async with Interlock.open(home, housekeeping=False) as app:
        await admit(app, sample.add, sample.echo, ledger, ledgers, echo)
        async with wired(app) as wires:
            assert "vault.ledger" in (await wires.call(door, "vault.ledge", {})).text.replace("-", ".")
            await narrow(wires, app)
            # A name that is nearly one: suggestions are among what there is for them.
            near = await wires.call(door, "demo.ech", {})
            assert "`demo.echo`" in near.text
            for name in ("vault.ledge", "demo.ledger", "ledge"):
                heard = await wires.call(door, name, {})
                assert heard.failure["error_code"] == "E3101"
                assert [one for one in TELLING if one in heard.text] == [], name
            # Input that does not fit: the token is what they hear of, not the schema.
            for name, code in (("vault.ledger", "E3204"), ("demo.ledgers", "E3206")):
                for arguments in ({}, {"password_hint": 5}, {"nothing": "x"}):
                    heard = await wires.call(door, name, arguments)
                    if heard.failure["error_code"] == "E3101":
                        continue  # to this door there is no such tool
                    assert (heard.failure["error_code"], heard.failure.get("details") or {}) == (code, {})
                    assert [one for one in TELLING[:2] if one in heard.text] == []


async def test_what_does_not_exist_and_what_is_not_theirs_are_described_alike(home: Path) -> None:
    async with Interlock.open(home, housekeeping=False) as app:
        await admit(app, sample.add, sample.echo, ledger, ledgers, echo)
        async with wired(app) as wires:
            await narrow(wires, app)
            for name in ("vault.ledger", "vault.nothing", "ledger", "demo.ledgers", "vault.ledger?version=9.9.9"):
                answer = await wires.http.get(f"/v1/tools/{name}")
                plain = name.partition("?")[0]
                assert (answer.status_code, answer.json()["error"]["error_code"]) == (404, "E3101")
                assert answer.json()["error"]["humanMessage"].partition(";")[0] == f"no tool named `{plain}`"
                rest = answer.text.replace(plain, "")
                assert [one for one in TELLING if one in rest] == []
            # Of two tools of one name they hear of the one that is theirs.
            twice = await wires.http.get("/v1/tools/echo")
            assert (twice.status_code, "other.echo" in twice.text, "demo.echo" in twice.text) == (404, False, True)
            # And a range that a tool of theirs has not is told with the versions there are.
            ranged = await wires.http.get("/v1/tools/demo.add", params={"version": "9.9.9"})
            assert ranged.json()["error"]["error_code"] != "E3101"

"""A search of a data directory at rest finds what an open one finds, for every caller, or leaves it to an open one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from interlock import Failure, Interlock
from interlock.api.homes import reader_at_rest
from interlock.api.parts_at_rest import search
from interlock.registry import quarantine
from interlock.registry.retirement import deprecate, move
from interlock.store import upstreams
from tests.support.calls import admit
from tests.support.office import OFFERED, some_tool

pytestmark = pytest.mark.sqlite_only("a store on a server is never searched at rest")

Json = dict[str, Any]
SCOPED = some_tool("send_fax", "Send a fax message to a recipient.", scopes=("fax:send",))
WRITE = some_tool("bill_customer", "Bill a customer for goods.", mutation_class="write_irreversible")
LATER = some_tool("translate", "Translate a text or a speech into another language.", version="1.1.0")
REQUESTS = (
    "send message to user",
    "bill the client",
    "will it rain tomorrow?",
    "office.translate",
    "delete_file",
    "qwertz asdfgh",
    "Übersetze 翻訳 a text. Then send it to the customer; finally delete the file that it came from.",
)
PRINCIPAL = '[[principal]]\nid = "local:*"\nkind = "{kind}"\ntrust = {trust}\ngroups = {groups}\nscopes = {scopes}\n'
PERMITTED = "permit (principal, action, resource);\n"
CALLERS = {
    "as first made": ("", ""),
    "with a scope": (PRINCIPAL.format(kind="human", trust=9, groups="[]", scopes='["fax:send"]'), PERMITTED),
    "an agent": (
        PRINCIPAL.format(kind="agent", trust=10, groups='["readers"]', scopes="[]"),
        PERMITTED
        + 'forbid (principal is Agent, action, resource) when { resource.mutation_class == "write_irreversible" };\n'
        + 'forbid (principal, action == Action::"office.forecast", resource);\n',
    ),
    "denied by arguments": (
        "",
        PERMITTED + 'forbid (principal, action == Action::"office.translate", resource)'
        ' when { context.arguments.value == "secret" };\n',
    ),
    "of a group that may send": (
        PRINCIPAL.format(kind="human", trust=50, groups='["senders"]', scopes="[]"),
        'permit (principal in Group::"senders", action == Action::"office.send_email", resource);\n',
    ),
    "without a rule": ("", "// nothing is permitted\n"),
    "with a policy that nobody understands": ("", "permit (\n"),
    "with principals that nobody understands": ("[[principal\n", PERMITTED),
}


async def _open_answers(home: Path, requests: tuple[str, ...] = REQUESTS) -> list[Json]:
    async with Interlock.open(home) as app:
        return [
            {"tools": [one.document() for one in found], **found.facts()}
            for request in requests
            for by in ("words", "meaning", "both")
            for found in [await app.search(request, limit=5, by=by)]
        ]


def _answers_at_rest(home: Path, requests: tuple[str, ...] = REQUESTS) -> list[Json | None]:
    with ExitStack() as within:
        reader = reader_at_rest(home, within)
        assert reader is not None
        answers = [search(reader, home, request, 5, by) for request in requests for by in ("words", "meaning", "both")]
    return [
        None if found is None else {"tools": [one.document() for one in found], **found.facts()} for found in answers
    ]


async def _compare(home: Path, requests: tuple[str, ...] = REQUESTS) -> list[Json]:
    """Assert that both paths answer alike, and return the answers."""
    at_rest = await asyncio.to_thread(_answers_at_rest, home, requests)
    answers = await _open_answers(home, requests)
    assert at_rest == answers
    return answers


async def _make(home: Path, *tools: Any) -> None:
    async with Interlock.open(home) as app:
        await admit(app, *tools)


@pytest.mark.parametrize("caller", CALLERS)
async def test_every_caller_finds_at_rest_what_they_find_in_an_open_data_directory(home: Path, caller: str):
    await _make(home, *OFFERED, SCOPED, WRITE)
    principals, policy = CALLERS[caller]
    if principals:
        (home / "principals.toml").write_text(principals)
    if policy:
        (home / "policy.cedar").write_text(policy)
    answers = await _compare(home)
    names = {tool["tool"] for one in answers for tool in one["tools"]}
    assert ("office.send_fax" in names) == (caller == "with a scope")
    assert ("office.forecast" in names) == (caller in ("as first made", "with a scope", "denied by arguments"))
    assert ("office.bill_customer" in names) == (caller in ("as first made", "with a scope", "denied by arguments"))
    assert ("office.translate" in names) == (
        caller in ("as first made", "with a scope", "an agent", "denied by arguments")
    )


async def test_a_missing_policy_hides_everything_at_rest(home: Path):
    await _make(home, *OFFERED)
    (home / "policy.cedar").unlink()
    assert all(one["tools"] == [] for one in await _compare(home))


async def _quarantined(app: Interlock) -> None:
    found = await app.catalog.resolve("office.send_email")
    await app.journal.commit(quarantine.impose(found.row.digest, found.contract.ref, "a-call", "it lied"))


async def _deprecated(app: Interlock) -> None:
    await app.journal.commit(deprecate("office.translate", "1.1.0", by="test"))


async def _removed(app: Interlock) -> None:
    await _deprecated(app)
    await app.journal.commit(move("office.translate", "1.1.0", "sunset", by="test"))


async def _of_an_upstream(app: Interlock) -> None:
    def far(transaction: Any) -> None:
        upstreams.insert(transaction, "far", kind="http", config="{}", overlay="{}", added_by="test", at_ms=1)

    await app.journal.commit(far)


@pytest.mark.parametrize("change", [_quarantined, _deprecated, _removed, _of_an_upstream])
async def test_catalogs_in_every_state_are_searched_alike(home: Path, change: Callable[[Interlock], Awaitable[None]]):
    await _make(home, *OFFERED, LATER)
    before = await _compare(home)
    async with Interlock.open(home) as app:
        await change(app)
    assert (await _compare(home) == before) == (change is _of_an_upstream)


async def test_a_large_catalog_is_searched_alike(tmp_path: Path):
    home = tmp_path / "many"
    many = [some_tool(f"send_{number}", f"Send message number {number} to recipients.") for number in range(600)]
    await _make(home, *many)
    found = await _compare(home, ("send message number 17", "office.send_599"))
    assert found[0]["tools"][0]["tool"] == "office.send_17"
    assert len(found[0]["tools"]) == 5


@pytest.mark.parametrize(("request_", "limit", "by"), [(" ", 5, "both"), ("mail", 0, "both"), ("mail", 5, "colour")])
async def test_a_search_that_is_refused_is_refused_alike_at_rest(home: Path, request_: str, limit: int, by: str):
    await _make(home, *OFFERED)

    def at_rest() -> None:
        with ExitStack() as within:
            reader = reader_at_rest(home, within)
            assert reader is not None
            search(reader, home, request_, limit, by)

    with pytest.raises(Failure) as refused:
        await asyncio.to_thread(at_rest)
    async with Interlock.open(home) as app:
        with pytest.raises(Failure) as opened:
            await app.search(request_, limit=limit, by=by)
    assert (refused.value.code, refused.value.message) == (opened.value.code, opened.value.message)


async def _state_settings(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "settings.toml").write_text('search_encoder = "none"\n')


async def _set_a_variable(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLOCK_SURFACE_EXCLUDED", "[]")


async def _lose_an_upstream(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def far(transaction: Any) -> None:
        upstreams.insert(transaction, "far", kind="http", config="{}", overlay="{}", added_by="test", at_ms=1)
        upstreams.mark_probed(transaction, "far", "unavailable", "nobody answers", 2)

    async with Interlock.open(home) as app:
        await app.journal.commit(far)


async def _install_an_encoder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = home / "packages" / "encoder-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: encoder\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[interlock.search_encoders]\nencoder = os:getcwd\n")
    monkeypatch.setattr(sys, "path", [str(package.parent), *sys.path])


@pytest.mark.parametrize("change", [_state_settings, _set_a_variable, _lose_an_upstream, _install_an_encoder])
async def test_what_a_search_at_rest_does_not_know_is_left_to_an_open_data_directory(
    home: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, pytest.MonkeyPatch], Awaitable[None]]
):
    await _make(home, *OFFERED)
    await change(home, monkeypatch)
    assert await asyncio.to_thread(_answers_at_rest, home, ("mail",)) == [None, None, None]

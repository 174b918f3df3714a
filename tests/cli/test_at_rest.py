"""Tools are exported and rules explained at rest as in an open data directory, or an open one is left to do it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from interlock import Failure, Interlock
from interlock.api import parts_at_rest
from interlock.api.declarations import Declarations
from interlock.api.homes import reader_at_rest
from interlock.api.policy import explain_call
from interlock.store.port import Reader
from tests.support.calls import admit
from tests.support.office import OFFERED, some_tool

pytestmark = pytest.mark.sqlite_only("a store on a server is never read at rest")

T = TypeVar("T")
Json = dict[str, Any]
SCOPED = some_tool("send_fax", "Send a fax message to a recipient.", scopes=("fax:send",))
WRITE = some_tool("bill_customer", "Bill a customer for goods.", mutation_class="write_irreversible")
KEYED = some_tool("post_online", "Post a message to a site.", permissions=("credentials:office/key",))
PRINCIPAL = '[[principal]]\nid = "local:*"\nkind = "agent"\ntrust = 10\ngroups = ["readers"]\nscopes = []\n'
RULES = """permit (principal, action, resource);
forbid (principal is Agent, action, resource) when { resource.mutation_class == "write_irreversible" };
forbid (principal, action == Action::"office.translate", resource) when { context.arguments.value == "secret" };
"""
FACTS = {
    "as first made": ("", ""),
    "an agent": (PRINCIPAL, RULES),
    "without a rule": ("", "// nothing is permitted\n"),
    "with a policy that nobody understands": ("", "permit (\n"),
}
QUESTIONS: list[tuple[str, str, Json]] = [
    ("me", "office.translate", {}),
    ("me", "office.translate", {"value": "secret"}),
    ("me", "office.bill_customer@^1.0.0", {"value": "x"}),
    ("me", "office.send_fax", {}),
    ("bot", "office.forecast", {}),
    ("nobody", "office.forecast", {}),
    ("me", "office.forecast", {"value": 5}),
    ("me", "office.unknown", {}),
]


def _read(home: Path, ask: Callable[[Reader], T]) -> T:
    with ExitStack() as within:
        reader = reader_at_rest(home, within)
        assert reader is not None
        return ask(reader)


async def _either(work: Any) -> Any:
    """What a question is answered, or how it is refused."""
    try:
        return await work
    except Failure as failure:
        return failure.code, failure.message, failure.details


async def _make(home: Path, *tools: Any) -> None:
    async with Interlock.open(home) as app:
        await admit(app, *tools)


@pytest.mark.parametrize("facts", FACTS)
async def test_rules_are_explained_at_rest_as_in_an_open_data_directory(home: Path, facts: str):
    await _make(home, *OFFERED, SCOPED, WRITE)
    for name, text in zip(("principals.toml", "policy.cedar"), FACTS[facts], strict=True):
        if text:
            (home / name).write_text(text)

    async def at_rest(question: tuple[str, str, Json]) -> Any:
        return await asyncio.to_thread(_read, home, lambda reader: parts_at_rest.explain(reader, home, *question))

    explained = [await _either(at_rest(one)) for one in QUESTIONS]
    async with Interlock.open(home) as app:
        assert explained == [await _either(explain_call(app, app.caller, *one, door="cli")) for one in QUESTIONS]
    assert None not in explained
    assert any(isinstance(one, dict) for one in explained) == (facts != "with a policy that nobody understands")


@pytest.mark.parametrize("facts", FACTS)
@pytest.mark.parametrize("names", [(), ("office.forecast", "office.bill_customer"), ("office.unknown",)])
async def test_tools_are_exported_at_rest_as_from_an_open_data_directory(
    home: Path, facts: str, names: tuple[str, ...]
):
    await _make(home, *OFFERED, SCOPED, WRITE)
    for name, text in zip(("principals.toml", "policy.cedar"), FACTS[facts], strict=True):
        if text:
            (home / name).write_text(text)

    def ask(reader: Reader) -> list[Json] | None:
        return parts_at_rest.declarations(reader, home, "anthropic", names, 100, strict=True)

    at_rest = await _either(asyncio.to_thread(_read, home, ask))
    async with Interlock.open(home) as app:

        async def exported() -> list[Json]:
            found = Declarations(app, app.tools).declarations("anthropic", app.caller, strict=True, names=names)
            return (await found)[0]

        assert at_rest == await _either(exported())


async def test_tools_that_need_a_credential_are_exported_from_an_open_data_directory(home: Path):
    await _make(home, *OFFERED)

    def ask(reader: Reader) -> list[Json] | None:
        return parts_at_rest.declarations(reader, home, "anthropic", (), 100, strict=False)

    declared = await asyncio.to_thread(_read, home, ask)
    assert declared is not None
    assert {f"office__{one.__name__}" for one in OFFERED} <= {one["name"] for one in declared}
    async with Interlock.open(home) as app:
        await admit(app, KEYED)
    assert await asyncio.to_thread(_read, home, ask) is None


async def test_settings_are_heeded_by_opening_the_data_directory(home: Path):
    await _make(home, *OFFERED)
    (home / "settings.toml").write_text('surface_excluded = [{ tools = ["office.*"] }]\n')
    assert (
        await asyncio.to_thread(
            _read, home, lambda reader: parts_at_rest.explain(reader, home, "me", "office.forecast", {})
        )
        is None
    )

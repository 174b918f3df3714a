"""The table of kinds of upstream: a kind is a module and a row."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pydantic
import pytest
from click.testing import CliRunner

from interlock.api.interlock import Interlock
from interlock.api.offers import Offers
from interlock.api.upstreams import Upstreams, addable_kinds
from interlock.call.connector import Definition, Discovered, RemoteCall
from interlock.cli.upstream import add
from interlock.contract import upstream_kinds
from interlock.contract.executors import PROTOCOLS
from interlock.contract.manifest import Manifest
from interlock.contract.upstream_kinds import KINDS, UpstreamKind
from interlock.core.errors import Failure
from interlock.data.schema import Json
from interlock.upstreams.configuration import read_config
from interlock.upstreams.kinds import Site


def test_every_protocol_of_a_manifest_has_a_row() -> None:
    assert set(get_args(Manifest.model_fields["protocol"].annotation)) == PROTOCOLS.keys()


class ParrotConfig(pydantic.BaseModel, extra="forbid"):
    greeting: str
    # A file of this machine.
    perch: str = ""


class Parrot:
    """The connector of a kind that Interlock does not have."""

    def __init__(self, name: str, config: ParrotConfig) -> None:
        self._name = name
        self._greeting = config.greeting

    async def call(self, call: RemoteCall) -> Any:
        return f"{self._greeting} {call.arguments['text']}"

    def mapping(self, native: Json, reported: Json) -> Json | None:
        return None

    async def discover(self, credentials: Mapping[str, str] | None = None) -> Discovered:
        text = {"type": "string", "description": "The text to say.", "examples": ["hi"]}
        takes: Json = {"type": "object", "properties": {"text": text}, "required": ["text"]}
        gives: Json = {"type": "string", "description": "What the parrot says."}
        return Discovered([Definition("say", "Says a text.", takes, gives, {"protocol": "parrot"})])

    async def probe(self, credentials: Mapping[str, str] | None = None) -> None: ...

    def forget(self) -> None: ...

    async def close(self) -> None: ...


PARROT = UpstreamKind("parrots", "A parrot that a file configures.", on_machine=frozenset(("perch",)))


@pytest.fixture
def _parrots(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(name: str, config: Json, site: Site) -> Parrot:
        return Parrot(name, read_config(ParrotConfig, config))

    module = ModuleType("parrots")
    vars(module)["make"] = make
    monkeypatch.setitem(sys.modules, "parrots", module)
    monkeypatch.setattr(upstream_kinds, "KINDS", {**KINDS, "parrot": PARROT})


@pytest.mark.usefixtures("_parrots")
async def test_a_module_and_a_row_are_a_new_kind_of_upstream(home: Path) -> None:
    reads = {"defaults": {"mutation_class": "read_only"}}
    async with Interlock.open(home) as app:
        with pytest.raises(Failure, match=r"`greting` is not a field there; did you mean `greeting`"):
            await app.upstreams.add("polly", "parrot", {"greting": "Ahoy"}, by=app.caller)
        report = await app.upstreams.add("polly", "parrot", {"greeting": "Ahoy"}, by=app.caller, overlay=reads)
        assert [(one.name, one.state) for one in report.tools] == [("say", "admitted")]
        assert (await app.call("polly.say", text="there")).unwrap() == "Ahoy there"


@pytest.mark.usefixtures("_parrots")
async def test_an_endpoint_refuses_what_the_row_of_a_kind_says_is_on_the_machine(home: Path) -> None:
    config = {"greeting": "Ahoy", "perch": "/etc/perch"}
    async with Interlock.open(home) as app:
        from_afar, here = Upstreams(app), Upstreams(app, on_machine=True)
        with pytest.raises(Failure, match="`perch` reaches into this machine") as refused:
            await from_afar.add("polly", "parrot", config, by=app.caller)
        assert refused.value.code == "E3206"
        assert (await here.preview("polly", "parrot", config, by=app.caller))["tools"]
        assert addable_kinds()[-1] == "parrot"


class Song:
    """The one resource of a parrot."""

    async def list_resources(self) -> list[Json]:
        return [{"uri": "song:1", "name": "shanty"}]


def _attend(_: Parrot, __: Callable[[str], None]) -> None: ...


@pytest.mark.usefixtures("_parrots")
async def test_resources_of_a_kind_are_offered_if_its_row_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parrot, "content", Song(), raising=False)
    monkeypatch.setattr(Parrot, "attend", _attend, raising=False)
    reads = {"defaults": {"mutation_class": "read_only"}}
    async with Interlock.open(home) as app:
        await app.upstreams.add("polly", "parrot", {"greeting": "Ahoy"}, by=app.caller, overlay=reads)
        offers = Offers(app, app.tools, lambda _: None)
        assert await offers.resources(app.caller) == []
        singing = UpstreamKind("parrots", "A parrot that a file configures.", offers_content=True)
        monkeypatch.setattr(upstream_kinds, "KINDS", {**KINDS, "parrot": singing})
        assert await offers.resources(app.caller) == [{"uri": "upstream:polly:song:1", "name": "shanty"}]


async def test_an_unknown_kind_is_refused_with_the_one_that_was_meant(home: Path) -> None:
    async with Interlock.open(home) as app:
        with pytest.raises(Failure, match="`opnapi` is not a kind of upstream; did you mean `openapi`") as refused:
            await app.upstreams.add("shop", "opnapi", {}, by=app.caller)
    assert refused.value.code == "E3004"


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_has_a_module_that_makes_it_and_a_command_that_explains_it(name: str) -> None:
    assert callable(importlib.import_module(KINDS[name].module).make)
    shown = CliRunner().invoke(add, [name, "--help"])
    assert shown.exit_code == 0
    assert "Usage" in shown.output
    assert KINDS[name].help.split("\n", 1)[0] in " ".join(shown.output.split())

"""The table of executors: an executor is a module and a row."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from interlock import Failure, Interlock
from interlock.call.context import Context
from interlock.call.executor import Executor
from interlock.call.phases import Granted
from interlock.contract import executors
from interlock.contract.executors import EXECUTORS, ExecutorKind
from interlock.executors.site import Site
from tests.support.calls import SIX, records

MANIFEST: dict[str, Any] = {
    "tool_id": "whisper",
    "namespace": "parrots",
    "name": "Whisper",
    "version": "1.0.0",
    "description": "Repeats a text, loudly.",
    "provider": "local",
    "protocol": "custom",
    "parameters": {
        "type": "object",
        "properties": {"text": {"type": "string", "description": "The text to repeat.", "examples": ["hi"]}},
        "required": ["text"],
        "additionalProperties": False,
    },
    "result_schema": {"type": "string", "description": "The text in capitals."},
    "mutation_class": "read_only",
    "required_permissions": [],
    "idempotency": {},
    "observability": {},
    "execution": {"kind": "parrot", "target": "polly"},
}


class Parrots(Executor):
    """The executor of a kind that Interlock does not have."""

    def __init__(self, site: Site) -> None:
        super().__init__(site.grant)
        self.closed = False

    async def execute(self, granted: Granted, context: Context | None) -> Any:
        execution = granted.tool.contract.manifest.execution
        assert execution is not None
        return f"{execution.target}: {granted.input['text'].upper()}"

    def health(self) -> Any:
        return {"parrots": "healthy"}

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def parrots(monkeypatch: pytest.MonkeyPatch) -> list[Parrots]:
    made: list[Parrots] = []

    def make(site: Site) -> Parrots:
        made.append(Parrots(site))
        return made[-1]

    module = ModuleType("parrots")
    vars(module)["make"] = make
    monkeypatch.setitem(sys.modules, "parrots", module)
    monkeypatch.setattr(executors, "EXECUTORS", {**EXECUTORS, "parrot": ExecutorKind("parrots", "a parrot")})
    return made


def _file(directory: Path, **changed: Any) -> str:
    path = directory / "whisper.yaml"
    path.write_text(yaml.safe_dump({**MANIFEST, **changed}))
    return str(path)


async def test_a_module_and_a_row_are_a_new_executor(home: Path, tmp_path: Path, parrots: list[Parrots]) -> None:
    async with Interlock.open(home) as app:
        (added,) = await app.add_from(_file(tmp_path))
        assert added.admitted, added.verdict
        result = await app.call("parrots.whisper", text="hello")
        assert result.unwrap() == "polly: HELLO"
        (record,) = records(app, result.invocation_id)
        assert record["phases"] == SIX
        refused = await app.call("parrots.whisper", words="hello")
        assert refused.error is not None
        assert refused.error.code == "E3301"
        assert app.gateway.runner.health() == {"parrots": "healthy"}
    # A second process finds the tool by its row.
    async with Interlock.open(home) as app:
        assert (await app.call("parrots.whisper", text="again")).unwrap() == "polly: AGAIN"
    assert parrots
    assert all(one.closed for one in parrots)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"execution": {"kind": "parrot", "target": "polly", "argv": ["polly"]}}, "is for programs only"),
        ({"execution": {"kind": "parrot", "target": "polly", "handlers": {"check": "a:b"}}}, "has no handlers"),
        ({"sandbox": {}}, "a parrot runs there: it has no sandbox here"),
        ({"mutation_class": "write_reversible"}, "a parrot cannot be undone"),
        ({"execution": {"kind": "budgie", "target": "polly"}}, "'upstream' or 'parrot'"),
    ],
)
@pytest.mark.usefixtures("parrots")
async def test_a_manifest_of_a_new_kind_says_nothing_that_its_row_does_not_allow(
    home: Path, tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    async with Interlock.open(home) as app:
        with pytest.raises(Failure, match=words) as refused:
            await app.add_from(_file(tmp_path, **changed))
    assert refused.value.code == "E3105"


@pytest.mark.parametrize("of_upstream", [True, False])
@pytest.mark.usefixtures("parrots")
async def test_the_row_says_whether_a_call_leaves_this_machine_for_an_upstream(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, of_upstream: bool
) -> None:
    row = ExecutorKind("parrots", "a parrot", of_upstream=of_upstream)
    monkeypatch.setattr(executors, "EXECUTORS", {**EXECUTORS, "parrot": row})
    async with Interlock.open(home) as app:
        (added,) = await app.add_from(_file(tmp_path, timeout_class="interactive"))
    assert added.admitted is not of_upstream, added.verdict
    if of_upstream:
        assert "an interactive tool does no external I/O; choose standard" in str(added.verdict)


@pytest.mark.parametrize("module", executors.modules())
def test_every_row_names_a_module_that_makes_an_executor(module: str) -> None:
    assert callable(importlib.import_module(module).make)

"""A tool of an adapter whose contract tests fail is refused like every tool, and the others of its upstream are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlock import Interlock
from interlock.data.schema import Json
from interlock.upstreams.manager import Report
from tests.upstreams.servers import Answer, HttpServer, json_answer
from tests.upstreams.test_functions import PROVIDERS, TAKES, declared
from tests.upstreams.test_langchain import MODULE


async def _refused(lock: Interlock, report: Report, upstream: str, wrong: set[str], right: str) -> None:
    states = {one.name: (one.state, one.reason) for one in report.tools}
    assert states[right][0] == "admitted"
    for name in wrong:
        assert states[name][0] == "refused"
        assert "contract_tests_passing" in states[name][1] or "contract tests" in states[name][1], states[name]
        missing = await lock.call(f"{upstream}.{name}", {"text": "a"})
        assert missing.error is not None
        assert missing.error.code == "E3101"


@pytest.mark.proves("EXEC-12")
async def test_a_langchain_tool_whose_contract_tests_fail_is_refused(tmp_path: Path) -> None:
    reads: Json = {"mutation_class": "read_only"}
    example: Json = {"examples": [{"text": "a"}]}
    overlay: Json = {
        "tools": {
            "shout": {**reads, **example},
            "crash": {**reads, **example},
            "late": {**reads, **example},
        }
    }
    async with Interlock.open(tmp_path, housekeeping=False) as lock:
        report = await lock.upstreams.add("chain", "langchain", {"module": MODULE}, by=lock.caller, overlay=overlay)
        await _refused(lock, report, "chain", {"crash", "late"}, "shout")


@pytest.mark.proves("EXEC-12")
@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_function_whose_contract_tests_fail_is_refused(tmp_path: Path, provider: str) -> None:
    said: Json = {"mutation_class": "read_only", "examples": [{"city": "Ulm"}], "result_schema": {"type": "string"}}
    answers = {"/right": json_answer("sunny"), "/unfit": json_answer(7), "/broken": Answer(status=500, body=b"{}")}
    async with HttpServer.open() as server, Interlock.open(tmp_path, housekeeping=False) as lock:
        server.otherwise = lambda got: answers[got.path]
        names = ("right", "unfit", "broken")
        config: Json = {
            "declarations": [declared(provider, name, TAKES) for name in names],  # pyright: ignore[reportArgumentType] - one of PROVIDERS
            "urls": [server.url],
            "allow_private": True,
        }
        overlay: Json = {"tools": dict.fromkeys(names, said)}
        report = await lock.upstreams.add("fns", "functions", config, by=lock.caller, overlay=overlay)
        await _refused(lock, report, "fns", {"unfit", "broken"}, "right")

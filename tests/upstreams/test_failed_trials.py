"""A tool of an adapter whose contract tests fail is refused like every tool, and the others of its upstream are not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from interlock import Interlock
from interlock.api import scratch
from interlock.core.clock import Clock
from interlock.data.schema import Json
from interlock.upstreams import repository
from interlock.upstreams.manager import PROVE_EVERY_S, Report
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
    answers = {"/right": json_answer("sunny"), "/unfit": json_answer(7), "/broken": Answer(status=400, body=b"{}")}
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


@pytest.mark.parametrize("status", [429, 503])
async def test_an_upstream_that_does_not_answer_for_now_is_asked_again_then_admitted_and_proven_later(
    tmp_path: Path, status: int
) -> None:
    said: Json = {"mutation_class": "read_only", "examples": [{"city": "Ulm"}], "result_schema": {"type": "string"}}
    names = ("once", "proven", "disproven")
    away = {"once": 1, "proven": 99, "disproven": 99}  # how often each of them does not answer

    def answer(got: Any) -> Answer:
        name = got.path.strip("/")
        away[name] = away.get(name, 0) - 1  # a probe asks for something else
        if away[name] >= 0:
            return Answer(status=status, body=b"{}")
        return json_answer(7 if name == "disproven" else "sunny")

    passed = 0.0
    clock = Clock(monotonic=lambda: time.monotonic() + passed)
    async with HttpServer.open() as server, Interlock.open(tmp_path, clock=clock, housekeeping=False) as lock:
        server.otherwise = answer
        config: Json = {
            "declarations": [declared("anthropic", name, TAKES) for name in names],
            "urls": [server.url],
            "allow_private": True,
        }
        overlay: Json = {"tools": dict.fromkeys(names, said)}
        report = await lock.upstreams.add("fns", "functions", config, by=lock.caller, overlay=overlay)
        states = {one.name: (one.state, "not proven yet" in one.reason) for one in report.tools}
        assert states == {"once": ("admitted", False), "proven": ("admitted", True), "disproven": ("admitted", True)}
        again = await lock.upstreams.refresh("fns", by=lock.caller)
        assert len(await unproven(lock)) == 2, "it still does not answer"
        for tools in (again.tools, await lock.upstreams.offers("fns")):
            assert {one.name for one in tools if "not proven yet" in one.reason} == {"proven", "disproven"}
        away |= {"proven": 0, "disproven": 0}
        await lock.gateway.services.answers("fns")  # the breaker lets calls through again
        if status == 429:
            await lock.upstreams.refresh("fns", by=lock.caller)
        else:  # what runs in the background does the same
            passed = PROVE_EVERY_S
            assert await lock.upstreams.probe("fns") == "available"
        assert await unproven(lock) == []
        assert {one.reason for one in await lock.upstreams.offers("fns")} == {""}
        good = await lock.call("fns.proven", {"city": "Ulm"})
        bad = await lock.call("fns.disproven", {"city": "Ulm"})
        assert (good.value, bad.error and bad.error.code) == ("sunny", "E3210")
        assert bad.error is not None
        assert "contract tests failed" in bad.error.message


async def unproven(lock: Interlock) -> list[tuple[str, str, str]]:
    return await lock.journal.read(lambda reader: repository.unproven(reader, "fns"))


@pytest.mark.parametrize("endpoints", [1, 2])
async def test_trials_that_fail_do_not_keep_healthy_tools_of_the_upstream_out(tmp_path: Path, endpoints: int) -> None:
    """Breakers count failures of calls. Trials of other tools, with inputs nobody sent, say nothing about these."""
    said: Json = {"mutation_class": "read_only", "examples": [{"city": "Ulm"}], "result_schema": {"type": "string"}}
    broken = [f"broken{number}" for number in range(6)]

    def answer(got: Any) -> Answer:
        return Answer(status=500, body=b"{}") if "broken" in got.path else json_answer("sunny")

    async with (
        HttpServer.open() as server,
        HttpServer.open() as other,
        Interlock.open(tmp_path, housekeeping=False) as lock,
    ):
        server.otherwise = other.otherwise = answer
        write: Json = {
            "mutation_class": "write_reversible",
            "undo": {"tool": "healthy", "arguments": {"city": "/input/city"}, "example": {"city": "Ulm"}},
            "result_schema": {"type": "string"},
        }
        config: Json = {
            "declarations": [declared("anthropic", name, TAKES) for name in (*broken, "healthy", "write")],
            "urls": [server.url, other.url][:endpoints],
            "allow_private": True,
        }
        overlay: Json = {"tools": {**dict.fromkeys((*broken, "healthy"), said), "write": write}}
        report = await lock.upstreams.add("fns", "functions", config, by=lock.caller, overlay=overlay)
        states = {one.name: (one.state, one.reason) for one in report.tools}
        assert (states["healthy"], states["write"]) == (("admitted", ""), ("admitted", "")), states
        assert [one for one in broken if "not proven yet" not in states[one][1]] == []
        assert {one.state for one in lock.gateway.services.snapshot() if one.name == "fns"} <= {"closed"}
        assert (await lock.call("fns.healthy", {"city": "Ulm"})).value == "sunny"
        assert (await lock.call("fns.write", {"city": "Ulm"}, key="one")).value == "sunny"


async def test_an_upstream_that_lists_its_tools_and_answers_no_call_is_given_up_after_some_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "MOST_LOST_S", 0.0)
    said: Json = {"mutation_class": "read_only", "examples": [{"city": "Ulm"}], "result_schema": {"type": "string"}}
    async with HttpServer.open() as server, Interlock.open(tmp_path, housekeeping=False) as lock:
        server.otherwise = lambda got: Answer(status=500, body=b"{}")
        names = ("first", "second")
        config: Json = {
            "declarations": [declared("anthropic", name, TAKES) for name in names],
            "urls": [server.url],
            "allow_private": True,
        }
        overlay: Json = {"tools": dict.fromkeys(names, said)}
        report = await lock.upstreams.add("fns", "functions", config, by=lock.caller, overlay=overlay)
        assert [one.state for one in report.tools] == ["admitted", "admitted"]
        assert ["not tried" in one.reason for one in report.tools] == [False, True]
        assert len(await unproven(lock)) == 2, "both are tried again"

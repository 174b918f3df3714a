"""Examples that contract tests do not run, for read-only tools whose host may be down at admission."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest

from interlock import Effect, Example, Failure, Field, Interlock, Tool, tool
from interlock.registry.catalog import contract_digest
from tests.support.cli import Cli

City = Annotated[str, Field(description="the city", examples=["Bern"], min_length=2)]
SOURCE = '''
from typing import Annotated
from interlock import Example, Field, tool

@tool(version="1.0.0", mutation_class="read_only", namespace="net", examples=[Example({"city": "Bern"}, live=False)])
def weather(city: Annotated[str, Field(description="the city", examples=["Bern"])]) -> float:
    """Ask a service that cannot be reached."""
    raise OSError("no route to host")
'''


def weather(*examples: Any) -> Tool[..., Any]:
    @tool(version="1.0.0", mutation_class="read_only", namespace="net", examples=list(examples))
    def weather(city: City) -> dict[str, float]:
        """Temperature of a city, from a service that is down now."""
        raise OSError("no route to host")

    return weather


@pytest.mark.parametrize(
    ("example", "case"),
    [
        (Example({"city": "Bern"}, live=False), "example 1, its input alone"),
        (Example({"city": "Bern"}, answer={"celsius": 21.5}), "example 1, by its recorded answer"),
    ],
)
async def test_a_tool_whose_host_is_down_is_admitted_by_what_was_recorded_and_the_evidence_says_so(
    tmp_path: Path, example: Example, case: str
) -> None:
    reads = weather(example)
    async with Interlock.open(tmp_path / "home") as app:
        (admitted,) = await app.add(reads)
        assert admitted.admitted
        assert admitted.trial is not None
        assert admitted.trial.mode == "recorded"
        assert [one.case for one in admitted.trial.outcomes if not one.ran] == [case]
        evidence = await app.evidence(contract_digest(reads))
        assert evidence is not None
        assert (evidence.mode, case in evidence.report) == ("recorded", True)
        # Asked to, the tests run it too.
        live = await app.try_out(reads, live=True)
        assert (live.passed, live.mode) == (False, "examples")


async def test_a_tool_that_is_run_with_some_examples_names_the_others(tmp_path: Path) -> None:
    @tool(
        version="1.0.0",
        mutation_class="read_only",
        namespace="net",
        examples=[{"city": "Bern"}, Example({"city": "Oslo"}, live=False)],
    )
    def length(city: City) -> int:
        """Length of the name of a city, if it is not Oslo."""
        assert city != "Oslo"
        return len(city)

    async with Interlock.open(tmp_path / "home") as app:
        (admitted,) = await app.add(length)
        assert admitted.admitted
        assert admitted.trial is not None
        assert admitted.trial.mode == "examples"
        assert [one.case for one in admitted.trial.outcomes if not one.ran] == ["example 2, its input alone"]


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (Example({"city": "B"}, live=False), "example 1, its input alone"),
        (Example({"city": "Bern"}, answer={"celsius": "warm"}), "the recorded answer is not as promised"),
        (Example({"city": "Bern"}, answer=None), "the recorded answer is not as promised"),
    ],
)
async def test_what_was_recorded_must_keep_the_contract(tmp_path: Path, example: Example, words: str) -> None:
    async with Interlock.open(tmp_path / "home") as app:
        with pytest.raises(Failure) as refused:
            await app.add(weather(example))
    assert refused.value.code == "E3105"
    assert words in refused.value.message


def test_a_tool_that_writes_cannot_leave_its_example_without_a_run() -> None:
    with pytest.raises(Failure) as refused:

        @tool(
            version="1.0.0",
            mutation_class="write_irreversible",
            namespace="net",
            effects=[Effect("city:{city}", "UPDATE")],
            examples=[Example({"city": "Bern"}, live=False)],
        )
        def rename(city: City) -> None:  # pyright: ignore[reportUnusedFunction] - it is refused
            """Rename a city."""

    assert refused.value.code == "E3105"
    assert "only a read_only tool" in refused.value.message


def test_the_command_line_says_how_many_examples_were_not_run(tmp_path: Path) -> None:
    fresh = Cli(tmp_path)
    (fresh.path / "net.py").write_text(SOURCE)
    shown = fresh("tools", "add", "net.py")
    assert (shown.code, "(recorded)" in shown.out) == (0, True)
    assert "not run with 1 example; to run all: interlock tools test --live" in shown.out

"""What an agent's calls hold together, counted over every process that shares a home."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock import Caller, Failure, Interlock
from interlock.executors.sandbox.allowance import Allowance, Allowances
from interlock.executors.sandbox.job import GIB, Limits
from interlock.executors.sandbox.shares import Shares
from tests.sandbox import sharing

ROOT = Path(__file__).parents[2]
LIMITED = pytest.mark.proves("EXEC-04")
WHOLE = Allowance()
AGENT = Caller(id="agent:sharing")
_SHARES = st.builds(
    Limits, cpu_cores=st.sampled_from([0.5, 1.0, 2.0, 4.0]), memory_bytes=st.sampled_from([GIB // 2, 2 * GIB, 8 * GIB])
)


@contextmanager
def holder(home: Path) -> Generator[subprocess.Popen[str]]:
    """Another process on the home, whose call runs and uses 6 of its agent's 8 GiB."""
    run = "import asyncio, sys\nfrom tests.sandbox.sharing import main\nasyncio.run(main(sys.argv[1]))"
    command = [sys.executable, "-c", run, str(home)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            yield process
        finally:
            process.kill()


@LIMITED
async def test_the_calls_of_an_agent_in_several_processes_share_one_allowance(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        await sharing.admit(app)
        with holder(tmp_path) as other:
            refused = await app.call("sharing.large", caller=AGENT, timeout_s=2)
            assert refused.error is not None
            assert refused.error.code == "E3402"
            # Another agent has an allowance of its own.
            assert (await app.call("sharing.large", caller=Caller(id="agent:other"))).unwrap() == "much"
            # A killed process gives back what it held.
            waiting = asyncio.create_task(app.call("sharing.large", caller=AGENT))
            other.send_signal(signal.SIGKILL)
            assert (await waiting).unwrap() == "much"


@LIMITED
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from("ab"), _SHARES, st.integers(0, 4), st.booleans()), max_size=16
    )
)
def test_however_calls_of_several_processes_come_and_give_up_they_stay_within_the_allowance(
    wishes: list[tuple[int, str, Limits, int, bool]],
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        among = [Allowances(WHOLE, Path(directory) / "sandbox.lock") for _ in range(3)]
        held: dict[str, list[Limits]] = {"a": [], "b": []}

        async def hold(process: int, agent: str, limits: Limits, turns: int) -> None:
            async with among[process].taken(agent, limits, "wait"):
                held[agent].append(limits)
                assert sum(one.cpu_cores for one in held[agent]) <= WHOLE.cores
                assert sum(one.memory_bytes for one in held[agent]) <= WHOLE.memory_bytes
                try:
                    for _ in range(turns):
                        await asyncio.sleep(0)
                finally:
                    held[agent].remove(limits)

        async def all_of_them() -> None:
            tasks = [asyncio.create_task(hold(*wish)) for *wish, _ in wishes]  # pyright: ignore[reportArgumentType]
            await asyncio.sleep(0)
            for task, (*_, gives_up) in zip(tasks, wishes, strict=True):
                if gives_up:
                    task.cancel()
            async with asyncio.timeout(60):
                ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert not [one for one in ended if isinstance(one, Exception)]
            for one in among:
                async with one.taken("a", Limits(cpu_cores=4.0, memory_bytes=8 * GIB), "refuse"):
                    pass  # everything was given back

        asyncio.run(all_of_them())


@LIMITED
async def test_a_large_call_is_not_overtaken_by_small_ones_of_another_process(tmp_path: Path) -> None:
    first, second = (Allowances(WHOLE, tmp_path / "sandbox.lock") for _ in range(2))
    small, large = Limits(cpu_cores=1.0), Limits(cpu_cores=4.0)
    order: list[str] = []

    async def take(among: Allowances, limits: Limits, name: str) -> None:
        async with among.taken("a", limits, "wait"):
            order.append(name)

    async with AsyncExitStack() as running:
        await running.enter_async_context(first.taken("a", small, "wait"))
        tasks = [asyncio.create_task(take(second, large, "large"))]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(take(first, small, "small")))
        with pytest.raises(Failure, match="whole allowance"):
            async with first.taken("a", small, "refuse"):
                pass
    await asyncio.gather(*tasks)
    assert order == ["large", "small"]


@LIMITED
@given(st.lists(st.tuples(_SHARES, st.integers(0, 8)), max_size=24))
def test_a_share_fits_exactly_where_enough_is_left_in_however_many_pieces(steps: list[tuple[Limits, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as everything:
        shares = Shares(Path(directory) / "sandbox.lock", cores=WHOLE.cores, memory_bytes=WHOLE.memory_bytes)
        held: list[tuple[Limits, ExitStack]] = []
        for limits, leaver in steps:
            if leaver < len(held):
                held.pop(leaver)[1].close()
            cores = sum(one.cpu_cores for one, _ in held) + limits.cpu_cores
            memory = sum(one.memory_bytes for one, _ in held) + limits.memory_bytes
            with ExitStack() as mine:
                share = shares.ask("a", limits)
                mine.callback(share.close)
                assert share.taken() == (cores <= WHOLE.cores and memory <= WHOLE.memory_bytes)
                if cores <= WHOLE.cores and memory <= WHOLE.memory_bytes:
                    held.append((limits, everything.enter_context(mine.pop_all())))


async def test_a_file_that_cannot_be_used_stops_the_call_and_one_that_was_removed_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "sandbox.lock"
    path.mkdir()
    allowances = Allowances(WHOLE, path)
    with pytest.raises(Failure, match=r"sandbox\.lock") as refused:
        async with allowances.taken("a", Limits(), "wait"):
            pass
    assert refused.value.code == "E3801"
    path.rmdir()
    for _ in range(2):
        async with allowances.taken("a", Limits(), "refuse"):
            assert path.stat().st_mode & 0o777 == 0o600
        path.unlink()
    assert os.listdir(tmp_path) == []

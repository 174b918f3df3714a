"""The sandbox: runs a job isolated and bounded, and reports how it ended. Survives whatever the job does.

    async with await Sandbox.open() as sandbox:
        outcome = await sandbox.run(PythonJob(source=source, entry="main", arguments={"x": 1}))

The kind of isolation depends on the host, so it is found by trying: `Sandbox.open` goes down the ladder of back ends
that the operator accepts and keeps the first that runs a probe and is seen to confine it. If none does, the sandbox
opens all the same and refuses every job with the reasons: an Interlock without a sandbox still serves the tools that
need none. Nothing ever runs on less than what was requested.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Self

from interlock.executors.sandbox.allowance import Allowance, Allowances, Excess
from interlock.executors.sandbox.child import Backend, Child, IsolationError, Shape
from interlock.executors.sandbox.job import Job, JobOutcome
from interlock.executors.sandbox.ladder import BACKENDS, Rung, climb, probe_all
from interlock.executors.sandbox.pool import Host
from interlock.executors.sandbox.watch import Report, Save, Watch


class Sandbox:
    """Runs jobs on the best isolation that this host offers."""

    def __init__(self, host: Host, backend: Backend | None, rungs: Sequence[Rung], allowances: Allowances) -> None:
        self._host = host
        self._backend = backend
        self._rungs = tuple(rungs)
        self._allowances = allowances

    @classmethod
    async def open(
        cls,
        *,
        host: Host | None = None,
        backends: Sequence[str] = BACKENDS,
        cgroups: bool = True,
        spares: int = 4,
        recycle_after: int = 1000,
        allowance: Allowance | None = None,
        shared: Path | None = None,
    ) -> Self:
        """Find out which isolation works here. `shared`: the file by which several processes count the calls of an
        agent.
        """
        host = host or Host()
        backend, rungs = await climb(host, backends, cgroups=cgroups, spares=spares, recycle_after=recycle_after)
        return cls(host, backend, rungs, Allowances(allowance or Allowance(), shared))

    @property
    def backend(self) -> str | None:
        """The back end in use; None if there is none."""
        return None if self._backend is None else self._backend.name

    async def describe(self) -> list[Rung]:
        """List every way of isolation, whether it works on this host, and if not, why. Tries those not tried yet."""
        return await probe_all(self._host, self._rungs)

    async def run(
        self,
        job: Job,
        *,
        agent: str = "",
        excess: Excess = "wait",
        exit_evidence: bool = False,
        on_progress: Report | None = None,
        on_partial: Report | None = None,
        on_checkpoint: Save | None = None,
        cancelled: asyncio.Event | None = None,
    ) -> JobOutcome:
        """Run a job to its end. `exit_evidence`: also after a success, wait for exit status and figures."""
        backend = self._backend
        if backend is None or job.tier not in backend.tiers:
            return JobOutcome(status="isolation", why=self._why_not(job))
        unfit = next((why for one in job.mounts if (why := self._host.unfit(one)) is not None), None)
        if unfit is not None:
            return JobOutcome(status="isolation", why=unfit)
        async with self._allowances.taken(agent, job.limits, excess):
            try:
                child = await backend.take(Shape.of(job))
            except IsolationError as error:
                return JobOutcome(status="isolation", why=f"isolation could not be set up ({error})")
            try:
                async with AsyncExitStack() as network:
                    refused = await network.enter_async_context(_served(job, child))
                    watch = Watch(
                        child,
                        job,
                        # When a call that can write files is answered, the files must not change any more.
                        exit_evidence=exit_evidence or job.writes,
                        on_progress=on_progress,
                        on_partial=on_partial,
                        on_checkpoint=on_checkpoint,
                        refused=refused,
                        hang_up=network.aclose,
                    )
                    return await watch.outcome(cancelled)
            finally:
                try:
                    if job.writes:
                        await child.gone()
                finally:
                    backend.give_back(child)

    def _why_not(self, job: Job) -> str:
        if self._backend is None:
            return "nothing on this host isolates; `interlock doctor` says why"
        return f"{self._backend.name} does not isolate tier {job.tier}"

    async def close(self) -> None:
        """End everything that runs, and leave nothing behind."""
        if self._backend is not None:
            await self._backend.close()
            self._backend = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _served(job: Job, child: Child) -> AbstractAsyncContextManager[list[str]]:
    """The proxy that serves the call's network. Without one, nothing listens there."""
    if child.inside is not None and job.egress is not None:
        return job.egress(child.inside)
    if child.inside is not None:
        child.inside.close()
    return nullcontext([])

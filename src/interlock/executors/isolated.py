"""Runs tools in the sandbox: Python functions, whose module is sent inside as source, and programs, word by word.

The reports of a function (effects, costs, undo arguments, session values, checkpoints) are copied into its context,
where they count as the tool's own statements. A program reports nothing but its output. Either may produce files, if
its manifest says so. How the call ended is determined by the sandbox, not by the tool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from interlock.call.context import Context
from interlock.call.executor import Executor
from interlock.call.phases import Call, Granted
from interlock.core.errors import Failure
from interlock.executors.confinement import Confinement
from interlock.executors.site import Site

if TYPE_CHECKING:
    from interlock.executors.egress import EgressRefusal
    from interlock.executors.sandbox.job import JobOutcome
    from interlock.executors.sandbox.supervisor import Sandbox

# The number of stderr lines in the log.
LOGGED_LINES = 20
State = Literal["closed", "opening", "open", "refusing"]


# The sandbox, its jobs and the egress proxy are imported only when needed: most processes never need them.
async def _open(shared: Path | None) -> Sandbox:
    from interlock.executors.sandbox.supervisor import Sandbox

    return await Sandbox.open(shared=shared)


def make(site: Site) -> IsolatedExecutor:
    return IsolatedExecutor(site)


class IsolatedExecutor(Executor):
    """Runs functions and programs in isolation."""

    def __init__(self, site: Site, opener: Callable[[], Awaitable[Sandbox]] | None = None) -> None:
        super().__init__(site.grant)
        self._site = site
        self.grace_s = site.grace_s
        self._confinement = Confinement(site)
        self._opener = opener or partial(_open, site.sandbox)
        self._opening: asyncio.Future[Sandbox] | None = None

    async def execute(self, granted: Granted, context: Context | None) -> Any:
        from interlock.executors.program import program_job, program_output
        from interlock.executors.sandbox.job import failure_of
        from interlock.executors.sandboxed_function import function_job, function_output

        call, execution = granted, granted.tool.contract.manifest.execution
        program = execution if execution is not None and execution.argv else None
        sandbox = await self._sandbox()
        refused: list[EgressRefusal] = []
        confined = self._confinement.of(granted, refused)
        job = (
            function_job(granted, context, confined, self._site.checkpoints, self.grace_s)
            if program is None
            else program_job(program, granted, confined, self._site.clock, self.grace_s)
        )
        outcome = await sandbox.run(
            job,
            agent="" if call.request.caller is None else call.request.caller.acting,
            exit_evidence=call.more.meter is not None,
            on_progress=None if context is None else lambda facts: context.progress(**facts),
            on_partial=None if context is None else context.partial,
            on_checkpoint=None if context is None else context.checkpoint,
        )
        self._note(call, outcome)
        if refused:
            from interlock.executors.egress import violation

            # INVARIANT: a call that tried to reach a forbidden host has failed, whatever it made of the refusal.
            raise violation(refused)
        if program is None:
            if outcome.status != "ok":
                raise _with_last_words(failure_of(outcome, granted.tool.ref), outcome)
            return function_output(granted, context, outcome)
        try:
            return program_output(program, granted, outcome)
        except Failure as failure:
            raise _with_last_words(failure, outcome) from None

    def _note(self, call: Call, outcome: JobOutcome) -> None:
        """Meter a call, and have attempts at what the sandbox forbids recorded."""
        if call.more.meter is not None and outcome.cpu_ns is not None:
            call.more.meter.record_use(outcome.cpu_ns, outcome.wall_ns, outcome.max_rss or 0)
        if outcome.violations:
            self._site.violated(call, outcome.violations)

    async def _sandbox(self) -> Sandbox:
        """The one sandbox of this process. Opened when it is first needed: most processes never need it."""
        if self._opening is None or _broke(self._opening):
            self._opening = asyncio.ensure_future(self._opener())
        return await asyncio.shield(self._opening)

    async def warm_up(self) -> None:
        """Open the sandbox before a call needs it, with the modules that every declared tool imports.

        Isolation is found by trying, which on a busy machine can take as long as a call may.
        """
        from interlock.executors.sandbox.job import PythonJob

        await (await self._sandbox()).run(PythonJob(source="import interlock\ndef main(): pass", entry="main"))

    @property
    def state(self) -> State:
        """Whether the sandbox is open, and whether isolation works."""
        if self._opening is None:
            return "closed"
        if not self._opening.done():
            return "opening"
        return "refusing" if _broke(self._opening) or self._opening.result().backend is None else "open"

    def health(self) -> Mapping[str, Literal["healthy", "degraded"]]:
        state = self.state
        return {} if state == "closed" else {"sandbox": "healthy" if state == "open" else "degraded"}

    async def close(self) -> None:
        if self._opening is not None:
            await asyncio.wait({self._opening})
            if not _broke(self._opening):
                await self._opening.result().close()


def _broke(opening: asyncio.Future[Sandbox]) -> bool:
    """Whether opening has failed. Missing isolation is no failure: the sandbox refuses every call with the reason."""
    return opening.done() and (opening.cancelled() or opening.exception() is not None)


def _with_last_words(failure: Failure, outcome: JobOutcome) -> Failure:
    """Add the last lines of stderr to a failure as a note: for the log, not for the caller.

    Lines stay whole, so that the logger can find private values in them.
    """
    from interlock.executors.program import last_lines

    lines = last_lines(outcome.stderr, LOGGED_LINES)
    if lines:
        failure.add_note("\n".join(("its last words on stderr:", *lines)))
    return failure

"""Code inside hears that its call is over, has a moment to clean up, and gains nothing by it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import textwrap
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from interlock.executors.sandbox.job import JobOutcome, Limits, ProgramJob, PythonJob, failure_of
from interlock.executors.sandbox.supervisor import Sandbox
from tests.needs import missing
from tests.support.sandboxes import ROOMY

ON_SESSION = pytest.mark.asyncio(loop_scope="session")
ABORTED = pytest.mark.proves("LIFE-02")
# Longer than the cleaning takes on any machine. A test that would wait for its end fails at its own limit.
AMPLE_S = 600.0
LATE_S = 3.0

ASYNC = """
    import asyncio
    from interlock import Context
    async def main(ctx: Context):
        ctx.progress("begun")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            print("cleaned up", ctx.cancelled, flush=True)
            raise
"""
PLAIN = """
    from interlock import Context
    def main(ctx: Context):
        before = ctx.cancelled
        ctx.progress("begun")
        while not ctx.cancelled: pass
        print("cleaned up", not before, flush=True)
"""
WITHOUT = """
    import asyncio, sys
    async def main():
        print("begun", file=sys.stderr, flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            print("cleaned up", True, flush=True)
"""
SHELL = "trap 'echo cleaned up True; exit 0' TERM; echo begun >&2; while :; do sleep 0.01; done"


def python(body: str, /, grace_s: float = AMPLE_S, **given: Any) -> PythonJob:
    return PythonJob(source=textwrap.dedent(body), entry="main", grace_s=grace_s, **given)


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["zygote", "bubblewrap"])
async def each(request: pytest.FixtureRequest) -> AsyncGenerator[Sandbox]:
    """A sandbox on each back end that every machine of ours has."""
    async with await Sandbox.open(backends=(request.param,), spares=1, allowance=ROOMY) as opened:
        if opened.backend is None:
            missing(f"{request.param} does not isolate here: {await opened.describe()}")
        yield opened


async def cut_off(sandbox: Sandbox, job: PythonJob | ProgramJob, **given: Any) -> JobOutcome:
    """Run a job, and cancel it once it reports something."""
    over = asyncio.Event()
    return await sandbox.run(job, cancelled=over, on_progress=lambda _: over.set(), **given)


@ABORTED
@pytest.mark.parametrize("source", [ASYNC, PLAIN], ids=["async", "plain"])
@ON_SESSION
async def test_a_function_whose_call_is_cancelled_hears_it_and_cleans_up(each: Sandbox, source: str) -> None:
    outcome = await cut_off(each, python(source))
    assert (outcome.status, outcome.stdout) == ("killed", b"cleaned up True\n")
    assert failure_of(outcome, "x").code == "E3703"


@ABORTED
@pytest.mark.parametrize(
    "job",
    [python(ASYNC), python(PLAIN), python(WITHOUT), ProgramJob(argv=("sh", "-c", SHELL), grace_s=AMPLE_S)],
    ids=["async", "plain", "no context", "program"],
)
@ON_SESSION
async def test_code_whose_time_is_up_hears_it_and_cleans_up(each: Sandbox, job: PythonJob | ProgramJob) -> None:
    outcome = await each.run(replace(job, limits=Limits(wall_s=LATE_S)))
    assert (outcome.status, outcome.stdout) == ("timeout", b"cleaned up True\n")
    assert failure_of(outcome, "x").code == "E3402"


@ABORTED
@ON_SESSION
async def test_who_gives_up_a_call_waits_until_its_code_has_cleaned_up(sandbox: Sandbox) -> None:
    begun = asyncio.Event()
    source = ASYNC.replace('print("cleaned up", ctx.cancelled, flush=True)', 'ctx.progress("not heard")')
    heard: list[Any] = []
    job = python(source)

    def hear(facts: Any) -> None:
        heard.append(facts)
        begun.set()

    running = asyncio.create_task(sandbox.run(job, on_progress=hear))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [one["message"] for one in heard] == ["begun"]


DEAF = """
    import asyncio, time
    from interlock import Context
    async def main(ctx: Context):
        ctx.progress("begun")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
        print("goes on", flush=True)
        AFTER
"""


@pytest.mark.supports("EXEC-04")
@ABORTED
@pytest.mark.parametrize(
    "after",
    [
        "return 7",
        "ctx.progress('more'); ctx.partial(1); ctx.effect('file:x', 'UPDATE'); ctx.session['a'] = 1; return 7",
        "await ctx.checkpoint('done', 7); return 7",
        "raise ValueError('mine')",
    ],
)
@ON_SESSION
async def test_nothing_that_code_reports_after_the_end_of_its_call_counts(sandbox: Sandbox, after: str) -> None:
    heard: list[Any] = []
    over = asyncio.Event()

    async def save(*what: Any) -> None:
        heard.append(what)

    def hear(facts: Any) -> None:
        heard.append(facts)
        over.set()

    job = python(DEAF.replace("AFTER", after), limits=Limits(files=1))
    outcome = await sandbox.run(job, cancelled=over, on_progress=hear, on_partial=hear, on_checkpoint=save)
    assert len(heard) == 1
    assert (outcome.status, outcome.stdout) == ("killed", b"goes on\n")
    assert (outcome.value, outcome.error, outcome.reports, outcome.files) == (None, None, {}, ())


@pytest.mark.supports("EXEC-04")
@ABORTED
@pytest.mark.parametrize(
    "after",
    [
        "time.sleep(900)",
        "while True: pass",
        "while True: import os; os.write(3, b'R' * 65536)",
        "import os; [os.fork() for _ in range(3)]; time.sleep(900)",
        "import signal, os; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; os.close(3); time.sleep(900)",
    ],
)
@ON_SESSION
async def test_code_that_does_not_end_is_killed_with_all_it_started(sandbox: Sandbox, after: str) -> None:
    outcome = await cut_off(sandbox, python(DEAF.replace("AFTER", after), grace_s=0.2))
    assert (outcome.status, outcome.value, outcome.reports) == ("killed", None, {})


@ABORTED
@ON_SESSION
async def test_code_that_cannot_hear_is_killed_at_once(sandbox: Sandbox) -> None:
    source = """
        import sys, time
        def main():
            print("begun", flush=True)
            time.sleep(900)
    """
    outcome = await sandbox.run(python(source, grace_s=0.0, limits=Limits(wall_s=LATE_S)))
    assert (outcome.status, outcome.stdout) == ("timeout", b"begun\n")


@contextlib.asynccontextmanager
async def serving(listener: socket.socket) -> AsyncGenerator[list[str]]:
    """A network that answers whoever connects."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(answer, sock=listener)
    try:
        yield []
    finally:
        server.close()


@pytest.mark.supports("EXEC-06")
@ABORTED
@ON_SESSION
async def test_code_whose_call_is_over_reaches_nothing_any_more(sandbox: Sandbox) -> None:
    source = """
        import asyncio, os, socket, urllib.parse
        from interlock import Context
        def asked():
            place = urllib.parse.urlsplit(os.environ["HTTP_PROXY"])
            with socket.create_connection((place.hostname, place.port)) as line:
                return line.recv(5).decode()
        async def main(ctx: Context):
            print(asked(), flush=True)
            ctx.progress("begun")
            try:
                await asyncio.Event().wait()
            finally:
                while True:
                    try:
                        asked()
                    except ConnectionRefusedError:
                        break
                print("refused", flush=True)
    """
    outcome = await cut_off(sandbox, python(source, tier=2, egress=serving))
    assert (outcome.status, outcome.stdout) == ("killed", b"hello\nrefused\n")

"""What a job can do, what it gets and gives, and how it ends when it ends well or is made to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

import interlock
from interlock.core.errors import Failure
from interlock.executors.sandbox.allowance import Allowance, Allowances
from interlock.executors.sandbox.cgroups import PREFIX, Cgroups
from interlock.executors.sandbox.job import GIB, MIB, JobOutcome, Limits, Mount, ProgramJob, PythonJob, Tier, failure_of
from interlock.executors.sandbox.pool import Host
from interlock.executors.sandbox.supervisor import Sandbox
from tests import processes
from tests.sandbox.attacks import namespaces
from tests.support.sandboxes import ROOMY, groups_left, has_cgroups, strays

ON_SESSION = pytest.mark.asyncio(loop_scope="session")
# For whatever happens in its own time, however busy the machine is.
PATIENCE_S = 120.0
STREAMS = pytest.mark.proves("EXEC-05")
LIMITED = pytest.mark.proves("EXEC-04")


def python(body: str, /, **given: Any) -> PythonJob:
    return PythonJob(source=textwrap.dedent(body), entry="main", **given)


@ON_SESSION
async def test_a_function_gets_its_arguments_and_gives_its_result(sandbox: Sandbox) -> None:
    outcome = await sandbox.run(python("def main(a, b): return {'sum': a + b}", arguments={"a": 2, "b": 3}))
    assert (outcome.status, outcome.value) == ("ok", {"sum": 5})


@ON_SESSION
async def test_a_declared_tool_works_as_it_does_outside(sandbox: Sandbox) -> None:
    source = """
        import datetime
        from typing import Annotated
        from interlock import Context, Field, tool

        @tool(version="1.0.0", mutation_class="read_only")
        async def main(
            ctx: Context,
            day: Annotated[datetime.date, Field(description="The day", examples=["2026-01-31"])],
            times: Annotated[int, Field(description="How often", examples=[2])],
        ) -> list[datetime.date]:
            '''Repeats a day.'''
            ctx.progress("half way", percent=50)
            ctx.partial("first")
            ctx.effect("file:a", "write", before=1, after=2)
            ctx.compensate_with(day="back")
            ctx.attest("rows", 3, lambda: 4)
            ctx.cost(network=0.25)
            assert 0 < ctx.remaining_s <= 30 and not ctx.cancelled
            assert ctx.secret("key") == "s3cret" and ctx.caller.id == "ada"
            return [day + datetime.timedelta(days=1)] * times
    """
    progress: list[Any] = []
    partial: list[Any] = []
    job = python(
        source,
        arguments={"day": "2026-01-31", "times": 2.0},
        secrets={"key": b"s3cret"},
        call={"caller": {"id": "ada"}},
    )
    outcome = await sandbox.run(job, on_progress=progress.append, on_partial=partial.append)
    assert (outcome.status, outcome.value) == ("ok", ["2026-02-01", "2026-02-01"])
    assert progress == [{"message": "half way", "percent": 50}]
    assert partial == ["first"]
    assert outcome.reports["changes"] == [{"resource": "file:a", "operation": "write", "before": 1, "after": 2}]
    assert outcome.reports["attestations"] == [{"what": "rows", "claimed": 3, "observed": 4}]
    assert outcome.reports["compensation"] == {"day": "back"}
    assert outcome.reports["cost"]["network"] == 250_000


@ON_SESSION
async def test_a_failure_that_a_tool_names_keeps_its_name_and_others_say_only_their_type(sandbox: Sandbox) -> None:
    named = await sandbox.run(
        python(
            "def main():\n    from interlock import Failure\n    raise Failure('UPSTREAM_FAILURE', 'the bank is shut')"
        )
    )
    plain = await sandbox.run(python("def main(): raise ValueError('/etc/hidden')"))
    forged = await sandbox.run(
        python("class F(Exception):\n    row = 1; retryable = True; code = 'E3405'\ndef main(): raise F")
    )
    assert (failure_of(named, "a.b").code, failure_of(named, "a.b").message) == ("E3502", "the bank is shut")
    assert (failure_of(plain, "a.b").code, failure_of(plain, "a.b").message) == ("E3401", "a.b failed: ValueError")
    assert failure_of(forged, "a.b").code == "E3401"


@ON_SESSION
async def test_only_listed_dependencies_can_be_imported(sandbox: Sandbox) -> None:
    source = "def main():\n    import rich\n    return rich.__name__"
    refused = await sandbox.run(python(source))
    assert refused.error == {
        "type": "ModuleNotFoundError",
        "message": "`rich` is not among the dependencies of this tool",
    }
    allowed = await sandbox.run(python(source, imports=frozenset(("rich",))))
    assert allowed.value == "rich"


@STREAMS
@ON_SESSION
@pytest.mark.parametrize("exit_evidence", [False, True])
async def test_streams_exit_code_and_signal_come_apart(sandbox: Sandbox, exit_evidence: bool) -> None:
    async def run(script: str, stdin: bytes = b"") -> JobOutcome:
        job = ProgramJob(argv=("sh", "-c", script), stdin=stdin)
        return await sandbox.run(job, exit_evidence=exit_evidence)

    good = await run("cat; echo complaint >&2", b"parameters")
    assert (good.status, good.stdout, good.stderr, good.exit_code) == ("ok", b"parameters", b"complaint\n", 0)
    bad = await run("echo out; echo err >&2; exit 3")
    assert (bad.status, bad.stdout, bad.stderr, bad.exit_code) == ("error", b"out\n", b"err\n", 3)
    assert failure_of(bad, "x").code == "E3401"
    dead = await run("echo last; kill -SEGV $$")
    assert (dead.status, dead.stdout, dead.signal) == ("crashed", b"last\n", signal.SIGSEGV)
    assert failure_of(dead, "x").code == "E3404"
    flood = await run("yes | head -c 100000000")
    assert (flood.status, len(flood.stdout)) == ("limit", MIB)


@STREAMS
@ON_SESSION
async def test_after_a_timeout_the_whole_tree_is_gone(sandbox: Sandbox) -> None:
    script = "(setsid sleep 987 &) ; setsid sleep 987 & sleep 987"
    outcome = await sandbox.run(ProgramJob(argv=("sh", "-c", script), limits=Limits(wall_s=0.5)))
    assert outcome.status == "timeout"
    assert failure_of(outcome, "x").code == "E3402"


@pytest.mark.supports("EXEC-12")
@ON_SESSION
async def test_arguments_reach_a_program_as_they_are(sandbox: Sandbox) -> None:
    hostile = ("a b", "'\"", "$(id)", "`id`", "-rf", "line\nline", "*", ";id", "é\u2028")
    code = "import json,sys; print(json.dumps(sys.argv[1:]))"
    outcome = await sandbox.run(ProgramJob(argv=("python3", "-I", "-c", code, *hostile)))
    assert tuple(json.loads(outcome.stdout)) == hostile
    missing = await sandbox.run(ProgramJob(argv=("no-such-program",)))
    assert failure_of(missing, "x").code == "E3401"


@ON_SESSION
async def test_programs_get_secrets_as_files_and_never_as_words(sandbox: Sandbox) -> None:
    script = "cat /tmp/.secrets/key; env; cat /proc/self/cmdline"
    outcome = await sandbox.run(ProgramJob(argv=("sh", "-c", script), secrets={"key": b"s3cret"}))
    assert outcome.stdout.startswith(b"s3cret")
    assert outcome.stdout.count(b"s3cret") == 1


@ON_SESSION
async def test_files_left_in_the_output_directory_come_back(sandbox: Sandbox) -> None:
    script = "mkdir out/a; printf one > out/a/b; printf two > out/c; ln -s /etc/passwd out/d; mkfifo out/e"
    outcome = await sandbox.run(ProgramJob(argv=("sh", "-c", script), limits=Limits(files=2)))
    assert {(one.path, one.content) for one in outcome.files} == {("a/b", b"one"), ("c", b"two")}
    assert all(len(one.sha256) == 64 and one.size == 3 for one in outcome.files)


@ON_SESSION
@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "", "x\\u0000"])
async def test_a_forged_file_name_ends_the_call(sandbox: Sandbox, path: str) -> None:
    source = f"""
        import os, struct
        def main():
            body = b'"{path}"' + bytes([10]) + b"content"
            os.write(3, struct.pack("<cI", b"F", len(body)) + body)
    """
    assert (await sandbox.run(python(source, limits=Limits(files=2)))).status == "no_result"


@pytest.mark.supports("EXEC-03")
@ON_SESSION
async def test_nothing_leaks_from_one_call_to_the_next(sandbox: Sandbox) -> None:
    stain = """
        import builtins, json, os, sys, threading
        def main():
            builtins.LEAK = json.LEAK = 1
            sys.modules["evil"] = json
            os.environ["LEAK"] = "1"
            open("/tmp/leak", "w").write("x")
            threading.Thread(target=lambda: None).start()
            return 1
    """
    look = """
        import builtins, json, os, sys
        def main():
            return [hasattr(builtins, "LEAK"), hasattr(json, "LEAK"), "evil" in sys.modules, os.listdir("/tmp"),
                    "LEAK" in os.environ, sorted(os.listdir("/proc/self/fd")), os.getpid(),
                    [one for one in os.listdir("/proc") if one.isdigit()]]
    """
    clean = (await sandbox.run(python(look))).value
    assert clean == [False, False, False, [], False, ["0", "1", "2", "3", "4"], 1, ["1"]]
    for _ in range(4):
        assert (await sandbox.run(python(stain))).value == 1
        assert (await sandbox.run(python(look))).value == clean


@pytest.mark.supports("EXEC-03")
@ON_SESSION
async def test_calls_at_the_same_time_do_not_see_or_reach_one_another(sandbox: Sandbox) -> None:
    began = asyncio.Event()
    victim = python(
        """
        import os, time
        from interlock import Context
        async def main(ctx: Context):
            open("/tmp/secret", "w").write("s")
            child = os.fork()
            if child == 0:
                time.sleep(0.5); os._exit(7)
            ctx.progress("ready")
            return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.listdir("/tmp")]
        """
    )
    attacker = python(
        """
        import os, signal
        def main():
            signal.signal(15, signal.SIG_IGN)
            for target in (-1, 0):
                try: os.kill(target, 15)
                except OSError: pass
            return [os.listdir("/tmp"), [one for one in os.listdir("/proc") if one.isdigit()]]
        """
    )
    running = asyncio.create_task(sandbox.run(victim, on_progress=lambda _: began.set()))
    await asyncio.wait_for(began.wait(), 20)
    assert (await sandbox.run(attacker)).value == [[], ["1"]]
    assert (await running).value == [7, ["secret"]]


@pytest.mark.proves("EXEC-03")
@ON_SESSION
async def test_a_call_has_every_namespace_to_itself(sandbox: Sandbox) -> None:
    source = """
        import os
        def main(names):
            return {name: os.readlink("/proc/self/ns/" + name) for name in names}
    """
    job = python(source, arguments={"names": ["user", "pid", "mnt", "net", "ipc", "uts", "cgroup"]})
    first, second = [(await sandbox.run(job)).value for _ in range(2)]
    assert first.keys() == second.keys() == {"user", "pid", "mnt", "net", "ipc", "uts", "cgroup"}
    assert set(first.values()).isdisjoint(namespaces().values())
    assert set(second.values()).isdisjoint(namespaces().values())


@pytest.mark.proves("EXEC-03")
@ON_SESSION
async def test_code_that_changes_itself_changes_nothing_of_the_next_call(sandbox: Sandbox) -> None:
    source = """
        import pathlib
        answer = 1
        def main():
            told = answer
            pathlib.Path(main.__code__.co_filename).write_text("def main(): return 3")  # in its own /tmp
            globals()["answer"] = 2
            globals()["main"] = lambda: 3
            return told
    """
    assert [(await sandbox.run(python(source))).value for _ in range(4)] == [1, 1, 1, 1]


@pytest.mark.proves("EXEC-03")
@pytest.mark.parametrize("mode", [0o755, 0o4755, 0o6755], ids=["plain", "setuid", "setuid and setgid"])
@ON_SESSION
async def test_a_program_with_the_setuid_bit_makes_nobody_another_user(
    sandbox: Sandbox, tmp_path: Path, mode: int
) -> None:
    directory = tmp_path / "bin"
    directory.mkdir(mode=0o755)
    program = directory / "who"
    shutil.copy(shutil.which("id") or "", program)
    program.chmod(mode)
    script = "cd /in/x; ./who -u; ./who -ru; ./who -g; ./who -rg"
    job = ProgramJob(argv=("sh", "-c", script), mounts=(Mount(directory, "/in/x"),), tier=1)
    outcome = await sandbox.run(job)
    effective, real, group, real_group = map(int, outcome.stdout.split())
    assert (outcome.status, effective, group) == ("ok", real, real_group)
    assert 0 not in (effective, group)


@pytest.mark.supports("LIFE-15")
@ON_SESSION
async def test_a_cancelled_call_is_killed_with_all_it_started(sandbox: Sandbox) -> None:
    cancelled = asyncio.Event()
    source = """
        import os, time
        from interlock import Context
        def main(ctx: Context):
            for _ in range(3):
                if os.fork() == 0: time.sleep(900)
            ctx.progress("started")
            time.sleep(900)
    """
    outcome = await sandbox.run(python(source), cancelled=cancelled, on_progress=lambda _: cancelled.set())
    assert outcome.status == "killed"
    assert failure_of(outcome, "x").code == "E3703"
    task = asyncio.create_task(sandbox.run(python("import time\ndef main(): time.sleep(900)")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@contextlib.asynccontextmanager
async def proxy(listener: socket.socket) -> AsyncGenerator[list[str]]:
    """A proxy that refuses everything, in words."""
    refused: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if request := await reader.readline():
            refused.append(request.split()[1].decode())
            writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, sock=listener)
    try:
        yield refused
    finally:
        server.close()


@pytest.mark.proves("EXEC-06")
@ON_SESSION
async def test_requests_reach_the_hosts_proxy_and_what_it_refuses_is_a_violation(sandbox: Sandbox) -> None:
    source = """
        import urllib.request
        def main(): return urllib.request.urlopen("http://evil.example/x", timeout=5).status
    """
    outcome = await sandbox.run(python(source, tier=2, egress=proxy))
    assert outcome.violations == ("egress http://evil.example/x",)
    assert failure_of(outcome, "a.b").code == "E3406"
    alone = await sandbox.run(python(source, tier=2))
    assert (alone.status, alone.violations) == ("error", ())


@pytest.mark.proves("EXEC-02")
@ON_SESSION
@pytest.mark.parametrize("tier", [0, 1, 2, 3])
async def test_each_tier_reaches_what_it_may_and_no_more(sandbox: Sandbox, tmp_path: Path, tier: Tier) -> None:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    (inputs / "a").write_text("given")
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    for directory in (inputs, *inputs.parents):
        if directory.is_relative_to("/tmp/pytest-of-root") or directory == inputs:
            directory.chmod(directory.stat().st_mode | 0o055)
    source = f"""
        import os, socket
        def tried(function):
            try: return function()
            except OSError: return None
        def main():
            sock = tried(lambda: socket.socket())
            if "INTERLOCK_OUT" in os.environ:
                open(os.environ["INTERLOCK_OUT"] + "/left", "w").write("kept")
            return {{
                "input": tried(lambda: open("/in/data/a").read()),
                "written": tried(lambda: open("/in/data/a", "w").write("x")),
                "host": tried(lambda: open({__file__!r}).read(8)),
                "env": os.environ.get("GIVEN"),
                "proxy": sock is not None and tried(lambda: sock.connect(("127.0.0.1", 3128)) or "reached"),
                "other": sock is not None and tried(lambda: socket.socket().connect(("192.0.2.1", 80)) or "reached"),
                "server": sock and tried(lambda: socket.socket().connect(("127.0.0.1", {port})) or "reached"),
                "root": tried(lambda: open("/x-sandbox", "w")) is not None and os.unlink("/x-sandbox") is None,
            }}
    """
    given: dict[str, Any] = {}
    if tier in (1, 2):
        given |= {"mounts": (Mount(inputs, "/in/data"),), "env": {"GIVEN": "yes"}}
    if tier == 2:
        given["egress"] = proxy
    if tier == 3:
        given |= {"ticket": "T-1", "env": {"GIVEN": "yes"}}
    if tier < 3 or not __file__.startswith("/tmp/"):  # where modules are in /tmp, tier 3 has none of its own
        given["limits"] = Limits(files=1)
    with listener:
        outcome = await sandbox.run(python(source, tier=tier, **given), exit_evidence=True)
    assert [(one.path, one.content) for one in outcome.files] == ([("left", b"kept")] if "limits" in given else [])
    files = "given" if tier in (1, 2) else None
    common = {"input": files, "written": None, "host": '"""What ' if tier == 3 else None}
    common |= {"env": "yes" if tier else None, "root": tier == 3 and os.getuid() == 0, "other": outcome.value["other"]}
    common["server"] = "reached" if tier == 3 else None
    assert outcome.value == {**common, "proxy": "reached" if tier == 2 else False if tier < 2 else None}
    assert outcome.value["other"] in ((False,) if tier < 2 else (None,) if tier == 2 else (None, "reached"))
    if tier == 2:
        assert set(outcome.violations) - {f"connect 127.0.0.1 port {port}"} == {"connect 192.0.2.1 port 80"}


def test_what_is_installed_beside_the_package_goes_inside_and_what_lies_beside_it_in_a_checkout_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = os.path.realpath(sysconfig.get_path("purelib"))
    for beside, seen in ((installed, True), (os.path.realpath(tmp_path), False)):
        monkeypatch.setattr(interlock, "__file__", f"{beside}/interlock/__init__.py")
        readable = Host().readable
        assert (beside in readable) is seen
        assert f"{beside}/interlock" in readable
        assert installed in readable


@pytest.mark.proves("EXEC-02")
def test_what_a_tier_does_not_have_cannot_be_asked_for() -> None:
    refusals: tuple[tuple[dict[str, Any], str], ...] = (
        ({"tier": 3}, "E3208"),
        ({"tier": 0, "env": {"A": "b"}}, "E3210"),
        ({"tier": 0, "mounts": (Mount(Path("/usr"), "/in/a"),)}, "E3210"),
    )
    for said, code in refusals:
        with pytest.raises(Failure) as refused:
            ProgramJob(argv=("true",), **said)
        assert refused.value.code == code
    with pytest.raises(Failure):
        Mount(Path("/usr"), "/in/../usr")


BOMBS = {
    "memory": ("E3403", "kept = []\n    while True: kept.append(bytearray(os.urandom(1 << 20)))"),
    "storage": ("E3407", "for i in range(64): open(f'/tmp/{i}', 'wb', 0).write(b'x' * (1 << 20))"),
    "processes": (
        "E3407",
        "while True:\n        try:\n            if os.fork() == 0: continue\n        except OSError: pass",
    ),
    "output": ("E3407", "while True: os.write(1, b'x' * 65536)"),
    "processor": ("E3402", "while True: pass"),
}


def bomb(kind: str, wall_s: float) -> PythonJob:
    small = Limits(memory_bytes=64 * MIB, pids=8, tmp_bytes=2 * MIB, wall_s=wall_s, cpu_s=30)
    return python(f"import os\ndef main():\n    {BOMBS[kind][1]}", limits=small)


@pytest_asyncio.fixture(loop_scope="session", params=[True, False], ids=["with groups", "without groups"])
async def besieged(request: pytest.FixtureRequest) -> AsyncGenerator[tuple[Sandbox, bool]]:
    """A sandbox, and whether its calls have groups: where the host gives none, what bounds calls then is asserted."""
    async with await Sandbox.open(backends=("zygote",), cgroups=request.param, spares=2, allowance=ROOMY) as opened:
        yield opened, request.param and has_cgroups()


@LIMITED
@ON_SESSION
async def test_twenty_hostile_calls_at_once_end_each_with_its_own_code_and_a_good_one_still_works(
    besieged: tuple[Sandbox, bool],
) -> None:
    sandbox, grouped = besieged
    # Without groups nobody counts refused forks: the number of processes is bounded, and time ends who goes on trying.
    expected = {kind: code for kind, (code, _) in BOMBS.items()} | ({} if grouped else {"processes": "E3402"})
    kinds = list(BOMBS) * 4
    hostile = (sandbox.run(bomb(kind, 1.0 if expected[kind] == "E3402" else 60.0)) for kind in kinds)
    good = python("def main(): return 1")
    outcomes = await asyncio.gather(*hostile, *(sandbox.run(good) for _ in range(5)))
    codes = [(kind, failure_of(outcome, "a.b").code) for kind, outcome in zip(kinds, outcomes, strict=False)]
    assert codes == [(kind, expected[kind]) for kind in kinds]
    assert [one.value for one in outcomes[20:]] == [1] * 5


@LIMITED
@ON_SESSION
async def test_a_call_that_takes_long_yields_the_processor_to_those_that_have_just_begun(
    besieged: tuple[Sandbox, bool],
) -> None:
    sandbox, grouped = besieged
    enough = asyncio.Event()
    # Processes of an earlier test may take a while to end, and their groups with them.
    others = _yielding()
    running = asyncio.create_task(sandbox.run(bomb("processor", PATIENCE_S), cancelled=enough))
    good = python("import os\ndef main(): return len(os.sched_getaffinity(0))")
    if grouped:
        await _until(lambda: len(_yielding() - others) == 1)
        assert (await sandbox.run(good)).value >= 1
    else:
        # Without groups nothing can yield: a call is kept to as many processors as its limit says.
        assert (await sandbox.run(good)).value == 1
    enough.set()
    assert (await running).status == "killed"
    # Its group is used again, by calls that have just begun as well as any.
    for _ in range(8):
        assert (await sandbox.run(good)).status == "ok"
    await _until(lambda: not _yielding() - others)


@LIMITED
def test_what_a_call_gets_when_nothing_is_said() -> None:
    assert Limits() == Limits(cpu_cores=1.0, memory_bytes=512 * MIB, tmp_bytes=100 * MIB)
    assert Allowance() == Allowance(cores=4.0, memory_bytes=8 * GIB)


def _yielding() -> set[Path]:
    """The groups of this server that hold a process and have less than a whole share of the processor."""
    found: set[Path] = set()
    whole = {"cpu.shares": 1024, "cpu.weight": 100}
    # Groups of others come and go while we look, which ends a glob but not a walk.
    for place, _, names in os.walk("/sys/fs/cgroup"):
        group = Path(place)
        if not group.parent.name.startswith(f"{PREFIX}{os.getpid()}-"):
            continue
        for name in whole.keys() & set(names):
            with contextlib.suppress(OSError):
                if (group / "cgroup.procs").read_text() and int((group / name).read_text()) < whole[name]:
                    found.add(group)
    return found


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.01)


class _Counting(selectors.EpollSelector):
    """The event loop's own way of waiting, counted."""

    waits = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.waits += 1
        return super().select(timeout)


def test_the_end_of_a_process_is_waited_for_without_asking_again_and_again() -> None:
    counting = _Counting()
    calls = 10

    async def run() -> int:
        async with await Sandbox.open(backends=("zygote",), spares=1) as opened:
            job = python("def main(): return 1")
            assert (await opened.run(job, exit_evidence=True)).exit_code == 0
            before = counting.waits
            for _ in range(calls):
                assert (await opened.run(job, exit_evidence=True)).exit_code == 0
            return counting.waits - before

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(counting)) as runner:
        assert runner.run(run()) <= 20 * calls


@LIMITED
async def test_an_agents_calls_never_hold_more_than_its_allowance() -> None:
    others = groups_left()
    each = Limits(memory_bytes=64 * MIB, cpu_cores=1)
    job = python("import time\ndef main(): time.sleep(0.05)", limits=each)
    async with await Sandbox.open(backends=("zygote",), spares=0, allowance=Allowance(2, 512 * MIB)) as opened:
        many = await asyncio.gather(*(opened.run(job, agent="a") for _ in range(6)))
        assert {one.status for one in many} == {"ok"}
        refused = await asyncio.gather(
            *(opened.run(job, agent="a", excess="refuse") for _ in range(3)), return_exceptions=True
        )
        assert [one.code for one in refused if isinstance(one, Failure)] == ["E3407"]
        with pytest.raises(Failure):
            await opened.run(python("def main(): pass", limits=Limits(cpu_cores=3)), agent="b")
    assert groups_left() == others


_SHARES = st.builds(
    Limits, cpu_cores=st.sampled_from([0.5, 1.0, 2.0, 4.0]), memory_bytes=st.sampled_from([GIB // 2, 2 * GIB, 8 * GIB])
)


@LIMITED
@given(st.lists(st.tuples(st.sampled_from("ab"), _SHARES, st.integers(0, 4), st.booleans()), max_size=20))
def test_what_an_agents_calls_hold_together_is_within_its_allowance_whoever_waits_or_gives_up(
    wishes: list[tuple[str, Limits, int, bool]],
) -> None:
    allowances, whole = Allowances(Allowance()), Allowance()
    held: dict[str, list[Limits]] = {"a": [], "b": []}

    async def hold(agent: str, limits: Limits, turns: int) -> None:
        async with allowances.taken(agent, limits, "wait"):
            held[agent].append(limits)
            assert sum(one.cpu_cores for one in held[agent]) <= whole.cores
            assert sum(one.memory_bytes for one in held[agent]) <= whole.memory_bytes
            try:
                for _ in range(turns):
                    await asyncio.sleep(0)
            finally:
                held[agent].remove(limits)

    async def all_of_them() -> None:
        tasks = [asyncio.create_task(hold(agent, limits, turns)) for agent, limits, turns, _ in wishes]
        await asyncio.sleep(0)
        for task, (*_, gives_up) in zip(tasks, wishes, strict=True):
            if gives_up:
                task.cancel()
        async with asyncio.timeout(60):
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [one for one in ended if isinstance(one, Exception)]
        async with allowances.taken("a", Limits(cpu_cores=4.0, memory_bytes=8 * GIB), "refuse"):
            pass  # everything was given back

    asyncio.run(all_of_them())


async def test_a_zygote_that_dies_is_replaced_and_one_that_has_served_enough_is_too() -> None:
    before = set(processes.below(os.getpid()))
    job = python("import os\ndef main(): return os.urandom(0) == b''")
    async with await Sandbox.open(backends=("zygote",), spares=1, recycle_after=3) as opened:
        for _ in range(8):
            assert (await opened.run(job)).value is True
        for child in set(processes.below(os.getpid())) - before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        # A call that had its process already may be lost with it. The next ones are not.
        outcomes = [await opened.run(job) for _ in range(3)]
        assert outcomes[-1].value is True
        assert {one.status for one in outcomes} <= {"ok", "crashed", "isolation"}
    assert strays() == []


async def test_closing_ends_what_runs() -> None:
    others = groups_left()
    opened = await Sandbox.open(backends=("zygote",), spares=1)
    running = asyncio.create_task(opened.run(python("import time\ndef main(): time.sleep(900)")))
    await asyncio.sleep(0)
    await opened.close()
    assert (await running).status in ("crashed", "isolation", "killed")
    assert (await opened.run(python("def main(): pass"))).status == "isolation"
    assert groups_left() == others


def test_a_killed_server_leaves_no_process_behind(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(
        textwrap.dedent(
            """
            import asyncio, os
            from interlock.executors.sandbox.job import PythonJob
            from interlock.executors.sandbox.supervisor import Sandbox
            async def main():
                sandbox = await Sandbox.open(backends=("zygote",), spares=2)
                source = "import os, time\\nfrom interlock import Context\\ndef main(ctx: Context):\\n"
                source += "  for _ in range(3):\\n    if os.fork() == 0: os.setsid(); time.sleep(900)\\n"
                source += "  ctx.progress('x')\\n  time.sleep(900)"
                await sandbox.run(PythonJob(source=source, entry="main"), on_progress=lambda _: print("up", flush=True))
            asyncio.run(main())
            """
        )
    )
    server = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "up\n"
    children = processes.below(server.pid)
    assert len(children) >= 6
    server.kill()
    server.wait()
    server.stdout.close()
    for child in children:
        descriptor = _pidfd(child)
        if descriptor is not None:
            assert select.select([descriptor], [], [], 20)[0]
            os.close(descriptor)
    # Its cgroups are empty now, and the next server sweeps them.
    with contextlib.suppress(OSError):
        Cgroups.open().close()
    assert groups_left(server.pid) == []


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


@pytest.mark.parametrize("start", ["grow()", "threading.Thread(target=lambda: (grow(), time.sleep(60))).start()"])
async def test_without_cgroups_the_memory_of_a_tree_is_still_bounded(start: str) -> None:
    source = f"""
        import os, threading, time
        threading.stack_size(1 << 18)
        def grow():
            if os.fork() == 0:
                b = bytearray(os.urandom(1 << 20)) * 40
                time.sleep(60)
        def main():
            for _ in range(6):
                {start}
            time.sleep(60)
    """
    small = Limits(memory_bytes=96 * MIB, wall_s=20.0)
    async with await Sandbox.open(backends=("zygote",), cgroups=False, spares=0) as opened:
        assert (await opened.run(python(source, limits=small))).status == "memory"
        forks = python(
            "import os, time\ndef main():\n  for _ in range(9):\n    if os.fork() == 0: time.sleep(9)\n  return 1"
        )
        assert (await opened.run(forks)).value == 1


@pytest.mark.proves("EXEC-03")
async def test_where_nothing_isolates_nothing_runs_and_it_is_said_why() -> None:
    async with await Sandbox.open(backends=(), host=Host()) as opened:
        outcome = await opened.run(python("def main(): return 1"))
        assert outcome.status == "isolation"
        assert failure_of(outcome, "a.b").code == "E3405"

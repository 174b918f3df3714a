"""Programs we run: what they write is kept apart, they are started again within limits, and none is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.contract.manifest import RetryPolicy
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.resilience.retry import may_retry
from interlock.testing import FakeClock
from interlock.upstreams.children import OLDER_LOGS, Child, Crashed, Log, Program
from interlock.upstreams.response_limits import Allowance, Intake
from interlock.upstreams.supervisor import Restarts, Supervisor
from tests.support.children import gone
from tests.support.children import no_process_is_left as no_process_is_left
from tests.support.hostile import loop_is_free

AT_ONCE = Restarts(pause_s=0.0)


def program(source: str, *arguments: str, **facts: Any) -> Program:
    command = (sys.executable, "-I", "-S", "-u", "-c", textwrap.dedent(source), *arguments)
    given: dict[str, Any] = {"command": command, "env": {}, "secret": {}}
    return Program(**given | facts)


class Heard:
    """What a child said, and the wish to hear more."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[bytes] = asyncio.Queue()
        self.intake = Intake("child")
        self.allowance = Allowance(lambda: 0.0)
        self.too_long: list[bytes] = []

    def hear(self, line: bytes) -> None:
        self.lines.put_nowait(line)

    def oversize(self, ends: bytes) -> None:
        self.too_long.append(ends)

    async def line(self) -> str:
        async with asyncio.timeout(60):
            return (await self.lines.get()).decode()


ECHO = """
import os, sys
for line in sys.stdin:
    print(line.strip()[::-1])
    print("said", os.environ.get("TOKEN"), file=sys.stderr)
"""


async def test_lines_go_in_and_out_and_stderr_goes_to_a_log_without_the_secrets_lent(tmp_path: Path) -> None:
    heard, log = Heard(), tmp_path / "logs" / "child.log"
    child = await Child.start(program(ECHO, secret={"TOKEN": "s3cret"}, log=log), heard)
    child.send(b"abc")
    child.send(b"")
    child.send(b"def")
    assert [await heard.line(), await heard.line()] == ["cba", "fed"]
    await child.stop()
    assert child.ended.result() == "the upstream's process ended: exit status 0"
    assert set(log.read_text().split("\n")) == {"said [redacted]", ""}
    assert log.stat().st_mode & 0o777 == 0o600
    with pytest.raises(Failure) as caught:
        child.send(b"more")
    assert (caught.value.code, caught.value.details) == ("E3502", {"sent": False})


async def test_a_child_has_nothing_of_our_environment_that_it_was_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLOCK_PRIVATE", "ours")
    heard = Heard()
    child = await Child.start(program("import os; print(sorted(os.environ))", env={"MINE": "1"}), heard)
    names = await heard.line()
    await child.stop()
    assert "INTERLOCK_PRIVATE" not in names
    assert "'MINE'" in names


async def test_a_line_that_comes_in_pieces_is_one_line_and_the_last_one_is_heard() -> None:
    source = """
    import os, time
    for piece in (b'on', b'e\\ntw', b'o\\n', b'x' * 200_000 + b'\\n', b'last\\n'):
        os.write(1, piece)
    """
    heard = Heard()
    child = await Child.start(program(source), heard)
    assert [await heard.line(), await heard.line()] == ["one", "two"]
    assert len(await heard.line()) == 200_000
    assert await heard.line() == "last"
    await child.stop()


GROUP = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
below = os.fork()
if not below:
    signal.pause()
print(os.getpid(), below)
if sys.argv[1] == "stay":
    while True:
        signal.pause()
"""


@pytest.mark.parametrize("manner", ["stay", "leave"])
async def test_the_whole_group_ends_with_its_leader_however_stubborn(manner: str) -> None:
    heard = Heard()
    child = await Child.start(program(GROUP, manner), heard)
    leader, below = map(int, (await heard.line()).split())
    assert os.getpgid(below) == child.pid  # the leader may be gone already
    await child.stop(grace_s=0.01)
    assert gone(leader)
    assert gone(below)


async def test_a_child_dies_when_this_process_is_killed(tmp_path: Path) -> None:
    source = """
    import asyncio, sys
    from interlock.upstreams.children import Child, Program
    from tests.upstreams.test_children import Heard

    async def main():
        command = (sys.executable, "-I", "-S", "-c", "import signal, time\\nwhile True: signal.pause()")
        child = await Child.start(Program(command, {}, {}), Heard())
        print(child.pid, flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
    """
    command = (sys.executable, "-c", textwrap.dedent(source))
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    pid = int(await server.stdout.readline())
    assert not gone(pid, 0)
    server.send_signal(signal.SIGKILL)
    await server.wait()
    assert gone(pid)


TWICE = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
reading, writing = os.pipe()
if not os.fork():
    os.setsid()
    if not os.fork():
        os.write(writing, b"%d %d\\n" % (os.getpid(), os.getsid(0)))
        for number in (0, 1, 2):
            os.close(number)
        while True:
            signal.pause()
    os._exit(0)
os.wait()
print(os.getpid(), os.read(reading, 100).decode().strip(), flush=True)
if sys.argv[1] == "stay":
    while True:
        signal.pause()
"""


@pytest.mark.parametrize("manner", ["stay", "leave"])
async def test_a_process_that_forked_twice_and_left_the_session_ends_with_the_child(manner: str) -> None:
    heard = Heard()
    child = await Child.start(program(TWICE, manner), heard)
    # With "leave" the process may be gone already, so it says itself in which session it was.
    leader, hidden, session = map(int, (await heard.line()).split())
    assert session != child.pid
    await child.stop(grace_s=0.01)
    assert gone(leader)
    assert gone(hidden)


async def test_a_process_that_forked_twice_ends_when_this_process_is_killed() -> None:
    source = """
    import asyncio, sys
    from interlock.upstreams.children import Child
    from tests.upstreams.test_children import TWICE, Heard, program

    async def main():
        heard = Heard()
        child = await Child.start(program(TWICE, "stay"), heard)
        leader, hidden, _ = (await heard.line()).split()
        print(child.pid, leader, hidden, flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
    """
    command = (sys.executable, "-c", textwrap.dedent(source))
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    pids = [int(pid) for pid in (await server.stdout.readline()).split()]
    assert len(pids) == 3
    server.send_signal(signal.SIGKILL)
    await server.wait()
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("how", ["sys.exit(7)", "os.kill(os.getpid(), 11)"])
async def test_a_child_is_said_to_have_ended_as_its_program_did(how: str) -> None:
    child = await Child.start(program(f"import os, sys; {how}"), Heard())
    async with asyncio.timeout(30):
        said = await child.ended
    assert said == f"the upstream's process ended: {'exit status 7' if 'exit' in how else 'signal 11'}"


FLOODS = {
    "tiny lines": "while True: os.write(1, b'{}\\n' * 20_000)",
    "blank lines": "while True: os.write(1, b'\\n' * 60_000)",
    "a line without an end": "while True: os.write(1, b'x' * 65536)",
}


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_child_that_floods_is_ended_and_said_to_have_been(kind: str) -> None:
    heard = Heard()
    heard.intake.max_bytes = 1_000_000
    async with loop_is_free():
        child = await Child.start(program("import os\n" + FLOODS[kind]), heard)
        async with asyncio.timeout(60):
            said = await child.ended
    assert said.startswith("the upstream's process was ended: it sent far more than")


async def test_a_line_over_the_limit_is_not_kept_and_the_next_one_is_heard() -> None:
    heard = Heard()
    heard.intake.max_bytes = 1_000_000
    source = 'import os; print(\'{"id": 1, "x": "\' + "y" * 3_000_000 + \'", "z": 1}\'); print("next")'
    child = await Child.start(program(source), heard)
    assert await heard.line() == "next"
    await child.stop()
    (ends,) = heard.too_long
    assert len(ends) < 1000
    assert ends.startswith(b'{"id": 1,')
    assert ends.endswith(b'"z": 1}')


async def test_a_flood_on_stderr_does_not_hold_the_loop(tmp_path: Path) -> None:
    heard = Heard()
    source = "import os\nwhile True: os.write(2, b'word ' * 10_000)"
    async with loop_is_free() as beats:
        child = await Child.start(program(source, log=tmp_path / "child.log"), heard)
        async with asyncio.timeout(60):
            await beats.many.wait()
        await child.stop(grace_s=0.01)


@pytest.mark.parametrize(
    "facts", [{"command": ("no-such-program",)}, {"command": ("./no-such-program",)}, {"cwd": "/no/such/place"}]
)
async def test_a_program_that_is_not_there_is_said_so(facts: Any) -> None:
    with pytest.raises(Failure) as caught:
        await Child.start(program("", **facts), Heard())
    assert (caught.value.code, caught.value.details) == ("E3108", {"sent": False})
    assert not caught.value.retryable


SECRET = "hunter2"
written = st.lists(st.one_of(st.just(SECRET), st.sampled_from(["a", "\n", "hunt", "er2", "x" * 40])), max_size=60)


@pytest.mark.proves("OPS-10")
@given(pieces=written)
def test_a_log_is_bounded_and_holds_no_secret_whatever_the_pieces(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str]
) -> None:
    path = tmp_path_factory.mktemp("log") / "child.log"
    log = Log(path, (SECRET,), limit=200)
    for piece in pieces:
        log.write(piece.encode())
    log.close()
    files = sorted(path.parent.iterdir())
    assert len(files) <= OLDER_LOGS + 1
    assert all(file.stat().st_size <= 200 for file in files)
    assert not any(SECRET in file.read_text() for file in files)


class Thing:
    """Something a supervisor can keep."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.busy = 0
        self.closed = False
        self.drained: float | None = None

    async def close(self, drain_s: float = 0.0) -> None:
        self.drained = drain_s
        self.closed = True
        if not self.ended.done():
            self.ended.set_result("closed")


class Starts:
    """Starts things, or fails to, as told."""

    def __init__(self) -> None:
        self.made: list[Thing] = []
        self.failures: list[Failure] = []

    async def __call__(self) -> Thing:
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        self.made.append(Thing())
        return self.made[-1]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@given(uptimes=st.lists(st.sampled_from([0.0, 9.9, 10.0, 3600.0]), max_size=30))
@pytest.mark.proves("OPS-10")
def test_ten_restarts_that_do_not_help_are_the_last_and_somebody_is_told_once(uptimes: list[float]) -> None:
    async def live() -> None:
        time, starts, alerts = FakeClock(), Starts(), list[str]()
        kept = Supervisor(starts, clock=time.clock, restarts=AT_ONCE, alert=alerts.append)
        await kept.get(1)
        soon, given_up = 0, False
        for uptime in uptimes:
            time.advance(uptime)
            if not given_up:
                soon = soon + 1 if uptime < 10 else 0
                given_up = soon > 10
                starts.made[-1].ended.set_result("it died")
            await settle()
            assert kept.state == ("failed" if given_up else "up")
            assert len(alerts) == given_up
        assert all(thing.closed for thing in starts.made[:-1])
        if given_up:
            with pytest.raises(Failure) as caught:
                await kept.get(1)
            assert caught.value.code == "E3502"
            await kept.replace(0)  # a person has looked
            assert (await kept.get(1)) is starts.made[-1]
        await kept.close()
        assert all(thing.closed for thing in starts.made)
        assert kept.state == "closed"

    asyncio.run(live())


@given(
    acts=st.lists(st.sampled_from(["get", "die", "replace", "discard", "crash", "refuse", "pass"]), max_size=40),
    eager=st.booleans(),
)
def test_whatever_happens_one_at_most_is_kept_and_none_is_left_open(acts: list[str], eager: bool) -> None:
    async def live() -> None:
        starts, asked = Starts(), set[asyncio.Task[Any]]()
        kept = Supervisor(starts, clock=Clock(), restarts=AT_ONCE if eager else None)
        for act in acts:
            match act:
                case "get":
                    asked.add(asyncio.create_task(kept.get(1)))
                case "replace":
                    asked.add(asyncio.create_task(kept.replace(0)))
                case "die" if starts.made and not starts.made[-1].ended.done():
                    starts.made[-1].ended.set_result("it died")
                case "discard" if kept.current is not None:
                    kept.discard(kept.current)
                case "crash":
                    starts.failures.append(Crashed("E3502", "it died"))
                case "refuse":
                    starts.failures.append(Failure("E3502", "no"))
                case _:
                    await asyncio.sleep(0)
        starts.failures.clear()
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(one, Thing | Failure | None) for one in outcomes)
        await settle()
        assert [thing for thing in starts.made if not thing.closed] == ([kept.current] if kept.current else [])
        await kept.close()
        assert all(thing.closed for thing in starts.made)

    asyncio.run(live())


async def test_pauses_grow_to_a_limit_and_there_is_none_for_one_that_had_stayed_up() -> None:
    restarts = Restarts()
    assert [restarts.pause(n) for n in range(4)] == [0.0, 0.1, 0.2, 0.4]
    assert restarts.pause(10) == 30.0
    assert sum(map(restarts.pause, range(11))) < 120


async def test_whoever_comes_during_a_pause_hears_at_once_when_to_come_again() -> None:
    time, starts = FakeClock(), Starts()
    kept = Supervisor(starts, clock=time.clock, restarts=Restarts(pause_s=20.0))
    (await kept.get(1)).ended.set_result("it died")
    await settle()
    time.advance(5)
    with pytest.raises(Failure) as caught:
        await kept.get(30)
    assert (caught.value.code, caught.value.retry_after_ms) == ("E3502", 15_000)
    assert "it died" in caught.value.message
    assert not may_retry(caught.value, RetryPolicy.model_validate({})), "no call waits it out"
    await kept.replace(0)  # a person has mended it, and does not wait
    assert (await kept.get(1)) is starts.made[-1]
    assert kept.state == "up"
    await kept.close()


async def test_whoever_comes_during_a_short_pause_waits_it_out() -> None:
    starts = Starts()
    kept = Supervisor(starts, clock=Clock(), restarts=Restarts(pause_s=0.05))
    for deaths in range(1, 4):
        (await kept.get(1)).ended.set_result("it died")
        await settle()
        assert (kept.state, len(starts.made)) == ("starting", deaths), "it is paused"
        assert (await kept.get(1)) is starts.made[deaths]
    await kept.close()


async def test_a_start_that_crashes_is_made_again_and_those_who_wait_hear_of_the_first() -> None:
    starts = Starts()
    starts.failures = [Crashed("E3502", "it died"), Crashed("E3502", "it died")]
    kept = Supervisor(starts, clock=Clock(), restarts=AT_ONCE)
    with pytest.raises(Failure) as caught:
        await kept.get(1)
    assert caught.value.message == "it died"
    await settle()
    assert kept.state == "up"
    assert kept.restarted == 2
    await kept.close()


async def test_a_start_that_is_refused_is_not_made_again_until_it_is_asked_for() -> None:
    starts = Starts()
    starts.failures = [Failure("E3502", "no version in common")]
    kept = Supervisor(starts, clock=Clock(), restarts=AT_ONCE)
    with pytest.raises(Failure):
        await kept.get(1)
    await settle()
    assert (kept.state, starts.made) == ("idle", [])
    assert await kept.get(1) is starts.made[0]
    await kept.close()


async def test_many_who_wait_get_the_same_one_and_without_restarts_it_comes_back_when_needed() -> None:
    starts = Starts()
    kept = Supervisor(starts, clock=Clock())
    first, *others = await asyncio.gather(*(kept.get(1) for _ in range(10)))
    assert all(one is first for one in others)
    first.ended.set_result("it died")
    await settle()
    assert kept.state == "idle"
    assert await kept.get(1) is not first
    kept.discard(starts.made[-1])
    assert await kept.get(1) is starts.made[2]
    await kept.close()
    assert all(thing.closed for thing in starts.made)


async def test_a_replacement_is_up_before_the_old_one_is_asked_to_finish() -> None:
    starts = Starts()
    kept = Supervisor(starts, clock=Clock(), restarts=AT_ONCE)
    old = await kept.get(1)
    replacing = asyncio.create_task(kept.replace(7.5))
    await asyncio.sleep(0)
    assert not old.closed
    assert await kept.get(1) is old
    await replacing
    assert (old.closed, old.drained) == (True, 7.5)
    new = await kept.get(1)
    assert new is not old
    assert kept.restarted == 0
    starts.failures = [Failure("E3502", "no")]
    with pytest.raises(Failure):
        await kept.replace(0)
    assert await kept.get(1) is new  # what works stays
    await kept.close()


async def test_one_who_waits_for_a_start_that_takes_too_long_hears_so_and_the_start_goes_on() -> None:
    go = asyncio.Event()

    async def start() -> Thing:
        await go.wait()
        return Thing()

    kept = Supervisor(start, clock=Clock())
    with pytest.raises(Failure) as caught:
        await kept.get(0)
    assert caught.value.details == {"sent": False}
    go.set()
    assert (await kept.get(1)).closed is False
    await kept.close()
    with pytest.raises(Failure):
        await kept.get(1)

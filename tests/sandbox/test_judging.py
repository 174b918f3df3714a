"""How a call went is decided by evidence; and where isolation is denied, nothing runs."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.data.schema import Json
from interlock.executors.sandbox import filter as seccomp
from interlock.executors.sandbox import frames, root, syscalls
from interlock.executors.sandbox.cgroups import Cgroups, Counted
from interlock.executors.sandbox.child import Ended
from interlock.executors.sandbox.job import MIB, JobOutcome, Limits, PythonJob, Status, failure_of
from interlock.executors.sandbox.judging import RunEvidence, judge
from interlock.executors.sandbox.supervisor import Sandbox
from tests.support.sandboxes import has_cgroups

CODES: dict[Status, str] = {
    "error": "E3401", "timeout": "E3402", "memory": "E3403", "crashed": "E3404", "no_result": "E3404",
    "isolation": "E3405", "network": "E3406", "limit": "E3407", "killed": "E3703",
}  # fmt: skip

_errors = st.fixed_dictionaries({"type": st.sampled_from(["MemoryError", "OSError"]), "errno": st.integers(0, 200)})
_said: st.SearchStrategy[Json | None] = (
    st.none()
    | st.fixed_dictionaries({"ok": st.just(True), "exit": st.integers(-40, 255)})
    | st.fixed_dictionaries({"ok": st.just(False), "error": _errors})
    | st.fixed_dictionaries({"ok": st.just(True), "value": st.integers()})
)
_evidence = st.builds(
    RunEvidence,
    ended_by_us=st.none()
    | st.tuples(st.sampled_from(["timeout", "limit", "killed", "no_result", "memory"]), st.just("")),
    ended=st.builds(Ended, st.none() | st.sampled_from([0, 3 << 8, 9, 11, 24]), st.integers(0, 10**11)),
    counted=st.none() | st.builds(Counted, st.integers(0, 2), st.integers(0, 2), st.just(0)),
    violations=st.sampled_from([(), ("socket",), ("ptrace",), ("egress evil.example:443",)]),
    result=_said,
    cpu_s=st.just(60),
)


MOST: dict[bytes, int] = dict.fromkeys((frames.PROGRESS, frames.PARTIAL, frames.FILE, frames.RESULT), 50)


@given(_evidence)
def test_nothing_that_code_says_makes_a_success_of_what_the_evidence_calls_a_failure(evidence: RunEvidence) -> None:
    status, _ = judge(evidence)
    if status == "ok":
        assert evidence.ended_by_us is None
        assert evidence.result is not None
        assert evidence.result["ok"] is True
        assert not (evidence.counted and evidence.counted.killed_for_memory)
        assert evidence.ended.status is None or not os.WIFSIGNALED(evidence.ended.status)
    else:
        assert failure_of(JobOutcome(status=status), "a.b").code == CODES[status]


@given(st.lists(st.tuples(st.sampled_from([b"P", b"V", b"F", b"R"]), st.binary(max_size=50)), max_size=8), st.data())
def test_frames_come_out_as_they_went_in_however_they_are_cut(said: list[tuple[bytes, bytes]], data: Any) -> None:
    stream = b"".join(frames.frame(kind, body) for kind, body in said)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    reader = frames.Reader(10_000, MOST)
    came: list[tuple[bytes, bytes]] = []
    for one, other in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        reader.add(stream[one:other])
        while (frame := reader.next()) is not None:
            came.append(frame)
    assert came == said


@given(st.binary(min_size=1, max_size=64))
def test_a_reader_of_frames_survives_anything(noise: bytes) -> None:
    reader = frames.Reader(1024, MOST)
    reader.add(noise)
    try:
        while reader.next() is not None:
            pass
    except (frames.Malformed, frames.TooMuch):
        pass


def _verdict(program: bytes, machine: str, number: int, arguments: tuple[int, ...] = ()) -> int:
    """What the kernel would answer: the few instructions that our programs use, carried out."""
    import struct

    words = (number, {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine], 0, 0)
    data = struct.pack("<IIII", *words) + struct.pack("<6Q", *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
    at, accumulator = 0, 0
    while True:
        code, then, otherwise, value = struct.unpack_from("<HBBI", program, at * 8)
        at += 1
        if code == 0x06:
            return value
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x05:
            at += value
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            at += then if holds else otherwise


ALLOW, NOTIFY, KILL, ERROR = 0x7FFF0000, 0x7FC00000, 0x80000000, 0x00050000


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("tier", [0, 1, 2, 3])
def test_a_filter_answers_every_number_as_the_table_says(machine: str, tier: int) -> None:
    numbers = syscalls.NUMBERS[machine]
    program = seccomp.build(tier, metered=True, recording=True, machine=machine)
    assert len(program) // 8 < 4096
    named = {number: name for name, number in numbers.items()}
    for number in range(600):
        verdict = _verdict(program, machine, number)
        if number not in named:
            assert verdict == ERROR | errno.ENOSYS, number
    for name in ("read", "openat", "futex", "execve"):
        assert _verdict(program, machine, numbers[name]) == ALLOW
    for name in ("ptrace", "mount", "unshare", "bpf", "keyctl", "setns"):
        assert _verdict(program, machine, numbers[name]) == NOTIFY
    assert _verdict(program, machine, numbers["clone3"]) == ERROR | errno.ENOSYS
    assert _verdict(program, machine, numbers["clone"], (0x10000000,)) == NOTIFY
    assert _verdict(program, machine, numbers["clone"], (17,)) == ALLOW
    assert _verdict(program, machine, numbers["socket"], (2,)) == (ALLOW if tier >= 2 else NOTIFY)
    assert _verdict(program, machine, numbers["socket"], (40,)) == NOTIFY
    if machine == "x86_64":
        assert _verdict(program, machine, 0x40000000 + 59) == KILL


def test_only_the_outermost_directories_are_bound() -> None:
    assert root.outermost(["/usr", "/usr/lib", "/opt/a", "/opt/ab", "/opt/a/b"]) == ["/opt/a", "/opt/ab", "/usr"]


_DENIED = """
import asyncio, errno, os, struct, sys
from interlock.executors.sandbox import linux
from interlock.executors.sandbox.job import PythonJob, failure_of
from interlock.executors.sandbox.supervisor import Sandbox

def deny(*names):
    steps = [struct.pack("<HBBI", 0x20, 0, 0, 0)]
    for name in names:
        # The C library needs clone3 for threads, and does without it only where it does not exist.
        error = errno.ENOSYS if name == "clone3" else errno.EPERM
        steps += [struct.pack("<HBBI", 0x15, 0, 1, linux.number(name)), struct.pack("<HBBI", 6, 0, 0, 0x50000 | error)]
    linux.no_new_privileges()
    linux.load_filter(b"".join([*steps, struct.pack("<HBBI", 6, 0, 0, 0x7FFF0000)]), listening=False)

async def main():
    async with await Sandbox.open(spares=1, backends=sys.argv[2].split(",")) as sandbox:
        outcome = await sandbox.run(PythonJob(source="def main(): return 'ran'", entry="main"))
        tried = {one.backend: one for one in await sandbox.describe()}
        print(sandbox.backend, outcome.status, failure_of(outcome, "a.b").code, bool(tried["zygote"].why_not))

deny(*sys.argv[1].split(","))
asyncio.run(main())
"""


@pytest.mark.proves("EXEC-03")
@pytest.mark.parametrize(
    ("denied", "backends"),
    [
        ("unshare", "zygote"),
        ("clone3", "zygote"),
        ("mount_setattr", "zygote"),
        ("pivot_root", "zygote,bubblewrap"),
        ("mount", "zygote,bubblewrap"),
        ("seccomp", "zygote,bubblewrap"),
    ],
)
def test_where_isolation_is_denied_nothing_runs(denied: str, backends: str, tmp_path: Path) -> None:
    script = tmp_path / "denied.py"
    script.write_text(textwrap.dedent(_DENIED))
    command = [sys.executable, str(script), denied, backends]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("None isolation E3405 True\n", "")


@pytest.mark.asyncio(loop_scope="session")
async def test_a_group_is_not_used_again_while_anything_of_its_last_call_lives(sandbox: Sandbox) -> None:
    if not has_cgroups():
        # Then no call has a group, and its memory is bounded all the same.
        hoard = PythonJob(
            source="def main(): return len(bytearray(1 << 30))", entry="main", limits=Limits(memory_bytes=64 * MIB)
        )
        assert (await sandbox.run(hoard)).status == "memory"
        return
    groups = Cgroups.open()
    limits = Limits(pids=4)
    try:
        slot = groups.take()
        with subprocess.Popen(["sleep", "60"]) as left:  # noqa: ASYNC220 - ends here
            slot.take(left.pid, limits)
            groups.give(slot)
            another = groups.take()
            assert another is not slot
            left.kill()
        groups.give(another)
        assert {groups.take(), groups.take()} == {slot, another}
    finally:
        groups.close()

"""Nothing that comes out of a sandbox is believed: whatever it says, the call ends and the loop stays free.

The host's side is real: a `Watch` on real sockets and pipes. In place of a sandboxed process, the test writes frames
into the other end of the control socket, as hostile code inside could.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock.call.checkpoints import Bounds
from interlock.data.bounds import MOST_VALUES, TooManyValues, more_values, parse, plain_text
from interlock.data.schema import Json
from interlock.executors.sandbox import frames
from interlock.executors.sandbox.child import Child, Ended
from interlock.executors.sandbox.job import Job, JobOutcome, Limits, ProgramJob, PythonJob, failure_of
from interlock.executors.sandbox.watch import Watch
from tests.support.forged_frames import CUT, DONE, JSON, RESULT_BYTES, ROWS, said, spoilt
from tests.thorough import THOROUGH, no_collection

# How many frames the property test has the host take. All of them in a thorough run, which measures the loop too.
FRAMES = 100_000 if THOROUGH else 400
HELD_S = 0.05
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
LIMITS = Limits(wall_s=60.0, output_bytes=4096, result_bytes=1 << 20, files=3)
PYTHON = PythonJob(source="", entry="main", limits=LIMITS, checkpoints=Bounds(3, 4096))
# As large as results may be where nothing else is said.
LARGE = Limits(wall_s=60.0, output_bytes=4096, result_bytes=RESULT_BYTES, files=3)
ODD_JOB = PythonJob(source="", entry="main", limits=LARGE, checkpoints=Bounds(3, 4096))


@dataclass(slots=True)
class Heard:
    """How a call ended, what was passed on of what it said, and how long the loop was held at most."""

    outcome: JobOutcome
    progress: list[Json] = field(default_factory=list[Json])
    partial: list[Any] = field(default_factory=list[Any])
    saved: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    frames: int = 0
    turns: int = 0
    longest_s: float = 0.0


async def hear(
    said: bytes, job: Job = PYTHON, *, status: int = 0, on_progress: Callable[[Json], None] | None = None
) -> Heard:
    """Have a watch hear these bytes from its call, which then ends with this status."""
    heard = Heard(JobOutcome(status="no_result"))
    control, inside = socket.socketpair()
    (out, their_out), (err, their_err) = os.pipe(), os.pipe()
    process = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220 - ends with the call
    over = os.pidfd_open(process.pid)
    child = Child(process.pid, over, control, out, err, over, lambda: Ended(status), lambda: None)
    child.make_ready()

    async def save(label: str, state: Any) -> None:
        heard.saved.append((label, state))

    async def turns() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            heard.turns += 1
            heard.longest_s, last = max(heard.longest_s, now - last), now

    def write() -> None:
        with contextlib.suppress(OSError):  # the watch may have heard enough
            inside.sendall(said)
        inside.close()
        process.kill()
        process.wait()

    watch = Watch(
        child,
        job,
        exit_evidence=True,
        on_progress=on_progress or heard.progress.append,
        on_partial=heard.partial.append,
        on_checkpoint=save,
        refused=[],
    )
    counted = _Counted(**{name: getattr(watch._reader, name) for name in ("allowance", "most")})  # pyright: ignore[reportPrivateUsage]
    watch._reader = counted  # pyright: ignore[reportPrivateUsage]
    counting = asyncio.create_task(turns())
    writing = asyncio.get_running_loop().run_in_executor(None, write)
    try:
        async with asyncio.timeout(60):
            heard.outcome = await watch.outcome(None)
    finally:
        counting.cancel()
        child.all.close()
        control.close()
        await writing
        for one in (out, their_out, err, their_err, over):
            os.close(one)
    heard.frames = counted.taken
    return heard


@dataclass(slots=True)
class _Counted(frames.Reader):
    """A reader that counts the frames that it has cut, and the one that it refused."""

    taken: int = 0

    def next(self) -> tuple[bytes, bytes] | None:
        try:
            found = frames.Reader.next(self)
        except (frames.Malformed, frames.TooMuch):
            self.taken += 1
            raise
        self.taken += found is not None
        return found


@pytest.mark.supports("EXEC-03")
@pytest.mark.timeout(3600)
def test_whatever_is_said_the_call_ends_and_only_what_is_sane_is_passed_on() -> None:
    taken, longest = 0, (0.0, b"")

    @given(ROWS, CUT, st.sampled_from([0, 9, 11, 256]), st.booleans())
    @settings(
        max_examples=1000 if THOROUGH else 40,
        deadline=None,
        suppress_health_check=SLOW,
    )
    def one(
        rows: tuple[list[bytes], list[bytes], bool], cut: tuple[int, int | None] | None, status: int, program: bool
    ) -> None:
        nonlocal taken, longest
        before, odd, done = rows
        stream = spoilt(b"".join((*before, *odd, DONE if done else b"")), cut)
        job: Job = ProgramJob(argv=("x",), limits=LARGE) if program else ODD_JOB
        with no_collection():
            heard = runner.run(hear(stream, job, status=status))
        _check_sane(heard)
        taken += heard.frames
        longest = max(longest, (heard.longest_s, stream[:200]))
        assert heard.longest_s < HELD_S or not THOROUGH

    with asyncio.Runner() as runner:
        while taken < FRAMES:
            one()
    print(f"{taken:,} frames were taken; the loop was held for {longest[0] * 1e3:.1f} ms at most: {longest[1]!r}")


def _check_sane(heard: Heard) -> None:
    outcome = heard.outcome
    if outcome.status != "ok":
        told = failure_of(outcome, "a.b").message
        assert len(told) < 2200
        assert plain_text(told, len(told)) == told
    json.dumps(_all(heard), allow_nan=False).encode()
    str(_all(heard)).encode()  # no surrogates
    cost = outcome.reports.get("cost", {})
    assert all(type(amount) is int and amount >= 0 for amount in cost.values())
    assert sum(cost.values()) <= 10**15
    assert outcome.exit_code is None or 0 <= outcome.exit_code <= 255
    assert len(outcome.files) <= 3


def _all(heard: Heard) -> list[Any]:
    outcome = heard.outcome
    return [outcome.value, outcome.error, outcome.reports, outcome.why, heard.progress, heard.partial, heard.saved]


async def test_small_frames_are_charged_and_shared_out_over_turns_of_the_loop() -> None:
    small = said(frames.PROGRESS, {})
    heard = await hear(small * 680_000)
    assert (heard.outcome.status, heard.outcome.why) == ("limit", "result size")
    # Each frame is charged, so there are only so many; and one turn of the loop takes only so many of these.
    allowance = LIMITS.result_bytes + LIMITS.output_bytes + 1 + LIMITS.files * frames.FILE_HEAD
    assert len(heard.progress) == allowance // frames.LEAST_CHARGE
    assert heard.turns >= len(heard.progress) // 64


async def test_frames_of_a_call_that_has_ended_are_all_taken_in_turns_too() -> None:
    heard = await hear(said(frames.PARTIAL, 1) * 500 + DONE)
    assert (heard.outcome.status, heard.outcome.value) == ("ok", 1)
    assert heard.partial == [1] * 500
    assert heard.turns >= 500 // 64


@pytest.mark.parametrize("much", ["x", "\x1b", "\u202e", "\u0000", " /etc/passwd"])
async def test_the_words_of_an_error_are_cut_before_they_are_cleaned(much: str) -> None:
    words = much * (400_000 // len(json.dumps(much)))
    heard = await hear(said(frames.RESULT, {"ok": False, "error": {"type": words, "message": words, "code": "E3411"}}))
    assert heard.outcome.status == "error"
    assert heard.outcome.error is not None
    assert len(heard.outcome.error["message"]) <= 2000
    assert len(heard.outcome.error["type"]) <= 100
    assert not {"\x1b", "\u202e", "\0"} & set(heard.outcome.error["message"])


@pytest.mark.parametrize(
    "document",
    [
        {"ok": True, "value": 1, "reports": {"cost": {"network": -50_000_000}}},
        {"ok": True, "value": 1, "reports": {"cost": {"network": 10**30}}},
        {"ok": True, "value": 1, "reports": {"cost": {"network": 1.5}}},
        {"ok": True, "value": 1, "reports": {"cost": {"network": True}}},
        {"ok": True, "value": 1, "reports": {"cost": {"llm_inference": 1}}},
        {"ok": True, "value": 1, "reports": {"cost": []}},
        {"ok": True, "value": 1, "reports": {"session": {"\ud800": 1}}},
        {"ok": True, "value": 1, "reports": {"session": {"x" * 300: 1}}},
        {"ok": True, "value": 1, "reports": {"session": [1]}},
        {"ok": True, "value": 1, "reports": {"changes": [{"resource": "a", "operation": "UPDATE", "self": 1}]}},
        {"ok": True, "value": 1, "reports": {"changes": [{"operation": "UPDATE"}]}},
        {"ok": True, "value": 1, "reports": {"changes": 7}},
        {"ok": True, "value": 1, "reports": {"attestations": [{"what": "a"}]}},
        {"ok": True, "value": 1, "reports": {"others": 1}},
        {"ok": True, "value": 1, "exit": 7},
        {"ok": True, "value": 1, "exit": 10**30},
        {"ok": True, "value": "\ud800"},
        {"ok": 1, "value": 1},
        b'{"ok":true,"value":1e999}',
        b'{"ok":true,"value":1,"reports":{"cost":{"network":1e999}}}',
        b'{"ok":true,"value":NaN}',
    ],
    ids=lambda one: str(one)[:70].encode("ascii", "backslashreplace").decode(),
)
async def test_a_forged_result_is_no_result(document: Any) -> None:
    outcome = (await hear(said(frames.RESULT, document))).outcome
    assert (outcome.status, outcome.value, outcome.exit_code) == ("no_result", None, 0)
    assert failure_of(outcome, "a.b").code == "E3404"


@pytest.mark.parametrize("code", [-1000, 256, 10**30, "7", 1.5, True, None])
async def test_an_exit_code_that_cannot_be_is_not_repeated(code: Any) -> None:
    job = ProgramJob(argv=("x",), limits=LIMITS)
    outcome = (await hear(said(frames.RESULT, {"ok": True, "exit": code}), job)).outcome
    assert (outcome.status, outcome.exit_code) == ("no_result", 0)
    assert (await hear(said(frames.RESULT, {"ok": True, "exit": 7}), job)).outcome.exit_code == 7


async def test_a_whole_number_of_any_length_keeps_its_value() -> None:
    value = [10**30, -(10**25), 2**64, 0.1]
    assert (await hear(said(frames.RESULT, {"ok": True, "value": value}))).outcome.value == value


async def test_who_hears_of_progress_and_fails_ends_the_call_and_nothing_else() -> None:
    def broken(_: Json) -> None:
        raise RuntimeError("not today")

    outcome = (await hear(said(frames.PROGRESS, {"message": "a"}) + DONE, on_progress=broken)).outcome
    assert outcome.status == "no_result"


@given(JSON, st.integers(1, 40))
def test_values_are_counted_as_a_parser_would(document: Any, most: int) -> None:
    body = json.dumps(document).encode()
    count = _count(document)
    if 2 * count <= most:
        assert not more_values(body, most)
    if count > most + 1:
        with pytest.raises(TooManyValues):
            parse(body, most)


def test_a_long_text_full_of_commas_is_one_value() -> None:
    text = 'a,"[{\\,' * MOST_VALUES
    assert parse(json.dumps(text).encode()) == text
    with pytest.raises(TooManyValues):
        parse(b"[" + b"[]," * MOST_VALUES + b"0]")
    with pytest.raises(TooManyValues):
        parse(b"{" + b'"a":"",' * (2 * MOST_VALUES) + b'"b":0}')


def _count(document: Any) -> int:
    inner: list[Any] = []
    if isinstance(document, dict):
        inner = list(cast("Json", document).values())
    elif isinstance(document, list):
        inner = cast("list[Any]", document)
    return 1 + sum(map(_count, inner))


@pytest.mark.parametrize("name", ["session", "modifiers", "views", "provenance", "compensation"])
async def test_reports_under_more_names_than_can_be_looked_at_in_one_turn_end_the_call(name: str) -> None:
    names = b",".join(b'"k%d":1' % number for number in range(20_000))
    heard = await hear(framed_result(b'{"ok":true,"value":1,"reports":{"%b":{%b}}}' % (name.encode(), names)))
    assert (heard.outcome.status, heard.outcome.why) == ("limit", "10000 reports")


def framed_result(body: bytes) -> bytes:
    return frames.frame(frames.RESULT, body)

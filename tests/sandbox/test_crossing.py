"""What code inside reports reaches the host in order and while it runs, on every back end; what it forges ends it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from interlock.call.checkpoints import Bounds
from interlock.core.errors import Failure
from interlock.executors.sandbox.job import PythonJob
from interlock.executors.sandbox.supervisor import Sandbox
from tests.needs import missing
from tests.support.sandboxes import ORDINARY, ordinary_python, require

HERE = Path(__file__).parent
BOUNDS = Bounds(3, 2000)


@pytest.mark.parametrize(
    ("backend", "user"),
    [("zygote", 0), ("zygote", ORDINARY), ("bubblewrap", 0), ("bubblewrap", ORDINARY), ("gvisor", 0)],
)
def test_progress_parts_checkpoints_and_cancellation_cross_on_every_back_end_for_every_user(
    backend: str, user: int
) -> None:
    require(backend)
    if os.getuid() != 0 and user != os.getuid():
        missing("only root can become another user: run the tests as root")
    done = subprocess.run(
        [ordinary_python(user), "-I", str(HERE / "crossing.py"), backend, *sys.path],
        user=user,
        group=user,
        extra_groups=[],
        cwd="/",
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "everything crossed\n", "")


# What only hostile code does

SAYS = dedent(
    """
    import json
    import socket
    import struct
    import threading

    control = socket.socket(fileno=3)


    def framed(kind, body):
        return struct.pack("<cI", kind, len(body)) + body


    def checkpoint(number, label, state=b"1"):
        return framed(b"C", json.dumps({"number": number, "label": label}).encode() + b"\\n" + state)


    def say(kind, body):
        control.sendall(framed(kind, body))


    def save(*given):
        control.sendall(checkpoint(*given))


    def heard():
        kind, length = struct.unpack("<cI", control.recv(5, socket.MSG_WAITALL))
        return kind.decode(), json.loads(control.recv(length, socket.MSG_WAITALL))


    def done(value=None):
        say(b"R", json.dumps({"ok": True, "value": value, "reports": {}}).encode())
        threading.Event().wait()


    def main():
    """
)
FORGED: dict[str, tuple[str, str]] = {
    "a number that is not next": ("save(2, 'a')", "no_result"),
    "the same number again": ("save(1, 'a'); heard(); save(1, 'a')", "no_result"),
    "a label that is no text": ("save(1, 7)", "no_result"),
    "a state that is no JSON": ("save(1, 'a', b'{')", "no_result"),
    "a state that is no number": ("save(1, 'a', b'NaN')", "no_result"),
    "a state nested too deep": ("save(1, 'a', b'[' * 1500)", "no_result"),
    "no state": ("say(b'C', b'{}')", "no_result"),
    "no checkpoint": ("say(b'C', b'')", "no_result"),
    "an answer": ("say(b'A', b'{}')", "no_result"),
    "a checkpoint after the result": ("say(b'R', b'{\"ok\": true}'); save(1, 'a')", "no_result"),
    "a state that is too large": ("save(1, 'a', b'1' * 4000)", "limit"),
    "one more than is allowed": ("[(save(n, 'a'), heard()) for n in (1, 2, 3)]; save(4, 'a')", "limit"),
    "a second before the first is saved": ("control.sendall(checkpoint(1, 'a') + checkpoint(2, 'a'))", "no_result"),
}


def forging(body: str) -> PythonJob:
    lines = "\n".join(f"    {line}" for line in [*body.split("\n"), "done()"])
    return PythonJob(source=SAYS + lines, entry="main", checkpoints=BOUNDS)


@pytest.mark.parametrize("forged", FORGED)
@pytest.mark.asyncio(loop_scope="session")
async def test_a_forged_checkpoint_ends_the_call(sandbox: Sandbox, forged: str) -> None:
    saved: list[str] = []
    body, status = FORGED[forged]

    async def save(label: str, state: Any) -> None:
        saved.append(label)
        await asyncio.sleep(0)

    outcome = await sandbox.run(forging(body), on_checkpoint=save, exit_evidence=True)
    assert outcome.status == status
    assert len(saved) <= BOUNDS.number


@pytest.mark.asyncio(loop_scope="session")
async def test_a_checkpoint_of_a_call_that_may_save_none_ends_it(sandbox: Sandbox) -> None:
    job = PythonJob(source=forging("save(1, 'a')").source, entry="main")

    async def save(label: str, state: Any) -> None:
        raise AssertionError(label)

    for on_checkpoint in (None, save):
        assert (await sandbox.run(job, on_checkpoint=on_checkpoint)).status == "limit"
    assert (await sandbox.run(forging("save(1, 'a')"))).status == "no_result"


@pytest.mark.asyncio(loop_scope="session")
async def test_an_answer_has_a_kind_and_a_number_of_its_own(sandbox: Sandbox) -> None:
    async def save(label: str, state: Any) -> None:
        if label == "b":
            raise Failure("E3902", "no room")
        if label == "c":
            raise ZeroDivisionError

    body = "done([(save(n, label), heard())[1] for n, label in ((1, 'a'), (2, 'b'), (3, 'c'))])"
    outcome = await sandbox.run(forging(body), on_checkpoint=save)
    assert outcome.value == [
        ["A", {"number": 1}],
        ["A", {"number": 2, "code": "E3902", "message": "no room"}],
        ["A", {"number": 3, "code": "E3902"}],
    ]


@pytest.mark.asyncio(loop_scope="session")
async def test_code_that_never_reads_its_answers_holds_nobody_up(sandbox: Sandbox) -> None:
    async def refuse(label: str, state: Any) -> None:
        raise Failure("E3902", "x" * 1_000_000)

    # The answer is more than the socket holds, so that some of it waits for a reader who never comes.
    body = "save(1, 'a')\nwhile len(control.recv(1 << 16, socket.MSG_PEEK)) < 1 << 15: pass\ndone(7)"
    outcome = await sandbox.run(forging(body), on_checkpoint=refuse)
    assert (outcome.status, outcome.value) == ("ok", 7)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_checkpoint_that_came_before_the_result_is_saved_before_it_is_told(sandbox: Sandbox) -> None:
    begun, written = asyncio.Event(), asyncio.Event()
    order: list[str] = []

    async def save(label: str, state: Any) -> None:
        begun.set()
        await written.wait()
        order.append("saved")

    running = asyncio.ensure_future(sandbox.run(forging("save(1, 'a')\ndone(7)"), on_checkpoint=save))
    running.add_done_callback(lambda _: order.append("told"))
    await begun.wait()
    done, _ = await asyncio.wait({running}, timeout=0.1)
    assert not done
    written.set()
    assert (await running).value == 7
    assert order == ["saved", "told"]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_call_that_is_given_up_gives_up_its_checkpoint(sandbox: Sandbox) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def save(label: str, state: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    running = asyncio.ensure_future(sandbox.run(forging("save(1, 'a')"), on_checkpoint=save))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(60):
        await ended.wait()

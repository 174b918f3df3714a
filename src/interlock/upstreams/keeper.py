"""Runs one program and leaves no process of it behind: `python -I -S keeper.py PARENT PROGRAM [ARGUMENT…]`.

The keeper is the parent of the program and the subreaper of everything below it: a process that forks twice, or leaves
the group and the session, becomes a child of the keeper when its parent ends. When the program ends, when the keeper is
asked to end (SIGUSR1) or when the process that started the keeper dies, all of them are killed; then the keeper ends as
the program did. Signals to the group reach the program; the keeper handles only SIGUSR1.

Imports nothing of the package, and little at all: it is started once for each program.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

_PARENT_DEATH, _SUBREAPER = 1, 36
_TAKEN = {signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE}


def main(parent: int, command: list[str]) -> None:
    prctl = ctypes.CDLL(None).prctl
    # Blocked before anything can send one, so that none is lost: they are waited for below.
    signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN)
    prctl(_SUBREAPER, 1, 0, 0, 0)
    prctl(_PARENT_DEATH, signal.SIGUSR1, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the kernel was told
    program = os.fork()
    if not program:
        prctl(_PARENT_DEATH, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TAKEN)
        try:
            os.execvp(command[0], command)  # noqa: S606 - a shell is what this must not be
        except OSError:
            os._exit(127)
    _let_go_of_the_pipes()
    status = _wait_for(program)
    _end_all()
    _end_like(signal.SIGKILL if status is None else status)


def _let_go_of_the_pipes() -> None:
    """Close the pipes, which belong to the program: their reader must see when the program closes them."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)


def _wait_for(program: int) -> int | None:
    """Wait for the program and return its status; None if the keeper is asked to end first."""
    while True:
        if signal.sigwait(_TAKEN) == signal.SIGUSR1:
            return None
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == program:
                    return ended[1]
        except ChildProcessError:
            return None


def _end_all() -> None:
    """Kill all processes below until none is left: orphans of a killed process become our children."""
    while True:
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it ended by itself
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as listed:
        return [int(pid) for pid in listed.read().split()]


def _end_like(status: int) -> None:
    if not os.WIFSIGNALED(status):
        os._exit(os.waitstatus_to_exitcode(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

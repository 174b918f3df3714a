"""Parts of agents' allowances that calls hold, counted over all processes that share a home.

Theory of operation. The count is kept by the kernel, as record locks on one file. Every agent has a range of offsets in
it: one byte for the turn, then one per thousandth of a core, then one per KiB of memory. Nothing is stored at these
offsets. A call that runs has locked as many bytes as it may use, wherever they were free, so calls together cannot lock
more than there are. Each call has a descriptor of its own, and closing it gives everything back. The kernel closes it
when the process dies, however it dies: there is no entry that could be left behind.

Only the call that has locked the turn of its agent takes anything. It gives the turn up when it has taken all that it
needs; a call that finds too little free keeps the turn and looks again later. Others who come meanwhile wait behind it,
so that a large call is not starved by small ones of another process.

The beginning of the file holds a random key by which agents are given their ranges. Without it an agent could choose a
name that shares a range with somebody else's, and use up what is theirs.

INVARIANT: one descriptor at a time has an offset locked, and a call runs only while all that it may use is locked.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from interlock.core import record_locks
from interlock.core.errors import Failure
from interlock.core.record import NamedTuple
from interlock.executors.sandbox.job import Limits
from interlock.store.failures import no_room

KEY_BYTES = 32
# A range holds a turn, up to a million thousandths of a core, and up to 1 TiB of memory in KiB.
_MEMORY_AT = 1 << 20
_RANGE_BITS = 31
_MOST_MEMORY = (1 << _RANGE_BITS) - _MEMORY_AT


class _Wish(NamedTuple):
    """A range of offsets, and how many of them a call needs."""

    start: int
    end: int
    wanted: int


class Shares:
    """The file on which the calls of one home lock what they use."""

    def __init__(self, path: Path, *, cores: float, memory_bytes: int) -> None:
        self._path = path
        self._cores = min(round(cores * 1000), _MEMORY_AT - 1)
        self._memory = min(memory_bytes >> 10, _MOST_MEMORY)

    def ask(self, agent: str, limits: Limits) -> Share:
        """Make a share of the agent's allowance, which `Share.taken` takes. Close it to give it back."""
        try:
            file = self._open()
            try:
                key = os.pread(file, KEY_BYTES, 0)
                digest = hashlib.blake2b(agent.encode(errors="surrogatepass"), key=key, digest_size=4).digest()
            except BaseException:
                os.close(file)
                raise
        except OSError as error:
            raise _unusable(error) from None
        base = int.from_bytes(digest) << _RANGE_BITS
        cores = _Wish(base + 1, base + 1 + self._cores, round(limits.cpu_cores * 1000))
        at = base + _MEMORY_AT
        memory = _Wish(at, at + self._memory, -(-limits.memory_bytes // 1024))
        return Share(file, base, (cores, memory))

    def _open(self) -> int:
        while True:
            try:
                return os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                self._make()

    def _make(self) -> None:
        """Make the file with a new key. It appears whole, and only if there is none."""
        fresh = self._path.with_name(f"{self._path.name}.{os.urandom(8).hex()}")
        try:
            file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(file, "wb") as writing:
                writing.write(os.urandom(KEY_BYTES))
            os.link(fresh, self._path)
        except FileExistsError:
            pass  # another process was first
        finally:
            fresh.unlink(missing_ok=True)


class Share:
    """The part of its agent's allowance that one call holds or waits for."""

    def __init__(self, file: int, turn: int, wishes: Sequence[_Wish]) -> None:
        self._file = file
        self._turn = turn
        self._wishes = wishes
        self._first = False

    def taken(self) -> bool:
        """Take it whole, if there is room and nobody waits before.

        Does not wait: call it again until it returns True.
        """
        try:
            if not self._first:
                self._first = record_locks.take(self._file, self._turn, 1)
            if not self._first:
                return False
            free = [self._free(wish) for wish in self._wishes]
            if None in free:
                return False  # the turn is kept: others wait behind
            for start, length in chain.from_iterable(filter(None, free)):
                if not record_locks.take(self._file, start, length):
                    raise BlockingIOError(errno.EAGAIN, "locked without a turn")
            record_locks.give_back(self._file, self._turn, 1)
        except OSError as error:
            raise _unusable(error) from None
        return True

    def close(self) -> None:
        """Give everything back."""
        os.close(self._file)

    def _free(self, wish: _Wish) -> list[tuple[int, int]] | None:
        """Return ranges of free offsets, as many as are wanted in all; None if there are not enough."""
        # No other call locks any of them before this call gives up the turn.
        free: list[tuple[int, int]] = []
        at, wanted = wish.start, wish.wanted
        while wanted and at < wish.end:
            length, after = self._gap(at, wish.end)
            if length:
                free.append((at, min(length, wanted)))
                wanted -= free[-1][1]
            at = after
        return None if wanted else free

    def _gap(self, start: int, end: int) -> tuple[int, int]:
        """Return the number of free offsets from here on, and the end of the next lock."""
        after = end
        while start < end:
            lock = record_locks.any_lock(self._file, start, end - start)
            if lock is None:
                break
            # The kernel reports one of the locks there, not the first: search again before it.
            end, after = max(lock[0], start), sum(lock)
        return end - start, after


def _unusable(error: OSError) -> Failure:
    return no_room(error) or Failure(
        "E3801",
        f"sandboxed calls cannot be counted: `sandbox.lock` of the data directory cannot be used ({error.strerror})",
        resolution="let the user that runs Interlock read and write that file, or remove it, then send the call again",
    )

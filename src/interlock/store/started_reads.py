"""Notes of the reads that run, for the process that comes after one that was killed.

The journal has nothing of a read before it ends, or has run for a while: a record of its start would cost as much as
all its other records. But its process may be killed while it runs. So each read has a note in a file of its process,
from before its tool starts until its closing record is written. A read that is answered before that (`audit =
"batched"`) has its closing record as a note from then on. The file is mapped into memory: its content stays there
when the process is killed, and nothing waits for the disk. A machine that loses its power may lose it.

    file    SLOTS slots of SLOT bytes, each for the start of a read; then parts of PART bytes, for closing records
    slot    one note
    part    notes, one behind the other, and a byte that is not 1 behind the last one
    note    1 while it counts, a record, a line feed, which no record contains

The closing records of a batch are written together, and their notes are removed together: by the first byte of the
part, once all its records are written.

INVARIANT: the first byte of a note is set behind the rest of it and removed before anything else of it is changed, so
a note counts whole or not at all.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from interlock.store.port import Written

if TYPE_CHECKING:
    from asyncio import Future

_log = logging.getLogger("interlock.store")

SLOT: Final = 2048
SLOTS: Final = 1024
PART: Final = 256 * 1024
PARTS: Final = 8
# What a note takes beside its record.
_AROUND: Final = 2
_LONGEST: Final = SLOT - _AROUND
_COUNTS: Final = 1
_GONE: Final = 0
_SUFFIX: Final = ".reads"

# Queues a record: its kind, the id of its call, its body, and who hears when it is written or cannot be.
Write: TypeAlias = Callable[[str, str, bytes, Written], None]


class StartedReads:
    """The notes of one process. The file is made for the first of them."""

    def __init__(self, directory: Path, owner: str) -> None:
        self._path = directory / f"{owner}{_SUFFIX}"
        self.memory: mmap.mmap | None = None
        # The places of slots that are free, and of those in use by the ids of their calls.
        self.free: list[int] = []
        self.used: dict[str, int] = {}
        # The parts for closing records that are not written yet, the one that takes the next of them, and one for those
        # that cannot be written.
        self.parts: list[_Part] = []
        self._part: _Part | None = None
        self._left: _Part | None = None
        self._settled: Future[None] | None = None
        self._is_refused = False
        # Whether the last records could not be written, which is in the log once.
        self._is_left = False

    def begin(self, call: str, trace_id: str, input_hash: str, rest: str) -> bool:
        """Note that a read starts, as the record of its start. False if there is no room for it.

        `rest` has the other members of the record, as JSON: see `records.rest_of_read` and `rest_of_start`.
        """
        memory = self._open() if self.memory is None else self.memory
        note = (
            f'{{"kind":"started","call":"{call}","traceId":"{trace_id}","inputHash":"{input_hash}",{rest}}}\n'.encode()
        )
        size = len(note)
        if memory is None or not self.free or size > _LONGEST:
            return False
        self.used[call] = at = self.free.pop()
        memory[at + 1 : at + 1 + size] = note
        memory[at] = _COUNTS
        return True

    def end(self, call: str) -> None:
        """Remove the note of a read whose closing record is written, if there is one."""
        at = self.used.pop(call, None)
        if at is not None and self.memory is not None:
            self.memory[at] = _GONE
            self.free.append(at)

    def answer(self, call: str, record: bytes, write: Write) -> bool:
        """Queue the closing record of a read with `write`, and note it in place of the start of the read until it is
        written. False, and it is not queued, if there is no room for the note.

        INVARIANT: at every moment one of both notes counts, or both; a closing record counts more.
        """
        part = self._part
        if part is None or not part.has_room(record):
            part = self._next_part(record)
            if part is None:
                return False
        write("closed", call, record, part)
        part.add(record)
        part.expected += 1
        self.end(call)
        return True

    @property
    def expected(self) -> int:
        """The number of closing records that are noted and may still be written."""
        return sum(part.expected for part in self.parts)

    def _next_part(self, record: bytes) -> _Part | None:
        """The first part without notes, which takes the next ones; None if there is none that has room."""
        if self.memory is None:
            self._open()
        part = next((part for part in self.parts if part.is_empty and part.has_room(record)), None)
        self._part = part or self._part
        return part

    def _settle(self, part: _Part, failed: list[bytes], error: BaseException | None) -> None:
        """Remove the notes of a part whose records are written. Those that could not be written stay."""
        if error is not None and not self._is_left:
            _log.error("records of reads that were answered are left to the next process: %s", error)
        self._is_left = error is not None
        left = self._left
        for record in failed:
            if left is None or not left.has_room(record):
                break
            left.add(record)
        else:
            part.clear()
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(None)

    async def settle(self) -> None:
        """Wait until the closing records of all reads are written, or cannot be."""
        from asyncio import get_running_loop  # commands that look at a data directory do without it

        while self.expected:
            self._settled = get_running_loop().create_future()
            await self._settled

    def _open(self) -> mmap.mmap | None:
        """Make the file. If that fails once it is not tried again, so that reads do not pay for it."""
        if self._is_refused:
            return None
        parts = range(SLOT * SLOTS, SLOT * SLOTS + PART * PARTS, PART)
        try:
            place = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                # Its room is taken now: a full disk is an error here, and would end the process later.
                os.posix_fallocate(place, 0, parts.stop)
                self.memory = memory = mmap.mmap(place, parts.stop)
            except OSError:
                self._path.unlink()
                raise
            finally:
                os.close(place)
        except OSError as error:
            self._is_refused = True
            _log.warning("reads are noted in the journal, as %s cannot be made: %s", self._path.name, error.strerror)
            return None
        self.free = [SLOT * number for number in reversed(range(SLOTS))]
        *self.parts, self._left = (_Part(memory, at, self._settle) for at in parts)
        return memory

    def close(self) -> None:
        """Remove the file. One with notes stays: the next process to open the data directory closes their calls."""
        if self.memory is None or self._left is None:
            return
        self.memory.close()
        if not self.used and all(part.is_empty for part in (*self.parts, self._left)):
            self._path.unlink(missing_ok=True)
        self.memory, self.free, self.parts, self._part, self._left = None, [], [], None, None


class _Part:
    """A part of the file: notes of closing records that are not written yet."""

    __slots__ = ("_error", "_failed", "_first", "_last", "_memory", "_next", "_on_settled", "expected")

    def __init__(
        self,
        memory: mmap.mmap,
        first: int,
        on_settled: Callable[[_Part, list[bytes], BaseException | None], None],
    ) -> None:
        self._memory = memory
        self._on_settled = on_settled
        # Where the records of its first note and its next one begin, and where the part ends.
        self._first = self._next = first + 1
        self._last = first + PART
        # How many records may still be written, those that could not be, and why.
        self.expected = 0
        self._failed: list[bytes] = []
        self._error: BaseException | None = None

    @property
    def is_empty(self) -> bool:
        return self._next == self._first

    def has_room(self, record: bytes) -> bool:
        return self._next + len(record) + _AROUND <= self._last

    def add(self, record: bytes) -> None:
        """Note a record. The byte behind it is that of the next note."""
        start = self._next
        self._next = end = start + len(record) + _AROUND
        self._memory[start:end] = record + b"\n\0"
        self._memory[start - 1] = _COUNTS

    def written(self, record: bytes, error: BaseException | None) -> None:
        if error is not None:
            self._failed.append(record)
            self._error = error
        self.expected -= 1
        if not self.expected:
            self._on_settled(self, self._failed, self._error)

    def clear(self) -> None:
        """Remove all notes."""
        self._memory[self._first - 1] = _GONE
        self._next = self._first
        self._failed, self._error = [], None


class LeftNotes:
    """The notes that dead processes have left. A file that cannot be read stays for a later process."""

    def __init__(self, directory: Path, alive: Callable[[str], bool]) -> None:
        self._paths: list[Path] = []
        self.notes: list[bytes] = []
        for path in directory.glob(f"*{_SUFFIX}"):
            if alive(path.stem):
                continue
            try:
                with open(path, "rb") as file:
                    held = file.read(SLOT * SLOTS + PART * PARTS)
            except FileNotFoundError:
                continue  # another process was faster
            except OSError as error:
                _log.warning("notes of reads in %s cannot be read: %s", path.name, error.strerror)
                continue
            for start in range(0, min(len(held), SLOT * SLOTS), SLOT):
                self.notes += _notes(held[start : start + SLOT])
            for start in range(SLOT * SLOTS, len(held), PART):
                self.notes += _notes(held[start : start + PART])
            self._paths.append(path)

    @property
    def there(self) -> bool:
        """Whether a dead process has left a file, with notes or without."""
        return bool(self._paths)

    def remove(self) -> None:
        """Remove the files, once the calls are closed."""
        for path in self._paths:
            with suppress(OSError):
                path.unlink()


def _notes(held: bytes) -> Iterator[bytes]:
    """The notes of a slot or a part. What is behind the line feed of a slot is left of an earlier note."""
    at = 0
    while at < len(held) and held[at] == _COUNTS and (end := held.find(b"\n", at)) >= 0:
        yield held[at + 1 : end]
        at = end + 1

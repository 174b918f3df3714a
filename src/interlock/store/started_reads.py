"""Notes of the reads that run, for the process that comes after one that was killed.

The journal has nothing of a read before it ends, or has run for a while: a record of its start would cost as much as
all its other records. But its process may be killed while it runs. So each read has a note in a file of its process,
from before its tool starts until its closing record is written. A read that is answered before that (`audit =
"batched"`) has its closing record as a note from then on. The file is mapped into memory: its content stays there
when the process is killed, and nothing waits for the disk. A machine that loses its power may lose it.

    file    SLOTS slots of SLOT bytes, each for one note
    slot    1 while its note counts, the length of the note in four bytes, the note

INVARIANT: the first byte is set behind the note and removed before anything else of the slot is changed, so a note
counts whole or not at all.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from asyncio import Future

_log = logging.getLogger("interlock.store")

SLOT: Final = 2048
SLOTS: Final = 1024
_HEAD: Final = 5
_LONGEST: Final = SLOT - _HEAD
_SIZE: Final = Struct("<I").pack
_SUFFIX: Final = ".reads"

# Queues a record: its kind, the id of its call, its body, and what to call when it is written or cannot be.
Write: TypeAlias = Callable[[str, str, bytes, Callable[[str, BaseException | None], None]], None]


class StartedReads:
    """The notes of one process. The file is made for the first of them."""

    def __init__(self, directory: Path, owner: str) -> None:
        self._path = directory / f"{owner}{_SUFFIX}"
        self.memory: mmap.mmap | None = None
        # The places of slots that are free, and of those in use by the ids of their calls.
        self.free: list[int] = []
        self.used: dict[str, int] = {}
        # The same of closing records that are not written yet, and how many of them still may be.
        self.answered: dict[str, int] = {}
        self._expected = 0
        self._settled: Future[None] | None = None
        self._is_refused = False
        # Whether the last one of them could not be written, which is in the log once.
        self._is_left = False

    def begin(self, call: str, trace_id: str, input_hash: str, rest: str) -> bool:
        """Note that a read starts, as the record of its start. False if there is no room for it.

        `rest` has the other members of the record, as JSON: see `records.rest_of_read` and `rest_of_start`.
        """
        memory = self.memory or self._open()
        note = f'{{"kind":"started","call":"{call}","traceId":"{trace_id}","inputHash":"{input_hash}",{rest}}}'.encode()
        size = len(note)
        if memory is None or not self.free or size > _LONGEST:
            return False
        self.used[call] = at = self.free.pop()
        memory[at + 1 : at + _HEAD + size] = _SIZE(size) + note
        memory[at] = 1
        return True

    def end(self, call: str) -> None:
        """Remove the note of a read whose closing record is written, if there is one."""
        at = self.used.pop(call, None)
        if at is not None and self.memory is not None:
            self.memory[at] = 0
            self.free.append(at)

    def answer(self, call: str, record: bytes, write: Write) -> bool:
        """Queue the closing record of a read with `write`, and note it in place of the start of the read until it is
        written. False, and it is not queued, if there is no room for the note.

        INVARIANT: at every moment one of both notes counts, or both; a closing record counts more.
        """
        memory, size = self.memory or self._open(), len(record)
        if memory is None or not self.free or size > _LONGEST:
            return False
        write("closed", call, record, self._forget)
        self.answered[call] = at = self.free.pop()
        memory[at + 1 : at + _HEAD + size] = _SIZE(size) + record
        memory[at] = 1
        self._expected += 1
        begun = self.used.pop(call, None)
        if begun is not None:
            memory[begun] = 0
            self.free.append(begun)
        return True

    def _forget(self, call: str, error: BaseException | None) -> None:
        """Remove the closing record of a read that is in the journal now. One that could not be written stays."""
        self._expected -= 1
        if error is not None:
            if not self._is_left:
                _log.error("records of reads that were answered are left to the next process: %s", error)
            self._is_left = True
        elif self.memory is not None:
            self._is_left = False
            at = self.answered.pop(call)
            self.memory[at] = 0
            self.free.append(at)
        if self._settled is not None and not self._expected and not self._settled.done():
            self._settled.set_result(None)

    async def settle(self) -> None:
        """Wait until the closing records of all reads are written, or cannot be."""
        from asyncio import get_running_loop  # commands that look at a data directory do without it

        if self._expected:
            self._settled = get_running_loop().create_future()
            await self._settled

    def _open(self) -> mmap.mmap | None:
        """Make the file. If that fails once it is not tried again, so that reads do not pay for it."""
        if self._is_refused:
            return None
        try:
            place = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                # Its room is taken now: a full disk is an error here, and would end the process later.
                os.posix_fallocate(place, 0, SLOT * SLOTS)
                self.memory = mmap.mmap(place, SLOT * SLOTS)
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
        return self.memory

    def close(self) -> None:
        """Remove the file. One with notes stays: the next process to open the data directory closes their calls."""
        if self.memory is None:
            return
        self.memory.close()
        self.memory, self.free = None, []
        if not self.used and not self.answered:
            self._path.unlink(missing_ok=True)


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
                    held = file.read(SLOT * SLOTS)
            except FileNotFoundError:
                continue  # another process was faster
            except OSError as error:
                _log.warning("notes of reads in %s cannot be read: %s", path.name, error.strerror)
                continue
            self.notes += _notes(held)
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


def _notes(held: bytes) -> Iterable[bytes]:
    for at in range(0, len(held) - SLOT + 1, SLOT):
        size = int.from_bytes(held[at + 1 : at + _HEAD], "little")
        if held[at] == 1 and size <= _LONGEST:
            yield held[at + _HEAD : at + _HEAD + size]

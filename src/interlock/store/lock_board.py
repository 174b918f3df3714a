"""The lock board: where the processes of a store write down the resource locks that their calls hold or wait for.

The board has one entry per process: whether it is alone, or which locks its calls hold or wait for. A process changes
the board while no other one does. Entries of processes that do not live count for nothing. `effects.locks` says what
the entries mean.

Two implementations differ in where the board is: `FileBoard` for the processes of one machine, and
`postgres.lock_board.PostgresBoard` for those of several.
"""

from __future__ import annotations

import fcntl
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import orjson

from interlock.core.record import NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.store.instance import Instance

Answer = Literal["alone", "held", "taken", "handing over"]
# The number that the next ticket gets, and the entries of processes by their instance ids.
Document: TypeAlias = dict[str, Any]


class Claim(Protocol):
    """The locks of one call. `reaches` says what they stand for, and whether the call changes it."""

    reaches: dict[str, bool]
    number: int | None
    held: bool

    @property
    def nested(self) -> bool:
        """Whether another call that holds locks made this one. It waits for nobody."""
        ...


class Posted(NamedTuple):
    """Whether this process is alone on the board, and the state of each ticket that it asked about."""

    alone: bool
    answers: list[Answer]


class Board(ABC):
    """A board, as one process uses it. Subclasses define where the text is stored and which processes live."""

    # Whether the board is used so fast that the event loop may do it.
    near = True

    def __init__(self, me: str) -> None:
        self._me = me

    def post(self, mine: Sequence[Claim], requests: Sequence[Claim]) -> Posted:
        """Write the locks of this process, and tell the state of some of them. Those that can be held are, from now on.

        Raises BlockingIOError while another process writes, and a failure where the board cannot be used.
        """
        answers: list[Answer] = []

        def change(board: Document) -> Document:
            others, number = board["members"], board["next"]
            for ticket in mine:
                if ticket.number is None:
                    ticket.number = number
                    number += 1
            answers[:] = [_answer(one, others.values()) if others else "alone" for one in requests]
            held = {id(one) for one, answer in zip(requests, answers, strict=True) if answer == "held"}
            claims = [[one.number, one.held or id(one) in held, one.reaches] for one in mine if one.reaches]
            entry = {"alone": not others, "claims": claims if others else []}
            alone.append(not others)
            return {"next": number, "members": {**others, self._me: entry}}

        alone: list[bool] = []
        self._exchange(change)
        for ticket, answer in zip(requests, answers, strict=True):
            if answer == "held":
                ticket.held = True
        return Posted(alone[-1], answers)

    def leave(self) -> None:
        """Remove this process from the board."""
        self._exchange(lambda board: board)

    @abstractmethod
    def rung(self) -> bool:
        """Whether another process has written since this one last wrote."""

    def sure(self) -> bool:
        """Whether this process is certainly not taken for dead."""
        return True

    def expiring(self) -> bool:
        """Whether `sure` will soon be false, unless the store answers."""
        return False

    def guard(self, working: bool) -> None:  # noqa: B027 - only leases run out
        """Note whether a tool works under locks of this process. While one does, it ends when it loses them."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the board. Entries of this process stay until it does not live any more."""

    @abstractmethod
    def _exchange(self, change: Callable[[Document], Document]) -> None:
        """Replace the text of the board. `change` gets it with the entries of the other living processes."""


def _answer(request: Claim, others: Iterable[Mapping[str, Any]]) -> Answer:
    """Determine the state of a ticket among the locks of other processes."""
    assert request.number is not None
    for entry in others:
        if entry["alone"]:
            return "handing over"
        for number, held, reaches in entry["claims"]:
            ahead = held or (not request.nested and number < request.number)
            if ahead and _conflict(request.reaches, reaches):
                return "taken"
    return "held"


def _conflict(mine: Mapping[str, bool], theirs: Mapping[str, bool]) -> bool:
    return any(
        (write or writes) and (one.startswith(other) or other.startswith(one))
        for one, write in mine.items()
        for other, writes in theirs.items()
    )


_HEADER = struct.Struct("!QQQ")  # number of writes, position and length of the text


class FileBoard(Board):
    """The board as a file of the data directory, for the processes that use the directory.

    It is written under a `flock`: a process killed at any moment leaves the old text or the new. It has a header, and
    behind it the text that the header points at. New text is written beside the old, and then the header is switched to
    it in one write that a kill cannot divide. The kernel knows who is dead (`Instance.alive`). After a power cut
    everybody is, so nothing here needs to reach the disk.
    """

    def __init__(self, path: Path, instance: Instance) -> None:
        super().__init__(instance.id)
        self._alive = instance.alive
        self._path = path
        self._file: int | None = None
        self._seen_header = bytes(_HEADER.size)

    def rung(self) -> bool:
        return self._header() != self._seen_header

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _exchange(self, change: Callable[[Document], Document]) -> None:
        with _Writing(self._open()):
            board = self._read()
            members: dict[str, Any] = board.get("members", {})
            others = {owner: entry for owner, entry in members.items() if owner != self._me and self._alive(owner)}
            self._write(board, change({"next": board.get("next", 1), "members": others}))

    def _open(self) -> int:
        if self._file is None:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._file

    def _header(self) -> bytes:
        return os.pread(self._open(), _HEADER.size, 0).ljust(_HEADER.size, b"\0")

    def _read(self) -> Document:
        file = self._open()
        self._seen_header = self._header()
        _, start, length = _HEADER.unpack(self._seen_header)
        if start + length <= os.fstat(file).st_size:
            try:
                return orjson.loads(os.pread(file, length, start))
            except orjson.JSONDecodeError:
                pass
        # A new board, or one damaged by a power cut: the process that wrote it is gone.
        self._seen_header = bytes(_HEADER.size)
        return {}

    def _write(self, board: Document, now: Document) -> None:
        if board == now:
            return
        file, text = self._open(), orjson.dumps(now)
        times, start, length = _HEADER.unpack(self._seen_header)
        # INVARIANT: the text that the header points at is not overwritten.
        start = _HEADER.size if _HEADER.size + len(text) <= start else max(start + length, _HEADER.size)
        os.pwrite(file, text, start)
        self._seen_header = _HEADER.pack(times + 1, start, len(text))
        os.pwrite(file, self._seen_header, 0)


class _Writing:
    """Context in which one process may write the board. Does not wait."""

    def __init__(self, file: int) -> None:
        self._file = file

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

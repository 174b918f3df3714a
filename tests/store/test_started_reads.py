"""The notes of closing records that are not written yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlock.store import started_reads
from interlock.store.port import Written
from interlock.store.started_reads import LeftNotes, StartedReads

OWNER = "01M7JQ9AJG6CC9359201E27AFF"


class Queue:
    """Records that wait to be written, and who hears of each."""

    def __init__(self) -> None:
        self.waiting: list[tuple[bytes, Written]] = []

    def write(self, kind: str, call: str, record: bytes, listener: Written) -> None:
        assert (kind, len(call)) == ("closed", 26)
        self.waiting.append((record, listener))

    def settle(self, *failing: bytes) -> None:
        """End the writes of all records, of some with an error."""
        waiting, self.waiting = self.waiting, []
        for record, listener in waiting:
            listener.written(record, OSError("no room") if record in failing else None)


def left(directory: Path) -> list[bytes]:
    """The notes that another process would find now."""
    return LeftNotes(directory, lambda _: False).notes


def record(number: int, size: int = 20) -> bytes:
    return f'{{"number":{number:0{size}}}}'.encode()


def answer(reads: StartedReads, queue: Queue, number: int, size: int = 20) -> bool:
    call = f"{number:026}"
    return reads.begin(call, "t", "h", '"door":"library"') and reads.answer(call, record(number, size), queue.write)


def test_notes_count_until_the_last_record_of_their_part_is_written(tmp_path: Path) -> None:
    reads, queue = StartedReads(tmp_path, OWNER), Queue()
    for size in (300, 20, 150):  # what is left of longer notes does not count
        for number in range(3):
            assert answer(reads, queue, number, size)
            assert left(tmp_path) == [record(one, size) for one in range(number + 1)]
        first = queue.waiting.pop(0)
        queue.settle()
        assert left(tmp_path) == [record(one, size) for one in range(3)]
        queue.waiting.append(first)
        queue.settle()
        assert (left(tmp_path), reads.expected) == ([], 0)
    reads.close()
    assert list(tmp_path.iterdir()) == []


def test_notes_of_records_that_cannot_be_written_stay_and_take_no_room_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(started_reads, "PART", 200)
    monkeypatch.setattr(started_reads, "PARTS", 3)  # the last is for those that cannot be written
    reads, queue = StartedReads(tmp_path, OWNER), Queue()
    for number in range(4):
        assert answer(reads, queue, 10 * number)
        assert answer(reads, queue, 10 * number + 1)
        queue.settle(record(10 * number))
    failed = [record(10 * number) for number in range(4)]
    assert left(tmp_path) == failed
    assert len(caplog.records) == 1
    # When there is no room for more of them, they stay where they are, with those that were written beside them.
    for number in range(4, 6):
        for one in range(6):
            assert answer(reads, queue, 10 * number + one)
        queue.settle(*(record(10 * number + one) for one in range(6)))
    assert set(left(tmp_path)) >= {*failed, *(record(10 * number + one) for number in (4, 5) for one in range(6))}
    assert not answer(reads, queue, 99)
    assert (reads.expected, queue.waiting) == (0, [])
    reads.end(f"{99:026}")
    reads.close()
    assert len(set(left(tmp_path))) == 16

"""The findings of an examination of the chain, and its verdict."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from interlock.core.clock import iso
from interlock.core.record import dataclass
from interlock.store.last_head import GENESIS, SignedHead

if TYPE_CHECKING:
    from interlock.data.schema import Json


MAX_FAULTS = 20


@dataclass(frozen=True, slots=True)
class ChainFault:
    """A difference from what was written. `seq` 0: not about one record."""

    seq: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainVerdict:
    """The result of the verification."""

    intact: bool
    records: int
    purged_through: int
    head: tuple[int, str]
    anchors: int
    anchored_through: int
    last_anchor_ms: int | None
    anchors_file: bool
    faults: tuple[ChainFault, ...]
    seconds: float

    def document(self) -> Json:
        seq, digest = self.head
        return {
            "intact": self.intact,
            "records": self.records,
            "purged_through": self.purged_through,
            "head": {"seq": seq, "hash": digest},
            "anchors": self.anchors,
            "anchored_through": self.anchored_through,
            "last_anchor_at": None if self.last_anchor_ms is None else iso(self.last_anchor_ms),
            "anchors_file": self.anchors_file,
            "faults": [{"seq": fault.seq, "what": fault.what} for fault in self.faults],
            "seconds": self.seconds,
        }


@dataclass(slots=True)
class FaultList:
    """The first faults of one kind of check. Each check meets its own in order, so the first overall are kept."""

    faults: list[ChainFault] = field(default_factory=list[ChainFault])

    def note(self, seq: int, what: str) -> None:
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(ChainFault(seq, what))


@dataclass(slots=True)
class Examination:
    """The state and the findings of an examination."""

    in_segments: FaultList = field(default_factory=FaultList)
    in_records: FaultList = field(default_factory=FaultList)
    in_anchors: FaultList = field(default_factory=FaultList)
    in_general: FaultList = field(default_factory=FaultList)
    records: int = 0
    segment_heads: dict[int, bytes] = field(default_factory=dict[int, bytes])
    purged_through: int = 0
    seq: int = 0
    head: bytes = GENESIS
    anchors: int = 0
    newest: SignedHead | None = None
    anchors_file: bool = True

    def verdict(self, seconds: float) -> ChainVerdict:
        parts = (self.in_segments, self.in_records, self.in_anchors)
        faults = sorted((fault for part in parts for fault in part.faults), key=lambda fault: fault.seq)
        faults = [*faults, *self.in_general.faults][:MAX_FAULTS]
        newest = self.newest
        return ChainVerdict(
            intact=not faults,
            records=self.records,
            purged_through=self.purged_through,
            head=(self.seq, self.head.hex()),
            anchors=self.anchors,
            anchored_through=0 if newest is None else newest.seq,
            last_anchor_ms=None if newest is None else newest.at_ms,
            anchors_file=self.anchors_file,
            faults=tuple(faults),
            seconds=seconds,
        )


def records_words(first: int, last: int) -> str:
    return f"record {first} is" if first == last else f"records {first} to {last} are"

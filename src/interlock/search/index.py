"""The index of a catalog: BM25F over the fields of each tool, joined with vectors where there are any.

What a search returns depends on the visible tools alone: how rare a term is, the highest score and the scale of the
vectors are all taken from them. So nothing about other tools can be learned from results or scores. Nor does its work
grow with them: for each term at most `_PER_TOOL` entries are looked at for each visible tool, and for all together at
most twice as many vectors as there are visible tools. Finding a tool in the list of a term takes steps as the logarithm
of the length of the list.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar

import numpy as np

from interlock.core.record import dataclass

from . import words
from .likeness import Bits, Compared, Counts, Floats, Given, Slots, highest, joined

if TYPE_CHECKING:
    from numpy.typing import NDArray

# For name, description, parameter names, parameter texts, server and tags, server text: how much an occurrence counts,
# and the usual length. Lengths are constants and not averages of the catalog, so that the weights of a tool depend on
# that tool alone, and adding another does not touch them.
WEIGHTS: Final = (4.0, 2.0, 1.0, 1.0, 2.0, 0.5)
USUAL: Final = (3.0, 14.0, 5.0, 20.0, 3.0, 15.0)
B: Final = np.float32(0.4)
K1: Final = np.float32(1.2)
MOST_TERMS: Final = 24
# How much the whole request counts beside its best sentence.
WHOLE_WORDS: Final = np.float32(0.7)
MOST_REQUEST: Final = 4000
_LEAST_REMOVED: Final = 1000
# A list that is longer than this for each visible tool is searched for the visible tools, and not read.
_PER_TOOL: Final = 4

By = Literal["words", "meaning", "both"]
_Postings = tuple[Slots, Floats]
_Kind = TypeVar("_Kind", bound=np.generic)


@dataclass(frozen=True, slots=True)
class IndexedTool:
    """The texts of a tool that are searched."""

    id: str
    name: str
    description: str = ""
    parameters: Sequence[str] = ()
    parameter_texts: Sequence[str] = ()
    server: str = ""
    server_text: str = ""
    tags: Sequence[str] = ()

    def fields(self) -> tuple[str, str, str, str, str, str]:
        return (
            self.name,
            self.description,
            " ".join(self.parameters),
            " ".join(self.parameter_texts),
            " ".join((self.server, *self.tags)),
            self.server_text,
        )

    def text(self) -> str:
        """The tool as one text, for encoders."""
        head = " ".join(words.split(f"{self.server} {self.name}"))
        names = " ".join(" ".join(words.split(name)) for name in self.parameters)
        return f"{head}: {self.description[:400]} ({names}) {' '.join(self.parameter_texts)[:250]}"


class Encoder(Counts, Protocol):
    """Converts texts to vectors of length one."""

    def documents(self, texts: Sequence[str]) -> Floats: ...

    def queries(self, texts: Sequence[str]) -> Floats: ...


@dataclass(frozen=True, slots=True)
class Hit:
    id: str
    score: float


class Mask:
    """The tools that a search is about, by their numbers in the index, and the place of each among them."""

    __slots__ = ("numbering", "places", "removals", "slots")

    def __init__(self, bits: Bits, numbering: int, removals: int) -> None:
        self.slots: Slots = np.flatnonzero(bits).astype(np.int32)
        # -1 for tools that are not visible.
        self.places: Slots = np.full(len(bits), -1, np.int32)
        self.places[self.slots] = np.arange(len(self.slots), dtype=np.int32)
        self.numbering = numbering
        # How many tools had been removed when it was made.
        self.removals = removals

    def __len__(self) -> int:
        return len(self.slots)


class Renumbered(Exception):  # noqa: N818 - not a fault: the mask has to be made again
    """The tools of the index have other numbers than when the mask was made."""


# many methods: postings, vectors and numbers of tools change together, under one lock
class Index:
    """Tools can be added and removed at any time, from any thread.

    With an encoder the index makes the vectors itself. Vectors that take long are made elsewhere: `counts` says how
    they count, `place` adds those of tools, and a search is given those of its request. Where a database has the
    vectors, `refer` adds the number of each tool's row there, and a search is given what the database compared. A tool
    whose vector is not there yet is found by words.
    """

    def __init__(self, encoder: Encoder | None = None, *, counts: Counts | None = None) -> None:
        self._encoder = encoder
        self._counts = encoder or counts
        self._lock = threading.Lock()
        self._slots: dict[str, int] = {}
        self._ids: list[str | None] = []
        self._documents: dict[str, array[int]] = {}
        self._weights: dict[str, array[float]] = {}
        self._vectors: Floats = np.zeros((0, 0), np.float32)
        # The number of the row that has the vector of a tool, where a database has it; 0 if there is none.
        self._rows: NDArray[np.int64] = np.zeros(0, np.int64)
        self._placed: Bits = np.zeros(0, np.bool_)
        self._gone: Bits = np.zeros(0, np.bool_)
        self._removed = self._removals = 0
        self.numbering = 0
        # How many entries of lists and how many vectors all searches have looked at.
        self.looked_at = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, tool: str) -> bool:
        return tool in self._slots

    def ids(self) -> set[str]:
        return set(self._slots)

    def add(self, entries: Iterable[IndexedTool]) -> None:
        """Add tools, or replace those of the same id."""
        entries = list(entries)
        weighed = [weigh(entry) for entry in entries]
        vectors = None
        if self._encoder is not None and entries:
            vectors = self._encoder.documents([entry.text() for entry in entries])
        with self._lock:
            first = len(self._ids)
            self._reserve(first + len(entries), vectors)
            for entry, weights in zip(entries, weighed, strict=True):
                self._drop(entry.id)
                slot = len(self._ids)
                self._slots[entry.id] = slot
                self._ids.append(entry.id)
                for term, weight in weights.items():
                    if term not in self._documents:
                        self._documents[term] = array("i")
                        self._weights[term] = array("f")
                    self._documents[term].append(slot)
                    self._weights[term].append(weight)
            if vectors is not None:
                self._vectors[first : len(self._ids)] = vectors
                self._placed[first : len(self._ids)] = True

    def place(self, tools: Sequence[str], vectors: Floats) -> None:
        """Set the vectors of tools. Those that are no longer in the index are left out."""
        with self._lock:
            self._reserve(len(self._ids), vectors)
            for tool, vector in zip(tools, vectors, strict=True):
                slot = self._slots.get(tool)
                if slot is not None:
                    self._vectors[slot] = vector
                    self._placed[slot] = True

    def refer(self, rows: Mapping[str, int]) -> None:
        """Set the numbers of the rows that have the vectors of tools. Tools that are no longer there are left out."""
        with self._lock:
            for tool, number in rows.items():
                slot = self._slots.get(tool)
                if slot is not None:
                    self._rows[slot] = number
                    self._placed[slot] = True

    def rows(self, mask: Mask) -> NDArray[np.int64]:
        """The numbers of the rows that have the vectors of some tools; raise Renumbered if the mask is void."""
        with self._lock:
            if mask.numbering != self.numbering:
                raise Renumbered
            return self._rows[mask.slots]

    def without_vector(self, mask: Mask) -> list[str]:
        """Return those of some tools that have no vector."""
        with self._lock:
            if mask.numbering != self.numbering:
                return []  # it is made anew with the next search
            slots: list[int] = mask.slots[~self._placed[mask.slots]].tolist()
            return [tool for slot in slots if (tool := self._ids[slot]) is not None]

    def vectors(self, tools: Sequence[str]) -> Floats | None:
        """The vectors of tools, one row each; None if one of them has none."""
        with self._lock:
            slots = [self._slots.get(tool, -1) for tool in tools]
            if -1 in slots or not self._placed[slots].all() or not self._vectors.size:
                return None
            return self._vectors[slots]

    def remove(self, tools: Iterable[str]) -> None:
        with self._lock:
            for tool in tools:
                self._drop(tool)
            if self._removed > len(self._slots) + _LEAST_REMOVED:
                self._renumber()

    def mask(self, tools: Iterable[str]) -> Mask:
        """The tools that a search is about. Those that are not in the index are left out."""
        with self._lock:
            return self._mask(np.zeros(len(self._ids), np.bool_), tools)

    def changed(self, mask: Mask, *, less: Iterable[str], more: Iterable[str]) -> Mask:
        """A mask without some tools and with others."""
        with self._lock:
            bits = np.zeros(len(self._ids), np.bool_)
            if mask.numbering != self.numbering:
                raise Renumbered
            bits[mask.slots] = True
            bits[[slot for tool in less if (slot := self._slots.get(tool)) is not None]] = False
            return self._mask(bits, more)

    def _mask(self, bits: Bits, more: Iterable[str]) -> Mask:
        bits[[slot for tool in more if (slot := self._slots.get(tool)) is not None]] = True
        bits &= ~self._gone[: len(bits)]
        return Mask(bits, self.numbering, self._removals)

    def search(
        self,
        query: str,
        limit: int,
        mask: Mask,
        *,
        by: By = "both",
        asked: Floats | None = None,
        similar: Floats | None = None,
    ) -> list[Hit]:
        """Return the best of the visible tools for a request, best first; raise Renumbered if the mask is void.

        A tool is found if it has a term of the request, or if its vector is near to the request's; one of the two can
        be left out. `asked` has the vectors of `texts_of` the request, where the index has no encoder. `similar` has
        their similarities to the tools of the mask instead, a row for each text, and NaN where there is none.
        """
        query, *parts = texts_of(query)
        if by == "words":
            asked = similar = None
        elif self._encoder is not None:
            asked = self._encoder.queries([query, *parts])
        with self._lock:
            if mask.numbering != self.numbering:
                raise Renumbered
            if mask.removals != self._removals and self._gone[mask.slots].any():
                before, mask = mask, self._mask(mask.places >= 0, ())
                similar = None if similar is None else similar[:, before.places[mask.slots]]
            if not len(mask):
                return []
            scores = np.zeros(len(mask), np.float32) if by == "meaning" else self._lexical(query, parts, mask)
            found = scores > 0
            alike = Given(similar) if similar is not None else None if asked is None else self._compared(asked, mask)
            if self._counts is not None and alike is not None:
                scores, near = joined(scores, alike, self._counts, alone=by == "meaning")
                found |= near
            # Equal scores are in the order of the names, whatever the order in which tools were added.
            best: list[int] = highest(np.flatnonzero(found), scores, limit).tolist()
            named = sorted((-float(scores[one]), str(self._ids[int(mask.slots[one])])) for one in best)[:limit]
        return [Hit(tool, min(1.0, max(0.0, -score))) for score, tool in named]

    def _lexical(self, query: str, parts: Sequence[str], mask: Mask) -> Floats:
        """Scores of the visible tools by words, at most 1."""
        total = len(mask)
        found: dict[str, _Postings] = {}
        rarity: dict[str, int] = {}
        for term in words.terms(query):
            if term in found or term not in self._documents:
                continue
            places, weights = self._visible(term, mask)
            if len(places):
                idf = np.float32(np.log(1 + (total - len(places) + 0.5) / (len(places) + 0.5)))
                found[term] = places, (idf * weights * (K1 + 1) / (weights + K1)).astype(np.float32, copy=False)
                rarity[term] = len(places)
        rarest = sorted(found, key=rarity.__getitem__)[:MOST_TERMS]
        scores = _sum(found, rarest, total)
        if not parts:
            return scores
        best = np.zeros_like(scores)
        for part in parts:
            best = np.maximum(best, _sum(found, [t for t in dict.fromkeys(words.terms(part)) if t in found], total))
        return WHOLE_WORDS * scores + (1 - WHOLE_WORDS) * best

    def _visible(self, term: str, mask: Mask) -> _Postings:
        """The visible tools that have a term, and its weights in them."""
        documents = np.frombuffer(self._documents[term], np.int32)
        weights = np.frombuffer(self._weights[term], np.float32)
        if len(documents) > _PER_TOOL * len(mask):
            self.looked_at += len(mask)
            at = np.searchsorted(documents, mask.slots)
            at[at == len(documents)] = 0
            there = np.flatnonzero(documents[at] == mask.slots)
            return there.astype(np.int32), weights[at[there]]
        self.looked_at += len(documents)
        if documents[-1] >= len(mask.places):  # some were added after the mask was made
            known = int(np.searchsorted(documents, len(mask.places)))
            documents, weights = documents[:known], weights[:known]
        places = mask.places[documents]
        visible = places >= 0
        return places[visible], weights[visible]

    def _compared(self, asked: Floats, mask: Mask) -> Compared:
        """Compare a request with the vectors of the visible tools."""
        placed = self._placed[mask.slots]
        if not placed.any():
            return Compared(np.zeros(len(mask), np.float32), placed, asked[1:], self._vectors, mask.slots)
        # Not `@`: BLAS would use threads for it, which wait busily for 20 ms afterwards. This takes 1 to 2 ms of one.
        if len(mask.places) <= 2 * len(mask):  # reading them in a row costs less than gathering most of them
            self.looked_at += len(mask.places)
            whole = np.einsum("ij,j->i", self._vectors[: len(mask.places)], asked[0])[mask.slots]
        else:
            self.looked_at += len(mask)
            whole = np.einsum("ij,j->i", self._vectors[mask.slots], asked[0])
        return Compared(whole, placed, asked[1:], self._vectors, mask.slots)

    def _reserve(self, count: int, vectors: Floats | None) -> None:
        """Make room for so many tools, and for their vectors once there are any."""
        width = self._vectors.shape[1] if vectors is None else vectors.shape[1]
        room = len(self._gone)
        if count > room:
            room = max(64, count * 5 // 4)
            self._gone, self._placed = _resized(self._gone, room), _resized(self._placed, room)
            self._rows = _resized(self._rows, room)
        if self._vectors.shape != (room, width):
            grown = np.zeros((room, width), np.float32)
            if self._vectors.size:
                grown[: len(self._vectors)] = self._vectors
            self._vectors = grown

    def _drop(self, tool: str) -> None:
        slot = self._slots.pop(tool, None)
        if slot is not None:
            self._ids[slot] = None
            self._gone[slot] = True
            self._removed += 1
            self._removals += 1

    def _renumber(self) -> None:
        """Renumber the tools, without those that were removed."""
        retained = np.array([one is not None for one in self._ids], np.bool_)
        numbers = np.cumsum(retained, dtype=np.int32) - 1
        for term in list(self._documents):
            documents = np.frombuffer(self._documents[term], np.int32)
            alive = retained[documents]
            fresh, weights = numbers[documents[alive]], np.frombuffer(self._weights[term], np.float32)[alive]
            del documents
            if len(fresh):
                self._documents[term] = array("i", fresh.tobytes())
                self._weights[term] = array("f", weights.tobytes())
            else:
                del self._documents[term], self._weights[term]
        self._vectors = self._vectors[: len(retained)][retained]
        self._placed = self._placed[: len(retained)][retained]
        self._rows = self._rows[: len(retained)][retained]
        self._gone = np.zeros(len(self._placed), np.bool_)
        self._ids = [one for one in self._ids if one is not None]
        self._slots = {str(one): slot for slot, one in enumerate(self._ids)}
        self._removed = 0
        self.numbering += 1


def texts_of(query: str) -> list[str]:
    """The texts of a request whose vectors count: the request, and its sentences if it has several."""
    query = query[:MOST_REQUEST]
    return [query, *words.sentences(query)]


def weigh(entry: IndexedTool) -> dict[str, float]:
    """The terms of a tool with their weights, before saturation."""
    weights: dict[str, float] = {}
    for text, weight, usual in zip(entry.fields(), WEIGHTS, USUAL, strict=True):
        found = words.terms(text)
        each = weight / (1 - float(B) + float(B) * len(found) / usual)
        for term in found:
            weights[term] = weights.get(term, 0.0) + each
    return weights


def _sum(postings: Mapping[str, _Postings], terms: Iterable[str], size: int) -> Floats:
    """Add up the scores of terms, scaled so that the best tool has 1."""
    scores = np.zeros(size, np.float32)
    for term in terms:
        documents, weights = postings[term]
        scores[documents] += weights
    highest = scores.max(initial=0)
    return scores / highest if highest > 0 else scores


def _resized(values: NDArray[_Kind], size: int) -> NDArray[_Kind]:
    grown = np.zeros(size, values.dtype)
    grown[: len(values)] = values
    return grown

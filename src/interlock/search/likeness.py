"""Similarities of a request and tools by their vectors, and the score that words and vectors give together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import numpy as np

from interlock.core.record import dataclass

if TYPE_CHECKING:
    from numpy.typing import NDArray

# How much the whole request counts beside its best sentence.
WHOLE_VECTOR: Final = np.float32(0.5)
# Vectors of few tools may be about equally far from a request: differences smaller than this are not made larger.
LEAST_SPREAD: Final = 0.3
CANDIDATES: Final = 300

Floats: TypeAlias = "NDArray[np.float32]"
Bits: TypeAlias = "NDArray[np.bool_]"
Slots: TypeAlias = "NDArray[np.int32]"


class Counts(Protocol):
    """The weight of vectors in a score.

    `share` is the part of a score that comes from them; a tool without a common term is found if its vector is at least
    `near` to the request's.
    """

    share: float
    near: float


class Likeness(Protocol):
    """Cosines of a request with the visible tools, and which of them have a vector at all."""

    @property
    def whole(self) -> Floats: ...

    @property
    def placed(self) -> Bits: ...

    def of_sentences(self, candidates: NDArray[np.intp]) -> Floats | None:
        """The cosine of the best sentence of the request with each candidate; None if it has one sentence."""
        ...


@dataclass(frozen=True, slots=True)
class Compared:
    """Vectors of the index, compared here."""

    whole: Floats
    placed: Bits
    sentences: Floats
    vectors: Floats
    slots: Slots

    def of_sentences(self, candidates: NDArray[np.intp]) -> Floats | None:
        # A sentence is compared with the candidates only: with all tools it would take most of the time.
        if not len(self.sentences):
            return None
        return (self.vectors[self.slots[candidates]] @ self.sentences.T).max(axis=1)


class Given:
    """Similarities that a database has computed: a row for the request and one for each sentence."""

    def __init__(self, similar: Floats) -> None:
        self.placed: Bits = ~np.isnan(similar[0])
        self.whole: Floats = np.where(self.placed, similar[0], np.float32(0))
        self._sentences = similar[1:]

    def of_sentences(self, candidates: NDArray[np.intp]) -> Floats | None:
        return self._sentences[:, candidates].max(axis=0) if len(self._sentences) else None


def joined(lexical: Floats, alike: Likeness, counts: Counts, *, alone: bool) -> tuple[Floats, Bits]:
    """Scores by words and vectors together, or by vectors alone, and which tools are near to the request."""
    placed, cosine = alike.placed, alike.whole
    if not placed.any():
        return lexical, placed
    low, high = cosine[placed].min(), cosine[placed].max()
    # By vectors alone the score is the cosine itself.
    share, low = (np.float32(1), np.float32(0)) if alone else (np.float32(counts.share), low)
    scale = np.float32(1 if alone else 1 / max(high - low, LEAST_SPREAD))
    scores = np.where(placed, (1 - share) * lexical + share * (cosine - low) * scale, lexical)
    near = placed & (cosine >= counts.near)
    candidates = highest(np.flatnonzero(placed), scores, CANDIDATES)
    best = alike.of_sentences(candidates)
    if best is not None:
        scores[candidates] += share * (1 - WHOLE_VECTOR) * (best - cosine[candidates]) * scale
        near[candidates] |= best >= counts.near
    return scores, near


def highest(slots: NDArray[np.intp], scores: Floats, count: int) -> NDArray[np.intp]:
    """Return the slots of the `count` highest scores, and of those that equal the lowest of these."""
    if len(slots) <= count:
        return slots
    found = scores[slots]
    return slots[found >= np.partition(found, -count)[-count]]

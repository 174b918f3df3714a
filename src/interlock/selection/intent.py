"""Names the kind of help that a request needs: read, change, compute, communicate or none.

The model is linear: each word of the request has a weight for each kind, and so has each number of the request's vector
by the table of the search. `training/intent.py` made the weights. A verdict narrows the candidates and adds none: a
tool is left out if the kinds that it can give (`kinds`) have next to no probability. Below a threshold there is no
verdict, and all candidates stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Final

import numpy as np

from interlock.core.record import dataclass
from interlock.search import words
from interlock.search.index import Floats, texts_of
from interlock.search.table import Table, shipped
from interlock.selection.kinds import KINDS, Kind

# Below this confidence there is no verdict. Nothing at all is offered where no help is needed, so that takes more.
THRESHOLD: Final = 0.75
NONE_THRESHOLD: Final = 0.9
# A tool whose kinds have less probability than this, all together and for every sentence, is left out.
LEAST: Final = 0.05
MOST_WORDS: Final = 80
VECTOR_WEIGHT: Final = 3.0
_EXPLAINING_WORDS: Final = 5


@dataclass(frozen=True, slots=True)
class Intent:
    """The kind of help that a request needs; None if that is not clear enough. `words` spoke for it most."""

    kind: Kind | None
    confidence: float
    probabilities: Mapping[Kind, float]
    words: tuple[str, ...]

    def allows(self, kinds: frozenset[Kind]) -> bool:
        """Whether a tool that gives these kinds of help stays a candidate."""
        if self.kind is None:
            return True
        return self.kind != "none" and sum(self.probabilities[kind] for kind in kinds) >= LEAST

    def document(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "confidence": round(self.confidence, 4),
            "probabilities": {kind: round(value, 4) for kind, value in self.probabilities.items()},
            "words": list(self.words),
        }


def seen_words(text: str) -> list[str]:
    """The words of a request that count, each once; the first one counts also by its place."""
    found = [word.lower() for word in words.split(text)][:MOST_WORDS]
    return list(dict.fromkeys([*(f"^{word}" for word in found[:1]), *found]))


def features(texts: Sequence[str], vocabulary: Mapping[str, int], table: Table) -> Floats:
    """One row for each text: its words, its vector, and 1."""
    rows = np.zeros((len(texts), len(vocabulary)), np.float32)
    for row, text in zip(rows, texts, strict=True):
        known = [vocabulary[word] for word in seen_words(text) if word in vocabulary]
        row[known] = 1 / max(len(known), 1) ** 0.5
    vectors = np.float32(VECTOR_WEIGHT) * table.queries(texts)
    return np.concatenate([rows, vectors, np.ones((len(texts), 1), np.float32)], axis=1)


def softmax(scores: Floats) -> Floats:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


class Classifier:
    """A linear model over the words and the vector of a request."""

    def __init__(self, data: bytes, table: Table) -> None:
        with np.load(BytesIO(data)) as file:
            listed = bytes(file["words"]).decode().split("\n")
            self._weights = file["weights"].astype(np.float32)
        self._vocabulary = {word: place for place, word in enumerate(listed)}
        self._table = table

    def classify(self, request: str, threshold: float = THRESHOLD) -> Intent:
        """The intent of a request. Of several sentences, each may need help of its own: the highest counts."""
        texts = texts_of(request)
        each = softmax(features(texts, self._vocabulary, self._table) @ self._weights)
        best = int(each[0].argmax())
        kind, confidence = KINDS[best], float(each[0][best])
        highest = each.max(axis=0)
        clear = confidence >= (NONE_THRESHOLD if kind == "none" else threshold)
        return Intent(
            kind if clear and (kind != "none" or len(texts) == 1) else None,
            confidence,
            {name: float(highest[place]) for place, name in enumerate(KINDS)},
            self._spoke(texts[0], best),
        )

    def _spoke(self, text: str, kind: int) -> tuple[str, ...]:
        mean = self._weights.mean(axis=1)
        weights = {
            word: float(self._weights[place, kind] - mean[place])
            for word in seen_words(text)
            if (place := self._vocabulary.get(word)) is not None
        }
        best = sorted((word for word in weights if weights[word] > 0), key=lambda word: (-weights[word], word))
        return tuple(best[:_EXPLAINING_WORDS])


@cache
def classifier() -> Classifier:
    """The model of this package."""
    return Classifier(Path(__file__).with_name("intent.npz").read_bytes(), shipped())

"""A router that learns from calls: multinomial logistic regression from requests to the tools that answered them.

The features of a request are its words, hashed, and its vector by the table of the search. Training is deterministic:
the same requests give the same router. A request gets a distribution over the tools that exist now: what the router
learned, and for tools that it has never seen the similarity of their descriptions. A tool that is gone has no mass.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, Final

import numpy as np

from interlock.core.record import dataclass
from interlock.search import words
from interlock.search.index import MOST_REQUEST, Floats
from interlock.search.table import shipped
from interlock.selection.intent import softmax

HASHED: Final = 1024
FEWEST: Final = 20
MOST_PAIRS: Final = 10_000
MOST_TOOLS: Final = 2_000
# The part of a distribution that comes from what was learned; the rest is similarity.
SHARE: Final = 0.7
# Differences of similarity are made larger by this before they become a distribution.
SHARPNESS: Final = 10.0
_STEPS, _RATE, _DECAY = 200, 0.1, 1e-4
_VECTOR_WEIGHT: Final = np.float32(2)
_HELD_OUT: Final = 5

Pair = tuple[str, str]
"""A request and the tool that answered it."""


def features(texts: Sequence[str]) -> Floats:
    """One row for each text."""
    texts = [text[:MOST_REQUEST] for text in texts]
    rows = np.zeros((len(texts), HASHED), np.float32)
    for row, text in zip(rows, texts, strict=True):
        places = sorted({zlib.crc32(term.encode()) % HASHED for term in words.terms(text)})
        row[places] = 1 / max(len(places), 1) ** 0.5
    vectors = _VECTOR_WEIGHT * shipped().queries(texts)
    return np.concatenate([rows, vectors, np.ones((len(texts), 1), np.float32)], axis=1)


def is_held_out(request: str) -> bool:
    """Whether a request is for measuring. One in five is, by its text: the same text is never in both parts."""
    return zlib.crc32(request.strip().lower().encode()) % _HELD_OUT == 0


def similarity(scores: Mapping[str, float]) -> dict[str, float]:
    """A distribution over tools from the scores of a search."""
    if not scores:
        return {}
    powers = softmax(np.array([list(scores.values())], np.float32) * np.float32(SHARPNESS))[0]
    return dict(zip(scores, map(float, powers), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """The weights of each tool that was seen in training."""

    tools: tuple[str, ...]
    weights: Floats

    def distribution(self, request: str, scores: Mapping[str, float], current: frozenset[str]) -> dict[str, float]:
        """The probability of each current tool. `scores` are those of a search, for tools that were not learned."""
        near = {tool: value for tool, value in scores.items() if tool in current}
        known = [place for place, tool in enumerate(self.tools) if tool in current]
        alike = similarity(near)
        if not known:
            unknown = 0.0 if alike else 1 / max(len(current), 1)
            return {tool: alike.get(tool, unknown) for tool in current}
        learned = softmax(features([request]) @ self.weights[:, known])[0]
        share = SHARE if alike else 1.0
        found = {tool: (1 - share) * alike.get(tool, 0.0) for tool in current}
        for place, value in zip(known, learned, strict=True):
            found[self.tools[place]] += share * float(value)
        return found

    def best(self, request: str, scores: Mapping[str, float], current: frozenset[str], most: int) -> list[str]:
        found = self.distribution(request, scores, current)
        return sorted(found, key=lambda tool: (-found[tool], tool))[:most]

    def save(self) -> bytes:
        out = BytesIO()
        names = np.frombuffer("\n".join(self.tools).encode(), np.uint8)
        np.savez_compressed(out, tools=names, weights=self.weights.astype(np.float16))
        return out.getvalue()

    @classmethod
    def load(cls, data: bytes) -> Router:
        """A router that was saved; ValueError for anything else."""
        try:
            with np.load(BytesIO(data), allow_pickle=False) as file:
                names, weights = bytes(file["tools"]).decode(), file["weights"].astype(np.float32)
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError("it is not a router") from error
        tools = tuple(names.split("\n"))
        rows = features([""]).shape[1]
        if weights.shape != (rows, len(tools)) or not np.isfinite(weights).all():
            raise ValueError("it is not a router")
        return cls(tools, weights)


def train(pairs: Sequence[Pair]) -> Router:
    """Learn from pairs by least cross-entropy. The newest are last; only so many count."""
    pairs = list(pairs)[-MOST_PAIRS:]
    tools = tuple(sorted({tool for _, tool in pairs}))[:MOST_TOOLS]
    places = {tool: place for place, tool in enumerate(tools)}
    pairs = [pair for pair in pairs if pair[1] in places]
    rows = features([text for text, _ in pairs])
    wanted = np.zeros((len(pairs), len(tools)), np.float32)
    wanted[np.arange(len(pairs)), [places[tool] for _, tool in pairs]] = 1
    weights = np.zeros((rows.shape[1], len(tools)), np.float32)
    first: Any = np.zeros_like(weights)
    second: Any = np.zeros_like(weights)
    for step in range(1, _STEPS + 1):
        gradient = rows.T @ (softmax(rows @ weights) - wanted) / len(pairs) + _DECAY * weights
        first = 0.9 * first + 0.1 * gradient
        second = 0.99 * second + 0.01 * gradient**2
        weights -= (_RATE * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.99**step)) + 1e-8)).astype(np.float32)
    return Router(tools, weights)


@dataclass(frozen=True, slots=True)
class Figures:
    """The part of held-out requests whose tool was first, and among the first three."""

    requests: int
    first: float
    among_three: float

    def document(self) -> dict[str, Any]:
        return {"requests": self.requests, "first": round(self.first, 4), "among_three": round(self.among_three, 4)}


def figures(ranked: Sequence[tuple[Sequence[str], str]]) -> Figures:
    """Scores of rankings, each given with the tool that was right."""
    number = max(len(ranked), 1)
    first = sum(found[:1] == [right] for found, right in ranked)
    three = sum(right in found[:3] for found, right in ranked)
    return Figures(len(ranked), first / number, three / number)

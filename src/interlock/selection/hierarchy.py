"""Categories of a large catalog, so that a choice among many tools is made in two small steps.

    partition   tools by server; large groups are divided by what their tools do, small ones joined
    choose      the categories whose descriptions fit a request; tools are then looked for inside these alone

With N tools a category has at most max(25, √N) of them, and there are at most 2N / size + 1 categories. So what a step
shows grows with √N: the descriptions of the categories, or the tools of the chosen ones.

INVARIANT: every tool is in exactly one category.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from interlock.core.record import dataclass
from interlock.search import words
from interlock.search.index import Encoder, Floats, Index, IndexedTool

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A catalog of more tools than this is chosen from by category.
FLAT: Final = 50
LEAST_SIZE: Final = 25
# How many categories are looked into for one request.
CHOSEN: Final = 8
_MOST_WORDS: Final = 90
_MOST_SERVERS: Final = 3
_ROUNDS: Final = 8

_Places: TypeAlias = "NDArray[np.intp]"


@dataclass(frozen=True, slots=True)
class Category:
    name: str
    description: str
    tools: tuple[str, ...]

    @property
    def line(self) -> str:
        """The category as a model reads it."""
        return f"{self.name} ({len(self.tools)} tools): {self.description}\n"


def most_tools(total: int) -> int:
    """The largest number of tools that a category of a catalog may have."""
    return max(LEAST_SIZE, math.isqrt(max(total - 1, 0)) + 1)


def partition(entries: Sequence[IndexedTool], vectors: Floats) -> list[Category]:
    """Divide tools into categories. `vectors` has one row for each tool; the same tools give the same categories."""
    order = sorted(range(len(entries)), key=lambda place: entries[place].id)
    most = most_tools(len(entries))
    by_server: dict[str, list[int]] = {}
    for place in order:
        by_server.setdefault(entries[place].server, []).append(place)
    groups = [part for places in by_server.values() for part in _divided(np.array(places, np.intp), vectors, most)]
    return _described(_joined(groups, vectors, most), entries)


def _divided(places: _Places, vectors: Floats, most: int) -> list[_Places]:
    """Halve a group that is too large, by what its tools do, until no part is."""
    waiting, done = [places], list[_Places]()
    while waiting:
        group = waiting.pop()
        if len(group) <= most:
            done.append(group)
            continue
        nearer = _halves(vectors[group])
        waiting += [group[~nearer], group[nearer]]
    return done


def _halves(vectors: Floats) -> NDArray[np.bool_]:
    """Two parts of some vectors, neither of them less than a quarter: 2-means from the two that are farthest apart."""
    first = vectors[int(np.argmin(vectors @ vectors.mean(axis=0)))]
    centres = np.stack([first, vectors[int(np.argmin(vectors @ first))]])
    least = max(1, len(vectors) // 4)
    nearer = np.zeros(len(vectors), np.bool_)
    for _ in range(_ROUNDS):
        difference = vectors @ (centres[1] - centres[0])
        ranks = np.argsort(np.argsort(-difference, kind="stable"), kind="stable")
        count = min(max(int(np.count_nonzero(difference > 0)), least), len(vectors) - least)
        now = ranks < count
        if (now == nearer).all():
            break
        nearer = now
        centres = np.stack([vectors[~nearer].mean(axis=0), vectors[nearer].mean(axis=0)])
    return nearer


def _joined(groups: list[_Places], vectors: Floats, most: int) -> list[_Places]:
    """Join the smallest group with the one that is nearest to it and has room, until none has."""
    if not groups:
        return []
    places: list[_Places | None] = list(groups)
    sizes = np.array([len(one) for one in groups])
    centres = np.stack([vectors[one].mean(axis=0) for one in groups])
    while True:
        smallest = int(np.argmin(np.where(sizes > 0, sizes, most + 1)))
        fits = (sizes > 0) & (sizes + sizes[smallest] <= most)
        fits[smallest] = False
        group = places[smallest]
        if group is None or not fits.any():
            return [one for one in places if one is not None]
        nearest = int(np.argmax(np.where(fits, centres @ centres[smallest], -np.inf)))
        other = places[nearest]
        assert other is not None
        together = np.sort(np.concatenate([other, group]))
        places[nearest], places[smallest] = together, None
        sizes[nearest], sizes[smallest] = len(together), 0
        centres[nearest] = vectors[together].mean(axis=0)


def _described(groups: Iterable[_Places], entries: Sequence[IndexedTool]) -> list[Category]:
    """Name each group by its servers, and describe it by the words that tell it from the others."""
    groups = sorted(groups, key=lambda group: entries[int(group[0])].id)
    counts = [_counted(entries[int(place)] for place in group) for group in groups]
    spread = Counter(word for counted in counts for word in counted)
    taken: Counter[str] = Counter()
    made: list[Category] = []
    for group, counted in zip(groups, counts, strict=True):
        tools = [entries[int(place)] for place in group]
        servers = [name for name, _ in Counter(one.server for one in tools).most_common() if name]
        name = ", ".join(servers[:_MOST_SERVERS]) or "tools"
        taken[name] += 1
        weights = {word: number * math.log(1 + len(groups) / spread[word]) for word, number in counted.items()}
        best = sorted(weights, key=lambda word: (-weights[word], word))[:_MOST_WORDS]
        unique = name if taken[name] == 1 else f"{name} {taken[name]}"
        made.append(Category(unique, " ".join(best), tuple(one.id for one in tools)))
    return made


def _counted(tools: Iterable[IndexedTool]) -> Counter[str]:
    """In how many of the tools each word is; those of names count twice."""
    counted: Counter[str] = Counter()
    for one in tools:
        named = {word.lower() for word in words.split(one.name)}
        described = {word.lower() for word in words.split(one.description[:200])}
        counted.update(word for word in named if _tells(word))
        counted.update(word for word in named | described if _tells(word))
    return counted


def _tells(word: str) -> bool:
    return word not in words.STOP_WORDS and not word.isdigit() and (len(word) > 2 or not word.isascii())


class Hierarchy:
    """The categories of the tools that one caller sees."""

    def __init__(self, categories: Sequence[Category], encoder: Encoder | None) -> None:
        self.categories: Mapping[str, Category] = {one.name: one for one in categories}
        self._index = Index(encoder)
        self._index.add(
            IndexedTool(one.name, one.name, one.description, tags=one.description.split()) for one in categories
        )
        self._all = self._index.mask(self.categories)

    @property
    def text(self) -> str:
        """The text that a model reads in the first step."""
        return "".join(one.line for one in self.categories.values())

    def choose(self, request: str, most: int = CHOSEN, among: AbstractSet[str] | None = None) -> list[Category]:
        """The categories whose descriptions fit a request best; all, in order, where none fits.

        With `among`, only categories that hold one of these tools.
        """
        held = list(self.categories.values())
        if among is not None:
            held = [one for one in held if not among.isdisjoint(one.tools)]
        mask = self._all if among is None else self._index.mask(one.name for one in held)
        return [self.categories[hit.id] for hit in self._index.search(request, most, mask)] or held

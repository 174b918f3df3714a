"""The account of a context window over a session.

    size = system + history + memory + reserve + schemas + results + room

The reserve is for the answer of the model. Results are admitted at the level that suits the task and the room. Whenever
less than a tenth of what schemas and results may have is left, tokens are freed in this order:

    1   old results are removed
    2   recent results are shown at a smaller level
    3   schemas are dropped, the least useful first
    4   the history is summarised, where somebody can do that

INVARIANT: the parts together never have more tokens than the window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.window.levels import View, choose

LEAST_RESERVE, MOST_RESERVE = 2048, 4096
# Results that are not removed before everything else was tried, and the share from which on a window counts as full.
RECENT: Final = 3
FULL: Final = 0.9

Kind = Literal["pruned", "compressed", "schema_dropped", "history_summarised"]
Summarise = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Reduction:
    """Tokens that were freed, how and of what."""

    kind: Kind
    what: str
    freed: int


@dataclass(slots=True)
class _Held:
    key: str
    views: Sequence[View]
    view: View


class Window:
    """A window of a number of tokens, and what is in it.

    `summarise_history` gets the number of tokens to aim at, and returns how many there are then.
    """

    def __init__(
        self,
        size: int,
        *,
        system: int = 0,
        history: int = 0,
        memory: int = 0,
        reserve: int = LEAST_RESERVE,
        summarise_history: Summarise | None = None,
    ) -> None:
        if not LEAST_RESERVE <= reserve <= MOST_RESERVE:
            raise Failure("E3004", f"the reserve for the answer has {LEAST_RESERVE:,} to {MOST_RESERVE:,} tokens")
        if min(system, history, memory) < 0 or system + history + memory + reserve > size:
            words = "make the window larger, or the instructions, the history or the memory shorter"
            raise Failure("E3004", "the window does not hold what is in it already", resolution=words)
        self.size, self.reserve = size, reserve
        self.system, self.history, self.memory = system, history, memory
        self._summarise = summarise_history
        self.reductions: list[Reduction] = []
        self._schemas: dict[str, tuple[int, float]] = {}
        self._results: list[_Held] = []

    @property
    def room(self) -> int:
        """The tokens that are left for tool output."""
        return self.capacity - sum(one.view.tokens for one in self._results) - sum(t for t, _ in self._schemas.values())

    @property
    def capacity(self) -> int:
        """The tokens that schemas and results may have together."""
        return self.size - self.system - self.history - self.memory - self.reserve

    @property
    def schemas(self) -> list[str]:
        return list(self._schemas)

    @property
    def text(self) -> str:
        """The results that are in the window, oldest first."""
        return "".join(one.view.text for one in self._results)

    def load(self, schemas: Mapping[str, tuple[int, float]]) -> list[str]:
        """Put schemas, by tool with their tokens and utility, in the place of those before. Returns those that fit."""
        self._schemas = {}
        for tool, (tokens, utility) in sorted(schemas.items(), key=lambda one: -one[1][1]):
            if 0 <= tokens <= self.room:
                self._schemas[tool] = tokens, utility
        self._keep_free(keep=1, schemas=False)  # what was loaded just now stays
        return list(self._schemas)

    def admit(self, key: str, among: Sequence[View], pointer: View | None, weight: float) -> View | None:
        """Put a result into the window. Returns how it is shown; None if not even a pointer to it fits.

        INVARIANT: what is returned was deducted, and `room` is not below 0.
        """
        wanted = choose(among, self.capacity, weight) or pointer or among[-1]
        if self.room < wanted.tokens:
            self._free(wanted.tokens, keep=0)
        view = choose(among, self.room, weight)
        # One word is less than the way to all of it, unless more would have had room.
        offloads = view is None or (view.level == 4 and among[-2].tokens > self.room)
        if offloads and pointer is not None and pointer.tokens <= self.room:
            view = pointer
        if view is not None:
            self._results.append(_Held(key, among, view))
            self._keep_free(keep=1)
        return view

    def spend(self, *, history: int = 0, memory: int = 0) -> None:
        """Add tokens to the history or the memory, and free others for them; E3004 if the window cannot hold them."""
        if min(history, memory) < 0:
            raise Failure("E3004", "tokens are counted from 0")
        needed = history + memory
        if self.room < needed:
            self._free(needed, keep=0)
        if self.room < needed:
            words = "start a new conversation, or summarise this one and open a window with the summary as its history"
            raise Failure("E3004", f"the window has no room for {needed:,} more tokens", resolution=words)
        self.history += history
        self.memory += memory
        self._keep_free(keep=1)

    def _keep_free(self, *, keep: int, schemas: bool = True) -> None:
        least_free = self.capacity - int(FULL * self.capacity)
        if self.room < least_free:
            self._free(least_free, keep=keep, schemas=schemas)

    def _free(self, room: int, *, keep: int, schemas: bool = True) -> None:
        """Free tokens, in the order above, until there is so much room. The last `keep` results stay as they are."""
        while self.room < room and len(self._results) > max(RECENT, keep):
            gone = self._results.pop(0)
            self.reductions.append(Reduction("pruned", gone.key, gone.view.tokens))
        for one in self._results[: len(self._results) - keep]:
            if self.room >= room:
                return
            smallest = one.views[-1]
            if smallest.tokens < one.view.tokens:
                self.reductions.append(Reduction("compressed", one.key, one.view.tokens - smallest.tokens))
                one.view = smallest
        for tool in sorted(self._schemas, key=lambda name: self._schemas[name][1]) if schemas else ():
            if self.room >= room:
                return
            self.reductions.append(Reduction("schema_dropped", tool, self._schemas.pop(tool)[0]))
        if self.room < room and self._summarise is not None:
            left = self._summarise(max(0, self.history - (room - self.room)))
            if 0 <= left < self.history:
                self.reductions.append(Reduction("history_summarised", "", self.history - left))
                self.history = left

"""The options and the outcome of a selection."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from interlock.api.selection_gate import GateVerdict
from interlock.core.record import dataclass
from interlock.selection.stages import Candidate, Selector, Stage

if TYPE_CHECKING:
    from interlock.data.schema import Json
    from interlock.selection.intent import Intent


class AnsweredLater(Exception):  # noqa: N818 - a branch, not an error
    """Raised by a selector whose model answers in a later request: this selection ends without a record."""


class SelectOptions(TypedDict, total=False):
    """Options of a selection.

    `allocation` is how many tokens the schemas of the candidates may take together; `cheaper` chooses the cheaper of
    tools with equal expected success, `faster` the faster, and both the faster of the cheapest; `intent` is false where
    the kind of help is not to narrow the candidates; `selector` is a model that chooses tool and parameters; `session`
    and `task` are those whose budgets count.
    """

    allocation: int | None
    cheaper: bool
    faster: bool
    intent: bool
    selector: Selector | None
    session: str
    task: str
    door: str


@dataclass(frozen=True, slots=True)
class Selection:
    """The outcome of a selection. `chosen` is None where no tool fits; `verdict` is about a call of it."""

    id: str
    request: str
    intent: Intent | None
    stages: tuple[Stage, ...]
    candidates: tuple[Candidate, ...]
    chosen: str | None
    parameters: Json | None
    refused: str | None
    verdict: GateVerdict | None
    tokens: Json
    # What a model answered, also where that was refused: JSON, for the store alone.
    answer: bytes | None = None

    def document(self) -> Json:
        return {
            "id": self.id,
            "intent": None if self.intent is None else self.intent.document(),
            "stages": [one.document() for one in self.stages],
            "candidates": [one.document() for one in self.candidates],
            "chosen": self.chosen,
            "parameters": self.parameters,
            "refused": self.refused,
            "gate": None if self.verdict is None else self.verdict.document(),
            "tokens": self.tokens,
        }

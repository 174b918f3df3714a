"""Examples of a tool's use: those that contract tests run, and those that they do not.

A read-only tool that needs a network host would be refused at admission while the host is down. `Example(…,
live=False)` is checked against the contract and not run; with `answer`, the answer that was recorded from the real
service is checked against the result schema too. The evidence says that the tool was not run with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from interlock.core.record import dataclass

_CONFIG = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="constants", defer_build=True)


class KnownPair(BaseModel):
    """An input, and the output that the tool must give for it."""

    model_config = _CONFIG

    input: dict[str, Any]
    output: Any


class RecordedExample(BaseModel):
    """An input of `examples` that contract tests do not run, and the output that was recorded, if any."""

    model_config = _CONFIG

    input: dict[str, Any]
    output: Any = None

    @property
    def answered(self) -> bool:
        """Whether an output was recorded; it may be null."""
        return "output" in self.model_fields_set


class _Unset:
    def __repr__(self) -> str:
        return "…"


UNSET: Final = _Unset()


@dataclass(frozen=True, slots=True)
class Example:
    """One example of a tool's arguments, for `@tool(examples=[…])`.

    `live=False`: contract tests check the arguments, and do not run the tool with them. `answer` is what the real
    service answered; it is checked against the result schema, and implies `live=False`.
    """

    arguments: Mapping[str, Any]
    live: bool = True
    answer: Any = UNSET

    def recorded(self) -> dict[str, Any] | None:
        """The example as `recorded_examples` of a manifest has it; None if it is run."""
        if self.answer is not UNSET:
            return {"input": dict(self.arguments), "output": self.answer}
        return None if self.live else {"input": dict(self.arguments)}

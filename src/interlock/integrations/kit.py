"""The part of a toolkit that the adapters of frameworks use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from interlock.call.results import Result
    from interlock.contract.contract import Contract
    from interlock.data.schema import Json


class Kit(Protocol):
    """The governed tools of one caller, by the names that a model knows."""

    async def named(self) -> list[tuple[str, Contract]]:
        """The tools that the caller may see, in order, each with its name."""
        ...

    async def call(self, name: str, arguments: Any, call_id: str | None) -> tuple[Result, list[Json]]:
        """Make a tool call of a model; its result, and the parts for the model."""
        ...

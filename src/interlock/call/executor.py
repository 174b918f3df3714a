"""An executor: runs the tools of granted calls. The gateway makes one of each module in contract/executors.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, final

from interlock.core.errors import Failure

if TYPE_CHECKING:
    from interlock.call.context import Context
    from interlock.call.phases import Granted


class Unfinished(Protocol):
    """A tool that goes on after its call was cut off."""

    # Called on the event loop when it has ended.
    listeners: list[Callable[[], None]]

    def result(self) -> Any:
        """Return what the tool returned, or raise what it raised."""
        ...


class Executor(ABC):
    """Runs granted calls. It has no other entry point.

    `makes_context`: the executor makes the context of a read itself, when there is something to report. `grace_s`: how
    long a tool that was cut off may take to clean up before it is killed.
    """

    makes_context = False
    grace_s = 0.0

    def __init__(self, grant: object) -> None:
        self._grant = grant

    @final
    def run(self, granted: Granted, context: Context | None) -> Coroutine[Any, Any, Any]:
        """Run the tool of a call and return its output. Refuses anything without the grant of the Authorize phase."""
        # INVARIANT: nothing runs without a grant that the Authorize phase of this gateway made.
        if granted.grant is not self._grant:
            raise not_granted()
        return self.execute(granted, context)

    @abstractmethod
    async def execute(self, granted: Granted, context: Context | None) -> Any:
        """Run the tool. `run` has checked the grant, and nothing else calls this."""

    def unfinished(self, call_id: str) -> Unfinished | None:
        """The pending outcome of a call that was cut off, if its tool cannot be stopped; None if it does not run."""
        return None

    async def warm_up(self) -> None:  # noqa: B027 - most need nothing
        """Prepare what the first call would otherwise wait for. Only done where a tool needs the sandbox."""

    def health(self) -> Mapping[str, Literal["healthy", "degraded"]]:
        """The parts of the executor that `/ready` lists. None of them is listed before it is used."""
        return {}

    def loads(self) -> Mapping[str, Callable[[], float]]:
        """The limits that raise an alert when nearly reached, by name: functions that return the share in use."""
        return {}

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release what the executor holds. No call runs any more."""


def not_granted() -> Failure:
    return Failure("E3000", "a tool can only run under a grant")

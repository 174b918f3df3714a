"""Detects what a call changed, from outside, and compares it with what its tool declared.

A watcher takes a snapshot of some resources before a call and after it, and reports the changes. It cannot tell who
made them. A watched call therefore locks the `resources` of its watchers for writing, however little it means to do
there: then whatever changed was changed by it, or by somebody outside who takes no locks. Places that others change
freely must not be watched.

The verdict is one comparison: a read-only tool changes nothing, and a write tool changes nothing that its manifest,
filled in with the call's input, does not cover in resource and operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from interlock.core.record import record
from interlock.effects.locks import covers

if TYPE_CHECKING:
    from interlock.contract.effects import Change
    from interlock.contract.manifest import MutationClass

Finding = Literal["ok", "MUTATION_CLASS_VIOLATION", "UNDECLARED_EFFECT"]


class Watcher(Protocol):
    """Takes snapshots of some resources before and after a call."""

    @property
    def resources(self) -> tuple[str, ...]:
        """The watched resources, as names to lock."""
        ...

    async def before(self) -> Any:
        """Take a snapshot."""
        ...

    async def after(self, before: Any) -> list[Change]:
        """Take another snapshot and return the changes since."""
        ...

    async def restore(self, before: Any) -> list[Change]:
        """Undo the changes since, as far as possible; returns the ones that remain."""
        ...


@record
class WatchVerdict:
    """The changes that watchers and session detected, and those of them that the tool had not declared."""

    finding: Finding
    changes: tuple[Change, ...]
    session_changes: tuple[Change, ...]
    outside: tuple[Change, ...]

    @property
    def ok(self) -> bool:
        return self.finding == "ok"


def judge(
    mutation_class: MutationClass,
    predicted: Sequence[Change],
    detected: Iterable[Change],
    session_changes: Iterable[Change] = (),
    unlisted: Iterable[Change] = (),
) -> WatchVerdict:
    """Compare the changes of a call with what its tool declared: the same operations, on resources that it covers.

    `unlisted`: changes that no permission of it covers.
    """
    changes, session_changes = tuple(detected), tuple(session_changes)
    changes_ = (*changes, *session_changes)
    if mutation_class == "read_only":
        outside, finding = changes_, "MUTATION_CLASS_VIOLATION"
    else:
        refused = tuple(unlisted)
        outside = tuple(
            [
                one
                for one in changes_
                if one in refused
                or not any(two.operation == one.operation and covers(two.resource, one.resource) for two in predicted)
            ]
        )
        finding = "UNDECLARED_EFFECT"
    return WatchVerdict(
        finding=finding if outside else "ok", changes=changes, session_changes=session_changes, outside=outside
    )


async def look(watchers: Sequence[Watcher]) -> list[Any]:
    """Take the snapshots of all watchers before a call."""
    return [await watcher.before() for watcher in watchers]


async def changes(watchers: Sequence[Watcher], before: Sequence[Any]) -> list[Change]:
    """Return the changes since, as all watchers report them."""
    return [change for watcher, seen in zip(watchers, before, strict=True) for change in await watcher.after(seen)]

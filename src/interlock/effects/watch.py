"""Watching: what a call changed, seen from outside and compared with what its tool declared.

A watcher looks at a part of the world before a call and after it, and tells what changed in between. It cannot tell who
changed it. So a call that is watched claims the `resources` of its watchers for itself, to write, however little it
means to do there: then whatever changed was changed by it, or by somebody outside who does not ask for locks. Places
that others change at will must not be watched.

The verdict is one comparison: a read-only tool changes nothing, and a write tool changes nothing that its manifest,
filled in with the call's input, does not cover in resource and operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

from interlock.contract.effects import Change
from interlock.contract.manifest import MutationClass
from interlock.core.record import record
from interlock.effects.locks import covers

Finding = Literal["ok", "MUTATION_CLASS_VIOLATION", "UNDECLARED_EFFECT"]


class Watcher(Protocol):
    """Looks at a part of the world before and after a call."""

    @property
    def resources(self) -> tuple[str, ...]:
        """What is watched, as names to claim."""
        ...

    async def before(self) -> Any:
        """Look, and return what was seen."""
        ...

    async def after(self, before: Any) -> list[Change]:
        """Look again, and tell what changed since."""
        ...

    async def restore(self, before: Any) -> list[Change]:
        """Undo what changed since, as far as it can be undone; tells what could not be."""
        ...


@record
class Verdict:
    """What the watchers saw of a call, what its session saw, and which of it the tool had no leave to do."""

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
) -> Verdict:
    """Compare what a call changed with what its tool declared. `unlisted`: changes that no permission of it covers."""
    changes, session_changes = tuple(detected), tuple(session_changes)
    found = (*changes, *session_changes)
    if mutation_class == "read_only":
        outside, finding = found, "MUTATION_CLASS_VIOLATION"
    else:
        refused = tuple(unlisted)
        outside = tuple(one for one in found if one in refused or not declared(one, predicted))
        finding = "UNDECLARED_EFFECT"
    return Verdict(
        finding=finding if outside else "ok", changes=changes, session_changes=session_changes, outside=outside
    )


def declared(change: Change, predicted: Iterable[Change]) -> bool:
    """Whether a change was announced: the same operation, on a resource that the prediction covers."""
    return any(one.operation == change.operation and covers(one.resource, change.resource) for one in predicted)


async def look(watchers: Sequence[Watcher]) -> list[Any]:
    """What every watcher sees before a call."""
    return [await watcher.before() for watcher in watchers]


async def changes(watchers: Sequence[Watcher], before: Sequence[Any]) -> list[Change]:
    """What every watcher says has changed since."""
    return [change for watcher, seen in zip(watchers, before, strict=True) for change in await watcher.after(seen)]

"""Session state: values that a tool stores between calls, changed only together with the record of the change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import orjson

from interlock.contract.effects import Change
from interlock.core.errors import Failure


class SessionState(MutableMapping[str, Any]):
    """A session's values as one call sees them. Writes stay here until the call's closing record commits them.

    The stored values are read when they are first used. Another call that has changed them by the time this one closes
    is noticed by the version (E3410).
    """

    def __init__(self, load: Callable[[], tuple[int, str]] | None, version: int = 0, stored: str = "{}") -> None:
        """`load` returns the version of the session and its values as JSON; None if they are given."""
        self._load = load
        self._version = version
        # Parsed twice, so that changing a list in place is seen as a change.
        self._before: dict[str, Any] = orjson.loads(stored)
        self._current: dict[str, Any] = orjson.loads(stored)

    def read(self) -> SessionState:
        """Read the stored values now, unless they have been read."""
        load = self._load
        if load is not None:
            self._version, stored = load()
            self._before, self._current = orjson.loads(stored), orjson.loads(stored)
            self._load = None
        return self

    @property
    def _now(self) -> dict[str, Any]:
        return self.read()._current

    @property
    def version(self) -> int:
        """The version of the session that was read."""
        return self.read()._version

    def __getitem__(self, name: str) -> Any:
        return self._now[name]

    def __setitem__(self, name: str, value: Any) -> None:
        # Stored as JSON: values that JSON cannot represent are refused where they are written, and aliases are cut.
        try:
            self._now[name] = orjson.loads(orjson.dumps(value))
        except TypeError:
            raise Failure("E3906", f"the session value `{name}` is not JSON") from None

    def __delitem__(self, name: str) -> None:
        del self._now[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now)

    def __len__(self) -> int:
        return len(self._now)

    @property
    def changed(self) -> bool:
        return self._load is None and self._current != self._before

    def values_now(self) -> dict[str, Any]:
        return self._now

    def rewrite(self, clean: Callable[[Any], Any]) -> None:
        """Pass everything that is about to be stored through `clean`."""
        if self._load is None:
            self._current = clean(self._current)

    def changes(self) -> tuple[Change, ...]:
        """The changes of this call, as records that replay to the same state."""
        before, now = self._before, self._current
        if before == now:
            return ()
        changes: list[Change] = []
        for name in sorted(before.keys() | now.keys()):
            if name not in now:
                changes.append(Change(resource=f"session:{name}", operation="DELETE", before=before[name]))
            elif name not in before:
                changes.append(Change(resource=f"session:{name}", operation="CREATE", after=now[name]))
            elif before[name] != now[name]:
                changes.append(
                    Change(resource=f"session:{name}", operation="UPDATE", before=before[name], after=now[name])
                )
        return tuple(changes)

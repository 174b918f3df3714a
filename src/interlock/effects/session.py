"""Session state: values that a tool stores between calls, changed only together with the record of the change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import orjson

from interlock.contract.effects import Change
from interlock.core.errors import Failure


class SessionState(MutableMapping[str, Any]):
    """A session's values as one call sees them. Writes stay here until the call's closing record commits them."""

    def __init__(self, version: int, stored: str) -> None:
        self.version = version
        # Parsed twice, so that changing a list in place is detected as a change.
        self._before: dict[str, Any] = orjson.loads(stored)
        self._now: dict[str, Any] = orjson.loads(stored)

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
        return self._now != self._before

    def values_now(self) -> dict[str, Any]:
        return self._now

    def rewrite(self, clean: Callable[[Any], Any]) -> None:
        """Pass every value that is about to be stored through `clean`."""
        self._now = clean(self._now)

    def changes(self) -> tuple[Change, ...]:
        """The changes of this call, as records that replay to the same state."""
        before, now = self._before, self._now
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

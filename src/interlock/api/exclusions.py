"""Tools that the operator has excluded for some callers (`surface_excluded`). For these callers they do not exist."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interlock.call.context import Caller
    from interlock.settings import Excluded


class Exclusions:
    """The rules of the operator."""

    def __init__(self, rules: Sequence[Excluded]) -> None:
        self._rules = tuple(rules)

    def __bool__(self) -> bool:
        return bool(self._rules)

    def concern(self, caller: Caller) -> bool:
        """Whether there are rules about a caller."""
        return any(rule.concerns(caller.groups, caller.id, caller.agent) for rule in self._rules)

    def reason(self, caller: Caller, address: str) -> str | None:
        """The reason why a tool does not exist for a caller; None if no rule is about it."""
        for rule in self._rules:
            if rule.concerns(caller.groups, caller.id, caller.agent) and any(
                fnmatchcase(address, one) for one in rule.tools
            ):
                return rule.reason
        return None

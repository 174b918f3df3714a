"""Tools that the operator has excluded for some callers (`surface_excluded`). For these callers they do not exist.

A rule may be about capabilities that a tool needs of the model which calls it. The operator also says what models
callers have (`surface_models`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from interlock.call.context import Caller
    from interlock.call.surface_rules import Excluded, ModelRule

DEFAULT_CAPABILITIES: Final = ("tool_calls",)


class Without:
    """The whole catalog, without the tools that are excluded for a caller."""

    defers = False

    def __init__(self, reason: Callable[[str], str | None]) -> None:
        self._reason = reason

    def has(self, address: str) -> bool:
        return self._reason(address) is None

    offers = has

    def hides(self, address: str) -> bool:
        return self._reason(address) is not None


class Exclusions:
    """The rules of the operator."""

    def __init__(self, rules: Sequence[Excluded], models: Sequence[ModelRule] = ()) -> None:
        self._rules = tuple(rules)
        self._models = tuple(models)

    def __bool__(self) -> bool:
        return bool(self._rules)

    def concern(self, caller: Caller) -> bool:
        """Whether there are rules about a caller."""
        return any(rule.concerns(caller.groups, caller.id, caller.agent) for rule in self._rules)

    def applied(self, caller: Caller) -> Caller:
        """The caller of a program's own call, for whom excluded tools do not exist."""
        if caller.surface is not None or not self.concern(caller):
            return caller
        return replace(caller, surface=Without(partial(self.reason, caller)))

    def capabilities(self, caller: Caller) -> tuple[str, ...]:
        """Return the capabilities of a caller's model: those of the first rule that concerns the caller."""
        for rule in self._models:
            if rule.concerns(caller.groups, caller.id, caller.agent):
                return rule.capabilities
        return DEFAULT_CAPABILITIES

    def reason(self, caller: Caller, address: str) -> str | None:
        """The reason why a tool does not exist for a caller; None if no rule is about it."""
        for rule in self._rules:
            if (
                rule.concerns(caller.groups, caller.id, caller.agent)
                and any(fnmatchcase(address, one) for one in rule.tools)
                and not (rule.needs and rule.needs.issubset(self.capabilities(caller)))
            ):
                return "model_unsupported" if rule.needs else rule.reason
        return None

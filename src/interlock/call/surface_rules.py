"""Rules of the operator about surfaces: which tools callers see, and what the models of callers can do."""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic


class _ForSome(pydantic.BaseModel):
    """A rule for every caller, for those of some groups, or for some callers by their ids."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, defer_build=True)

    groups: frozenset[str] = frozenset()
    callers: frozenset[str] = frozenset()

    @property
    def for_everybody(self) -> bool:
        return not self.groups and not self.callers

    def concerns(self, groups: frozenset[str], *ids: str | None) -> bool:
        """Whether it is about a caller of these groups, with these ids."""
        return self.for_everybody or not self.groups.isdisjoint(groups) or not self.callers.isdisjoint(ids)


class Pinned(_ForSome):
    """Tools that are always listed."""

    tools: tuple[str, ...] = pydantic.Field(min_length=1, max_length=100)


ModelCapability = Annotated[str, pydantic.Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]


class Excluded(_ForSome):
    """Tools that are off the surface of callers, by name or pattern (`shop.*`), and why.

    With `needs`, only of those callers whose models lack one of these capabilities; the reason is model_unsupported.
    """

    tools: tuple[str, ...] = pydantic.Field(min_length=1, max_length=100)
    needs: Annotated[frozenset[ModelCapability], pydantic.Field(max_length=20)] = frozenset()
    reason: Literal["feature_disabled", "model_unsupported", "recursive_tool_forbidden"] = "feature_disabled"


class ModelRule(_ForSome):
    """The capabilities of the models that callers use."""

    capabilities: Annotated[tuple[ModelCapability, ...], pydantic.Field(max_length=20)]

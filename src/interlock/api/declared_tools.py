"""Tools in a file, a module or a manifest, before they are admitted, with the declarations that were refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlock.api.tool_listing import any_version
from interlock.contract.refusals import collecting
from interlock.core.errors import Failure
from interlock.core.record import NamedTuple
from interlock.registry.source import load
from interlock.trials import CaseOutcome, Trial

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.contract.declare import Tool
    from interlock.contract.refusals import DeclarationRefusal


class Declared(NamedTuple):
    """The tools of a file, a module or a manifest. Nothing of it is used if a declaration or all of it was refused."""

    origin: str
    tools: list[Tool[..., Any]]
    refused: list[DeclarationRefusal]
    failure: Failure | None


def declared_in(target: str) -> Declared:
    """Load a file, a module or a manifest, and collect the declarations that were refused."""
    with collecting() as refused:
        try:
            origin, tools = load(target)
        except Failure as failure:
            return Declared("", [], refused, failure)
    return Declared(origin, tools, refused, None)


async def tools_of(parts: Parts, target: str) -> list[Tool[..., Any]]:
    """The tools of a file, a module or a manifest; or the registered one that goes by this name."""
    name, at, spec = target.partition("@")
    if "/" not in target and await parts.catalog.versions(await parts.catalog.address(name)):
        return [(await any_version(parts, name, spec if at else None)).bound]
    return load(target)[1]


def refused_trial(tool: str, failure: Failure) -> Trial:
    """The trial of a tool that could not be tried out."""
    return Trial(tool, "none", (CaseOutcome("declaration", False, failure.in_full),))

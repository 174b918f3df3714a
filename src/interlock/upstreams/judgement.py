"""The class of an upstream's tool: what its operator says of it, what its upstream says, or the safe value.

Lists of upstreams ask for it, so it needs neither the models of overlays nor those of manifests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from interlock.core.record import dataclass

if TYPE_CHECKING:
    from interlock.contract.manifest import MutationClass


@dataclass(frozen=True, slots=True)
class Judged:
    """The class of a tool, and the reason in one line for people."""

    mutation_class: MutationClass
    why: str


def judge(
    hints: Mapping[str, Any], stated: MutationClass | None, of_all: MutationClass | None, *, accept_hints: bool
) -> Judged:
    """Determine the class of a tool by its hints and by what an overlay states of it, and of all tools.

    INVARIANT: only the operator's statement makes a tool less than irreversible.
    """
    if stated is not None:
        return Judged(stated, "the overlay says so")
    if of_all is not None:
        return Judged(of_all, "the overlay says so of all its tools")
    if not accept_hints:
        return Judged("write_irreversible", "unknown, so treated as irreversible")
    if hints.get("readOnlyHint") is True:
        if hints.get("destructiveHint") is True:
            return Judged("write_irreversible", "its hints contradict one another, so treated as irreversible")
        return Judged("read_only", "its hint readOnlyHint was accepted")
    method = str(hints.get("method", "")).upper()
    if method in ("GET", "HEAD"):
        return Judged("read_only", f"{method}, and hints were accepted")
    if method or "readOnlyHint" in hints:
        return Judged("write_irreversible", f"{method or 'its hints'} may change things, so treated as irreversible")
    return Judged("write_irreversible", "no hint says otherwise, so treated as irreversible")

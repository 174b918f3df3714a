"""Names of an upstream's tools, in the form of our ids and as words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from interlock.core.expressions import expression

if TYPE_CHECKING:
    from interlock.upstreams.overlay import Overlay  # its models take long to load

_HUMPS = expression(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_UNFIT = expression(r"[^a-z0-9]+")
_LONGEST_ID = 200


def clean_id(name: str) -> str:
    """Convert a name to an id: `getUserByName`, `get-user.by name` and `Get_User_By_Name` are one."""
    cleaned = _UNFIT.sub("_", _HUMPS.sub("_", name).lower()).strip("_")
    if len(cleaned) < 3 or not cleaned[0].isalpha():
        cleaned = f"tool_{cleaned}".rstrip("_")
    return cleaned[:_LONGEST_ID]


def tool_ids(names: Iterable[str], overlay: Overlay, known: Mapping[str, str]) -> dict[str, str]:
    """Assign an id to every name, independently of their order.

    INVARIANT: a new tool never takes the id of an existing one: first come the operator's names, then the ids that were
    assigned before, then the names that are ids already, then the others, numbered where they collide.
    """
    left = sorted(set(names), key=lambda name: (clean_id(name) != name, name))
    given = {name: rename for name in left if (rename := overlay.of(name).rename) is not None}
    given |= {name: known[name] for name in left if name in known and name not in given}
    taken = set(given.values())
    for name in left:
        if name in given:
            continue
        plain = candidate = clean_id(name)
        number = 2
        while candidate in taken:
            candidate, number = f"{plain}_{number}", number + 1
        taken.add(candidate)
        given[name] = candidate
    return given


def in_words(name: str) -> str:
    """Convert a name to words: `issueNumber` is `issue number`."""
    return " ".join(_UNFIT.sub(" ", _HUMPS.sub(" ", name).lower()).split()) or name

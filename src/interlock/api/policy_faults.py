"""The faults of a text as the policy of a data directory, of which the tools and callers are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.authority.policy_check import Fault


async def faults_of(parts: Parts, text: str, people: frozenset[str] | None = None) -> list[Fault]:
    """The faults of a text as the policy of this data directory. A text with grave ones cannot be applied.

    `people` are the groups of the principals that it is to be used with, if these are not the ones in force.
    """
    from interlock.authority.policy_check import check, concerned

    now_ms = parts.clock.now_ms()
    known = await parts.identities.all()
    here = parts.policy.groups if people is None else people
    groups = here | {group for identity in known for group in identity.groups}
    versions = [one for one in await parts.catalog.everything() if not one.gone(now_ms)]
    matters = concerned(text)
    contracts = [one.contract for one in versions if matters(one.row.address, one.row.manifest)]
    return check(text, contracts, groups, {one.row.address for one in versions})

"""The tools that the policy denies a caller whatever they send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from interlock.authority.decisions import caller_facts
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.core.event_loop import give_way
from interlock.core.threads import DEFINITIONS
from interlock.registry.version import Version

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.contract.contract import Contract

_MOST_REMEMBERED: Final = 100_000
# How many tools are looked at before other tasks get their turn, and how many that the policy is asked about.
_AT_ONCE: Final = 500
_ASKED_AT_ONCE: Final = 20


class Denials:
    """Only an embedded policy can say it. For others nothing is denied in advance."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        # By the caller and the tool, while these rules are in force.
        self._remembered: dict[tuple[object, ...], bool] = {}
        self._rules: object = None

    async def remembered(self, caller: Caller, version: Version) -> bool:
        """The same as `every_call`, remembered while the same rules are in force: a search asks it about each hit."""
        rules = self._parts.policy.state()
        if rules is not self._rules or len(self._remembered) >= _MOST_REMEMBERED:
            self._remembered, self._rules = {}, rules
        key = caller_facts(caller), version.row.digest
        known = self._remembered.get(key)
        if known is None:
            remembered = self._remembered
            if not version.at_hand and self._judged(caller, version) is None:
                await DEFINITIONS.run(_contract, version)
            known = remembered[key] = self.every_call(caller, version)
        return known

    def rules(self) -> object:
        """Return an object that stays the same while the answers do."""
        policy = self._parts.policy
        return policy.state() if self._parts.engine is policy else None

    async def among(self, caller: Caller, versions: Mapping[str, Version]) -> frozenset[str]:
        """Those of some tools that the policy denies a caller. It is asked once about all that it treats alike."""
        if self._parts.engine is not self._parts.policy:
            return frozenset()
        denied: set[str] = set()
        asked = 0
        for number, (tool, version) in enumerate(versions.items(), 1):
            known = self._judged(caller, version)
            if known is None:
                asked += 1
                if not version.at_hand:
                    await DEFINITIONS.run(_contract, version)
                known = self.every_call(caller, version)
            if known:
                denied.add(tool)
            if number % _AT_ONCE == 0 or asked == _ASKED_AT_ONCE:
                asked = 0
                await give_way()
        return frozenset(denied)

    def every_call(self, caller: Caller, version: Version) -> bool:
        """Whether the policy denies every call, whatever its arguments."""
        denied = self._judged(caller, version)
        return bool(self._judged(caller, version, version.contract) if denied is None else denied)

    def _judged(self, caller: Caller, version: Version, contract: Contract | None = None) -> bool | None:
        """The same, or None where that takes the contract."""
        policy = self._parts.policy
        if self._parts.engine is not policy:
            return False
        try:
            return policy.denies_every_call(caller, version.row.address, version.content.stated, contract)
        except Failure:
            return True  # a policy that cannot be used forbids everything


def _contract(version: Version) -> Contract:
    return version.contract

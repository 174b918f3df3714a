"""The tools that the policy denies a caller whatever they send."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.authority.decisions import caller_facts
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.core.threads import DEFINITIONS
from interlock.registry.catalog import Version

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.contract.contract import Contract

_MOST_REMEMBERED = 100_000


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
                await DEFINITIONS.run(lambda: version.contract)
            known = remembered[key] = self.every_call(caller, version)
        return known

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

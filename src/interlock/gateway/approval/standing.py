"""Standing approvals: calls of one tool by one caller that a person approves in advance, within bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from interlock.approvals import standing
from interlock.approvals.standing import Standing
from interlock.authority.approval_gate import APPROVAL_TIER
from interlock.contract.argument_bounds import bound_faults, is_open, values_in
from interlock.core.clock import Clock, new_id
from interlock.core.errors import Failure
from interlock.gateway import token_checks
from interlock.gateway.allowances import uses_of

if TYPE_CHECKING:
    from interlock.call.context import Caller
    from interlock.gateway.reviewer_view import ReviewerView
    from interlock.registry.catalog import Catalog
    from interlock.settings import Settings
    from interlock.store.port import Store, Transaction


class StandingApprovals:
    """The standing approvals of one data directory."""

    def __init__(
        self, *, journal: Store, catalog: Catalog, settings: Settings, clock: Clock, view: ReviewerView
    ) -> None:
        self._journal = journal
        self._catalog = catalog
        self._settings = settings
        self._clock = clock
        self._view = view

    async def grant(
        self,
        tool: str,
        *,
        by: Caller,
        caller: str,
        arguments: Mapping[str, Any],
        uses: int,
        expires_ms: int,
        versions: str | None = None,
        tenant: str | None = None,
    ) -> Standing:
        """Approve calls of one tool by one caller in advance, within bounds; without `versions`, of the present one.

        `tenant` is the caller's, if it is not that of the person who approves.
        """
        version = await self._catalog.resolve(tool, versions)
        contract = version.contract
        if contract.manifest.tier >= APPROVAL_TIER:
            raise Failure(
                "E3004",
                f"{contract.ref} runs in sandbox tier {contract.manifest.tier}, with full access, so a person must"
                " agree to each of its calls; decide on their tickets one by one",
            )
        for fault in bound_faults(arguments, contract.input.document):
            raise Failure("E3004", fault)
        quoted = [{name: value} for name, pattern in arguments.items() for value in values_in(pattern)]
        for name in self._view.private_arguments(contract, *quoted):
            # INVARIANT: the patterns of standing approvals are stored readably, so they contain no private value.
            if not is_open(arguments[name]):
                raise Failure(
                    "E3004",
                    f"`{name}` is private, and the patterns of standing approvals are kept readable",
                    resolution=f"leave `{name}` open, with --any-value {name}, or decide on each call's ticket",
                )
        now_ms = self._clock.now_ms()
        approval = Standing(
            id=f"sta_{new_id(now_ms, self._clock.random_bytes(8))}",
            tenant=tenant or by.tenant,
            tool=contract.address,
            versions=versions or contract.version,
            arguments=dict(arguments),
            caller=caller,
            uses=uses,
            expires_ms=expires_ms,
            granted_by=by.acting,
        )
        rule = contract.manifest.approval or self._settings.approval
        groups = frozenset(step.group for step in rule.chain)
        used_up: Sequence[Callable[[Transaction], None]] = ()
        if by.capability is not None:
            token_checks.check_in_advance(
                by.capability, contract, approval.versions, approval.arguments, self._settings.environment
            )
            token_checks.check_cost(by.capability, contract, approval.uses)
            used_up = uses_of(by.capability, approval.uses)
        # That a person may not approve is the first thing they learn.
        unit = standing.grant(approval, by, groups, now_ms, used_up)
        required: list[str] = contract.input.model_facing.get("required") or []
        for name in required:
            if name not in arguments:
                raise Failure(
                    "E3004",
                    f"{contract.ref} is never called without `{name}`, and no pattern names it, so no call would be"
                    " covered",
                    resolution=f"add a pattern for `{name}`",
                )
        return await self._journal.commit(unit)

    async def list(self) -> list[Standing]:
        """Return every standing approval."""
        return await self._journal.read(standing.listing)

    async def revoke(self, standing_id: str, *, by: Caller) -> Standing:
        """End a standing approval now."""
        return await self._journal.commit(standing.revoke(standing_id, by))

"""The approval gate: decides whether a person must agree before a call runs, whatever the rules say.

Five rules, and the first that applies decides:

    1. a read                                                        no
    2. a write that can be undone, by a trusted caller, outside PROD no
    3. a write that cannot be undone                                 yes
    4. PROD, and the write reaches as far as is critical or farther  yes
    5. anything else                                                 as configured

INVARIANT: the gate only ever adds. A deny or an ask stays unchanged, and "no" leaves the rules' own answer in force.
All its inputs are statements of the operator or the tool author; none of them comes with the call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from interlock.call.phases import Decision
from interlock.core.record import record

if TYPE_CHECKING:
    from interlock.contract.contract import Contract
    from interlock.contract.manifest import Effect, MutationClass
    from interlock.settings import Settings

Approval = Literal["no", "yes", "policy"]

# The reach of an effect, narrowest first.
SCOPES = ("field", "resource", "collection", "tenant", "system")
# Environments in which a mistake does not affect customers. Any other name counts as PROD.
NOT_PROD = frozenset({"LOCAL", "DEV", "TEST", "STAGING"})
# The sandbox tier whose every call needs approval.
APPROVAL_TIER = 3


@record
class Gate:
    """The configured thresholds. The defaults are those of a cautious operator."""

    environment: str = "PROD"
    theta_auto: int = 80
    sigma_critical: str = "collection"
    otherwise: Approval = "policy"
    ask_all_writes: bool = False

    @classmethod
    def of(cls, settings: Settings) -> Gate:
        """The thresholds of a home."""
        return cls(
            environment=settings.environment,
            theta_auto=settings.theta_auto,
            sigma_critical=settings.sigma_critical,
            otherwise=settings.approval_otherwise,
            ask_all_writes=settings.ask_all_writes,
        )


def is_production(environment: str) -> bool:
    return environment.upper() not in NOT_PROD


def reach(scope: str) -> int:
    """The rank of a scope; an unknown one ranks as the widest."""
    return SCOPES.index(scope) if scope in SCOPES else len(SCOPES) - 1


def widest(effects: Iterable[Effect]) -> str:
    """Return the widest scope among a tool's effects."""
    return SCOPES[max((reach(effect.scope) for effect in effects), default=0)]


def approval_required(
    mutation_class: MutationClass,
    *,
    trust: int,
    environment: str,
    scope: str,
    ask_all_writes: bool,
    theta_auto: int,
    sigma_critical: str,
    otherwise: Approval,
) -> Approval:
    """Return the answer of the first rule that applies; `policy` leaves it to the rules."""
    if mutation_class == "read_only":
        return "no"
    if ask_all_writes:
        return "yes"
    production = is_production(environment)
    if mutation_class == "write_reversible" and trust >= theta_auto and not production:
        return "no"
    # Anything that is neither a read nor known to be undoable counts as the worst.
    if mutation_class != "write_reversible":
        return "yes"
    if production and reach(scope) >= reach(sigma_critical):
        return "yes"
    return otherwise


def gate(decision: Decision, contract: Contract, *, trust: int, settings: Gate, tier: int = 0) -> Decision | None:
    """Return the decision that replaces the rules' own, or None if the gate adds nothing."""
    if decision.behavior in ("deny", "ask"):
        return None
    mutation = contract.mutation
    required = approval_required(
        mutation.mutation_class,
        trust=trust,
        environment=settings.environment,
        scope=widest(mutation.effects),
        ask_all_writes=settings.ask_all_writes,
        theta_auto=settings.theta_auto,
        sigma_critical=settings.sigma_critical,
        otherwise=settings.otherwise,
    )
    if tier >= APPROVAL_TIER:
        reason, rule = f"it runs in sandbox tier {tier}", "gate:sandbox-tier"
    elif required == "yes":
        reason, rule = f"a {mutation.mutation_class} in {settings.environment} needs a person", "gate:approval"
    else:
        return None
    return Decision(
        behavior="ask",
        reason=reason,
        rules=(*decision.rules, rule),
        policy=decision.policy,
        source="gate",
        expires_ms=decision.expires_ms,
        obligations=decision.obligations,
    )

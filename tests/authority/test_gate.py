"""The gate asks by five rules, and can only ever make an answer stricter."""

from __future__ import annotations

import inspect
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.authority.gate import SCOPES, Approval, Gate, approval_required, gate, reach, widest
from interlock.core.manifest import Effect, MutationClass
from interlock.core.phases import Behavior, Decision
from tests.authority.questions import contract

CLASSES = st.sampled_from(get_args(MutationClass))
ENVIRONMENTS = st.sampled_from(["local", "dev", "test", "staging", "PROD", "prod", "production", "eu-west", ""])
REACHES = st.sampled_from([*SCOPES, "galaxy"])
APPROVALS = st.sampled_from(get_args(Approval))
THRESHOLDS = st.integers(0, 100)

# class, trusted, production, far enough: what the specification says; None is what is configured.
TABLE: dict[tuple[str, bool, bool, bool], Approval | None] = {
    **{("read_only", t, p, s): "no" for t in (True, False) for p in (True, False) for s in (True, False)},
    **{("write_irreversible", t, p, s): "yes" for t in (True, False) for p in (True, False) for s in (True, False)},
    ("write_reversible", True, False, False): "no",
    ("write_reversible", True, False, True): "no",
    ("write_reversible", False, False, False): None,
    ("write_reversible", False, False, True): None,
    ("write_reversible", True, True, False): None,
    ("write_reversible", False, True, False): None,
    ("write_reversible", True, True, True): "yes",
    ("write_reversible", False, True, True): "yes",
}
NOT_PRODUCTION = ("local", "dev", "test", "staging")
ORDER = {"field": 0, "resource": 1, "collection": 2, "tenant": 3, "system": 4}


@pytest.mark.proves("HITL-01")
@given(CLASSES, THRESHOLDS, THRESHOLDS, ENVIRONMENTS, REACHES, st.sampled_from(SCOPES), APPROVALS, st.booleans())
def test_the_gate_says_what_the_table_says(
    mutation_class: MutationClass,
    trust: int,
    theta_auto: int,
    environment: str,
    scope: str,
    sigma_critical: str,
    otherwise: Approval,
    ask_all_writes: bool,
) -> None:
    said = approval_required(
        mutation_class,
        trust=trust,
        environment=environment,
        scope=scope,
        ask_all_writes=ask_all_writes,
        theta_auto=theta_auto,
        sigma_critical=sigma_critical,
        otherwise=otherwise,
    )
    far = ORDER.get(scope, 4) >= ORDER[sigma_critical]
    row = TABLE[mutation_class, trust >= theta_auto, environment not in NOT_PRODUCTION, far]
    if ask_all_writes and mutation_class != "read_only":
        assert said == "yes"
    else:
        assert said == (otherwise if row is None else row)


STRICTNESS = {"allow": 0, "passthrough": 0, "ask": 1, "deny": 2}
TOOLS = {
    "read_only": contract(),
    "write_reversible": contract(
        mutation_class="write_reversible", compensable=True, effects=[{"resource": "a", "operation": "UPDATE"}]
    ),
    "write_irreversible": contract(
        mutation_class="write_irreversible", previews=True, effects=[{"resource": "a", "operation": "DELETE"}]
    ),
}


def decision(behavior: Behavior) -> Decision:
    return Decision(behavior=behavior, reason="r", rules=("x",), policy="p", expires_ms=7, obligations=("log",))


@pytest.mark.proves("HITL-01")
@given(
    CLASSES, st.sampled_from(get_args(Behavior)), THRESHOLDS, ENVIRONMENTS, APPROVALS, st.booleans(), st.integers(0, 4)
)
def test_the_gate_never_lowers_an_answer(
    mutation_class: MutationClass,
    behavior: Behavior,
    trust: int,
    environment: str,
    otherwise: Approval,
    ask_all_writes: bool,
    tier: int,
) -> None:
    settings = Gate(environment=environment, otherwise=otherwise, ask_all_writes=ask_all_writes)
    before = decision(behavior)
    after = gate(before, TOOLS[mutation_class], trust=trust, settings=settings, tier=tier)
    if after is None:
        assert behavior in ("ask", "deny") or (mutation_class != "write_irreversible" and tier < 3)
        return
    assert STRICTNESS[after.behavior] > STRICTNESS[behavior]
    assert (after.behavior, after.source, after.expires_ms, after.obligations) == ("ask", "gate", 7, ("log",))
    assert after.rules[0] == "x"


@pytest.mark.parametrize("theta_auto", [0, 100])
@pytest.mark.parametrize("environment", ["local", "PROD"])
def test_no_configuration_lets_through_what_cannot_be_undone(theta_auto: int, environment: str) -> None:
    settings = Gate(environment=environment, theta_auto=theta_auto, sigma_critical="system", otherwise="no")
    gated = gate(decision("allow"), TOOLS["write_irreversible"], trust=100, settings=settings)
    assert gated is not None
    assert gated.behavior == "ask"


def test_a_tier_3_sandbox_is_asked_about_even_to_read() -> None:
    settings = Gate(environment="local", theta_auto=0)
    gated = gate(decision("allow"), TOOLS["read_only"], trust=100, settings=settings, tier=3)
    assert gated is not None
    assert gated.rules == ("x", "gate:sandbox-tier")


@pytest.mark.proves("HITL-01")
def test_nothing_the_gate_reads_comes_with_the_call() -> None:
    # The contract is the author's, trust and settings the operator's, the tier the sandbox's; arguments are not there.
    assert set(inspect.signature(gate).parameters) == {"decision", "contract", "trust", "settings", "tier"}


def test_an_effect_reaches_as_far_as_the_farthest_of_them() -> None:
    assert widest([]) == "field"
    assert widest([Effect("a", "UPDATE", "field"), Effect("b", "UPDATE", "tenant")]) == "tenant"
    assert widest([Effect("a", "UPDATE", "galaxy")]) == "system"
    assert [reach(scope) for scope in SCOPES] == [0, 1, 2, 3, 4]

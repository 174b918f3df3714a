"""The gate asks by five rules, and can only ever make an answer stricter."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock import Caller, Effect, Failure, Interlock, Preview, tool
from interlock.authority.approval_gate import SCOPES, Approval, Gate, approval_required, gate, reach, widest
from interlock.call.phases import Behavior, Decision
from interlock.contract.contract import Contract
from interlock.contract.manifest import MutationClass
from interlock.settings import load_settings
from tests import sample
from tests.authority.questions import contract
from tests.sample import Text
from tests.support.calls import admit

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


KITS = pytest.mark.part_of("HITL-01", rest="kit rules, of which there are none yet")


@KITS
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


@KITS
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


def of_scope(mutation_class: str, scope: str) -> Contract:
    """A tool of this class, one of whose effects reaches so far."""
    if mutation_class == "read_only":
        return TOOLS["read_only"]
    effects = [{"resource": "a", "operation": "UPDATE", "scope": "field"}]
    effects.append({"resource": "b", "operation": "UPDATE", "scope": scope})
    return contract(mutation_class=mutation_class, compensable=True, previews=True, effects=effects)


MADE = {(one, scope): of_scope(one, scope) for one in get_args(MutationClass) for scope in ORDER}


@KITS
@given(
    CLASSES, st.sampled_from(["allow", "passthrough"]), THRESHOLDS, THRESHOLDS, ENVIRONMENTS,
    st.sampled_from(list(ORDER)), st.sampled_from(list(ORDER)), APPROVALS, st.booleans(), st.integers(0, 2),
)  # fmt: skip
def test_the_gate_asks_exactly_where_the_table_says_so(
    mutation_class: MutationClass,
    behavior: Behavior,
    trust: int,
    theta_auto: int,
    environment: str,
    scope: str,
    sigma_critical: str,
    otherwise: Approval,
    ask_all_writes: bool,
    tier: int,
) -> None:
    settings = Gate(
        environment=environment, theta_auto=theta_auto, sigma_critical=sigma_critical, otherwise=otherwise,
        ask_all_writes=ask_all_writes,
    )  # fmt: skip
    asked = gate(decision(behavior), MADE[mutation_class, scope], trust=trust, settings=settings, tier=tier)
    far = ORDER[scope] >= ORDER[sigma_critical]
    row = TABLE[mutation_class, trust >= theta_auto, environment not in NOT_PRODUCTION, far]
    said = "yes" if ask_all_writes and mutation_class != "read_only" else row or otherwise
    assert (asked is not None) == (said == "yes")
    assert asked is None or (asked.behavior, asked.rules[-1]) == ("ask", "gate:approval")


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="demo",
    effects=[Effect("list:{name}", "UPDATE", "tenant")],
)  # fmt: skip
async def rename_all(name: Text) -> str:
    """Change something of everybody's at once."""
    return name


@rename_all.preview
def _(name: str) -> Preview:
    return Preview(impact=name)


@rename_all.compensate
async def _(result: str) -> None: ...


@KITS
@pytest.mark.parametrize("from_a_file", [True, False])
@pytest.mark.parametrize(
    ("settings", "trust", "narrow", "wide"),
    [
        # demo.increment reaches one resource, demo.rename_all the tenant. True: a person is asked.
        ({"environment": "PROD", "sigma_critical": "resource"}, 100, True, True),
        ({"environment": "PROD", "sigma_critical": "tenant"}, 100, False, True),
        ({"environment": "PROD", "sigma_critical": "system"}, 100, False, False),
        ({"environment": "eu-west"}, 100, False, True),
        ({"environment": "staging", "sigma_critical": "field"}, 100, False, False),
        ({"environment": "local", "approval_otherwise": "yes"}, 50, False, False),
        ({"environment": "local", "approval_otherwise": "yes"}, 49, True, True),
        ({"environment": "local", "approval_otherwise": "yes", "theta_auto": 80}, 80, False, False),
        ({"environment": "local", "approval_otherwise": "yes", "theta_auto": 80}, 79, True, True),
        ({"environment": "local", "approval_otherwise": "policy", "theta_auto": 80}, 79, False, False),
        ({"environment": "PROD", "approval_otherwise": "yes", "sigma_critical": "system"}, 100, True, True),
        ({"environment": "local", "ask_all_writes": True}, 100, True, True),
    ],
)
async def test_the_thresholds_come_from_the_configuration(
    tmp_path: Path, settings: dict[str, Any], trust: int, narrow: bool, wide: bool, from_a_file: bool
) -> None:
    sample.reset()
    home = tmp_path / "home"
    home.mkdir()
    (home / "policy.cedar").write_text("permit (principal, action, resource);\n")
    if from_a_file:
        said = (f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
        (home / "settings.toml").write_text("".join(said))
    caller = Caller(id="local:ann", trust=trust)
    async with Interlock.open(home, housekeeping=False, **({} if from_a_file else settings)) as app:
        await admit(app, sample.increment, rename_all)
        # What a caller sends along changes nothing: these are not theirs to say.
        native = {"environment": "local", "trust": 100, "scope": "field", "mutation_class": "read_only"}
        one = await app.call("demo.increment", name="a", key="1", caller=caller, native=native)
        all_of_them = await app.call("demo.rename_all", name="a", key="2", caller=caller, native=native)
    assert (one.pending, all_of_them.pending) == (narrow, wide)
    assert (one.ok, all_of_them.ok) == (not narrow, not wide)
    assert sample.world.runs == (0 if narrow else 1)


def test_a_threshold_that_is_misspelled_is_refused_and_does_not_open_the_gate(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('sigma_critical = "tennant"\n')
    with pytest.raises(Failure) as refused:
        load_settings(tmp_path / "settings.toml")
    assert refused.value.code == "E3108"
    assert "settings.toml, line 1" in refused.value.message


@pytest.mark.supports("HITL-01", "EFFECT-01")
@pytest.mark.parametrize("theta_auto", [0, 100])
@pytest.mark.parametrize("environment", ["local", "PROD"])
def test_no_configuration_lets_through_what_cannot_be_undone(theta_auto: int, environment: str) -> None:
    settings = Gate(environment=environment, theta_auto=theta_auto, sigma_critical="system", otherwise="no")
    gated = gate(decision("allow"), TOOLS["write_irreversible"], trust=100, settings=settings)
    assert gated is not None
    assert gated.behavior == "ask"


@pytest.mark.supports("HITL-01")
def test_a_tier_3_sandbox_is_asked_about_even_to_read() -> None:
    settings = Gate(environment="local", theta_auto=0)
    gated = gate(decision("allow"), TOOLS["read_only"], trust=100, settings=settings, tier=3)
    assert gated is not None
    assert gated.rules == ("x", "gate:sandbox-tier")


@KITS
def test_nothing_the_gate_reads_comes_with_the_call() -> None:
    # The contract is the author's, trust and settings the operator's, the tier the sandbox's; arguments are not there.
    assert set(inspect.signature(gate).parameters) == {"decision", "contract", "trust", "settings", "tier"}


@pytest.mark.supports("HITL-01")
def test_an_effect_reaches_as_far_as_the_farthest_of_them() -> None:
    assert widest([]) == "field"
    assert widest([Effect("a", "UPDATE", "field"), Effect("b", "UPDATE", "tenant")]) == "tenant"
    assert widest([Effect("a", "UPDATE", "galaxy")]) == "system"
    assert [reach(scope) for scope in SCOPES] == [0, 1, 2, 3, 4]

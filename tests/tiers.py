"""The tiers of the tests. Each test has exactly one, by the directory it stands in."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal, get_args

Tier = Literal["unit", "contract", "integration", "behavioural", "chaos"]
TIERS: tuple[Tier, ...] = get_args(Tier)
ROOT = Path(__file__).parent

# The first part of a test's path below tests/, and its tier. docs/explanation/test-tiers.md says when each runs.
TIER_OF: dict[str, Tier] = {
    "core": "unit",
    "data": "unit",
    "privacy": "unit",
    "contract": "unit",
    "net": "unit",
    "call": "unit",
    "authority": "unit",
    "resilience": "unit",
    "search": "contract",
    "surfaces": "contract",
    "selection": "contract",
    "test_tiers.py": "unit",
    "test_changed.py": "unit",
    "test_house.py": "unit",
    "test_dependencies.py": "unit",
    "test_dev.py": "integration",
    "test_workers.py": "integration",
    "test_hops.py": "contract",
    "registry": "contract",
    "clients": "contract",
    "doors": "contract",
    "docs": "contract",
    "golden": "contract",
    "test_requirements.py": "contract",
    "test_upstream_features.py": "contract",
    "approvals": "integration",
    "audit": "integration",
    "effects": "integration",
    "egress": "integration",
    "gateway": "integration",
    "integrations": "integration",
    "service": "integration",
    "store": "integration",
    "telemetry": "integration",
    "upstreams": "integration",
    "window": "integration",
    "cli": "behavioural",
    "deploy": "behavioural",
    "crash": "chaos",
    "faults": "chaos",
    "sandbox": "chaos",
}

# The tests of behaviour. `./dev test --thorough` runs all of them a second time, with stores on PostgreSQL and Redis
# beside them.
BEHAVIOUR = tuple(
    f"tests/{name}"
    for name in (
        "approvals", "audit", "authority", "cli", "clients", "contract", "doors", "effects", "egress", "gateway",
        "golden", "integrations", "privacy", "registry", "resilience", "search", "selection", "service", "surfaces",
        "telemetry", "upstreams", "window",
    )
)  # fmt: skip
# The part of them that `.ci/run` runs there: the directories whose tests use the store the most, calls over each of the
# five wires, and files of the gateway for what is different there, such as lost writes, killed processes and texts.
# Single tests are those of clauses that name both databases.
ON_POSTGRES = (
    "tests/approvals",
    "tests/audit",
    "tests/authority",
    "tests/effects",
    "tests/registry",
    "tests/resilience",
    "tests/doors/test_flow.py",
    "tests/doors/test_parity.py",
    "tests/doors/test_reviewers.py",
    "tests/gateway/test_authority.py",
    "tests/gateway/test_at_rest.py",
    "tests/gateway/test_edges.py",
    "tests/gateway/test_interleavings.py",
    "tests/gateway/test_pinned.py",
    "tests/doors/test_registry.py::test_what_is_registered_over_rest_stays_as_it_is",
    "tests/doors/test_records.py::test_through_every_door_each_outcome_leaves_one_record_with_every_field",
    "tests/doors/test_records.py::test_what_others_called_is_seen_with_the_scope_alone_and_seeing_it_is_on_record",
    "tests/doors/test_records.py::test_credentials_that_came_as_arguments_are_nowhere_whichever_door_they_came_by",
    "tests/gateway/test_secrets.py::test_a_credential_gets_out_in_no_way",
    "tests/gateway/test_results.py::test_credentials_appear_nowhere",
    "tests/gateway/test_checkpoints.py::test_credentials_are_in_no_checkpoint",
    "tests/gateway/test_effects.py::test_only_a_person_who_says_why_lifts_a_quarantine",
    "tests/gateway/test_idempotency.py::test_fifty_simultaneous_submissions_run_once_and_agree",
    "tests/gateway/test_idempotency.py::test_a_duplicate_that_cannot_wait_is_told_that_the_call_is_running",
)


def tier_of(path: Path) -> Tier:
    """The tier of a test file; KeyError where nobody has said which it has."""
    return TIER_OF[path.relative_to(ROOT).parts[0]]


if __name__ == "__main__":
    print(*(BEHAVIOUR if "--behaviour" in sys.argv else ON_POSTGRES))

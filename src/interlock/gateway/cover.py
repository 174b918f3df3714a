"""What a token covers: every link of its chain must name the tool and its version, allow its class, hold in this
environment and reach whatever the call touches.

Callers are held to it at every call, people who decide on a ticket or agree in advance when they say yes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from interlock.approvals.standing import is_range
from interlock.authority.facts import facts
from interlock.core.capability import CLASSES, Capability, ToolGrant, widenings
from interlock.core.contract import Contract
from interlock.core.errors import Failure
from interlock.core.words import quantity

_RESOURCES = frozenset({"resources"})
_WILD = frozenset("*?[")


def check_tool(capability: Capability, contract: Contract, environment: str) -> None:
    """Refuse a tool that the token does not name (E3204), or may not call here (E3206)."""
    if not capability.covers(str(contract.id), contract.version):
        raise Failure("E3204", f"the token does not name {contract.ref}")
    for link in capability.links:
        allowed = link.constraints.get("mutation_class")
        if allowed is not None and CLASSES.index(contract.mutation.mutation_class) > CLASSES.index(allowed):
            raise Failure("E3206", f"the token allows {allowed} at most, and {contract.ref} is more")
        environments = link.constraints.get("environments")
        if environments is not None and environment not in environments:
            raise Failure("E3206", f"the token is not for the environment {environment}")


def resources_of(contract: Contract, arguments: Mapping[str, Any]) -> list[str]:
    """The resources that a call with these arguments touches; E3206 for a value that has no normal form."""
    return facts(contract, arguments, (), _RESOURCES)["resources"]


def check_resources(capability: Capability, contract: Contract, found: Sequence[str]) -> None:
    """Refuse (E3206) what lies outside the token's resources; a call must tell at least one that it touches."""
    if not found:
        words = f"the token is bound to resources, and {contract.ref} does not tell which it touches"
        raise Failure("E3206", words)
    for resource in found:
        if not capability.covers_resource(resource):
            raise Failure("E3206", f"the token does not cover {resource}")


def check_cost(capability: Capability, contract: Contract, calls: int = 1) -> None:
    """Refuse (E3206) calls that are expected to cost more than the token is for."""
    expected = (contract.manifest.estimated_cost or 0.0) * calls
    most = min(
        (link.constraints["max_cost"] for link in capability.links if "max_cost" in link.constraints), default=None
    )
    if most is not None and expected > most:
        raise Failure("E3206", f"the token is for {quantity(most)} at most, and it would cost {quantity(expected)}")


def check_in_advance(
    capability: Capability, contract: Contract, versions: str, patterns: Mapping[str, Any], environment: str
) -> None:
    """Refuse calls to come, of a range of versions and with arguments of a pattern, but those the token covers."""
    check_tool(capability, contract, environment)
    whole = ToolGrant(str(contract.id), versions)
    if any(widenings(link, replace(link, tools=(whole,))) for link in capability.links):
        raise Failure("E3204", f"the token does not name all of {whole}")
    bound = capability.bound
    by_class = any("mutation_class" in link.constraints for link in capability.links)
    if (bound or by_class) and versions != contract.version:
        # What another version is and touches, nobody knows.
        raise Failure("E3206", f"the token bounds what a tool may be, so name one version: {contract.version}")
    if bound and any(is_range(one) or (isinstance(one, str) and _WILD.intersection(one)) for one in patterns.values()):
        raise Failure("E3206", "the token is bound to resources, so every argument must be written in full")
    if bound:
        check_resources(capability, contract, resources_of(contract, patterns))

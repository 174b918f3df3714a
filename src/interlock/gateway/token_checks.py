"""Checks of what a token covers.

Every link of its chain must name the tool and its version, allow its class, hold in this environment and cover the
resources of the call. Tokens of callers are checked at every call, tokens of reviewers when they approve.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from interlock.authority.facts import facts, resources_of
from interlock.call.capability import CLASSES, Capability, ToolGrant, widenings
from interlock.contract.argument_bounds import is_value
from interlock.contract.effects import fields_of, predict
from interlock.contract.permissions import Permission, is_below, permissions_of
from interlock.core.errors import Failure
from interlock.core.formatting import quantity

if TYPE_CHECKING:
    from interlock.call.prepared import Prepared
    from interlock.contract.contract import Contract

_RESOURCES_AND_ARGUMENTS = frozenset({"resources", "arguments"})


class BlockedPath(Failure):
    """A path that the caller's token or the tool's permissions do not cover (E3206)."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__("E3206", message)
        self.path = path


def check_tool(capability: Capability, contract: Contract, environment: str) -> None:
    """Refuse a tool that the token does not name (E3204), or may not call here (E3206)."""
    if not capability.covers(contract.address, contract.version):
        raise Failure("E3204", f"the token does not name {contract.ref}")
    for link in capability.links:
        allowed = link.constraints.get("mutation_class")
        if allowed is not None and CLASSES.index(contract.mutation.mutation_class) > CLASSES.index(allowed):
            raise Failure("E3206", f"the token allows {allowed} at most, and {contract.ref} is more")
        environments = link.constraints.get("environments")
        if environments is not None and environment not in environments:
            raise Failure("E3206", f"the token is not for the environment {environment}")
    if capability.bound:
        check_permissions(capability, contract)


def check_permissions(capability: Capability, contract: Contract) -> None:
    """Refuse (E3206) a tool that uses more than a token that names resources covers.

    INVARIANT: a call uses nothing by the permissions of its tool that the token of its caller does not cover.
    """
    for one in _permissions(contract):
        wider = replace(one, mode="write")
        if not (capability.covers_resource(one.resource) or capability.covers_resource(wider.resource)):
            raise Failure("E3206", f"{contract.ref} needs {one.resource}, and the token does not cover it")


def _permissions(contract: Contract) -> tuple[Permission, ...]:
    sandbox = contract.manifest.sandbox
    mounted = () if sandbox is None else sandbox.reads.values()
    listed = permissions_of(contract.auth.required_permissions).listed
    return (*listed, *(Permission("filesystem", path.rstrip("/")) for path in mounted))


def check_paths(tool: Prepared, arguments: Mapping[str, Any]) -> None:
    """Refuse (E3206) arguments that name a path outside those that the tool's permissions list.

    For a tool in this process symbolic links are resolved. A tool in a sandbox finds what it reads below /in, and what
    it writes at its own path.
    """
    held, contract = tool.permissions, tool.contract
    roots, writable = set(held.readable), set(held.writable)
    if tool.isolated:
        roots |= {f"/in{path}" for path in held.only_readable}
        roots |= {f"/in/{name}" for name in contract.manifest.sandbox.reads} if contract.manifest.sandbox else set()
        roots.add("/tmp")  # noqa: S108 - the sandbox's own, private to the call
    else:
        roots |= {os.path.realpath(path) for path in roots}
        writable |= {os.path.realpath(path) for path in writable}
    effects = contract.mutation.effects
    found = facts(contract, arguments, fields_of(effects), _RESOURCES_AND_ARGUMENTS)
    changed = {change.resource for change in predict(effects, found["arguments"])}
    for resource in found["resources"]:
        if not resource.startswith("file:"):
            continue
        path = _path_in(resource)
        if not any(is_below(path, root) for root in roots):
            raise BlockedPath(f"{contract.ref} lists no permission for `{path[:200]}`", path)
        if resource in changed and not any(is_below(path, root) for root in writable):
            raise BlockedPath(f"{contract.ref} lists no permission to write `{path[:200]}`", path)


def _path_in(resource: str) -> str:
    path = resource.removeprefix("file:")
    return path[2:] if path.startswith("///") else path


def reach_of(contract: Contract, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return everything that a call with these arguments may use: its resources and those of its permissions."""
    return (*resources_of(contract, arguments), *(one.resource for one in _permissions(contract)))


def check_resources(capability: Capability, contract: Contract, resources: Sequence[str]) -> None:
    """Refuse (E3206) resources that the token does not cover; a call must name at least one.

    A sandboxed tool that lists permissions needs to name none: it cannot reach anything else.
    """
    stated = contract.manifest.sandbox is not None and contract.auth.required_permissions
    if not resources and not stated:
        words = f"the token is bound to resources, and {contract.ref} does not tell which it touches"
        raise Failure("E3206", words)
    for resource in resources:
        if not capability.covers_resource(resource):
            words = f"the token does not cover {resource}"
            raise BlockedPath(words, _path_in(resource)) if resource.startswith("file:") else Failure("E3206", words)


def check_cost(capability: Capability, contract: Contract, calls: int = 1) -> None:
    """Refuse (E3206) calls that are expected to cost more than the token allows."""
    expected = (contract.manifest.estimated_cost or 0.0) * calls
    most = min(
        (link.constraints["max_cost"] for link in capability.links if "max_cost" in link.constraints), default=None
    )
    if most is not None and expected > most:
        raise Failure("E3206", f"the token is for {quantity(most)} at most, and it would cost {quantity(expected)}")


def check_in_advance(
    capability: Capability, contract: Contract, versions: str, patterns: Mapping[str, Any], environment: str
) -> None:
    """Refuse future calls, of a range of versions and with a pattern of arguments, that the token does not cover."""
    check_tool(capability, contract, environment)
    whole = ToolGrant(contract.address, versions)
    if any(widenings(link, replace(link, tools=(whole,))) for link in capability.links):
        raise Failure("E3204", f"the token does not name all of {whole}")
    bound = capability.bound
    by_class = any("mutation_class" in link.constraints for link in capability.links)
    if (bound or by_class) and versions != contract.version:
        # Nothing is known about the resources of other versions.
        raise Failure("E3206", f"the token bounds what a tool may be, so name one version: {contract.version}")
    if bound and not all(map(is_value, patterns.values())):
        raise Failure("E3206", "the token is bound to resources, so every argument must be written in full")
    if bound:
        check_resources(capability, contract, resources_of(contract, patterns))

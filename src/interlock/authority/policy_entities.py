"""A caller and a tool in Cedar's terms: all that is needed to ask which tools a caller may ever use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from interlock.authority.approval_gate import widest
from interlock.authority.cedar import INVOKE, Rules, Slice, Uid
from interlock.core.errors import Failure

if TYPE_CHECKING:
    from cedarpy import Entities

    from interlock.call.context import Caller
    from interlock.contract.contract import Contract
    from interlock.data.schema import Json

# The context of a question that says nothing of a call.
NOTHING = b"{}"

_KINDS = {"human": "User", "agent": "Agent", "service": "Service"}


def _principal(caller: Caller) -> Uid:
    # An agent without a stated kind is an agent, whatever its user is.
    kind = "agent" if caller.agent is not None and caller.kind == "human" else caller.kind
    return _KINDS[kind], caller.acting


def rules_near(caller: Caller, address: str, rules: Rules) -> Slice:
    """Return the rules that can apply when a caller calls a tool."""
    return rules.slice(_principal(caller), (("Group", group) for group in caller.groups), address)


def entities_of(caller: Caller, contract: Contract, environment: str) -> tuple[Json, Entities]:
    """Return the request, except for its context, and the entities it names."""
    import cedarpy

    kind, name = _principal(caller)
    address, manifest = contract.address, contract.manifest
    request = {
        "principal": {"type": kind, "id": name},
        "action": {"type": "Action", "id": address},
        "resource": {"type": "Tool", "id": address},
    }
    principal = {
        "id": caller.acting,
        "trust": caller.trust,
        "tenant": caller.tenant,
        "scopes": sorted(caller.scopes),
        "on_behalf_of": caller.id,
    }
    tool = {
        "address": address,
        "name": contract.id.name,
        "version": contract.version,
        "namespace": contract.id.namespace,
        "mutation_class": contract.mutation.mutation_class,
        "tier": 0 if manifest.sandbox is None else manifest.tier,
        "tags": sorted(manifest.tags),
        "environment": environment,
        "permissions": sorted(contract.auth.required_permissions),
        "scope": widest(contract.mutation.effects),
        "external_io": manifest.external_io,
    }
    groups = [{"type": "Group", "id": group} for group in sorted(caller.groups)]
    entities = [
        {"uid": request["principal"], "attrs": principal, "parents": groups},
        {"uid": request["action"], "attrs": {}, "parents": [{"type": "Action", "id": INVOKE}]},
        {"uid": request["resource"], "attrs": tool, "parents": [{"type": "Namespace", "id": contract.id.namespace}]},
    ]
    try:
        text = orjson.dumps(entities).decode()
        return request, cedarpy.Entities.from_json_str(text)  # pyright: ignore[reportUnknownMemberType] - its types leave dicts open
    except (TypeError, ValueError):
        raise Failure("E3206", "the caller's name or the tool's is not valid text") from None

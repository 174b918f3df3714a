"""Exports a contract as documents of the standard, for readers outside."""

from __future__ import annotations

import re
from collections.abc import Mapping

from interlock.contract.contract import Contract
from interlock.contract.executors import PROTOCOLS
from interlock.contract.manifest import HandlerName, LifecycleState, ToolKind
from interlock.contract.permissions import permissions_of
from interlock.contract.standard import (
    LIFECYCLE_OF_REGISTRY_STATE,
    Execution,
    ExecutionKind,
    Identity,
    Persistence,
    Safety,
    Schemas,
    ToolDeclaration,
    ToolExecutionProfile,
    ToolInputContract,
    ToolInterface,
    ToolOutputContract,
    ToolPermissionProfile,
)
from interlock.data.bounds import preview_chars
from interlock.data.schema import Json
from interlock.data.subschemas import COMMAND, HOST, PATH, URL

MEDIA = ("image", "audio", "video")
# How a tool is run and where it came from concerns its operator only.
_OF_OPERATORS = ("execution", "sandbox", "lifecycle_state")


def shown(contract: Contract) -> Json:
    """The manifest for callers: without the fields that they may not set, and without how it is run."""
    document, hidden = contract.document(), contract.input.hidden
    for name in _OF_OPERATORS:
        document.pop(name, None)
    document |= {"parameters": contract.input.model_facing, "result_schema": contract.delivers}
    if hidden and "examples" in document:
        document["examples"] = [{name: one[name] for name in one if name not in hidden} for one in document["examples"]]
    if hidden:
        named = re.compile("|".join(rf"\{{{re.escape(name)}\}}" for name in sorted(hidden)))
        for part in {"effects", "preconditions"} & document.keys():
            document[part] = [{name: named.sub("{}", text) for name, text in one.items()} for one in document[part]]
    document["known_pairs"] = len(contract.manifest.known_pairs)
    document["execution_profile"] = execution_profile(contract).document()
    document["permission_profile"] = permission_profile(contract).document()
    return document


# Kinds of tools that determine where they are executed, whatever runs them here.
_KIND_OF_TOOL: Mapping[ToolKind, ExecutionKind] = {
    "browser_action": "browser",
    "model_task": "model",
    "peer_agent_tool": "peer_agent",
    "native_tool": "native",
}


def execution_profile(contract: Contract) -> ToolExecutionProfile:
    """The tool_execution_profile of a version: how it is run, and which operations its calls support.

    An operation that is not stated is not offered: it is answered as unsupported, and never ignored.
    """
    manifest = contract.manifest
    sandbox = manifest.sandbox
    return ToolExecutionProfile.model_validate(
        {
            "profile_id": f"profile:{contract.ref}",
            "kind": _execution_kind(contract),
            **({} if sandbox is None else {"sandbox_profile": f"tier-{manifest.tier}"}),
            "timeout_ms": round(contract.timeout.default_s * 1000),
            # An isolated tool is ended from outside; a function is notified, and may ignore it.
            "supports_abort": sandbox is not None or manifest.cancellable,
            "supports_progress": manifest.reports_progress,
            "supports_cancellation": manifest.cancellable,
            "supports_resume": False,
        }
    )


def permission_profile(contract: Contract) -> ToolPermissionProfile:
    """The tool_permission_profile of a version: the facts that a permission check judges, and no decision."""
    manifest, mutation = contract.manifest, contract.mutation
    network, permissions = manifest.network_policy, permissions_of(manifest.required_permissions)
    domains = () if network.deny_all_egress else network.allowed_domains
    listed = [f"{host}:{port}" for host, port in permissions.hosts]
    files = [f"filesystem:{one.mode}:{one.target}" for one in permissions.listed if one.family == "filesystem"]
    files += [] if manifest.sandbox is None else [f"filesystem:read:{path}" for path in manifest.sandbox.reads.values()]
    databases = [f"database:{engine}:{mode}" for engine, mode in permissions.databases.items()]
    return ToolPermissionProfile.model_validate(
        {
            "profile_id": f"permissions:{contract.ref}",
            "risk": mutation.mutation_class,
            "data_access": sorted({*files, *databases}),
            "write_effects": [f"{one.operation} {one.resource}" for one in mutation.effects],
            "network_scope": listed or [f"{domain}:{port}" for domain in domains for port in network.allowed_ports],
            "credentials": sorted(f"credential:{name}" for name in permissions.credentials),
            **({} if manifest.sandbox is None else {"sandbox_profile": f"tier-{manifest.tier}"}),
            "requires_approval": mutation.mutation_class == "write_irreversible" or manifest.approval is not None,
            "redaction": "schema, names and patterns" if manifest.redact_results else "schema and names",
        }
    )


def _stated(profile: ToolExecutionProfile) -> Json:
    return profile.model_dump(include={"timeout_ms", "supports_abort", "supports_progress"})


def _execution_kind(contract: Contract) -> ExecutionKind:
    manifest = contract.manifest
    if manifest.tool_kind in _KIND_OF_TOOL:
        return _KIND_OF_TOOL[manifest.tool_kind]
    kind = manifest.runs_as.standard
    if kind == "remote":
        return PROTOCOLS[manifest.protocol].standard
    # A function that names a service does its work partly there.
    return "hybrid" if kind == "local" and manifest.external_service is not None else kind


def declaration(contract: Contract, state: LifecycleState = "active") -> ToolDeclaration:
    """The tool_declaration of a version, without the fields that callers may not set."""
    manifest = contract.manifest
    facts = {
        "tool_id": contract.address,
        "namespace": contract.id.namespace,
        "name": contract.id.name,
        "title": manifest.title or manifest.name,
        "description": manifest.full_description,
        "lifecycle": LIFECYCLE_OF_REGISTRY_STATE[state],
        "tool_kind": manifest.tool_kind,
        "aliases": manifest.aliases,
        "search_hint": manifest.search_hint,
        "input_contract": input_contract(contract),
        "output_contract": output_contract(contract),
        "interface_ref": f"interface:{contract.ref}",
        "execution_profile_ref": f"profile:{contract.ref}",
        "permission_profile_ref": f"permissions:{contract.ref}",
        "annotations": manifest.annotations,
    }
    return ToolDeclaration.model_validate({name: fact for name, fact in facts.items() if fact is not None})


def input_contract(contract: Contract) -> ToolInputContract:
    """The tool_input_contract as callers see it."""
    schema = contract.input
    return ToolInputContract.model_validate(
        {
            "model_input_schema": schema.model_facing,
            "strict": True,
            "defaults": {name: value for name, value in schema.defaults if name not in schema.internal},
            "examples": shown(contract).get("examples", []),
            "sensitive_fields": sorted(schema.sensitive - schema.hidden),
            "mutation_policy": "recorded",  # conversion, defaults and hooks; each difference is in the call's record
        }
    )


def output_contract(contract: Contract) -> ToolOutputContract:
    """The tool_output_contract as callers see it."""
    manifest = contract.manifest
    persisted = manifest.persist_output
    leaves_files = manifest.sandbox is not None and manifest.sandbox.artifacts > 0
    referred = [*(["persisted_ref"] if persisted else []), *(["artifact_ref"] if leaves_files else [])]
    return ToolOutputContract.model_validate(
        {
            "output_schema": contract.delivers,
            "content_types": list(dict.fromkeys(["text", *manifest.content_types, *referred])),
            "media_modes": ["text", *(one for one in MEDIA if one in manifest.content_types)],
            "expected_artifacts": manifest.expected_artifacts or (["*"] if leaves_files else []),
            "expected_resources": manifest.expected_resources,
            "max_inline_chars": manifest.max_inline_chars if persisted else None,
            "result_size_policy": "persist" if persisted else "inline",
            "rendering_boundary": "model_facing_content",
        }
    )


def interface(contract: Contract, *, enabled: bool = True, for_callers: bool = False) -> ToolInterface:
    """The tool_interface of a version: the safety facts its contract states, and the unsafe value for all others.

    With `for_callers`, fields that callers may not set are not in it.
    """
    manifest = contract.manifest
    marked = _marked(contract)
    profile = permission_profile(contract)
    reads = contract.mutation.mutation_class == "read_only"
    return ToolInterface.model_validate(
        {
            "identity": Identity.model_validate(
                {
                    "tool_id": contract.address,
                    "name": contract.id.name,
                    "namespace": contract.id.namespace,
                    "aliases": manifest.aliases,
                }
            ),
            "schemas": Schemas.model_validate(
                {
                    "model_input_schema": contract.input.model_facing,
                    "runtime_input_schema": contract.input.model_facing if for_callers else contract.input.document,
                    "output_schema": contract.output.document,
                    "strict": True,
                    "visibility": "callers" if for_callers else "runtime",
                }
            ),
            "availability": {
                "is_enabled": enabled,
                "setup_state": "ready",  # admission is the setup; besides, a tool only needs its credentials
                "feature_gates": [],
                "required_credentials": list(profile.credentials or ()),
                "model_support": ["*"],
                "deferred": manifest.execution is not None and manifest.execution.native.get("defer_loading") is True,
            },
            "validation": {
                "parses_schema": True,
                "value_checks": ["check"] if _has(contract, "check") else [],
                "preflight_checks": ["preflight"] if _has(contract, "preflight") else [],
            },
            "permission_matching": {
                "tool_names": [contract.address, *(f"{contract.id.namespace}.{one}" for one in manifest.aliases)],
                "paths": marked[PATH],
                "commands": marked[COMMAND],
                "urls": sorted({*marked[URL], *marked[HOST]}),
                "resources": [] if contract.input.hidden else [one.resource for one in contract.mutation.effects],
            },
            "rendering": {
                "model_result": "model_facing_content",
                "ui_result": "ui_facing_rendering.expanded",
                "ui_progress": "ui_facing_rendering.progress",
                "ui_rejection": "ui_facing_rendering.rejection",
                "ui_error": "ui_facing_rendering.error",
                "ui_grouped": "ui_facing_rendering.grouped",
                "transcript_search_text": "transcript_search_text",
            },
            "safety": Safety.model_validate(
                {
                    "is_read_only": reads,
                    "is_destructive": contract.mutation.mutation_class == "write_irreversible",
                    "is_open_world": manifest.external_io,
                    "is_concurrency_safe": manifest.concurrency_safe,
                    "requires_approval": contract.mutation.mutation_class == "write_irreversible",
                    "requires_user_interaction": False,
                    **({} if manifest.sandbox is None else {"sandbox_profile": f"tier-{manifest.tier}"}),
                    "classifier_input": "permission_input",
                }
            ),
            "execution": Execution.model_validate(_stated(execution_profile(contract))),
            "persistence": Persistence.model_validate(
                {
                    "max_inline_chars": manifest.max_inline_chars,
                    "opt_out": not manifest.persist_output,
                    **({} if manifest.persist_output else {"opt_out_reason": "persist_output is false"}),
                    "preview_chars": preview_chars(manifest.max_inline_chars),
                    "redaction": profile.redaction,
                }
            ),
        }
    )


def _marked(contract: Contract) -> Mapping[str, list[str]]:
    """The parameters that rules match as paths, URLs, hosts and commands, by their names."""
    marked: dict[str, list[str]] = {kind: [] for kind in (PATH, URL, HOST, COMMAND)}
    for name in contract.input.properties:
        if name not in contract.input.hidden:
            for kind in contract.input.places.root.member(name).kinds:
                marked[kind].append(name)
    return marked


def _has(contract: Contract, handler: HandlerName) -> bool:
    execution = contract.manifest.execution
    return execution is not None and handler in execution.handlers

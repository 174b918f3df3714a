"""A contract as the standard's documents: what others read of our tools."""

from __future__ import annotations

from interlock.core.contract import Contract
from interlock.core.manifest import LifecycleState
from interlock.core.objects import (
    LIFECYCLE_OF_REGISTRY_STATE,
    Execution,
    Identity,
    Persistence,
    Safety,
    Schemas,
    ToolDeclaration,
    ToolInputContract,
    ToolInterface,
    ToolOutputContract,
)


def declaration(contract: Contract, state: LifecycleState = "active") -> ToolDeclaration:
    """The tool_declaration of a version. Fields that callers may not set are not in it."""
    manifest = contract.manifest
    facts = {
        "tool_id": str(contract.id),
        "namespace": contract.id.namespace,
        "name": contract.id.name,
        "title": manifest.title or manifest.name,
        "description": manifest.description,
        "lifecycle": LIFECYCLE_OF_REGISTRY_STATE[state],
        "tool_kind": manifest.tool_kind,
        "aliases": manifest.aliases,
        "search_hint": manifest.search_hint,
        "input_contract": input_contract(contract),
        "output_contract": ToolOutputContract.model_validate({"output_schema": contract.output.document}),
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
            "examples": list(contract.manifest.examples),
            "sensitive_fields": sorted(schema.sensitive - schema.internal),
        }
    )


def interface(contract: Contract) -> ToolInterface:
    """The tool_interface of a version: the safety facts its contract states, and the unsafe value for all others."""
    manifest = contract.manifest
    reads = contract.mutation.mutation_class == "read_only"
    return ToolInterface.model_validate(
        {
            "identity": Identity.model_validate(
                {
                    "tool_id": str(contract.id),
                    "name": contract.id.name,
                    "namespace": contract.id.namespace,
                    "aliases": manifest.aliases,
                }
            ),
            "schemas": Schemas.model_validate(
                {
                    "model_input_schema": contract.input.model_facing,
                    "runtime_input_schema": contract.input.document,
                    "output_schema": contract.output.document,
                }
            ),
            "safety": Safety.model_validate(
                {
                    "is_read_only": reads,
                    "is_destructive": contract.mutation.mutation_class == "write_irreversible",
                    "is_open_world": manifest.external_io,
                    "is_concurrency_safe": manifest.concurrency_safe,
                    "requires_approval": contract.mutation.mutation_class == "write_irreversible",
                    "requires_user_interaction": False,
                }
            ),
            "execution": Execution.model_validate({}),
            "persistence": Persistence.model_validate({"max_inline_chars": manifest.max_inline_chars}),
        }
    )

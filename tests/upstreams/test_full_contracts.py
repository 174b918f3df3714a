"""Adapters make full contracts: every part of them, word for word, for LangChain tools, functions and programs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from interlock import Effect, Interlock
from interlock.contract.contract import ERROR_SCHEMA, Contract
from interlock.contract.manifest import Manifest
from interlock.data.schema import Json
from interlock.upstreams.formats import Provider
from tests.support.programs import written
from tests.support.providers import PROVIDERS, TAKES, declared
from tests.support.upstreams import MODULE

ANYTHING = ["string", "object", "array", "number", "boolean", "null"]


def parts(contract: Contract) -> Json:
    """The ten parts of a contract."""
    return {
        "id": str(contract.id),
        "version": contract.version,
        "input": contract.input.document,
        "output": contract.output.document,
        "error": contract.error.document,
        "auth": asdict(contract.auth),
        "timeout": asdict(contract.timeout),
        "idempotency": asdict(contract.idempotency),
        "mutation": asdict(contract.mutation),
        "observability": asdict(contract.observability),
    }


def about(contract: Contract) -> Json:
    """What the manifest says beside the parts, but for the pinned digest of what the upstream said."""
    document: Json = contract.manifest.model_dump(mode="json", exclude_defaults=True)
    pinned = document["execution"].pop("implementation")
    assert len(pinned) == 64
    of_the_parts = (
        "parameters", "result_schema", "idempotency", "observability", "required_permissions", "version", "effects",
        "timeout_class", "mutation_class",
    )  # fmt: skip
    return {name: value for name, value in document.items() if name not in of_the_parts}


READ: Json = {
    "auth": {"required_permissions": ("credentials:maps",), "required_scopes": ()},
    "timeout": {"timeout_class": "long_running", "default_s": 30, "max_s": 300.0},
    "idempotency": {"key_required": False, "window_s": None, "key_from": "caller"},
    "mutation": {"mutation_class": "read_only", "effects": ()},
}
OBSERVED = {"trace": True, "metrics": True}


def write(upstream: str, tool: str) -> Json:
    """The parts of a tool that nobody called harmless: it needs a key, and a person agrees to each call."""
    return {
        "auth": {"required_permissions": ("credentials:maps",), "required_scopes": ()},
        "timeout": {"timeout_class": "async", "default_s": 30, "max_s": 7200.0},
        "idempotency": {"key_required": True, "window_s": None, "key_from": "caller"},
        "mutation": {
            "mutation_class": "write_irreversible",
            "effects": (Effect(resource=f"upstream:{upstream}/{tool}", operation="UPDATE", scope="system"),),
        },
    }


@pytest.mark.proves("EXEC-12")
async def test_a_langchain_tool_has_every_part_of_a_contract(tmp_path: Path) -> None:
    overlay = {"tools": {"shout": {"mutation_class": "read_only"}}}
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        await app.secrets.set("maps", "a-lent-value", by="test")
        config = {"module": MODULE, "credentials": {"token": "maps"}}
        await app.upstreams.add("chain", "langchain", config, by=app.caller, overlay=overlay)
        shout, crash = [(await app.catalog.resolve(f"chain.{name}")).contract for name in ("shout", "crash")]
    text: Json = {"title": "Text", "type": "string"}
    times: Json = {"title": "Times", "type": "integer", "default": 1}
    gives = {"type": ANYTHING}
    common: Json = {"version": "1.0.0", "output": gives, "error": ERROR_SCHEMA, "observability": OBSERVED}
    assert parts(shout) == {
        **common, **READ, "id": "chain.shout",
        "input": {"type": "object", "properties": {"text": text, "times": times}, "required": ["text"]},
    }  # fmt: skip
    assert parts(crash) == {
        **common, **write("chain", "crash"), "id": "chain.crash",
        "input": {"type": "object", "properties": {"text": text}, "required": ["text"]},
    }  # fmt: skip
    assert about(shout) == {
        "tool_id": "shout", "name": "shout", "title": "shout", "namespace": "chain", "provider": "chain",
        "description": "Say a text in capitals, so that nobody misses it.", "external_service": "chain",
        "protocol": "langchain",
        "execution": {
            "kind": "upstream", "target": "chain",
            "native": {"protocol": "langchain", "module": MODULE, "tool": "shout"},
        },
    }  # fmt: skip
    assert about(crash)["previews"] is True


@pytest.mark.proves("EXEC-12")
@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_function_of_a_provider_has_every_part_of_a_contract(tmp_path: Path, provider: Provider) -> None:
    said: Any = {"tools": {"look": {"mutation_class": "read_only", "result_schema": {"type": "string"}}}}
    async with Interlock.open(tmp_path, housekeeping=False) as app:
        await app.secrets.set("maps", "a-lent-value", by="test")
        config: Json = {
            "declarations": [declared(provider, name, TAKES) for name in ("look", "order")],
            "urls": ["http://127.0.0.1:9"], "allow_private": True, "auth": {"kind": "bearer", "secret": "maps"},
        }  # fmt: skip
        await app.upstreams.add("fns", "functions", config, by=app.caller, overlay=said)
        look, order = [(await app.catalog.resolve(f"fns.{name}")).contract for name in ("look", "order")]
    common: Json = {"version": "1.0.0", "input": TAKES, "error": ERROR_SCHEMA, "observability": OBSERVED}
    gives = {"type": ANYTHING}
    assert parts(look) == {**common, **READ, "id": "fns.look", "output": {"type": "string"}}
    assert parts(order) == {**common, **write("fns", "order"), "id": "fns.order", "output": gives}
    assert about(look) == {
        "tool_id": "look", "name": "look", "title": "look", "namespace": "fns", "provider": "fns",
        "description": "Says something about look.", "external_service": "fns", "protocol": "custom",
        "execution": {
            "kind": "upstream", "target": "fns",
            "native": {"protocol": "function_calling", "name": "look", "method": "POST", "path": "/look"},
        },
    }  # fmt: skip
    assert about(order)["previews"] is True


# Programs. The first manifest states everything that a program can state, and each value is another than the default.

NOTE: Json = {
    "type": "object", "properties": {"text": {"type": "string", "description": "the note", "examples": ["hello"]}},
    "required": ["text"], "additionalProperties": False,
}  # fmt: skip
STATED: Json = {
    "tool_id": "post", "namespace": "prog", "version": "2.1.0", "name": "Post", "title": "Post a note",
    "description": "Put a note into a box, for everybody to read.", "provider": "local", "protocol": "custom",
    "parameters": NOTE, "result_schema": {"type": "string", "description": "the note"},
    "error_schema": {"type": "object"}, "required_permissions": ["credentials:box/key"],
    "required_scopes": ["notes:write"], "timeout_default": 20, "timeout_max": 40, "timeout_class": "long_running",
    "retry_policy": {
        "max_attempts": 2, "backoff_multiplier": 1.5, "backoff_max_seconds": 9, "retry_on_status_codes": [503],
        "jitter": "proportional", "jitter_factor": 0.1,
    },
    "circuit_breaker_config": {
        "per": "tool", "failure_threshold": 7, "success_threshold": 2, "timeout_seconds": 30,
        "half_open_max_calls": 5, "window_seconds": 50, "failure_rate": 0.5, "failure_rate_calls": 20,
        "canary_share": 0.25,
    },
    "resource_limits": {"cpu": "500m", "memory": "256Mi", "ephemeral_storage": "64Mi"},
    "network_policy": {"allowed_domains": ["api.example.org"], "allowed_ports": [443], "deny_all_egress": True},
    "external_service": "box",
    "checkpoint_config": {"enabled": True, "micro_interval_seconds": 60, "macro_events": ["done"]},
    "priority": 3, "tags": ["notes"], "changelog": "Notes have a title now.", "breaking_changes": True,
    "documentation_url": "https://example.org/docs", "source_code_url": "https://example.org/source",
    "license": "MIT", "author": {"name": "A. Person", "email": "a@example.org", "url": "https://example.org"},
    "mutation_class": "write_irreversible", "compensation_class": "irreversible",
    "effects": [{"resource": "box:{text}", "operation": "CREATE", "scope": "system"}],
    "idempotency": {"window_seconds": 90_000}, "observability": {"trace": False, "metrics": False, "audit": True},
    "tool_kind": "shell_command", "aliases": ["note"], "search_hint": "write something down",
    "examples": [{"text": "hello"}], "annotations": {"x": 1}, "restart_safe": True, "external_io": False,
    "cancellable": False, "coerce_output": True, "tolerant_output": True, "behaviour_change": True,
    "redact_results": False, "max_inline_chars": 1000, "max_result_bytes": 100_000, "persist_output": False,
    "approval": {
        "timeout_seconds": 60, "escalation_fraction": 0.25, "chain": [{"group": "editors", "after_seconds": 0}],
    },
    "sandbox": {"tier": 1, "pids": 8, "tmp_bytes": 4_096_000, "output_bytes": 1000, "artifacts": 2},
    "expected_artifacts": ["*.txt"], "expected_resources": ["box:*"], "estimated_cost": 0.5,
    "execution": {
        "kind": "program", "target": "printf", "argv": ["printf", "--", "%s", "{text}"], "stdin": "none",
        "parse": "text", "env": {"LANG": "C"}, "cwd": "/usr",
    },
}  # fmt: skip
# The second states what only a read can state, and leaves the rest to the defaults.
PLAIN: Json = {
    "tool_id": "look", "namespace": "prog", "version": "1.0.0", "name": "Look", "provider": "local",
    "description": "Say a text again, word for word.", "protocol": "native", "mutation_class": "read_only",
    "parameters": NOTE, "result_schema": {"type": "string"}, "required_permissions": [], "idempotency": {},
    "observability": {}, "timeout_class": "standard", "concurrency_safe": True, "isolated_calls": True,
    "private_output": True, "known_pairs": [{"input": {"text": "hello"}, "output": "hello"}],
    "recorded_examples": [{"input": {"text": "hello"}, "output": "hello"}],
    "execution": {"kind": "program", "target": "printf", "argv": ["printf", "--", "%s", "{text}"]},
}  # fmt: skip
DEFAULTS: Json = {
    "timeout_default": 30, "timeout_max": None, "error_schema": None, "required_scopes": [],
    "retry_policy": {
        "max_attempts": 3, "backoff_multiplier": 2.0, "backoff_max_seconds": 60,
        "retry_on_status_codes": [429, 500, 502, 503, 504], "jitter": "full", "jitter_factor": 0.2,
    },
    "circuit_breaker_config": {
        "per": "service", "failure_threshold": 5, "success_threshold": 3, "timeout_seconds": 60,
        "half_open_max_calls": 10, "window_seconds": 60, "failure_rate": None, "failure_rate_calls": 10,
        "canary_share": None,
    },
    "resource_limits": {"cpu": "1", "memory": "512Mi", "ephemeral_storage": "1Gi"},
    "network_policy": {"allowed_domains": [], "allowed_ports": [80, 443], "deny_all_egress": False},
    "external_service": None,
    "checkpoint_config": {"enabled": False, "micro_interval_seconds": 30, "macro_events": []},
    "lifecycle_state": "active", "deprecation_date": None, "sunset_date": None, "migration_guide_url": None,
    "replacement_tool_id": None, "priority": 5, "tags": [], "changelog": None, "breaking_changes": False,
    "documentation_url": None, "source_code_url": None, "license": None, "author": None, "compensation_class": None,
    "effects": [], "preconditions": [], "tool_kind": "function", "title": None, "aliases": [], "search_hint": None,
    "examples": [], "known_pairs": [], "recorded_examples": [], "annotations": {}, "compensable": False,
    "previews": False, "versioned": False, "has_fixture": False, "concurrency_safe": False, "isolated_calls": False,
    "restart_safe": False, "external_io": True, "cancellable": True, "paged": False, "coerce_output": False,
    "tolerant_output": False, "behaviour_change": False, "redact_results": True, "max_inline_chars": 25_000,
    "max_result_bytes": None, "persist_output": True, "private_output": False, "content_types": [],
    "expected_artifacts": [], "expected_resources": [], "approval": None, "sandbox": None, "estimated_cost": None,
}  # fmt: skip
RUN: Json = {
    "implementation": None, "handlers": {}, "stdin": "auto", "parse": "text", "env": {}, "cwd": "/tmp", "native": {},
    "undo": None,
}  # fmt: skip
# A program always runs in one.
SANDBOX: Json = {
    "tier": 0, "imports": [], "reads": {}, "pids": 64, "tmp_bytes": 100 * 2**20, "output_bytes": 2**20, "artifacts": 0,
}  # fmt: skip
# Handlers are Python, deprecation is for a version that is published, and `ctx.attach` and cursors are for functions.
NOT_OF_PROGRAMS = {
    "has_fixture", "compensable", "versioned", "preconditions", "lifecycle_state", "deprecation_date", "sunset_date",
    "migration_guide_url", "replacement_tool_id", "content_types", "paged",
}  # fmt: skip


@pytest.mark.proves("EXEC-12")
async def test_a_program_has_every_part_of_a_contract_as_its_manifest_states_it(tmp_path: Path) -> None:
    path = written(tmp_path / "programs.json", STATED, PLAIN)
    async with Interlock.open(tmp_path / "home", housekeeping=False) as app:
        await app.secrets.set("box/key", "a-lent-value", by="test")
        assert [one.verdict.refused for one in await app.add_from(path)] == [{}, {}]
    # What is registered is what the next process reads from the store.
    async with Interlock.open(tmp_path / "home", housekeeping=False) as app:
        post, look = [(await app.catalog.resolve(f"prog.{name}")).contract for name in ("post", "look")]
    assert parts(post) == {
        "id": "prog.post", "version": "2.1.0", "input": NOTE, "output": STATED["result_schema"],
        "error": {"type": "object"},
        "auth": {"required_permissions": ("credentials:box/key",), "required_scopes": ("notes:write",)},
        "timeout": {"timeout_class": "long_running", "default_s": 20, "max_s": 40.0},
        "idempotency": {"key_required": True, "window_s": 90_000, "key_from": "caller"},
        "mutation": {
            "mutation_class": "write_irreversible",
            "effects": (Effect(resource="box:{text}", operation="CREATE", scope="system"),),
        },
        "observability": {"trace": False, "metrics": False},
    }  # fmt: skip
    assert parts(look) == {
        "id": "prog.look", "version": "1.0.0", "input": NOTE, "output": {"type": "string"}, "error": ERROR_SCHEMA,
        "auth": {"required_permissions": (), "required_scopes": ()},
        "timeout": {"timeout_class": "standard", "default_s": 5.0, "max_s": 5.0},
        "idempotency": {"key_required": False, "window_s": None, "key_from": "caller"},
        "mutation": {"mutation_class": "read_only", "effects": ()},
        "observability": OBSERVED,
    }  # fmt: skip
    # A program has no handler for a preview: it is made from `effects`, and that it has one is added.
    assert post.manifest.model_dump(mode="json", exclude_unset=True) == {**STATED, "previews": True}
    whole: Json = look.manifest.model_dump(mode="json")
    assert whole == {
        **DEFAULTS, **PLAIN,
        "idempotency": {"key": "caller", "window_seconds": None},
        "observability": {"trace": True, "metrics": True, "audit": True},
        "execution": {**RUN, **PLAIN["execution"]},
        "sandbox": SANDBOX,
    }  # fmt: skip
    assert STATED.keys() | PLAIN.keys() | {"previews"} | NOT_OF_PROGRAMS == Manifest.model_fields.keys()
    assert not {name for name in STATED if name in DEFAULTS and STATED[name] == DEFAULTS[name]}

"""Adapters make full contracts: every part of them, word for word, for LangChain tools and provider functions."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from interlock import Effect, Interlock
from interlock.contract.contract import ERROR_SCHEMA, Contract
from interlock.data.schema import Json
from interlock.upstreams.formats import Provider
from tests.upstreams.test_functions import PROVIDERS, TAKES, declared
from tests.upstreams.test_langchain import MODULE

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
    "idempotency": {"key_required": False, "window_s": None},
    "mutation": {"mutation_class": "read_only", "effects": ()},
}
OBSERVED = {"trace": True, "metrics": True}


def write(upstream: str, tool: str) -> Json:
    """The parts of a tool that nobody called harmless: it needs a key, and a person agrees to each call."""
    return {
        "auth": {"required_permissions": ("credentials:maps",), "required_scopes": ()},
        "timeout": {"timeout_class": "async", "default_s": 30, "max_s": 7200.0},
        "idempotency": {"key_required": True, "window_s": None},
        "mutation": {
            "mutation_class": "write_irreversible",
            "effects": (Effect(resource=f"upstream:{upstream}/{tool}", operation="UPDATE", scope="system"),),
        },
    }


@pytest.mark.proves("EXEC-12")
async def test_a_langchain_tool_has_every_part_of_a_contract(tmp_path: Path) -> None:
    overlay = {"tools": {"shout": {"mutation_class": "read_only"}}}
    async with Interlock.open(tmp_path, housekeeping=False) as lock:
        await lock.secrets.set("maps", "a-lent-value", by="test")
        config = {"module": MODULE, "credentials": {"token": "maps"}}
        await lock.upstreams.add("chain", "langchain", config, by=lock.caller, overlay=overlay)
        shout, crash = (lock.catalog.resolve(f"chain.{name}").contract for name in ("shout", "crash"))
    text: Json = {"title": "Text", "type": "string", "description": "The text."}
    times: Json = {"title": "Times", "type": "integer", "default": 1, "description": "The times."}
    gives = {"type": ANYTHING, "description": "What the tool returned: text, or the data it is made of."}
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
    async with Interlock.open(tmp_path, housekeeping=False) as lock:
        await lock.secrets.set("maps", "a-lent-value", by="test")
        config: Json = {
            "declarations": [declared(provider, name, TAKES) for name in ("look", "order")],
            "urls": ["http://127.0.0.1:9"], "allow_private": True, "auth": {"kind": "bearer", "secret": "maps"},
        }  # fmt: skip
        await lock.upstreams.add("fns", "functions", config, by=lock.caller, overlay=said)
        look, order = (lock.catalog.resolve(f"fns.{name}").contract for name in ("look", "order"))
    common: Json = {"version": "1.0.0", "input": TAKES, "error": ERROR_SCHEMA, "observability": OBSERVED}
    gives = {"type": ANYTHING, "description": "What the function gives back."}
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

"""A function that is declared as a tool is offered again through a door: as strictly as its author said, or not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest

from interlock import Caller, Effect, Failure, Field, Interlock, Preview, demo_tools, tool
from interlock.api.service import Service
from interlock.contract.declare import Tool
from interlock.contract.manifest import Approval, ApprovalStep

Json = dict[str, Any]
ROOT = Caller(id="local:root", scopes=frozenset({"tools:admin"}))
HERE = __name__
GUARDS = Approval(timeout_seconds=600, escalation_fraction=0.5, chain=(ApprovalStep(group="guards", after_seconds=0),))
runs: list[str] = []


@tool(
    namespace="vault",
    version="1.0.0",
    mutation_class="write_irreversible",
    effects=[Effect("safe:{number}", "UPDATE")],
    scopes=["vault:open"],
    permissions=["filesystem:read:/srv/vault"],
    tags=["money"],
    approval=GUARDS,
    estimated_cost=5.0,
    window_s=90_000,
    external_service="vault",
    persist_output=False,
)
def open_safe(
    number: Annotated[int, Field(description="which safe", examples=[1], ge=1, le=9)],
) -> dict[str, str]:
    """Open a safe, which cannot be undone."""
    runs.append(f"safe {number}")
    return {"content": "gold"}


@open_safe.preview
def _would_open(number: int) -> Preview:
    return Preview(impact=f"safe {number} would be open")


@open_safe.check
def _closed_now(number: int) -> list[str]:
    return []


def ring(**_: Any) -> list[str]:
    """A function of the same module that is no handler of the tool."""
    runs.append("rung")
    return []


@tool(namespace="vault", version="1.0.0", mutation_class="read_only", restart_safe=True)
def owner(
    path: Annotated[str, Field(description="where", examples=["a"], json_schema_extra={"x-path": True})],
) -> Annotated[str, Field(json_schema_extra={"x-disclose": "vault:names"})]:
    """Say whose a safe is, for those who may know."""
    runs.append(path)
    return "ann"


def restated(declared: Tool[..., Any], **edits: Any) -> Json:
    """What a manifest would say to offer a function again, word for word; with some of it changed."""
    said = declared.manifest.document()
    named = {name: f"{HERE}:{function.__name__}" for name, function in declared.handlers.items()}
    execution = {"target": said["execution"]["target"], "handlers": named}
    return {**said, "tool_id": "peek", "namespace": "stats", "execution": execution, **edits}


async def offer(app: Interlock, manifest: Json) -> Failure | None:
    runs.clear()
    try:
        await Service(app).registration.register(manifest, by=ROOT)
    except Failure as failure:
        return failure
    return None


OPEN: Json = {"type": "object", "properties": {"number": {"type": "integer", "description": "x", "examples": [1]}}}
LOOSER: dict[str, Any] = {
    "mutation_class": "read_only",
    "parameters": {**OPEN, "required": ["number"]},
    "effects": [{"resource": "nothing", "operation": "UPDATE"}],
    "required_permissions": [],
    "required_scopes": [],
    "tags": [],
    "approval": {"chain": [{"group": "friends"}]},
    "estimated_cost": 0.5,
    "idempotency": {"window_seconds": 60},
    "external_service": "elsewhere",
    "persist_output": True,
    "concurrency_safe": True,
    "restart_safe": True,
    "tolerant_output": True,
    "coerce_output": True,
    "redact_results": False,
    "external_io": False,
    "resource_limits": {"memory": "8Gi"},
    "network_policy": {"deny_all_egress": True},
    "protocol": "custom",
}


@pytest.mark.parametrize("field", LOOSER)
async def test_a_function_is_never_offered_again_under_less_than_its_author_said(home: Path, field: str) -> None:
    async with Interlock.open(home, housekeeping=False) as app:
        # A read that had effects would be refused for that alone.
        also: Json = {"effects": []} if field == "mutation_class" else {}
        failure = await offer(app, restated(open_safe, **{field: LOOSER[field]}, **also))
        assert failure is not None
        assert (failure.code, runs) == ("E3105", [])
        assert f"/{field}" in {fault["pointer"] for fault in (failure.details or {})["faults"]}
        assert not await app.catalog.versions("stats.peek")


async def test_a_function_is_offered_again_as_declared_or_more_strictly(home: Path) -> None:
    stricter = {
        "parameters": {**OPEN, "properties": {"number": {**OPEN["properties"]["number"], "minimum": 2, "maximum": 3,
        "examples": [2]}}, "required": ["number"]},
        "tags": ["money", "rare"], "required_scopes": ["vault:open", "vault:rare"], "estimated_cost": 9.0,
    }  # fmt: skip
    async with Interlock.open(home, housekeeping=False) as app:
        assert await offer(app, restated(open_safe)) is None
        assert await offer(app, restated(open_safe, tool_id="rare", **stricter)) is None
        assert await offer(app, restated(owner, tool_id="owner")) is None
        assert (await app.catalog.resolve("stats.rare")).contract.mutation.mutation_class == "write_irreversible"
    # Of what cannot be undone the contract tests run the preview; of a read, its examples.
    assert runs == ["a"]


async def test_what_is_private_or_dangerous_about_a_value_stays_marked(home: Path) -> None:
    plain: Json = {"type": "object", "properties": {"path": {"type": "string", "description": "where"}}}
    async with Interlock.open(home, housekeeping=False) as app:
        for edit in ({"result_schema": {"type": "string"}}, {"parameters": {**plain, "required": ["path"]}}):
            failure = await offer(app, restated(owner, **edit))
            assert failure is not None
            assert (failure.code, runs) == ("E3105", [])


@pytest.mark.parametrize("name", ["preview", "check", "fixture"])
async def test_the_handlers_around_a_function_are_its_own(home: Path, name: str) -> None:
    own = {one: f"{HERE}:{function.__name__}" for one, function in open_safe.handlers.items()}
    target = f"{HERE}:open_safe"
    async with Interlock.open(home, housekeeping=False) as app:
        for handlers in ({**own, name: f"{HERE}:ring"}, {one: own[one] for one in own if one != name}):
            if handlers == own:
                continue
            facts = {"previews": "preview" in handlers, "has_fixture": "fixture" in handlers}
            failure = await offer(app, restated(open_safe, execution={"target": target, "handlers": handlers}, **facts))
            assert failure is not None
            assert (failure.code, runs) == ("E3105", [])


async def test_nothing_is_mailed_by_offering_the_mailer_as_a_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLOCK_DEMO_LEDGER", str(home / "ledger"))
    lie: Json = {
        **demo_tools.mail_statement.manifest.document(), "tool_id": "peek", "mutation_class": "read_only",
        "effects": [], "previews": False, "execution": {"target": "interlock.demo_tools:mail_statement"},
    }  # fmt: skip
    async with Interlock.open(home, housekeeping=False) as app:
        failure = await offer(app, lie)
    assert failure is not None
    assert (failure.code, (home / "ledger.outbox").exists()) == ("E3105", False)

"""The decision on record names the path because of which a call was refused."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import pytest
import pytest_asyncio

from interlock import Field, Interlock, tool
from interlock.api.calls import Calls
from interlock.call.capability import Capability
from interlock.contract.standard.calls import ToolPermissionDecision
from interlock.data.schema import Json
from tests.support.calls import admit, code
from tests.support.capabilities import Where, bound_to

Paths = Annotated[list[str], Field(description="files", examples=[["/srv/a"]], json_schema_extra={"format": "path"})]
Secret = Annotated[str, Field(description="a file", examples=["/srv/a"], json_schema_extra={"format": "path"})]
ANYTHING = "permit (principal, action, resource);\n"
FORBID = '@id("no") forbid (principal, action, resource) when { %s };\n'
PERMIT = "permit (principal, action, resource) when { %s };\n"


@tool(version="1.0.0", mutation_class="read_only", namespace="blocked")
async def read(path: Where, others: Paths) -> str:
    """Read some files."""
    return path


@tool(version="1.0.0", mutation_class="read_only", namespace="blocked", permissions=["filesystem:read:/srv/data"])
async def listed(path: Where) -> str:
    """Read a file of the data directory."""
    return path


@tool(version="1.0.0", mutation_class="read_only", namespace="blocked")
async def private(password: Secret) -> str:
    """Read a file that nobody is to hear of."""
    return "read"


@pytest_asyncio.fixture
async def app(tmp_path: Path) -> AsyncGenerator[Interlock]:
    async with Interlock.open(tmp_path / "home", housekeeping=False) as opened:
        await admit(opened, read, listed, private)
        yield opened


async def decision(app: Interlock, name: str, capability: Capability | None = None, **arguments: object) -> Json:
    """What the status of a refused call tells of its check."""
    caller = app.caller if capability is None else replace(app.caller, capability=capability)
    result = await app.call(f"blocked.{name}", dict(arguments), caller=caller)
    assert result.pending or code(result) == "E3206"
    (told,) = (await Calls(app).status(result.invocation_id, app.caller))["permission_decisions"]
    ToolPermissionDecision.model_validate(told)
    return told


@pytest.mark.proves("AUTH-10")
@pytest.mark.parametrize(
    ("rules", "path", "others", "blocked"),
    [
        (ANYTHING + FORBID % 'context.paths.contains("/etc")', "/etc/passwd", (), "/etc/passwd"),
        (ANYTHING + FORBID % 'context.paths.contains("/etc")', "/srv/a", ("/srv/b", "/etc/../etc/x/"), "/etc/x"),
        (ANYTHING + FORBID % '!context.all_paths.contains("/srv")', "/srv/a", ("/home/me",), "/home/me"),
        (PERMIT % 'context.all_paths.contains("/srv")', "/srv/a", ("/srv/b", "/var/c"), "/var/c"),
        (ANYTHING + FORBID % 'context.arguments.path like "/etc/*"', "/srv/../etc/a", ("/srv/b",), "/etc/a"),
        (PERMIT % 'context.arguments.path like "/srv/*"', "/etc/b", ("/srv/b",), "/etc/b"),
        (ANYTHING + FORBID % 'context.paths.contains("/etc") && !context.approved', "/etc/d", (), "/etc/d"),
        # Rules on something else, beside rules on paths and without them.
        (ANYTHING + FORBID % 'context.door == "library"', "/etc/passwd", (), None),
        ('permit (principal, action, resource) when { context.door == "none" };\n', "/etc/passwd", (), None),
        (
            ANYTHING + FORBID % 'context.paths.contains("/etc")' + FORBID.replace("no", "never") % "true",
            "/srv/a", (), None,
        ),
    ],
)  # fmt: skip
async def test_a_decision_names_the_path_that_a_rule_refuses(
    app: Interlock, rules: str, path: str, others: Sequence[str], blocked: str | None
) -> None:
    app.home.policy.write_text(rules)
    told = await decision(app, "read", path=path, others=list(others))
    assert told["blocked_path"] == blocked
    assert told["behavior"] == ("ask" if "approved" in rules else "deny")


@pytest.mark.proves("AUTH-10")
async def test_a_decision_names_the_path_that_a_permission_or_a_token_does_not_cover(app: Interlock) -> None:
    app.home.policy.write_text(ANYTHING)
    told = await decision(app, "listed", path="/srv/data/../other/a")
    assert (told["behavior"], told["source"], told["blocked_path"]) == ("deny", "permissions", "/srv/other/a")
    assert told["reason"] == "blocked.listed@1.0.0 lists no permission for `[path]`"
    token = bound_to("file:/srv/data/*")
    told = await decision(app, "read", token, path="/srv/data/a", others=["/etc/passwd"])
    assert (told["behavior"], told["source"], told["blocked_path"]) == ("deny", "token", "/etc/passwd")


async def test_a_path_that_is_private_or_no_path_at_all_is_not_recorded(app: Interlock) -> None:
    app.home.policy.write_text(ANYTHING + FORBID % 'context.paths.contains("/etc")')
    assert (await decision(app, "private", password="/etc/hunter2"))["blocked_path"] is None
    assert (await decision(app, "read", path="/etc/" + "a" * 5000, others=[]))["blocked_path"] is None
    told = await decision(app, "read", bound_to("file:/srv/*"), path="/srv/" + "../" * 3 + "a" * 5000, others=[])
    assert told["blocked_path"] is None


async def test_a_path_is_named_as_it_was_written_and_not_by_where_its_links_lead(
    app: Interlock, tmp_path: Path
) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "hidden")
    rules = (
        FORBID % f'context.paths.contains("{tmp_path}/hidden")',
        FORBID % f'context.arguments.path like "{tmp_path}/hidden/*"',
    )
    for rule in rules:
        app.home.policy.write_text(ANYTHING + rule)
        told = await decision(app, "read", path=f"{tmp_path}/link/./a", others=[])
        assert told["blocked_path"] == f"{tmp_path}/link/a"
    relative = os.path.relpath(f"{tmp_path}/link/a")  # noqa: ASYNC240 - nothing waits
    assert (await decision(app, "read", path=relative, others=[]))["blocked_path"] == relative
    token = bound_to(f"file:{tmp_path}/link/*")
    assert (await decision(app, "read", token, path=f"{tmp_path}/link/b", others=[]))["blocked_path"].endswith("link/b")

"""Trying tools out: contract tests in a scratch home, where everything is allowed and all of it is thrown away."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from interlock.authority.secrets import SecretSource
from interlock.call.connector import Connector
from interlock.call.context import Caller
from interlock.call.results import Result
from interlock.contract.declare import Tool
from interlock.registry import admission
from interlock.registry.admission import Evidence
from interlock.registry.catalog import contract_digest
from interlock.settings import Settings
from interlock.store.home import Home
from interlock.trials import Trial, try_tool

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock

Connect = Callable[[str], Connector]
Open = Callable[..., AbstractAsyncContextManager["Interlock"]]

_OPEN_POLICY = """
@id("scratch")
permit (principal, action, resource);
"""


@asynccontextmanager
async def scratch_home(
    open_home: Open, settings: Settings, secrets: SecretSource, connect: Connect
) -> AsyncGenerator[Interlock]:
    """A home for contract tests: everything is allowed there, and all of it is thrown away."""
    with tempfile.TemporaryDirectory(prefix="interlock-") as directory:
        home = Home(directory)
        home.prepare()
        home.policy.write_text(_OPEN_POLICY)
        said = settings.model_dump(include={"strict_redaction", "redact_names", "no_pattern_redaction"})
        async with open_home(directory, **said, housekeeping=False, otlp_endpoint="", hooks=()) as lock:
            lock.lend_from(secrets)
            lock.connect_through(connect)
            yield lock


async def try_in(scratch: Interlock, tool: Tool[..., Any], *, live: bool = False) -> Trial:
    """Run a tool's contract tests there. With `live`, write tools really run."""
    digest = contract_digest(tool)
    pretend = Evidence(digest, True, "trial", "")
    await scratch.journal.commit(admission.publish(tool.manifest, digest, "library:", pretend, "trial"))
    scratch.catalog.attach(tool)
    # Whoever tries a tool out holds what its callers must hold.
    scopes = scratch.caller.scopes.union(tool.manifest.required_scopes)
    make = partial(scratch.request, caller=replace(scratch.caller, scopes=scopes))
    return await try_tool(scratch.gateway, tool, make, live=live, agree=lambda pending: _agree(scratch, pending))


async def _agree(scratch: Interlock, pending: Result) -> None:
    """The author of a tool agrees to a call of its trial, by the same gate as any reviewer."""
    author = Caller(id="trial:author", groups=frozenset({"approvers", "managers", "admins"}))
    await scratch.approvals.approve(pending.metadata["pending"]["ticketId"], by=author, comment="contract test")

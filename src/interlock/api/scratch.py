"""Contract tests in a temporary data directory, in which every call is allowed."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from interlock.api.requests import make_request
from interlock.call.connector import Connector, RemoteCall
from interlock.call.context import Caller
from interlock.call.results import Result
from interlock.contract.declare import Tool
from interlock.contract.recipes import PinnedStep
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.core.threads import DEFINITIONS
from interlock.registry import admission
from interlock.registry.admission import TrialEvidence
from interlock.registry.catalog import contract_digest
from interlock.store.home import Home
from interlock.store.port import Unit
from interlock.trials import Trial, try_tool

if TYPE_CHECKING:
    from interlock.api.parts import Parts

Open = Callable[..., AbstractAsyncContextManager["Parts"]]

# How long the trials of one scratch data directory wait in all for calls of upstreams that fail.
MOST_LOST_S = 75.0

_OPEN_POLICY = """
@id("scratch")
permit (principal, action, resource);
"""


@asynccontextmanager
async def scratch_home(open_home: Open, parts: Parts) -> AsyncGenerator[Parts]:
    """A data directory for contract tests: everything is allowed there, and all of it is removed afterwards.

    Credentials and connections to upstreams are those of the data directory that the tools are for.
    """
    with tempfile.TemporaryDirectory(prefix="interlock-") as directory:
        home = Home(directory)
        home.prepare()
        home.policy.write_text(_OPEN_POLICY)
        settings = parts.settings.model_dump(include={"strict_redaction", "redact_names", "no_pattern_redaction"})
        settings |= {"breakers": [{"per": "tool"}], "housekeeping": False, "otlp_endpoint": "", "hooks": ()}
        # A file and a policy of its own, wherever those are that the tools are for.
        settings |= {"store": "", "shared_config": False}
        async with open_home(directory, **settings) as scratch:
            scratch.authority.lend_from(parts.authority.lent_from)
            scratch.connect_through(_Connections(parts.connect))
            yield scratch


@dataclass(slots=True)
class _Connections:
    """The connections to upstreams of one scratch data directory, and what they know of its trials.

    `seconds` is the time that trials have waited for calls that failed. `reads` is the latest read of each tool, by the
    digest of its definition: how it was made, how much time it had, and its answer.
    """

    connect: Callable[[str], Connector]
    seconds: float = 0.0
    reads: dict[str, tuple[Connector, RemoteCall, float, Any]] = field(default_factory=dict[str, Any])

    def __call__(self, name: str) -> _Trying:
        return _Trying(self.connect(name), self)

    async def reread(self, step: PinnedStep) -> tuple[Any, Any] | None:
        """The answer of the latest read by a step of a recipe, and the answer of the same read now."""
        known = self.reads.get(step.implementation)
        if known is None:
            return None
        connector, call, allowed_s, before = known
        return before, await connector.call(replace(call, deadline=call.monotonic() + allowed_s, breaker=None))


class _Trying:
    """A connection to an upstream, for trials.

    A trial uses inputs that nobody sent, so a failure of it says nothing about calls: it counts for no breaker of the
    upstream. An upstream that lists its tools and does not answer calls is given up after some time instead.
    """

    def __init__(self, connector: Connector, shared: _Connections) -> None:
        self._connector = connector
        self._shared = shared
        self.mapping = connector.mapping
        self.discover = connector.discover
        self.probe = connector.probe
        self.forget = connector.forget
        self.close = connector.close

    async def call(self, call: RemoteCall) -> Any:
        if self._shared.seconds > MOST_LOST_S:
            words = f"not tried: trials before it waited {MOST_LOST_S:.0f} s for answers that did not come"
            raise Failure("E3502", words, details={"sent": False})
        begun = call.monotonic()
        try:
            answer = await self._connector.call(replace(call, breaker=None))
        except BaseException:  # at its deadline it is cancelled
            self._shared.seconds += call.monotonic() - begun
            raise
        if not call.writes and call.definition is not None:
            self._shared.reads[call.definition] = self._connector, call, call.deadline - begun, answer
        return answer


async def try_in(scratch: Parts, tool: Tool[..., Any], *, live: bool = False) -> Trial:
    """Run a tool's contract tests there. With `live`, write tools really run."""
    await scratch.journal.commit(await DEFINITIONS.run(_publication, tool))
    scratch.catalog.attach(tool)
    # The caller of a trial holds the scopes that the callers of the tool must hold.
    scopes = scratch.caller.scopes.union(tool.manifest.required_scopes)
    make = partial(make_request, caller=replace(scratch.caller, scopes=scopes))
    connections = scratch.connect
    reread = connections.reread if isinstance(connections, _Connections) else None
    agree = partial(_agree, scratch)
    return await try_tool(scratch.gateway, tool, make, live=live, agree=agree, reread=reread)


def _publication(tool: Tool[..., Any]) -> Unit[bool]:
    digest = contract_digest(tool)
    return admission.publish(tool.manifest, digest, "library:", TrialEvidence(digest, True, "trial", ""), "trial")


async def _agree(scratch: Parts, pending: Result) -> None:
    """The author of a tool agrees to a call of its trial, by the same gate as any reviewer."""
    author = Caller(id="trial:author", groups=frozenset({"approvers", "managers", "admins"}))
    await scratch.approvals.approve(pending.metadata["pending"]["ticketId"], by=author, comment="contract test")

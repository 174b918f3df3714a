"""Admission of tools: contract tests in a scratch data directory, the eight conditions, publication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.registry.catalog import contract_digest

# Calls do without admission: what judges and tries tools is loaded when a tool is offered.
if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.api.scratch import Open
    from interlock.call.context import Caller
    from interlock.contract.declare import Tool
    from interlock.registry.admission import AdmissionVerdict, TrialEvidence
    from interlock.trials import Trial

# How many tools are tried out in one scratch data directory.
_TRIED_TOGETHER = 50


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to a tool that was offered."""

    tool: str
    verdict: AdmissionVerdict
    new: bool
    trial: Trial | None = None

    @property
    def admitted(self) -> bool:
        return self.verdict.admitted


class Admissions:
    """Admits tools to one data directory. `open_home` opens the scratch data directory where they are tried out."""

    def __init__(self, parts: Parts, open_home: Open) -> None:
        self._parts = parts
        self._open_home = open_home
        # Told of each tool of an upstream before it is tried out: its name, and how many of how many were tried.
        self.on_trial: Callable[[str, int, int], None] = lambda _tool, _done, _total: None

    async def lift_quarantine(self, tool: str, *, reason: str, by: Caller) -> None:
        """Release a version from quarantine. On record with the reason."""
        from interlock.api.quarantine import lift_quarantine

        await lift_quarantine(self._parts, tool, reason=reason, by=by)

    async def offer(self, tool: Tool[..., Any], origin: str, *, by: Caller) -> Admission:
        """Judge a tool and publish it if all eight conditions hold. Needs `tools:admin` (E3206)."""
        from interlock.registry import admission

        parts = self._parts
        if not by.governs("tools:admin"):
            raise Failure("E3206", "adding tools needs the scope tools:admin")
        manifest = tool.manifest
        digest = contract_digest(tool)
        published = await parts.catalog.versions(manifest.address)
        evidence = await self.evidence(digest)
        trial: Trial | None = None
        if evidence is None:
            before = admission.examine(
                manifest, digest, published, admission.TrialEvidence(digest, True, "pending", "")
            )
            if before.admitted:
                trial = await self.try_out(tool, by=by)
                evidence = trial.evidence(digest)
        verdict = admission.examine(manifest, digest, published, evidence)
        ref = f"{manifest.address}@{manifest.version}"
        if not verdict.admitted:
            return Admission(ref, verdict, False, trial)
        assert evidence is not None
        # They load declarations, as tools that are offered do.
        from interlock.contract.source_text import stored_text
        from interlock.registry.source import source_of
        from interlock.registry.tool_code import code_of

        source = source_of(manifest, origin, parts.home.manifests)
        code = None if parts.home.near else code_of(manifest, origin, parts.home.manifests)
        text = stored_text(tool)
        unit = admission.publish(manifest, digest, origin, evidence, by.acting, source, code, text)
        new = await parts.journal.commit(unit)
        if new:
            parts.observer.mention("tool.declared", "", ref, digest=digest, by=by.acting)
        await parts.catalog.look()
        parts.catalog.attach(tool)
        return Admission(ref, verdict, new, trial)

    async def offer_all(self, target: str, *, by: Caller) -> list[Admission]:
        """Offer every tool found in a .py file, a module or a manifest."""
        from interlock.registry.source import load  # as above

        origin, tools = load(target)
        return [await self.offer(tool, origin, by=by) for tool in tools]

    async def evidence(self, digest: str) -> TrialEvidence | None:
        """The contract tests that passed on exactly this content; None if they failed or never ran."""
        from interlock.registry import admission

        found = await self._parts.journal.read(lambda reader: admission.stored_evidence(reader, digest))
        return found if found is not None and found.passed else None

    async def try_out(self, tool: Tool[..., Any], *, by: Caller, live: bool = False) -> Trial:
        """Run a tool's contract tests. With `live`, write tools really run and the evidence is kept (tools:admin)."""
        from interlock.api.scratch import scratch_home, try_in
        from interlock.registry.admission import record_evidence

        if live and not by.governs("tools:admin"):
            raise Failure("E3206", "recording evidence needs the scope tools:admin")
        async with scratch_home(self._open_home, self._parts) as scratch:
            trial = await try_in(scratch, tool, live=live)
        if live:
            evidence = trial.evidence(contract_digest(tool))
            await self._parts.journal.commit(lambda tx: record_evidence(tx, evidence))
        return trial

    async def try_out_all(self, tools: Sequence[Tool[..., Any]]) -> list[TrialEvidence]:
        """Run the contract tests of many tools, in scratch data directories for some of them each.

        What a data directory compiles of its tools takes memory until it is closed. Parts of a closed one refer to each
        other; they are young, so looking at young objects alone finds them.
        """
        import gc

        found: list[TrialEvidence] = []
        for first in range(0, len(tools), _TRIED_TOGETHER):
            found += await self._try_together(tools[first : first + _TRIED_TOGETHER], first, len(tools))
            gc.collect(0)
        return found

    async def _try_together(self, tools: Sequence[Tool[..., Any]], done: int, total: int) -> list[TrialEvidence]:
        """Run the contract tests of tools in one scratch data directory."""
        from interlock.api.scratch import scratch_home, try_in

        found: list[TrialEvidence] = []
        async with scratch_home(self._open_home, self._parts) as scratch:
            for tool in tools:
                self.on_trial(tool.manifest.address, done + len(found), total)
                found.append((await try_in(scratch, tool)).evidence(contract_digest(tool)))
        return found

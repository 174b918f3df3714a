"""A developer's session with a file of tools that they are writing: drafts after every save, and calls of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock.call.phases import Request
from interlock.contract.refusals import place_of
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.registry import admission
from interlock.registry.admission import TrialEvidence
from interlock.registry.catalog import contract_digest
from interlock.registry.drafts import DRAFTS, Drafts, DraftSource, draft_of, number_draft, stamp_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from interlock.api.interlock import Interlock
    from interlock.call.results import Result
    from interlock.contract.declare import Tool
    from interlock.contract.refusals import DeclarationRefusal
    from interlock.registry.admission import AdmissionVerdict
    from interlock.registry.drafts import Stamp
    from interlock.registry.version import Version
    from interlock.trials import Trial


@dataclass(frozen=True, slots=True)
class Draft:
    """One tool of the file after it was loaded: a draft that can be called, or everything that it was refused for.

    `tool` has the version of the draft, or of a refused tool what is known of its name. `notes` are warnings, and what
    would keep the tool from being published as it stands.
    """

    tool: str
    file: str
    line: int
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    trial: Trial | None = None

    @property
    def callable(self) -> bool:
        return not self.faults


def stamps_of(files: Iterable[Path]) -> dict[Path, Stamp | None]:
    """The stamps of files, which change when one is saved; None for one that is missing."""
    return {path: stamp_of(path) for path in files}


class DraftSession:
    """Drafts of one file, for the local user. Nobody else can call them or learn of them.

    Needs `tools:admin` in person (E3206): the code of the file runs in this process. A token does not do.
    """

    def __init__(self, app: Interlock, path: Path) -> None:
        if app.caller.capability is not None or not app.caller.governs("tools:admin"):
            raise Failure("E3206", "drafts need the scope tools:admin, held in person and not by a token")
        self._app = app
        self._source = DraftSource(path)
        self._drafts = Drafts(app.catalog)
        self._caller = replace(app.caller, drafts=self._drafts.key)

    @property
    def files(self) -> dict[Path, Stamp | None]:
        """The files whose change makes it worth loading again: the file, and what it imports from its own folder.

        Each with what `stamp_of` said of it when it was loaded.
        """
        return self._source.files

    @property
    def drafts(self) -> list[Version]:
        """The drafts that can be called now."""
        return self._drafts.newest

    async def load(self) -> list[Draft]:
        """Load the file, and make drafts of all of its tools that pass admission.

        A file that cannot be loaded to its end leaves the drafts as they were.
        """
        survey = self._source.load()
        drafts = [_refused(one) for one in survey.refused]
        if survey.broken is not None:
            return [*drafts, _refused(survey.broken)]
        ready: list[tuple[Tool[..., Any], Tool[..., Any]]] = []
        names: set[str] = set()
        for tool in survey.tools:
            try:
                ready.append((tool, _provisional(tool, names)))
            except Failure as failure:
                drafts.append(Draft(_name(tool), *place_of(tool.function), faults=(failure.message,)))
        held: list[Tool[..., Any]] = []
        for tool, draft in ready:
            verdict, trial = await self._judge(draft)
            if verdict.admitted:
                held.append(await self._app.journal.commit(number_draft(tool, self._caller.acting)))
            name = _name(held[-1] if verdict.admitted else tool)
            faults = tuple(f"{which}: {fault}" for which, found in verdict.refused.items() for fault in found)
            notes = (*verdict.warnings, *await self._before_publishing(tool))
            drafts.append(Draft(name, *place_of(tool.function), faults=faults, notes=notes, trial=trial))
        self._drafts.hold(held)
        return sorted(drafts, key=lambda one: one.line)

    async def _judge(self, draft: Tool[..., Any]) -> tuple[AdmissionVerdict, Trial | None]:
        """Judge a draft as admission judges a version, contract tests included."""
        verdict = await self._examine(draft, None)
        if not verdict.admitted:
            return verdict, None
        trial = await self._app.admissions.try_out(draft, by=self._caller)
        return await self._examine(draft, trial.evidence(contract_digest(draft))), trial

    async def _examine(self, tool: Tool[..., Any], evidence: TrialEvidence | None) -> AdmissionVerdict:
        digest = contract_digest(tool)
        published = await self._app.catalog.versions(tool.manifest.address)
        return admission.examine(
            tool.manifest, digest, published, evidence or TrialEvidence(digest, True, "pending", "")
        )

    async def _before_publishing(self, tool: Tool[..., Any]) -> list[str]:
        """Return the reasons why a tool cannot be published under the version that it declares."""
        verdict = await self._examine(tool, None)
        return [f"before you add it: {fault}" for fault in verdict.refused.get("version_registered", ())]

    async def call(
        self, name: str, arguments: Any, *, key: str | None = None, dry_run: bool = False, session: str = ""
    ) -> Result:
        """Call a draft by its name through all six phases. What is no draft of this session is refused (E3101)."""
        draft = self.find(name)
        return await self._app.gateway.invoke(
            Request(
                tool=draft.row.address,
                version=draft.row.version,
                arguments=arguments,
                caller=self._caller,
                key=key,
                session=session,
                dry_run=dry_run,
                door=DRAFTS,
            )
        )

    async def undo(self, invocation_id: str, *, key: str) -> Result:
        """Undo a call of a draft. It takes the code of the draft, so only the session that made the call can."""
        return await self._app.undo(invocation_id, key=key, caller=self._caller, door=DRAFTS)

    def find(self, name: str) -> Version:
        """The newest draft of a name, with or without its namespace; E3101 if there is none."""
        found = self._drafts.find(self._caller, *_split(name))
        if found is None:
            there = ", ".join(f"`{one.row.address}`" for one in self.drafts) or "none"
            raise Failure("E3101", f"`{name}` is no draft that can be called; there are: {there}")
        return found


def _provisional(tool: Tool[..., Any], names: set[str]) -> Tool[..., Any]:
    """The draft that is examined and tried, before it has a number."""
    draft = tool.as_version(draft_of(tool.manifest.version, 0))
    if _name(draft) in names:
        raise Failure("E3103", "the file declares this version twice; give one of the two another name")
    names.add(_name(draft))
    return draft


def _split(name: str) -> tuple[str, str | None]:
    address, at, version = name.partition("@")
    return address, version if at else None


def _refused(refusal: DeclarationRefusal) -> Draft:
    return Draft(refusal.name, refusal.file, refusal.line, refusal.faults)


def _name(tool: Tool[..., Any]) -> str:
    return repr(tool).removeprefix("<tool ").removesuffix(">")

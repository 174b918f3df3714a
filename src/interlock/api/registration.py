"""Operations on the catalog: register a manifest, deprecate a version, release one from quarantine."""

from __future__ import annotations

import hashlib
import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import orjson

from interlock.api.files import keep
from interlock.api.quarantine import lift_quarantine, quarantine_entries
from interlock.api.rights import require, require_here
from interlock.call.context import Caller
from interlock.contract.declare import Tool
from interlock.contract.manifest import Manifest, parse_manifest
from interlock.contract.permissions import permissions_of
from interlock.core.errors import Failure
from interlock.data.schema import Fault, Json
from interlock.registry import admission, retirement
from interlock.registry.admission import TrialEvidence
from interlock.registry.strictness import loosenings
from interlock.store import records
from interlock.store.port import Transaction

if TYPE_CHECKING:
    from interlock.api.admission import Admissions
    from interlock.api.parts import Parts


class Registration:
    """Registers, deprecates and releases tools, for callers with `tools:admin`."""

    def __init__(self, parts: Parts, admissions: Admissions) -> None:
        self._parts = parts
        self._admissions = admissions

    async def register(self, document: Any, *, by: Caller) -> Json:
        """Admit the tool of a manifest; E3105 with every gap if it is not fit to be admitted."""
        require_here(by, "tools:admin", "registering a tool")
        manifest = _complete(document)
        await self._refuse_foreign_code(manifest)
        if permissions_of(manifest.required_permissions).credentials:
            require(by, "secrets:admin", "lending stored credentials to a new tool")
        parts = self._parts
        ref = f"{manifest.address}@{manifest.version}"

        def unit(transaction: Transaction) -> None:
            body = records.plain("registry", ref, transaction.now_ms, event="tool.offered", tool=ref, by=by.acting)
            transaction.append("registry", ref, body)

        await parts.journal.commit(unit)
        path = parts.home.manifests / f"{hashlib.sha256(orjson.dumps(document)).hexdigest()}.json"
        known = path.exists()
        keep(path, orjson.dumps(document, option=orjson.OPT_INDENT_2))
        admitted = False
        try:
            (offered,) = await self._admissions.offer_all(str(path), by=parts.caller)
            admitted = offered.admitted
        finally:
            if not admitted and not known:
                path.unlink(missing_ok=True)
        if not admitted:
            raise offered.verdict.failure(offered.tool)
        return {
            "tool_id": manifest.address,
            "version": manifest.version,
            "new": offered.new,
            "warnings": list(offered.verdict.warnings),
        }

    async def _refuse_foreign_code(self, manifest: Manifest) -> None:
        """Refuse (E3105) a manifest that would run code that the operator has not installed.

        INVARIANT: a manifest that comes through a door makes nothing of this machine run that was not a tool before: it
        names a function declared with @tool in a module that serves tools here already, or a program in a sandbox from
        which neither a file of the machine can be seen nor a network reached. Nor does it govern a function less than
        the declaration does, or put other handlers around it: nothing of it runs, not even for its contract tests.
        """
        execution = manifest.execution
        assert execution is not None
        row = manifest.runs_as
        if (manifest.sandbox is not None or row.always_sandboxed) and manifest.tier:
            words = "wants files, environment or network of this machine: interlock tools add, on the machine"
            raise Failure("E3105", f"{manifest.address} {words}")
        if row.provided_by is not None:
            raise Failure("E3105", f"{manifest.address} {row.provided_by}")
        if row.always_sandboxed:
            return
        if not row.in_process:
            raise Failure("E3105", f"{manifest.address} runs outside any sandbox: interlock tools add, on the machine")
        module = execution.target.rpartition(":")[0]
        serving = {row.origin.removeprefix("module:") for row in await self._parts.catalog.rows()}
        loaded = sys.modules.get(module) or (importlib.import_module(module) if module in serving else None)
        found = _named(execution.target, loaded)
        if not isinstance(found, Tool):
            raise Failure(
                "E3105",
                f"`{execution.target}` is no tool that is loaded here: declare it with @tool in a module that was added"
                " with interlock tools add, or describe a program",
            )
        declared = cast("Tool[..., Any]", found)
        faults = loosenings(declared.manifest, manifest)
        handlers = {
            handler: _named(where, loaded) if where.rpartition(":")[0] == module else None
            for handler, where in execution.handlers.items()
        }
        if handlers != declared.handlers:
            own = {handler: f"{module}:{function.__name__}" for handler, function in declared.handlers.items()}
            words = f"must be those that the function is declared with: {orjson.dumps(own).decode()}"
            faults.append(Fault("/execution/handlers", words))
        if faults:
            listing = "; ".join(f"{fault.pointer} {fault.message}" for fault in faults)
            details = {"faults": [fault.document() for fault in faults]}
            raise Failure("E3105", f"{manifest.address} was refused: {listing}", details=details)

    async def deprecate(
        self,
        tool: str,
        version: str,
        *,
        by: Caller,
        successor: str | None = None,
        guide: str | None = None,
        days: int | None = None,
        amend: bool = False,
        anyway: bool = False,
    ) -> Json:
        """Announce the end of one version, or with `amend` correct what was announced."""
        require_here(by, "tools:admin", "retiring a version")
        address = await self._parts.catalog.address(tool)
        stated: Json = {"successor": successor, "migration_guide": guide, "anyway": anyway}
        stated |= {} if days is None else {"grace_days": days}
        unit = (retirement.amend if amend else retirement.deprecate)(address, version, by=by.acting, **stated)
        notice = await self._parts.journal.commit(unit)
        await self._parts.catalog.look()
        return {"tool_id": address, "version": version, "state": "deprecated", "deprecation": notice.document()}

    async def quarantined(self, *, by: Caller) -> list[Json]:
        """The versions that are or were in quarantine, each with the reason."""
        require_here(by, "tools:admin", "listing the quarantine")
        return await quarantine_entries(self._parts)

    async def release(self, tool: str, *, reason: str, by: Caller) -> Json:
        """Release a version from quarantine. Only a person with `tools:admin` may."""
        await lift_quarantine(self._parts, tool, reason=reason, by=by)
        return {"released": tool, "reason": reason}


def _named(target: str, module: ModuleType | None) -> Any:
    """The object that `module:name` names in a module. Only a plain identifier is accepted."""
    name = target.rpartition(":")[2]
    return getattr(module, name, None) if name.isidentifier() else None


# Defaults with which an incomplete manifest is read again, to find its other gaps.
_STAND_INS: Json = {"provider": "local", "protocol": "native"}


def _complete(document: Any) -> Manifest:
    """The manifest, if it says all that admission asks for; E3105 with everything that it lacks, not only the first."""
    gaps: list[Json] = []
    try:
        manifest = parse_manifest(document)
    except Failure as failure:
        gaps += (failure.details or {}).get("faults", [])
        try:
            manifest = parse_manifest({**_STAND_INS, **document} if isinstance(document, dict) else document)
        except Failure:
            raise failure from None
    verdict = admission.examine(manifest, "", {}, TrialEvidence("", True, "pending", ""))
    gaps += [{"pointer": f"/{name}", "message": fault} for name, found in verdict.refused.items() for fault in found]
    if manifest.execution is None:
        gaps.append({"pointer": "/execution", "message": "name what to run: {target: module:function}, or a program"})
    if gaps:
        message = "; ".join(f"{gap['pointer'] or '/'} {gap['message']}" for gap in gaps)
        raise Failure("E3105", f"{manifest.address} was refused: {message}", details={"faults": gaps})
    return manifest

"""Admission: a version becomes available only if all eight conditions hold.

A refusal lists every condition that failed and what to do about each. Nothing is admitted in reduced form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import orjson

from interlock.contract import permissions
from interlock.contract.contract import Contract, class_faults, contract_of
from interlock.contract.effects import manifest_faults
from interlock.contract.manifest import Manifest
from interlock.contract.versions import predecessor
from interlock.contract.wire_names import shortened
from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.registry.compat import VersionSurface, classify, require_bump
from interlock.registry.schema_faults import schema_faults
from interlock.registry.tool_code import allow_code, remember_source
from interlock.store import records, tool_sources, tools

if TYPE_CHECKING:
    from interlock.registry.version import Version
    from interlock.store.port import Reader, Transaction, Unit

Conjunct = Literal[
    "schema_valid",
    "version_registered",
    "auth_policy_defined",
    "timeout_class_assigned",
    "idempotency_specified",
    "mutation_class_labeled",
    "observability_instrumented",
    "contract_tests_passing",
]
CONJUNCTS: tuple[Conjunct, ...] = get_args(Conjunct)


# The mode of contract tests that could not be run to the end, because the upstream of the tool did not answer for now.
UNPROVEN = "unproven"


@dataclass(frozen=True, slots=True)
class TrialEvidence:
    """Contract tests that passed on one exact content, or are to be run again (`UNPROVEN`)."""

    digest: str
    passed: bool
    mode: str
    report: str


@dataclass(frozen=True, slots=True)
class AdmissionVerdict:
    """The conditions that failed, and why; admitted if there are none."""

    refused: Mapping[Conjunct, tuple[str, ...]]
    warnings: tuple[str, ...] = ()
    conflict: bool = False

    @property
    def admitted(self) -> bool:
        return not self.refused

    def failure(self, address: str) -> Failure:
        listing = "; ".join(f"{name}: {', '.join(faults)}" for name, faults in self.refused.items())
        return Failure(
            "E3103" if self.conflict else "E3105",
            f"{address} was refused: {listing}",
            details={"conjuncts": {name: list(faults) for name, faults in self.refused.items()}},
        )


def examine(
    manifest: Manifest, digest: str, published: Mapping[str, Version], evidence: TrialEvidence | None
) -> AdmissionVerdict:
    """Check a manifest against all eight conditions at once."""
    faults: dict[Conjunct, list[str]] = {
        "schema_valid": schema_faults(manifest),
        "version_registered": _version_faults(manifest, digest, published),
        "auth_policy_defined": _permission_faults(manifest),
        "timeout_class_assigned": class_faults(manifest),
        "idempotency_specified": _unless(
            manifest.idempotency is not None, "say idempotency: {} for caller's keys and the default window"
        ),
        "mutation_class_labeled": _mutation_faults(manifest),
        "observability_instrumented": _unless(
            manifest.observability is not None, "say observability: {} for traces, metrics and audit"
        ),
        "contract_tests_passing": _evidence_faults(digest, evidence),
    }
    warnings = ["tool_kind custom is a fallback; choose a named kind"] if manifest.tool_kind == "custom" else []
    warnings += permissions.warnings(manifest.required_permissions or ())
    same = published.get(manifest.version)
    conflict = same is not None and same.row.digest != digest
    return AdmissionVerdict(
        {name: tuple(reasons) for name, reasons in faults.items() if reasons}, tuple(warnings), conflict
    )


def _unless(holds: bool, words: str) -> list[str]:
    return [] if holds else [words]


def _permission_faults(manifest: Manifest) -> list[str]:
    """List why the permissions of a manifest cannot be enforced as they are written."""
    texts = manifest.required_permissions
    if texts is None:
        return ["say required_permissions, [] if it needs none"]
    faults = [f"required_permissions: {fault}" for fault in permissions.faults(texts)]
    listed, network = permissions.permissions_of(texts), manifest.network_policy
    if listed.hosts and network.deny_all_egress:
        faults.append("required_permissions lists a network permission, and network_policy denies all egress")
    for host, port in listed.hosts if network.allowed_domains else ():
        named = any(permissions.names_host(domain, host) for domain in network.allowed_domains)
        if not named or port not in network.allowed_ports:
            faults.append(f"required_permissions lists {host}:{port}, and network_policy does not allow it")
    sandbox = manifest.sandbox
    if sandbox is not None and manifest.tier < 3:
        faults.extend(
            f"filesystem:write:{path} cannot be mounted in a sandbox, which has its own {place};"
            " list a directory elsewhere"
            for path in listed.writable
            if (place := permissions.own_place(path)) is not None
        )
        if listed.writable and manifest.mutation_class == "read_only":
            faults.append(
                f"the tool is read_only, and required_permissions lists filesystem:write:{listed.writable[0]};"
                " list filesystem:read, or declare what the tool changes"
            )
        faults.extend(
            f"sandbox.reads `{name}` and filesystem:read:{path} would both be mounted at /in/{name}; rename the first"
            for name in sandbox.reads
            for path in listed.only_readable
            if path.split("/")[1] == name
        )
    return faults


def _version_faults(manifest: Manifest, digest: str, published: Mapping[str, Version]) -> list[str]:
    same = published.get(manifest.version)
    if same is not None:
        if same.row.digest == digest:
            return []
        return [f"{manifest.version} is published with other content; give the change a new version"]
    if manifest.lifecycle_state != "active":
        return ["a version is published as active; deprecate it afterwards"]
    before = predecessor(manifest.version, published)
    if before is None or manifest.result_schema is None:
        return []
    try:
        difference = classify(_surface(published[before].contract.manifest), _surface(manifest))
        require_bump(before, manifest.version, difference, manifest.breaking_changes)
    except Failure as failure:
        return [failure.message]
    return []


def _surface(manifest: Manifest) -> VersionSurface:
    return VersionSurface(
        input=manifest.parameters,
        output=True if manifest.result_schema is None else manifest.result_schema,
        tolerant_output=manifest.tolerant_output,
        declared_behaviour_change=manifest.behaviour_change,
    )


def _mutation_faults(manifest: Manifest) -> list[str]:
    if manifest.mutation_class is None:
        return ["say mutation_class: read_only, write_reversible or write_irreversible"]
    return manifest_faults(manifest)


def _evidence_faults(digest: str, evidence: TrialEvidence | None) -> list[str]:
    if evidence is None or evidence.digest != digest:
        return ["no contract tests have passed on this exact content"]
    return [] if evidence.passed else [f"contract tests failed: {evidence.report}"]


def publish(
    manifest: Manifest,
    digest: str,
    origin: str,
    evidence: TrialEvidence,
    by: str,
    source: str | None = None,
    code: str | None = None,
    text: bytes | None = None,
) -> Unit[bool]:
    """Unit that makes an admitted version available. False if exactly this content is already there.

    `source`: the digest of the text that is executed when the tool is loaded. `code` identifies the code of a tool
    that is not isolated; if the version is already there, this code is allowed for it too. `text`: the text of a
    sandboxed tool, from which machines without its file run it.
    """
    from interlock.contract.standard.export import permission_profile  # the models of the standard, for publishing only

    contract: Contract = contract_of(manifest)
    address, version, ref = contract.address, contract.version, contract.ref
    state, aliases = manifest.lifecycle_state, [f"{manifest.namespace}.{alias}" for alias in manifest.aliases]
    # The unit has the manifest as bytes alone. A look at an upstream makes hundreds of units before it commits them,
    # and a text with one letter beyond Latin-1 takes twice as much memory.
    document = orjson.dumps(manifest.document())
    profile = permission_profile(contract).document()

    def unit(transaction: Transaction) -> bool:
        # Checked again inside the write: another process may have published since the examination.
        published = tools.digest(transaction, address, version)
        if published is not None:
            if published == digest:
                if text is not None and tool_sources.put(transaction, digest, text):
                    tools.bump_epoch(transaction, (address,))  # machines without its file can run it now
                if code is not None and allow_code(transaction, digest, code):
                    tools.bump_epoch(transaction, (address,))
                    facts = {"event": "tool.code", "tool": ref, "digest": digest, "by": by, "code": code}
                    transaction.append("registry", ref, records.plain("registry", ref, transaction.now_ms, **facts))
                return False
            raise Failure("E3103", f"{ref} is published with other content; give the change a new version")
        _refuse_collisions(transaction, address, aliases)
        tools.insert(
            transaction, address, version, digest=digest, state=state, manifest=document.decode(), origin=origin,
            published_ms=transaction.now_ms,
        )  # fmt: skip
        for alias in aliases:
            tools.insert_alias(transaction, alias, address)
        record_evidence(transaction, evidence)
        if source is not None:
            remember_source(transaction, digest, source)
        if text is not None:
            tool_sources.put(transaction, digest, text)
        if code is not None:
            allow_code(transaction, digest, code)
        tools.bump_epoch(transaction, (address,))
        body = records.plain(
            "registry", ref, transaction.now_ms, event="tool.declared", tool=ref, digest=digest, by=by,
            permissionProfile=profile,
        )  # fmt: skip
        transaction.append("registry", ref, body)
        return True

    return unit


def _refuse_collisions(transaction: Transaction, address: str, aliases: Sequence[str]) -> None:
    taken = tools.aliased_by_other(transaction, address, address)
    if taken is not None:
        raise Failure("E3103", f"`{address}` is already an alias of {taken}")
    for name in aliases:
        other = tools.aliased_by_other(transaction, name, address)
        if other is not None or (name != address and tools.exists(transaction, name)):
            raise Failure("E3103", f"the alias `{name}` collides with {other or name}")
    if names := shortened(address):
        for other in tools.other_addresses(transaction, address):
            if names & shortened(other):
                raise Failure("E3103", same_name(address, other))


def same_name(address: str, other: str) -> str:
    """Why a tool is not admitted: another tool has the same name on the wire."""
    return f"`{address}` would be shown to clients under the same shortened name as `{other}`; give it a shorter id"


def record_evidence(transaction: Transaction, evidence: TrialEvidence) -> None:
    row = tools.StoredEvidence(evidence.digest, int(evidence.passed), evidence.mode, evidence.report)
    tools.put_evidence(transaction, row, transaction.now_ms)


def stored_evidence(reader: Reader, digest: str) -> TrialEvidence | None:
    """Return the result of the contract tests that were run on a content; None if there were none."""
    row = tools.evidence(reader, digest)
    return None if row is None else TrialEvidence(row.digest, bool(row.passed), row.mode, row.report)

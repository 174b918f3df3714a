"""What operators, reviewers and auditors do through a door: register, decide, issue, govern, look.

Each method takes the caller by whom it is done and checks their scope itself, so that no door can forget to. What it
gives back is a document that every wire can carry.

    tools:admin      register and deprecate tools, upstreams       policy:read     see, check and explain the policy
    tokens:issue     issue and revoke tokens                       policy:admin    change it
    audit:read       read the journal, which is recorded           approvals       by the groups that a ticket names

Callers of the tenant `local` run the place and see all of it; others see what is their tenant's.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson

from interlock.approvals.notify import undelivered
from interlock.approvals.standing import Standing
from interlock.approvals.tickets import Ticket
from interlock.authority.identities import Identity
from interlock.core.capability import ToolGrant, is_did
from interlock.core.clock import iso, new_id
from interlock.core.connector import UpstreamKind
from interlock.core.context import Caller, CallerKind
from interlock.core.declare import Tool
from interlock.core.errors import Failure
from interlock.core.manifest import Manifest, parse_manifest
from interlock.core.phases import Request
from interlock.core.results import Result
from interlock.core.schema import Json
from interlock.registry import admission
from interlock.registry.admission import Evidence
from interlock.registry.retirement import deprecate
from interlock.store import records
from interlock.store.journal import Transaction

if TYPE_CHECKING:
    from interlock.app import Interlock
    from interlock.authority.cedar import Fault
    from interlock.authority.questions import Question

PAGE = 100
# How many records one page looks through at most, and at a time: a filter that fits nothing must not hold up calls.
LOOKED_THROUGH = 20_000
AT_A_TIME = 1000
READY_WITHIN_S = 2.0
READY_FOR_S = 1.0

Health = Literal["healthy", "degraded", "down"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sought:
    """Which records of the journal somebody wants to see. Times are ISO 8601 in UTC, `since` included, `until` not."""

    call: str | None = None
    tool: str | None = None
    caller: str | None = None
    kind: str | None = None
    since: str | None = None
    until: str | None = None

    def fits(self, record: Json) -> bool:
        """Whether a record is among them, as far as its body tells."""
        at = str(record.get("timestamp", ""))
        return (
            (self.tool is None or self.tool in _tools_named(record))
            and (
                self.caller is None or self.caller in (record.get("callerId"), record.get("agentId"), record.get("by"))
            )
            and (self.since is None or at >= self.since)
            and (self.until is None or at < self.until)
        )

    def document(self) -> Json:
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}


class Admin:
    """One Interlock, as those see it who look after it."""

    def __init__(self, lock: Interlock) -> None:
        self._lock = lock
        self._ready: tuple[float, asyncio.Future[tuple[Health, dict[str, Health]]]] | None = None

    # Tools

    async def register(self, document: Any, *, by: Caller) -> Json:
        """Admit the tool of a manifest; E3105 with every gap if it is not fit to be admitted."""
        _require(by, "tools:admin", "registering a tool")
        manifest = _complete(document)
        self._refuse_foreign_code(manifest)
        if any(one.startswith("credentials:") for one in manifest.required_permissions or ()):
            _require(by, "secrets:admin", "lending stored credentials to a new tool")
        lock = self._lock
        ref = f"{manifest.address}@{manifest.version}"

        def unit(transaction: Transaction) -> None:
            body = records.plain("registry", ref, transaction.now_ms, event="tool.offered", tool=ref, by=by.acting)
            transaction.append("registry", ref, body)

        await lock.journal.commit(unit)
        path = lock.home.path / "manifests" / f"{hashlib.sha256(orjson.dumps(document)).hexdigest()}.json"
        known = path.exists()
        _keep(path, orjson.dumps(document, option=orjson.OPT_INDENT_2))
        admitted = False
        try:
            (offered,) = await lock.add_from(str(path))
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

    def _refuse_foreign_code(self, manifest: Manifest) -> None:
        """Refuse (E3105) to run what the operator has not brought here.

        INVARIANT: a manifest that comes through a door makes nothing of this machine run that was not a tool before: it
        names a function declared with @tool in a module that serves tools here already, or a program in a sandbox from
        which no file of the machine can be seen.
        """
        execution, sandbox = manifest.execution, manifest.sandbox
        assert execution is not None
        if sandbox is not None and (sandbox.reads or sandbox.tier == 3):
            raise Failure(
                "E3105", f"{manifest.address} wants files of this machine: interlock tools add, on the machine"
            )
        if execution.kind == "upstream":
            raise Failure("E3105", f"{manifest.address} is an upstream's: add the upstream, and its tools come with it")
        if execution.kind == "program":
            return
        module, _, name = execution.target.rpartition(":")
        serving = {row.origin.removeprefix("module:") for row in self._lock.catalog.rows()}
        loaded = sys.modules.get(module) or (importlib.import_module(module) if module in serving else None)
        found = getattr(loaded, name, None) if name.isidentifier() else None
        if not isinstance(found, Tool):
            raise Failure(
                "E3105",
                f"`{execution.target}` is no tool that is loaded here: declare it with @tool in a module that was added"
                " with interlock tools add, or describe a program",
            )
        for handler in execution.handlers.values():
            where, _, name = handler.rpartition(":")
            function = getattr(loaded, name, None) if name.isidentifier() else None
            if where != module or getattr(function, "__module__", None) != module:
                raise Failure("E3105", f"the handler `{handler}` must be a function of {module} itself")

    async def deprecate(
        self,
        tool: str,
        version: str,
        *,
        by: Caller,
        successor: str | None = None,
        guide: str | None = None,
        days: int = 90,
    ) -> Json:
        """Announce the end of one version."""
        _require(by, "tools:admin", "retiring a version")
        address = self._lock.catalog.address(tool)
        unit = deprecate(address, version, by=by.acting, successor=successor, migration_guide=guide, grace_days=days)
        notice = await self._lock.journal.commit(unit)
        self._lock.catalog.forget()
        return {"tool_id": address, "version": version, "state": "deprecated", "deprecation": notice.document()}

    # Calls

    async def undo(self, call_id: str, *, by: Caller, key: str, door: str, trace: str | None = None) -> Result:
        """Run the compensation that a call of this caller stored. Governed like any call."""
        rows = self._lock.journal.read("SELECT body FROM journal WHERE call = ? AND kind = 'closed'", (call_id,))
        closed: Json = orjson.loads(rows[-1][0]) if rows else {}
        if (closed.get("callerId"), closed.get("tenant")) != (by.id, by.tenant):
            raise Failure("E3702", f"no call `{call_id}` of yours is on record")
        request = Request(
            tool=closed["toolId"], arguments={}, caller=by, key=key, operation="compensate", parent=call_id, door=door,
            trace_id=trace,
        )  # fmt: skip
        return await self._lock.gateway.invoke(request)

    # Approvals

    def tickets(self, *, by: Caller, every: bool = False) -> list[Json]:
        """What waits for a person, the oldest first; or all there was, the newest first. Only what is one's affair."""
        return [_ticket_document(one) for one in self._lock.approvals.list(every=every) if _concerns(one, by)]

    async def ticket(self, ticket_id: str, *, by: Caller) -> Json:
        """One ticket, with what a reviewer should read before deciding."""
        ticket = await self._ticket(ticket_id, by)
        sent = self._lock.journal.read(
            "SELECT DISTINCT channel FROM notification WHERE ticket = ? AND state = 'sent' ORDER BY 1", (ticket.id,)
        )
        late = undelivered(self._lock.journal, ticket=ticket.id)
        return {
            **_ticket_document(ticket),
            "told": [channel for (channel,) in sent],
            "undelivered": [{"channel": one.channel, "attempts": one.attempts, "error": one.error} for one in late],
        }

    async def approve(
        self, ticket_id: str, *, by: Caller, comment: str = "", edit: Mapping[str, Any] | None = None
    ) -> Json:
        """Agree to one call, once; with `edit`, to that call with these arguments changed."""
        ticket = await self._mine(ticket_id, by)
        desk = self._lock.approvals
        return _ticket_document(await desk.approve(ticket.id, by=by, comment=comment, edit=edit))

    async def deny(self, ticket_id: str, *, by: Caller, comment: str = "") -> Json:
        """Say no."""
        ticket = await self._mine(ticket_id, by)
        return _ticket_document(await self._lock.approvals.deny(ticket.id, by=by, comment=comment))

    async def _ticket(self, ticket_id: str, by: Caller) -> Ticket:
        ticket = await self._mine(ticket_id, by)
        if not _concerns(ticket, by):
            raise _no_ticket(ticket_id)
        return ticket

    async def _mine(self, ticket_id: str, by: Caller) -> Ticket:
        """A ticket of the caller's tenant, by its whole id. Who may decide on it the desk says, and records."""
        ticket = await self._lock.approvals.show(ticket_id) if ticket_id.startswith("apr_") else None
        if ticket is None or ticket.id != ticket_id or not _same_place(by, ticket.tenant):
            raise _no_ticket(ticket_id)
        return ticket

    def standing(self, *, by: Caller) -> list[Json]:
        """What was agreed to in advance, by or for the caller."""
        return [one.document() for one in self._lock.approvals.standing() if self._has_part(one, by)]

    async def agree_in_advance(
        self,
        tool: str,
        *,
        by: Caller,
        caller: str,
        arguments: Mapping[str, Any],
        uses: int,
        lifetime_s: int,
        versions: str | None = None,
    ) -> Json:
        """Agree to calls of one tool by one caller, within bounds."""
        lock = self._lock
        known = lock.identities.find(caller)
        if known is None and ":" not in caller:
            raise Failure("E3207", f"nobody is known as `{caller}`")
        if known is not None and not _same_place(by, known.tenant):
            raise Failure("E3207", f"nobody is known as `{caller}`")
        contract = lock.catalog.resolve(tool, versions).contract
        takes: Json = contract.input.document.get("properties") or {}
        if unknown := sorted(arguments.keys() - takes.keys()):
            words = ", ".join(takes) or "no arguments"
            raise Failure("E3004", f"{contract.ref} takes no `{unknown[0]}`; it takes {words}")
        standing = await lock.approvals.agree_in_advance(
            str(contract.id),
            by=by,
            caller=caller if known is None else known.did,
            arguments=arguments,
            uses=uses,
            expires_ms=lock.clock.now_ms() + lifetime_s * 1000,
            versions=versions,
        )
        return standing.document()

    async def take_back(self, standing_id: str, *, by: Caller) -> Json:
        """End now what was agreed to in advance."""
        found = next((one for one in self._lock.approvals.standing() if one.id == standing_id), None)
        if found is None or not self._has_part(found, by):
            raise Failure("E3702", f"no standing approval `{standing_id}`")
        return (await self._lock.approvals.take_back(standing_id, by=by)).document()

    def _has_part(self, standing: Standing, by: Caller) -> bool:
        return by.acting in (standing.caller, standing.granted_by) or (
            by.tenant == "local" and bool(by.groups & self._approvers(standing.tool))
        )

    def _approvers(self, tool: str) -> set[str]:
        try:
            manifest = self._lock.catalog.resolve(tool).contract.manifest
        except Failure:
            return set()  # no longer to be called
        return {step.group for step in (manifest.approval or self._lock.settings.approval).chain}

    # Tokens

    async def issue(
        self,
        *,
        by: Caller,
        agent: str | None = None,
        person: str | None = None,
        user: str | None = None,
        tools: Sequence[str] | None = None,
        scopes: Sequence[str] = (),
        resources: Sequence[str] | None = None,
        constraints: Mapping[str, Any] | None = None,
        ttl_s: int = 3600,
    ) -> Json:
        """A token for an agent or a person. Below the issuer's own token, where they act by one: never more than it."""
        _require(by, "tokens:issue", "issuing a token")
        if (agent is None) == (person is None):
            raise Failure("E3004", "say who holds the token: `agent` or `person`, and not both")
        holder = await self._somebody(agent or person or "", "human" if agent is None else "agent", by)
        behalf = None if user is None else await self._somebody(user, "human", by)
        text = await self._lock.tokens.issue(
            subject=holder.did,
            user=None if behalf is None else behalf.did,
            scopes=scopes,
            tools=_grants(["*"] if tools is None else tools),
            resources=resources,
            constraints=constraints,
            ttl_s=ttl_s,
            by=by,
        )
        return {"token": text, **await self._lock.tokens.inspect(text)}

    async def delegate(
        self,
        token: str,
        *,
        by: Caller,
        to: str,
        tools: Sequence[str] | None = None,
        scopes: Sequence[str] | None = None,
        resources: Sequence[str] | None = None,
        constraints: Mapping[str, Any] | None = None,
        ttl_s: int | None = None,
    ) -> Json:
        """Pass a token on, narrowed. Holding it is the right to; only a new name needs the right to issue."""
        holder = await self._somebody(to, "agent", by)
        text = await self._lock.tokens.delegate(
            token,
            subject=holder.did,
            by=by,
            scopes=scopes,
            tools=None if tools is None else _grants(tools),
            resources=resources,
            constraints=constraints,
            ttl_s=ttl_s,
        )
        return {"token": text, **await self._lock.tokens.inspect(text)}

    async def inspect(self, token: str) -> Json:
        """Whether a token holds, and why not; who gave it to whom, and what each of them may do."""
        return await self._lock.tokens.inspect(token)

    async def revoke(self, ref: str, *, by: Caller, reason: str) -> Json:
        """Void a token, a link of a chain, an identity or a key, and everything that hangs on it."""
        _require(by, "tokens:issue", "revoking")
        if by.tenant != "local":
            known = self._lock.identities.find(ref)
            if known is None or known.tenant != by.tenant:
                raise Failure("E3206", "outside the tenant `local`, only identities of one's own tenant can be revoked")
            ref = known.did
        return {"revoked": await self._lock.tokens.revoke(ref, reason=reason, by=by)}

    async def _somebody(self, who: str, kind: CallerKind, by: Caller) -> Identity:
        """An identity by name or DID. A new name gets a did:key of its own, which needs the right to issue tokens."""
        from interlock.authority.dids import make_did_key
        from interlock.authority.keys import keep_private, make_private

        lock = self._lock
        known = lock.identities.find(who)
        if known is not None and _same_place(by, known.tenant):
            return known
        # INVARIANT: a token never takes its holder into another tenant.
        if known is not None or is_did(who) or "tokens:issue" not in by.scopes:
            raise Failure("E3207", f"nobody is known as `{who}`; an operator registers identities")
        private = make_private("EdDSA")
        did = make_did_key(private.public_key())
        keep_private(lock.home.keys / "identities" / f"{did.rpartition(':')[2]}.pem", private)
        return await lock.identities.register(Identity(did=did, name=who, kind=kind, tenant=by.tenant), by=by.acting)

    # Policy

    def policy(self, *, by: Caller) -> Json:
        """The rules in force, as they are written."""
        _require_policy(by)
        rules = self._lock.policy.rules
        return {
            "version": rules.version,
            "digest": rules.digest,
            "text": rules.text,
            "rules": [{"id": rule.id, "effect": rule.effect, "line": rule.line} for rule in rules.rules],
        }

    def check_policy(self, text: str, *, by: Caller) -> Json:
        """What is wrong with a policy, by the tools there are and what they take."""
        _require_policy(by)
        faults = self._policy_faults(text)
        return {"usable": not any(fault.grave for fault in faults), "faults": [_fault(fault) for fault in faults]}

    def explain(
        self, *, by: Caller, door: str, principal: str, tool: str, arguments: Json, operation: str = "invoke"
    ) -> Json:
        """Why somebody may make a call, or may not: which rule decides, and what would have to change."""
        _require_policy(by)
        question = self._question(principal, tool, arguments, operation, door)
        found = self._lock.policy.explain(question)
        decision = found.decision
        return {
            "principal": question.caller.acting,
            "tool": question.contract.ref,
            "behavior": decision.behavior,
            "reason": decision.reason,
            "rules": list(decision.rules),
            "policy": decision.policy,
            "would_have_to_change": list(found.advice),
            "considered": [
                {"id": view.rule.id, "effect": view.rule.effect, "line": view.rule.line, "holds": view.holds}
                for view in found.rules
            ],
        }

    async def apply_policy(self, text: str, *, by: Caller, instead_of: str | None = None) -> Json:
        """Make a text the policy if it has no faults; with `instead_of`, only in place of the policy of that digest."""
        _require(by, "policy:admin", "changing the policy")
        path = self._lock.policy.path
        before = path.read_text(errors="replace") if path.exists() else ""
        digests = [hashlib.sha256(one.encode()).hexdigest() for one in (before, text)]
        if instead_of is not None and instead_of != self._lock.policy.rules.digest:
            raise Failure("E3410", "the policy was changed meanwhile; read it again")
        faults = self._policy_faults(text)
        if any(fault.grave for fault in faults):
            told = "; ".join(f"line {fault.line}: {fault.message}" for fault in faults if fault.grave)
            details = {"faults": [_fault(fault) for fault in faults]}
            raise Failure("E3004", f"the policy cannot be used: {told}", details=details)
        lock = self._lock
        ref = new_id(lock.clock.now_ms(), lock.clock.random_bytes(8))

        def unit(transaction: Transaction) -> None:
            body = records.plain(
                "authority", ref, transaction.now_ms, act="policy.applied", by=by.acting, before=digests[0],
                after=digests[1],
            )  # fmt: skip
            transaction.append("authority", ref, body)

        # The record comes first: a policy in force that nobody can be named for must not happen.
        await lock.journal.commit(unit)
        _keep(path.with_name(f"{path.name}.previous"), before.encode())
        _keep(path, text.encode())
        return {"applied": True, "changed": before != text, "faults": [_fault(fault) for fault in faults]}

    def _policy_faults(self, text: str) -> list[Fault]:
        from interlock.authority.cedar import check

        lock = self._lock
        now_ms = lock.clock.now_ms()
        groups = lock.policy.groups | {group for identity in lock.identities.all() for group in identity.groups}
        versions = [one for address in lock.catalog.addresses() for one in lock.catalog.versions(address).values()]
        return check(text, [one.contract for one in versions if not one.gone(now_ms)], groups)

    def _question(self, who: str, tool: str, arguments: Json, operation: str, door: str) -> Question:
        from interlock.authority.questions import Question

        lock = self._lock
        name, _, spec = tool.partition("@")
        version = lock.catalog.resolve(name, spec or None)
        known = lock.identities.find(who)
        caller = (
            lock.policy.principal(who)
            if known is None
            else Caller(id=known.did, tenant=known.tenant, kind=known.kind, trust=known.trust, groups=known.groups)
        )
        filled = {**dict(version.contract.input.defaults), **arguments}
        return Question(
            caller, version.contract, version.row.digest, filled, operation, "", door, None, (0, 0),
            lock.clock.now_ms(),
        )  # fmt: skip

    # Audit

    async def records(
        self, sought: Sought, *, by: Caller, door: str, after: int = 0, limit: int = PAGE
    ) -> tuple[list[Json], int | None]:
        """Records of the journal in their order, and the place to go on from. That they were read is itself recorded.

        A page may hold fewer than `limit`, even none, and still have more after it: so many were looked through.
        """
        await self._note_reading("records", by, door, sought=sought.document())
        found: list[Json] = []
        looked = 0
        while looked < LOOKED_THROUGH and len(found) < limit:
            rows = self._lock.journal.read(
                "SELECT seq, hash, body FROM journal WHERE seq > ? AND kind = coalesce(?, kind)"
                " AND call = coalesce(?, call) ORDER BY seq LIMIT ?",
                (after, sought.kind, sought.call, AT_A_TIME),
            )
            if not rows:
                return found, None
            for seq, digest, body in rows:
                record: Json = orjson.loads(body)
                after, looked = seq, looked + 1
                if _same_place(by, record.get("tenant")) and sought.fits(record):
                    found.append({"seq": seq, "hash": digest.hex(), "record": record})
                    if len(found) == limit:
                        break
            await asyncio.sleep(0)
        return found, after

    async def verify(self, *, by: Caller, door: str) -> Json:
        """Recompute the whole chain and check it against its signed heads."""
        from interlock.audit.chain import verify

        await self._note_reading("verify", by, door, everything=True)
        verdict = await asyncio.to_thread(verify, self._lock.home)
        seq, digest = verdict.head
        return {
            "intact": verdict.intact,
            "records": verdict.records,
            "purged_through": verdict.purged_through,
            "head": {"seq": seq, "hash": digest},
            "anchors": verdict.anchors,
            "anchored_through": verdict.anchored_through,
            "last_anchor_at": None if verdict.last_anchor_ms is None else iso(verdict.last_anchor_ms),
            "faults": [{"seq": fault.seq, "what": fault.what} for fault in verdict.faults],
            "seconds": verdict.seconds,
        }

    async def export(self, *, by: Caller, door: str) -> AsyncGenerator[bytes]:
        """Every record as JSON lines, byte for byte as it is chained: {"seq", "hash", "record"}."""
        upto = await self._note_reading("export", by, door, everything=True)
        return self._lines(upto)

    async def _lines(self, upto: int) -> AsyncGenerator[bytes]:
        after = -1
        while True:
            rows = self._lock.journal.read(
                "SELECT seq, hash, body FROM journal WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?",
                (after, upto, AT_A_TIME),
            )
            if not rows:
                return
            # The body goes out byte for byte: its hash must still fit.
            yield b"".join(
                b'{"seq":%d,"hash":"%b","record":%b}\n' % (seq, digest.hex().encode(), body)
                for seq, digest, body in rows
            )
            after = rows[-1][0]

    async def _note_reading(
        self, what: str, by: Caller, door: str, *, everything: bool = False, sought: Json | None = None
    ) -> int:
        """Put on record that the journal is read, before anything of it is shown. Returns the record's place."""
        _require(by, "audit:read", "reading the audit journal")
        if everything and by.tenant != "local":
            raise Failure("E3206", "the whole journal is for callers of the tenant `local`; ask for records")
        clock = self._lock.clock
        ref = new_id(clock.now_ms(), clock.random_bytes(10))

        def unit(transaction: Transaction) -> int:
            told: Json = {"sought": sought} if sought else {}
            body = records.plain("audit.read", ref, transaction.now_ms, by=by.acting, what=what, door=door, **told)
            transaction.append("audit.read", ref, body)
            return transaction.head[0]

        return await self._lock.journal.commit(unit)

    # Upstreams

    def upstreams(self, *, by: Caller) -> list[Json]:
        """Every upstream, what it was last seen to offer, and what became of that."""
        _require(by, "tools:admin", "looking at upstreams")
        known = self._lock.upstreams
        return [
            {**one.document(), "tools": [tool.document() for tool in known.offers(one.name)]} for one in known.list()
        ]

    async def add_upstream(
        self, name: str, kind: UpstreamKind, config: Json, *, by: Caller, overlay: Json | None = None
    ) -> Json:
        """Connect to an upstream that runs elsewhere, and serve those of its tools that are admitted."""
        _require(by, "tools:admin", "adding an upstream")
        # INVARIANT: through a door nobody starts a program, loads code, reads a file or reaches into the network that
        # this machine is in. Whoever wants that is on the machine.
        if reaching := _ON_THE_MACHINE & config.keys() or ({"langchain"} if kind == "langchain" else set[str]()):
            words = f"`{min(reaching)}` reaches into this machine: interlock upstream add, on the machine itself"
            raise Failure("E3206", words)
        if config.keys() & {"auth", "credentials"}:
            _require(by, "secrets:admin", "sending stored credentials to an upstream")
        return (await self._lock.upstreams.add(name, kind, config, by=by, overlay=overlay)).document()

    async def refresh_upstream(self, name: str, *, by: Caller, overlay: Json | None = None) -> Json:
        """Look again at what an upstream offers."""
        return (await self._lock.upstreams.refresh(name, by=by, overlay=overlay)).document()

    async def accept_upstream(
        self, name: str, *, by: Caller, tools: Sequence[str], reason: str, shown: Mapping[str, str] | None = None
    ) -> Json:
        """Take changed definitions as new versions, as a person who has looked at them."""
        return (await self._lock.upstreams.accept(name, by=by, tools=tools, reason=reason, shown=shown)).document()

    async def remove_upstream(self, name: str, *, by: Caller) -> Json:
        """Let go of an upstream; its tools are sunset."""
        await self._lock.upstreams.remove(name, by=by)
        return {"removed": name}

    # Health

    async def ready(self) -> tuple[Health, dict[str, Health]]:
        """How this place is, and each part that it depends on. Says nothing but that, and seldom: anybody may ask."""
        now = self._lock.clock.monotonic()
        if self._ready is None or now >= self._ready[0]:
            self._ready = now + READY_FOR_S, asyncio.ensure_future(self._look_around())
        return await asyncio.shield(self._ready[1])

    async def _look_around(self) -> tuple[Health, dict[str, Health]]:
        parts: dict[str, Health] = {
            "store": await _holds(self._store_answers()),
            "signer": await _holds(asyncio.to_thread(self._signer_signs)),
        }
        if parts["store"] == "healthy" and self._lock.journal.crowded:
            parts["store"] = "degraded"
        if "down" in parts.values():
            return "down", parts
        # Without these, calls are still served.
        parts |= {"sinks": self._sinks(), "upstreams": self._upstreams()}
        return "healthy" if set(parts.values()) == {"healthy"} else "degraded", parts

    async def _store_answers(self) -> None:
        """An empty write that goes all the way: what cannot be recorded cannot be run."""
        await self._lock.journal.commit(lambda transaction: transaction.one("SELECT 1"))

    def _signer_signs(self) -> None:
        self._lock.issuer_keys.all()

    def _sinks(self) -> Health:
        return "degraded" if undelivered(self._lock.journal, limit=1) else "healthy"

    def _upstreams(self) -> Health:
        answering = [one.state == "available" for one in self._lock.upstreams.list()]
        return "healthy" if all(answering) else "degraded" if any(answering) else "down"


async def _holds(attempt: Awaitable[None]) -> Health:
    try:
        await asyncio.wait_for(attempt, READY_WITHIN_S)
    except (Failure, TimeoutError, OSError):
        return "down"
    return "healthy"


# Upstreams

_ON_THE_MACHINE = frozenset(("command", "env", "cwd", "module", "allow_private", "tls"))


# Rights


def _require(by: Caller, scope: str, what: str) -> None:
    if scope not in by.scopes:
        raise Failure("E3206", f"{what} needs the scope `{scope}`")


def _require_policy(by: Caller) -> None:
    if not by.scopes & {"policy:read", "policy:admin"}:
        raise Failure("E3206", "looking at the policy needs the scope `policy:read`")


def _same_place(by: Caller, tenant: str | None) -> bool:
    return by.tenant in ("local", tenant)


def _concerns(ticket: Ticket, by: Caller) -> bool:
    """Whether a ticket is somebody's affair: they asked for it, or may decide on it."""
    if by.acting in (ticket.requester, ticket.caller):
        return True
    return _same_place(by, ticket.tenant) and bool(by.groups.intersection(ticket.approvers))


def _no_ticket(ticket_id: str) -> Failure:
    return Failure("E3702", f"no ticket `{ticket_id}` is yours to see")


# Documents


def _ticket_document(ticket: Ticket) -> Json:
    return {
        **ticket.document(),
        "mutation_class": ticket.head.get("mutationClass"),
        "readable": _readable(ticket),
    }


def _readable(ticket: Ticket) -> list[str]:
    """What a person should know before deciding, a line for each thing."""
    behalf = "" if ticket.requester == ticket.caller else f" for {ticket.caller}"
    undone = "cannot" if ticket.head.get("mutationClass") == "write_irreversible" else "can"
    lines = [f"{ticket.requester}{behalf} asks to {ticket.operation} {ticket.ref}: {ticket.reason}"]
    lines += [f"with {name} = {orjson.dumps(value).decode()}" for name, value in ticket.params.items()]
    effects: list[Json] = ticket.preview.get("predicted_effects") or []
    for effect in effects:
        before, after = (orjson.dumps(effect.get(name)).decode() for name in ("before", "after"))
        lines.append(f"it would {effect['operation']} {effect['resource']}, from {before} to {after}")
    conditions: dict[str, bool] = ticket.preview.get("preconditions") or {}
    lines += [f"{name}: {'holds' if holds else 'does not hold'}" for name, holds in conditions.items()]
    if impact := ticket.preview.get("impact"):
        lines.append(str(impact))
    return [*lines, f"it {undone} be undone"]


def _fault(fault: Fault) -> Json:
    return {"line": fault.line, "rule": fault.rule, "message": fault.message, "grave": fault.grave}


def _grants(tools: Sequence[str]) -> list[ToolGrant]:
    pairs = [tool.partition("@") for tool in tools]
    return [ToolGrant(name, within if at else "*") for name, at, within in pairs]


def _tools_named(record: Json) -> set[str]:
    """A record's tool by address and with its version, whichever way its kind writes it."""
    named = {str(record[name]) for name in ("toolId", "tool") if record.get(name)}
    return named | {name.partition("@")[0] for name in named} | {f"{record.get('toolId')}@{record.get('version')}"}


# Manifests

# What a manifest that says less is read with, to find the rest of what it lacks.
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
    verdict = admission.examine(manifest, "", {}, Evidence("", True, "pending", ""))
    gaps += [{"pointer": f"/{name}", "message": fault} for name, found in verdict.refused.items() for fault in found]
    if manifest.execution is None:
        gaps.append({"pointer": "/execution", "message": "name what to run: {target: module:function}, or a program"})
    if gaps:
        told = "; ".join(f"{gap['pointer'] or '/'} {gap['message']}" for gap in gaps)
        raise Failure("E3105", f"{manifest.address} was refused: {told}", details={"faults": gaps})
    return manifest


def _keep(path: Path, content: bytes) -> None:
    """A file that is the old or the new one at every moment, also after a power cut."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with open(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    except OSError as error:
        raise Failure("E3801", f"the home cannot be written: {error.strerror}") from None
    finally:
        staged.unlink(missing_ok=True)

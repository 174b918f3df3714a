"""The parts of an Interlock put together, and offered as one object."""

from __future__ import annotations

import asyncio
import itertools
import os
import pwd
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import orjson

from interlock.api import demonstration
from interlock.api.backends import engine, secret_source
from interlock.api.background import Chores
from interlock.api.home_health import Condition
from interlock.api.opening import Opening
from interlock.approvals.notify import Courier
from interlock.approvals.tickets import rejection
from interlock.authority import budgets
from interlock.authority.identities import DidRegistry, LocalIdentities
from interlock.authority.keys import IssuerKeys, TrustedIssuer, TrustedIssuers
from interlock.authority.policy import Policies
from interlock.authority.secrets import Secrets, SecretSource, open_lease
from interlock.authority.tokens import Tokens
from interlock.call.checkpoints import Checkpoint
from interlock.call.connector import Connector
from interlock.call.context import Caller
from interlock.call.cost import Cost
from interlock.call.events import Listener
from interlock.call.phases import Lease, Reason, Request
from interlock.call.results import Result
from interlock.contract.declare import Tool
from interlock.core.clock import Clock, Deadline, new_id
from interlock.core.errors import Failure
from interlock.core.supervise import Supervisor
from interlock.data.canonical import derive_key, tenant_secret
from interlock.data.schema import Json
from interlock.effects.locks import Locks
from interlock.gateway import inputs
from interlock.gateway.batch import Batch, BatchPolicy
from interlock.gateway.hooks import Hook
from interlock.gateway.inputs import Inputs
from interlock.gateway.invoke import Gateway
from interlock.gateway.ownership import Ownership
from interlock.gateway.paging import Cursors
from interlock.gateway.remote_cancel import Elsewhere
from interlock.gateway.review import Desk
from interlock.privacy.redact import RedactionRules, Redactor
from interlock.registry import quarantine
from interlock.registry.catalog import Catalog, Row, contract_digest
from interlock.registry.latency import Latencies, measure
from interlock.registry.source import load
from interlock.resilience.retry import Pacing, call_with_retries
from interlock.settings import Settings
from interlock.store import facts, ledger, payloads
from interlock.store.home import Home, Instance
from interlock.store.inspection import has_sandboxed_tools
from interlock.store.journal import Journal
from interlock.store.readers import Readers
from interlock.store.sealing import Box
from interlock.store.signing import Signer

if TYPE_CHECKING:
    from interlock.api.scratch import Connect
    from interlock.registry.admission import Evidence, Verdict
    from interlock.registry.retirement import Milestone
    from interlock.trials import Trial
    from interlock.upstreams.manager import Upstreams

# A process that stays so long is worth opening the sandbox in, before any call needs it. Most commands are shorter.
WARM_AFTER_S = 1.0
# How often it is worked out which timeout classes measured latency calls for.
MEASURE_EVERY_S = 300.0


@dataclass(frozen=True, slots=True)
class Admission:
    """What became of a tool that was offered."""

    tool: str
    verdict: Verdict
    new: bool
    trial: Trial | None = None

    @property
    def admitted(self) -> bool:
        return self.verdict.admitted


class Interlock:
    """Tools under control, over one home.

    async with Interlock.open("data") as lock:
        await lock.add(balance, post)
        result = await lock.call("demo.post", account="cash", cents=250, key="order-17")
    """

    def __init__(
        self,
        home: Home,
        *,
        clock: Clock,
        store_clock: Clock,
        settings: Settings,
        caller: str | None,
        registry: DidRegistry | None = None,
    ) -> None:
        self.home = home
        self.settings = settings
        self.clock = clock
        self.journal = Journal(
            home,
            clock=store_clock,
            signer=Signer(home.keys),
            monotonic=clock.monotonic,
            max_stale_s=settings.max_stale_s,
        )
        self.readers = Readers(home.database)
        self.instance = Instance(home, new_id(clock.now_ms(), clock.random_bytes(8)))
        self.supervisor = Supervisor(clock, self._alert_background, self._tell_background)
        self.catalog = Catalog(self.journal, clock, home.manifests)
        self.ownership = Ownership(self.journal, self.catalog, settings.environment)
        self.latencies = Latencies()
        self.elsewhere = Elsewhere(self.journal, self.instance)
        self.policy = Policies(home.policy, home.principals, clock=clock, environment=settings.environment)
        self.redactor = Redactor(
            RedactionRules(
                strict=settings.strict_redaction,
                extra_patterns=tuple(one.rule for one in settings.redact_patterns),
                extra_names=settings.redact_names,
            )
        )
        self.engine = engine(settings, self.policy, clock, self.redactor)
        self.issuer_keys = IssuerKeys(home.keys / "issuer", clock=clock)
        self.identities = LocalIdentities(self.journal)
        self.tokens = Tokens(
            journal=self.journal,
            clock=clock,
            keys=self.issuer_keys,
            registry=registry or self.identities,
            trusted=TrustedIssuers([TrustedIssuer.read(entry) for entry in settings.trusted_issuers], clock=clock),
            issuer=settings.token_issuer,
            audience=settings.token_audience,
            max_ttl_s=settings.token_max_s,
        )
        self.box = box = Box(home.keys, where=settings.secrets_key)
        self.secrets = Secrets(self.journal, box, clock)
        self._source = self._lent_from = secret_source(settings, self.secrets, clock)
        self._connect: Connect = self._connect_upstream
        self.gateway = Gateway(
            journal=self.journal,
            catalog=self.catalog,
            engine=self.engine,
            tokens=self.tokens,
            box=box,
            channels=self._channels_of,
            lend=self._lend,
            locks=Locks(home, clock=clock, instance=self.instance),
            redactor=self.redactor,
            settings=settings,
            clock=clock,
            instance=self.instance,
            cursors=Cursors(home.keys),
            supervisor=self.supervisor,
            connect=lambda name: self._connect(name),
        )
        self.gateway.telemetry.alerts.watch("journal queue", lambda: self.journal.fill)
        self.gateway.telemetry.alerts.watch("hung tool threads", self.gateway.execution.hung_share)
        announce = self.gateway.observer.announce
        self.catalog.on_change = self.gateway.observer.surface_changed
        self.journal.watch_clock(lambda facts: announce("tool.alert", "", "", alert="CLOCK_STEPPED", **facts))
        self.approvals = Desk(
            gateway=self.gateway,
            asking=self.gateway.asking,
            journal=self.journal,
            catalog=self.catalog,
            settings=settings,
            clock=clock,
            channels=self._channels_of,
            revive=self._revive,
        )
        self.courier = Courier(
            self.journal,
            settings.channels,
            owner=self.instance.id,
            alive=self.instance.alive,
            clock=clock,
            secrets=self._secret_texts,
            box=box,
            supervisor=self.supervisor,
            attempt_s=settings.notify_timeout_s,
            alert=self._channel_fails,
        )
        self._caller_id = caller or f"local:{local_user()}"
        self._acting: Caller | None = None
        self._chores = Chores(
            home=home,
            journal=self.journal,
            clock=clock,
            settings=settings,
            approvals=self.approvals,
            courier=self.courier,
            upstreams=lambda: self.upstreams,
            announce=self.gateway.observer.announce,
            pay=self.gateway.pay,
            release_pieces=self.gateway.kept.release_pieces,
            heed=lambda: self.elsewhere.heed(self.gateway.execution.cancel),
            alive=self.instance.alive,
            condition=Condition(home, self.gateway.telemetry.alerts, self.gateway.observer.announce),
            supervisor=self.supervisor,
        )
        if settings.housekeeping:
            self.warm_up(WARM_AFTER_S)
            self.supervisor.every("classes by latency", MEASURE_EVERY_S, self.measure, at_once=False)
        self._end_demonstration = demonstration.keep_in(home.path)

    @cached_property
    def upstreams(self) -> Upstreams:
        """Systems that others run. Most programs have none, so what they need is loaded when it is first asked for."""
        from interlock.upstreams.kinds import Site, connector
        from interlock.upstreams.manager import Upstreams

        def make(name: str, kind: str, config: Json, changed: Callable[[], None]) -> Connector:
            alert = partial(self._alert_upstream, name)
            services, logs = self.gateway.execution.services, self.home.path / "logs"
            return connector(name, kind, config, Site(self.clock, services, logs, changed, alert))

        return Upstreams(
            journal=self.journal,
            catalog=self.catalog,
            clock=self.clock,
            make=make,
            lend=self._lend,
            try_out=self.try_out_all,
            announce=self.gateway.observer.announce,
            mention=self.gateway.observer.mention,
            look=self.gateway.quarantine.look,
            answers=self.gateway.execution.services.answers,
            supervisor=self.supervisor,
        )

    @classmethod
    def open(
        cls,
        home: str | os.PathLike[str],
        *,
        clock: Clock | None = None,
        store_clock: Clock | None = None,
        caller: str | None = None,
        registry: DidRegistry | None = None,
        **settings: Any,
    ) -> Opening:
        """Open a home, making it if need be. Use it in `async with`.

        `clock` is this process's time, `store_clock` the store's; tests set them. `registry` says which identities are
        known, instead of the home itself. Further arguments override settings.
        """
        return Opening(cls, Home(home), clock or Clock(), store_clock or clock or Clock(), caller, registry, settings)

    async def close(self) -> None:
        """Finish what is being written, anchor the chain, let go of the home."""
        await self.supervisor.stop()
        await self.courier.close()
        if "upstreams" in vars(self):
            await self.upstreams.finish()
        await self.gateway.close()
        if "upstreams" in vars(self):
            await self.upstreams.close()
        await self.engine.close()
        await self._source.close()
        await self.supervisor.close()
        self.readers.close()
        await self.journal.close()
        self.instance.close()
        self._end_demonstration()

    @property
    def caller(self) -> Caller:
        """Who acts where nobody is named: the local user, as principals.toml describes them, unless told otherwise."""
        return self._acting or self.policy.principal(self._caller_id)

    def act_as(self, caller: Caller) -> None:
        """Let somebody else be who acts where nobody is named."""
        self._acting = caller

    async def caller_of(self, token: str) -> Caller:
        """Whoever holds a token, with the authority it carries; raises E3201, E3202, E3203 or E3207."""
        return self.tokens.known(token) or await self.tokens.verify(token)

    # Calling

    async def call(
        self,
        tool: str | Tool[..., Any],
        arguments: Mapping[str, Any] | None = None,
        /,
        *,
        key: str | None = None,
        session: str = "",
        version: str | None = None,
        timeout_s: float | None = None,
        deadline: Deadline | None = None,
        dry_run: bool = False,
        caller: Caller | None = None,
        token: str | None = None,
        task: str | None = None,
        trace_id: str | None = None,
        native: Mapping[str, Any] | None = None,
        on_progress: Callable[[Json], None] | None = None,
        door: str = "library",
        **named: Any,
    ) -> Result:
        """Call a tool through all six phases. Arguments by name, or as one mapping where names would clash.

        The tool is named `demo.post` or `demo.post@^1`, or is the declared tool itself, which means its very version.
        A call that changes something needs a `key` of the caller's own: sent twice, it runs once. With a `token` it is
        made on the authority that the token carries, otherwise on the local user's. A call that a person must agree to
        comes back with `pending`; sent again under its key, or waited for with `wait`, it goes on once they have.
        """
        name, at, spec = (tool if isinstance(tool, str) else _ref(tool)).partition("@")
        try:
            given = named if arguments is None else {**arguments, **named}
        except TypeError:
            raise TypeError('arguments are named, or one mapping: lock.call("demo.post", account="cash")') from None
        wanted = spec if at and version is None else version
        if token is not None:
            caller = self.tokens.known(token)
            if caller is None:
                try:
                    caller = await self.tokens.verify(token)
                except Failure as failure:
                    # Refused like any call: as a result, and on record.
                    return await self.gateway.decline(Request(tool=name, arguments={}, caller=None, door=door), failure)
        # In order of its fields; by name it would take half as long again.
        request = Request(
            name, given, caller or self.caller, None, wanted, key, session, trace_id, timeout_s, deadline, dry_run,
            "invoke", native, None, door, on_progress, task,
        )  # fmt: skip
        result = await self.gateway.invoke(request)
        return result if result.error is None or not named else _with_options(result, named)

    async def wait(self, pending: Result, *, within_s: float | None = None, poll_s: float = 0.2) -> Result:
        """Wait until a person has decided on a pending call, and go on with it; pending still when time is up."""
        ticket_id = pending.metadata["pending"]["ticketId"]
        give_up = None if within_s is None else self.clock.monotonic() + within_s
        while pending.pending:
            await self.approvals.sweep()
            ticket = await self.approvals.show(ticket_id)
            if ticket.state == "APPROVED":
                return await self.approvals.resume(ticket.id)
            failure = rejection(ticket)
            if failure is not None:
                metadata = {**pending.metadata, "approval": ticket.outcome()}
                return replace(pending, state="denied", error=failure, metadata=metadata)
            if ticket.state != "PENDING":
                break  # another process has gone on with it
            if give_up is not None and self.clock.monotonic() >= give_up:
                break
            await asyncio.sleep(poll_s)
        return pending

    async def call_with_retries(
        self,
        tool: str | Tool[..., Any],
        arguments: Mapping[str, Any] | None = None,
        /,
        *,
        within_s: float = 60.0,
        **options: Any,
    ) -> Result:
        """Call a tool as often as its retry policy allows, under one key, until it is clear how the call ended."""
        name, at, spec = _ref(tool).partition("@")
        version = self.catalog.resolve(name, options.get("version") or (spec if at else None))
        deadline = self.clock.monotonic() + within_s
        pacing = Pacing(monotonic=self.clock.monotonic, sleep=asyncio.sleep, uniform=random.uniform)

        observer, retried = self.gateway.observer, self.gateway.telemetry.metrics.retried
        tries = itertools.count()

        def attempt(until: float) -> Awaitable[Result]:
            if next(tries):
                retried(version.prepared)
            return self.call(tool, arguments, deadline=Deadline(at=until), **options)

        def exhausted(result: Result, attempts: int) -> None:
            observer.announce("RETRY_BUDGET_EXHAUSTED", result.invocation_id, result.tool, attempts=attempts)

        return await call_with_retries(
            attempt,
            version.contract.manifest.retry_policy,
            pacing,
            deadline=deadline,
            on_exhausted=exhausted,
        )

    async def batch(
        self, requests: Sequence[Request], policy: BatchPolicy | None = None, *, interrupt: asyncio.Event | None = None
    ) -> list[Result]:
        """Call several tools; results come in the order of the requests.

        Setting `interrupt` ends the batch early: no further call starts, and the policy's `interrupt` says whether
        those that run are cancelled or finish. Every request still gets its result.
        """
        return await Batch(self.gateway, self.catalog, policy or BatchPolicy()).run(requests, interrupt)

    def availability(self, row: Row) -> str:
        """AVAILABLE, or UNAVAILABLE for a version of an upstream that did not answer when it was last asked.

        Its tools are kept: calls fail at once (E3502), and the first probe that succeeds makes them available again.
        """
        upstream = row.origin.removeprefix("upstream:")
        return "AVAILABLE" if upstream == row.origin or self.upstreams.answers(upstream) else "UNAVAILABLE"

    def request(
        self, tool: str | Tool[..., Any], arguments: Mapping[str, Any] | None = None, /, **options: Any
    ) -> Request:
        """A request of the local user, for `batch`."""
        if "operation" in options:
            raise TypeError("a request invokes a tool; to undo a call, use undo()")
        name, at, spec = _ref(tool).partition("@")
        return Request(
            tool=name,
            version=options.pop("version", None) or (spec if at else None),
            arguments=dict(arguments or {}),
            caller=options.pop("caller", None) or self.caller,
            **options,
        )

    def cancel(self, invocation_id: str, reason: Reason = "interruption") -> str:
        """Ask for a call that this process runs to end. Answers canceled, unsupported or finished.

        The reason labels the synthetic result: a person or program interrupts (`interruption`), nobody wants the result
        any more (`discard`), or another answer takes its place (`fallback`).
        """
        if self.elsewhere.runs(invocation_id) is not None:
            return "unsupported"  # at once; `call_off` asks the process that runs it
        return self.gateway.execution.cancel(invocation_id, reason)

    async def call_off(self, invocation_id: str, reason: Reason = "interruption") -> str:
        """The same, whichever process on this home runs the call. Discards what a finished call left, if so asked."""
        owner = self.elsewhere.runs(invocation_id)
        if owner is not None:
            return await self.elsewhere.cancel(invocation_id, owner, reason)
        answer = self.cancel(invocation_id, reason)
        if answer == "finished" and reason == "discard":
            await self.journal.commit(self.gateway.kept.discard(invocation_id))
        return answer

    async def undo(
        self,
        invocation_id: str,
        *,
        key: str,
        caller: Caller | None = None,
        door: str = "library",
        trace_id: str | None = None,
    ) -> Result:
        """Run the compensation that a call stored when it succeeded. Governed like any call of whoever asks for it."""
        record = ledger.newest_of_kind(self.journal.reader, invocation_id, "closed")
        if record is None:
            raise Failure("E3702", f"no call {invocation_id} is on record")
        who = caller or self.caller
        if who.capability is not None and not self.ownership.has_call(who, invocation_id):
            raise Failure("E3702", f"no call `{invocation_id}` of yours is on record")
        closed: Json = orjson.loads(record)
        return await self.gateway.invoke(
            Request(
                tool=closed["toolId"],
                arguments={},
                caller=who,
                key=key,
                trace_id=trace_id,
                operation="compensate",
                parent=invocation_id,
                door=door,
            )
        )

    async def read_payload(self, ref: str, *, caller: Caller | None = None) -> bytes:
        """The full bytes of a result that was kept instead of sent. Only for the caller that made the call."""
        who = caller or self.caller
        found = payloads.find(self.journal.reader, ref)
        if found is None or found.owner != f"{who.tenant}/{who.id}" or not ref.startswith("payload:"):
            raise Failure("E3702", f"no payload `{ref}`")
        if who.capability is not None and not self.ownership.has_call(who, found.call):
            raise Failure("E3702", f"no payload `{ref}`")
        body = await self.gateway.kept.payload(ref)
        if body is None:
            raise Failure("E3702", f"the payload `{ref}` is gone: {payloads.reason(self.journal.reader, ref)}")
        return body

    def replay_session(self, session: str = "", *, caller: Caller | None = None) -> dict[str, Any]:
        """The state of a session of this caller, made anew from the journal's records of its changes."""
        return self.gateway.kept.replayed_session(caller or self.caller, session)

    def inputs(self, invocation_id: str) -> Inputs:
        """The four inputs of a call with all their differences, as far as they are kept; E3702 if it is not on record.

        Values are as they were, private ones too. Doors and the command line show them redacted.
        """
        return self.find_inputs(invocation_id)()

    def find_inputs(self, invocation_id: str) -> Callable[[], Inputs]:
        """The same, found and not opened yet: what it gives may be large, and can be opened on another thread."""
        kept = self.gateway.kept.inputs(invocation_id)
        if kept is not None:
            return lambda: inputs.read(kept())
        record = ledger.newest_of_kind(self.journal.reader, invocation_id, "closed")
        if record is None:
            raise Failure("E3702", f"no call `{invocation_id}` has ended")
        closed: Json = orjson.loads(record)
        try:
            contract = self.catalog.exact(closed["toolId"], closed["version"]).prepared.contract
            defaults = dict(contract.input.defaults)
        except (Failure, KeyError):
            defaults = {}  # the tool is not here any more, or never was
        changes = inputs.from_record(closed, defaults)
        return lambda: Inputs(None, None, None, None, changes, closed.get("inputsWithheld", ""))

    async def measure(self) -> None:
        """Work out from the journal which timeout class measured latency calls for. A server does so by itself."""
        self.latencies.found = await self.readers.read(measure)

    def checkpoints(self, invocation_id: str, *, caller: Caller | None = None) -> list[Checkpoint]:
        """What a call has saved of its work, oldest first. Only for the caller that made it."""
        who = caller or self.caller
        if who.capability is not None and not self.ownership.has_call(who, invocation_id):
            raise Failure("E3702", f"no call `{invocation_id}` of yours is on record")
        return self.gateway.checkpoints.seen_by(who, invocation_id)

    def key_for(
        self, tool: str, step: str, params: Mapping[str, Any], *, session: str = "", caller: Caller | None = None
    ) -> str:
        """An idempotency key that the same step of the same tenant always gives again, also after a restart."""
        known = facts.get(self.journal.reader, "key_secret")
        if known is None:
            raise Failure("E3108", "the home has no key secret yet")
        secret = tenant_secret(bytes.fromhex(known), (caller or self.caller).tenant)
        return derive_key(secret, session_id=session, tool_id=tool, step_id=step, params=dict(params))

    # Watching

    def listen(self, listener: Listener, *, call: str | None = None) -> Callable[[], None]:
        """Hear of every event as it happens, or of those of one call. Returns the way to stop."""
        if call is not None:
            return self.gateway.observer.follow(call, listener)
        self.gateway.observer.listeners.append(listener)
        return lambda: self.gateway.observer.listeners.remove(listener)

    def hook(self, hook: Hook) -> None:
        """Put a hook around calls."""
        self.gateway.hooks.registered.append(hook)

    # Housekeeping

    async def maintain(self) -> list[Milestone]:
        """Let go of what has expired and retire versions whose time has come. Runs by itself once an hour."""
        return await self._chores.maintain()

    def warm_up(self, after_s: float = 0.0) -> asyncio.Task[None]:
        """Open the sandbox in the background where the home has tools that need it.

        Otherwise the first call would wait for it, out of its own time. Runs by itself in a process that stays.
        """

        async def open_sandbox() -> None:
            await asyncio.sleep(after_s)
            if await self.readers.read(has_sandboxed_tools):
                await self.gateway.execution.warm_up()

        return self.supervisor.keep("opening of the sandbox", open_sandbox)

    def _alert_upstream(self, name: str, words: str) -> None:
        self.gateway.observer.announce("tool.alert", "", "", alert="UPSTREAM_FAILED", upstream=name, reason=words)

    def _alert_background(self, task: str, reason: str) -> None:
        announce = self.gateway.observer.announce
        announce("tool.alert", "", "", alert="BACKGROUND_TASK_FAILED", task=task, reason=reason)

    def _tell_background(self) -> None:
        """Let other processes on this home, such as `interlock doctor`, see which background tasks fail."""
        self.instance.tell({"failing": [[one.task, one.failures, one.error] for one in self.supervisor.failing]})

    def _connect_upstream(self, name: str) -> Connector:
        return self.upstreams.connect(name)

    def _channels_of(self, group: str) -> list[str]:
        return [channel.name for channel in self.settings.channels if channel.serves(group) and not channel.console]

    def lend_from(self, source: SecretSource) -> None:
        """Lend credentials from another source than the settings name."""
        self._lent_from = source

    def connect_through(self, connect: Connect) -> None:
        """Reach upstreams through somebody else's connections."""
        self._connect = connect

    async def _lend(self, names: tuple[str, ...], lifetime_s: float) -> Lease:
        return await open_lease(self._lent_from, names, lifetime_s=lifetime_s, clock=self.clock)

    async def _secret_texts(self, name: str) -> list[str]:
        """A stored secret for a channel that is about to be used."""
        credential = await self._lent_from.fetch(name)
        try:
            return [credential.reveal()]
        finally:
            credential.wipe()

    def _channel_fails(self, channel: str, failures: int, reason: str) -> None:
        """Raise an alert about a channel that notifies nobody."""
        facts = {"channel": channel, "failures": failures, "reason": reason}
        self.gateway.observer.announce("tool.alert", "", "", alert="CHANNEL_FAILING", **facts)

    async def _revive(self, asked: Caller) -> Caller:
        """Who asked for a call that waited, with the authority they have now."""
        if asked.capability is not None:
            return await self.tokens.renew(asked.capability)
        if not asked.id.startswith("local:"):
            return asked  # somebody this program spoke for: what it said of them counts
        known = self.policy.principal(asked.id)
        return known if asked.agent is None else replace(asked, scopes=asked.scopes & known.scopes)

    async def lift_quarantine(self, tool: str, *, reason: str, by: Caller | None = None) -> None:
        """Let a version out of quarantine, as a person who has looked at it. On record with the reason."""
        await self.journal.commit(quarantine.lift(tool, by=by or self.caller, reason=reason))
        self.gateway.quarantine.look()

    # Costs

    def cost_of(self, task: str, *, tenant: str = "local") -> Cost:
        """What a task has cost: every call made for it, nested ones included, and what was charged to it."""
        return budgets.task_cost(self.journal.reader, task, tenant=tenant)

    async def charge(self, task: str, *, part: str, amount: float, session: str = "", key: str) -> None:
        """Add what a task used besides calls (llm_inference, retrieval) to its cost. The same key counts once."""
        caller = self.caller
        now_ms = self.clock.now_ms()
        held = budgets.budget_keys(
            self.settings.budgets, caller=caller, session=session, task=task, tool="", now_ms=now_ms
        )
        unit = budgets.charge(
            f"charge:{task}:{key}", part, amount, held, task=task, session=session, tenant=caller.tenant, by=caller.id
        )
        for overrun in await self.journal.commit(unit):
            facts = {"alert": "BUDGET_OVERRUN", "task": task, **overrun.document()}
            self.gateway.observer.announce("tool.alert", "", "", **facts)

    # Tools

    async def add(self, *tools: Tool[..., Any]) -> list[Admission]:
        """Admit tools of this program; raises with everything that is wrong if one is refused."""
        for tool in tools:
            _require_tool(tool)
        admissions = [await self.offer(tool, "library:") for tool in tools]
        for admission_ in admissions:
            if not admission_.admitted:
                raise admission_.verdict.failure(admission_.tool)
        return admissions

    async def add_from(self, target: str) -> list[Admission]:
        """Offer every tool found in a .py file, a module or a manifest."""
        origin, tools = load(target)
        return [await self.offer(tool, origin) for tool in tools]

    async def offer(self, tool: Tool[..., Any], origin: str) -> Admission:
        """Judge a tool and publish it if all eight conditions hold."""
        from interlock.registry import admission

        _require_tool(tool)
        if not self.caller.governs("tools:admin"):
            raise Failure("E3206", "adding tools needs the scope tools:admin")
        manifest = tool.manifest
        digest = contract_digest(tool)
        published = self.catalog.versions(manifest.address)
        evidence = self.evidence(digest)
        trial: Trial | None = None
        if evidence is None:
            before = admission.examine(manifest, digest, published, admission.Evidence(digest, True, "pending", ""))
            if before.admitted:
                trial = await self.try_out(tool)
                evidence = trial.evidence(digest)
        verdict = admission.examine(manifest, digest, published, evidence)
        if not verdict.admitted:
            return Admission(f"{manifest.address}@{manifest.version}", verdict, False, trial)
        assert evidence is not None
        by = self.caller.acting
        new = await self.journal.commit(admission.publish(manifest, digest, origin, evidence, by))
        ref = f"{manifest.address}@{manifest.version}"
        if new:
            self.gateway.observer.mention("tool.declared", "", ref, digest=digest, by=by)
        self.catalog.forget()
        self.catalog.attach(tool)
        return Admission(ref, verdict, new, trial)

    def evidence(self, digest: str) -> Evidence | None:
        """The contract tests that passed or failed on exactly this content, if they were ever run."""
        from interlock.registry import admission

        found = admission.stored_evidence(self.journal.reader, digest)
        return found if found is not None and found.passed else None

    async def try_out(self, tool: Tool[..., Any], *, live: bool = False) -> Trial:
        """Run a tool's contract tests in a scratch home. With `live`, write tools really run."""
        from interlock.api.scratch import scratch_home, try_in
        from interlock.registry import admission

        if live and not self.caller.governs("tools:admin"):
            raise Failure("E3206", "recording evidence needs the scope tools:admin")
        async with scratch_home(Interlock.open, self.settings, self._lent_from, self._connect) as scratch:
            trial = await try_in(scratch, tool, live=live)
        if live:
            evidence = trial.evidence(contract_digest(tool))
            await self.journal.commit(lambda tx: admission.record_evidence(tx, evidence))
        return trial

    async def try_out_all(self, tools: Sequence[Tool[..., Any]]) -> list[Evidence]:
        """The contract tests of many tools, in one scratch home."""
        from interlock.api.scratch import scratch_home, try_in

        async with scratch_home(Interlock.open, self.settings, self._lent_from, self._connect) as scratch:
            return [(await try_in(scratch, tool)).evidence(contract_digest(tool)) for tool in tools]


def _ref(tool: str | Tool[..., Any]) -> str:
    """What a tool is called by: its name, or a declared tool's very version."""
    if isinstance(tool, str):
        return tool
    _require_tool(tool)
    return f"{tool.manifest.address}@{tool.manifest.version}"


def _require_tool(given: object) -> None:
    if isinstance(given, Tool):
        return
    if isinstance(given, str | os.PathLike):
        raise TypeError(f"{os.fspath(given)!r} is a place, not a tool; write add_from({os.fspath(given)!r})")
    what = getattr(given, "__name__", None) or type(given).__name__
    raise TypeError(f'{what} is not a tool; put @tool(version="1.0.0", mutation_class="read_only") above the function')


# What is often written for an option of `call`, and then taken for an argument of the tool.
_OPTIONS = {"timeout": "timeout_s", "idempotency_key": "key", "idempotencyKey": "key", "dryrun": "dry_run"}


def _with_options(result: Result, named: Mapping[str, Any]) -> Result:
    """A refusal of arguments that the tool does not have, with the option that was meant."""
    error = result.error
    hints = [f"`{name}` was sent to the tool; the option is `{_OPTIONS[name]}`" for name in named if name in _OPTIONS]
    faults: list[Json] = [] if error is None else (error.details or {}).get("faults", [])
    strange = [fault["pointer"] for fault in faults if "is not a parameter" in fault["message"]]
    if error is None or not hints or not any(f"/{name}" in strange for name in named if name in _OPTIONS):
        return result
    return replace(result, error=error.saying("; ".join([error.message, *hints]), error.details))


def local_user() -> str:
    """The local user's name, from the kernel's user id. The environment (LOGNAME, USER) names whom it likes."""
    uid = os.getuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)

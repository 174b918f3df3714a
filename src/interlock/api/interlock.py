"""The library facade: one open data directory, and what a program does with it.

Every method hands its work to the operation that endpoints and the command line use too, with the caller that the
program names or, where it names none, the local user.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack, overload

from interlock.api import requests
from interlock.api.admission import Admission, Admissions
from interlock.api.call_records import CallRecords
from interlock.api.opening import Opening
from interlock.api.parts import Parts
from interlock.api.requests import DEFAULT_LIMIT
from interlock.call.phases import Request
from interlock.core.clock import Clock, Deadline
from interlock.core.errors import Failure

if TYPE_CHECKING:
    from interlock.api.client import CallOptions, Client
    from interlock.api.model_window import ModelWindow
    from interlock.api.search import SearchAnswer
    from interlock.api.selection import Selections
    from interlock.api.selection_results import Selection, SelectOptions
    from interlock.api.tools import Tools
    from interlock.api.window import WindowOptions, Windows
    from interlock.authority.identities import DidRegistry
    from interlock.authority.secrets import SecretSource
    from interlock.call.checkpoints import Checkpoint
    from interlock.call.context import Caller, Context
    from interlock.call.cost import Cost
    from interlock.call.phases import Reason
    from interlock.call.results import Result
    from interlock.contract.declare import Tool
    from interlock.data.schema import Json
    from interlock.gateway.batch import BatchPolicy
    from interlock.gateway.hooks import Hook
    from interlock.gateway.inputs import Inputs
    from interlock.registry.admission import TrialEvidence
    from interlock.registry.retirement import Milestone
    from interlock.selection.together import Recommendation
    from interlock.settings import Settings
    from interlock.store.home import Home
    from interlock.trials import Trial
    from interlock.window.affordances import Affordances
    from interlock.window.reading import Part

__all__ = ["Admission", "Interlock"]

P = ParamSpec("P")
T = TypeVar("T")


# many methods: the public facade of the library; each method hands over to one module of api
class Interlock(Parts):
    """Tools under control, over one data directory.

    async with Interlock.open("data") as app:
        await app.add(balance, post)
        result = await app.call("demo.post", account="cash", cents=250, key="order-17")
    """

    # The whole surface of the library in one place. No method has logic of its own beyond choosing the caller.

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
        self.admissions = Admissions(self, type(self).open)
        self.records = CallRecords(self)
        super().__init__(
            home,
            clock=clock,
            store_clock=store_clock,
            settings=settings,
            caller=caller,
            registry=registry,
            try_out=self.admissions.try_out_all,
            read_file=lambda ref, caller: self.records.payload(ref, by=caller),
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
    ) -> Opening[Interlock]:
        """Open a data directory, making it if it does not exist. Use it in `async with`.

        `clock` is this process's time, `store_clock` the store's; tests set them. `registry` says which identities are
        known, instead of the data directory itself. Further arguments override settings.
        """
        return Opening(cls, home, clock or Clock(), store_clock or clock or Clock(), caller, registry, settings)

    def end_with_lease(self) -> None:
        """Have the kernel end this process if others could take the locks under which a tool of it still works.

        `interlock serve` does so. It matters on PostgreSQL alone, and needs Linux. Something must start the program
        again.
        """
        self.instance.end_with_lease()

    def act_as(self, caller: Caller) -> None:
        """Make another caller the default, where none is named."""
        self.authority.act_as(caller)

    async def caller_of(self, token: str) -> Caller:
        """The holder of a token, with the authority it carries; raises E3201, E3202, E3203 or E3207."""
        return await self.authority.caller_of(token)

    # Calling

    @cached_property
    def tools(self) -> Tools:
        """The catalog as callers see it."""
        from interlock.api.tools import Tools

        return Tools(self)

    async def search(
        self, query: str, *, limit: int = DEFAULT_LIMIT, by: str = "both", caller: Caller | None = None
    ) -> SearchAnswer:
        """Find tools by what they do, best first: `await app.search("send a message to a customer")`.

        Only tools that the caller may use are found. `by` is words, meaning or both.
        """
        return await self.tools.search(query, caller or self.caller, limit, by)

    @cached_property
    def selections(self) -> Selections:
        """Chooses tools for requests. Most programs never ask, so it is made on first use."""
        from interlock.api.selection import Selections

        return Selections(self, self.tools, self.windows)

    async def select(
        self, request: str, *, caller: Caller | None = None, **options: Unpack[SelectOptions]
    ) -> Selection:
        """Choose a tool for a request: `(await app.select("what is in the cash account")).chosen`.

        Says what each stage left and why, and whether the caller may make the call. It is on record; no call is made.
        """
        return await self.selections.select(request, caller or self.caller, **options)

    async def recommend(self, tool: str | None = None, *, caller: Caller | None = None) -> list[Recommendation]:
        """Tools that are used together with a tool, or that others of the caller's groups use. From the own tenant."""
        return await self.selections.recommend(caller or self.caller, tool)

    # A declared tool takes what its function takes, and the result has the type of the function. These overloads come
    # first; a type checker goes on to the others where options are given by name, and then checks the options only.
    @overload
    async def call(
        self, tool: Tool[Concatenate[Context, P], Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Result[T]: ...
    @overload
    async def call(self, tool: Tool[Concatenate[Context, P], T], /, *args: P.args, **kwargs: P.kwargs) -> Result[T]: ...
    @overload
    async def call(self, tool: Tool[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> Result[T]: ...
    @overload
    async def call(self, tool: Tool[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Result[T]: ...
    @overload
    async def call(self, tool: Tool[..., Any], /, *, key: str | None, **options: Any) -> Result: ...
    @overload
    async def call(
        self, tool: Tool[..., Any], arguments: Mapping[str, Any] | None, /, **options: Unpack[CallOptions]
    ) -> Result: ...
    @overload
    async def call(
        self,
        tool: str,
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
    ) -> Result: ...
    async def call(
        self,
        tool: Any,
        /,
        *given: Any,
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
        A declared tool takes the arguments that its function takes, and `unwrap` returns what the function declares:
        type checkers hold both against the function. They check the arguments beside options if these are set with
        `using`.

        A call that changes something needs a `key` of the caller's own: sent twice, it runs once. With a `token` it is
        made on the authority that the token carries, otherwise on the local user's. A call that a person must agree to
        comes back with `pending`; sent again under its key, or waited for with `wait`, it goes on once they have.
        """
        name, spec = requests.named_tool(tool)
        load = None
        if isinstance(tool, str):
            arguments = requests.arguments_of(tool, given, named) if given else named
        else:
            load = tool.load
            arguments = requests.arguments_of(tool, given, named) if given or tool.rich else named
        wanted = spec if version is None else version
        if token is not None:
            caller = self.tokens.verifier.known(token)
            if caller is None:
                try:
                    caller = await self.tokens.verifier.verify(token)
                except Failure as failure:
                    # Refused like any call: as a result, and on record.
                    return await self.gateway.decline(Request(tool=name, arguments={}, caller=None, door=door), failure)
        if self.has_exclusions:
            caller = self.tools.exclusions.applied(caller or self.caller)
        # In order of its fields; by name it would take half as long again.
        request = Request(
            name, arguments, caller or self.authority.caller, None, wanted, key, session, trace_id, timeout_s, deadline,
            dry_run, "invoke", native, None, door, on_progress, task,
        )  # fmt: skip
        made = self.gateway.make(request)
        result = await made if isinstance(made, CoroutineType) else made
        if result.error is None:
            return result if load is None else replace(result, load=load)
        return result if not named else requests.suggest_options(result, named)

    def using(self, **options: Unpack[CallOptions]) -> Client:
        """A client whose calls have these options: `app.using(key="order-17").call(post, account="cash", cents=250)`.

        Its calls have the types of the tools' functions.
        """
        from interlock.api import client

        return client.Client(self, options)

    async def wait(self, pending: Result, *, within_s: float | None = None, poll_s: float = 0.2) -> Result:
        """Wait until a person has decided on a pending call, and continue it.

        The result is still pending when time is up, and when somebody else has continued the call meanwhile: sent again
        under its idempotency key, it is answered with the outcome.
        """
        from interlock.api import waiting

        return await waiting.wait_for_decision(self, pending, within_s=within_s, poll_s=poll_s)

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
        from interlock.api import waiting

        name, spec = requests.named_tool(tool)
        version = await self.catalog.resolve(name, options.get("version") or spec)
        return await waiting.retry(
            self,
            version,
            lambda until: self.call(tool, arguments, deadline=Deadline(at=until), **options),
            within_s=within_s,
        )

    async def batch(
        self, requests: Sequence[Request], policy: BatchPolicy | None = None, *, interrupt: asyncio.Event | None = None
    ) -> list[Result]:
        """Call several tools; results come in the order of the requests.

        Setting `interrupt` ends the batch early: no further call starts, and the policy's `interrupt` says whether
        those that run are cancelled or finish. Every request still gets its result.
        """
        from interlock.gateway.batch import Batch, BatchPolicy

        if self.has_exclusions:
            applied = self.tools.exclusions.applied
            requests = [one if one.caller is None else replace(one, caller=applied(one.caller)) for one in requests]
        return await Batch(self.gateway, self.catalog, policy or BatchPolicy()).run(requests, interrupt)

    async def may_overlap(self, request: Request) -> bool | None:
        """Whether a call may run beside others of a batch, as its tool declares it; None if that depends on its input.

        A call of which the latter is true is made with a `Turn`, which it takes when its input is as it stays.
        """
        from interlock.gateway.batch import may_overlap

        return await may_overlap(self.catalog, request)

    def request(
        self,
        tool: str | Tool[..., Any],
        arguments: Mapping[str, Any] | None = None,
        /,
        *,
        caller: Caller | None = None,
        **options: Any,
    ) -> Request:
        """A request for `batch`, of the local user unless a caller is named."""
        return requests.make_request(tool, arguments, caller=caller or self.caller, **options)

    async def cancel(self, invocation_id: str, reason: Reason = "interruption") -> str:
        """End a call that this process runs. Answers canceled, unsupported or finished.

        The reason labels the synthetic result: a person or program interrupts (`interruption`), nobody wants the result
        any more (`discard`), another answer takes its place (`fallback`), or a call beside it failed (`sibling`).
        """
        return await self.records.cancel(invocation_id, reason)

    async def call_off(self, invocation_id: str, reason: Reason = "interruption") -> str:
        """The same, whichever process on this data directory runs the call.

        With the reason `discard`, what a finished call left is removed.
        """
        return await self.records.call_off(invocation_id, reason)

    async def undo(
        self,
        invocation_id: str,
        *,
        key: str,
        caller: Caller | None = None,
        door: str = "library",
        trace_id: str | None = None,
    ) -> Result:
        """Run the compensation that a call stored when it succeeded. Governed like any call of the caller."""
        by = caller or self.caller
        return await self.records.undo(invocation_id, by=by, key=key, door=door, trace_id=trace_id)

    async def read_payload(self, ref: str, *, caller: Caller | None = None) -> bytes:
        """The full bytes of a result that was kept instead of sent. Only for the caller that made the call."""
        return await self.records.payload(ref, by=caller or self.caller)

    async def read_part(self, ref: str, part: Part | Mapping[str, Any], *, caller: Caller | None = None) -> Json:
        """A part of a result that was kept instead of sent. Only for the caller that made the call.

        A mapping has the fields of a `Part`, such as somebody sent; E3004 if it cannot be one.
        """
        return await self.windows.read_part(await self.read_payload(ref, caller=caller), part)

    async def replay_session(self, session: str = "", *, caller: Caller | None = None) -> dict[str, Any]:
        """The state of a session of this caller, rebuilt from the journal's records of its changes."""
        replay = self.storage.changes.replay_session
        return await self.readers.read(partial(replay, caller or self.caller, session))

    async def inputs(self, invocation_id: str) -> Inputs:
        """The four inputs of a call with all their differences, as far as they are kept; E3702 if it is not on record.

        Values are as they were, private ones too. Endpoints and the command line show them redacted.
        """
        return (await self.records.inputs(invocation_id))()

    async def checkpoints(self, invocation_id: str, *, caller: Caller | None = None) -> list[Checkpoint]:
        """The checkpoints that a call has saved, oldest first. Only for the caller that made it."""
        return await self.records.checkpoints(invocation_id, by=caller or self.caller)

    async def key_for(
        self, tool: str, step: str, params: Mapping[str, Any], *, session: str = "", caller: Caller | None = None
    ) -> str:
        """An idempotency key that the same step of the same tenant always gives again, also after a restart."""
        return await self.records.key_for(tool, step, params, session=session, by=caller or self.caller)

    # Configuration and upkeep

    def hook(self, hook: Hook) -> None:
        """Put a hook around calls."""
        self.hooks.registered.append(hook)

    def lend_from(self, source: SecretSource) -> None:
        """Lend credentials from another source than the settings name."""
        self.authority.lend_from(source)

    async def maintain(self) -> list[Milestone]:
        """Remove what has expired and retire versions whose time has come. Runs by itself once an hour."""
        return await self.background.maintain()

    async def lift_quarantine(self, tool: str, *, reason: str, by: Caller | None = None) -> None:
        """Release a version from quarantine, as a person who has looked at it. On record with the reason."""
        await self.admissions.lift_quarantine(tool, reason=reason, by=by or self.caller)

    # Costs

    async def cost_of(self, task: str, *, tenant: str = "local") -> Cost:
        """The cost of a task: every call made for it, nested ones included, and what was charged to it."""
        from interlock.api.budgets import task_cost

        return await self.journal.read(lambda reader: task_cost(reader, task, tenant=tenant))

    async def charge(self, task: str, *, part: str, amount: float, session: str = "", key: str) -> None:
        """Add what a task used besides calls (llm_inference, retrieval) to its cost. The same key counts once."""
        from interlock.api.budgets import charge

        await charge(self, task, part=part, amount=amount, session=session, key=key, by=self.caller)

    # The context window of a model

    @cached_property
    def windows(self) -> Windows:
        """The content of models' context windows. Made on first use, because most programs need none."""
        from interlock.api.window import Windows

        return Windows(self, self.tools)

    async def token_costs(self, *, caller: Caller | None = None) -> Json:
        """The tokens of every tool the caller can see: of its line in an index, of its full schema, and of all."""
        return await self.windows.cost(caller or self.caller)

    async def affordances(
        self,
        *,
        budget: int,
        query: str = "",
        ranking: Mapping[str, float] | None = None,
        caller: Caller | None = None,
    ) -> Affordances:
        """Tools for a model within a budget of tokens: a line for each, and the full schemas of the most useful.

        Useful is what `ranking` says (a number above 0 by tool), or what a search for `query` finds, or what the caller
        called most of late.
        """
        return await self.windows.affordances(caller or self.caller, budget, query=query, ranking=ranking)

    async def window(self, size: int, *, caller: Caller | None = None, **options: Unpack[WindowOptions]) -> ModelWindow:
        """The context window of a conversation, of so many tokens: results are put into it, and never more than fit."""
        return await self.windows.open(self, size, caller or self.caller, **options)

    async def schema_part(self, tool: str, pointer: str = "", *, caller: Caller | None = None) -> Json:
        """The part of a tool's input schema that `affordances` left out under `x-detail`; without a pointer, all."""
        return await self.windows.detail(tool, pointer, caller or self.caller)

    # Tools

    async def add(self, *tools: Tool[..., Any]) -> list[Admission]:
        """Admit tools of this program; raises with everything that is wrong if one is refused."""
        for tool in tools:
            requests.require_tool(tool)
        admissions = [await self.offer(tool, "library:") for tool in tools]
        for admission in admissions:
            if not admission.admitted:
                raise admission.verdict.failure(admission.tool)
        return admissions

    async def add_from(self, target: str) -> list[Admission]:
        """Offer every tool found in a .py file, a module or a manifest."""
        return await self.admissions.offer_all(target, by=self.caller)

    async def offer(self, tool: Tool[..., Any], origin: str) -> Admission:
        """Judge a tool and publish it if all eight conditions hold."""
        requests.require_tool(tool)
        return await self.admissions.offer(tool, origin, by=self.caller)

    async def evidence(self, digest: str) -> TrialEvidence | None:
        """The contract tests that passed on exactly this content; None if they failed or never ran."""
        return await self.admissions.evidence(digest)

    async def try_out(self, tool: Tool[..., Any], *, live: bool = False) -> Trial:
        """Run a tool's contract tests in a scratch data directory. With `live`, write tools really run."""
        return await self.admissions.try_out(tool, by=self.caller, live=live)

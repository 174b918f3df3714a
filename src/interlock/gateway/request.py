"""Phase 1. Identify the caller, the tool, the deadline and the input as it was sent."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, cast

from interlock.call.phases import Call, Request, Requested
from interlock.call.prepared import Prepared
from interlock.core.errors import Failure
from interlock.core.threads import DEFINITIONS, INPUTS
from interlock.data.bounds import (
    LARGE_INPUT,
    LONGEST_NAME,
    LONGEST_NUMBER,
    SMALL_INPUT,
    check_unicode,
    check_values,
    size_of,
)
from interlock.data.canonical import canonical, plain_form, private_copy
from interlock.data.schema import Json
from interlock.gateway import idempotency
from interlock.gateway.observe import Observer
from interlock.gateway.persistence.undo import UndoStore
from interlock.gateway.redaction import CallRedaction
from interlock.gateway.results.outputs import Outputs
from interlock.registry.catalog import Catalog, Stranded
from interlock.registry.quarantine import Quarantine
from interlock.store import idempotency as idempotency_rows

if TYPE_CHECKING:
    from interlock.call.context import Caller
    from interlock.store.port import Store


class Requests:
    """Reads requests."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        quarantine: Quarantine,
        observer: Observer,
        redaction: CallRedaction,
        outputs: Outputs,
        undo: UndoStore,
        journal: Store,
        most_values: int,
    ) -> None:
        self._catalog = catalog
        self._quarantine = quarantine
        self._observer = observer
        self._redaction = redaction
        self._outputs = outputs
        self._undo = undo
        self._journal = journal
        self._most_values = most_values

    async def read(self, call: Call, tool: Prepared | None = None, *, to_run: bool = True) -> Requested:
        """Check the request of a call, encode its input, and find its tool and deadline.

        `tool` is the tool of the call, if its caller has just looked it up. Unless the call is `to_run`, nothing is
        prepared for its result.
        """
        request = call.request
        if request.key == "":
            call.request = request = replace(request, key=None)
        caller = request.caller
        if caller is None:
            raise Failure("E3212", "a call needs the identity it is made for")
        if not isinstance(request.arguments, dict):
            raise Failure("E3004", "arguments must be an object")
        names = (request.tool, request.session, request.key or "", request.version or "", request.task or "")
        joint = "".join(names)
        if len(joint) > LONGEST_NAME and max(map(len, names)) > LONGEST_NAME:
            call.request = _with_short_names(request)
            raise Failure(
                "E3004",
                f"the names of tools, versions, sessions, tasks and keys have at most {LONGEST_NAME} characters",
                details={"mostCharacters": LONGEST_NAME},
            )
        if not joint.isascii():
            check_unicode("names, versions, sessions and keys", *names)
        if self._observer.audience:
            self._observer.emit("tool.invocation.planned", call)
        if request.operation == "compensate":
            return self._select(call, await self._undone(call, caller))
        # The input in canonical form. A large one is copied and encoded in a thread.
        given: Any = request.arguments
        size = size_of(given, LARGE_INPUT)
        model_input = None if size > LARGE_INPUT else plain_form(given)
        if model_input is None and size <= SMALL_INPUT:
            model_input = canonical(given)
        if model_input is None or len(model_input) > LARGE_INPUT:
            # INVARIANT: code outside of Interlock has no reference to the copy that is read from here on.
            given, model_input, call.input_hash = await INPUTS.run(_copy_input, given, self._most_values)
            call.request = request = replace(request, arguments=given)
            call.model_input = model_input
        else:
            call.model_input, call.input_hash = model_input, sha256(model_input).hexdigest()
            if len(model_input) > LONGEST_NUMBER:
                check_values(model_input, self._most_values)
        try:
            tool = tool or self._catalog.at_hand(request.tool, request.version, caller.capability)
            if tool is None:
                return await self._look_up(call, caller, to_run)
        except Stranded as missing:
            tool = await self._answered_before(call, missing)
        return self._select(call, tool)

    async def _look_up(self, call: Call, caller: Caller, to_run: bool) -> Requested:
        """Find a tool that is not in memory, or that has a large contract which was not compiled yet."""
        request = call.request
        version = await self._catalog.resolve(request.tool, request.version, caller.capability, caller)
        if version.at_hand:
            return self._select(call, version.prepared)
        await DEFINITIONS.run(version.compile)
        requested = self._select(call, version.prepared)
        await DEFINITIONS.run(self._compile_redaction, requested, to_run)
        return requested

    def _compile_redaction(self, requested: Requested, to_run: bool) -> None:
        """Compile the redactors of a large contract, before the first call needs them."""
        self._redaction.input_redactor(requested)
        if to_run:
            self._outputs.redactor_of(requested.tool)

    async def _undone(self, call: Call, caller: Caller) -> Prepared:
        """Find the tool of a call that is to be undone, and the input with which it is undone."""
        # INVARIANT: an undo does what the call it undoes recorded, never what its caller asks for.
        stored = await self._undo.read(call.request.parent or "", caller)
        call.extend().hidden = tuple(stored["hidden"])
        call.request = replace(call.request, session=stored.get("session", ""))
        call.model_input = canonical(stored["arguments"])
        call.input_hash = sha256(call.model_input).hexdigest()
        return (await self._catalog.exact(stored["tool"], stored["version"], caller)).prepared

    def _select(self, call: Call, tool: Prepared) -> Requested:
        """Set the tool of a call and its deadline."""
        request = call.request
        caller, contract = request.caller, tool.contract
        surface = None if caller is None or request.operation == "compensate" else caller.surface
        if (
            caller is not None
            and surface is not None
            and (
                surface.hides(contract.address)
                or not caller.covers(contract.address, contract.version, tool.required_scopes)
            )
        ):
            # INVARIANT: what is not on a surface is refused like a tool that does not exist; see `masking`.
            raise Failure("E3101", f"no tool named `{request.tool}`; see interlock tools list")
        withheld = surface is not None and not surface.offers(contract.address)
        call.tool = tool
        if withheld:
            raise _not_loaded(contract.address)
        if request.identity is not None and request.key is None and tool.key_from == "request":
            call.request = request = replace(request, key=request.identity)
        self._quarantine.check(tool.digest, tool.ref, call.started)
        call.move("selected")
        if self._observer.audience:
            self._observer.emit("tool.invocation.selected", call)
        timeout = contract.timeout
        if request.timeout_s is not None and not request.timeout_s > 0:
            raise Failure("E3004", "a timeout is a number of seconds above zero")
        bound_s = timeout.default_s if request.timeout_s is None else min(request.timeout_s, timeout.max_s)
        deadline = call.started + bound_s
        if request.deadline is not None:
            # INVARIANT: a deadline only ever shrinks.
            deadline = min(deadline, request.deadline.at)
        call.deadline = deadline
        return cast("Requested", call)

    async def _answered_before(self, call: Call, missing: Stranded) -> Prepared:
        """Return a tool whose code is missing, if the call's idempotency key has an outcome. Nothing runs for that."""
        tool, request = missing.prepared, call.request
        if not tool.writes or request.key is None or request.dry_run:
            raise missing
        scope = idempotency.scope_for(request, tool.contract, call.input_hash, request.key)
        answered = partial(idempotency_rows.has_outcome, scope=scope, now_ms=call.started_ms)
        if not await self._journal.read(answered):
            raise missing

        def refuse(_: Any) -> None:
            raise missing

        call.extend().uses = [refuse]  # in case the outcome expires meanwhile
        return tool


def _copy_input(arguments: Json, most_values: int) -> tuple[Json, bytes, str]:
    """Return a copy of a large input, its canonical form and the digest of that."""
    try:
        given: Json = private_copy(arguments)
    except (TypeError, ValueError, RecursionError):
        given = arguments  # not JSON: `canonical` raises what is wrong with it
    except RuntimeError:
        raise Failure("E3004", "the arguments were changed while they were read") from None
    model_input = canonical(given)
    check_values(model_input, most_values)
    return given, model_input, sha256(model_input).hexdigest()


def _with_short_names(request: Request) -> Request:
    """Return a request that is refused for the length of its names, as it is recorded."""

    def short(name: str) -> str:
        return name if len(name) <= LONGEST_NAME else f"{name[:100]}…"

    key, version, task = (
        None if name is None else short(name) for name in (request.key, request.version, request.task)
    )
    return replace(
        request, tool=short(request.tool), session=short(request.session), key=key, version=version, task=task
    )


def _not_loaded(address: str) -> Failure:
    words = f"discover it first: find it with search_tools, load `{address}` with load_tools, then call it"
    return Failure("E3107", f"the schema of {address} was not loaded", resolution=words, details={"tool": address})

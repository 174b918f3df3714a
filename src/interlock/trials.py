"""Contract tests: evidence that a version keeps its contract, gathered without causing an effect nobody asked for.

They run through the same gateway as every call, in a scratch home that is thrown away. Invalid and boundary inputs stop
before Execute. A read-only tool runs its own examples, except those that it declares as not live: of these the input,
and the recorded answer if there is one, is held against the contract. A write tool runs in dry run, or for real inside
the fixture it declares, where the same key must change things once, and what can be undone is undone by what the call
itself stored. A tool with neither is run for real only when its author asks.

A read of an upstream that does not answer for now (429, 5xx) is neither proven nor disproven: its evidence is
`UNPROVEN`, and its tests are run again when the upstream answers (`upstreams.manager`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

from interlock.call.phases import Request
from interlock.call.results import Result
from interlock.contract.cases import Case, cases_of
from interlock.contract.contract import Contract, contract_of
from interlock.contract.declare import Tool
from interlock.contract.recipes import ONLY_RUN, PinnedStep, Recipe, image
from interlock.core.errors import ErrorCode, Failure
from interlock.core.record import dataclass
from interlock.core.threads import DEFINITIONS
from interlock.data.canonical import encode
from interlock.data.explain import brief, output_faults
from interlock.data.schema import Json
from interlock.gateway.invoke import Gateway
from interlock.registry.admission import UNPROVEN, TrialEvidence

Run = Callable[[Request], Awaitable[Result]]
# No answer in the call's time, circuit breaker open, upstream unavailable, timed out, rate limit.
_PASSING = frozenset({"E3402", "E3501", "E3502", "E3503", "E3504"})
# Characters of each value that is quoted where an undo did not restore it.
MOST_QUOTED = 200
# Makes the latest read by a step of a recipe again: its answer then, and its answer now; None if there was none.
Reread = Callable[[PinnedStep], Awaitable["tuple[Any, Any] | None"]]
Mode = Literal["examples", "recorded", "preview", "fixture", "live", "none"]


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """One case and how it went."""

    case: str
    passed: bool
    message: str = ""
    ran: bool = True  # False for an example that the tool was not run with, because it needs a network host
    passing: bool = False  # it failed because an upstream did not answer for now, which tells nothing about the tool


@dataclass(frozen=True, slots=True)
class Trial:
    """All cases of one version."""

    tool: str
    mode: Mode
    outcomes: tuple[CaseOutcome, ...]

    @property
    def passed(self) -> bool:
        return all(outcome.passed for outcome in self.outcomes)

    def evidence(self, digest: str) -> TrialEvidence:
        missed = [outcome for outcome in self.outcomes if not outcome.passed]
        if missed and all(outcome.passing for outcome in missed):
            report = "; ".join(f"{outcome.case}: {outcome.message}" for outcome in missed[:5])
            return TrialEvidence(digest=digest, passed=True, mode=UNPROVEN, report=report)
        failed = [f"{outcome.case}: {outcome.message}" for outcome in self.outcomes if not outcome.passed]
        report = "; ".join(failed[:5]) if failed else f"{len(self.outcomes)} cases passed"
        if unrun := [outcome.case for outcome in self.outcomes if not outcome.ran]:
            report = f"{report}; the tool was not run with: {', '.join(unrun[:5])}"
        if not failed and any(outcome.message == ONLY_RUN for outcome in self.outcomes):
            report = f"{report}; {ONLY_RUN}"
        return TrialEvidence(digest=digest, passed=self.passed, mode=self.mode, report=report)


def mode_of(contract: Contract, *, live: bool) -> Mode:
    """The way in which a tool can be tried without an unwanted effect."""
    if contract.mutation.mutation_class == "read_only":
        return "examples"
    if live:
        return "live"
    if contract.manifest.has_fixture:
        return "fixture"
    return "preview" if contract.manifest.previews else "none"


async def try_tool(
    gateway: Gateway,
    tool: Tool[..., Any],
    make: Callable[..., Request],
    *,
    live: bool,
    agree: Callable[[Result], Awaitable[None]],
    reread: Reread | None = None,
) -> Trial:
    """Try a tool that the gateway's scratch catalog holds.

    `make` builds requests of the scratch caller; `agree` is the author's agreement to a call that must be agreed to.
    `reread` makes the read again that a recipe made before its write.
    """

    async def once(request: Request) -> Result:
        result = await gateway.invoke(request)
        if result.pending:
            await agree(result)
            result = await gateway.invoke(request)
        return result

    contract = await DEFINITIONS.run(contract_of, tool.manifest)
    run: Run = once if contract.mutation.writes else partial(_run_again_if_late, once)
    mode = mode_of(contract, live=live)
    outcomes: list[CaseOutcome] = []
    if mode == "none":
        hint = "nothing to try it with: add a @tool.preview or @tool.fixture, or run `interlock tools test --live`"
        return Trial(contract.ref, mode, (CaseOutcome("effects", False, hint),))
    if "compensate" in tool.handlers:
        outcomes.extend(_undoable(tool))
    cases = await DEFINITIONS.run(cases_of, contract)
    if mode == "examples" and not live and not any(case.expect in ("example", "pair") for case in cases):
        mode = "recorded" if any(case.expect == "recorded" for case in cases) else mode
    for case in cases:
        await asyncio.sleep(0)  # others have their turn between two cases
        if case.expect == "pair":
            if mode != "fixture":
                outcomes.append(await _run_pair(run, contract, case, mode, make))
        elif case.expect == "recorded" and not live:
            outcomes.append(await _check_recorded(gateway, contract, case, make))
        elif case.expect in ("example", "recorded"):
            outcomes.extend(await _run_example(gateway, run, contract, case, mode, make))
        else:
            outcomes.append(await _check(gateway, contract, case, make))
    if mode == "fixture":
        outcomes.extend(await _run_in_fixture(run, tool, contract, make))
    execution = contract.manifest.execution
    if execution is not None and execution.undo is not None and execution.undo.example is not None:
        undone = await _run_and_undo(run, contract, "undo", execution.undo.example, make)
        outcomes.extend(undone)
        if reread is not None and all(outcome.passed for outcome in undone):
            outcomes.append(await _restored(execution.undo, reread))
    return Trial(contract.ref, mode, tuple(outcomes))


async def _run_again_if_late(run: Run, request: Request) -> Result:
    """Run a read, and once more if it exceeded its deadline: its first call in a process also loads what it needs."""
    result = await run(request)
    late = result.error is not None and result.error.code == "E3402"
    return await run(request) if late else result


async def _refusal(gateway: Gateway, request: Request) -> Failure | None:
    """The failure that the input of a call would meet. Nothing runs, and nothing is recorded."""
    try:
        await gateway.checked(request)
    except Failure as failure:
        return failure
    return None


async def _check(gateway: Gateway, contract: Contract, case: Case, make: Callable[..., Request]) -> CaseOutcome:
    """Validation alone decides; nothing runs."""
    failure = await _refusal(gateway, make(contract.address, case.input, key="trial", version=contract.version))
    if case.expect == "refused":
        refused = failure is not None and failure.row.error_code is ErrorCode.INVALID_INPUT
        return CaseOutcome(case.name, refused, "" if refused else "was not refused")
    # The tool's own checks may know better than its schema; a crash would not be E3308.
    passed = failure is None or failure.code == "E3308"
    return CaseOutcome(case.name, passed, "" if failure is None else failure.message)


async def _check_recorded(
    gateway: Gateway, contract: Contract, case: Case, make: Callable[..., Request]
) -> CaseOutcome:
    """Hold an example that is not run against the contract: its input, and its answer if one was recorded."""
    name = f"{case.name}, {'by its recorded answer' if case.answered else 'its input alone'}"
    failure = await _refusal(gateway, make(contract.address, case.input, key="trial", version=contract.version))
    if failure is not None:
        return CaseOutcome(name, False, failure.message, ran=False)
    faults = output_faults(contract.output, case.output)[:5] if case.answered else []
    words = "; ".join(f"{fault.pointer or 'the answer'} {fault.message}" for fault in faults)
    return CaseOutcome(
        name, not faults, f"the recorded answer is not as promised: {words}" if faults else "", ran=False
    )


async def _run_example(
    gateway: Gateway, run: Run, contract: Contract, case: Case, mode: Mode, make: Callable[..., Request]
) -> list[CaseOutcome]:
    if mode == "fixture":
        return [await _check(gateway, contract, Case(case.name, case.input, "accepted"), make)]
    dry = mode == "preview"
    key = None if dry else case.name.replace(" ", "-")
    request = make(contract.address, case.input, key=key, dry_run=dry, version=contract.version)
    result = await run(request)
    outcomes = [CaseOutcome(case.name, result.ok, _why(result), passing=_is_passing(contract, result))]
    if contract.mutation.writes and result.ok:
        outcomes.append(_same(case.name, result, await run(request), replayed=not dry))
        if not dry:
            outcomes.extend(await _undone(run, contract, case.name, request, result))
    return outcomes


async def _run_pair(run: Run, contract: Contract, case: Case, mode: Mode, make: Callable[..., Request]) -> CaseOutcome:
    """Run a known input and hold the result against its output. A pair that cannot be run proves nothing."""
    if mode == "preview":
        hint = "a tool that writes runs its pairs inside a @tool.fixture, or with `interlock tools test --live`"
        return CaseOutcome(case.name, False, hint)
    key = case.name.replace(" ", "-")
    result = await run(make(contract.address, case.input, key=key, version=contract.version))
    if not result.ok:
        return CaseOutcome(case.name, False, _why(result), passing=_is_passing(contract, result))
    same = encode(result.value) == encode(case.output)
    return CaseOutcome(
        case.name, same, "" if same else f"gave `{brief(result.value)}` instead of `{brief(case.output)}`"
    )


def _is_passing(contract: Contract, result: Result) -> bool:
    """Whether a read of an upstream failed for a reason that passes: it is asked too often, or does not answer now.

    The call has been tried several times by then, as its contract says.
    """
    failure = result.error
    if failure is None or contract.mutation.writes or not contract.manifest.runs_as.of_upstream:
        return False
    return failure.retryable and failure.code in _PASSING


def _why(result: Result) -> str:
    """Why a case failed, as its author must know it: where the result or the effect is not as promised, and how."""
    failure = result.error
    if failure is None:
        return ""
    if failure.code not in ("E3303", "E3417"):
        return failure.message
    faults: list[Json] = (failure.details or {}).get("faults", [])
    listed = [f"{fault.get('what') or fault.get('pointer') or 'the result'} {fault['message']}" for fault in faults]
    return f"{failure.message}: {'; '.join(listed[:5])}"


def _same(name: str, first: Result, again: Result, *, replayed: bool) -> CaseOutcome:
    """The duplicate-key case: equal data, and when it really ran, one run only."""
    equal = again.ok and again.value == first.value and again.replayed == replayed
    return CaseOutcome(
        f"{name} again under its key", equal, "" if equal else "the second call did not give the first result"
    )


def _undoable(tool: Tool[..., Any]) -> list[CaseOutcome]:
    """Whether a compensation can have what it asks for, as far as that can be told without running anything."""
    given = dict.fromkeys(tool.manifest.parameters.get("properties", ()))
    if tool.takes_context or tool.undo_arguments(given, None) is not None:
        return []
    words = "its compensation asks for more than the call's arguments and result: take a Context and state the rest"
    return [CaseOutcome("compensation", False, f"{words} with ctx.compensate_with")]


async def _undone(run: Run, contract: Contract, name: str, request: Request, done: Result) -> list[CaseOutcome]:
    """The undoing of a call, by what it stored when it succeeded."""
    if contract.mutation.mutation_class != "write_reversible":
        return []
    undo = replace(request, arguments={}, key=f"{request.key}-undo", operation="compensate", parent=done.invocation_id)
    result = await run(undo)
    return [CaseOutcome(f"{name} undone", result.ok, _why(result))]


async def _run_in_fixture(
    run: Run, tool: Tool[..., Any], contract: Contract, make: Callable[..., Request]
) -> list[CaseOutcome]:
    try:
        async with _entered(tool.handlers["fixture"]) as arguments:
            ran = await _run_and_undo(run, contract, "fixture", arguments, make)
            if not ran[0].passed:
                return ran
            pairs = [one for one in cases_of(contract) if one.expect == "pair"]
            return [*ran, *[await _run_pair(run, contract, one, "fixture", make) for one in pairs]]
    except Failure:
        raise
    except Exception as error:  # noqa: BLE001 - the author's fixture is the author's code
        return [CaseOutcome("fixture", False, f"the fixture failed: {type(error).__name__}: {error}")]


async def _run_and_undo(
    run: Run, contract: Contract, name: str, arguments: Json, make: Callable[..., Request]
) -> list[CaseOutcome]:
    """Run a write for real, again under its key, and undo it if it can be undone."""
    request = make(contract.address, arguments, key=name, version=contract.version)
    first = await run(request)
    if not first.ok:
        return [CaseOutcome(name, False, _why(first))]
    again = _same(name, first, await run(request), replayed=True)
    return [CaseOutcome(name, True), again, *await _undone(run, contract, name, request, first)]


async def _restored(recipe: Recipe, reread: Reread) -> CaseOutcome:
    """Whether what was there before a write is there again after its undo, where the recipe says how it is read."""
    case = "undo restores what was there"
    try:
        read = None if recipe.before is None else await reread(recipe.before)
    except Failure as failure:
        return CaseOutcome(case, False, f"it could not be read again after the undo: {failure.message}")
    if read is None:
        return CaseOutcome(case, True, ONLY_RUN)
    before, after = (encode(image(recipe, one)) for one in read)
    if before == after:
        return CaseOutcome(case, True)
    was, now = (_quoted(one) for one in (before, after))
    return CaseOutcome(
        case, False, f"the undo ran, and what was there is not back: `{was}` before the write, `{now}` now"
    )


def _quoted(value: bytes) -> str:
    text = value.decode()
    return text if len(text) <= MOST_QUOTED else f"{text[:MOST_QUOTED]}…"


@asynccontextmanager
async def _entered(fixture: Callable[[], Any]) -> AsyncGenerator[Json]:
    """Enter a fixture, written as a generator or a context manager, sync or async."""
    if inspect.isasyncgenfunction(fixture):
        async with asynccontextmanager(fixture)() as arguments:
            yield arguments
        return
    if inspect.isgeneratorfunction(fixture):
        from contextlib import contextmanager

        with contextmanager(fixture)() as arguments:
            yield arguments
        return
    manager: Any = fixture()
    if hasattr(manager, "__aenter__"):
        async with cast("AbstractAsyncContextManager[Json]", manager) as arguments:
            yield arguments
    else:
        with cast("AbstractContextManager[Json]", manager) as arguments:
            yield arguments

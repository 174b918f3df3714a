"""Chooses a tool for a request, in stages, and says of each stage what it left and why.

    intent ► hierarchy ► retrieval ► router ► rules ► allocation ► cost ► latency ► model ► gate

Every stage works without the others. Only tools that the caller can see are looked at, and the gate comes last, also
for what a model, a rule or the router chose. A selection is on record, without the text of the request; the text is
stored encrypted for `payload_days`, unless the setting `selection_requests` is never.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Unpack

import orjson

from interlock.api.learning import Learning
from interlock.api.narrowing import Narrowing
from interlock.api.selection_gate import SelectionGate, admit_model, parameter_faults
from interlock.api.selection_records import answer_of, model_answer, selector_failed, store, sums, written
from interlock.api.selection_results import AnsweredLater, Selection, SelectOptions
from interlock.core.clock import new_id
from interlock.core.errors import Failure
from interlock.core.threads import DEFINITIONS, WALKS
from interlock.data.bounds import check_unicode
from interlock.selection.stages import (
    MOST_REQUEST,
    Candidate,
    Choice,
    Selector,
    Stage,
    apply_rules,
    checked_choice,
    fit,
    keep_best,
    prefer_cheaper,
    prefer_faster,
)
from interlock.window.affordances import declaration

__all__ = ["MOST_REQUEST", "Selections"]

if TYPE_CHECKING:
    from interlock.api.parts import Parts
    from interlock.api.tools import Tools
    from interlock.api.window import Windows
    from interlock.call.context import Caller
    from interlock.data.schema import Json
    from interlock.registry.version import Version
    from interlock.selection.together import Recommendation
    from interlock.store.port import Transaction

# How many candidates a search brings before router and rules look at them.
_FOUND: Final = 50
# The calls from which on the journal says what a tool costs, and how long its calls take.
_FEWEST_CALLS: Final = 5
# What is assumed of a tool before it was called: 9 of 10 calls succeed.
_PRIOR: Final = (9, 10)


class Selections:
    """Selections of one data directory."""

    def __init__(self, parts: Parts, tools: Tools, windows: Windows) -> None:
        self._parts = parts
        self._tools = tools
        self._windows = windows
        self._narrowing = Narrowing(tools.index)
        self.learning = Learning(parts, tools)
        self._configured: Selector | None = None
        self.token_price = parts.settings.selection_token_price

    async def select(self, request: str, caller: Caller, **options: Unpack[SelectOptions]) -> Selection:
        """Choose a tool for a request, ask the gate, and put both on record.

        E3003 if the caller has made the model of the settings choose too often: what it costs is not theirs.
        """
        if options.get("selector") is None and self._parts.settings.selection_model and request.strip():
            await admit_model(self._parts, caller)
        made, version = await self.choose(request, caller, **options)
        return await self._gated(made, version, caller, options)

    async def choose(
        self, request: str, caller: Caller, **options: Unpack[SelectOptions]
    ) -> tuple[Selection, Version | None]:
        """Choose a tool for a request. The gate is not asked, and nothing is recorded."""
        if not request.strip():
            raise Failure("E3004", "say what is to be done", resolution="select a tool for words, such as: send mail")
        request = request[:MOST_REQUEST]
        check_unicode("a request", request)
        visible = await self._tools.index.surface(caller)
        stages: list[Stage] = []
        intent = await self._narrowing.intent(request) if options.get("intent", True) else None
        narrowed = await self._narrowing.by_intent(visible, intent, stages)
        chosen, categories = await self._narrowing.by_category(request, visible, narrowed, stages)
        candidates = await self._retrieved(request, caller, visible, chosen, stages)
        by_name = {one.row.address: one for one in visible.values()}
        candidates = await self._routed(request, caller, candidates, chosen, visible, stages)
        rules = self._parts.settings.selection_rules
        # INVARIANT: a rule brings back nothing that the verdict about the request has left out.
        left = {visible[tool].row.address for tool in narrowed}
        if rules:
            denied = await self._denied(caller, visible, {one.tool for one in rules})
            left.update(denied[tool].row.address for tool in await self._narrowing.giving(denied, intent))
            by_name |= {one.row.address: one for one in denied.values()}
        candidates, stage = apply_rules(request, candidates, rules, lambda tool: tool in left)
        stages.append(stage)
        candidates = await self._measured(by_name, candidates, caller)
        candidates, stage = fit(candidates, options.get("allocation"))
        stages.append(stage)
        candidates, stage = prefer_cheaper(candidates, asked=options.get("cheaper", False))
        stages.append(stage)
        cheaper = options.get("cheaper", False)
        candidates, stage = prefer_faster(candidates, asked=options.get("faster", False), cheaper=cheaper)
        stages.append(stage)
        selector = options.get("selector") or self._model()
        picked, refused, answer = await self._picked(request, candidates, by_name, selector, stages)
        made = Selection(
            new_id(self._parts.clock.now_ms(), self._parts.clock.random_bytes(10)),
            request,
            intent,
            tuple(stages),
            tuple(candidates),
            picked.tool,
            picked.parameters if selector is not None and picked.tool else None,
            refused,
            None,
            {
                "categories": 0 if categories is None else await self._windows.count(categories.text),
                "schemas": sum(one.tokens for one in candidates),
            },
            answer,
        )
        return made, None if picked.tool is None else by_name[picked.tool]

    def _model(self) -> Selector | None:
        """The model that the settings name."""
        settings, authority = self._parts.settings, self._parts.authority
        if self._configured is None and settings.selection_model:
            from interlock.selection.model import ModelSelector

            async def key() -> str | None:
                name = settings.selection_model_secret
                return (await authority.secret_texts(name))[0] if name else None

            self._configured = ModelSelector(settings.selection_model, key)
        return self._configured

    async def recommend(self, caller: Caller, tool: str | None = None) -> list[Recommendation]:
        """Tools that go together with a tool, or with those that the caller uses."""
        from interlock.api.recommendations import recommended

        return await recommended(self._parts, self._tools, caller, tool)

    async def answer(self, selection: str, by: Caller) -> Json | None:
        """Return the stored answer of the model in a selection; None if there is none."""
        return await answer_of(self._parts, selection, by)

    # Choosing

    async def _denied(
        self, caller: Caller, allowed: Mapping[str, Version], named: Collection[str]
    ) -> dict[str, Version]:
        """Tools that rules name and the policy denies the caller. The gate refuses them, and says why."""
        seen = await self._tools.index.surface(caller, allowed=False)
        return {tool: one for tool, one in seen.items() if tool not in allowed and one.row.address in named}

    async def _retrieved(
        self,
        request: str,
        caller: Caller,
        visible: Mapping[str, Version],
        among: Collection[str],
        stages: list[Stage],
    ) -> list[Candidate]:
        found: list[Candidate] = []
        why = "there are no candidates"
        if among:
            limited = None if len(among) == len(visible) else among
            answer = await self._tools.index.find(request, caller, _FOUND, among=limited, allowed=True)
            found = [Candidate(one.version.row.address, one.score) for one in answer]
            why = f"by {answer.by}" + (f": {answer.note}" if answer.note else "")
        stages.append(Stage("retrieval", len(among), _names(found), why))
        return found

    async def _routed(
        self,
        request: str,
        caller: Caller,
        candidates: Sequence[Candidate],
        among: Collection[str],
        visible: Mapping[str, Version],
        stages: list[Stage],
    ) -> list[Candidate]:
        """The best ten: by the router of the tenant, or by their scores where there is none."""
        router = await self.learning.router(caller.tenant)
        if router is None or not among:
            best = keep_best(candidates)
            stages.append(Stage("router", len(candidates), _names(best), "no router is in use: the best by score"))
            return best
        scores = {one.tool: one.score for one in candidates}
        current = frozenset(visible[tool].row.address for tool in among)
        mass = await WALKS.run(router.distribution, request, scores, current)
        best = keep_best([Candidate(tool, value, reason="router") for tool, value in mass.items()])
        stages.append(Stage("router", len(current), _names(best), "the best by the router of the tenant"))
        return best

    async def _measured(
        self, by_name: Mapping[str, Version], candidates: Sequence[Candidate], caller: Caller
    ) -> list[Candidate]:
        """The candidates with their tokens, and with cost, success and latency by the journal of their tenant."""
        offers = await self._windows.measured([by_name[one.tool] for one in candidates])
        tokens = {address: one.schema_tokens for (address, _), one in offers.items()}
        used = await self._parts.readers.read(partial(sums, caller.tenant))
        made: list[Candidate] = []
        for one in candidates:
            known = used.get(one.tool)
            number, failed = (0, 0) if known is None else (known.calls, known.failures)
            stated = by_name[one.tool].contract.manifest.estimated_cost or 0.0
            enough = known is not None and number >= _FEWEST_CALLS and known.cost > 0
            cost = known.cost / number if known is not None and enough else stated
            success = (number - failed + _PRIOR[0]) / (number + _PRIOR[1])
            latency = known.latency_ms if known is not None and number - failed >= _FEWEST_CALLS else None
            made.append(replace(one, tokens=tokens[one.tool], cost=cost, success=success, latency_ms=latency))
        return made

    async def _picked(
        self,
        request: str,
        candidates: Sequence[Candidate],
        by_name: Mapping[str, Version],
        selector: Selector | None,
        stages: list[Stage],
    ) -> tuple[Choice, str | None, bytes | None]:
        """The tool that a model chose, or the first candidate. A tool that is no candidate is refused.

        With it come the reason of a refusal and what the model answered, for the record.
        """
        if selector is None or not candidates:
            first = candidates[0].tool if candidates else None
            why = "no model is in use" if candidates else "there are no candidates"
            stages.append(Stage("model", len(candidates), _names(candidates), why))
            return Choice(first, {}), None, None
        count = await self._windows.counter()
        offered = [
            await DEFINITIONS.run(declaration, one.tool, orjson.loads(by_name[one.tool].row.manifest), count)
            for one in candidates
        ]
        answer: Any = None
        try:
            answer = await selector(request, offered)
            choice = checked_choice(
                answer, {one.tool: partial(parameter_faults, by_name[one.tool]) for one in candidates}
            )
        except AnsweredLater:
            raise
        except Exception as error:  # noqa: BLE001 - a selection is on record, whatever its selector does
            failure = error if isinstance(error, Failure) else selector_failed(self._parts, error)
            if failure is not error:
                answer = None  # it may be what failed
            facts = {"code": failure.code, **model_answer(answer, _names(candidates))}
            stages.append(Stage("model", len(candidates), (), f"refused: {failure.message}", facts))
            return Choice(None, {}), failure.message, written(answer)
        picked = () if choice.tool is None else (choice.tool,)
        why = "the model chose" if picked else "the model chose no tool"
        stages.append(Stage("model", len(candidates), picked, why, model_answer(answer, _names(candidates))))
        return choice, None, written(answer)

    # Deciding

    async def _gated(
        self, made: Selection, version: Version | None, caller: Caller, options: SelectOptions
    ) -> Selection:
        """Let the gate decide, and put the selection on record in the same write."""
        parts, session = self._parts, options.get("session", "")
        gate = None
        if version is not None:
            gate = SelectionGate(parts, version, caller, session, options.get("task") or made.id)
            await gate.look(made.parameters or {}, options.get("door", "library"))

        def unit(transaction: Transaction) -> Selection:
            done = replace(made, verdict=None if gate is None else gate.decide(transaction))
            store(parts, transaction, done, caller, session)
            return done

        return await parts.journal.commit(unit)


def _names(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    return tuple(one.tool for one in candidates)

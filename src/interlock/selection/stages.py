"""The stages between a search and the gate. Each takes candidates, best first, and returns some of them.

    intent ► hierarchy ► retrieval ► router ► rules ► allocation ► cost ► latency ► model ► gate

A stage returns tools that it was given. Two add others that the caller may use: the router, which ranks all tools that
intent and hierarchy left, and a rule, which names a tool that intent left.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, Final, Protocol, cast

from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.data.schema import Json
from interlock.search import words

# What router or retrieval keeps at most, and what a rule keeps besides its own tool.
MOST_REMAINING: Final = 10
BESIDE_RULE: Final = 2
# Of tools whose expected success differs by no more than this, the cheaper or the faster is chosen where that counts.
EQUAL: Final = 0.02
MOST_REQUEST: Final = 4000
MOST_NAME: Final = 512


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tool that may be chosen. `score` says how well it fits, `success` how often its calls succeeded.

    `latency_ms` is how long its calls take on average; None until enough of them were measured.
    """

    tool: str
    score: float
    tokens: int = 0
    cost: float = 0.0
    success: float = 1.0
    reason: str = "retrieved"
    latency_ms: float | None = None

    @property
    def expected(self) -> float:
        """The expected success: that it is the right tool, and that its call succeeds."""
        return self.score * self.success

    def document(self) -> Json:
        return {
            "tool": self.tool,
            "score": round(self.score, 4),
            "tokens": self.tokens,
            "cost": self.cost,
            "success": round(self.success, 4),
            "latency_ms": None if self.latency_ms is None else round(self.latency_ms, 1),
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Stage:
    """The candidates that a stage left, and why. A stage that is not set up says so."""

    name: str
    before: int
    tools: tuple[str, ...]
    why: str
    facts: Json = field(default_factory=dict[str, Any])

    def document(self) -> Json:
        return {"stage": self.name, "before": self.before, "after": len(self.tools), "why": self.why, **self.facts}


class Rule(Protocol):
    """Fires if the request has all the words, or if the pattern matches somewhere in it."""

    @property
    def tool(self) -> str: ...
    @property
    def words(self) -> Sequence[str]: ...
    @property
    def pattern(self) -> str: ...


def fires(rule: Rule, request: str) -> bool:
    if rule.pattern and re.search(rule.pattern, request[:MOST_REQUEST], re.IGNORECASE):
        return True
    spoken = {word.lower() for word in words.split(request[:MOST_REQUEST])}
    terms = set(words.terms(request[:MOST_REQUEST]))
    return bool(rule.words) and all(_has(spoken, terms, word) for word in rule.words)


def _has(spoken: set[str], terms: set[str], word: str) -> bool:
    """Whether a request has a word, as it is written or in another form."""
    wanted = words.terms(word)
    return word.lower() in spoken or (bool(wanted) and terms.issuperset(wanted))


def apply_rules(
    request: str, candidates: Sequence[Candidate], rules: Iterable[Rule], allowed: Callable[[str], bool]
) -> tuple[list[Candidate], Stage]:
    """Put the tool of the first rule that fires first, and keep two others.

    A rule about a tool that is not `allowed` is passed over: the caller does not see it, or the request needs another
    kind of help.
    """
    before = len(candidates)
    for rule in rules:
        if not allowed(rule.tool) or not fires(rule, request):
            continue
        others = [one for one in candidates if one.tool != rule.tool][:BESIDE_RULE]
        chosen = [Candidate(rule.tool, 1.0, reason="rule"), *others]
        return chosen, Stage("rules", before, _names(chosen), f"a rule puts {rule.tool} first")
    return list(candidates), Stage("rules", before, _names(candidates), "no rule fired")


def keep_best(candidates: Sequence[Candidate], most: int = MOST_REMAINING) -> list[Candidate]:
    """The best ones; of equal ones, in the order of their names."""
    return sorted(candidates, key=lambda one: (-one.score, one.tool))[:most]


def fit(candidates: Sequence[Candidate], allocation: int | None) -> tuple[list[Candidate], Stage]:
    """Cut candidates to those whose schemas fit into so many tokens together, in their order."""
    if allocation is None:
        return list(candidates), Stage("allocation", len(candidates), _names(candidates), "no limit was given")
    fitting: list[Candidate] = []
    room = allocation
    for one in candidates:
        if one.tokens <= room:
            fitting.append(one)
            room -= one.tokens
    why = f"{allocation - room:,} of {allocation:,} tokens are used by schemas"
    return fitting, Stage("allocation", len(candidates), _names(fitting), why)


def prefer_cheaper(candidates: Sequence[Candidate], *, asked: bool) -> tuple[list[Candidate], Stage]:
    """Put the cheapest of those first whose expected success equals that of the first, and say what that trades."""
    before = len(candidates)
    if not asked or not candidates:
        why = "cost was not asked for" if not asked else "there is nothing to choose from"
        return list(candidates), Stage("cost", before, _names(candidates), why)
    first = candidates[0]
    if first.reason == "rule":
        return list(candidates), Stage("cost", before, _names(candidates), "a rule decided")
    equal = [one for one in candidates if first.expected - one.expected <= EQUAL]
    best = min(equal, key=lambda one: (one.cost, -one.expected, one.tool))
    if best.cost >= first.cost:
        return list(candidates), Stage(
            "cost", before, _names(candidates), f"{first.tool} is the cheapest of its equals"
        )
    chosen = [best, *(one for one in candidates if one is not best)]
    why = (
        f"{best.tool} at {best.cost:g} instead of {first.tool} at {first.cost:g}: saves {first.cost - best.cost:g} a"
        f" call, with {_gained(best, first):+.3f} of expected success"
    )
    trade: Json = {
        "chosen": best.tool,
        "instead_of": first.tool,
        "cost": best.cost,
        "saved": round(first.cost - best.cost, 9),
        "expected_success": _gained(best, first),
    }
    return chosen, Stage("cost", before, _names(chosen), why, {"trade": trade})


def prefer_faster(
    candidates: Sequence[Candidate], *, asked: bool, cheaper: bool = False
) -> tuple[list[Candidate], Stage]:
    """Put the fastest of those first whose expected success equals that of the first, and say what that trades.

    Where cost counts too, none that costs more. A tool whose latency was not measured is not taken to be faster, nor
    slower than another.
    """
    before = len(candidates)

    def unchanged(why: str) -> tuple[list[Candidate], Stage]:
        return list(candidates), Stage("latency", before, _names(candidates), why)

    if not asked or not candidates:
        return unchanged("latency was not asked for" if not asked else "there is nothing to choose from")
    first = candidates[0]
    if first.reason == "rule":
        return unchanged("a rule decided")
    if first.latency_ms is None:
        return unchanged(f"how long calls of {first.tool} take was not measured yet")
    equal = [
        (one.latency_ms, -one.expected, one.tool, one)
        for one in candidates
        if one.latency_ms is not None
        and first.expected - one.expected <= EQUAL
        and not (cheaper and one.cost > first.cost)
    ]
    latency_ms, _, _, best = min(equal, key=lambda one: one[:3])
    if latency_ms >= first.latency_ms:
        return unchanged(f"{first.tool} is the fastest of its equals")
    kept = [best, *(one for one in candidates if one is not best)]
    why = (
        f"{best.tool} at {latency_ms:.1f} ms instead of {first.tool} at {first.latency_ms:.1f} ms: saves"
        f" {first.latency_ms - latency_ms:.1f} ms a call, with {_gained(best, first):+.3f} of expected success"
        f" and {best.cost - first.cost:+g} of cost"
    )
    return kept, Stage("latency", before, _names(kept), why)


def _gained(chosen: Candidate, first: Candidate) -> float:
    """The expected success of the chosen tool, less that of the one that was first."""
    return round(chosen.expected - first.expected, 4) or 0.0


def _names(candidates: Iterable[Candidate]) -> tuple[str, ...]:
    return tuple(one.tool for one in candidates)


# A model that chooses

Selector = Callable[[str, Sequence[Json]], Awaitable[Any]]
"""Takes a request and the declarations of the candidates; returns {"tool": NAME or null, "parameters": {…}}."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The answer of a model, checked: one of the candidates, and parameters that its schema allows."""

    tool: str | None
    parameters: Json


def checked_choice(answer: Any, candidates: Mapping[str, Callable[[Json], Sequence[str]]]) -> Choice:
    """Check the answer of a model. `candidates` has, by name, a function that returns the faults of parameters.

    E3101 for a tool that is not a candidate, E3301 for parameters that the tool does not take, E3004 for anything else.
    """
    if not isinstance(answer, Mapping):
        raise Failure("E3004", "the model did not answer with a tool and parameters")
    choice = cast("Mapping[str, Any]", answer)
    tool, parameters = choice.get("tool"), choice.get("parameters", {})
    if tool is None:
        return Choice(None, {})
    if not isinstance(tool, str) or not isinstance(parameters, dict):
        raise Failure("E3004", "the model did not answer with the name of a tool and an object of parameters")
    faults_of = candidates.get(tool)
    if faults_of is None:
        raise Failure("E3101", f"the model named `{tool[:MOST_NAME]}`, which it was not offered")
    given = cast("Json", parameters)
    faults = faults_of(given)
    if faults:
        raise Failure("E3301", f"the model's parameters do not fit {tool}: {'; '.join(faults[:5])}")
    return Choice(tool, given)

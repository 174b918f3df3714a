"""The policy of a data directory: Cedar rules in `policy.cedar`, people in `principals.toml`, and the engine over both.

Decisions are cached under each part of the context that the rules read, and never past a change of the files. If the
rules read nothing of a call but its caller and tool, a cached decision costs one lookup.

Where machines share their configuration, the texts of the store count in place of both files (`SharedTexts`).

The files are made with their defaults together with the home and never again, checked every 50 ms, and read again when
they changed. INVARIANT: a file that is missing, unreadable or invalid denies everything (E3205): a broken policy must
not open anything. So does an old `policy.toml`: what it forbade must not be dropped silently.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock.authority.cedar import DEFAULT, Rule, Rules, Slice
from interlock.authority.decisions import MOST_DECISIONS, Engine, Memory, Question, caller_facts, expiry
from interlock.authority.policy_entities import NOTHING, entities_of, rules_near
from interlock.authority.principals import DEFAULT as DEFAULT_PRINCIPALS
from interlock.authority.principals import Principal, Principals
from interlock.call.context import Caller
from interlock.call.phases import Decision
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.record import record

if TYPE_CHECKING:
    from interlock.authority.policy_question import CedarQuestion
    from interlock.contract.contract import Contract

__all__ = ["Engine", "Explanation", "Policies", "Question", "RuleView"]

_log = logging.getLogger("interlock.policy")

# The interval at which the files are checked for changes.
LOOK_EVERY_S = 0.05

# Explaining


@record
class RuleView:
    """The state of one rule for a question: met, not met, or broken; without a person's agreement and with it."""

    rule: Rule
    holds: str
    holds_approved: str


@record
class Explanation:
    """A decision, every rule that could have applied, and what would have to change."""

    decision: Decision
    rules: tuple[RuleView, ...]
    advice: tuple[str, ...]


# The engine of a home


class _Loaded:
    """One state of the files, and what was compiled from it."""

    def __init__(self, rules: Rules, monotonic: Callable[[], float]) -> None:
        self.rules = rules
        self.memory = Memory(monotonic)
        # Whether every call is denied, by the caller, the rules and the attributes of the tool that they mention.
        self.denied: dict[tuple[object, ...], bool] = {}
        # The rules that can apply, by the caller and the attributes of the tool that rules mention.
        self.at_best: dict[tuple[object, ...], Slice] = {}


Seen = tuple[object, ...]


class SharedTexts:
    """Texts that are in force in place of the files of the home. `texts` is set when they change."""

    def __init__(self, principals: str, policy: str) -> None:
        self.texts = (principals, policy)


# many methods: the engine and its loaded files change together, under one freshness check
class Policies:
    """The rules in a home's files, as an engine."""

    def __init__(
        self,
        policy: Path,
        principals: Path,
        *,
        clock: Clock,
        environment: str = "local",
        shared: SharedTexts | None = None,
    ) -> None:
        self.path = policy
        self._principals_path = principals
        self._former = policy.with_name("policy.toml")
        self._shared = shared
        self._environment = environment
        self._monotonic = clock.monotonic
        self._looked_at = float("-inf")
        self._seen: Seen = ()
        self._loaded: _Loaded | None = None
        self._principals: Principals | None = None
        self._broken: Failure | None = None
        # The same for callers, who do not see the content of the files.
        self._reason_for_callers = ""
        self._nobody: dict[str, Caller] = {}
        self.evaluations = 0

    # Deciding

    def cached_for_every_call(self, caller: Caller, digest: str, now: float, now_ms: int) -> Decision | None:
        """The cached decision for a caller and a tool that holds for every call: if no rule reads the call.

        If it is time to check the files, this does it. All calls of one turn of the loop would miss the cache
        otherwise, because none of them decides in another way before all have asked here.
        """
        if now - self._looked_at >= LOOK_EVERY_S:
            self._look()
            self._looked_at = now
        loaded = self._loaded
        if loaded is None:
            return None
        cached = loaded.memory.for_every_call.get((caller, digest))
        if cached is None:
            return None
        decision, until = cached
        return decision if now < until and now_ms < (decision.expires_ms or 0) else None

    def cached(self, question: Question) -> Decision | None:
        """The cached decision for exactly this question, if any."""
        try:
            memory = self._current().memory
        except Failure:
            return None
        slot = memory.slot(question)
        if slot is None:
            return None
        prepared: CedarQuestion = slot.what
        try:
            key = prepared.context(question)
        except Failure:
            return None
        return memory.get(slot, key, question.now_ms, None if prepared.rules.reads else question)

    async def decide(self, question: Question) -> Decision:
        """Decide by the rules. E3205 if there are none that can be used."""
        return self.judge(question)

    def judge(self, question: Question) -> Decision:
        """`decide` without waiting."""
        loaded = self._current()
        memory = loaded.memory
        try:
            slot = memory.slot(question) or memory.open(question, self._ask(question, loaded.rules))
            prepared: CedarQuestion = slot.what
            context = prepared.context(question)
        except Failure as failure:
            return _refused(question, loaded.rules, failure)
        every_call = None if prepared.rules.reads else question
        decision = memory.get(slot, context, question.now_ms, every_call)
        if decision is None:
            self.evaluations += 1
            answer = prepared.rules.ask(prepared.entities, prepared.request, context)
            blocked = prepared.refused_path(question, answer, context) if answer.behavior != "allow" else ""
            decision = Decision(
                behavior=answer.behavior,
                reason=answer.reason,
                rules=answer.rules,
                policy=loaded.rules.version,
                expires_ms=expiry(question),
                blocked_path=blocked or None,
            )
            memory.put(slot, context, decision, every_call)
        return decision

    def denies_every_call(
        self, caller: Caller, address: str, stated: Mapping[str, Any], contract: Contract | None
    ) -> bool | None:
        """Whether a caller is denied a tool whatever they send. E3205 if there are no rules that can be used.

        `stated` are attributes of the tool. If the rules mention no others, the answer for one tool is that for all
        with the same ones, and does not take their contracts. None without a contract where it takes one.
        """
        loaded, who = self._current(), caller_facts(caller)
        kind = who, loaded.rules.kind(address)
        rules = loaded.at_best.get(kind)
        if rules is None:
            if len(loaded.at_best) >= MOST_DECISIONS:
                loaded.at_best.clear()
            rules = loaded.at_best[kind] = rules_near(caller, address, loaded.rules).at_best
        shared = None
        if rules.mentions is not None and rules.mentions <= stated.keys():
            shared = who, rules, *(stated[name] for name in sorted(rules.mentions))
            known = loaded.denied.get(shared)
            if known is not None:
                return known
        if contract is None:
            return None
        request, entities = entities_of(caller, contract, self._environment)
        denied = rules.ask(entities, request, NOTHING).behavior == "deny"
        if shared is not None:
            if len(loaded.denied) >= MOST_DECISIONS:
                loaded.denied.clear()
            loaded.denied[shared] = denied
        return denied

    def state(self, *, anew: bool = False) -> object:
        """Return an object that stays the same until the rules change. With `anew`, the files are read again now."""
        if anew:
            self._looked_at = float("-inf")
        self._refresh()
        return self._loaded or self._broken

    def files(self) -> object:
        """The state of the files that the rules are read from. Any thread may ask."""
        return None if self._shared is not None else (_status(self.path), _status(self._principals_path))

    def forget(self, subjects: Collection[str] | None) -> None:
        """Drop the cached decisions about these callers; None means all."""
        if self._loaded is not None:
            self._loaded.memory.forget(subjects)

    async def close(self) -> None:
        """Nothing is held open."""

    def principal(self, caller_id: str) -> Caller:
        """Return the caller for an id: the same object until a file changes; without rights while principals.toml is
        broken.
        """
        self._refresh()
        if self._principals is not None:
            return self._principals.caller(caller_id)
        if len(self._nobody) > 1000:
            self._nobody.clear()
        return self._nobody.setdefault(caller_id, Caller(id=caller_id))

    def knows(self, caller_id: str) -> bool:
        """Whether principals.toml has an entry for an id."""
        self._refresh()
        return self._principals is not None and self._principals.knows(caller_id)

    @property
    def rules(self) -> Rules:
        """The rules in force; E3205 if the files are broken."""
        return self._current().rules

    @property
    def entries(self) -> tuple[Principal, ...]:
        """The entries of principals.toml; none while it is broken."""
        self._refresh()
        return () if self._principals is None else self._principals.entries

    @property
    def groups(self) -> frozenset[str]:
        """Every group that principals.toml assigns to somebody."""
        self._refresh()
        return frozenset() if self._principals is None else self._principals.groups

    # Explaining

    def explain(self, question: Question) -> Explanation:
        """Explain a decision: the deciding rule, the state of every other one, and what would have to change."""
        rules = self._current().rules
        prepared = self._ask(question, rules)
        decision = self.judge(question)
        try:
            context = prepared.context(question)
        except Failure as failure:
            return Explanation(
                decision=decision,
                rules=(),
                advice=(f"the call is sent so that rules can look at it: {failure.message}",),
            )
        views = tuple(
            RuleView(
                rule=rule,
                holds=prepared.near.holds(rule, prepared.entities, prepared.request, context, approved=False),
                holds_approved=prepared.near.holds(rule, prepared.entities, prepared.request, context, approved=True),
            )
            for rule in prepared.near.rules
        )
        return Explanation(decision=decision, rules=views, advice=tuple(_advice(decision, views)))

    def _ask(self, question: Question, rules: Rules) -> CedarQuestion:
        from interlock.authority.policy_question import CedarQuestion  # with the facts of calls; many commands ask none

        return CedarQuestion(question, rules, self._environment)

    # Files

    def _current(self) -> _Loaded:
        self._refresh()
        if self._loaded is None:
            assert self._broken is not None
            raise Failure("E3205", self._reason_for_callers)
        return self._loaded

    def _refresh(self) -> None:
        monotonic = self._monotonic
        now = monotonic()
        if now - self._looked_at >= LOOK_EVERY_S:
            self._look()
            self._looked_at = now

    def _look(self) -> None:
        former = self._shared is None and _status(self._former)
        seen: Seen = (_status(self.path), _status(self._principals_path), former)
        if self._shared is not None:
            seen = self._shared.texts
        if seen == self._seen and (self._loaded or self._broken):
            return
        self._seen = seen
        before = self._broken
        self._load(former=self._shared is None and former is not None)
        # Logged once for each change, not for each refused call.
        if self._broken is not None and (before is None or before.message != self._broken.message):
            _log.error("the policy cannot be used: %s", self._broken.message)
        elif self._broken is None and before is not None:
            _log.warning("the policy can be used again")

    def _load(self, *, former: bool) -> None:
        self._loaded = self._principals = self._broken = None
        if former:
            self._reason_for_callers = "there is a policy.toml: move its rules to policy.cedar and remove it"
            self._broken = Failure("E3205", self._reason_for_callers)
            return
        # People keep their rights while the rules are broken: somebody must be able to repair them.
        parsed = ""
        try:
            text = read_file(self._principals_path) if self._shared is None else self._shared.texts[0]
            parsed = self._principals_path.name
            self._principals = Principals(text)
            parsed = ""
            text = read_file(self.path) if self._shared is None else self._shared.texts[1]
            parsed = self.path.name
            self._loaded = _Loaded(Rules(text), self._monotonic)
        except Failure as failure:
            self._broken = failure
            self._reason_for_callers = _fault_in(parsed, failure) if parsed else failure.message


def _status(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def read_file(path: Path) -> str:
    """Read a policy file; E3205 if it is missing or not text, with what to do."""
    try:
        return path.read_text()
    except FileNotFoundError:
        words = f"{path.name} is missing from the data directory, so nothing is allowed; {_PUT_BACK[path.suffix]}"
        raise Failure("E3205", words) from None
    except (OSError, UnicodeDecodeError):
        raise Failure("E3205", f"{path.name} cannot be read") from None


def _fault_in(name: str, failure: Failure) -> str:
    """Describe the fault of an invalid file for callers: its place, and nothing of its content."""
    line = (failure.details or {}).get("line")
    where = "" if line is None else f" in line {line}"
    return f"{name} has a fault{where}, so nothing is allowed; `interlock doctor` shows it to an operator"


_PUT_BACK = {
    ".cedar": "put it back with `interlock policy apply FILE`; `interlock policy default` prints the default policy",
    ".toml": "put it back from a backup; `interlock policy default --principals` prints the default file",
}


def make_defaults(policy: Path, principals: Path) -> None:
    """Create missing policy files of a new home; each appears whole or not at all. E3801 if that fails."""
    for path, text in ((policy, DEFAULT), (principals, DEFAULT_PRINCIPALS)):
        staged = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
        try:
            if not path.exists():
                staged.write_text(text)
                staged.chmod(0o600)
                os.link(staged, path)
        except FileExistsError:
            pass  # another process was first
        except OSError as error:
            raise Failure("E3801", f"{path.name} cannot be made in the data directory: {error.strerror}") from None
        finally:
            staged.unlink(missing_ok=True)


def _refused(question: Question, rules: Rules, failure: Failure) -> Decision:
    return Decision(behavior="deny", reason=failure.message, rules=(), policy=rules.version, expires_ms=question.now_ms)


def _advice(decision: Decision, views: Collection[RuleView]) -> Iterator[str]:
    """Yield what would have to change for the call to be allowed."""
    broken = [view for view in views if view.holds not in _HOLDS or view.holds_approved not in _HOLDS]
    if decision.behavior == "ask":
        yield "a person approves this call"
    if decision.behavior in ("allow", "ask"):
        return
    for view in broken:
        yield f"rule `{view.rule.id}` (line {view.rule.line}) can be evaluated"
    for view in views:
        if view.rule.effect == "forbid" and view.holds_approved == "yes":
            yield f"rule `{view.rule.id}` (line {view.rule.line}) no longer forbids it; approval does not lift it"
    permits = [view for view in views if view.rule.effect == "permit"]
    if not any(view.holds_approved == "yes" for view in permits):
        near = ", ".join(f"`{view.rule.id}`" for view in permits) or "none"
        yield f"a permit covers it; those that speak of this tool and do not: {near}"


_HOLDS = ("yes", "no")

"""The local policy: a short list of rules in a file a person can read, replace and keep under version control.

Rules match callers, tools and mutation classes. Deny beats ask beats allow, and what no rule matches is denied. A file
that cannot be read or understood denies everything: a broken policy must not open a door.
"""

from __future__ import annotations

import fnmatch
import hashlib
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pydantic

from interlock.core.context import Caller
from interlock.core.contract import Contract
from interlock.core.errors import Failure
from interlock.core.manifest import MutationClass
from interlock.core.phases import Behavior, Decision

DEFAULT = """\
# What the local user's calls may do. Deny beats ask beats allow; what no rule matches is denied.
# Edit it, or replace it: it is read again whenever it changes.

[[rule]]
id = "reads-and-undoable-writes"
effect = "allow"
mutation_class = ["read_only", "write_reversible"]

[[rule]]
id = "a-person-decides-what-cannot-be-undone"
effect = "ask"
mutation_class = ["write_irreversible"]

# What the local user may do besides calling tools.
[[grant]]
caller = "local:*"
scopes = ["audit:read", "calls:reconcile", "tools:admin", "pii:read"]
"""

# A changed file is noticed this soon.
LOOK_EVERY_S = 0.05

_STRENGTH: dict[Behavior, int] = {"allow": 0, "ask": 1, "deny": 2}


class Rule(pydantic.BaseModel):
    """One line of policy. Unsaid conditions match everything."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    id: str
    effect: Literal["allow", "ask", "deny"]
    caller: str = "*"
    tool: str = "*"
    mutation_class: tuple[MutationClass, ...] = ("read_only", "write_reversible", "write_irreversible")

    def matches(self, caller: Caller, contract: Contract) -> bool:
        return (
            contract.mutation.mutation_class in self.mutation_class
            and fnmatch.fnmatchcase(caller.id, self.caller)
            and fnmatch.fnmatchcase(str(contract.id), self.tool)
        )


class Grant(pydantic.BaseModel):
    """Scopes that a caller holds."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    caller: str
    scopes: tuple[str, ...]


class _File(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    rule: tuple[Rule, ...] = ()
    grant: tuple[Grant, ...] = ()


class Policy:
    """Rules and what they decide. Decisions are cached under everything a rule reads."""

    def __init__(self, text: str) -> None:
        self.version = f"local:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        self._cache: dict[tuple[str, str], Decision] = {}
        self._scopes: dict[str, frozenset[str]] = {}
        try:
            file = _File.model_validate(tomllib.loads(text))
        except (tomllib.TOMLDecodeError, pydantic.ValidationError) as error:
            raise Failure("E3205", f"the policy file cannot be used: {_first_line(error)}") from None
        self.rules = file.rule
        self.grants = file.grant

    def scopes(self, caller_id: str) -> frozenset[str]:
        """The scopes a local caller holds."""
        held = self._scopes.get(caller_id)
        if held is None:
            matching = [grant.scopes for grant in self.grants if fnmatch.fnmatchcase(caller_id, grant.caller)]
            held = self._scopes[caller_id] = frozenset(scope for scopes in matching for scope in scopes)
        return held

    def decide(self, caller: Caller, contract: Contract) -> Decision:
        """What the rules say of this caller calling this version."""
        key = (caller.id, contract.digest)
        decision = self._cache.get(key)
        if decision is None:
            if len(self._cache) > 50_000:
                self._cache.clear()
            decision = self._cache[key] = self._evaluate(caller, contract)
        return decision

    def _evaluate(self, caller: Caller, contract: Contract) -> Decision:
        matching = [rule for rule in self.rules if rule.matches(caller, contract)]
        if not matching:
            return Decision(behavior="deny", reason="no rule allows it", rules=(), policy=self.version)
        behavior: Behavior = max((rule.effect for rule in matching), key=lambda effect: _STRENGTH[effect])
        rules = tuple(rule.id for rule in matching if rule.effect == behavior)
        return Decision(behavior=behavior, reason=f"rule {', '.join(rules)}", rules=rules, policy=self.version)


def _first_line(error: Exception) -> str:
    if isinstance(error, pydantic.ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error).splitlines()[0]


class PolicyFile:
    """The policy of a home, read again whenever its file changes."""

    def __init__(self, path: Path, monotonic: Callable[[], float]) -> None:
        self._path = path
        self._monotonic = monotonic
        self._looked_at = float("-inf")
        self._seen: tuple[int, int, int] | None = None
        self._policy: Policy | None = None
        if not path.exists():
            try:
                path.write_text(DEFAULT)
            except OSError:
                pass  # a read-only home; the default below is what the file would say

    def current(self) -> Policy:
        """The policy in force; E3205 when its file is broken."""
        now = self._monotonic()
        if self._policy is not None and now - self._looked_at < LOOK_EVERY_S:
            return self._policy
        try:
            status = self._path.stat()
            seen = (status.st_mtime_ns, status.st_size, status.st_ino)
            if self._policy is None or seen != self._seen:
                self._policy = Policy(self._path.read_text())
                self._seen = seen
        except FileNotFoundError:
            self._policy, self._seen = Policy(DEFAULT), None
        except (OSError, UnicodeDecodeError):
            self._policy = None
            raise Failure("E3205", "the policy file cannot be read") from None
        except Failure:
            self._policy = None
            raise
        self._looked_at = now
        return self._policy

"""Questions for policy engines, made of a schema and a few words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interlock.authority.decisions import Question
from interlock.authority.policy import Policies, make_defaults
from interlock.call.capability import Capability, Link, ToolGrant
from interlock.call.context import Caller
from interlock.contract.contract import Contract, parse_contract
from interlock.testing import FakeClock

ALICE = Caller(id="local:alice", trust=60, groups=frozenset({"staff"}), scopes=frozenset({"audit:read"}))


def contract(properties: Mapping[str, Any] | None = None, **said: Any) -> Contract:
    """A tool `demo.act` with these parameters; it reads unless told otherwise."""
    parameters = {"type": "object", "properties": dict(properties or {})}
    facts: dict[str, Any] = {
        "tool_id": "act", "namespace": "demo", "version": "1.0.0", "name": "Act", "description": "do what is asked",
        "provider": "tests", "protocol": "native", "parameters": parameters, "result_schema": {},
        "required_permissions": [], "mutation_class": "read_only", "idempotency": {}, "observability": {},
        "timeout_class": "standard",
    }  # fmt: skip
    return parse_contract(facts | said)


READ = contract({"amount": {"type": "integer"}, "path": {"type": "string", "format": "path"}})


def question(
    tool: Contract = READ,
    arguments: Mapping[str, Any] | None = None,
    *,
    caller: Caller = ALICE,
    operation: str = "invoke",
    session: str = "",
    door: str = "library",
    native: str | None = None,
    budgets: tuple[int, int] = (0, 0),
    now_ms: int = 1_800_000_000_000,
) -> Question:
    given = arguments or {}
    return Question(caller, tool, tool.digest, given, operation, session, door, native, budgets, now_ms)


def capability(*expires_s: int, digest: str = "d1", subject: str = "did:web:agent.example") -> Capability:
    """A chain whose links end at these times."""
    links = tuple(
        Link(
            jti=f"j{at}",
            subject=subject if at else "local:alice",
            scopes=frozenset(),
            tools=(ToolGrant("*"),),
            not_before=0,
            expires=expires,
            constraints={},
        )
        for at, expires in enumerate(expires_s)
    )
    return Capability(digest=digest, issuer="tests", links=links)


class PolicyHome:
    """A home's policy files and the engine over them, on a clock that stands still."""

    def __init__(self, path: Path, text: str | None = None) -> None:
        self.path = path
        self.clock = FakeClock()
        if text is not None:
            (path / "policy.cedar").write_text(text)
        make_defaults(path / "policy.cedar", path / "principals.toml")
        self.engine = Policies(path / "policy.cedar", path / "principals.toml", clock=self.clock.clock)

    def write(self, text: str, name: str = "policy.cedar") -> None:
        """Change a file, and let the time pass in which that is noticed."""
        (self.path / name).write_text(text)
        self.clock.advance(1)

    def says(self, asked: Question) -> str:
        return self.engine.judge(asked).behavior

"""The check of `interlock doctor` that concerns the policy: its rules, and the people and tools it speaks of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from interlock.api.doctor.findings import Finding, Status, if_usable

if TYPE_CHECKING:
    from interlock.authority.cedar import Rule
    from interlock.contract.contract import Contract
    from interlock.store.home import Home


def check_policy(home: Home) -> Iterator[Finding]:
    from interlock.authority.cedar import DEFAULT, Rules
    from interlock.authority.policy import read_file
    from interlock.authority.policy_check import check
    from interlock.authority.principals import DEFAULT as DEFAULT_PRINCIPALS
    from interlock.authority.principals import Principals
    from interlock.store.shared_config import text_of

    former = home.path / "policy.toml"
    if former.exists() and home.shared is None:
        what = "there is a policy.toml, which counts no more; nothing is allowed while it is there"
        yield Finding("policy", "broken", what, "move its rules to policy.cedar and its people to principals.toml")
        return
    # What a home is made with is there before its database.
    made, shared = home.made, home.shared
    text = text_of(home, home.policy.name)
    if text is None:
        text = read_file(home.policy) if made or home.policy.exists() else DEFAULT
    rules = Rules(text)
    which = f"shared version {shared.version}" if shared else "the default" if text == DEFAULT else str(home.policy)
    yield Finding("policy", "good", f"{which}; what no rule permits is denied ({rules.version})")
    for rule in rules.rules:
        yield Finding("", "good", _rule_words(rule))
    if shared is None:
        yield from _applied(home, text)
    written = text_of(home, home.principals.name)
    if written is None:
        written = read_file(home.principals) if made or home.principals.exists() else DEFAULT_PRINCIPALS
    people = Principals(written)
    contracts, known, groups = rules_speak_of(home, text)
    for fault in check(text, contracts, people.groups | groups, known):
        what = f"line {fault.line}, {fault.rule}: {fault.message}"
        status: Status = "broken" if fault.grave else "attention"
        yield Finding("policy", status, what, "correct the rule, then: interlock policy check")
    for entry in people.entries:
        holds = f"; holds {', '.join(entry.scopes)}" if entry.scopes else ""
        yield Finding("", "good", f"{entry.id} is in {', '.join(entry.groups) or 'no group'}{holds}")


def _applied(home: Home, text: str) -> Iterator[Finding]:
    """Whether the policy in force is the one that was last applied. The file may be edited; nobody is named then."""
    import hashlib

    import orjson

    from interlock.store.inspection import policy_applied

    with if_usable(home) as reader:
        body = None if reader is None else policy_applied(reader)
    applied = None if body is None else orjson.loads(body)
    if applied is not None and applied["after"] != hashlib.sha256(text.encode()).hexdigest():
        what = f"not what {applied['by']} applied at {applied['timestamp']}: the file was changed by hand"
        advice = "see what it says: interlock policy show; put one in force by name: interlock policy apply FILE"
        yield Finding("policy", "attention", what, advice)


def rules_speak_of(home: Home, text: str) -> tuple[list[Contract], set[str], frozenset[str]]:
    """The contracts of the tools that rules depend on, the names of all tools, and the groups of known callers."""
    import orjson

    from interlock.authority.policy_check import concerned
    from interlock.contract.contract import parse_contract
    from interlock.store import inspection

    contracts, known, matters = list["Contract"](), set[str](), concerned(text)
    with if_usable(home) as reader:
        if reader is None:
            return contracts, known, frozenset()
        for address, manifest in inspection.manifests(reader):
            known.add(address)
            if matters(address, manifest):
                contracts.append(parse_contract(orjson.loads(manifest)))
        return contracts, known, inspection.groups(reader)


def _rule_words(rule: Rule) -> str:
    return f"{'a person decides' if rule.asks else rule.effect}: {rule.id}"

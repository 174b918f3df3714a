"""Rules decide, in whatever order they stand; decisions are remembered under all they depended on, and no longer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.authority import cedar, policy_check, principals
from interlock.authority.decisions import Question
from interlock.authority.policy import Policies, make_defaults
from interlock.call.context import Caller
from interlock.core.errors import Failure
from tests.authority.questions import ALICE, READ, PolicyHome, capability, contract, question

UNDOABLE = contract({"amount": {"type": "integer"}}, mutation_class="write_reversible", compensable=True, effects=[
    {"resource": "a:{amount}", "operation": "UPDATE"}])  # fmt: skip
FINAL = contract(mutation_class="write_irreversible", previews=True, effects=[{"resource": "a", "operation": "DELETE"}])
ALLOW = '@id("all") permit (principal, action, resource);'


@pytest.fixture
def home(tmp_path: Path) -> Callable[..., PolicyHome]:
    return partial(PolicyHome, tmp_path)


MakeHome = Callable[..., PolicyHome]


# What rules decide


def test_the_default_allows_what_can_be_undone_and_asks_about_the_rest(home: MakeHome) -> None:
    made = home()
    assert (made.path / "policy.cedar").read_text() == cedar.DEFAULT
    assert (made.path / "principals.toml").read_text() == principals.DEFAULT
    assert made.says(question(READ)) == "allow"
    assert made.says(question(UNDOABLE)) == "allow"
    decision = made.engine.judge(question(FINAL))
    assert (decision.behavior, decision.rules) == ("ask", ("a-person-decides-what-cannot-be-undone",))
    assert decision.reason == "rule a-person-decides-what-cannot-be-undone"
    assert decision.policy.startswith("local:")


RULES = [
    ALLOW,
    '@id("permit-approved") permit (principal, action, resource) when { context.approved };',
    '@id("ask-staff") forbid (principal in Group::"staff", action, resource) unless { context.approved };',
    '@id("large") forbid (principal, action == Action::"demo.act", resource) when { context.arguments.amount > 5 };',
    """@id("ask-writes") forbid (principal, action, resource)
       when { resource.mutation_class != "read_only" } unless { context.approved };""",
    '@id("deny-other") forbid (principal, action == Action::"demo.other", resource);',
    '@id("deny-services") forbid (principal is Service, action, resource);',
]


def expected(chosen: set[int], caller: Caller, writes: bool, amount: int) -> str:
    """The outcome by hand: deny beats ask beats allow, and what nothing allows is denied."""
    if (3 in chosen and amount > 5) or (6 in chosen and caller.kind == "service"):
        return "deny"
    asks = (2 in chosen and "staff" in caller.groups) or (4 in chosen and writes)
    if 0 in chosen:
        return "ask" if asks else "allow"
    return "ask" if 1 in chosen else "deny"


SERVICE = Caller(id="did:web:service.example", kind="service")


@pytest.mark.proves("AUTH-11")
@given(
    order=st.lists(st.integers(0, len(RULES) - 1), unique=True).flatmap(lambda some: st.permutations(some)),
    caller=st.sampled_from([ALICE, SERVICE]),
    writes=st.booleans(),
    amount=st.integers(0, 10),
)
def test_the_order_of_rules_never_matters(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], caller: Caller, writes: bool, amount: int
) -> None:
    asked = question(UNDOABLE if writes else READ, {"amount": amount}, caller=caller)
    path = tmp_path_factory.mktemp("home")
    decision = PolicyHome(path, "\n".join(RULES[at] for at in order)).engine.judge(asked)
    assert decision.behavior == expected(set(order), caller, writes, amount)
    reordered = PolicyHome(path, "\n".join(RULES[at] for at in sorted(order))).engine.judge(asked)
    assert (reordered.behavior, set(reordered.rules)) == (decision.behavior, set(decision.rules))


@pytest.mark.proves("AUTH-04")
def test_allowing_a_read_and_denying_a_delete_of_one_tool(home: MakeHome) -> None:
    tool = contract({"action": {"type": "string"}})
    made = home(
        ALLOW + '@id("no-delete") forbid (principal, action, resource) when { context.arguments.action == "delete" };'
    )
    assert made.says(question(tool, {"action": "read"})) == "allow"
    assert made.engine.judge(question(tool, {"action": "delete"})).rules == ("no-delete",)


@pytest.mark.parametrize(
    "condition",
    [
        "context.arguments.missing > 1", "context.nonsense", "principal.nonsense == 1", "resource.owner == principal",
        "context.arguments.amount > 1", "context.native == \"x\"", "context.time.century > 1",
    ],
)  # fmt: skip
def test_a_forbid_that_cannot_be_evaluated_denies(home: MakeHome, condition: str) -> None:
    made = home(ALLOW + f'@id("guard") forbid (principal, action, resource) when {{ {condition} }};')
    decision = made.engine.judge(question(READ, {"path": "/x"}))
    assert decision.behavior == "deny"
    assert "`guard`" in decision.reason


def test_a_permit_that_cannot_be_evaluated_denies_too(home: MakeHome) -> None:
    made = home(ALLOW + '@id("odd") permit (principal, action, resource) when { context.nonsense };')
    assert made.says(question()) == "deny"


def test_an_error_that_only_approval_brings_about_denies(home: MakeHome) -> None:
    made = home('@id("a") permit (principal, action, resource) when { context.approved && context.nonsense };')
    decision = made.engine.judge(question())
    assert decision.behavior == "deny"
    assert "`a`" in decision.reason


@pytest.mark.parametrize(
    "value", [2**63, 0.123456, {"__entity": {"type": "Group", "id": "admins"}}, {"__extn": {"fn": "ip", "arg": "::"}}]
)
def test_a_value_no_rule_can_look_at_does_not_slip_past_one(home: MakeHome, value: Any) -> None:
    tool = contract({"amount": {}, "note": {}})
    made = home(ALLOW + '@id("g") forbid (principal, action, resource) when { context.arguments.amount == 7 };')
    decision = made.engine.judge(question(tool, {"amount": value}))
    assert decision.behavior == "deny"
    assert "`amount" in decision.reason
    assert made.says(question(tool, {"amount": 1, "note": value})) == "allow"


@pytest.mark.parametrize(
    ("condition", "met", "unmet"),
    [
        ('context.operation == "compensate"', {"operation": "compensate"}, {}),
        ('context.door == "mcp"', {"door": "mcp"}, {}),
        ('context.session == "s"', {"session": "s"}, {}),
        ('context has native && context.native == "pets.delete"', {"native": "pets.delete"}, {}),
        ("context.budgets.left < 10", {"budgets": (5, 9)}, {"budgets": (5, 10)}),
        ("context.time.hour == 8 && context.time.weekday == 5", {"now_ms": 1_800_000_000_000},
         {"now_ms": 1_800_004_000_000}),
        ("context.time.minute_of_day == 480", {"now_ms": 1_800_000_000_000}, {"now_ms": 1_800_000_060_000}),
        ("context.risk >= 30", {"tool": UNDOABLE}, {}),
        ('resource.scope == "resource"', {"tool": UNDOABLE}, {}),
        ('resource in Namespace::"demo" && resource.name == "act"', {}, {"tool": contract(namespace="other")}),
        ('principal.scopes.contains("audit:read")', {}, {"caller": SERVICE}),
        ("principal is Agent && principal.trust < 50 && principal.on_behalf_of == \"local:alice\"",
         {"caller": Caller(id="local:alice", agent="did:web:a.example", trust=10)}, {}),
    ],
)  # fmt: skip
@pytest.mark.proves("AUTH-11")
def test_rules_can_match_what_a_call_is(
    home: MakeHome, condition: str, met: dict[str, Any], unmet: dict[str, Any]
) -> None:
    made = home(ALLOW + f'@id("g") forbid (principal, action, resource) when {{ {condition} }};')
    assert made.engine.judge(question(**met)).rules == ("g",)
    assert made.engine.judge(question(**unmet)).behavior == "allow"


# Remembering


class Asked:
    """Counts how often the rules were really evaluated."""

    def __init__(self, made: PolicyHome) -> None:
        self._made = made

    def anew(self, asked: Question) -> bool:
        before = self._made.engine.evaluations
        remembered = self._made.engine.cached(asked)
        decision = self._made.engine.judge(asked)
        evaluated = self._made.engine.evaluations > before
        assert (remembered is None) == evaluated
        assert self._made.engine.cached(asked) is decision
        return evaluated


def agent(**said: Any) -> Caller:
    facts: dict[str, Any] = {
        "id": "local:alice", "agent": "did:web:agent.example", "kind": "agent", "trust": 50,
        "groups": frozenset({"staff"}), "scopes": frozenset({"a"}),
        "capability": capability(1_800_000_900, 1_800_000_900),
    }  # fmt: skip
    return Caller(**(facts | said))


@pytest.mark.proves("AUTH-05")
@pytest.mark.parametrize(
    "other",
    [
        {"id": "local:bob"}, {"agent": "did:web:other.example"}, {"trust": 51}, {"kind": "service"}, {"tenant": "t"},
        {"groups": frozenset({"x"})}, {"scopes": frozenset({"a", "b"})},
        {"capability": capability(1_800_000_900, 1_800_000_900, digest="d2")},
    ],
)  # fmt: skip
def test_a_second_call_asks_nothing_and_another_caller_does(home: MakeHome, other: dict[str, Any]) -> None:
    asked = Asked(home(ALLOW))
    assert asked.anew(question(caller=agent()))
    assert not asked.anew(question(caller=agent())), "an equal caller in another object"
    assert asked.anew(question(caller=agent(**other)))
    assert not asked.anew(question(caller=agent(**other)))


@pytest.mark.proves("AUTH-05")
def test_another_tool_version_or_permission_is_asked_about_anew(home: MakeHome) -> None:
    asked = Asked(home(ALLOW))
    assert asked.anew(question(READ))
    for tool in (contract(tool_id="other"), contract(version="1.0.1"), contract(required_permissions=["fs:read"])):
        assert asked.anew(question(tool))
    assert not asked.anew(question(READ, {"amount": 5})), "no rule reads the argument"


@pytest.mark.proves("AUTH-05")
@pytest.mark.parametrize(
    ("condition", "first", "same", "other"),
    [
        ("context.arguments.amount > 5", {"arguments": {"amount": 1}}, {"arguments": {"amount": 1, "path": "/x"}},
         {"arguments": {"amount": 2}}),
        ("context.arguments has amount", {"arguments": {"amount": 1}}, {"arguments": {"amount": 1}}, {"arguments": {}}),
        ("context.arguments == {}", {"arguments": {"amount": 1}}, {"arguments": {"amount": 1}},
         {"arguments": {"amount": 1, "path": "/x"}}),
        ('context.paths.contains("/etc")', {"arguments": {"path": "/a/b"}}, {"arguments": {"path": "/a/c/../b"}},
         {"arguments": {"path": "/a/c"}}),
        ('context.operation == "preview"', {}, {"session": "x"}, {"operation": "preview"}),
        ("context.time.hour < 3", {}, {"now_ms": 1_800_000_100_000}, {"now_ms": 1_800_003_600_000 - 8 * 3_600_000}),
        ("context.budgets.left < 3", {"budgets": (0, 9)}, {"budgets": (5, 9)}, {"budgets": (0, 8)}),
        ('context.session == "x"', {}, {"door": "mcp"}, {"session": "y"}),
        ("context == {}", {}, {}, {"door": "mcp"}),
    ],
)  # fmt: skip
def test_a_rule_that_reads_something_is_asked_again_when_that_changes(
    home: MakeHome, condition: str, first: dict[str, Any], same: dict[str, Any], other: dict[str, Any]
) -> None:
    asked = Asked(home(ALLOW + f"forbid (principal, action, resource) when {{ {condition} }};"))
    assert asked.anew(question(**first))
    assert not asked.anew(question(**same))
    assert asked.anew(question(**other))


def test_a_rule_about_another_tool_makes_nobody_read_its_arguments(home: MakeHome) -> None:
    rule = 'forbid (principal, action == Action::"demo.other", resource) when { context.arguments.amount > 5 };'
    asked = Asked(home(ALLOW + rule))
    assert asked.anew(question(arguments={"amount": 1}))
    assert not asked.anew(question(arguments={"amount": 2}))


@pytest.mark.proves("AUTH-05")
@pytest.mark.parametrize(("ends_s", "lives_s"), [(None, 300), (900, 300), (301, 300), (100, 100)])
def test_a_decision_lives_five_minutes_and_never_longer_than_its_token(
    home: MakeHome, ends_s: int | None, lives_s: int
) -> None:
    made, start = home(ALLOW), 1_800_000_000
    token = None if ends_s is None else capability(start + 9000, start + ends_s)
    caller = agent(capability=token)

    def remembered(after_s: float) -> bool:
        return made.engine.cached(question(caller=caller, now_ms=int((start + after_s) * 1000))) is not None

    decision = made.engine.judge(question(caller=caller))
    assert decision.expires_ms == (start + lives_s) * 1000
    assert remembered(lives_s - 0.001)
    assert not remembered(lives_s)


def test_a_clock_set_back_makes_no_decision_last_longer(home: MakeHome) -> None:
    made = home(ALLOW)
    made.engine.judge(question())
    made.clock.monotonic_s += 300
    assert made.engine.cached(question(now_ms=1_799_999_000_000)) is None


@pytest.mark.proves("AUTH-06")
def test_what_is_remembered_of_a_subject_can_be_dropped(home: MakeHome) -> None:
    asked = Asked(home(ALLOW))
    everybody = {
        "local:alice": agent(),
        "local:bob": agent(id="local:bob", agent="did:web:b.example", capability=None),
        "did:web:c.example": agent(id="local:carol", agent="did:web:c.example", capability=None),
    }

    def dropped(subjects: list[str] | None) -> set[str]:
        for caller in everybody.values():
            asked.anew(question(caller=caller))
        asked._made.engine.forget(subjects)  # pyright: ignore[reportPrivateUsage] - of this very module
        return {name for name, caller in everybody.items() if asked.anew(question(caller=caller))}

    for name in everybody:
        assert dropped([name]) == {name}
    assert dropped(["did:web:agent.example"]) == {"local:alice"}, "whoever is in the chain"
    assert dropped([]) == set()
    assert dropped(None) == everybody.keys()


def test_the_memory_is_bounded(home: MakeHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlock.authority.decisions.MOST_DECISIONS", 10)
    made = home(ALLOW + "forbid (principal, action, resource) when { context.arguments.amount > 500 };")
    for amount in range(50):
        assert made.says(question(arguments={"amount": amount})) == "allow"
    assert sum(made.engine.cached(question(arguments={"amount": amount})) is not None for amount in range(50)) <= 11


def test_a_long_key_is_remembered_by_its_hash(home: MakeHome) -> None:
    asked = Asked(home(ALLOW + 'forbid (principal, action, resource) when { context.session == "x" };'))
    assert asked.anew(question(session="s" * 10_000))
    assert not asked.anew(question(session="s" * 10_000))
    assert asked.anew(question(session="s" * 10_001))


# Files


def test_a_changed_file_counts_at_once_for_decisions_that_were_remembered(home: MakeHome) -> None:
    made = home(ALLOW)
    assert made.says(question()) == "allow"
    made.write("forbid (principal, action, resource);")
    assert made.engine.cached(question()) is None
    assert made.says(question()) == "deny"
    made.write(ALLOW)
    assert made.says(question()) == "allow"


def failure_of(made: PolicyHome) -> Failure:
    with pytest.raises(Failure) as caught:
        made.engine.judge(question())
    assert caught.value.code == "E3205"
    assert made.engine.cached(question()) is None
    return caught.value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("permit (principal, action, resource);\n\n// a ; b\nforbid (principal, action resource);", "line 4: "),
        ('permit (principal, action, resource) when { "a;b" == ";" };\npermit (principal', "line 2: "),
        ("\nforbid (principal == ?principal, action, resource);", "line 2: a template decides nothing"),
        ("permit (principal, action, resource) when { context.x. };", "line 1: "),
    ],
)
@pytest.mark.proves("AUTH-04")
def test_a_broken_policy_denies_everything_and_says_where(
    home: MakeHome, text: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = home(ALLOW)
    assert made.says(question()) == "allow"
    made.write(text)
    line = words.partition(":")[0]
    assert failure_of(made).message == (
        f"policy.cedar has a fault in {line}, so nothing is allowed; `interlock doctor` shows it to an operator"
    )
    assert words in caplog.text, "the log says what is wrong there"
    assert made.engine.principal("local:alice").scopes, "somebody must be able to mend it"
    made.write(ALLOW)
    assert made.says(question()) == "allow"


def test_broken_principals_deny_everything_and_give_nobody_rights(home: MakeHome) -> None:
    made = home(ALLOW)
    for text in ("[[principal]]\nid = 'x'\ntrust = 101", "nonsense", "[[principle]]\nid = 'x'"):
        made.write(text, "principals.toml")
        assert "principals.toml" in failure_of(made).message
        assert made.engine.principal("local:alice").scopes == frozenset()
        assert made.engine.principal("local:alice") is made.engine.principal("local:alice")


def test_a_former_policy_is_never_dropped_in_silence(home: MakeHome) -> None:
    made = home(ALLOW)
    made.write("[[rule]]", "policy.toml")
    assert "policy.cedar" in failure_of(made).message
    assert made.engine.principal("local:alice").scopes == frozenset()
    (made.path / "policy.toml").unlink()
    made.clock.advance(1)
    assert made.says(question()) == "allow"


def test_a_policy_that_vanishes_is_not_replaced_by_the_default(home: MakeHome) -> None:
    made = home(ALLOW)
    assert made.says(question()) == "allow"
    (made.path / "policy.cedar").unlink()
    made.clock.advance(1)
    assert "missing" in failure_of(made).message


def test_a_policy_that_is_not_text_denies(home: MakeHome) -> None:
    made = home(ALLOW)
    (made.path / "policy.cedar").write_bytes(b"\xff\xfe")
    assert "cannot be read" in failure_of(made).message


def test_missing_principals_deny_everything_and_give_nobody_rights(home: MakeHome) -> None:
    made = home(ALLOW)
    (made.path / "principals.toml").unlink()
    again = Policies(made.path / "policy.cedar", made.path / "principals.toml", clock=made.clock.clock)
    with pytest.raises(Failure, match="interlock policy default --principals"):
        again.judge(question())
    assert again.principal("local:alice").scopes == frozenset()
    assert not (made.path / "principals.toml").exists()


def test_defaults_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    home = tmp_path / "gone"
    with pytest.raises(Failure) as refused:
        make_defaults(home / "policy.cedar", home / "principals.toml")
    assert refused.value.code == "E3801"


PEOPLE = """
[[principal]]
id = "did:web:*.trusted.example"
kind = "agent"
trust = 90
[[principal]]
id = "did:*"
kind = "service"
trust = 5
groups = ["robots"]
scopes = ["a"]
"""


def test_principals_are_who_the_file_says(home: MakeHome) -> None:
    made = home(ALLOW)
    made.write(PEOPLE, "principals.toml")
    trusted, other = made.engine.principal("did:web:x.trusted.example"), made.engine.principal("did:web:y.example")
    assert (trusted.kind, trusted.trust, trusted.groups, trusted.scopes) == ("agent", 90, {"robots"}, {"a"})
    assert (other.kind, other.trust) == ("service", 5)
    nobody = made.engine.principal("local:alice")
    assert (nobody.kind, nobody.trust, nobody.groups, nobody.scopes) == ("human", 0, frozenset(), frozenset())
    assert made.engine.principal("did:web:y.example") is other
    assert made.engine.groups == {"robots"}


# Checking and explaining


TYPED = contract(
    {
        "amount": {"type": "integer"}, "price": {"type": "number"}, "flag": {"type": "boolean", "default": True},
        "tags": {"type": "array", "items": {"type": "string"}}, "who": {"$ref": "#/$defs/Who"}, "any": {},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "kind": {"enum": ["a", "b"]},
    },
    parameters={
        "type": "object", "required": ["amount", "who"], "$defs": {
            "Who": {"type": "object", "properties": {"name": {"type": "string"}, "boss": {"$ref": "#/$defs/Who"}},
                    "required": ["name"]}},
        "properties": {
            "amount": {"type": "integer"}, "price": {"type": "number"}, "flag": {"type": "boolean", "default": True},
            "tags": {"type": "array", "items": {"type": "string"}}, "who": {"$ref": "#/$defs/Who"}, "any": {},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "kind": {"enum": ["a", "b"]},
        },
    },
)  # fmt: skip


@pytest.mark.parametrize(
    "condition",
    [
        "context.arguments.amount > 5", 'context.arguments.flag && context.arguments.who.name == "x"',
        'context.arguments has price && context.arguments.price.greaterThan(decimal("2.5"))',
        'context.arguments has tags && context.arguments.tags.contains("x")',
        'context.arguments has note && context.arguments.note == "x"',
        'context.arguments has kind && context.arguments.kind == "a"',
        'context has native && context.native == "x"', "context.budgets.left < 1", "context.time.hour < 3",
        'context.all_paths.contains("/etc") && context.risk > 3 && principal.trust > 1 && resource.external_io',
    ],
)  # fmt: skip
def test_a_sound_rule_passes_the_check(condition: str) -> None:
    text = f'@id("r") permit (principal, action == Action::"demo.act", resource) when {{ {condition} }};'
    assert policy_check.check(text, [TYPED]) == []


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('\n@id("r") permit (principal, action == Action::"demo.act", resource) when { context.arguments.amont > 5 };',
         2, "amont"),
        ('@id("r") permit (principal, action == Action::"demo.act", resource) when { context.arguments.price > 5 };',
         1, "decimal"),
        ('@id("r") permit (principal, action == Action::"demo.nope", resource);', 1, "demo.nope"),
        ('@id("r") permit (principal is Robot, action, resource);', 1, "Robot"),
        ('@id("r") permit (principal, action, resource) when { context.arguments.amount > 5 };', 1, "amount"),
        ('@id("r") permit (principal, action, resource);\n@id("r") permit (principal, action, resource);', 2, "line 1"),
        ("permit (principal, action, resource", 1, "unexpected"),
    ],
)  # fmt: skip
def test_the_check_finds_what_is_wrong_and_where(text: str, line: int, words: str) -> None:
    grave = [fault for fault in policy_check.check(text, [TYPED]) if fault.grave]
    assert [fault.line for fault in grave][:1] == [line]
    assert words in grave[0].message


def test_the_check_notes_what_is_merely_doubtful() -> None:
    text = 'permit (principal in Group::"gone", action, resource in Namespace::"void");'
    messages = [fault.message for fault in policy_check.check(text, [TYPED], groups={"staff"}) if not fault.grave]
    assert [message for message in messages if "Group" in message]
    assert [message for message in messages if "Namespace" in message]
    assert [message for message in messages if "no name" in message]


def test_the_default_has_no_faults_with_and_without_tools() -> None:
    assert policy_check.check(cedar.DEFAULT, []) == []
    assert policy_check.check(cedar.DEFAULT, [TYPED, contract(version="2.0.0")]) == []


def test_the_examples_in_the_default_are_sound_rules() -> None:
    start = cedar.DEFAULT.index("// Large bookings")
    lines = [line.removeprefix("//").removeprefix(" ") for line in cedar.DEFAULT[start:].splitlines()]
    code = "\n".join(line for line in lines if line.startswith(("@", "forbid", "when", "unless")))
    post = contract({"cents": {"type": "integer"}}, tool_id="post", parameters={
        "type": "object", "properties": {"cents": {"type": "integer"}}, "required": ["cents"]})  # fmt: skip
    assert code.count("@id") == 5
    assert policy_check.check(cedar.DEFAULT + code, [post]) == []


def test_versions_of_a_tool_may_be_spoken_about_where_they_agree() -> None:
    older = contract({"a": {"type": "string"}, "b": {"type": "string"}})
    newer = contract({"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "string"}}, version="2.0.0")
    rule = (
        '@id("r") permit (principal, action == Action::"demo.act", resource) '
        'when {{ context.arguments has {0} && context.arguments.{0} == "x" }};'
    )
    assert policy_check.check(rule.format("a"), [older, newer]) == []
    assert policy_check.check(rule.format("c"), [older, newer]) == []
    unsure = '@id("r") permit (principal, action == Action::"demo.act", resource) when { context.arguments.b == "x" };'
    assert [fault.grave for fault in policy_check.check(unsure, [older, newer])] == [True]


def test_an_explanation_names_the_rule_and_what_would_have_to_change(home: MakeHome) -> None:
    made = home()
    asked = made.engine.explain(question(FINAL))
    assert asked.decision.behavior == "ask"
    assert asked.advice == ("a person approves this call",)
    standing = {view.rule.id: (view.holds, view.holds_approved) for view in asked.rules}
    assert standing["a-person-decides-what-cannot-be-undone"] == ("yes", "no")
    assert standing["reads-and-undoable-writes"] == ("no", "no")
    made.write(ALLOW + '@id("never") forbid (principal, action, resource);')
    denied = made.engine.explain(question())
    assert "`never`" in denied.advice[0]
    made.write('@id("p") permit (principal, action, resource) when { principal.trust > 90 };')
    assert "`p`" in made.engine.explain(question()).advice[0]
    made.write(ALLOW + '@id("broken") forbid (principal, action, resource) when { context.nonsense };')
    assert "`broken`" in made.engine.explain(question()).advice[0]
    made.write(ALLOW + '@id("g") forbid (principal, action, resource) when { context.paths.contains("/etc") };')
    refused = made.engine.explain(question(arguments={"path": "~/x"}))
    assert (refused.decision.behavior, refused.rules) == ("deny", ())
    assert refused.advice


def test_statements_end_where_cedar_says() -> None:
    text = """// one; two
@id("a;b") permit (principal, action, resource) // x;
when { "\\";" == "" };

forbid (principal, action, resource);
"""
    assert [statement.line for statement in cedar.statements(text)] == [2, 5]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[principal]]\nkind = 'human'\n", ["`principal.0.id`: a text that is not empty is needed"]),
        ("[[principal]]\nid = 'a'\ntrust = true\n", ["`principal.0.trust`: a whole number from 0 to 100 is needed"]),
        ("[[principal]]\nid = 'a'\ntrust = 101\n", ["`principal.0.trust`: a whole number from 0 to 100 is needed"]),
        ("[[principal]]\nid = 'a'\nkind = ['agent']\n", ["`principal.0.kind`: one of human, agent, service is needed"]),
        (
            "[[principal]]\nid = 'a'\n[[principal]]\nid = 'b'\ngroups = 'g'\nscopes = [1]\n",
            ["`principal.1.groups`: a list of texts is needed", "`principal.1.scopes`: a list of texts is needed"],
        ),
        (
            "[[principal]]\nid = 'a'\nrole = 'b'\n",
            ["`principal.0.role`: there is no such field; an entry has id, kind, trust, groups, scopes"],
        ),
        ("[[principals]]\nid = 'a'\n", ["`principals`: there is no such table; write [[principal]]"]),
        ("principal = ['a']\n", ["`principal.0`: it is a table; write [[principal]]"]),
        ("[principal]\nid = 'a'\n", ["`principal`: it is a list; write [[principal]]"]),
    ],
)
def test_principals_that_cannot_be_used_are_refused_with_the_place(text: str, told: list[str]) -> None:
    with pytest.raises(Failure) as caught:
        principals.Principals(text)
    assert (caught.value.code, caught.value.details) == ("E3205", {"faults": told})
    assert caught.value.message == f"principals.toml cannot be used: {told[0]}"

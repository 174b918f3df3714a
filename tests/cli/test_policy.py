"""`interlock policy`: rules are checked, tried, explained and put in force from the command line."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from tests.support import stores
from tests.support.cli import Cli

RULES = """@id("demo")
permit (principal, action, resource in Namespace::"demo");

@id("large")
forbid (principal, action == Action::"demo.post", resource)
when { context.arguments.cents > 100000 }
unless { context.approved };
"""
LARGE = json.dumps({"account": "cash", "cents": 250_000})
CASES = """[[case]]
tool = "demo.post"
arguments = { account = "cash", cents = 250000 }
expect = "ask"
rule = "large"
[[case]]
principal = "local:alice"
tool = "demo.balance"
arguments = { account = "cash" }
expect = "deny"
"""


def authority_records(cli: Cli) -> list[dict[str, Any]]:
    return stores.bodies(cli.store, "authority")


def test_a_policy_is_checked_then_applied_with_a_record_of_both(cli: Cli) -> None:
    before = (cli.home / "policy.cedar").read_text()
    (cli.path / "typo.cedar").write_text(RULES.replace("cents", "cent"))
    refused = cli("policy", "apply", "typo.cedar")
    assert refused.code == 1
    assert "line 4" in refused.out
    assert "arguments.cent" in refused.out
    assert (cli.home / "policy.cedar").read_text() == before
    assert authority_records(cli) == []

    (cli.path / "new.cedar").write_text(RULES)
    checked = cli.ask("policy", "check", "new.cedar")
    assert (checked["usable"], checked["faults"]) == (True, [])
    applied = cli.ask("policy", "apply", "new.cedar")
    assert applied["applied"]
    assert '+@id("large")' in applied["diff"]
    assert (cli.home / "policy.cedar").read_text() == RULES
    assert (cli.home / "policy.cedar.previous").read_text() == before
    (record,) = authority_records(cli)
    assert record["act"] == "policy.applied"
    assert record["by"].startswith("local:")
    assert [record["before"], record["after"]] == [
        hashlib.sha256(text.encode()).hexdigest() for text in (before, RULES)
    ]
    shown = cli.ask("policy", "show")
    assert [rule["id"] for rule in shown["rules"]] == ["demo", "large"]
    assert shown["digest"] == record["after"]


def test_cached_decisions_are_dropped_with_a_record_of_it(cli: Cli) -> None:
    named = cli("policy", "forget", "local:bob", "local:alice")
    assert "about local:alice, local:bob are dropped" in named.out
    assert cli.ask("policy", "forget") == {"forgotten": True, "subjects": None}
    records = authority_records(cli)
    assert [(one["act"], one["subjects"]) for one in records] == [
        ("policy.forgotten", ["local:alice", "local:bob"]),
        ("policy.forgotten", None),
    ]
    many = cli("policy", "forget", *map(str, range(1001)))
    assert many.code == 1
    assert "at most 1000" in many.err


def test_applying_needs_the_scope_for_it(cli: Cli) -> None:
    (cli.path / "new.cedar").write_text(RULES)
    (cli.home / "principals.toml").write_text('[[principal]]\nid = "local:*"\nscopes = ["audit:read"]\n')
    refused = cli("policy", "apply", "new.cedar")
    assert refused.code == 1
    assert "policy:admin" in refused.err


def test_a_call_is_explained_by_the_rule_that_decides(cli: Cli) -> None:
    (cli.home / "policy.cedar").write_text(RULES)
    asked = cli.ask("policy", "explain", "local:alice", "demo.post", LARGE)
    assert (asked["decision"], asked["rules"], asked["principal"]) == ("ask", ["large"], "local:alice")
    assert asked["would_have_to_change"] == ["a person approves this call"]
    assert cli.ask("policy", "explain", "me", "demo.mail_statement")["decision"] == "ask"
    page = cli("policy", "explain", "me", "demo.mail_statement").out
    assert page.startswith("! ask  ")
    assert "rule demo" in page
    assert "a person is asked all the same" in page
    assert cli("policy", "explain", "me", "demo.post", "[]").code == 2


def test_cases_that_come_out_otherwise_fail(cli: Cli) -> None:
    (cli.home / "policy.cedar").write_text(RULES)
    (cli.path / "cases.toml").write_text(CASES)
    tried = cli("policy", "test", "cases.toml")
    assert tried.code == 1
    assert "1 of 2 cases as expected" in tried.out
    # The words are those of an explanation.
    explained = cli("policy", "explain", "local:alice", "demo.post", LARGE).out.split()[1]
    assert explained == cli.ask("policy", "explain", "local:alice", "demo.post", LARGE)["decision"] == "ask"
    assert " ask " in tried.out
    (cli.path / "odd.toml").write_text('[[case]]\ntool = "demo.post"\nexpect = "perhaps"\n')
    assert "expect" in cli("policy", "test", "odd.toml").err


def test_a_case_comes_out_as_the_call_would_where_a_person_is_asked_whatever_the_rules_say(cli: Cli) -> None:
    (cli.home / "policy.cedar").write_text(RULES)
    wish = {"account": "cash", "to": "press@example.org"}
    waits = cli.call("demo.mail_statement", wish, "--key", "m")["pending"]["reason"]
    case = '[[case]]\ntool = "demo.mail_statement"\nexpect = "allow"\n'
    (cli.path / "cases.toml").write_text(f"{case}{case.replace('allow', 'ask')}{case}operation = 'preview'\n")
    tried = cli("policy", "test", "cases.toml", "--json")
    assert tried.code == 1
    assert [(row["answer"], row["passed"]) for row in tried.json["cases"]] == [
        ("ask", False), ("ask", True), ("allow", True),
    ]  # fmt: skip
    assert (tried.json["cases"][0]["why"], "gate:approval" in tried.json["cases"][0]["rules"]) == (waits, True)
    assert cli.call("demo.mail_statement", wish, "--key", "p", "--dry-run").get("pending") is None


WHEN = """
@id("by-day")
permit (principal, action, resource)
when { context.time.hour >= 6 && context.door != "mcp" && context.budgets.left >= 100 };
"""


def test_a_case_says_when_and_through_what_and_with_how_much_left_its_call_is_made(cli: Cli) -> None:
    (cli.home / "policy.cedar").write_text(WHEN)
    case = '[[case]]\ntool = "demo.balance"\nbudget_left = 100\n'
    (cli.path / "cases.toml").write_text(
        f"{case}at = 2026-11-17T07:00:00Z\nexpect = 'allow'\n"
        f"{case}at = '2026-11-17T07:00:00+02:00'\nexpect = 'deny'\n"
        f"{case}at = 2026-11-17T07:00:00Z\ndoor = 'mcp'\nexpect = 'deny'\n"
        f"{case.replace('100', '99')}at = 2026-11-17T07:00:00Z\nexpect = 'deny'\n"
    )
    tried = cli("policy", "test", "cases.toml")
    assert (tried.code, "4 of 4 cases as expected" in tried.out) == (0, True), tried.out
    for wrong in ("'yesterday'", "2026-11-17T07:00:00"):
        (cli.path / "cases.toml").write_text(f"{case}at = {wrong}\nexpect = 'allow'\n")
        refused = cli("policy", "test", "cases.toml")
        assert (refused.code, "a time with its zone" in refused.err) == (1, True)


def test_a_broken_policy_in_force_is_found_and_can_be_replaced(cli: Cli) -> None:
    (cli.home / "policy.cedar").write_text("permit (principal, action, resource)\n")
    assert cli("policy", "check").code == 1
    assert cli("policy", "show").code == 1
    (cli.path / "new.cedar").write_text(RULES)
    assert cli("policy", "apply", "new.cedar").code == 0
    assert cli("policy", "check").code == 0


def test_only_what_could_be_called_by_somebody_who_is_known_is_explained(cli: Cli) -> None:
    (cli.home / "policy.cedar").write_text(RULES)
    nobody = cli("policy", "explain", "nobody", "demo.post")
    assert (nobody.code, "E3207" in nobody.err, nobody.out) == (1, True, "")
    wrong = cli.ask("policy", "explain", "me", "demo.post", '{"cents": "x"}')["error"]
    assert (wrong["error_code"], [one["pointer"] for one in wrong["details"]["faults"]]) == ("E3301", ["/cents"])
    other = cli.ask("policy", "explain", "me", "demo.post", '{"sents": 1}')["error"]
    assert (other["error_code"], "cents" in other["message"]) == ("E3301", True)
    assert cli.ask("policy", "explain", "me", "demo.post", '{"cents": "250000"}')["decision"] == "ask"

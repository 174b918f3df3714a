"""`interlock policy`: what calls may do, tried out and explained before anything depends on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from interlock.cli.command import Output, anywhere, at_server, looking, over_home, parse_json, require, without_home

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock.api.interlock import Interlock
    from interlock.authority.decisions import Question
    from interlock.authority.policy import Explanation
    from interlock.cli.remote import Server
    from interlock.cli.render import Page

Json = dict[str, Any]
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group()
def policy() -> None:
    """The rules by which calls are allowed, asked about or denied: Cedar, in policy.cedar of the home.

    \b
    interlock policy explain me demo.post '{"account": "cash", "cents": 250}'
    interlock policy check new.cedar
    interlock policy apply new.cedar
    """


# show


async def _show_at_server(server: Server, out: Output, /) -> int:
    told = await server.get("/v1/policy")
    text = str(told.pop("text"))
    out.answer(told, lambda page: page.console.print(_plain(text.rstrip())))
    return 0


@policy.command()
@at_server(_show_at_server)
@looking
async def show(lock: Interlock, out: Output, /) -> int:
    """The rules in force, as they are written.

    \b
    interlock policy show
    """
    rules = lock.policy.rules
    document = {
        "version": rules.version,
        "digest": rules.digest,
        "rules": [{"id": rule.id, "effect": rule.effect, "line": rule.line, "text": rule.text} for rule in rules.rules],
    }
    out.answer(document, lambda page: page.console.print(_plain(rules.text.rstrip())))
    return 0


# default


@policy.command()
@anywhere
@click.option("--principals", is_flag=True, help="principals.toml instead: who callers are, and what they may govern.")
@without_home
def default(out: Output, /, principals: bool) -> int:
    """The policy that a new home gets. A home that has lost its policy allows nothing until one is put back.

    \b
    interlock policy default > first.cedar
    interlock policy apply first.cedar
    """
    from interlock.authority import cedar
    from interlock.authority import principals as people

    name, text = ("principals.toml", people.DEFAULT) if principals else ("policy.cedar", cedar.DEFAULT)
    out.answer({"file": name, "text": text}, lambda page: click.echo(text, nl=False))
    return 0


# check


async def _check_at_server(server: Server, out: Output, /, file: Path | None) -> int:
    text = str((await server.get("/v1/policy"))["text"]) if file is None else _read(file)
    told = await server.post("/v1/policy/check", {"text": text})
    return _answer_check(out, file or Path("policy.cedar"), told["faults"])


@policy.command()
@at_server(_check_at_server)
@click.argument("file", type=_FILE, required=False)
@looking
async def check(lock: Interlock, out: Output, /, file: Path | None) -> int:
    """Check FILE, or the policy in force, against the registered tools and what they take. Exits 1 if it has faults.

    A rule that reads a tool's own arguments must name the tool: action == Action::"demo.post".

    \b
    interlock policy check
    interlock policy check new.cedar
    """
    from interlock.api.policy import fault_document, faults_of

    path = file or lock.policy.path
    return _answer_check(out, path, [fault_document(fault) for fault in faults_of(lock, _read(path))])


def _answer_check(out: Output, path: Path, faults: Sequence[Json]) -> int:
    usable = not any(fault["grave"] for fault in faults)
    document = {"file": str(path), "usable": usable, "faults": faults}
    out.answer(document, lambda page: _show_faults(page, path.name, faults))
    return 0 if usable else 1


def _show_faults(page: Page, name: str, faults: Sequence[Json]) -> None:
    from interlock.cli.render import BAD, GOOD, MAYBE

    if not any(fault["grave"] for fault in faults):
        page.line(GOOD, f" {name} can be used")
    page.table(
        [(BAD if one["grave"] else MAYBE, f"line {one['line']}", one["rule"] or "-", one["message"]) for one in faults]
    )


# test


@policy.command()
@click.argument("file", type=_FILE)
@over_home
async def test(lock: Interlock, out: Output, /, file: Path) -> int:
    """Put every case of FILE to the policy in force. Exits 1 if an answer differs from what the case expects.

    \b
    [[case]]
    principal = "me"
    tool = "demo.post"
    arguments = { account = "cash", cents = 250000 }
    expect = "ask"
    rule = "large-bookings"
    """
    rows = [_try(lock, case) for case in _cases(file)]
    failed = [row for row in rows if not row["passed"]]

    def show_rows(page: Page) -> None:
        from interlock.cli.render import BAD, GOOD

        columns = ("principal", "tool", "expect", "answer", "why")
        cells = [[GOOD if row["passed"] else BAD, *(str(row[column]) for column in columns)] for row in rows]
        page.table(cells, ("", *columns))
        page.line(f"{len(rows) - len(failed)} of {len(rows)} cases as expected")

    out.answer({"cases": rows, "failed": len(failed)}, show_rows)
    return 1 if failed else 0


def _cases(file: Path) -> list[Json]:
    import tomllib

    from interlock.core.errors import Failure

    try:
        cases: Any = tomllib.loads(_read(file)).get("case")
    except tomllib.TOMLDecodeError as error:
        raise Failure("E3004", f"`{file.name}` cannot be read: {error}") from None
    if not isinstance(cases, list) or not cases:
        raise Failure("E3004", f"`{file.name}` has no [[case]]")
    for at, case in enumerate(cast("list[Json]", cases), 1):
        unknown = case.keys() - {"principal", "tool", "arguments", "operation", "expect", "rule"}
        if unknown or "tool" not in case or case.get("expect") not in ("allow", "ask", "deny"):
            words = f"case {at} of `{file.name}` needs a tool and expect = allow, ask or deny"
            raise Failure("E3004", f"{words}; it may not say {', '.join(sorted(unknown))}" if unknown else words)
    return cast("list[Json]", cases)


def _try(lock: Interlock, case: Json) -> Json:
    from interlock.api.policy import asked_all_the_same

    who = str(case.get("principal", "me"))
    question = _question(lock, who, str(case["tool"]), case.get("arguments", {}), str(case.get("operation", "invoke")))
    ruled = lock.policy.judge(question)
    decision = asked_all_the_same(lock, question, ruled) or ruled
    passed = decision.behavior == case["expect"] and case.get("rule") in (None, *decision.rules)
    wanted = case["expect"] + (f" by {case['rule']}" if case.get("rule") else "")
    return {
        "principal": who,
        "tool": case["tool"],
        "expect": wanted,
        "answer": decision.behavior,
        "why": decision.reason,
        "rules": decision.rules,
        "passed": passed,
    }


# explain


@policy.command()
@click.argument("who")
@click.argument("tool", metavar="TOOL[@RANGE]")
@click.argument("arguments", default="{}")
@over_home
async def explain(lock: Interlock, out: Output, /, who: str, tool: str, arguments: str) -> int:
    """Why WHO may call TOOL with ARGUMENTS, or may not: which rule decides, and what would have to change.

    WHO is `me`, the name or DID of a registered identity, or an id that principals.toml speaks of (local:alice).
    ARGUMENTS may leave some out. Nothing is called.

    \b
    interlock policy explain me demo.post '{"account": "cash", "cents": 250}'
    interlock policy explain local:alice demo.mail_statement
    """
    from interlock.api.policy import asked_all_the_same

    given = parse_json(arguments, "ARGUMENTS")
    if not isinstance(given, dict):
        raise click.UsageError("ARGUMENTS: write a JSON object")
    question = _question(lock, who, tool, cast("Json", given), "invoke")
    explanation = lock.policy.explain(question)
    decision = explanation.decision
    stricter = asked_all_the_same(lock, question, decision)
    asked = None if stricter is None else stricter.reason
    document = {
        "principal": question.caller.acting,
        "tool": question.contract.ref,
        "decision": decision.behavior,
        "reason": decision.reason,
        "rules": decision.rules,
        "policy": decision.policy,
        "would_have_to_change": explanation.advice,
        "gate": asked,
        "considered": [
            {
                "id": view.rule.id,
                "effect": view.rule.effect,
                "line": view.rule.line,
                "holds": view.holds,
                "holds_when_approved": view.holds_approved,
            }
            for view in explanation.rules
        ],
    }
    out.answer(document, lambda page: _show_explanation(page, question, explanation, asked))
    return 0


def _show_explanation(page: Page, question: Question, explanation: Explanation, asked: str | None) -> None:
    from interlock.cli.render import BAD, GOOD, MAYBE, Text

    decision = explanation.decision
    mark = {"allow": GOOD, "ask": MAYBE}.get(decision.behavior, BAD)
    word = {"allow": "allowed", "ask": "a person decides", "deny": "denied"}.get(decision.behavior, decision.behavior)
    page.line(mark, " ", Text(word, "bold"), f"  {question.caller.acting} calls {question.contract.ref}")
    page.line(f"  {decision.reason}")
    if asked is not None:
        page.line("  ", MAYBE, f" a person is asked all the same: {asked}")
    for view in explanation.rules:
        if view.rule.id in decision.rules:
            page.line("")
            for number, line in enumerate(view.rule.text.splitlines(), view.rule.line):
                page.line(Text(f"  {number:>4}  ", "dim"), line)
    others = [view for view in explanation.rules if view.rule.id not in decision.rules]
    if others:
        page.line("")
        words = {"yes": "applies", "no": "does not apply"}
        page.table([(f"  {view.rule.effect}", view.rule.id, words.get(view.holds, view.holds)) for view in others])
    if explanation.advice:
        page.line("")
        page.line("  for this call to be allowed:")
        for advice in explanation.advice:
            page.line(f"  - {advice}")


def _question(lock: Interlock, who: str, tool: str, arguments: Json, operation: str) -> Question:
    from interlock.api.policy import question_of, somebody

    caller = lock.caller if who == "me" else somebody(lock, who)
    return question_of(lock, caller, tool, arguments, operation, "cli")


# apply


@policy.command()
@click.argument("file", type=_FILE)
@over_home
async def apply(lock: Interlock, out: Output, /, file: Path) -> int:
    """Make FILE the policy, if it has no faults. Shows what changes, keeps the former one, and puts it on record.

    \b
    interlock policy apply new.cedar
    """
    from interlock.api.policy import Policy, fault_document, faults_of

    require(lock.caller, "policy:admin", "changing the policy")
    text, before = _read(file), _former(lock.policy.path)
    faults = faults_of(lock, text)
    told = [fault_document(fault) for fault in faults]
    if any(fault.grave for fault in faults):
        document = {"applied": False, "faults": told}
        out.answer(document, lambda page: _show_faults(page, file.name, told))
        return 1
    changes, replaces = _diff(before, text), lock.policy.path.exists()
    await Policy(lock).apply(text, by=lock.caller)

    def show_changes(page: Page) -> None:
        from interlock.cli.render import GOOD, Text

        for line in changes:
            page.line(Text(line, {"+": "green", "-": "red"}.get(line[:1], "dim")))
        kept = "; the former policy is kept in policy.cedar.previous" if replaces else ""
        page.line(GOOD, f" applied{kept}" if changes else " nothing to change")

    out.answer({"applied": True, "diff": changes, "faults": told}, show_changes)
    return 0


def _diff(before: str, after: str) -> list[str]:
    import difflib

    return list(difflib.unified_diff(before.splitlines(), after.splitlines(), "in force", "new", lineterm=""))


def _former(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _read(path: Path) -> str:
    from interlock.core.errors import Failure

    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        raise Failure("E3004", f"`{path.name}` cannot be read as text") from None


def _plain(text: str) -> Any:
    from interlock.cli.render import Text, clean

    return Text(clean(text))

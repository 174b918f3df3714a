"""`interlock tools add` and `tools test`: admission of tools, and their contract tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import over_home
from interlock.cli.completion import tool_names
from interlock.cli.output import Output

if TYPE_CHECKING:
    from interlock.api.interlock import Admission, Interlock
    from interlock.api.types import Trial
    from interlock.cli.render import Page
    from interlock.contract.declare import Tool
    from interlock.contract.refusals import DeclarationRefusal
    from interlock.core.errors import Failure

Json = dict[str, Any]


# add


@click.command(short_help="Admit every tool of a file, a module or a manifest.")
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True)
@over_home
async def add(app: Interlock, out: Output, /, targets: tuple[str, ...]) -> int:
    """Admit every tool found in TARGET: a .py file, an importable module, or a manifest (.yaml, .json).

    A version is admitted when all eight conditions hold; otherwise each one that fails is named with the line to add.
    Contract tests are part of that, and cause no effect. Exits 1 if anything was refused.

    \b
    interlock tools add my_tools.py
    interlock tools add interlock.demo_tools
    interlock tools add mailer.yaml
    """
    with out.working("looking for tools …"):
        offers = [offer for target in targets for offer in await _offer(app, out, target)]
    admitted = [offer for offer in offers if offer["admitted"]]
    refused = [offer for offer in offers if not offer["admitted"]]

    def show(page: Page) -> None:
        for offer in offers:
            _show_offer(page, offer)

    out.answer({"admitted": admitted, "refused": refused}, show)
    return 1 if refused else 0


async def _offer(app: Interlock, out: Output, target: str) -> list[Json]:
    from interlock.api.declared_tools import declared_in
    from interlock.core.errors import Failure

    origin, found, refused, broken = declared_in(target)
    if refused or broken is not None:
        # INVARIANT: nothing is admitted of a file that cannot be loaded whole, for a call of it would load it again.
        return [*map(_undeclared, refused), *([] if broken is None else [_refusal(target, broken)])]
    offers: list[Json] = []
    for number, tool in enumerate(found):
        out.progress(f"trying out {_ref(tool)}", 100 * number / len(found))
        try:
            offers.append(_offer_document(await app.offer(tool, origin)))
        except Failure as failure:
            offers.append(_refusal(_ref(tool), failure))
    return offers


def _ref(tool: Tool[..., Any]) -> str:
    return repr(tool).removeprefix("<tool ").removesuffix(">")


def _offer_document(admission: Admission) -> Json:
    trial = admission.trial
    return {
        "tool": admission.tool,
        "admitted": admission.admitted,
        "new": admission.new,
        "refused": {name: list(faults) for name, faults in admission.verdict.refused.items()},
        "warnings": list(admission.verdict.warnings),
        "tests": None if trial is None else _trial_document(trial),
        "error": None,
    }


def _undeclared(refusal: DeclarationRefusal) -> Json:
    return {**_refusal(refusal.name, refusal.failure()), "file": refusal.file, "line": refusal.line}


def _refusal(tool: str, failure: Failure) -> Json:
    return {
        "tool": tool,
        "admitted": False,
        "new": False,
        "refused": {},
        "warnings": [],
        "tests": None,
        "error": failure.envelope(""),
    }


def _show_offer(page: Page, offer: Json) -> None:
    from interlock.cli.render import BAD, GOOD, MAYBE, Text

    tests: Json | None = offer["tests"]
    if offer["admitted"]:
        how = "admitted" if offer["new"] else "already there, unchanged"
        cases = f"{len(tests['cases'])} contract tests passed ({tests['mode']})" if tests else ""
        unrun = sum(not one.get("ran", True) for one in tests["cases"]) if tests else 0
        page.line(GOOD, " ", Text(offer["tool"], "bold"), f"   {how}", right=cases)
        if unrun:
            words = f"not run with {unrun} example{'' if unrun == 1 else 's'}; to run all: interlock tools test --live"
            page.line("    ", MAYBE, " ", words)
    else:
        place = f"{Path(offer['file']).name}, line {offer['line']}" if offer.get("line") else ""
        page.line(BAD, " ", Text(offer["tool"], "bold"), "   refused", right=place)
        page.table([(Text(f"    {name}", "red"), advice) for name, advice in _reasons(offer)])
    for warning in offer["warnings"]:
        page.line("    ", MAYBE, " ", warning)


def _reasons(offer: Json) -> list[tuple[str, str]]:
    """Each failed condition with its advice, one to a line."""
    refused: dict[str, list[str]] = offer["refused"]
    reasons = [(name, advice) for name, faults in refused.items() for advice in faults]
    error: Json | None = offer["error"]
    if error is not None:
        details: Json = error.get("details") or {}
        listed: list[Json] = details.get("faults") or [{"message": error["message"]}]
        reasons.extend((str(fault.get("pointer") or error["error_code"]), str(fault["message"])) for fault in listed)
    return reasons


# test


@click.command(short_help="Run the contract tests of tools, and say how each went.")
@click.argument("target", shell_complete=tool_names)
@click.option("--live", is_flag=True, help="Run write tools for real, and keep the evidence for admission.")
@over_home
async def test(app: Interlock, out: Output, /, target: str, live: bool) -> int:
    """Run the contract tests of every tool in TARGET, or of a registered one, and say how each case went.

    Without --live nothing is written: bad input must be refused, read-only tools run their examples, write tools run
    as previews or in the fixture they declare. With it, examples that are declared as not live run too. Exits 1 if a
    case failed.

    \b
    interlock tools test my_tools.py
    interlock tools test my_tools.py --live
    interlock tools test demo.post
    """
    from interlock.api.declared_tools import refused_trial, tools_of
    from interlock.core.errors import Failure

    trials: list[Trial] = []
    with out.working("looking for tools …"):
        found = await tools_of(app, target)
        for number, tool in enumerate(found):
            out.progress(f"trying out {_ref(tool)}", 100 * number / len(found))
            try:
                trials.append(await app.try_out(tool, live=live))
            except Failure as failure:
                trials.append(refused_trial(_ref(tool), failure))

    passed = all(trial.passed for trial in trials)
    document = {"passed": passed, "live": live, "tools": [_trial_document(trial) for trial in trials]}
    out.answer(document, lambda page: _show_trials(page, trials))
    return 0 if passed else 1


def _trial_document(trial: Trial) -> Json:
    return {
        "tool": trial.tool,
        "mode": trial.mode,
        "passed": trial.passed,
        "cases": [
            {"case": one.case, "passed": one.passed, "message": one.message, "ran": one.ran} for one in trial.outcomes
        ],
    }


def _show_trials(page: Page, trials: list[Trial]) -> None:
    from interlock.cli.render import BAD, GOOD, Text

    for trial in trials:
        failed = sum(not outcome.passed for outcome in trial.outcomes)
        verdict = f"{failed} of {len(trial.outcomes)} failed" if failed else f"{len(trial.outcomes)} passed"
        page.line(Text(trial.tool, "bold"), f"   {verdict}", right=f"mode: {trial.mode}")
        rows = [(GOOD if one.passed else BAD, one.case, one.message) for one in trial.outcomes]
        page.table(rows, indent="  ")

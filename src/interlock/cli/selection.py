"""`interlock tools search`, `select`, `train-router`, `evaluate` and `recommend`: tools for requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from interlock.cli.command import acting, as_holder, at_rest, at_server, lean_vectors, over_home
from interlock.cli.completion import tool_names
from interlock.cli.output import Output

if TYPE_CHECKING:
    from interlock.api.interlock import Interlock
    from interlock.api.types import Reader
    from interlock.cli.remote import Server
    from interlock.cli.render import Page

Json = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Any])
_ANSWERS = {"ALLOW": "allowed", "REQUIRE_APPROVAL": "needs approval", "DENY": "denied"}


# Options that choosing a tool and measuring the choice have in common.
_PREFERENCES = (
    click.option("--cheaper", is_flag=True, help="Of tools with equal expected success, choose the cheaper one."),
    click.option("--faster", is_flag=True, help="Of tools with equal expected success, choose the faster one."),
)


def _preferring(command: F) -> F:
    for option in reversed(_PREFERENCES):
        command = option(command)
    return command


async def _search_at_server(server: Server, out: Output, /, words: tuple[str, ...], limit: int, by: str) -> int:
    page = await server.get("/v1/tools", q=" ".join(words), limit=min(limit, 500), by=by)
    documents = [
        {"tool": one["tool_id"], **{name: one[name] for name in ("version", "mutation_class", "description", "score")}}
        for one in page["tools"]
    ]
    # Of a caller with a surface, tools that are not loaded.
    facts = {"version": "", "mutation_class": "deferred"}
    documents += [
        {"tool": one["tool_id"], **facts, "description": one["search_hint"] or "", "score": one["score"]}
        for one in page["deferred"]
    ]
    documents.sort(key=lambda one: -one["score"])
    return _answer_found(out, documents, {name: page[name] for name in ("by", "note", "outcome", "pending")})


def _search_at_rest(reader: Reader, out: Output, /, words: tuple[str, ...], limit: int, by: str) -> int | None:
    from interlock.api.parts_at_rest import search as find

    lean_vectors()
    found = find(reader, out.session.path, " ".join(words), limit, by)
    return None if found is None else _answer_found(out, [one.document() for one in found], found.facts())


@click.command()
@at_server(_search_at_server)
@at_rest(_search_at_rest)
@click.argument("words", nargs=-1, required=True)
@click.option("--limit", type=click.IntRange(1, 1000), default=10, show_default=True, help="How many at most.")
@click.option(
    "--by",
    type=click.Choice(("words", "meaning", "both")),
    default="both",
    show_default=True,
    help="What counts: words, their meaning, or both.",
)
@as_holder
@over_home
async def search(app: Interlock, out: Output, /, words: tuple[str, ...], limit: int, by: str, token: str | None) -> int:
    """Find tools by what they do, best first.

    Words of names, descriptions and parameters count, and what they mean: "tell a customer" finds a tool that sends
    mail. Only tools that the caller may use are found. Search for one step of a task at a time.

    \b
    interlock tools search balance
    interlock tools search "tell a customer that the parcel is late" --limit 5
    """
    lean_vectors()
    caller = await acting(app, token)
    found = await app.search(" ".join(words), limit=limit, by=by, caller=caller)
    return _answer_found(out, [one.document() for one in found], found.facts())


def _answer_found(out: Output, documents: list[Json], facts: Json) -> int:
    def show(page: Page) -> None:
        if facts["note"]:
            page.line(f"searched by {facts['by']}: {facts['note']}")
        for one in facts["pending"]:
            page.line(f"{one['server']} may have more: it is {one['state']}")
        if not documents:
            page.line("no tool fits; see them all: interlock tools list")
            return
        columns = ("tool", "version", "mutation_class", "description")
        rows = [[str(one[column]).splitlines()[0] for column in columns] for one in documents]
        page.table(rows, ("tool", "version", "changes", "what it does"))

    out.answer({"tools": documents, **facts}, show)
    return 0


async def _select_at_server(server: Server, out: Output, /, words: tuple[str, ...], **options: Any) -> int:
    return _answer(out, await server.post("/v1/tools/select", {"request": " ".join(words), **options}))


@click.command(short_help="Choose a tool for a request, and say how.")
@at_server(_select_at_server)
@click.argument("words", nargs=-1, required=True)
@click.option("--allocation", type=click.IntRange(0), help="How many tokens the schemas may take together.")
@_preferring
@click.option("--session", default="", help="The session whose budgets count.")
@as_holder
@over_home
async def select(app: Interlock, out: Output, /, words: tuple[str, ...], token: str | None, **options: Any) -> int:
    """Choose a tool for a request, and say how: what each stage left, and whether you may call it.

    No call is made. The selection is on record; its text is stored encrypted unless selection_requests is never.

    \b
    interlock tools select "how much is in the cash account"
    interlock tools select "post 250 to cash" --json
    """
    lean_vectors()
    made = await app.select(" ".join(words), caller=await acting(app, token), door="cli", **options)
    return _answer(out, made.document())


def _answer(out: Output, document: Json) -> int:
    def show(page: Page) -> None:
        for one in document["stages"]:
            page.line(f"{one['stage']:<11} {one['before']:>6,} → {one['after']:<6,} {one['why']}")
        page.line("")
        rows = [[one["tool"], f"{one['score']:.2f}", f"{one['tokens']:,}"] for one in document["candidates"]]
        if rows:
            page.table(rows, ("candidate", "score", "tokens"))
        gate: Json | None = document["gate"]
        if gate is None:
            page.line(document["refused"] or "no tool fits; see them all: interlock tools list")
            return
        wait = "" if gate["timeout_s"] is None else f", within {gate['timeout_s']:,} s"
        page.line(f"chosen: {document['chosen']}   {_ANSWERS[gate['answer']]}{wait}: {gate['reason']}")

    out.answer(document, show)
    return 0


@click.command("train-router", short_help="Train the router of selections on your own calls.")
@click.option("--tenant", help="The tenant whose calls it learns from; yours unless said.")
@over_home
async def train_router(app: Interlock, out: Output, /, tenant: str | None) -> int:
    """Train the router of selections on your own calls, and use it if it is better than the search.

    It learns from selections that were followed by a successful call. A fifth of them is held out for the comparison.
    Needs the scopes tools:admin and audit:read.

    \b
    interlock tools train-router
    """
    with out.working("training on your calls …"):
        answer = await app.selections.learning.train(app.caller, tenant)

    def show(page: Page) -> None:
        page.line(f"{answer['calls']:,} calls, {answer['held_out']:,} of them held out: {answer['why']}")
        names = (("router", "this router"), ("before", "the one before"), ("search", "the search"))
        rows = [
            [words, f"{answer[name]['first']:.1%}", f"{answer[name]['among_three']:.1%}"]
            for name, words in names
            if answer.get(name) is not None
        ]
        if rows:
            page.table(rows, ("", "right", "among three"))

    out.answer(answer, show)
    return 0


@click.command(short_help="Measure how well tools are chosen, and at what cost.")
@click.argument("trace", type=click.Path(exists=True, dir_okay=False), required=False)
@click.option("--journal", is_flag=True, help="Your own selections and the calls that followed them, selected anew.")
@click.option("--recorded", is_flag=True, help="The same, as they were selected then: tools may have changed since.")
@click.option(
    "--up-to", type=click.IntRange(1), help="With --recorded: the `up_to` of an earlier report, to repeat it."
)
@_preferring
@click.option("--no-intent", is_flag=True, help="Without the stage that names the kind of help.")
@over_home
async def evaluate(
    app: Interlock,
    out: Output,
    /,
    trace: str | None,
    journal: bool,
    recorded: bool,
    up_to: int | None,
    no_intent: bool,
    **preferences: bool,
) -> int:
    """Measure how well tools are chosen: precision, recall, wrong tools, tokens, cost and latency per task.

    TRACE has one task a line: {"query": "weather in Rome", "relevant": ["office.forecast"]}; `groups` may name
    alternatives.

    \b
    interlock tools evaluate tasks.jsonl
    interlock tools evaluate --journal --json
    interlock tools evaluate --recorded --up-to 4711
    """
    from pathlib import Path

    from interlock.api.evaluating import evaluate as measure
    from interlock.api.evaluating import evaluate_journal, evaluate_recorded, tasks_of

    if [trace is not None, journal, recorded].count(True) != 1:
        raise click.UsageError("name a file with tasks, or --journal, or --recorded")
    options: Any = {**preferences, "intent": not no_intent}
    with out.working("measuring selections …"):
        if recorded:
            answer = await evaluate_recorded(app.selections, app.caller, up_to)
        elif trace is None:
            answer = await evaluate_journal(app.selections, app.caller, **options)
        else:
            answer = await measure(app.selections, await tasks_of(Path(trace)), app.caller, **options)

    def show(page: Page) -> None:
        for name, value in answer.items():
            told = "not measured" if value is None else value if isinstance(value, bool | int) else f"{value:g}"
            page.line(f"{name.replace('_', ' '):<19} {told}")

    out.answer(answer, show)
    return 0


async def _recommend_at_server(server: Server, out: Output, /, tool: str | None) -> int:
    return _answer_recommended(out, (await server.get("/v1/tools/recommendations", tool=tool))["tools"])


@click.command(short_help="Tools that are used together with one, or by others.")
@at_server(_recommend_at_server)
@click.argument("tool", required=False, shell_complete=tool_names)
@as_holder
@over_home
async def recommend(app: Interlock, out: Output, /, tool: str | None, token: str | None) -> int:
    """Tools that are used together with TOOL, or that others of your groups use.

    They come from the calls of your own tenant. What fewer than recommend_callers others did is left out.

    \b
    interlock tools recommend demo.balance
    interlock tools recommend
    """
    found = await app.recommend(tool, caller=await acting(app, token))
    return _answer_recommended(out, [one.document() for one in found])


def _answer_recommended(out: Output, tools: list[Json]) -> int:
    def show(page: Page) -> None:
        if not tools:
            page.line("nothing to recommend: too few callers have used tools together so far")
            return
        page.table([[one["tool"], f"{one['callers']:,}", one["why"]] for one in tools], ("tool", "callers", "why"))

    out.answer({"tools": tools}, show)
    return 0

"""`interlock tools`: add, list, show, export, test, deprecate and compare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from interlock.cli.command import Output, acting, as_holder, at_server, looking, over_home, require

if TYPE_CHECKING:
    from interlock.api.interlock import Admission, Interlock
    from interlock.cli.remote import Server
    from interlock.cli.render import Cell, Page
    from interlock.contract.declare import Tool
    from interlock.core.errors import Failure
    from interlock.registry.catalog import Version
    from interlock.trials import Trial

Json = dict[str, Any]


@click.group()
def tools() -> None:
    """What agents may call: declare it, look at it, test it, retire it.

    \b
    interlock tools add my_tools.py
    interlock tools list
    """


# add


@tools.command()
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True)
@over_home
async def add(lock: Interlock, out: Output, /, targets: tuple[str, ...]) -> int:
    """Admit every tool found in TARGET: a .py file, an importable module, or a manifest (.yaml, .json).

    A version is admitted when all eight conditions hold; otherwise each one that fails is named with the line to add.
    Contract tests are part of that, and cause no effect. Exits 1 if anything was refused.

    \b
    interlock tools add my_tools.py
    interlock tools add interlock.demo_tools
    interlock tools add mailer.yaml
    """
    offers = [offer for target in targets for offer in await _offer(lock, target)]
    admitted = [offer for offer in offers if offer["admitted"]]
    refused = [offer for offer in offers if not offer["admitted"]]

    def show(page: Page) -> None:
        for offer in offers:
            _show_offer(page, offer)

    out.answer({"admitted": admitted, "refused": refused}, show)
    return 1 if refused else 0


async def _offer(lock: Interlock, target: str) -> list[Json]:
    from interlock.core.errors import Failure
    from interlock.registry.source import load

    try:
        origin, found = load(target)
    except Failure as failure:
        return [_refusal(target, failure)]
    offers: list[Json] = []
    for tool in found:
        try:
            offers.append(_offer_document(await lock.offer(tool, origin)))
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
        page.line(GOOD, " ", Text(offer["tool"], "bold"), f"   {how}", right=cases)
    else:
        page.line(BAD, " ", Text(offer["tool"], "bold"), "   refused")
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


# export


@tools.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option(
    "--format", "provider", type=click.Choice(["openai-chat", "openai-responses", "anthropic", "gemini"]),
    required=True, help="Whose words to use.",
)  # fmt: skip
@click.option("--strict", is_flag=True, help="The strict form, where a tool's schema has one.")
@looking
async def export(lock: Interlock, out: Output, /, names: tuple[str, ...], provider: Any, *, strict: bool) -> int:
    """Tools as OpenAI, Anthropic or Gemini take them: what stands in the `tools` of a request.

    What a model then asks for is handed on as it came: POST /v1/tools/calls makes the call and gives back the message
    for the conversation.

    \b
    interlock tools export --format anthropic > tools.json
    interlock tools export --format openai-chat --strict demo.balance
    """
    import json

    from interlock.api.service import Service

    service = Service(lock)
    chosen = {lock.catalog.address(name) for name in names}
    for name in names:
        service.tools.find(name, None, lock.caller)
    shown = [one for one in service.tools.visible(lock.caller) if not chosen or one.row.address in chosen]
    document = service.providers.declared(shown, provider, strict=strict)
    out.answer(document, lambda _: click.echo(json.dumps(document, indent=2, ensure_ascii=False)))
    return 0


# list and show


@tools.command()
@looking
async def quarantine(lock: Interlock, out: Output, /) -> int:
    """Versions that were caught doing what they said they would not, and why.

    They are refused until a person has looked at them: interlock tools release

    \b
    interlock tools quarantine
    """
    found = [one.document() for one in lock.gateway.quarantine.all()]

    def show(page: Page) -> None:
        if not found:
            page.line("nothing is in quarantine")
            return
        rows = [
            (one["tool"], "released" if one["lifted"] else "kept out", one["reason"], one["invocation_id"])
            for one in found
        ]
        page.table(rows, head=("tool", "state", "because", "call"))

    out.answer({"quarantine": found}, show)
    return 0


@tools.command()
@click.argument("tool", metavar="TOOL@VERSION")
@click.option("--reason", required=True, help="Why it may run again; goes on record with who said so.")
@as_holder
@over_home
async def release(lock: Interlock, out: Output, /, tool: str, reason: str, token: str | None) -> int:
    """Let a version out of quarantine, as a person who has looked at it. Needs the scope tools:admin.

    \b
    interlock tools release demo.count@1.0.0 --reason 'the file was its own cache'
    """
    await lock.lift_quarantine(tool, reason=reason, by=await acting(lock, token))

    def show(page: Page) -> None:
        from interlock.cli.render import GOOD

        page.line(GOOD, f" {tool}   may run again")

    out.answer({"released": tool, "reason": reason}, show)
    return 0


async def _list_at_server(server: Server, out: Output, /) -> int:
    found: list[Json] = []
    cursor: str | None = None
    while True:
        page = await server.get("/v1/tools", cursor=cursor, limit=500)
        found += page["tools"]
        cursor = page["cursor"]
        if cursor is None:
            break
    documents = [
        {
            "tool": one["tool_id"],
            **{name: one[name] for name in ("version", "mutation_class", "state", "availability")},
            "description": str(one["description"]).splitlines()[0],
            **{name: one[name] for name in ("published_at", "known_pairs", "deprecation")},
        }
        for one in found
    ]
    return _answer_list(out, documents)


@tools.command("list")
@at_server(_list_at_server)
@looking
async def list_tools(lock: Interlock, out: Output, /) -> int:
    """Every registered version, with what it may change and where it is in its life.

    With --server: the newest version of every tool that your token lets you call.

    \b
    interlock tools list
    interlock tools list --json
    """
    import orjson

    from interlock.core.clock import iso

    documents: list[Json] = []
    for row in lock.catalog.rows():
        manifest: Json = orjson.loads(row.manifest)
        documents.append(
            {
                "tool": row.address,
                "version": row.version,
                "mutation_class": manifest.get("mutation_class"),
                "state": "quarantined" if lock.gateway.quarantine.holds(row.digest) else row.state,
                "availability": lock.availability(row),
                "description": str(manifest.get("description", "")).splitlines()[0],
                "digest": row.digest,
                "origin": row.origin,
                "published_at": iso(row.published_ms),
                "known_pairs": len(manifest.get("known_pairs") or ()),
                "deprecation": None if row.notice is None else row.notice.document(),
            }
        )
    return _answer_list(out, documents)


def _answer_list(out: Output, documents: list[Json]) -> int:
    def show(page: Page) -> None:
        if not documents:
            page.line("no tools yet; add some: interlock tools add FILE.py")
            return
        columns = ("tool", "version", "mutation_class", "state", "description")
        shown = [{**one, "state": _state(one["state"], one["availability"])} for one in documents]
        rows = [[str(document[column]) for column in columns] for document in shown]
        page.table(rows, ("tool", "version", "changes", "state", "what it does"))

    out.answer({"tools": documents}, show)
    return 0


async def _search_at_server(server: Server, out: Output, /, words: tuple[str, ...], limit: int) -> int:
    page = await server.get("/v1/tools", q=" ".join(words), limit=min(limit, 500))
    documents = [
        {"tool": one["tool_id"], **{name: one[name] for name in ("version", "mutation_class", "description")}}
        for one in page["tools"]
    ]
    return _answer_search(out, documents)


@tools.command()
@at_server(_search_at_server)
@click.argument("words", nargs=-1, required=True)
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many at most.")
@as_holder
@over_home
async def search(lock: Interlock, out: Output, /, words: tuple[str, ...], limit: int, token: str | None) -> int:
    """Tools whose name, title, description, tags or hint hold every word, best first.

    \b
    interlock tools search balance
    interlock tools search send mail --limit 5
    """
    from interlock.api.tools import Tools

    caller = await acting(lock, token)
    documents: list[Json] = [
        {
            "tool": one.row.address,
            "version": one.row.version,
            "mutation_class": one.contract.mutation.mutation_class,
            "description": one.contract.manifest.description,
        }
        for one in Tools(lock).search(" ".join(words), caller, limit)
    ]
    return _answer_search(out, documents)


def _answer_search(out: Output, documents: list[Json]) -> int:
    def show(page: Page) -> None:
        if not documents:
            page.line("no tool fits; see them all: interlock tools list")
            return
        columns = ("tool", "version", "mutation_class", "description")
        rows = [[str(one[column]).splitlines()[0] for column in columns] for one in documents]
        page.table(rows, ("tool", "version", "changes", "what it does"))

    out.answer({"tools": documents}, show)
    return 0


async def _show_at_server(server: Server, out: Output, /, tool: str) -> int:
    from interlock.cli.remote import part

    name, at, spec = tool.partition("@")
    told = await server.get(f"/v1/tools/{part(name)}", version=spec if at else None)
    profiles = {name: told.pop(name) for name in ("execution_profile", "permission_profile", "interface")}
    document: Json = {
        "tool": told["tool_id"],
        **{name: told.pop(name) for name in ("state", "availability", "deprecation", "timeout")},
        "version": told["version"],
        "input_schema": told["parameters"],
        "output_schema": told["result_schema"],
        "manifest": told,
        **profiles,
        "known_pairs": told["known_pairs"],
    }
    out.answer(document, lambda page: _show_version(page, document))
    return 0


@tools.command()
@at_server(_show_at_server)
@click.argument("tool", metavar="TOOL[@RANGE]")
@looking
async def show(lock: Interlock, out: Output, /, tool: str) -> int:
    """The contract of a version: what it takes and gives, what it may change, how long it lives.

    \b
    interlock tools show demo.post
    interlock tools show demo.post@^1
    """
    from interlock.contract.standard.export import declaration, execution_profile, interface, permission_profile

    name, at, spec = tool.partition("@")
    version = _version(lock, name, spec if at else None)
    await lock.measure()
    row, contract = version.row, version.contract
    document: Json = {
        "tool": row.address,
        "version": row.version,
        "digest": row.digest,
        "state": row.state,
        "availability": lock.availability(row),
        "origin": row.origin,
        "deprecation": None if row.notice is None else row.notice.document(),
        "input_schema": contract.input.model_facing,
        "output_schema": contract.output.document,
        "manifest": contract.document(),
        "declaration": declaration(contract, row.state).document(),
        "execution_profile": execution_profile(contract).document(),
        "permission_profile": permission_profile(contract).document(),
        "interface": interface(contract).document(),
        "known_pairs": len(contract.manifest.known_pairs),
        "timeout": lock.latencies.describe(contract),
    }
    out.answer(document, lambda page: _show_version(page, document))
    return 0


def _state(state: str, availability: str) -> str:
    """The state of a version for people: `unavailable` where it could be called if its upstream answered."""
    return "unavailable" if state in ("active", "deprecated") and availability != "AVAILABLE" else state


def _version(lock: Interlock, name: str, spec: str | None) -> Version:
    """A version to look at: also one that can no longer be called."""
    if spec:
        found = lock.catalog.versions(lock.catalog.address(name)).get(spec.lstrip("=v "))
        if found is not None:
            return found
    return lock.catalog.resolve(name, spec)


def _time(timeout: Json) -> str:
    """How long a call may take, the class of its tool, and what was measured."""
    kind = f"{timeout['class']}, {timeout['class_source']}"
    words = f"{timeout['default_s']:g} s, at most {timeout['max_s']:g} s ({kind})"
    if "measured_calls" not in timeout:
        return words
    return f"{words}; of {timeout['measured_calls']:,} calls 99 % took at most {timeout['measured_p99_ms']:,.0f} ms"


def _show_version(page: Page, document: Json) -> None:
    from interlock.cli.render import Text

    manifest: Json = document["manifest"]
    state = _state(document["state"], document["availability"])
    page.line(
        Text(f"{document['tool']}@{document['version']}", "bold"), f"   {state}", right=manifest["mutation_class"]
    )
    page.line(manifest["description"])
    page.line("")
    page.line(Text("takes", "bold"))
    page.table(_fields(document["input_schema"]), indent="  ")
    page.line(Text("gives", "bold"))
    page.table(_fields(document["output_schema"]), indent="  ")
    words = {"previews": "previewed", "compensable": "undone", "cancellable": "cancelled"}
    effects: list[Json] = manifest.get("effects") or []
    needs: list[str] = [*(manifest.get("required_permissions") or ()), *(manifest.get("required_scopes") or ())]
    facts: list[tuple[str, Cell]] = [
        *(("may change", f"{effect['operation']} {effect['resource']}") for effect in effects),
        ("can be", ", ".join(word for name, word in words.items() if manifest.get(name)) or "called"),
        ("time", _time(document["timeout"])),
        ("key", "the caller's own, needed" if manifest["mutation_class"] != "read_only" else "not needed"),
        ("needs", ", ".join(needs) or "nothing"),
        ("known pairs", str(document["known_pairs"] or "none: nothing says what it must answer")),
    ]
    # A server tells callers neither where a tool comes from nor the digest of what runs it.
    facts += [(name, document[key]) for name, key in (("digest", "digest"), ("from", "origin")) if key in document]
    told: Json = document["deprecation"] or {}
    facts.extend((name, str(said)) for name, said in told.items() if said is not None)
    page.line(Text("contract", "bold"))
    page.facts(facts)


def _fields(schema: Json) -> list[list[str]]:
    from interlock.data.explain import type_words
    from interlock.data.schema import resolve_ref

    parts: Json = schema.get("properties") or {}
    if not parts:
        return [["nothing" if schema.get("type") == "object" and "properties" in schema else type_words(schema)]]
    required: list[str] = schema.get("required") or []
    rows: list[list[str]] = []
    for name, raw in parts.items():
        part = {**resolve_ref(schema, raw), **raw}
        default = f", {part['default']!r} unless said" if "default" in part else ", may be left out"
        examples: list[Any] = part.get("examples") or []
        example = f" (for example {examples[0]!r})" if examples else ""
        rows.append([name, type_words(part) + ("" if name in required else default), f"{_said(part)}{example}"])
    return rows


def _said(part: Json) -> str:
    return str(part.get("description", ""))


# test


@tools.command()
@click.argument("target")
@click.option("--live", is_flag=True, help="Run write tools for real, and keep the evidence for admission.")
@over_home
async def test(lock: Interlock, out: Output, /, target: str, live: bool) -> int:
    """Run the contract tests of every tool in TARGET, or of a registered one, and say how each case went.

    Without --live nothing is written: bad input must be refused, read-only tools run their examples, write tools run
    as previews or in the fixture they declare. Exits 1 if a case failed.

    \b
    interlock tools test my_tools.py
    interlock tools test my_tools.py --live
    interlock tools test demo.post
    """
    from interlock.core.errors import Failure
    from interlock.trials import Outcome, Trial

    trials: list[Trial] = []
    for tool in _tools_of(lock, target):
        try:
            trials.append(await lock.try_out(tool, live=live))
        except Failure as failure:
            trials.append(Trial(_ref(tool), "none", (Outcome("declaration", False, failure.in_full),)))

    passed = all(trial.passed for trial in trials)
    document = {"passed": passed, "live": live, "tools": [_trial_document(trial) for trial in trials]}
    out.answer(document, lambda page: _show_trials(page, trials))
    return 0 if passed else 1


def _tools_of(lock: Interlock, target: str) -> list[Tool[..., Any]]:
    """The tools of a file, a module or a manifest; or the registered one that goes by this name."""
    from interlock.registry.source import load

    name, at, spec = target.partition("@")
    if "/" not in target and lock.catalog.versions(lock.catalog.address(name)):
        return [_version(lock, name, spec if at else None).bound]
    return load(target)[1]


def _trial_document(trial: Trial) -> Json:
    return {
        "tool": trial.tool,
        "mode": trial.mode,
        "passed": trial.passed,
        "cases": [{"case": one.case, "passed": one.passed, "message": one.message} for one in trial.outcomes],
    }


def _show_trials(page: Page, trials: list[Trial]) -> None:
    from interlock.cli.render import BAD, GOOD, Text

    for trial in trials:
        failed = sum(not outcome.passed for outcome in trial.outcomes)
        verdict = f"{failed} of {len(trial.outcomes)} failed" if failed else f"{len(trial.outcomes)} passed"
        page.line(Text(trial.tool, "bold"), f"   {verdict}", right=f"mode: {trial.mode}")
        rows = [(GOOD if one.passed else BAD, one.case, one.message) for one in trial.outcomes]
        page.table(rows, indent="  ")


# deprecate and diff


@tools.command()
@click.argument("tool", metavar="TOOL@VERSION")
@click.option("--successor", help="What to call instead, as TOOL or TOOL@VERSION.")
@click.option("--guide", help="Address of a page that says how to move over.")
@click.option("--days", type=click.IntRange(0, 36_500), help="How long it still runs [default: 90].")
@click.option("--amend", is_flag=True, help="Correct what was announced before; what is not said stays.")
@click.option("--anyway", is_flag=True, help="The successor is yet to be registered.")
@over_home
async def deprecate(
    lock: Interlock,
    out: Output,
    /,
    tool: str,
    successor: str | None,
    guide: str | None,
    days: int | None,
    amend: bool,
    anyway: bool,
) -> int:
    """Announce the end of one version. It runs until its removal date, and every result says so.

    \b
    interlock tools deprecate demo.post@1.2.0 --successor demo.post@2.0.0 --days 30
    interlock tools deprecate demo.post@1.2.0 --amend --guide https://example.org/moving
    """
    from interlock.registry import retirement

    name, _, version = tool.partition("@")
    if not version:
        raise click.UsageError(f"say which version: interlock tools deprecate {name}@VERSION")
    require(lock.caller, "tools:admin", "retiring a version")
    address = lock.catalog.address(name)
    said: Json = {"successor": successor, "migration_guide": guide, "anyway": anyway}
    said |= {} if days is None else {"grace_days": days}
    unit = (retirement.amend if amend else retirement.deprecate)(address, version, by=lock.caller.acting, **said)
    notice = await lock.journal.commit(unit)
    document = {"tool": address, "version": version, "state": "deprecated", "deprecation": notice.document()}

    def show(page: Page) -> None:
        from interlock.cli.render import GOOD, clock_time

        page.line(GOOD, f" {address}@{version}   deprecated; it runs until ", clock_time(_removal(document)))
        if notice.successor:
            page.facts([("use", notice.successor)])

    out.answer(document, show)
    return 0


def _removal(document: Json) -> str:
    return str(document["deprecation"]["removalDate"])


@tools.command()
@click.argument("tool")
@click.argument("old")
@click.argument("new")
@looking
async def diff(lock: Interlock, out: Output, /, tool: str, old: str, new: str) -> int:
    """What changed for callers between two versions of a tool, and which step up in version that needs.

    \b
    interlock tools diff demo.post 1.2.0 2.0.0
    """
    from interlock.contract.versions import bump_between
    from interlock.registry.compat import Surface, classify

    before, after = _version(lock, tool, f"={old}"), _version(lock, tool, f"={new}")

    def surface(version: Version) -> Surface:
        manifest = version.contract.manifest
        return Surface(
            input=manifest.parameters,
            output=True if manifest.result_schema is None else manifest.result_schema,
            tolerant_output=manifest.tolerant_output,
            declared_behaviour_change=manifest.behaviour_change,
        )

    found = classify(surface(before), surface(after))
    bump = bump_between(before.row.version, after.row.version)
    changes = [
        {"level": one.level, "side": one.side, "pointer": one.pointer, "what": one.what} for one in found.changes
    ]
    document = {
        "tool": before.row.address,
        "old": before.row.version,
        "new": after.row.version,
        "level": found.level,
        "bump": bump,
        "changes": changes,
    }

    def show(page: Page) -> None:
        page.line(
            f"{before.row.address} {before.row.version} → {after.row.version}   a {found.level} change",
            right=f"version steps up: {bump}",
        )
        rows = [(one.level, one.side, one.pointer or "/", one.what) for one in found.changes]
        if rows:
            page.table(rows, ("breaks", "side", "where", "what"), indent="  ")
        else:
            page.line("  the schemas are the same for callers")

    out.answer(document, show)
    return 0

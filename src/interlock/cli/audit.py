"""`interlock audit`: prove the chain, hand it out, tell one call's story."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from interlock.cli.command import at_server, over_home, refuse_token, without_home
from interlock.cli.output import Output
from interlock.cli.viewer import Local, Remote, Viewer, with_names

if TYPE_CHECKING:
    from datetime import datetime

    from interlock.api.audit import Audit
    from interlock.api.history import History
    from interlock.api.interlock import Interlock
    from interlock.cli.remote import Server
    from interlock.cli.render import Page

Json = dict[str, Any]


@click.group(short_help="Proof of what happened.")
def audit() -> None:
    """Proof of what happened, without having to trust anybody's word.

    \b
    interlock audit verify
    interlock audit explain 01JC…
    interlock audit purge
    interlock audit accept-tail
    """


# verify


def _key(_: click.Context, __: click.Parameter, value: str | None) -> bytes | None:
    try:
        key = None if value is None else bytes.fromhex(value)
    except ValueError:
        key = b""
    if key is not None and len(key) != 32:
        raise click.BadParameter("an Ed25519 key is 64 hexadecimal digits")
    return key


def _head(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, bytes] | None:
    if value is None:
        return None
    found = re.fullmatch(r"0*([1-9][0-9]{0,17}):([0-9a-fA-F]{64})", value)
    if found is None:
        words = "write it SEQ:HASH, a record's number and 64 hexadecimal digits, as `audit verify --json` gives them"
        raise click.BadParameter(words)
    return int(found[1]), bytes.fromhex(found[2])


async def _verify_at_server(server: Server, out: Output, /, exported: IO[bytes] | None, **given: Any) -> int:
    if exported is not None or any(given.values()):
        raise click.UsageError("a server verifies its own journal, by its own keys; export it to verify it yourself")
    verdict = await server.ask("GET", "/v1/audit/verify", timeout_s=600.0)
    out.answer(verdict, lambda page: _show_verdict(page, verdict, "database"))
    return 0 if verdict["intact"] else 1


@audit.command(short_help="Check the whole chain against its signed heads.")
@at_server(_verify_at_server)
@click.option(
    "--public-key", metavar="HEX", callback=_key, help="The key you trust, instead of the one in the data directory."
)
@click.option(
    "--known-head", metavar="SEQ:HASH", callback=_head, help="A head you noted earlier; it must still be there."
)
@click.option(
    "--database-only", is_flag=True, help="The database came without its data directory: do without the anchors file."
)
@click.option(
    "--export", "exported", type=click.File("rb"), help="A file that `audit export` wrote, instead of a data directory."
)
@without_home
def verify(
    out: Output,
    /,
    public_key: bytes | None,
    known_head: tuple[int, bytes] | None,
    database_only: bool,
    exported: IO[bytes] | None,
) -> int:
    """Recompute the whole chain and check it against its signed heads. Exits 1 if a record was touched, and says which.

    The layout of the ledger, its indexes and the tables that authority is read from are held against the record too.

    \b
    interlock audit verify
    interlock audit verify --json
    interlock --home copy audit verify --database-only --public-key 7d32…
    interlock audit verify --export journal.jsonl --public-key 7d32…
    """
    from interlock.api import journal_files

    if exported is not None and database_only:
        raise click.UsageError("--export and --database-only exclude each other: say which of them to verify")

    def tell(done: int) -> None:
        out.progress(f"verifying: {done:,} records")

    trusted: Any = {"public_key": public_key, "known_head": known_head, "progress": tell}
    try:
        if exported is not None:
            verdict = journal_files.verify_export(exported, **trusted)
        else:
            verdict = journal_files.verify(out.session.path, database_only=database_only, **trusted)
    finally:
        out.progress("")

    def show(page: Page) -> None:
        _show_verdict(page, verdict, "database" if exported is None else "export")
        if exported is not None and public_key is None and verdict["intact"]:
            page.line("  by the key that the export itself names; hold it against one you noted: --public-key HEX")

    out.answer(verdict, show)
    return 0 if verdict["intact"] else 1


def _show_verdict(page: Page, verdict: Json, of: str) -> None:
    from interlock.cli.render import BAD, GOOD, Text, clock_time

    head, intact = verdict["head"], verdict["intact"]
    signed_at = verdict["last_anchor_at"]
    signed = "not signed yet" if signed_at is None else f"signed {clock_time(signed_at)}"
    parts = [f"{verdict['records']:,} records", "1 chain", f"head {head['hash'][:4]}…{head['hash'][-2:]} {signed}"]
    if verdict["purged_through"]:
        parts.append(f"{verdict['purged_through']:,} retired")
    word = Text("intact", "bold green") if intact else Text("broken", "bold red")
    page.line(GOOD if intact else BAD, f" {' · '.join(parts)} · ", word, right=f"{verdict['seconds']:.1f} s")
    unsigned = head["seq"] - verdict["anchored_through"]
    if intact and unsigned > 0:
        page.line(f"  the last {unsigned:,} are chained but not signed yet; interlock doctor tells if they should be")
    if not verdict["anchors_file"]:
        page.line(f"  of the {of} alone: that its end was cut back to an earlier anchor would not show")
    faults: list[Json] = verdict["faults"]
    shown = faults[:50]
    whole = "  the export" if of == "export" else "  data directory"
    page.table([(f"  at record {fault['seq']}" if fault["seq"] else whole, fault["what"]) for fault in shown])
    if len(faults) > len(shown):
        page.line(f"  and {len(faults) - len(shown):,} more; --json lists them all")


# export


async def _export_at_server(server: Server, out: Output, /, target: Path | None, replace: bool) -> int:
    from interlock.data.canonical import decode

    if target is None:
        async for piece in server.stream("/v1/audit/export"):
            out.stdout.write(piece)
        out.stdout.flush()
        return 0
    if not replace:
        _refuse_taken(target)
    count, last = 0, b""
    with out.working("waiting for records …"), _staged(target, replace=replace) as file:
        async for piece in server.stream("/v1/audit/export"):
            file.write(piece)
            count += piece.count(b"\n")
            out.progress(f"writing: {count:,} records")
            last += piece
            last = last[last.rfind(b"\n", 0, -1) + 1 :]
    return _exported(out, target, count, int(decode(last)["seq"]))


@audit.command()
@at_server(_export_at_server)
@click.option("--out", "target", type=click.Path(dir_okay=False, path_type=Path), help="A file instead of stdout.")
@click.option("--replace", is_flag=True, help="Write over that file if it is there.")
@over_home
async def export(app: Interlock, out: Output, /, target: Path | None, replace: bool) -> int:
    """Every record as JSON lines: {"seq", "hash", "record"}. That it was read is itself on record, and signed.

    Each hash is sha256(previous hash, seq as 8 bytes, canonical record), so a copy can be checked anywhere.

    \b
    interlock audit export --out journal.jsonl
    interlock audit verify --export journal.jsonl
    """
    from interlock.api.audit import Audit

    if target is not None and not replace:
        _refuse_taken(target)
    journal = Audit(app)
    upto = await journal.begin_export(by=app.caller, door="cli")
    if target is None:
        await _export(journal, out.stdout, upto)
        out.stdout.flush()
        return 0
    with out.working(f"writing: 0 of {upto:,} records"), _staged(target, replace=replace) as file:

        def tell(done: int) -> None:
            out.progress(f"writing: {done:,} of {upto:,} records", 100 * done / max(upto, 1))

        count = await _export(journal, file, upto, tell)
    return _exported(out, target, count, upto)


def _exported(out: Output, target: Path, count: int, upto: int) -> int:
    def show(page: Page) -> None:
        page.line(f"{count:,} records written to {target}")

    out.answer({"records": count, "out": str(target), "through": upto}, show)
    return 0


def _refuse_taken(target: Path) -> None:
    from interlock.core.errors import Failure

    if os.path.lexists(target):
        words = f"`{target}` is there already; nothing was written"
        raise Failure("E3411", words, resolution="choose another name, or write over it: --replace")


@contextlib.contextmanager
def _staged(target: Path, *, replace: bool) -> Generator[IO[bytes]]:
    """A file that is put in its place whole or not at all, readable by its owner alone."""
    from tempfile import mkstemp

    from interlock.core.errors import Failure

    try:
        # Under a name that nobody can have foreseen: what lies there is not followed or written to.
        descriptor, staged = mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with open(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if not replace:
                _refuse_taken(target)
            os.replace(staged, target)
        finally:
            Path(staged).unlink(missing_ok=True)
    except OSError as error:
        raise Failure("E3004", f"`{target.name}` cannot be written: {error.strerror}") from None


async def _export(journal: Audit, file: IO[bytes], upto: int, tell: Callable[[int], None] = lambda done: None) -> int:
    count = 0
    async for records, lines in journal.lines(upto):
        file.write(lines)
        count += records
        tell(count)
    return count


# purge


@audit.command(short_help="Remove records that are past their term.")
@click.option("--through", type=click.IntRange(min=1), metavar="SEQ", help="Up to this record; all must be past term.")
@click.option("--before", type=click.DateTime(["%Y-%m-%d"]), metavar="DATE", help="Only what was made before this day.")
@click.option("--yes", is_flag=True, help="Remove it. Without this, nothing is removed.")
@over_home
async def purge(app: Interlock, out: Output, /, through: int | None, before: datetime | None, yes: bool) -> int:
    """Remove records that are past their term from the start of the journal, and give the space back to the disk.

    Says what would go; with --yes it goes. The terms are the settings retention_years and retention_years_writes. What
    goes leaves a signed head, from which the rest still verifies, and a record of who removed it. Others can work
    meanwhile. `purge_records = true` in settings.toml does the same once a day. With the setting archive_to they are
    written to an object store first, and nothing is removed if that fails.

    \b
    interlock audit purge
    interlock audit purge --before 2024-01-01 --yes
    """
    from datetime import UTC

    from interlock.api.retention import purge as remove

    def tell(done: int, expected: int) -> None:
        out.progress(f"removed {done:,} of {expected:,} records", min(100.0, 100 * done / max(expected, 1)))

    before_ms = None if before is None else round(before.replace(tzinfo=UTC).timestamp() * 1000)
    try:
        found = await remove(app, by=app.caller, through=through, before_ms=before_ms, remove=yes, progress=tell)
    finally:
        out.progress("")

    def show(page: Page) -> None:
        if not found["records"]:
            page.line("nothing is past its term")
            return
        span = f"{found['records']:,} records, {found['first']} to {found['last']}"
        if yes:
            page.line(f"{span}: removed; the file is {found['freed_bytes'] / 2**20:.1f} MiB smaller")
        else:
            page.line(f"{span}: past their term; to remove them: interlock audit purge --yes")

    out.answer(found, show)
    return 0


# accept-tail


@audit.command("accept-tail", short_help="Accept unsigned records at the end of the journal.")
@click.option("--reason", metavar="TEXT", help="Why these records are genuine. It is put on record.")
@click.option("--yes", is_flag=True, help="Accept them. Without this, nothing is accepted.")
@without_home
def accept_tail(out: Output, /, reason: str | None, yes: bool) -> int:
    """Accept unsigned records at the end of the journal, after a data directory was refused for them (E3804).

    Shows the records; with --yes and a --reason they are signed, and a record says who accepted them and why. Needs the
    journal's signing key. Nothing else can be accepted: a journal with another fault stays refused.

    \b
    interlock audit accept-tail
    interlock audit accept-tail --reason "the clock was a day ahead until 14:00" --yes
    """
    from interlock.api.journal_files import unsigned_tail

    reason = (reason or "").strip()
    if yes and not reason:
        raise click.UsageError("say why the records are genuine: --reason TEXT")
    refuse_token("accepting records")
    tail = unsigned_tail(out.session.path, accept_because=reason if yes else None)

    def show(page: Page) -> None:
        if tail["fault"] is None:
            page.line("nothing needs to be accepted: the end of the journal is signed, or the next start signs it")
            return
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in tail["kinds"].items())
        page.line(f"{tail['records']:,} unsigned records, {tail['first']} to {tail['last']}: {kinds}")
        page.line(f"  made from {tail['earliest']} to {tail['latest']}")
        page.line(f"  {tail['fault']}")
        if not tail["accepted"]:
            page.line("  if they are genuine: interlock audit accept-tail --reason TEXT --yes")
        else:
            page.line(f"accepted and signed; record {tail['record']} says so")

    out.answer(tail, show)
    return 0


# explain


async def _explain_at_server(server: Server, out: Output, /, call_id: str) -> int:
    from interlock.cli.history import history_at
    from interlock.core.errors import Failure

    if "audit:read" not in await server.scopes():
        raise Failure("E3206", "reading the audit journal needs the scope audit:read")
    return _answer_story(out, await Remote.of(server), await history_at(server, call_id, with_previews=True))


@audit.command(short_help="One call as a story: who asked, who agreed, what changed.")
@at_server(_explain_at_server)
@click.argument("call_id", metavar="ID")
@over_home
async def explain(app: Interlock, out: Output, /, call_id: str) -> int:
    """One call as a story: who asked, for whom, under which rule, who agreed to what, what changed, how it ended.

    With --server: the whole ID, and what the scope audit:read lets you see.

    \b
    interlock audit explain 01JCXK2M4Q8Z
    """
    from interlock.api.history import story

    history = await story(app, call_id, by=app.caller, door="cli")
    return _answer_story(out, await Local.of(app), history)


def _answer_story(out: Output, viewer: Viewer, history: History) -> int:
    from interlock.cli.history import explain as tell

    sentences = [with_names(viewer, sentence) for sentence in tell(history)]

    def show(page: Page) -> None:
        for sentence in sentences:
            page.line(sentence)

    document = {
        "invocation_id": history.call,
        "tool": history.tool,
        "state": history.state,
        "story": sentences,
        "records": [entry.seq for entry in history.entries],
    }
    out.answer(document, show)
    return 0

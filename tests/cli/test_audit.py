"""`interlock audit purge` and `interlock audit accept-tail`: shown first, done when it is said, and on record."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import orjson
import pytest

from interlock.audit.chain import verify
from interlock.core.clock import iso
from interlock.store import last_head
from interlock.store.home import Home
from interlock.store.homes import home_at
from interlock.store.records import plain
from tests.support.chains import Copy, count
from tests.support.chains import make_home as recent_home
from tests.support.cli import Cli
from tests.support.retention import make_home, ms, stored
from tests.support.stores import opened, unguarded


@pytest.fixture
def old(fresh: Cli) -> Cli:
    """A home whose records are all past their term."""
    asyncio.run(make_home(fresh.home, start_ms=ms(2015)))
    return fresh


def test_a_purge_is_shown_first_and_done_with_yes(old: Cli) -> None:
    home, before = home_at(old.home), stored(home_at(old.home))
    shown = old("audit", "purge")
    assert (shown.code, "interlock audit purge --yes" in shown.out) == (0, True)
    told = old.ask("audit", "purge")
    assert (told["removed"], told["records"], told["first"]) == (False, len(before), 1)
    assert set(before) <= set(stored(home)), "nothing went"
    assert "nothing is past its term" in old("audit", "purge", "--before", "2015-01-01", "--yes").out
    done = old.ask("audit", "purge", "--yes")
    assert (done["removed"], done["records"]) == (True, len(before))
    assert stored(home)[0][0] == len(before) + 1
    assert ("purge", f"purge:{len(before)}") in _calls(home)
    assert old("audit", "verify").code == 0
    assert old.ask("audit", "purge", "--yes")["records"] == 0


def test_a_purge_up_to_a_record_that_must_be_kept_is_refused(cli: Cli) -> None:
    refused = cli("audit", "purge", "--through", "1", "--yes")
    assert (refused.code, "E3411" in refused.err) == (1, True)
    assert stored(home_at(cli.home))[0][0] == 1


def test_a_purge_needs_the_scope_to_administer(old: Cli) -> None:
    (old.home / "principals.toml").write_text('[[principal]]\nid = "local:*"\nscopes = ["audit:read"]\n')
    before = stored(home_at(old.home))
    for words in ((), ("--yes",)):
        refused = old("audit", "purge", *words)
        assert (refused.code, "E3206" in refused.err, "`policy:admin`" in refused.err) == (1, True, True)
    assert set(before) <= set(stored(home_at(old.home)))


def _calls(home: Home) -> list[tuple[str, str]]:
    with opened(home) as db:
        return db.execute("SELECT kind, call FROM journal").fetchall()


# Accepting a tail


def _append(home: Home, records: int, *, later_ms: int = 0) -> None:
    """Add records that are chained as they should be and that nobody has signed."""
    head = last_head.read(home)
    assert head is not None
    body = plain("authority", "x", head.at_ms + later_ms, act="test")
    with unguarded(home) as db:
        first = count(home) + 1
        rows = [(first + at, "authority", "x", body, b"") for at in range(records)]
        for row in rows:
            db.execute("INSERT INTO journal (seq, kind, call, body, hash) VALUES (?, ?, ?, ?, ?)", row)
        Copy(home, db).relink(first)


@pytest.fixture
def tailed(fresh: Cli) -> Cli:
    """A home that is refused: it ends with unsigned records that were made an hour after the last signature."""
    asyncio.run(recent_home(fresh.home))
    _append(home_at(fresh.home), 3, later_ms=3_600_000)
    return fresh


def _last_record(home: Home) -> dict[str, Any]:
    with opened(home) as db:
        return orjson.loads(db.execute("SELECT body FROM journal ORDER BY seq DESC LIMIT 1").fetchone()[0])


def test_an_unsigned_tail_is_shown_accepted_with_a_reason_and_on_record(tailed: Cli) -> None:
    home = home_at(tailed.home)
    before = count(home)
    refused = tailed("tools", "list")
    assert refused.code == 1
    assert "E3804" in refused.err
    assert "interlock audit accept-tail --reason" in refused.err

    shown = tailed("audit", "accept-tail")
    assert shown.code == 0
    assert f"3 unsigned records, {before - 2} to {before}: 3 authority" in shown.out
    assert "3,600 seconds after the newest signature" in " ".join(shown.out.split())
    told = tailed.ask("audit", "accept-tail")
    assert (told["accepted"], told["first"], told["last"], count(home)) == (False, before - 2, before, before)
    assert tailed("audit", "accept-tail", "--yes").code == 2, "a reason is needed"
    assert tailed("audit", "accept-tail", "--yes", "--reason", "  ").code == 2
    assert not verify(home).intact

    done = tailed.ask("audit", "accept-tail", "--reason", "the clock was an hour ahead", "--yes")
    assert (done["accepted"], done["record"]) == (True, before + 1)
    record = _last_record(home)
    assert (record["kind"], record["act"]) == ("signing", "tail.accepted")
    assert (record["reason"], record["first"], record["last"]) == ("the clock was an hour ahead", before - 2, before)
    assert record["by"].startswith("local:")
    verdict = verify(home)
    assert (verdict.intact, verdict.anchored_through) == (True, before + 1)
    assert tailed("tools", "list").code == 0
    assert "nothing needs to be accepted" in tailed("audit", "accept-tail", "--reason", "again", "--yes").out


def test_a_tail_is_not_accepted_without_the_signing_key_or_on_the_word_of_a_token(tailed: Cli) -> None:
    home, words = home_at(tailed.home), ("audit", "accept-tail", "--reason", "known", "--yes")
    before = count(home)
    holder = replace(tailed, extra={"INTERLOCK_TOKEN": "e30"})
    assert "E3206" in holder(*words).err
    key = home.keys / "journal.ed25519"
    kept = key.read_bytes()
    key.unlink()
    missing = tailed(*words)
    assert (missing.code, "keys/journal.ed25519" in missing.err) == (1, True)
    key.touch(mode=0o600)
    key.write_bytes(bytes(32))
    assert "E3804" in tailed(*words).err
    assert (count(home), verify(home).intact) == (before, False)
    key.write_bytes(kept)
    assert tailed(*words).code == 0


def test_nothing_but_the_tail_can_be_accepted(tailed: Cli) -> None:
    home = home_at(tailed.home)
    with unguarded(home) as db:
        db.execute("UPDATE journal SET body = ? WHERE seq = 2", (plain("registry", "x", 0, at=iso(0)),))
    refused = tailed("audit", "accept-tail", "--reason", "known", "--yes")
    assert refused.code == 1
    assert "E3804" in refused.err
    assert "another fault: record 2" in " ".join(refused.err.split())
    assert not verify(home).intact


@pytest.mark.proves("AUDIT-01")
def test_every_call_from_the_command_line_leaves_one_record_with_every_field(cli: Cli) -> None:
    post = {"account": "cash", "cents": 5}
    calls: tuple[tuple[str, dict[str, Any], tuple[str, ...], str, str | None], ...] = (
        ("demo.post", post, ("--key", "k"), "SUCCESS", None),
        ("demo.post", post, ("--key", "k"), "SUCCESS", None),
        ("demo.post", post, ("--dry-run",), "SUCCESS", None),
        ("demo.balance", {"account": "cash"}, (), "SUCCESS", None),
        ("demo.balance", {"account": 7}, (), "ERROR", "INVALID_INPUT"),
        ("demo.nothing", {}, (), "ERROR", "TOOL_NOT_FOUND"),
    )
    for tool, arguments, words, _, _ in calls:
        cli("call", tool, orjson.dumps(arguments).decode(), *words, "--json")
    with opened(home_at(cli.home)) as db:
        rows = db.execute("SELECT body FROM journal WHERE kind = 'closed' ORDER BY seq").fetchall()
    records = [one for one in (orjson.loads(body) for (body,) in rows) if one["door"] == "cli"]
    told = [(one["toolId"], one["status"], one["errorCode"]) for one in records]
    assert told == [(tool, status, error) for tool, _, _, status, error in calls]
    assert all(one.keys() >= FIELDS for one in records)
    assert len({one["call"] for one in records}) == len(calls)


FIELDS = {
    "timestamp", "traceId", "callerId", "agentId", "toolId", "version", "operation", "inputHash", "outputSummary",
    "mutationClass", "sideEffects", "authDecision", "approvalTicketId", "latencyMs", "status", "errorCode",
}  # fmt: skip

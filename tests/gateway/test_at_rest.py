"""What calls leave behind is encrypted at rest; homes from before that are still read."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

from interlock import Context, Effect, Interlock, Preview, tool
from interlock.call.context import Caller
from interlock.data.canonical import sealed_digest
from interlock.store.backup import copied
from interlock.store.homes import home_at
from tests import sample
from tests.support.calls import admit
from tests.support.stores import address_of, contents
from tests.support.webhooks import Receiver

PLANTED = "the quick brown heron wades"


@tool(version="1.0.0", mutation_class="read_only", namespace="rest", max_inline_chars=100)
def essay(times: sample.Number) -> str:
    """A text that is too long to travel inline."""
    return PLANTED * times


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="rest", effects=[Effect("session:*", "CREATE")],
)  # fmt: skip
async def remember(ctx: Context, text: sample.Text) -> list[str]:
    """Keep a text in the session, and give back what was there before."""
    before = sorted(ctx.session)
    ctx.session[text] = True
    return before


@remember.compensate
async def _(text: str) -> None:
    return None


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="rest", effects=[Effect("note:*", "CREATE")],
)  # fmt: skip
async def note(ctx: Context, text: sample.Text) -> str:
    """Write a text down outside, and give it back."""
    ran.append(text)
    ctx.effect("note:1", "CREATE")
    return text


@note.compensate
async def _(text: str) -> None:
    return None


@tool(
    version="1.0.0", mutation_class="write_irreversible", namespace="rest", effects=[Effect("letter:*", "CREATE")],
)  # fmt: skip
async def post(ctx: Context, text: sample.Text) -> str:
    """Send a text away."""
    ran.append(text)
    ctx.effect("letter:1", "CREATE")
    return text


@post.preview
async def _(text: str) -> Preview:
    return Preview(impact=f"sends {text}")


ran: list[str] = []
BEN = Caller(id="local:ben", groups=frozenset({"approvers"}))


def forms(text: str) -> list[bytes]:
    """A text as it is, in hexadecimal, and in base64 at each of the three places it may begin at."""
    raw = text.encode()
    encoded = [base64.b64encode(b"x" * shift + raw)[4 if shift else 0 :][:-4] for shift in range(3)]
    return [raw, raw.hex().encode(), raw.hex().upper().encode(), *encoded]


def assert_nowhere(home: Path, text: str) -> None:
    """Nothing in the home's database, its write-ahead log, or a backup of it tells a text."""
    if address_of(home_at(home)) is not None:
        held = contents(home_at(home))
        assert not [form for form in forms(text) if form in held]
        return
    backup = home.parent / "backup"
    shutil.rmtree(backup, ignore_errors=True)
    with copied(home_at(home), backup):
        pass
    paths = [path for root in (home, backup) for path in root.rglob("*") if path.is_file()]
    assert sum(path.name == "interlock.db" for path in paths) == 2
    assert any(path.name.endswith("-wal") and path.stat().st_size for path in paths)
    for path in paths:
        content = path.read_bytes()
        assert not [form for form in forms(text) if form in content], path


def copy_of(home: Path, target: Path) -> None:
    """Copy a data directory that nobody uses."""
    if address_of(home_at(home)) is not None:
        shutil.copytree(home, target)
        return
    with copied(home_at(home), target):
        pass


async def test_large_results_and_results_kept_for_replay_are_nowhere_in_clear_text(home: Path) -> None:
    async with Interlock.open(home, housekeeping=False) as app:
        await admit(app, essay, note)
        for times in (20, 20_000):
            result = await app.call("rest.essay", {"times": times})
            assert result.persistence.ref is not None
            assert (await app.read_payload(result.persistence.ref)).decode() == f'"{PLANTED * times}"'
        assert (await app.call("rest.note", {"text": PLANTED}, key="1")).unwrap() == PLANTED
        again = await app.call("rest.note", {"text": PLANTED}, key="1")
        assert (again.replayed, again.unwrap()) == (True, PLANTED)
        assert_nowhere(home, PLANTED)
        rows = app.journal.reader.all(
            "SELECT size, length(body) FROM payload WHERE ref LIKE 'payload:%' ORDER BY size", ()
        )
        assert [size for size, _ in rows] == [len(PLANTED) * times + 2 for times in (20, 20_000)]
    async with Interlock.open(home, housekeeping=False) as app:
        await admit(app, essay, note)
        again = await app.call("rest.note", {"text": PLANTED}, key="1")
        assert (again.replayed, again.unwrap()) == (True, PLANTED)
        assert result.persistence.ref is not None
        assert PLANTED.encode() in await app.read_payload(result.persistence.ref)
    copy_of(home, home.parent / "again")
    async with Interlock.open(home.parent / "again", housekeeping=False) as app:
        assert PLANTED.encode() in await app.read_payload(result.persistence.ref)


async def test_a_write_whose_outcome_could_not_be_sealed_does_not_begin(home: Path) -> None:
    ran.clear()
    async with Interlock.open(home, housekeeping=False) as app:
        await admit(app, essay, note)
        assert (await app.call("rest.note", {"text": "before"}, key="1")).ok
        ring = home_at(home).keys / "secrets.key"
        ring.chmod(0o644)
        refused = await app.call("rest.note", {"text": "now"}, key="2")
        assert refused.error is not None
        assert refused.error.code == "E3804"
        assert ran == ["before"]
        large = await app.call("rest.essay", {"times": 20})
        assert large.error is not None
        assert large.error.code == "E3804"
        assert app.journal.reader.all("SELECT key, state FROM reservation", ()) == [("1", "done")]
        assert app.journal.reader.all("SELECT count(*) FROM payload WHERE ref LIKE 'payload:%'", ()) == [(0,)]
        ring.chmod(0o600)
        assert (await app.call("rest.note", {"text": "now"}, key="2")).unwrap() == "now"
        assert ran == ["before", "now"]
        ring.unlink()
        lost = await app.call("rest.note", {"text": "before"}, key="1")
        assert lost.error is not None
        assert lost.error.code == "E3604"
        assert ran == ["before", "now"]


async def test_what_a_reviewer_is_shown_and_changes_is_nowhere_in_clear_text(home: Path, tmp_path: Path) -> None:
    changed = PLANTED + " away"
    approval = {"chain": [{"group": "approvers"}], "timeout_seconds": 600}
    async with Receiver.open() as receiver:
        secret = tmp_path / "secret"
        secret.write_text("whsec_" + base64.b64encode(bytes(32)).decode())
        channel = {"name": "hook", "webhook": receiver.url, "secret_file": str(secret), "allow_private": True}
        options: dict[str, Any] = {
            "housekeeping": False,
            "approval": approval,
            "channels": [channel | {"groups": ["approvers"]}],
        }
        async with Interlock.open(home, **options) as app:
            await admit(app, post)
            pending = await app.call("rest.post", {"text": PLANTED}, key="1")
            ticket = pending.metadata["pending"]["ticketId"]
            assert app.journal.reader.all("SELECT count(*) FROM notification", ()) == [(1,)]
            assert_nowhere(home, PLANTED)
            await app.courier.deliver_due()
            assert [orjson.loads(one.body)["data"]["params"] for one in receiver.got] == [{"text": PLANTED}]
            shown = await app.approvals.show(ticket)
            assert (shown.params, shown.preview["impact"]) == ({"text": PLANTED}, f"sends {PLANTED}")
            agreed = await app.approvals.approve(ticket, by=BEN, edit={"text": changed})
            assert agreed.differences() == {"text": (PLANTED, changed)}
        async with Interlock.open(home, **options) as app:
            await admit(app, post)
            assert (await app.approved_calls.resume(ticket)).unwrap() == changed
            [again] = await app.approvals.list(every=True)
            assert again.document()["edit"]["preview"]["impact"] == f"sends {changed}"
            assert_nowhere(home, PLANTED)


async def test_a_new_key_takes_over_sessions_and_tickets_and_the_old_one_goes(home: Path) -> None:
    ring = home_at(home).keys / "secrets.key"
    async with Interlock.open(home, housekeeping=False) as app:
        await admit(app, remember, post)
        await app.call("rest.remember", {"text": PLANTED}, session="s", key="1")
        ticket = (await app.call("rest.post", {"text": PLANTED}, key="2")).metadata["pending"]["ticketId"]
        await app.approvals.deny(ticket, by=BEN)

        def expire(transaction: Any) -> None:  # what expires keeps its key until then
            transaction.execute("DELETE FROM reservation")
            transaction.execute("DELETE FROM payload")

        await app.journal.commit(expire)
        before = ring.read_bytes()
        await app.secrets.rotate_key(by="local:ben")
        assert len(ring.read_bytes()) == len(before)
        assert ring.read_bytes() != before
        assert (await app.approvals.show(ticket)).params == {"text": PLANTED}
        assert (await app.call("rest.remember", {"text": "more"}, session="s", key="3")).value == [PLANTED]


@pytest.mark.sqlite_only("a store of an older version")
@pytest.mark.parametrize("content", [b"42", b"\x01 a file that begins like something sealed"])
async def test_what_an_older_version_stored_in_clear_text_is_still_read(home: Path, content: bytes) -> None:
    async with Interlock.open(home, housekeeping=False) as app:
        await admit(app, essay, remember, note)
        ref = (await app.call("rest.essay", {"times": 30})).persistence.ref
        assert ref is not None
        await app.call("rest.note", {"text": "new"}, key="1")
        session = sealed_digest(app.caller.tenant, app.caller.id, "s")
        outcome = b'{"value":"old","persistence":["inline",null,5,""],"redacted":[]}'

        def as_before(transaction: Any) -> None:
            transaction.execute("UPDATE payload SET body = ?, size = ? WHERE ref = ?", (content, len(content), ref))
            transaction.execute("INSERT INTO session (id, version, state) VALUES (?, 1, ?)", (session, '{"old": true}'))
            transaction.execute("UPDATE reservation SET result = ?", (outcome,))

        await app.journal.commit(as_before)
        assert await app.read_payload(ref) == content
        assert (await app.call("rest.note", {"text": "new"}, key="1")).unwrap() == "old"
        assert (await app.call("rest.remember", {"text": "new"}, session="s", key="2")).value == ["old"]
        assert (await app.call("rest.remember", {"text": "more"}, session="s", key="3")).value == ["new", "old"]
        (state,) = app.journal.reader.all("SELECT state FROM session WHERE id = ?", (session,))[0]
        assert isinstance(state, bytes)
        assert b"old" not in state
    copy_of(home, home.parent / "copy")

"""`interlock backup` and `restore`: what comes back is the home as it was, proven, and nothing is written over."""

from __future__ import annotations

import asyncio
import os
import pty
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from interlock import Caller, Interlock
from interlock.api import background
from interlock.api.health import Health
from interlock.api.registration import Registration
from interlock.audit import backups
from interlock.audit.backups import remove_expired
from interlock.store.home import MARK
from interlock.store.homes import home_at
from interlock.store.port import Transaction
from interlock.store.schema_version import SCHEMA_HEAD
from interlock.testing import FakeClock
from tests.needs import need
from tests.support import stores, unfinished
from tests.support.cli import INTERLOCK, Cli, elsewhere, post
from tests.support.older import OLDER, schema, set_back
from tests.support.programs import TEXT, manifest


def everything(path: Path) -> dict[str, bytes]:
    return {str(one.relative_to(path)): one.read_bytes() for one in sorted(path.rglob("*")) if one.is_file()}


@pytest.mark.part_of("OPS-12", rest="a paused saga that goes on after a restore; there are no sagas yet")
async def test_a_backup_during_calls_comes_back_elsewhere_whole_and_with_its_keys(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERLOCK_DEMO_LEDGER", str(cli.ledger))
    assert await asyncio.to_thread(post, cli, "before") == (True, False)
    begun, done = asyncio.Event(), asyncio.Event()

    async def work(app: Interlock) -> int:
        made = 0
        while not done.is_set():
            made += 1
            arguments = {"account": "cash", "cents": 1}
            assert (await app.call("demo.post", arguments, key=f"meanwhile-{made}")).ok
            begun.set()
        return made

    async with Interlock.open(cli.home) as app:
        working = asyncio.ensure_future(work(app))
        try:
            await asyncio.wait_for(begun.wait(), 30)
            copied = await asyncio.to_thread(cli, "backup", "copy", "--json")
        finally:
            done.set()
            made = await working
    assert copied.code == 0, copied.err
    assert copied.json["verdict"]["intact"]
    assert post(cli, "after") == (True, False)

    restored = elsewhere(cli)
    assert restored.ask("restore", "copy")["verdict"]["intact"]
    assert restored("audit", "verify").code == 0
    assert post(restored, "before") == (True, True)
    assert post(restored, "after") == (True, False)  # of what came later, nothing is known: it runs again
    with stores.opened(home_at(cli.path / "restored")) as database:
        query = "SELECT COUNT(*) FROM reservation WHERE state IN ('done', 'unknown')"
        assert 2 < database.one(query)[0] < made + 2


@pytest.mark.part_of("OPS-12", rest="a paused saga that goes on after a restore; there are no sagas yet")
def test_a_backup_and_what_is_restored_are_their_owners_alone(cli: Cli) -> None:
    before = os.umask(0)
    try:
        with open(cli.home / "demo-ledger.jsonl", "w"):
            pass
        assert cli("backup", "copy").code == 0
        assert elsewhere(cli)("restore", "copy").code == 0
    finally:
        os.umask(before)
    for place in ("copy", "restored"):
        paths = [cli.path / place, *(cli.path / place).rglob("*")]
        assert [path for path in paths if path.stat().st_mode & 0o077] == []
        assert {path.name for path in paths} >= {"journal.ed25519", "anchors.jsonl", "policy.cedar"}
        assert not (cli.path / place / "instances").exists()
    copy, restored = everything(cli.path / "copy"), everything(cli.path / "restored")
    assert "interlock.db" in copy
    if not cli.store.near:  # the rows are in a database
        copy = {name: text for name, text in copy.items() if name != MARK and not name.startswith("interlock.db")}
    assert copy == restored


@pytest.mark.sqlite_only("the store's file is one of an earlier version")
def test_a_backup_leaves_the_home_and_its_schema_as_they_are(cli: Cli) -> None:
    set_back(cli)
    before = everything(cli.home)
    assert cli("backup", "copy").code == 0
    assert everything(cli.home) == before
    restored = elsewhere(cli)
    assert restored("restore", "copy").code == 0
    assert schema(cli) == OLDER
    assert restored("tools", "list").code == 0
    with closing(sqlite3.connect(cli.path / "restored" / "interlock.db")) as database:
        assert database.execute("SELECT version_num FROM alembic_version").fetchone() == (SCHEMA_HEAD,)


async def test_tools_that_came_through_a_door_are_there_wherever_the_home_comes_back(fresh: Cli) -> None:
    say = manifest("say", ["echo", "1"], {"type": "integer"}, parameters={"text": TEXT}, execution={"parse": "json"})
    async with Interlock.open(fresh.home, housekeeping=False) as app:
        await Registration(app, app.admissions).register(say, by=app.caller)
    assert fresh("backup", "copy").code == 0
    fresh.home.rename(fresh.path / "away")
    restored = elsewhere(fresh)
    assert restored("restore", "copy").code == 0
    assert restored.call("prog.say", {"text": "x"})["status"] == "succeeded"
    assert "cannot be called" not in restored("doctor").out


def test_a_call_that_ran_during_the_backup_is_settled_by_a_person(cli: Cli) -> None:
    cli.kill("call", "demo.post", '{"account": "cash", "cents": 250}', "--key", "order-1")
    stores.bury(cli.store)
    assert cli("backup", "copy").code == 0
    restored = elsewhere(cli)
    told = restored("restore", "copy")
    assert "calls that were running when it was made: 1; their outcome is unknown" in told.out
    assert "interlock calls reconcile" in told.out
    assert "demo.post" in restored("calls", "reconcile").out
    refused = restored.call("demo.post", {"account": "cash", "cents": 250}, "--key", "order-1")["error"]
    assert refused["error_code"] == "E3409"


async def test_a_restore_says_which_calls_a_server_will_make_by_itself(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INTERLOCK_DEMO_LEDGER", str(cli.ledger))
    ben = Caller(id="local:ben", groups=frozenset({"approvers"}))
    async with Interlock.open(cli.home, housekeeping=False) as app:
        mail = {"account": "cash", "to": "press@example.org"}
        ticket = (await app.call("demo.mail_statement", mail, key="m-1")).metadata["pending"]["ticketId"]
        await app.approvals.approve(ticket, by=ben)
        assert cli("backup", "copy").code == 0
        assert (await app.approved_calls.resume(ticket)).ok
    assert cli("backup", "later").code == 0
    told = elsewhere(cli)("restore", "copy")
    assert "calls that were approved and had not run: 1; a server makes them as soon as it starts" in told.out
    async with Interlock.open(cli.path / "restored", housekeeping=False) as app:
        assert [result.ok for result in await app.approved_calls.resume_all()] == [True]
    assert elsewhere(cli, "second").ask("restore", "later")["calls_approved"] == 0


@pytest.mark.part_of("OPS-12", rest="a paused saga that goes on after a restore; there are no sagas yet")
async def test_a_call_that_waits_for_a_person_and_an_open_breaker_are_as_they_were_after_a_restore(cli: Cli) -> None:
    async with Interlock.open(cli.home, housekeeping=False) as app:
        left = await unfinished.begin(app)
        assert (await asyncio.to_thread(cli, "backup", "copy")).code == 0
    restored = elsewhere(cli)
    assert restored("restore", "copy").code == 0
    assert [one["id"] for one in restored.ask("approvals", "list")["tickets"]] == [left.ticket.id]
    assert "the breaker of bank is open" in " ".join(restored("doctor").out.split())
    async with Interlock.open(cli.path / "restored", housekeeping=False) as app:
        await unfinished.finish(app, left)


def test_nothing_is_written_over(cli: Cli) -> None:
    (cli.path / "full").mkdir()
    (cli.path / "full" / "mine").write_text("mine")
    (cli.path / "file").write_text("mine")
    for place in ("full", "file"):
        refused = cli("backup", place)
        assert refused.code == 1
        assert "E3411" in refused.err
        assert "is there already; nothing was written" in refused.err
    assert "in the data directory itself" in cli("backup", str(cli.home / "copy")).err
    assert cli("backup", "copy").code == 0
    assert "is there already" in cli("backup", "copy").err
    before = everything(cli.home)
    refused = cli("restore", "copy").err
    assert "E3411" in refused
    assert "already; nothing was" in refused
    assert everything(cli.home) == before
    (cli.path / "empty").mkdir()
    assert elsewhere(cli, "empty")("restore", "copy").code == 0
    assert sorted(os.listdir(cli.path)) == ["copy", "empty", "file", "full", "home"]


OF_A_FILE = pytest.mark.sqlite_only("the store's file is damaged")


def _cut(home: Path) -> None:
    with stores.unguarded(home_at(home)) as database:
        database.execute("DELETE FROM journal WHERE seq = 2")


def _later(home: Path) -> None:
    stores.make_newer(home_at(home))


def _emptied(home: Path) -> None:
    (home / "interlock.db").unlink()


def _junk(home: Path) -> None:
    (home / "interlock.db").write_bytes(b"junk" * 1000)


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (_cut, "E3804", "at record 2, record 2 is missing"),
        (_later, "E3805", "9999"),
        pytest.param(_emptied, "E3804", "there is no database in", marks=OF_A_FILE),
        pytest.param(_junk, "E3804", "damaged or not a database", marks=OF_A_FILE),
    ],
)
def test_what_does_not_verify_is_neither_backed_up_nor_restored(
    cli: Cli, spoil: Callable[[Path], None], code: str, words: str
) -> None:
    assert cli("backup", "good").code == 0
    spoil(cli.home)
    spoil(cli.path / "good")
    for refused in (cli("backup", "bad"), elsewhere(cli)("restore", "good")):
        assert refused.code == 1
        assert code in refused.err
        assert words in refused.err
    assert sorted(os.listdir(cli.path)) == ["good", "home"]


def test_whoever_acts_by_a_token_makes_no_copy_of_the_keys(cli: Cli) -> None:
    holder = Cli(cli.path, {"INTERLOCK_TOKEN": "e30"})
    assert "E3206" in holder("backup", "copy").err
    assert not (cli.path / "copy").exists()


def test_on_a_terminal_it_is_told_how_far_a_backup_is(cli: Cli) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen([*INTERLOCK, "backup", "copy"], env=cli.environment, cwd=cli.path, stderr=theirs) as child:
        os.close(theirs)
        told = b""
        with suppress(OSError):  # the terminal ends with its last writer
            while more := os.read(ours, 4096):
                told += more
        os.close(ours)
    assert child.returncode == 0
    assert b"100 %  copying" in told
    assert b"verifying: " in told


@pytest.mark.sqlite_only("the database of a run cannot be reached from another user namespace")
def test_a_disk_without_room_for_a_backup_is_told_and_left_empty(cli: Cli) -> None:
    (cli.path / "small").mkdir()
    script = 'mount -t tmpfs -o size=200k none small && "$@"; code=$?; ls -A small; exit $code'
    words = [str(need("unshare", "util-linux")), "-rm", "sh", "-c", script, "sh", *INTERLOCK, "backup", "small"]
    done = subprocess.run(words, env=cli.environment, cwd=cli.path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "the copy at `small` cannot be made: its disk is full" in done.stderr
    assert done.stdout == ""


# By schedule


async def seen(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - the file system tells
            await asyncio.sleep(0.02)


def put_by_schedule(cli: Cli, folder: Path | str) -> None:
    with Path(cli.home, "settings.toml").open("a") as file:
        file.write(f'\nbackup_to = "{folder}"\n')


def scheduled(cli: Cli) -> list[str]:
    return sorted(path.name for path in (cli.path / "scheduled").iterdir())


@pytest.mark.part_of("OPS-12", rest="a paused saga that goes on after a restore; there are no sagas yet")
async def test_a_server_makes_a_backup_by_itself_once_for_all_processes_and_the_newest_can_be_tried(cli: Cli) -> None:
    assert post(cli, "before") == (True, False)
    folder = cli.path / "scheduled"
    async with Interlock.open(cli.home, backup_to=folder, resume_approved=True) as app:
        await seen(lambda: list(cli.path.glob("scheduled/*/interlock.db")))
        await seen(lambda: not list(cli.path.glob("scheduled/*/.incomplete")))
        [first] = scheduled(cli)
        assert first.startswith("interlock-")
        assert (await Health(app).ready())[1]["backups"] == "healthy"
        # For another process the next one is due tomorrow.
        async with Interlock.open(cli.home, backup_to=folder, resume_approved=True) as other:
            assert (await other.call("demo.balance", {"account": "cash"})).ok
            await seen(lambda: not app.supervisor.failing)
    assert scheduled(cli) == [first]
    put_by_schedule(cli, folder)
    before = everything(cli.path / "scheduled")
    tried = cli.ask("restore", "--drill")
    assert tried["backup"].endswith(first)
    assert tried["verdict"]["intact"]
    assert tried["tools"] == 3
    assert tried["rows"]["journal"] == tried["verdict"]["records"]
    assert tried["rows"]["reservation"] == 1
    assert everything(cli.path / "scheduled") == before
    assert "restored and compared" in cli("restore", "--drill").out
    assert "newest 0.0 hours old" in cli("doctor").out


@pytest.mark.part_of("OPS-12", rest="a paused saga that goes on after a restore; there are no sagas yet")
async def test_a_server_whose_settings_say_nothing_of_it_makes_a_backup_every_day(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, due = 0, backups.due

    def looked(transaction: Transaction, every_ms: int) -> bool:
        nonlocal looks
        looks += 1
        return due(transaction, every_ms)

    monkeypatch.setattr(backups, "due", looked)
    monkeypatch.setattr(background, "BACKUP_EVERY_S", 0.01)
    time, folder = FakeClock(round(datetime.now(UTC).timestamp() * 1000)), cli.path / "scheduled"

    def finished() -> int:
        return len(backups.made_in(folder)) - len([*folder.glob("*/.incomplete")])

    async def passes(**some: float) -> None:
        """Time passes, and the server looks whether a backup is due."""
        time.advance(timedelta(**some).total_seconds())
        if not cli.store.near:  # the time of the store is that of the database
            stores.set_time(cli.store, time.now_ms)
        before = looks
        await seen(lambda: looks > before + 4)

    async with Interlock.open(cli.home, backup_to=folder, resume_approved=True, clock=time.clock) as app:
        assert (app.settings.backup_every_h, app.settings.backup_days) == (24, 30)
        await seen(lambda: finished() == 1)
        await passes(hours=23, minutes=58)
        assert finished() == 1
        await passes(minutes=2)
        await seen(lambda: finished() == 2)
        first, second = (one.made for one in backups.made_in(folder))
        assert timedelta(days=1) <= second - first < timedelta(days=1, minutes=1)


@pytest.mark.part_of("OPS-12", rest="a paused saga that goes on after a restore; there are no sagas yet")
def test_backups_are_removed_after_thirty_days_but_never_the_newest_nor_what_is_not_a_backup(cli: Cli) -> None:
    folder = cli.path / "scheduled"
    put_by_schedule(cli, folder)
    assert cli("backup").code == 0
    [first] = folder.iterdir()
    now = datetime.now(UTC)
    names = {days: f"interlock-{now - timedelta(days=days):%Y%m%dT%H%M%SZ}" for days in (29, 31, 400)}
    for days in (31, 400):
        shutil.copytree(first, folder / names[days])
    (folder / names[29]).mkdir()  # not finished, and not old either
    (folder / "holiday").mkdir()
    (folder / "interlock-20200101T000000Z").symlink_to(cli.home)
    first.rename(folder / f"interlock-{now - timedelta(days=1):%Y%m%dT%H%M%SZ}")
    made = cli.ask("backup")
    left = {"holiday", "interlock-20200101T000000Z", names[29], f"interlock-{now - timedelta(days=1):%Y%m%dT%H%M%SZ}"}
    assert {*scheduled(cli)} == {*left, Path(made["backup"]).name}
    assert (cli.home / "policy.cedar").exists()

    shutil.copytree(made["backup"], cli.path / "only")
    shutil.rmtree(folder)
    folder.mkdir()
    (cli.path / "only").rename(folder / names[400])
    remove_expired(folder, 30, now)
    assert scheduled(cli) == [names[400]]


def named(at: datetime) -> str:
    return f"interlock-{at:%Y%m%dT%H%M%SZ}"


def made_at(path: str) -> datetime:
    return datetime.strptime(Path(path).name, "interlock-%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)


async def test_backups_are_named_and_removed_by_the_time_of_the_store_and_not_by_that_of_the_machine(cli: Cli) -> None:
    folder = cli.path / "scheduled"
    assert post(cli, "before") == (True, False)
    later = datetime.now(UTC) + timedelta(days=100)
    stores.set_time(cli.store, round(later.timestamp() * 1000))
    # By the clock of the machine, one of them is of the future and none is past its term.
    ages = {29: True, 31: False}
    for days in ages:
        (folder / named(later - timedelta(days=days))).mkdir(parents=True)
    put_by_schedule(cli, folder)
    by_hand = cli.ask("backup")["backup"]
    assert timedelta(0) <= made_at(by_hand) - later.replace(microsecond=0) < timedelta(days=1)
    left = {named(later - timedelta(days=days)) for days, stays in ages.items() if stays}
    assert {*scheduled(cli)} == {*left, Path(by_hand).name}
    assert cli.ask("restore", "--drill")["backup"] == by_hand
    assert "newest 0.0 hours old" in cli("doctor").out

    shutil.rmtree(folder)
    async with Interlock.open(cli.home, backup_to=folder, resume_approved=True) as app:
        await seen(lambda: list(cli.path.glob("scheduled/*/interlock.db")))
        await seen(lambda: not app.supervisor.failing)
    [by_server] = scheduled(cli)
    assert timedelta(0) <= made_at(by_server) - later.replace(microsecond=0) < timedelta(days=1)


def test_nothing_is_removed_and_none_is_the_newest_while_a_backup_is_dated_in_the_future(cli: Cli) -> None:
    folder = cli.path / "scheduled"
    put_by_schedule(cli, folder)
    first = cli.ask("backup")["backup"]
    now = datetime.now(UTC)
    old, ahead = named(now - timedelta(days=400)), named(now + timedelta(days=2))
    shutil.copytree(first, folder / old)
    Path(first).rename(folder / ahead)

    ended = cli("backup", "--json")  # the new one counts all the same
    assert ended.code == 0
    assert {*scheduled(cli)} == {old, ahead, Path(ended.json["backup"]).name}
    refused = cli("restore", "--drill")
    assert (refused.code, "E3411" in refused.err) == (1, True), refused.err
    assert f"`{ahead}` is dated after the present time of the store" in " ".join(refused.err.split())
    assert cli.ask("restore", str(folder / ahead), "--drill")["verdict"]["intact"]
    told = " ".join(cli("doctor").out.split())
    assert f"backups past their term are not removed: {folder / ahead} is dated after" in told

    shutil.rmtree(folder / ahead)
    assert cli.ask("restore", "--drill")["backup"] == ended.json["backup"]
    while named(datetime.now(UTC)) == Path(ended.json["backup"]).name:
        pass  # two backups of one second would have one name
    assert old not in {path.name for path in map(Path, [cli.ask("backup")["backup"]])}
    assert old not in scheduled(cli)
    assert "not removed" not in cli("doctor").out


async def test_a_schedule_that_fails_is_told_and_tried_again(cli: Cli) -> None:
    blocked = cli.path / "scheduled"
    blocked.write_text("a file, where a folder should be")
    async with Interlock.open(cli.home, backup_to=blocked, resume_approved=True) as app:
        await seen(lambda: app.supervisor.failing)
        [failing] = app.supervisor.failing
        assert failing.task == "backups"
        assert "cannot be made" in failing.error
        status, parts = await Health(app).ready()
        assert (status, parts["backups"]) == ("degraded", "degraded")


def test_a_drill_refuses_a_backup_that_was_changed_and_a_folder_without_one(cli: Cli) -> None:
    post(cli, "before")
    assert cli("backup", "copy").code == 0
    _cut(cli.path / "copy")
    refused = cli("restore", "copy", "--drill")
    assert (refused.code, "E3804" in refused.err) == (1, True)
    assert "name the backup" in cli("restore").err
    assert "backup_to" in cli("restore", "--drill").err
    put_by_schedule(cli, "backups")
    assert "write the whole path" in cli("backup").err

"""Backups, removed records and old checkpoints in an object store.

The store is moto, an emulator of S3. It accepts every signature.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from interlock import Context, Failure, Interlock, tool
from interlock.api.health import Health
from interlock.audit import archive
from interlock.audit.archive import TERMS, Archive, Archived, Tier, archive_at
from interlock.audit.backups import due, last_made
from interlock.audit.chain import verify
from interlock.net.s3 import Account, Bucket, signed
from interlock.store.homes import home_at
from interlock.testing import FakeClock
from tests import warm
from tests.needs import missing
from tests.support import stores
from tests.support.cli import Cli, elsewhere, post
from tests.support.retention import make_home, ms, stored
from tests.support.stores import opened

OPS_14 = pytest.mark.proves("OPS-14")
STATE_06 = pytest.mark.part_of("STATE-06", rest="deleting named checkpoints, which does not exist yet")
NOW = datetime(2026, 11, 18, 3, 15, tzinfo=UTC)
SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
NAMES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION", "NO_PROXY")


@pytest.fixture(scope="module")
def emulator() -> Iterator[dict[str, str]]:
    """The variables that lead to an emulator of S3 with an empty bucket."""
    try:
        from moto.server import ThreadedMotoServer  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        missing("moto is not installed: requirements/dev.txt")
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    given = {
        NAMES[0]: "AKIAIOSFODNN7EXAMPLE",
        NAMES[1]: SECRET,
        NAMES[2]: f"http://{host}:{port}",
        NAMES[3]: "us-east-1",
    }

    async def create() -> None:
        bucket = Bucket(Account.of(given), "backups")
        await bucket._ask("PUT", "")  # pyright: ignore[reportPrivateUsage] - a bucket is made by its owner
        await bucket.close()

    asyncio.run(create())
    yield given
    server.stop()


@pytest.fixture
def account(emulator: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in emulator.items():
        monkeypatch.setenv(name, value)
    return emulator


def with_account(cli: Cli, account: dict[str, str], **more: str) -> Cli:
    return Cli(cli.path, {**cli.extra, **account, **more})


async def keys(place: str) -> list[str]:
    async with archive_at(place) as found:
        return await found._bucket.list(found._prefix)  # pyright: ignore[reportPrivateUsage]


@OPS_14
def test_a_backup_is_written_verified_listed_and_restored_by_one_command(cli: Cli, account: dict[str, str]) -> None:
    cli = with_account(cli, account)
    assert post(cli, "before") == (True, False)
    place = "s3://backups/one/two"
    assert cli.ask("archive", "list", place) == {"backups": []}
    made = cli.ask("backup", place)
    assert made["verdict"]["intact"] is True
    (listed,) = cli.ask("archive", "list", place)["backups"]
    assert (listed["tier"], listed["whole"]) == ("warm", True)
    assert made["backup"] == f"{place}/{listed['name']}"
    assert "until" in cli("archive", "list", place).out

    code, shown = warm.at_terminal(("backup", "s3://backups/shown"), cli.environment, cli.path)
    assert (code, "100 %  copying" in shown) == (0, True), shown
    shown_at = str(cli.path / "shown")
    code, shown = warm.at_terminal(("--home", shown_at, "restore", "s3://backups/shown"), cli.environment, cli.path)
    assert (code, "100 %  reading" in shown, "100 %  copying" in shown) == (0, True, True), shown
    drilled = cli.ask("restore", place, "--drill")
    assert drilled["rows"]["reservation"] == 1
    for number, source in enumerate((place, made["backup"])):
        other = with_account(
            elsewhere(cli, f"restored-{number}"), account, INTERLOCK_HOME=str(cli.path / f"r-{number}")
        )
        assert other("restore", source).code == 0
        assert post(other, "before") == (True, True)
        assert other("audit", "verify").code == 0
        assert (cli.path / f"r-{number}" / "keys" / "journal.ed25519").stat().st_mode & 0o777 == 0o600


def test_what_is_no_finished_backup_is_not_restored(cli: Cli, account: dict[str, str]) -> None:
    cli = with_account(cli, account)
    place = "s3://backups/damaged"
    assert cli("backup", place).code == 0

    async def damage() -> None:
        async with archive_at(place) as found:
            bucket: Bucket = found._bucket  # pyright: ignore[reportPrivateUsage]
            (manifest,) = [key for key in await keys(place) if key.endswith("manifest.json")]
            part = manifest.replace("manifest.json", "0000000")
            content = await bucket.get(part) or b""
            await bucket.put(part, content[:-1] + bytes([content[-1] ^ 1]))
            await refused("is not what was written")
            await bucket.remove(part)
            await refused("is missing")
            await bucket.put(manifest, b'{"files": {"../outside": []}}')
            await refused("manifest")
            await bucket.remove(manifest)
            await refused("no finished backup")

    async def refused(words: str) -> None:
        ended = await asyncio.to_thread(cli, "restore", place, "--drill")
        assert (ended.code, words in ended.err) == (1, True), ended.err

    asyncio.run(damage())
    assert not (cli.path / "outside").exists()
    assert [one["whole"] for one in cli.ask("archive", "list", place)["backups"]] == [False]


@OPS_14
async def test_backups_expire_by_their_tier_but_never_the_newest(account: dict[str, str], tmp_path: Path) -> None:
    assert TERMS["hot"] == timedelta(hours=1)
    assert TERMS["warm"] == timedelta(days=90)
    assert timedelta(days=7 * 365) <= TERMS["cold"] <= timedelta(days=7 * 366)
    (tmp_path / "file").write_bytes(b"content")
    second = timedelta(seconds=1)
    place = "s3://backups/tiers"
    tiers: tuple[Tier, ...] = ("hot", "warm", "cold")
    async with archive_at(place) as found:
        for tier in tiers:
            for age in (TERMS[tier], TERMS[tier] - second):
                await found.store(tmp_path, tier, NOW - age)
        expected = [one for one in await found.list() if NOW - one.made < TERMS[one.tier]]
        removed = await found.expire(NOW)
        assert sorted(one.tier for one in removed) == ["cold", "hot", "warm"]
        assert await found.list() == expected
        assert len(await keys(place)) == 2 * len(expected)
        # Long after, one is left: the newest.
        await found.expire(NOW + timedelta(days=36_500))
        assert await found.list() == [max(expected, key=lambda one: one.made)]


def test_an_archive_goes_by_the_time_of_the_store_and_removes_nothing_while_a_backup_is_dated_in_the_future(
    cli: Cli, account: dict[str, str], tmp_path: Path
) -> None:
    cli, place, now = with_account(cli, account), "s3://backups/ahead", datetime.now(UTC)
    (tmp_path / "file").write_bytes(b"content")

    async def store(tier: Tier, at: datetime) -> str:
        async with archive_at(place) as found:
            return (await found.store(tmp_path, tier, at)).name

    old = asyncio.run(store("hot", now - timedelta(days=1)))
    ahead = asyncio.run(store("warm", now + timedelta(days=2)))

    def names() -> list[str]:
        return [one["name"] for one in cli.ask("archive", "list", place)["backups"]]

    for words in (("archive", "expire", place), ("restore", place, "--drill")):
        refused = cli(*words)
        assert (refused.code, f"`{ahead}` is dated after" in " ".join(refused.err.split())) == (1, True), refused.err
    assert names() == [old, ahead]
    with_settings(cli, f'backup_to = "{place}"\n')
    made = cli.ask("backup")["backup"].removeprefix(f"{place}/")
    assert names() == [old, made, ahead]

    # The store's time is later than that: it is a backup like others, and the old one is past its term.
    stores.set_time(cli.store, round((now + timedelta(days=3)).timestamp() * 1000))
    assert [one["name"] for one in cli.ask("archive", "expire", place)["removed"]] == [old]
    latest = cli.ask("backup")["backup"].removeprefix(f"{place}/")
    assert names() == [made, ahead, latest]
    assert cli.ask("restore", place, "--drill")["verdict"]["intact"]


async def test_a_server_goes_on_with_backups_and_doctor_tells_that_none_is_removed_while_one_is_dated_in_the_future(
    cli: Cli, account: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = "s3://backups/server-ahead"
    (tmp_path / "file").write_bytes(b"content")
    async with archive_at(place) as found:
        ahead = await found.store(tmp_path, "cold", datetime.now(UTC) + timedelta(days=2))
    async with (
        Interlock.open(cli.home, backup_to=place, resume_approved=True, keep_environment=list(NAMES)) as app,
        asyncio.timeout(120),
    ):
        while await app.journal.read(last_made) is None:  # noqa: ASYNC110 - the store tells
            await asyncio.sleep(0.05)
        assert (await Health(app).ready())[1]["backups"] == "healthy"
    with_settings(cli, f'backup_to = "{place}"\n')
    told = " ".join((await asyncio.to_thread(cli, "doctor")).out.split())
    assert f"backups past their term are not removed: `{ahead.name}` is dated after" in told


class Careless(Bucket):
    """An object store that loses a byte."""

    async def get(self, key: str) -> bytes | None:
        content = await super().get(key)
        return None if content is None else content[:-1]


@OPS_14
async def test_what_cannot_be_read_back_is_no_backup(account: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    bucket = Careless(Account.of(os.environ), "backups")
    careless = Archive(bucket, "careless")
    with pytest.raises(Failure, match="is not what was written") as refused:
        await careless.store(tmp_path, "warm", NOW)
    assert refused.value.code == "E3804"
    assert [one.whole for one in await careless.list()] == [False]
    await bucket.close()


async def test_large_files_are_cut_into_parts(
    account: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "PART", 1000)
    (tmp_path / "from" / "deep").mkdir(parents=True)
    content = {"large": os.urandom(2500), "deep/empty": b"", "deep/ä b": b"x"}
    for name, data in content.items():
        (tmp_path / "from" / name).write_bytes(data)
    (tmp_path / "to").mkdir()
    async with archive_at("s3://backups/parts") as found:
        await found.store(tmp_path / "from", "hot", NOW)
        assert len(await keys("s3://backups/parts")) == 5
        await found.fetch(tmp_path / "to", NOW)
    assert {name: (tmp_path / "to" / name).read_bytes() for name in content} == content


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"AWS_ACCESS_KEY_ID": ""}, "no credentials"),
        ({"AWS_ENDPOINT_URL": "http://objects.example.com"}, "plain HTTP"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "no answer"),
    ],
)
def test_an_account_that_cannot_be_used_is_told(
    cli: Cli, account: dict[str, str], changed: dict[str, str], words: str
) -> None:
    ended = with_account(cli, {**account, **changed})("archive", "list", "s3://backups/x")
    assert (ended.code, words in ended.err) == (1, True), ended.err
    assert SECRET not in ended.err + ended.out


def test_a_bucket_that_is_not_there_and_words_that_fit_nothing_are_told(cli: Cli, account: dict[str, str]) -> None:
    cli = with_account(cli, account)
    assert "NoSuchBucket" in cli("backup", "s3://nowhere/x").err
    assert cli("archive", "list", "/srv/backups").code == 2
    assert cli("backup", str(cli.path / "copy"), "--tier", "cold").code == 2
    assert cli("restore", str(cli.path / "nothing")).code == 2


def test_requests_are_signed_as_amazon_documents_and_its_library_signs() -> None:
    """The example of "Signature Calculations for the Authorization Header" in the reference of the S3 API."""
    account = Account("https://examplebucket.s3.amazonaws.com", "us-east-1", "AKIAIOSFODNN7EXAMPLE", SECRET)
    moment = datetime(2013, 5, 24, tzinfo=UTC)
    headers = signed(account, "GET", f"{account.endpoint}/test.txt", b"", moment, range="bytes=0-9")
    assert headers["authorization"].endswith("f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41")
    listing = signed(account, "GET", f"{account.endpoint}/?max-keys=2&prefix=J", b"", moment)
    assert listing["authorization"].endswith("34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7")
    assert SECRET not in repr(account)


# By a server


@OPS_14
async def test_a_server_makes_its_scheduled_backup_in_an_object_store_with_a_stored_credential(
    cli: Cli, account: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES[:2]:
        monkeypatch.delenv(name)
    place = "s3://backups/scheduled"
    monkeypatch.setenv("INTERLOCK_DEMO_LEDGER", str(cli.ledger))
    with_settings(cli, f'backup_to = "{place}"\nbackup_tier = "cold"\narchive_secret = "objects"\n')
    assert "none in s3://backups/scheduled yet" in cli("doctor").out
    assert cli("secrets", "set", "objects", "-", stdin=f"{account[NAMES[0]]}:{SECRET}").code == 0
    assert post(cli, "before") == (True, False)

    async def made() -> list[Archived]:
        async with archive_at(place, f"{account[NAMES[0]]}:{SECRET}") as found:
            return await found.list()

    async with Interlock.open(cli.home, resume_approved=True) as app:
        async with asyncio.timeout(120):
            while await app.journal.read(last_made) is None:  # noqa: ASYNC110 - the store tells
                await asyncio.sleep(0.05)
        (first,) = await made()
        assert (first.tier, first.whole, first.kind) == ("cold", True, "interlock")
        assert (await Health(app).ready())[1]["backups"] == "healthy"
        # For another process of the same store the next one is due tomorrow.
        async with Interlock.open(cli.home, housekeeping=False) as other:
            assert not await other.journal.commit(partial(due, every_ms=app.settings.backup_every_ms))
    assert await made() == [first]
    assert "s3://backups/scheduled, the newest 0.0 hours old" in cli("doctor").out

    drilled = cli.ask("restore", "--drill")
    assert drilled["verdict"]["intact"] is True
    assert drilled["rows"]["reservation"] == 1


@OPS_14
def test_commands_use_the_stored_credential_that_the_settings_name(
    cli: Cli, account: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES[:2]:
        monkeypatch.delenv(name)
    place = "s3://backups/stored"
    with_settings(cli, f'backup_to = "{place}"\narchive_secret = "objects"\n')
    for words in (("backup",), ("backup", place), ("archive", "list", place), ("restore", "--drill")):
        refused = cli(*words)
        assert (refused.code, "there is no credential `objects`" in refused.err) == (1, True), refused.err
    assert cli("secrets", "set", "objects", "-", stdin=f"{account[NAMES[0]]}:{SECRET}").code == 0
    assert post(cli, "before") == (True, False)
    assert cli.ask("backup", place, "--tier", "cold")["verdict"]["intact"] is True
    assert cli.ask("backup")["verdict"]["intact"] is True
    assert [one["tier"] for one in cli.ask("archive", "list", place)["backups"]] == ["cold", "warm"]
    assert cli.ask("archive", "expire", place) == {"removed": []}
    for words in (("restore", "--drill"), ("restore", place, "--drill")):
        assert cli.ask(*words)["rows"]["reservation"] == 1

    # A new machine has no store yet that could hold the credential: it takes that of the environment.
    fresh = elsewhere(cli, "fresh")
    named = Cli(fresh.path, {**fresh.extra, "INTERLOCK_ARCHIVE_SECRET": "objects"})
    for one, words in ((fresh, "no credentials for the object store"), (named, "there is no store here")):
        refused = one("restore", place)
        assert (refused.code, words in refused.err) == (1, True), refused.err
    assert with_account(named, account)("restore", place).code == 0
    assert post(fresh, "before") == (True, True)
    # The restored data directory has the stored credential again.
    assert fresh.ask("restore", "--drill")["rows"]["reservation"] == 1


async def test_an_object_store_that_refuses_is_shown_as_a_failing_backup(
    cli: Cli, account: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Interlock.open(cli.home, backup_to="s3://nowhere/x", resume_approved=True) as app:
        async with asyncio.timeout(120):
            while not app.supervisor.failing:  # noqa: ASYNC110 - the supervisor tells
                await asyncio.sleep(0.05)
        (failing,) = app.supervisor.failing
        assert (failing.task, "NoSuchBucket" in failing.error) == ("backups", True)
        assert (await Health(app).ready())[1]["backups"] == "degraded"


async def test_readiness_tells_whether_the_object_store_can_be_used(
    cli: Cli, account: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "s3://backups/ready"

    async def told(**settings: Any) -> tuple[str, str | None]:
        async with Interlock.open(cli.home, housekeeping=False, keep_environment=list(NAMES), **settings) as app:
            status, parts = await Health(app).ready()
            assert place not in str(parts)
            return status, parts.get("archive")

    assert await told(backup_to=place) == await told(archive_to=place) == ("healthy", "healthy")
    assert await told(archive_to="s3://nowhere/x") == ("degraded", "down")
    assert await told(archive_to=place, archive_secret="missing") == ("degraded", "down")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert await told(backup_to=place) == ("degraded", "down")
    assert (await told())[1] is None


# Records past their term


def with_settings(cli: Cli, text: str) -> None:
    with Path(cli.home, "settings.toml").open("a") as file:
        file.write(f"\n{text}")


@OPS_14
async def test_records_are_in_the_archive_before_they_are_removed_and_come_back_by_one_command(
    tmp_path: Path, account: dict[str, str]
) -> None:
    home = await make_home(tmp_path / "home", start_ms=ms(2015))
    cli = with_account(Cli(tmp_path), account)
    with opened(home) as database:
        bodies: list[bytes] = [body for (body,) in database.execute("SELECT body FROM journal ORDER BY seq")]
    count, place = len(bodies), "s3://backups/records"

    failed = with_account(cli, account, INTERLOCK_ARCHIVE_TO="s3://nowhere/x")("audit", "purge", "--yes")
    assert (failed.code, "NoSuchBucket" in failed.err) == (1, True), failed.err
    assert len(stored(home)) >= count
    assert verify(home).purged_through == 0

    with_settings(cli, f'archive_to = "{place}"\n')
    assert cli.ask("audit", "purge", "--through", "3", "--yes")["records"] == 3
    assert cli.ask("audit", "purge", "--yes")["last"] == count
    assert cli("audit", "verify").code == 0
    listed = cli.ask("archive", "list", place)["backups"]
    assert [(one["kind"], one["tier"], one["whole"]) for one in listed] == [("records", "cold", True)] * 2
    purges = [orjson.loads(line)["record"] for line in cli("audit", "export").out.splitlines()]
    assert [one["archive"] for one in purges if one["kind"] == "purge"] == [one["name"] for one in listed]

    public = (home.keys / "journal.pub").read_text().strip()
    returned: list[bytes] = []
    for number, one in enumerate(listed):
        restored = cli.ask("archive", "restore", f"{place}/{one['name']}", "--to", f"records-{number}")
        assert restored["verdict"]["intact"] is True
        verified = cli("audit", "verify", "--export", restored["out"], "--public-key", public)
        assert verified.code == 0, verified.out
        lines = (tmp_path / restored["out"]).read_bytes().splitlines()
        returned += [line.partition(b',"record":')[2][:-1] for line in lines]
    assert returned == bodies
    again = cli("archive", "restore", f"{place}/{listed[0]['name']}", "--to", "records-0")
    assert "is there already" in again.err
    words = ("archive", "restore", f"{place}/{listed[0]['name']}", "--to", "records-shown")
    shown = await asyncio.to_thread(warm.at_terminal, words, cli.environment, cli.path)
    assert (shown[0], "100 %  reading" in shown[1]) == (0, True), shown[1]

    async with archive_at(place) as found:
        bucket: Bucket = found._bucket  # pyright: ignore[reportPrivateUsage]
        part = f"records/{listed[0]['name']}/0000000"
        await bucket.put(part, (await bucket.get(part) or b"").replace(b"demo.echo", b"demo.post"))
    damaged = await asyncio.to_thread(
        cli, "archive", "restore", f"{place}/{listed[0]['name']}", "--to", "records-damaged"
    )
    assert (damaged.code, "is not what was written" in damaged.err) == (1, True)
    assert not (tmp_path / "records-damaged").exists()


# Checkpoints


@tool(namespace="arch", version="1.0.0", mutation_class="read_only", checkpoints=["phase_complete"])
async def crawl(ctx: Context) -> int:
    """Save one named checkpoint and one at a milestone."""
    await ctx.checkpoint("page", {"read": 1})
    await ctx.checkpoint("phase_complete", {"read": 2})
    return 2


@OPS_14
@STATE_06
async def test_a_checkpoint_at_a_milestone_goes_to_the_archive_at_day_ninety_and_can_be_restored(
    tmp_path: Path, account: dict[str, str]
) -> None:
    place, time = "s3://backups/checkpoints", FakeClock()
    cli = with_account(Cli(tmp_path), account)
    async with Interlock.open(tmp_path / "home", clock=time.clock, housekeeping=False, archive_to=place) as app:
        await app.add(crawl)
        call = (await app.call("arch.crawl")).invocation_id
        saved = await app.checkpoints(call)
        assert [one.checkpoint_type for one in saved] == ["named", "macro"]
        time.advance(90 * 86_400 - 60)
        await app.maintain()
        assert await app.checkpoints(call) == saved
        time.advance(86_400)
        await app.maintain()
        assert await app.checkpoints(call) == saved[:1]
        async with archive_at(place) as found:
            (archived,) = await found.list()
        assert (archived.kind, archived.tier, archived.whole) == ("checkpoints", "cold", True)
        # The sealing key that the archived checkpoint needs outlives a change of the key.
        await app.secrets.rotate_key(by="local:test")
    assert verify(home_at(tmp_path / "home")).intact

    restored = f"{place}/{archived.name}"
    assert cli.ask("archive", "restore", restored) == {"archived": archived.name, "checkpoints": 1}
    assert cli.ask("archive", "restore", restored)["checkpoints"] == 0
    async with Interlock.open(tmp_path / "home", housekeeping=False) as app:
        await app.add(crawl)
        assert await app.checkpoints(call) == saved


@OPS_14
async def test_a_checkpoint_that_cannot_be_archived_stays(tmp_path: Path, account: dict[str, str]) -> None:
    time = FakeClock()
    async with Interlock.open(
        tmp_path / "home", clock=time.clock, housekeeping=False, archive_to="s3://nowhere/x"
    ) as app:
        await app.add(crawl)
        call = (await app.call("arch.crawl")).invocation_id
        time.advance(91 * 86_400)
        with pytest.raises(Failure, match="NoSuchBucket"):
            await app.maintain()
        assert len(await app.checkpoints(call)) == 2


def test_only_archived_records_and_checkpoints_are_restored_by_the_archive_command(
    cli: Cli, account: dict[str, str]
) -> None:
    cli = with_account(cli, account)
    for words in (
        ("/srv/backups", "--to", "x"),
        ("s3://backups/x/warm/interlock-20261118T031500Z",),
        ("s3://backups/x/cold/records-20261118T031500Z",),
        ("s3://backups/x/cold/checkpoints-20261118T031500Z", "--to", "x"),
        ("s3://backups/x/cold/records-2026", "--to", "x"),
    ):
        assert cli("archive", "restore", *words).code == 2
    missing_one = cli("archive", "restore", "s3://backups/x/cold/checkpoints-20261118T031500Z")
    assert (missing_one.code, "no finished backup" in missing_one.err) == (1, True)

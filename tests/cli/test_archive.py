"""Backups in an object store. The store is moto, an emulator of S3. It accepts every signature."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from interlock import Failure
from interlock.audit import archive
from interlock.audit.archive import TERMS, Archive, Tier, archive_at
from interlock.net.s3 import Account, Bucket, signed
from tests.cli.conftest import Cli
from tests.cli.test_backup import elsewhere, post
from tests.needs import missing

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


@pytest.mark.part_of("OPS-14", rest="checkpoints and purged audit segments; backups by a server's schedule")
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


@pytest.mark.part_of("OPS-14", rest="checkpoints and purged audit segments; backups by a server's schedule")
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


class Careless(Bucket):
    """An object store that loses a byte."""

    async def get(self, key: str) -> bytes | None:
        content = await super().get(key)
        return None if content is None else content[:-1]


@pytest.mark.part_of("OPS-14", rest="checkpoints and purged audit segments; backups by a server's schedule")
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
        await found.fetch(tmp_path / "to")
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

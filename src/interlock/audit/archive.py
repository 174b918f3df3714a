"""Directories in an S3-compatible store: written, read back and compared, listed, fetched, removed after their term.

    PREFIX/TIER/KIND-TIME/manifest.json      every file of the directory with the digests of its parts; written last
    PREFIX/TIER/KIND-TIME/0000000, …         the parts, of at most `PART` bytes

There are three kinds: `interlock` is a backup, `records` a part of the journal that retention removed, and
`checkpoints` are old checkpoints of calls that have ended (see `archiving`).

INVARIANT: a directory without a manifest is none. The manifest is written when every part was read back and is what was
sent, and it is removed first. So a backup that was cut off in the middle is never restored, and is removed after its
term as others are.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Literal, cast
from urllib.parse import urlsplit

import orjson

from interlock.core.errors import Failure
from interlock.core.expressions import expression
from interlock.core.record import NamedTuple
from interlock.net.s3 import Account, Bucket, is_address

Tier = Literal["hot", "warm", "cold"]
Kind = Literal["interlock", "records", "checkpoints"]
# How long what is in a tier is kept.
TERMS: dict[Tier, timedelta] = {
    "hot": timedelta(hours=1),
    "warm": timedelta(days=90),
    "cold": timedelta(days=7 * 365.25),
}
PART = 16 << 20
# Times of one store are never further apart than this; those of a machine and an object store may be a little.
DIFFERENCE = timedelta(minutes=5)
_MANIFEST = "manifest.json"
_TIME = "%Y%m%dT%H%M%SZ"
_NAME = r"(hot|warm|cold)/(interlock|records|checkpoints)-(\d{8}T\d{6}Z)"
_NAMED = expression(rf"^{_NAME}/([^/]+)$")
_CHOSEN = expression(rf"^(.*?)/?({_NAME})$")
_Progress = Callable[[int, int], None]


class Archived(NamedTuple):
    """A directory in an archive: a backup, or something else that was put there."""

    tier: Tier
    made: datetime
    # Whether it was finished.
    whole: bool
    kind: Kind = "interlock"

    @property
    def name(self) -> str:
        return f"{self.tier}/{self.kind}-{self.made.strftime(_TIME)}"


class Archive:
    """The backups and the rest below one address, s3://BUCKET/PREFIX."""

    def __init__(self, bucket: Bucket, prefix: str, chosen: str = "") -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        # What the address names, if it names something in the archive.
        self.chosen = chosen

    async def store(
        self, source: Path, tier: Tier, now: datetime, progress: _Progress | None = None, *, kind: Kind = "interlock"
    ) -> Archived:
        """Write a directory. Every part is read back; E3804 where it is not what was sent."""
        backup = Archived(tier, now.astimezone(UTC).replace(microsecond=0), True, kind)
        while await self._bucket.list(place := f"{self._prefix}{backup.name}/"):  # another one of this second
            backup = backup._replace(made=backup.made + timedelta(seconds=1))
        paths = sorted(path for path in source.rglob("*") if path.is_file())  # noqa: ASYNC240 - a command does nothing else
        total, done, number = sum(path.stat().st_size for path in paths), 0, 0
        files: dict[str, list[list[str]]] = {}
        for path in paths:
            parts = files[path.relative_to(source).as_posix()] = list[list[str]]()
            with open(path, "rb") as file:  # noqa: ASYNC230 - likewise
                while data := file.read(PART):
                    parts.append([f"{number:07}", await self._put(f"{place}{number:07}", data)])
                    number, done = number + 1, done + len(data)
                    if progress is not None:
                        progress(done, total)
        await self._put(place + _MANIFEST, orjson.dumps({"version": 1, "files": files}))
        return backup

    async def check(self) -> None:
        """Refuses (E3411) if the store does not answer, or does not let us read."""
        await self._bucket.check(self._prefix)

    async def list(self) -> list[Archived]:
        """Everything in it, the oldest first, also what was not finished."""
        found: dict[str, Archived] = {}
        for key in await self._bucket.list(self._prefix):
            if named := _NAMED.match(key.removeprefix(self._prefix)):
                made = datetime.strptime(named[3], _TIME).replace(tzinfo=UTC)
                tier, kind = cast("Tier", named[1]), cast("Kind", named[2])
                one = Archived(tier, made, named[4] == _MANIFEST, kind)
                if one.whole or one.name not in found:
                    found[one.name] = one
        return sorted(found.values(), key=lambda one: (one.made, one.tier, one.kind))

    async def fetch(self, target: Path, now: datetime, progress: _Progress | None = None) -> str:
        """Read what the address names, or the newest backup, into an empty directory; its name.

        E3804 where anything is missing or is not what was written, E3411 where nobody knows which backup is the newest.
        """
        name = self.chosen or await self._newest(now)
        place = f"{self._prefix}{name}/"
        manifest = await self._bucket.get(place + _MANIFEST)
        if manifest is None:
            raise Failure(
                "E3411", f"there is no finished backup `{name}`", resolution="interlock archive list names them"
            )
        try:
            files: dict[str, list[list[str]]] = orjson.loads(manifest)["files"]
            count, done = sum(len(parts) for parts in files.values()), 0
            for file, parts in files.items():
                path = _inside(target, file)
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:  # noqa: ASYNC230 - likewise
                    for part, digest in parts:
                        out.write(await self._get(place + PurePosixPath(part).name, digest))
                        done += 1
                        if progress is not None:
                            progress(done, count)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise Failure(
                "E3804", f"the manifest of `{name}` is damaged", resolution="restore another backup"
            ) from None
        return name

    async def expire(self, now: datetime) -> list[Archived]:
        """Remove what is past the term of its tier, but never the newest finished backup.

        E3411, and nothing is removed, while something is dated in the future.
        """
        every = await self.list()
        if dated := [one.name for one in every if is_in_future(one.made, now)]:
            raise dated_in_future(dated[-1], now, "so nothing is removed")
        newest = [one for one in every if one.whole and one.kind == "interlock"][-1:]
        past = [one for one in every if now - one.made >= TERMS[one.tier] and one not in newest]
        for one in past:
            place = f"{self._prefix}{one.name}/"
            await self._bucket.remove(place + _MANIFEST)
            for key in await self._bucket.list(place):
                await self._bucket.remove(key)
        return past

    async def _newest(self, now: datetime) -> str:
        whole = [one for one in await self.list() if one.whole and one.kind == "interlock"]
        if not whole:
            raise Failure("E3411", "there is no finished backup at this address", resolution="check the address")
        if is_in_future(whole[-1].made, now):
            raise dated_in_future(whole[-1].name, now, "so it is not known which one is the newest")
        return whole[-1].name

    async def _put(self, key: str, data: bytes) -> str:
        """Store a part and read it back; its digest."""
        await self._bucket.put(key, data)
        digest = hashlib.sha256(data).hexdigest()
        await self._get(key, digest)
        return digest

    async def _get(self, key: str, digest: str) -> bytes:
        data = await self._bucket.get(key)
        if data is None or hashlib.sha256(data).hexdigest() != digest:
            what = "is missing" if data is None else "is not what was written"
            words = f"a part of the backup {what}: `{key}`"
            raise Failure("E3804", words, resolution="use another backup, and look at who may write to the bucket")
        return data


def _inside(target: Path, name: str) -> Path:
    """The path of a file of a backup. A name that would lead out of the directory raises ValueError."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ValueError(name)
    return target / path


def is_in_future(made: datetime, now: datetime) -> bool:
    """Whether a backup is dated in the future: a machine whose clock was wrong made it."""
    return made - now > DIFFERENCE


def dated_in_future(name: str, now: datetime, consequence: str) -> Failure:
    """The failure of what depends on the dates of backups, one of which is in the future."""
    words = f"`{name}` is dated after the present time of the store, {now:%Y-%m-%d %H:%M} UTC, {consequence}"
    advice = (
        "correct the clock of the machine that made it, or of this one; then remove it or move it away. To restore a"
        " backup, name it"
    )
    return Failure("E3411", words, resolution=advice)


def chosen_kind(address: str) -> Kind | None:
    """The kind of what an address names in an archive; None if it names nothing there."""
    named = _CHOSEN.match(urlsplit(address).path.strip("/")) if is_address(address) else None
    return None if named is None else cast("Kind", named[4])


@asynccontextmanager
async def archive_at(address: str, credential: str = "") -> AsyncGenerator[Archive]:
    """The archive at an address. Without a credential, KEY_ID:SECRET, it is that of the environment."""
    parts = urlsplit(address)
    prefix, chosen = parts.path.strip("/"), ""
    if named := _CHOSEN.match(prefix):
        prefix, chosen = named[1], named[2]
    bucket = Bucket(Account.of(os.environ, credential), parts.netloc)
    try:
        yield Archive(bucket, prefix, chosen)
    finally:
        await bucket.close()

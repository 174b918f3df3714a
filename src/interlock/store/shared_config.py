"""The shared configuration: policy, principals and settings of all machines on a store, in the table `shared_config`.

Each version has the texts of all three files, and who pushed it. Versions are only ever added, and the newest one is in
force. A data directory whose settings state `shared_config` takes the three from here in place of its own files; its
settings.toml then states what is its own (`shared_settings.OF_A_MACHINE`). The journal has a record with the digests
of each version. The texts are checked before they are stored, by those who call `add`.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import orjson

from interlock.core.errors import Failure
from interlock.default_settings import Effective, defaults_if_unstated
from interlock.store import records
from interlock.store.home import Home
from interlock.store.inspection import opened
from interlock.store.schema_version import schema_of
from interlock.store.shared_version import SharedConfig

if TYPE_CHECKING:
    from interlock.store.port import Reader, Transaction

POLICY, PRINCIPALS, SETTINGS = "policy.cedar", "principals.toml", "settings.toml"
FILES = (POLICY, PRINCIPALS, SETTINGS)
_SINCE = "0018"
_COLUMNS = "version, files, digest, pushed_by, at_ms"


def newest(reader: Reader) -> SharedConfig | None:
    """The version that is in force; None where nothing was ever shared."""
    row = reader.one(f"SELECT {_COLUMNS} FROM shared_config ORDER BY version DESC LIMIT 1")  # noqa: S608 - constant
    return None if row is None else _read(row)


def get(reader: Reader, version: int) -> SharedConfig:
    """One version; E3411 if there is none of this number."""
    row = reader.one(f"SELECT {_COLUMNS} FROM shared_config WHERE version = ?", (version,))  # noqa: S608 - constant
    if row is None:
        raise Failure("E3411", f"there is no version {version}", resolution="interlock config history lists them")
    return _read(row)


def history(reader: Reader, most: int) -> list[SharedConfig]:
    """The last versions, the newest first."""
    rows = reader.all(f"SELECT {_COLUMNS} FROM shared_config ORDER BY version DESC LIMIT ?", (most,))  # noqa: S608 - constant
    return [_read(row) for row in rows]


def _read(row: Any) -> SharedConfig:
    version, text, digest, by, at_ms = row
    # INVARIANT: texts that were changed after they were stored are not used.
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise Failure("E3804", f"version {version} of the shared configuration is not what was stored")
    return SharedConfig(version, orjson.loads(text), by, at_ms)


def add(transaction: Transaction, files: dict[str, str], ref: str, by: str, instead_of: int | None) -> SharedConfig:
    """Put texts in force as the next version, with a record. E3410 if another version than `instead_of` is."""
    before = newest(transaction)
    version = 0 if before is None else before.version
    if version != (instead_of or 0):
        assert before is not None or instead_of
        now = "nothing" if before is None else f"version {version}, by {before.by},"
        raise Failure(
            "E3410",
            f"{now} is in force, and not what this is to replace",
            resolution="look at it: interlock config diff; then push again with --instead-of and its number",
        )
    text = orjson.dumps(files, option=orjson.OPT_SORT_KEYS).decode()
    digest = hashlib.sha256(text.encode()).hexdigest()
    transaction.execute(
        f"INSERT INTO shared_config ({_COLUMNS}) VALUES (?, ?, ?, ?, ?)",  # noqa: S608 - constant
        (version + 1, text, digest, by, transaction.now_ms),
    )
    transaction.notifies = True
    digests = {name: hashlib.sha256(one.encode()).hexdigest() for name, one in files.items()}
    body = records.plain(
        "authority", ref, transaction.now_ms, act="config.pushed", by=by, configVersion=version + 1, files=digests,
        digest=digest,
    )  # fmt: skip
    transaction.append("authority", ref, body)
    return SharedConfig(version + 1, files, by, transaction.now_ms)


def settings_of(home: Home, **given: Any) -> Effective:
    """The settings in effect of a data directory: of its file or, if that states `shared_config`, of the store.

    In the second case, also sets what is shared on the home.
    """
    if not given and (defaults := defaults_if_unstated(home.settings)) is not None:
        return Effective(defaults, {})
    # Models are loaded where settings are stated.
    from interlock.settings import effective_settings
    from interlock.store.shared_settings import with_shared

    effective = Effective(*effective_settings(home.settings, **given))
    if not effective.settings.shared_config:
        return effective
    home.shared = shared = _of_store(home)
    return with_shared(effective, f"shared version {shared.version}", shared.files[SETTINGS], given)


def in_store(home: Home) -> SharedConfig | None:
    """The version that is in force in the store of a data directory, whether that follows it or not."""
    if home.new:
        return None
    with opened(home) as reader:
        # A store of an earlier schema has no such table.
        return newest(reader) if str(schema_of(reader)) >= _SINCE else None


def text_of(home: Home, name: str) -> str | None:
    """The text that is in force in place of a file; None if the file is."""
    return None if home.shared is None else home.shared.files.get(name)


def _of_store(home: Home) -> SharedConfig:
    found = in_store(home)
    if found is None:
        raise Failure(
            "E3108",
            "the settings state shared_config, and no configuration was pushed to the store yet",
            resolution="on the machine whose files are right, run: INTERLOCK_SHARED_CONFIG=false interlock config push",
        )
    return found

"""Finds the store of a data directory: the file in it, or a PostgreSQL database that its settings name."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from interlock.store.home import MARK, Home


def home_at(path: str | os.PathLike[str], store: str | None = None, store_admin: str | None = None) -> Home:
    """The home of a data directory. `store` and `store_admin` are settings that the program was given."""
    # A backup is read as it is. Its settings may name a server, which has gone on since.
    address = "" if store is None and os.path.exists(Path(path, MARK)) else _setting("store", path, store)
    if not address:
        return Home(path)
    from interlock.store.postgres.home import PostgresHome  # the driver takes a tenth of a second to load

    return PostgresHome(path, address, _setting("store_admin", path, store_admin))


def address_of(home: Home) -> str:
    """The address of the database of a home; empty if its store is a file."""
    if home.near:
        return ""
    from interlock.store.postgres.home import PostgresHome

    return cast("PostgresHome", home).address


def restored_home(path: str | os.PathLike[str], backup: Path) -> Home:
    """The home of a data directory that is restored from a backup: with the store that the backup's settings name."""
    return home_at(path, _setting("store", backup, None), _setting("store_admin", backup, None))


@contextmanager
def scratch_home(path: str | os.PathLike[str], server: str) -> Generator[Home]:
    """The home of a data directory with its store in a schema that is made on a server, and removed in the end."""
    from interlock.store.postgres.scratch import scratch_schema

    with scratch_schema(server) as address:
        yield home_at(path, address, address)


def _setting(name: str, path: str | os.PathLike[str], given: str | None) -> str:
    """A setting by its name. One that is wrong, or a file that is, is for `load_settings` to refuse."""
    if given is None:
        given = os.environ.get(f"INTERLOCK_{name.upper()}")
    if given is None:
        try:
            text = Path(path, "settings.toml").read_text()
            found = tomllib.loads(text).get(name) if "store" in text else None
        except (OSError, ValueError):
            return ""
        given = found if isinstance(found, str) else ""
    return given if given.startswith(("postgresql://", "postgres://")) else ""

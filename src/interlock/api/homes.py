"""Data directories that are not opened: found, read as they are, and what goes wrong with them.

The command line uses these functions, which check no rights: who can read the files may read the database. Opening a
data directory builds every part of the gateway, so what is not needed to read it is imported in the functions.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

    from interlock.api.interlock import Interlock
    from interlock.core.errors import Failure
    from interlock.default_settings import Effective
    from interlock.store.home import Home
    from interlock.store.port import Reader


def home_at(path: Path, store: str | None = None, store_admin: str | None = None) -> Home:
    """The data directory of a path. `store` and `store_admin` are settings that the program was given."""
    from interlock.store import homes

    return homes.home_at(path, store, store_admin)


def first_texts() -> dict[str, str]:
    """The texts of policy and principals that a new data directory begins with, by the names of the files."""
    from interlock.authority.cedar import DEFAULT as POLICY
    from interlock.authority.default_principals import DEFAULT as PRINCIPALS

    return {"policy.cedar": POLICY, "principals.toml": PRINCIPALS}


def settings_of(home: Home) -> Effective:
    """The settings in effect of a data directory, each with its source."""
    from interlock.store import shared_config

    return shared_config.settings_of(home)


def reader_at_rest(path: Path, within: ExitStack) -> Reader | None:
    """The database in one read transaction that `within` ends; None if the data directory has to be opened first."""
    from interlock.store import at_rest

    return at_rest.reader_at_rest(home_at(path), within)


def tool_addresses(reader: Reader) -> list[str]:
    """The names of the tools in a database, in order."""
    from interlock.store import tools

    return sorted(tools.addresses(reader))


def upstream_names(reader: Reader) -> list[str]:
    """The names of the upstreams in a database, in order."""
    from interlock.store import upstreams

    return [one.name for one in upstreams.every(reader)]


@contextmanager
def reading(path: Path) -> Generator[Reader]:
    """The database in one read transaction, whether the data directory is in order or not."""
    from interlock.store.inspection import opened

    with opened(home_at(path)) as reader:
        yield reader


def failure_of(error: Exception) -> Failure:
    """The failure that an exception stands for: of the store, of the machine, or inside Interlock."""
    from interlock.core.errors import Failure
    from interlock.store.failures import no_room, store_failure
    from interlock.store.port import StoreError

    if isinstance(error, Failure):
        return error
    if isinstance(error, StoreError):
        return store_failure(error)
    if isinstance(error, OSError):
        words = f"the data directory cannot be used: {error.strerror or type(error).__name__}"
        return no_room(error) or Failure("E3801", words)
    return Failure("E3000", f"something went wrong inside Interlock ({type(error).__name__})")


class Left(NamedTuple):
    """A write of a process that is being interrupted: it has ended, or whether it took effect is unknown."""

    tool: str
    call: str
    unknown: bool


async def left_behind(app: Interlock) -> list[Left]:
    """The writes of this process that ended while it was being interrupted."""
    from interlock.store import idempotency

    rows = await app.journal.read(lambda reader: idempotency.ended(reader, app.instance.id))
    return [Left(tool, call, state == "unknown") for tool, call, state in rows]

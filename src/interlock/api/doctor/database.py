"""The checks of `interlock doctor` that concern the database of the store: its server, and what was to be in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from interlock.api.doctor.findings import Finding

if TYPE_CHECKING:
    from interlock.store.home import Home
    from interlock.store.port import Reader
    from interlock.store.postgres.connection import PostgresConnection
    from interlock.store.postgres.home import PostgresHome


def check_database(home: Home, reader: Reader) -> Iterator[Finding]:
    if not home.near:
        yield from _server(home, reader)
    yield from _vectors(home, reader)


def _server(home: Home, reader: Reader) -> Iterator[Finding]:
    """The server that has the store, whether its rights keep the journal append-only, and which ones are missing."""
    from interlock.store.postgres import pooler
    from interlock.store.postgres.layout import missing_rights, server, unsafe_settings

    mode = pooler.pooler_mode(cast("PostgresConnection", reader), cast("PostgresHome", home).address)
    if mode == "transaction":
        yield Finding("store", "broken", pooler.WORDS, pooler.ADVICE)
    elif mode is not None:
        yield Finding("store", "good", "reached through a connection pooler in session mode")
    yield _connections(home, reader)
    for right in missing_rights(reader):
        what = f"the role of this process lacks the right {right}"
        yield Finding("store", "broken", what, "grant it, as the owner of the tables")
    if off := unsafe_settings(reader):
        what = f"{' and '.join(off)} {'is' if len(off) == 1 else 'are'} off: a crash of the server may lose or damage"
        yield Finding("store", "attention", f"{what} what was acknowledged", "switch it on in postgresql.conf")
    version, owns = server(reader)
    if not owns:
        yield Finding("store", "good", f"PostgreSQL {version}; the role of this process cannot change a record")
        return
    what = f"PostgreSQL {version}; the role of this process owns the journal, and only triggers protect it"
    yield Finding("store", "attention", what, "give processes a role of their own: the settings store and store_admin")


def _connections(home: Home, reader: Reader) -> Finding:
    """Whether the server allows the connections that the processes on the store need. They open some of them late."""
    from interlock.store.postgres.layout import CONNECTIONS, connections_allowed

    running, allowed = home.alive(), connections_allowed(reader)
    wanted, room = CONNECTIONS * max(running, 1), allowed // CONNECTIONS
    what = f"the database server allows {allowed:,} connections, enough for {room:,} processes; {running:,} run now"
    if wanted <= allowed:
        return Finding("store", "good", what)
    advice = (
        f"allow {wanted:,} at least, {CONNECTIONS} for each process: max_connections of the server, or the connection"
        " limit of the database or of the role; or run fewer processes"
    )
    return Finding("store", "attention", what, advice)


def _vectors(home: Home, reader: Reader) -> Iterator[Finding]:
    """Why vectors of tools are not in the database, although the settings ask for that."""
    from interlock.store.shared_config import settings_of

    if settings_of(home).settings.search_vectors != "store":
        return
    from interlock.store.postgres.vectors import NoVectors, in_database

    try:
        in_database(reader, home)
    except NoVectors as reason:
        what = f"search_vectors is store, and vectors of tools are in memory: {reason}"
        yield Finding("store", "attention", what, "searches find the same; see the how-to page on searching")

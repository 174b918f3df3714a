"""A real PostgreSQL server for tests: one per process of a run (the fixture `postgres_server`), a schema per test."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.needs import need

if TYPE_CHECKING:
    import psycopg


class Server:
    """A server on a socket in a temporary directory, run by somebody who is not root."""

    def __init__(self) -> None:
        self._binaries = need("initdb", "postgresql", below="/usr/lib/postgresql/*/bin").parent
        self.place = Path(tempfile.mkdtemp(prefix="interlock-pg-"))  # the path of a socket must be short
        self._data = self.place / "data"
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(self.place, nobody.pw_uid, nobody.pw_gid)
            self._user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        self._run("initdb", "-D", self._data, "-A", "trust", "-U", "postgres", "--no-sync", "-E", "UTF8")
        self.start()

    @property
    def address(self) -> str:
        return f"postgresql://postgres@/postgres?host={self.place}"

    def start(self) -> None:
        options = f"-k {self.place} -c listen_addresses= -c fsync=off -c max_connections=200"
        self._run("pg_ctl", "-D", self._data, "-w", "-l", self.place / "log", "-o", options, "start")

    def stop(self, how: str = "immediate") -> None:
        self._run("pg_ctl", "-D", self._data, "-w", "-m", how, "stop")

    def remove(self) -> None:
        """End the server for good."""
        try:
            self.stop()
        except subprocess.CalledProcessError:
            pass  # a test has stopped it
        shutil.rmtree(self.place, ignore_errors=True)

    def connect(self) -> psycopg.Connection[Any]:
        """A connection with all rights, for tests that do to the database what the program does not."""
        import psycopg  # most tests do without it

        return psycopg.connect(self.address, autocommit=True)

    def new_schema(self) -> str:
        """The address of a schema that nobody else uses."""
        name = f"t{secrets.token_hex(6)}"
        with self.connect() as connection:
            connection.execute(f'CREATE SCHEMA "{name}"'.encode())
        return f"{self.address}&options=-csearch_path%3D{name}"

    def _run(self, program: str, *arguments: object) -> None:
        command = [str(self._binaries / program), *map(str, arguments)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/", **self._user)


def adopted(home: Path, address: str) -> str:
    """Copy what the database of a data directory holds to a new store on PostgreSQL; returns its address."""
    if (home / "interlock.db").exists():
        from interlock.store.home import Home
        from interlock.store.postgres import schema
        from interlock.store.postgres.connection import Connection
        from interlock.store.tables import metadata

        with closing(Connection(address)) as copy, closing(Home(home).reading()) as original:
            schema.bring_to_head(copy, address, None)
            for table in metadata.sorted_tables:
                columns = ", ".join(f'"{column.name}"' for column in table.columns)
                marks = ", ".join("?" * len(table.columns))
                for row in original.all(f"SELECT {columns} FROM {table.name}"):
                    copy.execute(f"INSERT INTO {table.name} ({columns}) VALUES ({marks}) ON CONFLICT DO NOTHING", row)
            copy.execute("SELECT setval('revocation_seq_seq', (SELECT coalesce(max(seq), 0) + 1 FROM revocation))")
    return address

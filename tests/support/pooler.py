"""A real PgBouncer before a PostgreSQL server, for tests, on a socket in a temporary directory."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.needs import need
from tests.support import surroundings
from tests.support.postgres import Server

PATIENCE_S = 60.0
_PORT = 6432
_CONFIGURATION = """
[databases]
* = host={server}
[pgbouncer]
listen_addr =
listen_port = {port}
unix_socket_dir = {place}
auth_type = trust
auth_file = {place}/users
admin_users = postgres
pool_mode = {mode}
server_round_robin = {in_turns}
max_client_conn = 200
default_pool_size = 60
"""


class Pooler:
    """A pooler in a mode. `in_turns`: it takes its free sessions one after the other, and not the last one again."""

    def __init__(self, server: Server, mode: str, *, in_turns: bool = False) -> None:
        self._program = need("pgbouncer", "pgbouncer", below="/usr/sbin")
        self._server = server
        self.place = Path(tempfile.mkdtemp(prefix="interlock-pool-", dir=surroundings.memory() or "/tmp"))
        (self.place / "users").write_text('"postgres" ""\n')
        (self.place / "ini").write_text(
            _CONFIGURATION.format(server=server.place, port=_PORT, place=self.place, mode=mode, in_turns=int(in_turns))
        )
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:  # which it refuses
            nobody = pwd.getpwnam("nobody")
            os.chown(self.place, nobody.pw_uid, nobody.pw_gid)
            self._user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [str(self._program), str(self.place / "ini")],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", **self._user,
        )  # fmt: skip
        until = time.monotonic() + PATIENCE_S
        while not self._answers():
            assert self._process.poll() is None, "PgBouncer does not start"
            assert time.monotonic() < until
            time.sleep(0.01)

    def kill(self) -> None:
        """End it as a crash would, with all connections through it."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        (self.place / f".s.PGSQL.{_PORT}").unlink(missing_ok=True)

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.place, ignore_errors=True)

    def new_database(self, name: str) -> str:
        """The address, through the pooler, of an empty database. It passes on no `options`, so no schema by them."""
        with self._server.connect() as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return f"postgresql://postgres@/{name}?host={self.place}&port={_PORT}"

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as knocking:
            return knocking.connect_ex(str(self.place / f".s.PGSQL.{_PORT}")) == 0

"""A real Postgres for the tests of this directory."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.needs import need


@pytest.fixture(scope="session")
def socket() -> Generator[Path]:
    """A server of our own on a socket in a temporary directory, run by somebody who is not root."""
    binaries = need("initdb", "postgresql", below="/usr/lib/postgresql/*/bin").parent
    place = Path(tempfile.mkdtemp(prefix="interlock-pg-"))  # the path of a socket must be short
    user: dict[str, Any] = {}
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(place, nobody.pw_uid, nobody.pw_gid)
        user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    data = place / "data"
    options = f"-k {place} -c listen_addresses= -c fsync=off -c autovacuum=off"
    run_as: dict[str, Any] = {"check": True, "capture_output": True, "cwd": "/", **user}
    try:
        subprocess.run([binaries / "initdb", "-D", data, "-A", "trust", "-U", "postgres", "--no-sync"], **run_as)
        start = [binaries / "pg_ctl", "-D", data, "-w", "-l", place / "log", "-o", options, "start"]
        subprocess.run(start, **run_as)
        yield place
        subprocess.run([binaries / "pg_ctl", "-D", data, "-m", "immediate", "stop"], **run_as)
    finally:
        shutil.rmtree(place)

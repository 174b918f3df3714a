"""The surroundings of a run: where its temporary files are, which authorities it trusts, whether it keeps bytecode."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

# Nearly every test opens a data directory, and each one writes to the disk a dozen times and waits for it. No test cuts
# the power, so none can tell memory from a disk.
MEMORY = Path("/dev/shm")
LEAST_BYTES = 2 << 30
# Tests reach nobody outside of this machine. Each HTTP client parses the certificates of all authorities that it
# trusts, 70 ms of CPU for the usual hundred and forty, so here it is one. Its key was thrown away.
AUTHORITY = str(Path(__file__).parent / "authority.pem")
AUTHORITIES, GIVEN = "SSL_CERT_FILE", "GIVEN_SSL_CERT_FILE"

# The name of the socket of the process that all workers have theirs forked off (tests/warm.py), where there is one.
shared_socket = [""]
# Descriptors of this process that several tests use: those of connections with such a process.
shared_descriptors: set[int] = set()


def memory() -> Path | None:
    """The directory in memory, where there is one with enough space."""
    if not os.access(MEMORY, os.W_OK) or shutil.disk_usage(MEMORY).free < LEAST_BYTES:
        return None
    return MEMORY


def settle() -> None:
    """Set up this process and all that it starts."""
    # Without bytecode, each process compiles the tests and the whole program when it starts.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # A thread of its own that numpy's linear algebra starts when it is loaded would not be in the workers.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    place = memory()
    if place is not None and "TMPDIR" not in os.environ:
        os.environ["TMPDIR"] = tempfile.tempdir = str(place)
    if os.environ.get(AUTHORITIES) != AUTHORITY:
        if AUTHORITIES in os.environ:
            os.environ[GIVEN] = os.environ[AUTHORITIES]
        os.environ[AUTHORITIES] = AUTHORITY


def outside() -> dict[str, str]:
    """The environment for a program that reaches the world, such as an installer: it trusts what the run was given."""
    environment = {name: value for name, value in os.environ.items() if name not in (AUTHORITIES, GIVEN)}
    return {**environment, AUTHORITIES: os.environ[GIVEN]} if GIVEN in os.environ else environment

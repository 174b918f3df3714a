"""A real Postgres for the tests of this directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.postgres import Server


@pytest.fixture(scope="session")
def socket(postgres_server: Server) -> Path:
    """The directory of the socket of a server of our own."""
    return postgres_server.place

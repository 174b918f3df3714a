"""A home of another version: migrated when nobody runs on it, and never under somebody who does."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import subprocess
import time
from contextlib import closing

import pytest

from interlock.api.doctor import examine
from interlock.store.home import Home
from interlock.store.instance import Instance
from interlock.store.schema_version import SCHEMA_HEAD
from tests.support.cli import INTERLOCK, Cli
from tests.support.older import OLDER, RUNNING, schema, set_back

pytestmark = pytest.mark.sqlite_only("the store's file is one of an earlier version; a process has a lock on it")


def test_a_home_is_not_migrated_under_a_process_that_runs_on_it(cli: Cli) -> None:
    set_back(cli)
    (cli.home / "instances" / "01JCXK2M4Q8Z7T5V9W3Y6B1D0A.lock").touch()  # of a process that was killed
    with closing(Instance(Home(cli.home), RUNNING)):
        refused = cli("tools", "list")
        assert refused.code == 1
        for words in (
            "E3804",
            "1 process runs on this data directory",
            f"{OLDER} to {SCHEMA_HEAD}",
            "stop it",
            "run this again",
        ):
            assert words in refused.err
        assert schema(cli) == OLDER
        (told,) = [one for one in examine(Home(cli.home), machine=False) if one.name == "schema"]
        assert (told.status, told.advice[:7]) == ("attention", "stop it")
    assert cli("tools", "list").code == 0
    assert schema(cli) == SCHEMA_HEAD
    with closing(sqlite3.connect(cli.home / "interlock.db")) as database:
        assert database.execute("SELECT 1 FROM sqlite_master WHERE name = 'journal_only_grows'").fetchone() is None


def test_commands_that_meet_an_older_home_at_once_all_find_it_migrated(cli: Cli) -> None:
    set_back(cli)
    words = [*INTERLOCK, "tools", "list", "--json"]
    children = [subprocess.Popen(words, env=cli.environment, stdout=subprocess.PIPE) for _ in range(2)]
    listed = [child.communicate(timeout=60)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert listed[0].count(b"demo.") > 0
    assert set(listed) == {listed[0]}


def test_a_home_that_is_migrated_while_it_is_being_opened_is_refused(cli: Cli) -> None:
    with open(cli.home / "migrate.lock", "w") as newer:
        fcntl.flock(newer, fcntl.LOCK_EX)
        child = subprocess.Popen([*INTERLOCK, "health"], env=cli.environment, stderr=subprocess.PIPE, text=True)
        give_up = time.monotonic() + 30
        while not os.listdir(cli.home / "instances"):
            assert time.monotonic() < give_up
            assert child.poll() is None
        with closing(sqlite3.connect(cli.home / "interlock.db")) as database:
            database.execute("UPDATE alembic_version SET version_num = '9999'")
            database.execute("UPDATE fact SET value = '9999' WHERE name = 'schema_compatible_since'")
            database.commit()
    assert "E3805" in child.communicate(timeout=30)[1]
    assert os.listdir(cli.home / "instances") == []

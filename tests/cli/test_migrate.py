"""`interlock migrate`: what it shows, what it does, and that a backup is made before."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlock.store.home import Home
from interlock.store.instance import Instance
from interlock.store.schema_version import SCHEMA_HEAD
from tests.support.cli import Cli
from tests.support.older import OLDER, RUNNING, schema, set_back


def backups(cli: Cli) -> list[Path]:
    return sorted(cli.path.glob("home-before-*"))


@pytest.mark.sqlite_only("the store's file is one of an earlier version")
@pytest.mark.proves("OPS-08")
def test_an_older_home_is_shown_and_then_migrated_with_a_backup_before(cli: Cli) -> None:
    set_back(cli)
    found = cli.ask("migrate", "status")
    assert (found["schema"], found["head"], found["running"]) == (OLDER, SCHEMA_HEAD, 0)
    applied = [one["revision"] for one in found["migrations"] if one["applied"]]
    pending = [one["revision"] for one in found["migrations"] if not one["applied"]]
    assert (applied[-1], pending[-1]) == (OLDER, SCHEMA_HEAD)
    shown = cli("migrate", "up", "--dry-run").out
    assert all(f"{revision} would be applied" in shown for revision in pending)
    assert schema(cli) == OLDER
    assert backups(cli) == []

    done = cli.ask("migrate", "up")
    assert (done["applied"], done["schema"], schema(cli)) == (pending, SCHEMA_HEAD, SCHEMA_HEAD)
    (backup,) = backups(cli)
    assert done["backup"] == str(backup)
    assert "intact" in cli("--home", str(backup), "audit", "verify").out
    assert cli.ask("--home", str(backup), "migrate", "status")["schema"] == OLDER
    assert "nothing to do" in cli("migrate", "up").out
    assert backups(cli) == [backup]
    assert "intact" in cli("audit", "verify").out


@pytest.mark.sqlite_only("a file is copied before it is migrated; a server has backups of its own")
def test_the_last_migration_is_undone_and_no_more_than_can_be(cli: Cli) -> None:
    before = cli.ask("migrate", "status")["migrations"]
    undoable = [one["revision"] for one in before if one["can_be_undone"]]
    assert f"{SCHEMA_HEAD} would be undone" in cli("migrate", "down", "--dry-run").out
    assert schema(cli) == SCHEMA_HEAD
    for number, revision in enumerate(reversed(undoable)):
        place = cli.path / f"backup-{number}"
        done = cli.ask("migrate", "down", "--backup", str(place))
        assert (done["undone"], done["backup"]) == ([revision], str(place))
    refused = cli("migrate", "down")
    assert (refused.code, "E3411" in refused.err, "cannot be undone" in refused.err) == (1, True, True)
    assert cli.ask("migrate", "status")["migrations"][-1]["applied"] is False
    assert cli("tools", "list").code == 0  # which migrates it again
    assert schema(cli) == SCHEMA_HEAD


@pytest.mark.sqlite_only("a process has a lock on the data directory")
def test_nothing_is_changed_or_copied_under_a_process_that_runs(cli: Cli) -> None:
    running = Instance(Home(cli.home), RUNNING)
    try:
        refused = cli("migrate", "down")
        assert (refused.code, "E3804" in refused.err) == (1, True)
        assert cli.ask("migrate", "status")["running"] == 1
    finally:
        running.close()
    assert (schema(cli), backups(cli)) == (SCHEMA_HEAD, [])


def test_a_home_without_a_database_has_nothing_to_migrate(fresh: Cli) -> None:
    refused = fresh("migrate", "status")
    assert (refused.code, "no database yet" in refused.err) == (1, True)
    assert not fresh.home.exists()

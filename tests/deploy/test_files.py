"""The files in deploy/ that start a server: what they start is a command of this release, with its options."""

from __future__ import annotations

import json
import os
import re
import runpy
import secrets
import shlex
import subprocess
from collections.abc import Iterator
from configparser import ConfigParser
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import psycopg
import pytest
import yaml

from interlock.cli import root as cli
from interlock.settings import Settings
from tests.needs import need
from tests.support.cli import Cli
from tests.support.postgres import Server
from tests.support.redis import Server as Redis

DEPLOY = Path(__file__).parents[2] / "deploy"
IMAGE = (DEPLOY / "container" / "Containerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "container" / "compose.yaml").read_text())["services"]["interlock"]
WITH_POSTGRES: dict[str, Any] = yaml.safe_load((DEPLOY / "container" / "compose.postgres.yaml").read_text())


def unit(name: str) -> ConfigParser:
    parser = ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue] - names of systemd have capitals
    parser.read(DEPLOY / "systemd" / name)
    return parser


def started() -> dict[str, list[str]]:
    """The words of every command that a file starts, without the name of the program."""
    units = {name: unit(name)["Service"]["ExecStart"] for name in ("interlock.service", "interlock-drill.service")}
    commands = {name: shlex.split(line)[1:] for name, line in units.items()}
    [default] = re.findall(r"^CMD (\[.*\])$", IMAGE, re.MULTILINE)
    migrates = WITH_POSTGRES["services"]["migrate"]["command"]
    of_compose = {"compose.yaml": COMPOSE["command"], "compose.postgres.yaml": migrates}
    return {**commands, "Containerfile": json.loads(default), **of_compose}


def test_what_is_started_is_a_command_with_options_that_it_has() -> None:
    for name, words in started().items():
        command = cli.get_command(click.Context(cli), words[0])
        assert command is not None, name
        context = command.make_context(words[0], list(words[1:]))
        assert not isinstance(command, click.Group) or words[1] in command.list_commands(context)
        assert words[0] != "serve" or context.params["bare"], name


def test_services_with_postgres_get_the_passwords_of_their_roles_in_a_file_of_their_own(tmp_path: Path) -> None:
    """The entry point of compose.postgres.yaml, with another program in the place of the server."""
    services, files = WITH_POSTGRES["services"], WITH_POSTGRES["secrets"]
    expected = {"interlock": ["interlock"], "migrate": ["interlock", "interlock_owner"]}
    for name, roles in expected.items():
        service, place = services[name], tmp_path / name
        assert service["secrets"] == roles
        assert files.keys() >= {*roles}
        given: dict[str, str] = service["environment"]
        addresses = [urlsplit(given[one]) for one in ("INTERLOCK_STORE", "INTERLOCK_STORE_ADMIN") if one in given]
        assert [address.username for address in addresses] == roles
        assert {address.hostname for address in addresses} <= services.keys()
        (place / "secrets").mkdir(parents=True)
        for role in roles:
            (place / "secrets" / role).write_text(f"of {role}")
        words = [word.replace("$$", "$").replace("/run/secrets", "secrets") for word in service["entrypoint"]]
        words[2] = words[2].replace("exec interlock", "exec echo")
        environment = {"PGPASSFILE": str(place / "pgpass"), "PATH": os.environ["PATH"]}
        said = subprocess.run([*words, "up"], env=environment, cwd=place, capture_output=True, text=True, check=True)
        assert said.stdout == "up\n"
        assert (place / "pgpass").read_text() == "".join(f"*:*:*:{role}:of {role}\n" for role in roles)
        assert (place / "pgpass").stat().st_mode & 0o777 == 0o600


@pytest.fixture
def roles(postgres_server: Server, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The addresses of the role of servers and of the owner, made by roles.sql under names that no other test uses."""
    made, psql = f"t{secrets.token_hex(6)}", need("psql", "postgresql-client")
    text = (DEPLOY / "container" / "roles.sql").read_text()
    named = re.sub(r"\binterlock(?=_owner\b|\b)", made, "\n".join(text.splitlines()[6:]))
    for name in ("owner", "server"):
        (tmp_path / f"{name}.password").write_text(f"of the {name}")
    words = [psql, "--no-psqlrc", "-v", "ON_ERROR_STOP=1", "-d", postgres_server.address]
    subprocess.run(words, input=named, cwd=tmp_path, text=True, check=True, capture_output=True)
    start = postgres_server.address.replace("/postgres?", f"/{made}?")
    yield start.replace("postgres@", f"{made}@"), start.replace("postgres@", f"{made}_owner@")
    with closing(postgres_server.connect()) as connection:
        for statement in (f"DATABASE {made} WITH (FORCE)", f"ROLE {made}", f"ROLE {made}_owner"):
            connection.execute(f"DROP {statement}".encode())


def test_the_role_of_servers_can_only_add_to_the_journal_and_the_owner_migrates_and_removes(
    roles: tuple[str, str], tmp_path: Path
) -> None:
    server, owner = roles
    command = WITH_POSTGRES["services"]["migrate"]["command"]
    as_owner = Cli(tmp_path, {"INTERLOCK_STORE": server, "INTERLOCK_STORE_ADMIN": owner})
    as_server = Cli(tmp_path, {"INTERLOCK_STORE": server})
    # Only the owner makes the tables, of an empty store too. That is done again and changes nothing.
    assert as_server(*command).code == 1
    for _ in range(2):
        assert as_owner(*command).code == 0
    assert as_server("tools", "add", "interlock.demo_tools").code == 0
    posted = as_server.call("demo.post", {"account": "cash", "cents": 1}, "--key", "k")
    assert posted["status"] == "succeeded"
    told = " ".join(as_server("doctor").out.split())
    assert "the role of this process cannot change a record" in told
    assert "lacks the right" not in told

    with closing(psycopg.connect(server, autocommit=True)) as connection:
        ((count,),) = connection.execute(b"SELECT count(*) FROM journal").fetchall()
        assert count > 0
        for table in ("journal", "anchor"):
            for statement in (f"DELETE FROM {table}", f"TRUNCATE {table}", f"UPDATE {table} SET seq = seq + 1"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute(statement.encode())
        for statement in (
            b"INSERT INTO segment SELECT * FROM segment",
            b"DROP TABLE journal",
            b"CREATE TABLE t (a int)",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement)
    with closing(psycopg.connect(owner, autocommit=True)) as connection:
        may = "SELECT has_table_privilege('journal', 'DELETE') AND has_table_privilege('segment', 'INSERT')"
        assert connection.execute(may.encode()).fetchall() == [(True,)]
    assert as_owner("audit", "purge", "--yes").code == 0
    assert as_server("audit", "verify").code == 0


@pytest.mark.part_of("OPS-12", rest="a paused saga that goes on after a restore; there are no sagas yet")
def test_redis_of_the_compose_file_makes_snapshots_every_15_minutes_and_syncs_its_log_every_second() -> None:
    services = WITH_POSTGRES["services"]
    address: str = services["interlock"]["environment"]["INTERLOCK_REDIS"]
    assert urlsplit(address).hostname in services
    assert "ports" not in services["redis"]
    program, *options = services["redis"]["command"]
    assert program == "redis-server"
    server = Redis(*options)
    try:
        for name, value in (("save", "900 1"), ("appendonly", "yes"), ("appendfsync", "everysec")):
            assert server.ask("CONFIG", "GET", name).splitlines() == [name, value]
    finally:
        server.remove()


def test_variables_are_settings() -> None:
    variables = [*re.findall(r"INTERLOCK_[A-Z_]+(?==)", (DEPLOY / "systemd" / "interlock.service").read_text())]
    services = [WITH_POSTGRES["services"][name] for name in ("interlock", "migrate")]
    more = [name for service in services for name in service["environment"] if name.startswith("INTERLOCK_")]
    for name in (*variables, *more, *COMPOSE["environment"]):
        assert name == "INTERLOCK_HOME" or name.removeprefix("INTERLOCK_").lower() in Settings.model_fields


def test_a_server_has_longer_to_end_than_it_gives_its_calls() -> None:
    waits = {
        "interlock.service": unit("interlock.service")["Service"]["TimeoutStopSec"],
        "compose.yaml": COMPOSE["stop_grace_period"].removesuffix("s"),
    }
    for name, wait in waits.items():
        words = started()[name]
        command = cli.get_command(click.Context(cli), words[0])
        assert command is not None
        params = command.make_context(words[0], words[1:]).params
        assert int(wait) >= params["shutdown_delay"] + params["drain_timeout"] + 15, name


@pytest.mark.part_of(
    "OPS-09",
    rest="an image is built by the thorough run alone, on a base made for the test",
)
def test_the_image_is_built_in_stages_and_its_service_is_confined() -> None:
    assert re.findall(r"^FROM (.*)$", IMAGE, re.MULTILINE) == ["${BASE} AS build", "${BASE}"]
    assert "ARG BASE=docker.io/library/python:3.11-slim" in IMAGE
    assert "--require-hashes" in IMAGE
    # What the engine reads of it, without building it; the thorough run asks the engine.
    last = IMAGE.rpartition("FROM ${BASE}")[2]
    assert re.findall(r"^(USER|EXPOSE) (.*)$", last, re.MULTILINE) == [("USER", "1000"), ("EXPOSE", "8080")]
    check = re.findall(r"^HEALTHCHECK (.*) \\\n +CMD (.*)$", last, re.MULTILINE)
    assert [(one, "http://127.0.0.1:8080/health" in asked) for one, asked in check] == [
        ("--interval=30s --timeout=3s --start-period=5s --retries=3", True)
    ]
    assert COMPOSE["read_only"] is True
    assert COMPOSE["cap_drop"] == ["ALL"]
    assert COMPOSE["ports"] == ["127.0.0.1:8080:8080"]


PAGES = ("team", "kubernetes", "postgres", "upgrade", "backup", "serve")


@pytest.mark.parametrize("page", PAGES)
def test_commands_on_the_pages_for_operators_are_commands_with_options_that_they_have(page: str) -> None:
    """Also those that the tests of the documentation do not run, because they need a machine of one's own."""
    text = (DEPLOY.parent / "docs" / "how-to" / f"{page}.md").read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    prompts = {"": "", "console": r"\$ "}  # in a block of a console, other lines are answers
    lines = [
        line
        for kind, block in blocks
        if kind in prompts
        for line in re.findall(rf"^{prompts[kind]}((?:interlock|deploy/rollout\.py) .+)$", block, re.MULTILINE)
    ]
    assert lines or page == "serve"
    for line in lines:
        program, *words = shlex.split(line.partition(" | ")[0], comments=True)
        if program == "interlock":
            _parse(cli, words)
        else:
            rollout = runpy.run_path(str(DEPLOY / "rollout.py"))
            assert rollout["arguments"](words).nodes, line


def _parse(group: click.Group, words: list[str]) -> None:
    """Find the command that words name, and its options; whether the files are there that they name is not asked."""
    context = click.Context(group)
    while words and words[0].startswith("-"):
        takes_value = words[0] == "--home"
        words = words[2 if takes_value else 1 :]
    if not words:
        return
    command = group.get_command(context, words[0])
    assert command is not None, words
    if isinstance(command, click.Group):
        _parse(command, words[1:])
        return
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    assert {word.partition("=")[0] for word in words[1:] if word.startswith("--")} <= known, words

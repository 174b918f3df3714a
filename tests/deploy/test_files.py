"""The files in deploy/ that start a server: what they start is a command of this release, with its options."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
from configparser import ConfigParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import pytest
import yaml

from interlock.cli import root as cli
from interlock.settings import Settings
from tests.support.redis import Server as Redis

DEPLOY = Path(__file__).parents[2] / "deploy"
IMAGE = (DEPLOY / "container" / "Containerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "container" / "compose.yaml").read_text())["services"]["interlock"]


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
    return {**commands, "Containerfile": json.loads(default), "compose.yaml": COMPOSE["command"]}


def test_what_is_started_is_a_command_with_options_that_it_has() -> None:
    for name, words in started().items():
        command = cli.get_command(click.Context(cli), words[0])
        assert command is not None, name
        context = command.make_context(words[0], list(words[1:]))
        assert words[0] != "serve" or context.params["bare"], name


def test_the_service_with_postgres_gets_a_password_that_is_its_alone(tmp_path: Path) -> None:
    """The entry point of compose.postgres.yaml, with another program in the place of the server."""
    services = yaml.safe_load((DEPLOY / "container" / "compose.postgres.yaml").read_text())["services"]
    server, database = services["interlock"], services["postgres"]["environment"]
    store: str = server["environment"]["INTERLOCK_STORE"]
    parts = urlsplit(store)
    assert (parts.username, parts.path) == (database["POSTGRES_USER"], f"/{database['POSTGRES_DB']}")
    assert parts.hostname in services
    assert server["secrets"] == services["postgres"]["secrets"]
    (tmp_path / "secret").write_text("of the database")
    words = [word.replace("$$", "$").replace("/run/secrets/postgres", "secret") for word in server["entrypoint"]]
    words[2] = words[2].replace("exec interlock", "exec echo")
    environment = {"PGPASSFILE": str(tmp_path / "pgpass"), "PATH": os.environ["PATH"]}
    said = subprocess.run([*words, "serve"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert said.stdout == "serve\n"
    assert (tmp_path / "pgpass").read_text() == "*:*:*:*:of the database"
    assert (tmp_path / "pgpass").stat().st_mode & 0o777 == 0o600


@pytest.mark.part_of("OPS-12", rest="a paused saga that goes on after a restore; there are no sagas yet")
def test_redis_of_the_compose_file_makes_snapshots_every_15_minutes_and_syncs_its_log_every_second() -> None:
    services = yaml.safe_load((DEPLOY / "container" / "compose.postgres.yaml").read_text())["services"]
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
    with_postgres = yaml.safe_load((DEPLOY / "container" / "compose.postgres.yaml").read_text())["services"][
        "interlock"
    ]
    more = [name for name in with_postgres["environment"] if name.startswith("INTERLOCK_")]
    for name in (*variables, *more, *COMPOSE["environment"]):
        assert name == "INTERLOCK_HOME" or name.removeprefix("INTERLOCK_").lower() in Settings.model_fields


def test_a_server_has_longer_to_end_than_it_gives_its_calls() -> None:
    assert int(unit("interlock.service")["Service"]["TimeoutStopSec"]) > 30
    assert int(COMPOSE["stop_grace_period"].removesuffix("s")) > 30


@pytest.mark.part_of(
    "OPS-09",
    rest="an image is built by the thorough run alone, on a base made for the test",
)
def test_the_image_is_built_in_stages_and_its_service_is_confined() -> None:
    assert re.findall(r"^FROM (.*)$", IMAGE, re.MULTILINE) == ["${BASE} AS build", "${BASE}"]
    assert "ARG BASE=docker.io/library/python:3.11-slim" in IMAGE
    assert "--require-hashes" in IMAGE
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

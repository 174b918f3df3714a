"""The files in deploy/ that start a server: what they start is a command of this release, with its options."""

from __future__ import annotations

import json
import os
import re
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


def test_variables_are_settings() -> None:
    variables = [*re.findall(r"INTERLOCK_[A-Z_]+(?==)", (DEPLOY / "systemd" / "interlock.service").read_text())]
    for name in (*variables, *COMPOSE["environment"]):
        assert name == "INTERLOCK_HOME" or name.removeprefix("INTERLOCK_").lower() in Settings.model_fields


def test_a_server_has_longer_to_end_than_it_gives_its_calls() -> None:
    assert int(unit("interlock.service")["Service"]["TimeoutStopSec"]) > 30
    assert int(COMPOSE["stop_grace_period"].removesuffix("s")) > 30


@pytest.mark.part_of("OPS-09", rest="a run by a container engine, of which none works in a test machine")
def test_the_image_is_built_in_stages_and_its_service_is_confined() -> None:
    assert re.findall(r"^FROM (.*)$", IMAGE, re.MULTILINE) == ["${BASE} AS build", "${BASE}"]
    assert "ARG BASE=docker.io/library/python:3.11-slim" in IMAGE
    assert "--require-hashes" in IMAGE
    assert COMPOSE["read_only"] is True
    assert COMPOSE["cap_drop"] == ["ALL"]
    assert COMPOSE["ports"] == ["127.0.0.1:8080:8080"]

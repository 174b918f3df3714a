"""The files in deploy/ that start a server: what they start is a command of this release, with its options."""

from __future__ import annotations

import json
import re
import shlex
from configparser import ConfigParser
from pathlib import Path
from typing import Any

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

"""Commands whose output cannot be written: the reader of a pipe has gone, or a disk is full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.cli import INTERLOCK, Cli, running

NOBODY_READS = 141  # 128 + SIGPIPE
CALL = ("call", "demo.balance", '{"account": "cash"}')


def ended(cli: Cli, words: Sequence[str], stdout: int, **environment: str) -> tuple[int, str]:
    """The exit code of a command that writes to a descriptor, and what it said on stderr."""
    done = subprocess.run(
        [*INTERLOCK, *words], env={**cli.environment, **environment}, cwd=cli.path, stdout=stdout,
        stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


def into_a_closed_pipe(cli: Cli, *words: str, **environment: str) -> tuple[int, str]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return ended(cli, words, writer, **environment)
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("calls", "--help"),
        ("tools", "list"),
        ("tools", "list", "--json"),
        ("policy", "explain", "me", "demo.post"),
        ("calls", "list"),
        CALL,
        (*CALL, "--json"),
        ("config", "show"),
        ("audit", "export"),
        ("tools", "schema", "demo.post"),
    ],
    ids=" ".join,
)
def test_a_command_whose_reader_has_gone_ends_without_a_word(cli: Cli, words: tuple[str, ...]) -> None:
    assert into_a_closed_pipe(cli, *words) == (NOBODY_READS, "")


def test_a_command_whose_output_is_not_buffered_ends_alike(cli: Cli) -> None:
    for words in (("--help",), ("tools", "list")):
        assert into_a_closed_pipe(cli, *words, PYTHONUNBUFFERED="1") == (NOBODY_READS, "")


def test_a_command_at_a_server_whose_reader_has_gone_ends_without_a_word(cli: Cli) -> None:
    token = cli("token", "issue", "--agent", "bot").out.strip()
    with running(cli, "--no-grpc", "--no-token", "--json") as server:
        for words in (("tools", "list"), CALL):
            at = ("--server", server.json["base_url"], *words)
            assert into_a_closed_pipe(cli, *at, INTERLOCK_TOKEN=token) == (NOBODY_READS, "")


@pytest.mark.parametrize("words", [("--help",), ("tools", "list"), CALL, (*CALL, "--json")], ids=" ".join)
def test_output_that_finds_no_room_is_not_told_as_a_full_data_directory(cli: Cli, words: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        code, told = ended(cli, words, full.fileno())
    assert code == 1
    assert told.startswith("Error: the output cannot be written: No space left on device. Write it elsewhere")
    assert len(told.splitlines()) == 1


def test_a_command_works_in_a_directory_that_was_removed(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    within = ["/bin/sh", "-c", 'cd gone && rmdir ../gone && exec "$@"', "sh", *INTERLOCK, *CALL]
    done = subprocess.run(
        within, env=cli.environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")

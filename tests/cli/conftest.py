"""The command line as people and scripts meet it: a process of its own, over a home of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from interlock.store.home import Home
from interlock.store.homes import home_at
from tests import warm

INTERLOCK = (sys.executable, "-m", "interlock.cli")


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True)
class Cli:
    """The console script over one home."""

    path: Path
    extra: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def home(self) -> Path:
        return self.path / "home"

    @property
    def store(self) -> Home:
        """The home with its store, for what tests do behind the program's back (`tests.support.stores`)."""
        return home_at(self.home)

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def environment(self) -> dict[str, str]:
        # Children may cache bytecode, whatever the test run itself was told: hundreds of them start.
        dropped = ("INTERLOCK_", "PYTHONDONTWRITEBYTECODE")
        base = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        return {**base, "INTERLOCK_HOME": str(self.home), "INTERLOCK_DEMO_LEDGER": str(self.ledger), **self.extra}

    def __call__(self, *words: str, stdin: str = "") -> Ended:
        code, printed, said = warm.run(words, self.environment, self.path, stdin.encode())
        out, err = printed.decode(), said.decode()
        assert "Traceback" not in out + err, err
        return Ended(code, out, err)

    def ask(self, *words: str) -> Any:
        """The JSON a command prints: exactly one document, and nothing else on stdout."""
        return self(*words, "--json").json

    def call(self, tool: str, arguments: Any = None, *words: str) -> Any:
        return self.ask("call", tool, json.dumps(arguments or {}), *words)

    def kill(self, *words: str) -> None:
        """Run a call of demo.post and kill it once its entry is in the ledger."""
        reader, writer = os.pipe()
        environment = {**self.environment, "INTERLOCK_DEMO_PIPE": str(writer)}
        with warm.start(words, environment, self.path, pass_fds=[writer]) as child, open(reader, "rb") as pipe:
            os.close(writer)
            assert pipe.readline() == b"written\n"
            child.send_signal(signal.SIGKILL)
            assert child.wait() == -signal.SIGKILL


@pytest.fixture
def fresh(tmp_path: Path) -> Cli:
    """A home that does not exist yet."""
    return Cli(tmp_path)


@pytest.fixture(scope="session")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Cli]:
    """Make a home with the demo tools in a directory, as a copy of one in which they were admitted once.

    Tests get copies only: a call in the original would be on record in the home of every later test.
    """
    original = Cli(tmp_path_factory.mktemp("admitted"))
    assert original("tools", "add", "interlock.demo_tools").code == 0

    def copy(directory: Path) -> Cli:
        cli = Cli(directory)
        shutil.copytree(original.home, cli.home)
        return cli

    return copy


@pytest.fixture
def cli(tmp_path: Path, copied: Callable[[Path], Cli]) -> Cli:
    """A home with the demo tools in it."""
    return copied(tmp_path)

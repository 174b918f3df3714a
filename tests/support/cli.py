"""The command line as people and scripts meet it, over a data directory of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from interlock.store.home import Home
from interlock.store.homes import home_at
from tests import warm
from tests.support import in_process

Json = dict[str, Any]
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
        """Run a command in this process, where it can; otherwise in one of its own."""
        if not in_process.fits(words, self.environment):
            return self.apart(*words, stdin=stdin)
        return self._ended(*in_process.run(words, self.environment, self.path, stdin.encode()))

    def apart(self, *words: str, stdin: str = "") -> Ended:
        """Run a command in a process of its own."""
        return self._ended(*warm.run(words, self.environment, self.path, stdin.encode()))

    def _ended(self, code: int, printed: bytes, said: bytes) -> Ended:
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


def elsewhere(cli: Cli, name: str = "restored") -> Cli:
    """The command line over another home, in the same world."""
    return Cli(cli.path, {"INTERLOCK_HOME": str(cli.path / name)})


def post(cli: Cli, key: str) -> tuple[bool, bool]:
    """Whether a posting under a key is good, and whether it was made before."""
    result = cli.call("demo.post", {"account": "cash", "cents": 250}, "--key", key)
    return result["status"] == "succeeded", result["metadata"]["replayed"]


PATIENCE_S = 60


@dataclass
class Running:
    """A server that has said where it is."""

    process: warm.Started
    said: str

    @property
    def json(self) -> Json:
        return json.loads(self.said)

    def end(self, by: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Ask it to end; its exit code, and what it said on stderr."""
        self.process.send_signal(by)
        _, err = self.process.communicate(PATIENCE_S)
        return self.process.wait(), err.decode()


@contextmanager
def running(cli: Cli, *words: str, until: str = "}\n") -> Generator[Running]:
    with warm.start(("serve", "--port", "0", *words), cli.environment, cli.path) as process:
        said = ""
        while not said.endswith(until):
            line = process.stdout.readline().decode()
            assert line, process.communicate()[1].decode()
            said += line
        yield Running(process, said)


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}

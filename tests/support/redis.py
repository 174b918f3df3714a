"""A real Redis server for tests, on a socket in a temporary directory: one per process of a run."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.needs import need
from tests.support import surroundings

PATIENCE_S = 60.0


class Server:
    """A server that keeps nothing on disk. `options` are those of its command line."""

    def __init__(self, *options: str) -> None:
        self._program = need("redis-server", "redis-server")
        self._client = need("redis-cli", "redis-server")
        self._options = options
        # With a short name: it is the path of a socket.
        self.place = Path(tempfile.mkdtemp(prefix="interlock-redis-", dir=surroundings.memory() or "/tmp"))
        self.start()

    @property
    def socket(self) -> Path:
        return self.place / "redis.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        command = [
            str(self._program), "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.place),
            "--save", "", "--appendonly", "no", "--daemonize", "no", "--enable-debug-command", "local",
            *self._options,
        ]  # fmt: skip
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._wait()

    def restart(self) -> None:
        """End it as a crash would, and start it again as the same process."""
        command = [str(self._client), "-s", str(self.socket), "DEBUG", "CRASH-AND-RECOVER"]
        subprocess.run(command, capture_output=True, check=False)
        self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while not self._answers():
            assert self._process.poll() is None, "Redis does not start"
            assert time.monotonic() < until
            time.sleep(0.01)

    def _answers(self) -> bool:
        asked = subprocess.run([str(self._client), "-s", str(self.socket), "PING"], capture_output=True, check=False)
        return b"PONG" in asked.stdout or b"NOAUTH" in asked.stdout

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it as a crash would."""
        self._process.kill()
        self._process.wait()

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.place, ignore_errors=True)

    def ask(self, *words: str, stdin: bytes | None = None) -> str:
        """Run a command of redis-cli. With `stdin`, that is its last argument."""
        last = () if stdin is None else ("-x",)
        command = [str(self._client), "-s", str(self.socket), *last, *words]
        return subprocess.run(command, check=True, capture_output=True, input=stdin).stdout.decode().strip()

    def together(self, *commands: str) -> list[str]:
        """Run commands in one step, between which nobody else has a turn. Returns what each one answers."""
        lines = "\n".join(("MULTI", *commands, "EXEC", ""))
        command = [str(self._client), "-s", str(self.socket)]
        said = subprocess.run(command, check=True, capture_output=True, input=lines.encode()).stdout.decode()
        return said.split()[-len(commands) :]

    @contextmanager
    def heard(self, channel: str) -> Generator[Iterator[str]]:
        """The messages of a channel, as redis-cli prints them, from now on."""
        command = [str(self._client), "-s", str(self.socket), "SUBSCRIBE", channel]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert [client.stdout.readline().strip() for _ in range(3)][:2] == ["subscribe", channel]
            try:
                yield _messages(iter(client.stdout))
            finally:
                client.kill()


def _messages(lines: Iterator[str]) -> Iterator[str]:
    for kind in lines:
        assert kind.strip() == "message", kind
        next(lines)
        yield next(lines).rstrip("\n")

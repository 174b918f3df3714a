"""Notification services supported by apprise, each run in a process of its own.

apprise blocks, reads answers of any length, and honours proxies and files of the environment. Every channel with a
`url` therefore has a process that runs `sender`: started when a message is due, ended with its lane, killed when an
attempt takes too long. It receives the URL through a pipe and an environment without credentials. Names are resolved
here, under the rules of `addresses`, and the process connects to nothing else.

The output of the process is not trusted: lines are bounded, and none of its text is passed on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import urlsplit

import orjson

from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.net import addresses

if TYPE_CHECKING:
    from interlock.call.channels import Channel

START_S = 60.0
MOST_LOOKUPS = 100
_LONGEST_LINE = 1 << 16
_SENDER = str(Path(__file__).with_name("sender.py"))
# The location of trusted certificates is not secret. The user's home directory may contain a .netrc, so it is not
# passed.
_ENVIRONMENT = ("LANG", "LC_ALL", "PATH", "REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE", "TMPDIR", "TZ")
_NO_HOME = "/nonexistent"


@dataclass(frozen=True, slots=True)
class DeliveryOutcome:
    """The outcome of one attempt. `gone`: the receiver wants no more messages; `wait_ms`: the pause it requests."""

    result: Literal["sent", "retry", "failed"]
    error: str = ""
    wait_ms: int = 0
    gone: bool = False


class Broken(Exception):  # noqa: N818 - what the process is
    """The sending process ended or sent an invalid message."""


class NotificationService:
    """One channel that apprise serves."""

    def __init__(self, channel: Channel, resolve: addresses.Resolve, attempt_s: float) -> None:
        self._channel = channel
        self._resolve = resolve
        self._attempt_s = attempt_s
        self._url = ""
        self._process: asyncio.subprocess.Process | None = None
        self._ending: set[asyncio.subprocess.Process] = set()
        self._refused: Failure | None = None

    async def send(self, url: str, title: str, text: str) -> bool:
        """Send a message; returns whether the service accepted it.

        Raises E3406 if it leads to an address that is not allowed, E3004 for a URL that apprise does not support,
        TimeoutError and `Broken`. After any of them the process is gone.
        """
        try:
            if self._process is None or self._url != url:
                await self.release()
                async with asyncio.timeout(START_S):
                    await self._start(url)
            async with asyncio.timeout(self._attempt_s):
                return await self._send(title, text)
        except BaseException:
            await self.release()
            raise

    async def release(self) -> None:
        """End the process, if there is one. The next message starts another."""
        process, self._process = self._process, None
        if process is not None:
            await self._end(process)

    async def close(self) -> None:
        """End all processes."""
        await self.release()
        for process in list(self._ending):
            await self._end(process)

    # The process

    async def _start(self, url: str) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", _SENDER),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=_environment(self._channel),
            start_new_session=True,
            limit=_LONGEST_LINE,
        )
        self._url = url
        limit_s = int(START_S + self._attempt_s) + 1
        self._write(path=sys.path, url=url, private=self._channel.allow_private, limit_s=limit_s)
        if (await self._read()).get("ready") is not True:
            raise Failure("E3004", f"apprise does not support the url of channel `{self._channel.name}`")

    async def _send(self, title: str, text: str) -> bool:
        self._refused = None
        self._write(title=title, text=text)
        for _ in range(MOST_LOOKUPS):
            message = await self._read()
            if "lookup" not in message:
                if self._refused is not None:
                    raise self._refused
                return message.get("sent") is True
            self._write(addresses=await self._addresses(str(message["lookup"])))
        raise Broken

    async def _addresses(self, host: str) -> list[str]:
        """Resolve a host; returns no address if one of them is not allowed."""
        proxy = self._channel.proxy
        is_proxy = proxy is not None and host == urlsplit(proxy.get_secret_value()).hostname
        try:
            return list(
                await addresses.checked(
                    host[:255], allow_private=self._channel.allow_private or is_proxy, resolve=self._resolve
                )
            )
        except OSError:
            return []
        except Failure as failure:
            self._refused = failure
            return []

    def _write(self, **message: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(orjson.dumps(message) + b"\n")

    async def _read(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            message: Any = orjson.loads(await self._process.stdout.readline())
        except ValueError:  # end of output, a line without an end, or invalid JSON
            raise Broken from None
        if not isinstance(message, dict):
            raise Broken
        return cast("dict[str, Any]", message)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        self._ending.add(process)
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()
        self._ending.discard(process)


def _environment(channel: Channel) -> dict[str, str]:
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | {"HOME": _NO_HOME}
    if channel.proxy is not None:
        for name in ("http_proxy", "https_proxy"):
            environment[name] = channel.proxy.get_secret_value()
    return environment

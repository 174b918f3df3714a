"""Ports for programs that have to be told one."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

# Below those that the kernel gives to whoever asks for any port (`ip_local_port_range`), so that nobody else gets one
# by chance before the program has it.
PORTS = range(20_000, 32_000)


def unused_port() -> int:
    """A port at which nobody listens."""
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", random.SystemRandom().choice(PORTS))) as free:
            return int(free.getsockname()[1])

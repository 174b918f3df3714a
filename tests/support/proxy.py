"""A way to a server of the tests that can be cut: a TCP port that passes bytes on to a Unix socket."""

from __future__ import annotations

import random
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

_AT_ONCE = 4096


class Proxy:
    """Passes bytes on in both directions. While `cutting`, every connection is cut after a random number of them.

    So a connection ends at any byte of a request or an answer: the server may have done what it was asked for, and
    nobody has heard of it. While `delay_s`, each piece is passed on up to twice as late. `silence` holds all bytes
    back until `resume`, as a network does that drops packets.
    """

    def __init__(self, target: Path, seed: int) -> None:
        self._target = str(target)
        self._random = random.Random(seed)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._left: dict[socket.socket, int] = {}
        self._other: dict[socket.socket, socket.socket] = {}
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        # A number of bytes, of which a connection passes up to twice as many on; 0 while none is cut.
        self.cutting = 0
        self.cuts = 0
        self.delay_s = 0.0
        self._passing = threading.Event()
        self._passing.set()
        self._threads[0].start()

    @property
    def port(self) -> int:
        return self._listening.getsockname()[1]

    def cut_all(self) -> None:
        """Cut every connection there is."""
        with self._lock:
            self.cuts += len(self._other) // 2
            for end in self._other:
                _hang_up(end)

    def lead_to(self, target: Path) -> None:
        """Lead to another server from now on, and cut every connection to the one before."""
        self._target = str(target)
        self.cut_all()

    def silence(self) -> None:
        self._passing.clear()

    def resume(self) -> None:
        self._passing.set()

    def close(self) -> None:
        self.resume()
        _hang_up(self._listening)
        self._listening.close()
        self.cut_all()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self._listening.accept()
            except OSError:
                return
            theirs = socket.socket(socket.AF_UNIX)
            try:
                theirs.connect(self._target)
            except OSError:  # the server is away
                ours.close()
                theirs.close()
                continue
            ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._other |= {ours: theirs, theirs: ours}
                self._left[ours] = self._random.randrange(1, 2 * self.cutting) if self.cutting else 0
                pumps = [threading.Thread(target=self._pump, args=(one, ours), daemon=True) for one in (ours, theirs)]
                self._threads = [*(one for one in self._threads if one.is_alive()), *pumps]
            for pump in pumps:
                pump.start()

    def _pump(self, source: socket.socket, connection: socket.socket) -> None:
        """Pass on what a side sends until one hangs up, or until the connection has had its share."""
        target = self._other[source]
        with suppress(OSError):
            while data := source.recv(_AT_ONCE):
                if self.delay_s:
                    time.sleep(self._random.uniform(0, 2 * self.delay_s))
                self._passing.wait()
                with self._lock:
                    left = self._left[connection] if self.cutting else 0
                    if left:
                        data, self._left[connection] = data[:left], max(1, left - len(data))
                    over = left and len(data) >= left
                    self.cuts += bool(over)
                target.sendall(data)
                if over:
                    break
        _hang_up(source)
        _hang_up(target)
        with self._lock:
            if self._other.pop(source, None) is not None and target not in self._other:
                source.close()
                target.close()
                self._left.pop(connection, None)


def _hang_up(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)

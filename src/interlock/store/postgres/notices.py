"""Notices: a process that commits a change wakes the readers of changes of all processes on the store.

A notice says only that something has changed. Who hears it reads the epochs (`store.changes`), as it does from time to
time in any case: a notice that was lost costs time and nothing else. The server delivers it when the transaction is
committed, and not if it is rolled back. All stores of a database share one channel; the name of the schema tells whose
notice it is.

Listening belongs to the connection, so each process has one for it. A pooler must be in session mode.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg

from interlock.store.port import StoreError
from interlock.store.postgres.connection import connected

SEND = "SELECT pg_notify('interlock', current_schema())"
_LISTEN = b"LISTEN interlock"
_SCHEMA = b"SELECT current_schema()"
# How long to wait before a server that cannot be reached is tried again.
TRY_AGAIN_S = 1.0


class Listener:
    """A thread that waits for notices on a connection of its own, and calls `news` for each.

    `news` is also called whenever listening has begun: what was sent before is not heard.
    """

    def __init__(self, address: str, news: Callable[[], None]) -> None:
        self._address = address
        self._news = news
        # Whether notices that are sent now are heard.
        self.listening = False
        self._ended = threading.Event()
        # A pipe to wake the thread when it is to end: it waits for the server and for this pipe.
        self._end, self._ending = os.pipe()
        self._thread = threading.Thread(target=self._run, name="interlock-notices", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        os.write(self._ending, b"x")
        self._thread.join()
        os.close(self._end)
        os.close(self._ending)

    def _run(self) -> None:
        while not self._ended.is_set():
            # Until the next try, changes are found by reading.
            with suppress(psycopg.Error, StoreError, OSError), connected(self._address) as driver:
                self._listen(driver)
            self.listening = False
            self._ended.wait(TRY_AGAIN_S)

    def _listen(self, driver: psycopg.Connection[Any]) -> None:
        row = driver.execute(_SCHEMA).fetchone()
        schema = b"" if row is None or row[0] is None else row[0].encode()  # there is none if it was dropped
        driver.execute(_LISTEN)
        self.listening = True
        self._news()
        # Not `driver.notifies()`: that has to wake up again and again to be ended by another thread.
        server, waiting = driver.pgconn, select.poll()
        for descriptor in (server.socket, self._end):
            waiting.register(descriptor, select.POLLIN)
        while not self._ended.is_set():
            waiting.poll()
            server.consume_input()
            heard = False
            while (notice := server.notifies()) is not None:
                heard = heard or notice.extra == schema
            if heard:
                self._news()

"""Leases: the sign of life of a process whose store is on PostgreSQL, which other machines can see.

A process has a row in the table `instance` with the time until which it lives, and renews it every few seconds by the
clock of the database. A process that asks about one whose time has passed removes its row (`interlock_alive`). From
then on `interlock_enter` refuses every transaction of that process: the id of a process is used once, so it is its
fencing token. So a process that was only slow cannot write over what others made of its calls.

Fencing the store does not stop a tool. So while a tool works under locks, a timer of the kernel (`fence`) ends a
server (`end_with_lease`) `MARGIN_S` before its lease runs out, which is before others may take these locks.

With its lease a process tells how it is, and which files its data directory has (`store.node_files`).

INVARIANT: as long as this process runs, the lease is renewed, or it is `lost`: servers end when it is. So nothing that
goes wrong here ends the thread in silence, and a transaction that was refused for the lease counts as a loss too.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import orjson

from interlock.store.failures import store_failure
from interlock.store.node_files import describe
from interlock.store.port import StoreError
from interlock.store.postgres import fence
from interlock.store.postgres.connection import PostgresConnection
from interlock.store.postgres.schema import LEASE_MS
from interlock.store.schema_version import SCHEMA_HEAD

if TYPE_CHECKING:
    from collections.abc import Callable

    from interlock.store.home import Home

_log = logging.getLogger("interlock.store")

RENEW_EVERY_S = 3.0
# A process is sure of its lease until this long before it runs out, because clocks run at different speeds.
MARGIN_S = 2.0
# Tools that work under locks are stopped this long before that, so that the process does not have to end.
ENDING_S = 2.0
# How long a process that was found to live is not asked about again.
BELIEVED_S = 0.5
_MOST_DEAD = 1000
# A clock that goes on while the machine sleeps.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Lease:
    """The lease of this process, renewed by a thread until it is closed."""

    def __init__(
        self, home: Home, instance_id: str, *, address: str, place: str, holds: Callable[[Lease | None], None]
    ) -> None:
        """Take a lease on the store at an address.

        `place` is which data directory on which machine this is. `holds` is called with the lease when it is taken, and
        with None at its end.
        """
        self.id = instance_id
        self.home = home
        self.address = address
        self._place = place
        self._holds = holds
        # Which schema this process knows, so that nobody changes it to one on which this process could not go on.
        self._reported: dict[str, Any] = {"schema": SCHEMA_HEAD}
        # Whether others have taken this process for dead. It may not write any more, and does not get its lease back.
        self.lost = False
        self._sure_until = 0.0
        self._settings = ""
        # What was told last, and the kinds of errors that were logged.
        self._last_report = b""
        self._logged: set[type[Exception]] = set()
        # Processes that were found to live, with the time until which that is believed, and some that have died.
        self._living: dict[str, float] = {}
        self._dead: dict[str, None] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        # The timer that ends this process with its lease, if it is to; and whether a tool works under its locks.
        self._fence: fence.Fence | None = None
        self._guards = False
        self._fencing = threading.Lock()
        self._connection = PostgresConnection(address)
        try:
            self._renew(anew=True)
        except BaseException as error:
            self._connection.close()
            if isinstance(error, StoreError):
                raise store_failure(error) from None
            raise
        holds(self)
        self._thread = threading.Thread(target=self._keep, name="interlock-lease", daemon=True)
        self._thread.start()

    def alive(self, owner: str) -> bool:
        """Whether the process with this id lives. One whose lease has run out has none any more after this."""
        if owner == self.id:
            return True
        if owner in self._dead:
            return False
        if _now() < self._living.get(owner, 0.0):
            return True
        try:
            alive = bool(self._ask("SELECT interlock_alive(?)", owner))
        except StoreError as error:
            raise store_failure(error, "read") from None
        # Units ask for many rows. A process that has died does not come back, and nobody needs to know at once of one
        # that has died just now.
        if alive:
            self._living[owner] = _now() + BELIEVED_S
        else:
            self._living.pop(owner, None)
            self._dead[owner] = None
            if len(self._dead) > _MOST_DEAD:
                del self._dead[next(iter(self._dead))]
        return alive

    def sure(self) -> bool:
        """Whether nobody can have taken this process for dead. Needs no server, and counts the sleep of the machine."""
        return _now() < self._sure_until

    def expiring(self) -> bool:
        """Whether `sure` will be false within `ENDING_S`, unless the lease is renewed."""
        return _now() >= self._sure_until - ENDING_S

    def end_with_lease(self) -> None:
        """Have the kernel end this process when its lease may have run out while a tool works under its locks."""
        if fence.possible():
            self._fence = fence.Fence()

    def guard(self, working: bool) -> None:
        """Note whether a tool works under locks of this process."""
        if self._fence is not None:
            with self._fencing:
                self._guards = working
                self._fence.end_at(self._sure_until if working else 0.0)

    def report(self, document: dict[str, Any]) -> None:
        """Tell others on this store how this process is, with the next renewal."""
        self._reported = {**document, "schema": self._reported["schema"]}

    def close(self) -> None:
        """End the lease. Whatever the process still ran is from now on that of a process that has ended."""
        self._ended.set()
        self._thread.join()
        with suppress(StoreError):  # it runs out by itself
            self._connection.execute("DELETE FROM instance WHERE id = ?", (self.id,))
        self._connection.close()
        self._holds(None)
        with self._fencing:
            if self._fence is not None:
                self._fence.close()
                self._fence = None

    def _keep(self) -> None:
        try:
            while not self.lost and not self._ended.wait(RENEW_EVERY_S):
                try:
                    self._renew()
                except StoreError:
                    pass  # tried again; the server refuses to write when it was too late
                except Exception as error:  # noqa: BLE001 - without this thread, the process would be taken for dead
                    self._note(error)
        finally:
            if not self._ended.is_set():
                self.lost = True

    def _renew(self, *, anew: bool = False) -> None:
        statement = "SELECT interlock_renew(?, ?, CAST(? AS BOOLEAN), ?)"
        try:
            self._last_report = self._description(anew=anew)
        except Exception as error:
            if anew:
                raise
            self._note(error)  # renew with the last report, or this process is taken for dead
        began = _now()
        if self._ask(statement, self.id, self._last_report, "t" if anew else "f", self._place):
            with self._fencing:
                self._sure_until = began + LEASE_MS / 1000 - MARGIN_S
                if self._fence is not None and self._guards:
                    self._fence.end_at(self._sure_until)
        else:
            self.lost = True

    def _description(self, *, anew: bool) -> bytes:
        description = describe(self.home)
        files: dict[str, str] = description["files"]
        if anew:
            self._settings = files["settings.toml"]
        # A process runs with the settings that it was started with, whatever the file has by now.
        restart = self.home.other_settings or files["settings.toml"] != self._settings
        files["settings.toml"] = self._settings
        return orjson.dumps({**self._reported, **description, "restart": restart})

    def _note(self, error: Exception) -> None:
        """Log an error, once for each kind."""
        if type(error) not in self._logged:
            self._logged.add(type(error))
            _log.warning("a renewal of the lease met an error: %r", error)

    def _ask(self, statement: str, *parameters: Any) -> Any:
        with self._lock:
            if self._connection.lost:
                self._connection.reopen()
            return self._connection.one(statement, parameters)[0]


def _now() -> float:
    return time.clock_gettime(_CLOCK)

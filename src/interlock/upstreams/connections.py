"""The connections of one process to its upstreams.

The stored state is followed: a connection to an upstream that was removed, or was added again under the same name, is
closed, and one whose tools have changed forgets what they answered, whichever process saw the change. An upstream that
announces a change is looked at again, one look at a time however often it announces changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from interlock.call.connector import Connector
from interlock.core.clock import Clock
from interlock.core.errors import Failure
from interlock.core.supervise import Supervisor
from interlock.data.schema import Json
from interlock.store.port import Store
from interlock.upstreams import repository
from interlock.upstreams.repository import Outdated, Upstream
from interlock.upstreams.sharing import Sharing
from interlock.upstreams.states import UpstreamStates

_log = logging.getLogger("interlock.upstreams")

FINISH_S = 5.0

Make = Callable[[str, str, Json, Callable[[], None]], Connector]
Look = Callable[[str], Awaitable[Any]]


class _Tasks:
    """Work that is cancelled when the connections are closed."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._supervisor.spawn(name, work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Looks:
    """Looks again at upstreams that announced a change."""

    def __init__(self, tasks: _Tasks, look: Look) -> None:
        self._spawn = tasks.spawn
        self._look = look
        self._again: dict[str, asyncio.Event] = {}
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def begin(self, name: str) -> None:
        """Look at an upstream: one look at a time, and one more for announcements during the last."""
        again = self._again.get(name)
        if again is not None:
            again.set()
            return
        again = self._again[name] = asyncio.Event()
        again.set()
        self._under_way[name] = self._spawn(f"look at the changed upstream {name}", self._look_again(name, again))

    async def _look_again(self, name: str, again: asyncio.Event) -> None:
        try:
            while again.is_set():
                again.clear()
                await self._look(name)
        except Failure as failure:
            _log.warning("the upstream %s announced a change that could not be read: %s", name, failure.message)
        finally:
            del self._again[name], self._under_way[name]

    def names(self) -> tuple[str, ...]:
        """The upstreams that are being looked at."""
        return tuple(self._under_way)

    async def wait(self, name: str, within_s: float) -> None:
        """Wait for the look at an upstream, if one is under way."""
        if name in self._under_way:
            await asyncio.wait((self._under_way[name],), timeout=within_s)

    async def finish(self) -> None:
        """Let the looks under way finish, within a time limit."""
        if self._under_way:
            await asyncio.wait(self._under_way.values(), timeout=FINISH_S)


# many methods: one table of connections with their states, which change together
class Connections:
    """The connections to the upstreams of one home. `look` is called with the name of one that announced a change."""

    def __init__(
        self,
        *,
        journal: Store,
        clock: Clock,
        states: UpstreamStates,
        make: Make,
        supervisor: Supervisor,
        announce: Callable[..., None],
        look: Look,
        owner: str,
        alive: Callable[[str], bool],
        probe_every_s: float,
    ) -> None:
        self._journal = journal
        self._states = states
        self._make = make
        self._announce = announce
        self._supervisor = supervisor
        self._tasks = _Tasks(supervisor)
        self._closing: set[asyncio.Task[None]] = set()
        self.sharing = Sharing(journal, clock, owner=owner, alive=alive, probe_every_s=probe_every_s)
        self.looks = Looks(self._tasks, partial(self.sharing.look, look=look))
        self._connectors: dict[str, tuple[Upstream, Connector]] = {}
        self._trying: dict[str, Connector] = {}  # upstreams that are being added, for the contract tests of their tools
        self._missed: set[str] = set()  # of these, the ones that announced a change meanwhile
        self._closed = False
        self._away: set[str] = set()  # upstreams that did not answer the last request of this process
        states.listen(self._follow)

    def get(self, name: str) -> Connector:
        """Return the connection to an upstream; E3502 at once for one that is away, E3108 for one that was removed."""
        trying = self._trying.get(name)
        if trying is not None:
            return trying
        known = self._states.now(name)
        if known is None:
            raise Failure("E3108", f"there is no upstream `{name}` any more: interlock upstream add")
        if known.state != "available":
            raise Failure("E3502", f"the upstream `{name}` does not answer: {known.reason}", details={"sent": False})
        return self.of(known)

    def of(self, known: Upstream) -> Connector:
        """Return the connection to an upstream, made if there is none."""
        held = self._connectors.get(known.name)
        if held is None:
            if self._closed:  # nobody would close it
                raise Failure("E3502", "connections to upstreams are closed", details={"sent": False})
            made = self._make(known.name, known.kind, known.config, partial(self._announced, known.name))
            held = self._connectors[known.name] = known, made
        return held[1]

    @asynccontextmanager
    async def adding(self, name: str, kind: str, config: Json) -> AsyncGenerator[Connector]:
        """A connection to an upstream that is being added. It is closed if the body fails; else `hold` it."""
        if name in self._trying:
            raise Outdated(name)
        connector = self._trying[name] = self._make(name, kind, config, partial(self._announced, name))
        try:
            yield connector
        except BaseException:
            await connector.close()
            self._missed.discard(name)
            raise
        finally:
            del self._trying[name]

    def hold(self, known: Upstream, connector: Connector) -> None:
        """Keep the connection to an upstream that was added, and look again at one that has changed since."""
        self._connectors[known.name] = known, connector
        if known.name in self._missed:
            self._missed.discard(known.name)
            self.looks.begin(known.name)

    def release(self, name: str, *, if_away: bool = False) -> Connector | None:
        """Return the connection to an upstream and forget it; with `if_away`, only if the upstream did not answer."""
        if if_away and name not in self._away:
            return None
        held = self._connectors.pop(name, None)
        return None if held is None else held[1]

    def _announced(self, name: str) -> None:
        if self._closed:
            return
        if name in self._trying:
            self._missed.add(name)  # looked at again once it is added
        else:
            self.looks.begin(name)

    # Do they answer?

    def discovering(self) -> tuple[str, ...]:
        """The upstreams that are being added or looked at, which may offer more tools later."""
        return (*self._trying, *self.looks.names())

    def set_state(self, name: str, state: str) -> None:
        """Note whether an upstream answered this process."""
        (self._away.discard if state == "available" else self._away.add)(name)

    async def mark(self, known: Upstream, state: str, reason: str) -> None:
        """Note whether an upstream answered, and store it if that is new."""
        self.set_state(known.name, state)
        if (known.state, known.reason) == (state, reason):
            return
        await self._journal.commit(repository.marking(known, state, reason))
        await self._journal.changes.look()
        if known.state != state:
            facts = {"alert": f"UPSTREAM_{state.upper()}", "upstream": known.name, "reason": reason}
            self._announce("tool.alert", "", "", **facts)

    def _follow(self, upstreams: Sequence[Upstream]) -> None:
        """Apply the stored state; close connections to upstreams that were removed, or added again
        under the same name. Where another process has seen other tools, cached answers are dropped.
        """
        stored = {one.name: one for one in upstreams}
        for name, (meant, connector) in list(self._connectors.items()):
            known = stored.get(name)
            # One that did not answer us but answers others is connected to anew: our connection may be given up.
            if (
                known is None
                or (known.added_ms, known.kind, known.configured) != (meant.added_ms, meant.kind, meant.configured)
                or (name in self._away and known.state == "available")
            ):
                self._away.discard(name)
                del self._connectors[name]
                closing = self._supervisor.spawn(f"closing of the upstream {name}", connector.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            elif known.revision != meant.revision:
                connector.forget()
                self._connectors[name] = known, connector

    async def close(self) -> None:
        """Close all connections. From now on none is made, also where an upstream announces a change while it ends."""
        self._closed = True
        await self._tasks.close()
        connectors, self._connectors = [one for _, one in self._connectors.values()], {}
        # Those of removed upstreams are let finish: a connector whose closing is cut off would keep its connections.
        closing = [*self._closing, *(connector.close() for connector in connectors)]
        await asyncio.gather(*closing, return_exceptions=True)

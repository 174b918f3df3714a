"""The store of one data directory as one process opens it: the journal, threads that read it, the process's entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlock.core.clock import Clock, new_id
from interlock.core.record import dataclass
from interlock.store.home import Home
from interlock.store.instance import Instance
from interlock.store.journal import Journal
from interlock.store.readers import Readers
from interlock.store.signing import Signer

if TYPE_CHECKING:
    from interlock.settings import Settings


@dataclass(frozen=True, slots=True)
class Storage:
    """The open files and connections of a data directory."""

    journal: Journal
    readers: Readers
    instance: Instance

    @classmethod
    def open(cls, home: Home, settings: Settings, clock: Clock, store_clock: Clock) -> Storage:
        """Open the store. `store_clock` gives the times of records, `clock` those of this process."""
        journal = Journal(
            home,
            clock=store_clock,
            signer=Signer(home.keys),
            monotonic=clock.monotonic,
            max_stale_s=settings.max_stale_s,
        )
        instance_id = new_id(clock.now_ms(), clock.random_bytes(8))
        return cls(journal, Readers(home), home.instance(instance_id))

    async def close(self) -> None:
        """Finish pending writes, anchor the chain, and release the data directory."""
        self.readers.close()
        await self.journal.close()
        self.instance.close()

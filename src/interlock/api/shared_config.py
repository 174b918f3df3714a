"""The configuration that all machines on a store share: pushed, followed, and rolled back.

A push is checked as the files of a data directory are, before anything is stored: a policy that cannot be used would
deny every call on every machine. Processes that follow it notice a new version as they notice a revocation
(`store.changes`), and decide by its policy and principals from then on. Settings are read at the start of a process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from interlock.api.policy_faults import faults_of
from interlock.api.rights import require_here
from interlock.authority.principals import Principals
from interlock.core.clock import iso, new_id
from interlock.core.errors import Failure
from interlock.store import shared_config
from interlock.store.shared_config import FILES, POLICY, PRINCIPALS, SETTINGS
from interlock.store.shared_version import SharedConfig

if TYPE_CHECKING:
    from pathlib import Path

    from interlock.api.parts import Parts
    from interlock.call.context import Caller
    from interlock.data.schema import Json

MOST_BYTES = 1 << 20


class SharedConfiguration:
    """Reads and changes the configuration of all machines, for callers who may."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def newest(self) -> SharedConfig | None:
        """The version that is in force; None where nothing was pushed."""
        return await self._parts.journal.read(shared_config.newest)

    async def get(self, version: int) -> SharedConfig:
        """One version; E3411 if there is none of this number."""
        return await self._parts.journal.read(lambda reader: shared_config.get(reader, version))

    async def history(self, most: int = 50) -> list[Json]:
        """The last versions, without their texts, the newest first."""
        found = await self._parts.journal.read(lambda reader: shared_config.history(reader, most))
        return [document(one) for one in found]

    async def push(self, texts: Mapping[str, str], *, by: Caller, instead_of: int | None) -> SharedConfig:
        """Put these texts in force for all machines; those of the version before stay where none is given.

        E3004 with all faults if a text cannot be used, E3410 if another version than `instead_of` is in force.
        """
        require_here(by, "policy:admin", "changing the configuration of all machines")
        before = await self.newest()
        files = {SETTINGS: "", **({} if before is None else before.files), **texts}
        if missing := [name for name in FILES if name not in files]:
            raise Failure(
                "E3004", f"{' and '.join(missing)} missing", resolution="add what is missing, then push again"
            )
        faults = await self._faults(files)
        if faults:
            raise Failure("E3004", f"the configuration cannot be used: {faults[0]}", details={"faults": faults})
        parts = self._parts
        ref = new_id(parts.clock.now_ms(), parts.clock.random_bytes(8))
        pushed = await parts.journal.commit(
            lambda transaction: shared_config.add(transaction, files, ref, by.acting, instead_of)
        )
        parts.messages.policy_changed(None)
        await parts.journal.changes.look()
        return pushed

    async def push_files(self, folder: Path | None, *, by: Caller, instead_of: int | None) -> SharedConfig:
        """Push the files of a directory that has some of them; those of the data directory where none is named."""
        home = self._parts.home
        if folder is None and home.shared is not None:
            raise Failure(
                "E3411",
                "this data directory follows the shared configuration, so its own files do not count",
                resolution="interlock config pull DIR, change the files there, then: interlock config push --from DIR",
            )
        place = folder or home.path
        try:
            texts = {name: (place / name).read_text() for name in FILES if (place / name).exists()}
        except (OSError, UnicodeDecodeError):
            raise Failure("E3004", "a file of the configuration cannot be read as text") from None
        return await self.push(texts, by=by, instead_of=instead_of)

    async def rollback(self, version: int, *, by: Caller) -> SharedConfig:
        """Put the texts of an earlier version in force again, as a new version."""
        earlier, now = await self.get(version), await self.newest()
        return await self.push(earlier.files, by=by, instead_of=None if now is None else now.version)

    async def _faults(self, files: Mapping[str, str]) -> list[str]:
        from interlock.store.shared_settings import shared_faults  # it loads the models of settings

        large = [name for name, text in files.items() if len(text.encode()) > MOST_BYTES]
        if large:
            return [f"{name}: it has more than {MOST_BYTES >> 20} MiB" for name in large]
        faults = [f"{SETTINGS}: {one}" for one in shared_faults(files[SETTINGS])]
        groups = frozenset[str]()
        try:
            groups = Principals(files[PRINCIPALS]).groups
        except Failure as failure:
            faults += [f"{PRINCIPALS}: {one}" for one in (failure.details or {}).get("faults", [failure.message])]
        found = await faults_of(self._parts, files[POLICY], groups)
        return faults + [f"{POLICY}: line {one.line}: {one.message}" for one in found if one.grave]


def document(shared: SharedConfig) -> Json:
    """A version without its texts, as JSON."""
    return {"version": shared.version, "by": shared.by, "at": iso(shared.at_ms)}

"""Checkpoints at rest, and as their readers may see them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import orjson

from interlock.call.checkpoints import Checkpoint, CheckpointType
from interlock.core.errors import Failure
from interlock.data.canonical import decode, digest
from interlock.store import checkpoints, ledger

if TYPE_CHECKING:
    from interlock.call.context import Caller
    from interlock.data.schema import Json
    from interlock.privacy.redact import Redacted, Redactor
    from interlock.settings import Settings
    from interlock.store.checkpoints import CheckpointRow
    from interlock.store.port import Reader, Store
    from interlock.store.sealing import Box

_GZIP = 31


class StoredCheckpoints:
    """Reads the checkpoints of a data directory."""

    def __init__(self, journal: Store, settings: Settings, redactor: Redactor, box: Box) -> None:
        self._journal = journal
        self._settings = settings
        self._schema = redactor.for_schema({})
        self._box = box

    async def of(self, call_id: str, *, after: int = 0, limit: int | None = None) -> list[Checkpoint]:
        """Return what a call has saved, oldest first, for a caller who may see it. E3904 for a damaged checkpoint."""
        rows = await self._journal.read(lambda reader: checkpoints.of_call(reader, call_id, after=after, limit=limit))
        return [self._read(row) for row in rows]

    async def seen_by(self, caller: Caller, call_id: str) -> list[Checkpoint]:
        """Return the same for the caller that made the call. E3702 for other callers, as if the call did not exist."""
        if owner_of(caller) not in await self._journal.read(lambda reader: _owners(reader, call_id)):
            raise Failure("E3702", f"no call `{call_id}` of yours is on record")
        return await self.of(call_id)

    def _read(self, row: CheckpointRow) -> Checkpoint:
        state, paths, error = None, (), None
        try:
            state, paths = self._shown(row.tool, self._opened(row))
        except Failure as failure:
            error = failure
        return Checkpoint(
            invocation_id=row.call,
            sequence=row.seq,
            tool_id=row.tool,
            tool_version=row.version,
            checkpoint_type=cast("CheckpointType", row.type),
            label=row.label,
            at_ms=row.at_ms,
            size=row.size,
            checksum=row.sha256,
            state=state,
            redacted=tuple(dict.fromkeys((*orjson.loads(row.redacted), *paths))),
            error=error,
        )

    def _opened(self, row: CheckpointRow) -> Any:
        """Return the state exactly as it was saved; E3904 if it was changed since."""
        *facts, body = row
        seq, label, sha256 = row.seq, row.label, row.sha256
        try:
            state = decode(zlib.decompress(self._box.open(body, purpose="checkpoint", about=about(facts)), _GZIP))
        except (Failure, ValueError, zlib.error) as error:
            why = error.message if isinstance(error, Failure) else "it is damaged"
            raise Failure("E3904", f"checkpoint {seq} (`{label}`) cannot be read: {why}") from None
        if digest(state) != sha256:
            raise Failure("E3904", f"checkpoint {seq} (`{label}`) cannot be read: its checksum is another")
        return state

    def _shown(self, tool: str, state: Any) -> Redacted:
        """Return a state as its reader may see it. Namespaces whose results keep their text keep it here too."""
        redacts = tool.partition(".")[0] not in self._settings.no_pattern_redaction
        return self._schema.for_sinks(state) if redacts else self._schema.for_people(state)


def compress(text: bytes) -> bytes:
    """Return a state as it is stored, before it is encrypted."""
    return zlib.compress(text, wbits=_GZIP)


def about(facts: Sequence[Any]) -> str:
    """Return what an encrypted state is bound to: all other columns of its row."""
    return orjson.dumps(facts).decode()


def owner_of(caller: Caller) -> str:
    """Return the owner of a checkpoint."""
    return f"{caller.tenant}/{caller.id}"


def _owners(reader: Reader, call_id: str) -> set[str]:
    """The callers that made a call, by its checkpoints and its records."""
    owners = checkpoints.owners(reader, call_id)
    for body in ledger.of_call(reader, call_id):
        record: Json = orjson.loads(body)
        owners.add(f"{record.get('tenant')}/{record.get('callerId')}")
    return owners

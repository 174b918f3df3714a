"""Storage for what calls leave behind besides records: sessions, payloads, outcomes under keys, means to undo them.

The unit that closes a call stores all of it. Only large payloads are encrypted and written in pieces before that, since
other writers would wait for them; the closing unit then takes the pieces over. It never depends on them: where they
cannot be used, it stores the payload whole.

All of it is encrypted at rest. Rows that an older version wrote in clear text are still read: a session is text instead
of bytes, a payload is as long as its row says, and an outcome is JSON.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeGuard, cast

import orjson

from interlock.call.context import Caller
from interlock.call.phases import Call, Ran, Requested, Verified
from interlock.core.errors import Failure
from interlock.core.threads import WALKS
from interlock.data.bounds import LARGE_INPUT
from interlock.data.canonical import decode, encode, sealed_digest
from interlock.data.schema import Json
from interlock.effects.session import SessionState
from interlock.gateway import idempotency, inputs
from interlock.gateway.observe import Observer
from interlock.settings import Settings
from interlock.store import idempotency as idempotency_rows
from interlock.store import ledger, payloads, sessions
from interlock.store.payloads import Payload
from interlock.store.port import Reader, Store, Transaction, Unit
from interlock.store.sealing import VALUE, Box

_log = logging.getLogger("interlock.gateway")

_DAY_MS = 86_400_000
_OUTCOME = "outcome"
# Payloads of this many bytes or more are encrypted and decrypted in a thread.
_LARGE = 256_000


def owner_of(caller: Caller) -> str:
    """Return the owner of a payload."""
    return f"{caller.tenant}/{caller.id}"


class Kept:
    """Stores and reads what calls leave behind in one data directory."""

    def __init__(self, journal: Store, observer: Observer, settings: Settings, box: Box, writer: str) -> None:
        self._journal = journal
        self._reader = journal.reader
        self._observer = observer
        self._settings = settings
        self._box = box
        # The id of this process as the writer of pieces, and payloads whose pieces no row refers to.
        self._writer = writer
        self._abandoned: set[str] = set()

    # Sessions

    def session(self, caller: Caller, session: str) -> SessionState:
        """Return a caller's session as it is now."""
        return SessionState(lambda: self._stored_session(session_id(caller, session)))

    def _stored_session(self, row_id: bytes) -> tuple[int, str]:
        row = sessions.find(self._reader, row_id)
        if row is None:
            return 0, "{}"
        version, state = row
        if isinstance(state, bytes):
            state = self._box.open(state, purpose="session", about=row_id.hex()).decode()
        return version, state

    def store_session(self, transaction: Transaction, row_id: bytes, session: SessionState) -> None:
        """Write a session's state, unless another call has changed it meanwhile (E3410)."""
        if sessions.version(transaction, row_id) != session.version:
            raise Failure("E3410", "the session was changed by another call meanwhile", retry_after_ms=10)
        state = self._box.seal(orjson.dumps(session.values_now()), purpose="session", about=row_id.hex())
        sessions.put(transaction, row_id, session.version + 1, state)

    # Payloads

    async def payload(self, ref: str) -> bytes | None:
        """Read the payload with this reference. None where it has expired or was discarded.

        A payload in clear text is as long as its row says. Pieces are read one per turn of the event loop, and a large
        payload is decrypted in a thread.
        """
        found = payloads.content(self._reader, ref)
        if found is None or found.body is None or len(found.body) == found.size:
            return None if found is None else found.body
        parts = [found.body]
        for number in range(1, found.pieces + 1):
            await asyncio.sleep(0)
            piece = payloads.piece(self._reader, ref, number)
            if piece is None:
                if payloads.has_body(self._reader, ref):
                    raise Failure(
                        "E3604", f"a part of the payload `{ref}` is missing; restore the data directory from a backup"
                    )
                return None  # expired or discarded meanwhile
            parts.append(piece)
        opening = partial(self._opened, ref, parts)
        return opening() if found.size < _LARGE else await WALKS.run(opening)

    def _opened(self, ref: str, parts: list[bytes]) -> bytes:
        sealed = parts[0] if len(parts) == 1 else b"".join(parts)
        return self._box.open(sealed, purpose="payload", about=ref)

    def has(self, ref: str) -> bool:
        """Whether anything is stored under a reference now."""
        return payloads.has_body(self._reader, ref)

    def check_room(self, reader: Reader, caller: Caller, size: int) -> None:
        """Refuse (E3407) what would not fit into the quotas of the caller, the tenant and the data directory.

        It is checked in the transaction that stores, so concurrent calls cannot exceed a quota together.
        """
        settings = self._settings
        quotas = {
            f"caller:{owner_of(caller)}": ("payload_bytes_per_caller", settings.payload_bytes_per_caller),
            f"tenant:{caller.tenant}": ("payload_bytes_per_tenant", settings.payload_bytes_per_tenant),
            "home": ("payload_bytes", settings.payload_bytes),
        }
        used = payloads.bytes_used(reader, quotas)
        for scope, (name, most) in quotas.items():
            if used.get(scope, 0) + size > most:
                raise Failure(
                    "E3407",
                    f"large results of {used.get(scope, 0):,} bytes are kept, and `{name}` allows {most:,}",
                    details={"quota": name, "used": used.get(scope, 0), "most": most, "wanted": size},
                    resolution=f"ask for less, page through it, or wait until results have expired"
                    f" ({settings.payload_days} days); an operator can raise {name}",
                )

    def why_withheld(self, reader: Reader, caller: Caller, bodies: Mapping[str, bytes]) -> str:
        """Return why what a write leaves behind is not stored; empty if it fits into the quotas.

        The write has had its effect: its outcome is recorded in any case, with references that say why they refer to
        nothing.
        """
        try:
            self.check_room(reader, caller, sum(map(len, bodies.values())))
        except Failure as failure:
            return f"withheld: {failure.message}"
        return ""

    async def write_ahead(self, caller: Caller, bodies: Mapping[str, bytes], *, strict: bool) -> Mapping[str, Sealed]:
        """Encrypt payloads in a thread and write the pieces of large ones. Does nothing if all are small.

        Nothing is written that has no room: `strict` raises that (E3407), otherwise the unit that stores the payloads
        decides. A failure of the store is left to that unit too, which then writes them whole.
        """
        size = sum(map(len, bodies.values()))
        if size < _LARGE:
            return {}
        try:
            self.check_room(self._reader, caller, size)
        except Failure:
            if strict:
                raise
            return {}
        sealed = await WALKS.run(lambda: {ref: self._sealed(ref, body) for ref, body in bodies.items()})
        return {ref: Sealed(body, await self._write_pieces(ref, body)) for ref, body in sealed.items()}

    async def _write_pieces(self, ref: str, sealed: bytes) -> int:
        """Write the pieces of a payload. Returns how many there are; 0 where it is small or they cannot be written."""
        pieces = payloads.pieces(sealed)
        try:
            for number, piece in enumerate(pieces, 1):
                unit = partial(payloads.add_piece, ref=ref, number=number, piece=piece, writer=self._writer)
                await self._journal.commit_large(unit)
        except Failure as failure:
            _log.warning("the pieces of `%s` could not be written: %s", ref, failure.message)
            self._abandoned.add(ref)
            return 0
        except BaseException:
            self._abandoned.add(ref)
            raise
        return len(pieces)

    def abandon(self, bodies: Mapping[str, bytes]) -> None:
        """Have the pieces of payloads removed, unless a row refers to them: the unit for that has failed."""
        self._abandoned.update(ref for ref, body in bodies.items() if len(body) >= _LARGE)

    def abandon_inputs(self, sent: SentInputs | None) -> None:
        """Do the same for the inputs of a call, after the unit that stores them has run or failed."""
        if sent is not None and sent.sealed is not None and sent.sealed.pieces:
            self._abandoned.add(sent.ref)

    async def release_pieces(self, alive: Callable[[str], bool]) -> None:
        """Mark pieces for removal that no row will refer to: abandoned ones, and those of dead processes."""
        abandoned = frozenset(self._abandoned)

        def useless(reader: Reader) -> list[str]:
            return [
                ref
                for ref, writer in payloads.unfinished(reader)
                if not alive(writer) or (writer == self._writer and ref in abandoned)
            ]

        def unit(transaction: Transaction) -> None:
            # Checked inside the write: a closing that was merely slow may have taken them over.
            for ref in useless(transaction):
                payloads.release_pieces(transaction, ref)

        if useless(self._reader):
            await self._journal.commit(unit)
        self._abandoned -= abandoned

    def _sealed(self, ref: str, body: bytes) -> bytes:
        return self._box.seal(body, purpose="payload", about=ref)

    def store_payloads(
        self,
        transaction: Transaction,
        call: Call,
        bodies: Mapping[str, bytes],
        withheld: str,
        ahead: Mapping[str, Sealed],
        for_the_key: str | None,
    ) -> None:
        """Store the payloads of a call; or, where they are withheld, the reason.

        `ahead` contains those that were encrypted already, and maybe written in pieces. A payload's size is that of its
        content. Nobody is told of the payload `for_the_key`: it is stored for replays only, until the window of the
        call's idempotency key has passed.
        """
        assert call.request.caller is not None
        owner, until_ms = owner_of(call.request.caller), transaction.now_ms + self._settings.payload_days * _DAY_MS
        for ref, body in bodies.items():
            stored = Sealed(None, 0)
            if not withheld:
                stored = self._taken(transaction, ref, ahead.get(ref)) or Sealed(self._sealed(ref, body), 0)
            if not stored.pieces and ref in ahead and ahead[ref].pieces:
                payloads.release_pieces(transaction, ref)
            its_end_ms = _end_of_key(transaction, call) if ref == for_the_key else until_ms
            _store_until(transaction, ref, call.id, owner, stored, len(body), its_end_ms, withheld)

    def _taken(self, transaction: Transaction, ref: str, ahead: Sealed | None) -> Sealed | None:
        """Return a payload that was encrypted ahead, as its row contains it; None if it must be encrypted again."""
        # INVARIANT: nothing is stored under a key that was retired after it was sealed.
        if ahead is None or ahead.body is None or not self._box.holds(ahead.body):
            return None
        if ahead.pieces and payloads.take_pieces(transaction, ref, self._writer):
            return Sealed(payloads.head(ahead.body), ahead.pieces)
        return Sealed(ahead.body, 0)

    def why_gone(self, ref: str) -> str:
        """Return the reason why nothing is stored under a reference."""
        reason = payloads.reason(self._reader, ref) or ""
        return reason if reason.startswith(("withheld", "discarded")) else "the payload is no longer kept"

    def discard(self, call: str) -> Unit[None]:
        """Return a unit that removes the result and the files of a call. Its rows stay and say so; its undo stays."""
        return lambda transaction: payloads.discard(transaction, call)

    # Private values of changes

    def store_values(self, transaction: Transaction, call: str, caller: Caller, values: PrivateValues) -> None:
        """Store the private values of a call's changes for as long as the records that refer to them."""
        days = self._settings.retention_years_writes * 366
        for ref, plain in values.kept.items():
            sealed = self._box.seal(plain, purpose=VALUE, about=ref)
            _store(transaction, ref, call, owner_of(caller), Sealed(sealed, 0), len(plain), days)

    def value(self, recorded: Any) -> Any:
        """Return a value of a change, from its record. E3801 if the stored value is gone or has another hash."""
        if not is_sealed_value(recorded):
            return recorded
        ref = str(recorded["sealed"])
        body = payloads.body(self._reader, ref)
        plain = b"" if body is None else self._box.open(body, purpose=VALUE, about=ref)
        if hashlib.sha256(plain).hexdigest() != recorded["sha256"]:
            raise Failure("E3801", f"`{ref}` is gone, or not what the journal says it was; see interlock audit verify")
        return decode(plain)["value"]

    def replayed_session(self, caller: Caller, session: str) -> Json:
        """Return a session's state, computed from the journal's records of its changes."""
        state: Json = {}
        for body in ledger.session_changes(self._reader):
            record: Json = orjson.loads(body)
            owner = (record["tenant"], record["callerId"], record.get("session", ""))
            if "sessionState" not in record or owner != (caller.tenant, caller.id, session):
                continue
            name = str(record["affectedResource"]).removeprefix("session:")
            if record["mutationType"] == "DELETE":
                state.pop(name, None)
            else:
                state[name] = self.value(record["newValue"])
        return state

    # Outcomes under a key

    def check_key(self) -> None:
        """Refuse (E3601, E3604, E3804) to begin a call whose outcome could not be encrypted."""
        self._box.look()

    def outcome(self, found: idempotency.Replay) -> Json:
        """Return the outcome of a call, as stored under its key. JSON in clear text is of an older version."""
        sealed = found.result
        if sealed.startswith(b"{"):
            return decode(sealed)
        return decode(self._box.open(sealed, purpose=_OUTCOME, about=found.call))

    def sealed_outcome(self, call: str, outcome: Json) -> bytes:
        """Return the outcome of a call, encrypted for its key."""
        return self._box.seal(encode(outcome), purpose=_OUTCOME, about=call)

    # Inputs

    def keeps_inputs(self, call: Call) -> bool:
        """Whether the inputs of a call are to be stored, by the setting and by what changed them."""
        mode = self._settings.keep_inputs
        return mode == "always" or (mode == "changed" and inputs.worth_keeping(call))

    async def inputs_of(self, call: Call, *, waits: bool = False) -> SentInputs | None:
        """Return the inputs of a call, ready to be stored; None if they are not to be stored.

        Large ones are encoded and encrypted in a thread. A call that `waits` for an approval ends in a unit that knows
        only its ticket, so its inputs are stored with the ticket. If it runs, its closing replaces them: a reviewer may
        have changed them.
        """
        if call.request.caller is None or not call.model_input or not self.keeps_inputs(call):
            return None
        ref, size = f"inputs:{call.id}", len(call.model_input)
        if waits or call.more.approval is not None or call.request.id is not None:
            # A call that waited can end more than once under its id: one that is refused for a while is tried again.
            ref = f"{ref}.{secrets.token_hex(8)}"
        if size > inputs.LARGEST_KEPT and self._settings.keep_inputs != "always":
            return SentInputs(ref, b"", None, inputs.TOO_LARGE)
        if size <= LARGE_INPUT:
            return SentInputs(ref, encode(inputs.to_keep(call)), None)
        body, sealed = await WALKS.run(self._written_inputs, call, ref)
        return SentInputs(ref, body, Sealed(sealed, await self._write_pieces(ref, sealed)))

    def _written_inputs(self, call: Call, ref: str) -> tuple[bytes, bytes]:
        body = encode(inputs.to_keep(call))
        return body, self._box.seal(body, purpose="inputs", about=ref)

    def store_inputs(self, transaction: Transaction, call: Call, sent: SentInputs | None) -> Json:
        """Store the inputs of a call, encrypted. Returns what the closing record says if they are not stored.

        They are left out if a quota has no room for them: the call itself is more important.
        """
        caller = call.request.caller
        if sent is None or caller is None:
            return {}
        ref = sent.ref
        if "." in ref:
            payloads.replace_inputs(transaction, call.id)
        withheld = self.inputs_withheld(transaction, call, sent)
        stored = None if withheld else self._taken(transaction, ref, sent.sealed)
        if sent.sealed is not None and sent.sealed.pieces and (stored is None or not stored.pieces):
            payloads.release_pieces(transaction, ref)
        if withheld:
            return withheld
        stored = stored or Sealed(self._box.seal(sent.body, purpose="inputs", about=ref), 0)
        _store(transaction, ref, call.id, owner_of(caller), stored, len(sent.body), self._settings.payload_days)
        return {}

    def inputs_withheld(self, reader: Reader, call: Call, sent: SentInputs | None) -> Json:
        """Return what a record says about inputs that should be stored and cannot be; empty if they can."""
        if sent is None or call.request.caller is None:
            return {}
        withheld = sent.withheld or self.why_withheld(reader, call.request.caller, {sent.ref: sent.body})
        return {"inputsWithheld": withheld} if withheld else {}

    def inputs(self, call: str) -> Callable[[], Json] | None:
        """Return a function that decrypts the stored inputs of a call, on any thread; None if there are none."""
        ref = payloads.inputs_of(self._reader, call)
        body = None if ref is None else payloads.whole(self._reader, ref)
        return None if body is None else lambda: decode(self._box.open(body, purpose="inputs", about=cast("str", ref)))

    # Undoing

    def undo(self, call: str, caller: Caller) -> Json:
        """Return what undoing a call needs, as stored when the call succeeded; only for the caller that made it."""
        ref = f"undo:{call}"
        row = payloads.owned(self._reader, ref)
        if row is None or row.body is None or row.owner != owner_of(caller):
            raise Failure("E3702", f"nothing is stored that could undo call {call}")
        return decode(self._box.open(row.body, purpose="undo", about=ref))

    def store_undo(self, transaction: Transaction, call: str, owner: str, undo: Json, hidden: list[str]) -> None:
        ref = f"undo:{call}"
        sealed = self._box.seal(encode({**undo, "hidden": hidden}), purpose="undo", about=ref)
        _store(transaction, ref, call, owner, Sealed(sealed, 0), len(sealed), self._settings.undo_days)

    async def keep_undo(self, ran: Ran) -> None:
        """Store what undoing a call needs although the call did not succeed, so that it can be undone now."""
        assert ran.more.compensation is not None
        await self._keep_undo(ran, _undo(ran, ran.more.compensation))

    async def keep_undo_of(self, verified: Verified) -> None:
        """Do the same for a call whose effect is confirmed and whose result is withheld, if it can be undone."""
        undo = compensation(verified)
        if undo is not None:
            await self._keep_undo(verified, undo)

    async def _keep_undo(self, requested: Requested, undo: Json) -> None:
        call, caller = requested, requested.request.caller
        assert caller is not None
        hidden, owner = self._observer.hidden(call), owner_of(caller)
        await self._journal.commit(lambda transaction: self.store_undo(transaction, call.id, owner, undo, hidden))


class Sealed(NamedTuple):
    """An encrypted payload, and how many pieces of it are written. None: it is not stored."""

    body: bytes | None
    pieces: int


class SentInputs(NamedTuple):
    """The inputs of a call as they are to be stored, encrypted already if they are large; or why they are not."""

    ref: str
    body: bytes
    sealed: Sealed | None
    withheld: str = ""


class PrivateValues:
    """Decides which values of one call's changes are private, and keeps these until they are encrypted.

    A record refers to such a value and has a hash of it. The hash is salted, because a short value could be guessed
    from it.
    """

    def __init__(self, call: str, private: Callable[[str, Any], bool], random_bytes: Callable[[int], bytes]) -> None:
        self._call = call
        self._private = private
        self._random_bytes = random_bytes
        self.kept: dict[str, bytes] = {}

    def shown(self, resource: str, value: Any) -> Any:
        """Return a value as its record shows it."""
        if value is None or not self._private(resource, value):
            return value
        ref = f"value:{self._call}.{len(self.kept)}"
        self.kept[ref] = plain = encode({"salt": self._random_bytes(16).hex(), "value": value})
        return {"sealed": ref, "sha256": hashlib.sha256(plain).hexdigest()}


def is_sealed_value(recorded: Any) -> TypeGuard[Json]:
    """Whether a record refers to a value that is stored encrypted."""
    return isinstance(recorded, dict) and cast("Json", recorded).keys() == {"sealed", "sha256"}


def session_id(caller: Caller, session: str) -> bytes:
    """Return the id of the row of a session, which only the tenant and caller that own it can compute."""
    return _session_id(caller.tenant, caller.id, session)


_session_id = lru_cache(maxsize=256)(sealed_digest)


def compensation(verified: Verified) -> Json | None:
    """Return the call that would undo this one, stored before success is reported; None if there is none."""
    ran = verified
    requested = ran
    contract = requested.tool.contract
    if ran.more.source != "compute" or requested.request.operation != "invoke" or not contract.manifest.compensable:
        return None
    arguments = ran.more.compensation
    if arguments is None:
        arguments = requested.tool.bound.undo_arguments(ran.input, verified.value)
    return None if arguments is None else _undo(requested, arguments)


def _undo(requested: Requested, arguments: Json) -> Json:
    contract, session = requested.tool.contract, requested.request.session
    return {"tool": str(contract.id), "version": contract.version, "session": session, "arguments": arguments}


def _end_of_key(transaction: Transaction, call: Call) -> int:
    """Return the end of the window of a call's idempotency key."""
    assert call.more.scope is not None
    row = idempotency_rows.state(transaction, call.more.scope)
    assert row is not None
    return row[1]


def _store(tx: Transaction, ref: str, call: str, owner: str, sealed: Sealed, size: int, days: int) -> None:
    _store_until(tx, ref, call, owner, sealed, size, tx.now_ms + days * _DAY_MS)


def _store_until(
    tx: Transaction, ref: str, call: str, owner: str, sealed: Sealed, size: int, until_ms: int, reason: str = ""
) -> None:
    payloads.insert(tx, Payload(ref, call, owner, sealed.body, size, tx.now_ms, until_ms, reason, sealed.pieces))

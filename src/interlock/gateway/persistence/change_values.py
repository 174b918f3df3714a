"""Private values of changes: a record refers to them by a reference and a salted hash."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import orjson

from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.data.canonical import decode, encode
from interlock.gateway.persistence.payloads import insert, owner_of
from interlock.gateway.persistence.pieces import Sealed
from interlock.privacy.redact_schema import PLAIN
from interlock.store import ledger, payloads
from interlock.store.sealing import VALUE, Box

if TYPE_CHECKING:
    from interlock.call.context import Caller
    from interlock.contract.effects import Change
    from interlock.data.schema import Json
    from interlock.privacy.redact import Redactor, SchemaRedactor
    from interlock.settings import Settings
    from interlock.store.port import Reader, Transaction


@dataclass(slots=True)
class PrivateValues:
    """Decides which values of one call's changes are private, and keeps these until they are encrypted.

    A record refers to such a value and has a hash of it. The hash is salted, because a short value could be guessed
    from it.
    """

    call: str
    redactor: Redactor
    schemas: Sequence[SchemaRedactor]
    random_bytes: Callable[[int], bytes]
    to_seal: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def shown(self, change: Change) -> list[Any]:
        """Return the values of a change, before and after, as its record shows them.

        A value is private by the name of its resource, a schema or its content.
        """
        secret, values = self.redactor.names_secret(change.resource), [change.before, change.after]
        for at, value in enumerate(values):
            # Nothing is found in a number; only its name or its schema can tell that it is private.
            if value is not None and (
                secret
                or (value.__class__ not in PLAIN and self.redactor.value(value).paths)
                or any(schema.for_sinks(value).paths for schema in self.schemas)
            ):
                ref = f"value:{self.call}.{len(self.to_seal)}"
                self.to_seal[ref] = plain = encode({"salt": self.random_bytes(16).hex(), "value": value})
                values[at] = {"sealed": ref, "sha256": hashlib.sha256(plain).hexdigest()}
        return values


def is_sealed_value(recorded: Any) -> TypeGuard[Json]:
    """Whether a record refers to a value that is stored encrypted."""
    return isinstance(recorded, dict) and cast("Json", recorded).keys() == {"sealed", "sha256"}


class ChangeValues:
    """Stores and reads the private values of changes."""

    def __init__(self, settings: Settings, box: Box) -> None:
        self._settings = settings
        self._box = box

    def store(self, transaction: Transaction, call: str, caller: Caller, values: PrivateValues) -> None:
        """Store the private values of a call's changes for as long as the records that refer to them."""
        days = self._settings.retention_years_writes * 366
        for ref, plain in values.to_seal.items():
            sealed = self._box.seal(plain, purpose=VALUE, about=ref, within=transaction)
            insert(transaction, ref, call, owner_of(caller), Sealed(sealed, 0), len(plain), days)

    def read(self, reader: Reader, recorded: Any) -> Any:
        """Return a value of a change, from its record. E3801 if the stored value is gone or has another hash."""
        if not is_sealed_value(recorded):
            return recorded
        ref = str(recorded["sealed"])
        body = payloads.body(reader, ref)
        plain = b"" if body is None else self._box.open(body, purpose=VALUE, about=ref)
        if hashlib.sha256(plain).hexdigest() != recorded["sha256"]:
            raise Failure("E3801", f"`{ref}` is gone, or not what the journal says it was; see interlock audit verify")
        return decode(plain)["value"]

    def replay_session(self, caller: Caller, session: str, reader: Reader) -> Json:
        """Return a session's state, computed from the journal's records of its changes. Takes long."""
        state: Json = {}
        for body in ledger.session_changes(reader):
            record: Json = orjson.loads(body)
            owner = (record["tenant"], record["callerId"], record.get("session", ""))
            if "sessionState" not in record or owner != (caller.tenant, caller.id, session):
                continue
            name = str(record["affectedResource"]).removeprefix("session:")
            if record["mutationType"] == "DELETE":
                state.pop(name, None)
            else:
                state[name] = self.read(reader, record["newValue"])
        return state

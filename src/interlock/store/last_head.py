"""The last signed head, kept beside the keys, and the limits of what may be unsigned.

Anchors lie in the database and in a file beside it. Somebody who can write both can remove them, rewrite every record
and leave a chain without a signature. So the newest signed head is also kept in `keys/journal.head`, where only the
owner of the keys writes. It says how far signing came: a journal that does not go through it was rewritten or cut back.

Signing keeps up with writing. A batch takes a signature along when a thousand records or a second have passed since the
last one, by the monotonic clock or by the store's own time, and a process that opens a home signs at once what another
left unsigned. A process that is killed therefore leaves at most `ANCHOR_EVERY` unsigned records, all written within
moments of the last signature, however long ago that was. Anything else was not written by Interlock, and a home that
holds it is not opened (E3804).

A home of an earlier version has no such file. The first process that opens it makes one and records that it did. From
then on a missing file is a fault; the fact `last_head` in the database says which of the two it is.
"""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import orjson

from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.store.failures import RESTORE
from interlock.store.home import Home
from interlock.store.port import Reader
from interlock.store.signing import signed_by

GENESIS = bytes(32)
ANCHOR_EVERY = 1000
# How long after the newest signature a record may have been made and still be unsigned. A signature is due after one
# second; the rest is for a commit that takes its time.
UNSIGNED_MS = 10_000
FACT = "last_head"

_NEWEST = "SELECT seq, hash, at_ms, key_id, signature FROM anchor ORDER BY seq DESC LIMIT 1"
HEAD = "SELECT seq, hash FROM journal ORDER BY seq DESC LIMIT 1"
PURGED_HEAD = "SELECT last_seq, hash FROM segment ORDER BY last_seq DESC LIMIT 1"
_IN_SEGMENT = "SELECT CASE last_seq WHEN ?1 THEN hash ELSE ?2 END FROM segment WHERE ?1 BETWEEN first_seq AND last_seq"
_UNSIGNED = "SELECT seq, body FROM journal WHERE seq > ? AND seq <= ? ORDER BY seq"


@dataclass(frozen=True, slots=True)
class SignedHead:
    """A place in the chain that somebody with the key has signed."""

    seq: int
    hash: bytes
    at_ms: int
    key_id: str
    signature: bytes


def anchor_line(seq: int, head: bytes, at_ms: int, key_id: str, signature: bytes) -> bytes:
    """A signed head as files hold it. This form distinguishes a line that was cut off from a changed one."""
    line = {"seq": seq, "hash": head.hex(), "at_ms": at_ms, "key_id": key_id, "signature": signature.hex()}
    return orjson.dumps(line)


def read_line(line: bytes) -> SignedHead | None:
    """The signed head that a line holds; None for anything else."""
    try:
        fields = cast("dict[str, Any]", orjson.loads(line))
        digest, signature = bytes.fromhex(fields["hash"]), bytes.fromhex(fields["signature"])
        seq, at_ms, key_id = fields["seq"], fields["at_ms"], fields["key_id"]
    except (ValueError, TypeError, KeyError):
        return None
    if type(seq) is not int or type(at_ms) is not int or not isinstance(key_id, str) or not 0 <= seq < 2**63:
        return None
    return SignedHead(seq, digest, at_ms, key_id, signature)


def path_of(home: Home) -> Path:
    return home.keys / "journal.head"


def read(home: Home) -> SignedHead | None:
    """The last signed head; None when there is no such file, E3804 when it holds none or cannot be read."""
    try:
        text = path_of(home).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Failure("E3804", f"keys/journal.head cannot be read: {error.strerror}", resolution=RESTORE) from None
    head = read_line(text)
    if head is None:
        raise Failure("E3804", "keys/journal.head is damaged", resolution=RESTORE)
    return head


def write(home: Home, line: bytes, *, first: bool = False) -> None:
    """Keep a signed head as the last one, unless a later one is kept; `first`: unless any is. Raises OSError."""
    path, staged = path_of(home), path_of(home).with_name(f".journal.head.{os.urandom(8).hex()}")
    with suppress(FileNotFoundError):
        before, now = read_line(path.read_bytes()), read_line(line)
        # Processes write after they have committed, so a slower one may come with an earlier head.
        if first or (before is not None and now is not None and before.seq >= now.seq):
            return
    try:
        with open(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)


def note_anchor(home: Home, line: bytes) -> None:
    """Keep a signed head that is in the database in the anchors file and beside the keys as well."""
    # The database holds the same anchor; these are further witnesses.
    with suppress(OSError), open(home.anchors, "ab") as file:
        # The newline in front ends a line that a power cut or a full disk may have left half written.
        file.write(b"\n" + line + b"\n")
    with suppress(OSError):  # the one before stays, and says that signing came at least that far
        write(home, line)


def expected(reader: Reader) -> bool:
    """Whether this database says that its home keeps a last signed head."""
    return reader.one("SELECT 1 FROM fact WHERE name = ?", (FACT,)) is not None


@dataclass(frozen=True, slots=True)
class Ends:
    """The ends of the journal, of its newest anchor and of the last signed head."""

    head: tuple[int, bytes]
    anchor: SignedHead | None
    last: SignedHead | None

    @property
    def signed(self) -> SignedHead | None:
        """The newest of the two signed heads."""
        return max(filter(None, (self.anchor, self.last)), key=lambda one: one.seq, default=None)

    @property
    def unsigned(self) -> int:
        return max(self.head[0] - (0 if self.signed is None else self.signed.seq), 0)


def ends(reader: Reader, last: SignedHead | None) -> Ends:
    """The ends of a journal. The head is read first: others may write on, and what they sign is no less signed."""
    head = reader.one(HEAD) or reader.one(PURGED_HEAD) or (0, GENESIS)
    row = reader.one(_NEWEST)
    return Ends(head, None if row is None else SignedHead(*row), last)


def refuse_forged(public: bytes, ends_: Ends) -> None:
    """Refuse (E3804) a signed head whose signature the key of the data directory did not make."""
    for one, where in ((ends_.last, "keys/journal.head"), (ends_.anchor, "the newest anchor")):
        if one is not None and not signed_by(public, "head", one.seq, one.hash, one.at_ms, one.signature):
            advice = "keep a copy of the data directory as evidence and examine it: interlock audit verify"
            raise Failure("E3804", f"the signature of {where} does not verify", resolution=advice)


def refuse_rewritten(reader: Reader, ends_: Ends) -> None:
    """Refuse (E3804) a journal that does not go through its signed heads, or has more unsigned than a crash leaves.

    The signatures themselves are for the caller to check.
    """
    for one, where in ((ends_.last, "keys/journal.head"), (ends_.anchor, "the newest anchor")):
        if one is None or (digest := hash_at(reader, one.seq)) in (one.hash, PURGED):
            continue
        what = "is missing" if digest is None else "is another one"
        words = f"the journal was rewritten or cut back: record {one.seq}, which {where} names, {what}"
        raise Failure("E3804", words, resolution=EVIDENCE)
    if ends_.last is not None and ends_.last.seq and (ends_.anchor is None or ends_.anchor.seq < ends_.last.seq):
        words = f"signed heads were removed: keys/journal.head names record {ends_.last.seq}, and no anchor does"
        raise Failure("E3804", words, resolution=EVIDENCE)
    if ends_.last is None and ends_.head[0] and expected(reader):
        raise Failure("E3804", "keys/journal.head is missing, though this data directory had one", resolution=RESTORE)
    if (what := unsigned_fault(reader, ends_)) is not None:
        raise Failure("E3804", what, resolution=ACCEPT)


def refuse_lost(reader: Reader, seq: int, digest: bytes) -> None:
    """Refuse (E3804) a store without a record that this process knows: one that lagged has taken its place."""
    there = hash_at(reader, seq)
    if there not in (digest, PURGED):
        what = "does not have" if there is None else "has another one in the place of"
        raise Failure("E3804", f"the database has gone back: it {what} record {seq}, which was there", resolution=LOST)


LOST = (
    "the server was probably replaced by one that lagged behind it: make the one that has the record the primary again,"
    " or see Failover in the how-to page on PostgreSQL"
)
EVIDENCE = f"keep a copy of the data directory as evidence and look at it: interlock audit verify; then {RESTORE}"
ACCEPT = (
    "keep a copy of the data directory as evidence and look at the records: interlock audit accept-tail. If you know"
    " that they are genuine, accept them on record: interlock audit accept-tail --reason TEXT --yes. Otherwise"
    f" {RESTORE}"
)

PURGED = b"purged"


def hash_at(reader: Reader, seq: int) -> bytes | None:
    """The hash of a record; PURGED for one inside a purged segment, None for one that is missing."""
    if seq == 0:
        return GENESIS
    row = reader.one("SELECT hash FROM journal WHERE seq = ?", (seq,))
    row = row or reader.one(_IN_SEGMENT, (seq, PURGED))
    return None if row is None else bytes(row[0])


def unsigned_fault(reader: Reader, ends_: Ends) -> str | None:
    """The reason why the unsigned end of a journal cannot be what a process left that was killed; None if it can."""
    if not ends_.unsigned:
        return None
    since = 0 if ends_.signed is None else ends_.signed.seq
    if ends_.unsigned > ANCHOR_EVERY:
        return (
            f"{ends_.unsigned:,} records from {since + 1} on are not signed, more than the {ANCHOR_EVERY:,} that a"
            " killed process can leave: signed heads were removed, or records were added by something else"
        )
    # Where no last head is kept, an earlier version wrote this, which signed a second after it was opened.
    base = None if ends_.last is None else cast("SignedHead", ends_.signed).at_ms
    for seq, body in reader.each(_UNSIGNED, (since, ends_.head[0])):
        made = _made_ms(body)
        if made is None:
            continue
        base = made if base is None else base
        if made - base > UNSIGNED_MS:
            return (
                f"record {seq} is not signed, though it was made {(made - base) // 1000:,} seconds after the newest"
                " signature: signed heads were removed, or records were added by something else"
            )
    return None


def _made_ms(body: Any) -> int | None:
    try:
        return round(datetime.fromisoformat(orjson.loads(body)["timestamp"]).timestamp() * 1000)
    except (ValueError, TypeError, KeyError, OverflowError):
        return None

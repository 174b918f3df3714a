"""Sealing: what must be kept but not be read at rest, encrypted so that any change to it shows.

Theory of operation. A home has a ring of 256-bit keys, the last of which is current. What is sealed carries the id of
its key in front, so that it opens as long as that key is on the ring:

    version (1) │ key id (8) │ nonce (12) │ AES-256-GCM ciphertext and tag

Each purpose has a key of its own, derived by HKDF, so that what was sealed for one cannot be passed off as another.
`about` binds a value to its place: a row copied over another row does not open there.

The ring is one small file, or one entry of the operating system's keyring. It is only ever replaced whole, so that a
process killed at any moment leaves either the old ring or the new one. To change the key, `rotate` puts a new one
at the end, the holders of sealed values seal them again, and `retire` drops the keys that nothing is sealed under.

INVARIANT: a key leaves the ring only while nothing in the database is sealed under it. For that, seal inside the unit
that writes what was sealed: `seal` looks at the ring each time, and units of all processes come one after the other.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Collection, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from interlock.core.errors import Failure
from interlock.core.record import dataclass
from interlock.store import facts
from interlock.store.expressions import hex_digits
from interlock.store.port import Reader, Transaction, Unit
from interlock.store.signing import own_secret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

Where = Literal["file", "keyring"]
Keys = dict[bytes, bytes]  # by id, oldest first
# The fact that holds the id of the key that seals, where a store has several data directories.
SEALED_BY = "sealed_by"
# The fact that holds the ids of the keys that archived checkpoints are sealed under: these keys are kept.
ARCHIVED_UNDER = "archived_under"

# How long an event loop waits for a keyring that was not asked before the loop needed it.
PATIENCE_S = 0.5
_VERSION = b"\x01"
_KEY, _ID, _NONCE = 32, 8, 12
_HEADER = len(_VERSION) + _ID

# Every column that holds something sealed, or nothing: what is needed no more may be emptied instead of removed. Rows
# of an older version hold clear text: text or JSON, which never begin so, and payloads as long as their row says.
_COLUMNS = (
    ("secret", "sealed"), ("ticket", "sealed"), ("ticket", "edited"), ("checkpoint", "body"), ("session", "state"),
    ("ticket", "params"), ("ticket", "preview"), ("ticket", "changed"), ("reservation", "result"), ("payload", "body"),
)  # fmt: skip
_SEALED = {"payload": " AND (length(body) != size OR ref LIKE 'undo:%')"}
_IN_USE = " UNION ".join(
    f"SELECT {hex_digits(f'substr({column}, {len(_VERSION) + 1}, {_ID})')} FROM {table}"  # noqa: S608 - constants
    f" WHERE substr({column}, 1, 1) = x'01'{_SEALED.get(table, '')}"
    for table, column in _COLUMNS
)


@dataclass(frozen=True, slots=True)
class Place:
    """A column whose rows stay for good, with the purpose its values are sealed for and what they are about, as SQL.

    `key` is the primary key, by which the rows are read in order, and `before` a value below all keys.
    """

    table: str
    key: str
    before: str | bytes
    column: str
    purpose: str
    about: str
    where: str = "1 = 1"


VALUE = "value"  # the purpose of private values of changes

# What no expiry takes away: it is sealed again when the key changes, so that the old key can go.
LASTING = (
    Place("session", "id", b"", "state", "session", hex_digits("id")),
    *(Place("ticket", "id", "", part, "shown", f"id || ' {part}'") for part in ("params", "preview", "changed")),
    Place("payload", "ref", "", "body", VALUE, "ref", "ref >= 'value:' AND ref < 'value;'"),
)
_AT_ONCE = 500


class Box:
    """Seals and opens with the keys of one home. Keys are made and loaded at first use."""

    def __init__(self, directory: Path, *, where: Where = "file") -> None:
        self._lock = directory / "secrets.lock"
        self._shelf: _Shelf = _FileShelf(directory / "secrets.key") if where == "file" else _KeyringShelf(directory)
        self._raw = b""
        # Whether the keys are in a file and have been read, so that looking at them is quick and makes none.
        self.in_hand = False
        self._keys: Keys = {}
        self._ciphers: dict[tuple[bytes, str], AESGCM] = {}

    @property
    def current(self) -> str:
        """The id of the key that seals now."""
        return next(reversed(self.look())).hex()

    def prepare(self) -> None:
        """Load the keys, and make the first one where they are in a keyring. May take long; call it on a thread."""
        if isinstance(self._shelf, _KeyringShelf):
            self.look()

    def ids(self) -> frozenset[str]:
        """The ids of the keys that there are; makes none. E3604 when they are damaged, E3804 when others read them."""
        raw = self._shelf.read()
        return frozenset(key_id.hex() for key_id in _parse(raw)) if raw else frozenset()

    def seal(self, plain: bytes, *, purpose: str, about: str = "", within: Transaction | None = None) -> bytes:
        """Encrypt. The purpose is one of a few fixed words; what it is about must be said again to open it.

        `within` is the transaction that stores the result. The keys are looked at once for all that it stores.
        """
        keys = self.look() if within is None else within.once(self.look)
        header = _VERSION + next(reversed(keys))
        # INVARIANT: no nonce comes twice under one key, so it is never drawn from a clock that tests can replay.
        nonce = os.urandom(_NONCE)
        cipher = self._cipher(keys, header[len(_VERSION) :], purpose)
        return header + nonce + cipher.encrypt(nonce, plain, header + about.encode())

    def open(self, sealed: bytes, *, purpose: str, about: str = "") -> bytes:
        """Decrypt; E3604 when the key is not here or the bytes are not what was sealed for this."""
        from cryptography.exceptions import InvalidTag

        header, nonce, body = sealed[:_HEADER], sealed[_HEADER : _HEADER + _NONCE], sealed[_HEADER + _NONCE :]
        key_id = header[len(_VERSION) :]
        keys = self._keys if key_id in self._keys else self.look()
        if not header.startswith(_VERSION) or key_id not in keys:
            raise Failure("E3604", "its sealing key is missing; restore the keys of the data directory from a backup")
        try:
            return self._cipher(keys, key_id, purpose).decrypt(nonce, body, header + about.encode())
        except (InvalidTag, ValueError):
            raise Failure("E3604", "it was changed after it was sealed, or sealed for something else") from None

    def holds(self, sealed: bytes) -> bool:
        """Whether something was sealed with a key that is still there."""
        return sealed[len(_VERSION) : _HEADER] in self.look()

    def rotate(self) -> str:
        """Make a new current key and return its id. The old ones still open what they sealed."""
        self.look()
        with self._locked():
            self._shelf.write(self._shelf.read() + os.urandom(_KEY))
        return self.current

    def retire(self, in_use: Collection[str]) -> int:
        """Drop every old key whose id is not among those in use; returns how many went."""
        with self._locked():
            keys = _parse(self._shelf.read())
            current = next(reversed(keys))
            ring = [key for key_id, key in keys.items() if key_id == current or key_id.hex() in in_use]
            if len(ring) < len(keys):
                self._shelf.write(b"".join(ring))
        self._ciphers.clear()
        self.look()
        return len(keys) - len(ring)

    def look(self) -> Keys:
        """Look at the keys, and make the first one where there is none. Raises what sealing would raise."""
        raw = self._shelf.read()
        if not raw:
            with self._locked():
                raw = self._shelf.read()
                if not raw:
                    raw = os.urandom(_KEY)
                    self._shelf.write(raw)
        if raw != self._raw:
            self._keys, self._raw = _parse(raw), raw
            self.in_hand = isinstance(self._shelf, _FileShelf)
            # A key that another process retired is not kept in memory either.
            self._ciphers = {name: cipher for name, cipher in list(self._ciphers.items()) if name[0] in self._keys}
        return self._keys

    @contextmanager
    def _locked(self) -> Generator[None]:
        """Alone among all processes that might change the ring."""
        try:
            file = open(self._lock, "ab", opener=_private)  # noqa: SIM115 - closed below; only opening may fail this way
        except OSError as error:
            raise _unwritable(error) from None
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _cipher(self, keys: Keys, key_id: bytes, purpose: str) -> AESGCM:
        cipher = self._ciphers.get((key_id, purpose))
        if cipher is None:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF

            derive = HKDF(algorithm=SHA256(), length=_KEY, salt=None, info=b"interlock sealing 1 " + purpose.encode())
            cipher = self._ciphers[key_id, purpose] = AESGCM(derive.derive(keys[key_id]))
        return cipher


def is_sealed(value: bytes) -> bool:
    """Whether bytes have the form of something sealed."""
    return value.startswith(_VERSION) and len(value) > _HEADER + _NONCE


def key_id_of(sealed: bytes) -> str:
    """The id of the key that something was sealed with."""
    return sealed[len(_VERSION) : _HEADER].hex()


def keys_in_use(reader: Reader) -> set[str]:
    """The ids of all keys that something in the database, or archived from it, is sealed under."""
    archived = (facts.get(reader, ARCHIVED_UNDER) or "").split()
    return {key_id for (key_id,) in reader.each(_IN_USE)} | {*archived}


def seal_again(box: Box, place: Place, after: str | bytes) -> Unit[str | bytes | None]:
    """A unit that seals the next rows of a place under the current key: those whose keys follow `after`.

    Returns the key of the last row, None at the end.

    Rows under the key that is current now stay as they are, so every run of the unit seals the same ones. What cannot
    be opened, and what an older version left in clear text, stays as it is too.
    """
    rows = (
        f"SELECT {place.key}, {place.column}, {place.about} FROM {place.table}"  # noqa: S608 - constants
        f" WHERE {place.where} AND {place.key} > ? AND substr({place.column}, 1, 1) = x'01'"
        f" ORDER BY {place.key} LIMIT {_AT_ONCE}"
    )
    change = f"UPDATE {place.table} SET {place.column} = ? WHERE {place.key} = ?"  # noqa: S608 - constants

    # Asked before the unit, which may run more than once: looking for the current key makes one where there is none.
    current = box.current

    def unit(transaction: Transaction) -> str | bytes | None:
        last: str | bytes | None = None
        for last, sealed, about in transaction.all(rows, (after,)):
            if key_id_of(sealed) == current:
                continue
            try:
                plain = box.open(sealed, purpose=place.purpose, about=about)
            except Failure:
                continue
            transaction.execute(change, (box.seal(plain, purpose=place.purpose, about=about), last))
        return last

    return unit


def _parse(raw: bytes) -> Keys:
    if not raw or len(raw) % _KEY:
        words = "the sealing keys are damaged; restore them from a backup"
        raise Failure("E3604", words, resolution="restore keys/secrets.key from a backup")
    keys = [raw[at : at + _KEY] for at in range(0, len(raw), _KEY)]
    return {hashlib.sha256(b"interlock sealing key" + key).digest()[:_ID]: key for key in keys}


# Where the ring is kept


class _Shelf(Protocol):
    """A place for the ring. Empty until it is first written, and written under the lock only."""

    def read(self) -> bytes: ...

    def write(self, raw: bytes) -> None: ...


class _FileShelf:
    """A file that its owner alone can read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = str(path)
        self._seen: tuple[int, ...] = ()
        self._raw = b""

    def read(self) -> bytes:
        """The ring. The file is looked at every time, and read when it is not the one that was read before."""
        try:
            seen = _looks(os.stat(self._name))
            if seen != self._seen:
                raw = own_secret(self._path)
                _parse(raw)  # an empty file is no new home: what was sealed before must not be lost in silence
                self._raw, self._seen = raw, seen
            return self._raw
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise Failure("E3604", f"the key `{self._path.name}` cannot be read: {error.strerror}") from None

    def write(self, raw: bytes) -> None:
        staged = self._path.with_suffix(".new")
        try:
            with open(staged, "wb", opener=_private) as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            staged.replace(self._path)
            directory = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise _unwritable(error) from None


class _KeyringShelf:
    """An entry of the operating system's keyring, under a name that stays with the home when the home is moved.

    A keyring may take seconds to answer, or wait for a person to unlock it. So it is asked on a thread, and what it
    said counts until the ring changes. The file `secrets.changed` tells that to all processes on the home: it gets
    another content with every write, and says "changing" from before a write until after it. While it says so, nothing
    is remembered; a process that was killed in between leaves a ring that is asked for each time, and never an old one.
    """

    def __init__(self, directory: Path) -> None:
        self._named = directory / "secrets.keyring"
        self._changed = directory / "secrets.changed"
        self._mutex = threading.Lock()
        self._open_question: _Question | None = None
        self._known: tuple[_Seen, bytes] | None = None

    def read(self) -> bytes:
        """The ring. E3601 where the keyring does not answer: soon on an event loop, which has others to serve."""
        until = time.monotonic() + PATIENCE_S if _on_event_loop() else None
        while True:
            seen = self._look()
            known = self._known
            if known is not None and known[0] == seen:
                return known[1]
            question = self._ask(seen)
            try:
                raw = question.answer.result(None if until is None else max(0.0, until - time.monotonic()))
            except TimeoutError:
                raise _no_keyring("it does not answer") from None
            if question.seen == seen:
                return raw

    def write(self, raw: bytes) -> None:
        import keyring
        from keyring.errors import KeyringError

        name = self._name()
        self._mark(_CHANGING)
        try:
            keyring.set_password("interlock", name, raw.hex())
        except KeyringError as error:
            raise _no_keyring(type(error).__name__) from None
        self._mark(os.urandom(16).hex().encode())
        self._known = self._look(), raw

    def _name(self) -> str:
        return hashlib.sha256(own_secret(self._named)).hexdigest()[:16]

    def _look(self) -> _Seen:
        """Return the state of the files that show whether the ring has changed."""
        try:
            return tuple(_looks(os.stat(path)) for path in (self._named, self._changed))
        except FileNotFoundError:
            return ()

    def _ask(self, seen: _Seen) -> _Question:
        """Ask the keyring on a thread; a question that is still open is shared."""
        with self._mutex:
            if self._open_question is None or self._open_question.answer.done():
                self._open_question = _Question(seen)
                threading.Thread(
                    target=self._answer, args=(self._open_question,), name="interlock-keyring", daemon=True
                ).start()
            return self._open_question

    def _answer(self, question: _Question) -> None:
        try:
            name = self._name()
            if not self._changed.exists():
                self._mark(os.urandom(16).hex().encode())  # a home of an older version
                question.seen = self._look()
            settled = self._changed.read_bytes() != _CHANGING
            raw = _entry(name)
            if settled and raw and question.seen == self._look():
                self._known = question.seen, raw
            question.answer.set_result(raw)
        except OSError as error:
            words = f"the sealing keys cannot be read: {error.strerror}"
            question.answer.set_exception(Failure("E3604", words))
        except BaseException as error:  # noqa: BLE001 - raised where somebody waits for it
            question.answer.set_exception(error)

    def _mark(self, content: bytes) -> None:
        staged = self._changed.with_suffix(f".{os.urandom(8).hex()}")
        try:
            with open(staged, "wb", opener=_private) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            staged.replace(self._changed)
        except OSError as error:
            raise _unwritable(error) from None


_Seen = tuple[tuple[int, ...], ...]
_CHANGING = b"changing"


class _Question:
    """A question to the keyring, and what the files looked like when it was asked."""

    __slots__ = ("answer", "seen")

    def __init__(self, seen: _Seen) -> None:
        self.seen = seen
        self.answer: Future[bytes] = Future()


def _on_event_loop() -> bool:
    import asyncio  # a command that only reads does without it

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _entry(name: str) -> bytes:
    import keyring
    from keyring.errors import KeyringError

    try:
        return bytes.fromhex(keyring.get_password("interlock", name) or "")
    except KeyringError as error:
        failure = _no_keyring(type(error).__name__)
    except ValueError:
        failure = Failure("E3604", "the keyring's entry for this data directory is damaged; restore it from a backup")
    raise failure


def _looks(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_mode)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _unwritable(error: OSError) -> Failure:
    return Failure("E3801", f"the sealing keys cannot be written: {error.strerror}")


def _no_keyring(why: str) -> Failure:
    return Failure("E3601", f"the operating system's keyring cannot be used ({why}); unlock it")

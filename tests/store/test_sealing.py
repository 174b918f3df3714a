"""Sealing: opens for its key, purpose and place, and for nothing else."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

import keyring
import keyring.backend
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keyring.errors import KeyringLocked

from interlock import Failure, Interlock
from interlock.store.home import Home
from interlock.store.sealing import LASTING, Box, key_id_of, seal_again
from tests.support import forked
from tests.support.calls import until


class _Said(TypedDict):
    purpose: str
    about: str


LOCAL: _Said = {"purpose": "test", "about": "here"}


class MemoryKeyring(keyring.backend.KeyringBackend):
    """A FAKE of an operating system's keyring."""

    priority = 1  # pyright: ignore[reportAssignmentType,reportIncompatibleMethodOverride] - as keyring's own backends do

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[tuple[str, str], str] = {}
        self.locked = False
        self.asked = 0
        self.answers = threading.Event()
        self.answers.set()

    def get_password(self, service: str, username: str) -> str | None:
        self.asked += 1
        assert self.answers.wait(60)
        if self.locked:
            raise KeyringLocked
        return self.entries.get((service, username))

    def set_password(self, service: str, username: str, password: str) -> None:
        if self.locked:
            raise KeyringLocked
        self.entries[service, username] = password


@pytest.fixture
def ring() -> Iterator[MemoryKeyring]:
    before = keyring.get_keyring()
    fake = MemoryKeyring()
    keyring.set_keyring(fake)
    yield fake
    fake.answers.set()
    keyring.set_keyring(before)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Box:
    return Box(tmp_path_factory.mktemp("keys"))


def _refusal(box: Box, sealed: bytes, *, purpose: str = "test", about: str = "here") -> str:
    with pytest.raises(Failure) as caught:
        box.open(sealed, purpose=purpose, about=about)
    return caught.value.code


@given(plain=st.binary(max_size=200), purpose=st.sampled_from(["secret", "ticket"]), about=st.text(max_size=20))
def test_what_was_sealed_opens_as_it_was_and_shows_nothing(shared: Box, plain: bytes, purpose: str, about: str) -> None:
    sealed = shared.seal(plain, purpose=purpose, about=about)
    assert shared.open(sealed, purpose=purpose, about=about) == plain
    assert shared.seal(plain, purpose=purpose, about=about) != sealed
    assert len(plain) < 4 or plain not in sealed


@given(data=st.data(), plain=st.binary(max_size=50))
def test_any_changed_or_missing_byte_shows(shared: Box, data: st.DataObject, plain: bytes) -> None:
    sealed = shared.seal(plain, **LOCAL)
    at = data.draw(st.integers(0, len(sealed) - 1))
    flipped = bytes([sealed[at] ^ data.draw(st.integers(1, 255))])
    assert _refusal(shared, sealed[:at] + flipped + sealed[at + 1 :]) == "E3604"
    assert _refusal(shared, sealed[:at]) == "E3604"


def test_what_was_sealed_for_one_purpose_or_place_does_not_open_for_another(shared: Box) -> None:
    sealed = shared.seal(b"value", **LOCAL)
    assert _refusal(shared, sealed, purpose="other") == "E3604"
    assert _refusal(shared, sealed, about="there") == "E3604"


@pytest.mark.supports("EXEC-08")
def test_another_key_does_not_open_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    sealed = Box(tmp_path / "a").seal(b"value", **LOCAL)
    assert _refusal(Box(tmp_path / "b"), sealed) == "E3604"


def test_the_key_file_is_its_owners_alone_and_refused_when_it_is_not(tmp_path: Path) -> None:
    box = Box(tmp_path)
    sealed = box.seal(b"value", **LOCAL)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"secrets.key": 0o600, "secrets.lock": 0o600}
    (tmp_path / "secrets.key").chmod(0o640)
    with pytest.raises(Failure) as caught:
        Box(tmp_path).open(sealed, **LOCAL)
    assert caught.value.code == "E3804"
    assert "chmod 600" in caught.value.message


@pytest.mark.parametrize("content", [b"", b"short", bytes(33)])
def test_a_damaged_key_file_is_said_to_be_damaged(tmp_path: Path, content: bytes) -> None:
    box = Box(tmp_path)
    sealed = box.seal(b"value", **LOCAL)
    (tmp_path / "secrets.key").write_bytes(content)
    assert _refusal(Box(tmp_path), sealed) == "E3604"


def test_a_key_file_that_cannot_be_written_or_read_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(Failure) as unwritable:
        Box(tmp_path / "absent").seal(b"value", **LOCAL)
    assert unwritable.value.code == "E3801"
    (tmp_path / "secrets.key").mkdir(mode=0o700)
    with pytest.raises(Failure) as unreadable:
        Box(tmp_path).seal(b"value", **LOCAL)
    assert unreadable.value.code == "E3604"


@pytest.mark.parametrize("where", ["file", "keyring"])
def test_after_rotation_old_things_open_until_their_key_is_retired(
    tmp_path: Path, where: str, ring: MemoryKeyring
) -> None:
    box, other = (Box(tmp_path, where="file" if where == "file" else "keyring") for _ in range(2))
    first = box.seal(b"first", **LOCAL)
    assert other.open(first, **LOCAL) == b"first"
    second_id = box.rotate()
    # The other process had loaded the old ring: it seals under the new key all the same.
    second = other.seal(b"second", **LOCAL)
    assert key_id_of(second) == second_id == box.current != key_id_of(first)
    assert box.open(first, **LOCAL) == b"first"
    third_id = box.rotate()
    assert box.retire({second_id}) == 1
    assert box.retire({second_id}) == 0
    assert _refusal(box, first) == "E3604"
    assert box.open(second, **LOCAL) == b"second"
    assert box.current == third_id
    assert box.retire(()) == 1
    assert _refusal(box, second) == "E3604"


def test_a_keyring_holds_the_key_and_no_file_does(tmp_path: Path, ring: MemoryKeyring) -> None:
    box = Box(tmp_path / "keys", where="keyring")
    (tmp_path / "keys").mkdir()
    sealed = box.seal(b"value", **LOCAL)
    assert not (tmp_path / "keys" / "secrets.key").exists()
    (kept,) = ring.entries.values()
    files = b"".join(path.read_bytes() for path in (tmp_path / "keys").iterdir())
    assert bytes.fromhex(kept) not in files
    (tmp_path / "keys").rename(tmp_path / "moved")
    assert Box(tmp_path / "moved", where="keyring").open(sealed, **LOCAL) == b"value"


def test_a_locked_or_damaged_keyring_is_said_to_be_so(tmp_path: Path, ring: MemoryKeyring) -> None:
    sealed = Box(tmp_path, where="keyring").seal(b"value", **LOCAL)
    ring.locked = True
    assert _refusal(Box(tmp_path, where="keyring"), sealed) == "E3601"
    ring.locked = False
    ring.entries = dict.fromkeys(ring.entries, "no hex")
    assert _refusal(Box(tmp_path, where="keyring"), sealed) == "E3604"


def test_a_keyring_is_asked_when_the_ring_has_changed_and_not_for_every_seal(
    tmp_path: Path, ring: MemoryKeyring
) -> None:
    box, other = Box(tmp_path, where="keyring"), Box(tmp_path, where="keyring")
    box.seal(b"value", **LOCAL)
    asked = ring.asked
    for _ in range(100):
        box.seal(b"value", **LOCAL)
    assert ring.asked == asked
    changed = other.rotate()
    assert key_id_of(box.seal(b"value", **LOCAL)) == changed
    (tmp_path / "secrets.changed").write_bytes(b"changing")  # a process was killed while it changed the ring
    entry = ring.entries.copy()
    key_id = key_id_of(box.seal(b"value", **LOCAL))
    ring.entries = {name: value + os.urandom(32).hex() for name, value in entry.items()}
    assert key_id_of(box.seal(b"value", **LOCAL)) != key_id, "nothing is remembered while the ring may change"


async def test_a_keyring_that_hangs_does_not_hold_the_event_loop(tmp_path: Path, ring: MemoryKeyring) -> None:
    sealed = Box(tmp_path, where="keyring").seal(b"value", **LOCAL)
    box = Box(tmp_path, where="keyring")
    ring.answers.clear()
    with pytest.raises(Failure) as refused:
        box.open(sealed, **LOCAL)
    assert (refused.value.code, "does not answer" in refused.value.message) == ("E3601", True)
    ring.answers.set()
    assert await asyncio.to_thread(box.open, sealed, **LOCAL) == b"value"
    ring.answers.clear()
    assert box.open(sealed, **LOCAL) == b"value", "what was said once is remembered"
    assert box.seal(b"value", **LOCAL)


async def test_a_home_opens_while_its_keyring_takes_its_time(tmp_path: Path, ring: MemoryKeyring) -> None:
    ring.answers.clear()
    opening = asyncio.ensure_future(
        Interlock.open(tmp_path / "home", secrets_key="keyring", housekeeping=False).start()
    )
    await until(lambda: ring.asked)  # the loop turns, although the keyring does not answer
    await asyncio.sleep(0.05)
    assert not opening.done()
    assert ring.asked == 1
    ring.answers.set()
    app = await opening
    try:
        asked = ring.asked
        sealed = app.box.seal(b"value", **LOCAL)
        assert app.box.open(sealed, **LOCAL) == b"value"
        assert ring.asked == asked
    finally:
        await app.close()


def test_processes_that_start_at_once_share_one_key(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from interlock.store.sealing import Box;"
        "sys.stdin.read(); print(Box(Path(sys.argv[1])).current)"
    )
    # They all wait for the end of one pipe, and then begin together.
    reader, writer = os.pipe()
    children = [
        subprocess.Popen([*forked.python(), "-c", program, str(tmp_path)], stdin=reader, stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    os.close(reader)
    os.close(writer)
    ids = {child.communicate(timeout=60)[0] for child in children}
    assert len(ids) == 1


def test_importing_and_making_a_box_loads_neither_cryptography_nor_keyring(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from interlock.store.sealing import Box; Box(Path('.'));"
        "import interlock.authority.secrets, interlock.authority.vault;"
        "print([name for name in ('cryptography', 'keyring', 'hvac', 'requests') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[]"


async def test_sealing_again_does_the_same_each_time_it_runs_though_the_key_changes_between(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path / "home", housekeeping=False) as app:
        box = Box(Home(tmp_path / "home").keys)
        before = box.seal(b"{}", purpose="session", about="00")
        await app.journal.commit(lambda tx: tx.execute("INSERT INTO session VALUES (x'00', 1, ?)", (before,)).rowcount)
        place = next(one for one in LASTING if one.table == "session")
        unit = seal_again(box, place, place.before)
        for _ in range(2):
            assert await app.journal.commit(unit) == b"\x00"
            assert app.journal.reader.all("SELECT state FROM session") == [(before,)]
            box.rotate()
        assert await app.journal.commit(seal_again(box, place, place.before)) == b"\x00"
        ((after,),) = app.journal.reader.all("SELECT state FROM session")
    assert key_id_of(after) == box.current
    assert box.open(after, purpose="session", about="00") == b"{}"


def test_a_key_that_another_process_retired_is_not_kept_in_memory(tmp_path: Path) -> None:
    ours, theirs = Box(tmp_path), Box(tmp_path)
    sealed = ours.seal(b"x", purpose="tests")
    assert theirs.open(sealed, purpose="tests") == b"x"
    theirs.rotate()
    assert theirs.retire(()) == 1
    ours.seal(b"y", purpose="tests")
    old = key_id_of(sealed)
    assert old not in {key_id.hex() for key_id, _ in ours._ciphers}  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(Failure) as caught:
        ours.open(sealed, purpose="tests")
    assert caught.value.code == "E3604"

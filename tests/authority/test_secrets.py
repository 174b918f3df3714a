"""Credentials: kept encrypted, lent to one call, void afterwards, and never to be seen."""

from __future__ import annotations

import asyncio
import base64
import copy
import itertools
import json
import os
import pickle
import pty
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import FrameType
from typing import Any, cast
from urllib.parse import quote, quote_plus

import orjson
import pytest
import pytest_asyncio
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from interlock import Clock, Failure
from interlock.authority import secrets as module
from interlock.authority.secrets import Credential, Lease, Secrets, open_lease
from interlock.cli.output import Session
from interlock.cli.secrets import secrets
from interlock.privacy.scrub import holds, scrub
from interlock.store import sealing
from interlock.store.home import Home
from interlock.store.homes import home_at
from interlock.store.journal import Journal
from interlock.store.sealing import Box
from interlock.store.signing import Signer
from interlock.store.tables import metadata
from interlock.testing import FakeClock
from tests.support import forked
from tests.support.cli import INTERLOCK, Cli
from tests.support.stores import everything_in, opened

API_KEY, PASSWORD = "sk-secret123456", "supersecret"


@pytest.fixture
def time() -> FakeClock:
    return FakeClock()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return home_at(tmp_path / "home")


@pytest_asyncio.fixture
async def journal(home: Home, time: FakeClock) -> AsyncGenerator[Journal]:
    opened = Journal(home, clock=time.clock, signer=Signer(home.keys))
    yield opened
    await opened.close()


@pytest.fixture
def store(home: Home, journal: Journal, time: FakeClock) -> Secrets:
    return Secrets(journal, Box(home.keys), time.clock)


def refusal(function: Callable[[], object]) -> str:
    with pytest.raises(Failure) as caught:
        function()
    return caught.value.code


async def fetch_refusal(store: Secrets, name: str) -> str:
    with pytest.raises(Failure) as caught:
        await store.fetch(name)
    return caught.value.code


# The embedded store


async def test_what_was_set_is_what_is_fetched(store: Secrets, time: FakeClock) -> None:
    await store.set("github/token", "ghp_first", by="local:alice")
    time.advance(1)
    await store.set("github/token", "ghp_second", by="local:alice", expires_ms=time.now_ms + 5000)
    credential = await store.fetch("github/token")
    assert credential.reveal() == "ghp_second"
    assert (credential.name, credential.slot, credential.version) == ("github/token", "main", str(time.now_ms))
    assert credential.expires_ms == time.now_ms + 5000
    assert [tuple(kept) for kept in await store.names()] == [
        ("github/token", "main", time.now_ms, time.now_ms + 5000, 0)
    ]


@pytest.mark.supports("EXEC-08")
async def test_the_four_errors_of_the_embedded_store(
    store: Secrets, home: Home, journal: Journal, time: FakeClock
) -> None:
    await store.set("short", "value-1", by="me", expires_ms=time.now_ms + 1000)
    await store.set("long", "value-2", by="me")
    assert await fetch_refusal(store, "absent") == "E3602"
    time.advance(1)
    assert await fetch_refusal(store, "short") == "E3603"
    (home.keys / "secrets.key").write_bytes(os.urandom(32))
    wrong_key = Secrets(journal, Box(home.keys), time.clock)
    assert await fetch_refusal(wrong_key, "long") == "E3604"
    await journal.close()
    assert await fetch_refusal(store, "long") == "E3601"


@pytest.mark.supports("EXEC-08")
@pytest.mark.proves("AUDIT-07")
@pytest.mark.proves("EXEC-07")
async def test_no_file_of_the_home_holds_a_value_in_any_form(
    store: Secrets, home: Home, journal: Journal, time: FakeClock
) -> None:
    await store.set("payments/api_key", API_KEY, by="me")
    await store.set("payments/password", PASSWORD, by="me", slot="spare")
    lease = await open_lease(store, ["payments/api_key", "payments/password"], lifetime_s=9, clock=time.clock)
    shown, found = scrub({"error": f"401 for {API_KEY}", PASSWORD: [PASSWORD]}, lease.values())
    await journal.append("authority", "test", orjson.dumps(shown))
    await lease.close()
    await store.rest("payments/api_key", "main", 1000)
    await store.rotate_key(by="me")
    await store.remove("payments/password", by="me")
    held = everything_in(home)
    await journal.close()
    held += everything_in(home)
    assert found
    assert b"[REDACTED]" in held
    assert b"payments/api_key" in held
    for secret in (API_KEY.encode(), PASSWORD.encode()):
        for form in (secret, base64.b64encode(secret).rstrip(b"="), secret.hex().encode(), secret[::-1]):
            assert form not in held


async def test_a_row_moved_elsewhere_or_given_a_longer_life_does_not_open(
    store: Secrets, home: Home, time: FakeClock
) -> None:
    await store.set("mine", "value-of-mine", by="me", expires_ms=time.now_ms + 1000)
    await store.set("yours", "value-of-yours", by="me")
    with opened(home) as database:
        database.execute(
            "UPDATE secret SET sealed = (SELECT sealed FROM secret WHERE name = 'yours') WHERE name = 'mine'"
        )
    assert await fetch_refusal(store, "mine") == "E3604"
    await store.set("mine", "value-of-mine", by="me", expires_ms=time.now_ms + 1000)
    with opened(home) as database:
        database.execute("UPDATE secret SET expires_ms = NULL WHERE name = 'mine'")
    assert await fetch_refusal(store, "mine") == "E3604"


@pytest.mark.supports("EXEC-08")
async def test_a_rate_limited_slot_rests_and_the_pool_goes_on(store: Secrets, time: FakeClock) -> None:
    for slot in ("a", "b", "c"):
        await store.set("api", f"key-{slot}", by="me", slot=slot)
    served: list[str] = []
    for _ in range(3):
        lease = await open_lease(store, ["api"], lifetime_s=30, clock=time.clock)
        served.append(lease["api"].reveal())
        await lease.rate_limited("api", 60_000 + 1000 * len(served))
        assert lease["api"].reveal() == served[-1], "a running call keeps what it was lent"
        await lease.close()
    assert served == ["key-a", "key-b", "key-c"]
    with pytest.raises(Failure) as caught:
        await store.fetch("api")
    assert (caught.value.code, caught.value.retry_after_ms) == ("E3504", 61_000)
    time.advance(61)
    assert (await store.fetch("api")).slot == "a"


async def test_a_rest_is_never_shortened_and_never_for_ever(store: Secrets, time: FakeClock) -> None:
    await store.set("api", "key-main", by="me")
    await store.rest("api", "main", 10**15)
    await store.rest("api", "main", 1)
    assert (await store.names())[0].resting_until_ms == time.now_ms + module.LONGEST_REST_MS
    await store.set("api", "key-new", by="me")
    assert (await store.fetch("api")).reveal() == "key-new", "a new value has met no limit yet"


async def test_an_expired_slot_is_passed_over(store: Secrets, time: FakeClock) -> None:
    await store.set("api", "key-a", by="me", slot="a", expires_ms=time.now_ms + 1)
    await store.set("api", "key-b", by="me", slot="b")
    time.advance(1)
    assert (await store.fetch("api")).slot == "b"


async def test_removing_forgets_a_slot_or_all(store: Secrets) -> None:
    for slot in ("a", "b", "c"):
        await store.set("api", f"key-{slot}", by="me", slot=slot)
    assert await store.remove("api", by="me", slot="b") == 1
    assert [kept.slot for kept in await store.names()] == ["a", "c"]
    assert await store.remove("api", by="me") == 2
    for slot in (None, "a"):
        with pytest.raises(Failure) as caught:
            await store.remove("api", by="me", slot=slot)
        assert caught.value.code == "E3602"


async def test_every_change_is_on_record_with_its_author_and_without_its_value(
    store: Secrets, journal: Journal
) -> None:
    await store.set("api", "key-value", by="local:alice", slot="a")
    await store.rest("api", "a", 10)
    await store.rotate_key(by="local:bob")
    await store.remove("api", by="local:carol")
    rows = journal.reader.all("SELECT kind, call, body FROM journal ORDER BY seq")
    bodies = [orjson.loads(body) for _, _, body in rows]
    assert {kind for kind, _, _ in rows} == {"authority"}
    assert [(body["act"], body["by"], body["call"]) for body in bodies] == [
        ("secret.set", "local:alice", "secret:api"),
        ("secret.resting", "interlock", "secret:api"),
        ("secret.key_rotated", "local:bob", "secret"),
        ("secret.removed", "local:carol", "secret:api"),
    ]
    assert all(body["slot"] == "a" for body in bodies if body["call"] == "secret:api")


@pytest.mark.parametrize(
    ("name", "value", "options"),
    [
        ("Upper", "value", {}),
        ("a/../b", "value", {}),
        ("a" * 201, "value", {}),
        ("fine\n", "value", {}),
        ("fine", "", {}),
        ("fine", "very private " * 6000, {}),
        ("fine", "private \ud800", {}),
        ("fine", "private", {"slot": "No Slot"}),
        ("fine", "private", {"expires_ms": 1}),
    ],
)
async def test_what_cannot_be_stored_is_refused_without_being_quoted(
    name: str, value: str, options: dict[str, Any], store: Secrets
) -> None:
    with pytest.raises(Failure) as caught:
        await store.set(name, value, by="me", **options)
    assert caught.value.code == "E3004"
    assert "private" not in caught.value.message
    assert await store.names() == []


# Changing the key


async def test_after_a_rotation_only_the_new_key_is_left_and_opens_everything(store: Secrets, home: Home) -> None:
    for number in range(5):
        await store.set(f"name-{number}", f"value-{number}", by="me")
    before = (home.keys / "secrets.key").read_bytes()
    assert await store.rotate_key(by="me") == []
    after = (home.keys / "secrets.key").read_bytes()
    assert len(after) == 32
    assert after != before
    assert [(await store.fetch(f"name-{number}")).reveal() for number in range(5)] == [
        f"value-{number}" for number in range(5)
    ]


async def test_a_key_stays_while_anything_else_is_sealed_under_it(store: Secrets, home: Home, journal: Journal) -> None:
    box = Box(home.keys)
    sealed = box.seal(b"how to go on", purpose="ticket")
    ticket = metadata.tables["ticket"]
    values = {
        one.name: sealed if one.name == "sealed" else one.type.python_type() for one in ticket.columns
    } | dict.fromkeys(("params", "preview", "changed"), b"")
    insert = f"INSERT INTO ticket ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})"
    await journal.commit(lambda transaction: transaction.execute(insert, tuple(values.values())))
    await store.rotate_key(by="me")
    assert box.open(sealed, purpose="ticket") == b"how to go on"
    await journal.commit(lambda transaction: transaction.execute("DELETE FROM ticket"))
    await store.rotate_key(by="me")
    assert refusal(lambda: Box(home.keys).open(sealed, purpose="ticket")) == "E3604"


async def test_a_rotation_leaves_what_cannot_be_opened_and_says_which(store: Secrets, home: Home) -> None:
    await store.set("good", "value-good", by="me")
    await store.set("torn", "value-torn", by="me")
    with opened(home) as database:
        database.execute("UPDATE secret SET sealed = substr(sealed, 1, 30) WHERE name = 'torn'")
    assert [kept.name for kept in await store.rotate_key(by="me")] == ["torn"]
    assert (await store.fetch("good")).reveal() == "value-good"
    assert await fetch_refusal(store, "torn") == "E3604"


async def test_credentials_set_and_read_while_keys_change_are_all_readable(store: Secrets, journal: Journal, home: Home,
                                                                          time: FakeClock) -> None:  # fmt: skip
    other = Secrets(journal, Box(home.keys), time.clock)
    await store.set("steady", "value-steady", by="me")

    async def write(number: int) -> None:
        await other.set(f"name-{number}", f"value-{number}", by="me")
        assert (await other.fetch("steady")).reveal() == "value-steady"

    await asyncio.gather(*(write(number) if number % 4 else store.rotate_key(by="me") for number in range(20)))
    for kept in await store.names():
        assert (await other.fetch(kept.name)).reveal() == kept.name.replace("name", "value").replace(
            "steady", "value-steady"
        )


def test_killed_at_any_line_a_rotation_leaves_everything_readable(tmp_path: Path) -> None:
    """Kill -9 at every line of the functions through which a rotation changes anything, one after the other."""
    program = "from tests.authority import test_secrets; test_secrets.kill_at_every_line()"
    done = subprocess.run(
        [*forked.python(), "-c", program], env={**os.environ, "HOME_PATH": str(tmp_path / "home")},
        capture_output=True, text=True, check=False, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40


_WATCHED = frozenset(
    {(sealing.__file__, name) for name in ("rotate", "retire", "write")}
    | {(module.__file__, name) for name in ("rotate_key", "reseal_all", "unit")}
)


def kill_at_every_line() -> None:
    """In a process of its own: fork, die at the nth line, look whether all is there; until a child lives to the end."""
    home = home_at(os.environ["HOME_PATH"])
    values = {f"name-{number}": f"value-{number}" for number in range(2)}

    async def prepare(store: Secrets) -> None:
        for name, value in values.items():
            await store.set(name, value, by="me")

    async def rotate(store: Secrets) -> None:
        await store.rotate_key(by="me")

    async def check(store: Secrets) -> None:
        for name, value in values.items():
            assert (await store.fetch(name)).reveal() == value

    asyncio.run(_with_store(home, prepare))
    asyncio.run(_with_store(home, rotate))
    killed = 0
    while True:
        child = os.fork()
        if child == 0:
            _die_at_line(killed + 1)
            asyncio.run(_with_store(home, rotate))
            os._exit(0)
        died = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        asyncio.run(_with_store(home, check))
        if not died:
            break
        killed += 1
    assert (home.keys / "secrets.key").stat().st_size == 32, "rotating to the end drops what the killed have left"
    print(killed)


async def _with_store(home: Home, work: Callable[[Secrets], Any]) -> None:
    journal = Journal(home, clock=Clock(), signer=Signer(home.keys))
    await work(Secrets(journal, Box(home.keys), Clock()))
    await journal.close()


def _die_at_line(last: int) -> None:
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if (frame.f_code.co_filename, frame.f_code.co_name) not in _WATCHED:
            return None
        if event == "line":
            lines += 1
            if lines == last:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


# What a call gets


@pytest.mark.proves("EXEC-07")
async def test_a_lease_holds_what_was_named_for_as_long_as_the_call_may_take(store: Secrets, time: FakeClock) -> None:
    await store.set("github/token", "ghp_value", by="me")
    await store.set("other/token", "not asked for", by="me")
    lease = await open_lease(store, ["github/token"], lifetime_s=30, clock=time.clock)
    credential = lease["github/token"]
    assert list(lease) == ["github/token"]
    assert refusal(lambda: lease["other/token"]) == "E3206"
    time.advance(29.9)
    assert credential.reveal() == "ghp_value"
    time.advance(0.1)
    assert refusal(credential.reveal) == "E3603"
    assert lease.values() == ["ghp_value"], "what a late call says must still be scrubbed"
    await lease.close()


@pytest.mark.proves("EXEC-07")
async def test_when_the_call_has_ended_its_credentials_are_void_and_zeroed(store: Secrets, time: FakeClock) -> None:
    await store.set("github/token", "ghp_value", by="me")
    lease = await open_lease(store, ["github/token"], lifetime_s=30, clock=time.clock)
    credential = lease["github/token"]
    held: bytearray = credential._value  # pyright: ignore[reportPrivateUsage] - that it is zeroed is what is tested
    await lease.close()
    await lease.close()
    assert bytes(held) == bytes(9)
    assert refusal(credential.reveal) == "E3603"
    assert refusal(lease.values) == "E3603", "an empty list would read as nothing to hide"


async def test_a_rotation_reaches_the_next_call_and_no_running_one(store: Secrets, time: FakeClock) -> None:
    await store.set("api", "value-first", by="me")
    running = await open_lease(store, ["api"], lifetime_s=30, clock=time.clock)
    await store.set("api", "value-second", by="me")
    await store.rotate_key(by="me")
    following = await open_lease(store, ["api"], lifetime_s=30, clock=time.clock)
    assert (running["api"].reveal(), following["api"].reveal()) == ("value-first", "value-second")
    await running.close()
    await following.close()


async def test_leases_of_concurrent_calls_are_independent(store: Secrets, time: FakeClock) -> None:
    await store.set("api", "value-shared", by="me")

    async def lend() -> Lease:
        return await open_lease(store, ["api"], lifetime_s=30, clock=time.clock)

    leases = await asyncio.gather(*(lend() for _ in range(20)))
    for number, lease in enumerate(leases):
        assert lease["api"].reveal() == "value-shared"
        await lease.close()
        assert all(later["api"].reveal() == "value-shared" for later in leases[number + 1 :])


async def test_when_one_of_several_cannot_be_had_none_is_kept(store: Secrets, time: FakeClock) -> None:
    await store.set("first", "value-first", by="me")
    lent: list[Credential] = []
    fetch = store.fetch

    async def watched(name: str, lifetime_s: float | None = None) -> Credential:
        lent.append(await fetch(name, lifetime_s))
        return lent[-1]

    store.fetch = watched
    with pytest.raises(Failure) as caught:
        await open_lease(store, ["first", "absent"], lifetime_s=30, clock=time.clock)
    assert caught.value.code == "E3602"
    assert [refusal(one.reveal) for one in lent] == ["E3603"]


# Never to be seen


async def test_no_way_of_showing_a_credential_shows_its_value(store: Secrets, time: FakeClock) -> None:
    await store.set("api", API_KEY, by="me")
    lease = await open_lease(store, ["api"], lifetime_s=30, clock=time.clock)
    credential = lease["api"]
    shown = [repr(credential), str(credential), f"{credential}", f"{credential!r:>40}", repr(lease), str([credential])]
    for refuse in (pickle.dumps, copy.copy, copy.deepcopy, json.dumps, orjson.dumps):
        with pytest.raises(TypeError) as caught:
            refuse(credential)
        shown.append(str(caught.value))
    with pytest.raises(TypeError):
        vars(credential)
    time.advance(30)
    try:
        credential.reveal()
    except Failure as failure:
        trace = traceback.TracebackException.from_exception(failure, capture_locals=True)
        shown.append("".join(trace.format()))
    await lease.close()
    assert len(shown) == 12
    assert all(API_KEY not in text for text in shown)


def test_a_thread_that_reads_while_it_is_wiped_sees_the_value_or_a_refusal() -> None:
    value = "x" * 5000
    for _ in range(50):
        credential = Credential(value.encode(), name="api", slot="main", version="1", clock=Clock())
        ready, seen = threading.Barrier(2), set[str]()

        def read(credential: Credential = credential, ready: threading.Barrier = ready, seen: set[str] = seen) -> None:
            ready.wait()
            try:
                while True:
                    seen.add(credential.reveal())
            except Failure:
                pass

        reader = threading.Thread(target=read)
        reader.start()
        ready.wait()
        credential.wipe()
        reader.join()
        assert seen <= {value}


# Scrubbing

_MARK = "[REDACTED]"


def _json_form(secret: str) -> str:
    return json.dumps(secret)[1:-1]


ENCODINGS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "base64": lambda secret: base64.b64encode(secret.encode()).decode(),
    "base64 for URLs": lambda secret: base64.urlsafe_b64encode(secret.encode()).decode().rstrip("="),
    "quoted": lambda secret: quote(secret, safe=""),
    "quoted as a form": quote_plus,
    "JSON": _json_form,
    "JSON, upper": lambda secret: json.dumps(secret, ensure_ascii=False)[1:-1],
    "hex": lambda secret: secret.encode().hex(),
    "HEX": lambda secret: secret.encode().hex().upper(),
}

secret_texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=4, max_size=12).filter(
    lambda secret: all(encode(secret) not in _MARK for encode in ENCODINGS.values())
)


def _hide(before: str, secret: str, encode: Callable[[str], str], after: str) -> str:
    return before + encode(secret) + after


def _joined(parts: list[str]) -> str:
    return "".join(parts)


@st.composite
def laden(draw: st.DrawFn, secrets: list[str]) -> Any:
    """Random JSON in which secrets stand at random places, in random forms."""
    text = st.text(max_size=6)
    hidden = st.builds(_hide, text, st.sampled_from(secrets), st.sampled_from(list(ENCODINGS.values())), text)
    strings = text | hidden | st.lists(hidden, max_size=3).map(_joined)
    leaves = st.none() | st.booleans() | st.integers() | strings
    return draw(
        st.recursive(
            leaves,
            lambda inner: st.lists(inner, max_size=4) | st.dictionaries(strings, inner, max_size=4),
            max_leaves=12,
        )
    )


def strings_of(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for pair in cast("dict[str, Any]", value).items() for part in pair for text in strings_of(part)]
    if isinstance(value, list):
        return [text for item in cast("list[Any]", value) for text in strings_of(item)]
    return [value] if isinstance(value, str) else []


def size_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(size_of, cast("dict[str, Any]", value).values()))
    return 1 + sum(map(size_of, cast("list[Any]", value))) if isinstance(value, list) else 1


@pytest.mark.proves("AUDIT-07")
@given(data=st.data(), secrets=st.lists(secret_texts, min_size=1, max_size=3))
def test_no_secret_survives_scrubbing_in_any_form_at_any_place(data: st.DataObject, secrets: list[str]) -> None:
    value = data.draw(laden(secrets))
    scrubbed, found = scrub(value, secrets)
    forms = {encode(secret) for secret in secrets for encode in ENCODINGS.values()}
    assert found or not any(form in text for form in forms for text in strings_of(value))
    assert not any(form in text for form in forms for text in strings_of(scrubbed))
    assert size_of(scrubbed) == size_of(value), "nothing is dropped, also where two keys were secrets"
    assert found or scrubbed is value


@given(secret=secret_texts, before=st.binary(max_size=7), after=st.binary(max_size=7))
def test_a_secret_within_longer_base64_does_not_survive(secret: str, before: bytes, after: bytes) -> None:
    encoded = base64.b64encode(before + secret.encode() + after).decode()
    scrubbed, found = scrub(f"Basic {encoded}", [secret])
    assert found
    for part in scrubbed.removeprefix("Basic ").split(_MARK):
        for start in range(4):
            letters = part.rstrip("=")[start:]
            assert secret.encode() not in base64.b64decode(letters[: len(letters) // 4 * 4])


@pytest.mark.parametrize(
    ("value", "secrets", "expected"),
    [
        ("the pin is 47 of 4711", ["47"], "the pin is 47 of 4711"),
        ({"pin": "47", "47": 47}, ["47"], {"pin": _MARK, _MARK: _MARK}),
        ({"card": 41111111, "rate": 1.5, "on": True}, ["41111111"], {"card": _MARK, "rate": 1.5, "on": True}),
        ({"one-secret": 1, "two-secret": 2}, ["one-secret", "two-secret"], {_MARK: 1, f"{_MARK} 1": 2}),
        (("abababab!", "abababa"), ["abab"], [f"{_MARK}{_MARK}!", f"{_MARK}aba"]),
        ("say REDACTED and secret-2", ["REDACTED", "secret-2"], f"say {_MARK} and {_MARK}"),
        ("x-secret-D]yy", ["-secret-", "x[REDACTED]D]"], _MARK),
        ("nothing here", [], "nothing here"),
    ],
)
def test_scrubbing_in_particular_cases(value: Any, secrets: list[str], expected: Any) -> None:
    assert scrub(value, secrets)[0] == expected


KEY_LINES = [base64.b64encode(bytes(range(start, start + 48))).decode() for start in (1, 70, 140)]
KEY = "\n".join(("-----BEGIN OPAQUE KEY-----", *KEY_LINES, "-----END OPAQUE KEY-----", ""))
REWRITTEN: dict[str, Callable[[str], str]] = {
    "as it is": lambda key: key,
    "other line ends": lambda key: key.replace("\n", "\r\n"),
    "indented": lambda key: key.replace("\n", "\n    "),
    "on one line": lambda key: key.replace("\n", " "),
    "joined": lambda key: key.replace("\n", ""),
    "broken elsewhere": lambda key: "\n".join(key.replace("\n", "")[at : at + 19] for at in range(0, len(key), 19)),
    "without its frame": lambda key: "\n".join(key.splitlines()[1:-1]),
    "one line alone": lambda key: f"its second line is {key.splitlines()[2]}, and so on",
    "lines as a list": lambda key: json.dumps(key.splitlines()),
    "JSON": json.dumps,
    "JSON in JSON": lambda key: json.dumps(json.dumps({"key": key})),
    "JSON with escaped slashes": lambda key: json.dumps(key).replace("/", "\\/"),
    "MIME": lambda key: base64.encodebytes(key.encode()).decode(),
    "MIME in JSON": lambda key: json.dumps(base64.encodebytes(key.encode()).decode()).replace("/", "\\/"),
    "base64 in a column": lambda key: re.sub("(.{5})", r"\1\n  ", base64.b64encode(key.encode()).decode()),
    "hex in groups": lambda key: " ".join(re.findall("..?.?.?", key.encode().hex())),
}


@pytest.mark.parametrize("way", REWRITTEN)
@pytest.mark.parametrize("secret", [KEY, json.dumps({"type": "service", "private_key": KEY})], ids=["key", "document"])
def test_a_secret_of_several_lines_is_found_however_its_lines_are_written(secret: str, way: str) -> None:
    said = f"a {REWRITTEN[way](KEY if 'line' in way or 'frame' in way else secret)} z"
    scrubbed, found = scrub({"said": [said]}, [secret])
    (text,) = scrubbed["said"]
    bare = re.sub(r"\s|\\+[rn]", "", text)
    readable = {bare, bare.replace("\\", "")}
    for code in (r"[A-Za-z0-9+/]{16,}", r"[0-9a-f]{16,}"):
        for run in re.findall(code, bare.replace("\\", "")):
            whole = run[: len(run) // 4 * 4]
            plain = base64.b64decode(whole) if "A" in code else bytes.fromhex(whole)
            readable.add(plain.decode(errors="replace"))
    assert found
    assert _MARK in text
    assert not any(line in one for line in KEY_LINES for one in readable)
    assert (text[:2], text[-2:]) == ("a ", " z") or text == _MARK
    assert holds([said.encode()], [secret])


@given(
    secret=st.text("abAB/+ \\n", min_size=16, max_size=60),
    places=st.lists(st.integers(0, 60)),
    gap=st.sampled_from(["\n", "\r\n  ", " ", "\\n"]),
)
def test_a_long_secret_is_found_wherever_lines_are_broken(secret: str, places: list[int], gap: str) -> None:
    pieces = [secret[begin:end] for begin, end in itertools.pairwise([0, *sorted(places), len(secret)])]
    bare = "".join(secret.split())
    scrubbed, found = scrub(f"({gap.join(pieces)})", [secret])
    if len(bare) >= 16 and "\\" not in bare:
        assert found
        assert bare not in re.sub(r"\s|\\[rn]", "", scrubbed)


@pytest.mark.parametrize(
    "text",
    ["-----BEGIN OPAQUE KEY-----", "short", "a public line\nof text", KEY_LINES[0][:-1], " ".join(KEY_LINES[0])[:60]],
)
def test_what_is_like_a_line_of_a_secret_and_is_none_stays(text: str) -> None:
    assert scrub(text, [f"{KEY}\nshort\n"]) == (text, False)


def test_what_is_nested_too_deeply_to_look_through_is_withheld() -> None:
    value: Any = "leaf"
    for _ in range(100_000):
        value = [value]
    assert refusal(lambda: scrub(value, ["secret"])) == "E3304"


# The command line


def test_the_command_line_stores_lists_and_rotates_and_never_shows_a_value(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    stored = cli("secrets", "set", "payments/key", "-", "--expires", "2h", stdin=API_KEY + "\n")
    assert stored.code == 0
    listed = cli("secrets", "list")
    assert [line.split()[:2] for line in listed.out.splitlines()] == [["name", "slot"], ["payments/key", "main"]]
    assert "in 2 h" in listed.out
    assert cli.ask("secrets", "rotate-key") == {"sealed": 1, "left": []}
    assert API_KEY not in stored.out + stored.err + listed.out + listed.err
    assert API_KEY.encode() not in everything_in(home_at(cli.home))


@pytest.mark.parametrize(
    ("words", "stdin"),
    [
        (("set", "a", API_KEY), b""),
        (("set", "a"), b"piped without being asked for"),
        (("set", "a", "-"), b"no text: \xff"),
        (("set", "a", "-", "--expires", "tomorrow"), b"value"),
        (("set", "a", "-", "--expires", "0d"), b"value"),
    ],
)
def test_a_command_that_is_not_understood_stores_and_quotes_nothing(
    words: tuple[str, ...], stdin: bytes, home: Home
) -> None:
    done = CliRunner().invoke(secrets, words, input=stdin, obj=Session(home=str(home.path), verbose=False))
    assert done.exit_code == 2
    assert not home.path.exists()
    assert API_KEY not in done.output


def test_a_value_is_asked_for_on_the_terminal_without_being_shown(tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    child = subprocess.Popen(
        [*INTERLOCK, "secrets", "set", "api"],
        env=Cli(tmp_path).environment, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    shown = b""
    # The prompt comes once echo is off; only then is anything typed.
    for prompt in (b"Value (not shown): ", b"Once more: "):
        while not shown.endswith(prompt):
            shown += os.read(master, 1000)
        os.write(master, API_KEY.encode() + b"\n")
    try:
        while data := os.read(master, 1000):
            shown += data
    except OSError:
        pass  # how a terminal says that nobody is at its other end
    os.close(master)
    assert child.wait(60) == 0
    assert b"is stored" in shown
    assert API_KEY.encode() not in shown

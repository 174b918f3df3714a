"""One byte form per value: published vectors, and what must and must not make a difference."""

from __future__ import annotations

import hashlib
import hmac
import json
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from interlock import Caller, Interlock
from interlock.core.errors import Failure
from interlock.data.canonical import canonical, derive_key, digest, parse

pytestmark = pytest.mark.usefixtures("either_way")

Json = dict[str, Any]
PRECOMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"

# Published: another implementation that gives these bytes, digests and keys agrees with ours.
BYTES: list[tuple[str, Any, bytes]] = [
    ("null", None, b"null"),
    ("true", True, b"true"),
    ("empty_object", {}, b"{}"),
    ("sorted_keys", {"b": 1, "a": {"d": [], "c": None}}, b'{"a":{"c":null,"d":[]},"b":1}'),
    ("keys_by_code_point", {"\U00010000": 2, "\ue000": 1, "Z": 0}, b'{"Z":0,"\xee\x80\x80":1,"\xf0\x90\x80\x80":2}'),
    ("whole_floats", [1.0, -0.0, 2.5, 100.0], b"[1,0,2.5,100]"),
    ("big_integers", [2**53 + 1, 2**64, 10**25], b"[9007199254740993,18446744073709551616,10000000000000000000000000]"),
    ("fractions", [0.1, -19.99], b"[0.1,-19.99]"),
    ("nfc", [DECOMPOSED, {DECOMPOSED: 1}], b'["caf\xc3\xa9",{"caf\xc3\xa9":1}]'),
    ("escapes", '"\\/\n\t\x00\x1f\x7f\u2028', b'"\\"\\\\/\\n\\t\\u0000\\u001f\x7f\xe2\x80\xa8"'),
    ("text_that_looks_like_numbers", ["1.0", "1e5", "null"], b'["1.0","1e5","null"]'),
]  # fmt: skip
DIGESTS: list[tuple[str, Any, str]] = [
    ("empty_object", {}, "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"),
    ("order", {"amount": 250.0, "to": DECOMPOSED}, "6b0893ab7c95ba1790c9763a010750d93e4b1912cf32e98c787b9b25455a57fe"),
]
KEYS: list[tuple[str, bytes, tuple[str, str, str], Any, str]] = [
    (
        "plain",
        b"secret",
        ("session", "demo.add", "step-1"),
        {"a": 1, "b": 2},
        "5352f8a6f2c6ea8161884f206e6f6044112a85218c9bb1592bba2c9070eee674",
    ),
    (
        "unicode",
        bytes(range(32)),
        ("sitzung-\u00e9", "bank.pay", "7"),
        {"to": DECOMPOSED, "cents": 250.0},
        "24561514a3304748004744b1d14343175d20be14fa5c10141fca0d485e0ac389",
    ),
    ("empty", b"", ("", "", ""), {}, "b29c7bee112706b2b38fc6eb1b902b5defe3b11e39ef834dfd47d0af97bf02e5"),
]
SECRET = b"a tenant's secret"


def key(session: str, tool: str, step: str, params: Any) -> str:
    return derive_key(SECRET, session_id=session, tool_id=tool, step_id=step, params=params)


@pytest.mark.proves("IDEM-02")
@pytest.mark.parametrize(("value", "expected"), [pytest.param(v, b, id=name) for name, v, b in BYTES])
def test_canonical_bytes_equal_the_published_vectors(value: Any, expected: bytes) -> None:
    assert canonical(value) == expected


@pytest.mark.proves("IDEM-02")
@pytest.mark.parametrize(("value", "expected"), [pytest.param(v, d, id=name) for name, v, d in DIGESTS])
def test_digests_equal_the_published_vectors(value: Any, expected: str) -> None:
    assert digest(value) == expected


@pytest.mark.proves("IDEM-02")
@pytest.mark.parametrize(("secret", "parts", "params", "expected"), [pytest.param(*row[1:], id=row[0]) for row in KEYS])
def test_derived_keys_equal_the_published_vectors(
    secret: bytes, parts: tuple[str, str, str], params: Any, expected: str
) -> None:
    session, tool, step = parts
    assert derive_key(secret, session_id=session, tool_id=tool, step_id=step, params=params) == expected


_OTHER_PROCESS = """
import hashlib
import hmac
import json
from interlock.data.canonical import canonical, derive_key, digest
from tests.data.test_canonical import BYTES, DIGESTS, KEYS
print(json.dumps({
    "bytes": [canonical(value).hex() for _, value, _ in BYTES],
    "digests": [digest(value) for _, value, _ in DIGESTS],
    "keys": [derive_key(s, session_id=p[0], tool_id=p[1], step_id=p[2], params=v) for _, s, p, v, _ in KEYS],
}))
"""


@pytest.mark.proves("IDEM-02")
def test_a_second_process_gives_the_same_bytes_digests_and_keys() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _OTHER_PROCESS], cwd=root, capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == {
        "bytes": [expected.hex() for _, _, expected in BYTES],
        "digests": [expected for _, _, expected in DIGESTS],
        "keys": [expected for *_, expected in KEYS],
    }


@pytest.mark.proves("IDEM-02")
async def test_each_tenant_of_a_home_has_a_secret_of_its_own(tmp_path: Path) -> None:
    tenants = ("local", "acme", "acme2", "globex", "")
    callers = {tenant: Caller(id="user:ann", tenant=tenant) for tenant in tenants}

    async def keys(app: Interlock) -> dict[str, str]:
        given: Json = {"tool": "demo.add", "step": "step-1", "params": {"a": 1}, "session": "s"}
        return {tenant: await app.key_for(**given, caller=caller) for tenant, caller in callers.items()}

    async with Interlock.open(tmp_path / "home") as app:
        first = await keys(app)
        assert len(set(first.values())) == len(tenants)
        assert await app.key_for("demo.add", "step-1", {"a": 1}, session="s") == first[app.caller.tenant]
        app.act_as(callers["acme"])
        assert await app.key_for("demo.add", "step-1", {"a": 1}, session="s") == first["acme"]
    async with Interlock.open(tmp_path / "home") as app:
        assert await keys(app) == first


@pytest.mark.proves("IDEM-02")
@pytest.mark.parametrize(("secret", "parts", "params", "expected"), [pytest.param(*row[1:], id=row[0]) for row in KEYS])
def test_a_key_is_hmac_sha256_over_delimited_parts_and_json(
    secret: bytes, parts: tuple[str, str, str], params: Any, expected: str
) -> None:
    message = b"".join(b"%d:%b" % (len(part.encode()), part.encode()) for part in parts)
    plain = json.loads(json.dumps(params), parse_float=lambda text: int(float(text)))
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    message += unicodedata.normalize("NFC", text).encode()
    assert hmac.new(secret, message, hashlib.sha256).hexdigest() == expected


@pytest.mark.proves("IDEM-02")
async def test_a_home_gives_the_same_key_for_the_same_step_after_a_restart(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path / "one") as app:
        first = await app.key_for("demo.add", "step-1", {"a": 1, "b": 2}, session="s")
    async with Interlock.open(tmp_path / "one") as app:
        assert await app.key_for("demo.add", "step-1", {"b": 2.0, "a": 1}, session="s") == first
        assert await app.key_for("demo.add", "step-2", {"a": 1, "b": 2}, session="s") != first
    async with Interlock.open(tmp_path / "two") as app:
        assert await app.key_for("demo.add", "step-1", {"a": 1, "b": 2}, session="s") != first


# What makes no difference

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
NAMES = st.text("abcxyz.01", max_size=4)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=12
)


def reordered(value: Any) -> Any:
    if isinstance(value, dict):
        members: list[tuple[str, Any]] = list(value.items())  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType] - JSON
        return {name: reordered(item) for name, item in reversed(members)}
    return [reordered(item) for item in value] if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType] - JSON


@pytest.mark.proves("IDEM-02")
@given(VALUES)
def test_key_order_and_whitespace_make_no_difference(value: Any) -> None:
    spaced = json.loads(json.dumps(reordered(value), indent=3, separators=(" ,\n", " : ")))
    assert canonical(spaced) == canonical(value)
    assert key("s", "t", "1", spaced) == key("s", "t", "1", value)


@pytest.mark.proves("IDEM-02")
@given(VALUES)
def test_the_canonical_form_reads_back_as_the_same_value_and_is_its_own_form(value: Any) -> None:
    encoded = canonical(value)
    assert canonical(json.loads(encoded)) == encoded


MARKS = st.text('a1:,.0[]{}"\\-', max_size=8)
LOOK_ALIKES = st.recursive(
    st.sampled_from([1.0, -0.0, -2.0, 0.5, 70.0, 3]) | MARKS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(MARKS, inner, max_size=4),
    max_leaves=12,
)


def plainly(value: Any) -> Any:
    """The value with whole numbers in their one spelling, as slowly as can be."""
    if isinstance(value, dict):
        return {name: plainly(item) for name, item in value.items()}  # pyright: ignore[reportUnknownVariableType] - JSON
    if isinstance(value, list):
        return [plainly(item) for item in value]  # pyright: ignore[reportUnknownVariableType] - JSON
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.mark.proves("IDEM-02")
@given(LOOK_ALIKES)
@example([{"a": ":5.0,"}, ":5.0]", 1.0])
@example({'a"': 5.0, "a:": ':-5.0,a":5.0,', "b": 5.0})
def test_what_looks_like_a_number_in_a_text_stays_as_it_is(value: Any) -> None:
    assert canonical(value) == json.dumps(plainly(value), sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.proves("IDEM-02")
@given(st.integers(min_value=-(2**53), max_value=2**53))
def test_the_spelling_of_a_whole_number_makes_no_difference(number: int) -> None:
    spellings = [f"{number}", f"{number}.0", f"{number}.00e0", f"{number * 10}e-1", f"{number}E+0"]
    assert {canonical({"n": json.loads(spelling)}) for spelling in spellings} == {canonical({"n": number})}


@pytest.mark.proves("IDEM-02")
@given(
    st.floats(allow_nan=False, allow_infinity=False).filter(float.is_integer)
    | st.integers(15, 308).map(lambda e: float(f"1e{e}"))
)
def test_a_whole_float_of_any_size_is_that_whole_number(number: float) -> None:
    assert canonical([number]) == canonical([int(number)])
    assert canonical({"n": number, "s": "x"}) == canonical({"n": int(number), "s": "x"})


@pytest.mark.proves("IDEM-02")
@given(st.floats(allow_nan=False, allow_infinity=False))
@example(1e-7)
def test_how_a_number_is_written_does_not_depend_on_what_stands_beside_it(number: float) -> None:
    assert canonical([number, 2**70]) == canonical([number])[:-1] + b",%d]" % 2**70
    assert canonical({"n": {"x": number}, "a": 2**70}) == b'{"a":%d,"n":%s}' % (2**70, canonical({"x": number}))
    assert canonical([number, DECOMPOSED]) == canonical([number, PRECOMPOSED])
    assert canonical([number, 1.0]) == canonical([number, 1])
    assert canonical([number, 10.0**25]) == canonical([number, int(10.0**25)])


@pytest.mark.proves("IDEM-02")
@given(VALUES, TEXT)
def test_how_a_value_is_written_does_not_depend_on_a_number_beyond_64_bits_beside_it(value: Any, text: str) -> None:
    assert canonical([value, text, 2**70]) == canonical([value, text])[:-1] + b",%d]" % 2**70


@pytest.mark.proves("IDEM-02")
@given(TEXT, TEXT)
def test_the_unicode_form_of_text_makes_no_difference(text: str, name: str) -> None:
    for form in ("NFC", "NFD"):
        same = {unicodedata.normalize(form, name): [unicodedata.normalize(form, text)]}
        assert canonical(same) == canonical({name: [text]})


def test_a_tuple_is_a_list() -> None:
    assert canonical((1, (2, "x"))) == canonical([1, [2, "x"]])


# What makes a difference


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are one value: true is not 1, 1.0 is 1, text counts in NFC."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, str) and isinstance(other, str):
        return unicodedata.normalize("NFC", one) == unicodedata.normalize("NFC", other)
    if isinstance(one, list) and isinstance(other, list):
        pairs: list[tuple[Any, Any]] = list(zip(one, other, strict=False))  # pyright: ignore[reportUnknownArgumentType] - JSON
        return len(one) == len(other) and all(same(a, b) for a, b in pairs)  # pyright: ignore[reportUnknownArgumentType] - JSON
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType] - JSON
    return bool(one == other)


SMALL = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 1.0, 0.5, -1, "", "1", "true", "null", PRECOMPOSED, DECOMPOSED, 2**70]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.proves("IDEM-02")
@given(SMALL, SMALL)
def test_two_values_share_a_form_exactly_when_they_are_the_same(one: Any, other: Any) -> None:
    assert (canonical(one) == canonical(other)) is same(one, other)
    assert (key("s", "t", "1", one) == key("s", "t", "1", other)) is same(one, other)


@pytest.mark.proves("IDEM-02")
@given(VALUES, VALUES)
def test_changing_one_value_anywhere_changes_the_key(before: Any, after: Any) -> None:
    deep_before, deep_after = {"a": [0, {"b": before}]}, {"a": [0, {"b": after}]}
    assert (key("s", "t", "1", deep_before) == key("s", "t", "1", deep_after)) is (
        canonical(before) == canonical(after)
    )
    assert key("s", "t", "1", {"a": before}) != key("s", "t", "1", {"a": [before]})


@pytest.mark.proves("IDEM-02")
@given(st.text("ab:1", max_size=6), st.integers(0, 6), st.integers(0, 6), st.integers(0, 6), st.integers(0, 6))
def test_tuples_with_equal_concatenations_get_distinct_keys(text: str, a: int, b: int, c: int, d: int) -> None:
    one = (text[:a], text[a : a + b], text[a + b :])
    other = (text[:c], text[c : c + d], text[c + d :])
    assert (key(*one, {}) == key(*other, {})) is (one == other)


@pytest.mark.proves("IDEM-02")
def test_text_cannot_imitate_the_delimiters_or_the_params() -> None:
    assert key("a", "b", "c", {}) != key("a1:b", "", "c", {})
    assert key("", "", "", "x") != key("", "", '"x"', "")
    assert key("1:a", "", "", {}) != key("", "1:a", "", {})
    assert key("\u00e9", "", "", {}) != key("e\u0301", "", "", {}), "ids are bytes, not words"


@pytest.mark.proves("IDEM-02")
def test_another_secret_gives_another_key() -> None:
    assert derive_key(b"1", session_id="s", tool_id="t", step_id="1", params={}) != derive_key(
        b"2", session_id="s", tool_id="t", step_id="1", params={}
    )


# What is refused

CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(float("nan"), id="nan"),
        pytest.param({"a": [None, float("nan")]}, id="nan inside"),
        pytest.param(float("inf"), id="infinity"),
        pytest.param([-float("inf"), 1.0], id="minus infinity"),
        pytest.param("\ud800", id="lone surrogate"),
        pytest.param({"\udfff": 1}, id="lone surrogate in a key"),
        pytest.param({1: "x"}, id="number as a key"),
        pytest.param({None: None}, id="null as a key"),
        pytest.param({"a": {True: 1.0}}, id="boolean as a key"),
        pytest.param({1, 2}, id="set"),
        pytest.param([frozenset({"a"})], id="set inside"),
        pytest.param(b"bytes", id="bytes"),
        pytest.param(object(), id="object"),
        pytest.param([1j], id="complex"),
        pytest.param({PRECOMPOSED: 1, DECOMPOSED: 2}, id="keys that collide in NFC"),
        pytest.param({PRECOMPOSED: 1, DECOMPOSED: 1}, id="keys that collide in NFC with one value"),
        pytest.param(CYCLE, id="a list that holds itself"),
        pytest.param({"a": [10**5000]}, id="a number that is too long to be written"),
    ],
)
def test_what_json_cannot_hold_is_refused_as_malformed(value: Any) -> None:
    for attempt in (canonical, digest, _key_of):
        with pytest.raises(Failure) as caught:
            attempt(value)
        assert caught.value.code == "E3004"


def _key_of(value: Any) -> str:
    return key("s", "t", "1", value)


@pytest.mark.parametrize("part", ["session_id", "tool_id", "step_id"])
def test_a_lone_surrogate_in_an_id_is_refused_as_malformed(part: str) -> None:
    ids = {"session_id": "s", "tool_id": "t", "step_id": "1"} | {part: "\ud800"}
    with pytest.raises(Failure) as caught:
        derive_key(SECRET, params={}, **ids)
    assert caught.value.code == "E3004"


def nested(depth: int, leaf: Any, *, objects: bool) -> Any:
    for _ in range(depth):
        leaf = {"a": leaf} if objects else [leaf]
    return leaf


LEAVES: list[Any] = [1, 1.0, "null", "1.0", DECOMPOSED, 10**30]


@pytest.mark.parametrize("leaf", LEAVES, ids=repr)
@pytest.mark.parametrize("objects", [True, False], ids=["objects", "lists"])
@pytest.mark.parametrize("depth", [100, 199, 201, 260, 1000, 20_000])
def test_deep_nesting_is_handled_or_refused_and_never_exhausts_the_stack(depth: int, objects: bool, leaf: Any) -> None:
    value = nested(depth, leaf, objects=objects)
    if depth < 200:
        assert canonical(value)
        return
    try:
        canonical(value)
    except Failure as failure:
        assert failure.code == "E3004"  # noqa: PT017 - either outcome is right, an overflow of the stack is not


@given(st.integers(min_value=-(10**400), max_value=10**400))
def test_integers_of_any_size_keep_every_digit(number: int) -> None:
    assert canonical([number]) == b"[%d]" % number
    assert canonical({"n": number, "x": 1.0}) == b'{"n":%d,"x":1}' % number


# Reading JSON text


@pytest.mark.parametrize(
    "raw",
    ["", "{", "[1,", "NaN", "-Infinity", "1e999", "'a'", '{"a":1,}', "\ufeff{}", '"\ud800"', b"\xff", "[" * 100_000],
    ids=lambda raw: repr(raw[:10]),
)
def test_text_that_is_not_json_is_refused_as_malformed(raw: bytes | str) -> None:
    with pytest.raises(Failure) as caught:
        parse(raw)
    assert caught.value.code == "E3004"
    assert caught.value.message.startswith("not valid JSON")


@given(st.binary(max_size=40) | st.text(max_size=40))
def test_reading_arbitrary_text_gives_a_value_or_a_failure_and_nothing_else(raw: bytes | str) -> None:
    try:
        value = parse(raw)
    except Failure as failure:
        assert failure.code == "E3004"  # noqa: PT017 - either outcome is right, another exception is not
        return
    assert canonical(value)

"""Redaction: what must not be seen does not come out, and what may be seen comes out unharmed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from interlock.core.credentials import SENSITIVE_NAMES
from interlock.core.errors import Failure
from interlock.privacy import patterns
from interlock.privacy.patterns import Patterns
from interlock.privacy.redact import RedactionRules, Redactor, SchemaRedactor, private_values, safe_message
from tests.support.each import each
from tests.thorough import THOROUGH

pytestmark = pytest.mark.usefixtures("either_way")

REDACTOR = Redactor()
STRICT = Redactor(RedactionRules(strict=True))
NOBODY: frozenset[str] = frozenset()

CANARIES = {
    "[EMAIL_REDACTED]": ("alice@example.com", "Bob.O+x@mail.example.co.uk", "jürgen@münchen.example"),
    "[SSN_REDACTED]": ("123-45-6789", "078\u201105\u20111120"),
    "[CREDIT_CARD_REDACTED]": ("4111111111111111", "4111 1111 1111 1111", "5500-0000-0000-0004"),
    "[PHONE_REDACTED]": ("555-123-4567", "555.123.4567", "(555) 123-4567", "+1 555 123 4567", "+442079460958"),
    "[IP_ADDRESS_REDACTED]": ("10.0.0.1", "255.255.255.255", "192.168.1.20"),
}
NAMES = (
    "password",
    "secret",
    "token",
    "apiKey",
    "api_key",
    "accessToken",
    "refresh_token",
    "private_key",
    "credit_card",
    "ssn",
    "social_security",
)
# Long enough that a search in quadratic time would not end before the test is cut off.
LENGTH = 1_000_000 if THOROUGH else 250_000
HOSTILE = (
    "a" * LENGTH + "@",
    "a@" * (LENGTH // 2),
    " @a.bb" * (LENGTH // 6),
    "@" + "a." * (LENGTH // 2),
    "a@" + "b-" * (LENGTH // 2),
    "1" * LENGTH,
    "1-" * (LENGTH // 2),
    "1." * (LENGTH // 2),
    "+1 2 3 4 5 6 7 8 9 0 1 2 3 4 55" * (LENGTH // 30),
    "1234 " * (LENGTH // 5),
    "(123)" * (LENGTH // 5),
    "123-45-678" * (LENGTH // 10),
)

# Words and separators between planted canaries: no digits, and nothing that could lengthen an address.
filler = st.text(alphabet="abc xyz,;!?()[]\n\"'é", max_size=12).map(lambda text: f" {text} ")
canary = st.sampled_from([(marker, text) for marker, texts in CANARIES.items() for text in texts])
free_text = st.lists(st.tuples(filler, canary), min_size=1, max_size=5)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
keys = st.text(alphabet="abcdefghij_", min_size=1, max_size=8)
json_data = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=20
)
messy_text = st.text(alphabet="0123456789-. +()@ab\u2011\n[]", max_size=60) | st.lists(
    st.sampled_from([text for texts in CANARIES.values() for text in texts] + ["-", ".", " ", "1", "@", "a", "+", "("]),
    max_size=8,
).map("".join)


def spelled(name: str, choices: list[int]) -> str:
    """The name in another case and with other separators."""
    out = ""
    for letter, choice in zip(name, choices * len(name), strict=False):
        out += ("", "_", "-")[choice % 3] + (letter.upper() if choice % 2 else letter.lower())
    return out


def compiled(schema: dict[str, Any], *, patterns: bool = True) -> SchemaRedactor:
    return REDACTOR.for_schema(schema, patterns=patterns)


def shown(schema: dict[str, Any], data: Any, *scopes: str) -> Any:
    return compiled(schema).apply(data, disclose=frozenset(scopes)).value


# Patterns and names


@pytest.mark.proves("AUDIT-05")
@pytest.mark.parametrize("redactor", [REDACTOR, STRICT], ids=["lax", "strict"])
def test_the_examples_of_the_specification(redactor: Redactor) -> None:
    message = {"message": "Contact me at alice@example.com or 555-123-4567", "ssn": "123-45-6789"}
    assert redactor.value(message).value == {
        "message": "Contact me at [EMAIL_REDACTED] or [PHONE_REDACTED]",
        "ssn": "[SSN_REDACTED]",
    }
    assert redactor.value(message).paths == ("/message", "/ssn")
    login = {"username": "alice", "password": "secret123", "apiKey": "sk-1234567890"}
    assert redactor.value(login).value == {"username": "alice", "password": "[REDACTED]", "apiKey": "[REDACTED]"}


@pytest.mark.proves("AUDIT-05")
@each("redactor", [REDACTOR, STRICT])
@each(("marker", "texts"), CANARIES.items())
def test_each_pattern_becomes_its_marker(redactor: Redactor, marker: str, texts: tuple[str, ...]) -> None:
    for text in texts:
        assert redactor.text(text) == marker
        assert redactor.text(f"see <{text}>, please") == f"see <{marker}>, please"


@pytest.mark.proves("AUDIT-05")
@pytest.mark.parametrize(
    ("text", "strictly"),
    [
        ("5551234567", "[PHONE_REDACTED]"),
        ("1234567812345678", "[CREDIT_CARD_REDACTED]"),
        ("300.1.1.999", "[IP_ADDRESS_REDACTED]"),
    ],
)
def test_false_alarms_need_the_strict_setting(text: str, strictly: str) -> None:
    assert REDACTOR.text(text) == text
    assert STRICT.text(text) == strictly


@each(
    "text",
    ["2024-05-01T10:30:00Z", "order 12345678", "3.14159265358979", "v1.2.3", "npm@1.2.3", "1700000000", "a @ b", "12%"],
)
def test_ordinary_text_stays(text: str) -> None:
    assert REDACTOR.text(text) is text


def test_a_card_behind_another_group_of_four_is_found() -> None:
    assert REDACTOR.text("2024 4111 1111 1111 1111") == "2024 [CREDIT_CARD_REDACTED]"


@pytest.mark.proves("AUDIT-05")
@given(pieces=free_text, strict=st.booleans())
def test_no_planted_canary_survives_in_free_text(pieces: list[tuple[str, tuple[str, str]]], strict: bool) -> None:
    redactor = STRICT if strict else REDACTOR
    text = "".join(before + planted for before, (_, planted) in pieces)
    assert redactor.text(text) == "".join(before + marker for before, (marker, _) in pieces)
    nested = {"a": [{"b": (text, 7)}], "c": text, f"k{text}": 1}
    left = json.dumps(redactor.value(nested).value, ensure_ascii=False)
    assert not [planted for _, (_, planted) in pieces if planted in left]


@pytest.mark.proves("AUDIT-05")
@given(name=st.sampled_from(NAMES), choices=st.lists(st.integers(0, 5), min_size=1), data=json_data)
def test_a_sensitive_name_is_known_in_every_spelling_and_depth(name: str, choices: list[int], data: Any) -> None:
    key = spelled(name.replace("_", ""), choices)
    done = REDACTOR.value({"outer": [data, {key: "hunter2", "other": 1}]})
    assert done.value["outer"][1] == {key: "[REDACTED]", "other": 1}
    assert f"/outer/1/{key}" in done.paths
    assert REDACTOR.value({key: {"deep": ["hunter2"]}}).value == {key: "[REDACTED]"}


@pytest.mark.proves("AUDIT-05")
@each(
    "name",
    [
        "password",
        "secret",
        "token",
        "apiKey",
        "api_key",
        "accessToken",
        "refresh_token",
        "private_key",
        "credit_card",
        "ssn",
        "social_security",
    ],
)
def test_the_whole_value_of_a_sensitive_name_goes_also_where_it_only_holds_a_match(name: str) -> None:
    for text in ("hunter2 alice@example.com", "alice@example.com, or hunter2", "123-45-6789 hunter2"):
        done = REDACTOR.value({name: text}).value
        assert done == {name: "[REDACTED]"}
    assert REDACTOR.value({name: "123-45-6789"}).value == {name: "[SSN_REDACTED]"}


@pytest.mark.proves("AUDIT-05")
@given(text=messy_text, strict=st.booleans(), data=json_data, key=st.sampled_from([*NAMES, "note"]))
def test_redaction_is_idempotent(text: str, strict: bool, data: Any, key: str) -> None:
    redactor = STRICT if strict else REDACTOR
    once = redactor.text(text)
    assert redactor.text(once) == once
    first = redactor.value({key: text, "more": [data, text], text: text}).value
    again = redactor.value(first)
    assert again.value is first
    assert again.paths == ()


@given(text=messy_text)
def test_the_quick_look_agrees_with_the_expressions(text: str) -> None:
    # A long text is looked at by its outline first; the strict forms are not, and hold all the others.
    if REDACTOR.text(text) != text:
        assert STRICT.text(text) != text
    assert REDACTOR.value([text, "x"]).value == [REDACTOR.text(text), "x"]


@given(data=json_data)
def test_data_without_anything_to_remove_is_the_same_object(data: Any) -> None:
    done = REDACTOR.value(data)
    assert (done.value is data) == (done.paths == ())
    assert done.value is data or done.value != data


def test_absent_secrets_and_flags_stay() -> None:
    data = {"password": None, "token": True, "ssn": False}
    assert REDACTOR.value(data).value is data
    assert REDACTOR.value({"token": 42, "secret": ""}).value == {"token": "[REDACTED]", "secret": "[REDACTED]"}


def test_personal_data_in_keys_is_removed_without_losing_members() -> None:
    done = REDACTOR.value({"a@example.com": 1, "b@example.com": "555-123-4567", "c": 3})
    assert list(done.value.values()) == [1, "[PHONE_REDACTED]", 3]
    assert len(done.value) == 3
    assert all(key.startswith("[EMAIL_REDACTED]") for key in list(done.value)[:2])
    assert not any("example.com" in path for path in done.paths)


def test_paths_are_json_pointers() -> None:
    done = REDACTOR.value({"a/b": [{"x~y": "alice@example.com"}]})
    assert done.paths == ("/a~1b/0/x~0y",)
    assert REDACTOR.value("alice@example.com").paths == ("",)


def test_tuples_stay_tuples_and_the_input_is_not_changed() -> None:
    data = {"a": ("alice@example.com", 1)}
    assert REDACTOR.value(data).value == {"a": ("[EMAIL_REDACTED]", 1)}
    assert data == {"a": ("alice@example.com", 1)}


@pytest.mark.proves("AUDIT-05")
@given(st.text("0123456789.+-() \u2010\u00a0\nab\0", max_size=40), st.sampled_from([REDACTOR, STRICT]))
def test_nothing_is_found_in_a_text_without_an_at_sign_or_four_digits(text: str, redactor: Redactor) -> None:
    """The compiled walk does not hand such texts on to be searched."""
    few = "".join(c for i, c in enumerate(text) if not c.isdigit() or sum(map(str.isdigit, text[:i])) < 3)
    assert redactor.text(few) == few
    assert redactor.value([few]).value == [few]


@pytest.mark.proves("AUDIT-05")
def test_patterns_and_names_can_be_added() -> None:
    rules = RedactionRules(extra_patterns=(("staff", r"^EMP-\d+|REDACTED", "[STAFF]"),), extra_names=("pin-code",))
    redactor = Redactor(rules)
    done = redactor.value({"note": "EMP-77 wrote a@example.com", "PIN_CODE": "1234", "token": "EMP-1"})
    assert done.value == {
        "note": "[STAFF] wrote [EMAIL_REDACTED]",
        "PIN_CODE": "[REDACTED]",
        "token": "[STAFF]",
    }
    assert redactor.value(done.value).value == done.value
    assert safe_message(redactor, "bad pin_code=1234") == "bad pin_code=[REDACTED]"


@pytest.mark.parametrize("text", HOSTILE, ids=[text[:12] for text in HOSTILE])
def test_hostile_text_is_read_in_linear_time(text: str) -> None:
    REDACTOR.text(text)
    STRICT.text(text)
    REDACTOR.value({"a": text, text: 1})


# Results


CONTACT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "email": {"type": "string", "format": "email", "x-disclose": "contacts:read"},
        "name": {"type": "string", "x-disclose": "contacts:read"},
        "note": {"type": "string"},
        "salary": {"type": "integer", "x-sensitivity": "pii"},
        "flag": {"type": "boolean", "x-sensitivity": "health"},
        "card": {"type": "string", "x-sensitivity": "pii", "x-disclose": "cards:read"},
        "password": {"type": "string", "x-disclose": "secrets:read"},
        "id": {"type": "string", "pattern": "^[0-9-]+$"},
    },
}
CONTACT_DATA: dict[str, Any] = {
    "email": "alice@example.com",
    "name": "Alice",
    "note": "call 555-123-4567",
    "salary": 9,
    "flag": True,
    "card": "4111 1111 1111 1111",
    "password": "hunter2",
    "id": "555-123-4567",
}


@pytest.mark.supports("VALID-04")
def test_without_the_scope_personal_data_is_removed() -> None:
    done = compiled(CONTACT).apply(CONTACT_DATA, disclose=NOBODY)
    assert done.value == {
        "email": "[EMAIL_REDACTED]",
        "name": "[REDACTED]",
        "note": "call [PHONE_REDACTED]",
        "salary": "[REDACTED]",
        "flag": "[REDACTED]",
        "card": "[CREDIT_CARD_REDACTED]",
        "password": "[REDACTED]",
        "id": "555-123-4567",
    }
    assert set(done.paths) == {"/email", "/name", "/note", "/salary", "/flag", "/card", "/password"}


@pytest.mark.supports("VALID-04")
def test_a_scope_opens_its_own_fields_and_no_other() -> None:
    assert shown(CONTACT, CONTACT_DATA, "contacts:read", "other") == {
        "email": "alice@example.com",
        "name": "Alice",
        "note": "call [PHONE_REDACTED]",
        "salary": "[REDACTED]",
        "flag": "[REDACTED]",
        "card": "[CREDIT_CARD_REDACTED]",
        "password": "[REDACTED]",
        "id": "555-123-4567",
    }
    opened = shown(CONTACT, CONTACT_DATA, "cards:read", "secrets:read")
    assert (opened["card"], opened["password"]) == ("4111 1111 1111 1111", "hunter2")


def test_a_disclosed_object_is_disclosed_throughout_but_for_its_own_marks() -> None:
    schema: dict[str, Any] = {
        "properties": {
            "person": {
                "x-disclose": "people",
                "properties": {"mails": {"items": {"type": "string"}}, "pin": {"x-sensitivity": "secret"}},
            }
        }
    }
    data = {"person": {"mails": ["a@example.com"], "pin": 1, "token": "t", "b@example.com": "10.0.0.1"}}
    assert shown(schema, data) == {"person": "[REDACTED]"}
    assert shown(schema, data, "people") == {
        "person": {"mails": ["a@example.com"], "pin": "[REDACTED]", "token": "[REDACTED]", "b@example.com": "10.0.0.1"}
    }


@pytest.mark.supports("VALID-04")
def test_pattern_redaction_of_results_can_be_turned_off_but_names_and_marks_hold() -> None:
    done = compiled(CONTACT, patterns=False).apply({**CONTACT_DATA, "token": "x"}, disclose=NOBODY)
    assert done.value["note"] == "call 555-123-4567"
    assert (done.value["salary"], done.value["token"], done.value["name"]) == ("[REDACTED]",) * 3
    assert "555-123-4567" not in json.dumps(compiled(CONTACT, patterns=False).for_sinks(CONTACT_DATA).value)


@pytest.mark.supports("VALID-04")
@each(
    "schema",
    [
        {"type": "string", "format": "ipv4"},
        {"type": "string", "enum": ["10.0.0.1"]},
        {"type": "string", "pattern": "^[0-9.]+$"},
        {"const": "10.0.0.1"},
        {"$ref": "#/$defs/address"},
        {"allOf": [{"type": "string"}, {"format": "ipv4"}]},
        {"anyOf": [{"type": "null"}, {"type": "string", "format": "ipv4"}]},
        {"oneOf": [{"const": "10.0.0.1"}, {"type": "integer"}, {"type": "string", "format": "uuid"}]},
    ],
)
def test_a_field_whose_schema_says_what_it_holds_is_not_corrupted(schema: dict[str, Any]) -> None:
    whole = {"$defs": {"address": {"type": "string", "format": "ipv4"}}, "properties": {"field": schema}}
    data = {"field": "10.0.0.1"}
    assert compiled(whole).apply(data, disclose=NOBODY).value is data
    assert compiled(whole).for_sinks(data).value == {"field": "[IP_ADDRESS_REDACTED]"}


@each(
    "schema",
    [
        True,
        {},
        {"type": "string"},
        {"type": ["string", "null"], "maxLength": 80},
        {"type": "string", "format": "markdown"},
        {"anyOf": [{"type": "string", "format": "ipv4"}, {"type": "string"}]},
        {"type": "integer"},
        {"type": "object", "additionalProperties": False},
    ],
)
def test_free_text_and_what_does_not_fit_the_schema_is_redacted(schema: Any) -> None:
    whole: dict[str, Any] = {"properties": {"field": schema}}
    assert shown(whole, {"field": "10.0.0.1"}) == {"field": "[IP_ADDRESS_REDACTED]"}
    assert shown(whole, {"field": [{"x": "10.0.0.1"}]}) == {"field": [{"x": "[IP_ADDRESS_REDACTED]"}]}


@pytest.mark.parametrize(
    "marked",
    [
        {"x-sensitivity": "pii"},
        {"$ref": "#/$defs/marked"},
        {"allOf": [{"type": "string"}, {"$ref": "#/$defs/marked"}]},
        {"anyOf": [{"type": "integer"}, {"x-sensitivity": "pii"}]},
        {"oneOf": [{"anyOf": [{"$ref": "#/$defs/marked"}]}]},
        {"if": {"minLength": 3}, "then": {"x-sensitivity": "pii"}},
    ],
    ids=json.dumps,
)
def test_a_mark_is_found_wherever_the_schema_hides_it(marked: dict[str, Any]) -> None:
    places: list[tuple[dict[str, Any], Any, Any]] = [
        (marked, "canary", "[REDACTED]"),
        ({"properties": {"a": marked}}, {"a": "canary"}, {"a": "[REDACTED]"}),
        ({"items": marked}, ["canary"], ["[REDACTED]"]),
        ({"prefixItems": [{}, marked]}, ["x", "canary", "y"], ["x", "[REDACTED]", "y"]),
        ({"additionalProperties": marked}, {"any": "canary"}, {"any": "[REDACTED]"}),
        ({"patternProperties": {"^a": marked}}, {"any": "canary"}, {"any": "[REDACTED]"}),
        ({"anyOf": [{"properties": {"a": marked}}, {"properties": {"a": {}}}]}, {"a": "canary"}, {"a": "[REDACTED]"}),
    ]
    for schema, data, expected in places:
        redactor = compiled({**schema, "$defs": {"marked": {"x-sensitivity": "pii"}}})
        assert redactor.apply(data, disclose=NOBODY).value == expected
        assert redactor.for_sinks(data).value == expected


def test_a_recursive_schema_is_followed_to_any_depth() -> None:
    schema: dict[str, Any] = {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "host": {"type": "string", "format": "ipv4"},
                    "pin": {"type": "string", "x-sensitivity": "secret"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
                },
            }
        },
    }
    data: dict[str, Any] = {"host": "10.0.0.1", "pin": "canary"}
    for _ in range(50):
        data = {"host": "10.0.0.1", "children": [data]}
    text = json.dumps(shown(schema, data))
    assert "canary" not in text
    assert text.count("10.0.0.1") == 51


@each(
    ("schema", "trivial"),
    [
        ({"type": "integer"}, True),
        ({"type": ["number", "null"]}, True),
        ({"enum": ["a", "b"]}, True),
        ({"type": "array", "items": {"type": "number"}}, True),
        ({"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False}, True),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, True),
        ({"type": "object", "properties": {"n": {"type": "integer"}}}, False),
        ({"type": "object", "properties": {"token": {"type": "integer"}}, "additionalProperties": False}, False),
        ({"type": "integer", "x-sensitivity": "pii"}, False),
        ({"type": "array"}, False),
        ({"type": "string"}, False),
        ({}, False),
    ],
)
def test_a_schema_without_room_for_anything_to_remove_is_trivial(schema: dict[str, Any], trivial: bool) -> None:
    assert compiled(schema).trivial is trivial


@given(
    count=st.integers(),
    rate=st.floats(allow_nan=False),
    when=st.sampled_from(["10.0.0.1", "555-123-4567"]),
    more=json_data,
)
def test_numbers_and_described_fields_of_a_result_are_untouched(count: int, rate: float, when: str, more: Any) -> None:
    schema: dict[str, Any] = {
        "properties": {
            "count": {"type": "integer"},
            "rate": {"type": "number"},
            "when": {"type": "string", "pattern": "."},
            "secret": {"type": "string"},
        }
    }
    done = shown(schema, {"count": count, "rate": rate, "when": when, "secret": "s", "more": more})
    assert (done["count"], done["rate"], done["when"], done["secret"]) == (count, rate, when, "[REDACTED]")


@given(data=json_data)
def test_a_result_without_anything_to_remove_is_the_same_object(data: Any) -> None:
    schemas: list[dict[str, Any]] = [CONTACT, {"items": {"type": "string"}}, {"additionalProperties": {"items": {}}}]
    for schema in schemas:
        done = compiled(schema).apply(data, disclose=NOBODY)
        assert (done.value is data) == (done.paths == ())


# Sinks


@pytest.mark.proves("AUDIT-06")
@pytest.mark.proves("AUDIT-07")
def test_sinks_see_no_mark_no_secret_and_no_match_whatever_the_schema_says() -> None:
    done = compiled(CONTACT).for_sinks({**CONTACT_DATA, "api_key": "sk-secret123456", "password": "supersecret"})
    assert done.value == {
        "email": "[EMAIL_REDACTED]",
        "name": "[REDACTED]",
        "note": "call [PHONE_REDACTED]",
        "salary": "[REDACTED]",
        "flag": "[REDACTED]",
        "card": "[CREDIT_CARD_REDACTED]",
        "password": "[REDACTED]",
        "id": "[PHONE_REDACTED]",
        "api_key": "[REDACTED]",
    }


# Failure


class Broken(dict[str, Any]):
    """Data that makes the redactor raise, with the content in the exception."""

    def items(self) -> Any:
        raise ValueError("canary")


def deep(levels: int) -> Any:
    data: Any = "canary alice@example.com"
    for _ in range(levels):
        data = {"a": [data]}
    return data


def cyclic() -> Any:
    data: dict[str, Any] = {"note": "canary"}
    data["self"] = data
    return data


@pytest.mark.proves("AUDIT-06")
@pytest.mark.parametrize(
    "data", [Broken(a="canary"), {"a": object()}, {"a": b"canary"}, deep(5_000), cyclic()], ids=range(5)
)
def test_a_fault_inside_redaction_withholds_the_content(data: Any) -> None:
    results = compiled({"properties": {"x": {"x-sensitivity": "pii"}}})
    for redact in (REDACTOR.value, results.for_sinks, results.apply):
        with pytest.raises(Failure) as failed:
            redact(data)
        assert failed.value.code == "E3304"
        assert "canary" not in repr(failed.value.envelope("trace"))
        assert failed.value.__cause__ is None
        assert failed.value.__context__ is None


@pytest.mark.proves("AUDIT-06")
def test_a_name_that_is_private_itself_hides_no_other_private_value_from_the_search() -> None:
    results = compiled({"type": "object"})
    data = {"ada@example.com": {"password": "hunter22"}, "note": "call 555-123-4567", "token": "abcd-1234"}
    assert private_values(results, data) == ["call 555-123-4567", "ada@example.com", "abcd-1234", "hunter22"]
    assert private_values(results, data, for_people=True) == ["abcd-1234", "hunter22"]
    with pytest.raises(Failure) as failed:
        private_values(results, {"a": b"canary"})
    assert failed.value.code == "E3304"
    assert failed.value.__context__ is None


@pytest.mark.proves("AUDIT-06")
def test_text_that_is_none_and_a_schema_we_cannot_follow_are_refused() -> None:
    for attempt in (
        lambda: REDACTOR.text(None),  # pyright: ignore[reportArgumentType] - the fault under test
        lambda: safe_message(REDACTOR, None),  # pyright: ignore[reportArgumentType]
        lambda: compiled({"$ref": "https://elsewhere.example/schema"}),
        lambda: compiled({"$ref": "#/$defs/missing"}),
    ):
        with pytest.raises(Failure) as failed:
            attempt()
        assert failed.value.code == "E3304"


# Messages


@pytest.mark.proves("CONTRACT-13")
@each(
    ("text", "safe"),
    [
        ("the bank does not answer", "the bank does not answer"),
        ("no mail to alice@example.com", "no mail to [EMAIL_REDACTED]"),
        ("cannot open /home/alice/notes.txt: denied", "cannot open [path]: denied"),
        ("No such file: '/srv/my data/x y.csv'", "No such file: '[path]'"),
        ("cannot open ~/keys/id_rsa", "cannot open [path]"),
        (r"cannot open C:\Users\John Smith\x.txt now", "cannot open [path] now"),
        ("cannot open D:/data/x.txt", "cannot open [path]"),
        (r"share \\files\team\x.txt gone", "share [path] gone"),
        ("see file:///etc/passwd", "see [path]"),
        ("engine sqlite:////var/lib/x.db failed", "engine [path] failed"),
        ("GET https://api.example.com/v1/users failed", "GET https://api.example.com/v1/users failed"),
        ("either/or, 1/2, /tmp", "either/or, 1/2, /tmp"),
        ('boom\nTraceback (most recent call last):\n  File "x.py", line 1\nKeyError', "boom"),
        ('at File "/app/x.py", line 12, in run failed', "at failed"),
        ("401 for Bearer abc.def-123", "401 for [REDACTED]"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: [REDACTED]"),
        ("key sk-secret123456 refused", "key [REDACTED] refused"),
        ("AKIAIOSFODNN7EXAMPLE", "[REDACTED]"),
        ("ghp_16C7e42F292c6912E7710c838347Ae178B4a", "[REDACTED]"),
        ("xoxb-1234-abcd", "[REDACTED]"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.sig-x", "[REDACTED]"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY----- bad", "[REDACTED] bad"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE", "[REDACTED]"),
        ("login with password=supersecret failed", "login with password=[REDACTED] failed"),
        ("api_key: 'a b c' unknown", "api_key: [REDACTED] unknown"),
        ('{"apiKey": "abc", "n": 1}', '{"apiKey": [REDACTED], "n": 1}'),
        (r"{\"db_password\": \"abc\"}", r"{\"db_password\": [REDACTED]}"),
        ("postgres://app:p@ss@db.internal/x", "postgres://[REDACTED]@db.internal/x"),
        ("Traceback (most recent call last):\n...", ""),
    ],
)
def test_a_message_for_a_model_holds_no_trace_path_or_credential(text: str, safe: str) -> None:
    assert safe_message(REDACTOR, text) == safe
    assert safe_message(REDACTOR, safe) == safe


def test_a_message_is_cut_to_two_thousand_characters() -> None:
    assert len(safe_message(REDACTOR, "x " * 5_000)) == 2_000


@pytest.mark.parametrize(
    "unit", ["/a", "a/", "'/a", "C:\\a ", "eyJ-", "password", 'File "', "-----BEGIN ", "a.", "://a"]
)
def test_hostile_messages_are_read_in_linear_time(unit: str) -> None:
    assert len(safe_message(REDACTOR, unit * (300_000 // len(unit)))) <= 2_000


def test_addresses_that_run_into_one_another_leave_nothing_behind() -> None:
    masking = Patterns(strict=False, extra=(), names=())
    assert masking.mask("ann@example.orgbob@example.net.") == "[EMAIL_REDACTED]."
    assert masking.mask("ann@example.org" + "a." * 400 + "bob@example.net") == "[EMAIL_REDACTED]"
    assert masking.mask("ann@example.org bob@example.net") == "[EMAIL_REDACTED] [EMAIL_REDACTED]"


PIECES = st.lists(
    st.sampled_from(
        ["ann@example.org", "@", "a@b.c", "@" + "a" * 700, ".com ", "a." * 400, "415-555-2671", "078-05-1120 ",
         "4111 1111 1111 1111", "+49 30 (901) 820-55 ", "10.0.0.1", "1" * 40, " " * 300, "x" * 900, "-", "\u2013", "\0"]
    ),
    max_size=12,
).map("".join)  # fmt: skip


@given(text=PIECES, strict=st.booleans())
@example(text="ann@example.org" + "a." * 400 + "ann@example.org", strict=False)
def test_a_long_text_is_masked_in_windows_as_it_is_at_once(text: str, strict: bool) -> None:
    masking = Patterns(strict=strict, extra=(), names=())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patterns, "_WINDOW", 512)
        in_windows = masking.mask(text)
        patch.setattr(patterns, "_WINDOW", 1 << 30)
        assert in_windows == masking.mask(text)


@each(
    "credential",
    [
        "-----BEGIN KEY----- abc -----END KEY-----",
        "://ann:pass@host",
        "bearer abcdef",
        "BEARER abcdef",
        "sk-abcdefij",
        "rk_abcdefij",
        "pk-abcdefij",
        "AKIAIOSFODNN7EXAMPLE",
        "ASIAIOSFODNN7EXAMPLE",
        "ghp_abcdefij",
        "github_pat_abcdefij",
        "glpat-abcdefij",
        "xoxb-abcdefij",
        "AIzaabcdefijklmnopqrstuv",
        "eyJabcdefijk.klm.nop",
        "password=abcdef",
        "api key: abcdef",
    ],
)
def test_each_kind_of_credential_is_hidden_where_nothing_else_is_in_the_text(credential: str) -> None:
    shown = Patterns(strict=False, extra=(), names=SENSITIVE_NAMES).log(credential)
    assert "[REDACTED]" in shown
    assert "abc" not in shown
    assert "EXAMPLE" not in shown
    assert "pass@" not in shown

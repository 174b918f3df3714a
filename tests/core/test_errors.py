"""The one error table: it says what the ledger says, it has no gaps, and nobody overrides it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.contract.contract import ERROR_SCHEMA
from interlock.core.errors import CODES, RETRYABLE, Code, ErrorClass, ErrorCode, Failure
from interlock.data.schema import Schema
from tests.support.codes import CLAUSES, listed
from tests.support.each import each

ROWS = list(CODES.values())
JSONRPC_RESERVED = {-32700, -32600, -32601}
GRPC_STATUSES = {
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
}  # fmt: skip


def test_the_ledger_lists_as_many_codes_as_its_proofs_count() -> None:
    assert [len(list(listed(clause))) for clause in ("CONTRACT-15", "CONTRACT-16", "CONTRACT-17")] == [18, 20, 20]


@pytest.mark.proves("CONTRACT-15")
def test_general_registry_and_token_codes_keep_the_statuses_of_the_ledger() -> None:
    assert {code: CODES[code].http for code, _, _ in listed("CONTRACT-15")} == {
        code: status for code, _, status in listed("CONTRACT-15")
    }


@pytest.mark.proves("CONTRACT-16")
def test_validation_execution_upstream_and_secret_codes_keep_the_statuses_of_the_ledger() -> None:
    assert {code: CODES[code].http for code, _, _ in listed("CONTRACT-16")} == {
        code: status for code, _, status in listed("CONTRACT-16")
    }


@pytest.mark.part_of(
    "CONTRACT-17", rest="E3704 and E3802, which come with callbacks and event streams; the document and state bridges"
)
def test_job_journal_document_and_state_codes_keep_the_statuses_of_the_ledger() -> None:
    assert {code: CODES[code].http for code, _, _ in listed("CONTRACT-17")} == {
        code: status for code, _, status in listed("CONTRACT-17")
    }


@pytest.mark.proves("CONTRACT-18")
def test_codes_of_our_own_take_numbers_that_the_ledger_left_free() -> None:
    theirs = {code for clause in ("CONTRACT-15", "CONTRACT-16", "CONTRACT-17") for code, _, _ in listed(clause)}
    assert theirs <= set(CODES)
    for code in set(CODES) - theirs:
        assert re.fullmatch(r"E3[1-9]\d\d|E3200", code), code
        assert CODES[code].title, code
        assert CODES[code].resolution, code


@pytest.mark.proves("CONTRACT-18")
@each("row", ROWS)
def test_every_code_has_one_value_in_every_column(row: Code) -> None:
    assert CODES[row.code] is row
    assert re.fullmatch(r"E3\d{3}", row.code)
    assert row.error_code in ErrorCode
    assert row.error_class in ErrorClass
    assert 200 <= row.http <= 599
    assert row.grpc in GRPC_STATUSES
    assert -32768 <= row.jsonrpc <= -32000
    assert row.jsonrpc not in JSONRPC_RESERVED


@pytest.mark.proves("CONTRACT-18")
def test_every_error_class_of_the_ledger_is_reachable_and_no_other_exists() -> None:
    names = CLAUSES["CONTRACT-18"].split("22 names ")[1].split(". ")[0].split(", ")
    assert len(names) == 22
    assert {member.value for member in ErrorClass} == set(names)
    assert {row.error_class for row in CODES.values()} == set(ErrorClass)


@pytest.mark.proves("CONTRACT-18")
def test_every_error_code_is_reachable_and_each_has_a_json_rpc_number_of_its_own() -> None:
    assert {row.error_code for row in CODES.values()} == set(ErrorCode)
    numbers = {row.error_code: row.jsonrpc for row in CODES.values()}
    assert len(set(numbers.values())) == len(ErrorCode)


@pytest.mark.proves("CONTRACT-18")
@each("row", ROWS)
def test_the_statuses_of_a_row_agree_with_each_other(row: Code) -> None:
    assert (row.http == 401) == (row.grpc == "UNAUTHENTICATED")
    assert (row.http == 499) == (row.grpc == "CANCELLED")
    assert (row.http == 200) == (row.grpc == "OK")
    if row.http == 429:
        assert row.grpc == "RESOURCE_EXHAUSTED"
    if row.error_code is ErrorCode.CONFLICT:
        assert row.http == 409


def test_a_key_that_was_used_with_other_arguments_is_not_to_be_sent_again() -> None:
    """Other conflicts pass; this key stays with the arguments that it was first used with."""
    refused = Failure("E3306", "the key was used with other arguments")
    assert not refused.retryable
    assert Failure("E3103", "the version is taken").row.error_code is refused.row.error_code


@pytest.mark.part_of(
    "CONTRACT-17", rest="E3704 and E3802, which come with callbacks and event streams; the document and state bridges"
)
def test_a_cache_miss_is_the_only_code_that_is_not_a_failure() -> None:
    assert [row.code for row in CODES.values() if row.http < 202] == ["E3854"]


# The words of CONTRACT-14, taken as yes or no; None is "as the failure says", no where it says nothing.
FLAGS: dict[str, bool | None] = {
    "INVALID_INPUT": False,
    "AUTHORIZATION_DENIED": False,
    "TOOL_NOT_FOUND": False,
    "DEADLINE_EXCEEDED": True,
    "RATE_LIMITED": True,
    "UPSTREAM_FAILURE": True,
    "INTERNAL_TOOL_ERROR": None,
    "RESOURCE_EXHAUSTED": False,
    "PRECONDITION_FAILED": False,
    "CONFLICT": True,
    "APPROVAL_REQUIRED": True,
    "EXECUTION_FAILED": None,
    "COMPOSITE_PARTIAL_FAILURE": False,
    "RETRY_EXHAUSTED": False,
}
_WORDS = {"not retryable": False, "no": False, "yes": True, "poll": True, "with caution": None}


@pytest.mark.proves("CONTRACT-14")
def test_the_retryable_flag_of_each_code_is_as_the_ledger_lists_it() -> None:
    said = {
        name: _WORDS[words.split(",")[0]]
        for name, words in re.findall(r"([A-Z]{4,}(?:_[A-Z]+)*) \(([^)]*)\)", CLAUSES["CONTRACT-14"])
    }
    assert len(said) == 11
    assert said.items() <= FLAGS.items()
    assert {code.value: flag for code, flag in RETRYABLE.items()} == FLAGS
    assert set(FLAGS) == set(re.findall(r"[A-Z]{4,}(?:_[A-Z]+)*", CLAUSES["CONTRACT-14"]))


@pytest.mark.proves("CONTRACT-14")
@each("row", ROWS)
@each("said", [None, False, True])
def test_nobody_overrides_the_flag_where_the_table_decides_it(row: Code, said: bool | None) -> None:
    failure = Failure(row.code, retryable=said)
    expected = bool(said) if row.retryable is None else row.retryable
    assert failure.retryable is expected
    assert failure.envelope("t")["retryable"] is expected
    assert failure.envelope("t")["recoverability"] == ("retry" if expected else "none")


@pytest.mark.parametrize("code", list(ErrorCode))
def test_a_bare_error_code_becomes_a_row_that_has_this_error_code(code: ErrorCode) -> None:
    assert Failure(code).row.error_code is code
    assert Failure(code.value).row.error_code is code
    assert Failure(code).row.code in CODES


def test_a_code_that_is_not_in_the_table_cannot_be_raised() -> None:
    with pytest.raises(ValueError, match="E9999"):
        Failure("E9999")


@each("row", ROWS)
def test_titles_and_resolutions_are_lower_case_without_a_full_stop(row: Code) -> None:
    for text in (row.title, row.resolution):
        assert text == text.strip()
        assert text[0].islower(), text
        assert not text.endswith("."), text
        assert len(text) <= 80, text


@pytest.mark.proves("CONTRACT-13")
@each("row", ROWS)
def test_the_envelope_of_every_code_fits_the_published_error_schema(row: Code) -> None:
    envelope = Failure(row.code, details={"faults": []}, retry_after_ms=5, policy_refs=("p",)).envelope("trace")
    assert Schema(ERROR_SCHEMA).valid(envelope)
    assert (envelope["error_code"], envelope["errorCode"]) == (row.code, row.error_code)
    assert envelope["error_class"] == row.error_class
    assert envelope["humanMessage"] == envelope["message"] == row.title
    assert envelope["resolution"] == row.resolution
    assert envelope["traceId"] == "trace"
    assert envelope["retryAfterMs"] == envelope["retry_after"] == 5
    assert envelope["policy_refs"] == ["p"]
    assert envelope["evidence_refs"] == []
    assert envelope["native_error_ref"] is None


ROOTS = st.sampled_from(["/home", "/srv", "/etc", "/var/lib", "/tmp", "/root", "/usr", "~", "C:\\Users"])
STEPS = st.lists(st.text("abcXYZ019._-", min_size=1, max_size=8).filter(lambda name: name.strip(".")), min_size=1)
HOST_PATHS = st.tuples(ROOTS, STEPS).map(lambda parts: "/".join([parts[0], *parts[1]]))
AROUND = st.sampled_from(
    ["cannot open {}: denied", "'{}'", "`{}` is gone", "UPDATE file:{}", "see file://{}", "({})", "{}", "a {}, b {}"]
)


@pytest.mark.proves("CONTRACT-13")
@given(path=HOST_PATHS, words=AROUND)
def test_no_path_of_the_machine_leaves_in_an_envelope(path: str, words: str) -> None:
    text = words.replace("{}", path)
    failure = Failure(
        "E3801", text, details={"at": [text], text: {"deep": text}}, resolution=text, native_error_ref=text
    )
    envelope = failure.envelope("trace")
    assert path not in str(envelope)
    assert path.split("/")[-1] not in envelope["humanMessage"].replace("[path]", "") or len(path.split("/")[-1]) < 4
    assert failure.in_full == text
    assert failure.details_in_full == {"at": [text], text: {"deep": text}}


@pytest.mark.supports("CONTRACT-13")
@pytest.mark.parametrize(
    "text",
    ["/parameters/0 is missing", "GET /v1/calls/x", "https://api.example.com/etc/x", "either/or, 1/2", "3:/4", "/tmp"],
)
def test_what_only_looks_like_a_path_of_the_machine_stays(text: str) -> None:
    failure = Failure("E3004", text, details={"pointer": "/etc/0", "text": text})
    assert (failure.message, failure.details) == (text, {"pointer": "/etc/0", "text": text})


CREDENTIALS = st.sampled_from([
    "sk-live-0123456789abcdef", "AKIAIOSFODNN7EXAMPLE", "ghp_16C7e42F292c6912E7710c838347Ae178B4a", "xoxb-1234-abcd",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.sig-x", "-----BEGIN PRIVATE KEY-----\nMIIE", "Bearer abc.def-123",
    "password=correcthorse", "api_key: 'a b c'", '"apiKey": "abcdef"', "Authorization: Basic dXNlcjpwYXNz",
    "postgres://app:hunter22@db.internal/x", "passwd: hunter22", "client_secret => abc",
])  # fmt: skip
QUOTED = st.sampled_from(["{}", "cannot log in with {}", "`{}` is refused", "a {}, b", "({})", "no: {}"])


@pytest.mark.proves("CONTRACT-13")
@given(credential=CREDENTIALS, words=QUOTED)
def test_no_credential_is_in_a_failure_nor_in_its_envelope(credential: str, words: str) -> None:
    text = words.replace("{}", credential)
    failure = Failure(
        "E3801", text, details={"at": [text], text: {"deep": text}, "pointer": text, "password": "correcthorse"},
        resolution=text, native_error_ref=text,
    )  # fmt: skip
    told = f"{failure.envelope('trace')} {failure.in_full} {failure.details_in_full} {failure!r}"
    assert credential not in told
    assert "correcthorse" not in told
    assert "hunter22" not in told
    assert "[REDACTED]" in failure.message
    assert Failure("E3801", failure.message).message == failure.message


@pytest.mark.supports("CONTRACT-13")
@pytest.mark.parametrize(
    "text",
    [
        "token: must be a string", "/password: is missing", "missing permission `credentials:maps/key2`",
        "send a token: `Authorization: Bearer …`", "the header must read `Bearer TOKEN`", "send a bearer token",
        "pk_customer: is no field", "the token is malformed: it has 2 parts", "credential:bank2024", "secret:bank2024",
        "https://api.example.com/v1", "token: `abc1234` is unknown",
    ],
)  # fmt: skip
def test_what_only_speaks_of_a_credential_stays(text: str) -> None:
    failure = Failure("E3004", text, details={"pointer": "/token", "text": text, "token": None, "secret": 5})
    assert failure.message == text
    assert failure.details == {"pointer": "/token", "text": text, "token": None, "secret": 5}


@pytest.mark.timeout(60)  # a search that starts again at every word would take many minutes
@pytest.mark.supports("CONTRACT-13")
@pytest.mark.parametrize("part", ["pwd:", "pwd: ", "pwd='", "bearer ", "pwd: basic ", "sk-", "://", "-----BEGIN "])
def test_a_text_of_many_beginnings_of_credentials_is_searched_once(part: str) -> None:
    text = part * (200_000 // len(part)) + "bearer" + " " * 50_000 + "password=correcthorse"
    failure = Failure("E3801", text, details={"text": text})
    assert "correcthorse" not in failure.message
    assert "correcthorse" not in str(failure.details)


def test_a_failure_keeps_the_beginning_of_a_long_text() -> None:
    """A search through a text of megabytes would hold up every other call."""
    text = "12345678" * 400_000
    failure = Failure("E3801", text, resolution=text, native_error_ref=text)
    for kept in (failure.message, failure.in_full, failure.resolution, failure.native_error_ref):
        assert kept is not None
        assert kept.startswith(text[: 1 << 16])
        assert kept[1 << 16 :] == "… [3,134,464 more characters are not shown]"


@pytest.mark.proves("CONTRACT-13")
@given(
    code=st.sampled_from([*CODES, *ErrorCode]),
    message=st.text(max_size=50) | st.none(),
    details=st.none() | st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3),
    retryable=st.none() | st.booleans(),
    retry_after_ms=st.none() | st.integers(min_value=0, max_value=10**9),
)
def test_whatever_a_failure_is_made_of_its_envelope_is_valid(
    code: str,
    message: str | None,
    details: dict[str, int | str] | None,
    retryable: bool | None,
    retry_after_ms: int | None,
) -> None:
    failure = Failure(code, message, details=details, retryable=retryable, retry_after_ms=retry_after_ms)
    envelope = failure.envelope("trace")
    assert Schema(ERROR_SCHEMA).valid(envelope)
    assert envelope["humanMessage"]
    assert ("details" in envelope) == (details is not None)
    assert ("retryAfterMs" in envelope) == (retry_after_ms is not None)
    assert str(failure) == envelope["humanMessage"]
    assert failure.code in repr(failure)

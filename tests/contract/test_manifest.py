"""Manifests: every bound and pattern from both sides, each fault with its pointer, defaults as published."""

from __future__ import annotations

import difflib
import json
import re
from datetime import date
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.contract.manifest import Effect, Manifest, ToolKind, parse_manifest
from interlock.core.errors import Failure
from tests.support.each import each
from tests.support.manifests import REQUIRED

Json = dict[str, Any]
MINIMAL: Json = {
    "tool_id": "send_email",
    "version": "1.0.0",
    "name": "Send",
    "description": "Send one e-mail.",
    "provider": "mail team",
    "protocol": "native",
    "parameters": {"type": "object"},
}


def placed(path: str, value: Any) -> Json:
    """A minimal manifest with a value at a dotted path."""
    outer, _, inner = path.partition(".")
    return MINIMAL | {outer: {inner: value} if inner else value}


def refusal(document: Any) -> Failure | None:
    """The failure with which a manifest is refused, if it is; one that is accepted reads back as itself."""
    try:
        manifest = parse_manifest(document)
    except Failure as failure:
        return failure
    assert parse_manifest(manifest.document()) == manifest
    return None


def faults(document: Any) -> list[Json]:
    """The faults for which a manifest is refused; none if it is accepted."""
    failure = refusal(document)
    if failure is None:
        return []
    assert (failure.code, failure.row.http) == ("E3105", 422)
    assert failure.details is not None
    assert failure.details["faults"]
    return list(failure.details["faults"])


def pointers(document: Any) -> list[str]:
    return [fault["pointer"] for fault in faults(document)]


@pytest.mark.proves("CONTRACT-02")
@each(("field", "value"), [(field, value) for field, good, _ in REQUIRED for value in good])
def test_a_required_field_is_accepted_inside_its_bounds(field: str, value: Any) -> None:
    assert faults(MINIMAL | {field: value}) == []


@pytest.mark.proves("CONTRACT-02")
@each(("field", "value"), [(field, value) for field, _, bad in REQUIRED for value in bad])
def test_a_required_field_is_refused_one_step_outside_with_its_pointer(field: str, value: Any) -> None:
    assert pointers(MINIMAL | {field: value}) == [f"/{field}"]


@pytest.mark.proves("CONTRACT-02")
@pytest.mark.parametrize("field", [field for field, _, _ in REQUIRED])
def test_a_missing_required_field_is_named(field: str) -> None:
    assert pointers({name: value for name, value in MINIMAL.items() if name != field}) == [f"/{field}"]


@pytest.mark.proves("CONTRACT-02")
def test_every_fault_is_listed_at_once() -> None:
    document = MINIMAL | {"tool_id": "A", "version": "1", "priority": 11, "author": {"email": "x", "url": "y"}}
    assert pointers(document) == ["/tool_id", "/version", "/priority", "/author/email", "/author/url"]
    assert pointers({}) == [f"/{field}" for field, _, _ in REQUIRED]


@pytest.mark.proves("CONTRACT-02")
@pytest.mark.parametrize("document", [None, [], "text", 5, True, [MINIMAL]])
def test_what_is_not_an_object_is_refused_as_a_whole(document: Any) -> None:
    assert pointers(document) == [""]


@pytest.mark.proves("CONTRACT-02")
def test_a_fault_inside_a_schema_names_the_place_in_the_schema() -> None:
    document = MINIMAL | {"parameters": {"type": "object", "properties": {"a": {"type": "text"}}}}
    [fault] = faults(document)
    assert fault["pointer"].startswith("/parameters")
    assert "/properties/a/type" in fault["pointer"] + fault["message"]


# Numbers: path, lowest, highest, default
BOUNDS: list[tuple[str, float, float, float | None]] = [
    ("timeout_default", 1, 7200, 30),
    ("timeout_max", 30, 86_400, None),  # the lowest is timeout_default, which is 30 here
    ("retry_policy.max_attempts", 1, 10, 3),
    ("retry_policy.backoff_multiplier", 1.0, 10.0, 2.0),
    ("retry_policy.backoff_max_seconds", 1, 300, 60),
    ("circuit_breaker_config.failure_threshold", 1, 100, 5),
    ("circuit_breaker_config.success_threshold", 1, 100, 3),
    ("circuit_breaker_config.timeout_seconds", 1, 3600, 60),
    ("circuit_breaker_config.half_open_max_calls", 1, 100, 10),
    ("checkpoint_config.micro_interval_seconds", 10, 300, 30),
    ("priority", 1, 10, 5),
]


def at(manifest: Manifest, path: str) -> Any:
    found: Any = manifest
    for step in path.split("."):
        found = getattr(found, step)
    return found


@pytest.mark.proves("CONTRACT-03")
@given(st.data())
@pytest.mark.parametrize(("path", "low", "high"), [bounds[:3] for bounds in BOUNDS])
def test_a_number_is_accepted_exactly_within_its_bounds(
    path: str, low: float, high: float, data: st.DataObject
) -> None:
    around = st.integers(int(low) - 3, int(low) + 3) | st.integers(int(high) - 3, int(high) + 3) | st.integers()
    value: float = data.draw(around)
    if isinstance(low, float):
        near = st.floats(low - 0.01, low + 0.01) | st.floats(high - 0.01, high + 0.01) | st.floats(allow_nan=True)
        value = data.draw(around | near)
    where = "/" + path.replace(".", "/")
    assert pointers(placed(path, value)) == ([] if low <= value <= high else [where])


@pytest.mark.proves("CONTRACT-03")
@pytest.mark.parametrize(("path", "low", "high"), [bounds[:3] for bounds in BOUNDS])
def test_a_number_is_accepted_on_its_bounds_and_refused_beside_them(path: str, low: float, high: float) -> None:
    where = "/" + path.replace(".", "/")
    for value in (low, high):
        assert faults(placed(path, value)) == []
    for wrong in (low - 1, high + 1, str(low), True, [low], float("nan"), float("inf")):
        assert pointers(placed(path, wrong)) == [where], wrong


@pytest.mark.proves("CONTRACT-03")
@pytest.mark.parametrize(
    ("codes", "wrong"), [([400, 599], []), ([399], [0]), ([429, 600], [1]), ([399, 500, 600], [0, 2]), ([], [])]
)
def test_status_codes_to_retry_on_lie_within_400_and_599(codes: list[int], wrong: list[int]) -> None:
    expected = [f"/retry_policy/retry_on_status_codes/{index}" for index in wrong]
    assert pointers(placed("retry_policy.retry_on_status_codes", codes)) == expected


@pytest.mark.proves("CONTRACT-03")
def test_a_manifest_with_none_of_the_numbers_has_exactly_the_listed_defaults() -> None:
    manifest = parse_manifest(MINIMAL)
    assert {path: at(manifest, path) for path, *_ in BOUNDS} == {path: default for path, _, _, default in BOUNDS}
    assert list(manifest.retry_policy.retry_on_status_codes) == [429, 500, 502, 503, 504]
    assert manifest.checkpoint_config.enabled is False
    assert list(manifest.checkpoint_config.macro_events) == []


@pytest.mark.proves("CONTRACT-03")
def test_a_part_that_says_one_number_keeps_the_other_defaults() -> None:
    manifest = parse_manifest(placed("circuit_breaker_config.failure_threshold", 9))
    assert manifest.circuit_breaker_config.model_dump() == {
        "failure_threshold": 9,
        "success_threshold": 3,
        "timeout_seconds": 60,
        "half_open_max_calls": 10,
        "per": "service",
        "window_seconds": 60,
        "failure_rate": None,
        "failure_rate_calls": 10,
        "canary_share": None,
    }


@pytest.mark.proves("CONTRACT-03")
def test_checkpoints_take_a_switch_and_a_list_of_events() -> None:
    config = {"enabled": True, "macro_events": ["phase_complete"]}
    manifest = parse_manifest(MINIMAL | {"checkpoint_config": config})
    assert manifest.checkpoint_config.enabled is True
    assert list(manifest.checkpoint_config.macro_events) == ["phase_complete"]
    assert pointers(placed("checkpoint_config.enabled", "yes")) == ["/checkpoint_config/enabled"]
    assert pointers(placed("checkpoint_config.macro_events", [5])) == ["/checkpoint_config/macro_events/0"]


@pytest.mark.proves("CONTRACT-03")
@given(st.integers(1, 7200), st.integers(1, 86_400))
def test_a_longest_timeout_below_the_usual_one_is_refused(usual: int, longest: int) -> None:
    document = MINIMAL | {"timeout_default": usual, "timeout_max": longest}
    assert pointers(document) == ([] if longest >= usual else ["/timeout_max"])


@pytest.mark.proves("CONTRACT-03")
def test_the_longest_timeout_is_compared_with_the_default_where_nothing_is_said() -> None:
    assert pointers(MINIMAL | {"timeout_max": 29}) == ["/timeout_max"]
    assert pointers(MINIMAL | {"timeout_max": 1}) == ["/timeout_max"]
    assert pointers(MINIMAL | {"timeout_max": 30}) == []


# Permissions, limits, network
ACCESS: list[tuple[str, list[Any], list[Any]]] = [
    ("required_permissions", [[], ["filesystem:read:/data"], ["network:https://api.example.com",
         "credentials:aws_s3"], ["a:b"], ["_:x"]], []),
    ("resource_limits.cpu", ["1", "500m", "0", "64"], ["", "m", "1.5", "500M", "-1", "1 ", "1\n", "\u0664", "1c", 1,
         None]),
    ("resource_limits.memory", ["512Mi", "2Gi", "0Mi"], ["", "512", "Mi", "1.5Gi", "512MB", "512Ki", "1Ti", "512mi",
         "\u0664Mi", "1Gi\n", 512, None]),
    ("resource_limits.ephemeral_storage", ["512Mi", "1Gi"], ["", "1", "1G", "1gi", "-1Gi", "1Gi ", "\u0664Gi", None]),
    ("network_policy.deny_all_egress", [True, False], [1, "true", None]),
    ("external_service", ["sendgrid", "stripe_api"], [5, ["x"]]),
]  # fmt: skip
DOMAINS_GOOD = ["example.com", "*.example.com", "localhost", "a-b.example.com", "EXAMPLE.com", "1.example",
"a" * 63 + ".com", "xn--bcher-kva.de"]  # fmt: skip
DOMAINS_BAD = [
    "", "*", "*.", "a.*.com", "*.*.com", "**.com", "*a.com", "a*.com", ".com", "a..com", "a.com.", "-a.com", "a-.com",
    "a_b.com", "http://a.com",
    "a.com/x", "a.com:80", "a b.com", "a.com\n", "a" * 64 + ".com", ".".join(["a" * 60] * 5), "b\u00fccher.de", 5,
]  # fmt: skip


@pytest.mark.proves("CONTRACT-04")
@each(("path", "value"), [(path, value) for path, good, _ in ACCESS for value in good])
def test_permissions_limits_and_services_are_accepted_in_their_forms(path: str, value: Any) -> None:
    assert faults(placed(path, value)) == []


@pytest.mark.proves("CONTRACT-04")
@each(("path", "value"), [(path, value) for path, _, bad in ACCESS for value in bad])
def test_permissions_limits_and_services_are_refused_in_any_other_form(path: str, value: Any) -> None:
    assert pointers(placed(path, value)) == ["/" + path.replace(".", "/")]


@pytest.mark.proves("CONTRACT-04")
@pytest.mark.parametrize(
    "permission", ["", "network", ":x", "network:", "Network:x", "net-work:x", "n1:x", "network:a b", " a:b", "a:b ", 5]
)
def test_a_permission_of_another_form_is_refused_with_its_position(permission: Any) -> None:
    assert pointers(MINIMAL | {"required_permissions": ["a:b", permission]}) == ["/required_permissions/1"]


@pytest.mark.proves("CONTRACT-04")
@pytest.mark.parametrize("domain", DOMAINS_GOOD)
def test_host_names_and_one_leading_wildcard_are_accepted(domain: str) -> None:
    assert faults(placed("network_policy.allowed_domains", [domain])) == []


@pytest.mark.proves("CONTRACT-04")
@each("domain", DOMAINS_BAD)
def test_other_domains_are_refused_with_their_position(domain: Any) -> None:
    document = placed("network_policy.allowed_domains", ["example.com", domain])
    assert pointers(document) == ["/network_policy/allowed_domains/1"]


@pytest.mark.proves("CONTRACT-04")
@pytest.mark.parametrize(
    ("port", "good"),
    [(1, True), (65_535, True), (0, False), (65_536, False), (-1, False), ("80", False), (True, False)],
)
def test_ports_lie_within_1_and_65535(port: Any, good: bool) -> None:
    expected = [] if good else ["/network_policy/allowed_ports/0"]
    assert pointers(placed("network_policy.allowed_ports", [port])) == expected


@pytest.mark.proves("CONTRACT-04")
def test_limits_and_network_have_exactly_the_listed_defaults() -> None:
    manifest = parse_manifest(MINIMAL)
    assert manifest.resource_limits.model_dump() == {"cpu": "1", "memory": "512Mi", "ephemeral_storage": "1Gi"}
    assert list(manifest.network_policy.allowed_domains) == []
    assert list(manifest.network_policy.allowed_ports) == [80, 443]
    assert manifest.network_policy.deny_all_egress is False
    assert manifest.external_service is None


@pytest.mark.proves("CONTRACT-04")
@given(st.integers(0, 10**6), st.sampled_from([("Mi", 2**20), ("Gi", 2**30)]))
def test_limits_come_out_as_cores_and_bytes(number: int, unit: tuple[str, int]) -> None:
    text, factor = unit
    limits = parse_manifest(
        MINIMAL | {"resource_limits": {"cpu": f"{number}m", "memory": f"{number}{text}",
        "ephemeral_storage": f"{number}{text}"}}
    ).resource_limits  # fmt: skip
    assert limits.cores == number / 1000
    assert limits.memory_bytes == limits.storage_bytes == number * factor
    assert parse_manifest(placed("resource_limits.cpu", str(number))).resource_limits.cores == number


@pytest.mark.proves("CONTRACT-04")
@pytest.mark.parametrize("path", ["resource_limits.cpu", "resource_limits.memory", "resource_limits.ephemeral_storage"])
def test_a_limit_of_absurd_length_is_refused_and_never_breaks_its_reader(path: str) -> None:
    text = "9" * 5000 + ("m" if path.endswith("cpu") else "Mi")
    assert pointers(placed(path, text)) == ["/" + path.replace(".", "/")]


# Lifecycle and description
FORMATS: list[tuple[str, list[Any], list[Any]]] = [
    ("lifecycle_state", ["active", "deprecated", "sunset", "removed"], ["draft", "Active", "", None, 5]),
    ("deprecation_date", ["2026-02-28", "2024-02-29"], ["2026-02-29", "2026-13-01", "2026-1-1", "01.02.2026", "soon",
         "", "2026-01-01T00:00:00", "2026-01-01T00:00:00Z", "0", 0, 86_400, 1.5, True]),
    ("sunset_date", ["2026-02-28", "2024-02-29"], ["2026-02-30", "20260228", "2026-02-28 ", "tomorrow", 0,
         1_700_006_400, []]),
    ("migration_guide_url", ["https://example.com/guide", "urn:guide"], ["guide", "/guide", "//example.com",
         "http://a b", "", 5]),
    ("documentation_url", ["https://example.com/docs#a"], ["docs", "example.com/docs", "https://exa mple.com", 5]),
    ("source_code_url", ["https://example.com/repo.git"], ["repo", "C:\\repo", "git@example.com:repo", "", 5]),
    ("author.url", ["https://example.com/ada"], ["ada", "www.example.com", "http://[", 5]),
    ("author.email", ["ada@example.com", "a+b@example.com"], ["ada", "ada@", "@example.com", "a b@example.com",
         "ada@exa mple.com", "", 5]),
    ("author.name", ["Ada"], [5, []]),
    ("replacement_tool_id", ["send_mail"], [5]),
    ("tags", [[], ["email", "communication"]], ["email", [5], None]),
    ("changelog", ["first"], [5]),
    ("breaking_changes", [True, False], ["no", 0, None]),
    ("license", ["MIT", "Apache-2.0", "Proprietary"], [5, ["MIT"]]),
]  # fmt: skip


@pytest.mark.proves("CONTRACT-05")
@each(("path", "value"), [(path, value) for path, good, _ in FORMATS for value in good])
def test_lifecycle_and_descriptive_fields_are_accepted_in_their_formats(path: str, value: Any) -> None:
    assert faults(placed(path, value)) == []


@pytest.mark.proves("CONTRACT-05")
@each(("path", "value"), [(path, value) for path, _, bad in FORMATS for value in bad])
def test_a_bad_format_is_refused_with_its_pointer(path: str, value: Any) -> None:
    [where] = pointers(placed(path, value))
    assert where.startswith("/" + path.replace(".", "/"))


@pytest.mark.proves("CONTRACT-05")
def test_lifecycle_fields_have_exactly_the_listed_defaults() -> None:
    manifest = parse_manifest(MINIMAL)
    assert manifest.lifecycle_state == "active"
    assert manifest.breaking_changes is False
    assert list(manifest.tags) == []
    unsaid = [
        manifest.deprecation_date, manifest.sunset_date, manifest.migration_guide_url, manifest.documentation_url,
        manifest.source_code_url, manifest.replacement_tool_id, manifest.changelog, manifest.license, manifest.author,
    ]  # fmt: skip
    assert unsaid == [None] * 9


@pytest.mark.proves("CONTRACT-05")
def test_dates_come_out_as_dates_also_where_yaml_read_them_as_such() -> None:
    assert parse_manifest(MINIMAL | {"sunset_date": "2026-02-28"}).sunset_date == date(2026, 2, 28)
    manifest = parse_manifest(MINIMAL | {"sunset_date": date(2026, 2, 28)})
    assert manifest.sunset_date == date(2026, 2, 28)
    assert manifest.document()["sunset_date"] == "2026-02-28"


SEND_EMAIL: Json = {
    "tool_id": "send_email",
    "version": "1.2.3",
    "name": "Email Sender",
    "description": "Send emails via SMTP or SendGrid API. Supports attachments, HTML templates, and delivery tracking.",
    "provider": "Platform Team",
    "protocol": "native",
    "parameters": {
        "type": "object",
        "properties": {
            "to": {"type": "string", "format": "email"},
            "subject": {"type": "string", "maxLength": 200},
            "body": {"type": "string"},
            "attachments": {"type": "array", "items": {"type": "string", "format": "uri"}},
        },
        "required": ["to", "subject", "body"],
    },
    "result_schema": {
        "type": "object",
        "properties": {
            "message_id": {"type": "string"},
            "status": {"type": "string", "enum": ["sent", "queued", "failed"]},
        },
        "required": ["message_id", "status"],
    },
    "required_permissions": ["network:https://api.sendgrid.com", "credentials:sendgrid"],
    "timeout_default": 30,
    "external_service": "sendgrid",
    "circuit_breaker_config": {"failure_threshold": 5, "timeout_seconds": 60},
    "priority": 7,
    "tags": ["communication", "email", "notifications"],
}


@pytest.mark.proves("CONTRACT-05")
def test_the_published_example_is_accepted_unchanged() -> None:
    manifest = parse_manifest(json.loads(json.dumps(SEND_EMAIL)))
    assert manifest.document() == SEND_EMAIL
    assert manifest.circuit_breaker_config.half_open_max_calls == 10
    assert manifest.address == "default.send_email"


# Beyond the published schema


@pytest.mark.proves("CONTRACT-10")
def test_tool_kinds_are_a_closed_list() -> None:
    kinds = get_args(ToolKind)
    assert len(kinds) == len(set(kinds)) == 17
    for kind in kinds:
        assert faults(MINIMAL | {"tool_kind": kind}) == []
    assert pointers(MINIMAL | {"tool_kind": "plugin"}) == ["/tool_kind"]


@pytest.mark.proves("EFFECT-01")
@pytest.mark.parametrize(
    ("kind", "counts_as"),
    [
        ("fully_reversible", "write_reversible"),
        ("semantically_reversible", "write_reversible"),
        ("compensable_with_side_effects", "write_irreversible"),
        ("irreversible", "write_irreversible"),
    ],
)
def test_how_well_an_effect_can_be_taken_back_decides_its_class(kind: str, counts_as: str) -> None:
    said = MINIMAL | {"compensation_class": kind}
    assert parse_manifest(said).mutation_class == counts_as
    for name in ("read_only", "write_reversible", "write_irreversible"):
        assert pointers(said | {"mutation_class": name}) == ([] if name == counts_as else ["/compensation_class"])


@pytest.mark.proves("EFFECT-01")
def test_mutation_classes_are_a_closed_list_and_none_is_assumed() -> None:
    for name in ("read_only", "write_reversible", "write_irreversible"):
        assert parse_manifest(MINIMAL | {"mutation_class": name}).mutation_class == name
    for wrong in ("write", "READ_ONLY", "", 5):
        assert pointers(MINIMAL | {"mutation_class": wrong}) == ["/mutation_class"]
    assert parse_manifest(MINIMAL).mutation_class is None


@pytest.mark.proves("EFFECT-02")
def test_effects_name_a_resource_an_operation_and_a_scope() -> None:
    for operation in ("CREATE", "UPDATE", "DELETE"):
        manifest = parse_manifest(MINIMAL | {"effects": [{"resource": "mail:{to}", "operation": operation}]})
        assert manifest.effects == (Effect("mail:{to}", operation, "resource"),)  # pyright: ignore[reportArgumentType] - one of the three
        for scope in ("field", "resource", "collection", "tenant", "system"):
            said = {"resource": "mail:{to}", "operation": operation, "scope": scope}
            assert parse_manifest(MINIMAL | {"effects": [said]}).effects == (Effect("mail:{to}", operation, scope),)  # pyright: ignore[reportArgumentType] - as above
    for wrong in (5, None, ["tenant"]):
        said = {"resource": "mail", "operation": "CREATE", "scope": wrong}
        assert pointers(MINIMAL | {"effects": [said]}) == ["/effects/0/scope"]
    assert pointers(MINIMAL | {"effects": [{"resource": "mail", "operation": "SEND"}]}) == ["/effects/0/operation"]
    assert pointers(MINIMAL | {"effects": [{"resource": "", "operation": "CREATE"}]}) == ["/effects/0/resource"]
    assert pointers(MINIMAL | {"effects": [{"operation": "CREATE"}]}) == ["/effects/0/resource"]


def test_audit_cannot_be_switched_off() -> None:
    assert pointers(MINIMAL | {"observability": {"audit": False}}) == ["/observability/audit"]


# Words


@pytest.mark.parametrize(
    ("document", "where", "near"),
    [
        (MINIMAL | {"timeuot_default": 5}, "/timeuot_default", "timeout_default"),
        (MINIMAL | {"mutationclass": "read_only"}, "/mutationclass", "mutation_class"),
        (MINIMAL | {"licence": "MIT"}, "/licence", "license"),
        (placed("retry_policy.max_atempts", 3), "/retry_policy/max_atempts", "max_attempts"),
        (placed("circuit_breaker_config.timeout_second", 3), "/circuit_breaker_config/timeout_second",
             "timeout_seconds"),
        (placed("author.emial", "a@b.c"), "/author/emial", "email"),
        (MINIMAL | {"effects": [{"resource": "r", "operation": "CREATE", "scop": "x"}]}, "/effects/0/scop", "scope"),
    ],
)  # fmt: skip
def test_a_misspelt_field_is_named_with_the_nearest(document: Json, where: str, near: str) -> None:
    [fault] = faults(document)
    assert fault["pointer"] == where
    assert f"did you mean `{near}`?" in fault["message"]


@pytest.mark.supports("CONTRACT-02")
def test_a_field_that_resembles_none_is_named_alone() -> None:
    assert difflib.get_close_matches("zzzz", Manifest.model_fields) == []
    assert faults(MINIMAL | {"zzzz": 1}) == [{"pointer": "/zzzz", "message": "not a field of a manifest"}]


@pytest.mark.parametrize(
    ("path", "value"),
    [("tags", "email"), ("retry_policy", 5), ("retry_policy", None), ("parameters", "x"), ("author", []),
    ("network_policy.allowed_ports", 80)],
)  # fmt: skip
def test_faults_speak_of_lists_and_objects_not_of_python(path: str, value: Any) -> None:
    [fault] = faults(placed(path, value))
    assert not re.search(r"tuple|dictionary|instance of|None|class", fault["message"]), fault["message"]


def test_messages_begin_in_lower_case_and_end_without_a_full_stop() -> None:
    for document in ({}, MINIMAL | {"tool_id": "A"}, MINIMAL | {"priority": 0}, MINIMAL | {"protocol": "x"}):
        for fault in faults(document):
            assert not fault["message"][0].isupper(), fault["message"]
            assert not fault["message"].endswith("."), fault["message"]


# Anything at all

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_LEAKS = re.compile(r'Traceback|File "|site-packages|pydantic|0x[0-9a-f]{6}|/work/|/home/|\.py\b', re.IGNORECASE)


def outcome(document: Any) -> None:
    """Read a document; anything but a manifest or a clean refusal fails the test."""
    faults(document)
    failure = refusal(document)
    assert failure is None or not _LEAKS.search(failure.message)


@given(JSON)
def test_arbitrary_json_is_a_manifest_or_refused_and_nothing_else(document: Any) -> None:
    outcome(document)


@given(st.dictionaries(st.sampled_from(sorted(Manifest.model_fields)), JSON, max_size=4))
def test_arbitrary_json_in_known_fields_is_accepted_or_refused_and_nothing_else(edits: Json) -> None:
    outcome(MINIMAL | edits)


@given(JSON, st.sampled_from(["parameters", "result_schema", "error_schema"]))
def test_arbitrary_json_as_a_schema_is_accepted_or_refused_and_nothing_else(part: Any, field: str) -> None:
    outcome(MINIMAL | {field: {"type": part, "properties": {"a": part}, "enum": part, "pattern": part}})
    outcome(MINIMAL | {field: {"properties": {"a": {"default": part, "examples": [part]}}}})


@each("field", ["annotations", "parameters", "examples", "tags", "author"])
@each("depth", [100, 300, 5000])
def test_deep_nesting_is_accepted_or_refused_and_nothing_else(field: str, depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    outcome(MINIMAL | {field: [value] if field in ("examples", "tags") else value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800"], ids=ascii)
@pytest.mark.parametrize("field", ["annotations", "parameters", "examples"])
def test_what_json_cannot_hold_is_refused_wherever_it_stands(field: str, value: Any) -> None:
    part: Any = {"default": value}
    [where] = pointers(MINIMAL | {field: [part] if field == "examples" else part})
    assert where.startswith(f"/{field}")

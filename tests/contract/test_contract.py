"""The contract: ten parts and none optional, the same after a round trip, and classes that follow the rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock import Field, Interlock, tool
from interlock.contract.contract import (
    ERROR_SCHEMA,
    Contract,
    ToolId,
    contract_of,
    parse_contract,
)
from interlock.contract.manifest import MutationClass, parse_manifest
from interlock.contract.timeouts import CLASS_MAX_S, TimeoutClass, class_for_latency, infer_class
from interlock.core.errors import Failure
from interlock.data.canonical import digest
from interlock.data.explain import input_faults
from interlock.data.schema import Schema
from tests.support.manifests import COMPLETE

Json = dict[str, Any]
PARTS = ["id", "version", "input", "output", "error", "auth", "timeout", "idempotency", "mutation", "observability"]


def contract(**edits: Any) -> Contract:
    document = COMPLETE | edits
    return parse_contract({name: value for name, value in document.items() if value is not None})


def refused(**edits: Any) -> str:
    with pytest.raises(Failure) as caught:
        contract(**edits)
    assert caught.value.code == "E3105"
    return caught.value.message


# The ten parts


@pytest.mark.proves("CONTRACT-01")
def test_a_contract_without_any_one_of_its_ten_parts_cannot_be_made() -> None:
    whole = contract()
    given: Json = {part: getattr(whole, part) for part in [*PARTS, "manifest"]}
    assert Contract(**given) == whole
    errors: set[str] = set()
    for part in PARTS:
        with pytest.raises(TypeError, match=f"'{part}'") as caught:
            Contract(**{name: value for name, value in given.items() if name != part})
        errors.add(str(caught.value))
    assert len(errors) == 10


# The parts a document can leave out, by the field that says them; the other two have a published default.
FIELDS = {
    "id": "tool_id",
    "version": "version",
    "input": "parameters",
    "output": "result_schema",
    "auth": "required_permissions",
    "idempotency": "idempotency",
    "mutation": "mutation_class",
    "observability": "observability",
}


@pytest.mark.proves("CONTRACT-01")
def test_a_document_without_a_part_is_refused_with_words_of_its_own() -> None:
    messages = {field: refused(**{field: None}) for field in FIELDS.values()}
    assert len(set(messages.values())) == len(FIELDS)
    for field, message in messages.items():
        assert field in message, message


@pytest.mark.proves("CONTRACT-01")
def test_a_document_without_several_parts_is_told_all_of_them() -> None:
    missing = ("result_schema", "required_permissions", "mutation_class", "idempotency", "observability")
    message = refused(**dict.fromkeys(missing))
    assert message.startswith("bank.balance is incomplete")
    for field in missing:
        assert f"{field}: " in message


@pytest.mark.proves("CONTRACT-01")
def test_the_parts_say_what_the_document_said() -> None:
    made = contract()
    assert made.id == ToolId("bank", "balance")
    assert (str(made.id), made.ref, made.version) == ("bank.balance", "bank.balance@1.0.0", "1.0.0")
    assert made.output == Schema({"type": "integer"})
    assert made.error == Schema(ERROR_SCHEMA)
    assert made.auth.required_permissions == ("database:ledger:read",)
    assert made.auth.required_scopes == ("ledger.read",)
    assert (made.timeout.timeout_class, made.timeout.default_s, made.timeout.max_s) == ("standard", 5.0, 5.0)
    assert (made.mutation.mutation_class, made.mutation.writes) == ("read_only", False)
    assert (made.observability.trace, made.observability.metrics) == (True, True)


@pytest.mark.parametrize("mutation_class", get_args(MutationClass))
def test_a_write_demands_a_key_and_a_read_does_not(mutation_class: MutationClass) -> None:
    made = contract(mutation_class=mutation_class)
    assert made.idempotency.key_required == made.mutation.writes == (mutation_class != "read_only")


def test_an_error_schema_of_the_authors_own_is_kept() -> None:
    assert contract(error_schema={"type": "object"}).error == Schema({"type": "object"})


# Round trips

NAMES = st.from_regex(r"[a-z][a-z0-9_]{2,20}", fullmatch=True)
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS
JSON = st.recursive(
    VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=5
)
PART_SCHEMAS: st.SearchStrategy[Json] = st.fixed_dictionaries(
    {"type": st.sampled_from(["string", "integer", "number", "boolean", "array", "object"])},
    optional={
        "description": WORDS,
        "examples": st.lists(JSON, max_size=2),
        "default": JSON,
        "enum": st.lists(VALUES, min_size=1, max_size=3, unique_by=repr),
        "x-sensitivity": st.sampled_from(["pii", "secret"]),
        "x-token-cost": st.integers(0, 100),
        "x-internal": st.booleans(),
    },
)
OBJECT_SCHEMAS: st.SearchStrategy[Json] = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": st.dictionaries(NAMES, PART_SCHEMAS, max_size=3)},
    optional={"additionalProperties": st.booleans(), "description": WORDS},
)
EFFECTS = st.fixed_dictionaries(
    {"resource": WORDS.filter(bool), "operation": st.sampled_from(["CREATE", "UPDATE", "DELETE"])},
    optional={"scope": WORDS},
)
DOCUMENTS: st.SearchStrategy[Json] = st.fixed_dictionaries(
    {
        "tool_id": NAMES,
        "version": st.tuples(*[st.integers(0, 99)] * 3).map(lambda numbers: ".".join(map(str, numbers))),
        "name": WORDS.map(lambda text: f"Tool {text}"),
        "description": WORDS.map(lambda text: f"It does: {text}."),
        "provider": WORDS,
        "protocol": st.sampled_from(["native", "mcp", "openapi", "langchain", "custom"]),
        "parameters": OBJECT_SCHEMAS,
        "result_schema": PART_SCHEMAS | OBJECT_SCHEMAS,
        "required_permissions": st.lists(NAMES.map(lambda name: f"database:{name}"), max_size=2),
        "idempotency": st.fixed_dictionaries({}, optional={"window_seconds": st.integers(1, 31_536_000)}),
        "observability": st.fixed_dictionaries({}, optional={"trace": st.booleans(), "metrics": st.booleans()}),
        "mutation_class": st.sampled_from(get_args(MutationClass)),
        "restart_safe": st.just(True),
    },
    optional={
        "namespace": NAMES,
        "timeout_default": st.integers(1, 7200),
        "timeout_max": st.integers(7200, 86_400),
        "effects": st.lists(EFFECTS, max_size=2),
        "required_scopes": st.lists(WORDS, max_size=2),
        "error_schema": OBJECT_SCHEMAS,
        "retry_policy": st.fixed_dictionaries({}, optional={"backoff_multiplier": st.floats(1, 10)}),
        "annotations": st.dictionaries(WORDS, JSON, max_size=2),
        "examples": st.lists(st.dictionaries(NAMES, JSON, max_size=2), max_size=2),
        "sunset_date": st.dates().map(str),
        "tags": st.lists(WORDS, max_size=2),
        "priority": st.integers(1, 10),
        "coerce_output": st.booleans(),
    },
)


@pytest.mark.proves("CONTRACT-01")
@given(DOCUMENTS)
def test_any_contract_survives_being_written_and_read_unchanged(document: Json) -> None:
    made = parse_contract(document)
    again = parse_contract(json.loads(json.dumps(made.document())))
    assert again == made
    assert again.digest == made.digest == digest(made.document())
    assert parse_contract(made.document()).document() == made.document()


@pytest.mark.proves("CONTRACT-01")
@given(DOCUMENTS)
def test_reading_a_document_keeps_everything_its_author_said(document: Json) -> None:
    assert digest(parse_contract(document).document()) == digest(document)


@given(DOCUMENTS, st.sampled_from([{"priority": 10}, {"provider": "someone else"}, {"tags": ["x", "y", "z"]}]))
def test_a_contract_that_says_anything_else_has_another_digest(document: Json, edit: Json) -> None:
    changed = document | edit
    assert (parse_contract(changed).digest == parse_contract(document).digest) == (changed == document)


# Timeout classes

SMALLEST: list[tuple[float, TimeoutClass]] = [
    (0.001, "interactive"),
    (0.5, "interactive"),
    (0.501, "standard"),
    (1, "standard"),
    (5, "standard"),
    (5.001, "long_running"),
    (6, "long_running"),
    (30, "long_running"),
    (300, "long_running"),
    (300.001, "async"),
    (301, "async"),
    (7200, "async"),
]
BEHAVIOUR = "async calls that are submitted of themselves and told by callback"


@pytest.mark.part_of("LIFE-09", rest=BEHAVIOUR)
@pytest.mark.parametrize(("timeout_s", "expected"), SMALLEST)
def test_a_timeout_takes_the_smallest_class_that_holds_it(timeout_s: float, expected: TimeoutClass) -> None:
    assert infer_class(timeout_s) == expected


@pytest.mark.part_of("LIFE-09", rest=BEHAVIOUR)
@given(st.integers(1, 7200))
def test_a_manifest_without_a_class_takes_the_smallest_that_holds_its_timeout(timeout_s: int) -> None:
    timeout = contract(timeout_class=None, timeout_default=timeout_s).timeout
    order: list[TimeoutClass] = ["interactive", "standard", "long_running", "async"]
    assert timeout.timeout_class == next(name for name in order if CLASS_MAX_S[name] >= timeout_s)
    assert timeout.default_s == timeout_s
    assert timeout.default_s <= timeout.max_s <= CLASS_MAX_S[timeout.timeout_class]


@pytest.mark.part_of("LIFE-09", rest=BEHAVIOUR)
def test_a_manifest_that_says_nothing_of_time_is_long_running_with_thirty_seconds() -> None:
    timeout = contract(timeout_class=None).timeout
    assert (timeout.timeout_class, timeout.default_s, timeout.max_s) == ("long_running", 30, 300)


@pytest.mark.part_of("LIFE-09", rest=BEHAVIOUR)
@pytest.mark.parametrize(
    ("timeout_class", "timeout_s", "accepted"),
    [
        ("interactive", 1, False),
        ("standard", 1, True),
        ("standard", 5, True),
        ("standard", 6, False),
        ("long_running", 1, True),
        ("long_running", 300, True),
        ("long_running", 301, False),
        ("async", 1, True),
        ("async", 7200, True),
    ],
)
def test_a_timeout_above_the_maximum_of_its_class_is_refused(
    timeout_class: TimeoutClass, timeout_s: int, accepted: bool
) -> None:
    edits: Json = {"timeout_class": timeout_class, "timeout_default": timeout_s}
    if accepted:
        assert contract(**edits).timeout.default_s == timeout_s
    else:
        assert refused(**edits) == f"timeout_default of {timeout_s} s is above the {timeout_class} maximum"


@pytest.mark.part_of("LIFE-09", rest=BEHAVIOUR)
@pytest.mark.parametrize(
    ("timeout_class", "seconds"), [("interactive", 0.5), ("standard", 5), ("long_running", 300), ("async", 7200)]
)
def test_a_class_alone_gives_the_longest_usual_timeout_it_allows(timeout_class: TimeoutClass, seconds: float) -> None:
    timeout = contract(timeout_class=timeout_class).timeout
    assert (timeout.default_s, timeout.max_s) == (seconds, seconds)


@pytest.mark.part_of("LIFE-09", rest=BEHAVIOUR)
@pytest.mark.parametrize("timeout_class", ["long_running", "async"])
@pytest.mark.parametrize("longest", [30, 60, 299])
def test_the_longest_timeout_an_author_states_is_never_exceeded(timeout_class: TimeoutClass, longest: int) -> None:
    timeout = contract(timeout_class=timeout_class, timeout_max=longest).timeout
    assert timeout.default_s <= timeout.max_s <= longest


LATENCY: list[tuple[float, bool, bool, TimeoutClass]] = [
    # p99, external I/O, checkpointable
    (0.0, False, False, "interactive"),
    (0.499, False, False, "interactive"),
    (0.499, True, False, "standard"),
    (0.5, False, False, "standard"),
    (0.5, True, True, "standard"),
    (0.501, False, True, "standard"),
    (4.999, True, False, "standard"),
    (4.999, False, True, "standard"),
    (5.0, True, True, "long_running"),
    (5.0, False, True, "long_running"),
    (5.0, True, False, "async"),
    (5.0, False, False, "async"),
    (299.999, True, True, "long_running"),
    (299.999, True, False, "async"),
    (300.0, True, True, "async"),
    (300.0, False, True, "async"),
    (300.001, False, False, "async"),
    (86_400.0, True, True, "async"),
]


@pytest.mark.proves("LIFE-11")
@pytest.mark.parametrize(("p99_s", "external_io", "checkpointable", "expected"), LATENCY)
def test_measured_latency_calls_for_the_class_of_the_decision_table(
    p99_s: float, external_io: bool, checkpointable: bool, expected: TimeoutClass
) -> None:
    assert class_for_latency(p99_s, external_io=external_io, checkpointable=checkpointable) == expected


@pytest.mark.proves("LIFE-11")
@pytest.mark.parametrize("permission", ["network:https://api.example.com", "network:*"])
def test_an_interactive_tool_with_network_permissions_is_refused(permission: str) -> None:
    edits: Json = {"timeout_class": "interactive", "required_permissions": ["database:x", permission]}
    assert "an interactive tool does no external I/O" in refused(**edits)
    assert contract(timeout_class="standard", required_permissions=[permission])
    assert contract(timeout_class="interactive", required_permissions=["filesystem:read"])


@pytest.mark.proves("LIFE-11")
def test_an_interactive_tool_that_lists_domains_is_refused() -> None:
    listed: Json = {"network_policy": {"allowed_domains": ["api.example.com"]}}
    assert "an interactive tool does no external I/O" in refused(timeout_class="interactive", **listed)
    assert contract(timeout_class="standard", **listed)


@pytest.mark.proves("LIFE-11")
def test_an_interactive_tool_that_says_it_reaches_outside_is_refused() -> None:
    assert "an interactive tool does no external I/O" in refused(timeout_class="interactive", external_io=True)
    native: Json = {"execution": {"kind": "upstream", "target": "desk", "native": {"protocol": "mcp", "name": "echo"}}}
    assert "an interactive tool does no external I/O" in refused(timeout_class="interactive", **native)
    for fits in ({"timeout_class": "standard", "external_io": True}, {"timeout_class": "standard", **native}):
        assert contract(**fits)
    assert contract(timeout_class="interactive", external_io=False)
    assert contract(timeout_class="interactive"), "nothing is said of I/O"


@tool(
    version="1.0.0", mutation_class="read_only", namespace="bank", timeout_class="interactive",
    permissions=["network:https://api.example.com"], external_io=False,
)  # fmt: skip
async def rate(currency: Annotated[str, Field(description="three letters", examples=["EUR"])]) -> float:
    """Exchange rate of a currency to the euro."""
    raise AssertionError("a refused tool never runs")


@pytest.mark.proves("LIFE-11")
async def test_registering_an_interactive_tool_with_network_permissions_is_refused(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path) as app:
        admission = await app.offer(rate, "library:")
        assert not admission.admitted
        [words] = admission.verdict.refused["timeout_class_assigned"]
        assert "external I/O" in words
        error = (await app.call("bank.rate", currency="EUR")).error
        assert error is not None
        assert error.row.error_code == "TOOL_NOT_FOUND"


@pytest.mark.proves("LIFE-11")
@pytest.mark.parametrize(
    "timeouts", [{"timeout_class": "long_running"}, {"timeout_class": None, "timeout_default": 30}]
)
def test_a_long_running_write_that_can_neither_resume_nor_restart_is_refused(timeouts: Json) -> None:
    write: Json = timeouts | {"mutation_class": "write_reversible"}
    assert "must be restart_safe or have checkpoints enabled" in refused(**write)
    assert contract(**write, restart_safe=True).timeout.timeout_class == "long_running"
    assert contract(**write, checkpoint_config={"enabled": True}).timeout.timeout_class == "long_running"
    assert contract(**timeouts, mutation_class="read_only").timeout.timeout_class == "long_running"
    assert contract(mutation_class="write_reversible", timeout_class="async").timeout.timeout_class == "async"


# The window in which a duplicate is recognised

HOUR = 3600
WINDOWS: list[tuple[Json, int, int]] = [
    ({"timeout_class": "interactive"}, HOUR, HOUR),
    ({"timeout_class": "standard"}, HOUR, HOUR),
    ({"timeout_class": "long_running"}, HOUR, HOUR),
    ({"timeout_class": "async", "timeout_max": 86_400}, HOUR, 48 * HOUR),
    ({"timeout_class": "async", "timeout_max": 7200}, HOUR, 4 * HOUR),
    ({"timeout_class": "async", "timeout_default": 60, "timeout_max": 60}, HOUR, HOUR),
    ({"timeout_class": None, "timeout_default": 301, "timeout_max": 86_400}, HOUR, 48 * HOUR),
    ({"timeout_class": "long_running"}, 60, 600),
    ({"timeout_class": "interactive"}, 60, 60),
    ({"timeout_class": "standard", "idempotency": {"window_seconds": 7 * HOUR}}, HOUR, 7 * HOUR),
    ({"timeout_class": "standard", "idempotency": {"window_seconds": 1}}, HOUR, HOUR),
]


@pytest.mark.supports("IDEM-04")
@pytest.mark.parametrize(("edits", "minimum_s", "expected"), WINDOWS)
def test_a_record_lives_for_twice_the_class_maximum_but_never_less_than_the_minimum(
    edits: Json, minimum_s: int, expected: int
) -> None:
    made = contract(**edits)
    assert made.idempotency.window(made.timeout, minimum_s) == expected


# Schemas of the contract


@pytest.mark.proves("CONTRACT-06")
def test_the_input_of_a_native_tool_is_closed_and_its_output_as_the_author_said() -> None:
    made = contract(result_schema={"type": "object"})
    assert made.input.document["additionalProperties"] is False
    assert not made.input.valid({"account": "cash", "tenant": "t1", "other": 1})
    assert made.output.valid({"anything": 1})
    assert "additionalProperties" not in made.document()["parameters"], "the document stays as the author wrote it"
    opened = COMPLETE["parameters"] | {"additionalProperties": True}
    assert contract(parameters=opened).input.valid({"account": "cash", "tenant": "t1", "other": 1})


@pytest.mark.proves("CONTRACT-06")
def test_both_extensions_are_visible_on_the_loaded_contract() -> None:
    made = contract()
    assert made.input.sensitive == {"token"}
    assert made.input.properties["token"]["x-sensitivity"] == "credential"
    assert made.input.properties["token"]["x-token-cost"] == 12


def test_sensitive_fields_are_found_at_any_depth() -> None:
    card: Json = {"type": "object", "properties": {"number": {"type": "string", "x-sensitivity": "pii"}}}
    parameters: Json = {
        "type": "object",
        "properties": {"cards": {"type": "array", "items": {"$ref": "#/$defs/card"}}, "pin": {"$ref": "#/$defs/pin"}},
        "$defs": {"card": card, "pin": {"type": "string", "x-sensitivity": "secret"}},
    }
    assert contract(parameters=parameters).input.sensitive == {"number", "pin"}


@pytest.mark.proves("CONTRACT-12")
def test_internal_fields_are_in_the_runtime_schema_and_never_in_the_models() -> None:
    made = contract()
    assert made.input.internal == {"tenant"}
    assert "tenant" in made.input.document["properties"]
    shown = made.input.model_facing
    assert "tenant" not in json.dumps(shown)
    assert shown["required"] == ["account"]
    assert set(shown["properties"]) == {"account", "token"}
    assert not Schema(shown).valid({"account": "cash", "tenant": "t1"})
    assert made.input.document["required"] == ["account", "tenant"], "showing it changes nothing"


@pytest.mark.proves("CONTRACT-12")
@pytest.mark.parametrize(
    "parameters",
    [
        pytest.param(
            {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}, "hidden_one": {"$ref": "#/$defs/h"}},
             "$defs": {"a": {"type": "string"}, "h": {"type": "string", "x-internal": True}},
             "required": ["hidden_one"]},
            id="behind a reference",
        ),
        pytest.param(
            {"type": "object", "properties": {"outer": {"type": "object", "properties": {
                "a": {"type": "string"}, "hidden_one": {"type": "string", "x-internal": True}},
                "required": ["hidden_one"]}}},
            id="inside an object",
        ),
        pytest.param(
            {"type": "object", "properties": {"a": {"type": "string"}, "hidden_one": {"type": "string",
            "x-internal": True}},
             "dependentRequired": {"a": ["hidden_one"]}},
            id="named by a rule",
        ),
    ],
)  # fmt: skip
def test_an_internal_field_is_hidden_wherever_it_stands(parameters: Json) -> None:
    made = contract(parameters=parameters)
    assert "hidden_one" not in json.dumps(made.input.model_facing)
    assert made.input.hidden == {"hidden_one"}


HIDDEN: Json = {"type": "string", "x-internal": True}


@pytest.mark.proves("CONTRACT-12")
@pytest.mark.parametrize(
    "rule",
    [
        {"allOf": [{"properties": {"other": HIDDEN}}]},
        {"allOf": [{"required": ["hidden_one"]}]},
        {"anyOf": [{"required": ["a"]}, {"required": ["hidden_one"]}]},
        {"if": {"properties": {"hidden_one": {"const": "x"}}}, "then": {"required": ["a"]}},
        {"not": {"allOf": [{"required": ["hidden_one"]}]}},
        {"then": {"properties": {"inner": {"type": "object", "properties": {"other": HIDDEN}}}}},
    ],
    ids=str,
)
def test_an_internal_field_that_a_condition_names_is_refused(rule: Json) -> None:
    properties: Json = {"a": {"type": "string"}, "hidden_one": HIDDEN}
    said = refused(parameters={"type": "object", "properties": properties, **rule})
    assert "x-internal" in said
    assert "hidden_one" not in said


@pytest.mark.proves("CONTRACT-12")
@given(open_=st.booleans(), deep=st.booleans(), value=JSON)
def test_nobody_can_send_an_internal_field_even_where_any_other_may_come(open_: bool, deep: bool, value: Any) -> None:
    inner: Json = {"type": "object", "properties": {"a": {}, "hidden_one": HIDDEN}, "additionalProperties": open_}
    parameters = {"type": "object", "properties": {"outer": inner}} if deep else inner
    held = Schema(contract(parameters=parameters).input.caller_facing)
    sent: Json = {"a": 1, "hidden_one": value}
    faults = input_faults(held, {"outer": sent} if deep else sent)
    assert [fault.message for fault in faults] == ["a field that callers may not set was sent"]
    assert "hidden_one" not in str(faults)
    assert input_faults(held, {"outer": {"a": 1}} if deep else {"a": 1}) == []


def test_a_manifest_and_its_contract_agree() -> None:
    manifest = parse_manifest(COMPLETE)
    made = contract_of(manifest)
    assert made.manifest is manifest
    assert made.document() == COMPLETE

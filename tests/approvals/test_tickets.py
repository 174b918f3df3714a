"""The arithmetic of tickets and standing approvals, against oracles."""

from __future__ import annotations

import fnmatch
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock import Change, Failure
from interlock.approvals.standing import Standing
from interlock.approvals.ticket import Step, chain_of
from interlock.call.context import Caller
from interlock.contract.argument_bounds import bound_faults, is_open, matches
from interlock.contract.manifest import Approval, ApprovalStep
from interlock.gateway.preview_diff import predicted_changes, preview_differences
from interlock.settings import load_settings
from interlock.testing import FakeClock
from tests.support.tickets import ANN, BEN, ask, opened


@pytest.mark.proves("HITL-05")
@given(
    length=st.integers(1, 10),
    fraction=st.floats(0.01, 1.0),
    timeout_s=st.integers(1, 2_592_000),
    said=st.lists(st.none() | st.integers(0, 10_000), min_size=10, max_size=10),
)
def test_a_step_is_due_when_it_says_or_at_its_share_of_the_fraction(
    length: int, fraction: float, timeout_s: int, said: list[int | None]
) -> None:
    steps = tuple(ApprovalStep(group=f"g{place}", after_seconds=said[place]) for place in range(length))
    chain = chain_of(Approval(timeout_seconds=timeout_s, escalation_fraction=fraction, chain=steps))
    for place, step in enumerate(chain):
        after_s = said[place]
        expected_s = fraction * timeout_s * place / length if after_s is None else after_s
        assert abs(step.after_ms - expected_s * 1000) <= 0.5 + 1e-6
        assert step.group == f"g{place}"


@pytest.mark.proves("HITL-05")
def test_the_defaults_are_one_hour_four_hours_and_a_day(tmp_path: Path) -> None:
    approval = load_settings(tmp_path / "settings.toml").approval
    assert approval.timeout_seconds == 86_400
    assert approval.escalation_fraction == 0.5
    assert chain_of(approval) == (Step("approvers", 0), Step("managers", 3_600_000), Step("admins", 14_400_000))


TEXTS = st.sampled_from(["", "a", "ab", "b", "a\nb", "*", "?"])
PATTERNS = st.sampled_from(["*", "a*", "a", "?", "**", "", 1, True, None])
VALUES = TEXTS | st.sampled_from([0, 1, True, None, 1.0])


def as_sent(patterns: Mapping[str, Any], arguments: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Patterns and arguments of a tool that takes no paths, URLs or hosts."""
    return patterns, arguments


@pytest.mark.proves("HITL-09")
@given(
    patterns=st.dictionaries(st.sampled_from("xyz"), PATTERNS, max_size=3),
    arguments=st.dictionaries(st.sampled_from("xyz"), VALUES, max_size=3),
    caller=st.sampled_from([ANN, "local:zoe"]),
    version=st.sampled_from(["1.0.0", "1.9.0", "2.0.0"]),
    used=st.integers(0, 3),
    now_ms=st.integers(0, 20),
)
def test_a_standing_approval_covers_what_it_names_and_nothing_else(
    patterns: dict[str, object], arguments: dict[str, object], caller: str, version: str, used: int, now_ms: int
) -> None:
    standing = Standing(
        id="sta_1", tenant="local", tool="demo.mail", versions="^1.0.0", arguments=patterns, caller=ANN, uses=2,
        expires_ms=10, granted_by=BEN.id, used=used,
    )  # fmt: skip

    def allows(name: str, value: object) -> bool:
        pattern = patterns[name]
        if isinstance(pattern, str) and isinstance(value, str):
            return fnmatch.fnmatchcase(value, pattern)
        return (type(pattern), pattern) == (type(value), value)

    spoken_of = all(name in patterns and allows(name, value) for name, value in arguments.items())
    bound = [name for name, pattern in patterns.items() if pattern not in ("*", "**", "?")]
    complete = all(name in arguments for name in bound)
    in_bounds = caller == ANN and version != "2.0.0" and used < 2 and now_ms < 10
    by = Caller(id=caller, groups=frozenset({ANN, f"group:{ANN}"}))
    assert standing.fits(by, "demo.mail", version, arguments, now_ms, as_sent) == (spoken_of and complete and in_bounds)
    assert not standing.fits(by, "demo.send", version, arguments, now_ms, as_sent)


HOLDS: dict[str, Callable[[Fraction, Fraction], bool]] = {
    "minimum": operator.ge, "maximum": operator.le, "exclusiveMinimum": operator.gt, "exclusiveMaximum": operator.lt,
}  # fmt: skip
NUMBERS = st.integers(-3, 3) | st.floats(-3, 3) | st.sampled_from([2**70, -(2**70), 0.1, 1e-7])


@pytest.mark.proves("HITL-09")
@given(
    pattern=st.dictionaries(st.sampled_from(sorted(HOLDS)), NUMBERS, min_size=1),
    value=NUMBERS | st.sampled_from([True, None, "1", "", float("nan")]) | st.lists(NUMBERS, max_size=1),
)
def test_bounds_of_a_number_cover_the_numbers_within_them_and_nothing_of_another_type(
    pattern: dict[str, float], value: object
) -> None:
    standing = Standing(
        id="sta_1", tenant="local", tool="demo.mail", versions="1.0.0", arguments={"x": pattern}, caller=ANN, uses=2,
        expires_ms=10, granted_by=BEN.id,
    )  # fmt: skip
    within = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and not math.isnan(value)
        and all(HOLDS[word](Fraction(value), Fraction(bound)) for word, bound in pattern.items())
    )
    assert standing.fits(Caller(id=ANN), "demo.mail", "1.0.0", {"x": value}, 0, as_sent) == within
    assert not standing.fits(Caller(id=ANN), "demo.mail", "1.0.0", {"x": pattern}, 0, as_sent)
    assert not standing.fits(Caller(id=ANN), "demo.mail", "1.0.0", {}, 0, as_sent)
    spoilt = replace(standing, arguments={"x": {**pattern, "minimum": "0"}})
    assert not spoilt.fits(Caller(id=ANN), "demo.mail", "1.0.0", {"x": value}, 0, as_sent)


NUMBER: dict[str, Any] = {"type": "number"}
NAN: dict[str, Any] = {"type": "string", "enum": ["NaN", "Infinity", "-Infinity"]}


@pytest.mark.parametrize(
    ("schema", "numeric"),
    [
        ({}, True), (NUMBER, True), ({"anyOf": [True, {"type": "integer"}]}, True), ({"anyOf": [NUMBER, NAN]}, True),
        ({"type": ["integer", "string"]}, True), ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, True),
        ({"enum": [1, 2]}, True), ({"const": 1}, True), ({"$ref": "#/$defs/amount"}, True),
        ({"anyOf": [{"$ref": "#/$defs/amount"}, {"type": "null"}]}, True), ({"allOf": [{}, NUMBER]}, True),
        ({"type": "string"}, False), ({"enum": ["1"]}, False), (NAN, False), ({"type": ["boolean", "null"]}, False),
        ({"allOf": [NUMBER, {"type": "string"}]}, False), ({"type": "array", "items": NUMBER}, False),
    ],
)  # fmt: skip
def test_what_may_be_a_number_has_bounds_and_what_never_is_one_has_none(schema: dict[str, Any], numeric: bool) -> None:
    document = {"type": "object", "properties": {"x": schema}, "$defs": {"amount": NUMBER}}
    faults = list(bound_faults({"x": {"minimum": 1}}, document))
    assert faults == ([] if numeric else ["`x` is not a number, so it has no least and no most"])


@pytest.mark.proves("HITL-09")
@pytest.mark.parametrize(
    ("pattern", "value", "covered"),
    [
        ({"a": 1}, {"a": True}, False),
        ([0], [False], False),
        ({"a": [{"b": True}]}, {"a": [{"b": 1}]}, False),
        ({"a": 1, "b": [True, 2**70]}, {"b": [True, 2**70], "a": 1}, True),
        ({"a": {"minimum": 1}}, {"a": 5}, False),
        ("[draft] x", "[draft] x", True),
        ("[draft] x", "d x", False),
        ("[draft] *", "[draft] of a letter", True),
        ("[!a]?", "[!a]b", True),
        ("[!a]?", "bc", False),
    ],
)
def test_a_value_that_must_be_so_is_so_to_its_last_part(pattern: object, value: object, covered: bool) -> None:
    standing = Standing(
        id="sta_1", tenant="local", tool="demo.mail", versions="1.0.0", arguments={"x": pattern}, caller=ANN, uses=2,
        expires_ms=10, granted_by=BEN.id,
    )  # fmt: skip
    assert standing.fits(Caller(id=ANN), "demo.mail", "1.0.0", {"x": value}, 0, as_sent) == covered


EACH: dict[str, Any] = {"items": "a*"}
LEAVES = st.sampled_from(["a", "ab", "b", 1, 2.5, True, None])


@pytest.mark.proves("HITL-09")
@pytest.mark.parametrize(
    ("pattern", "value", "covered"),
    [
        (EACH, ["a", "ab"], True),
        (EACH, ["a", "b"], False),
        (EACH, ["a", None], False),
        (EACH, ["a", ["a"]], False),
        (EACH, "a", False),
        (EACH, {"items": "a*"}, False),
        # A list of nothing means everything to some tools.
        (EACH, [], False),
        ({"items": "*"}, [], True),
        ({"items": "*"}, [1], False),
        ({"items": {"maximum": 5}}, [1, 5], True),
        ({"items": {"maximum": 5}}, [1, 6], False),
        ({"items": {"maximum": 5}}, [1, "1"], False),
        ({"items": {"enum": ["a", 1]}}, [1, "a", 1], True),
        ({"items": {"enum": ["a", 1]}}, ["a", True], False),
        ({"items": {"type": "string"}}, ["a", "b c"], True),
        ({"items": {"a": 1}}, [{"a": 1}, {"a": 1}], True),
        ({"items": {"a": 1}}, [{"a": 1, "b": 2}], False),
        ({"items": EACH}, [["a"], ["ab", "a"]], True),
        ({"items": EACH}, [["a"], ["b"]], False),
        ({"items": EACH}, [["a"], []], False),
        ({"items": EACH}, ["a"], False),
        ({"x-any": True}, None, True),
        ({"x-any": True}, [{"a": [1]}], True),
        # These are values, and no bounds.
        ({"x-any": 1}, 5, False),
        ({"x-any": False}, 5, False),
        ({"items": "a*", "maxItems": 3}, ["a"], False),
        ({}, 5, False),
        ({"enum": [{"items": "a*"}]}, {"items": "a*"}, True),
        ({"enum": [{"items": "a*"}]}, ["a"], False),
    ],
)
def test_a_list_is_covered_by_a_bound_for_each_item_and_any_value_by_that_word_alone(
    pattern: object, value: object, covered: bool
) -> None:
    standing = Standing(
        id="sta_1", tenant="local", tool="demo.mail", versions="1.0.0", arguments={"x": pattern}, caller=ANN, uses=2,
        expires_ms=10, granted_by=BEN.id,
    )  # fmt: skip
    assert standing.fits(Caller(id=ANN), "demo.mail", "1.0.0", {"x": value}, 0, as_sent) == covered


def in_lists(leaves: st.SearchStrategy[Any], depth: int) -> st.SearchStrategy[Any]:
    return leaves if depth == 0 else leaves | st.lists(in_lists(leaves, depth - 1), max_size=3)


@pytest.mark.proves("HITL-09")
@given(pattern=PATTERNS, depth=st.integers(0, 2), value=in_lists(LEAVES, 3))
def test_a_bound_for_each_item_covers_what_its_bound_covers_of_every_item(
    pattern: object, depth: int, value: object
) -> None:
    def allows(value: Any, depth: int) -> bool:
        if depth > 0:
            items: list[Any] = [*value] if isinstance(value, list) else []  # pyright: ignore[reportUnknownVariableType]
            covered = isinstance(value, list) and (items != [] or is_open(pattern))
            return covered and all(allows(one, depth - 1) for one in items)
        if isinstance(pattern, str) and isinstance(value, str):
            return fnmatch.fnmatchcase(value, pattern)
        return (type(pattern), pattern) == (type(value), value)

    bound: Any = pattern
    for _ in range(depth):
        bound = {"items": bound}
    assert matches(bound, value) == allows(value, depth)


async def test_a_ticket_is_found_by_the_beginning_of_its_id_if_there_is_only_one(tmp_path: Path) -> None:
    async with opened(tmp_path / "home", FakeClock()) as app:
        first = await ask(app, key="a")
        assert (await app.approvals.show(first[:8])).id == first
        await ask(app, key="b")
        for text in (first[:8], "", "apr_nobody", first + "0"):
            with pytest.raises(Failure) as refused:
                await app.approvals.show(text)
            assert refused.value.code == "E3702"


CHANGES = st.lists(
    st.builds(
        Change,
        resource=st.sampled_from(["mail:a", "mail:b"]),
        operation=st.sampled_from(["CREATE", "UPDATE"]),
        after=st.sampled_from([None, 1, 2]),
    ),
    max_size=4,
)


@given(said=CHANGES, done=CHANGES)
def test_a_promise_is_kept_by_the_same_changes_with_no_other_values(said: list[Change], done: list[Change]) -> None:
    preview = [{"resource": one.resource, "operation": one.operation, "after": one.after} for one in said]
    found = preview_differences({"promised": predicted_changes({"predicted_effects": preview})}, done)
    values: dict[tuple[str, str], set[int | None]] = {}
    for one in said:
        values.setdefault((one.resource, one.operation), set()).add(one.after)
    kept = values.keys() == {(one.resource, one.operation) for one in done} and all(
        one.after is None or values[one.resource, one.operation] & {one.after, None} for one in done
    )
    assert (found == []) == kept

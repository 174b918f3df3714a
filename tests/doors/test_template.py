"""An answer filled in says the same as one that was worded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.call.results import Result
from interlock.data.canonical import encode
from interlock.data.schema import Json
from interlock.doors.mcp.calling import own_result
from interlock.doors.mcp.listing import Form
from interlock.doors.response_template import REQUEST, Templates
from interlock.doors.rest.answers import success

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
IDS = st.text("0123456789ABCDEF", min_size=1, max_size=26)


def _asked(put: Callable[[Result], Json]) -> Callable[[Result, Any], Json]:
    return lambda result, request: {"jsonrpc": "2.0", "id": request, "result": put(result)}


WORDINGS: dict[str, Callable[[Result, Any], Json]] = {
    "REST": lambda result, _: success(result),
    "JSON-RPC": _asked(Result.document),
    "MCP": _asked(
        lambda result: own_result(result, Form(native=False, wraps=False, headers=False, keyed=False, exact=False))
    ),
    "MCP, wrapped": _asked(
        lambda result: own_result(result, Form(native=False, wraps=True, headers=False, keyed=False, exact=False))
    ),
}


def _result(
    call: str, trace: str, at: int, took: float, rules: list[str], value: Any, approval: Json | None = None
) -> Result:
    metadata: Json = {"latency_ms": took, "policy_refs": rules}
    if approval is not None:
        metadata["approval"] = approval
    return Result(call, "demo.add@1.0.0", "succeeded", at, trace, metadata, value)


# Beside a number beyond 64 bits, another encoder writes the whole answer, and it spells 1e-5 as 1e-05.
THOUSANDTHS = st.integers(0, 10**9).map(lambda number: number / 1000)
TOOK, RULES = THOUSANDTHS | st.integers(0, 99), st.lists(st.text(max_size=5))
APPROVALS = st.none() | st.fixed_dictionaries({"mechanism": st.just("auto"), "rule": st.text()})
REQUESTS = st.none() | st.integers() | st.text() | THOUSANDTHS


@given(result=st.builds(_result, IDS, IDS, st.integers(0, 2**42), TOOK, RULES, ANY, APPROVALS), request=REQUESTS)
def test_a_template_says_of_every_plain_result_what_its_door_would_say(result: Result, request: Any) -> None:
    for word in WORDINGS.values():
        answer = Templates().answer(result, lambda one, word=word: word(one, REQUEST), request)
        assert answer == encode(word(result, request))


class Colour(StrEnum):
    RED = "red"


@pytest.mark.parametrize("door", WORDINGS)
@pytest.mark.parametrize(("tool", "value"), [("demo.add@1.0.0", Colour.RED), ("demo.add@71234.567891.0", 5)])
def test_a_text_of_another_class_is_a_text_and_a_version_is_no_time(door: str, tool: str, value: Any) -> None:
    result = replace(_result("C", "T", 0, 1.5, [], value), tool=tool)
    word = WORDINGS[door]
    assert Templates().answer(result, lambda one: word(one, REQUEST), 7) == encode(word(result, 7))


def test_each_tool_has_its_own_and_not_without_end() -> None:
    templates = Templates()
    result = Result("C", "demo.add@1.0.0", "succeeded", 0, "t", {"latency_ms": 1.5, "policy_refs": ()}, 100)
    for number in range(3000):
        tool = f"demo.t{number % 1500}@1.0.{number % 7}"
        said = orjson.loads(templates.answer(replace(result, tool=tool), success) or b"")
        assert (said["tool_id"], said["tool_version"], said["result"]) == (*tool.split("@"), 100)

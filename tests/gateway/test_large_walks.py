"""Large data is checked and searched apart from the event loop, and the rest of a call is bounded too."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import orjson
import pytest
import pytest_asyncio

from interlock import Caller, Failure, Field, Hook, Interlock, tool
from interlock.call.phases import Request
from interlock.data.bounds import LONGEST_NAME
from interlock.data.coerce import coerce
from interlock.gateway import input_checks, request
from interlock.gateway.failure_log import FailureLog
from interlock.gateway.redaction import MOST_PRIVATE, CallRedaction
from interlock.privacy.redact import SchemaRedactor
from tests import sample
from tests.support.calls import admit

ANN = Caller(id="user:ann", tenant="north")
MANY = 20_000


@tool(version="1.0.0", mutation_class="read_only", namespace="large", timeout_s=120)
async def total(numbers: Annotated[list[int], Field(description="numbers to add", examples=[[1]])]) -> int:
    """Add some numbers."""
    return sum(numbers)


@tool(version="1.0.0", mutation_class="read_only", namespace="large", timeout_s=120)
async def give_back(value: Annotated[Any, Field(description="any value", examples=[1])]) -> Any:
    """Give a value back."""
    return value


@tool(version="1.0.0", mutation_class="read_only", namespace="large", timeout_s=120)
async def fail(text: Annotated[str, Field(description="a text", examples=["x"])]) -> int:
    """Fail with a text of any length."""
    raise Failure("E3401", text)


@pytest_asyncio.fixture
async def app(tmp_path: Path) -> AsyncGenerator[Interlock]:
    async with Interlock.open(tmp_path, housekeeping=False) as opened:
        await admit(opened, total, give_back, fail, sample.send)
        yield opened


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[bool]]:
    """Which walks ran on the thread of the loop."""
    seen: dict[str, set[bool]] = {}
    main = threading.get_ident()

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def noted(*given: Any, **named: Any) -> Any:
            seen.setdefault(name, set()).add(threading.get_ident() == main)
            return real(*given, **named)

        monkeypatch.setattr(owner, name, noted)

    assert input_checks.coerce is coerce
    watch(input_checks, "coerce")
    watch(request, "canonical")
    watch(request, "plain_form")
    watch(request, "private_copy")
    watch(SchemaRedactor, "apply")
    watch(CallRedaction, "without_private_values")
    watch(FailureLog, "redact_and_log")
    return seen


@pytest.mark.parametrize("large", [False, True])
async def test_only_large_inputs_are_checked_in_a_thread(
    app: Interlock, walked: dict[str, set[bool]], large: bool
) -> None:
    result = await app.call("large.total", numbers=["7"] * (MANY if large else 3), caller=ANN)
    assert result.value == 7 * (MANY if large else 3)
    assert walked["coerce"] == {not large}
    assert walked["canonical" if large else "plain_form"] == {not large}
    assert ("canonical" in walked, "plain_form" in walked) == (large, not large)
    assert walked.get("private_copy", set()) == ({False} if large else set())


@pytest.mark.parametrize(
    "value",
    [
        pytest.param([1.5e300] * 2000, id="whole numbers of 300 digits"),
        pytest.param([2**70] * 2000, id="numbers beyond 64 bits"),
        pytest.param(["e\u0301"] * 2000, id="texts that are not in NFC"),
        pytest.param("e" + "\u0301\u0316" * 5000, id="marks that are out of order"),
    ],
)
async def test_what_takes_long_to_write_is_written_in_a_thread_although_it_is_short(
    app: Interlock, walked: dict[str, set[bool]], value: Any
) -> None:
    result = await app.call("large.give_back", value=value, caller=ANN)
    assert result.ok, result.error
    assert walked["canonical"] == {False}


@pytest.mark.parametrize("large", [False, True])
async def test_only_large_results_are_searched_in_a_thread(
    app: Interlock, walked: dict[str, set[bool]], large: bool
) -> None:
    value = [f"user{number}@example.org" for number in range(MANY if large else 3)]
    result = await app.call("large.give_back", value=value, caller=ANN)
    assert result.ok
    assert result.redacted
    assert "@" not in str(result.value)
    assert (not large) in walked["apply"]
    assert large not in walked["without_private_values"] | walked["apply"]


@pytest.mark.parametrize("large", [False, True])
async def test_only_a_long_failure_is_cleaned_in_a_thread(
    app: Interlock, walked: dict[str, set[bool]], large: bool
) -> None:
    failed = (await app.call("large.fail", text="a@example.org " * (MANY if large else 3), caller=ANN)).error
    assert failed is not None
    assert failed.code == "E3401"
    assert "@" not in failed.message
    assert len(failed.message) < 20_000
    assert walked["redact_and_log"] == {not large}


async def test_what_a_caller_changes_while_a_large_input_is_checked_has_no_effect(app: Interlock) -> None:
    numbers = ["7"] * MANY
    calling = asyncio.ensure_future(app.call("large.total", numbers=numbers, caller=ANN))
    while not calling.done():
        numbers[:] = ["9"] * MANY if numbers[0] == "7" else ["7"] * MANY
        await asyncio.sleep(0)
    assert calling.result().value in (7 * MANY, 9 * MANY), "as it was sent, never a mixture"


@pytest.mark.proves("VALID-01")
@pytest.mark.parametrize(("sent", "listed", "warnings"), [
    (1000, 1000, None), (1001, 1000, ["INPUT_MUTATIONS_OMITTED count=1"]),
    (5000, 1000, ["INPUT_MUTATIONS_OMITTED count=4000"]),
])  # fmt: skip
async def test_a_thousand_changes_of_an_input_are_recorded_one_by_one_and_the_others_by_their_member(
    app: Interlock, sent: int, listed: int, warnings: list[str] | None
) -> None:
    result = await app.call("large.total", numbers=["7"] * sent, caller=ANN)
    together = ["/numbers"] if sent > listed else []
    assert len(result.metadata["input_mutations"]) == listed + len(together)
    assert result.metadata.get("warnings") == warnings
    (body,) = app.journal.reader.all(
        "SELECT body FROM journal WHERE call = ? AND kind = 'closed'", (result.invocation_id,)
    )
    record = orjson.loads(body[0])
    places = [f"/numbers/{place}" for place in range(listed)] + together
    assert [one["pointer"] for one in record["inputMutations"]] == places
    assert record.get("warnings") == warnings


async def test_a_call_with_very_many_private_values_is_refused(app: Interlock) -> None:
    many = [{"password": f"hunter-{number}-22"} for number in range(2 * MOST_PRIVATE)]
    refused = (await app.call("large.give_back", value=many, caller=ANN)).error
    assert refused is not None
    assert (refused.code, refused.details) == ("E3004", {"mostPrivateValues": MOST_PRIVATE})
    assert (await app.call("large.give_back", value=many[:3], caller=ANN)).ok


@pytest.mark.parametrize("name", ["tool", "version", "key", "session", "task"])
async def test_a_long_name_is_refused_and_not_recorded(app: Interlock, name: str) -> None:
    long = "n" * (LONGEST_NAME + 1)
    asked: dict[str, Any] = {"tool": "large.total", "arguments": {"numbers": [1]}, "caller": ANN, name: long}
    result = await app.gateway.invoke(Request(**asked))
    assert result.error is not None
    assert result.error.code == "E3004"
    assert str(LONGEST_NAME) in result.error.message
    records = app.journal.reader.all("SELECT body FROM journal WHERE call = ?", (result.invocation_id,))
    assert records
    assert not any(long.encode() in body for (body,) in records)


async def test_a_long_trace_is_not_recorded(app: Interlock) -> None:
    result = await app.call("large.total", numbers=[1], caller=ANN, trace_id="t" * 5000)
    assert result.ok
    assert len(result.trace_id) <= 128


@pytest.mark.parametrize("text", ["word " * 800_000, "a" * 4_000_000, "1" * 4_000_000])
async def test_a_reviewer_sees_the_beginning_of_a_long_text_and_how_much_is_missing(app: Interlock, text: str) -> None:
    asked = await app.call("demo.send", to=text, key="k", caller=ANN)
    assert asked.pending
    (ticket,) = await app.approvals.list()
    shown = ticket.params["to"]
    missing = re.search(r"\[([0-9,]+) more characters\]\Z", shown)
    assert missing is not None
    left_out, kept = int(missing[1].replace(",", "")), len(shown[: missing.start()])
    assert abs(left_out + kept - len(text)) < 5
    assert len(shown) < 40_000


async def test_hooks_get_large_data_although_every_default_thread_hangs(app: Interlock) -> None:
    seen: list[int] = []
    app.hook(Hook(id="after", when="post", run=lambda one: seen.append(len(one.value))))
    app.hook(Hook(id="failed", when="failure", run=lambda one: seen.append(len(one.input["text"]))))
    value, loop, end = "x" * 600_000, asyncio.get_running_loop(), threading.Event()
    with ThreadPoolExecutor(1) as only:
        loop.set_default_executor(only)
        hung = loop.run_in_executor(None, end.wait)
        try:
            assert (await app.call("large.give_back", value=value, caller=ANN)).ok
            assert (await app.call("large.fail", text=value, caller=ANN)).state == "failed"
        finally:
            end.set()
            await hung
    assert seen == [len(value)] * 2

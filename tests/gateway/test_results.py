"""Results: checked, confirmed, redacted, kept where they are large, and never anything a reader may not see."""

from __future__ import annotations

import asyncio
import copy
import hashlib
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import hypothesis.strategies as st
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from pydantic import BaseModel
from typing_extensions import TypedDict

from interlock import Caller, Change, Context, Effect, Failure, Field, Interlock, Preview, tool
from interlock.api.service import Service
from interlock.audit.retention import expire_payloads
from interlock.call.results import Result
from interlock.contract.contract import contract_of
from interlock.contract.standard import ToolResult, ToolResultPersistence
from interlock.core.clock import iso
from interlock.data.canonical import canonical, digest
from interlock.data.schema import Schema
from interlock.store.port import Transaction
from tests.sample import Number, Text, world
from tests.support.calls import admit, code, publish, records
from tests.support.private import person
from tests.support.stores import everything_in

returned: list[Any] = []
readers: list[Callable[[str], Awaitable[bytes]]] = []


@tool(version="1.0.0", mutation_class="read_only", namespace="r", timeout_class="interactive", external_io=False)
async def shaped(text: Text) -> dict[str, list[Annotated[int, Field(ge=0, le=9)]]]:
    """Return whatever the test put there."""
    return returned[-1]


@tool(version="1.0.0", mutation_class="read_only", namespace="r", coerce_output=True)
async def lenient(text: Text) -> dict[str, float | bool]:
    """Return text where numbers are promised."""
    return returned[-1]


Sign = Annotated[str, Field(description="what the text consists of", examples=["x"])]
PRIVATE = ("ann@example.org", "555-123-4567", "supersecret")


@tool(version="1.0.0", mutation_class="read_only", namespace="r", max_inline_chars=100)
async def long(size: Number, sign: Sign = "x") -> str:
    """Text of a length."""
    return sign * size


@tool(version="1.0.0", mutation_class="read_only", namespace="r", max_inline_chars=100)
async def long_letter(size: Number) -> str:
    """Text of a length to somebody whose address is private."""
    return "To ann@example.org: " + "x" * size


@tool(version="1.0.0", mutation_class="read_only", namespace="r", max_inline_chars=5000)
async def longer(size: Number) -> str:
    """Text of a length, much of which may be shown."""
    return "x" * size


@tool(version="1.0.0", mutation_class="read_only", namespace="r", max_inline_chars=100, persist_output=False)
async def read_back(ref: Text) -> str:
    """Read a kept payload; its own output is never kept again."""
    return orjson.loads(await readers[-1](ref))


class Receipt(BaseModel):
    path: str
    rows: int


@tool(version="1.0.0", mutation_class="write_reversible", namespace="r", effects=[Effect("file:{path}", "CREATE")])
def store(ctx: Context, path: Text, content: Text, lie: Text) -> Receipt:
    """Write a file and attest it."""
    Path(path).write_text(content)
    claimed = hashlib.sha256(b"something else" if lie == "hash" else content.encode()).hexdigest()
    ctx.attest("content hash", claimed, lambda: hashlib.sha256(Path(path).read_bytes()).hexdigest())
    ctx.attest("row count", 2 if lie == "rows" else 1, lambda: len(Path(path).read_text().splitlines()))
    ctx.effect(f"file:{path}", "CREATE", after=content)
    return Receipt(path=path, rows=1)


@store.preview
def _(path: str, content: str, lie: str) -> Preview:
    return Preview(effects=(Change(resource=f"file:{path}", operation="CREATE"),))


@store.compensate
def _(receipt: Receipt) -> None:
    Path(receipt.path).unlink()


@store.verify
async def _(arguments: dict[str, Any], result: dict[str, Any]) -> list[str]:
    return [] if arguments["lie"] != "verify" else [f"{result['rows']} rows were not found"]


@tool(version="1.0.0", mutation_class="write_reversible", namespace="r", effects=[Effect("vault:{slot}", "UPDATE")])
async def keep(
    ctx: Context,
    slot: Text,
    api_key: Annotated[str, Field(description="a key", examples=["k"], json_schema_extra={"x-sensitivity": "secret"})],
    password: Annotated[str, Field(description="a password", examples=["p"])],
) -> dict[str, str]:
    """Take credentials and give them back."""
    ctx.effect(f"vault:{slot}", "UPDATE", before=None, after={"api_key": api_key, "password": password})
    ctx.log.warning("storing %s under %s", password, slot)
    ctx.progress(f"storing for ann@example.org, password={password}")
    if slot == "crash":
        raise ValueError(password, {"key": api_key})
    if slot == "fail":
        raise Failure("E3401", f"could not store password={password} with api_key: {api_key}")
    return {"api_key": api_key, "slot": slot, "password": password}


@keep.preview
def _(slot: str, api_key: str, password: str) -> Preview:
    return Preview(impact=slot)


@keep.compensate
async def _(result: dict[str, str]) -> None:
    return None


TOOLS = (shaped, lenient, person, long, longer, read_back, store, keep)


@pytest.fixture
async def results(app: Interlock) -> Interlock:
    for one in TOOLS:
        await app.journal.commit(publish(one))
        app.catalog.attach(one)
    return app


@pytest.mark.shows("Python function", "results bounded")
@pytest.mark.supports("LIFE-19")
@pytest.mark.part_of("VALID-03", rest="fallback engages on a violation; there are no fallbacks yet")
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.dictionaries(st.text(max_size=3), st.lists(st.integers(-2, 12), max_size=3), max_size=2)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=2), max_leaves=3
    )
)
async def test_an_output_reaches_the_caller_only_if_it_fits(results: Interlock, value: Any) -> None:
    returned.append(value)
    fits = Schema(shaped.manifest.result_schema or {}).valid(value)
    result = await results.call("r.shaped", text="x")
    if fits:
        assert result.unwrap() == value
    else:
        assert code(result) == "E3303"
        assert result.error is not None
        assert not result.error.retryable
        assert result.value is None


@pytest.mark.part_of("VALID-03", rest="fallback engages on a violation; there are no fallbacks yet")
async def test_a_violation_names_the_path_and_the_rule_and_never_the_value(results: Interlock) -> None:
    alerts: list[Any] = []
    results.listen(lambda event: alerts.append(event) if event.type == "tool.alert" else None)
    returned.append({"a": [1, 1234567]})
    result = await results.call("r.shaped", text="x")
    assert result.error is not None
    assert result.error.details is not None
    assert result.error.details["faults"] == [{"pointer": "/a/1", "message": "is greater than the maximum of 9"}]
    assert "1234567" not in str(result.document())
    assert [event.data["alert"] for event in alerts] == ["TOOL_OUTPUT_SCHEMA_VIOLATION"]


@pytest.mark.proves("VALID-01")
async def test_outputs_are_coerced_only_where_the_contract_says_so(results: Interlock) -> None:
    returned.append({"price": "19.99", "active": "true"})
    assert (await results.call("r.lenient", text="x")).unwrap() == {"price": 19.99, "active": True}
    returned.append({"a": ["3"]})
    assert code(await results.call("r.shaped", text="x")) == "E3303"


class Line(TypedDict):
    price: Annotated[float, Field(description="what it cost", examples=[1.5])]
    paid: Annotated[bool, Field(description="whether it is paid", examples=[True])]


@tool(version="1.0.0", mutation_class="read_only", namespace="r", redact_results=False)
async def typed(
    count: Annotated[int, Field(description="how many", examples=[1])],
    lines: Annotated[list[Line], Field(description="what was sold", examples=[[]])],
    at: Annotated[datetime, Field(description="when", examples=["2026-01-31T00:00:00Z"])],
) -> str:
    """Say what it was given, and of which types."""
    return repr((count, lines, at.isoformat()))


SOLD: dict[str, Any] = {"count": "42", "lines": [{"price": "19.99", "paid": "YES"}], "at": "2026-02-28T00:00:00Z"}


@pytest.mark.proves("VALID-01")
async def test_each_coercion_of_a_call_is_on_its_record_and_what_was_sent_is_untouched(results: Interlock) -> None:
    await admit(results, typed)
    sent = copy.deepcopy(SOLD)
    result = await results.call("r.typed", sent)
    assert result.unwrap() == "(42, [{'price': 19.99, 'paid': True}], '2026-02-28T00:00:00+00:00')"
    assert sent == SOLD
    (record,) = records(results, result.invocation_id)
    coerced = [{"source": "coercion", "pointer": at} for at in ("/count", "/lines/0/price", "/lines/0/paid")]
    assert sorted(record["inputMutations"], key=str) == sorted(coerced, key=str)
    as_sent = hashlib.sha256(canonical(SOLD)).hexdigest()
    assert record["inputHash"] == as_sent, "of the input as the model wrote it"


@pytest.mark.proves("VALID-01")
@pytest.mark.parametrize(
    ("change", "pointer", "code"),
    [
        ({"count": "4x"}, "/count", "E3301"),
        ({"count": "1.5"}, "/count", "E3302"),
        ({"lines": [{"price": "NaN", "paid": "no"}]}, "/lines/0/price", "E3301"),
        ({"lines": [{"price": "1", "paid": "maybe"}]}, "/lines/0/paid", "E3301"),
        ({"at": "2026-02-29T00:00:00Z"}, "/at", "E3301"),
        ({"at": "yesterday"}, "/at", "E3301"),
    ],
)
async def test_a_call_whose_text_cannot_be_coerced_is_refused_at_the_place(
    results: Interlock, change: dict[str, Any], pointer: str, code: str
) -> None:
    await admit(results, typed)
    refused = (await results.call("r.typed", {**SOLD, **change})).error
    assert refused is not None
    assert refused.code == code
    assert refused.details is not None
    assert [fault["pointer"] for fault in refused.details["faults"]] == [pointer]


@pytest.mark.proves("VALID-04")
async def test_what_a_caller_may_not_see_is_removed_and_named(results: Interlock) -> None:
    curious = Caller(id="local:curious")
    result = await results.call("r.person", {"text": "soon"}, caller=curious)
    hidden = result.document()
    for part in ("content", "model_facing_content", "ui_facing_summary", "transcript_search_text"):
        assert hidden[part], part
    assert not any(private in orjson.dumps(hidden).decode() for private in PRIVATE)
    (record,) = records(results, result.invocation_id)
    assert (result.ok, record["status"], record["states"][-1]) == (True, "SUCCESS", "succeeded")
    assert record["outputSummary"]
    assert not any(private in str(record) for private in PRIVATE)
    assert hidden["structured_content"] == {
        "name": "Ann", "mail": "[EMAIL_REDACTED]", "note": "call [PHONE_REDACTED], soon", "password": "[REDACTED]",
    }  # fmt: skip
    assert sorted(hidden["redaction_state"]["paths"]) == ["/mail", "/note", "/password"]
    allowed = Caller(id="local:curious", scopes=frozenset({"pii:read"}))
    shown = await results.call("r.person", {"text": "soon"}, caller=allowed)
    assert shown.unwrap()["mail"] == "ann@example.org"
    assert shown.unwrap()["password"] == "[REDACTED]"
    assert shown.unwrap()["note"] == "call [PHONE_REDACTED], soon", "no schema says that it carries personal data"
    assert sorted(shown.document()["redaction_state"]["paths"]) == ["/note", "/password"]


@pytest.mark.proves("LIFE-20")
async def test_a_preview_has_a_thousand_characters_at_most(results: Interlock) -> None:
    result = await results.call("r.longer", size=6000)
    assert result.persistence.decision == "preview"
    text = str(result.document())
    assert "x" * 900 in text
    assert "x" * 1001 not in text


@pytest.mark.proves("LIFE-20")
async def test_a_large_result_with_a_private_part_is_announced_as_redacted_and_as_persisted(results: Interlock) -> None:
    await admit(results, long_letter)
    events: list[Any] = []
    results.listen(events.append)
    result = await results.call("r.long_letter", size=200)
    assert result.persistence.decision == "preview"
    assert "ann@example.org" not in str(result.document())
    heard = [event.type for event in events]
    assert {"tool.result.created", "tool.result.persisted", "tool.result.redacted"} <= set(heard)


@pytest.mark.proves("LIFE-16")
@pytest.mark.proves("LIFE-20", "CONTRACT-19")
@pytest.mark.parametrize("sign", ["x", "\u00e9", "\U0001d11e"])  # of one byte, of two, and of four
@pytest.mark.parametrize(("size", "kept"), [(98, False), (99, True), (500, True), (1001, True), (5000, True)])
async def test_a_large_result_is_kept_and_referred_to(results: Interlock, size: int, kept: bool, sign: str) -> None:
    events: list[Any] = []
    results.listen(events.append)
    result = await results.call("r.long", size=size, sign=sign)
    document = result.document()
    ToolResult.parse(document)
    ToolResultPersistence.parse(document["metadata"]["persistence"])
    assert result.value == sign * size
    assert bool(document["persistence_refs"]) == kept
    assert result.persistence.decision == ("preview" if kept else "inline")
    on_record = records(results, result.invocation_id)[0].get("persistence")
    assert (on_record is None) == (not kept)
    assert ("tool.result.persisted" in [event.type for event in events]) == kept
    # A record without a decision reads as inline.
    left = await _status(results, result)
    assert left["status"] == "succeeded"
    assert left["persistence"]["decision"] == ("preview" if kept else "inline")
    if kept:
        assert left["persistence"]["reason"] == "larger than max_inline_chars"
        assert left["persistence"]["ref"] == f"payload:{result.invocation_id}"
        (ref,) = document["persistence_refs"]
        assert document["structured_content"] is None
        assert document["content"][0]["type"] == "persisted_ref"
        assert orjson.loads(await results.read_payload(ref)) == sign * size
        with pytest.raises(Failure):
            await results.read_payload(ref, caller=Caller(id="local:other"))
        assert on_record is not None
        assert (on_record["decision"], on_record["ref"]) == ("preview", ref)
        assert on_record["size"] == len(f'"{sign * size}"'.encode())
        # INVARIANT: the answer refers to the payload and shows a part of it, never the whole.
        assert str(document).count(sign * 50) > 0
        assert sign * 51 not in str(document)
        assert document["content"][0]["preview"].startswith(sign * 50)
        assert document["model_facing_content"][0]["text"].startswith(sign * 50)
        # A tool that reads payloads has opted out, so that nothing is kept a second time.
        before = results.journal.reader.all("SELECT count(*) FROM payload")
        readers[:] = [results.read_payload]
        again = await results.call("r.read_back", ref=ref)
        assert again.document()["structured_content"] == sign * size
        assert again.document()["persistence_refs"] == []
        assert again.persistence.decision == "inline"
        assert results.journal.reader.all("SELECT count(*) FROM payload") == before


async def _status(app: Interlock, result: Result) -> dict[str, Any]:
    """Where a call stands, as doors tell it when only its record is left."""
    return await Service(app).calls.status(result.invocation_id, app.caller)


@pytest.mark.proves("LIFE-16")
@pytest.mark.proves("LIFE-20")
async def test_a_result_without_its_private_fields_is_recorded_and_announced_as_redacted(results: Interlock) -> None:
    events: list[Any] = []
    results.listen(events.append)
    result = await results.call("r.person", text="x")
    assert result.persistence.decision == "redact"
    ToolResultPersistence.parse(result.document()["metadata"]["persistence"])
    assert records(results, result.invocation_id)[0]["persistence"]["decision"] == "redact"
    (event,) = [event for event in events if event.type == "tool.result.redacted"]
    assert set(event.data["paths"]) == set(result.redacted)
    left = await _status(results, result)
    assert (left["status"], left["persistence"]["decision"]) == ("succeeded", "redact")
    assert left["persistence"]["reason"] == "private fields were removed"


@tool(version="1.0.0", mutation_class="read_only", namespace="r", private_output=True)
async def diagnosis(ctx: Context, text: Text) -> str:
    """Say something that belongs into no transcript."""
    ctx.partial(f"half of {text}")
    ctx.attach("text", text=f"more of {text}")
    return f"all of {text}"


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="r", private_output=True,
    effects=[Effect("chart:{text}", "CREATE")],
)  # fmt: skip
async def chart(ctx: Context, text: Text) -> str:
    """Write something down that belongs into no transcript."""
    ctx.effect(f"chart:{text}", "CREATE")
    return f"all of {text}"


@chart.preview
def _(text: str) -> Preview:
    return Preview(impact="a chart")


@chart.compensate
async def _(result: str) -> None:
    return None


@pytest.mark.proves("LIFE-20")
@pytest.mark.proves("LIFE-16")
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", ["r.diagnosis", "r.chart"])
async def test_a_private_result_is_referred_to_and_never_embedded(results: Interlock, name: str, full: bool) -> None:
    await admit(results, diagnosis, chart)
    events: list[Any] = []
    results.listen(events.append)
    key = "k" if name == "r.chart" else None
    if full and key is not None:
        # A write whose result there is no room for any more: only its reason is left.
        quota = results.settings.model_copy(update={"payload_bytes_per_caller": 2})
        results.gateway.storage.payloads._settings = quota  # pyright: ignore[reportPrivateUsage]
    result = await results.call(name, {"text": "Quux-7731"}, key=key)
    assert result.value == "all of Quux-7731", "the program that made the call has it"
    replayed = [await results.call(name, {"text": "Quux-7731"}, key=key)] if key is not None else []
    for one in (result, *replayed):
        document = one.document()
        ToolResult.parse(document)
        ToolResultPersistence.parse(document["metadata"]["persistence"])
        del document["metadata"]["policy_refs"]
        assert "Quux" not in str(document)
        assert document["status"] == "succeeded"
        assert document["persistence_refs"] == [f"payload:{result.invocation_id}"]
        withheld = full and key is not None
        assert one.persistence.decision == ("link" if withheld else "persist")
        assert one.persistence.reason
    assert "Quux" not in str([event.data for event in events])
    (persisted,) = [event for event in events if event.type == "tool.result.persisted"]
    assert persisted.data["decision"] == ("link" if full and key is not None else "persist")
    record = records(results, result.invocation_id)[0]
    assert "Quux" not in str({**record, "sideEffects": None})
    assert record["persistence"]["decision"] == ("link" if full and key is not None else "persist")
    if not full:
        assert orjson.loads(await results.read_payload(f"payload:{result.invocation_id}")) == "all of Quux-7731"


def test_a_tool_cannot_keep_all_results_and_none() -> None:
    torn = diagnosis.manifest.model_copy(update={"persist_output": False})
    with pytest.raises(Failure, match="drop one"):
        contract_of(torn)


@pytest.mark.proves("LIFE-16")
@pytest.mark.parametrize("how", ["expired", "discarded", "withheld"])
async def test_what_is_left_of_a_call_whose_payload_is_gone_says_why(results: Interlock, how: str) -> None:
    await admit(results, chart)
    if how == "withheld":
        quota = results.settings.model_copy(update={"payload_bytes_per_caller": 2})
        results.gateway.storage.payloads._settings = quota  # pyright: ignore[reportPrivateUsage]
    result = await results.call("r.chart", {"text": "a"}, key="k")
    if how == "expired":
        await results.journal.commit(lambda tx: tx.execute("UPDATE payload SET expires_ms = 0") and None)
        await expire_payloads(results.journal)
    service = Service(results)
    if how == "discarded":
        assert await service.calls.cancel(result.invocation_id, results.caller, "discard") == "finished"
    status = await service.calls.status(result.invocation_id, results.caller)
    ref = f"payload:{result.invocation_id}"
    assert (status["status"], status["tool_id"]) == ("succeeded", "r.chart")
    assert (status["persistence"]["decision"], status["persistence"]["ref"]) == ("link", ref)
    why = {"expired": "no longer kept", "discarded": "discarded by its caller", "withheld": "withheld"}[how]
    assert why in status["persistence"]["reason"]
    again = await results.call("r.chart", {"text": "a"}, key="k")
    assert (again.ok, again.value, again.persistence.ref) == (True, None, ref)
    assert why in again.persistence.reason
    await service.calls.close()


@pytest.mark.proves("LIFE-16")
async def test_the_envelope_of_an_expired_payload_stays_readable(results: Interlock) -> None:
    result = await results.call("r.long", size=500)
    ref = result.persistence.ref
    assert ref is not None
    await results.journal.commit(lambda tx: tx.execute("UPDATE payload SET expires_ms = 0") and None)
    assert await expire_payloads(results.journal) == 1
    with pytest.raises(Failure, match="expired"):
        await results.read_payload(ref)
    assert records(results, result.invocation_id)[0]["outputSummary"] == {"type": "string", "bytes": 502}


@pytest.mark.proves("LIFE-19")
@pytest.mark.parametrize("lie", ["none", "hash", "rows", "verify"])
async def test_a_tool_that_lies_about_its_effect_fails_before_anyone_hears_of_success(
    results: Interlock, tmp_path: Path, lie: str
) -> None:
    target = str(tmp_path / "file.txt")
    heard: list[str] = []
    results.listen(lambda event: heard.append(event.type) if event.tool.startswith("r.store") else None)
    result = await results.call("r.store", path=target, content="one line", lie=lie, key=f"k-{lie}")
    if lie == "none":
        envelope = result.envelope()
        assert envelope["data"] == {"path": target, "rows": 1}
        assert envelope["provenance"].keys() >= {"source", "version", "executedAt"}
        assert envelope["execution"].keys() >= {"latencyMs", "cost"}
        undone = await results.undo(result.invocation_id, key="undo")
        assert undone.ok
        assert target not in map(str, tmp_path.iterdir())  # noqa: ASYNC240 - a look at a test's own directory
    else:
        assert code(result) == "E3417"
        assert records(results, result.invocation_id)[0]["phases"][-2:] == ["verify", "return"]
        assert "tool.invocation.succeeded" not in heard
        assert result.error is not None
        assert result.error.row.error_code == "INTERNAL_TOOL_ERROR"


@pytest.mark.proves("AUDIT-07")
@pytest.mark.proves("AUDIT-06")
async def test_credentials_appear_nowhere(results: Interlock, caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    results.listen(lambda event: said.append(str(event.document())))
    secrets = {"api_key": "sk-secret123456", "password": "supersecret"}
    with caplog.at_level("DEBUG"):
        good = await results.call("r.keep", {"slot": "a", **secrets}, key="k1")
        again = await results.call("r.keep", {"slot": "a", **secrets}, key="k1")
        bad = await results.call("r.keep", {"slot": "fail", **secrets}, key="k2")
        crashed = await results.call("r.keep", {"slot": "crash", **secrets}, key="k5")
        wrong = await results.call("r.keep", {"slot": "a", **secrets, "extra": 1}, key="k3")
        refused = await results.call("r.keep", {"slot": 5, "api_key": 5, "password": "supersecret"}, key="k4")
    told = [str(result.document()) for result in (good, again, bad, crashed, wrong, refused)]
    assert good.unwrap() == {"api_key": "[REDACTED]", "slot": "a", "password": "[REDACTED]"}
    await results.journal.drain()
    written = await asyncio.to_thread(everything_in, results.home)
    everything = "".join([*told, *said, caplog.text]) + written.decode("latin-1")
    for secret in secrets.values():
        assert secret not in everything
        assert secret.encode() not in written
    assert "[REDACTED]" in everything
    assert "ValueError" in caplog.text
    assert "storing [REDACTED] under a" in caplog.text


@pytest.mark.proves("EFFECT-05")
async def test_every_reported_change_is_a_record_with_private_values_only_sealed(results: Interlock) -> None:
    result = await results.call("r.keep", slot="a", api_key="sk-secret123456", password="p", key="k")
    (mutation,) = records(results, result.invocation_id, kind="mutation")
    assert mutation["newValue"].keys() == {"sealed", "sha256"}
    assert mutation["previousValue"] is None
    assert mutation.keys() >= {"toolId", "callerId", "timestamp", "mutationType", "affectedResource", "idempotencyKey"}
    counted = await results.call("demo.increment", name="a", key="k2")
    (change,) = records(results, counted.invocation_id, kind="mutation")
    assert (change["previousValue"], change["newValue"], change["mutationType"]) == (0, 1, "UPDATE")


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="r",
    effects=[Effect("session:*", "UPDATE"), Effect("row:*", "UPDATE")],
)  # fmt: skip
async def enrol(ctx: Context, text: Text) -> str:
    """Make credentials of its own, which no argument and no result holds."""
    for name in ("password", "api_key", "accessToken", "colour"):
        ctx.session[name] = f"made-up-{name}"
        ctx.effect(f"row:users/7/{name}", "UPDATE", before=f"former-{name}", after=f"made-up-{name}")
    ctx.effect("row:users/7", "UPDATE", after={"name": "ann", "password": "made-up-nested"})
    return text


@enrol.preview
def _(text: str) -> Preview:
    return Preview()


@enrol.compensate
async def _(result: str) -> None:
    return None


@pytest.mark.supports("EFFECT-07")
@pytest.mark.proves("EFFECT-05")
async def test_values_under_the_name_of_a_secret_are_kept_sealed(results: Interlock) -> None:
    await results.journal.commit(publish(enrol))
    results.catalog.attach(enrol)
    result = await results.call("r.enrol", text="x", key="k")
    assert result.ok
    changes = {one["affectedResource"]: one for one in records(results, result.invocation_id, kind="mutation")}
    for name in ("password", "api_key", "accessToken"):
        shown = [
            changes[f"session:{name}"]["newValue"],
            changes[f"row:users/7/{name}"]["newValue"],
            changes[f"row:users/7/{name}"]["previousValue"],
        ]
        assert all(one.keys() == {"sealed", "sha256"} for one in shown)
        assert len({one["sha256"] for one in shown}) == 3, "a hash without salt would tell equal values"
        assert digest(f"made-up-{name}") not in {one["sha256"] for one in shown}
        opened = [results.gateway.storage.changes.read(results.journal.reader, one) for one in shown]
        assert opened == [f"made-up-{name}", f"made-up-{name}", f"former-{name}"]
    assert changes["row:users/7"]["newValue"].keys() == {"sealed", "sha256"}
    assert changes["session:colour"]["newValue"] == "made-up-colour"
    assert changes["row:users/7/colour"]["previousValue"] == "former-colour"
    live = orjson.loads(results.gateway.storage.sessions.read(results.caller, "")[1])
    assert await results.replay_session() == live
    assert live["api_key"] == "made-up-api_key"
    # A new key takes the place of the old one for these values too.
    before = results.gateway.storage.payloads._box.current  # pyright: ignore[reportPrivateUsage]
    await results.secrets.rotate_key(by="me")
    assert results.gateway.storage.payloads._box.current != before  # pyright: ignore[reportPrivateUsage]
    assert await results.replay_session() == live


async def test_a_sealed_value_that_was_exchanged_is_not_believed(results: Interlock) -> None:
    await results.journal.commit(publish(enrol))
    results.catalog.attach(enrol)
    result = await results.call("r.enrol", text="x", key="k")
    changes = {one["affectedResource"]: one for one in records(results, result.invocation_id, kind="mutation")}
    one, other = (changes[f"session:{name}"]["newValue"] for name in ("password", "api_key"))

    def exchange(transaction: Transaction) -> None:
        transaction.execute("UPDATE payload SET body = NULL WHERE ref = ?", (one["sealed"],))
        transaction.execute(
            "UPDATE payload SET body = (SELECT body FROM payload WHERE ref = ?) WHERE ref = ?",
            (changes["row:users/7"]["newValue"]["sealed"], other["sealed"]),
        )

    await results.journal.commit(exchange)
    for shown, expected in ((one, "E3801"), (other, "E3604")):
        with pytest.raises(Failure) as caught:
            results.gateway.storage.changes.read(results.journal.reader, shown)
        assert caught.value.code == expected


@tool(version="1.0.0", mutation_class="write_reversible", namespace="r", effects=[Effect("nothing", "UPDATE")])
async def idle(ctx: Context) -> str:
    """A write that changes nothing this time."""
    return "nothing to do"


@idle.preview
def _() -> Preview:
    return Preview()


@idle.compensate
async def _(result: str) -> None:
    return None


@tool(version="1.0.0", mutation_class="write_reversible", namespace="r", effects=[Effect("row:{table}", "UPDATE")])
async def thrice(ctx: Context, table: Text) -> int:
    """Three changes in one call."""
    for row in range(3):
        ctx.effect(f"row:{table}", "UPDATE", before=row, after=row + 1)
    return 3


@thrice.preview
def _(table: str) -> Preview:
    return Preview()


@thrice.compensate
async def _(result: int) -> None:
    return None


@pytest.mark.proves("EFFECT-05")
async def test_three_changes_are_three_records_that_name_their_call(results: Interlock) -> None:
    await results.journal.commit(publish(thrice))
    results.catalog.attach(thrice)
    began = datetime.fromisoformat(iso(results.clock.now_ms()))
    result = await results.call("r.thrice", table="t", key="k")
    changes = records(results, result.invocation_id, kind="mutation")
    assert [(one["previousValue"], one["newValue"]) for one in changes] == [(0, 1), (1, 2), (2, 3)]
    assert {(one["call"], one["traceId"], one["idempotencyKey"]) for one in changes} == {
        (result.invocation_id, result.trace_id, "k")
    }
    assert {(one["toolId"], one["version"], one["callerId"]) for one in changes} == {
        ("r.thrice", "1.0.0", results.caller.id)
    }
    assert {(one["affectedResource"], one["mutationType"]) for one in changes} == {("row:t", "UPDATE")}
    (closed,) = records(results, result.invocation_id)
    for one in changes:
        assert began <= datetime.fromisoformat(one["timestamp"]) <= datetime.fromisoformat(closed["timestamp"])
    assert not any("approvedBy" in one for one in changes)


Personal = Annotated[
    str, Field(description="a favourite colour", examples=["red"], json_schema_extra={"x-sensitivity": "pii"})
]


@tool(version="1.0.0", mutation_class="write_reversible", namespace="r", effects=[Effect("row:{name}", "UPDATE")])
async def paint(ctx: Context, name: Text, colour: Personal) -> str:
    """Keep something under a harmless name that is declared to be personal."""
    ctx.effect(f"row:{name}", "UPDATE", before={"colour": colour}, after=colour)
    return name


@paint.preview
def _(name: str, colour: str) -> Preview:
    return Preview()


@paint.compensate
async def _(result: str) -> None:
    return None


@pytest.mark.proves("EFFECT-05")
async def test_a_value_that_its_schema_declares_sensitive_is_in_no_record(results: Interlock) -> None:
    await results.journal.commit(publish(paint))
    results.catalog.attach(paint)
    result = await results.call("r.paint", name="wall", colour="ultramarine", key="k")
    assert result.ok
    (change,) = records(results, result.invocation_id, kind="mutation")
    assert (change["previousValue"], change["newValue"]) == ({"colour": "[REDACTED]"}, "[REDACTED]")
    written = results.journal.reader.all("SELECT body FROM journal")
    assert not any(b"ultramarine" in body for (body,) in written)


@pytest.mark.proves("EFFECT-05")
async def test_a_write_that_changes_nothing_succeeds_with_a_warning(results: Interlock) -> None:
    await results.journal.commit(publish(idle))
    results.catalog.attach(idle)
    result = await results.call("r.idle", key="k")
    alerts: list[tuple[str, str]] = []
    results.gateway.telemetry.alerts.listeners.append(lambda alert: alerts.append((alert.name, alert.severity)))
    assert result.ok
    assert result.metadata["warnings"] == ["WRITE_TOOL_NO_MUTATION"]
    again = await results.call("r.idle", key="k2")
    assert (again.ok, alerts) == (True, [("WRITE_TOOL_NO_MUTATION", "info")])
    assert await results.gateway.quarantine.all() == []


@pytest.mark.proves("EFFECT-01")
async def test_each_mutation_class_shows_its_own_governance(results: Interlock) -> None:
    read = await results.call("demo.add", a=1, b=1)
    assert read.ok
    assert not records(results, read.invocation_id, kind="intent")
    assert code(await results.call("demo.increment", name="a")) == "E3307"
    write = await results.call("demo.increment", name="a", key="k")
    (intent,) = records(results, write.invocation_id, kind="intent")
    assert intent["predicted"] == [{"resource": "counter:a", "operation": "UPDATE"}]
    refused = await results.call("demo.send", to="x", key="k")
    assert refused.error is not None
    assert (refused.error.code, refused.error.row.http) == ("E3208", 202)
    preview = await results.call("demo.send", to="x", dry_run=True)
    assert preview.unwrap() == {
        "predicted_effects": [{"resource": "mail:x", "operation": "CREATE"}],
        "preconditions": {},
        "impact": "x would get a mail",
    }
    assert world.runs == 1


class Internal(BaseModel):
    seen: str


@tool(version="1.0.0", mutation_class="read_only", namespace="r")
async def routed(
    text: Text,
    tenant_hint: Annotated[
        str, Field(description="set by the runtime", examples=["t"], json_schema_extra={"x-internal": True})
    ] = "none",
) -> Internal:
    """Say which hint arrived."""
    return Internal(seen=f"{text} {tenant_hint}")


@pytest.mark.supports("LIFE-06")
@pytest.mark.proves("CONTRACT-12")
async def test_a_field_of_the_runtimes_own_is_invisible_and_cannot_be_sent(results: Interlock) -> None:
    from interlock import Hook, HookResult

    await results.journal.commit(publish(routed))
    results.catalog.attach(routed)
    sent = await results.call("r.routed", text="a", tenant_hint="mine")
    assert sent.error is not None
    assert sent.error.row.error_code == "INVALID_INPUT"
    assert "tenant_hint" not in str(sent.document())
    misspelt = await results.call("r.routed", text="a", tenant_hin="mine")
    assert "tenant_hint" not in str(misspelt.document())
    results.hook(
        Hook(
            id="router",
            when="pre",
            tools="r.routed",
            run=lambda s: HookResult(updated_input={**s.input, "tenant_hint": "t7"}),
        )
    )
    result = await results.call("r.routed", text="a")
    assert result.unwrap() == {"seen": "a t7"}
    assert {"source": "hook:router", "pointer": "/tenant_hint"} in result.metadata["input_mutations"]

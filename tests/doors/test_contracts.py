"""What a contract promises, kept at every door: what is hidden stays hidden, what fails says so in one form."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Annotated, Any

import httpx
import orjson
import pytest
import pytest_asyncio
from pydantic import BaseModel, ConfigDict

from interlock import Caller, Context, Field, Hook, Interlock, Sandboxing, tool
from interlock.api.service import Service
from interlock.call.connector import RemoteCall
from interlock.call.results import ENVELOPE_SCHEMA
from interlock.contract.contract import contract_of, parse_contract
from interlock.contract.standard import ToolInterface
from interlock.contract.standard.export import declaration, interface
from interlock.core.errors import CODES, Failure
from interlock.data.schema import Schema
from interlock.doors.server import Gate, Listening
from interlock.http.route import Application
from interlock.registry import quarantine
from interlock.registry.retirement import deprecate, move
from interlock.registry.source import load
from tests import sample
from tests.sample import TOOLS
from tests.support.answers import Heard
from tests.support.calls import admit
from tests.support.faults import (
    PLACE,
    State,
    choosy,
    explodes,
    failing,
    log_each_in_full,
    logged,
    raising,
    sound,
    state,
)
from tests.support.paging import rows
from tests.support.programs import NAMED, written
from tests.support.upstreams import Scripted
from tests.support.upstreams import opened as far
from tests.support.wires import WIRES, Wires, opened

Json = dict[str, Any]
Hint = Annotated[str, Field(description="set by the runtime", examples=["t"], json_schema_extra={"x-internal": True})]


class Options(BaseModel):
    """An object that takes any other field as well."""

    model_config = ConfigDict(extra="allow")

    note: sample.Text = "none"
    billing_hint: Hint = "none"


@tool(version="1.0.0", mutation_class="read_only", namespace="c")
async def routed(
    text: sample.Text,
    options: Annotated[Options, Field(description="more", examples=[{"note": "a"}])],
    tenant_hint: Hint = "none",
) -> str:
    """Say what arrived."""
    state.runs += 1
    return f"{text} {tenant_hint} {options.billing_hint}"


@tool(version="1.0.0", mutation_class="read_only", namespace="c")
async def raises(code: sample.Text) -> str:
    """Fail in the way that it is asked for."""
    raise Failure(code)


class Box(BaseModel):
    """A result with a bound."""

    number: Annotated[int, Field(le=9)]


@tool(version="1.0.0", mutation_class="read_only", namespace="c")
async def boxed(number: Annotated[int, Field(description="a number", examples=[1], ge=0)]) -> Box:
    """Put a number into a box that may be too small for it."""
    state.runs += 1
    return {"number": number}  # pyright: ignore[reportReturnType] - not checked here, but by its contract


EARLY: dict[str, tuple[str, Any, bool]] = {
    "a member": ("partial", {"number": 9}, True),
    "another member": ("partial", {"name": "a"}, True),
    "no member": ("partial", {}, True),
    "all": ("partial", {"number": 9, "name": "a"}, True),
    "all, to be used": ("yielded", {"number": 9, "name": "a"}, True),
    "a member, to be used": ("yielded", {"number": 9}, False),
    "a member that does not fit": ("partial", {"number": 7654321}, False),
    "an unknown member": ("partial", {"7654321": 1}, False),
    "something else": ("partial", "7654321", False),
    "something else, to be used": ("yielded", "7654321", False),
    "no data": ("partial", {7654321}, False),
}
LISTED: dict[str, tuple[str, Any, bool]] = {
    "an element": ("partial", 9, True),
    "elements": ("partial", [9, 8], True),
    "elements, to be used": ("yielded", [9, 8], True),
    "an element, to be used": ("yielded", 9, False),
    "an element that does not fit": ("partial", "7654321", False),
    "elements that do not fit": ("partial", [9, "7654321"], False),
}
WORDED: dict[str, tuple[str, Any, bool]] = {
    "a piece": ("partial", "he", True),
    "a text, to be used": ("yielded", "hello", True),
    "a piece, to be used": ("yielded", "he", False),
    "no text": ("partial", 7654321, False),
    "pieces": ("partial", ["7654321"], False),
    "no text, to be used": ("yielded", 7654321, False),
}


class NamedBox(Box):
    """A box with two members, both of which must be there, and no others."""

    model_config = ConfigDict(extra="forbid")

    name: str


@tool(version="1.0.0", mutation_class="read_only", namespace="c")
async def early(ctx: Context, what: sample.Text) -> NamedBox:
    """Send something before the result."""
    _send(ctx, EARLY[what])
    return NamedBox(number=1, name="last")


@tool(version="1.0.0", mutation_class="read_only", namespace="c")
async def listed(ctx: Context, what: sample.Text) -> list[int]:
    """Send something before the list."""
    _send(ctx, LISTED[what])
    return [1]


@tool(version="1.0.0", mutation_class="read_only", namespace="c")
async def worded(ctx: Context, what: sample.Text) -> Annotated[str, Field(min_length=4)]:
    """Send something before the text, which has four letters or more."""
    _send(ctx, WORDED[what])
    return "last"


def _send(ctx: Context, case: tuple[str, Any, bool]) -> None:
    way, value, _ = case
    (ctx.partial if way == "partial" else ctx.yield_result)(value)


# Tools that send something early: what, and their result.
SENDERS = {"c.early": (EARLY, {"number": 1, "name": "last"}), "c.listed": (LISTED, [1]), "c.worded": (WORDED, "last")}


@pytest_asyncio.fixture
async def wires(home: Path) -> AsyncGenerator[Wires]:
    state.runs = 0
    async with opened(home) as made:
        for one in TOOLS:
            made.app.catalog.attach(one)
        await admit(made.app, routed, raises, boxed, early, listed, worded, explodes, choosy, rows)
        yield made


# What callers may not see


@pytest.mark.proves("CONTRACT-12")
@pytest.mark.parametrize("door", WIRES)
async def test_a_field_of_the_runtimes_own_shows_nowhere_and_is_refused(wires: Wires, door: str) -> None:
    for told in await wires.texts(door, "c.routed"):
        assert "routed" in told or "1.0.0" in told, "it is there"
        assert "hint" not in told
        assert "x-internal" not in told
    good = {"text": "a", "options": {"note": "b", "anything": 1}}
    assert "a none none" in str((await wires.call(door, "c.routed", good)).data)
    for sent in (
        {**good, "tenant_hint": "mine"},
        {"text": "a", "options": {"billing_hint": "mine"}},
        {"text": "a", "options": {"note": "b", "anything": 1, "billing_hint": "mine"}},
        {"text": "a", "tenant_hin": "x"},
        {"text": 1, "options": {"billing_hin": "x"}, "tenant_hint": 1},
    ):
        heard = await wires.call(door, "c.routed", sent)
        assert heard.failure["errorCode"] == "INVALID_INPUT"
        assert "tenant_hint" not in heard.text
        assert "billing_hint" not in heard.text
    assert state.runs == 1


@tool(
    version="1.0.0", mutation_class="read_only", namespace="c", sandbox=Sandboxing(artifacts=2),
    content_types=["image", "log"], expected_artifacts=["*.csv"], expected_resources=["https://wiki.example/*"],
    examples=[{"text": "a", "tenant_hint": "t"}],
)  # fmt: skip
async def stated(
    text: sample.Text,
    size: Annotated[int, Field(description="how large", examples=[1])] = 7,
    mail: Annotated[str, Field(description="whose", examples=["m"], json_schema_extra={"x-sensitivity": "pii"})] = "",
    tenant_hint: Hint = "none",
) -> str:
    """State everything that a contract can state."""
    return text


STATED: dict[str, tuple[Any, dict[str, Json]]] = {
    "by default": (
        routed,
        {
            "input_contract": {
                "strict": True, "argument_mode": "object", "media_mode": "none", "defaults": {}, "examples": [],
                "sensitive_fields": [], "mutation_policy": "recorded",
            },
            "output_contract": {
                "expected_artifacts": [], "expected_resources": [], "media_modes": ["text"],
                "content_types": ["text", "persisted_ref"], "result_size_policy": "persist",
                "max_inline_chars": 25_000, "rendering_boundary": "model_facing_content",
            },
        },
    ),
    "stated": (
        stated,
        {
            "input_contract": {
                "strict": True, "argument_mode": "object", "media_mode": "none", "defaults": {"size": 7, "mail": ""},
                "examples": [{"text": "a"}], "sensitive_fields": ["mail"], "mutation_policy": "recorded",
            },
            "output_contract": {
                "expected_artifacts": ["*.csv"], "expected_resources": ["https://wiki.example/*"],
                "media_modes": ["text", "image"],
                "content_types": ["text", "image", "log", "persisted_ref", "artifact_ref"],
                "result_size_policy": "persist", "max_inline_chars": 25_000,
                "rendering_boundary": "model_facing_content",
            },
        },
    ),
}  # fmt: skip


@pytest.mark.proves("CONTRACT-12")
@pytest.mark.parametrize("which", STATED)
def test_an_exported_contract_states_its_facts_and_shows_internal_fields_to_the_runtime_alone(which: str) -> None:
    made, sides = STATED[which]
    contract = contract_of(made.manifest)
    document = declaration(contract).document()
    for side, facts in sides.items():
        assert {name: document[side][name] for name in facts} == facts
    assert "hint" not in orjson.dumps(document).decode(), "models read it"
    schemas = interface(contract).document()["schemas"]
    assert schemas["runtime_input_schema"]["properties"]["tenant_hint"]["x-internal"] is True
    assert document["input_contract"]["internal_only_fields"] == []
    assert "hint" not in orjson.dumps(schemas["model_input_schema"]).decode()
    if made is routed:
        assert "billing_hint" in schemas["runtime_input_schema"]["$defs"]["Options"]["properties"]


def test_files_are_expected_only_of_a_tool_that_may_leave_some() -> None:
    document = {**routed.manifest.document(), "expected_artifacts": ["report.pdf"]}
    with pytest.raises(Failure) as refused:
        parse_contract(document)
    assert "sandbox.artifacts" in refused.value.message


# What a failure says


@pytest.mark.proves("CONTRACT-18")
async def test_every_code_is_the_same_triple_with_its_own_status_at_every_door(wires: Wires) -> None:
    seen: set[str] = set()
    for code, row in CODES.items():
        if row.http == 200:
            continue  # a diagnostic, which fails nothing
        # Both eras of MCP word a failure by the same function; the slower is asked once for each errorCode.
        doors = [door for door in WIRES if door != "mcp-legacy" or row.error_code not in seen]
        seen.add(row.error_code)
        heard = {door: await wires.call(door, "c.raises", {"code": code}) for door in doors}
        expected = (code, row.error_code.value, row.error_class.value, bool(row.retryable))
        assert {door: one.triple for door, one in heard.items()} == dict.fromkeys(doors, expected)
        statuses = {"rest": row.http, "jsonrpc": row.jsonrpc, "grpc": row.grpc}
        assert {door: one.status for door, one in heard.items()} == {
            door: statuses.get(door, "isError") for door in doors
        }


def _hook(app: Interlock, when: Any, raises: Raiser) -> None:
    app.hook(Hook(id="h", when=when, tools="demo.add", run=raises))


Raiser = Callable[..., Any]
# Hooks and policies that fail have decided nothing, which is told as a refusal.
CAUTIOUS = ("a hook before",)
LAYERS: dict[str, Callable[[Wires, pytest.MonkeyPatch, Raiser], object]] = {
    "the service": lambda w, m, r: [m.setattr(w.service.calls, n, r) for n in ("invoke", "open", "begin")],
    "request": lambda w, m, r: m.setattr(w.app.gateway._requests, "read", r),  # pyright: ignore[reportPrivateUsage]
    "validate": lambda w, m, r: m.setattr(w.app.gateway._validator, "validate", r),  # pyright: ignore[reportPrivateUsage]
    "a hook before": lambda w, _, r: _hook(w.app, "pre", r),
    "authorize": lambda w, m, r: [m.setattr(w.app.gateway._authorizer, n, r) for n in ("grant_read", "authorize")],  # pyright: ignore[reportPrivateUsage]
    "execute": lambda w, m, r: m.setattr(w.app.gateway._execution, "run", r),  # pyright: ignore[reportPrivateUsage]
    "verify": lambda w, m, r: m.setattr(w.app.gateway._verifier, "verify", r),  # pyright: ignore[reportPrivateUsage]
    "closing": lambda w, m, r: m.setattr(w.app.gateway._finisher, "succeed", r),  # pyright: ignore[reportPrivateUsage]
    "the journal": lambda w, m, r: [m.setattr(w.app.journal, n, r) for n in ("append", "record", "commit", "submit")],
}


def _doors_past(layer: str) -> tuple[str, ...]:
    """The doors behind which a layer lies: calls in process do not go through the service."""
    return WIRES if layer == "the service" else ("library", *WIRES)


async def _asked(wires: Wires, door: str) -> Heard:
    """A sum, asked for at a door. In process nothing is raised either: a failure is a result."""
    if door != "library":
        return await wires.call(door, "demo.add", {"a": 1})
    document = (await wires.app.call("demo.add", a=1)).document()
    return Heard(str(document), "library", document["structured_content"], envelope=document.get("error"))


@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize("layer", LAYERS)
async def test_a_fault_of_any_layer_is_told_as_an_envelope_and_only_the_log_says_what_it_was(
    wires: Wires, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, layer: str
) -> None:
    log_each_in_full(wires)
    for door in _doors_past(layer):
        assert (await _asked(wires, door)).envelope is None
        with monkeypatch.context() as broken:
            LAYERS[layer](wires, broken, raising)
            heard = await _asked(wires, door)
        wires.app.gateway.hooks.registered.clear()
        envelope = sound(heard, door)
        assert envelope["error_code"] == ("E3211" if layer in CAUTIOUS else "E3000"), (door, envelope)
        assert logged(wires, caplog, envelope["traceId"]), door


@pytest.mark.supports("LIFE-19")
@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize("layer", LAYERS)
async def test_a_failure_of_any_layer_names_no_place_and_no_credential_at_any_door_and_the_log_has_the_place(
    wires: Wires, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, layer: str
) -> None:
    log_each_in_full(wires)
    for door in _doors_past(layer):
        with monkeypatch.context() as broken:
            LAYERS[layer](wires, broken, failing)
            heard = await _asked(wires, door)
        wires.app.gateway.hooks.registered.clear()
        envelope = sound(heard, door)
        assert envelope["error_code"] == ("E3211" if layer in CAUTIOUS else "E3801"), (door, envelope)
        assert PLACE in logged(wires, caplog, envelope["traceId"]), door


@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize("how", State.failures)
async def test_what_a_tool_fails_with_is_told_without_what_it_gives_away(
    wires: Wires, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    log_each_in_full(wires)
    for door in WIRES:
        envelope = sound(await wires.call(door, "c.explodes", {"how": how}), door)
        assert logged(wires, caplog, envelope["traceId"]), door
        checked = sound(await wires.call(door, "c.choosy", {"text": "a"}), door)
        assert logged(wires, caplog, checked["traceId"]), door


FULL = Failure(
    "E3504", "ask again later", details={"why": "busy"}, retry_after_ms=7000, native_error_ref="n-1",
    policy_refs=("rule-1", "rule-2"), evidence_refs=("journal:e-1",),
)  # fmt: skip


@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize("door", WIRES)
async def test_an_envelope_holds_every_field_under_both_of_its_names(wires: Wires, door: str) -> None:
    state.failures = {**State.failures, "in full": lambda: FULL}
    envelope = (await wires.call(door, "c.explodes", {"how": "in full"})).failure
    assert (envelope["error_code"], envelope["errorCode"], envelope["error_class"]) == (
        "E3504", "RATE_LIMITED", "rate_limited",
    )  # fmt: skip
    if door == "grpc":
        assert int(envelope["retry_after_ms"]) == 7000
    else:
        assert envelope["retryAfterMs"] == envelope["retry_after"] == 7000
    assert envelope["retryable"] is True
    assert envelope["humanMessage"] == envelope["message"] == "ask again later"
    assert envelope["details"]["why"] == "busy"
    assert re.fullmatch(r"[0-9a-f]{32}", envelope["traceId"])
    assert envelope["native_error_ref"] == "n-1"
    assert (envelope["policy_refs"], envelope["evidence_refs"]) == (["rule-1", "rule-2"], ["journal:e-1"])
    assert envelope["recoverability"] == "retry"
    assert envelope["resolution"] == "wait for retryAfterMs, then send the call again"


@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize("door", WIRES)
async def test_a_call_that_a_rule_forbids_and_one_whose_outcome_is_unknown_name_what_there_is_to_look_at(
    home: Path, door: str
) -> None:
    _rule(home)
    async with opened(home) as wires:
        await admit(wires.app, sample.add, sample.increment)
        await _look_at(wires, door)


def _rule(home: Path) -> None:
    home.mkdir(exist_ok=True)
    (home / "policy.cedar").write_text(
        "permit (principal, action, resource);\n"
        '@id("no-sums") forbid (principal, action == Action::"demo.add", resource);\n'
    )


async def _look_at(wires: Wires, door: str) -> None:
    given: Json = {"name": f"of-{door.replace('mcp-', '')}"}
    key = f"key-{door}"
    cut_off = await wires.call(door, "demo.increment", given, key)
    assert cut_off.envelope is None
    call = cut_off.about.get("invocation_id") or cut_off.about.get("id") or ""
    statement = "UPDATE reservation SET state = 'unknown', result = NULL WHERE key = ?"
    await wires.app.journal.commit(lambda transaction: transaction.execute(statement, (key,)) and None)
    unknown = (await wires.call(door, "demo.increment", given, key)).failure
    assert (unknown["error_code"], unknown["recoverability"], unknown["retryable"]) == ("E3409", "none", False)
    (evidence,) = unknown["evidence_refs"]
    assert re.fullmatch(r"journal:[0-9A-Z]{26}", evidence)
    assert not call or evidence == f"journal:{call}"
    assert unknown["resolution"] == "settle it with interlock calls reconcile"
    denied = (await wires.call(door, "demo.add", {"a": 1})).failure
    assert (denied["error_code"], denied["policy_refs"]) == ("E3206", ["no-sums"])
    assert (denied["recoverability"], denied["resolution"]) == ("none", "ask for the missing permission")


@pytest.mark.proves("CONTRACT-13")
async def test_what_is_no_request_at_all_is_told_as_an_envelope_too(wires: Wires) -> None:
    http, bad = wires.http, {"authorization": "Bearer nonsense"}
    answers = [
        await http.post("/v1/tools/invoke", content=b"{"),
        await http.post("/v1/tools/invoke", json={"tool_id": "demo.add"}, headers=bad),
        await http.get("/v1/nothing"),
        await http.delete("/v1/policy"),
        await http.get("/v1/tools", params={"limit": "x"}),
        await http.get("/rpc"),
        await http.post("/rpc", content=b"{"),
        await http.post("/rpc", json=[]),
        await http.post("/rpc", json={"jsonrpc": "2.0", "id": 1, "method": "nothing"}),
        await http.post("/rpc", json={"jsonrpc": "2.0", "id": 1, "method": "tools.invoke", "params": {"x": 1}}),
        await http.post("/rpc", json={"jsonrpc": "2.0", "id": 1, "method": "tools.list"}, headers=bad),
        await http.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "tools/list"}, headers=bad),
        await http.get("/health", headers={"host": "elsewhere.example"}),
        await http.get("/health", headers={"origin": "http://elsewhere.example"}),
    ]
    for answer in answers:
        body: Any = answer.json()
        told = body.get("interlock") or body["error"].get("data") or body["error"]
        sound(Heard(answer.text, answer.status_code, envelope=told), "rest")


@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_door_that_cannot_even_be_loaded_is_told_as_an_envelope(
    caplog: pytest.LogCaptureFixture, method: str
) -> None:
    broken = Application(raising)
    for gate in (Gate(Listening(), {}, broken), Gate(Listening(), {(method, "/x"): broken}, broken)):
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(gate), base_url="http://localhost", timeout=60
        ) as client:
            answer = await client.request(method, "/x")
        envelope = sound(Heard(answer.text, answer.status_code, envelope=answer.json()["error"]), "rest")
        assert (answer.status_code, envelope["error_code"]) == (500, "E3000")
        assert any(getattr(record, "trace_id", None) == envelope["traceId"] for record in caplog.records)


@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize("modern", [True, False])
async def test_a_list_that_cannot_be_made_is_told_as_an_envelope(
    wires: Wires, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, modern: bool
) -> None:
    await wires.mcp("tools/list", {}, modern=modern)
    monkeypatch.setattr(wires.service.tools, "page", raising)
    text = await wires.mcp("tools/list", {}, modern=modern)
    error: Json = orjson.loads(text)["error"]
    envelope = sound(Heard(text, 0, envelope=error.get("data") or error), "mcp")
    assert logged(wires, caplog, envelope["traceId"])


@pytest.mark.proves("CONTRACT-13")
@pytest.mark.parametrize("modern", [True, False])
async def test_a_fault_of_the_protocol_is_told_as_an_envelope(wires: Wires, modern: bool) -> None:
    bad: tuple[tuple[str, Json], ...] = (
        ("tools/nothing", {}),
        ("tools/list", {"cursor": 7}),
        ("tools/list", {"cursor": "?"}),
        ("tools/call", {"name": "demo-nothing", "arguments": {}}),
        ("tools/call", {"name": "demo-add", "arguments": {"a": 1}, "_meta": {"interlock/key": 7}}),
        ("resources/read", {"uri": "payload:nothing"}),
    )
    for method, params in bad:
        text = await wires.mcp(method, params, modern=modern)
        envelope = sound(Heard(text, 0, envelope=orjson.loads(text)["error"]["data"]), "grpc")
        assert envelope["error_code"] != "E3000", "the fault is the client's"


# What a result says


def sections(heard: Heard, door: str) -> Json:
    """The four sections of a success, wherever a door puts them."""
    about: Json = heard.about
    data = heard.data["result"] if door.startswith("mcp") and set(heard.data) == {"result"} else heard.data
    return {"data": data, "pagination": None, **{n: about[n] for n in about if n in ENVELOPE_SCHEMA["properties"]}}


@pytest.mark.proves("CONTRACT-07")
@pytest.mark.parametrize("door", WIRES)
async def test_the_cursor_alone_fetches_the_next_page_at_every_door(wires: Wires, door: str) -> None:
    asked: Json = {"prefix": "a", "secret": "hush"}
    gathered: list[int] = []
    pages = 0
    while True:
        heard = await wires.call(door, "p.rows", asked)
        envelope = sections(heard, door)
        assert Schema(ENVELOPE_SCHEMA).valid(envelope), Schema(ENVELOPE_SCHEMA).errors(envelope)
        assert envelope["pagination"]["totalCount"] == 25
        assert "hush" not in heard.text
        gathered += envelope["data"]
        pages += 1
        if not envelope["pagination"]["hasMore"]:
            break
        asked = {"cursor": envelope["pagination"]["cursor"]}
    assert (gathered, pages) == (list(range(25)), 3)


@pytest.mark.proves("CONTRACT-07")
@pytest.mark.parametrize("door", WIRES)
async def test_every_success_says_where_its_data_comes_from_and_what_it_took(wires: Wires, door: str) -> None:
    calls: tuple[tuple[str, Json, str | None, str], ...] = (
        ("demo.add", {"a": 1, "b": 2}, None, "compute"),
        ("demo.echo", {"value": {"a": None}}, None, "compute"),
        ("demo.increment", {"name": "n"}, "k", "compute"),
        ("demo.increment", {"name": "n"}, "k", "replay"),
    )
    for name, asked, key, freshness in calls:
        envelope = sections(await wires.call(door, name, asked, key), door)
        assert Schema(ENVELOPE_SCHEMA).valid(envelope), envelope
        assert envelope.keys() == {"data", "pagination", "provenance", "execution"}
        assert envelope["pagination"] is None
        source, execution = envelope["provenance"], envelope["execution"]
        assert source.keys() >= {
            "source", "retrievedAt", "dataVersion", "invocationId", "timestamp", "freshness", "confidence",
        }  # fmt: skip
        await wires.app.journal.commit(lambda _: None)
        calls_made = wires.app.journal.reader.all(
            "SELECT call FROM journal WHERE kind = 'closed' ORDER BY seq DESC LIMIT 1"
        )
        assert calls_made == [(source["invocationId"],)]
        assert source["timestamp"] == source["retrievedAt"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", source["retrievedAt"])
        assert (source["confidence"], source["dataVersion"]) == (1.0, None)
        assert execution.keys() >= {"executionDurationMs", "resourceCost"}
        assert execution["executionDurationMs"] > 0
        assert execution["resourceCost"] == 0
        assert (envelope["provenance"]["source"], envelope["provenance"]["freshness"]) == (name, freshness)


# What passes at all


@pytest.mark.proves("CONTRACT-01")
@pytest.mark.part_of("VALID-03", rest="fallback engages on a violation; there are no fallbacks yet")
@pytest.mark.parametrize("door", WIRES)
async def test_neither_an_input_nor_an_output_passes_a_door_that_does_not_fit_its_schema(
    wires: Wires, door: str
) -> None:
    for sent in ({}, {"number": -1}, {"number": "x"}, {"number": 1, "more": 1}, {"number": None}, {"number": [1]}):
        assert (await wires.call(door, "c.boxed", sent)).failure["error_class"] == "schema_validation_failed"
    assert state.runs == 0
    alerts: list[Any] = []
    stop = wires.app.listen(lambda event: alerts.append(event) if event.type == "tool.alert" else None)
    heard = await wires.call(door, "c.boxed", {"number": 7654321})
    stop()
    (alert,) = alerts
    assert (alert.tool, alert.data) == ("c.boxed@1.0.0", {"alert": "TOOL_OUTPUT_SCHEMA_VIOLATION", "at": ["/number"]})
    await wires.app.journal.commit(lambda _: None)
    rows = wires.app.journal.reader.all("SELECT body FROM journal WHERE kind = 'closed' ORDER BY seq DESC LIMIT 1")
    record: Json = orjson.loads(rows[0][0])
    assert (record["status"], record["outputSummary"], record["error_code"]) == ("ERROR", None, "E3303")
    assert b"7654321" not in rows[0][0]
    assert heard.triple == ("E3303", "INTERNAL_TOOL_ERROR", "schema_validation_failed", False)
    assert "/number" in heard.text
    assert "7654321" not in heard.text
    assert (await wires.call(door, "c.boxed", {"number": 9})).data == {"number": 9}


@pytest.mark.proves("CONTRACT-01")
@pytest.mark.parametrize("name", SENDERS)
@pytest.mark.parametrize("door", WIRES)
async def test_nothing_is_sent_before_the_result_that_is_no_part_of_one_by_its_schema(
    wires: Wires, door: str, name: str
) -> None:
    """A part holds what the result may hold; what can be used as it is fits as a whole."""
    heard: list[Any] = []
    wires.app.listen(heard.append)
    cases, last = SENDERS[name]
    for what, (way, value, fits) in cases.items():
        heard.clear()
        told = await wires.call(door, name, {"what": what})
        kind = "tool.invocation.partial_result" if way == "partial" else "tool.invocation.yielded"
        sent = [event.data["value"] for event in heard if event.type == kind]
        alerts = [event.data["alert"] for event in heard if event.type == "tool.alert"]
        if fits:
            wrapped = door.startswith("mcp") and not isinstance(last, dict)  # structuredContent is an object
            assert (told.data, sent, alerts) == ({"result": last} if wrapped else last, [value], []), what
        else:
            assert told.triple == ("E3303", "INTERNAL_TOOL_ERROR", "schema_validation_failed", False), what
            assert (sent, len(alerts)) == ([], 1), what
            assert alerts[0] in ("TOOL_OUTPUT_SCHEMA_VIOLATION", "TOOL_OUTPUT_CORRUPTION"), what
        assert not any("7654321" in str(one.document()) for one in heard), what
        assert "7654321" not in told.text, what


class Careless(Scripted):
    """An upstream that answers something else than it says."""

    async def call(self, call: RemoteCall) -> Any:
        await super().call(call)
        return {"said": 7654321}


@pytest.mark.proves("CONTRACT-01")
async def test_no_executor_is_handed_or_hands_on_what_does_not_fit(home: Path, tmp_path: Path) -> None:
    server = Careless()
    _, programs = load(written(tmp_path / "programs.json", NAMED["misfit"], NAMED["bare"]))
    async with far(home, server) as (app, upstreams):
        await upstreams.add("far", "http", {"accept_hints": True}, by=app.caller)
        await admit(app, boxed, *programs)
        state.runs = 0
        for name, unfit, fit in (
            ("c.boxed", {"number": "x"}, {"number": 7654321}),
            ("prog.misfit", {"more": 1}, {}),
            ("far.look", {"text": 5.5}, {"text": "a"}),
        ):
            refused, wrong = await app.call(name, unfit), await app.call(name, fit)
            assert refused.error is not None
            assert refused.error.row.error_class == "schema_validation_failed"
            assert wrong.error is not None
            assert (wrong.error.code, wrong.value) == ("E3303", None)
        assert (state.runs, len(server.calls)) == (1, 1)


FIELDS = {
    "schemas": "model_input_schema runtime_input_schema output_schema strict visibility",
    "availability": "is_enabled setup_state feature_gates required_credentials model_support deferred",
    "safety": "is_read_only is_destructive is_open_world requires_user_interaction classifier_input",
    "persistence": "max_inline_chars opt_out preview_chars redaction",
}


@pytest.mark.proves("CONTRACT-11")
async def test_the_interface_of_a_tool_is_served_with_its_nine_concerns(wires: Wires) -> None:
    rest = (await wires.http.get("/v1/tools/c.routed")).json()
    asked = {"jsonrpc": "2.0", "id": 1, "method": "tools.describe", "params": {"tool_id": "c.routed"}}
    rpc = (await wires.http.post("/rpc", json=asked)).json()["result"]
    for told in (rest, rpc):
        served = told["interface"]
        assert ToolInterface.parse(served).document() == served
        for concern in (
            "identity", "schemas", "availability", "validation", "safety", "permission_matching", "execution",
            "rendering", "persistence",
        ):  # fmt: skip
            assert concern in served, concern
        for concern, fields in FIELDS.items():
            assert served[concern].keys() >= set(fields.split()), concern
        assert served["safety"]["is_read_only"] is True
        assert served["safety"]["is_open_world"] is True, "nothing was said of it"
        assert "hint" not in str(served), "fields of the runtime are not shown"
        assert served["persistence"]["preview_chars"] == 1000
        ready: Json = {"is_enabled": True, "setup_state": "ready", "feature_gates": [], "required_credentials": []}
        assert served["availability"] == {**ready, "model_support": ["*"], "deferred": False}


@pytest.mark.proves("CONTRACT-11")
async def test_the_interface_of_a_version_that_cannot_be_called_is_not_enabled(wires: Wires) -> None:
    @tool(version="1.0.0", mutation_class="read_only", namespace="c")
    async def leaving(text: sample.Text) -> str:
        """Say it again."""
        return text

    await admit(wires.app, leaving)
    app, name = wires.app, "c.leaving"
    tools = Service(app).tools

    async def enabled() -> bool:
        await app.gateway.quarantine.look()
        return tools.interface((await app.catalog.versions(name))["1.0.0"])["availability"]["is_enabled"]

    digest = (await app.catalog.resolve(name)).row.digest
    assert await enabled()
    await app.journal.commit(quarantine.impose(digest, f"{name}@1.0.0", "a-call", "a test"))
    assert not await enabled()
    person = Caller(id="local:admin", scopes=frozenset({"tools:admin"}))
    await app.journal.commit(quarantine.lift(digest, by=person, reason="looked at"))
    assert await enabled()
    await app.journal.commit(deprecate(name, "1.0.0", by="ann"))
    assert await enabled()
    await app.journal.commit(move(name, "1.0.0", "sunset", by="ann"))
    assert not await enabled()


@pytest.mark.proves("TEST-09")
async def test_a_tool_without_known_pairs_says_so_in_its_listing(wires: Wires) -> None:
    pairs = [{"input": {"text": "a"}, "output": "A"}]

    @tool(version="1.0.0", mutation_class="read_only", namespace="c", known_pairs=pairs)
    async def held_to(text: sample.Text) -> str:
        """Say it louder."""
        return text.upper()

    await admit(wires.app, held_to)
    listed = {one["tool_id"]: one for one in (await wires.http.get("/v1/tools")).json()["tools"]}
    assert (listed["c.held_to"]["known_pairs"], listed["c.routed"]["known_pairs"]) == (1, 0)
    asked = {"jsonrpc": "2.0", "id": 1, "method": "tools.list"}
    told = (await wires.http.post("/rpc", json=asked)).json()["result"]["tools"]
    assert {one["tool_id"]: one["known_pairs"] for one in told}["c.held_to"] == 1
    tools = orjson.loads(await wires.mcp("tools/list", {}, modern=True))["result"]["tools"]
    known = {one["_meta"]["interlock/address"]: one["_meta"]["interlock/known_pairs"] for one in tools}
    assert (known["c.held_to"], known["c.routed"]) == (1, 0)
    found = {one.tool_id: one.known_pairs for one in await wires.discovered()}
    assert (found["c.held_to"], found["c.routed"]) == (1, 0)

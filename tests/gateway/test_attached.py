"""What a call hands out beside its value: content of every type, views of its result, and work that is handed over."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import orjson
import pytest
import pytest_asyncio

from interlock import Caller, Context, Effect, Field, Interlock, tool
from interlock.authority.identities import Identity
from interlock.call.capability import Capability, Link, ToolGrant
from interlock.contract.standard import ToolResult
from interlock.data.schema import Json
from interlock.telemetry.w3c import read as read_trace
from tests.gateway import attaching_tools as attaching
from tests.sample import Text
from tests.support.calls import admit, code, records
from tests.support.identities import did_of
from tests.support.wires import WIRES, opened

PIXEL = base64.b64encode(b"a picture").decode()
# Every type that a tool can add; the two references are made by Interlock alone.
ITEMS: dict[str, Json] = {
    "text": {"text": "and more"},
    "json": {"value": {"rows": [1, 2]}},
    "image": {"mime_type": "image/png", "data": PIXEL},
    "audio": {"mime_type": "audio/wav", "data": PIXEL},
    "video": {"mime_type": "video/mp4", "uri": "https://media.example/clip"},
    "file": {"uri": "https://files.example/a.csv", "name": "a.csv", "size_bytes": 3},
    "resource_link": {"uri": "https://docs.example/1", "name": "the manual"},
    "embedded_resource": {"uri": "doc:1", "mime_type": "text/plain", "text": "inside"},
    "log": {"text": "tried twice", "level": "info"},
    "diff": {"diff": "-a\n+b", "path": "a.txt"},
}
What = Annotated[Any, Field(description="what to say", examples=[[]])]


@tool(version="1.0.0", mutation_class="read_only", namespace="att", scopes=["cases:read"])
async def adds(ctx: Context, items: What) -> str:
    """Add items of content to a result."""
    for item in items:
        ctx.attach(**item)
    return "the value"


@tool(version="1.0.0", mutation_class="read_only", namespace="att", max_inline_chars=200)
async def shows(ctx: Context, size: Annotated[int, Field(description="how large", examples=[1])]) -> str:
    """Give a value, and say how it is to be shown."""
    ctx.progress("half way", percent=50)
    ctx.show(model="a short answer", summary="one line", search="needle")
    return "x" * size


@tool(version="1.0.0", mutation_class="read_only", namespace="att", scopes=["cases:read"])
async def passes_on(ctx: Context, options: What, note: Text = "") -> str:
    """Hand a case over to somebody."""
    said: Json = {"what": {"case": 7}, **options}
    ctx.handoff(**said)
    return "handed over"


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="att", scopes=["cases:read"],
    effects=[Effect("case:7", "UPDATE")],
)  # fmt: skip
async def files(ctx: Context, options: What) -> str:
    """Change a case and hand it over."""
    ctx.effect("case:7", "UPDATE")
    ctx.handoff({"case": 7}, tool="att.adds", scopes=["cases:read"])
    return "filed"


@files.compensate
async def _(options: Any) -> None:
    return None


TOOLS = (adds, shows, passes_on, files)


@pytest_asyncio.fixture
async def app(tmp_path: Path) -> AsyncGenerator[Interlock]:
    async with Interlock.open(tmp_path / "home", housekeeping=False) as made:
        await admit(made, *TOOLS)
        yield made


def holder(app: Interlock, **more: Any) -> Caller:
    return replace(app.caller, scopes=app.caller.scopes | {"cases:read"}, **more)


# Content


@pytest.mark.proves("CONTRACT-19")
@pytest.mark.parametrize("kind", ITEMS)
async def test_a_result_carries_content_of_every_type_and_fits_the_standard(app: Interlock, kind: str) -> None:
    item = {"type": kind, **ITEMS[kind]}
    result = await app.call("att.adds", items=[item], caller=holder(app))
    document = result.document()
    ToolResult.parse(document)
    assert document["content"] == [{"type": "text", "text": "the value"}, item]
    shown = [] if kind == "log" else [item]
    assert document["model_facing_content"] == [{"type": "text", "text": "the value"}, *shown]
    assert document["structured_content"] == "the value"
    for words in ("text", "diff", "name"):
        if words in item:
            assert item[words] in document["transcript_search_text"]
            assert item[words] in document["ui_facing_rendering"]["expanded"]
    assert document["resource_refs"] == ([item["uri"]] if kind in ("resource_link", "embedded_resource") else [])


@pytest.mark.parametrize(
    "item",
    [
        {"type": "stranger", "text": "x"},
        {"type": "image", "mime_type": "image/png", "data": "not base64!"},
        {"type": "persisted_ref", "ref": "payload:of-somebody-else"},
        {"type": "artifact_ref", "ref": "payload:of-somebody-else"},
        {"type": "text"},
        {"type": "text", "text": "x" * (1 << 20)},
    ],
    ids=lambda item: f"{item['type']}-{len(str(item))}",
)
async def test_what_is_no_content_fails_the_call(app: Interlock, item: Json) -> None:
    result = await app.call("att.adds", items=[item], caller=holder(app))
    assert code(result) == "E3401"


async def test_content_is_redacted_like_the_value_and_media_is_left_whole(app: Interlock) -> None:
    items = [{"type": "log", "text": "mail to alice@example.com"}, {"type": "image", **ITEMS["image"]}]
    result = await app.call("att.adds", items=items, caller=holder(app))
    assert "alice" not in str(result.document()["content"])
    assert result.content[1]["data"] == PIXEL


@pytest.mark.proves("CONTRACT-19")
async def test_each_view_of_a_result_is_its_own_and_the_original_stays(app: Interlock) -> None:
    small = await app.call("att.shows", size=3)
    document = small.document()
    fields = [
        "result_id",
        "invocation_id",
        "status",
        "is_error",
        "content",
        "structured_content",
        "model_facing_content",
        "ui_facing_summary",
        "resource_refs",
        "artifact_refs",
        "evidence_refs",
        "policy_refs",
        "telemetry_refs",
        "persistence_refs",
        "summary",
        "redaction_state",
        "created_at",
    ]
    assert len(fields) == 17
    assert document.keys() >= set(fields)
    assert document["content"] == [{"type": "text", "text": "xxx"}]
    assert document["structured_content"] == "xxx"
    assert document["model_facing_content"] == [{"type": "text", "text": "a short answer"}]
    assert (document["ui_facing_summary"], document["ui_facing_rendering"]["grouped"]) == ("one line", "one line")
    assert document["ui_facing_rendering"]["expanded"] == "xxx"
    assert document["ui_facing_rendering"]["progress"] == {"message": "half way", "percent": 50}
    assert document["transcript_search_text"] == "one line\nneedle"
    large = await app.call("att.shows", size=5000)
    document = large.document()
    ToolResult.parse(document)
    assert document["model_facing_content"] == [{"type": "text", "text": "a short answer"}]
    (kept,) = document["content"]
    assert (kept["type"], document["persisted_payload_ref"]) == ("persisted_ref", kept["ref"])
    assert await app.read_payload(kept["ref"], caller=app.caller) == b'"' + b"x" * 5000 + b'"'


@pytest.mark.proves("CONTRACT-19")
async def test_a_rejection_and_an_error_are_different_views(app: Interlock) -> None:
    rejected = (await app.call("att.adds", items=[])).document()["ui_facing_rendering"]
    assert "missing scope" in rejected["rejection"]
    assert rejected["error"] is None
    failed = (await app.call("att.adds", items=[{"type": "x"}], caller=holder(app))).document()["ui_facing_rendering"]
    assert failed["rejection"] is None
    assert "attached an invalid value" in failed["error"]


@pytest.mark.supports("CONTRACT-12")
async def test_content_of_a_type_that_the_contract_does_not_state_is_a_warning(app: Interlock) -> None:
    await admit(app, stating)
    result = await app.call("att.stating", kind="diff")
    assert result.metadata["warnings"] == ["UNDECLARED_CONTENT type=diff"]
    assert [one["type"] for one in result.content] == ["diff"]
    assert "warnings" not in (await app.call("att.stating", kind="log")).metadata


@tool(version="1.0.0", mutation_class="read_only", namespace="att", content_types=["log"])
async def stating(ctx: Context, kind: Text) -> str:
    """Add content of some type."""
    ctx.attach(kind, **ITEMS[kind])
    return "the value"


# Handoffs


def bound_to(*resources: str, expires: int = 2**40) -> Capability:
    link = Link(
        jti="j", subject="did:key:z", scopes=frozenset({"cases:read"}), tools=(ToolGrant("*"),), not_before=0,
        expires=expires, resources=resources or None, constraints={},
    )  # fmt: skip
    return Capability(digest=f"{resources}{expires}", issuer="i", links=(link,))


@pytest.mark.proves("CONTRACT-22")
async def test_a_handoff_says_what_to_whom_with_what_authority_and_until_when_and_is_on_record(
    app: Interlock,
) -> None:
    said = {"agent": "did:key:other", "scopes": ["cases:read"], "resources": ["case:7"], "expires_s": 60}
    result = await app.call("att.passes_on", options=said, caller=holder(app))
    document = result.document()
    (handoff,) = document["handoff_refs"]
    assert ToolResult.parse(document).document()["handoff_refs"] == [handoff], "a round trip loses nothing"
    assert handoff["what"] == {"case": 7}
    assert handoff["to"] == {"agent": "did:key:other"}
    assert handoff["authority"] == {"scopes": ["cases:read"], "resources": ["case:7"]}
    assert handoff["from"] == app.caller.acting
    ends, made = map(datetime.fromisoformat, (handoff["expires_at"], document["created_at"]))
    assert ends - made == timedelta(seconds=60)
    (record,) = records(app, result.invocation_id)
    assert record["handoffs"] == [handoff]


@pytest.mark.proves("CONTRACT-22")
async def test_a_handoff_ends_no_later_than_the_token_of_whoever_makes_it(app: Interlock) -> None:
    now_s = app.clock.now_ms() // 1000
    caller = holder(app, capability=bound_to(expires=now_s + 30))
    result = await app.call("att.passes_on", options={"tool": "att.adds", "expires_s": 86400}, caller=caller)
    assert datetime.fromisoformat(result.handoffs[0]["expires_at"]).timestamp() == now_s + 30


@pytest.mark.proves("CONTRACT-22")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tool": "att.adds", "scopes": ["cases:write"]}, "E3206"),
        ({"tool": "att.adds", "scopes": ["tools:admin"]}, "E3206"),
        ({"tool": "att.adds", "resources": ["case:8"]}, "E3206"),
        ({}, "E3401"),
        ({"tool": "att.adds", "agent": "did:key:other"}, "E3401"),
        ({"tool": "att.adds", "expires_s": 0}, "E3401"),
        ({"tool": "att.adds", "expires_s": 1e9}, "E3401"),
        ({"tool": "att.adds", "what": {}}, "E3401"),
        ({"tool": "att.adds", "what": {"x": "x" * 5000}}, "E3401"),
    ],
)
async def test_a_handoff_names_no_more_than_its_call_has(app: Interlock, options: Json, expected: str) -> None:
    # The caller holds tools:admin; the tool does not require it, so the call does not have it.
    caller = holder(app, capability=bound_to("case:7", "https://*"))
    result = await app.call("att.passes_on", options=options, note="https://a.example/", caller=caller)
    assert code(result) == expected


@pytest.mark.proves("CONTRACT-22")
async def test_a_handoff_is_told_again_with_a_replay(app: Interlock) -> None:
    first = await app.call("att.files", options={}, key="1", caller=holder(app))
    again = await app.call("att.files", options={}, key="1", caller=holder(app))
    assert again.replayed
    assert again.handoffs == first.handoffs
    assert len(first.handoffs) == 1


@pytest.mark.proves("CONTRACT-22")
async def test_a_receiving_agent_uses_a_handoff_under_its_own_token_and_gains_nothing_by_it(app: Interlock) -> None:
    given = await app.call("att.passes_on", options={"tool": "att.adds", "scopes": ["cases:read"]}, caller=holder(app))
    (handoff,) = given.handoffs
    wanted = handoff["to"]["tool"]
    arguments = {"items": [{"type": "json", "value": handoff["what"]}]}
    app.issuer_keys.init("EdDSA")
    await app.identities.register(Identity(did=did_of("other"), name="other", kind="agent", trust=80), by="test")

    async def token(*scopes: str) -> str:
        return await app.tokens.issue(
            subject=did_of("other"), tools=[ToolGrant("att.adds")], scopes=scopes, by=holder(app)
        )

    # Whatever the receiver shows of the handoff, its own authority decides.
    bare = await token()
    for shown in (arguments, {"items": [{"type": "json", "value": handoff}]}):
        assert code(await app.call(wanted, shown, token=bare)) == "E3206"
    assert code(await app.call(wanted, arguments, token=handoff["handoff_id"])) == "E3203", "a reference is no token"
    received = await app.call(wanted, arguments, token=await token("cases:read"))
    assert received.content[0]["value"] == {"case": 7}
    assert [record["callerId"] for record in records(app, received.invocation_id)] == [did_of("other")]


# Facts about the data


@tool(
    version="1.0.0", mutation_class="write_reversible", namespace="att", effects=[Effect("case:7", "UPDATE")],
)  # fmt: skip
async def sourced(ctx: Context, facts: What) -> str:
    """Change a case, and say what was known of it."""
    ctx.effect("case:7", "UPDATE")
    ctx.provenance(**facts)
    ctx.cost(external_api=0.75)
    return "changed"


@sourced.compensate
async def _(facts: Any) -> None:
    return None


@pytest.mark.proves("CONTRACT-07")
@pytest.mark.parametrize("door", WIRES)
async def test_a_tool_states_the_version_of_its_data_and_its_confidence_at_every_door(home: Path, door: str) -> None:
    async with opened(home) as wires:
        await admit(wires.app, sourced)
        for cost in (0.75, 0):  # of the run, and of its replay
            heard = await wires.call(
                door, "att.sourced", {"facts": {"data_version": "2026-11", "confidence": 0.5}}, key="k"
            )
            source = heard.about["provenance"]
            assert (source["dataVersion"], source["confidence"]) == ("2026-11", 0.5), heard.text
            assert heard.about["execution"]["resourceCost"] == cost, heard.text
        half = await wires.call(door, "att.sourced", {"facts": {"confidence": 0}}, key="half")
        source = half.about["provenance"]
        assert (source["dataVersion"], source["confidence"]) == (None, 0.0)


@pytest.mark.parametrize(
    "facts",
    [
        {"data_version": ""}, {"data_version": "x" * 257}, {"data_version": 7}, {"data_version": "a\nb"},
        {"confidence": 1.01}, {"confidence": -0.1}, {"confidence": True}, {"confidence": "high"},
    ],
)  # fmt: skip
async def test_facts_about_data_of_another_form_fail_the_call(app: Interlock, facts: Json) -> None:
    await admit(app, sourced)
    assert code(await app.call("att.sourced", facts=facts, key="k")) == "E3401"


async def test_a_private_value_does_not_leave_as_the_version_of_data(app: Interlock) -> None:
    await admit(app, sourced)
    result = await app.call("att.sourced", facts={"data_version": "for alice@example.com"}, key="k")
    assert result.envelope()["provenance"]["dataVersion"] == "for [EMAIL_REDACTED]"


# Sandboxes and doors


async def test_a_sandboxed_tool_hands_out_the_same_and_is_held_to_the_same(tmp_path: Path) -> None:
    async with Interlock.open(tmp_path / "home", housekeeping=False) as app:
        await admit(app, attaching.attaches)
        good = (await app.call("cell.attaches", how="well", caller=holder(app))).document()
        assert [one["type"] for one in good["content"]] == ["text", "image", "log"]
        assert good["model_facing_content"][0]["text"] == "short"
        assert good["handoff_refs"][0]["authority"]["scopes"] == ["cases:read"]
        source = good["metadata"]["provenance"]
        assert (source["dataVersion"], source["confidence"]) == ("rows-7", 0.25)
        wrong = {"scope": "E3206"} | dict.fromkeys(("forged", "base64", "confidence", "version", "fact"), "E3401")
        for how, expected in wrong.items():
            assert code(await app.call("cell.attaches", how=how, caller=holder(app))) == expected, how


@pytest.mark.proves("CONTRACT-22")
@pytest.mark.parametrize("door", WIRES)
async def test_every_door_lists_handoffs_and_content(home: Path, door: str) -> None:
    async with opened(home) as wires:
        await admit(wires.app, open_handed)
        heard = await wires.call(door, "att.open_handed", {"name": "a"})
        assert heard.envelope is None
        (handoff,) = records(wires.app)[-1]["handoffs"]
        assert handoff.keys() >= {"handoff_id", "what", "to", "from", "authority", "expires_at"}
        told = re.sub(r"[\\\s]", "", heard.text)  # JSON in a field of gRPC is quoted
        members = {**{name: one for name, one in handoff.items() if name != "authority"}, **handoff["authority"]}
        for name, value in members.items():
            assert f'"{name}":{orjson.dumps(value).decode()}' in told, name
        assert '"authority":{' in told
        assert "https://docs.example/1" in heard.text


@tool(version="1.0.0", mutation_class="read_only", namespace="att")
async def open_handed(ctx: Context, name: Annotated[str, Field(description="a name", examples=["a"])]) -> str:
    """Add a link and hand a case over."""
    ctx.attach("resource_link", uri="https://docs.example/1", name=name)
    ctx.handoff({"case": name}, agent="did:key:other")
    return name


# Traces


@tool(version="1.0.0", mutation_class="read_only", namespace="att")
async def traced(ctx: Context) -> dict[str, str]:
    """Tell under which trace it runs."""
    return {**ctx.trace_headers, "trace_id": ctx.trace_id}


@pytest.mark.proves("OBS-02")
@pytest.mark.parametrize("ratio", [0.0, 1.0])
async def test_a_tool_sees_the_trace_and_the_tracestate_of_the_caller_in_process_and_in_a_sandbox(
    tmp_path: Path, ratio: float
) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    async with Interlock.open(tmp_path / "home", housekeeping=False, trace_ratio=ratio) as app:
        await admit(app, traced, attaching.traced)
        for name in ("att.traced", "cell.traced"):
            seen = (await app.call(name, trace_id=f"00-{trace_id}-00f067aa0ba902b7-01 vendor=value")).unwrap()
            place = read_trace(seen["traceparent"])
            assert place is not None
            assert (place.trace_id, seen["trace_id"], seen["tracestate"]) == (trace_id, trace_id, "vendor=value"), name
            bare = await app.call(name, trace_id="00-not-a-trace")
            place = read_trace(bare.unwrap()["traceparent"])
            assert place is not None
            assert place.trace_id == bare.trace_id != trace_id
            assert "tracestate" not in bare.unwrap()

"""An engine elsewhere, over HTTP and gRPC: its answer counts, and anything that is no answer is a no."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any, Protocol

import grpc
import pytest
import pytest_asyncio

from interlock import Context, Field, Interlock, tool
from interlock.authority.remote import Form, Remote
from interlock.call.context import Caller
from interlock.core.errors import Failure
from interlock.settings import load_settings
from interlock.testing import FakeClock
from tests.authority.questions import ALICE, capability, contract, question
from tests.support.calls import admit
from tests.support.engines import FakeEngine, FakeGrpcEngine, FakeHttpEngine, untyped
from tests.support.engines import fake as fake
from tests.support.engines import http as http

TOOL = contract({"amount": {"type": "integer"}}, required_permissions=["bank:post"])
AGENT = Caller(id="local:alice", agent="did:web:agent.example", kind="agent", trust=40, groups=frozenset({"staff"}))


@pytest_asyncio.fixture
async def over_grpc() -> AsyncGenerator[FakeGrpcEngine]:
    engine = FakeGrpcEngine()
    async with engine.running():
        yield engine


class Connect(Protocol):
    def __call__(self, fake: FakeEngine, form: Form = "interlock", **said: Any) -> Remote: ...


@pytest_asyncio.fixture
async def connect() -> AsyncGenerator[Connect]:
    made: list[Remote] = []

    def remote(fake: FakeEngine, form: Form = "interlock", **said: Any) -> Remote:
        options: dict[str, Any] = {"clock": FakeClock().clock, "form": form, "timeout_s": 30.0} | said
        made.append(Remote(fake.url, **options))
        return made[-1]

    yield remote
    for one in made:
        await one.close()


async def refused(remote: Remote) -> Failure:
    asked = remote.questions
    with pytest.raises(Failure) as caught:
        await remote.decide(question(TOOL))
    assert (caught.value.code, caught.value.row.http) == ("E3205", 503)
    assert remote.cached(question(TOOL)) is None
    with pytest.raises(Failure):
        await remote.decide(question(TOOL))
    assert remote.questions == asked + 2, "a failure is never remembered"
    return caught.value


AUTH_12 = pytest.mark.proves("AUTH-12")


@AUTH_12
@pytest.mark.proves("AUTH-04")
async def test_the_question_says_who_wants_what_with_which_arguments(fake: FakeEngine, connect: Connect) -> None:
    remote = connect(fake, token="t0ken")
    await remote.decide(question(TOOL, {"amount": 5}, caller=AGENT, operation="preview", door="mcp"))
    (asked,) = fake.asked
    assert fake.tokens == ["Bearer t0ken"]
    if isinstance(fake, FakeHttpEngine):
        assert fake.lines[0] == "POST /v1/authorize HTTP/1.1"
    assert (asked["subject"], asked["action"], asked["resource"]) == (
        "did:web:agent.example", "tool.invoke", "tool:demo.act:1.0.0",
    )  # fmt: skip
    context = asked["context"]
    assert context["required_permissions"] == ["bank:post"]
    assert context["arguments"] == {"amount": 5}
    assert context["timestamp"] == "2027-01-15T08:00:00.000Z"
    assert (context["on_behalf_of"], context["operation"], context["door"]) == ("local:alice", "preview", "mcp")


@AUTH_12
async def test_both_wires_ask_the_same_question(
    http: FakeHttpEngine, over_grpc: FakeGrpcEngine, connect: Connect
) -> None:
    for asked in (
        question(TOOL, {"amount": 2**63 - 1}, caller=AGENT, operation="preview", session="s", door="mcp"),
        question(TOOL, {"amount": -1}, native="bank.post"),
        question(TOOL, {}),
    ):
        for engine in (http, over_grpc):
            await connect(engine).decide(asked)
    assert len(http.asked) == 3
    assert http.asked == over_grpc.asked


async def test_authzen_asks_in_its_own_form(http: FakeHttpEngine, connect: Connect) -> None:
    fake = http
    fake.answer = {"decision": True}
    await connect(http, "authzen").decide(question(TOOL, {"amount": 5}, caller=AGENT))
    (asked,) = fake.asked
    assert fake.lines[0] == "POST /access/v1/evaluation HTTP/1.1"
    assert asked["subject"] == {
        "type": "agent", "id": "did:web:agent.example",
        "properties": {"kind": "agent", "trust": 40, "groups": ["staff"]},
    }  # fmt: skip
    assert asked["action"] == {"name": "tool.invoke"}
    assert asked["resource"] == {"type": "tool", "id": "demo.act", "properties": {"version": "1.0.0"}}
    assert asked["context"]["arguments"] == {"amount": 5}


async def test_arguments_stay_here_where_they_should(fake: FakeEngine, connect: Connect) -> None:
    await connect(fake, arguments="none").decide(question(TOOL, {"amount": 5}))
    assert "arguments" not in fake.asked[0]["context"]


ANSWERS: list[tuple[Form, Any, str, tuple[str, ...]]] = [
    ("interlock", {"decision": "allow", "reason": "fine"}, "allow", ()),
    ("interlock", {"decision": "deny", "reason": "no"}, "deny", ()),
    ("interlock", {"decision": "ask"}, "ask", ()),
    ("interlock", {"decision": "passthrough"}, "passthrough", ()),
    ("interlock", {"decision": "allow", "obligations": ["require_approval"]}, "ask", ()),
    ("interlock", {"decision": "allow", "obligations": ["log", {"type": "alert"}]}, "allow", ("alert", "log")),
    ("interlock", {"decision": "allow", "obligations": ["log", "dance"]}, "deny", ("log",)),
    ("interlock", {"decision": "ask", "obligations": [{"id": "dance"}]}, "deny", ()),
    ("interlock", {"decision": "passthrough", "obligations": ["dance"]}, "deny", ()),
    ("interlock", {"decision": "deny", "obligations": ["dance"]}, "deny", ()),
    ("authzen", {"decision": True}, "allow", ()),
    ("authzen", {"decision": False, "context": {"reason": "no"}}, "deny", ()),
    ("authzen", {"decision": True, "context": {"obligations": [{"name": "require_approval"}]}}, "ask", ()),
    ("authzen", {"decision": True, "context": {"obligations": ["dance"]}}, "deny", ()),
]


OURS = [(answer, behavior, obligations) for form, answer, behavior, obligations in ANSWERS if form == "interlock"]
AUTHZEN = [(answer, behavior, obligations) for form, answer, behavior, obligations in ANSWERS if form == "authzen"]


@AUTH_12
@pytest.mark.proves("AUTH-04")
@pytest.mark.parametrize(("answer", "behavior", "obligations"), OURS)
async def test_an_answer_is_taken_at_its_word(
    fake: FakeEngine, connect: Connect, answer: Any, behavior: str, obligations: tuple[str, ...]
) -> None:
    fake.answer = answer
    decision = await connect(fake).decide(question(TOOL))
    assert (decision.behavior, decision.obligations, decision.source) == (behavior, obligations, "remote")
    assert decision.reason == answer.get("reason", decision.reason)


@pytest.mark.proves("AUTH-04")
@pytest.mark.parametrize(("answer", "behavior", "obligations"), AUTHZEN)
async def test_an_answer_of_authzen_is_taken_at_its_word(
    http: FakeHttpEngine, connect: Connect, answer: Any, behavior: str, obligations: tuple[str, ...]
) -> None:
    http.answer = answer
    decision = await connect(http, "authzen").decide(question(TOOL))
    assert (decision.behavior, decision.obligations, decision.source) == (behavior, obligations, "remote")


@pytest.mark.proves("AUTH-04")
async def test_one_tool_may_be_allowed_to_read_and_not_to_delete(fake: FakeEngine, connect: Connect) -> None:

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        return {"decision": "deny" if asked["context"]["arguments"]["do"] == "delete" else "allow"}

    fake.answer = answer
    tool, remote = contract({"do": {"type": "string"}}), connect(fake)
    said = [(await remote.decide(question(tool, {"do": act}))).behavior for act in ("read", "delete", "read")]
    assert said == ["allow", "deny", "allow"]


GARBAGE: list[tuple[Form, Any]] = [
    ("interlock", b""), ("interlock", b"{"), ("interlock", []), ("interlock", {}), ("interlock", {"decision": True}),
    ("interlock", {"decision": "ALLOW"}), ("interlock", {"decision": ["allow"]}),
    ("interlock", {"decision": "allow", "obligations": "log"}),
    ("interlock", {"decision": "allow", "obligations": [1]}),
    ("interlock", b'{"decision": "allow", "pad": "' + b"x" * 70_000 + b'"}'),
    ("authzen", {"decision": "allow"}), ("authzen", {"decision": 1}), ("authzen", {"decision": True, "context": [1]}),
    ("authzen", {}),
]  # fmt: skip


@pytest.mark.parametrize(("form", "answer"), GARBAGE)
async def test_what_is_no_answer_is_refused(http: FakeHttpEngine, connect: Connect, form: Form, answer: Any) -> None:
    http.answer = answer
    await refused(connect(http, form))


ALLOW = b"\x08\x01"
GARBLED_MESSAGES = {
    "nothing": b"",
    "unspecified": b"\x08\x00",
    "a decision that does not exist": b"\x08\x09",
    "cut short": b"\x08",
    "no protobuf": b'{"decision": "allow"}',
    "the decision twice": b"\x08\x02" + ALLOW,
    "the reason twice": ALLOW + b"\x12\x01a\x12\x01b",
    "an obligation that is no text": ALLOW + b"\x18\x01",
    "an obligation that is not UTF-8": ALLOW + b"\x1a\x01\xff",
    "too long": ALLOW + b"\x12" + b"\xf0\xa2\x04" + b"x" * 70_000,
    "too many obligations": ALLOW + b"\x1a\x03log" * 101,
}


@AUTH_12
@pytest.mark.parametrize("what", GARBLED_MESSAGES)
async def test_what_is_no_message_is_refused(over_grpc: FakeGrpcEngine, connect: Connect, what: str) -> None:
    over_grpc.answer = GARBLED_MESSAGES[what]
    if what == "an obligation that is no text":
        # A field of another kind is unknown to protobuf, as an unknown name is to JSON.
        assert (await connect(over_grpc).decide(question(TOOL))).obligations == ()
        return
    await refused(connect(over_grpc))


@pytest.mark.parametrize(
    "status", ["201 Created", "204 No Content", "302 Found", "307 Temporary Redirect", "401 No", "500 Broken"]
)
async def test_any_status_but_200_is_refused_and_redirects_are_not_followed(
    http: FakeHttpEngine, connect: Connect, status: str
) -> None:
    http.status = status
    http.headers = f"Location: {http.url}elsewhere\r\n"
    await refused(connect(http))
    assert "elsewhere" not in http.lines[0]


@AUTH_12
@pytest.mark.parametrize("status", [one for one in grpc.StatusCode if one is not grpc.StatusCode.OK])
async def test_any_status_but_ok_is_refused(
    over_grpc: FakeGrpcEngine, connect: Connect, status: grpc.StatusCode
) -> None:
    over_grpc.status = status
    await refused(connect(over_grpc))


@AUTH_12
@pytest.mark.proves("AUTH-04")
async def test_an_engine_that_hangs_or_is_down_is_refused(fake: FakeEngine, connect: Connect) -> None:
    fake.hang = asyncio.Event()
    assert "does not answer" in (await refused(connect(fake, timeout_s=0.05))).message
    nobody = Remote(f"{fake.wire}://127.0.0.1:1", clock=FakeClock().clock)
    assert "does not answer" in (await refused(nobody)).message
    await nobody.close()


async def test_a_compressed_answer_is_refused(http: FakeHttpEngine, connect: Connect) -> None:
    http.headers, http.answer = "Content-Encoding: gzip\r\n", gzip.compress(b'{"decision": "allow"}')
    await refused(connect(http))


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


def _header(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value


async def _compresses_anyway(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """HTTP/2 by hand: a compressed message for a client that takes none. gRPC's own server would not send it."""
    try:
        await reader.readexactly(24)
        writer.write(_frame(4, 0, 0, b""))
        packed = gzip.compress(ALLOW + b"\x12\xc0\x84\x3d" + b"x" * 1_000_000)
        headers = b"\x88" + _header(b"content-type", b"application/grpc") + _header(b"grpc-encoding", b"gzip")
        message = b"\x01" + len(packed).to_bytes(4, "big") + packed
        while True:
            head = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] != 1:  # not the headers of a question
                continue
            stream = int.from_bytes(head[5:], "big")
            trailers = _frame(1, 5, stream, _header(b"grpc-status", b"0"))
            writer.write(_frame(1, 4, stream, headers) + _frame(0, 0, stream, message) + trailers)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


@AUTH_12
async def test_a_compressed_message_is_refused(connect: Connect) -> None:
    server = await asyncio.start_server(_compresses_anyway, "127.0.0.1", 0)
    engine = FakeGrpcEngine()
    engine.url = f"grpc://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    remote = connect(engine)
    try:
        assert "does not answer" not in (await refused(remote)).message
    finally:
        await remote.close()
        server.close()


SECRETIVE = contract(
    {
        "to": {"type": "string"},
        "password": {"type": "string"},
        "diagnosis": {"type": "string", "x-sensitivity": "pii"},
        "body": {"type": "string"},
    }
)
GIVEN = {
    "to": "bob@example.org",
    "password": "hunter2-hunter2",
    "diagnosis": "a broken leg",
    "body": "use Bearer abcdefghijklmnop, call 10",
}


async def test_the_engine_sees_no_secrets_unless_the_operator_says_so(fake: FakeEngine, connect: Connect) -> None:
    await connect(fake).decide(question(SECRETIVE, GIVEN))
    await connect(fake, arguments="all").decide(question(SECRETIVE, GIVEN))
    redacted, everything = (asked["context"]["arguments"] for asked in fake.asked)
    assert redacted == {
        "to": "bob@example.org",
        "password": "[REDACTED]",
        "diagnosis": "[REDACTED]",
        "body": "use [REDACTED], call 10",
    }
    assert everything == GIVEN


@pytest.mark.proves("AUTH-05")
async def test_a_question_with_large_arguments_is_asked_every_time(fake: FakeEngine, connect: Connect) -> None:
    remote = connect(fake)
    large = question(contract({"text": {"type": "string"}}), {"text": "word " * 200_000})
    for asked in (1, 2):
        assert (await remote.decide(large)).behavior == "allow"
        assert (remote.cached(large), len(fake.asked)) == (None, asked)
    assert len(fake.asked[0]["context"]["arguments"]["text"]) == 1_000_000


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"policy_url": "ftp://engine"}, "https://host/path or grpcs://host:port"),
        ({"policy_url": "grpcs://engine"}, "grpcs://host:port"),
        ({"policy_url": "grpcs://engine:8443", "policy_form": "authzen"}, "asked over http"),
        ({"policy_url": "grpc://engine:80", "policy_token_file": "/t"}, "clear text"),
        ({"policy_url": "http://engine", "policy_token_file": "/t"}, "clear text"),
    ],
)
def test_an_address_that_cannot_work_is_refused_at_the_start(tmp_path: Path, given: Any, words: str) -> None:
    with pytest.raises(Failure, match=words) as caught:
        load_settings(tmp_path / "settings.toml", policy_engine="remote", **given)
    assert caught.value.code == "E3108"


@tool(version="1.0.0", mutation_class="read_only", namespace="demo")
async def look(ctx: Context, at: Annotated[str, Field(description="at what", examples=["x"])]) -> str:
    """Look at something."""
    return f"saw {at}"


@AUTH_12
async def test_a_home_asks_the_engine_that_its_settings_name(fake: FakeEngine, tmp_path: Path) -> None:
    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        return {"decision": "allow" if asked["context"]["arguments"]["at"] == "this" else "deny", "reason": "a rule"}

    fake.answer = answer
    async with Interlock.open(tmp_path, policy_engine="remote", policy_url=fake.url, policy_timeout_s=30) as app:
        await admit(app, look)
        assert (await app.call("demo.look", at="this")).value == "saw this"
        refusal = await app.call("demo.look", at="that")
        assert refusal.error is not None
        assert (refusal.error.code, "a rule" in refusal.error.message) == ("E3206", True)
        fake.answer = b"\xff"
        unsure = await app.call("demo.look", at="other")
        assert unsure.error is not None
        assert unsure.error.code == "E3205"


BEARER = dataclasses.replace(AGENT, capability=capability(1_800_009_000, 1_800_000_100))
AMOUNT: dict[str, Any] = {"amount": {"type": "integer"}}


@pytest.mark.proves("AUTH-05")
async def test_the_same_question_is_asked_once_and_another_one_again(fake: FakeEngine, connect: Connect) -> None:
    clock = FakeClock()
    remote = connect(fake, clock=clock.clock)
    first = question(TOOL, {"amount": 1})
    decision = await remote.decide(first)
    assert await remote.decide(question(TOOL, {"amount": 1}, now_ms=1_800_000_299_999)) is decision
    others = (
        question(TOOL, {"amount": 2}),
        question(TOOL, {"amount": 1}, caller=AGENT),
        question(TOOL, {"amount": 1}, caller=dataclasses.replace(AGENT, agent="did:web:other.example")),
        question(TOOL, {"amount": 1}, caller=BEARER),
        question(TOOL, {"amount": 1}, caller=_other_token(digest="d2")),
        question(TOOL, {"amount": 1}, session="s"),
        question(TOOL, {"amount": 1}, operation="preview"),
        question(TOOL, {"amount": 1}, door="rest"),
        question(TOOL, {"amount": 1}, native="purge"),
        question(TOOL, {"amount": 1}, caller=dataclasses.replace(ALICE, scopes=frozenset({"a:read"}))),
        question(TOOL, {"amount": 1}, caller=dataclasses.replace(ALICE, tenant="other")),
        question(contract(AMOUNT, required_permissions=["bank:post"], version="2.0.0"), {"amount": 1}),
        question(contract(AMOUNT, required_permissions=["bank:post"], tool_id="other"), {"amount": 1}),
        question(contract(AMOUNT, required_permissions=["bank:read"]), {"amount": 1}),
    )
    for other in others:
        assert remote.cached(other) is None
        await remote.decide(other)
        assert remote.cached(other) is not None
    assert remote.questions == len(fake.asked) == len(others) + 1
    assert remote.cached(question(TOOL, {"amount": 1}, now_ms=1_800_000_300_000)) is None


def _other_token(**said: Any) -> Caller:
    return dataclasses.replace(BEARER, capability=capability(1_800_009_000, 1_800_000_100, **said))


@pytest.mark.proves("AUTH-05")
@pytest.mark.parametrize(("ends_s", "lives_s"), [(9000, 300), (301, 300), (100, 100)])
async def test_an_answer_is_remembered_no_longer_than_the_token_lives(
    fake: FakeEngine, connect: Connect, ends_s: int, lives_s: int
) -> None:
    remote = connect(fake)
    caller = dataclasses.replace(AGENT, capability=capability(1_800_009_000, 1_800_000_000 + ends_s))
    decision = await remote.decide(question(TOOL, caller=caller))
    end_ms = 1_800_000_000_000 + lives_s * 1000
    assert decision.expires_ms == end_ms
    assert remote.cached(question(TOOL, caller=caller, now_ms=end_ms - 1)) is decision
    assert remote.cached(question(TOOL, caller=caller, now_ms=end_ms)) is None


@pytest.mark.proves("AUTH-06")
async def test_what_is_forgotten_is_asked_again_also_when_the_answer_is_on_its_way(
    fake: FakeEngine, connect: Connect
) -> None:
    remote = connect(fake)
    await remote.decide(question(TOOL))
    remote.forget(["local:bob"])
    assert remote.cached(question(TOOL)) is not None
    remote.forget([ALICE.id])
    assert remote.cached(question(TOOL)) is None
    fake.hang = asyncio.Event()
    on_its_way = asyncio.create_task(remote.decide(question(TOOL)))
    await fake.reached.wait()
    remote.forget(None)
    fake.hang.set()
    assert (await on_its_way).behavior == "allow"
    assert remote.cached(question(TOOL)) is None


async def test_an_engine_that_answers_twice_does_not_answer_the_next_question(
    http: FakeHttpEngine, connect: Connect
) -> None:
    fake = http
    yes = b'{"decision": "allow"}'
    twice = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(yes) + yes
    remote = connect(fake)
    fake.answer = yes
    fake.trailing = twice
    assert (await remote.decide(question(TOOL, {"amount": 1}))).behavior == "allow"
    fake.answer, fake.trailing = {"decision": "deny"}, b""
    assert (await remote.decide(question(TOOL, {"amount": 2}))).behavior == "deny"
    assert len(fake.asked) == 2


@pytest.mark.parametrize("answer", [b'{"decision": "deny", "decision": "allow"}', b'{"decision": "allow", "x": NaN}'])
async def test_an_answer_that_is_not_strict_json_is_none(http: FakeHttpEngine, connect: Connect, answer: bytes) -> None:
    http.answer = answer
    await refused(connect(http))


@AUTH_12
async def test_an_engine_that_answers_twice_over_grpc_has_not_answered(connect: Connect) -> None:
    async def twice(_request: bytes, _context: Any) -> AsyncGenerator[bytes]:
        yield ALLOW
        yield ALLOW

    handler = untyped.unary_stream_rpc_method_handler(twice, None, None)
    server = untyped.aio.server()
    server.add_generic_rpc_handlers(
        (untyped.method_handlers_generic_handler("interlock.policy.v1.PolicyEngine", {"Authorize": handler}),)
    )
    engine = FakeGrpcEngine()
    engine.url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        # gRPC's client waits for the end of an answer that goes on after its one message.
        await refused(connect(engine, timeout_s=1.0))
    finally:
        await server.stop(None)

"""An engine elsewhere: what it says counts, and whatever is no answer is a no that nobody remembers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
import pytest_asyncio

from interlock.authority.remote import Form, Remote
from interlock.core.context import Caller
from interlock.core.errors import Failure
from interlock.testing import FakeClock
from tests.authority.questions import ALICE, capability, contract, question

TOOL = contract({"amount": {"type": "integer"}}, required_permissions=["bank:post"])
AGENT = Caller(id="local:alice", agent="did:web:agent.example", kind="agent", trust=40, groups=frozenset({"staff"}))


class FakeEngine:
    """An HTTP server that answers with what the test gives it, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answer: Any = {"decision": "allow"}
        self.status = "200 OK"
        self.headers = ""
        self.trailing = b""
        self.asked: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.hang: asyncio.Event | None = None
        self.reached = asyncio.Event()
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().splitlines()
                length = next(
                    int(line.partition(":")[2]) for line in lines if line.lower().startswith("content-length")
                )
                self.lines = lines
                self.asked.append(json.loads(await reader.readexactly(length)))
                if self.hang is not None:
                    self.reached.set()
                    await self.hang.wait()
                answer: Any = self.answer(self.asked[-1]) if callable(self.answer) else self.answer
                body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                writer.write(
                    f"HTTP/1.1 {self.status}\r\n{self.headers}Content-Length: {len(body)}\r\n\r\n".encode()
                    + body
                    + self.trailing
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest_asyncio.fixture
async def fake() -> AsyncGenerator[FakeEngine]:
    engine = FakeEngine()
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    engine.port = server.sockets[0].getsockname()[1]
    yield engine
    if engine.hang is not None:
        engine.hang.set()
    server.close()


Connect = Callable[..., Remote]


@pytest_asyncio.fixture
async def connect(fake: FakeEngine) -> AsyncGenerator[Connect]:
    made: list[Remote] = []

    def remote(form: Form = "interlock", **said: Any) -> Remote:
        options: dict[str, Any] = {"clock": FakeClock().clock, "form": form} | said
        made.append(Remote(f"http://127.0.0.1:{fake.port}/", **options))
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


@pytest.mark.proves("AUTH-04")
async def test_the_question_says_who_wants_what_with_which_arguments(fake: FakeEngine, connect: Connect) -> None:
    remote = connect(token="t0ken")
    await remote.decide(question(TOOL, {"amount": 5}, caller=AGENT, operation="preview", door="mcp"))
    (asked,) = fake.asked
    assert fake.lines[0] == "POST /v1/authorize HTTP/1.1"
    assert "authorization: Bearer t0ken" in {line[:1].lower() + line[1:] for line in fake.lines}
    assert (asked["subject"], asked["action"], asked["resource"]) == (
        "did:web:agent.example", "tool.invoke", "tool:demo.act:1.0.0",
    )  # fmt: skip
    context = asked["context"]
    assert context["required_permissions"] == ["bank:post"]
    assert context["arguments"] == {"amount": 5}
    assert context["timestamp"] == "2027-01-15T08:00:00.000Z"
    assert (context["on_behalf_of"], context["operation"], context["door"]) == ("local:alice", "preview", "mcp")


async def test_authzen_asks_in_its_own_form(fake: FakeEngine, connect: Connect) -> None:
    fake.answer = {"decision": True}
    await connect("authzen").decide(question(TOOL, {"amount": 5}, caller=AGENT))
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
    await connect(send_arguments=False).decide(question(TOOL, {"amount": 5}))
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


@pytest.mark.proves("AUTH-04")
@pytest.mark.parametrize(("form", "answer", "behavior", "obligations"), ANSWERS)
async def test_an_answer_is_taken_at_its_word(
    fake: FakeEngine, connect: Connect, form: Form, answer: Any, behavior: str, obligations: tuple[str, ...]
) -> None:
    fake.answer = answer
    decision = await connect(form).decide(question(TOOL))
    assert (decision.behavior, decision.obligations, decision.source) == (behavior, obligations, "remote")


@pytest.mark.proves("AUTH-04")
async def test_one_tool_may_be_allowed_to_read_and_not_to_delete(fake: FakeEngine, connect: Connect) -> None:

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        return {"decision": "deny" if asked["context"]["arguments"]["do"] == "delete" else "allow"}

    fake.answer = answer
    tool, remote = contract({"do": {"type": "string"}}), connect()
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
async def test_what_is_no_answer_is_refused(fake: FakeEngine, connect: Connect, form: Form, answer: Any) -> None:
    fake.answer = answer
    await refused(connect(form))


@pytest.mark.parametrize(
    "status", ["201 Created", "204 No Content", "302 Found", "307 Temporary Redirect", "401 No", "500 Broken"]
)
async def test_any_status_but_200_is_refused_and_redirects_are_not_followed(
    fake: FakeEngine, connect: Connect, status: str
) -> None:
    fake.status = status
    fake.headers = f"Location: http://127.0.0.1:{fake.port}/elsewhere\r\n"
    await refused(connect())
    assert "elsewhere" not in fake.lines[0]


@pytest.mark.proves("AUTH-04")
async def test_an_engine_that_hangs_or_is_down_is_refused(fake: FakeEngine, connect: Connect) -> None:
    fake.hang = asyncio.Event()
    assert "does not answer" in (await refused(connect(timeout_s=0.05))).message
    nobody = Remote("http://127.0.0.1:1", clock=FakeClock().clock)
    await refused(nobody)
    await nobody.close()


async def test_a_compressed_answer_is_refused(fake: FakeEngine, connect: Connect) -> None:
    import gzip

    fake.headers, fake.answer = "Content-Encoding: gzip\r\n", gzip.compress(b'{"decision": "allow"}')
    await refused(connect())


BEARER = dataclasses.replace(AGENT, capability=capability(1_800_009_000, 1_800_000_100))
AMOUNT: dict[str, Any] = {"amount": {"type": "integer"}}


@pytest.mark.proves("AUTH-05")
async def test_the_same_question_is_asked_once_and_another_one_again(fake: FakeEngine, connect: Connect) -> None:
    clock = FakeClock()
    remote = connect(clock=clock.clock)
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
        question(contract(AMOUNT, required_permissions=["bank:post"], version="2.0.0"), {"amount": 1}),
        question(contract(AMOUNT, required_permissions=["bank:post"], tool_id="other"), {"amount": 1}),
        question(contract(AMOUNT, required_permissions=["bank:read"]), {"amount": 1}),
    )
    for other in others:
        assert remote.cached(other) is None
        await remote.decide(other)
        assert remote.cached(other) is not None
    assert remote.questions == len(fake.asked) == 11
    assert remote.cached(question(TOOL, {"amount": 1}, now_ms=1_800_000_300_000)) is None


def _other_token(**said: Any) -> Caller:
    return dataclasses.replace(BEARER, capability=capability(1_800_009_000, 1_800_000_100, **said))


@pytest.mark.proves("AUTH-05")
@pytest.mark.parametrize(("ends_s", "lives_s"), [(9000, 300), (301, 300), (100, 100)])
async def test_an_answer_is_remembered_no_longer_than_the_token_lives(
    connect: Connect, ends_s: int, lives_s: int
) -> None:
    remote = connect()
    caller = dataclasses.replace(AGENT, capability=capability(1_800_009_000, 1_800_000_000 + ends_s))
    decision = await remote.decide(question(TOOL, caller=caller))
    end_ms = 1_800_000_000_000 + lives_s * 1000
    assert decision.expires_ms == end_ms
    assert remote.cached(question(TOOL, caller=caller, now_ms=end_ms - 1)) is decision
    assert remote.cached(question(TOOL, caller=caller, now_ms=end_ms)) is None


@pytest.mark.part_of("AUTH-06", rest="several nodes, over Redis")
async def test_what_is_forgotten_is_asked_again_also_when_the_answer_is_on_its_way(
    fake: FakeEngine, connect: Connect
) -> None:
    remote = connect()
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
    fake: FakeEngine, connect: Connect
) -> None:
    yes = b'{"decision": "allow"}'
    twice = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(yes) + yes
    remote = connect()
    fake.answer = yes
    fake.trailing = twice
    assert (await remote.decide(question(TOOL, {"amount": 1}))).behavior == "allow"
    fake.answer, fake.trailing = {"decision": "deny"}, b""
    assert (await remote.decide(question(TOOL, {"amount": 2}))).behavior == "deny"
    assert len(fake.asked) == 2


@pytest.mark.parametrize("answer", [b'{"decision": "deny", "decision": "allow"}', b'{"decision": "allow", "x": NaN}'])
async def test_an_answer_that_is_not_strict_json_is_none(fake: FakeEngine, connect: Connect, answer: bytes) -> None:
    fake.answer = answer
    await refused(connect())

"""Every condition that the error table lists, brought about for real and met over REST: its code and its status.

What a condition belongs to may not be there yet (semantic search, jobs with callbacks, the two bridges); the marks say
which are left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from interlock import Context, Failure, Interlock, tool
from interlock.authority.secrets import Secrets
from interlock.authority.vault import Vault
from interlock.contract.manifest import TimeoutClass, parse_manifest
from interlock.contract.manifest_tools import from_manifest
from interlock.core.errors import CODES
from interlock.http import asgi, connection
from interlock.registry.source import load
from interlock.store.sealing import Box
from tests import sample
from tests.support import isolated_tools as cell
from tests.support import payments as pay
from tests.support import stores
from tests.support.calls import admit, until
from tests.support.codes import listed
from tests.support.fake_vault import TOKEN, FakeVault
from tests.support.http_tools import RATE, READS
from tests.support.manifests import REQUIRED
from tests.support.programs import NAMED, written
from tests.support.rest import COMPLETE, World, refused, serving, until_ended
from tests.support.servers import place
from tests.support.upstream_servers import Answer, HttpServer

Json = dict[str, Any]
Provoke = Callable[[World], Awaitable[httpx.Response]]


@tool(version="1.0.0", mutation_class="read_only", namespace="w", permissions=["credentials:w/key"])
async def lent(ctx: Context, text: sample.Text) -> str:
    """Use a credential."""
    return str(len(ctx.secret("w/key")))


@tool(version="1.0.0", mutation_class="read_only", namespace="w")
async def remembers(ctx: Context, text: sample.Text) -> str:
    """Keep something that JSON cannot hold."""
    ctx.session["it"] = object()
    return text


@tool(version="1.0.0", mutation_class="read_only", namespace="w")
async def misfit(text: sample.Text) -> int:
    """Give back something else than it says."""
    return text  # pyright: ignore[reportReturnType] - on purpose


def nowhere() -> Any:
    """A tool that is to run in a sandbox and has no module that could be sent inside."""

    @tool(version="1.0.0", mutation_class="read_only", namespace="w", sandbox=True)
    def homeless(text: sample.Text) -> str:
        """Never run."""
        return text

    return homeless


# Its schema is sound, but what it refers to by name cannot be followed by whoever looks for what is private in it.
ANCHORED: Json = {
    **COMPLETE, "tool_id": "anchored", "execution": None,
    "result_schema": {"$ref": "#text", "$defs": {"t": {"$anchor": "text", "type": "string"}}},
}  # fmt: skip


@pytest_asyncio.fixture
async def world(home: Path) -> AsyncGenerator[World]:
    (home / "settings.toml").write_text(
        'search_encoder = "none"\nrate_limits = [{per = "tool", limit = 1, window_s = 60, tools = "demo.echo"}]'
    )
    async with serving(home) as made:
        yield made


# What is general, what is registered, who asks


async def _too_much(world: World) -> httpx.Response:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 100

    with pytest.MonkeyPatch.context() as narrow:
        narrow.setattr(asgi, "MOST_COMING", 150)
        return await world.ask("POST", "/v1/tools/invoke", content=body())


async def _twice(world: World) -> httpx.Response:
    assert (await world.invoke("demo.echo", {"value": 1})).status_code == 200
    return await world.invoke("demo.echo", {"value": 1})


async def _register(world: World, **edits: Any) -> httpx.Response:
    return await world.post("/v1/tools/register", {**COMPLETE, **edits}, "root")


async def _other_content(world: World) -> httpx.Response:
    assert (await _register(world)).status_code == 201
    return await _register(world, description="Something else altogether")


async def _removed(world: World) -> httpx.Response:
    assert (await world.post("/v1/tools/demo.add/deprecate", {"version": "1.0.0", "days": 0}, "root")).is_success
    world.clock.advance(1)
    return await world.invoke("demo.add", {"a": 1})


async def _expired(world: World) -> httpx.Response:
    world.clock.advance(7200)
    return await world.invoke("demo.add", {"a": 1})


async def _forged(world: World) -> httpx.Response:
    head, claims, signature = world.tokens["scout"].split(".")
    other = ("A" if signature[5] != "A" else "B").join((signature[:5], signature[6:]))
    return await world.invoke("demo.add", {"a": 1}, f"{head}.{claims}.{other}")


async def _narrow(world: World) -> httpx.Response:
    token = await world.token("scout", user="alice", tools=("demo.shout",))
    return await world.invoke("demo.add", {"a": 1}, token)


async def _without_policy(world: World) -> httpx.Response:
    world.app.home.policy.write_text("permit (principal,")
    world.clock.advance(5)
    return await world.invoke("demo.add", {"a": 1})


GENERAL: Mapping[str, Provoke] = {
    "E3001": _too_much,
    "E3003": _twice,
    "E3004": lambda w: w.invoke("", {}),
    "E3101": lambda w: w.invoke("demo.nothing", {}),
    "E3102": lambda w: w.invoke("demo.add", {"a": 1}, tool_version="^9.0.0"),
    "E3103": _other_content,
    "E3104": _removed,
    "E3105": lambda w: _register(w, version="1"),
    "E3106": lambda w: w.ask("GET", "/v1/tools?q=add&by=meaning"),
    "E3201": _expired,
    "E3202": _forged,
    "E3203": lambda w: w.invoke("demo.add", {"a": 1}, "a.b.c"),
    "E3204": _narrow,
    "E3205": _without_policy,
    "E3206": lambda w: w.post("/v1/tools/register", COMPLETE),
    "E3207": lambda w: w.post("/v1/tokens/delegate", {"to": "nobody"}),
}


def told(response: httpx.Response, code: str) -> Json:
    """A refusal with this code, whose status, errorCode, class and flag are the table's."""
    row = CODES[code]
    envelope = refused(response, row.http, code)
    assert envelope["error_class"] == row.error_class.value
    assert row.retryable is None or envelope["retryable"] is row.retryable
    return envelope


@pytest.mark.proves("CONTRACT-15")
@pytest.mark.supports("AUTH-04")
@pytest.mark.parametrize("code", GENERAL)
async def test_a_general_condition_has_its_code_and_status(world: World, code: str) -> None:
    told(await GENERAL[code](world), code)


@pytest.mark.proves("CONTRACT-15")
async def test_a_fault_inside_is_an_internal_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.service.calls, "invoke", None)
    told(await world.invoke("demo.add", {"a": 1}), "E3000")


@pytest.mark.proves("CONTRACT-15")
async def test_a_body_that_does_not_come_is_a_request_timeout(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_S", 0.05)
    async with place(home) as here:
        head = f"POST /v1/tools/invoke HTTP/1.1\r\nhost: localhost\r\nauthorization: {here.bearer['authorization']}"
        peer = await here.raw(f"{head}\r\nconnection: close\r\ncontent-length: 99\r\n\r\n{{".encode())
        answer = await peer.answer()
    assert answer.startswith(b"HTTP/1.1 504")
    assert b'"error_code":"E3002"' in answer


def test_all_that_is_listed_and_exists_is_provoked() -> None:
    exist = {code for clause in ("CONTRACT-15", "CONTRACT-16") for code, _, _ in listed(clause)}
    assert exist == {*GENERAL, "E3000", "E3002", *INSIDE, *UPSTREAM, *SECRETS}


# What is inside a call


async def _late(world: World) -> httpx.Response:
    sample.world.gate = asyncio.Event()
    asked = asyncio.create_task(world.invoke("demo.stepwise", {"steps": 1}))
    await until(lambda: sample.world.runs)
    world.clock.advance(31)
    return await asked


async def _dash(world: World) -> httpx.Response:
    return await world.invoke("prog.bare", {"text": "-rf"})


def _attempt(what: str) -> Provoke:
    return lambda w: w.invoke("cell.attempt", {"what": what})


async def _open_breaker(world: World) -> httpx.Response:
    pay.world.failure = Failure("E3502", "the maps are gone")
    try:
        for _ in range(5):
            told(await world.invoke("pay.route", {}), "E3502")
    finally:
        pay.world.failure = None
    return await world.invoke("pay.route", {})


INSIDE: Mapping[str, Provoke] = {
    "E3301": lambda w: w.invoke("demo.add", {"a": "x"}),
    "E3302": lambda w: w.invoke("demo.add", {"a": "1.5"}),
    "E3303": lambda w: w.invoke("w.misfit", {"text": "a"}),
    "E3304": lambda w: w.invoke("anchored", {"message": "a"}),
    "E3305": _dash,
    "E3401": lambda w: w.invoke("demo.broken", {"text": "a"}),
    "E3402": _late,
    "E3403": _attempt("memory"),
    "E3404": _attempt("crash"),
    "E3405": lambda w: w.invoke("w.homeless", {"text": "a"}),
    "E3406": _attempt("network"),
    "E3407": _attempt("output"),
    "E3501": _open_breaker,
}


@pytest.mark.proves("CONTRACT-16")
async def test_a_condition_inside_a_call_has_its_code_and_status(world: World, tmp_path: Path) -> None:
    _, programs = load(written(tmp_path / "programs.json", NAMED["bare"]))
    anchored = from_manifest(parse_manifest({k: v for k, v in ANCHORED.items() if v is not None}), _same, {})
    await admit(world.app, misfit, cell.attempt, nowhere(), pay.route, anchored, *programs)
    for code, provoke in INSIDE.items():
        told(await provoke(world), code)


def _same(message: str) -> str:
    return message


UPSTREAM: Mapping[str, Answer] = {
    "E3502": Answer(status=503),
    "E3503": Answer(status=504),
    "E3504": Answer(status=429, headers={"retry-after": "7"}),
}


@pytest.mark.proves("CONTRACT-16")
async def test_a_condition_of_an_upstream_has_its_code_and_status(world: World) -> None:
    async with HttpServer.open() as server:
        config: Json = {"urls": [server.url], "tools": [RATE], "allow_private": True}
        report = await world.app.upstreams.add("bank", "http", config, by=world.app.caller, overlay=READS)
        assert [one.state for one in report.tools] == ["admitted"], report.tools[0].reason
        for code, answer in UPSTREAM.items():
            server.otherwise = lambda _, answer=answer: answer
            envelope = told(await world.invoke("bank.rate", {"of": "CHF"}, timeout_ms=50), code)
            assert envelope["native_error_ref"] == f"http:{answer.status}"


@pytest.mark.proves("CONTRACT-14")
async def test_a_refusal_of_an_upstream_that_is_not_retryable_is_met_once(world: World) -> None:
    async with HttpServer.open() as server:
        config: Json = {"urls": [server.url], "tools": [RATE], "allow_private": True}
        await world.app.upstreams.add("bank", "http", config, by=world.app.caller, overlay=READS)
        for status in (400, 401, 403, 404, 409, 410, 422):
            server.got.clear()
            server.otherwise = lambda _, status=status: Answer(status=status)
            answer = await world.invoke("bank.rate", {"of": "CHF"})
            assert (answer.json()["error"]["retryable"], len(server.got)) == (False, 1), status


async def _vault_away(world: World, vault: FakeVault, _: Path) -> None:
    vault.fails = (503, "Vault is sealed")


async def _key_expired(world: World, _: FakeVault, __: Path) -> None:
    await world.app.secrets.set("w/key", "x", by="test", expires_ms=world.clock.now_ms + 1)
    world.app.lend_from(world.app.secrets)
    world.clock.advance(1)


async def _key_absent(world: World, _: FakeVault, __: Path) -> None:
    world.app.lend_from(world.app.secrets)


async def _key_of_another(world: World, _: FakeVault, elsewhere: Path) -> None:
    await world.app.secrets.set("w/key", "x", by="test")
    world.app.lend_from(Secrets(world.app.journal, Box(elsewhere), world.app.clock))


SECRETS: Mapping[str, Callable[[World, FakeVault, Path], Awaitable[None]]] = {
    "E3601": _vault_away,
    "E3602": _key_absent,
    "E3603": _key_expired,
    "E3604": _key_of_another,
}


@pytest.mark.proves("CONTRACT-16")
@pytest.mark.parametrize("code", SECRETS)
async def test_a_condition_of_a_credential_has_its_code_and_status(world: World, tmp_path: Path, code: str) -> None:
    await admit(world.app, lent)
    (tmp_path / "token").write_text(TOKEN)
    vault = FakeVault()
    source = Vault(vault.address, clock=world.app.clock, token_file=tmp_path / "token")
    world.app.lend_from(source)
    try:
        await SECRETS[code](world, vault, tmp_path)
        told(await world.invoke("w.lent", {"text": "a"}), code)
    finally:
        await source.close()
        vault.close()


# What is around it


async def _cancelled(world: World) -> httpx.Response:
    sample.world.gate = asyncio.Event()
    asked = asyncio.create_task(world.invoke("demo.stepwise", {"steps": 1}))
    await until(lambda: sample.world.runs)
    (running,) = world.app.gateway.runner.active._calls  # pyright: ignore[reportPrivateUsage] - nobody is told the id of a call that waits
    assert await world.app.cancel(running) == "canceled"
    return await asked


async def _closed(world: World) -> httpx.Response:
    await world.app.journal.close()
    return await world.invoke("demo.increment", {"name": "a"}, idempotency_key="k")


async def _held(world: World) -> httpx.Response:
    with stores.busy(world.app.home):
        return await world.invoke("demo.increment", {"name": "a"}, idempotency_key="k")


AROUND: Mapping[str, Provoke] = {
    "E3701": lambda w: w.invoke("demo.add", {"a": 1}, execution_mode="async"),
    "E3702": lambda w: w.get("/v1/calls/nothing"),
    "E3703": _cancelled,
    "E3801": _closed,
    "E3803": _held,
    "E3906": lambda w: w.invoke("w.remembers", {"text": "a"}),
}


@pytest.mark.part_of(
    "CONTRACT-17", rest="E3704 and E3802, which come with callbacks and event streams; the document and state bridges"
)
@pytest.mark.parametrize("code", AROUND)
async def test_a_condition_around_a_call_has_its_code_and_status(
    world: World, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setitem(vars(world.app.settings), "max_background_per_caller", 0)
    await admit(world.app, remembers)
    stores.impatient(world.app.home, world.app.journal, monkeypatch)
    told(await AROUND[code](world), code)


# Registering


@pytest.mark.proves("CONTRACT-02")
async def test_a_manifest_outside_its_bounds_is_refused_over_rest_with_a_pointer_to_each_fault(world: World) -> None:
    for field, good, bad in REQUIRED:
        for value in bad:
            envelope = told(await _register(world, **{field: value}), "E3105")
            assert f"/{field}" in [fault["pointer"] for fault in envelope["details"]["faults"]], (field, value)
        for value in good:
            answer = await _register(world, **{field: value}, required_permissions=None, tool_kind="x")
            pointers = [fault["pointer"] for fault in told(answer, "E3105")["details"]["faults"]]
            assert f"/{field}" not in pointers, (field, value)
    several = await _register(world, tool_id="A", version="01.0.0", name="x", parameters={"type": "text"})
    pointers = [fault["pointer"] for fault in told(several, "E3105")["details"]["faults"]]
    assert {"/tool_id", "/version", "/name", "/parameters"} <= set(pointers)
    assert not any(row.address.endswith("echo_tool") for row in await world.app.catalog.rows())


@pytest.mark.proves("CONTRACT-10")
async def test_a_tool_of_no_known_kind_is_registered_with_a_warning_and_one_of_a_made_up_kind_is_not(
    world: World,
) -> None:
    told(await _register(world, tool_kind="plugin"), "E3105")
    plain = await _register(world, tool_id="plain_tool", tool_kind="function")
    assert (plain.status_code, plain.json()["warnings"]) == (201, [])
    custom = await _register(world, tool_kind="custom")
    assert custom.status_code == 201
    assert "custom" in custom.json()["warnings"][0]
    assert (await world.invoke("echo_tool", {"message": "x"})).json()["result"] == {"echoed": "x"}


# Trying again


@tool(version="1.0.0", mutation_class="read_only", namespace="w")
async def stubborn(code: sample.Text) -> str:
    """Fail in one way, however often it is asked."""
    sample.world.runs += 1
    raise Failure(code, retryable=True)


@pytest.mark.proves("CONTRACT-14")
async def test_what_may_not_be_sent_again_runs_once_under_the_most_generous_policy(app: Interlock) -> None:
    generous = from_manifest(
        parse_manifest({**stubborn.manifest.document(), "retry_policy": {"max_attempts": 10}}), stubborn.function, {}
    )
    await admit(app, generous)
    for code, row in CODES.items():
        if Failure(code, retryable=True).retryable:
            continue
        sample.world.runs = 0
        result = await app.call_with_retries("w.stubborn", {"code": code})
        assert result.error is not None
        assert (result.error.code, result.error.retryable, sample.world.runs) == (code, False, 1), row


# Taking time


def lasting(timeout_class: TimeoutClass) -> Any:
    """A tool of a class, which waits until it is let go and says how far it is."""

    @tool(
        version="1.0.0", mutation_class="read_only", namespace="t", name=timeout_class, timeout_class=timeout_class,
        external_io=False,
    )  # fmt: skip
    async def lasts(ctx: Context, text: sample.Text) -> str:
        """Take as long as it is left."""
        sample.world.runs += 1
        if text == "long":
            ctx.progress("half way", percent=50)
            assert sample.world.gate is not None
            await sample.world.gate.wait()
        return text

    return lasts


LONGEST: Mapping[TimeoutClass, float] = {"interactive": 0.5, "standard": 5, "long_running": 300, "async": 7200}


@pytest.mark.supports("LIFE-10")
@pytest.mark.part_of("LIFE-09", rest="async calls that are submitted of themselves and told by callback")
@pytest.mark.parametrize("timeout_class", LONGEST)
async def test_a_call_is_waited_for_and_cut_off_at_the_maximum_of_its_class(
    world: World, timeout_class: TimeoutClass
) -> None:
    await admit(world.app, lasting(timeout_class))
    sample.world.gate = asyncio.Event()
    at_once = await world.invoke(f"t.{timeout_class}", {"text": "short"}, timeout_ms=86_400_000)
    assert (at_once.status_code, at_once.json()["result"]) == (200, "short")
    # However much more its caller would allow it; another allows less.
    asked, brief = (
        asyncio.create_task(world.invoke(f"t.{timeout_class}", {"text": "long"}, timeout_ms=ms))
        for ms in (86_400_000, 100)
    )
    await until(lambda: sample.world.runs == 3)
    world.clock.advance(LONGEST[timeout_class] - 0.1)
    told(await brief, "E3402")
    assert not asked.done()
    world.clock.advance(0.1)
    told(await asked, "E3402")


@pytest.mark.proves("LIFE-03")
@pytest.mark.parametrize("timeout_class", LONGEST)
async def test_a_call_without_a_deadline_has_the_maximum_of_its_class(
    world: World, timeout_class: TimeoutClass
) -> None:
    @tool(
        version="1.0.0", mutation_class="read_only", namespace="m", name=timeout_class, timeout_class=timeout_class,
        external_io=False,
    )  # fmt: skip
    async def left(ctx: Context) -> float:
        """Say how much time it has."""
        return ctx.remaining_s

    await admit(world.app, left)
    # The clock of this place stands still, so nothing of it is used up.
    assert (await world.invoke(f"m.{timeout_class}", {})).json()["result"] == pytest.approx(LONGEST[timeout_class])


@tool(version="1.0.0", mutation_class="read_only", namespace="t", timeout_class="standard", timeout_s=1)
async def brief() -> str:
    """Wait for longer than its manifest says."""
    sample.world.runs += 1
    await asyncio.Event().wait()
    return "never"


@pytest.mark.proves("LIFE-10")
async def test_a_call_without_a_timeout_is_cut_off_where_its_manifest_says(world: World) -> None:
    await admit(world.app, brief)
    asked = asyncio.create_task(world.invoke("t.brief", {}))
    await until(lambda: sample.world.runs == 1)
    world.clock.advance(0.9)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not asked.done()
    world.clock.advance(0.1)
    envelope = told(await asked, "E3402")
    assert (envelope["errorCode"], envelope["retryable"]) == ("DEADLINE_EXCEEDED", True)


@pytest.mark.supports("LIFE-14")
@pytest.mark.part_of("LIFE-09", rest="async calls that are submitted of themselves and told by callback")
@pytest.mark.parametrize("timeout_class", ["long_running", "async"])
async def test_a_slow_call_is_submitted_polled_and_heard_of_while_its_caller_does_other_things(
    world: World, timeout_class: TimeoutClass
) -> None:
    await admit(world.app, lasting(timeout_class))
    sample.world.gate = asyncio.Event()
    heard: list[Any] = []
    world.app.listen(heard.append)
    body = (await world.invoke(f"t.{timeout_class}", {"text": "long"}, execution_mode="async")).json()
    await until(lambda: sample.world.runs == 1)
    assert (await world.get(body["poll"])).json()["status"] == "running"
    assert (await world.invoke("demo.add", {"a": 1})).json()["result"] == 6, "meanwhile"
    steps = [one.data for one in heard if one.type == "tool.invocation.progress"]
    assert [(one["message"], one["percent"]) for one in steps] == [("started", 0), ("half way", 50)]
    sample.world.gate.set()
    ended = await until_ended(world, body["poll"])
    assert (ended["status"], ended["result"]) == ("success", "long")

"""Messages over Redis: cached decisions are dropped everywhere. Without Redis, or with lies, nothing is wrong."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from interlock import Caller, Interlock
from interlock.api.health import Health
from interlock.api.messages import BREAKERS, POLICY, affected
from interlock.api.policy import Policy
from interlock.contract.manifest import CircuitBreakerConfig
from interlock.core.errors import Failure
from interlock.net import redis
from interlock.net.redis import MOST_BYTES
from interlock.settings import load_settings
from interlock.store.decisions import MOST_SUBJECTS
from interlock.testing import FakeClock
from tests.sample import TOOLS
from tests.support.engines import FakeHttpEngine, http
from tests.support.redis import Server

__all__ = ["http"]

PATIENCE_S = 120.0
DOWN = Failure("E3502", "does not answer")
ALICE, BOB = Caller(id="local:alice"), Caller(id="local:bob")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no lost connection."""
    for name in ("OPEN_S", "ANSWER_S"):
        monkeypatch.setattr(redis, name, PATIENCE_S)


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not (await held if inspect.isawaitable(held := holds()) else held):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.005)


@asynccontextmanager
async def opened(home: Path, engine: FakeHttpEngine, **settings: Any) -> AsyncGenerator[Interlock]:
    said: dict[str, Any] = {"policy_engine": "remote", "policy_url": engine.url, "policy_timeout_s": 30} | settings
    async with Interlock.open(home, housekeeping=False, **said) as app:
        for one in TOOLS:
            app.catalog.attach(one)
        if settings.get("redis"):
            await until(lambda: app.messages.condition == "healthy")
        yield app


class Asked:
    """Whether calls need a new answer of the engine, or have a cached one."""

    def __init__(self, engine: FakeHttpEngine) -> None:
        self._engine = engine

    async def anew(self, app: Interlock, caller: Caller) -> bool:
        before = len(self._engine.asked)
        assert (await app.call("demo.echo", value="x", caller=caller)).ok
        return len(self._engine.asked) > before

    async def both(self, app: Interlock) -> list[bool]:
        return [await self.anew(app, ALICE), await self.anew(app, BOB)]


def publish(server: Server, content: bytes) -> Any:
    return asyncio.to_thread(server.ask, "PUBLISH", POLICY, stdin=content)


@pytest.mark.proves("AUTH-06")
async def test_a_message_drops_the_decisions_about_the_subjects_that_it_names(
    home: Path, http: FakeHttpEngine, redis_server: Server
) -> None:
    asked = Asked(http)
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(opened(home, http, redis=redis_server.url)) for _ in range(3)]
        for node in nodes:
            await asked.both(node)
            assert await asked.both(node) == [False, False]
        await publish(redis_server, json.dumps({"affected_subjects": [ALICE.id, "local:nobody"]}).encode())
        for node in nodes:
            await until(lambda node=node: asked.anew(node, ALICE))
            assert not await asked.anew(node, BOB)


async def test_any_other_message_drops_all_decisions(home: Path, http: FakeHttpEngine, redis_server: Server) -> None:
    asked = Asked(http)
    async with opened(home, http, redis=redis_server.url) as app:
        for content in (b"\xff\x00", b"{}", b"[" * 5000, b'{"affected_subjects": [1]}', b"x" * (MOST_BYTES + 1)):
            await asked.both(app)
            await publish(redis_server, content)
            await until(lambda: asked.anew(app, BOB))
            await until(lambda: app.messages.condition == "healthy")


def test_subjects_are_read_from_nothing_but_a_list_of_names() -> None:
    def message(subjects: Any) -> bytes:
        return json.dumps({"affected_subjects": subjects}).encode()

    assert affected(message(["a", "b", "a"])) == {"a", "b"}
    assert affected(message([])) == frozenset()
    everybody = (message(None), message("a"), message(["a", None]), message(["a"] * (MOST_SUBJECTS + 1)), b"", b"null")
    twice = b'{"affected_subjects": [], "affected_subjects": ["a"]}'
    assert [affected(one) for one in (*everybody, twice, b"[1]", b"\xff")] == [None] * 9


async def test_a_flood_of_messages_is_taken_together(
    home: Path, http: FakeHttpEngine, redis_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    drops: list[Any] = []
    async with opened(home, http, redis=redis_server.url) as app:
        monkeypatch.setattr(app.engine, "forget", drops.append)
        script = "for i = 1, 3000 do redis.call('publish', KEYS[1], '{\"affected_subjects\": [\"' .. i .. '\"]}') end"
        await asyncio.to_thread(redis_server.ask, "EVAL", script, "1", POLICY)
        await publish(redis_server, json.dumps({"affected_subjects": ["last"]}).encode())
        await until(lambda: drops and (drops[-1] is None or "last" in drops[-1]))
        assert len(drops) < 2000
        assert (await app.call("demo.echo", value="x", caller=ALICE)).ok


@pytest.mark.proves("AUTH-06")
async def test_a_lost_subscription_drops_all_decisions_when_it_begins_again(
    home: Path, http: FakeHttpEngine, redis_server: Server
) -> None:
    asked = Asked(http)
    async with opened(home, http, redis=redis_server.url) as app:
        await asked.both(app)
        http.answer = {"decision": "deny", "reason": "changed"}
        # In one step, so that nobody subscribes in between: the message is for those who do not listen.
        told = f"PUBLISH {POLICY} '{json.dumps({'affected_subjects': [ALICE.id]})}'"
        assert (await asyncio.to_thread(redis_server.together, "CLIENT KILL TYPE pubsub", told))[-1] == "0"

        async def denied() -> bool:
            return not (await app.call("demo.echo", value="x", caller=ALICE)).ok

        await until(denied)
        await until(lambda: app.messages.condition == "healthy")
        assert await denied()


@pytest.mark.proves("AUTH-06")
async def test_an_order_reaches_every_process_without_redis_too(
    home: Path, http: FakeHttpEngine, make_redis: Callable[..., Server]
) -> None:
    server, asked = make_redis(), Asked(http)
    gone = f"unix://{server.socket}"
    async with opened(home, http) as ours, opened(home, http) as theirs, opened(home, http, redis=gone) as third:
        for node in (ours, theirs):
            await asked.both(node)
        server.kill()
        await until(lambda: third.messages.condition == "down")
        told = await Policy(ours).forget([ALICE.id], by=ours.caller)
        assert told == {"forgotten": True, "subjects": [ALICE.id]}
        assert await asked.both(ours) == [True, False]
        await until(lambda: asked.anew(theirs, ALICE))
        assert not await asked.anew(theirs, BOB)
        await Policy(third).forget(None, by=ours.caller)
        assert await asked.both(third) == [True, True]
        await until(lambda: asked.anew(ours, BOB))
        await until(lambda: asked.anew(theirs, BOB))
        with pytest.raises(Failure) as refused:
            await Policy(ours).forget([], by=BOB)
        assert refused.value.code == "E3206"


async def test_an_order_is_published_with_its_subjects(home: Path, http: FakeHttpEngine, redis_server: Server) -> None:
    async with opened(home, http, redis=redis_server.url) as app:
        with redis_server.heard(POLICY) as messages:
            await Policy(app).forget([BOB.id, ALICE.id, BOB.id], by=app.caller)
            assert json.loads(await asyncio.to_thread(next, messages)) == {"affected_subjects": [ALICE.id, BOB.id]}
            await Policy(app).apply("permit (principal, action, resource);", by=app.caller)
            assert json.loads(await asyncio.to_thread(next, messages)) == {"affected_subjects": None}


@pytest.mark.proves("RESIL-03")
async def test_each_change_of_a_breaker_is_published_once(
    home: Path, http: FakeHttpEngine, redis_server: Server
) -> None:
    config = CircuitBreakerConfig.model_validate({"failure_threshold": 1, "timeout_seconds": 3600})

    def refused(app: Interlock) -> bool:
        try:
            app.gateway.services.enter("bank", config).abandoned()
        except Failure as failure:
            return failure.code == "E3501"
        return False

    url = redis_server.url
    async with opened(home, http, redis=url) as ours, opened(home, http, redis=url) as theirs:
        with redis_server.heard(BREAKERS) as messages:
            entries = [app.gateway.services.enter("bank", config) for app in (ours, theirs)]
            for entry in entries:
                entry.done(DOWN)
            assert await asyncio.to_thread(next, messages) == "bank:closed->open"
            await until(lambda: refused(ours) and refused(theirs))
            # A forged message changes nothing, and the next one is not about the same change again.
            await asyncio.to_thread(redis_server.ask, "PUBLISH", BREAKERS, "bank:open->closed")
            assert await asyncio.to_thread(next, messages) == "bank:open->closed"
            assert refused(ours)
            assert refused(theirs)


@pytest.mark.proves("RESIL-03")
async def test_every_step_of_a_breaker_is_published_as_it_is_on_record(
    home: Path, http: FakeHttpEngine, redis_server: Server
) -> None:
    time = FakeClock()
    config = CircuitBreakerConfig.model_validate({"failure_threshold": 1, "success_threshold": 2})
    async with opened(home, http, redis=redis_server.url, clock=time.clock) as app:

        async def ends(failure: Failure | None) -> None:
            app.gateway.services.enter("bank", config).done(failure)
            await app.gateway.services.settle()

        with redis_server.heard(BREAKERS) as messages:
            await ends(DOWN)
            time.advance(config.timeout_seconds)
            await ends(DOWN)
            time.advance(config.timeout_seconds)
            for _ in range(2):
                await ends(None)
            told = [await asyncio.to_thread(next, messages) for _ in range(5)]
        rows = app.journal.reader.all("SELECT body FROM journal WHERE kind = 'registry' AND call = 'bank' ORDER BY seq")
    recorded = [json.loads(body) for (body,) in rows]
    assert told == [f"bank:{one['from']}->{one['to']}" for one in recorded]
    steps = ["closed", "open", "half_open", "open", "half_open", "closed"]
    assert told == [f"bank:{old}->{new}" for old, new in itertools.pairwise(steps)]


@pytest.mark.proves("OPS-10")
async def test_readiness_tells_how_redis_is(
    home: Path, http: FakeHttpEngine, make_redis: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interlock.api.health.READY_FOR_S", 0.0)
    server = make_redis()
    async with opened(home, http, redis=server.url) as app:
        health = Health(app)

        async def told(*expected: str) -> bool:
            status, parts = await health.ready()
            return (status, parts.get("redis")) == expected

        assert await told("healthy", "healthy")
        server.kill()
        await until(lambda: told("degraded", "down"))
        assert (await app.call("demo.echo", value="x")).ok
        server.start()
        await until(lambda: told("healthy", "healthy"))
    async with opened(home, http) as app:
        assert "redis" not in (await Health(app).ready())[1]


async def test_a_redis_that_takes_no_messages_is_degraded(
    home: Path, http: FakeHttpEngine, make_redis: Callable[..., Server]
) -> None:
    server = make_redis(*["--user", "default", "on", "nopass", "~*", "&*", "+@all", "-publish"])
    async with opened(home, http, redis=server.url) as app:
        await Policy(app).forget(None, by=app.caller)
        await until(lambda: app.messages.condition == "degraded")


async def test_the_password_is_a_stored_secret(
    home: Path, http: FakeHttpEngine, make_redis: Callable[..., Server]
) -> None:
    server = make_redis("--requirepass", "secret")
    async with opened(home, http) as app:
        await app.secrets.set("redis", "secret", by="test")
    async with opened(home, http, redis=server.url, redis_secret="redis") as app:
        assert app.messages.condition == "healthy"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"redis": "http://host"}, "redis://host:port"),
        ({"redis": "redis://"}, "redis://host:port"),
        ({"redis": "unix://relative"}, "redis://host:port"),
        ({"redis": "redis://:secret@host"}, "keep the password out"),
        ({"redis": "redis://far.example:6379", "redis_secret": "redis"}, "clear text"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(tmp_path: Path, given: dict[str, str], words: str) -> None:
    with pytest.raises(Failure, match=words):
        load_settings(tmp_path / "settings.toml", **given)

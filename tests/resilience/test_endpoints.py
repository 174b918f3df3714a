"""A service with several endpoints is asked at the first that answers; an old answer is never passed off as fresh."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from interlock.contract.manifest import CircuitBreakerConfig
from interlock.core.errors import Failure
from interlock.resilience.endpoints import EndpointAnswer, Endpoints, LastGood
from interlock.resilience.services import Services
from interlock.store.homes import home_at
from interlock.store.journal import Journal
from interlock.store.signing import Signer
from interlock.testing import FakeClock
from tests.support.stores import passes

CONFIG = CircuitBreakerConfig.model_validate({"failure_threshold": 2})


class Server:
    """A server on a port of its own that says its name to whoever connects."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked = 0
        self.says = name

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", port)
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked += 1
        writer.write(self.says.encode())
        writer.close()

    async def kill(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"


async def send(url: str) -> str:
    """Ask a server; what it answers says how it went."""
    parts = urlsplit(url)
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except OSError:
        raise Failure("E3502", "nobody there", details={"sent": False}) from None
    try:
        said = (await reader.read()).decode()
    finally:
        writer.close()
    match said:
        case "":
            raise Failure("E3502", "broke off", details={"sent": True})
        case "no":
            raise Failure("E3401", "no", native_error_ref="http:422")
        case "busy":
            raise Failure("E3504", "not now", retry_after_ms=5000)
        case _:
            return said


@pytest.fixture
def time() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def journal(tmp_path: Path, time: FakeClock) -> AsyncGenerator[Journal]:
    place = home_at(tmp_path)
    place.prepare()
    made = Journal(place, clock=time.clock, signer=Signer(place.keys))
    yield made
    await made.close()


@pytest_asyncio.fixture
async def services(journal: Journal, time: FakeClock) -> AsyncGenerator[Services]:
    made = Services(journal, time.clock)
    yield made
    await made.settle()


@pytest_asyncio.fixture
async def servers() -> AsyncGenerator[list[Server]]:
    made = [Server(name) for name in ("first", "second", "third")]
    for server in made:
        await server.start()
    yield made
    for server in made:
        await server.kill()


def among(servers: list[Server], services: Services, cache: LastGood | None = None) -> Endpoints:
    return Endpoints("bank", [server.url for server in servers], services, cache=cache)


def states(services: Services) -> list[str]:
    return [one.state for one in sorted(services.snapshot(), key=lambda one: one.service)]


@pytest.mark.supports("RESIL-09")
async def test_endpoints_that_die_one_by_one_leave_the_next_and_at_last_a_marked_answer(
    servers: list[Server], services: Services, journal: Journal, time: FakeClock
) -> None:
    servers.sort(key=lambda server: server.port)
    names = [server.name for server in servers]
    cache = LastGood(time.clock.monotonic)
    endpoints = among(servers, services, cache)

    async def ask(stale_s: float | None = 60.0) -> EndpointAnswer:
        return await endpoints.ask(send, CONFIG, safe=True, key="ann balance", stale_s=stale_s)

    assert await ask() == (names[0], "live", 0.0)
    for alive, server in enumerate(servers[:2], start=1):
        await server.kill()
        # Two failures open its breaker; then it is not even tried.
        for _ in range(3):
            assert await ask() == (names[alive], "live", 0.0)
    assert states(services) == ["open", "open", "closed"]
    await servers[2].kill()
    await passes(time, 5, journal)
    for _ in range(3):
        assert await ask() == (names[2], "cache", 5.0)
    assert states(services) == ["open", "open", "open"]
    with pytest.raises(Failure) as caught:
        await ask(stale_s=None)
    assert caught.value.code == "E3502"
    details = caught.value.details or {}
    assert [said["error_code"] for said in details["endpoints"]] == ["E3501"] * 3
    assert [said["endpoint"] for said in details["endpoints"]] == [f"bank {server.url}" for server in servers]
    assert details["sent"] is False
    assert caught.value.retry_after_ms == 55_000
    with pytest.raises(Failure):
        await ask(stale_s=4.0)
    # The first one is back: when its time has come it is asked again, and before the others.
    await servers[0].start(servers[0].port)
    await passes(time, 60, journal)
    assert await ask() == (names[0], "live", 0.0)


async def test_what_may_have_been_done_is_not_asked_of_another(servers: list[Server], services: Services) -> None:
    servers[0].says = ""
    endpoints = among(servers, services)
    with pytest.raises(Failure) as caught:
        await endpoints.ask(send, CONFIG, safe=False)
    assert caught.value.message == "broke off"
    assert [server.asked for server in servers] == [1, 0, 0]
    assert (await endpoints.ask(send, CONFIG, safe=True)).value == "second"


async def test_what_was_never_sent_is_asked_of_another(servers: list[Server], services: Services) -> None:
    await servers[0].kill()
    assert (await among(servers, services).ask(send, CONFIG, safe=False)).value == "second"


async def test_an_answer_is_an_answer_even_if_it_is_no(servers: list[Server], services: Services) -> None:
    servers[0].says = "no"
    for _ in range(5):
        with pytest.raises(Failure) as caught:
            await among(servers, services).ask(send, CONFIG, safe=True)
        assert caught.value.code == "E3401"
    assert [server.asked for server in servers] == [5, 0, 0]


async def test_one_that_is_busy_is_passed_over_until_it_is_ready(
    servers: list[Server], services: Services, journal: Journal, time: FakeClock
) -> None:
    servers[0].says = "busy"
    endpoints = among(servers, services)
    for _ in range(3):
        assert (await endpoints.ask(send, CONFIG, safe=True)).value == "second"
    assert servers[0].asked == 1
    servers[0].says = "first"
    await passes(time, 5, journal)
    assert (await endpoints.ask(send, CONFIG, safe=True)).value == "first"


async def test_a_caller_whose_time_is_up_ends_the_search_and_harms_nobody(
    servers: list[Server], services: Services
) -> None:
    async def late(url: str) -> Any:
        raise Failure("E3503")

    endpoints = among(servers, services)
    for _ in range(5):
        with pytest.raises(Failure) as caught:
            await endpoints.ask(late, CONFIG, safe=True, own_deadline=True, expired=lambda: True)
        assert caught.value.code == "E3503"
    assert states(services) == ["closed"]


async def test_a_call_that_is_cancelled_says_nothing_about_the_endpoint(
    servers: list[Server], services: Services
) -> None:
    async def hangs(url: str) -> Any:
        await asyncio.Event().wait()

    for _ in range(3):
        asking = asyncio.create_task(among(servers, services).ask(hangs, CONFIG, safe=True))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert states(services) == ["closed"]


async def test_a_service_with_one_endpoint_says_what_that_one_said(servers: list[Server], services: Services) -> None:
    await servers[0].kill()
    endpoints = among(servers[:1], services)
    codes: list[str] = []
    for _ in range(3):
        with pytest.raises(Failure) as caught:
            await endpoints.ask(send, CONFIG, safe=True)
        codes.append(caught.value.code)
    assert codes == ["E3502", "E3502", "E3501"]


@pytest.mark.parametrize(
    "urls",
    [
        [],
        ["https://a", "https://b", "https://c", "https://d"],
        ["https://a/x?key=1", "https://a/x/?key=2"],
        ["nowhere"],
        ["https://a:port"],
        ["https://[::1"],
    ],
)
async def test_endpoints_that_make_no_sense_are_refused(services: Services, urls: list[str]) -> None:
    with pytest.raises(Failure) as caught:
        Endpoints("bank", urls, services)
    assert caught.value.code == "E3004"


async def test_what_an_address_may_hold_besides_the_place_is_not_in_its_name(services: Services) -> None:
    endpoints = Endpoints("bank", ["https://ann:secret@[::1]:8443/v1/?token=secret"], services)
    assert endpoints.all[0].name == "bank https://[::1]:8443/v1"


def test_a_kept_answer_is_a_copy_and_has_an_age(time: FakeClock) -> None:
    cache = LastGood(time.clock.monotonic)
    cache.keep("k", {"a": [1]}, cache.era)
    time.advance(2)
    found = cache.find("k", 2.0)
    assert found == ({"a": [1]}, "cache", 2.0)
    assert found is not None
    found.value["a"].append(2)
    assert cache.find("k", 2.0) == ({"a": [1]}, "cache", 2.0)
    assert cache.find("k", 1.9) is None
    assert cache.find("other", 60.0) is None


def test_kept_answers_stay_within_their_room(time: FakeClock) -> None:
    cache = LastGood(time.clock.monotonic, max_bytes=800)
    for number in range(20):
        cache.keep(f"key {number:04}", "x" * 82, cache.era)  # 100 bytes with its key: eight fit
    kept = [number for number in range(20) if cache.find(f"key {number:04}", 60.0) is not None]
    assert len(kept) <= 8
    assert kept == list(range(20))[-len(kept) :]
    cache.keep("key 0019", "x" * 1000, cache.era)
    assert cache.find("key 0019", 60.0) is None
    assert cache.find("key 0018", 60.0) is not None
    cache.keep("key 0018", 2**70, cache.era)
    assert cache.find("key 0018", 60.0) is None


def test_an_answer_to_a_request_from_before_everything_was_forgotten_is_not_kept(time: FakeClock) -> None:
    cache = LastGood(time.clock.monotonic)
    sent_in = cache.era
    cache.forget()
    cache.keep("k", "from before", sent_in)
    assert cache.find("k", 60.0) is None
    cache.keep("k", "from after", cache.era)
    assert cache.find("k", 60.0) is not None

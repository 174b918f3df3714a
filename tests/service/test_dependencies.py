"""Readiness tells each service that a server depends on: those that calls cannot do without, and the others."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from interlock import Interlock
from interlock.api import dependencies, health
from interlock.api.health import Health
from interlock.authority.trusted_issuers import TrustedIssuer, TrustedIssuers
from interlock.core.errors import Failure
from interlock.testing import FakeClock
from tests import sample
from tests.support.calls import until
from tests.support.engines import FakeGrpcEngine, FakeHttpEngine, fake, http
from tests.support.fake_vault import TOKEN, FakeVault
from tests.support.servers import LOOPBACK, place
from tests.support.upstream_servers import Answer, HttpServer

Json = dict[str, Any]
__all__ = ["fake", "http"]
# How long readiness waits for services where a test has one that does not answer.
MOMENT_S = 1.0
Told = Callable[..., Awaitable[bool]]


@pytest_asyncio.fixture(autouse=True)
async def asked_anew(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[None]:
    """Readiness is looked at whenever it is asked for."""
    monkeypatch.setattr(health, "READY_FOR_S", 0.0)
    monkeypatch.setattr(dependencies, "ASKED_FOR_S", 0.0)
    yield


def telling(app: Interlock, name: str) -> Told:
    """A function that says whether readiness, and that of one dependency, are as expected."""
    asked = Health(app)

    async def told(*expected: str) -> bool:
        status, parts = await asked.ready()
        return (status, parts.get(name)) == expected

    return told


@pytest.mark.parametrize("form", ["interlock", "authzen"])
async def test_a_server_is_not_ready_while_its_remote_policy_engine_does_not_decide(
    home: Path, fake: FakeHttpEngine | FakeGrpcEngine, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fake.wire == "grpc" and form == "authzen":
        return  # AuthZEN is spoken over HTTP
    fake.answer = {"decision": False} if form == "authzen" else {"decision": "deny", "reason": "as always"}
    settings: Json = {"policy_engine": "remote", "policy_url": fake.url, "policy_form": form}
    async with Interlock.open(home, housekeeping=False, policy_timeout_s=30, **settings) as app:
        await app.add(sample.add)
        told = telling(app, "policy")
        # Whatever the engine decides, it answers. The question is about no call.
        assert await told("healthy", "healthy")
        assert "interlock:readiness" in str(fake.asked[-1]["subject"])
        sound, fake.answer = fake.answer, b"{}"
        refused = await app.call("demo.add", a=1)
        assert refused.error is not None
        assert (refused.error.code, await told("down", "down")) == ("E3205", True)
        fake.answer = sound
        assert await told("healthy", "healthy")
    # One that does not answer at all keeps nobody waiting for longer than a moment.
    monkeypatch.setattr(dependencies, "ASK_S", MOMENT_S)
    async with Interlock.open(home, housekeeping=False, policy_timeout_s=MOMENT_S, **settings) as app:
        told = telling(app, "policy")
        fake.hang = asyncio.Event()
        assert await told("down", "down")
        fake.hang.set()
        fake.hang = None
        await until(lambda: told("healthy", "healthy"))


async def test_a_policy_engine_that_may_take_longer_than_readiness_waits_is_degraded(
    home: Path, http: FakeHttpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dependencies, "ASK_S", MOMENT_S)
    async with Interlock.open(
        home, housekeeping=False, policy_engine="remote", policy_url=http.url, policy_timeout_s=30
    ) as app:
        http.hang = asyncio.Event()
        assert await telling(app, "policy")("degraded", "degraded")


@pytest.fixture
def vault(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("VAULT_TOKEN", TOKEN)
    made = FakeVault()
    yield made
    made.close()


async def test_a_vault_that_gives_no_credentials_is_told_and_calls_are_served(
    home: Path, vault: FakeVault, caplog: pytest.LogCaptureFixture, closed_port: Callable[[], int]
) -> None:
    async with Interlock.open(home, housekeeping=False, secrets="vault", vault_url=vault.address) as app:
        await app.add(sample.add)
        told = telling(app, "vault")
        assert await told("healthy", "healthy")
        assert TOKEN not in vault.tokens_seen  # readiness needs no token, and shows none
        for status, condition in ((429, "healthy"), (473, "healthy"), (503, "down"), (501, "down"), (472, "down")):
            vault.sealed = status
            assert await told("healthy" if condition == "healthy" else "degraded", condition), status
        assert (await app.call("demo.add", a=1)).ok
        vault.sealed = 200
        assert await told("healthy", "healthy")
        assert [line.getMessage() for line in caplog.records if line.name == "interlock.readiness"] == [
            "readiness: vault is down: the vault answers 503, so it gives no credentials",
            "readiness: vault is healthy again",
        ]
        assert vault.address not in json.dumps(await Health(app).readiness())
    silent = f"http://127.0.0.1:{closed_port()}"
    async with Interlock.open(home, housekeeping=False, secrets="vault", vault_url=silent) as app:
        assert await telling(app, "vault")("degraded", "down")


async def test_a_vault_without_a_token_is_told(home: Path, vault: FakeVault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VAULT_TOKEN")
    async with Interlock.open(home, housekeeping=False, secrets="vault", vault_url=vault.address) as app:
        assert await telling(app, "vault")("degraded", "down")


def key_set() -> bytes:
    public = base64.urlsafe_b64encode(Ed25519PrivateKey.generate().public_key().public_bytes_raw()).decode().rstrip("=")
    return json.dumps({"keys": [{"kty": "OKP", "crv": "Ed25519", "x": public, "kid": "k1", "alg": "EdDSA"}]}).encode()


def issuer(name: str, jwks: str) -> Json:
    return {"iss": f"https://{name}.example", "audience": "interlock", "algorithms": ["EdDSA"], "jwks": jwks}


async def test_issuers_whose_keys_cannot_be_had_are_told(
    home: Path, tmp_path: Path, closed_port: Callable[[], int]
) -> None:
    files = [tmp_path / f"{name}.json" for name in "ab"]
    for file in files:
        file.write_bytes(key_set())
    entries = tuple(issuer(file.stem, str(file)) for file in files)
    async with Interlock.open(home, housekeeping=False, trusted_issuers=entries) as app:
        told = telling(app, "issuers")
        assert await told("healthy", "healthy")
        files[0].unlink()
        assert await told("degraded", "degraded")
        files[1].write_text("{")
        assert await told("degraded", "down")
        for file in files:
            file.write_bytes(key_set())
        assert await told("healthy", "healthy")
    silent = issuer("c", f"https://127.0.0.1:{closed_port()}/jwks")
    async with Interlock.open(home, housekeeping=False, trusted_issuers=(silent,)) as app:
        assert await telling(app, "issuers")("degraded", "down")


async def test_a_path_of_keys_is_of_the_data_directory_and_else_of_the_working_directory(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working = tmp_path / "working"
    working.mkdir()
    monkeypatch.chdir(working)

    async def told() -> str:
        async with Interlock.open(home, housekeeping=False, trusted_issuers=(issuer("a", "a.json"),)) as app:
            return (await Health(app).ready())[1]["issuers"]

    assert await told() == "down"
    (working / "a.json").write_bytes(key_set())
    assert await told() == "healthy"
    (home / "a.json").write_text("{")
    assert await told() == "down"
    (home / "a.json").write_bytes(key_set())
    (working / "a.json").unlink()
    assert await told() == "healthy"


async def test_keys_of_an_issuer_that_stay_in_force_without_it_are_told_as_old() -> None:
    clock = FakeClock()
    async with HttpServer.open() as server:
        server.otherwise = lambda _: Answer(200, body=key_set())
        entry = TrustedIssuer.read(issuer("a", f"{server.url}/jwks"))
        trusted = TrustedIssuers([entry], clock=clock.clock, loopback_http=True)
        assert await trusted.current(entry.iss)
        server.otherwise = lambda _: Answer(500)
        clock.advance(200)
        assert await trusted.current(entry.iss)
        clock.advance(200)
        assert not await trusted.current(entry.iss)
        clock.advance(3600)
        with pytest.raises(Failure, match="answers 500"):
            await trusted.current(entry.iss)


async def test_a_collector_that_takes_no_spans_is_told_and_calls_are_served(
    home: Path, closed_port: Callable[[], int]
) -> None:
    async with (
        HttpServer.open() as collector,
        Interlock.open(home, housekeeping=False, otlp_endpoint=collector.url) as app,
    ):
        await app.add(sample.add)
        told = telling(app, "traces")
        collector.otherwise = lambda _: Answer(200)
        assert await told("healthy", "healthy")
        collector.otherwise = lambda _: Answer(400)
        assert (await app.call("demo.add", a=1)).ok
        await until(lambda: told("degraded", "degraded"))
    async with Interlock.open(home, housekeeping=False, otlp_endpoint=f"http://127.0.0.1:{closed_port()}") as app:
        assert await telling(app, "traces")("degraded", "down")


async def test_what_no_setting_names_is_not_told(home: Path) -> None:
    async with Interlock.open(home, housekeeping=False) as app:
        parts = (await Health(app).ready())[1]
    assert not {"vault", "issuers", "archive", "traces"} & parts.keys()
    assert parts["policy"] == "healthy"


async def test_many_who_ask_for_readiness_ask_a_dependency_once(
    home: Path, http: FakeHttpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    settings: Json = {"policy_engine": "remote", "policy_url": http.url, "policy_timeout_s": 30}
    async with (
        place(home, LOOPBACK, clock=FakeClock().clock, **settings) as here,
        httpx.AsyncClient(base_url=here.base, timeout=60) as client,
    ):
        answers = await asyncio.gather(*(client.get("/ready") for _ in range(20)))
        assert {one.status_code for one in answers} == {200}
        assert {one.json()["dependencies"]["policy"] for one in answers} == {"healthy"}
        assert len(http.asked) == 1

"""Vault as a source of credentials, over a FAKE of its HTTP API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from interlock import Failure
from interlock.authority.secrets import open_lease
from interlock.authority.vault import Vault
from interlock.net.outgoing import Unanswered
from interlock.privacy.scrub import scrub
from interlock.testing import FakeClock
from tests.support.fake_vault import TOKEN, FakeVault

PATH = "secret/data/interlock/github/token"


@pytest.fixture
def fake() -> Iterator[FakeVault]:
    vault = FakeVault()
    yield vault
    vault.close()


@pytest.fixture
def time() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def source(fake: FakeVault, time: FakeClock, tmp_path: Path) -> AsyncGenerator[Vault]:
    (tmp_path / "token").write_text(TOKEN + "\n")
    opened = Vault(
        fake.address,
        clock=time.clock,
        token_file=tmp_path / "token",
        prefix="interlock",
        issued={"db/reader": "database/creds/reader", "db/void": "void"},
        timeout_s=10,
    )
    yield opened
    await opened.close()


async def test_a_value_comes_from_below_the_mount_and_prefix_with_its_version(fake: FakeVault, source: Vault) -> None:
    fake.put(PATH, value="ghp_first", owner="not a credential")
    fake.put(PATH, value="ghp_second")
    credential = await source.fetch("github/token")
    assert (credential.reveal(), credential.slot, credential.version) == ("ghp_second", "main", "2")


@pytest.mark.proves("EXEC-07")
async def test_a_new_value_reaches_the_next_call_and_no_running_one(
    fake: FakeVault, source: Vault, time: FakeClock
) -> None:
    fake.put(PATH, value="ghp_first")
    running = await open_lease(source, ["github/token"], lifetime_s=30, clock=time.clock)
    fake.put(PATH, value="ghp_second")
    following = await open_lease(source, ["github/token"], lifetime_s=30, clock=time.clock)
    assert running["github/token"].reveal() == "ghp_first"
    assert following["github/token"].reveal() == "ghp_second"
    await running.close()
    await following.close()


def _sealed(fake: FakeVault) -> None:
    fake.fails = (503, "Vault is sealed")


def _refusing(fake: FakeVault) -> None:
    fake.fails = (403, "permission denied")


def _broken(fake: FakeVault) -> None:
    fake.fails = (500, "internal error")


def _limited(fake: FakeVault) -> None:
    fake.fails = (429, "request rate limit exceeded")


def _absent(fake: FakeVault) -> None:
    del fake.secrets[PATH]


def _deleted(fake: FakeVault) -> None:
    fake.delete(PATH)


def _without_value(fake: FakeVault) -> None:
    fake.put(PATH, username="somebody")


def _expired(fake: FakeVault) -> None:
    fake.put(PATH, value="ghp_old", expires="2020-01-31")


def _no_time(fake: FakeVault) -> None:
    fake.put(PATH, value="ghp_old", expires="soon")


def _undecryptable(fake: FakeVault) -> None:
    fake.fails = (500, "failed to decrypt: cipher: message authentication failed")


def _no_text(fake: FakeVault) -> None:
    fake.put(PATH, value={"nested": True})


@pytest.mark.supports("EXEC-08")
@pytest.mark.parametrize(
    ("arrange", "code"),
    [
        (_sealed, "E3601"),
        (_refusing, "E3601"),
        (_broken, "E3601"),
        (_limited, "E3601"),
        (FakeVault.close, "E3601"),
        (_absent, "E3602"),
        (_deleted, "E3602"),
        (_without_value, "E3602"),
        (_expired, "E3603"),
        (_no_time, "E3603"),
        (_undecryptable, "E3604"),
        (_no_text, "E3604"),
    ],
)
async def test_each_way_to_fail_has_its_code_and_names_the_credential(
    arrange: Callable[[FakeVault], None], code: str, fake: FakeVault, source: Vault
) -> None:
    fake.put(PATH, value="ghp_secret_value")
    arrange(fake)
    with pytest.raises(Failure) as caught:
        await source.fetch("github/token")
    assert caught.value.code == code
    assert "ghp_" not in str(caught.value)
    assert TOKEN not in repr(caught.value)
    assert "`github/token`" in caught.value.message
    cause = caught.value.__context__
    assert not isinstance(cause, OSError | Unanswered), "it could hold the request with its token"


async def test_a_planned_deletion_bounds_a_credentials_life(fake: FakeVault, source: Vault, time: FakeClock) -> None:
    fake.put(PATH, value="ghp_short", deletion_time="2027-01-15T08:01:00.986212308Z", expires="2027-02-01T00:00:00Z")
    credential = await source.fetch("github/token")
    assert credential.reveal() == "ghp_short"
    time.advance(61)
    with pytest.raises(Failure) as caught:
        credential.reveal()
    assert caught.value.code == "E3603"


@pytest.mark.supports("EXEC-08")
async def test_a_rate_limited_slot_rests_and_the_next_one_serves(
    fake: FakeVault, source: Vault, time: FakeClock
) -> None:
    fake.put(PATH, **{"value": "ghp_main", "value-spare": "ghp_spare"})
    lease = await open_lease(source, ["github/token"], lifetime_s=30, clock=time.clock)
    await lease.rate_limited("github/token", 5000)
    assert (await source.fetch("github/token")).reveal() == "ghp_spare"
    await source.rest("github/token", "spare", 9000)
    with pytest.raises(Failure) as caught:
        await source.fetch("github/token")
    assert (caught.value.code, caught.value.retry_after_ms) == ("E3504", 5000)
    time.advance(5)
    assert (await source.fetch("github/token")).slot == "main"
    await lease.close()


@pytest.mark.proves("EXEC-07")
async def test_an_issued_credential_is_refused_by_its_service_once_the_call_has_ended(
    fake: FakeVault, source: Vault, time: FakeClock
) -> None:
    async with httpx.AsyncClient(base_url=fake.address, trust_env=False, timeout=60) as service:

        async def use(password: str) -> int:
            return (await service.get("/service", headers={"X-Credential": password})).status_code

        lease = await open_lease(source, ["db/reader"], lifetime_s=30, clock=time.clock)
        assert lease["db/reader"].reveal() == '{"username":"v-reader-1","password":"issued-password-1"}'
        assert await use("issued-password-1") == 200
        assert scrub({"dsn": "pg://v-reader-1:issued-password-1@db"}, lease.values()) == (
            {"dsn": "pg://[REDACTED]:[REDACTED]@db"},
            True,
        )
        await lease.close()
        assert await use("issued-password-1") == 401
    with pytest.raises(Failure) as caught:
        lease["db/reader"].reveal()
    assert caught.value.code == "E3603"


@pytest.mark.proves("EXEC-07")
@pytest.mark.parametrize(
    ("arrange", "lasts_s"),
    [
        ({"lease_duration": 600}, 30.0),
        ({"lease_duration": 10}, 30.0),
        ({"lease_duration": 10, "longest_s": 20}, 20.0),
        ({"lease_duration": 10, "renewable": False}, 10.0),
        ({"lease_duration": 10, "renews": False}, 10.0),
        ({"lease_duration": 600, "renewable": False}, 30.0),
    ],
    ids=["a long term", "a short term", "as the role allows", "not renewable", "may not renew", "long, not renewable"],
)
async def test_an_issued_credential_lasts_as_long_as_the_call_may_take_and_never_past_its_lease(
    arrange: dict[str, Any], lasts_s: float, fake: FakeVault, source: Vault, time: FakeClock
) -> None:
    for name, value in arrange.items():
        setattr(fake, name, value)
    lease = await open_lease(source, ["db/reader"], lifetime_s=29.5, clock=time.clock)
    (term,) = fake.terms.values()
    # What Vault is left with is no longer than the call either, also if nobody comes to revoke it.
    assert term == (30 if lasts_s == 30 and fake.renewable else min(lasts_s, 600) if lasts_s < 30 else 600)
    time.advance(min(lasts_s, 29.5) - 0.001)
    assert "issued-password-1" in lease["db/reader"].reveal()
    time.now_ms -= 3_600_000  # a wall clock that is set back gives nobody more time
    time.advance(0.001)
    with pytest.raises(Failure) as caught:
        lease["db/reader"].reveal()
    assert caught.value.code == "E3603"
    await lease.close()
    assert fake.leases == {}


async def test_what_is_issued_to_a_cancelled_call_is_revoked_when_it_arrives(fake: FakeVault, source: Vault) -> None:
    fake.gate.clear()
    fetching = asyncio.create_task(source.fetch("db/reader"))
    assert await asyncio.to_thread(fake.reached.wait, 10)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    fake.gate.set()
    assert await asyncio.to_thread(fake.revoked.wait, 10)
    assert fake.leases == {}


async def test_when_the_second_credential_cannot_be_had_the_first_is_revoked(
    fake: FakeVault, source: Vault, time: FakeClock
) -> None:
    with pytest.raises(Failure) as caught:
        await open_lease(source, ["db/reader", "github/token"], lifetime_s=30, clock=time.clock)
    assert caught.value.code == "E3602"
    assert fake.leases == {}


async def test_a_credential_that_is_named_twice_is_issued_once(fake: FakeVault, source: Vault, time: FakeClock) -> None:
    lease = await open_lease(source, ["db/reader", "db/reader"], lifetime_s=30, clock=time.clock)
    assert len(fake.leases) == 1
    await lease.close()
    assert fake.leases == {}


@pytest.mark.parametrize(
    ("name", "duration", "code"),
    [
        ("db/void", 60, "E3602"),
        ("db/reader", 0, "E3603"),
        ("db/reader", -5, "E3603"),
        ("db/reader", "an hour", "E3603"),
    ],
)
async def test_what_is_not_issued_or_issued_void_is_not_lent(
    name: str, duration: Any, code: str, fake: FakeVault, source: Vault
) -> None:
    fake.lease_duration = duration
    with pytest.raises(Failure) as caught:
        await source.fetch(name)
    assert caught.value.code == code
    assert fake.leases == {}


async def test_an_issuer_that_cannot_revoke_does_not_fail_the_call(
    fake: FakeVault, source: Vault, time: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    lease = await open_lease(source, ["db/reader"], lifetime_s=30, clock=time.clock)
    _sealed(fake)
    await lease.close()
    assert "db/reader could not be revoked" in caplog.text
    assert "issued-password" not in caplog.text


async def test_the_token_is_read_each_time_and_its_absence_is_said(
    fake: FakeVault, source: Vault, tmp_path: Path
) -> None:
    fake.put(PATH, value="ghp_value")
    (tmp_path / "token").write_text("hvs.renewed")
    with pytest.raises(Failure) as refused:
        await source.fetch("github/token")
    (tmp_path / "token").unlink()
    with pytest.raises(Failure) as missing:
        await source.fetch("github/token")
    assert refused.value.code == missing.value.code == "E3601"
    assert "no token for the vault in the file `token`" in missing.value.message
    assert fake.tokens_seen == ["hvs.renewed"]


async def test_the_token_can_come_from_a_variable(
    fake: FakeVault, time: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_VAULT_TOKEN", TOKEN)
    fake.put("kv/data/github/token", value="ghp_value")
    source = Vault(fake.address, clock=time.clock, token_variable="MY_VAULT_TOKEN", mount="kv")
    try:
        assert (await source.fetch("github/token")).reveal() == "ghp_value"
    finally:
        await source.close()


async def test_the_token_does_not_follow_a_redirect(fake: FakeVault, source: Vault) -> None:
    elsewhere = FakeVault()
    try:
        fake.redirect_to = elsewhere.address
        with pytest.raises(Failure) as caught:
            await source.fetch("github/token")
        assert caught.value.code == "E3601"
        assert elsewhere.tokens_seen == []
    finally:
        elsewhere.close()


@pytest.mark.parametrize("address", ["http://vault.example:8200", "vault.example", "ftp://127.0.0.1"])
def test_an_address_over_which_the_token_could_be_read_is_refused(address: str, time: FakeClock) -> None:
    with pytest.raises(Failure) as caught:
        Vault(address, clock=time.clock)
    assert caught.value.code == "E3108"


@pytest.mark.parametrize("name", ["../sys/seal", "a/../../b", "A", "", "a//b", "a?version=1", "a/"])
async def test_a_name_cannot_lead_out_of_the_prefix(name: str, fake: FakeVault, source: Vault) -> None:
    with pytest.raises(Failure) as caught:
        await source.fetch(name)
    assert caught.value.code == "E3004"
    assert fake.tokens_seen == []


async def test_connections_are_kept_and_bounded(fake: FakeVault, source: Vault) -> None:
    fake.put(PATH, value="ghp_value")
    for _ in range(3):
        await asyncio.gather(*(source.fetch("github/token") for _ in range(10)))
    assert 1 <= fake.connections <= 4


async def test_the_token_does_not_go_to_a_proxy_of_the_environment(
    fake: FakeVault, source: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = FakeVault()
    try:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.address)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        fake.put(PATH, value="ghp_direct")
        assert (await source.fetch("github/token")).reveal() == "ghp_direct"
        assert (proxy.tokens_seen, proxy.connections) == ([], 0)
    finally:
        proxy.close()

"""Webhooks: signed so that receivers can tell, sent to nobody they should not be, and honest about what came of it."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.approvals.webhook import Webhooks, read_secret, sign, verify
from interlock.core.errors import Failure
from interlock.testing import FakeClock
from tests.support.webhooks import OLDER, SECRET, Answer, Names, Receiver


class Wire:
    """A stand-in for the internet: every address leads to the receiver, and we see which was asked for."""

    def __init__(self, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dialled: list[str] = []
        self._receiver = receiver
        loop = asyncio.get_running_loop()
        self._dial = loop.create_connection
        monkeypatch.setattr(loop, "create_connection", self._connect)

    async def _connect(self, protocol: Callable[[], asyncio.Protocol], host: str, _: int, **named: Any) -> Any:
        self.dialled.append(host)
        return await self._dial(protocol, "127.0.0.1", self._receiver.port, **named)


@asynccontextmanager
async def sender(**options: Any) -> AsyncGenerator[Webhooks]:
    webhooks = Webhooks(FakeClock().clock, **options)
    try:
        yield webhooks
    finally:
        await webhooks.close()


# Signatures


@given(st.binary(max_size=200), st.text(st.characters(codec="ascii", exclude_characters=" ."), min_size=1))
def test_what_was_signed_verifies_and_what_was_changed_does_not(body: bytes, message_id: str) -> None:
    headers = sign([SECRET], message_id, 1_800_000_000, body)
    verify(headers, body, SECRET, 1_800_000_000)
    verify({name.title(): value for name, value in headers.items()}, body, SECRET, 1_800_000_299)
    changed = (
        (headers, body + b" ", SECRET),
        ({**headers, "webhook-id": message_id + "x"}, body, SECRET),
        ({**headers, "webhook-timestamp": "1800000001"}, body, SECRET),
        ({**headers, "webhook-signature": headers["webhook-signature"].replace("v1,", "v2,")}, body, SECRET),
        ({**headers, "webhook-signature": ""}, body, SECRET),
        (headers, body, OLDER),
    )
    for their_headers, their_body, secret in changed:
        with pytest.raises(Failure) as refused:
            verify(their_headers, their_body, secret, 1_800_000_000)
        assert refused.value.code == "E3202"


def test_the_example_of_the_standard_is_signed_as_the_standard_says() -> None:
    headers = sign(
        ["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
    )
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_while_a_secret_is_changed_the_old_and_the_new_both_verify() -> None:
    headers = sign([SECRET, OLDER], "m", 1_800_000_000, b"{}")
    assert len(headers["webhook-signature"].split()) == 2
    verify(headers, b"{}", SECRET, 1_800_000_000)
    verify(headers, b"{}", OLDER, 1_800_000_000)


@pytest.mark.parametrize("late_s", [301, -301, 10**9])
def test_an_old_request_cannot_be_sent_again(late_s: int) -> None:
    headers = sign([SECRET], "m", 1_800_000_000, b"{}")
    with pytest.raises(Failure) as refused:
        verify(headers, b"{}", SECRET, 1_800_000_000 + late_s)
    assert refused.value.code == "E3201"


@pytest.mark.parametrize("headers", [{}, {"webhook-id": "m", "webhook-timestamp": "soon", "webhook-signature": "v1,x"}])
def test_headers_that_cannot_be_read_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(Failure) as refused:
        verify(headers, b"{}", SECRET, 0)
    assert refused.value.code == "E3203"


@pytest.mark.parametrize("secret", ["", "password", "whsec_", "whsec_c2hvcnQ=", "whsec_" + "A" * 200, "whsec_ÄÖÜ"])
def test_a_weak_or_mistyped_secret_is_refused_and_not_repeated(secret: str) -> None:
    with pytest.raises(Failure) as refused:
        read_secret(secret)
    assert refused.value.code == "E3604"
    assert not secret or secret == "whsec_" or secret not in refused.value.message


# Sending


async def test_a_request_arrives_signed_over_a_connection_that_is_used_again() -> None:
    async with Receiver.open() as receiver, sender() as webhooks:
        for number in range(3):
            outcome = await webhooks.send(receiver.url, b'{"a":1}', [SECRET], f"m{number}", allow_private=True)
            assert outcome.result == "sent"
        assert receiver.connections == 1
        got = receiver.got[0]
        assert (got.path, got.body, got.headers["webhook-id"]) == ("/hook/s3cr3t-path", b'{"a":1}', "m0")
        assert got.headers["host"] == f"127.0.0.1:{receiver.port}"
        verify(got.headers, got.body, SECRET, 1_800_000_000)


@pytest.mark.parametrize(
    ("status", "headers", "result", "wait_ms"),
    [
        (200, "", "sent", 0), (202, "", "sent", 0), (299, "", "sent", 0),
        (302, "location: http://127.0.0.1/\r\n", "failed", 0), (400, "", "failed", 0), (404, "", "failed", 0),
        (410, "", "failed", 0), (500, "", "retry", 0), (503, "retry-after: 30\r\n", "retry", 30_000),
        (429, "Retry-After: 7\r\n", "retry", 7_000), (429, "retry-after: soon\r\n", "retry", 0),
        (429, "retry-after: Fri, 15 Jan 2027 08:01:00 GMT\r\n", "retry", 60_000),
        (429, "retry-after: Fri, 15 Jan 1999 08:01:00 GMT\r\n", "retry", 0),
        (429, "retry-after: " + "9" * 5000 + "\r\n", "retry", 24 * 3600 * 1000),
    ],
)  # fmt: skip
async def test_what_a_status_means(status: int, headers: str, result: str, wait_ms: int) -> None:
    async with Receiver.open() as receiver, sender() as webhooks:
        receiver.answers = [Answer(status, headers)]
        outcome = await webhooks.send(receiver.url, b"{}", [SECRET], "m", allow_private=True)
        assert (outcome.result, outcome.wait_ms, outcome.gone) == (result, wait_ms, status == 410)
        assert len(receiver.got) == 1, "redirects are not followed"
        assert "s3cr3t" not in outcome.error


async def test_a_long_answer_is_not_read_to_its_end() -> None:
    async with Receiver.open() as receiver, sender() as webhooks:
        receiver.answers = [Answer(200, "", b"x" * 5_000_000)]
        for _ in range(2):
            assert (await webhooks.send(receiver.url, b"{}", [SECRET], "m", allow_private=True)).result == "sent"
        assert receiver.connections == 2, "the connection was let go of"


async def test_a_receiver_that_is_not_there_or_speaks_something_else_is_tried_again() -> None:
    async with Receiver.open() as receiver, sender() as webhooks:
        receiver.answers = [Answer(headers="no colon here\r\n")]
        outcome = await webhooks.send(receiver.url, b"{}", [SECRET], "m", allow_private=True)
        assert (outcome.result, outcome.error) == ("retry", "E3704 the receiver cannot be reached")
        url = receiver.url
    async with sender() as webhooks:
        outcome = await webhooks.send(url, b"{}", [SECRET], "m", allow_private=True)
        assert (outcome.result, outcome.error) == ("retry", "E3704 the receiver cannot be reached")


# Where to


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "127.1"])
async def test_this_machine_is_not_reached_unless_an_operator_allows_it(host: str) -> None:
    async with Receiver.open() as receiver, sender() as webhooks:
        with pytest.raises(Failure) as refused:
            await webhooks.send(f"http://{host}:{receiver.port}/", b"{}", [SECRET], "m")
        assert refused.value.code == "E3406"
        assert receiver.connections == 0


async def test_a_name_that_changes_its_mind_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(["93.184.216.34"], ["127.0.0.1"])
    async with Receiver.open() as receiver:
        wire = Wire(receiver, monkeypatch)
        receiver.answers = [Answer(200, "connection: close\r\n")]
        async with sender(resolve=names) as webhooks:
            first = await webhooks.send("http://rebind.example.com/", b"{}", [SECRET], "m")
            assert (first.result, names.asked, wire.dialled) == ("sent", 1, ["93.184.216.34"])
            assert receiver.got[0].headers["host"] == "rebind.example.com"
            with pytest.raises(Failure) as refused:
                await webhooks.send("http://rebind.example.com/", b"{}", [SECRET], "m")
            assert (refused.value.code, wire.dialled) == ("E3406", ["93.184.216.34"])


async def test_when_one_address_does_not_answer_the_next_is_tried() -> None:
    async with Receiver.open() as receiver, sender(resolve=Names(["127.0.0.2", "127.0.0.1"])) as webhooks:
        url = f"http://two.example.com:{receiver.port}/"
        assert (await webhooks.send(url, b"{}", [SECRET], "m", allow_private=True)).result == "sent"
        assert receiver.got[0].headers["host"] == f"two.example.com:{receiver.port}"


def _certificate(path: Path, name: str) -> ssl.SSLContext:
    """A server's TLS for a name, vouched for by itself; the certificate is left in `path`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    began = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(began)
        .not_valid_after(began + datetime.timedelta(days=9))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context


async def test_tls_is_checked_for_the_name_although_the_connection_goes_to_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = _certificate(tmp_path / "server.pem", "hooks.example.com")
    trust = ssl.create_default_context(cafile=str(tmp_path / "server.pem"))
    async with Receiver.open(tls) as receiver:
        wire = Wire(receiver, monkeypatch)
        async with sender(resolve=Names(["93.184.216.34"]), ssl_context=trust) as webhooks:
            right = await webhooks.send("https://hooks.example.com/", b"{}", [SECRET], "m")
            wrong = await webhooks.send("https://other.example.com/", b"{}", [SECRET], "m")
        assert (right.result, wrong.result) == ("sent", "retry")
        assert [got.headers["host"] for got in receiver.got] == ["hooks.example.com"]
        assert wire.dialled == ["93.184.216.34"] * 2, "names do not share a connection"

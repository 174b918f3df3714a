"""Tunnels through the proxy: TLS for the host they were opened for, seen to be so, and nothing else."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from interlock.executors.egress import Limits
from interlock.executors.egress.hello import DENIED
from interlock.executors.egress.proxy import Streams
from tests.egress.world import PUBLIC, SOON, World, becomes, both, world
from tests.needs import need
from tests.support.hellos import client_hello, in_records, with_extension

CONNECT = b"CONNECT api.example.com:443 HTTP/1.1\r\nHost: api.example.com:443\r\n\r\n"
HELLO = client_hello("api.example.com")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a certificate for the servers behind the proxy, signed by an authority made for it."""
    place = tmp_path_factory.mktemp("authority")
    now = datetime.datetime.now(datetime.UTC)
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("ca", "server")}
    names = {key: x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, key)]) for key in keys}
    hosts = x509.SubjectAlternativeName([x509.DNSName("api.example.com"), x509.DNSName("*.b.example.org")])
    for name, extension in (("ca", x509.BasicConstraints(ca=True, path_length=None)), ("server", hosts)):
        certificate = (
            x509.CertificateBuilder()
            .subject_name(names[name])
            .issuer_name(names["ca"])
            .public_key(keys[name].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(extension, critical=name == "ca")
            .sign(keys["ca"], hashes.SHA256())
        )
        (place / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (place / "key.pem").write_bytes(
        keys["server"].private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return place


@pytest.fixture
def server_side(authority: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "server.pem", authority / "key.pem")
    return context


@pytest.fixture
def client_side(authority: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority / "ca.pem"))


@pytest.mark.proves("EXEC-06")
async def test_a_real_client_speaks_tls_with_the_host_it_named(
    server_side: ssl.SSLContext, client_side: ssl.SSLContext
) -> None:
    async with world(tls=server_side) as there, there.client(verify=client_side) as client:
        assert (await client.get("https://api.example.com/")).text == "ok"
        answer = await client.post("https://A.b.example.org/big", content=b"x" * 200_000)
        assert len(answer.content) == 1_000_000
        assert there.dialled == [(PUBLIC, 443)] * 2
        await client.aclose()
        seen = there.egress.requests
        assert [(one.method, one.host, one.port, one.status, one.safe) for one in seen] == [
            ("CONNECT", "api.example.com", 443, 200, None),
            ("CONNECT", "a.b.example.org", 443, 200, None),
        ]
        assert seen[1].bytes_out > 200_000
        assert seen[1].bytes_in > 1_000_000
        with pytest.raises(httpx.ProxyError):
            await there.client(verify=client_side).get("https://evil.example/")


async def test_curl_reaches_a_listed_host_and_no_other(authority: Path, server_side: ssl.SSLContext) -> None:
    need("curl", "curl")
    async with world(tls=server_side) as there:
        for url, status in (("https://api.example.com/", 0), ("https://evil.example/", 56), ("https://127.0.0.1/", 56)):
            curl = await asyncio.create_subprocess_exec(
                "curl", "-sS", "-x", there.proxy, "--cacert", str(authority / "ca.pem"), url,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            printed, _ = await curl.communicate()
            assert (curl.returncode, printed) == (status, b"" if status else b"ok")
        assert there.dialled == [(PUBLIC, 443)]


def _ech(hello: bytes) -> bytes:
    return with_extension(hello, b"\xfe\x0d\x00\x04\x00\x01\x02\x03")


NOT_FOR_IT = {
    "another name": client_hello("evil.example"),
    "a name below": client_hello("x.api.example.com"),
    "no name": client_hello(None),
    "an encrypted hello": _ech(HELLO),
    "a second name": with_extension(HELLO, b"\x00\x00\x00\x11\x00\x0f\x00\x00\x0cevil.example"),
    "plain HTTP": b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "mail": b"EHLO evil.example\r\n",
    "an alert": DENIED,
    "crumbs": in_records(HELLO, *[1] * 50),
    "half a hello": HELLO[:100],
    "a hello of 16 MB": b"\x16\x03\x01\x40\x00\x01\xff\xff\xff" + b"\x00" * 40_000,
}


@pytest.mark.proves("EXEC-06")
@pytest.mark.parametrize("said", NOT_FOR_IT.values(), ids=NOT_FOR_IT.keys())
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_tunnel_used_for_anything_else_is_cut_before_a_byte_leaves(said: bytes, at_once: bool) -> None:
    async with world() as there:
        if at_once:
            answer = await there.say(CONNECT + said)
        else:
            answer = await _after_the_200(there, said)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(DENIED)
        assert there.secure.heard in ([], [b""])
        (refusal,) = there.egress.refusals
        assert (refusal.host, refusal.port, refusal.method) == ("api.example.com", 443, "CONNECT")
        assert there.egress.requests[0].bytes_out == 0


async def _after_the_200(there: World, said: bytes) -> bytes:
    async with asyncio.timeout(SOON):
        reader, writer = await there.connect()
        try:
            writer.write(CONNECT)
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(said)
            writer.write_eof()
            return head + await reader.read()
        finally:
            writer.transport.abort()


@pytest.mark.parametrize("cut", [1, 3, 5, 60, len(HELLO) - 1])
async def test_a_hello_may_come_in_pieces_and_is_passed_on_as_it_came(cut: int) -> None:
    async with world() as there:
        reader, writer = await there.connect()
        writer.write(CONNECT + HELLO[:cut])
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HELLO[cut:] + b"and more\r\n\r\n")
        await becomes(lambda: there.egress.requests[0].bytes_out >= len(HELLO))
        writer.write_eof()
        async with asyncio.timeout(SOON):
            assert await reader.read() == b""
        writer.transport.abort()
        assert there.secure.heard == [HELLO + b"and more\r\n\r\n"]


async def test_a_tunnel_that_is_never_used_is_no_violation() -> None:
    async with world(limits=Limits(head_s=0.5, farewell_s=0.1)) as there:
        assert (await there.say(CONNECT)).startswith(b"HTTP/1.1 200 ")
        assert (await there.say(CONNECT, half_close=False)).startswith(b"HTTP/1.1 200 ")
        assert there.egress.refusals == []


@pytest.mark.parametrize(("name", "refused"), [(None, 0), ("api.example.com", 1)])
async def test_a_listed_address_is_reached_without_a_name_and_under_no_other(name: str | None, refused: int) -> None:
    async with world(both(PUBLIC)) as there:
        await there.say(CONNECT.replace(b"api.example.com", PUBLIC.encode()) + client_hello(name))
        assert there.egress.refused == refused
        assert there.dialled == [(PUBLIC, 443)]
        assert (there.egress.requests[0].bytes_out == 0) == bool(refused)


async def test_the_end_of_one_direction_is_passed_on_and_the_other_goes_on() -> None:
    """The upstream answers only after it has heard the end of what is sent."""

    async def answer_at_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"%d bytes" % len(await reader.read()))
        writer.write_eof()
        writer.close()

    async with world() as there:
        server = await asyncio.start_server(answer_at_the_end, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]

        async def dial(_address: str, _port: int) -> Streams:
            return await asyncio.open_connection("127.0.0.1", port)

        there.egress.dial = dial
        assert (await there.say(CONNECT + HELLO + b"x" * 1000)).endswith(b"%d bytes" % (len(HELLO) + 1000))
        server.close()

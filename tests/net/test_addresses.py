"""Connections go to public addresses that were checked, however an address is written, whatever a name says later."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.core.errors import Failure
from interlock.net.addresses import checked, parse, reach

NOT_PUBLIC_4 = (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4",
    "240.0.0.0/4", "168.63.129.16/32",
)  # fmt: skip
NOT_PUBLIC_6 = (
    "::/128", "::1/128", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8", "2001:db8::/32", "2001::/32", "2002::/16",
    "64:ff9b:1::/48", "100::/64", "fd00:ec2::254/128",
)  # fmt: skip

not_public_4 = st.sampled_from(NOT_PUBLIC_4).flatmap(lambda network: st.ip_addresses(v=4, network=network))
not_public_6 = st.sampled_from(NOT_PUBLIC_6).flatmap(lambda network: st.ip_addresses(v=6, network=network))


def _part(number: int, base: str) -> str:
    return {"decimal": str(number), "hex": hex(number), "octal": f"0{number:o}"}[base]


WIDE = {ord("."): "。", **{ord("0") + digit: chr(0xFF10 + digit) for digit in range(10)}}
bases = st.sampled_from(("decimal", "hex", "octal"))


@st.composite
def written(draw: st.DrawFn, address: ipaddress.IPv4Address) -> str:
    """An IPv4 address in one of the many forms that systems understand."""
    number = int(address)
    form = draw(st.sampled_from(("parts", "mapped", "mapped-hex", "nat64", "compatible", "6to4", "wide", "dot")))
    if form == "parts":  # a.b.c.d, a.b.C, a.B and A, each part in any base
        count = draw(st.integers(1, 4))
        parts = [number >> 24 - 8 * place & 0xFF for place in range(count - 1)]
        parts.append(number & (1 << 32 - 8 * (count - 1)) - 1)
        return ".".join(_part(part, draw(bases)) for part in parts)
    return {
        "mapped": f"::ffff:{address}",
        "mapped-hex": f"[::ffff:{number >> 16:x}:{number & 0xFFFF:x}]",
        "nat64": str(ipaddress.IPv6Address((0x64_FF9B << 96) + number)),
        "compatible": f"::{address}",
        "6to4": str(ipaddress.IPv6Address((0x2002 << 112) + (number << 80) + 1)),
        "wide": str(address).translate(WIDE),
        "dot": f"{address}.",
    }[form]


@given(st.data())
async def test_an_address_that_is_not_public_is_refused_in_every_form(data: st.DataObject) -> None:
    address = data.draw(not_public_4.map(lambda found: ipaddress.IPv4Address(int(found))))
    host = data.draw(written(address))

    async def never(name: str) -> Sequence[str]:
        raise AssertionError(f"{name} was taken for a name")

    with pytest.raises(Failure) as refused:
        await checked(host, resolve=never)
    assert refused.value.code == "E3406"


@given(not_public_6)
async def test_an_ipv6_address_that_is_not_public_is_refused(address: ipaddress.IPv6Address) -> None:
    for host in (str(address), address.exploded, f"[{address}]"):
        with pytest.raises(Failure) as refused:
            await checked(host)
        assert refused.value.code == "E3406"


@given(st.ip_addresses())
def test_what_is_not_refused_is_what_the_standard_library_calls_global(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    if reach(address) == "public":
        inner = getattr(address, "ipv4_mapped", None) or address
        assert inner.is_global or str(inner).startswith("64:ff9b::")
        assert not inner.is_multicast


@pytest.mark.parametrize(
    ("host", "canonical"),
    [
        ("8.8.8.8", "8.8.8.8"), ("0x08080808", "8.8.8.8"), ("[2606:4700::1111]", "2606:4700::1111"),
        ("64:ff9b::808:808", "64:ff9b::808:808"), ("1.1", "1.0.0.1"),
    ],
)  # fmt: skip
async def test_public_addresses_are_allowed_and_told_in_one_form(host: str, canonical: str) -> None:
    assert await checked(host) == (canonical,)


@pytest.mark.parametrize("host", ["127.0.0.1", "10.1.2.3", "::1", "fd12::1", "100.64.0.1", "::ffff:127.0.0.1"])
async def test_private_addresses_are_allowed_where_an_operator_says_so(host: str) -> None:
    assert len(await checked(host, allow_private=True)) == 1


@pytest.mark.parametrize(
    "host", ["169.254.169.254", "fd00:ec2::254", "100.100.100.200", "fe80::1%eth0", "0.0.0.0", "::", "224.0.0.1"]
)
async def test_metadata_services_are_refused_even_then(host: str) -> None:
    with pytest.raises(Failure) as refused:
        await checked(host, allow_private=True)
    assert refused.value.code == "E3406"


@pytest.mark.parametrize("host", ["example.com", "a", "1.2.3.4.5", "8.8.8.8 evil", "", "x.127.0.0.1.nip.io"])
def test_a_name_is_no_address(host: str) -> None:
    assert parse(host) is None


async def test_one_private_address_among_public_ones_is_enough_to_refuse_a_name() -> None:
    async def resolve(name: str) -> Sequence[str]:
        return ["93.184.216.34", "10.0.0.7"]

    with pytest.raises(Failure) as refused:
        await checked("mixed.example.com", resolve=resolve)
    assert refused.value.code == "E3406"


async def test_the_system_resolves_its_own_name_and_it_is_refused() -> None:
    with pytest.raises(Failure) as refused:
        await checked("localhost")
    assert refused.value.code == "E3406"
    assert "localhost" in refused.value.message

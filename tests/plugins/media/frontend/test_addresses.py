"""Which addresses are public, and how a host may be written."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.properties import properties
from pegboard.plugins.media.frontend.addresses import host_name, is_allowed_name, is_public

PUBLIC = ["1.1.1.1", "8.8.8.8", "93.184.215.14", "172.15.0.1", "172.32.0.1", "2606:4700::1111", "2a00:1450:4001::8a"]
INSIDE = [
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.8.9.1"),
    *("169.254.169.254", "169.254.170.2", "172.16.0.1", "172.31.255.255", "192.0.0.192", "192.0.2.1", "192.88.99.1"),
    *("192.168.1.1", "198.18.0.1", "198.51.100.7", "203.0.113.9", "224.0.0.1", "239.255.255.250", "240.0.0.1"),
    *("255.255.255.255", "168.63.129.16"),
    *("::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1"),
    *("100::1", "2001::1", "2001:10::1", "2001:20::1", "2001:db8::1", "2002:7f00:1::", "2002:808:808::1", "3fff::1"),
    *("5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "2606:4700::1111%eth0", "fec0::1", "ff02::1"),
]


@pytest.mark.parametrize("text", PUBLIC)
def test_public(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", INSIDE)
def test_not_public(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


@properties()
@given(st.ip_addresses(v=4))
def test_no_address_of_version_4_is_public_inside_of_one_of_version_6(inner: ipaddress.IPv4Address) -> None:
    number = int(inner)
    forms = [
        number,
        0xFFFF << 32 | number,
        int(ipaddress.IPv6Address("64:ff9b::")) | number,
        0x2002 << 112 | number << 80,
        0x20010000 << 96 | (number ^ 0xFFFFFFFF),
    ]
    assert not any(is_public(ipaddress.IPv6Address(one)) for one in forms)


@properties()
@given(st.ip_addresses())
def test_never_what_the_library_says_is_not_global(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    if not address.is_global or address.is_multicast:
        assert not is_public(address)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("Example.ORG", "example.org"),
        ("example.org.", "example.org"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("my_host", "my_host"),
        ("8.8.8.8", "8.8.8.8"),
        ("2606:4700:0:0::1111", "2606:4700::1111"),
        ("\uff11\uff12\uff17.0.0.1", "127.0.0.1"),
    ],
)
def test_hosts_are_read(host: str, name: str) -> None:
    assert host_name(host) == name


@pytest.mark.parametrize(
    "host",
    [
        *("", ".", "a..b", "-a.example", "a b", "a/b", "a%2eb", "a@b", "a" * 64 + ".example", "x." * 130 + "example"),
        *("2130706433", "017700000001", "0x7f000001", "0x7f.1", "127.1", "127.0.1", "0177.0.0.1", "127.0.0.01"),
        *("1.2.3.4.5", "256.1.1.1", "host.0x", "1.2.3", "::1%eth0", "fe80::1%25eth0", ":::", "1::2::3"),
    ],
)
def test_unusual_spellings_are_none(host: str) -> None:
    assert host_name(host) is None


def test_allowed_names() -> None:
    listed = ["Example.org", ".example.net"]
    names = ["example.org", "a.example.org", "example.net", "a.example.net", "a.b.example.net", "evilexample.net"]
    assert [is_allowed_name(one, listed) for one in names] == [True, False, False, True, True, False]
    assert is_allowed_name("anything.test", [])

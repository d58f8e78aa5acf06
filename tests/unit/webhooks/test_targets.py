"""Which URLs a webhook takes, and which addresses it may not connect to."""

from __future__ import annotations

import pytest

from millstream.errors import InvalidArgument
from millstream.webhooks.targets import is_public, parse_target


def test_a_url_is_taken_apart() -> None:
    target = parse_target("https://Example.com/a/b?token=x#part")
    assert target == (True, "example.com", 443, "/a/b?token=x", "example.com", "https://example.com/a/b?...")
    assert parse_target("http://[::1]:8080").authority == "[::1]:8080"
    assert parse_target("http://host:80/").authority == "host"
    assert parse_target("http://host?x").path == "/?x"


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("ftp://host/x", "starts with http"),
        ("file:///etc/passwd", "starts with http"),
        ("host/x", "starts with http"),
        ("", "printable ASCII"),
        ("http://", "not a host"),
        ("http:///x", "not a host"),
        ("http://user:password@host/", "put credentials into a header"),
        ("http://user@host/", "put credentials into a header"),
        ("http://host:99999/", "cannot be read"),
        ("http://host:0/", "not a host"),
        ("http://host:x/", "cannot be read"),
        ("http://[::1/", "cannot be read"),
        ("http://[fe80::1%25eth0]/", "not a host"),
        ("http://ho st/", "printable ASCII"),
        ("http://host/a\r\nX-Evil: 1", "printable ASCII"),
        ("http://höst/", "printable ASCII"),
        ("http://host/" + "x" * 2048, "2048 characters at most"),
    ],
)
def test_a_url_that_cannot_work_is_refused_with_a_sentence(url: str, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint) as refused:
        parse_target(url)
    assert "password" not in str(refused.value).replace("a user or password", "")


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "198.18.0.1"),
        *("169.254.169.254", "168.63.129.16", "192.0.0.192", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1"),
        *(
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "::127.0.0.1",
            "2002:7f00:1::",
            "64:ff9b::7f00:1",
            "2001:0:1::",
        ),
    ],
)
def test_no_other_address_is(address: str) -> None:
    assert not is_public(address)

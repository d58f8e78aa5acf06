"""Addresses of brokers as people write them; the SDK and the connector of Spark read them alike."""

from __future__ import annotations

import pytest

from millstream.addresses import parse_address
from millstream.errors import InvalidArgument


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("broker", ("broker", 9092)),
        ("broker:1234", ("broker", 1234)),
        ("tls://broker:1234", ("broker", 1234)),
        ("[::1]:1234", ("::1", 1234)),
        ("[::1]", ("::1", 9092)),
        ("::1", ("::1", 9092)),
        ("tls://fe80::1", ("fe80::1", 9092)),
    ],
)
def test_a_host_with_a_port_or_without(address: str, place: tuple[str, int]) -> None:
    assert parse_address(address) == place


@pytest.mark.parametrize(
    "address", ["", ":1234", "broker:", "broker:no", "broker:0", "broker:65536", "a:b:c", "[::1", "[::1]1"]
)
def test_what_is_none_is_said(address: str) -> None:
    with pytest.raises(InvalidArgument, match="is not an address: write host:port"):
        parse_address(address)

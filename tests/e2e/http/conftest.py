"""A broker per module that answers HTTP, and clients of both of its doors."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from millstream.client import Client
from millstream.testing.broker import BrokerForTests


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerForTests]:
    with BrokerForTests(http=True) as running:
        yield running


@pytest.fixture(scope="module")
def client(broker: BrokerForTests) -> Client:
    return broker.connect(client_id="tester")


@pytest.fixture(scope="module")
def http(broker: BrokerForTests) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{broker.url}/api/v1", timeout=10) as session:
        yield session

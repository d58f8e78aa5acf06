from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_broker import FakeBroker

import millstream


@pytest.fixture
def fake() -> Iterator[FakeBroker]:
    with FakeBroker() as broker:
        yield broker


@pytest.fixture
def client(fake: FakeBroker) -> Iterator[millstream.Client]:
    with millstream.connect(fake.address, timeout_s=10) as connected:
        yield connected

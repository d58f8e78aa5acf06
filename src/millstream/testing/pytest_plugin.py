"""Fixtures for users' tests.  pytest finds them by itself where Millstream is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from millstream.testing.broker import BrokerForTests


@pytest.fixture
def millstream_broker() -> Iterator[BrokerForTests]:
    """A broker for this test alone: `.address`, `.connect()`, and `.clock.advance("30s")`."""
    # Not before a test asks for it: everybody who runs pytest beside Millstream would pay for the import.
    from millstream.testing.broker import BrokerForTests

    with BrokerForTests() as broker:
        yield broker

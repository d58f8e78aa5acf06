"""What the log of a broker says of those who use it, at which level."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millstream.server.logs import set_log_level
from millstream.testing.broker import BrokerForTests
from tests.logged import Logged, logged


@pytest.fixture
def log() -> Iterator[Logged]:
    with logged() as entries:
        yield entries


@pytest.mark.parametrize("level", ["debug", "error"])
def test_a_new_level_is_said_in_the_log_by_whom_and_what_it_was(
    broker: BrokerForTests, log: Logged, level: str
) -> None:
    broker.broker.on_log_level = set_log_level
    with broker.connect(client_id="operator") as client:
        client.admin.set_log_level(level)  # type: ignore[arg-type]
    entry = log.one("log level changed")
    assert (entry["level"], entry["now"], entry["before"]) == ("warning", level, "info")
    assert (entry["client"], entry["logger"]) == ("operator", "millstream.administration")

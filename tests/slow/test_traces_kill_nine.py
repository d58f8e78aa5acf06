"""A passport after a real kill -9, with everything that can happen to a message in it."""

from __future__ import annotations

from pathlib import Path

import pytest

import millstream
from millstream.testing.broker import BrokerProcess
from tests.e2e.test_traces import check_whole_story, kill_and_replay

pytestmark = pytest.mark.slow


def test_passports_survive_kill_nine(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker:
        with millstream.connect(broker.address) as client:
            ids = kill_and_replay(client, "orders")
            check_whole_story(client, *ids)  # to look at it writes it
        broker.kill()

    with BrokerProcess(tmp_path) as broker, millstream.connect(broker.address) as client:
        check_whole_story(client, *ids)

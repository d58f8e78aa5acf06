"""Ten thousand topics: the broker still starts in seconds, after an orderly stop and after a crash."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from millstream.testing.broker import BrokerForTests
from millstream.wire.frames import FrameType, encode_frame
from tests.native import NativeClient

TOPICS = 10_000
START_S_MAX = 5.0


def in_flight(client: NativeClient, count: int) -> None:
    for _ in range(count):
        client.receive()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_topics_start_within_seconds(tmp_path: Path) -> None:
    data = tmp_path / "data"
    broker = BrokerForTests(data).start()
    client = NativeClient(broker.address)
    for first in range(0, TOPICS, 100):
        for number in range(first, first + 100):
            call = {"op": "topic.create", "name": f"topic.{number}"}
            client.socket.sendall(encode_frame(FrameType.CALL, json.dumps(call).encode(), client.next_correlation()))
        in_flight(client, 100)
    for first in range(0, TOPICS, 100):
        for number in range(first, first + 100):
            client.send_publish(f"topic.{number}", [b"x" * 100])
        in_flight(client, 100)
    crashed = tmp_path / "crashed"
    shutil.copytree(data, crashed)  # what a machine that went down now would leave behind
    client.close()
    broker.stop()

    for directory in (data, crashed):
        started = time.monotonic()
        with BrokerForTests(directory) as again:
            took_s = time.monotonic() - started
            print(f"{directory.name}: {took_s:.2f} s")
            with NativeClient(again.address) as reader:
                for number in (0, 4711, TOPICS - 1):
                    assert reader.fetch(f"topic.{number}", 0).high_watermark == 1
            assert took_s < START_S_MAX

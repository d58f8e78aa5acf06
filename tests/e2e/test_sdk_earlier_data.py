"""A broker that comes back with the data of an earlier moment: streams that read on miss nothing of what follows.

That is what a restored backup does, and a power cut where messages are confirmed before they are on disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.testing.broker import BrokerForTests
from tests.either import EitherClient


class Past:
    """A broker and its data as it was when `remember` was called."""

    def __init__(self, directory: Path) -> None:
        self._data, self._copy = directory / "data", directory / "copy"
        self._running = BrokerForTests(self._data).start()
        self.address = self._running.address

    def remember(self) -> None:
        self._running.stop()
        shutil.copytree(self._data, self._copy)
        self._start()

    def come_back(self) -> None:
        self._running.stop()
        shutil.rmtree(self._data)
        self._copy.rename(self._data)
        self._start()

    def _start(self) -> None:
        port = int(self.address.rpartition(":")[2])
        skipped_us = self._running.clock.skipped_us
        self._running = BrokerForTests(self._data, port=port)
        self._running.clock.skip(skipped_us + 60_000_000)  # nobody restores a backup within a second
        self._running.start()

    def stop(self) -> None:
        self._running.stop()


@pytest.fixture
def past(tmp_path: Path) -> Iterator[Past]:
    broker = Past(tmp_path)
    yield broker
    broker.stop()


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def either(past: Past, request: pytest.FixtureRequest) -> Iterator[EitherClient]:
    client = EitherClient(past.address, asynchronous=request.param)
    yield client
    client.end()


@pytest.mark.parametrize("options", [{}, {"group": "readers"}], ids=["alone", "in a group"])
def test_a_stream_reads_what_was_stored_in_the_place_of_what_it_had_read(
    past: Past, either: EitherClient, options: dict[str, Any]
) -> None:
    client, do = either.client, either.do
    do(client.create_topic("orders", 2))
    for number in range(4):
        do(client.publish("orders", b"kept %d" % number, partition=number % 2))
    stream = do(client.stream("orders", start="earliest", **options))
    assert len(either.values(stream, 4)) == 4
    if options:
        do(stream.commit())  # or the group would begin anew: it comes from that moment as well
    past.remember()
    for number in range(6):
        do(client.publish("orders", b"lost %d" % number, partition=number % 2))
    assert len(either.values(stream, 6)) == 6
    past.come_back()
    for number in range(10):
        do(client.publish("orders", b"new %d" % number, partition=number % 2))
    assert either.values(stream, 10) == [b"new %d" % number for number in range(10)], "all of it, and nothing twice"
    do(stream.close())


def test_a_stream_repeats_nothing_when_the_broker_comes_back_as_it_was(past: Past, either: EitherClient) -> None:
    client, do = either.client, either.do
    do(client.create_topic("orders", 2))
    do(client.publish_many("orders", [b"%d" % number for number in range(100)]))
    stream = do(client.stream("orders", start="earliest"))
    seen = [either.next(stream) for _ in range(30)]
    past.remember()
    seen += [either.next(stream) for _ in range(70)]
    places = [(message.partition, message.offset) for message in seen if message is not None]
    assert len(set(places)) == len(places) == 100
    assert either.next(stream, 0.3) is None
    do(stream.close())

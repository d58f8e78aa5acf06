"""A move that was cut short is finished before the next one to the same place, so that nothing overtakes it."""

from __future__ import annotations

import asyncio

import pytest

from millstream.broker.partition import Partition
from millstream.broker.transfer import Target
from millstream.records import Batch, encode_batch
from millstream.testing.broker import BrokerForTests
from millstream.wire.calls import CreateTopic


def test_the_next_move_waits_for_the_one_that_was_cut_short(
    broker: BrokerForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = broker.broker.topics

    async def move_twice() -> tuple[list[bytes | None], list[int], int]:
        for name in ("source", "target"):
            await topics.create("default", CreateTopic(name=name))
        transfer = topics.transfer(topics.registry.get("default", "source"), 0)
        target = Target("default", "target", 0)

        def cut(_: Target) -> Partition:
            raise asyncio.CancelledError

        with monkeypatch.context() as patched:
            patched.setattr(transfer, "_resolve", cut)
            with pytest.raises(asyncio.CancelledError):
                await transfer.move(target, encode_batch([b"first"], base_timestamp_us=1))
        assert transfer.undone == 1
        assert await transfer.move(target, encode_batch([b"second"], base_timestamp_us=1)) == 1
        log = topics.partition(*target).log
        buffers = log.read(0, 1 << 20, before=log.next_offset).buffers
        batches = []
        for data in buffers:
            at = 0
            while at < len(data):
                batches.append(Batch.parse(data, at))
                at += batches[-1].header.length
        values = [value for batch in batches for value in batch.values()]
        return values, [batch.header.first_sequence for batch in batches], transfer.undone

    assert broker.run(move_twice()) == ([b"first", b"second"], [0, 1], 0)

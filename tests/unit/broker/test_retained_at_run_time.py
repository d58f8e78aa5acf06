"""Retained messages of which nobody knows yet whether they are taken."""

from __future__ import annotations

from millstream.mqtt.messages import Message
from millstream.testing.storage import SimulatedStorage
from tests.simulated_broker import run, started


def test_a_retained_message_that_expires_before_it_is_refused_gives_way_to_the_one_before() -> None:
    """As on a disk that fails in the end, after a while in which it did nothing."""

    async def scenario() -> None:
        client = await started(SimulatedStorage())
        retained, now_us = client.broker.mqtt.retained, client.broker.now_us()
        await retained.put("default", Message("boiler", b"on", 1, True))
        short_lived = Message("boiler", b"off", 1, True, expiry_us=now_us + 1_000_000)
        await retained.propose("default", short_lived)
        await retained.expire(now_us + 2_000_000)
        assert not list(retained.matching("default", "boiler"))
        restored = retained.settle("default", short_lived, refused=True)
        assert restored is not None, "it is on its way to the disk"
        await restored
        assert [kept.message.payload for kept in retained.matching("default", "boiler") if kept] == [b"on"]
        await client.broker.stop()

    run(scenario)


def test_nothing_comes_back_into_a_namespace_that_was_deleted_while_it_was_refused() -> None:
    async def scenario() -> None:
        client = await started(SimulatedStorage())
        retained = client.broker.mqtt.retained
        await retained.put("team", Message("boiler", b"on", 1, True))
        clearing = Message("boiler", b"", 1, True)
        await retained.propose("team", clearing)
        await retained.forget_namespace("team")
        assert retained.settle("team", clearing, refused=True) is None
        assert not list(retained.matching("team", "boiler"))
        await client.broker.stop()

    run(scenario)

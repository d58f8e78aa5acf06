"""What the broker says to those whom its mode turns away."""

from __future__ import annotations

import pytest

from millstream.errors import RequestTimeout
from millstream.testing import virtual_broker, virtual_time


@virtual_time
async def test_a_broker_that_has_just_started_does_not_say_that_its_disk_is_full() -> None:
    async with virtual_broker() as broker:
        client = await broker.connect()
        now = await client.overview()
        assert now.uptime_ms < 1000
        assert now.disk_free_bytes > 0
        assert now.memory_bytes > 0


@virtual_time
async def test_a_refusal_gives_the_reason_of_now_and_not_the_one_that_the_mode_began_with() -> None:
    async with virtual_broker() as broker:
        client = await broker.connect()
        await client.set_mode("maintenance", reason="new disk")
        await client.set_mode("maintenance", reason="new network")
        with pytest.raises(RequestTimeout, match="new network"):
            await client.publish("orders", b"1")
        running = broker._machine.broker
        assert running is not None
        failures = ["the disk is full"]
        running.modes._state_failure = lambda: failures[-1]
        await client.set_mode("normal")
        await running.modes.watch()
        failures.append("input/output error")
        await running.modes.watch()
        assert "input/output error" in str(running.modes.publish_refusal)

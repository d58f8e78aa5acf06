"""What users get for their own tests."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from millstream.testing import BrokerForTests, virtual_broker, virtual_time

pytest_plugins = ["millstream.testing.pytest_plugin"]


def test_the_fixture_gives_a_broker_whose_time_can_be_skipped(millstream_broker: BrokerForTests) -> None:
    client = millstream_broker.connect()
    first = client.publish("orders", b"1")
    started_s = time.monotonic()
    millstream_broker.clock.advance("5h")
    second = client.publish("orders", b"2")
    assert second.append_time_us - first.append_time_us >= 5 * 3_600_000_000
    assert time.monotonic() - started_s < 10


def test_what_the_broker_had_planned_happens_while_time_is_skipped(millstream_broker: BrokerForTests) -> None:
    client = millstream_broker.connect()
    client.create_topic("orders", config={"retention_ms": 60_000, "segment_bytes": 4096})
    for _ in range(20):
        client.publish("orders", bytes(1000))
    assert client.offsets("orders", "earliest") == {0: 0}
    millstream_broker.clock.advance("10m")  # retention runs every minute
    assert client.offsets("orders", "earliest")[0] > 0


@virtual_time
async def test_a_virtual_broker_keeps_what_it_confirmed_when_it_crashes() -> None:
    async with virtual_broker() as broker:
        client = await broker.connect()
        await client.publish("orders", b"1")
        await broker.crash()
        await client.publish("orders", b"2")
        await broker.crash(power=False)
        await broker.restart()
        values = [message.value async for message in client.stream("orders", start="earliest", timeout_s=5)]
        assert values == [b"1", b"2"]


@virtual_time
async def test_a_stream_group_works_in_virtual_time() -> None:
    async with virtual_broker() as broker:
        client = await broker.connect()
        await client.publish("orders", b"1")
        async with client.stream("orders", group="billing", start="earliest") as stream:
            message = await stream.next(timeout_s=10)
            assert message is not None
            await stream.commit(message)
            await broker.clock.advance("10m")
        group = await client.group("billing")
        assert not group.members


def test_pytest_does_not_pay_for_the_broker_before_a_test_asks_for_it() -> None:
    code = "import sys, millstream.testing.pytest_plugin; print('millstream.broker' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.strip() == "False"


def test_a_virtual_broker_outside_of_virtual_time_says_what_to_do(tmp_path: Path) -> None:
    import asyncio

    async def scenario() -> None:
        async with virtual_broker():
            pass

    with pytest.raises(AssertionError, match="@virtual_time"):
        asyncio.run(scenario())

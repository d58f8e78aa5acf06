"""Queue groups that are changed and deleted while others are at it, or while the disk refuses."""

from __future__ import annotations

import pytest

from millstream.broker.state import StateLog
from millstream.errors import StorageFailed
from millstream.testing.storage import SimulatedStorage
from millstream.wire import calls, queue_calls
from tests.simulated_broker import run, started


def test_a_policy_of_a_pattern_that_could_not_be_recorded_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async def refuse(*_: object, **__: object) -> None:
            raise StorageFailed("cannot write the state: no space left on device")

        client = await started(SimulatedStorage(seed=1))
        await client.open_queue("orders.*", policy={"max_deliveries": 5})
        with monkeypatch.context() as patched:
            patched.setattr(StateLog, "record", refuse)
            with pytest.raises(StorageFailed):
                await client.call(queue_calls.ConfigureQueue(topic="orders.*", policy={"max_deliveries": 9}))
        await client.call(calls.CreateTopic(name="orders.eu"))
        info = await client.call(queue_calls.DescribeQueue(topic="orders.eu"))
        assert isinstance(info, queue_calls.QueueInfo)
        assert info.policy["max_deliveries"] == 5

    run(scenario)

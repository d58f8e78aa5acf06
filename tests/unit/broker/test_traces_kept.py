"""Records of what happens to messages, on a disk that is full for a while."""

from __future__ import annotations

import pytest

from millstream.testing.storage import Fault, SimulatedStorage
from millstream.traces.records import Record, Search
from tests.simulated_broker import run, started

SECOND_US = 1_000_000


@pytest.mark.parametrize("kind", ["create", "write"])
@pytest.mark.parametrize("opened", [False, True], ids=["new", "opened"])
def test_a_disk_that_was_full_for_a_while_gets_the_records_that_come_then(kind: str, opened: bool) -> None:
    async def scenario() -> None:
        storage = SimulatedStorage()
        client = await started(storage)
        store = client.broker.recorder.store
        now_us = client.broker.now_us()
        records = [Record("acked", number, b"place", number, b"\1") for number in range(3)]
        if opened:
            assert store.write(records[:1], now_us)
        storage.inject(Fault.NO_SPACE, times=100, when=lambda it: it.kind == kind and it.path.startswith("traces/"))
        written = store.write(records[1:2], now_us)
        assert written == (opened and kind == "create"), "what the disk refuses does not count as recorded"
        storage.heal()
        assert store.write(records[2:], now_us + SECOND_US)
        found = [record.time_ms async for some in store.forward(Search()) for record in some]
        assert found[-1] == 2
        await client.broker.stop()

    run(scenario)

"""A query that publishes batches while its broker is killed again and again."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from pathlib import Path

from millstream.errors import MillstreamError
from millstream.records import Batch
from millstream.testing.broker import BrokerProcess
from millstream.wire.messages import decode_publish_result
from millstream.wire.stage_calls import stage_address
from tests.native import NativeClient

__all__ = ["publish_through_kills", "values_of"]

PARTITIONS = 3
ROWS = 20
PATIENCE_S = 120


def values_of(client: NativeClient, topic: str = "orders", partition: int = 0) -> list[bytes | None]:
    values: list[bytes | None] = []
    while True:
        data = bytes(client.fetch(topic, len(values), partition=partition).batches)
        if not data:
            return values
        at = 0
        while at < len(data):
            batch = Batch.parse(data, at)
            values += [v for v, o in zip(batch.values(), batch.offsets(), strict=True) if o >= len(values)]
            at += batch.header.length


class Driver:
    """A query that publishes one batch after the other, over however many connections it takes."""

    def __init__(self, address: str, batches: int) -> None:
        self.address = address
        self.batches = batches
        self.done = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert self.done == self.batches

    def _run(self) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while self.done < self.batches and time.monotonic() < until_s:
            with suppress(OSError, EOFError, MillstreamError), NativeClient(self.address) as client:
                while self.done < self.batches:
                    self._publish(client, self.done)
                    self.done += 1

    def _publish(self, client: NativeClient, batch: int) -> None:
        """Stage everything anew, as tasks do that run again: their rows need not be in the same order."""
        parts = []
        for task in range(2):
            opened = client.call("stage.open", query="q", batch=batch, task=task)
            if opened["already"]:
                return
            stage = opened["stage"]
            waiting: list[int] = []
            for partition in range(PARTITIONS):
                values = [b"%d/%d/%d" % (batch, task, number) for number in range(ROWS)]
                random.shuffle(values)
                address = stage_address(stage, "orders")
                waiting += [
                    client.send_publish(address, values[at : at + 5], partition=partition)
                    for at in range(0, len(values), 5)
                ]
            for correlation in waiting:
                decode_publish_result(client.answer(correlation))
            parts.append({"stage": stage, "batches": len(waiting), "messages": ROWS * PARTITIONS})
        client.call("stage.publish", query="q", batch=batch, stages=parts)


def publish_through_kills(data: Path, *, batches: int, kills: int, seed: int = 5) -> None:
    """Kill the broker at moments of chance; then every row must be there once, and one batch after the other."""
    rng = random.Random(seed)
    broker = BrokerProcess(data).start()
    try:
        with NativeClient(broker.address) as client:
            client.call("topic.create", name="orders", partitions=PARTITIONS)
        port = int(broker.address.rpartition(":")[2])
        driver = Driver(broker.address, batches)
        driver.start()
        for kill in range(1, kills + 1):
            while driver.done < kill * batches // (kills + 1):
                time.sleep(0.001)
            time.sleep(rng.random() * 0.02)
            broker.kill()
            broker = BrokerProcess(data, port=port).start()
        driver.join()
        with NativeClient(broker.address) as client:
            for partition in range(PARTITIONS):
                found = values_of(client, partition=partition)
                assert len(found) == len(set(found)), "nothing is there twice"
                assert len(found) == batches * 2 * ROWS, "nothing is missing"
                numbers = [int((value or b"").split(b"/")[0]) for value in found]
                assert numbers == sorted(numbers), "one batch comes after the other"
    finally:
        broker.kill()

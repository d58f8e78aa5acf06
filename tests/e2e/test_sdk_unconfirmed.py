"""Messages that nobody confirms (acks="none"): a broker that is stopped in good order has taken all of them."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

import millstream
from millstream import aio
from millstream.testing.broker import BrokerForTests
from tests.waiting import eventually


def stored(broker: BrokerForTests) -> list[int]:
    with broker.connect() as client:
        (end,) = client.offsets("t").values()
        with client.stream("t", start="earliest") as stream:
            found = []
            while len(found) < end and (message := stream.next(10)) is not None:
                found.append(int(message.text.split()[0]))
    return found


class Pouring(threading.Thread):
    """Sends numbers without confirmation until it is told to end, then closes its producer."""

    def __init__(self, address: str, *, asynchronous: bool) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._asynchronous = asynchronous
        self.sent = 0
        self.enough = threading.Event()
        self.problem: BaseException | None = None

    def run(self) -> None:
        try:
            asyncio.run(self._pour_asynchronously()) if self._asynchronous else self._pour()
        except BaseException as problem:
            self.problem = problem

    def _pour(self) -> None:
        with (
            millstream.connect(self._address) as client,
            client.producer("t", acks="none", linger_ms=1, batch_messages=50) as producer,
        ):
            while not self.enough.is_set():
                producer.send(b"%d " % self.sent + bytes(1000))
                self.sent += 1

    async def _pour_asynchronously(self) -> None:
        async with (
            aio.connect(self._address) as client,
            client.producer("t", acks="none", linger_ms=1, batch_messages=50) as producer,
        ):
            while not self.enough.is_set():
                await producer.send(b"%d " % self.sent + bytes(1000))
                self.sent += 1


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
def test_a_broker_that_is_stopped_has_taken_everything_that_was_sent_without_confirmation(
    tmp_path: Path, asynchronous: bool
) -> None:
    """What the system had taken and the broker had not read yet was lost with the connection."""
    broker = BrokerForTests(tmp_path).start()
    port = int(broker.address.rpartition(":")[2])
    with broker.connect() as client:
        client.create_topic("t")
    pouring = Pouring(broker.address, asynchronous=asynchronous)
    pouring.start()
    for _ in range(3):
        before = pouring.sent
        eventually(lambda: pouring.sent > before + 3000)  # noqa: B023
        broker.stop()
        broker = BrokerForTests(tmp_path, port=port).start()
    pouring.enough.set()
    pouring.join(60)
    assert not pouring.is_alive()
    assert pouring.problem is None
    assert stored(broker) == list(range(pouring.sent))
    broker.stop()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
def test_a_producer_without_confirmations_that_rests_holds_up_no_broker_that_stops(
    tmp_path: Path, asynchronous: bool
) -> None:
    broker = BrokerForTests(tmp_path).start()

    def send(client: millstream.Client) -> millstream.Producer:
        producer = client.producer("t", acks="none", linger_ms=1)
        producer.send(b"0")
        producer.flush()
        return producer

    async def send_and_rest() -> None:
        async with aio.connect(broker.address) as client, client.producer("t", acks="none") as producer:
            await producer.send(b"0")
            await producer.flush()
            await asyncio.to_thread(eventually, lambda: stored(broker) == [0])
            began_s = time.monotonic()
            await asyncio.to_thread(broker.stop)
            assert time.monotonic() - began_s < 1.5, "it waited for a client that had nothing to say"

    if asynchronous:
        with broker.connect() as client:
            client.create_topic("t")
        asyncio.run(send_and_rest())
        return
    with broker.connect() as client:
        producer = send(client)
        eventually(lambda: stored(broker) == [0])
        began_s = time.monotonic()
        broker.stop()
        assert time.monotonic() - began_s < 1.5, "it waited for a client that had nothing to say"
        producer.close()

"""A link on which it takes a while to say hello: whoever was on it comes back to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

import millstream
from millstream import aio
from millstream.testing.broker import BrokerForTests

_SLOW_S = 0.6


class SlowLink:
    """Passes bytes on; a new connection waits a while before the first of them, once it is slow."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._broker = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.delay_s = 0.0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(client,), daemon=True).start()

    def _join(self, client: socket.socket) -> None:
        time.sleep(self.delay_s)
        broker = socket.create_connection(self._broker)
        self._open += [client, broker]
        for here, there in ((client, broker), (broker, client)):
            threading.Thread(target=self._pass_on, args=(here, there), daemon=True).start()

    def _pass_on(self, here: socket.socket, there: socket.socket) -> None:
        try:
            while data := here.recv(65536):
                there.sendall(data)
        except OSError:
            pass
        there.close()

    def cut(self) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):  # it has ended already
                one.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def close(self) -> None:
        self._listener.close()
        self.cut()


@pytest.fixture
def link(broker: BrokerForTests) -> Iterator[SlowLink]:
    link = SlowLink(broker.address)
    yield link
    link.close()


@pytest.mark.parametrize("kind", ["queue", "stream"])
def test_who_asks_often_and_briefly_comes_back_to_a_slow_link(
    broker: BrokerForTests, link: SlowLink, kind: str
) -> None:
    with millstream.connect(link.address) as client:
        client.publish("t", b"0")
        opened = client.queue("t") if kind == "queue" else client.stream("t", start="earliest")
        with opened as reader:
            first = reader.next(5)
            assert first is not None
            link.delay_s = _SLOW_S
            link.cut()
            broker.connect().publish("t", b"1")
            deadline_s = time.monotonic() + 20
            while (message := reader.next(0.05)) is None or message.value != b"1":
                assert time.monotonic() < deadline_s, "it never came back"


@pytest.mark.parametrize("kind", ["queue", "stream"])
def test_a_task_that_asks_often_and_briefly_comes_back_to_a_slow_link(
    broker: BrokerForTests, link: SlowLink, kind: str
) -> None:
    async def main() -> None:
        async with aio.connect(link.address) as client:
            await client.publish("t", b"0")
            opened = client.queue("t") if kind == "queue" else client.stream("t", start="earliest")
            async with opened as reader, asyncio.timeout(20):
                assert await reader.next(5) is not None
                link.delay_s = _SLOW_S
                link.cut()
                broker.connect().publish("t", b"1")
                while (message := await reader.next(0.05)) is None or message.value != b"1":
                    pass

    asyncio.run(main())

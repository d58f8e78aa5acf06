"""Programs that are interrupted in the middle of a call: nothing stays behind that nobody looks after."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream import aio
from millstream.client.blocking.worker import LoopEngine, ThreadEngine
from millstream.errors import InvalidArgument
from millstream.testing.broker import BrokerForTests
from tests.waiting import eventually


class Interrupted(Exception):
    """Stands for a Ctrl-C: raised by the handler of a signal."""


def test_what_is_leased_for_a_task_that_was_cancelled_goes_back(broker: BrokerForTests) -> None:
    async def main() -> None:
        async with aio.connect(broker.address) as client:
            await client.create_topic("t")
            async with client.queue("t") as queue:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(queue.lease(wait="10s"), 0.05)
                await client.publish("t", b"x")  # answers a request that nobody waits for any more
                message = await queue.next(5)
                assert message is not None
                assert message.delivery_count == 1
                await message.ack(wait=True)

    asyncio.run(main())


def test_what_is_leased_for_a_call_that_was_interrupted_goes_back(broker: BrokerForTests) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with millstream.connect(broker.address) as client:
            client.create_topic("t")
            with client.queue("t") as queue:
                main = threading.main_thread().ident
                assert main is not None
                threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGUSR1)).start()
                with pytest.raises(Interrupted):
                    queue.lease(wait="10s")
                client.publish("t", b"x")
                message = queue.next(5)
                assert message is not None
                message.ack(wait=True)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_ends_the_program_ends_its_worker(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.publish("t", b"x")

        @client.worker("t")
        def handle(message: millstream.QueueMessage) -> None:
            raise SystemExit(3)

        with handle:
            deadline_s = time.monotonic() + 5
            while handle.failure is None:
                assert time.monotonic() < deadline_s, "nobody has heard of it"
                time.sleep(0.01)
        assert isinstance(handle.failure, SystemExit)


def test_a_handler_whose_own_task_was_cancelled_fails_and_the_worker_goes_on(broker: BrokerForTests) -> None:
    async def main() -> None:
        async with aio.connect(broker.address) as client:
            await client.publish_many("t", [b"0", b"1"])
            seen, done = [], asyncio.Event()

            @client.worker("t")
            async def handle(message: aio.QueueMessage) -> None:
                seen.append(message.value)
                if message.value == b"0" and message.failures == 0:
                    waited_for = asyncio.get_running_loop().create_future()
                    waited_for.cancel()
                    await waited_for
                if len(seen) == 3:
                    done.set()

            async with handle, asyncio.timeout(10):
                await done.wait()
            assert sorted(seen) == [b"0", b"0", b"1"]

    asyncio.run(main())


def test_a_program_that_ends_without_closing_its_producer_loses_nothing(broker: BrokerForTests) -> None:
    program = """
import sys, millstream
producer = millstream.connect(sys.argv[1]).producer("t", linger_ms=1000)
for number in range(10):
    producer.send(b"%d" % number)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(millstream.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", program, broker.address], check=True, timeout=30, env=environment)
    with broker.connect().stream("t", timeout_s=0.5) as stream:
        assert [message.value for message in stream] == [b"%d" % number for number in range(10)]


def test_a_signal_that_finds_its_producer_at_work_does_not_wait_for_it(broker: BrokerForTests) -> None:
    """It would wait for itself."""
    program = """
import signal, sys, threading, millstream
from millstream.client.outbox import Outbox

client = millstream.connect(sys.argv[1])
producer = client.producer("t", linger_ms=1000)
next_frame = Outbox.next_frame

def interrupted(outbox):
    if threading.current_thread() is threading.main_thread():
        Outbox.next_frame = next_frame
        signal.raise_signal(signal.SIGUSR1)
    return next_frame(outbox)

def handle(*_):
    producer.send(b"2", headers={"a": "b"})  # whatever needs no closer look needs no waiting
    for ask in (producer.flush, producer.close, client.close, lambda: producer.send(b"3", partition=9)):
        try:
            ask()
        except millstream.errors.InvalidArgument as refusal:
            assert "interrupted" in str(refusal), refusal
            print("refused")

signal.signal(signal.SIGUSR1, handle)
Outbox.next_frame = interrupted
producer.send(b"1")
producer.flush()
producer.close()
"""
    environment = os.environ | {"PYTHONPATH": str(Path(millstream.__file__).parents[1])}
    ended = subprocess.run(
        [sys.executable, "-c", program, broker.address],
        check=True,
        timeout=30,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.stdout.split() == ["refused"] * 4
    with broker.connect().stream("t", timeout_s=0.5) as stream:
        assert [message.value for message in stream] == [b"1", b"2"]


def test_a_client_may_be_closed_by_a_signal_that_comes_while_it_notes_a_new_stream(broker: BrokerForTests) -> None:
    client = millstream.connect(broker.address)

    def close() -> None:
        with client._children_lock:  # as the code has that was interrupted
            client.close()

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()


def test_a_handler_may_stop_its_worker_and_run_returns(broker: BrokerForTests) -> None:
    with millstream.connect(broker.address) as client:
        client.publish_many("t", [b"0", b"1", b"2"])

        @client.worker("t", concurrency=1)
        def plain(message: millstream.QueueMessage) -> None:
            plain.stop()

        @client.worker("t", concurrency=1)
        async def coroutine(message: millstream.QueueMessage) -> None:
            coroutine.stop()

        for handle in (plain, coroutine):
            handle.run()
            with pytest.raises(InvalidArgument, match="was stopped"):
                handle.start()
        with client.queue("t") as queue:
            assert [message.value for message in (queue.next(5), queue.next(0.2)) if message] == [b"2"]


@pytest.mark.parametrize("engine", [ThreadEngine, LoopEngine])
def test_a_handler_may_stop_its_worker_before_its_start_is_over(
    broker: BrokerForTests, monkeypatch: pytest.MonkeyPatch, engine: type[ThreadEngine | LoopEngine]
) -> None:
    called, start = threading.Event(), engine.start

    def start_slowly(self: Any) -> None:
        start(self)
        assert called.wait(20)

    monkeypatch.setattr(engine, "start", start_slowly)
    with millstream.connect(broker.address) as client:
        client.publish_many("t", [b"0", b"1"])

        def plain(message: millstream.QueueMessage) -> None:
            handle.stop()
            called.set()

        async def coroutine(message: millstream.QueueMessage) -> None:
            plain(message)

        handle = client.worker("t", concurrency=1)(plain if engine is ThreadEngine else coroutine)
        running = threading.Thread(target=handle.run, daemon=True)
        running.start()
        running.join(20)
        assert not running.is_alive()
        with client.queue("t") as queue:
            assert [message.value for message in (queue.next(5), queue.next(0.2)) if message] == [b"1"]


def test_a_signal_that_comes_while_workers_stop_by_themselves_ends_at_once(broker: BrokerForTests) -> None:
    """The first one was taken for the wish to stop, which they did already."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    begun, over, main = threading.Event(), threading.Event(), threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with millstream.connect(broker.address) as client:
            client.publish_many("t", [b"0", b"1"])

            @client.worker("t", concurrency=2)
            def handle(message: millstream.QueueMessage) -> None:
                if message.value == b"0":
                    begun.wait(20)
                    raise SystemExit(3)
                begun.set()
                eventually(lambda: handle._stopped)
                signal.pthread_kill(main, signal.SIGTERM)
                over.wait(60)

            try:
                with pytest.raises(Interrupted):
                    client.run_workers()
            finally:
                over.set()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_asynchronous_handler_may_stop_its_worker_and_run_returns(broker: BrokerForTests) -> None:
    async def main() -> None:
        async with aio.connect(broker.address) as client:
            await client.publish_many("t", [b"0", b"1"])

            @client.worker("t", concurrency=1)
            async def handle(message: aio.QueueMessage) -> None:
                await handle.stop()

            async with asyncio.timeout(10):
                await handle.run()
            with pytest.raises(InvalidArgument, match="was stopped"):
                await handle.start()
            async with client.queue("t") as queue:
                left = [await queue.next(5), await queue.next(0.2)]
            assert [message.value for message in left if message] == [b"1"]

    asyncio.run(main())


def test_a_producer_that_is_not_closed_before_its_loop_ends_says_what_was_not_sent(
    broker: BrokerForTests, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        client = await aio.connect(broker.address)
        producer = await client.producer("t", linger_ms=1000)
        for _ in range(3):
            await producer.send(b"x")

    asyncio.run(main())
    assert "3 messages to 't' were not confirmed" in caplog.text

"""What users get for their own tests."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from threading import Event, Thread
from threading import enumerate as enumerate_threads

import pytest

from millstream.errors import ConnectionLost, TopicNotFound
from millstream.testing import BrokerForTests, BrokerProcess, virtual_broker, virtual_time
from tests.waiting import eventually

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


def test_threads_that_skip_time_at_once_do_so_one_after_the_other(millstream_broker: BrokerForTests) -> None:
    clock = millstream_broker.clock
    threads = [Thread(target=clock.advance, args=(by,), daemon=True) for by in ("1h", "2h", "10m")]
    for thread in threads:
        thread.start()
    eventually(lambda: not any(thread.is_alive() for thread in threads), "everybody to arrive")
    assert clock.skipped_us == 190 * 60_000_000


def test_who_skips_time_while_the_broker_stops_comes_back(millstream_broker: BrokerForTests) -> None:
    busy = Event()

    async def stay_busy() -> None:  # time goes on only when nobody has anything to do
        while not millstream_broker._stop.is_set():
            busy.set()
            await asyncio.sleep(0)

    asyncio.run_coroutine_threadsafe(stay_busy(), millstream_broker._loop)
    assert busy.wait(20)
    thread = Thread(target=millstream_broker.clock.advance, args=("1h",), daemon=True)
    thread.start()
    eventually(millstream_broker._loop._travelling.locked, "the journey to begin")  # type: ignore[attr-defined]
    millstream_broker.stop()
    eventually(lambda: not thread.is_alive(), "whoever was on the way")


def test_time_can_be_skipped_after_the_broker_has_stopped(millstream_broker: BrokerForTests) -> None:
    millstream_broker.stop()
    before_us = millstream_broker.clock.now_us()
    millstream_broker.clock.advance("1h")
    assert millstream_broker.clock.now_us() >= before_us + 3_600_000_000


def test_the_broker_cannot_skip_time_for_itself_and_says_so(millstream_broker: BrokerForTests) -> None:
    async def skip() -> None:
        millstream_broker.clock.advance("1h")

    with pytest.raises(AssertionError, match="from the test"):
        millstream_broker.run(skip())


def test_a_broker_that_cannot_start_leaves_no_threads_and_no_directory() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        before = set(enumerate_threads())
        broker = BrokerForTests(port=taken.getsockname()[1])
        assert broker._temporary is not None
        with pytest.raises(OSError, match="in use"):
            broker.start()
        assert set(enumerate_threads()) <= before
        assert not Path(broker._temporary.name).exists()


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


@virtual_time
async def test_a_virtual_broker_works_in_the_debug_mode_of_asyncio() -> None:
    asyncio.get_running_loop().set_debug(True)
    async with virtual_broker() as broker:
        client = await broker.connect()
        assert (await client.publish("orders", b"1")).label == "disk"


@pytest.mark.usefixtures("as_users_start_it")
def test_a_broker_process_leaves_no_pipe_open_also_if_it_cannot_start_or_ends_by_itself(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    failing, ending = BrokerProcess(tmp_path / "file"), BrokerProcess(tmp_path / "data")
    with pytest.raises(RuntimeError, match="ended with 1 before it listened"):
        failing.start()
    with ending:
        ending.send(signal.SIGKILL)
        assert ending._process is not None
        assert ending._process.wait(20) == -signal.SIGKILL
    for broker in (failing, ending):
        assert broker._process is not None
        assert broker._process.stdout is not None
        assert broker._process.stdout.closed


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


def test_a_client_that_raises_when_it_is_closed_leaves_neither_broker_nor_files_behind() -> None:
    broker = BrokerForTests().start()
    first, second = broker.connect(), broker.connect()
    first.create_topic("gone")
    first.producer("gone", linger_ms=60_000).send(b"x")
    second.delete_topic("gone", force=True)
    with pytest.raises(TopicNotFound):
        broker.stop()
    assert broker._temporary is not None
    assert not Path(broker._temporary.name).exists()
    assert not broker._thread.is_alive()
    assert second._closed.wait(0)


@virtual_time
async def test_a_client_that_raises_when_it_is_closed_leaves_no_virtual_broker_behind() -> None:
    broker = virtual_broker()
    async with asyncio.timeout(600):
        await broker.__aenter__()
        first, second = await broker.connect(), await broker.connect()
        await first.create_topic("gone")
        await (await first.producer("gone", linger_ms=60_000)).send(b"x")
        await second.delete_topic("gone", force=True)
        with pytest.raises(TopicNotFound):
            await broker.__aexit__()
    with pytest.raises(ConnectionLost):
        await broker.connect(timeout_s=1)
    assert second._closed

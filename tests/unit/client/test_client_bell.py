"""Bells: they wake whoever waits, and keep no descriptor once nobody needs them."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from fake_broker import FakeSubscriptions
from fake_queues import FakeQueues

import millstream
from millstream.client.blocking.bell import Bell
from tests.waiting import eventually


def is_open(bell: Bell) -> bool:
    return bell._in.fileno() >= 0 or bell._out.fileno() >= 0


def test_a_bell_that_nobody_waits_for_is_closed_at_once() -> None:
    bell = Bell()
    bell.close()
    assert not is_open(bell)
    bell.ring()
    bell.clear()
    bell.wait(60)  # nobody could wake it
    bell.close()


def test_a_bell_is_closed_by_the_last_who_waits() -> None:
    bell = Bell()
    begun, go_on, heard = threading.Semaphore(0), threading.Event(), []

    def wait(wait_s: float, descriptor: int) -> bool:
        begun.release()
        assert go_on.wait(20)
        heard.append(descriptor)
        return is_open(bell)

    waiting = [threading.Thread(target=bell.beside, args=(wait, 1.0)) for _ in range(2)]
    for thread in waiting:
        thread.start()
        begun.acquire()
    bell.close()
    assert is_open(bell)
    go_on.set()
    for thread in waiting:
        thread.join()
    assert heard[0] == heard[1] >= 0
    assert not is_open(bell)


def test_closing_a_bell_wakes_who_waits() -> None:
    bell = Bell()
    waiting = threading.Thread(target=bell.wait, args=(60,), daemon=True)
    waiting.start()
    eventually(lambda: bell._users)
    bell.close()
    waiting.join(20)
    assert not waiting.is_alive()
    assert not is_open(bell)


@pytest.fixture(params=["stream", "subscribe", "queue"])
def reader(request: pytest.FixtureRequest) -> Iterator[Any]:
    with FakeQueues() if request.param == "queue" else FakeSubscriptions() as fake:
        fake.topic("t")
        with millstream.connect(fake.address, timeout_s=20) as client:
            yield getattr(client, request.param)("t")


def test_what_is_closed_has_no_bell_any_more(reader: Any) -> None:
    assert reader.next(0.01) is None
    reader.close()
    assert not is_open(reader._bell)


def test_what_is_closed_by_another_thread_has_no_bell_any_more(reader: Any) -> None:
    waiting = threading.Thread(target=reader.next, daemon=True)
    waiting.start()
    eventually(lambda: reader._bell._users)
    reader.close()
    waiting.join(20)
    assert not waiting.is_alive()
    assert not is_open(reader._bell)


def test_what_is_dropped_without_being_closed_leaves_nothing_open() -> None:
    with FakeQueues() as fake, millstream.connect(fake.address) as client:
        fake.topic("t")
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for open_it in (client.queue, client.stream):
                assert open_it("t").next(0.01) is None
            gc.collect()
        assert [str(warning.message) for warning in found if warning.category is ResourceWarning] == []

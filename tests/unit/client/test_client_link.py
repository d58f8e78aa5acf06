"""The connection that the threads of a client share."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from fake_broker import FakeBroker

import millstream
from millstream.errors import ConnectionLost, MillstreamError, RequestTimeout
from millstream.wire.frames import FrameType, encode_frame


def test_any_number_of_pieces_are_sent(fake: FakeBroker, client: millstream.Client) -> None:
    """A stream over more than 1024 partitions never read anything: the system took none of its requests."""
    connection = client._link.current
    assert connection is not None
    connection.transport.send(*[encode_frame(FrameType.HEARTBEAT, b"")] * 3000)
    fake.wait_for(lambda: fake.heartbeat_frames == 3000)
    assert connection.usable


@contextlib.contextmanager
def kept_waiting(fake: FakeBroker, at: str, ask: Callable[[], object]) -> Iterator[None]:
    """While a thread that has time asks for something whose answer does not come."""
    asked, go_on = threading.Event(), threading.Event()

    def answer_late() -> None:
        asked.set()
        assert go_on.wait(20)

    def run() -> None:
        with contextlib.suppress(MillstreamError):
            ask()

    fake.before[at] = answer_late
    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    assert asked.wait(20)
    try:
        yield
    finally:
        go_on.set()
        asking.join(20)
    assert not asking.is_alive()


@pytest.mark.parametrize(("at", "error"), [("Hello", ConnectionLost), ("OpenInbox", RequestTimeout)])
def test_who_waits_for_another_thread_that_connects_waits_for_his_own_time(
    fake: FakeBroker, client: millstream.Client, at: str, error: type[MillstreamError]
) -> None:
    if at == "Hello":
        connection = client._link.current
        assert connection is not None
        connection.close()
    with kept_waiting(fake, at, lambda: client.request("t", b"x", timeout=20)):
        begun_s = time.monotonic()
        with pytest.raises(error):
            client.request("t", b"y", timeout=0.3)
        assert time.monotonic() - begun_s < 5

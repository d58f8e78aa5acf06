"""The faults themselves: a disk that never fills and a clock that is never wrong would make every soak pass."""

from __future__ import annotations

import errno
import random
import socket
import time
from pathlib import Path

import pytest

from millstream.queues.records import Rules
from tests.queue_log import FakeBatch, FakeLog
from tests.soak.audit import read_grants
from tests.soak.broker import Control, FaultyStorage, Grants, WrongClock, noted
from tests.soak.proxy import Proxy


@pytest.fixture
def control(tmp_path: Path) -> Path:
    (tmp_path / "control").mkdir()
    return tmp_path / "control"


def test_a_full_disk_takes_a_part_of_what_does_not_fit_and_nothing_new(control: Path, tmp_path: Path) -> None:
    storage = FaultyStorage(tmp_path, Control(control))
    file = storage.open("log", create=True)
    file.write(b"before", 0)
    (control / "full").touch()
    with pytest.raises(OSError, match="No space left") as refused:
        file.write(b"x" * 100, 6)
    assert refused.value.errno == errno.ENOSPC
    assert 6 <= file.size() <= 106
    file.write(b"BEFORE", 0)  # there is room for what does not make it longer
    with pytest.raises(OSError, match="No space left"):
        storage.open("another", create=True)
    assert storage.free_bytes() == 0
    (control / "full").unlink()
    file.write(b"x" * 100, 6)
    assert storage.free_bytes() > 0


def test_one_sync_of_the_right_file_fails(control: Path, tmp_path: Path) -> None:
    storage = FaultyStorage(tmp_path, Control(control))
    wrong, right = storage.open("orders", create=True), storage.open("jobs", create=True)
    (control / "fail-sync").write_text("jobs")
    wrong.sync()
    with pytest.raises(OSError, match="Input/output"):
        right.sync()
    right.sync()
    assert (control / "failed-sync").exists()


def test_the_clock_is_wrong_by_what_was_set_and_time_passes_as_always(control: Path) -> None:
    clock = WrongClock(Control(control))
    assert abs(clock.now_us() - time.time_ns() // 1000) < 1_000_000
    (control / "clock").write_text("-60")
    clock = WrongClock(Control(control))
    assert abs(clock.now_us() - time.time_ns() // 1000 + 60_000_000) < 1_000_000
    assert abs(clock.monotonic_ms() - time.monotonic_ns() // 1_000_000) < 1000


def test_a_proxy_passes_on_falls_silent_and_cuts() -> None:
    proxy = Proxy("native")
    proxy.start()
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            proxy.lead_to("native", server.getsockname()[1])
            host, _, port = proxy.address("native").rpartition(":")
            with socket.create_connection((host, int(port)), 5) as client:
                inner, _ = server.accept()
                client.sendall(b"hello")
                assert inner.recv(5) == b"hello"
                proxy.hush()
                client.settimeout(0.1)
                inner.sendall(b"not yet")
                with pytest.raises(TimeoutError):
                    client.recv(7)
                proxy.speak()
                client.settimeout(5)
                assert client.recv(7) == b"not yet"
                proxy.cut("native", random.Random(0))  # all of them, with this seed
                assert _is_cut(client)
                inner.close()
    finally:
        proxy.stop()


def _is_cut(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def test_the_broker_writes_down_what_it_grants_before_anybody_hears_of_it(control: Path) -> None:
    ledger = noted(Grants(control))(Rules(), draw=lambda: 0.0, draw_nonce=iter((0xAB, 0xCD)).__next__)
    ledger.open()
    ledger.start_at(0)
    log = FakeLog()
    log.add_batch(FakeBatch(range(2)))
    before_s = time.monotonic()
    ledger.lease(log, consumer="ann", want=1, now_us=1)
    assert before_s <= read_grants(control / "grants")["00000000000000ab"] <= time.monotonic()
    ledger.retake(log, [(1, 2)], consumer="bob", now_us=2)
    ledger.lease(log, consumer="ann", want=1, now_us=3)  # there is nothing
    assert list(read_grants(control / "grants")) == ["00000000000000ab", "00000000000000cd"]

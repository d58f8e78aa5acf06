"""Backups of brokers that run and of brokers that do not, and what comes back from them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest
import structlog

import millstream
from millstream.broker.broker import Broker
from millstream.cli.main import _run
from millstream.errors import FilesHeld, HoldLost, InvalidArgument, StartFailed
from millstream.log import holding
from millstream.log.holding import HELD, RESTORING, files_below, open_held, read_list
from millstream.log.lock import DirectoryLock
from millstream.testing.broker import BrokerForTests
from millstream.wire.stage_calls import stage_address
from tests.native import NativeClient
from tests.waiting import eventually

Command = Callable[..., str]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        outcome = _run([str(argument) for argument in arguments])
        said = capsys.readouterr()
        assert outcome == code, said.err
        return said.out + said.err

    return run


@contextmanager
def locked(data: Path) -> Iterator[None]:
    """What a broker as a process does, and the one inside a test does not."""
    lock = DirectoryLock(data)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _until_cleared(data: Path) -> None:
    """What was put aside is removed by a thread, after the answer."""
    eventually(lambda: not (data / HELD).exists())


def values(client: millstream.Client, topic: str) -> list[str]:
    return [message.text for message in client.stream(topic, start="earliest", timeout_s=1)]


def test_a_damaged_backup_is_no_mistake_of_the_user_and_no_matter_of_logs(tmp_path: Path, command: Command) -> None:
    with BrokerForTests(tmp_path / "data"):
        pass
    command("backup", tmp_path / "whole", "--data", tmp_path / "data")
    content = (tmp_path / "whole").read_bytes()
    (tmp_path / "cut").write_bytes(content[:100])
    for arguments in (
        ("backup", tmp_path / "cut", "--verify"),
        ("restore", tmp_path / "cut", "--data", tmp_path / "n"),
    ):
        said = command(*arguments, code=4)
        assert "damaged or cut short" in said
        assert "Use another backup" in said
    assert not (tmp_path / "n").exists()


def test_a_stopped_broker_is_copied_as_it_is(tmp_path: Path, command: Command) -> None:
    with BrokerForTests(tmp_path / "data") as broker, millstream.connect(broker.address) as client:
        client.publish_many("orders", [f"{number}" for number in range(100)])
    made = json.loads(command("backup", tmp_path / "a", "--data", tmp_path / "data", "--json"))
    assert (made["running"], made["files"] > 5) == (False, True)
    assert (tmp_path / "a").stat().st_mode & 0o077 == 0, "others must not read it: it has secrets"
    assert "whole" in command("backup", tmp_path / "a", "--verify")
    command("restore", tmp_path / "a", "--data", tmp_path / "copy")
    assert (tmp_path / "copy" / "clean").exists(), "it was stopped in order, and so is the copy"
    with BrokerForTests(tmp_path / "copy") as broker, millstream.connect(broker.address) as client:
        assert values(client, "orders") == [f"{number}" for number in range(100)]


def test_nothing_that_a_broker_writes_is_left_out(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path) as broker, millstream.connect(broker.address) as client:
        client.publish("orders", "now")
        client.publish("orders", "later", delay="2m")
        with client.queue("orders", timeout_s=1) as queue:
            next(iter(queue)).reject("no such article")
        client.admin.health(deep=True)
        with NativeClient(broker.address) as task:
            stage = task.call("stage.open", query="q", batch=0)["stage"]
            task.publish(stage_address(stage, "orders"), [b"staged"])
        broker.clock.advance("1m")
        eventually((tmp_path / "history").exists)
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.split("/")[0] for path in written} >= {"topics", "state", "history", "traces", "stages", "node_id"}
    assert written - set(files_below(str(tmp_path))) <= {"lock"}


def test_a_topic_on_another_disk_comes_back(tmp_path: Path, command: Command) -> None:
    """The backup was whole, it was said, and every message was missing."""
    data = tmp_path / "data"
    with BrokerForTests(data) as broker, millstream.connect(broker.address) as client:
        client.publish("orders", "stopped")
    (data / "topics").rename(tmp_path / "larger-disk")
    (data / "topics").symlink_to(tmp_path / "larger-disk")
    command("backup", tmp_path / "a", "--data", data)
    with BrokerForTests(data) as broker, locked(data):
        with millstream.connect(broker.address) as client:
            client.publish("orders", "running")
        command("backup", tmp_path / "b", "--data", data, "--broker", broker.address)
    for name, expected in (("a", ["stopped"]), ("b", ["stopped", "running"])):
        command("restore", tmp_path / name, "--data", tmp_path / f"{name}-copy")
        with BrokerForTests(tmp_path / f"{name}-copy") as copy, millstream.connect(copy.address) as client:
            assert values(client, "orders") == expected


def test_what_cannot_be_backed_up_is_named(tmp_path: Path, command: Command) -> None:
    data = tmp_path / "data"
    with BrokerForTests(data) as broker, locked(data):
        (data / "state" / "team").symlink_to(tmp_path / "not-mounted")
        assert "state/team" in command("backup", tmp_path / "a", "--data", data, "--broker", broker.address, code=4)
    assert "state/team" in command("backup", tmp_path / "a", "--data", data, code=4)


class Load:
    """Everything at once: publishing, working, failing, compacting, deleting."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stop = threading.Event()
        self.confirmed: list[str] = []
        self.settled: set[str] = set()
        self.schedules: list[str] = []
        self.keyed: dict[str, int] = {}
        self._number = 0
        self.failures: list[BaseException] = []
        works = (self._publish, self._work, self._replace, self._schedule, self._tidy, self._churn)
        self._threads = [threading.Thread(target=self._guarded, args=(work,)) for work in works]

    def __enter__(self) -> Load:
        with millstream.connect(self._address) as client:
            client.create_topic("orders", partitions=2, config={"segment_bytes": 16384})
            client.create_topic("settings", config={"segment_bytes": 4096, "cleanup": "compact"})
            client.create_topic("short", config={"segment_bytes": 4096, "retention_messages": 50})
            with client.queue("orders", group="billing", timeout_s=0):
                pass
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def _guarded(self, work: Callable[[millstream.Client], None]) -> None:
        try:
            with millstream.connect(self._address) as client:
                while not self._stop.is_set():
                    work(client)
        except BaseException as error:
            self.failures.append(error)

    def _publish(self, client: millstream.Client) -> None:
        made = [f"order {len(self.confirmed) + number} {'x' * 100}" for number in range(10)]
        client.publish_many("orders", made)
        self.confirmed += made
        client.publish_many("short", made)

    def _work(self, client: millstream.Client) -> None:
        with client.queue("orders", group="billing", prefetch=20, timeout_s=0.05) as queue:
            for message in queue:
                if self._stop.is_set():
                    return
                self.settled.add(message.text)  # before it is said, and so before the broker can know
                if message.offset % 5 == 4:
                    message.reject("no such article")
                else:
                    message.ack()

    def _replace(self, client: millstream.Client) -> None:
        self._number += 1
        client.publish("settings", f"{self._number}", key=f"k{self._number % 5}")
        self.keyed[f"k{self._number % 5}"] = self._number

    def _schedule(self, client: millstream.Client) -> None:
        name = f"late {len(self.schedules)}"
        client.publish("orders", name, delay="2m")
        self.schedules.append(name)
        time.sleep(0.005)

    def _tidy(self, client: millstream.Client) -> None:
        client.admin.compact(roll=True)
        client.admin.checkpoint()
        time.sleep(0.02)

    def _churn(self, client: millstream.Client) -> None:
        client.publish("passing", "here and gone")
        client.delete_topic("passing", force=True)


@pytest.mark.parametrize("rounds", [2, pytest.param(8, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_a_backup_under_load_shows_one_moment(
    tmp_path: Path, command: Command, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(root: str, path: str) -> BinaryIO:
        time.sleep(0.01)  # a copy of few and small files, and yet much happens meanwhile
        return open_held(root, path)

    monkeypatch.setattr(holding, "open_held", slowly)
    data = tmp_path / "data"
    known: list[tuple[list[str], set[str], list[str], dict[str, int]]] = []
    with BrokerForTests(data) as broker, locked(data):
        with Load(broker.address) as load:
            for number in range(rounds):
                time.sleep(0.3)
                before, schedules, keyed = list(load.confirmed), list(load.schedules), dict(load.keyed)
                where = ("--data", data, "--broker", broker.address)
                made = json.loads(command("backup", tmp_path / f"{number}.backup", *where, "--json"))
                assert made["running"] is True
                known.append((before, set(load.settled), schedules, keyed))
        assert not load.failures, load.failures
        _until_cleared(data)
    for number, (confirmed, settled, schedules, keyed) in enumerate(known):
        command("restore", tmp_path / f"{number}.backup", "--data", tmp_path / f"{number}")
        with BrokerForTests(tmp_path / f"{number}") as copy, millstream.connect(copy.address) as client:
            assert len(confirmed) > 20 * number
            stored = values(client, "orders")
            assert set(confirmed) <= set(stored), "what was confirmed before is there"
            assert len(stored) == len(set(stored)), "and once"
            newest = {m.key: int(m.text) for m in client.stream("settings", start="earliest", timeout_s=1)}
            assert all(newest[key.encode()] >= value for key, value in keyed.items())
            # Whoever is unhappy with a message says so before the broker moves it: nothing is ahead of that.
            letters = [letter.text for letter in client.dead_letters.list(limit=10_000)]
            assert len(letters) == len(set(letters))
            assert set(letters) <= settled
            copy.clock.advance("31s")  # what was leased at that moment comes back
            client.publish("orders", "and now")
            with client.queue("orders", group="billing", timeout_s=1) as queue:
                waiting = {message.text for message in queue if message.ack() is None}
            assert "and now" in waiting, "the copy goes on"
            assert set(stored) - waiting <= settled, "nothing counts as done that nobody has done"
            copy.clock.advance("3m")
            with client.queue("orders", group="billing", timeout_s=1) as queue:
                fired = {message.text for message in queue if message.ack() is None}
            assert set(schedules) <= waiting | fired  # in a long run some are due when the copy starts


def test_a_hold_ends_with_its_time_its_connection_and_its_release(broker: BrokerForTests, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with millstream.connect(broker.address) as client, millstream.connect(broker.address) as other:
        client.publish("orders", "hello")
        hold = client.admin.hold_files(hold_ms=60_000)
        assert (hold.files, hold.bytes) == (len(read_list(str(data)).sizes), sum(read_list(str(data)).sizes.values()))
        with pytest.raises(FilesHeld):
            other.admin.hold_files()
        with pytest.raises(HoldLost):
            other.admin.release_files(hold.id)
        broker.clock.advance("50s")
        client.admin.hold_files(hold.id, hold_ms=60_000)
        broker.clock.advance("50s")
        client.admin.release_files(hold.id)
        with pytest.raises(HoldLost):
            client.admin.release_files(hold.id)
        late = other.admin.hold_files(hold_ms=60_000)
        broker.clock.advance("61s")
        with pytest.raises(HoldLost):
            other.admin.hold_files(late.id)
        other.admin.hold_files()
        other.close()
        _until_cleared(data)
        for wrong in (0, -1, 600_001):
            with pytest.raises(InvalidArgument):
                client.admin.hold_files(hold_ms=wrong)
        client.admin.hold_files()  # and the broker stops with it


def test_publishing_goes_on_without_copies_of_logs_that_are_held(broker: BrokerForTests, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with millstream.connect(broker.address) as client:
        for number in range(10):
            client.publish("orders", f"order {number}")
        for number in range(10):
            client.create_topic(f"topic-{number}")
        hold = client.admin.hold_files()
        client.publish("orders", "behind the moment")
        client.create_topic("behind-the-moment")
        assert not list((data / HELD).rglob("*.log"))
        client.admin.release_files(hold.id)


def test_a_disk_without_room_for_a_backup_costs_the_backup_and_not_the_broker(
    broker: BrokerForTests, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    with millstream.connect(broker.address, timeout_s=5) as client:
        client.create_topic("small", config={"segment_bytes": 65_536})
        client.create_topic("gone")
        client.publish("small", b"x" * 60_000)
        client.publish("gone", b"x")
        hold = client.admin.hold_files(hold_ms=60_000)
        (data / HELD / "kept").write_bytes(b"")  # nothing can be put aside any more
        client.delete_topic("gone")
        for _ in range(3):
            client.publish("small", b"x" * 60_000)
        assert client.topic("small").partitions[0].failed is None
        with pytest.raises(HoldLost, match="put aside"):
            client.admin.hold_files(hold.id)
        with pytest.raises(HoldLost):
            client.admin.release_files(hold.id)
        client.admin.release_files(client.admin.hold_files().id)


def test_a_backup_is_not_written_into_a_file_that_somebody_has_put_there(tmp_path: Path, command: Command) -> None:
    with BrokerForTests(tmp_path / "data"):
        pass
    (tmp_path / "elsewhere").write_text("not mine")
    (tmp_path / "b.part").symlink_to(tmp_path / "elsewhere")
    assert "b.part" in command("backup", tmp_path / "b", "--data", tmp_path / "data", code=2)
    assert (tmp_path / "elsewhere").read_text() == "not mine"
    assert not (tmp_path / "b").exists()
    (tmp_path / "b.part").unlink()
    command("backup", tmp_path / "b", "--data", tmp_path / "data")
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o600


def test_a_backup_whose_reader_leaves_is_none(tmp_path: Path) -> None:
    """`millstream backup - | ssh elsewhere 'cat > it'`, and the line breaks."""
    with BrokerForTests(tmp_path):
        pass
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "millstream", "backup", "-", "--data", str(tmp_path)],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    finally:
        os.close(writing)
    assert done.returncode == 4
    assert "the backup was cut short: whoever reads it is gone" in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_what_a_killed_broker_held_is_cleared_away(tmp_path: Path) -> None:
    with BrokerForTests(tmp_path) as broker, millstream.connect(broker.address) as client:
        client.publish("orders", "hello")
    (tmp_path / HELD / "kept").mkdir(parents=True)
    with BrokerForTests(tmp_path):
        assert not (tmp_path / HELD).exists()


def test_a_restore_that_was_cut_short_is_no_data_directory(tmp_path: Path, command: Command) -> None:
    with BrokerForTests(tmp_path / "data"):
        pass
    (tmp_path / "data" / RESTORING).touch()
    with pytest.raises(StartFailed, match="cut short"), BrokerForTests(tmp_path / "data"):
        pass
    assert "cut short" in command("backup", tmp_path / "b", "--data", tmp_path / "data", code=4)


def test_the_wrong_broker_file_or_directory_is_named(tmp_path: Path, command: Command) -> None:
    assert "not the data directory" in command("backup", tmp_path / "b", "--data", tmp_path, code=2)
    with BrokerForTests(tmp_path / "a") as first, BrokerForTests(tmp_path / "b"), locked(tmp_path / "b"):
        where = ("--data", tmp_path / "b", "--broker", first.address)
        assert "another broker" in command("backup", tmp_path / "c", *where, code=1)
        assert not list(tmp_path.glob("c*"))
    (tmp_path / "there").write_text("mine")
    assert "exists already" in command("backup", tmp_path / "there", "--data", tmp_path / "a", code=2)
    assert "not a backup" in command("restore", tmp_path / "there", "--data", tmp_path / "new", code=1)
    assert "not empty" in command("restore", tmp_path / "there", "--data", tmp_path / "a", code=1)
    assert "cannot read" in command("restore", tmp_path / "nothing", "--data", tmp_path / "new", code=2)


def test_a_broker_that_dies_during_a_backup_leaves_no_backup(tmp_path: Path, command: Command) -> None:
    data = tmp_path / "data"
    with BrokerForTests(data) as broker, locked(data):
        with millstream.connect(broker.address) as client:
            client.publish("orders", "hello")
        released = Broker.call

        async def gone(self: Broker, session: object, call: object) -> object:
            if type(call).__name__ == "ReleaseFiles":
                raise HoldLost("the files were not held all the time")
            return await released(self, session, call)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Broker, "call", gone)
            command("backup", tmp_path / "b", "--data", data, "--broker", broker.address, code=1)
    assert not list(tmp_path.glob("b*"))

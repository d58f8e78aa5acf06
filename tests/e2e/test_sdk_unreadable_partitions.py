"""Topics with a partition whose log the broker cannot open: the others are read, and it is said which one is not."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from millstream.client import following
from millstream.errors import RequestTimeout, StorageFailed
from millstream.testing.broker import BrokerForTests
from tests.either import EitherClient


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[BrokerForTests]:
    """Partition 1 of 3 cannot be opened; each of them has one message."""
    with BrokerForTests(tmp_path) as broker, broker.connect() as client:
        client.create_topic("t", partitions=3)
        for number in range(3):
            client.publish("t", b"old %d" % number, partition=number)
    partition = tmp_path / "topics" / "default" / "t" / "1"
    shutil.move(partition, tmp_path / "whole")
    partition.touch()
    with BrokerForTests(tmp_path) as broker:
        yield broker


def mend(data: Path) -> None:
    partition = data / "topics" / "default" / "t" / "1"
    partition.unlink()
    shutil.move(data / "whole", partition)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize("group", ["g", None])
@pytest.mark.parametrize("start", ["latest", "earliest"])
def test_a_partition_that_cannot_be_opened_keeps_nobody_from_reading_the_others(
    broken: BrokerForTests,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    start: str,
    group: str | None,
    asynchronous: bool,
) -> None:
    """Nobody was let into a group at its ends, and a stream that was open raised its error instead of messages."""
    monkeypatch.setattr(following, "_TOPICS_AGE_S", 0.05)
    monkeypatch.setattr(following, "_LOOK_AGAIN_S", 0.05)
    caplog.set_level(logging.WARNING, "millstream.client")
    either = EitherClient(broken.address, asynchronous=asynchronous)
    with capture_logs() as entries:
        stream: Any = either.do(either.client.stream("t", group=group, start=start))
    old = [b"old 0", b"old 2"] if start == "earliest" else []
    assert either.values(stream, len(old)) == old
    with broken.connect() as client:
        for number in (0, 2):
            client.publish("t", b"new %d" % number, partition=number)
        assert either.values(stream, 2) == [b"new 0", b"new 2"]
        said = [record.getMessage() for record in caplog.records if "t/1" in record.getMessage()]
        assert len(said) == 1, "said once, however often it is tried"
        assert "cannot be read now" in said[0]
        if group and start == "latest":
            [entry] = [entry for entry in entries if entry["log_level"] == "warning"]
            assert (entry["group"], entry["topic"], entry["partition"]) == ("g", "t", 1)
        mend(tmp_path)
        assert either.values(stream, 1) == [b"old 1"], "nobody knew where it ended: all of it is read"
    either.do(stream.close())
    either.end()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize("place", ["offset", "offsets", "time"])
def test_where_a_user_has_said_where_to_begin_a_partition_that_is_opened_later_begins_there(
    broken: BrokerForTests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, asynchronous: bool
) -> None:
    """It was read from its first message, as if it had been made since."""
    monkeypatch.setattr(following, "_TOPICS_AGE_S", 0.05)
    start = {"offset": 1, "offsets": {0: 1, 1: 1, 2: 1}, "time": datetime.now(UTC)}[place]
    either = EitherClient(broken.address, asynchronous=asynchronous)
    stream: Any = either.do(either.client.stream("t", start=start))
    mend(tmp_path)
    with broken.connect() as client:
        client.publish("t", b"new 1", partition=1)
    assert either.values(stream, 1) == [b"new 1"]
    either.do(stream.close())
    either.end()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
def test_a_stream_of_which_nothing_can_be_read_says_so(broken: BrokerForTests, asynchronous: bool) -> None:
    either = EitherClient(broken.address, asynchronous=asynchronous)
    with pytest.raises(StorageFailed, match="topics/default/t/1"):
        either.do(either.client.stream("t", partitions=[1]))
    either.end()


def test_who_is_not_let_into_a_group_is_told_why(broker: BrokerForTests, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StorageFailed("the disk is gone")

    with broker.connect(timeout_s=0.5) as client:
        client.create_topic("t")
        monkeypatch.setattr(broker.broker.groups._log, "record", fail)
        with pytest.raises(RequestTimeout, match=r"did not admit this member within .* the disk is gone"):
            client.stream("t", group="g")
